"""The optimizers against formulas written out here, their state, and their names."""

from __future__ import annotations

import io
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel

from helpers import same
from lodo import LODO, Diagonal, Mixing, Residual, Scalar
from lodo.lab.data import using
from lodo.lab.optimizers import (
    OPTIMIZERS,
    Choice,
    build,
    evaluating,
    hyperparameters,
    keras,
    needs_graph,
    paper_hyperparameters,
    parse,
    resolve,
    state_bytes,
    with_settings,
)
from lodo.lab.optimizers.base import VectorOptimizer
from lodo.lab.optimizers.frozen import FrozenLODO
from lodo.lab.optimizers.lbfgs import SCALINGS, StochasticLBFGS, two_loop
from lodo.lab.optimizers.libraries import pytorch_optimizer_names
from lodo.lab.optimizers.rate_free import HDM, DoG, Mechanic
from lodo.lab.optimizers.second_order import BFGS, LevenbergMarquardt, Newton
from lodo.lab.schedules import schedule_of
from lodo.lab.settings import read_settings
from lodo.lab.tasks import make_task
from lodo.lab.tasks.bowl import Bowl
from lodo.lab.tasks.rosenbrock import Rosenbrock

F64 = torch.float64
SHAPES = ((3,), (2, 5), (), (4, 1, 3), (7, 2))
SCALES = (1.0, 1e-4, 30.0, 1e-2, 1.0)  # of the gradients: small ones show where epsilon stands


# ---------------------------------------------------------------- first order, against NumPy


def walk(make, formula, steps=50, seed=0, start=1.0):
    """The parameters after random gradients, and what the formula for one parameter makes of the same."""
    rng = np.random.default_rng(seed)
    xs = [start * rng.normal(size=shape) for shape in SHAPES]
    params = [Parameter(torch.tensor(x, dtype=F64)) for x in xs]
    optimizer = make(params)
    states = [{} for _ in xs]
    for t in range(1, steps + 1):
        for i, scale in enumerate(SCALES):
            g = scale * rng.normal(size=SHAPES[i])
            params[i].grad = torch.tensor(g, dtype=F64)
            xs[i] = formula(xs[i], g, states[i], t)
        optimizer.step()
    return [p.detach().numpy() for p in params], xs, states


def agree(actual, expected, rtol=1e-12, atol=1e-13):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("options", [{}, {"lr": 1.164, "beta1": 0.465, "beta2": 0.9884}, {"lr": 0.1, "eps": 1e-2}])
def test_adam(options):
    """Exactly torch's; from Keras' only as far as epsilon before or after the bias correction makes a difference."""
    lr, beta1, beta2, eps = (
        {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-7, **options}[k] for k in ("lr", "beta1", "beta2", "eps")
    )

    def formula(x, g, state, t):
        m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
        v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
        c1, c2 = 1 - beta1**t, 1 - beta2**t
        of_torch = lr * (m / c1) / (np.sqrt(v / c2) + eps)
        of_keras = lr * np.sqrt(c2) / c1 * m / (np.sqrt(v) + eps)
        # a / (s + e) - a / (s + e') = a (e' - e) / ((s + e) (s + e'))
        s, e = np.sqrt(v), eps * np.sqrt(c2)
        apart = lr * np.sqrt(c2) / c1 * np.abs(m) * (eps - e) / ((s + e) * (s + eps))
        state["apart"] = state.get("apart", 0) + apart
        state["keras"] = state.get("keras", x) - of_keras
        return x - of_torch

    actual, expected, states = walk(lambda params: keras.adam(params, **options), formula)
    agree(actual, expected)
    for a, state in zip(actual, states, strict=True):
        assert (np.abs(a - state["keras"]) <= state["apart"] * (1 + 1e-6) + 1e-12).all()
    if not options:  # no matter at 1e-7, for gradients of about 1
        np.testing.assert_allclose(actual[0], states[0]["keras"], atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"lr": 1.394, "beta": 0.529}, {"beta": 0.0}])
def test_momentum(options):
    lr, beta = options.get("lr", 1e-2), options.get("beta", 0.9)

    def formula(x, g, state, t):
        state["m"] = beta * state.get("m", 0) - lr * g
        return x + state["m"]

    agree(*walk(lambda params: keras.momentum(params, **options), formula)[:2])


@pytest.mark.parametrize("options", [{}, {"lr": 0.449, "rho": 0.04943, "beta": 0.595}, {"eps": 0.1, "beta": 0.5}])
def test_rmsprop(options):
    lr, rho, beta, eps = (
        {"lr": 1e-3, "rho": 0.9, "beta": 0.0, "eps": 1e-7, **options}[k] for k in ("lr", "rho", "beta", "eps")
    )

    def formula(x, g, state, t):
        state["v"] = rho * state.get("v", 0) + (1 - rho) * g**2
        state["m"] = beta * state.get("m", 0) + lr * g / np.sqrt(state["v"] + eps)
        return x - state["m"]

    agree(*walk(lambda params: keras.RMSprop(params, **options), formula)[:2])


@pytest.mark.parametrize("options", [{}, {"lr": 2.169, "beta1": 0.4362, "beta2": 0.9999723}, {"eps": 1e-7}])
def test_yogi(options):
    lr, beta1, beta2, eps = (
        {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-3, **options}[k] for k in ("lr", "beta1", "beta2", "eps")
    )

    def formula(x, g, state, t):
        v = state.get("v", np.zeros_like(g))
        state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
        state["v"] = v + (1 - beta2) * np.sign(g**2 - v) * g**2
        return x - lr * state["m"] / (np.sqrt(state["v"]) + eps)

    agree(*walk(lambda params: keras.yogi(params, **options), formula)[:2], rtol=1e-11)


@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.0008552, "beta": 0.9343, "weight_decay": 4.839e-5}, {"lr": 0.5, "weight_decay": 0.3}]
)
@pytest.mark.parametrize("start", [1.0, 0.0])
def test_lars(options, start):
    lr, beta, decay = options.get("lr", 1e-3), options.get("beta", 0.9), options.get("weight_decay", 0.0)

    def formula(x, g, state, t):
        size = np.sqrt((x**2).sum())
        if x.ndim > 1:
            trust = 0.001 * size / (np.sqrt((g**2).sum()) + decay * size) if size else 1.0
            g = (g + decay * x) * trust
        state["m"] = beta * state.get("m", 0) + g
        return x - lr * state["m"]

    agree(*walk(lambda params: keras.lars(params, **options), formula, start=start)[:2], rtol=1e-11)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -0.1), ("lr", math.nan), ("rho", 1.0), ("rho", -0.5), ("beta", 1.0), ("beta", "0.5"), ("eps", -1e-7)],
)
def test_bad_arguments_of_rmsprop_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be") as error:
        keras.RMSprop([Parameter(torch.zeros(2))], **{name: value})
    assert repr(value) in str(error.value)


