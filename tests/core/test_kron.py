"""KronLODO against its equations, against the methods it contains, and in a user's hands."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

import lodo.engines.numba.kron
import lodo.kron_state
import lodo.kron_step
from kron_oracle import KronOracle
from lodo import LODO, KronLODO

SHAPES = [(5, 3), (5, 3), (4, 3, 2, 2), (1, 6), (7,), (7,), ()]


def drawn(shapes=SHAPES, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=rng, dtype=dtype)) for shape in shapes]


def push(params, rng):
    """Gradients of a noisy bowl, of another curvature along every axis."""
    for p in params:
        noise = torch.randn(p.shape, generator=rng, dtype=p.dtype)
        scale = torch.linspace(0.1, 2, p.numel(), dtype=p.dtype).reshape(p.shape)
        p.grad = scale * p.detach() + 0.3 * noise


def run(opt, params, steps, seed=1):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        push(params, rng)
        opt.step()


class Recorder:
    """Notes the arguments of a function and calls it."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.function(*arguments)


def apart(a, b):
    """The largest relative difference."""
    return max(float((x - y).detach().norm() / y.detach().norm().clamp(min=1e-300)) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": False},
        {"gains": False},
        {"gains": False, "gate": False},
        {"basis": "none"},
        {"max_dim": 4},
        {"refresh_every": 3, "betas": (0.9, 0.99), "meta_lr": 0.1, "gate_lr": 0.02},
        {"weight_decay": 0.1, "lr": 0.01},
        {"averaging": 0.0},
        {"averaging": 0.5, "betas": (0.5, 0.9), "gate_lr": 0.02},
        {"averaging": 0.9, "betas": (0.5, 0.8), "refresh_every": 2},  # soon every second gradient, a refresh every 16
        {"anneal": 0.0, "meta_lr": 0.2},
        {"anneal": math.inf, "meta_lr": 0.2},
        {"anneal": 3.0, "meta_lr": 0.2},
        {"lr": 1e-4, "meta_lr": 0.03},
        {"guard": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_it_follows_its_equations(options, backend):
    params = drawn()
    opt = KronLODO(params, backend=backend, **options)
    told = dict(options)
    oracle = KronOracle([p.detach() for p in params], kronecker=told.pop("basis", "") != "none", **told)
    rng = torch.Generator().manual_seed(1)
    for step in range(50):
        if step in (15, 30):  # as schedulers do
            opt.param_groups[0]["lr"] = oracle.lr = oracle.lr * {15: 1.5, 30: 0.3}[step]
        elif step in (40, 43):  # and where training is paused
            opt.param_groups[0]["lr"] = oracle.lr = 0.0 if step == 40 else 2e-3
        push(params, rng)
        if step == 20:
            for p in params[::2]:
                p.grad *= 1000
        if step in (10, 33, 34):  # as where a head has no part in a batch
            params[0].grad.zero_()
        oracle.step([p.grad for p in params])
        opt.step()
        assert apart(params, oracle.params) < 1e-10
    if options.get("gains", True):
        gains = [float(opt.state[p]["gain"]) for p in params]
        assert gains == pytest.approx([s["c"] for s in oracle.states], rel=1e-8, abs=1e-10)
        assert len({round(g, 6) for g in gains}) > 1


@pytest.mark.parametrize("rates", [(3e-5, 3e-3), (1e-6, 1e-4), (1e-3, 0.1), (0.01, 0.1)], ids=str)
def test_it_follows_its_equations_in_groups_of_other_rates(rates):
    params = drawn([(4, 3), (3, 5)])
    told = {"meta_lr": 0.3, "anneal": 20.0}
    opt = KronLODO([{"params": [p], "lr": lr} for p, lr in zip(params, rates, strict=True)], **told)
    oracles = [KronOracle([p.detach()], lr=lr, fastest=max(rates), **told) for p, lr in zip(params, rates, strict=True)]
    rng = torch.Generator().manual_seed(1)
    for _ in range(50):
        push(params, rng)
        for p, oracle in zip(params, oracles, strict=True):
            oracle.step([p.grad])
        opt.step()
        assert apart(params, [oracle.params[0] for oracle in oracles]) < 1e-10


def test_a_slow_group_stays_slow():
    """As layer-wise rates want: neither are its gains made up for, nor can they be what the fast group's can."""
    params, rates = drawn([(4, 3)] * 3), (3e-7, 3e-5, 3e-3)
    opt = KronLODO([{"params": [p], "lr": lr} for p, lr in zip(params, rates, strict=True)])
    for _ in range(800):
        for p in params:
            p.grad = torch.ones_like(p)  # every step wants to be longer
        opt.step()
    reached = [lr * float(opt.state[p]["gain"].exp()) for p, lr in zip(params, rates, strict=True)]
    assert reached[1] == pytest.approx(0.01 * reached[2])
    assert reached[0] == pytest.approx(1e-4 * reached[2])


@pytest.mark.parametrize("basis", ["kronecker", "none"])
@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_it_follows_its_equations_where_gradients_are_rare(backend, basis):
    """As in the rows of an embedding. There X / R and M / R come to their limits."""
    shapes = [(12, 3), (5,)]
    params = drawn(shapes)
    opt = KronLODO(params, backend=backend, basis=basis, averaging=0.9)
    oracle = KronOracle([p.detach() for p in params], kronecker=basis != "none", averaging=0.9)
    rng = torch.Generator().manual_seed(1)
    at_the_limit = 0
    for step in range(60):
        push(params, rng)
        params[0].grad[torch.arange(12) != step * 5 % 12] = 0
        oracle.step([p.grad for p in params])
        opt.step()
        assert apart(params, oracle.params) < 1e-10
        at_the_limit += int((opt.state[params[0]]["scaled_grad"].abs() > 0.999 / math.sqrt(0.05)).sum())
    assert at_the_limit


@pytest.mark.parametrize("basis", ["kronecker", "none"])
def test_rows_without_gradients_stay_where_they_are(basis):
    x = drawn([(8, 6)], dtype=torch.float32)
    opt = KronLODO(x, basis=basis, weight_decay=0.0)
    run(opt, x, 600)
    before = x[0].detach().clone()
    for _ in range(1200):
        x[0].grad = torch.zeros(8, 6)
        opt.step()
    assert float((x[0].detach() - before).abs().max()) < 1.0, "M is used up, but does not outlive V"


@pytest.mark.parametrize("basis", ["kronecker", "none"])
def test_an_embedding_of_rare_words_is_trained(basis):
    torch.manual_seed(0)
    words, often = 200, 1 / torch.arange(1.0, 201)
    follows = torch.randint(words, (words,))

    def trained(make):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Embedding(words, 8), torch.nn.Linear(8, words))
        opt = make(model.parameters())
        losses = []
        for _ in range(1500):
            i = torch.multinomial(often, 32, replacement=True)
            loss = torch.nn.functional.cross_entropy(model(i), follows[i])
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
        return sum(losses[-100:]) / 100, float(model[0].weight.detach().abs().max())

    loss, largest = trained(lambda params: KronLODO(params, basis=basis))
    rival, usual = trained(lambda params: torch.optim.AdamW(params, lr=3e-3))
    assert loss < rival
    assert largest < 5 * usual


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_a_very_long_dimension_has_no_basis(backend):
    shapes = [(2, 32), (2, 33), (33, 2), (1, 17), (2, 3, 11)]
    params = drawn(shapes)
    opt, oracle = KronLODO(params, backend=backend), KronOracle([p.detach() for p in params])
    rng = torch.Generator().manual_seed(1)
    for _ in range(25):
        push(params, rng)
        oracle.step([p.grad for p in params])
        opt.step()
    assert apart(params, oracle.params) < 1e-10
    bases = [[side for side in ("left", "right") if f"{side}_basis" in opt.state[p]] for p in params]
    assert bases == [["left", "right"], ["left"], ["right"], [], ["left"]]


def test_states_saved_when_long_dimensions_had_bases_go_on_with_them(monkeypatch):
    whole, halves = drawn([(2, 40)]), drawn([(2, 40)])
    with monkeypatch.context() as before:
        before.setattr(lodo.kron_state, "LOPSIDED", 1000)
        run(KronLODO(whole), whole, 20)
        old = KronLODO(halves)
        rng = torch.Generator().manual_seed(1)
        for _ in range(7):
            push(halves, rng)
            old.step()
    new = KronLODO(halves)
    new.load_state_dict(through_a_file(old.state_dict()))
    for _ in range(13):
        push(halves, rng)
        new.step()
    assert new.state[halves[0]]["right_basis"].shape == (40, 40)
    assert torch.equal(whole[0], halves[0])


def test_its_slopes_are_those_of_the_loss():
    """Finite differences of a real loss after a real step, in c and in w."""
    target = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    x = Parameter(torch.zeros(4, 3, dtype=torch.float64))

    def loss():
        return (x - target).pow(4).sum() + (x @ x.T).sum()

    opt = KronLODO([x], lr=0.01)

    def turn():
        opt.zero_grad()
        loss().backward()
        opt.step()

    for _ in range(5):
        turn()
    opt.state[x]["gate"].fill_(0.6)
    before, saved = x.detach().clone(), copy.deepcopy(opt.state_dict())

    def after(name, change):
        """The loss after a step in which c or w is ``change`` larger than it is learned to be."""
        with torch.no_grad():
            x.copy_(before)
        opt.load_state_dict(copy.deepcopy(saved))
        opt.param_groups[0]["meta_lr"] = opt.param_groups[0]["gate_lr"] = 0.0
        opt.param_groups[0]["anneal"] = 0.0
        opt.state[x][name] += change
        turn()
        return float(loss().detach())

    h = 1e-5
    for name in ("gain", "gate"):
        slope = (after(name, h) - after(name, -h)) / (2 * h)
        after(name, 0.0)
        opt.zero_grad()
        loss().backward()
        last = {k: v.clone() for k, v in opt.state[x].items()}
        opt.step()
        cosine = -(opt.state[x][f"{name}_exp_avg"] - 0.9 * last[f"{name}_exp_avg"]) / 0.1
        scale = 0.01 * last["gain"].exp() * x.grad.norm() * last["length"]
        assert float(-cosine * scale) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_without_bases_gains_and_gate_it_is_adam(weight_decay):
    ours, theirs = drawn(), drawn()
    options = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": weight_decay}
    run(KronLODO(ours, basis="none", gains=False, gate=False, averaging=0, guard=False, **options), ours, 50)
    run(torch.optim.AdamW(theirs, **options), theirs, 50)
    assert apart(ours, theirs) < 1e-12


def test_with_orthogonal_directions_and_without_gains_it_is_muon():
    shapes = [(6, 4), (4, 9)]
    ours, theirs = drawn(shapes, torch.float32), drawn(shapes, torch.float32)
    options = {"lr": 0.01, "weight_decay": 0.1}
    run(KronLODO(ours, basis="orthogonal", gains=False, gate=False, averaging=0, guard=False, **options), ours, 20)
    muon = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    run(muon, theirs, 20)
    start = drawn(shapes, torch.float32)
    moved = max(float((a - b).detach().norm()) for a, b in zip(theirs, start, strict=True))
    assert all(
        float((a - b).detach().norm()) < 0.03 * moved for a, b in zip(ours, theirs, strict=True)
    )  # theirs is in bfloat16


def test_orthogonal_directions_have_gains():
    params = drawn([(6, 4), (5,)])
    opt = KronLODO(params, basis="orthogonal")
    run(opt, params, 20)
    assert all("gate" not in opt.state[p] and float(opt.state[p]["gain"]) != 0 for p in params)
    assert "exp_avg_sq" not in opt.state[params[0]]
    assert "exp_avg_sq" in opt.state[params[1]]  # a vector takes Adam's direction


def test_stacks_change_nothing():
    """Alone in an optimizer or beside others of its shape, a parameter goes the same way."""
    together, alone = drawn(), drawn()
    run(KronLODO(together), together, 25)
    opts = [KronLODO([p]) for p in alone]
    rng = torch.Generator().manual_seed(1)
    for _ in range(25):
        push(alone, rng)
        for opt in opts:
            opt.step()
    assert apart(together, alone) < 1e-10


def gains_over(steps, gradient, **options):
    """The gain of a matrix after every step."""
    x = Parameter(torch.ones(4, 3, dtype=torch.float64))
    opt = KronLODO([x], **options)
    rng, gains = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        x.grad = gradient(torch.randn(4, 3, generator=rng, dtype=torch.float64))
        opt.step()
        gains.append(float(opt.state[x]["gain"].exp()))
    return gains


def test_gains_do_not_fall_asleep():
    """Alternating gradients want a gain of zero: it falls as the bound allows, and no faster."""
    sign = [1.0]

    def alternating(noise):
        sign[0] = -sign[0]
        return sign[0] * torch.ones_like(noise)

    options = {"gate": False, "betas": (0.0, 0.95)}
    gains = gains_over(600, alternating, anneal=100.0, **options)
    assert gains[-1] == pytest.approx(1 / (1 + 599 / 100), rel=1e-6)
    assert gains_over(600, alternating, anneal=math.inf, **options)[-1] == 1.0
    assert gains_over(600, alternating, anneal=0.0, **options)[-1] < 0.01


def test_gains_do_not_rise_without_end():
    """Gradients that never change want an infinite gain."""
    gains = gains_over(1500, torch.ones_like, lr=3e-3)
    assert max(gains) < 10.001
    assert gains[-1] == pytest.approx(10 / (1 + 1499 / 1500), rel=0.01)


def test_a_too_large_lr_does_no_harm():
    """The first steps are no longer than 3e-3, whatever lr is; a user's large lr bounds the later ones."""
    large = [0.1 * gain for gain in gains_over(1500, torch.ones_like, lr=0.1, meta_lr=0.05)]
    assert large[0] == pytest.approx(3e-3)
    assert large[-1] == pytest.approx(0.1 / (1 + 1499 / 1500), rel=0.01)
    assert gains_over(1, torch.ones_like, lr=1e-3) == [1.0]


def test_a_too_small_lr_is_soon_made_up_for():
    """Steps that help become ten times longer every 25 steps, up to 3e-3, and more slowly from there."""
    rates = [1e-5 * gain for gain in gains_over(120, torch.ones_like, lr=1e-5)]
    there = next(i for i, rate in enumerate(rates) if rate >= 3e-3)
    assert there == pytest.approx(math.log(300) / 0.1, abs=4)
    assert rates[there + 20] / rates[there] == pytest.approx(math.exp(0.2), rel=0.02)
    slow = gains_over(120, lambda noise: noise, lr=3e-3)  # gains that have fallen are not behind
    assert max(abs(math.log(b / a)) for a, b in pairwise(slow)) < 0.02


def test_a_warm_up_does_not_multiply_the_gains():
    """What a gain has made of the small rates of a warm-up is the rate, until lr itself is larger."""
    x = Parameter(torch.ones(4, 3, dtype=torch.float64))
    opt = KronLODO([x])
    rates = []
    for t in range(1, 101):
        opt.param_groups[0]["lr"] = 1e-2 * t / 100
        x.grad = torch.ones_like(x)
        opt.step()
        rates.append(opt.param_groups[0]["lr"] * float(opt.state[x]["gain"].exp()))
    assert max(b / a for a, b in pairwise(rates[40:])) < 1.03
    assert 1e-2 <= rates[-1] < 1.5e-2


@pytest.mark.parametrize("basis", ["kronecker", "orthogonal", "none"])
def test_an_outlier_does_no_lasting_harm(basis):
    """After a gradient that is a thousand times too long, steps lead down as they did before."""

    def last_losses(outlier, **options):
        rng = torch.Generator().manual_seed(3)
        A = torch.randn(12, 12, generator=rng, dtype=torch.float64)
        W = Parameter(torch.zeros(12, 6, dtype=torch.float64))
        opt = KronLODO([W], lr=0.01, basis=basis, **options)
        losses = []
        for step in range(400):
            x = torch.randn(12, 32, generator=rng, dtype=torch.float64)
            noise = torch.randn(6, 32, generator=rng, dtype=torch.float64)
            loss = (W.T @ x - (A @ x)[:6] - noise).square().mean()
            opt.zero_grad()
            loss.backward()
            if step == 300:
                W.grad *= -outlier
            opt.step()
            losses.append(loss.item())
        return sum(losses[301:])

    undisturbed = last_losses(-1.0)
    assert last_losses(1000.0) < 1.03 * undisturbed
    assert last_losses(1000.0, guard=False) > 1.1 * undisturbed


def test_the_average_reaches_back_over_a_part_of_the_run():
    """M^ is the mean of the gradients with weights that sum to 1; after t steps the newest has 1 / (averaging t)."""
    x = Parameter(torch.zeros(1, dtype=torch.float64))
    opt = KronLODO([x], averaging=0.5, betas=(0.75, 0.9), basis="none")
    seen = []
    for t in range(1, 60):
        x.grad = torch.full_like(x, math.sin(t))
        opt.step()
        newest = 1 / max(4, 0.5 * t)
        seen = [weight * (1 - newest) for weight in seen] + [newest]
        mean = sum(weight * math.sin(i) for i, weight in enumerate(seen, 1)) / sum(seen)
        state = opt.state[x]
        assert float(state["exp_avg"]) / (1 - float(state["mean_decay"])) == pytest.approx(mean, rel=1e-10)


def test_a_schedule_stops_the_annealing():
    """While lr falls, step by step or epoch by epoch, c anneals no further; at a constant lr it does, even if low."""

    def last_gain(fall, at=range(400)):
        x = Parameter(torch.ones(4, 3, dtype=torch.float64))
        opt = KronLODO([x], lr=3e-3, anneal=10.0, betas=(0.0, 0.95), averaging=0, gate=False)
        for t in range(400):
            x.grad = torch.ones_like(x) * (-1) ** t
            opt.param_groups[0]["lr"] *= fall if t in at else 1.0
            opt.step()
        return float(opt.state[x]["gain"]) - float(opt.state[x]["gain_highest"])

    annealed = -math.log(1 + 399 / 10)
    assert last_gain(1.0) == pytest.approx(annealed, rel=0.01)
    assert last_gain(0.9999) == 0
    assert last_gain(0.9999, at=range(5, 400, 10)) > -math.log(1 + 100 / 10)  # some early steps are not counted
    assert last_gain(0.9, at=[100]) == pytest.approx(annealed - math.log(0.9), rel=0.02)  # a plateau


def test_a_schedule_takes_the_place_of_the_annealing():
    """What lr falls, c need not: their product falls as the slower of the two allows."""
    x = Parameter(torch.ones(4, 3, dtype=torch.float64))
    opt = KronLODO([x], lr=3e-3, anneal=10.0, betas=(0.0, 0.95), gate=False)
    for t in range(400):
        x.grad = torch.ones_like(x) * (-1) ** t
        opt.step()
    before = float(opt.state[x]["gain"])
    opt.param_groups[0]["lr"] = 3e-5  # far below what the annealing has come to
    x.grad = torch.ones_like(x)
    opt.step()
    state = opt.state[x]
    assert float(state["gain"]) == float(state["gain_highest"]) > before


@pytest.mark.parametrize("threads", [1, 2])
def test_pieces_and_threads_change_nothing(threads, monkeypatch):
    """Large matrices are cut into pieces, which threads share."""
    monkeypatch.setattr(lodo.engines.numba.kron, "_PIECE", 7)
    monkeypatch.setattr(lodo.engines.numba.kron, "_PARALLEL_FROM", 1)
    fused, plain = drawn(), drawn()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run(KronLODO(fused, backend="numba"), fused, 15)
    finally:
        torch.set_num_threads(before)
    run(KronLODO(plain, backend="reference"), plain, 15)
    assert apart(fused, plain) < 1e-10


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"state_dtype": "bfloat16"}], ids=str)
def test_changes_of_large_matrices_are_added_where_these_lie(options, monkeypatch):
    shapes = [(5, 3), (5, 3), (4, 3, 2, 2), (2, 40), (40, 2), (1, 40), (7,), (3, 5)]
    large, small = drawn(shapes), drawn(shapes)
    large[-1].data = large[-1].data.T.contiguous().T  # which cannot be
    run(KronLODO(small, **options), small, 12)
    monkeypatch.setattr(lodo.kron_step, "ADDED_FROM", 1)
    monkeypatch.setattr(torch, "_foreach_add_", added := Recorder(torch._foreach_add_))
    run(KronLODO(large, **options), large, 12)
    assert apart(large, small) < 1e-10
    assert {tuple(W.shape) for weights, _ in added.calls for W in weights} == {(1, 40), (7,), (3, 5)}
    alone, same = drawn([(5, 3)]), drawn([(5, 3)])
    run(KronLODO(alone, **options), alone, 12)
    monkeypatch.undo()
    run(KronLODO(same, **options), same, 12)
    assert apart(alone, same) < 1e-10


