"""The rows of rivals.toml: optimizers at their best known settings on the bowl."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from lodo._checks import check_choice
from lodo.lab.optimizers import BASELINES, COSTS, Choice

_FIELDS = ("optimizer", "label", "cost", "options", "known", "note")


@dataclass(frozen=True)
class Known:
    """The error of earlier runs, and after how many steps."""

    error: float
    steps: int


@dataclass(frozen=True)
class Rival:
    """An optimizer with its settings, what a step of it costs, and what is known of it."""

    choice: Choice
    cost: str
    known: Known | None = None
    note: str = ""


@functools.cache
def rivals() -> dict[str, Rival]:
    """All rows by name.

    >>> rivals()["psgd_lra_10"].choice.label, rivals()["psgd_lra_10"].cost
    ('PSGD-LRA, rank 10', 'O(n)')
    """
    text = resources.files("lodo.lab.settings").joinpath("rivals.toml").read_text(encoding="utf-8")
    return read(text)


def read(text: str) -> dict[str, Rival]:
    """Rows from TOML, in order.

    >>> read('[lodo]')["lodo"].choice.label
    'LODO'
    """
    return {name: _row(name, fields) for name, fields in tomllib.loads(text).items()}


def _row(name: str, fields: Mapping[str, Any]) -> Rival:
    for field in fields:
        check_choice(f"a field of [{name}]", field, _FIELDS)
    optimizer = fields.get("optimizer", name)
    known = BASELINES.get(optimizer)
    cost = fields.get("cost", known.cost if known else None)
    check_choice(f"cost of [{name}]", cost, COSTS)
    options = fields.get("options")
    settings = options and {key: None if value == "None" else value for key, value in options.items()}
    choice = Choice(optimizer, title=fields.get("label"), settings=settings)
    earlier = Known(**fields["known"]) if "known" in fields else None
    return Rival(choice, cost, earlier, fields.get("note", ""))
