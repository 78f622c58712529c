"""The class as its users meet it: arguments, dtypes, groups, bad gradients, looking inside."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import (
    BACKENDS,
    FAMILIES,
    difference,
    give_gradients,
    natural,
    network,
    parameter,
    permutations,
    same,
    snapshot,
)
from lodo import LODO, Diagonal, Mixing, Residual
from lodo.engines.numba import storage
from lodo.layout import Layout
from lodo.meta import Adam, ScheduleFree

F64 = torch.float64


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("lr", "fast"),
        ("meta_lr", -1e-3),
        ("meta_lr", float("inf")),
        ("beta", 1.0),
        ("beta", -0.1),
        ("beta", torch.tensor(0.5)),
        ("lr", torch.tensor([0.1, 0.2])),
        ("weight_decay", -0.1),
        ("maximize", "yes"),
        ("preconditioner", "diag"),
        ("preconditioner", Adam()),
        ("preconditioner", 3),
        ("meta_optimizer", "adamw"),
        ("meta_optimizer", Diagonal()),
        ("meta_optimizer", 0.9),
        ("seed", -1),
        ("seed", 0.5),
        ("backend", "cuda"),
        ("nonfinite", "ignore"),
        ("recipe", "best"),
        ("momentum", "none"),
        ("guard", "yes"),
        ("guard", 1),
        ("save_activations", "no"),
        ("save_activations", 0),
    ],
)
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=name) as error:
        LODO([parameter(3)], **{name: value})
    assert repr(value) in str(error.value)


def test_defaults_are_the_papers():
    group = LODO([parameter(3)]).param_groups[0]
    assert (group["lr"], group["meta_lr"], group["beta"]) == (1.0, 1e-3, 0.9)
    assert (group["preconditioner"], group["meta_optimizer"]) == ("mixing", "adam")
    assert (group["momentum"], group["guard"], group["weight_decay"]) == ("fixed", False, 0.0)
    assert LODO([parameter(3)]).save_activations is True
    assert Mixing() == Mixing(depth=16, block_size=4, width=2.0, mixing="random")
    assert Residual() == Residual(depth=64, width=2.0)
    assert Adam() == Adam(betas=(0.9, 0.999), eps=1e-7, moment_dtype=None)
    assert ScheduleFree() == ScheduleFree(b=0.93, window=None, eps=1e-8)


def test_a_configured_family_object():
    opt = LODO([parameter(3)], preconditioner=Mixing(depth=2, block_size=3))
    assert natural(opt, opt._state(0)["theta"]).shape == (2, 2, 3, 3)
    text = LODO([parameter(3)], preconditioner="mixing(depth=2, block_size=3)")
    assert text.param_groups[0]["preconditioner"] == opt.param_groups[0]["preconditioner"]


def test_options_of_a_group_override_the_defaults():
    a, b, c = parameter(3), parameter(4), parameter(5)
    opt = LODO(
        [
            {"params": [a]},
            {"params": [b], "lr": 0.5, "beta": 0.1, "meta_lr": 0.0, "weight_decay": 0.2, "preconditioner": "diagonal"},
            {"params": [c], "preconditioner": Diagonal(), "meta_optimizer": "sgd", "seed": 3},
        ]
    )
    assert [group["lr"] for group in opt.param_groups] == [1.0, 0.5, 1.0]
    assert [natural(opt, opt._state(i)["theta"], i).dim() for i in range(3)] == [4, 1, 1]
    assert "exp_avg" not in opt._state(2)


OF_A_GROUP = {
    "lr": 0.3,
    "meta_lr": 0.05,
    "beta": 0.2,
    "weight_decay": 0.5,
    "maximize": True,
    "momentum": "learned",
    "seed": 4,
}
META_OPTIMIZERS = (ScheduleFree(), Adam(moment_dtype="bfloat16"), Adam(betas=(0.5, 0.5)), Adam(eps=1.0))


@pytest.mark.parametrize(
    ("name", "value"), [*OF_A_GROUP.items(), *(("meta_optimizer", meta) for meta in META_OPTIMIZERS)], ids=str
)
def test_an_option_of_one_group_acts_on_that_group_alone(name, value):
    """Each group moves as it would in an optimizer of its own with that option."""
    a, b = parameter(6), parameter(6)
    twin, plain = torch.nn.Parameter(b.detach().clone()), torch.nn.Parameter(b.detach().clone())
    both = LODO([{"params": [a]}, {"params": [b], name: value}], lr=0.1)
    alone = LODO([{"params": [parameter(6)]}, {"params": [twin]}], **{"lr": 0.1, name: value})
    default = LODO([{"params": [parameter(6)]}, {"params": [plain]}], lr=0.1)
    for _ in range(4):
        give_gradients([a, b])
        twin.grad, plain.grad = b.grad.clone(), b.grad.clone()
        for opt in (both, alone, default):
            opt.step()
    assert torch.equal(b, twin)
    assert not torch.equal(b, plain)


@pytest.mark.parametrize(
    "name", ["save_activations", "recipe", "backend", "nonfinite", "check_sync_every", "on_reshard"]
)
def test_what_is_no_option_of_a_group_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is not an option of a group"):
        LODO([{"params": [parameter(3)], name: 3}])


def test_numbers_are_stored_as_pythons_own():
    numbers = {"lr": np.float64(0.1), "beta": np.float32(0.5), "meta_lr": 1, "seed": np.int64(3), "weight_decay": 0}
    adam = Adam(betas=[np.float64(0.8), 0], eps=np.float64(1e-6))
    group = LODO([parameter(3)], **numbers, meta_optimizer=adam).param_groups[0]
    assert {name: type(group[name]) for name in numbers} == dict.fromkeys(numbers, float) | {"seed": int}
    assert group["meta_optimizer"] == "adam(betas=(0.8, 0.0), eps=1e-06)"
    assert repr(ScheduleFree(np.float32(0.5), np.int64(7))) == "schedule-free(b=0.5, window=7)"
    assert repr(Mixing(np.int64(8), np.int64(3), np.float64(3))) == "mixing(depth=8, block_size=3, width=3.0)"
    assert repr(Mixing(8, 3, 3)) == "mixing(depth=8, block_size=3, width=3.0)"
    assert repr(Residual(np.int64(8), 3)) == "residual(depth=8, width=3.0)"


def test_a_family_that_does_not_describe_itself_is_refused():
    class Mute(Diagonal):
        def __repr__(self):
            return object.__repr__(self)

    with pytest.raises(ValueError, match="frozen dataclass"):
        LODO([parameter(3)], preconditioner=Mute())
    with pytest.raises(ValueError, match="frozen dataclass"):
        LODO([{"params": [parameter(3)], "preconditioner": Mute()}])


def test_removing_a_group_is_noticed():
    a, b = parameter(3), parameter(3)
    opt = LODO([{"params": [a]}, {"params": [b]}])
    give_gradients([a, b])
    opt.step()
    del opt.param_groups[0]
    with pytest.raises(RuntimeError, match="1 parameter groups but 2 were added"):
        opt.step()


def test_each_group_draws_its_own_network():
    opt = LODO([{"params": [parameter(6)]}, {"params": [parameter(6)]}])
    assert not torch.equal(opt._state(0)["theta"], opt._state(1)["theta"])
    assert not torch.equal(permutations(opt, 0), permutations(opt, 1))


def test_bad_group_is_refused_whole():
    opt = LODO([parameter(3)])
    before = len(opt.param_groups)
    with pytest.raises(ValueError, match=r"beta must be .* got 2"):
        opt.add_param_group({"params": [parameter(2)], "beta": 2})
    with pytest.raises(TypeError, match=r"int64"):
        opt.add_param_group({"params": [parameter(2), torch.arange(3)]})
    assert len(opt.param_groups) == len(opt._groups) == before
    opt.add_param_group({"params": [parameter(2)]})
    assert len(opt.param_groups) == 2


def test_integer_parameters_are_refused():
    with pytest.raises(TypeError, match=r"floating-point and complex.*parameter 0 of group 0.*int64"):
        LODO([torch.arange(3)])


def test_one_device_a_group():
    with pytest.raises(ValueError, match=r"one device.*'meta'"):
        LODO([parameter(3), torch.nn.Parameter(torch.zeros(3, device="meta"))])


def test_sparse_gradients_are_refused_by_name():
    table = torch.nn.Embedding(5, 2, sparse=True)
    dense = parameter(2, dtype=torch.float32)
    opt = LODO([("table.weight", table.weight), ("head", dense)])
    (table(torch.tensor([1, 2])).sum() + dense.sum()).backward()
    before = table.weight.detach().clone(), dense.detach().clone()
    with pytest.raises(RuntimeError, match=r"sparse.*'table.weight' 0 of group 0"):
        opt.step()
    assert torch.equal(table.weight, before[0])
    assert torch.equal(dense, before[1])
    with pytest.raises(RuntimeError, match="sparse gradients"):
        LODO([table.weight]).step()


# ---------------------------------------------------------------- dtypes, shapes, layouts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, backend):
    """theta is float32, or float64 for float64; the step is rounded once, into the parameter."""
    p = parameter(40, dtype=dtype)
    exact = torch.nn.Parameter(p.detach().to(F64 if dtype is F64 else torch.float32))
    opt, twin = LODO([p], lr=0.1, backend=backend), LODO([exact], lr=0.1, backend=backend)
    for _ in range(10):
        exact.data.copy_(p.detach())
        p.grad = torch.randn(40, dtype=F64).to(dtype)
        exact.grad = p.grad.to(exact.dtype)
        opt.step()
        twin.step()
        assert torch.equal(p, exact.detach().to(dtype))
    expected = F64 if dtype is F64 else torch.float32
    assert opt._state(0)["theta"].dtype == opt._state(0)["momentum"].dtype == expected


def test_mixed_dtypes_in_a_group(backend):
    params = [parameter(3, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float16)]
    whole = torch.nn.Parameter(torch.cat([p.detach().float() for p in params]))
    opt, twin = LODO(params, lr=0.1, backend=backend), LODO([whole], lr=0.1, backend=backend)
    give_gradients(params)
    for _ in range(3):
        whole.grad = torch.cat([p.grad.float() for p in params])
        opt.step()
        twin.step()
        whole.data.copy_(torch.cat([p.detach().float() for p in params]))
    assert torch.equal(opt._state(0)["theta"], twin._state(0)["theta"])
    assert LODO([params[0], parameter(2)])._state(0)["theta"].dtype == F64


def test_complex_parameters_are_pairs_of_reals(backend):
    z = torch.nn.Parameter(torch.randn(5, dtype=torch.complex128))
    r = torch.nn.Parameter(torch.view_as_real(z.detach()).clone())
    opt, twin = LODO([z], lr=0.1, backend=backend), LODO([r], lr=0.1, backend=backend)
    target = torch.randn(5, 2, dtype=F64)
    for _ in range(10):
        opt.zero_grad()
        twin.zero_grad()
        ((torch.view_as_real(z) - target).square().sum() + (r - target).square().sum()).backward()
        assert z.grad.is_complex()
        opt.step()
        twin.step()
    assert torch.equal(torch.view_as_real(z), r)


def test_conjugated_gradients():
    z, w = (torch.nn.Parameter(torch.randn(5, dtype=torch.complex128)) for _ in range(2))
    opt = LODO([z], lr=0.1)
    (z.conj() * w.detach()).real.sum().backward()
    before = z.detach().clone()
    opt.step()
    assert torch.allclose(before - z.detach(), 0.1 * 0.1 * w.detach())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_default_device_or_autocast_does_not_matter(family):
    def run():
        torch.manual_seed(2)
        x = torch.nn.Parameter(torch.randn(20, device="cpu"))
        x.grad = torch.randn(20, device="cpu")
        opt = LODO([x], lr=0.01, preconditioner=family)
        return x, opt

    x, plain = run()
    y, elsewhere = run()
    plain.step()
    plain.step()
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        elsewhere.step()
        elsewhere.step()
    assert torch.equal(x, y)


def test_inference_mode_leaves_no_trace(backend):
    x, y = parameter(20), parameter(20)
    y.data.copy_(x.detach())
    looked, plain = LODO([x], lr=0.1, backend=backend), LODO([y], lr=0.1, backend=backend)
    with torch.inference_mode():
        looked.precondition(torch.ones(20, dtype=F64))
    for _ in range(3):
        give_gradients([x])
        y.grad = x.grad.clone()
        looked.step()
        plain.step()
    assert torch.equal(x, y)


def test_non_contiguous_parameters(backend):
    base = torch.randn(4, 6, dtype=F64)
    strided = torch.nn.Parameter(base.clone().t())
    plain = torch.nn.Parameter(base.t().contiguous())
    assert not strided.is_contiguous()
    opt, twin = LODO([strided], lr=0.1, backend=backend), LODO([plain], lr=0.1, backend=backend)
    for _ in range(5):
        gradient = torch.randn(4, 6, dtype=F64).t()
        strided.grad, plain.grad = gradient, gradient.contiguous()
        opt.step()
        twin.step()
    assert torch.equal(strided, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_of_one_scalar(family, backend):
    x = parameter()
    opt = LODO([x], lr=0.01 if family == "residual" else 0.5, preconditioner=family, backend=backend)
    start = abs(float(x.detach()))
    for _ in range(60):
        opt.zero_grad()
        (0.5 * x**2).backward()
        opt.step()
    assert abs(float(x.detach())) < 0.5 * start


def test_empty_tensors_and_empty_groups_do_no_harm():
    empty, x = parameter(0), parameter(3)
    opt = LODO([{"params": [empty]}, {"params": [x, parameter(0)]}], lr=0.1)
    give_gradients([empty, x])
    before = x.detach().clone()
    opt.step()
    assert not torch.equal(x, before)
    assert "n = 0" in repr(opt)
    opt.load_state_dict(opt.state_dict())


# ---------------------------------------------------------------- what a step does


def test_maximize_mirrors_minimize(backend):
    a = parameter(12)
    b = torch.nn.Parameter(a.detach().clone())
    up, down = LODO([a], lr=0.1, maximize=True, backend=backend), LODO([b], lr=0.1, backend=backend)
    for _ in range(5):
        give_gradients([a])
        b.grad = -a.grad
        up.step()
        down.step()
    assert torch.equal(a, b)


def test_closure_is_called_once_with_grad_enabled():
    x = parameter(4)
    opt = LODO([x], lr=0.1)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        return loss

    expected = float((x.detach() ** 2).sum())
    with torch.no_grad():
        loss = opt.step(closure)
    assert calls == [True]
    assert float(loss.detach()) == pytest.approx(expected)
    assert opt.step() is None


def test_grad_mode_is_left_as_it_was_even_after_an_error():
    x = parameter(4)
    opt = LODO([x])
    x.grad = torch.full((4,), float("nan"), dtype=F64)
    with pytest.raises(FloatingPointError):
        opt.step()
    assert torch.is_grad_enabled()
    with torch.no_grad():
        give_gradients([x])
        opt.step()
        assert not torch.is_grad_enabled()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_nothing_of_the_graph_is_kept():
    x = parameter(4)
    opt = LODO([x], lr=0.1)
    for _ in range(3):
        opt.zero_grad()
        torch.autograd.backward((x**3).sum(), create_graph=True)  # gradients that have a graph themselves
        assert x.grad.requires_grad
        opt.step()
    for value in opt._state(0).values():
        assert not (isinstance(value, torch.Tensor) and (value.requires_grad or value.grad_fn is not None))
    net = network(opt)
    assert net.g.vector.grad_fn is None
    assert net.s.vector.grad_fn is None
    assert x.is_leaf
    x.grad = None


def test_a_group_without_any_gradient_is_left_alone():
    a, b = parameter(4), parameter(4)
    opt = LODO([{"params": [a]}, {"params": [b]}], lr=0.1)
    give_gradients([a, b])
    opt.step()
    before = snapshot(opt)
    a.grad, b.grad = None, None
    opt.step()
    assert same(snapshot(opt), before)
    give_gradients([a])
    opt.step()
    assert torch.equal(b, before[0][1])


def test_add_param_group_in_the_middle_of_a_run():
    a, b = parameter(6), parameter(5)
    opt, alone = LODO([a], lr=0.1), None
    twin = torch.nn.Parameter(a.detach().clone())
    alone = LODO([twin], lr=0.1)
    for step in range(8):
        if step == 4:
            opt.add_param_group({"params": [b], "lr": 0.2})
        give_gradients([a, b])
        twin.grad = a.grad.clone()
        start = b.detach().clone()
        opt.step()
        alone.step()
        assert torch.equal(b, start) == (step < 4)
    assert torch.equal(a, twin)  # the first group does not notice
    assert opt._state(1)["step"] == 4


# ---------------------------------------------------------------- non-finite gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_gradients_change_nothing(bad, family, backend):
    rate = 0.01 if family == "residual" else 0.1
    a, b = parameter(7), parameter(3)
    strict = LODO([{"params": [a]}, {"params": [b]}], lr=rate, preconditioner=family, backend=backend)
    for _ in range(4):
        give_gradients([a, b])
        strict.step()
    before = snapshot(strict)
    give_gradients([a, b])
    b.grad[1] = bad
    with pytest.raises(FloatingPointError, match=r"gradient of parameter 0 of group 1, shape \(3,\), is not finite"):
        strict.step()
    assert same(snapshot(strict), before)


def test_the_error_uses_the_parameters_name():
    model = torch.nn.Linear(2, 2)
    opt = LODO(model.named_parameters())
    model(torch.randn(1, 2)).sum().backward()
    model.bias.grad[0] = float("inf")
    with pytest.raises(
        FloatingPointError, match=r"parameter 'bias' 1 of group 0.*nothing was changed.*nonfinite='skip'"
    ):
        opt.step()


def test_skip_counts_and_continues_as_if_nothing_had_been(backend):
    x = parameter(9)
    y = torch.nn.Parameter(x.detach().clone())
    skipping, clean = (LODO([p], lr=0.1, nonfinite="skip", backend=backend) for p in (x, y))
    for step in range(12):
        if step % 3 == 0:  # the very first call included
            x.grad = torch.full((9,), float("nan"), dtype=F64)
            skipping.step()
        give_gradients([y])
        x.grad = y.grad.clone()
        skipping.step()
        clean.step()
    assert torch.equal(x, y)
    assert skipping.skipped_steps == 4
    assert clean.skipped_steps == 0


def test_skip_skips_every_group():
    a, b = parameter(4), parameter(4)
    for order in ([a, b], [b, a]):
        opt = LODO([{"params": [p]} for p in order], lr=0.1, nonfinite="skip")
        give_gradients([a, b])
        opt.step()
        before = [p.detach().clone() for p in (a, b)]
        give_gradients([a, b])
        b.grad[0] = float("nan")
        opt.step()
        assert all(map(torch.equal, (a, b), before))
        assert opt.skipped_steps == 1


def test_skipping_nothing_counts_nothing():
    clean = LODO([parameter(3)], nonfinite="skip")
    assert clean.skipped_steps == 0


def test_a_gradient_that_would_overflow_the_moments_is_refused_too():
    x = parameter(5, dtype=torch.float32)
    opt = LODO([x], lr=1.0)
    x.grad = torch.ones(5)
    opt.step()
    before = snapshot(opt)
    x.grad = torch.full((5,), 1e21)  # finite, but its hypergradient squared is not
    with pytest.raises(FloatingPointError, match=r"gradient of group 0 is too large for torch.float32"):
        opt.step()
    assert same(snapshot(opt), before)
    x.grad = torch.full((5,), 1e15)
    opt.step()
    x.grad = torch.full((5,), 1e15)  # no larger than the last, but the last step was
    with pytest.raises(FloatingPointError, match=r"lr \* \|u\| of at most"):
        opt.step()
    assert all(torch.isfinite(v).all() for v in opt._state(0).values() if isinstance(v, torch.Tensor))


# ---------------------------------------------------------------- reproducible


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_network_on_every_backend(family):
    nets = [LODO([parameter(50)], preconditioner=family, seed=7, backend=b) for b in BACKENDS]
    single = LODO([parameter(50, dtype=torch.float32)], preconditioner=family, seed=7)
    thetas = [natural(opt, opt._state(0)["theta"]) for opt in (*nets, single)]
    assert torch.equal(thetas[0], thetas[1])
    assert torch.equal(thetas[0].float(), thetas[2])
    assert torch.equal(permutations(nets[0]), permutations(nets[1]))
    v = torch.randn(50, dtype=F64)
    assert difference(nets[0].precondition(v), nets[1].precondition(v)) < 1e-12


@pytest.mark.parametrize("family", ["mixing", "residual"])
def test_two_runs_with_one_seed_are_identical_and_with_two_are_not(family, backend):
    def run(seed):
        torch.manual_seed(1)
        x = parameter(30)
        opt = LODO([x], lr=0.01, preconditioner=family, seed=seed, backend=backend)
        for _ in range(10):
            give_gradients([x])
            opt.step()
        return x

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


# ---------------------------------------------------------------- looking inside


@pytest.mark.parametrize("family", FAMILIES)
def test_precondition_is_the_matrix_and_the_step(family, backend):
    x = parameter(11)
    opt = LODO([x], lr=0.05, preconditioner=family, backend=backend)
    for _ in range(5):
        give_gradients([x])
        opt.step()
    v = torch.randn(11, dtype=F64)
    G = opt.preconditioner_matrix()
    assert difference(opt.precondition(v), G @ v) < 1e-12
    give_gradients([x])
    before = x.detach().clone()
    opt.step()
    taken = before - x.detach()
    assert difference(opt.precondition(opt._state(0)["momentum"]), taken) < 1e-12


def test_looking_does_not_disturb(backend):
    x = parameter(11)
    y = torch.nn.Parameter(x.detach().clone())
    looked, left = LODO([x], lr=0.1, backend=backend), LODO([y], lr=0.1, backend=backend)
    for _ in range(6):
        give_gradients([x])
        y.grad = x.grad.clone()
        looked.step()
        left.step()
        looked.precondition(torch.randn(11, dtype=F64))
        looked.preconditioner_matrix()
        repr(looked)
    assert torch.equal(x, y)


def test_precondition_errors():
    opt = LODO([{"params": [parameter(5)]}, {"params": [parameter(2)]}])
    with pytest.raises(ValueError, match=r"v must be a floating-point tensor of shape \(5,\).*got \(4,\)"):
        opt.precondition(torch.zeros(4))
    with pytest.raises(ValueError, match=r"group must be an index from 0 to 1, got 2"):
        opt.precondition(torch.zeros(5), group=2)
    assert opt.precondition(torch.zeros(2), group=1).dtype == torch.float32
    with pytest.raises(ValueError, match=r"floating-point tensor.*torch.int64"):
        opt.precondition(torch.ones(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"group 1 has none"):
        LODO([{"params": [parameter(5)]}, {"params": []}]).preconditioner_matrix(1)
    with pytest.raises(ValueError, match=r"n = 5,000.*n up to 4096"):
        LODO([parameter(5000)], preconditioner="diagonal").preconditioner_matrix()


def test_repr_tells_size_and_memory():
    text = repr(LODO([parameter(100, dtype=torch.float32)], preconditioner=Mixing(4, 2)))
    assert "n = 100" in text
    assert "mixing(depth=4, block_size=2)" in text
    assert "kB" in text


# ---------------------------------------------------------------- storage of the mixing network


@settings(max_examples=200)
@given(n=st.integers(1, 40_000), block_size=st.integers(1, 8), width=st.sampled_from([1.0, 1.3, 2.0, 4.0]))
def test_tiles_hold_every_block_and_little_else(n, block_size, width):
    family = Mixing(block_size=block_size, width=width)
    T, L = family.tiles(Layout.flat(n))
    blocks = family.hidden(n) // block_size
    assert family.hidden(n) >= n
    assert family.hidden(n) % block_size == 0
    assert L <= 64
    assert 0 <= T * L - blocks < L  # unused lanes fit in the last tile
    if width * n >= block_size:
        assert family.hidden(n) == max(int(width * n / block_size) * block_size, -(-n // block_size) * block_size)


@settings(max_examples=30)
@given(n=st.integers(1, 700), block_size=st.integers(1, 8), mixing=st.sampled_from(["random", "shuffle"]))
def test_permutations_are_permutations(n, block_size, mixing):
    """Of hidden vectors in natural order, and of vectors in tiles, where unused lanes stay among themselves."""
    family, layout = Mixing(depth=3, block_size=block_size, mixing=mixing), Layout.flat(n)
    P = family.fixed(layout, torch.Generator().manual_seed(n))
    hidden = family.hidden(n)
    rows = family.permutations(P, layout)
    assert torch.equal(rows.sort(dim=1).values, torch.arange(hidden).expand(3, hidden))
    if mixing == "random":
        packed = storage.pack_permutations(P, family, layout)
        size = packed.shape[1]
        assert torch.equal(packed.sort(dim=1).values, torch.arange(size, dtype=torch.int32).expand(3, size))