@pytest.mark.parametrize("shape", [(9, 6), (3, 11)])
def test_half_a_covariance_is_a_whole_one(shape, monkeypatch):
    """Of large covariances, one triangle is computed and the other copied."""
    halves, whole = drawn([shape, shape]), drawn([shape, shape])
    opt, plain = KronLODO(halves), KronLODO(whole)
    run(plain, whole, 12)
    monkeypatch.setattr(lodo.kron_step, "HALVED_FROM", 5)
    run(opt, halves, 12)
    assert apart(halves, whole) < 1e-10
    A = opt.state[halves[0]]["left_covariance" if shape[0] > 5 else "right_covariance"]
    assert torch.equal(A[-2:, :2], A[:2, -2:].mT)


# ---------------------------------------------------------------- short states


@pytest.mark.parametrize("state_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"betas": (0.9, 0.999)}, {"gate": False}, {"gains": False}], ids=str)
def test_short_states_are_the_same_on_both_backends(options, state_dtype):
    """Rounding to 8 or 16 bits happens at the same places, but for a few numbers that lie between two others."""
    fused, plain = drawn(dtype=torch.float32), drawn(dtype=torch.float32)
    options = {**options, "state_dtype": state_dtype, "refresh_every": 4}
    one, two = KronLODO(fused, backend="numba", **options), KronLODO(plain, backend="reference", **options)
    run(one, fused, 1)
    run(two, plain, 1)
    for a, b in zip(fused, plain, strict=True):
        for name, value in one.state[a].items():
            other = two.state[b][name]
            assert value.dtype == other.dtype
            if name == "scaled_grad":
                assert int((value.int() - other.int()).abs().max()) <= 1
            elif not name.endswith("basis"):  # whose columns may have another sign
                size = float(other.float().abs().max())
                assert torch.allclose(value.float().abs(), other.float().abs(), rtol=1e-2, atol=1e-5 * size)
    run(one, fused, 30, seed=2)
    run(two, plain, 30, seed=2)
    assert apart(fused, plain) < (1e-3 if state_dtype is None else 3e-2)


def test_scaled_gradients_in_8_bits_hardly_change_what_is_learned():
    """The same run in double precision, where they are exact."""
    short, exact = drawn([(24, 16), (32,)], torch.float32), drawn([(24, 16), (32,)])
    with torch.no_grad():
        for a, b in zip(short, exact, strict=True):
            b.copy_(a)
    options = {"meta_lr": 0.05, "gate_lr": 0.02, "anneal": 0.0}
    one, two = KronLODO(short, **options), KronLODO(exact, **options)
    rng = torch.Generator().manual_seed(1)
    for step in range(40):
        for a, b in zip(short, exact, strict=True):
            noise = torch.randn(b.shape, generator=rng, dtype=b.dtype)
            b.grad = b.detach() + 0.3 * noise
            a.grad = b.grad.float()
        one.step()
        two.step()
        if step == 0:
            for state in (*one.state.values(), *two.state.values()):
                state["gate"].fill_(0.5)
    for a, b in zip(short, exact, strict=True):
        assert one.state[a]["scaled_grad"].dtype == torch.int8
        assert two.state[b]["scaled_grad"].dtype == torch.float64
        assert abs(float(two.state[b]["gate"]) - 0.5) > 0.1
        for name in ("gain", "gate"):  # which can move by 2 and by 0.8; the first slope of the gate is but rounding
            assert float(one.state[a][name]) == pytest.approx(float(two.state[b][name]), abs=0.06)


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_scaled_gradients_fit_into_8_bits(beta2, backend):
    """The largest that there can be: a gradient after none, which is 1 / sqrt(1 - beta2) of its own root in V."""
    x = Parameter(torch.zeros(1, 3))
    opt = KronLODO([x], betas=(0.9, beta2), basis="none", eps=1e-30, backend=backend)
    x.grad = torch.zeros(1, 3)
    opt.step()
    opt.state[x]["step"].fill_(8000)  # as after so many gradients of zero
    opt.state[x]["square_decay"].fill_(0)
    x.grad = torch.tensor([[1.0, -1.0, 0.0]])
    opt.step()
    assert opt.state[x]["scaled_grad"].tolist() == [[127, -127, 0]]
    x.grad = torch.full((1, 3), 1e-25)  # its square is 0
    opt.step()
    assert int(opt.state[x]["scaled_grad"][0, 2]) == 127  # and not an overflow


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_averages_in_bfloat16_do_not_stand_still(backend):
    """With a decay of 0.999, every change of V is smaller than bfloat16 can resolve."""
    x = Parameter(torch.zeros(40, 50))
    opt = KronLODO([x], betas=(0.9, 0.999), basis="none", state_dtype="bfloat16", backend=backend)
    for scale in (1.0, 0.0):
        for _ in range(300):
            x.grad = torch.full((40, 50), scale)
            opt.step()
    assert float(opt.state[x]["exp_avg_sq"].float().mean()) == pytest.approx((1 - 0.999**300) * 0.999**300, rel=0.01)


def test_a_model_that_is_too_wide_for_bases_is_pointed_out():
    wide = [Parameter(torch.empty(shape, device="meta")) for shape in ((1536, 2048), (2048, 2048), (64, 2048), (2048,))]
    with pytest.warns(UserWarning, match=r"2 of 3 matrices of group 0 have no bases.* Pass max_dim=2048") as caught:
        KronLODO(wide)
    assert [warning.filename for warning in caught] == [__file__]
    for options in ({"max_dim": 2048}, {"max_dim": 1000}, {"basis": "none"}):
        KronLODO(wide, **options)
    KronLODO(wide[2:])


def test_nothing_is_gained_while_lr_is_zero():
    """As in fine-tuning in two phases, where a schedule keeps the rate of the body at 0 for a while."""
    (x,) = params = drawn([(4, 3)])
    opt = KronLODO(params, lr=0.0)
    before = x.detach().clone()
    for _ in range(200):
        x.grad = torch.ones_like(x)  # of which one would gain much
        opt.step()
    assert torch.equal(x, before)
    opt.param_groups[0]["lr"] = 3e-3
    opt.step()
    assert opt.diagnostics()["group0/parameter0/gain"] == pytest.approx(1.0, abs=0.02)
    assert float((x.detach() - before).abs().max()) < 4e-3


def test_gains_and_gates_stay_while_lr_is_zero():
    (x,) = params = drawn([(4, 3)])
    opt = KronLODO(params)
    run(opt, params, 50)
    opt.param_groups[0]["lr"] = 0.0
    run(opt, params, 1, seed=2)  # which still learns from the last step that moved
    before = opt.diagnostics()
    for _ in range(200):
        x.grad = torch.ones_like(x)
        opt.step()
    after = opt.diagnostics()
    for name in ("gain", "gate"):
        assert after[f"group0/parameter0/{name}"] == before[f"group0/parameter0/{name}"]


@pytest.mark.parametrize("apart", [20, 50])
@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_gradients_that_are_mostly_zero_are_not_taken_for_outliers(apart, backend):
    """As of the heads of several tasks, of which a batch has one."""
    target = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    W = Parameter(torch.zeros(8, 8))
    opt = KronLODO([W], weight_decay=0.0, backend=backend)
    for step in range(3000):
        W.grad = (W.detach() - target) * (step % apart == 0)
        opt.step()
    assert float((W.detach() - target).square().mean()) < 0.1


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize(
    "reset",
    [
        lambda opt, p: opt.state.clear(),
        lambda opt, p: opt.state.pop(p),
        lambda opt, p: opt.state.update({p: {}}),
        lambda opt, p: setattr(opt, "state", defaultdict(dict)),
    ],
    ids=["clear", "pop", "empty", "new"],
)
def test_a_state_can_be_reset(reset, backend):
    params = drawn([(4, 3), (4, 3)])
    opt = KronLODO(params, backend=backend)
    run(opt, params, 5)
    reset(opt, params[0])
    run(opt, params, 2)
    assert int(opt.state[params[0]]["step"]) == 2
    assert opt.state_dict()["state"].keys() == {0, 1}


def test_a_state_may_be_moved_into_shared_memory():
    """As happens when it is sent to another process."""
    runs = []
    for share in (True, False):
        params = drawn([(4, 3), (4, 3), (5,)], dtype=torch.float32)
        opt = KronLODO(params)
        run(opt, params, 5)
        if share:
            for p in params:
                for x in opt.state[p].values():
                    x.share_memory_()
        run(opt, params, 30, seed=2)
        runs.append(params)
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("basis", ["kronecker", "orthogonal"])
@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_a_step_within_autocast_is_exact(dtype, basis, backend):
    runs = []
    for enabled in (True, False):
        params = drawn([(4, 3), (40, 2), (5,)], dtype=torch.float32)
        opt = KronLODO(params, basis=basis, backend=backend)
        with torch.autocast("cpu", dtype, enabled=enabled):
            run(opt, params, 25)
            assert torch.is_autocast_enabled("cpu") == enabled
        runs.append(params)
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
@pytest.mark.parametrize("state_dtype", [None, "bfloat16"])
def test_a_model_may_be_cast_between_steps(before, after, state_dtype):
    model = torch.nn.Linear(4, 3, dtype=before)
    opt = KronLODO(model.parameters(), state_dtype=state_dtype)
    run(opt, list(model.parameters()), 12)
    gain = opt.diagnostics()["group0/parameter0/gain"]
    model.to(after)
    run(opt, list(model.parameters()), 1)
    assert opt.diagnostics()["group0/parameter0/gain"] == pytest.approx(gain, rel=0.05)
    for p in model.parameters():
        assert p.dtype == opt.state[p]["step"].dtype == after
        assert int(opt.state[p]["step"]) == 13
    model.bias.requires_grad_(False)
    run(opt, [model.weight], 3)


def test_conjugate_views_are_refused_by_name():
    z = Parameter(torch.ones(3, dtype=torch.complex64).conj())
    for make in (KronLODO, LODO):
        with pytest.raises(ValueError, match=r"parameter 'z' .* is a view of conjugate or negative numbers"):
            make([("z", z)])


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf])
def test_a_bad_rate_in_a_tensor_is_refused_before_anything_changes(bad):
    (x,) = params = drawn([(4, 3)])
    rate = torch.tensor(1e-3)
    opt = KronLODO(params, lr=rate)
    run(opt, params, 2)
    before = x.detach().clone()
    rate.fill_(bad)
    with pytest.raises(ValueError, match="lr of group 0 must be a finite number"):
        run(opt, params, 1)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("name", "other"), [("gains", False), ("gate", False), ("basis", "none"), ("max_dim", 2),
                                         ("guard", False), ("state_dtype", "bfloat16")])  # fmt: skip
