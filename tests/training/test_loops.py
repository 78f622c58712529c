"""Training loops as people write them: each must do with LODO what it does with any optimizer."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from helpers import BACKENDS, parameter, same
from lodo import LODO


def network(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 1)).to(dtype)


def data(t: int = 0, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(t))
    return x, torch.sin(x).sum(1, keepdim=True)


def loss_of(model: nn.Module, t: int = 0) -> torch.Tensor:
    x, y = data(t)
    return (model(x.to(next(model.parameters()).dtype)) - y).square().mean()


def train(model: nn.Module, opt: LODO, steps: range) -> None:
    for t in steps:
        opt.zero_grad()
        loss_of(model, t).backward()
        opt.step()


def alike(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_grad_scaler(dtype):
    """A step whose loss overflowed is the step of nobody: skipped, and the scale halved."""
    model, twin = network(4, 8), network(4, 8)
    opt, plain = (LODO(m.parameters(), lr=0.1) for m in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    first = float(loss_of(model).detach())
    for t in range(60):
        for m, o in ((model, opt), (twin, plain)):
            o.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(m, t)
            if o is opt:
                scaler.scale(loss * (float("inf") if t == 5 else 1.0)).backward()
                before = copy.deepcopy(opt.state_dict()["state"])
                scaler.step(opt)
                scaler.update()
                if t == 5:
                    assert same(before, opt.state_dict()["state"])
            elif t != 5:
                loss.backward()
                plain.step()
    assert scaler.get_scale() == 2.0**5
    assert opt._state(0)["step"] == 59
    assert float(loss_of(model).detach()) < 0.7 * first
    if dtype is torch.bfloat16:  # scaling by powers of two is exact
        assert alike(model, twin)


def test_a_scaler_that_is_off_is_not_there():
    """GradScaler("cuda") is switched off where there is no CUDA."""
    model, twin = network(4, 8), network(4, 8)
    opt, plain = (LODO(m.parameters(), lr=0.05) for m in (model, twin))
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    for t in range(4):
        opt.zero_grad()
        scaler.scale(loss_of(model, t)).backward()
        scaler.step(opt)
        scaler.update()
    train(twin, plain, range(4))
    assert alike(model, twin)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_in_bfloat16_has_a_state_in_float32(backend):
    model = network(4, 8, dtype=torch.bfloat16)
    opt = LODO(model.parameters(), lr=0.1, backend=backend)
    first = float(loss_of(model).detach())
    train(model, opt, range(80))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {v.dtype for v in opt._state(0).values() if isinstance(v, torch.Tensor)} == {torch.float32}
    assert float(loss_of(model).detach()) < 0.7 * first


# ---------------------------------------------------------------- loops


def test_accumulated_gradients_are_a_larger_batch():
    model, twin = network(4, 8, dtype=torch.float64), network(4, 8, dtype=torch.float64)
    opt, plain = (LODO(m.parameters(), lr=0.05) for m in (model, twin))
    for t in range(6):
        for micro in (2 * t, 2 * t + 1):
            (loss_of(model, micro) / 2).backward()
        opt.step()
        opt.zero_grad()
        plain.zero_grad()
        ((loss_of(twin, 2 * t) + loss_of(twin, 2 * t + 1)) / 2).backward()
        plain.step()
    assert all(torch.allclose(p, q, rtol=1e-10) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_averages_of_weights():
    """EMA and SWA read the parameters; LODO does not notice."""
    model, twin = network(4, 8), network(4, 8)
    model.insert(1, nn.BatchNorm1d(8))
    twin.insert(1, nn.BatchNorm1d(8))
    opt, plain = (LODO(m.parameters(), lr=0.05) for m in (model, twin))
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa, schedule = AveragedModel(model), SWALR(opt, swa_lr=0.05, anneal_epochs=1)
    for t in range(10):
        train(model, opt, range(t, t + 1))
        ema.update_parameters(model)
        swa.update_parameters(model)
        schedule.step()
    train(twin, plain, range(10))
    assert alike(model, twin)
    for average in (ema, swa):
        update_bn([data(t)[0] for t in range(4)], average)
        assert torch.isfinite(loss_of(average))
        assert not any(torch.equal(a, b) for a, b in zip(average.module.parameters(), model.parameters(), strict=True))


def test_groups_with_and_without_decay():
    model = network(4, 8)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ]
    opt = LODO(groups, lr=0.1, meta_lr=0.0)
    before = [[p.detach().clone() for p in group["params"]] for group in opt.param_groups]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    for p, old in zip(opt.param_groups[0]["params"], before[0], strict=True):
        assert torch.allclose(p, 0.95 * old)
    assert all(map(torch.equal, opt.param_groups[1]["params"], before[1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_layers_stay_and_thaw(backend):
    model = network(4, 8, 8)
    opt = LODO(model.parameters(), lr=0.05, weight_decay=0.1, backend=backend)
    model[0].requires_grad_(False)
    before = copy.deepcopy(model)
    train(model, opt, range(5))
    assert alike(model[0], before[0])
    assert not any(map(torch.equal, model[1].parameters(), before[1].parameters()))
    model[0].requires_grad_(True)
    train(model, opt, range(5, 8))
    assert not any(map(torch.equal, model[0].parameters(), before[0].parameters()))


def test_a_checkpoint_whose_first_layer_is_frozen():
    """torch's distributed checkpoints drop what sits under a frozen parameter."""

    def make() -> tuple[nn.Module, LODO]:
        model = network(4, 8)
        model[0].requires_grad_(False)
        return model, LODO(model.parameters(), lr=0.05)

    (model, opt), (resumed, other) = make(), make()
    train(model, opt, range(4))
    resumed.load_state_dict(model.state_dict())
    set_optimizer_state_dict(resumed, other, copy.deepcopy(get_optimizer_state_dict(model, opt)))
    train(model, opt, range(4, 8))
    train(resumed, other, range(4, 8))
    assert alike(model, resumed)
    for m in (model, resumed):  # a layer frozen after the optimizer was made
        m.requires_grad_(False)
        m[-1].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"group 0 of the state has entries .* but nothing that was learned"):
        set_optimizer_state_dict(resumed, other, get_optimizer_state_dict(model, opt))
    late = LODO(resumed.parameters(), lr=0.05)  # its own state sits elsewhere
    late.load_state_dict(opt.state_dict())
    assert torch.equal(late._state(0)["theta"], opt._state(0)["theta"])