def test_rmsprop_leaves_what_has_no_gradient():
    a, b = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    a.grad = torch.ones(2)
    optimizer = keras.RMSprop([{"params": [a], "lr": 0.5}, {"params": [b]}], rho=0.0, eps=0.0)
    assert optimizer.step() is None
    assert torch.equal(a, torch.full((2,), 0.5))
    assert torch.equal(b, torch.ones(2))
    assert b not in optimizer.state


# ---------------------------------------------------------------- L-BFGS


def inverse_hessian(S, Y, scaling):
    """B = V^T B V + s s^T / s.y, V = I - y s^T / s.y, over the pairs from the oldest on."""
    gamma = {
        "newest": S[-1] @ Y[-1] / (Y[-1] @ Y[-1]),
        "mean": np.mean([s @ y / (y @ y) for s, y in zip(S, Y, strict=True)]),
        "slip": S[0] @ Y[-1] / (Y[-1] @ Y[-1]),
    }[scaling]
    B = gamma * np.eye(S.shape[1])
    for s, y in zip(S, Y, strict=True):
        V = np.eye(len(s)) - np.outer(y, s) / (s @ y)
        B = V.T @ B @ V + np.outer(s, s) / (s @ y)
    return B


@given(n=st.integers(1, 12), pairs=st.integers(1, 10), seed=st.integers(0, 2**32), scaling=st.sampled_from(SCALINGS))
@settings(max_examples=80)
def test_two_loops_are_the_dense_matrix(n, pairs, seed, scaling):
    rng = np.random.default_rng(seed)
    S, g = rng.normal(size=(pairs, n)), rng.normal(size=n)
    Q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    Y = S @ (Q * np.linspace(0.5, 1, n)) @ Q.T
    expected = inverse_hessian(S, Y, scaling) @ g
    actual = two_loop(*map(torch.tensor, (g, S, Y)), scaling)
    np.testing.assert_allclose(actual, expected, atol=1e-9 * np.abs(expected).max())


def test_the_scalings_differ():
    rng = torch.Generator().manual_seed(0)
    S = torch.randn(3, 5, generator=rng, dtype=F64)
    Y = S * torch.linspace(0.1, 1, 5, dtype=F64)
    products = [two_loop(S[0] + S[1], S, Y, scaling) for scaling in SCALINGS]
    assert not any(torch.allclose(products[i], products[i - 1]) for i in range(3))
    for scaling in SCALINGS:  # the secant equation of the newest pair holds all the same
        torch.testing.assert_close(two_loop(Y[-1], S, Y, scaling), S[-1])


class Counted(Bowl):
    """Counts its batches and evaluations and keeps the gradients."""

    def __init__(self, *args, **options):
        super().__init__(*args, dtype="float64", **options)
        self.draws, self.seen = 0, []

    def draw(self):
        self.draws += 1
        super().draw()

    def evaluate(self, create_graph=False):
        loss = super().evaluate(create_graph)
        self.seen.append((loss, self.centre.clone(), self.x.detach().clone(), self.x.grad.clone()))
        return loss


def test_lbfgs_step_by_step():
    """Twice on every batch; the first step's scale; the falling rate; the dense matrix of the last three pairs."""
    lr, tau, first = 0.7, 3.0, 1e-3
    task = Counted(0, n=6, condition=10)
    optimizer = StochasticLBFGS(task.params, lr, tau, memory=3, first=first, scaling="mean")
    S, Y = [], []
    for t in range(8):
        task.draw()
        task.seen.clear()
        loss = optimizer.step(task.evaluate)
        assert task.draws == t + 1
        (before, centre, x, g), (_, centre_again, x_again, g_again) = task.seen
        assert loss == before
        assert torch.equal(centre, centre_again)
        assert torch.equal(x_again, task.x)
        if t == 0:
            expected = -first * g.numpy()
        else:
            B = inverse_hessian(np.stack(S[-3:]), np.stack(Y[-3:]), "mean")
            expected = -lr * tau / (tau + t) * B @ g.numpy()
        moved = (x_again - x).numpy()
        np.testing.assert_allclose(moved, expected, rtol=1e-8, atol=1e-12)
        S.append(moved)
        Y.append((g_again - g).numpy())
        np.testing.assert_allclose(Y[-1], task.H.numpy() @ moved, rtol=1e-6, atol=1e-12)
        memory = optimizer.memory
        assert memory["t"] == t + 1
        assert memory["S"].shape == memory["Y"].shape == (min(t + 1, 3), 6)
    np.testing.assert_allclose(memory["S"], S[-3:], rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(memory["Y"], Y[-3:], rtol=1e-8, atol=1e-12)


def test_lbfgs_as_the_paper_has_it():
    optimizer = StochasticLBFGS([Parameter(torch.zeros(2))])
    group = optimizer.param_groups[0]
    assert (group["memory"], group["first"]) == (48, 1e-10)
    task = make_task("bowl", {"n": 5}, 0)
    made = {name: build(name, task, 0, {}).param_groups[0] for name in ("lbfgs", "olbfgs", "lbfgs_slip")}
    assert {name: group["scaling"] for name, group in made.items()} == {
        "lbfgs": "newest",
        "olbfgs": "mean",
        "lbfgs_slip": "slip",
    }


def curved(curvatures):
    """A closure for f = sum(c x^2) / 2, and its parameter."""
    x = Parameter(torch.ones(len(curvatures), dtype=F64))
    c = torch.tensor(curvatures, dtype=F64)

    def closure():
        x.grad = x.detach() * c
        return 0.5 * float(x.detach() @ x.grad)

    return x, c, closure


def test_lbfgs_skips_pairs_without_curvature():
    x, c, closure = curved([-1.0, -2.0])
    optimizer = StochasticLBFGS([x], first=1e-4, tau=1e9)
    for t in range(6):  # ten times as long each time, up to 1
        before = x.detach().clone()
        optimizer.step(closure)
        torch.testing.assert_close(x.detach() - before, -before * c * min(1e-4 * 10**t, 1.0), rtol=1e-6, atol=0)
        assert len(optimizer.memory["S"]) == 0
    assert optimizer.memory["t"] == 6

    x, c, closure = curved([1.0, 2.0])
    optimizer = StochasticLBFGS([x], first=1e-4)
    optimizer.step(closure)
    optimizer.step(closure)
    pairs = {name: optimizer.memory[name].clone() for name in "SY"}
    c.neg_()
    x.data.fill_(1.0)
    optimizer.step(closure)
    assert same(pairs, {name: optimizer.memory[name] for name in "SY"})
    assert not torch.equal(x, torch.ones(2))
    c.zero_()  # s.y = 0 is no curvature either
    optimizer.step(closure)
    assert same(pairs, {name: optimizer.memory[name] for name in "SY"})


def test_lbfgs_gets_going_in_single_precision():
    """1 - 1e-10 is 1 there, so the first steps change nothing."""
    x = Parameter(torch.ones(3))

    def closure():
        x.grad = x.detach() * torch.tensor([1.0, 0.5, 0.1])
        return float(x.detach() @ x.grad)

    optimizer = StochasticLBFGS([x], tau=1e9)
    losses = [optimizer.step(closure) for _ in range(20)]
    assert losses[1] == losses[0]
    assert losses[-1] < 1e-4


def test_lbfgs_needs_a_closure():
    x = Parameter(torch.ones(3))
    x.grad = torch.ones(3)
    optimizer = StochasticLBFGS([x], first=0.1)
    with pytest.raises(ValueError, match=r"^closure must be given.*got None"):
        optimizer.step()
    assert torch.equal(x, torch.ones(3))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", "1"),
        ("tau", 0.0),
        ("tau", math.inf),
        ("memory", 0),
        ("memory", 1.5),
        ("first", 0.0),
        ("first", math.nan),
        ("scaling", "oldest"),
    ],
)
def test_bad_arguments_of_lbfgs_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be") as error:
        StochasticLBFGS([Parameter(torch.zeros(2))], **{name: value})
    assert repr(value) in str(error.value)


