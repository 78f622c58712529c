"""Recipes and the options they fill in: what is given wins, and what cannot be is named."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers import give_gradients, group_of, parameter
from lodo import LODO, Mixing, Residual, memory_estimate
from lodo.meta import SGD, Adam, ScheduleFree
from lodo.recipes import RECIPES

SHUFFLE, ROUNDED = Mixing(mixing="shuffle"), Adam(moment_dtype="bfloat16")
ROBUST = {
    "preconditioner": SHUFFLE,
    "momentum": "learned",
    "meta_optimizer": ROUNDED,
    "save_activations": False,
    "guard": True,
}
PAPER = {
    "preconditioner": Mixing(),
    "momentum": "fixed",
    "meta_optimizer": Adam(),
    "save_activations": True,
    "guard": False,
}


def chosen(opt, group=0):
    """The options of a recipe as they are in effect; text is what objects say of themselves."""
    options = opt.param_groups[group]
    assert repr(group_of(opt, group).family) == options["preconditioner"]
    return {
        **{name: options[name] for name in ("preconditioner", "momentum", "meta_optimizer", "guard")},
        "save_activations": opt.save_activations,
    }


def spelled(options):
    return {
        name: repr(value) if name in ("preconditioner", "meta_optimizer") else value for name, value in options.items()
    }


def test_what_the_recipes_are():
    assert chosen(LODO([parameter(3)])) == spelled(PAPER)
    assert chosen(LODO([parameter(3)], recipe="paper")) == spelled(PAPER)
    assert chosen(LODO([parameter(3)], recipe="robust")) == spelled(ROBUST)
    compact = {**ROBUST, "preconditioner": Mixing(depth=4, block_size=8, mixing="shuffle")}
    assert chosen(LODO([parameter(3)], recipe="compact")) == spelled(compact)


def test_a_recipe_has_its_own_meta_lr_unless_it_is_given():
    rates = {recipe: LODO([parameter(3)], recipe=recipe).param_groups[0]["meta_lr"] for recipe in RECIPES}
    assert rates == {"paper": 1e-3, "robust": 1e-3, "compact": 3e-4}
    assert LODO([parameter(3)], recipe="compact", meta_lr=1e-3).param_groups[0]["meta_lr"] == 1e-3
    opt = LODO(
        [{"params": [parameter(3)], "meta_lr": None}, {"params": [parameter(3)], "meta_lr": 2e-3}], recipe="compact"
    )
    assert [group["meta_lr"] for group in opt.param_groups] == [3e-4, 2e-3]


def test_a_recipe_is_its_options():
    x, y = parameter(20, dtype=torch.float32), parameter(20, dtype=torch.float32)
    y.data.copy_(x.detach())
    recipe, options = LODO([x], lr=0.1, recipe="robust"), LODO([y], lr=0.1, **ROBUST)
    for _ in range(5):
        give_gradients([x])
        y.grad = x.grad.clone()
        recipe.step()
        options.step()
    assert torch.equal(x, y)
    assert recipe.state_dict()["param_groups"] == options.state_dict()["param_groups"]


@pytest.mark.parametrize(
    ("name", "value", "means"),
    [
        ("preconditioner", Mixing(), "mixing"),
        ("preconditioner", "mixing", "mixing"),
        ("preconditioner", "mixing(depth=3)", "mixing(depth=3)"),
        ("preconditioner", "mixing(depth=3, mixing='shuffle')", "mixing(depth=3, mixing='shuffle')"),
        ("momentum", "fixed", "fixed"),
        ("meta_optimizer", Adam(), "adam"),
        ("meta_optimizer", "adam", "adam"),
        ("meta_optimizer", Adam(moment_dtype=torch.bfloat16), "adam(moment_dtype='bfloat16')"),
        ("meta_optimizer", "adam(eps=1e-6)", "adam(eps=1e-06)"),
        ("meta_optimizer", "sgd", "sgd"),
        ("save_activations", True, True),
        ("guard", False, False),
    ],
)
def test_what_is_given_wins_over_robust(name, value, means):
    """A network or a meta-optimizer that is given is taken as it is: the recipe fills in nothing of it."""
    opt = LODO([parameter(3)], recipe="robust", **{name: value})
    assert chosen(opt) == {**spelled(ROBUST), name: means}


@pytest.mark.parametrize("name", ROBUST)
def test_what_is_given_wins_over_the_paper(name):
    assert chosen(LODO([parameter(3)], **{name: ROBUST[name]})) == spelled({**PAPER, name: ROBUST[name]})


def test_none_leaves_it_to_the_recipe():
    for recipe, expected in (("paper", PAPER), ("robust", ROBUST)):
        assert chosen(LODO([parameter(3)], recipe=recipe, **dict.fromkeys(ROBUST))) == spelled(expected)


@pytest.mark.parametrize(("dtype", "own"), [(torch.float32, torch.float32), (torch.float64, torch.float64),
                                            (torch.bfloat16, torch.float32)])  # fmt: skip
def test_whole_moments_have_thetas_dtype(dtype, own):
    opt = LODO([parameter(3, dtype=dtype)], recipe="robust", meta_optimizer="adam")
    assert opt._state(0)["exp_avg"].dtype == opt._state(0)["theta"].dtype == own
    rounded = LODO([parameter(3, dtype=dtype)], recipe="robust")
    assert rounded._state(0)["exp_avg"].dtype == torch.bfloat16
    assert rounded._state(0)["theta"].dtype == own


@pytest.mark.parametrize(
    "options",
    [{"meta_optimizer": SGD()}, {"meta_optimizer": ScheduleFree()}, {"preconditioner": "diagonal"},
     {"preconditioner": Residual(8), "lr": 0.01}, {"preconditioner": Mixing(3)}, {"preconditioner": Mixing(3, 2)}],
    ids=str,
)  # fmt: skip
def test_robust_goes_with_everything(options, backend):
    x = parameter(12, dtype=torch.float32)
    opt = LODO([x], **{"lr": 0.1, "recipe": "robust", "backend": backend, **options})
    start = float(x.detach().square().sum())
    for _ in range(40):
        opt.zero_grad()
        (0.5 * x**2).sum().backward()
        opt.step()
    assert float(x.detach().square().sum()) < 0.5 * start
    given = {name: value for name, value in options.items() if name in ROBUST}
    assert chosen(opt) == {**spelled(ROBUST), **{name: str(value) for name, value in given.items()}}


def test_groups_follow_the_recipe_and_override_it():
    params = [parameter(3) for _ in range(4)]
    opt = LODO(
        [
            {"params": [params[0]]},
            {"params": [params[1]], "momentum": "fixed", "guard": False, "meta_optimizer": Adam()},
            {"params": [params[2]], "meta_optimizer": "schedule-free"},
            {"params": [params[3]], "preconditioner": "diagonal"},
        ],
        recipe="robust",
    )
    robust = spelled(ROBUST)
    assert chosen(opt, 0) == robust
    assert chosen(opt, 1) == {**robust, "momentum": "fixed", "guard": False, "meta_optimizer": "adam"}
    assert chosen(opt, 2) == {**robust, "meta_optimizer": "schedule-free"}
    assert chosen(opt, 3) == {**robust, "preconditioner": "diagonal"}
    give_gradients(params)
    opt.step()
    opt.step()


def test_none_in_a_group_leaves_it_to_the_recipe():
    nothing = {"preconditioner": None, "momentum": None, "guard": None, "meta_optimizer": None}
    for recipe, expected in (("paper", PAPER), ("robust", ROBUST)):
        opt = LODO([{"params": [parameter(3)], **nothing}], recipe=recipe)
        assert chosen(opt) == spelled(expected)


def test_a_copy_keeps_the_recipe():
    opt = copy.deepcopy(LODO([parameter(3)], recipe="robust"))
    opt.add_param_group({"params": [parameter(2)]})
    assert chosen(opt, 1) == spelled(ROBUST)


# ---------------------------------------------------------------- errors


ERRORS = [
    ({"recipe": "fast"}, r"recipe must be one of 'paper', 'robust', 'compact', got 'fast'$"),
    ({"recipe": "robst"}, r"recipe must be one of 'paper', 'robust', 'compact', got 'robst'; did you mean 'robust'\?"),
    ({"recipe": None}, r"recipe must be one of 'paper', 'robust', 'compact', got None"),
    ({"momentum": "none"}, r"momentum must be one of 'fixed', 'learned', got 'none'"),
    ({"momentum": "learnt"}, r"momentum must be one of 'fixed', 'learned', got 'learnt'; did you mean 'learned'\?"),
    ({"momentum": 0.9}, r"momentum must be one of 'fixed', 'learned', got 0.9"),
    ({"save_activations": "no"}, r"save_activations must be True or False, got 'no'"),
    ({"preconditioner": "shuffle"}, r"preconditioner must be one of 'mixing', .*got 'shuffle'"),
    ({"meta_optimizer": "lion"}, r"meta_optimizer must be one of 'adam', 'sgd', 'schedule-free', got 'lion'"),
]


@pytest.mark.parametrize(("options", "message"), [*ERRORS, ({"guard": 1}, r"guard must be True or False, got 1")])
def test_errors_name_the_argument_the_value_and_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        LODO([parameter(3)], **options)


@pytest.mark.parametrize(("options", "message"), ERRORS)
def test_the_memory_estimate_refuses_what_lodo_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        memory_estimate(100, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": "none"}, r"momentum must be one of 'fixed', 'learned', got 'none'"),
        ({"guard": "yes"}, r"guard must be True or False, got 'yes'"),
        ({"meta_optimizer": "schedule-free(window=-1)"}, r"window must be an integer >= 1, got -1"),
        ({"meta_optimizer": "adam(moment_dtype='half')"}, r"moment_dtype must be 'bfloat16'.* got 'half'"),
        ({"preconditioner": "shuffle"}, r"preconditioner must be one of"),
        ({"save_activations": False}, r"save_activations is not an option of a group \(got False\)"),
        ({"recipe": "robust"}, r"recipe is not an option of a group \(got 'robust'\)"),
    ],
)
def test_a_bad_option_of_a_group_is_refused_whole(options, message):
    opt = LODO([parameter(3)])
    with pytest.raises(ValueError, match=message):
        opt.add_param_group({"params": [parameter(2)], **options})
    assert len(opt.param_groups) == len(opt._groups) == 1
    opt.add_param_group({"params": [parameter(2)]})


def test_the_memory_estimate_takes_objects_and_text():
    half = memory_estimate(100, meta_optimizer=ROUNDED)
    assert memory_estimate(100, meta_optimizer="adam(moment_dtype='bfloat16')") == half
    assert memory_estimate(100, "mixing", meta_optimizer="adam") == memory_estimate(100, Mixing())
    assert 2 * half.moments == memory_estimate(100).moments


def test_the_memory_estimate_takes_recipes():
    without_guard = {name: value for name, value in ROBUST.items() if name != "guard"}
    for meta in (ROUNDED, Adam(), SGD(), ScheduleFree()):
        robust = memory_estimate(500, recipe="robust", meta_optimizer=meta)
        assert robust == memory_estimate(500, **{**without_guard, "meta_optimizer": meta})
    assert memory_estimate(500, recipe="robust") == memory_estimate(500, **without_guard)
    whole = memory_estimate(500, recipe="robust", meta_optimizer="adam", save_activations=True, backend="numba")
    assert whole.moments == 2 * whole.theta
    assert whole.activations > 0
