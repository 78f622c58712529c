"""Saving, loading, copying and pickling: a resumed run is the run that was not interrupted."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from helpers import BACKENDS, FAMILIES, give_gradients, parameter, same, snapshot
from lodo import LODO, Mixing

OPTIONS = {
    "gate": {"momentum": "learned"},
    "forgetful gate": {"momentum": "learned", "save_activations": False},
    "schedule-free": {"meta_optimizer": "schedule-free", "meta_window": 4},
    "bfloat16": {"moment_dtype": torch.bfloat16},
    "shuffle": {"mixing": "shuffle"},
    "permuted shuffle": {"mixing": "permuted-shuffle"},
    "forgetful": {"save_activations": False},
    "guard": {"guard": True},
    "robust": {"recipe": "robust"},
    "robust schedule-free": {"recipe": "robust", "meta_optimizer": "schedule-free"},
}


def gradients(params, steps, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [[torch.randn(p.shape, generator=rng).to(p.dtype) for p in params] for _ in range(steps)]


def play(opt, params, gradients):
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        opt.step()


def through_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("meta", ["adam", "sgd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_resume_is_bit_for_bit(family, meta, backend, dtype):
    settings = {
        "lr": 0.01, "preconditioner": family, "meta_optimizer": meta, "backend": backend, "seed": 5,
    }  # fmt: skip
    a = [parameter(30, dtype=dtype), parameter(2, 3, dtype=dtype)]
    opt = LODO(a, **settings)
    before, after = gradients(a, 6), gradients(a, 6, seed=1)
    play(opt, a, before)
    saved = through_file(opt.state_dict())
    b = [torch.nn.Parameter(p.detach().clone()) for p in a]
    resumed = LODO(b, **{**settings, "seed": 99})  # the seed comes with the state
    resumed.load_state_dict(saved)
    play(opt, a, after)
    play(resumed, b, after)
    assert all(map(torch.equal, a, b))
    assert same(opt.state_dict(), resumed.state_dict())
    expected = torch.float64 if dtype is torch.float64 else torch.float32
    assert resumed._state(0)["theta"].dtype == expected


def by_file(pair, make):
    """The state through a file, into an optimizer with another seed."""
    x, opt = pair
    y = torch.nn.Parameter(x.detach().clone())
    resumed = make(y, seed=99)  # the seed comes with the state
    resumed.load_state_dict(through_file(opt.state_dict()))
    return y, resumed


COPIES = {
    "file": by_file,
    "deepcopy": lambda pair, make: copy.deepcopy(pair),
    "pickle": lambda pair, make: pickle.loads(pickle.dumps(pair)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_resumes_bit_for_bit(name, backend, how, dtype):
    def make(x, seed=5):
        return LODO([x], lr=0.05, depth=3, backend=backend, seed=seed, **OPTIONS[name])

    x = parameter(33, dtype=dtype)
    opt = make(x)
    play(opt, [x], gradients([x], 6))
    y, twin = COPIES[how]((x, opt), make)
    after = gradients([x], 6, seed=1)
    play(opt, [x], after)
    play(twin, [y], after)
    assert torch.equal(x, y)
    assert same(opt.state_dict(), twin.state_dict())
    state = twin._state(0)
    assert state["theta"].dtype == torch.float32
    if "exp_avg" in state:
        rounded = opt.param_groups[0]["moment_dtype"]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == (rounded or torch.float32)
    play(twin, [y], after)
    assert not same(opt.state_dict(), twin.state_dict())  # nothing is shared


def steep(x, t):
    """Curvature 0.1 to 1; from step 6 on, for a while, a hundred times that."""
    curvature = torch.linspace(0.1, 1, len(x)).to(x.dtype) * (100 if 6 <= t < 12 else 1)
    x.grad = curvature * x.detach()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["guard", "robust"])
@pytest.mark.parametrize(
    ("saved_at", "clipped", "change"),
    [(6, True, 1.0), (7, True, 0.5), (9, True, 0.5), (14, False, 1.02)],
    ids=["before an outlier", "before an overshot", "amid overshots", "recovering"],
)
def test_a_save_in_the_middle_of_an_episode(saved_at, clipped, change, name, backend, how):
    """Trust, the average of norms and the direction of the last step come back with the state."""

    def make(x, seed=0):
        return LODO([x], lr=0.5, beta=0.5, depth=3, backend=backend, seed=seed, **OPTIONS[name])

    torch.manual_seed(2)
    x = parameter(20, dtype=torch.float32)
    opt = make(x)
    for t in range(saved_at):
        steep(x, t)
        opt.step()
    trust = opt._state(0)["guard"][1]
    assert (trust < 1) == (saved_at > 7)
    y, twin = COPIES[how]((x, opt), make)
    for t in range(saved_at, 20):
        steep(x, t)
        steep(y, t)
        outlier = float(x.grad.norm()) > 5 * opt._state(0)["guard"][0]
        opt.step()
        twin.step()
        assert torch.equal(x, y)
        if t == saved_at:
            assert outlier == clipped
            assert twin._state(0)["guard"][1] == pytest.approx(change * trust)
    assert same(opt.state_dict(), twin.state_dict())


def test_rounded_moments_stay_as_they_are_in_any_model():
    """torch would cast them to the parameter's dtype, and theta to bfloat16."""
    x = parameter(20, dtype=torch.float32)
    opt = LODO([x], lr=0.1, moment_dtype=torch.bfloat16)
    play(opt, [x], gradients([x], 4))
    for dtype, own in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        other = LODO([parameter(20, dtype=dtype)], lr=0.1, moment_dtype=torch.bfloat16)
        other.load_state_dict(through_file(opt.state_dict()))
        ours, theirs = opt._state(0), other._state(0)
        assert theirs["theta"].dtype == theirs["momentum"].dtype == own
        for moment in ("exp_avg", "exp_avg_sq"):
            assert theirs[moment].dtype == torch.bfloat16
            assert torch.equal(theirs[moment], ours[moment])
            assert theirs[moment].data_ptr() != ours[moment].data_ptr()