# ---------------------------------------------------------------- matrices


@pytest.mark.parametrize("lr", [1.0, 0.25])
def test_newton_on_a_bowl(lr):
    task = Bowl(0, n=9, dtype="float64")
    task.draw()
    task.evaluate()
    Newton(task.params, task.hessian, lr).step()
    torch.testing.assert_close(task.x.detach(), lr * task.centre, rtol=1e-9, atol=1e-11)


def test_newton_on_rosenbrock_asks_for_the_hessian_every_time():
    task = Rosenbrock(0)
    optimizer = build("newton", task, 0, {})
    for _ in range(8):
        loss = optimizer.step(task.evaluate)
    assert loss < 1e-20


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("damping", [None, 0.0, 1e-5, 0.3])
def test_levenberg_marquardt(damping, dtype):
    task = Bowl(0, n=9, condition=10, dtype=dtype)
    optimizer = LevenbergMarquardt(task.params, task.hessian, **({} if damping is None else {"damping": damping}))
    damping = 1.0 if damping is None else damping
    H = task.H.double().numpy()
    for _ in range(3):
        task.draw()
        task.evaluate()
        x, g = task.x.detach().double().numpy(), task.x.grad.double().numpy()
        A = H @ H
        expected = x - np.linalg.inv(A + damping * np.diag(np.diag(A))) @ H @ g
        optimizer.step()
        np.testing.assert_allclose(task.x.detach(), expected, rtol=1e-9 if dtype == "float64" else 1e-5, atol=1e-6)


def test_bfgs():
    """Every gradient on a new batch; B starts as the identity."""
    task = Bowl(0, n=5, condition=10, v=1e-4, dtype="float64")
    task.x.data.fill_(1.0)
    optimizer = BFGS(task.params, lr=0.3)
    B, last = np.eye(5), None
    x = task.x.detach().numpy().copy()
    for _ in range(12):
        task.draw()
        loss = optimizer.step(task.evaluate)
        away = x - task.centre.numpy()
        assert math.isclose(loss, 0.5 * away @ task.H.numpy() @ away, rel_tol=1e-8)
        g = task.H.numpy() @ away
        if last is not None:
            s, y = last[0], g - last[1]
            V = np.eye(5) - np.outer(y, s) / (s @ y)
            B = V.T @ B @ V + np.outer(s, s) / (s @ y)
        s = -0.3 * B @ g
        x, last = x + s, (s, g)
        np.testing.assert_allclose(task.x.detach(), x, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(optimizer.memory["B"], B, rtol=1e-8, atol=1e-9)
    assert np.abs(B - np.eye(5)).max() > 0.5
    assert BFGS(task.params).param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda p, v: Newton(p, None, v), "lr"), (lambda p, v: LevenbergMarquardt(p, None, v), "damping"), (BFGS, "lr")],
)
def test_bad_arguments_of_second_order_are_named(make, name):
    for value in (-0.5, math.nan, "a"):
        with pytest.raises(ValueError, match=f"^{name} must be") as error:
            make([Parameter(torch.zeros(2))], value)
        assert repr(value) in str(error.value)


# ---------------------------------------------------------------- rates of their own


