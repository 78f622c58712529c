"""What PyTorch's users expect of any optimizer: hooks, schedulers, scaling, clipping."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler as sched
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from helpers import give_gradients, parameter, same, snapshot
from lodo import LODO


def test_step_hooks_run_in_order_and_can_be_removed():
    x = parameter(3)
    opt = LODO([x], lr=0.1)
    calls = []
    handles = [
        opt.register_step_pre_hook(lambda *_: calls.append("pre")),
        opt.register_step_post_hook(lambda *_: calls.append("post")),
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
    ]
    give_gradients([x])
    before = x.detach().clone()
    opt.step()
    assert calls == ["global pre", "pre", "post", "global post"]
    assert not torch.equal(x, before)
    for handle in handles:
        handle.remove()
    opt.step()
    assert len(calls) == 4


def test_a_hooked_step_is_the_same_step():
    x = parameter(6)
    y = torch.nn.Parameter(x.detach().clone())
    plain, hooked = LODO([x], lr=0.1), LODO([y], lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    for _ in range(4):
        give_gradients([x])
        y.grad = x.grad.clone()
        plain.step()
        hooked.step()
    assert torch.equal(x, y)


def test_the_profiler_sees_the_step():
    x = parameter(3)
    opt = LODO([x])
    give_gradients([x])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step()
    assert any("Optimizer.step#LODO.step" in event.key for event in profile.key_averages())


def test_state_dict_hooks():
    opt = LODO([parameter(3)])
    opt.register_state_dict_post_hook(lambda _, state: state | {"note": 1})
    assert opt.state_dict()["note"] == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    x = parameter(3)
    opt = LODO([x])
    give_gradients([x])
    opt.zero_grad(set_to_none=set_to_none)
    assert (x.grad is None) if set_to_none else bool((x.grad == 0).all())


SCHEDULERS = {
    "LambdaLR": lambda opt: sched.LambdaLR(opt, lambda t: min(1.0, t / 4)),  # warm-up from zero
    "MultiplicativeLR": lambda opt: sched.MultiplicativeLR(opt, lambda t: 0.9),
    "StepLR": lambda opt: sched.StepLR(opt, 2),
    "MultiStepLR": lambda opt: sched.MultiStepLR(opt, [2, 4]),
    "ConstantLR": lambda opt: sched.ConstantLR(opt, 0.5, 3),
    "LinearLR": lambda opt: sched.LinearLR(opt, 0.1, total_iters=4),
    "ExponentialLR": lambda opt: sched.ExponentialLR(opt, 0.8),
    "PolynomialLR": lambda opt: sched.PolynomialLR(opt, 5),
    "CosineAnnealingLR": lambda opt: sched.CosineAnnealingLR(opt, 5),
    "CosineAnnealingWarmRestarts": lambda opt: sched.CosineAnnealingWarmRestarts(opt, 3),
    "CyclicLR": lambda opt: sched.CyclicLR(opt, 0.0, 0.3, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": lambda opt: sched.OneCycleLR(opt, 0.3, total_steps=20, cycle_momentum=False),
    "ReduceLROnPlateau": lambda opt: sched.ReduceLROnPlateau(opt, patience=0),
    "SequentialLR": lambda opt: sched.SequentialLR(
        opt, [sched.LinearLR(opt, 0.1, total_iters=2), sched.ExponentialLR(opt, 0.9)], [2]
    ),
    "ChainedScheduler": lambda opt: sched.ChainedScheduler([sched.StepLR(opt, 3), sched.ExponentialLR(opt, 0.9)]),
}


def test_every_scheduler_of_torch_is_listed():
    known = {
        name for name, value in vars(sched).items() if isinstance(value, type) and issubclass(value, sched.LRScheduler)
    }
    assert known - set(SCHEDULERS) - {"LRScheduler", "_LRScheduler"} == set()


def test_a_scheduler_that_cycles_the_momentum_is_refused():
    """Torch's default writes numbers into the option momentum, whatever it means to the optimizer."""
    x = parameter(6)
    opt = LODO([x], lr=0.3)
    sched.OneCycleLR(opt, 0.3, total_steps=20)
    before = x.detach().clone()
    x.grad = torch.ones(6, dtype=x.dtype)
    with pytest.raises(ValueError, match=r"momentum of group 0 must be one of .* got 0.95; .* cycle_momentum=False"):
        opt.step()
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name):
    x = parameter(6)
    opt = LODO([x], lr=0.3)
    scheduler = SCHEDULERS[name](opt)
    rates = []
    for _ in range(8):
        opt.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        rates.append(float(opt.param_groups[0]["lr"]))
        start = x.detach().clone()
        opt.step()
        assert torch.equal(x, start) == (rates[-1] == 0)
        if name == "ReduceLROnPlateau":
            scheduler.step(float(loss.detach()) + len(rates))
        else:
            scheduler.step()
    assert len(set(rates)) > 1
    assert torch.isfinite(x).all()


def test_a_learning_rate_that_is_a_tensor():
    x = parameter(6)
    y = torch.nn.Parameter(x.detach().clone())
    tensor, number = LODO([x], lr=torch.tensor(0.25)), LODO([y], lr=0.25)
    sched.ExponentialLR(tensor, 0.5)
    for _ in range(3):
        give_gradients([x])
        y.grad = x.grad.clone()
        tensor.step()
        number.step()
    assert torch.equal(x, y)


def test_grad_scaler_skips_overflow_and_unscales(backend):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = parameter(8, dtype=torch.float32)
    y = torch.nn.Parameter(x.detach().clone())
    scaled, plain = LODO([x], lr=0.1, backend=backend), LODO([y], lr=0.1, backend=backend)
    for step in range(8):
        scaled.zero_grad()
        plain.zero_grad()
        factor = float("inf") if step == 3 else 1.0
        scaler.scale((x**2).sum() * factor).backward()
        before = snapshot(scaled)
        scaler.step(scaled)
        scaler.update()
        if step == 3:
            assert same(snapshot(scaled), before)
        else:
            (y**2).sum().backward()
            plain.step()
    assert torch.equal(x, y)  # powers of two: unscaling is exact


def test_clip_grad_norm():
    x = parameter(8)
    opt = LODO([x], lr=0.1, beta=0.0)
    x.grad = 100 * torch.randn(8, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([x], 1.0)
    before = x.detach().clone()
    opt.step()
    assert float((x.detach() - before).norm()) == pytest.approx(0.1)


def test_trains_a_small_network():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    x = torch.randn(128, 4)
    y = torch.sin(x).sum(1, keepdim=True)
    opt = LODO(model.parameters(), lr=0.1)
    first = None
    for _ in range(150):
        loss = (model(x) - y).square().mean()
        first = first or float(loss.detach())
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert float(loss.detach()) < 0.2 * first


def test_in_place_changes_are_seen_by_autograd():
    """A step between a forward pass and its backward pass is an error, as with any optimizer."""
    w = parameter(3)
    opt = LODO([w], lr=0.1)
    loss = (w**2).sum()
    give_gradients([w])
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
