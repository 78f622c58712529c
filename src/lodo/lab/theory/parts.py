"""The parts of the theory by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lodo.lab.theory.base import Finding


PARTS = ("dynamics", "saddle", "expressiveness", "hessian", "minima", "gains")


class Part(Protocol):
    """Computes a part of the theory."""

    def __call__(self, quick: bool = False, seed: int = 0) -> Finding: ...


def part(name: str) -> Part:
    """Import one of `PARTS`."""
    run: Part = import_module(f"lodo.lab.theory.{name}").run
    return run
