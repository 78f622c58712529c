"""The options of a parameter group: recipes, checks, plain data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lodo import meta
from lodo._checks import check_bool, check_choice, check_int, check_real

RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"mixing": "random", "momentum": "fixed", "moment_dtype": None, "save_activations": True, "guard": False},
    "robust": {
        "mixing": "shuffle",
        "momentum": "learned",
        "moment_dtype": torch.bfloat16,
        "save_activations": False,
        "guard": True,
    },
}
MOMENTA = ("fixed", "learned")


def from_recipe(recipe: str, **given: Any) -> dict[str, Any]:
    """The recipe's options, and those given (None leaves them to the recipe).

    >>> from_recipe("robust", guard=False)["guard"]
    False
    """
    check_choice("recipe", recipe, tuple(RECIPES))
    return {**RECIPES[recipe], **{name: value for name, value in given.items() if value is not None}}


def complete(group: dict[str, Any], recipe: str) -> dict[str, Any]:
    """A group's options checked, filled in, and as plain data: `torch.load(weights_only=True)` reads no other."""
    left_open = [name for name in ("momentum", "guard") if group[name] is None]
    group = {**group, **{name: RECIPES[recipe][name] for name in left_open}}
    check(group)
    numbers = {name: float(group[name]) for name in ("meta_lr", "beta", "weight_decay", "meta_eps")}
    betas = meta.default_betas(group["meta_optimizer"]) if group["meta_betas"] is None else group["meta_betas"]
    return {
        **group,
        **numbers,
        "lr": group["lr"] if isinstance(group["lr"], Tensor) else float(group["lr"]),
        "seed": int(group["seed"]),
        "meta_betas": tuple(map(float, betas)),
        "moment_dtype": moment_dtype(group["moment_dtype"], group["meta_optimizer"], recipe),
    }


def moment_dtype(given: torch.dtype | str | None, meta_optimizer: str, recipe: str) -> torch.dtype | None:
    """bfloat16, or None for theta's own.

    >>> moment_dtype(None, "adam", "robust"), moment_dtype("own", "adam", "robust")
    (torch.bfloat16, None)
    """
    adam = meta_optimizer == "adam"
    if given is None:
        chosen: torch.dtype | None = RECIPES[recipe]["moment_dtype"] if adam else None
        return chosen
    if given not in (torch.bfloat16, "bfloat16", "own"):
        raise ValueError(
            f"moment_dtype must be torch.bfloat16 or 'bfloat16', 'own' (theta's dtype) or None, got {given!r}"
        )
    if given == "own":
        return None
    if not adam:
        raise ValueError(
            f"moment_dtype must be None unless meta_optimizer is 'adam': {meta_optimizer!r} has no moments "
            f"that could be halved, got {given!r}"
        )
    return torch.bfloat16


def check(group: dict[str, Any]) -> None:
    """Each option of a group, by name."""
    lr, betas = group["lr"], group["meta_betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Tensor lr must be 1-element, got {lr!r}")
    check_real("lr", lr.item() if isinstance(lr, Tensor) else lr, low=0.0)
    check_real("meta_lr", group["meta_lr"], low=0.0)
    check_real("beta", group["beta"], low=0.0, high=1.0)
    check_real("weight_decay", group["weight_decay"], low=0.0)
    check_choice("meta_optimizer", group["meta_optimizer"], meta.META_OPTIMIZERS)
    if betas is not None and (not isinstance(betas, (tuple, list)) or len(betas) != 2):
        raise ValueError(f"meta_betas must be two numbers in [0.0, 1.0), got {betas!r}")
    for i, b in enumerate(betas or ()):
        check_real(f"meta_betas[{i}]", b, low=0.0, high=1.0)
    check_real("meta_eps", group["meta_eps"], low=0.0, open_low=True)
    if group["meta_window"] is not None:
        check_int("meta_window", group["meta_window"], low=1)
        if group["meta_optimizer"] != "schedule-free":
            raise ValueError(
                f"meta_window must be None unless meta_optimizer is 'schedule-free', got {group['meta_window']} "
                f"with {group['meta_optimizer']!r}"
            )
    check_choice("momentum", group["momentum"], MOMENTA)
    check_bool("guard", group["guard"])
    check_int("seed", group["seed"], low=0)
    check_bool("maximize", group["maximize"])


def meta_optimizer(group: dict[str, Any]) -> meta.MetaOptimizer:
    """What learns a group's theta."""
    b1, b2 = group["meta_betas"]
    return meta.make(group["meta_optimizer"], (b1, b2), group["meta_eps"], group["meta_window"])
