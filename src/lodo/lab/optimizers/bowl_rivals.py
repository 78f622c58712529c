"""The rows of settings/rivals.toml: optimizers at their best known settings on the bowl."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lodo._checks import check_choice
from lodo.lab.optimizers import COSTS, OPTIMIZERS, Choice
from lodo.lab.settings import read_settings

_FIELDS = ("optimizer", "label", "cost", "options", "known", "note")


@dataclass(frozen=True)
class Known:
    """The error of earlier runs, and their number of steps."""

    error: float
    steps: int


@dataclass(frozen=True)
class Rival:
    """An optimizer with its settings, the cost of a step, and what is known about it."""

    choice: Choice
    cost: str
    known: Known | None = None
    note: str = ""


@functools.cache
def bowl_rivals() -> dict[str, Rival]:
    """All rows by name, in the order of the file.

    >>> bowl_rivals()["psgd_lra_10"].choice.label, bowl_rivals()["psgd_lra_10"].cost
    ('PSGD-LRA, rank 10', 'O(n)')
    """
    return {name: make_rival(name, fields) for name, fields in read_settings("rivals").items()}


def make_rival(name: str, fields: Mapping[str, Any]) -> Rival:
    """A row from its fields in the file.

    >>> make_rival("lodo", {}).choice.label
    'LODO'
    """
    for field in fields:
        check_choice(f"a field of [{name}]", field, _FIELDS)
    optimizer = fields.get("optimizer", name)
    entry = OPTIMIZERS.get(optimizer)
    cost = fields.get("cost", entry.cost if entry else None)
    check_choice(f"cost of [{name}]", cost, COSTS)
    settings = None
    if "options" in fields:
        settings = {key: None if value == "None" else value for key, value in fields["options"].items()}
    choice = Choice(optimizer, title=fields.get("label"), settings=settings)
    known = Known(**fields["known"]) if "known" in fields else None
    return Rival(choice, cost, known, fields.get("note", ""))