def test_what_a_state_is_made_for_cannot_be_changed_under_it(name, other):
    params = drawn([(4, 3)])
    opt = KronLODO(params)
    opt.param_groups[0]["max_dim"] = 100  # before the first step everything can
    run(opt, params, 2)
    before, state = params[0].detach().clone(), opt.state_dict()
    was = opt.param_groups[0][name]
    opt.param_groups[0][name] = other
    with pytest.raises(ValueError, match=f"{name} of group 0 must stay {was!r}, which its state is made for, got"):
        run(opt, params, 1)
    assert torch.equal(params[0], before)
    opt.param_groups[0][name] = was
    run(opt, params, 1)
    KronLODO(drawn([(4, 3)]), max_dim=100).load_state_dict(state)


def test_groups_of_another_optimizer_begin_anew():
    params = drawn([(4, 3), (5,)])
    opt = KronLODO(params, betas=(0.9, 0.9))
    run(opt, params, 7)
    for other in (KronLODO(opt.param_groups), KronLODO(params, **opt.defaults)):
        (group,) = other.param_groups
        assert (group["steps"], group["peak_lr"], group["betas"]) == (0, 0.0, (0.9, 0.9))
    assert opt.param_groups[0]["steps"] == 7


def test_groups_may_be_assigned():
    """As Lightning's callbacks for fine-tuning do."""
    params = drawn([(4, 3), (5,)])
    opt = KronLODO(params[:1])
    run(opt, params[:1], 2)
    opt.param_groups = [opt.param_groups[0], {**opt.param_groups[0], "params": params[1:], "steps": 0}]
    run(opt, params, 2)
    assert [int(opt.state[p]["step"]) for p in params] == [4, 2]


