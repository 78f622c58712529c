"""Saving, loading, copying and pickling: a resumed run is the run that was not interrupted."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from helpers import BACKENDS, FAMILIES, give_gradients, group_of, natural, network, parameter, same, snapshot
from lodo import LODO, KronLODO, Mixing
from lodo.meta import Adam, ScheduleFree

ROUNDED = Adam(moment_dtype="bfloat16")
SHUFFLE = Mixing(3, mixing="shuffle")
OPTIONS = {
    "gate": {"momentum": "learned"},
    "forgetful gate": {"momentum": "learned", "save_activations": False},
    "schedule-free": {"meta_optimizer": ScheduleFree(window=4)},
    "bfloat16": {"meta_optimizer": ROUNDED},
    "shuffle": {"preconditioner": SHUFFLE},
    "forgetful": {"save_activations": False},
    "guard": {"guard": True},
    "robust": {"recipe": "robust", "preconditioner": SHUFFLE},
    "robust schedule-free": {"recipe": "robust", "preconditioner": SHUFFLE, "meta_optimizer": "schedule-free"},
}


def small(params, **options):
    """LODO with a network of three layers, if no other one is given."""
    return LODO(params, **{"preconditioner": Mixing(3), **options})


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
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_resumes_bit_for_bit(name, backend, how, dtype):
    def make(x, seed=5):
        return small([x], lr=0.05, backend=backend, seed=seed, **OPTIONS[name])

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
        rounded = "bfloat16" in opt.param_groups[0]["meta_optimizer"]
        expected = torch.bfloat16 if rounded else torch.float32
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == expected
    play(twin, [y], after)
    assert not same(opt.state_dict(), twin.state_dict())  # nothing is shared


def steep(x, t):
    """Curvature 0.1 to 1; from step 6 on, for a while, a hundred times that."""
    curvature = torch.linspace(0.1, 1, len(x)).to(x.dtype) * (100 if 6 <= t < 12 else 1)
    x.grad = curvature * x.detach()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["guard", "robust"])
@pytest.mark.parametrize(
    ("saved_at", "clipped", "change"),
    [(6, True, 1.0), (7, True, 0.5), (9, True, 0.5), (14, False, 1.02)],
    ids=["before an outlier", "before an overshot", "amid overshots", "recovering"],
)
def test_a_save_in_the_middle_of_an_episode(saved_at, clipped, change, name, backend, how):
    """Trust, the average of norms and the direction of the last step come back with the state."""

    def make(x, seed=0):
        return small([x], lr=0.5, beta=0.5, backend=backend, seed=seed, **OPTIONS[name])

    torch.manual_seed(2)
    x = parameter(20, dtype=torch.float32)
    opt = make(x)
    for t in range(saved_at):
        steep(x, t)
        opt.step()
    trust = opt._state(0)["guard"].trust
    assert (trust < 1) == (saved_at > 7)
    y, twin = COPIES[how]((x, opt), make)
    for t in range(saved_at, 20):
        steep(x, t)
        steep(y, t)
        outlier = float(x.grad.norm()) > 5 * opt._state(0)["guard"].average
        opt.step()
        twin.step()
        assert torch.equal(x, y)
        if t == saved_at:
            assert outlier == clipped
            assert twin._state(0)["guard"].trust == pytest.approx(change * trust)
    assert same(opt.state_dict(), twin.state_dict())


def test_rounded_moments_stay_as_they_are_in_any_model():
    """torch would cast them to the parameter's dtype, and theta to bfloat16."""
    x = parameter(20, dtype=torch.float32)
    opt = LODO([x], lr=0.1, meta_optimizer=ROUNDED)
    play(opt, [x], gradients([x], 4))
    for dtype, own in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        other = LODO([parameter(20, dtype=dtype)], lr=0.1, meta_optimizer=ROUNDED)
        other.load_state_dict(through_file(opt.state_dict()))
        ours, theirs = opt._state(0), other._state(0)
        assert theirs["theta"].dtype == theirs["momentum"].dtype == own
        for moment in ("exp_avg", "exp_avg_sq"):
            assert theirs[moment].dtype == torch.bfloat16
            assert torch.equal(theirs[moment], ours[moment])
            assert theirs[moment].data_ptr() != ours[moment].data_ptr()