def test_tied_weights_are_one_parameter():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.embed = nn.Embedding(7, 5)
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embed(x)))

    model = Tied()
    opt = LODO(model.parameters(), lr=0.3)
    assert opt._groups[0].n == 35
    x = torch.arange(7)
    losses = []
    for _ in range(40):
        opt.zero_grad()
        losses.append(nn.functional.cross_entropy(model(x), (x + 1) % 7))
        losses[-1].backward()
        opt.step()
    assert model.head.weight is model.embed.weight
    assert float(losses[-1].detach()) < 0.8 * float(losses[0].detach())
    resumed = Tied()
    fresh = LODO(resumed.parameters(), lr=0.3)
    set_optimizer_state_dict(resumed, fresh, get_optimizer_state_dict(model, opt))
    assert torch.equal(fresh._state(0)["theta"], opt._state(0)["theta"])


# ---------------------------------------------------------------- torch.compile


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_model_trains():
    """aot_eager: traced forward and backward, without a C++ compiler."""
    model, twin = network(4, 8), network(4, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    opt, plain = LODO(compiled.parameters(), lr=0.05), LODO(twin.parameters(), lr=0.05)
    train(compiled, opt, range(5))
    train(twin, plain, range(5))
    assert all(torch.allclose(p, q, rtol=1e-4) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    fresh = network(4, 8)
    other = LODO(fresh.parameters(), lr=0.05)  # prefixes of compiled models are taken off
    set_optimizer_state_dict(fresh, other, get_optimizer_state_dict(compiled, opt))
    assert torch.equal(other._state(0)["theta"], opt._state(0)["theta"])


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("what", ["step", "loop"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_step_stays_out_of_compiled_graphs(backend, what):
    x, y = parameter(6), parameter(6)
    y.data.copy_(x.detach())
    hooked = []
    opt, plain = LODO([x], lr=0.1, backend=backend), LODO([y], lr=0.1, backend=backend)
    opt.register_step_post_hook(lambda *_: hooked.append(1))

    def loop() -> torch.Tensor:
        x.grad = 2 * x.detach() + 1
        opt.step()
        return x.detach() * 2

    step = torch.compile(opt.step, backend="eager") if what == "step" else opt.step
    compiled = torch.compile(loop, backend="eager")
    for _ in range(4):
        if what == "loop":
            compiled()
        else:
            x.grad = 2 * x.detach() + 1
            step()
        y.grad = 2 * y.detach() + 1
        plain.step()
    assert torch.equal(x, y)
    assert len(hooked) == 4
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"LODO\._step"):
        torch.compile(opt.step, backend="eager", fullgraph=True)()