def gradients(steps, n=4, seed=0):
    """What a wandering bowl does to x, in NumPy: a function of x and the step that returns loss and gradient."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(n, n))
    H, centres = A @ A.T / n + np.eye(n) / 2, rng.normal(size=(steps, n)).cumsum(0)
    return lambda x, t: (0.5 * (x - centres[t]) @ H @ (x - centres[t]), H @ (x - centres[t]))


def trained(make, steps=30, n=4):
    """The path of an optimizer on that bowl."""
    bowl, x = gradients(steps, n), Parameter(torch.ones(n, dtype=F64))
    optimizer, path = make([x]), []
    for t in range(steps):

        def closure(t=t):
            loss, g = bowl(x.detach().numpy(), t)
            x.grad = torch.tensor(g)
            return float(loss)

        optimizer.step(closure)
        path.append(x.detach().numpy().copy())
    return np.array(path)


@pytest.mark.parametrize(("lr", "start"), [(1.0, 1e-2), (0.5, 1e-4)])
def test_dog(lr, start):
    bowl, x = gradients(30), np.ones(4)
    r, squares, path = start * 3, 0.0, []
    for t in range(30):
        g = bowl(x, t)[1]
        r, squares = max(r, np.linalg.norm(x - 1)), squares + g @ g
        x = x - lr * r / math.sqrt(squares + 1e-8) * g
        path.append(x)
    np.testing.assert_allclose(trained(lambda p: DoG(p, lr, start)), path, rtol=1e-12)


@pytest.mark.parametrize(("momentum", "decay", "start"), [(0.0, 0.01, 1e-2), (0.9, 0.0, 1e-8), (0.5, 0.1, 1.0)])
def test_mechanic(momentum, decay, start):
    """Learner by learner, in plain numbers."""
    bowl, x, betas = gradients(30), np.ones(4), (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
    D, m, path = np.zeros(4), np.zeros(4), []
    learners = [{"bet": 0.0, "reward": 0.0, "squares": 0.0, "largest": 1e-6} for _ in betas]
    for t in range(30):
        g = bowl(x, t)[1]
        s = sum(one["bet"] for one in learners)
        h = D @ (g + decay * s * np.linalg.norm(g) * x / (np.linalg.norm(x) + 1e-8))
        for one, b in zip(learners, betas, strict=True):
            one["largest"] = max(b * one["largest"], abs(h))
            one["squares"] = b * b * one["squares"] + h * h
            one["reward"] = max(b * one["reward"] - one["bet"] * h, 0.0)
            one["bet"] = (start / 6 * one["largest"] + one["reward"]) / (math.sqrt(one["squares"]) + 1e-8)
        m = momentum * m + (1 - momentum) * g
        D = D - m
        x = 1 + sum(one["bet"] for one in learners) * D
        path.append(x)
    np.testing.assert_allclose(trained(lambda p: Mechanic(p, momentum, decay, start)), path, rtol=1e-9)


@pytest.mark.parametrize(("lr", "momentum", "start"), [(0.1, 0.95, 0.0), (0.5, 0.0, 0.2), (0.05, 0.9995, 1.0)])
def test_hdm(lr, momentum, start):
    """Some steps raise the loss of their batch: they are taken back, but learned from."""
    bowl, x, d = gradients(30), np.ones(4), np.zeros(4)
    P, b, P2, b2, path, kept = np.full(4, start), momentum, np.zeros(4), 0.0, [], []
    for t in range(30):
        before, g = bowl(x, t)
        s = b * d - P * g
        after, ahead = bowl(x + s, t)
        scale = 1 / (g @ g + 0.25 * d @ d)
        h, hb = -scale * ahead * g, scale * ahead @ d
        P2, b2 = P2 + h**2, b2 + hb**2
        P = np.maximum(P - lr * h / (np.sqrt(P2) + 1e-12), 0)
        b = min(max(b - 0.1 * hb / (math.sqrt(b2) + 1e-12), 0.0), 0.9995)
        kept.append(after <= before)
        d = s if kept[-1] else 0 * s
        x = x + d
        path.append(x)
    np.testing.assert_allclose(trained(lambda p: HDM(p, lr, momentum=momentum, start=start)), path, rtol=1e-9)
    assert any(kept)
    assert start < 1 or not all(kept)


def test_hdm_needs_a_closure():
    with pytest.raises(ValueError, match=r"^closure must be given to HDM, which evaluates every batch twice, got None"):
        HDM([Parameter(torch.zeros(2))]).step()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((DoG, name) for name in ("lr", "start")),
        *((Mechanic, name) for name in ("momentum", "decay", "start")),
        *((HDM, name) for name in ("lr", "momentum_lr", "momentum", "start", "damping")),
    ],
)
def test_bad_arguments_of_rate_free_ones_are_named(kind, name):
    for value in (-0.5, math.nan, "a"):
        with pytest.raises(ValueError, match=f"^{name} must be") as error:
            kind([Parameter(torch.zeros(2))], **{name: value})
        assert repr(value) in str(error.value)


# ---------------------------------------------------------------- one vector


CURVATURE = (lambda A: A @ A.T / 12 + torch.eye(12, dtype=F64) / 2)(
    torch.randn(12, 12, generator=torch.Generator().manual_seed(0), dtype=F64)
)
VECTOR = {
    "newton": lambda params: Newton(params, lambda: CURVATURE, 0.5),
    "lm": lambda params: LevenbergMarquardt(params, lambda: CURVATURE, 0.5),
    "bfgs": lambda params: BFGS(params, 0.1),
    "lbfgs": lambda params: StochasticLBFGS(params, 0.5, 100.0, first=1e-2),
    "dog": lambda params: DoG(params, start=0.1),
    "mechanic": lambda params: Mechanic(params, start=0.1),
    "hdm": HDM,
}


def quadratic(params):
    """A closure for a quadratic of all parameters as one vector."""

    def closure():
        x = torch.cat([p.detach().reshape(-1) for p in params])
        g, at = CURVATURE @ x, 0
        for p in params:
            p.grad = g[at : at + p.numel()].reshape(p.shape)
            at += p.numel()
        return 0.5 * float(x @ g)

    return closure


@pytest.mark.parametrize("name", VECTOR)
def test_several_parameters_are_one_vector(name):
    start = torch.randn(12, dtype=F64)
    flat = [Parameter(start.clone())]
    parts = [Parameter(t.clone()) for t in (start[:6].view(2, 3), start[6], start[7:].view(1, 5, 1))]
    a, b = VECTOR[name](flat), VECTOR[name](parts)
    for _ in range(6):
        assert a.step(quadratic(flat)) == b.step(quadratic(parts))
    assert torch.equal(flat[0], torch.cat([p.detach().view(-1) for p in parts]))
    assert (flat[0] - start).norm() > 0.1


@pytest.mark.parametrize("name", VECTOR)
def test_one_group_only(name):
    groups = [{"params": [Parameter(torch.zeros(2))]}, {"params": [Parameter(torch.zeros(3))]}]
    with pytest.raises(ValueError, match=r"^params must be one group for \w+, .* got 2 groups"):
        VECTOR[name](groups)


def test_a_missing_gradient_is_zero():
    class Descent(VectorOptimizer):
        def displacement(self, g):
            return -g

    a, b = Parameter(torch.ones(2)), Parameter(torch.ones(3, 1))
    b.grad = torch.full((3, 1), 0.5)
    assert Descent([a, b], {}).step() is None
    assert torch.equal(a, torch.ones(2))
    assert torch.equal(b, torch.full((3, 1), 0.5))


def test_gradients_of_any_layout():
    p = Parameter(torch.zeros(2, 3))
    p.grad = torch.arange(6.0).view(3, 2).T
    BFGS([p], lr=1.0).step()
    assert torch.equal(p, -p.grad)


# ---------------------------------------------------------------- frozen LODO


def test_frozen_lodo():
    """LODO bit for bit until it freezes; then theta stands still and the momentum begins anew."""
    tasks = Bowl(0, n=8), Bowl(0, n=8)
    options = {"lr": 0.3, "meta_lr": 1e-2, "beta": 0.6, "seed": 3}
    frozen, free = FrozenLODO(tasks[0].params, freeze_at=5, **options), LODO(tasks[1].params, **options)
    for _ in range(5):
        for task in tasks:
            task.draw()
        assert frozen.step(tasks[0].evaluate) == free.step(tasks[1].evaluate)
        assert torch.equal(tasks[0].x, tasks[1].x)
        assert torch.equal(frozen._state(0)["theta"], free._state(0)["theta"])
    task, G, m = tasks[0], frozen.preconditioner_matrix(), torch.zeros(8)
    theta = frozen._state(0)["theta"].clone()
    assert not torch.equal(theta, LODO([Parameter(torch.zeros(8))], **options)._state(0)["theta"])
    for _ in range(5):
        task.draw()
        before = task.x.detach().clone()
        frozen.step(task.evaluate)
        m = 0.6 * m + 0.4 * task.x.grad
        torch.testing.assert_close(task.x.detach() - before, -G @ m, rtol=1e-4, atol=1e-6)
        assert torch.equal(frozen._state(0)["theta"], theta)


def test_lodo_frozen_from_the_start():
    task = Bowl(0, n=8)
    optimizer = build("lodo_frozen", task, 7, {"freeze_at": 0, "meta_lr": 0.1})
    theta = optimizer._state(0)["theta"].clone()
    assert torch.equal(theta, LODO([Parameter(torch.zeros(8))], seed=7)._state(0)["theta"])
    for _ in range(3):
        task.draw()
        optimizer.step(task.evaluate)
    assert torch.equal(optimizer._state(0)["theta"], theta)


@pytest.mark.parametrize("value", [-1, 2.5, None])
def test_a_bad_freeze_at_is_named(value):
    with pytest.raises(ValueError, match=f"^freeze_at must be .* got {value!r}"):
        FrozenLODO([Parameter(torch.zeros(2))], freeze_at=value)


def test_hooks_of_frozen_lodo_are_called_once():
    task, calls = Bowl(0, n=3), []
    optimizer = FrozenLODO(task.params, freeze_at=2)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step(task.evaluate)
    assert calls == ["before", "after"]


# ---------------------------------------------------------------- every baseline


def options_of(name):
    return {**paper_hyperparameters("bowl", name), **({"freeze_at": 5} if name == "lodo_frozen" else {})}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_loss_is_handed_through(name):
    for task in (Bowl(0, n=6), Rosenbrock(0)):
        optimizer, losses = build(name, task, 0, options_of(name)), []
        start = task.params[0].detach().clone()

        def closure(task=task, losses=losses):
            losses.append(task.evaluate())
            return losses[-1]

        for _ in range(3):
            task.draw()
            losses.clear()
            assert optimizer.step(closure) == losses[0]
            assert len(losses) == (2 if name == "hdm" or ("bfgs" in name and name != "bfgs") else 1)
        assert not torch.equal(task.params[0], start)


@pytest.mark.parametrize("saved_at", [0, 3, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_is_bit_for_bit(name, saved_at):
    """Through a file, into a fresh optimizer, with steps before and after LODO freezes."""

    def fresh():
        task = Bowl(1, n=6)
        return task, build(name, task, 2, options_of(name))

    def advance(task, optimizer, steps):
        losses = []
        for _ in range(steps):
            task.draw()
            losses.append(optimizer.step(task.evaluate))
        return losses

    task, optimizer = fresh()
    advance(task, optimizer, saved_at)
    buffer = io.BytesIO()
    torch.save({"task": task.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    again, resumed = fresh()
    again.load_state_dict(state["task"])
    resumed.load_state_dict(state["optimizer"])
    assert advance(task, optimizer, 6) == advance(again, resumed, 6)
    assert torch.equal(task.x, again.x)
    assert same(optimizer.state_dict(), resumed.state_dict())


def drawn(seed, /, **options):
    return build("lodo", Bowl(0, n=6), seed, options)._state(0)["theta"]


def test_the_seed_of_lodo():
    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_the_seed_of_lodo_can_be_given():
    assert torch.equal(drawn(2, seed=1), drawn(1))


# ---------------------------------------------------------------- ablations

ABLATIONS = {
    "lodo_diagonal": {"preconditioner": "diagonal"},
    "lodo_global": {"preconditioner": "scalar"},
    "lodo_residuals": {"preconditioner": "residual"},
    "lodo_no_momentum": {"beta": 0.0},
    "lodo_sgd": {"meta_optimizer": "sgd"},
}


@pytest.mark.parametrize(
    ("name", "label", "family", "beta", "meta"),
    [
        ("lodo", "LODO", Mixing, 0.9, "adam"),
        ("lodo_diagonal", "LODO-Diagonal", Diagonal, 0.9, "adam"),
        ("lodo_global", "LODO-Global", Scalar, 0.9, "adam"),
        ("lodo_residuals", "LODO-Residuals", Residual, 0.9, "adam"),
        ("lodo_no_momentum", "LODO-No-Momentum", Mixing, 0.0, "adam"),
        ("lodo_sgd", "LODO-SGD", Mixing, 0.9, "sgd"),
    ],
)
def test_an_ablation_is_what_its_name_says(name, label, family, beta, meta):
    optimizer = build(name, Bowl(0, n=6), 0, {})
    (group,) = optimizer.param_groups
    assert type(optimizer) is LODO
    assert group["preconditioner"] == repr(family())
    assert (group["beta"], group["meta_optimizer"], group["momentum"]) == (beta, meta, "fixed")
    assert OPTIMIZERS[name].label == label


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_steps_as_lodo_with_its_option(name):
    options = {"lr": 0.2, "meta_lr": 0.01}
    task, other = Bowl(0, n=6), Bowl(0, n=6)
    ablation, lodo = build(name, task, 4, options), LODO(other.params, seed=4, **options, **ABLATIONS[name])
    for _ in range(4):
        for each, optimizer in ((task, ablation), (other, lodo)):
            each.draw()
            optimizer.step(each.evaluate)
    assert torch.equal(task.x, other.x)
    plain = Bowl(0, n=6)
    optimizer = build("lodo", plain, 4, options)
    for _ in range(4):
        plain.draw()
        optimizer.step(plain.evaluate)
    assert not torch.equal(task.x, plain.x)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lodo_no_momentum", {"beta": 0.5}),
        ("lodo_sgd", {"meta_optimizer": "adam"}),
        ("lodo_global", {"preconditioner": "mixing"}),
        ("lodo_diagonal", {"preconditioner": "diagonal"}),
        ("lodo_residuals", {"preconditioner": "mixing"}),
    ],
)
def test_what_an_ablation_takes_away_cannot_be_given(name, options):
    (option,) = options
    with pytest.raises(ValueError, match=f"^{name} has no option '{option}'"):
        build(name, Bowl(0, n=6), 0, options)


def test_whose_rate_falls():
    assert [name for name in (*OPTIMIZERS, "pytorch_optimizer.lars") if schedule_of(name, None)] == ["lars"]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("adam", "adam"),
        ("ADAM", "adam"),
        ("Lodo_Frozen", "lodo_frozen"),
        ("lbfgs", "lbfgs"),  # the paper's before torch's
        ("torch.lbfgs", "torch.LBFGS"),
        ("torch.Adam", "torch.Adam"),
        ("torch.optim.sgd", "torch.SGD"),
        ("sgd", "torch.SGD"),
        ("AdamW", "torch.AdamW"),
        ("pytorch_optimizer.AdamW", "pytorch_optimizer.adamw"),
        ("pytorch_optimizer.yogi", "pytorch_optimizer.yogi"),
        ("Lion", "pytorch_optimizer.lion"),
        ("SOAP", "pytorch_optimizer.soap"),
    ],
)
def test_names(name, full):
    assert resolve(name) == full
    assert parse(name) == [Choice(full)]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("adm", "; did you mean 'adam'?"),
        ("Ldo", "; did you mean 'lodo'?"),
        ("torch.SDG", "; did you mean 'torch.SGD'?"),
        ("torch.AdamWW", "; did you mean 'torch.AdamW'?"),
        ("AdamWW", "; did you mean 'torch.AdamW'?"),
        ("Lionn", "; did you mean 'pytorch_optimizer.lion'?"),
        ("pytorch_optimizer.adamw2", "; did you mean 'pytorch_optimizer.adamw'?"),
        ("qqqqqq", ";"),
        ("torch.lodo", "; did you mean 'lodo'?"),
        ("keras.adam", "; did you mean 'adam'?"),
        ("torch.Optimizer", None),
        ("torch.optim.lr_scheduler", None),
    ],
)
def test_unknown_names(name, hint):
    with pytest.raises(
        ValueError,
        match=r"optimizers must be among adam, .*, an optimizer of torch.optim, .*, or your own as module:Name$",
    ) as error:
        resolve(name)
    message = str(error.value)
    assert all(known in message for known in OPTIMIZERS)
    start = f"unknown optimizer {name!r}{hint or ''}"
    assert message.startswith(f"{start} optimizers must be among" if hint is not None else start)


def test_a_misspelled_name_is_answered_without_loading_a_library():
    code = """
