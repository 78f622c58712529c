"""Everything beyond the paper against the oracle: each option alone, together, in odd sizes and odd runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import BACKENDS, assert_agree, difference, network, oracle_for, quadratic
from lodo import LODO, Dense, Diagonal, Mixing, Residual, Scalar
from lodo.engines import ReferenceEngine
from lodo.meta import SGD, Adam, ScheduleFree

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}

RANDOM, SHUFFLE = Mixing(5), Mixing(5, mixing="shuffle")
OTHERS = (Residual(5), Diagonal(), Scalar(), Dense())  # one engine serves these, whatever the backend

GATE = {"momentum": "learned"}
SCHEDULE_FREE = {"meta_optimizer": ScheduleFree()}
WINDOW = {"meta_optimizer": ScheduleFree(b=0.8, window=7), "meta_lr": 3e-3}
ROUNDED = {"meta_optimizer": Adam(moment_dtype="bfloat16")}
GUARD = {"guard": True}
FORGETFUL = {"save_activations": False}
ROBUST = {"recipe": "robust"}

FOR_EVERY_FAMILY = {
    "gate": GATE,
    "schedule-free": SCHEDULE_FREE,
    "window": WINDOW,
    "bfloat16": ROUNDED,
    "guard": GUARD,
    "robust": ROBUST,
    "all but Adam": ROBUST | SCHEDULE_FREE,
}
FOR_RANDOM = {
    "forgetful": FORGETFUL,
    "forgetful sgd": FORGETFUL | {"meta_optimizer": SGD(), "meta_lr": 1e-2},
    "forgetful gate": FORGETFUL | GATE,
    "forgetful schedule-free": FORGETFUL | SCHEDULE_FREE,
    "forgetful bfloat16": FORGETFUL | ROUNDED,
    "gate, bfloat16, guard": GATE | ROUNDED | GUARD,
}
FOR_SHUFFLE = {
    "paper": {},
    "forgetful": FORGETFUL,
    "gate, schedule-free": GATE | SCHEDULE_FREE,
    "bfloat16": ROUNDED,
    "robust": ROBUST,
    "all but Adam": ROBUST | SCHEDULE_FREE,
}
CASES = [
    (f"{family}-{backend}-{name}", family, backend, options)
    for families, backends, table in (
        (OTHERS, ("reference",), FOR_EVERY_FAMILY),
        ((RANDOM,), BACKENDS, {**FOR_EVERY_FAMILY, **FOR_RANDOM}),
        ((SHUFFLE,), BACKENDS, FOR_SHUFFLE),
    )
    for family in families
    for backend in backends
    for name, options in table.items()
]


def rate(family):
    """An lr that suits a family: the residual network starts well above the identity."""
    return 0.02 if isinstance(family, Residual) else 0.3


def noisy(n, dtype, steps=50, steeper=1.0):
    """A loss a step: a quadratic and a random slope; from step 20 to 30 the curvature is another."""
    f, _ = quadratic(n, dtype=dtype)
    rng = torch.Generator().manual_seed(1)
    for t in range(steps):
        slope = torch.randn(n, generator=rng, dtype=torch.float64).to(dtype)
        factor = steeper if 20 <= t < 30 else 1.0
        yield lambda x, factor=factor, slope=slope: factor * f(x) + slope @ x


def step(opt, x, f):
    opt.zero_grad()
    f(x).backward()
    opt.step()


def test_other_families_have_one_engine():
    """What holds for a family other than the mixing network on one backend holds on the other."""
    for family in OTHERS:
        for backend in BACKENDS:
            opt = LODO([torch.nn.Parameter(torch.ones(3))], preconditioner=family, backend=backend)
            assert type(network(opt).engine) is ReferenceEngine


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("family", "backend", "options"),
    [pytest.param(*case, id=name) for name, *case in CASES],
)
def test_fifty_steps(family, backend, options, dtype):
    x = torch.nn.Parameter(torch.randn(57, dtype=dtype))
    lr = rate(family)
    opt = LODO([x], lr=lr, beta=0.7, preconditioner=family, backend=backend, **options)
    oracle = oracle_for(opt, x)
    guarded = opt.param_groups[0]["guard"]
    before, learned, trust = opt._state(0)["theta"].clone(), [], []
    for f in noisy(57, dtype, steeper=100 / lr if guarded else 1.0):
        step(opt, x, f)
        oracle.step(f)
        trust.append(opt._state(0)["guard"].trust)
        learned.append(difference(before, opt._state(0)["theta"]))
    assert_agree(opt, x, oracle, TOLERANCE[dtype])
    assert max(learned) > 1e-3
    assert (min(trust) <= 0.5) == guarded
    if opt.param_groups[0]["momentum"] == "learned":
        assert abs(opt._state(0)["gate"].value - 1) > 1e-3


@settings(max_examples=30)
@given(
    n=st.integers(1, 300),
    depth=st.integers(1, 6),
    block_size=st.integers(1, 8),
    width=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    gated=st.booleans(),
    save=st.booleans(),
    meta=st.sampled_from(["adam", "adam(moment_dtype='bfloat16')", "sgd", "schedule-free"]),
    seed=st.integers(0, 2**31),
)
def test_any_size_of_shuffle(backend, n, depth, block_size, width, gated, save, meta, seed):
    f, _ = quadratic(n, seed)
    x = torch.nn.Parameter(torch.randn(n, dtype=torch.float64))
    opt = LODO(
        [x],
        lr=0.3,
        beta=0.5,
        preconditioner=Mixing(depth, block_size, width, "shuffle"),
        momentum="learned" if gated else "fixed",
        save_activations=save,
        meta_optimizer=meta,
        seed=seed,
        backend=backend,
    )
    oracle = oracle_for(opt, x)
    for _ in range(8):
        step(opt, x, f)
        oracle.step(f)
    assert_agree(opt, x, oracle, 1e-10)


@settings(max_examples=20)
@given(
    n=st.integers(1, 300),
    depth=st.integers(1, 6),
    block_size=st.integers(1, 8),
    gated=st.booleans(),
    meta=st.sampled_from(["adam", "adam(moment_dtype='bfloat16')", "sgd", "schedule-free"]),
)
def test_any_size_of_forgetful_permutations(backend, n, depth, block_size, gated, meta):
    f, _ = quadratic(n)
    x = torch.nn.Parameter(torch.randn(n, dtype=torch.float64))
    opt = LODO(
        [x],
        lr=0.3,
        beta=0.5,
        preconditioner=Mixing(depth, block_size),
        momentum="learned" if gated else "fixed",
        save_activations=False,
        meta_optimizer=meta,
        backend=backend,
    )
    oracle = oracle_for(opt, x)
    for _ in range(8):
        step(opt, x, f)
        oracle.step(f)
    assert_agree(opt, x, oracle, 1e-10)


OF_A_GROUP = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.sampled_from([0.05, 0.2]),
        "beta": st.sampled_from([0.0, 0.5, 0.95]),
        "weight_decay": st.just(0.1),
        "maximize": st.booleans(),
        "momentum": st.sampled_from(["fixed", "learned"]),
        "guard": st.booleans(),
        "preconditioner": st.sampled_from([Residual(3), "diagonal", "scalar", Mixing(3, mixing="shuffle")]),
        "meta_optimizer": st.sampled_from(
            ["schedule-free", ScheduleFree(0.8, 7), "sgd", Adam(moment_dtype="bfloat16"), Adam((0.5, 0.9), eps=1e-4)]
        ),
        "meta_lr": st.just(3e-3),
        "seed": st.integers(0, 99),
    },
)


@settings(max_examples=25)
@given(
    groups=st.lists(
        st.tuples(st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=3), OF_A_GROUP),
        min_size=1,
        max_size=3,
    ),
    backend=st.sampled_from(BACKENDS),
    save=st.booleans(),
)
def test_groups_with_options_of_their_own(groups, backend, save):
    """Each group is as if it were alone, whatever the others do."""
    params = [[torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes] for shapes, _ in groups]
    options = [given for _, given in groups]
    opt = LODO(
        [{"params": group, **one} for group, one in zip(params, options, strict=True)],
        lr=0.02, preconditioner=Mixing(3), backend=backend, save_activations=save,
    )  # fmt: skip
    flats = [torch.cat([p.detach().reshape(-1) for p in group]) for group in params]
    oracles = [oracle_for(opt, flat, i) for i, flat in enumerate(flats)]

    def loss(i, x, t):
        curvature = torch.linspace(0.2, 1, len(x), dtype=torch.float64)
        steepness = (60.0 if t in (5, 6) else 1.0) * (-1.0 if options[i].get("maximize") else 1.0)
        return steepness * (0.5 * curvature * x**2).sum()

    for t in range(9):
        opt.zero_grad()
        sum(loss(i, torch.cat([p.reshape(-1) for p in group]), t) for i, group in enumerate(params)).backward()
        opt.step()
        for i, oracle in enumerate(oracles):
            sign = -1.0 if options[i].get("maximize") else 1.0
            oracle.step(lambda x, i=i, t=t, sign=sign: sign * loss(i, x, t))
    for i, (group, oracle) in enumerate(zip(params, oracles, strict=True)):
        assert_agree(opt, torch.cat([p.reshape(-1) for p in group]), oracle, 1e-10, i)


@settings(max_examples=30)
@given(
    options=st.sampled_from([GATE, GATE | FORGETFUL, GATE | SCHEDULE_FREE, GATE | GUARD, ROBUST]),
    family=st.sampled_from([Mixing(3), Mixing(3, mixing="shuffle"), "diagonal"]),
    beta=st.sampled_from([0.0, 0.6, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.2]),
    maximize=st.booleans(),
    run=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.0, 0.05, 0.3]),  # lr
            st.sampled_from(["ab", "ab", "a", "b", ""]),  # what has a gradient
            st.sampled_from([1.0, 1.0, 1.0, 50.0]),  # how steep it is
        ),
        min_size=5,
        max_size=15,
    ),
)
def test_odd_runs(backend, options, family, beta, weight_decay, maximize, run):
    """Any schedule with zeros, parameters frozen and thawed, sudden changes."""
    f, _ = quadratic(15)
    a, b = (torch.nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (9, 6))
    opt = LODO(
        [a, b], beta=beta, weight_decay=weight_decay, maximize=maximize, preconditioner=family, backend=backend,
        **options,
    )  # fmt: skip
    oracle = oracle_for(opt, torch.cat([a, b]).detach())
    for lr, present, steepness in run:
        opt.param_groups[0]["lr"] = oracle.lr = lr
        opt.zero_grad()
        sign = -1.0 if maximize else 1.0
        (sign * steepness * f(torch.cat([a, b]))).backward()
        a.grad, b.grad = (p.grad if name in present else None for name, p in (("a", a), ("b", b)))
        opt.step()
        if present:
            moves = torch.cat([torch.full((len(p),), float(name in present)) for name, p in (("a", a), ("b", b))])
            oracle.step(lambda x, steepness=steepness: steepness * f(x), moves.double())
    assert_agree(opt, torch.cat([a, b]), oracle, 1e-10)


@pytest.mark.parametrize(
    ("family", "backend"),
    [(Mixing(4), "numba"), (Mixing(4), "reference"), *((family, "reference") for family in OTHERS)],
    ids=str,
)
def test_freezing_and_unfreezing_with_a_gate(family, backend):
    f, _ = quadratic(20)
    a, b = (torch.nn.Parameter(torch.randn(10, dtype=torch.float64)) for _ in range(2))
    opt = LODO([a, b], lr=rate(family), weight_decay=0.1, preconditioner=family, backend=backend, **GATE)
    oracle = oracle_for(opt, torch.cat([a, b]).detach())
    for t in range(30):
        frozen = t % 7 in (2, 3, 5)
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


EXACT = {
    "paper": {},
    "gate": GATE,
    "schedule-free": SCHEDULE_FREE,
    "bfloat16": ROUNDED,
    "shuffle": {"preconditioner": SHUFFLE},
    "forgetful gate": FORGETFUL | GATE,
    "robust": ROBUST | {"preconditioner": SHUFFLE},
}


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_maximize_mirrors_minimize(options, backend):
    a = torch.nn.Parameter(torch.randn(12))
    b = torch.nn.Parameter(a.detach().clone())
    up, down = (
        LODO([p], lr=0.1, maximize=p is a, backend=backend, **{"preconditioner": RANDOM, **options}) for p in (a, b)
    )
    for _ in range(6):
        a.grad = torch.randn(12)
        b.grad = -a.grad
        up.step()
        down.step()
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["paper", "gate", "bfloat16", "shuffle"])
def test_activations_computed_again_are_the_same_bits(name, backend):
    """What saving them spares is work, nothing else."""
    options = {"preconditioner": RANDOM, **EXACT[name]}
    results = []
    for save in (True, False):
        torch.manual_seed(0)
        x = torch.nn.Parameter(torch.randn(50))
        opt = LODO([x], lr=0.1, backend=backend, save_activations=save, **options)
        for _ in range(10):
            x.grad = torch.randn(50)
            opt.step()
        results.append((x.detach(), opt._state(0)["theta"]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("options", [{"preconditioner": "mixing(mixing='shuffle')"}, ROBUST], ids=["shuffle", "robust"])
def test_starts_as_the_identity_and_stays_symmetric(options, backend):
    f, _ = quadratic(61)
    x = torch.nn.Parameter(torch.randn(61, dtype=torch.float64))
    opt = LODO([x], lr=0.3, backend=backend, **options)
    eye = 0.3 * torch.eye(61, dtype=torch.float64)
    assert torch.allclose(opt.preconditioner_matrix(), eye, atol=1e-14, rtol=0)
    for _ in range(30):
        step(opt, x, f)
    G = opt.preconditioner_matrix()
    assert (G - eye).abs().max() > 1e-3
    assert torch.allclose(G, G.T, atol=1e-13, rtol=0)
    assert torch.linalg.eigvalsh(G).min() > 0


@pytest.mark.parametrize("options", EXACT.values(), ids=EXACT)
def test_looking_does_not_disturb(options, backend):
    x = torch.nn.Parameter(torch.randn(11))
    y = torch.nn.Parameter(x.detach().clone())
    looked, left = (LODO([p], lr=0.1, backend=backend, **{"preconditioner": RANDOM, **options}) for p in (x, y))
    for _ in range(6):
        x.grad = torch.randn(11)
        y.grad = x.grad.clone()
        looked.step()
        left.step()
        looked.precondition(torch.randn(11))
        looked.preconditioner_matrix()
        repr(looked)
    assert torch.equal(x, y)
