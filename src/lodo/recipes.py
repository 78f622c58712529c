"""Named settings, and the options of a parameter group: checked, filled in, and as plain data."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from lodo._checks import check_bool, check_choice, check_int, check_real
from lodo.meta import META_OPTIMIZERS, MetaOptimizer
from lodo.spelling import configured

RECIPES: dict[str, dict[str, Any]] = {
    "paper": {
        "meta_lr": 1e-3,
        "preconditioner": "mixing",
        "momentum": "fixed",
        "meta_optimizer": "adam",
        "save_activations": True,
        "guard": False,
    },
    "robust": {
        "meta_lr": 1e-3,
        "preconditioner": "mixing(mixing='shuffle')",
        "momentum": "learned",
        "meta_optimizer": "adam(moment_dtype='bfloat16')",
        "save_activations": False,
        "guard": True,
    },
}
RECIPES["compact"] = {
    **RECIPES["robust"],
    "meta_lr": 3e-4,  # chosen on the bowl with n = 1,000
    "preconditioner": "mixing(depth=4, block_size=8, mixing='shuffle')",
}
MOMENTA = ("fixed", "learned")


def from_recipe(recipe: str, **given: Any) -> dict[str, Any]:
    """The recipe's options, replaced by those given; None leaves an option to the recipe.

    >>> from_recipe("robust", guard=False, momentum=None)["guard"]
    False
    """
    check_choice("recipe", recipe, tuple(RECIPES))
    chosen = {**RECIPES[recipe], **{name: value for name, value in given.items() if value is not None}}
    check_choice("momentum", chosen["momentum"], MOMENTA)
    check_bool("save_activations", chosen["save_activations"])
    check_bool("guard", chosen["guard"])
    return chosen


def as_meta_optimizer(given: str | MetaOptimizer) -> MetaOptimizer:
    """The meta-optimizer that ``given`` is or spells.

    >>> as_meta_optimizer("adam(eps=1e-8)").eps
    1e-08
    """
    return _spelled_meta_optimizer(given) if isinstance(given, str) else _checked_meta_optimizer(given)


@cache
def _spelled_meta_optimizer(text: str) -> MetaOptimizer:
    return _checked_meta_optimizer(text)


def _checked_meta_optimizer(given: object) -> MetaOptimizer:
    return configured("meta_optimizer", given, MetaOptimizer, META_OPTIMIZERS)  # type: ignore[type-abstract]


def complete(group: dict[str, Any], recipe: str) -> dict[str, Any]:
    """A group's options checked, filled in, and as plain data, which is all that ``torch.load`` reads safely."""
    left_open = [name for name in ("meta_lr", "momentum", "meta_optimizer", "guard") if group[name] is None]
    group = {**group, **{name: RECIPES[recipe][name] for name in left_open}}
    check(group)
    numbers = {name: float(group[name]) for name in ("meta_lr", "beta", "weight_decay")}
    return {
        **group,
        **numbers,
        "lr": group["lr"] if isinstance(group["lr"], Tensor) else float(group["lr"]),
        "seed": int(group["seed"]),
        "meta_optimizer": repr(as_meta_optimizer(group["meta_optimizer"])),
    }


def check(group: dict[str, Any]) -> None:
    """Check each option of a group, by name."""
    check_lr(group["lr"])
    check_real("meta_lr", group["meta_lr"], low=0.0)
    check_real("beta", group["beta"], low=0.0, high=1.0)
    check_real("weight_decay", group["weight_decay"], low=0.0)
    as_meta_optimizer(group["meta_optimizer"])
    check_choice("momentum", group["momentum"], MOMENTA)
    check_bool("guard", group["guard"])
    check_int("seed", group["seed"], low=0)
    check_bool("maximize", group["maximize"])


def check_lr(lr: object) -> None:
    """Check a rate, which may be a number or a tensor with one.

    >>> import torch
    >>> check_lr(torch.tensor([0.1, 0.2]))
    Traceback (most recent call last):
    ...
    ValueError: Tensor lr must be 1-element, got tensor([0.1000, 0.2000])
    """
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got {lr!r}")
    check_real("lr", lr.item() if isinstance(lr, Tensor) else lr, low=0.0)