@pytest.mark.parametrize("name", ["gate", "schedule-free", "bfloat16", "permuted shuffle", "robust"])
def test_backends_read_each_others_states_with_options(name):
    for first, second in (BACKENDS, BACKENDS[::-1]):
        x, y = parameter(30), parameter(30)
        one, other = (LODO([p], lr=0.1, depth=3, backend=b, **OPTIONS[name]) for p, b in ((x, first), (y, second)))
        play(one, [x], gradients([x], 4))
        y.data.copy_(x.detach())
        other.load_state_dict(one.state_dict())
        steps = gradients([x], 4, seed=1)
        play(one, [x], steps)
        play(other, [y], steps)
        assert torch.allclose(x, y, rtol=1e-11, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_continue_alike(how, backend):
    x = parameter(30)
    opt = LODO([{"params": [x]}], lr=0.1, preconditioner=Mixing(depth=3), backend=backend, nonfinite="skip")
    steps = gradients([x], 10)
    play(opt, [x], steps[:5])
    y, twin = how((x, opt))
    assert twin.param_groups[0]["params"][0] is y
    play(opt, [x], steps[5:])
    play(twin, [y], steps[5:])
    assert torch.equal(x, y)
    assert twin.backend == backend
    assert twin.nonfinite == "skip"
    twin.add_param_group({"params": [parameter(3)]})
    assert twin.param_groups[1]["preconditioner"] == "Mixing(depth=3, block_size=4, width=2.0, mixing='random')"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loaded_state_shares_nothing_with_its_source(backend):
    x, y = parameter(8), parameter(8)
    a, b = LODO([x], lr=0.1, backend=backend), LODO([y], lr=0.1, backend=backend)
    play(a, [x], gradients([x], 3))
    state = a.state_dict()
    b.load_state_dict(state)
    kept = copy.deepcopy(state)
    play(b, [y], gradients([y], 3))
    assert same(a.state_dict(), kept)


def test_backends_read_each_others_states():
    x, y = parameter(30), parameter(30)
    fused, plain = LODO([x], lr=0.1, backend="numba"), LODO([y], lr=0.1, backend="reference")
    play(fused, [x], gradients([x], 4))
    y.data.copy_(x.detach())
    plain.load_state_dict(fused.state_dict())
    steps = gradients([x], 4, seed=1)
    play(fused, [x], steps)
    play(plain, [y], steps)
    assert torch.allclose(x, y, rtol=1e-12, atol=0)


def test_a_float32_state_serves_a_float64_model():
    x = parameter(6, dtype=torch.float32)
    opt = LODO([x])
    play(opt, [x], gradients([x], 2))
    double = LODO([parameter(6)])
    double.load_state_dict(opt.state_dict())
    assert torch.equal(double._state(0)["theta"], opt._state(0)["theta"].double())


@pytest.mark.parametrize(
    ("settings", "sizes", "message"),
    [
        ({"depth": 3}, [6], r"preconditioner = .*depth=3.*ours is .*depth=2"),
        ({"preconditioner": "diagonal"}, [6], r"preconditioner = 'Diagonal\(\)'"),
        ({"meta_optimizer": "sgd"}, [6], r"meta_optimizer = 'sgd', ours is 'adam'"),
        ({"momentum": "learned"}, [6], r"momentum = 'learned', ours is 'fixed'"),
        ({"moment_dtype": torch.bfloat16}, [6], r"moment_dtype = torch.bfloat16, ours is None"),
        ({"mixing": "shuffle"}, [6], r"preconditioner = .*mixing='shuffle'.*ours is .*mixing='random'"),
        ({}, [7], r"momentum of shape \(7,\), but n = 6"),
        ({}, [3, 3], r"2 parameters, ours 1"),
        ({"preconditioner": "residual"}, [6], r"preconditioner = 'Residual"),
    ],
)
def test_a_foreign_state_is_refused_before_anything_changes(settings, sizes, message):
    foreign = [parameter(n) for n in sizes]
    other = LODO(foreign, **{"depth": 2, **settings})
    play(other, foreign, gradients(foreign, 2))
    x = parameter(6)
    opt = LODO([x], depth=2)
    play(opt, [x], gradients([x], 3))
    before = snapshot(opt)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(other.state_dict())
    assert same(snapshot(opt), before)
    play(opt, [x], gradients([x], 3, seed=2))  # and it still works


def test_parameters_of_other_sizes_are_refused_even_if_they_add_up():
    ours, theirs = [parameter(3), parameter(4)], [parameter(4), parameter(3)]
    opt, other = LODO(ours), LODO(theirs)
    play(other, theirs, gradients(theirs, 1))
    with pytest.raises(ValueError, match=r"parameters of \[4, 3\] elements, ours have \[3, 4\]"):
        opt.load_state_dict(other.state_dict())


def test_a_plain_state_is_refused_by_an_optimizer_with_options():
    x = parameter(6)
    plain = LODO([x], depth=2)
    play(plain, [x], gradients([x], 2))
    for options, message in (
        ({"momentum": "learned"}, "momentum = 'fixed', ours is 'learned'"),
        ({"moment_dtype": torch.bfloat16}, "moment_dtype = None, ours is torch.bfloat16"),
        ({"meta_optimizer": "schedule-free"}, "meta_optimizer = 'adam', ours is 'schedule-free'"),
        ({"recipe": "robust"}, "preconditioner"),
    ):
        opt = LODO([parameter(6)], depth=2, **options)
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(plain.state_dict())


def test_a_state_without_what_its_options_need_is_refused():
    x = parameter(6)
    opt = LODO([x], depth=2, momentum="learned")
    play(opt, [x], gradients([x], 2))
    state = opt.state_dict()
    del state["state"][0]["last_gradient"]
    with pytest.raises(ValueError, match=r"last_gradient of shape None, but n = 6"):
        opt.load_state_dict(state)


def test_another_number_of_groups_is_refused():
    opt = LODO([parameter(3)])
    with pytest.raises(ValueError, match="2 parameter groups, this optimizer 1"):
        opt.load_state_dict(LODO([{"params": [parameter(3)]}, {"params": [parameter(3)]}]).state_dict())


def test_a_state_with_other_permutations_is_refused():
    x = parameter(6)
    opt = LODO([x])
    play(opt, [x], gradients([x], 2))
    state = opt.state_dict()
    state["state"][0]["fingerprint"] ^= 1
    with pytest.raises(ValueError, match="other permutations"):
        opt.load_state_dict(state)


def test_permutations_are_not_stored():
    x = parameter(64)
    opt = LODO([x])
    play(opt, [x], gradients([x], 2))
    stored = [v for v in opt.state_dict()["state"][0].values() if isinstance(v, torch.Tensor)]
    assert all(v.is_floating_point() for v in stored)
    assert sum(v.numel() for v in stored) == 3 * opt._state(0)["theta"].numel() + 64


def test_state_sits_under_the_first_parameter_of_each_group():
    params = [parameter(3) for _ in range(4)]
    opt = LODO([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    give_gradients(params)
    opt.step()
    assert {p for p, state in opt.state.items() if state} == {params[0], params[2]}
    assert [i for i, state in opt.state_dict()["state"].items() if state] == [0, 2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, OPTIONS["robust"], OPTIONS["robust schedule-free"]])
def test_a_first_step_of_nothing_changes_nothing_that_matters(options, backend):
    """torch's distributed checkpointing makes a fresh optimizer's state with zero gradients and lr 0."""
    x = parameter(10)
    y = torch.nn.Parameter(x.detach().clone())
    prepared, fresh = (LODO([p], lr=0.1, backend=backend, **options) for p in (x, y))
    x.grad = torch.zeros_like(x)
    prepared.param_groups[0]["lr"] = 0.0
    prepared.step()
    prepared.param_groups[0]["lr"] = 0.1
    assert torch.equal(x, y)
    steps = gradients([x], 5)
    play(prepared, [x], steps)
    play(fresh, [y], steps)
    assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["paper", *OPTIONS])
def test_distributed_checkpointing_accepts_the_state(name):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def model():
        torch.manual_seed(3)
        return torch.nn.Linear(5, 2)

    a, b = model(), model()
    opt, resumed = (LODO(m.parameters(), lr=0.1, **OPTIONS.get(name, {})) for m in (a, b))
    play(opt, list(a.parameters()), gradients(list(a.parameters()), 4))
    b.load_state_dict(a.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(a, opt))
    set_optimizer_state_dict(b, resumed, state)
    steps = gradients(list(a.parameters()), 4, seed=1)
    play(opt, list(a.parameters()), steps)
    play(resumed, list(b.parameters()), steps)
    assert all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_into_the_state_is_noticed(backend):
    """Activations kept from the last step are not used with a theta or momentum they do not belong to."""
    x, y = parameter(30), parameter(30)
    y.data.copy_(x.detach())
    a, b = LODO([x], lr=0.1, backend=backend), LODO([y], lr=0.1, backend="reference")
    steps = gradients([x], 4)
    play(a, [x], steps[:2])
    play(b, [y], steps[:2])
    for opt in (a, b):
        opt._state(0)["theta"].mul_(1.1)
        opt._state(0)["momentum"].mul_(0.5)
    play(a, [x], steps[2:])
    play(b, [y], steps[2:])
    assert torch.allclose(x, y, rtol=1e-12, atol=0)


def test_load_hooks_of_the_user_run_around_ours():
    x = parameter(4, dtype=torch.bfloat16)
    opt = LODO([x])
    play(opt, [x], gradients([x], 2))
    state = opt.state_dict()
    seen = []
    fresh = LODO([parameter(4, dtype=torch.bfloat16)])
    fresh.register_load_state_dict_pre_hook(lambda _, given: {**given})
    fresh.register_load_state_dict_post_hook(lambda o: seen.append(o._state(0)["theta"].dtype))
    fresh.load_state_dict(state)
    assert seen == [torch.float32]
    assert len(fresh._optimizer_load_state_dict_pre_hooks) == 1