import sys
from lodo.lab.optimizers import resolve
for name in ("addam", "torch.AdamWW", "keras.adam"):
    try:
        resolve(name)
    except ValueError:
        assert "pytorch_optimizer" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_of_a_library_is_known():
    import pytorch_optimizer

    for name in pytorch_optimizer.get_supported_optimizers():
        assert resolve(f"pytorch_optimizer.{name}") == f"pytorch_optimizer.{name}"
        assert resolve(name).lower() in (name, f"torch.{name}", f"pytorch_optimizer.{name}")


def test_parsing():
    text = """lodo, Lodo(beta=0.5, preconditioner="diagonal"), torch.AdamW(lr=0.1, betas=(0.9, 0.99), amsgrad=True),
        lion(lr=-1e-3, foreach=None), adam()"""
    assert parse(text) == [
        Choice("lodo"),
        Choice("lodo", {"beta": 0.5, "preconditioner": "diagonal"}),
        Choice("torch.AdamW", {"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": True}),
        Choice("pytorch_optimizer.lion", {"lr": -1e-3, "foreach": None}),
        Choice("adam"),
    ]


@pytest.mark.parametrize(
    ("choice", "label"),
    [
        (Choice("lodo"), "LODO"),
        (Choice("lbfgs_slip"), "L-BFGS (authors' slip)"),
        (Choice("lodo", {"beta": 0.5, "meta_optimizer": "sgd"}), "LODO (beta=0.5, meta_optimizer='sgd')"),
        (Choice("torch.AdamW"), "torch.AdamW"),
        (Choice("pytorch_optimizer.lion", {"betas": (0.9, 0.99)}), "pytorch_optimizer.lion (betas=(0.9, 0.99))"),
    ],
)
def test_labels(choice, label):
    assert choice.label == label


