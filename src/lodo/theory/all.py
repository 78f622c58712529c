"""The parts of the theory by name."""

from __future__ import annotations

from typing import Protocol

from lodo.theory import dynamics, expressiveness, hessian, minima, saddle
from lodo.theory.base import Finding


class Part(Protocol):
    """Computes a part of the theory."""

    def __call__(self, quick: bool = False, seed: int = 0) -> Finding: ...


THEORY: dict[str, Part] = {
    "dynamics": dynamics.run,
    "saddle": saddle.run,
    "expressiveness": expressiveness.run,
    "hessian": hessian.run,
    "minima": minima.run,
}
