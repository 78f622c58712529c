"""The optimizer against the oracle: every family, meta-optimizer, backend and odd size; options are in test_options."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import BACKENDS, FAMILIES, assert_agree, difference, natural, oracle_for, quadratic
from lodo import LODO, Mixing, Residual
from lodo.meta import Adam

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
RATE = {"residual": 0.02}  # G starts well above the identity there


def train(opt, x, oracle, f, steps=50):
    for _ in range(steps):
        opt.zero_grad()
        f(x).backward()
        opt.step()
        oracle.step(f)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("meta", ["adam", "sgd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_steps(family, meta, backend, dtype):
    f, _ = quadratic(57, dtype=dtype)
    x = torch.nn.Parameter(torch.randn(57, dtype=dtype))
    opt = LODO(
        [x],
        lr=RATE.get(family, 0.3),
        beta=0.7,
        preconditioner=family,
        meta_optimizer=Adam(betas=(0.8, 0.95)) if meta == "adam" else "sgd",
        meta_lr=1e-2 if meta == "sgd" else 1e-3,
        backend=backend,
    )
    oracle = oracle_for(opt, x)
    before = opt._state(0)["theta"].clone()
    train(opt, x, oracle, f)
    assert difference(before, opt._state(0)["theta"]) > 1e-3  # it did learn
    assert_agree(opt, x, oracle, TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30)
@given(
    n=st.integers(1, 300),
    depth=st.integers(1, 6),
    block_size=st.integers(1, 8),
    width=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_any_size_of_mixing(backend, n, depth, block_size, width, seed):
    f, _ = quadratic(n, seed)
    x = torch.nn.Parameter(torch.randn(n, dtype=torch.float64))
    opt = LODO([x], lr=0.3, beta=0.5, preconditioner=Mixing(depth, block_size, width), seed=seed, backend=backend)
    oracle = oracle_for(opt, x)
    train(opt, x, oracle, f, steps=8)
    assert_agree(opt, x, oracle, 1e-10)


@settings(max_examples=20)
@given(n=st.integers(1, 300), depth=st.integers(1, 9), width=st.sampled_from([1.0, 1.7, 2.0]))
def test_any_size_of_residual(n, depth, width):
    f, _ = quadratic(n)
    x = torch.nn.Parameter(torch.randn(n, dtype=torch.float64))
    opt = LODO([x], lr=0.02, preconditioner=Residual(depth, width))
    oracle = oracle_for(opt, x)
    train(opt, x, oracle, f, steps=8)
    assert_agree(opt, x, oracle, 1e-10)


@settings(max_examples=25)
@given(
    groups=st.lists(
        st.lists(st.lists(st.integers(1, 4), max_size=5).map(tuple), min_size=1, max_size=4), min_size=1, max_size=3
    ),
    backend=st.sampled_from(BACKENDS),
)
def test_groups_and_shapes(groups, backend):
    """Parameters of 0 to 5 dimensions in several groups: each group is one flat vector with its own network."""
    params = [[torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in group] for group in groups]
    settings = [{"params": group, "lr": 0.1 * (i + 1), "beta": 0.2 * i} for i, group in enumerate(params)]
    opt = LODO(settings, preconditioner=Mixing(depth=3), backend=backend)
    flats = [torch.cat([p.detach().reshape(-1) for p in group]) for group in params]
    oracles = [oracle_for(opt, flat, i) for i, flat in enumerate(flats)]
    curvatures = [torch.linspace(0.2, 1, len(flat), dtype=torch.float64) for flat in flats]
    for _ in range(6):
        opt.zero_grad()
        loss = sum(
            (0.5 * curvature * torch.cat([p.reshape(-1) for p in group]) ** 2).sum()
            for curvature, group in zip(curvatures, params, strict=True)
        )
        loss.backward()
        opt.step()
        for oracle, curvature in zip(oracles, curvatures, strict=True):
            oracle.step(lambda x, curvature=curvature: (0.5 * curvature * x**2).sum())
    for i, (group, oracle) in enumerate(zip(params, oracles, strict=True)):
        assert_agree(opt, torch.cat([p.reshape(-1) for p in group]), oracle, 1e-10, i)


@pytest.mark.parametrize("backend", BACKENDS)
def test_warm_up_from_zero_and_any_schedule(backend):
    """The hypergradient uses the lr its step was taken with; a step of length zero teaches nothing."""
    f, _ = quadratic(20)
    x = torch.nn.Parameter(torch.randn(20, dtype=torch.float64))
    opt = LODO([x], lr=0.5, backend=backend, preconditioner=Mixing(depth=4))
    oracle = oracle_for(opt, x)
    rates = [0.0, 0.0, 0.1, 0.3, 0.5, 0.0, 0.2, 0.4, 0.1, 0.0, 0.3] * 3
    for lr in rates:
        opt.param_groups[0]["lr"] = oracle.lr = lr
        opt.zero_grad()
        f(x).backward()
        opt.step()
        oracle.step(f)
    assert_agree(opt, x, oracle, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_is_decoupled(family, backend):
    f, _ = quadratic(20)
    x = torch.nn.Parameter(torch.randn(20, dtype=torch.float64))
    opt = LODO([x], lr=RATE.get(family, 0.3), weight_decay=0.1, preconditioner=family, backend=backend)
    oracle = oracle_for(opt, x)
    train(opt, x, oracle, f, steps=20)
    assert_agree(opt, x, oracle, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_freezing_and_unfreezing(family, backend):
    """A parameter without a gradient counts as zero, stays where it is, and has no part in the next lesson."""
    f, _ = quadratic(20)
    a, b = (torch.nn.Parameter(torch.randn(10, dtype=torch.float64)) for _ in range(2))
    opt = LODO([a, b], lr=RATE.get(family, 0.3), weight_decay=0.1, preconditioner=family, backend=backend)
    oracle = oracle_for(opt, torch.cat([a, b]).detach())
    for step in range(30):
        frozen = step % 7 in (2, 3, 5)
        opt.zero_grad()
        f(torch.cat([a, b])).backward()
        before = b.detach().clone()
        if frozen:
            b.grad = None
        opt.step()
        assert torch.equal(b, before) == frozen
        moves = torch.cat([torch.ones(10), torch.full((10,), float(not frozen))]).double()
        oracle.step(f, moves)
    assert_agree(opt, torch.cat([a, b]), oracle, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_starts_as_the_identity_and_stays_symmetric(backend, dtype):
    f, _ = quadratic(61, dtype=dtype)
    x = torch.nn.Parameter(torch.randn(61, dtype=dtype))
    opt = LODO([x], lr=0.3, backend=backend)
    eps = torch.finfo(dtype).eps
    G = opt.preconditioner_matrix()
    assert torch.allclose(G, 0.3 * torch.eye(61, dtype=dtype), atol=20 * eps, rtol=0)
    for _ in range(30):
        opt.zero_grad()
        f(x).backward()
        opt.step()
    G = opt.preconditioner_matrix()
    assert (G - 0.3 * torch.eye(61, dtype=dtype)).abs().max() > 1e-3
    assert torch.allclose(G, G.T, atol=100 * eps, rtol=0)
    assert torch.linalg.eigvalsh(G.double()).min() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_momentum_is_beta_zero(backend):
    f, _ = quadratic(12)
    x = torch.nn.Parameter(torch.randn(12, dtype=torch.float64))
    opt = LODO([x], lr=0.3, beta=0.0, backend=backend)
    oracle = oracle_for(opt, x)
    train(opt, x, oracle, f)
    assert torch.equal(opt._state(0)["momentum"], x.grad)
    assert_agree(opt, x, oracle, 1e-10)


def test_reference_and_fused_agree_in_float32_on_a_large_network():
    """Above the size from which threads are used."""
    n = 9000
    curvature = torch.linspace(0.1, 1, n)
    xs = [torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(1))) for _ in BACKENDS]
    opts = [
        LODO([x], lr=0.3, backend=backend, preconditioner=Mixing(depth=4))
        for x, backend in zip(xs, BACKENDS, strict=True)
    ]
    for _ in range(10):
        for x, opt in zip(xs, opts, strict=True):
            x.grad = curvature * x.detach()
            opt.step()
    assert difference(*xs) < 1e-5
    assert difference(*(natural(opt, opt._state(0)["theta"]) for opt in opts)) < 1e-5