def test_others_may_put_things_beside_the_state():
    params = drawn([(4, 3), (4, 3)])
    opt = KronLODO(params)
    opt.state[params[1]]["first"] = 2
    run(opt, params, 2)
    opt.state[params[0]]["count"] = 3
    run(opt, params, 2)
    run(opt, params[:1], 1)
    assert (opt.state[params[0]]["count"], opt.state[params[1]]["first"]) == (3, 2)


def test_a_gradient_that_becomes_sparse_is_named():
    W = Parameter(torch.ones(4, 3))
    opt = KronLODO([("table", W)])
    W.grad = torch.ones(4, 3)
    opt.step()
    W.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(RuntimeError, match=r"sparse gradients are not supported, but parameter 'table' .* has one"):
        opt.step()


def test_states_of_frozen_layers_do_not_keep_stacks_alive():
    params = drawn([(16, 16)] * 8, dtype=torch.float32)
    opt = KronLODO(params)
    for frozen in range(8):
        for p in params[:frozen]:
            p.grad = None
        for p in params[frozen:]:
            p.grad = torch.ones_like(p)
        opt.step()
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for p in params for x in opt.state[p].values()
    }
    used = sum(x.nbytes for p in params for x in opt.state[p].values())
    assert sum(storages.values()) < 1.1 * used


