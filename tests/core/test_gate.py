"""The learned momentum gate: between the gradient and its average, wherever the loss is lower."""

from __future__ import annotations

import pytest
import torch

from helpers import difference, give_gradients, network, parameter, quadratic
from lodo import LODO, Mixing
from lodo.feed import RATE, START
from lodo.meta import Learned

F64 = torch.float64


@pytest.mark.parametrize("family", ["mixing(depth=3)", "residual(depth=3)", "diagonal", "scalar", "dense"])
def test_the_gate_goes_down_the_slope_of_the_loss(family, backend):
    """Against finite differences: the slope is how the loss after a step changes with the w it was taken with."""
    lr, n = 0.02, 9
    f, _ = quadratic(n)
    x = parameter(n)
    opt = LODO([x], lr=lr, beta=0.6, preconditioner=family, momentum="learned", backend=backend)

    def step():
        opt.zero_grad()
        f(x).backward()
        opt.step()

    step()
    step()
    state, engine = opt._state(0), network(opt).engine
    before = x.detach().clone()
    opt.zero_grad()
    f(x).backward()
    g = x.grad.clone()
    opt.step()
    theta, m, w = state["theta"].clone(), state["momentum"].clone(), state["gate"].value

    def loss_after_step(w):
        return float(f(before - lr * engine.apply(theta, (1 - w) * g + w * m)))

    assert float(f(x.detach())) == pytest.approx(loss_after_step(w), rel=1e-12)
    gate = state["gate"]
    step()
    slope = (loss_after_step(w + 1e-4) - loss_after_step(w - 1e-4)) / 2e-4
    after = state["gate"]
    assert after.exp_avg - 0.9 * gate.exp_avg == pytest.approx(0.1 * slope, rel=1e-6)
    assert after.t == gate.t + 1
    assert (after.value - gate.value) * after.exp_avg < 0


def test_its_adam_is_torchs():
    w = torch.nn.Parameter(torch.ones((), dtype=F64))
    adam = torch.optim.Adam([w], lr=1e-3, betas=(0.9, 0.999), eps=1e-7)
    gate = START
    for t in range(50):
        slope = float(torch.randn((), dtype=F64)) * 10.0 ** (t % 5 - 4)
        w.grad = torch.tensor(slope, dtype=F64)
        adam.step()
        gate = gate.updated(slope, RATE)
        assert gate.value == pytest.approx(float(w.detach()), rel=1e-12)


def test_the_first_step_is_the_papers(backend):
    x, y = parameter(20), parameter(20)
    y.data.copy_(x.detach())
    gated, fixed = (LODO([p], lr=0.1, momentum=m, backend=backend) for p, m in ((x, "learned"), (y, "fixed")))
    give_gradients([x])
    y.grad = x.grad.clone()
    gated.step()
    fixed.step()
    assert torch.equal(x, y)
    assert gated._state(0)["gate"] == Learned(1.0, 0.0, 0.0, 0)
    gated.step()
    fixed.step()
    assert torch.equal(gated._state(0)["theta"], fixed._state(0)["theta"])  # learned from the same step
    assert not torch.equal(x, y)


@pytest.mark.parametrize("mixing", ["random", "shuffle"])
def test_without_an_average_there_is_nothing_to_choose(mixing, backend):
    """beta = 0: m is g, the slope is zero, and the run is the one without a gate, bit by bit."""
    x, y = parameter(20), parameter(20)
    y.data.copy_(x.detach())
    gated, fixed = (
        LODO([p], lr=0.1, beta=0.0, momentum=m, preconditioner=Mixing(4, mixing=mixing), backend=backend)
        for p, m in ((x, "learned"), (y, "fixed"))
    )
    for _ in range(10):
        give_gradients([x])
        y.grad = x.grad.clone()
        gated.step()
        fixed.step()
    assert gated._state(0)["gate"].value == 1.0
    assert torch.equal(x, y)


