"""Nothing that is learned ever becomes infinite, whatever finite gradients come."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import difference, network, parameter, same, snapshot
from lodo import LODO, Mixing
from lodo.engines import ENGINES

DRAWN = -212.34578137020594  # the sum of a network's weights, as 0.1.0 drew them too
META = ("adam", "sgd", "schedule-free", "adam(moment_dtype='bfloat16')")


def all_finite(opt, *params):
    tensors = [value for value in opt._state(0).values() if isinstance(value, torch.Tensor)]
    return all(bool(torch.isfinite(x).all()) for x in [*tensors, *params])


@pytest.mark.parametrize("meta", META)
@pytest.mark.parametrize("mixing", ["random", "shuffle"])
@settings(max_examples=12)
@given(
    sizes=st.lists(st.floats(-44, 38), min_size=4, max_size=12),
    n=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    gate=st.booleans(),
    guard=st.booleans(),
    lr=st.sampled_from([1e-3, 0.3, 10.0]),
    meta_lr=st.sampled_from([1e-3, 1e-2, 0.1]),
    seed=st.integers(0, 1000),
)
def test_gradients_of_any_size(backend, meta, mixing, sizes, n, dtype, gate, guard, lr, meta_lr, seed):
    """Eighty decades in any order: refused steps change nothing, accepted ones leave everything finite."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.nn.Parameter(torch.randn(n, generator=rng).to(dtype))
    opt = LODO(
        [x], lr=lr, meta_lr=meta_lr, meta_optimizer=meta, preconditioner=Mixing(depth=3, mixing=mixing), guard=guard,
        momentum="learned" if gate else "fixed", nonfinite="skip", backend=backend,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that many steps in a row were skipped
        for size in sizes:
            for _ in range(3):
                x.grad = (torch.randn(n, generator=rng, dtype=torch.float64) * 10.0**size).to(dtype)
                opt.step()
                assert all_finite(opt, x)


@pytest.mark.parametrize("meta", META)
@pytest.mark.parametrize("backend", ["numba", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_solved_problem_stays_solved(backend, meta):
    for n in (2, 8):
        for mixing in ("random", "shuffle"):
            torch.manual_seed(n)
            x = torch.nn.Parameter(torch.randn(n))
            curvature = torch.linspace(0.1, 1, n)
            opt = LODO([x], lr=0.3, meta_optimizer=meta, preconditioner=Mixing(depth=4, mixing=mixing), backend=backend)
            for t in range(5000):
                x.grad = curvature * x.detach()
                opt.step()
                assert t < 500 or float(x.detach().abs().max()) < 1e-3
            assert all_finite(opt, x)


def test_a_tiny_gradient_after_ordinary_ones(backend):
    for seed in range(20):
        for tiny in (1e-23, 1e-40):
            x = torch.nn.Parameter(torch.randn(2, generator=torch.Generator().manual_seed(seed)))
            opt = LODO(
                [x],
                lr=0.3,
                meta_optimizer="schedule-free",
                preconditioner="mixing(depth=4)",
                seed=seed,
                backend=backend,
            )
            for t in range(12):
                x.grad = torch.full((2,), tiny) if t == 8 else torch.randn(2)
                opt.step()
            assert all_finite(opt, x)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_an_outlier_that_sgd_could_not_survive_is_refused(backend, nonfinite):
    x = parameter(30, dtype=torch.float32)
    opt = LODO([x], lr=0.1, meta_lr=1e-2, meta_optimizer="sgd", nonfinite=nonfinite, backend=backend)
    refused = 0
    for t in range(60):
        x.grad = torch.randn(30) * (1000 if t == 40 else 1)
        before = snapshot(opt)
        try:
            opt.step()
        except FloatingPointError as error:
            refused += "too large" in str(error) and "nothing was changed" in str(error)
            assert same(before, snapshot(opt))
        assert all_finite(opt, x)
    assert refused + opt.skipped_steps > 0


def test_adam_stays_able_to_learn_under_hostile_gradients(backend):
    x = parameter(50, dtype=torch.bfloat16)
    opt = LODO([x], lr=10.0, meta_lr=1e-2, nonfinite="skip", backend=backend)
    for t in range(60):
        x.grad = (torch.randn(50) * 10.0 ** (t % 18)).bfloat16()
        opt.step()
        assert all_finite(opt, x)


def test_schedule_free_at_a_large_rate(backend):
    x = parameter(30, dtype=torch.float32)
    opt = LODO([x], lr=0.3, meta_lr=0.1, meta_optimizer="schedule-free", nonfinite="skip", backend=backend)
    curvature = torch.linspace(0.1, 1, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(300):
            x.grad = curvature * x.detach()
            opt.step()
            assert all_finite(opt, x)


def test_skipping_recovers_by_itself(backend):
    """After one gradient with entries of 1e18, gradients of norm 1,000 are soon learned from again."""
    x = parameter(20, dtype=torch.float32)
    opt = LODO([x], nonfinite="skip", backend=backend, preconditioner=Mixing(depth=3))
    for _ in range(5):
        x.grad = torch.randn(20)
        opt.step()
    x.grad = torch.full((20,), 1e18)
    opt.step()
    skipped = opt.skipped_steps
    for _ in range(400):
        x.grad = 1000 * torch.randn(20) / 20**0.5
        opt.step()
        last, skipped = opt.skipped_steps > skipped, opt.skipped_steps
        assert all_finite(opt, x)
    assert not last
    assert skipped < 200
    updates = opt._state(0)["meta_step"]
    x.grad = 1000 * torch.randn(20) / 20**0.5
    opt.step()
    assert opt._state(0)["meta_step"] == updates + 1


def test_a_momentum_that_is_too_long_decays(backend):
    """A parameter in float16 has little room: G may send even an old momentum beyond it."""
    x = parameter(20, dtype=torch.float16)
    opt = LODO([x], lr=1.0, nonfinite="skip", backend=backend, preconditioner=Mixing(depth=3), beta=0.9)
    x.grad = torch.full_like(x, 1e-3)
    opt.step()
    state = opt._state(0)
    state["momentum"].fill_(500.0)
    state["momentum_bound"] = 500.0 * 20**0.5
    state["theta"].mul_(3.0)  # stretches by 3^6
    network(opt).log_s = 12 * math.log(3.0)
    before = x.detach().clone()
    for _ in range(200):
        x.grad = torch.full_like(x, 1e-3)
        opt.step()
        assert all_finite(opt, x)
        if not torch.equal(x, before):
            break
    assert 2 < opt.skipped_steps < 150
    assert not torch.equal(x, before)


def test_many_skipped_steps_say_so():
    x = parameter(5)
    opt = LODO([x], nonfinite="skip", preconditioner="diagonal")
    x.grad = torch.full((5,), math.nan, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(19):
            opt.step()
    with pytest.warns(UserWarning, match=r"skipped 20 steps in a row.*parameter 0 of group 0.*not finite.*smaller lr"):
        opt.step()


def test_moments_in_bfloat16_have_their_own_range(backend):
    x = parameter(64)  # float64
    opt = LODO([x], lr=1.0, meta_optimizer="adam(moment_dtype='bfloat16')", nonfinite="skip", backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(30):
            x.grad = 1e12 * torch.randn(64, dtype=torch.float64)
            opt.step()
            assert all_finite(opt, x)


@pytest.mark.parametrize("lr", [math.nan, -0.1, math.inf])
def test_a_rate_set_by_hand_is_checked_before_anything_changes(lr):
    x, y = parameter(5), parameter(3)
    opt = LODO([{"params": [x]}, {"params": [y]}], lr=0.1, preconditioner="diagonal")
    x.grad, y.grad = torch.ones(5, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    opt.step()
    before = snapshot(opt)
    opt.param_groups[1]["lr"] = lr
    with pytest.raises(ValueError, match=r"lr must be a finite number in \[0.0, inf\), got"):
        opt.step()
    opt.param_groups[1]["lr"] = 0.1
    assert same(before, snapshot(opt))


def test_other_things_among_the_states_do_no_harm():
    x = parameter(5)
    opt = LODO([x], nonfinite="skip", preconditioner="diagonal")
    opt.state["note of a hook"] = 3
    assert opt.skipped_steps == 0
    opt.param_groups.append({"params": [parameter(2)]})
    with pytest.raises(RuntimeError, match="there are 2 parameter groups but 1 were added"):
        opt.state_dict()


@pytest.mark.parametrize("name", ["theta", "momentum", "exp_avg_sq"])
def test_a_state_with_nans_is_refused(name):
    x = parameter(5)
    opt = LODO([x], preconditioner="mixing(depth=2)")
    x.grad = torch.ones(5, dtype=torch.float64)
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    state["state"][0][name].view(-1)[0] = math.nan
    with pytest.raises(ValueError, match=f"numbers in {name} that are not finite"):
        opt.load_state_dict(state)


def test_a_first_look_is_converged_and_ordered():
    torch.manual_seed(0)
    x = parameter(40, dtype=torch.float32)
    opt = LODO([x], lr=0.25)
    curvature = torch.linspace(0.05, 1, 40)
    for _ in range(300):
        x.grad = curvature * x.detach() + 0.1 * torch.randn(40)
        opt.step()
    numbers = opt.diagnostics()
    assert "group0/hypergradient_norm" not in numbers
    assert not any(map(math.isnan, numbers.values()))
    stretches = torch.linalg.eigvalsh(opt.preconditioner_matrix().double() / 0.25)
    assert numbers["group0/largest_stretch"] == pytest.approx(float(stretches[-1]), rel=0.05)
    assert numbers["group0/smallest_stretch"] == pytest.approx(float(stretches[0]), rel=0.3)
    assert numbers["group0/smallest_stretch"] <= numbers["group0/largest_stretch"]
    ratio = numbers["group0/largest_stretch"] / numbers["group0/smallest_stretch"]
    assert numbers["group0/stretch_ratio"] == pytest.approx(ratio)


def test_a_pickle_is_read_by_another_engine(monkeypatch):
    x = parameter(150, dtype=torch.float32)
    opt = LODO([x], lr=0.1, preconditioner=Mixing(depth=2))
    x.grad = torch.randn(150)
    opt.step()
    opt.step()
    pickled = pickle.dumps((x, opt))
    opt.step()
    monkeypatch.delitem(ENGINES, (Mixing, "numba"))
    y, other = pickle.loads(pickled)
    y.grad = x.grad.clone()
    other.step()
    assert type(network(other).engine).__name__ == "ReferenceEngine"
    assert difference(y, x) < 1e-5


@pytest.mark.parametrize("threads", [1, 2])
def test_a_draw_does_not_depend_on_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        opt = LODO([torch.nn.Parameter(torch.zeros(20_000))], preconditioner="mixing(depth=2)", backend="reference")
        theta = opt._state(0)["theta"]
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert float(theta.double().sum()) == pytest.approx(DRAWN, abs=1e-6)
    gram = theta[0] @ theta[0].mT
    assert torch.allclose(gram, torch.eye(4).expand_as(gram), atol=1e-5)


def test_a_rehearsed_step_after_loading_keeps_the_last_step(monkeypatch):
    """The guard judges the step that was really taken last, also if that step was rehearsed on copies."""
    runs = []
    for rehearse in (False, True):
        torch.manual_seed(0)
        x = parameter(20, dtype=torch.float32)
        opt = LODO([x], lr=0.5, guard=True, preconditioner=Mixing(depth=3))
        for t in range(12):
            if t == 6:
                resumed = LODO([x], lr=0.5, guard=True, preconditioner=Mixing(depth=3))
                resumed.load_state_dict(opt.state_dict())
                opt = resumed
            x.grad = torch.linspace(0.1, 1, 20) * x.detach() * (100 if t > 6 else 1)
            if rehearse and t == 6:
                with monkeypatch.context() as patch:
                    patch.setattr("lodo.algorithm._outlook", lambda *_: (False, math.inf))
                    opt.step()
            else:
                opt.step()
        runs.append((x.detach().clone(), opt.state_dict()["state"][0]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert same(runs[0][1], runs[1][1])