def test_a_lazy_module_can_be_trained():
    model = torch.nn.LazyLinear(3)
    opt = KronLODO(model.parameters())
    assert opt.memory_estimate().total == 0
    assert "KronLODO" in repr(opt)
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    assert "left_basis" in opt.state[model.weight]


def test_a_warning_that_is_an_error_leaves_a_whole_optimizer():
    opt = KronLODO(drawn([(3, 2)]))
    wide = Parameter(torch.empty(1100, 1100, device="meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="max_dim"):
            opt.add_param_group({"params": [wide]})
    opt.param_groups[0]["params"][0].grad = torch.ones(3, 2, dtype=torch.float64)
    opt.step()


def test_rates_of_every_form_that_torch_takes():
    rates = [3e-3, torch.tensor([3e-3], dtype=torch.float64), torch.tensor(3e-3, dtype=torch.float64), np.float64(3e-3)]
    runs = [drawn() for _ in rates]
    for params, lr in zip(runs, rates, strict=True):
        opt = KronLODO(params, lr=lr)
        run(opt, params, 3)
        assert apart(params, runs[0]) < 1e-12
        opt.param_groups[0]["lr"] = 1e-3
        assert through_a_file(opt.state_dict())["param_groups"][0]["peak_lr"] == pytest.approx(3e-3)


def test_the_default_device_does_not_matter():
    params, same = drawn(dtype=torch.float32), drawn(dtype=torch.float32)
    opt = KronLODO(params)
    run(opt, params, 2)
    run(KronLODO(same), same, 2)
    try:
        torch.set_default_device("meta")
        opt.step()
    finally:
        torch.set_default_device(None)


def test_a_gradient_that_is_too_large_is_named():
    small, large = Parameter(torch.ones(2)), Parameter(torch.ones(2, 2))
    opt = KronLODO([("small", small), ("large", large)])
    small.grad, large.grad = torch.ones(2), torch.full((2, 2), 1e30)
    with pytest.raises(
        FloatingPointError, match=r"gradient of parameter 'large' .*is too large: its norm is 2e\+30; nothing was"
    ):
        opt.step()


def test_a_short_state_is_short():
    params = drawn(dtype=torch.float32)
    opt = KronLODO(params, state_dtype=torch.bfloat16)
    run(opt, params, 12)
    dtypes = {name: value.dtype for p in params for name, value in opt.state[p].items()}
    assert {name: dtype for name, dtype in dtypes.items() if dtype.itemsize == 2} == {
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "left_basis": torch.float16,
        "right_basis": torch.float16,
    }
    assert all(bool(p.isfinite().all()) for p in params)
    assert "memory: 69.7 kB (17.0 bytes a weight)" in repr(
        KronLODO([Parameter(torch.zeros(64, 64))], state_dtype="bfloat16")
    )


def test_states_of_other_precision_can_be_loaded():
    """As when a model trained in double precision goes on in single."""
    exact, short = drawn(), drawn(dtype=torch.float32)
    one, two = KronLODO(exact), KronLODO(short)
    run(one, exact, 5)
    two.load_state_dict(one.state_dict())
    for a, b in zip(exact, short, strict=True):
        U, found = one.state[a]["scaled_grad"], two.state[b]["scaled_grad"]
        assert found.dtype == torch.int8
        assert torch.allclose(found.double() * 20**0.5 / 127, U, atol=0.5 * 20**0.5 / 127 + 1e-6)
    one.load_state_dict(two.state_dict())
    assert one.state[exact[0]]["scaled_grad"].dtype == torch.float64
    run(one, exact, 5)


def test_states_saved_before_there_were_short_ones_can_be_loaded():
    params = drawn(dtype=torch.float32)
    opt = KronLODO(params)
    run(opt, params, 3)
    saved = copy.deepcopy(opt.state_dict())
    del saved["param_groups"][0]["state_dtype"]
    for state in saved["state"].values():
        state["scaled_grad"] = state["scaled_grad"].float() * 20**0.5 / 127
    resumed = KronLODO(params)
    resumed.load_state_dict(saved)
    for p in params:
        assert torch.equal(resumed.state[p]["scaled_grad"], opt.state[p]["scaled_grad"])
    run(resumed, params, 1)


# ---------------------------------------------------------------- resuming


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float64, "bfloat16")],
)
@pytest.mark.parametrize("basis", ["kronecker", "orthogonal"])
@pytest.mark.parametrize("first", range(1, 8))
def test_resume_is_bit_for_bit_from_every_step_of_the_refresh_cycle(first, basis, dtype, state_dtype):
    whole, halves = drawn(dtype=dtype), drawn(dtype=dtype)
    options = {"refresh_every": 4, "basis": basis, "state_dtype": state_dtype}
    one, two = KronLODO(whole, **options), KronLODO(halves, **options)
    rng, again = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(12):
        push(whole, rng)
        one.step()
    for step in range(12):
        if step == first:
            resumed = KronLODO(halves, lr=1.0, **options)
            resumed.load_state_dict(through_a_file(two.state_dict()))
            two = resumed
        push(halves, again)
        two.step()
    for a, b in zip(whole, halves, strict=True):
        assert torch.equal(a, b)
        assert one.state[a].keys() == two.state[b].keys()
        assert all(torch.equal(one.state[a][k], two.state[b][k]) for k in one.state[a])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_go_on_as_the_original(copied):
    params = drawn()
    opt = KronLODO(params, nonfinite="skip")
    run(opt, params, 7)
    other = copied(opt)
    twins = [p for group in other.param_groups for p in group["params"]]
    run(opt, params, 7, seed=2)
    run(other, twins, 7, seed=2)
    assert other.nonfinite == "skip"
    assert all(map(torch.equal, params, twins))