def test_the_step_is_the_matrix_times_what_is_fed(backend):
    x = parameter(11)
    opt = LODO([x], lr=0.05, momentum="learned", backend=backend)
    for _ in range(5):
        give_gradients([x])
        opt.step()
    before = x.detach().clone()
    give_gradients([x])
    opt.step()
    state = opt._state(0)
    w = state["gate"].value
    assert torch.equal(state["last_gradient"], x.grad)
    fed = (1 - w) * x.grad + w * state["momentum"]
    assert w != 1
    assert difference(opt.precondition(fed), before - x.detach()) < 1e-12


def test_it_finds_out_that_the_average_is_too_slow():
    """On a bowl whose centre jumps about, an average over 20 steps is of little use; the gate takes half of it."""
    errors = {}
    for momentum in ("fixed", "learned"):
        torch.manual_seed(0)
        D, centre = torch.linspace(0.2, 1, 20), torch.zeros(20)
        x = torch.nn.Parameter(torch.zeros(20))
        opt = LODO([x], lr=0.5, beta=0.95, preconditioner=Mixing(4), momentum=momentum)
        losses = []
        for _ in range(2000):
            centre += 0.1 * torch.randn(20)
            x.grad = D * (x.detach() - centre)
            losses.append(float((0.5 * D * (x.detach() - centre) ** 2).sum()))
            opt.step()
        errors[momentum] = sum(losses[-500:]) / 500
    assert opt._state(0)["gate"].value < 0.7
    assert errors["learned"] < 0.6 * errors["fixed"]


def test_each_group_has_its_own(backend):
    params = [parameter(6) for _ in range(3)]
    groups = [{"params": [p], "momentum": m} for p, m in zip(params, ("learned", "fixed", "learned"), strict=True)]
    opt = LODO(groups, lr=0.1, backend=backend)
    for _ in range(5):
        give_gradients(params)
        opt.step()
    gates = [opt._state(i).get("gate") for i in range(3)]
    assert gates[1] is None
    assert "last_gradient" not in opt._state(1)
    assert gates[0] != gates[2]
    assert all(type(number) in (float, int) for number in (*gates[0], *gates[2]))  # plain data


def test_a_step_of_length_zero_teaches_it_nothing(backend):
    x = parameter(6)
    opt = LODO([x], lr=0.1, momentum="learned", backend=backend)
    for lr in (0.1, 0.1, 0.0, 0.1, 0.1):
        opt.param_groups[0]["lr"] = lr
        before = opt._state(0).get("gate", START)
        give_gradients([x])
        opt.step()
    assert before.t == 2
    assert opt._state(0)["gate"].t == 3


@pytest.mark.parametrize("what", ["last_gradient", "gate"])
def test_writing_into_the_state_is_noticed(what, backend):
    """What was fed is computed again if it is no longer what the state says."""
    x, y = parameter(30), parameter(30)
    y.data.copy_(x.detach())
    a, b = (
        LODO([p], lr=0.1, momentum="learned", backend=k, preconditioner=Mixing(3))
        for p, k in ((x, backend), (y, "reference"))
    )
    for t in range(6):
        give_gradients([x])
        y.grad = x.grad.clone()
        a.step()
        b.step()
        if t == 2:
            for state in (a._state(0), b._state(0)):
                if what == "gate":
                    state["gate"] = state["gate"]._replace(value=0.3)
                else:
                    state["last_gradient"].mul_(0.5)
    assert torch.allclose(x, y, rtol=1e-12, atol=0)


def test_a_gradient_too_large_for_the_gate_is_refused():
    """What is fed may be longer than the average: the bound is that of what is fed."""
    x = parameter(5, dtype=torch.float32)
    opt = LODO([x], lr=1.0, beta=0.999, momentum="learned")
    x.grad = torch.ones(5)
    opt.step()
    opt._state(0)["gate"] = Learned(0.0, t=1)
    x.grad = torch.full((5,), 1e12)
    opt.step()
    assert opt._state(0)["fed_bound"] == pytest.approx(1e12 * 5**0.5, rel=0.01)
    with pytest.raises(FloatingPointError, match=r"lr \* \|u\| of at most"):
        opt.step()
    assert all(torch.isfinite(v).all() for v in opt._state(0).values() if isinstance(v, torch.Tensor))