def test_labels_tell_the_optimizers_apart():
    assert len({entry.label for entry in OPTIMIZERS.values()}) == len(OPTIMIZERS)


@pytest.mark.parametrize("text", ["", "adam lodo", "adam(lr=0.1", "adam,,lodo", "lodo(beta=)", "adam)"])
def test_what_is_no_list_of_optimizers(text):
    with pytest.raises(ValueError, match=r"^optimizers must be names or calls such as") as error:
        parse(text)
    assert str(error.value).endswith(f"got {text!r}")


@pytest.mark.parametrize("text", ["adam(0.1)", "adam(*rates)", "adam(**rates)", "adam(0.1, beta1=0.5)"])
def test_options_go_by_name(text):
    with pytest.raises(ValueError, match=r"^options must be given by name, such as adam\(lr=0.1\)") as error:
        parse(f"lodo, {text}")
    assert str(error.value).endswith(f"got {text!r}")


@pytest.mark.parametrize("value", ["fast", "float('inf')", "2 ** 3", "[x for x in y]", "lambda: 1", "__import__('os')"])
def test_options_are_literals(value):
    with pytest.raises(ValueError, match=r"^lr of adam must be a finite number, text") as error:
        parse(f"adam(lr={value})")
    assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize("text", ["3", "'adam'", "lodo + adam", "adam(lr=1)(lr=2)", "[lodo]"])
def test_what_is_no_name(text):
    with pytest.raises(ValueError, match=r"optimizers must be among"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "adam)(lodo",
        "adam) + (lodo",
        "adam(lr={[1]: 2})",
        "adam(lr=0.1, lr=0.2)",
    ],
)
def test_odd_texts_are_refused_with_a_value_error(text):
    with pytest.raises(ValueError, match="adam"):
        parse(text)


# ---------------------------------------------------------------- the paper's table