def test_a_saved_state_is_not_changed_by_later_steps_of_the_one_that_loaded_it():
    params = drawn()
    opt = KronLODO(params)
    run(opt, params, 3)
    saved = copy.deepcopy(opt.state_dict())
    kept = copy.deepcopy(saved)
    opt.load_state_dict(saved)
    run(opt, params, 3)
    for key, state in kept["state"].items():
        assert all(torch.equal(saved["state"][key][name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda s: s["state"][0].pop("exp_avg"), r"parameter 0 of group 0, shape \(5, 3\), has exp_avg of shape None"),
        (lambda s: s["state"][0].update(exp_avg=torch.zeros(2)), r"exp_avg of shape \(2,\), but \(5, 3\) is needed"),
        (lambda s: s["state"][0]["exp_avg"].fill_(math.nan), "exp_avg that are not finite"),
        (lambda s: s["param_groups"][0].update(gate=False), "gate = False, ours is True"),
        (lambda s: s["param_groups"][0].update(state_dtype="bfloat16"), "state_dtype = 'bfloat16', ours is None"),
        (lambda s: s["param_groups"][0]["params"].pop(), "has 6 parameters, ours has 7"),
        (lambda s: s["param_groups"][0].pop("basis"), "must be one of KronLODO, got that of another optimizer"),
        (lambda s: s["param_groups"].pop(), "has 0 parameter groups, this optimizer has 1"),
    ],
)
def test_damaged_states_are_refused_before_anything_changes(damage, says):
    params = drawn()
    opt = KronLODO(params)
    run(opt, params, 3)
    before = copy.deepcopy(opt.state_dict())
    bad = copy.deepcopy(before)
    damage(bad)
    with pytest.raises(ValueError, match=says):
        opt.load_state_dict(bad)
    after = opt.state_dict()
    for key, state in before["state"].items():
        assert all(torch.equal(after["state"][key][name], value) for name, value in state.items())


