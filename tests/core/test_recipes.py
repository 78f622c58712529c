"""Recipes and the options they fill in: what is given wins, and what cannot be is named."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers import BACKENDS, give_gradients, parameter
from lodo import LODO, Mixing, memory_estimate

ROBUST = {
    "mixing": "shuffle",
    "momentum": "learned",
    "moment_dtype": torch.bfloat16,
    "save_activations": False,
    "guard": True,
}
PAPER = {"mixing": "random", "momentum": "fixed", "moment_dtype": None, "save_activations": True, "guard": False}


def chosen(opt, group=0):
    """The options of a recipe as they are in effect."""
    family, options = opt._families[group], opt.param_groups[group]
    return {
        "mixing": family.mixing if isinstance(family, Mixing) else None,
        "momentum": options["momentum"],
        "moment_dtype": options["moment_dtype"],
        "save_activations": opt.save_activations,
        "guard": options["guard"],
    }


def test_what_the_recipes_are():
    assert chosen(LODO([parameter(3)])) == PAPER
    assert chosen(LODO([parameter(3)], recipe="paper")) == PAPER
    assert chosen(LODO([parameter(3)], recipe="robust")) == ROBUST


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
    assert recipe.param_groups[0].keys() == options.param_groups[0].keys()


@pytest.mark.parametrize(
    ("name", "value", "means"),
    [
        ("mixing", "random", "random"),
        ("mixing", "permuted-shuffle", "permuted-shuffle"),
        ("momentum", "fixed", "fixed"),
        ("moment_dtype", "own", None),
        ("moment_dtype", "bfloat16", torch.bfloat16),
        ("save_activations", True, True),
        ("guard", False, False),
    ],
)
def test_what_is_given_wins_over_robust(name, value, means):
    opt = LODO([parameter(3)], recipe="robust", **{name: value})
    assert chosen(opt) == {**ROBUST, name: means}


@pytest.mark.parametrize("name", ROBUST)
def test_what_is_given_wins_over_the_paper(name):
    assert chosen(LODO([parameter(3)], **{name: ROBUST[name]})) == {**PAPER, name: ROBUST[name]}


def test_none_leaves_it_to_the_recipe():
    for recipe, expected in (("paper", PAPER), ("robust", ROBUST)):
        assert chosen(LODO([parameter(3)], recipe=recipe, **dict.fromkeys(ROBUST))) == expected


@pytest.mark.parametrize(("dtype", "own"), [(torch.float32, torch.float32), (torch.float64, torch.float64),
                                            (torch.bfloat16, torch.float32)])  # fmt: skip
def test_own_means_thetas_dtype(dtype, own):
    opt = LODO([parameter(3, dtype=dtype)], recipe="robust", moment_dtype="own")
    assert opt._state(0)["exp_avg"].dtype == opt._state(0)["theta"].dtype == own
    rounded = LODO([parameter(3, dtype=dtype)], recipe="robust")
    assert rounded._state(0)["exp_avg"].dtype == torch.bfloat16
    assert rounded._state(0)["theta"].dtype == own


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{"meta_optimizer": "sgd"}, {"meta_optimizer": "schedule-free"}, {"preconditioner": "diagonal"},
     {"preconditioner": "residual", "lr": 0.01}, {"preconditioner": Mixing(3)}, {"depth": 3, "block_size": 2}],
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
    adam = options.get("meta_optimizer") is None
    assert opt.param_groups[0]["moment_dtype"] == (torch.bfloat16 if adam else None)
    assert opt.param_groups[0]["momentum"] == "learned"
    assert opt.param_groups[0]["guard"] is True


def test_groups_follow_the_recipe_and_override_it():
    params = [parameter(3) for _ in range(4)]
    opt = LODO(
        [
            {"params": [params[0]]},
            {"params": [params[1]], "momentum": "fixed", "guard": False, "moment_dtype": "own"},
            {"params": [params[2]], "meta_optimizer": "schedule-free"},
            {"params": [params[3]], "preconditioner": "diagonal"},
        ],
        recipe="robust",
    )
    assert chosen(opt, 0) == ROBUST
    assert chosen(opt, 1) == {**ROBUST, "momentum": "fixed", "guard": False, "moment_dtype": None}
    assert chosen(opt, 2) == {**ROBUST, "moment_dtype": None}
    assert chosen(opt, 3) == {**ROBUST, "mixing": None}
    assert opt.param_groups[2]["meta_betas"][0] == 0.93
    assert opt.param_groups[0]["meta_betas"] == (0.9, 0.999)
    give_gradients(params)
    opt.step()
    opt.step()


def test_none_in_a_group_leaves_it_to_the_recipe():
    nothing = {"momentum": None, "guard": None, "moment_dtype": None}
    for recipe, expected in (("paper", PAPER), ("robust", ROBUST)):
        opt = LODO([{"params": [parameter(3)], **nothing}], recipe=recipe)
        assert chosen(opt) == expected


def test_a_copy_keeps_the_recipe():
    opt = copy.deepcopy(LODO([parameter(3)], recipe="robust"))
    opt.add_param_group({"params": [parameter(2)]})
    assert chosen(opt, 1) == ROBUST


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "best"}, r"recipe must be one of 'paper', 'robust', got 'best'"),
        ({"recipe": None}, r"recipe must be one of 'paper', 'robust', got None"),
        ({"momentum": "none"}, r"momentum must be one of 'fixed', 'learned', got 'none'"),
        ({"momentum": 0.9}, r"momentum must be one of 'fixed', 'learned', got 0.9"),
        ({"mixing": "riffle"}, r"mixing must be one of 'random', 'shuffle', 'permuted-shuffle', got 'riffle'"),
        ({"mixing": "riffle", "preconditioner": "diagonal"}, r"mixing must be one of .* got 'riffle'"),
        (
            {"mixing": "shuffle", "preconditioner": "diagonal"},
            r"mixing must be None unless preconditioner is 'mixing', got 'shuffle' with 'diagonal'",
        ),
        (
            {"mixing": "random", "preconditioner": Mixing(3)},
            r"mixing must be None unless .* got 'random' with Mixing\(",
        ),
        ({"meta_window": 5}, r"meta_window must be None unless meta_optimizer is 'schedule-free', got 5 with 'adam'"),
        ({"guard": 1}, r"guard must be True or False, got 1"),
        ({"save_activations": "no"}, r"save_activations must be True or False, got 'no'"),
        ({"meta_window": 0}, r"meta_window must be an integer >= 1, got 0"),
        ({"meta_window": 1.5, "meta_optimizer": "schedule-free"}, r"meta_window must be an integer >= 1, got 1.5"),
        ({"moment_dtype": torch.float16}, r"moment_dtype must be torch.bfloat16 .*'own' .* or None, got torch.float16"),
        ({"moment_dtype": "half"}, r"moment_dtype must be torch.bfloat16 .*'own' .* or None, got 'half'"),
        (
            {"moment_dtype": torch.bfloat16, "meta_optimizer": "schedule-free"},
            r"moment_dtype must be None unless meta_optimizer is 'adam': 'schedule-free' .* got torch.bfloat16",
        ),
        (
            {"moment_dtype": "bfloat16", "meta_optimizer": "sgd", "recipe": "robust"},
            r"moment_dtype must be None unless meta_optimizer is 'adam': 'sgd' .* got 'bfloat16'",
        ),
    ],
)
def test_errors_name_the_argument_the_value_and_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        LODO([parameter(3)], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": "none"}, r"momentum must be one of 'fixed', 'learned', got 'none'"),
        ({"guard": "yes"}, r"guard must be True or False, got 'yes'"),
        ({"meta_window": -1}, r"meta_window must be an integer >= 1, got -1"),
        ({"moment_dtype": torch.float64}, r"moment_dtype must be torch.bfloat16.* got torch.float64"),
        ({"moment_dtype": torch.bfloat16, "meta_optimizer": "sgd"}, r"moment_dtype must be None unless .* 'sgd'"),
        ({"preconditioner": "shuffle"}, r"preconditioner must be one of"),
        ({"mixing": "shuffle"}, r"mixing is not an option of a group \(got 'shuffle'\).*preconditioner=Mixing"),
        ({"save_activations": False}, r"save_activations is not an option of a group \(got False\)"),
        ({"recipe": "robust"}, r"recipe is not an option of a group \(got 'robust'\)"),
    ],
)
def test_a_bad_option_of_a_group_is_refused_whole(options, message):
    opt = LODO([parameter(3)])
    with pytest.raises(ValueError, match=message):
        opt.add_param_group({"params": [parameter(2)], **options})
    assert len(opt.param_groups) == len(opt._families) == len(opt._networks) == 1
    opt.add_param_group({"params": [parameter(2)]})


def test_own_is_allowed_with_every_meta_optimizer():
    for meta in ("adam", "sgd", "schedule-free"):
        opt = LODO([parameter(3)], meta_optimizer=meta, moment_dtype="own", recipe="robust")
        assert opt.param_groups[0]["moment_dtype"] is None


def test_the_memory_estimate_takes_the_same_names():
    half = memory_estimate(100, moment_dtype=torch.bfloat16)
    assert memory_estimate(100, moment_dtype="bfloat16") == half
    assert memory_estimate(100, moment_dtype="own") == memory_estimate(100)
    assert 2 * half.moments == memory_estimate(100).moments


def test_the_memory_estimate_takes_recipes():
    for meta in ("adam", "sgd", "schedule-free"):
        robust = {**ROBUST, "moment_dtype": torch.bfloat16 if meta == "adam" else None}
        del robust["guard"]
        assert memory_estimate(500, recipe="robust", meta_optimizer=meta) == memory_estimate(
            500, meta_optimizer=meta, **robust
        )
    whole = memory_estimate(500, recipe="robust", moment_dtype="own", save_activations=True)
    assert whole.moments == 2 * whole.theta
    assert whole.activations > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "best"}, r"recipe must be one of 'paper', 'robust', got 'best'"),
        ({"save_activations": "no"}, r"save_activations must be True or False, got 'no'"),
        ({"mixing": "riffle"}, r"mixing must be one of 'random'.* got 'riffle'"),
        ({"momentum": "none"}, r"momentum must be one of 'fixed', 'learned', got 'none'"),
        ({"moment_dtype": torch.float16}, r"moment_dtype must be torch.bfloat16.* got torch.float16"),
        ({"meta_optimizer": "lion"}, r"meta_optimizer must be one of .* got 'lion'"),
    ],
)
def test_the_memory_estimate_refuses_what_lodo_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        memory_estimate(100, **options)