COLUMNS = ("bowl", "rosenbrock", "mnist", "cifar10")
_ = None
TABLE = {  # "Hyperparameters used for the experiments", row by row
    ("adam", "lr"): (1.164, 0.9704, 0.0009554, 0.0004295),
    ("adam", "beta1"): (0.465, 0.864, 0.9323, 0.9562),
    ("adam", "beta2"): (0.9884, 0.99804, 0.99505, 0.99814),
    ("momentum", "lr"): (1.394, 0.09870, 0.003411, 0.009942),
    ("momentum", "beta"): (0.529, 0.9359, 0.9640, 0.99409),
    ("rmsprop", "lr"): (0.449, 0.004318, 4.167e-5, 9.877e-6),
    ("rmsprop", "rho"): (0.04943, 0.02836, 0.002258, 0.03338),
    ("rmsprop", "beta"): (0.595, 0.880, 0.936, 0.9394),
    ("yogi", "lr"): (2.169, 0.2991, 0.0009340, 0.001829),
    ("yogi", "beta1"): (0.4362, 0.9273, 0.9319, 0.9730),
    ("yogi", "beta2"): (0.9999723, 0.998787, 0.999708, 0.9828),
    ("lars", "lr"): (_, _, 0.0008552, 0.002516),
    ("lars", "beta"): (_, _, 0.9343, 0.9385),
    ("lars", "weight_decay"): (_, _, 4.839e-5, 5.370e-5),
    ("lbfgs", "lr"): (1.204, _, _, _),
    ("lbfgs", "tau"): (23002, _, _, _),
    ("olbfgs", "lr"): (1.050, _, _, _),
    ("olbfgs", "tau"): (36721, _, _, _),
    ("lodo", "meta_lr"): (0.0009600, 0.0001394, 7.946e-6, 0.0001134),
    ("lodo", "beta"): (0.195, 0.897, 0.9343, 0.9490),
    ("lodo", "lr"): (0.270, 0.2946, 0.08459, 0.1725),
    ("lodo_diagonal", "meta_lr"): (_, _, 0.0005196, _),
    ("lodo_diagonal", "beta"): (_, _, 0.9860, _),
    ("lodo_diagonal", "lr"): (_, _, 0.1325, _),
    ("lodo_global", "meta_lr"): (_, _, 7.951e-5, _),
    ("lodo_global", "beta"): (_, _, 0.9525, _),
    ("lodo_global", "lr"): (_, _, 0.05583, _),
    ("lodo_residuals", "meta_lr"): (_, _, 3.829e-5, _),
    ("lodo_residuals", "beta"): (_, _, 0.9301, _),
    ("lodo_residuals", "lr"): (_, _, 0.02134, _),
    ("lodo_sgd", "meta_lr"): (_, _, 0.0007196, _),
    ("lodo_sgd", "beta"): (_, _, 0.9499, _),
    ("lodo_sgd", "lr"): (_, _, 0.1035, _),
}
BESIDE_THE_TABLE = {
    ("bowl", "lbfgs_slip"): {"lr": 1.204, "tau": 23002},  # the paper's own L-BFGS
    ("bowl", "bfgs"): {"lr": 0.01},
    ("bowl", "lm"): {"damping": 1e-5},
    ("rosenbrock", "lodo"): {"preconditioner": "mixing(width=4.0)"},
    ("mnist", "lodo_no_momentum"): {"meta_lr": 7.946e-6, "lr": 0.08459},  # LODO's
}


def test_the_papers_table():
    expected = {task: {} for task in COLUMNS}
    for (optimizer, name), values in TABLE.items():
        for task, value in zip(COLUMNS, values, strict=True):
            if value is not None:
                expected[task].setdefault(optimizer, {})[name] = value
    for (task, optimizer), options in BESIDE_THE_TABLE.items():
        expected[task].setdefault(optimizer, {}).update(options)
    assert read_settings("paper") == expected
    for task, optimizers in expected.items():
        for optimizer, options in optimizers.items():
            assert paper_hyperparameters(task, optimizer) == options


def test_what_the_paper_does_not_give():
    assert paper_hyperparameters("bowl", "lars") == paper_hyperparameters("sphere", "adam") == {}
    paper_hyperparameters("bowl", "adam")["lr"] = 0
    assert paper_hyperparameters("bowl", "adam")["lr"] == 1.164


@pytest.mark.parametrize(
    ("task", "name"),
    [(task, name) for task in ("bowl", "rosenbrock", "mnist") for name in read_settings("paper")[task]],
)
def test_the_papers_settings_build(task, name):
    with using("digits"):
        optimizer = build(name, make_task(task, {}, 0), 0, paper_hyperparameters(task, name))
    group = optimizer.param_groups[0]
    given = paper_hyperparameters(task, name)
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    if name in ("momentum", "lars"):
        given["momentum"] = given.pop("beta")
    assert {key: group[key] for key in given} == given


# ---------------------------------------------------------------- hyperparameters from a file


def settings_of(text, tmp_path, optimizers="adam, lodo(beta=0.5), torch.AdamW(lr=2)", task="bowl"):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return [hyperparameters(task, choice) for choice in with_settings(parse(optimizers), task, file)]


def test_a_file_overrides_what_it_names(tmp_path):
    text = """
        [mnist]
        adam = { lr = 3.0 }
        [bowl]
        adam = { lr = 0.5 }
        yogi = { lr = 7.0 }
        "torch.AdamW" = { lr = 1.0, betas = [0.5, 0.75], amsgrad = true }
    """
    assert settings_of(text, tmp_path) == [
        {"lr": 0.5, "beta1": 0.465, "beta2": 0.9884},
        {"meta_lr": 0.0009600, "beta": 0.5, "lr": 0.270},
        {"lr": 2, "betas": [0.5, 0.75], "amsgrad": True},  # what is written on the command line comes first
    ]


def test_a_file_may_name_what_the_paper_has_not(tmp_path):
    (found,) = settings_of("[bowl.lodo]\nrecipe = 'robust'\nlr = 1.0\n", tmp_path, "lodo")
    assert found == {"meta_lr": 0.0009600, "beta": 0.195, "lr": 1.0, "recipe": "robust"}
    (found,) = settings_of("[sphere.adam]\nlr = 1.0\n", tmp_path, "adam", "sphere")
    assert found == {"lr": 1.0}


def test_a_file_changes_neither_labels_nor_options(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[bowl]\nadam = { lr = 0.5 }\nlodo = { lr = 0.1 }\n")
    before = parse("adam, lodo(beta=0.5), lodo, torch.SGD")
    after = with_settings(before, "bowl", file)
    assert [choice.label for choice in after] == [choice.label for choice in before]
    assert [choice.options for choice in after] == [choice.options for choice in before]
    assert after[-1] == before[-1]
    assert paper_hyperparameters("bowl", "adam")["lr"] == 1.164


def test_settings_of_a_choices_own_stay(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[bowl]\nadam = { lr = 0.5 }\n")
    own = Choice("adam", title="Fast Adam", settings={"lr": 9})
    assert with_settings([own, Choice("adam")], "bowl", file)[0] == own


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "must be a TOML file"),
        ("[bowl\nadam = 1", "must be a TOML file"),
        ("adam = { lr = 0.5, lr = 0.6 }", "must be a TOML file"),
        (b"\xff\xfe", "must be a TOML file"),
        ("", r"must name in \[bowl\] at least one of the chosen optimizers"),
        ("[mnist]\nadam = { lr = 0.5 }", r"must name in \[bowl\] at least one of the chosen optimizers"),
        ("[bowl]\nyogi = { lr = 0.5 }", r"must name in \[bowl\] at least one of the chosen optimizers"),
        ("[bowl]\nadam = 0.5", r"must have a table of numbers for each optimizer in \[bowl\]"),
        ("[bowl]\nadam = { lr = 1 }\nlr = 0.5", r"must have a table of numbers for each optimizer in \[bowl\]"),
        ("[bowl]\nadam = { lr = 2024-01-01 }", r"must have a table of numbers for each optimizer in \[bowl\]"),
        ("[bowl]\nadam = { lr = 1 }\nadamm = { lr = 1 }", r"must have a table of .* did you mean"),
        ("bowl = 3", r"must have a table of numbers for each optimizer in \[bowl\]"),
        ("bowl = [1, 2]", r"must have a table of numbers for each optimizer in \[bowl\]"),
    ],
)
def test_files_that_are_no_hyperparameters(text, said, tmp_path):
    file = tmp_path / "mine.toml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=f"^hyperparameters {said}") as error:
        with_settings(parse("adam, lodo"), "bowl", file)
    assert str(file) in str(error.value)