# ---------------------------------------------------------------- hostile gradients


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_gradients_that_cannot_be_used_change_nothing(bad, nonfinite):
    params = drawn(dtype=torch.float32)
    opt = KronLODO(params, nonfinite=nonfinite)
    run(opt, params, 4)
    twins, twin = copy.deepcopy((params, opt))
    twins = [p for group in twin.param_groups for p in group["params"]]
    push(params, torch.Generator().manual_seed(9))
    params[2].grad.view(-1)[3] = bad
    if nonfinite == "raise":
        what = "is not finite" if not math.isfinite(bad) else "too large"
        with pytest.raises(FloatingPointError, match=what):
            opt.step()
    else:
        opt.step()
        assert opt.skipped_steps == 1
    run(opt, params, 4, seed=3)
    run(twin, twins, 4, seed=3)
    assert all(map(torch.equal, params, twins))


def test_many_skipped_steps_are_worth_a_warning():
    x = Parameter(torch.ones(2, 2))
    opt = KronLODO([x], nonfinite="skip")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(25):
            x.grad = torch.full((2, 2), math.nan)
            opt.step()
    assert len(caught) == 1
    assert "has skipped 20 steps in a row" in str(caught[0].message)
    assert opt.skipped_steps == 25


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["zero", "row", "column", "repeated", "noise", "one"]), min_size=1, max_size=12),
    exponents=st.lists(st.floats(-30, 17), min_size=12, max_size=12),
    shape=st.sampled_from([(1, 1), (1, 5), (5, 1), (2, 3), (6, 6), (8, 3)]),
    seed=st.integers(0, 2**31),
)
def test_no_covariance_breaks_a_basis(kinds, exponents, shape, seed):
    rng = torch.Generator().manual_seed(seed)
    x = Parameter(torch.randn(shape, generator=rng))
    opt = KronLODO([x], refresh_every=2)
    for kind, exponent in zip(kinds, exponents, strict=False):
        G = torch.randn(shape, generator=rng)
        mask = torch.zeros(shape)
        if kind == "row":
            mask[0] = 1
        elif kind == "column":
            mask[:, 0] = 1
        elif kind == "one":
            mask[0, 0] = 1
        elif kind != "zero":
            mask[:] = 1
        G = G[:1].expand(shape) if kind == "repeated" else G
        x.grad = (G * mask * 10**exponent).contiguous()
        opt.step()
        state = opt.state[x]
        assert all(bool(value.isfinite().all()) for value in (x, *state.values()))
        for side in ("left", "right"):
            if f"{side}_basis" in state:
                P = state[f"{side}_basis"]
                assert torch.allclose(P.mT @ P, torch.eye(len(P)), atol=1e-5)


# ---------------------------------------------------------------- all kinds of parameters


def test_complex_parameters_are_pairs_of_reals():
    rng = torch.Generator().manual_seed(0)
    z = Parameter(torch.randn(3, 4, dtype=torch.complex128, generator=rng))
    x = Parameter(torch.view_as_real(z.detach()).clone())
    one, two = KronLODO([z]), KronLODO([x])
    for _ in range(15):
        g = torch.randn(3, 4, dtype=torch.complex128, generator=rng)
        z.grad, x.grad = g, torch.view_as_real(g)
        one.step()
        two.step()
    assert torch.equal(torch.view_as_real(z.detach()), x.detach())