@pytest.mark.parametrize("make", [KronLODO, torch.optim.AdamW])
def test_a_state_of_another_optimizer_is_refused(make):
    x = parameter(20)
    with pytest.raises(ValueError, match="the state must be one of LODO, got that of another optimizer"):
        LODO([x]).load_state_dict(make([x]).state_dict())


@pytest.mark.parametrize("name", ["paper", "gate", "schedule-free", "bfloat16", "shuffle", "robust"])
def test_backends_read_each_others_states(name):
    for first, second in (BACKENDS, BACKENDS[::-1]):
        x, y = parameter(30), parameter(30)
        one, other = (small([p], lr=0.1, backend=b, **OPTIONS.get(name, {})) for p, b in ((x, first), (y, second)))
        play(one, [x], gradients([x], 4))
        y.data.copy_(x.detach())
        other.load_state_dict(one.state_dict())
        steps = gradients([x], 4, seed=1)
        play(one, [x], steps)
        play(other, [y], steps)
        assert torch.allclose(x, y, rtol=1e-11, atol=0)


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
    assert twin.param_groups[1]["preconditioner"] == "mixing(depth=3)"


def test_a_loaded_state_shares_nothing_with_its_source(backend):
    x, y = parameter(8), parameter(8)
    a, b = LODO([x], lr=0.1, backend=backend), LODO([y], lr=0.1, backend=backend)
    play(a, [x], gradients([x], 3))
    state = a.state_dict()
    b.load_state_dict(state)
    kept = copy.deepcopy(state)
    play(b, [y], gradients([y], 3))
    assert same(a.state_dict(), kept)


def test_a_float32_state_serves_a_float64_model():
    x = parameter(6, dtype=torch.float32)
    opt = LODO([x])
    play(opt, [x], gradients([x], 2))
    double = LODO([parameter(6)])
    double.load_state_dict(opt.state_dict())
    assert double._state(0)["theta"].dtype == torch.float64
    assert torch.equal(double._state(0)["theta"], opt._state(0)["theta"].double())