def test_a_folder_is_no_file_of_hyperparameters(tmp_path):
    with pytest.raises(ValueError, match=r"^hyperparameters must be a TOML file"):
        with_settings(parse("adam"), "bowl", tmp_path)


# ---------------------------------------------------------------- building


@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch.SGD", "torch.AdamW"])
def test_bad_options_are_refused_by_name(name):
    options = {**options_of(name), "learning_rate": 0.1}
    with pytest.raises(ValueError, match="learning_rate") as error:
        build(name, make_task("bowl", {"n": 4}, 0), 0, options)
    said = str(error.value)
    assert said.startswith(f"{name} has no option 'learning_rate'")
    listed = said.partition("Its options: ")[2].split(", ")
    assert set(options_of(name)) - {"digest"} <= set(listed)
    assert not {"params", "task", "digest", "options"} & set(listed)


@pytest.mark.parametrize("name", ["kron_lodo", "lodo", "lodo_frozen", "muon_adamw", "torch.AdamW"])
def test_a_misspelled_option_is_recognised(name):
    with pytest.raises(ValueError, match=rf"^{name} has no option 'lrr'; did you mean 'lr'\? Its options: .*\blr\b"):
        build(name, make_task("bowl", {"n": 4}, 0), 0, {"lrr": 1})


def test_options_of_the_wrong_type_or_missing():
    task = make_task("bowl", {"n": 4}, 0)
    with pytest.raises(ValueError, match=r"^torch.SGD cannot be made with the options \{'lr': 'fast'\}"):
        build("torch.SGD", task, 0, {"lr": "fast"})
    with pytest.raises(ValueError, match=r"^lodo_frozen cannot be made with the options \{\}.*freeze_at"):
        build("lodo_frozen", task, 0, {})
    with pytest.raises(ValueError, match=r"^pytorch_optimizer.ranger21 cannot be made .*num_iterations"):
        build("pytorch_optimizer.ranger21", task, 0, {})


def test_bad_options_of_pytorch_optimizer_are_refused():
    with pytest.raises(ValueError, match="learning_rate"):
        build("pytorch_optimizer.lion", make_task("bowl", {"n": 4}, 0), 0, {"learning_rate": 0.1})


def step_three_times(name, task, **options):
    optimizer, losses = build(resolve(name), task, 0, options), []
    start = task.params[0].detach().clone()

    def closure():
        losses.append(task.evaluate(needs_graph(optimizer)))
        return losses[-1]

    for _ in range(3):
        task.draw()
        losses.clear()
        assert optimizer.step(closure) == losses[0]
        assert losses[0] > 0
    assert task.params[0].isfinite().all()
    assert not torch.equal(task.params[0], start)


def both():
    return Bowl(0, n=6), Rosenbrock(0)


OF_TORCH = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


@pytest.mark.parametrize("name", sorted({*OF_TORCH} - {"SparseAdam", "Muon"}))
def test_optimizers_of_torch(name):
    for task in both():
        step_three_times(f"torch.{name}", task)


@pytest.mark.skipif("Muon" not in OF_TORCH, reason="an older torch")
def test_muon_says_what_it_cannot_do():
    for task in both():
        with pytest.raises(ValueError, match="2D parameters"):
            build("torch.Muon", task, 0, {})


NAMES = """
    adabelief adabound adahessian adamp adan adanorm ademamix adopt amos apollo avagrad came dadaptadam diffgrad fromage
    gravity kron lamb laprop lion madgrad mars nero novograd padam prodigy qhadam schedulefreeadamw shampoo sgdp sm3
    soap sophiah srmm stableadamw swats tiger yogi
"""
OF_PYTORCH_OPTIMIZER = [name for name in NAMES.split() if name in pytorch_optimizer_names()]


def test_the_sample_is_broad():
    assert len(OF_PYTORCH_OPTIMIZER) >= 30
    named = {"adahessian", "sophiah", "soap", "lion", "kron", "schedulefreeadamw", "prodigy", "shampoo"}
    assert named <= {*OF_PYTORCH_OPTIMIZER}


@pytest.mark.parametrize("name", OF_PYTORCH_OPTIMIZER)
def test_optimizers_of_pytorch_optimizer(name):
    for task in both():
        step_three_times(f"pytorch_optimizer.{name}", task)


def test_a_closure_called_without_grad():
    step_three_times("pytorch_optimizer.alig", Rosenbrock(0))


def test_who_needs_a_graph():
    for name in OF_PYTORCH_OPTIMIZER:
        optimizer = build(f"pytorch_optimizer.{name}", Bowl(0, n=3), 0, {})
        assert needs_graph(optimizer) == (name in ("adahessian", "sophiah"))


def test_an_average_is_torchs_and_changes_nothing_about_training():
    plain, averaged = Bowl(1, n=6), Bowl(1, n=6)
    opt, judged = build("kron_lodo", plain, 0, {}), build("kron_lodo_averaged", averaged, 0, {})
    (x,), (y,) = plain.params, averaged.params

    def tenth(average, current, number):
        for a, now in zip(average, current, strict=True):
            a.lerp_(now, min(1.0, 10 / (float(number) + 1)))

    model = AveragedModel(torch.nn.ParameterList([x]), multi_avg_fn=tenth)
    for _ in range(30):
        for task, optimizer in ((plain, opt), (averaged, judged)):
            task.draw()
            optimizer.step(task.evaluate)
        model.update_parameters(torch.nn.ParameterList([x]))
    assert torch.equal(x, y)
    with evaluating(judged, averaged.params):
        average = y.detach().clone()
    torch.testing.assert_close(average, model.module[0].detach())
    assert not torch.equal(average, x)
    assert torch.equal(x, y), "put back"
    assert state_bytes(judged) == state_bytes(opt) + x.numel() * x.element_size()
    other = Bowl(1, n=6)
    resumed = build("kron_lodo_averaged", other, 0, {})
    resumed.load_state_dict(judged.state_dict())
    assert resumed.steps == 30
    with evaluating(resumed, other.params):
        assert torch.equal(other.params[0], average)