def test_memory_formats_change_nothing():
    plain, last = (Parameter(torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))) for _ in range(2))
    last.data = last.data.to(memory_format=torch.channels_last)
    gaps = Parameter(torch.stack([plain.detach(), plain.detach()], dim=-1)[..., 0])
    for p in (plain, last, gaps):
        opt = KronLODO([p])
        rng = torch.Generator().manual_seed(1)
        for _ in range(12):
            p.grad = torch.randn(p.shape, generator=rng)
            if p is last:
                p.grad = p.grad.to(memory_format=torch.channels_last)
            opt.step()
    assert torch.equal(plain, last)
    assert torch.equal(plain, gaps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_of_half_precision_parameters_are_single(dtype):
    params = drawn(dtype=dtype)
    opt = KronLODO(params)
    run(opt, params, 12)
    assert all(p.dtype == dtype and bool(p.isfinite().all()) for p in params)
    dtypes = {name: value.dtype for p in params for name, value in opt.state[p].items()}
    assert dtypes.pop("scaled_grad") == torch.int8
    assert set(dtypes.values()) == {torch.float32}


def test_parameters_without_a_gradient_wait():
    params = drawn([(3, 3), (3, 3), (4,)])
    opt = KronLODO(params)
    run(opt, params, 3)
    rng = torch.Generator().manual_seed(4)
    push(params, rng)
    before = params[1].detach().clone()
    params[1].grad = None
    state = {k: v.clone() for k, v in opt.state[params[1]].items()}
    opt.step()
    assert torch.equal(params[1], before)
    assert all(torch.equal(opt.state[params[1]][k], v) for k, v in state.items())
    run(opt, params, 3)
    assert [float(opt.state[p]["step"]) for p in params] == [7.0, 6.0, 7.0]


def test_a_layer_may_thaw_later_and_groups_may_come_later():
    params = drawn([(3, 3), (3, 3), (4,), (2, 2)])
    opt = KronLODO(params[:2])
    params[1].requires_grad_(False)
    run(opt, params[:1], 5)
    assert params[1] not in opt.state
    params[1].requires_grad_(True)
    opt.add_param_group({"params": params[2:], "lr": 0.1, "basis": "none", "gate": False})
    run(opt, params, 5)
    assert float(opt.state[params[0]]["step"]) == 10
    assert float(opt.state[params[1]]["step"]) == float(opt.state[params[2]]["step"]) == 5
    assert "left_basis" not in opt.state[params[3]]
    assert "gate" not in opt.state[params[3]]


def test_empty_parameters_and_empty_steps():
    empty, x = Parameter(torch.zeros(0, 3)), Parameter(torch.ones(2, 2))
    opt = KronLODO([empty, x])
    opt.step()
    empty.grad, x.grad = torch.zeros(0, 3), torch.ones(2, 2)
    opt.step()
    assert float(x.detach().mean()) < 1


def test_a_group_can_be_left_to_adamw():
    """As users of Muon do with embeddings and heads."""
    ours, theirs = drawn([(8, 4), (4, 4)]), drawn([(8, 4), (4, 4)])
    adamw = {"basis": "none", "gains": False, "gate": False, "betas": (0.9, 0.999), "lr": 1e-3, "weight_decay": 0.01}
    run(KronLODO([{"params": ours[:1], **adamw}, {"params": ours[1:]}]), ours, 20)
    opts = torch.optim.AdamW(theirs[:1], lr=1e-3), KronLODO(theirs[1:])
    rng = torch.Generator().manual_seed(1)
    for _ in range(20):
        push(theirs, rng)
        for opt in opts:
            opt.step()
    assert apart(ours, theirs) < 1e-12


def test_maximizing_is_minimizing_the_negative():
    up, down = drawn(), drawn()
    one, two = KronLODO(up, maximize=True), KronLODO(down)
    rng = torch.Generator().manual_seed(1)
    for _ in range(15):
        for p, q in zip(up, down, strict=True):
            p.grad = torch.randn(p.shape, generator=rng, dtype=p.dtype)
            q.grad = -p.grad
        one.step()
        two.step()
    assert all(map(torch.equal, up, down))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": -1.0}, r"lr must be a finite number in \[0.0, inf\), got -1.0"),
        ({"lr": math.nan}, "lr must be a finite number"),
        ({"meta_lr": -1.0}, "meta_lr must be"),
        ({"gate_lr": -1.0}, "gate_lr must be"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be a finite number in \[0.0, 1.0\), got 1.0"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"eps": 0.0}, "eps must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"basis": "kroneker"}, "basis must be one of 'kronecker', 'orthogonal', 'none', got 'kroneker'; did you mean"),
        ({"gains": "yes"}, "gains must be True or False"),
        ({"anneal": -1.0}, "anneal must be a number >= 0 or math.inf, got -1.0"),
        ({"anneal": True}, "anneal must be a number >= 0 or math.inf, got True"),
        ({"anneal": math.nan}, "anneal must be a number >= 0 or math.inf, got nan"),
        ({"max_dim": 1.5}, "max_dim must be an integer"),
        ({"state_dtype": "float16"}, "state_dtype must be 'bfloat16' or torch.bfloat16, or None .*, got 'float16'"),
        ({"refresh_every": 0}, "refresh_every must be an integer >= 1, got 0"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of 'raise', 'skip'"),
    ],
)
def test_errors_name_the_option(options, says):
    with pytest.raises(ValueError, match=says):
        KronLODO(drawn(), **options)
    if "nonfinite" not in options:
        opt = KronLODO(drawn())
        with pytest.raises(ValueError, match=says):
            opt.add_param_group({"params": drawn(), **options})
        assert len(opt.param_groups) == 1


def test_a_rate_set_by_hand_is_checked():
    params = drawn()
    opt = KronLODO(params)
    opt.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="lr of group 0 must be a finite number"):
        run(opt, params, 1)


def test_sparse_gradients_are_refused_by_name():
    table = torch.nn.Embedding(4, 3, sparse=True)
    opt = KronLODO(table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients are not supported, but parameter 'weight' 0 of group 0"):
        opt.step()


# ---------------------------------------------------------------- looking inside


def test_diagnostics():
    model = torch.nn.Linear(4, 3)
    opt = KronLODO(model.named_parameters(), weight_decay=0.0)  # which does not count as part of a step
    assert opt.diagnostics() == {"skipped_steps": 0.0}
    run(opt, list(model.parameters()), 5)
    found = opt.diagnostics()
    names = ("alignment", "gain", "gate", "left_condition", "right_condition", "step_norm")
    assert {name for name in found if "/weight/" in name} == {f"group0/weight/{name}" for name in names}
    assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())
    assert found["group0/weight/left_condition"] > 1
    before = model.weight.detach().clone()
    run(opt, list(model.parameters()), 1)
    moved = float((model.weight.detach() - before).norm())
    assert opt.diagnostics()["group0/weight/step_norm"] == pytest.approx(moved, rel=1e-5)


def test_repr_tells_the_memory():
    opt = KronLODO([Parameter(torch.zeros(64, 64))])
    assert "memory: 102.5 kB (25.0 bytes a weight)" in repr(opt)


@pytest.mark.parametrize(
    "options", [{}, {"state_dtype": "bfloat16"}, {"gate": False}, {"basis": "orthogonal"}], ids=str
)
def test_the_memory_is_known_before_the_first_step(options):
    params = [Parameter(torch.zeros(shape)) for shape in ((8, 3, 5), (7,), (20, 6))]
    opt = KronLODO(params, max_dim=16, **options)
    estimate = opt.memory_estimate()
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    kept = [value for p in params for value in opt.state[p].values()]
    assert estimate.total == sum(value.numel() * value.element_size() for value in kept)
    assert estimate.bases == sum(x.nbytes for p in params for name, x in opt.state[p].items() if "basis" in name)
    assert KronLODO([Parameter(torch.zeros(0))]).memory_estimate().total == 0


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_the_largest_gradients_give_no_warning(backend):
    """Their squares are just finite; 25 times that, the guard's limit, is not. Warnings are errors here."""
    x = Parameter(torch.ones(2, 2))
    opt = KronLODO([x], backend=backend)
    for _ in range(60):
        x.grad = torch.full((2, 2), 4.5e18)
        opt.step()
    assert bool(torch.isfinite(x).all())
    assert opt.skipped_steps == 0


@pytest.mark.parametrize("make", [KronLODO, LODO])
def test_a_misspelled_option_of_a_group_is_refused(make):
    x = Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"weigth_decay is not an option of a group .*did you mean 'weight_decay'"):
        make([{"params": [x], "weigth_decay": 0.1}])
    assert make([{"params": [x], "name": "head", "lr_scale": 2}]).param_groups[0]["name"] == "head"


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_an_average_of_squares_that_hardly_moves(backend):
    """In single precision, 1 - beta2 ** t is 0 here."""
    x = Parameter(torch.ones(3))
    opt = KronLODO([x], backend=backend, basis="none", betas=(0.9, 0.99999998))
    for _ in range(3):
        x.grad = torch.ones(3)
        opt.step()
    assert x.isfinite().all()


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_the_size_of_recent_gradients_follows_a_fall(backend):
    W = Parameter(torch.ones(2, 3))
    opt = KronLODO([W], backend=backend, betas=(0.9, 0.0))
    for size in (1e6, 1.0):
        W.grad = torch.full((2, 3), size)
        opt.step()
    assert opt.state[W]["norm_sq"] == pytest.approx(6)