@pytest.mark.parametrize(
    ("settings", "sizes", "message"),
    [
        ({"preconditioner": Mixing(2)}, [6], r"preconditioner = 'mixing\(depth=2\)', ours is 'mixing\(depth=3\)'"),
        ({"preconditioner": "diagonal"}, [6], r"preconditioner = 'diagonal', ours is 'mixing\(depth=3\)'"),
        ({"preconditioner": "residual"}, [6], r"preconditioner = 'residual'"),
        ({"preconditioner": SHUFFLE}, [6], r"preconditioner = .*mixing='shuffle'.*ours is 'mixing\(depth=3\)'"),
        ({"meta_optimizer": "sgd"}, [6], r"meta_optimizer = 'sgd', ours is 'adam'"),
        ({"meta_optimizer": ROUNDED}, [6], r"meta_optimizer = .*moment_dtype='bfloat16'.*, ours is 'adam'"),
        ({"momentum": "learned"}, [6], r"momentum = 'learned', ours is 'fixed'"),
        ({}, [7], r"momentum of shape \(7,\), but n = 6"),
        ({}, [3, 3], r"2 parameters, ours 1"),
    ],
)
def test_a_foreign_state_is_refused_before_anything_changes(settings, sizes, message):
    foreign = [parameter(n) for n in sizes]
    other = small(foreign, **settings)
    play(other, foreign, gradients(foreign, 2))
    x = parameter(6)
    opt = small([x])
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
    plain = small([x])
    play(plain, [x], gradients([x], 2))
    for options, message in (
        ({"momentum": "learned"}, "momentum = 'fixed', ours is 'learned'"),
        ({"meta_optimizer": ROUNDED}, "meta_optimizer = 'adam', ours is .*bfloat16"),
        ({"meta_optimizer": "schedule-free"}, "meta_optimizer = 'adam', ours is 'schedule-free'"),
        ({"recipe": "robust"}, "meta_optimizer = 'adam', ours is .*bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            small([parameter(6)], **options).load_state_dict(plain.state_dict())


def test_a_state_without_what_its_options_need_is_refused():
    x = parameter(6)
    opt = small([x], momentum="learned")
    play(opt, [x], gradients([x], 2))
    for name, message in (
        ("last_gradient", "last_gradient of shape None, but n = 6"),
        ("exp_avg", "exp_avg of shape None"),
        ("fingerprint", "has no fingerprint: it was not saved by LODO, or is damaged"),
        ("guard", "has no guard"),
        ("gate", "has no gate"),
    ):
        state = opt.state_dict()
        del state["state"][0][name]
        before = snapshot(opt)
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(state)
        assert same(snapshot(opt), before)


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


@pytest.mark.parametrize("name", ["paper", *OPTIONS])
def test_what_is_saved_is_in_natural_order_and_plain(name, backend):
    """Tensors and numbers only, so that ``torch.load`` reads them safely; no permutations, no unused lanes."""
    x = parameter(64)
    opt = small([x], backend=backend, lr=0.01, **OPTIONS.get(name, {}))
    play(opt, [x], gradients([x], 3))
    saved, state = opt.state_dict()["state"][0], opt._state(0)
    assert all(type(value) in (int, float, torch.Tensor) for value in saved.values())
    assert saved.keys() == state.keys()  # torch before 2.10 reads a flat distributed checkpoint by the names in memory
    shape = group_of(opt).family.shape(group_of(opt).layout)
    for moment in ("theta", "exp_avg", "exp_avg_sq", "z"):
        assert (moment in saved) == (moment in state)
        if moment in saved:
            assert saved[moment].shape == shape
            assert torch.equal(saved[moment], natural(opt, state[moment]))
            assert saved[moment].dtype == state[moment].dtype
    assert saved["guard"].tolist() == list(state["guard"])
    assert saved["moved"].tolist() == state["moved"] == [True]
    assert saved["numels"].tolist() == [64]
    assert ("gate" in saved) == ("gate" in state)
    if "gate" in saved:
        assert saved["gate"].tolist() == list(state["gate"])
    assert (saved["format"], saved["step"], saved["meta_step"], saved["skipped"]) == (3, 3, 2, 0)
    assert saved["fingerprint"] == network(opt).fingerprint
    assert not any(value.dtype == torch.int32 for value in saved.values() if isinstance(value, torch.Tensor))


def test_both_backends_save_the_same():
    """After a first step, which is the same but for the last digits, with theta as it was drawn."""
    saved = []
    for backend in BACKENDS:
        torch.manual_seed(0)
        x = parameter(50)
        opt = small([x], backend=backend)
        play(opt, [x], gradients([x], 1))
        saved.append(opt.state_dict())
    first, second = (state["state"][0] for state in saved)
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    assert first.keys() == second.keys()
    for name in ("theta", "exp_avg", "momentum", "numels", "fingerprint", "step"):
        assert same(first[name], second[name])


def test_state_sits_under_the_first_parameter_of_each_group():
    """The others have their part of the momentum."""
    params = [parameter(3) for _ in range(4)]
    opt = LODO([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    give_gradients(params)
    opt.step()
    assert [j for j, p in enumerate(params) if "theta" in opt.state[p]] == [0, 2]
    saved = opt.state_dict()["state"]
    assert [j for j in saved if "theta" in saved[j]] == [0, 2]
    assert all(list(saved[j]) == ["momentum"] for j in (1, 3))


def copies_of(opt, params):
    """The optimizer itself, its copies, and one that has loaded its state, each with its parameters."""
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    loaded = small(twins, lr=0.1)
    loaded.load_state_dict(through_file(opt.state_dict()))
    pair = (opt, params)
    return [pair, copy.deepcopy(pair), pickle.loads(pickle.dumps(pair)), (loaded, twins)]


def test_every_parameter_has_its_part_of_the_momentum():
    """In its shape, in memory and saved, before and after more steps, in copies and after loading."""
    params = [parameter(2, 3), parameter(4), parameter(), parameter(2, dtype=torch.complex128)]
    opt = small(params, lr=0.1)
    play(opt, params, gradients(params, 2))
    for other, own in copies_of(opt, params):
        play(other, own, gradients(own, 2, seed=1))
        parts = group_of(other).layout.split(other._state(0)["momentum"])
        saved = other.state_dict()["state"]
        for j, p in enumerate(own[1:], 1):
            assert torch.equal(other.state[p]["momentum"], parts[j])
            assert torch.equal(saved[j]["momentum"], parts[j])
            assert parts[j].any()
        assert [part.shape for part in parts] == [(2, 3), (4,), (), (2, 2)]


def nested(entry):
    """An entry of a saved state as format 2 had it."""
    return {**entry, "format": 2} if "theta" in entry else {}


@pytest.mark.parametrize("name", ["paper", "robust", "schedule-free"])
def test_states_of_format_2_load(name):
    """Only the holder had a state."""
    params = [parameter(5), parameter(2)]
    opt = small(params, lr=0.1, **OPTIONS.get(name, {}))
    play(opt, params, gradients(params, 3))
    state = opt.state_dict()
    old = {**state, "state": {key: nested(entry) for key, entry in state["state"].items()}}
    other = small([parameter(5), parameter(2)], lr=0.1, **OPTIONS.get(name, {}))
    other.load_state_dict(through_file(old))
    assert same(other.state_dict(), state)


def test_a_later_format_is_refused():
    x = parameter(6)
    opt = small([x])
    play(opt, [x], gradients([x], 2))
    state = opt.state_dict()
    state["state"][0]["format"] += 1
    with pytest.raises(ValueError, match="group 0 of the state has format 4, which a later release of lodo saved"):
        opt.load_state_dict(state)


def test_options_that_a_state_lacks_stay_as_they_are():
    x = parameter(6)
    opt = small([x], lr=0.1)
    play(opt, [x], gradients([x], 2))
    state = opt.state_dict()
    del state["param_groups"][0]["maximize"]
    other = small([parameter(6)], lr=0.3, maximize=True)
    other.load_state_dict(state)
    assert (other.param_groups[0]["maximize"], other.param_groups[0]["lr"]) == (True, 0.1)


def test_groups_that_were_not_added_are_saved_only_if_they_repeat_others():
    x = parameter(6)
    opt = small([x], lr=0.1)
    play(opt, [x], gradients([x], 2))
    state = opt.state_dict()
    opt.param_groups.append(opt.param_groups[0])
    repeated = opt.state_dict()
    assert same(repeated["state"], state["state"])
    assert same(repeated["param_groups"], 2 * state["param_groups"])
    opt.param_groups[1] = {**opt.param_groups[0], "params": [parameter(3)]}
    with pytest.raises(RuntimeError, match="use add_param_group"):
        opt.state_dict()
    opt.param_groups.clear()
    with pytest.raises(RuntimeError, match="groups cannot be removed"):
        opt.state_dict()


@pytest.mark.parametrize("name", ["paper", "robust", "robust schedule-free"])
def test_a_first_step_of_nothing_changes_nothing_that_matters(name, backend):
    """torch's distributed checkpointing makes a fresh optimizer's state with zero gradients and lr 0."""
    x = parameter(10)
    y = torch.nn.Parameter(x.detach().clone())
    prepared, fresh = (small([p], lr=0.1, backend=backend, **OPTIONS.get(name, {})) for p in (x, y))
    x.grad = torch.zeros_like(x)
    prepared.param_groups[0]["lr"] = 0.0
    prepared.step()
    prepared.param_groups[0]["lr"] = 0.1
    assert torch.equal(x, y)
    steps = gradients([x], 5)
    play(prepared, [x], steps)
    play(fresh, [y], steps)
    assert torch.equal(x, y)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("name", ["paper", *OPTIONS])
def test_distributed_checkpointing_accepts_the_state(name, flat, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    how = StateDictOptions(flatten_optimizer_state_dict=flat)

    def model():
        torch.manual_seed(3)
        return torch.nn.Linear(5, 2)

    a, b = model(), model()
    opt, resumed = (small(m.parameters(), lr=0.1, **OPTIONS.get(name, {})) for m in (a, b))
    play(opt, list(a.parameters()), gradients(list(a.parameters()), 4))
    b.load_state_dict(a.state_dict())
    dcp.save(get_optimizer_state_dict(a, opt, options=how), checkpoint_id=tmp_path, no_dist=True)
    state = get_optimizer_state_dict(b, resumed, options=how)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(b, resumed, state, options=how)
    assert same(resumed.state_dict(), opt.state_dict())
    steps = gradients(list(a.parameters()), 4, seed=1)
    play(opt, list(a.parameters()), steps)
    play(resumed, list(b.parameters()), steps)
    assert all(map(torch.equal, a.parameters(), b.parameters()))


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
