"""Numbers to log: how large gradients and steps are, whether they agree, how far G stretches.

| number | what it is |
|---|---|
| ``gradient_norm``, ``momentum_norm`` | of the last gradient g as it was used (after the guard), and of the average m |
| ``step_norm`` | how far the last step moved x, weight decay aside |
| ``descent_cosine`` | between the last step and -g: 1 is steepest descent, below 0 the step leads uphill |
| ``descent_fraction`` | how many of the steps since the first call had a cosine above 0 |
| ``largest_stretch``, ``smallest_stretch`` | estimates of the most and least that G, lr included, stretches a vector |
| ``hypergradient_norm`` | of the first update of theta after the first call, the fifth and so on; nan before that |
| ``gate_weight``, ``trust`` | of the learned momentum gate and of the guard, where they are on |

The stretches are power iterations, for G and for c - G with c the largest, whose vectors are kept from call to call:
they improve as calls go on and follow G as it changes. The largest is never too large, the smallest never too small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lodo.preconditioners import Engine

FIRST = 4  # power iterations of the first call, for each stretch
CYCLE = 16  # calls in which each stretch is refined once
UPDATES = 4  # calls in which one update of theta is measured


class Watch:
    """What is kept from call to call, never saved: counts of descents, vectors of the power iterations.

    >>> g = torch.tensor([1.0, 2.0])
    >>> watch = Watch(g, g, steps=1)
    >>> watch.note(g, -g)
    >>> watch.descent_fraction
    0.5
    """

    def __init__(self, g: Tensor, s: Tensor, steps: int) -> None:
        self._steps = self._descents = self._calls = 0
        rng = torch.Generator().manual_seed(0)
        self._top, self._bottom = (torch.randn(g.shape, generator=rng).to(g) for _ in range(2))
        self.largest = self.smallest = 0.0
        if steps:
            self.note(g, s)  # the step that was just taken

    def note(self, g: Tensor, s: Tensor) -> None:
        """A step of -lr s was taken where the gradient is g."""
        self._steps += 1
        self._descents += bool(g.dot(s) > 0)

    @property
    def descent_fraction(self) -> float:
        """Of the steps noted; nan if there was none."""
        return self._descents / self._steps if self._steps else float("nan")

    @property
    def due(self) -> bool:
        """Whether the next update of theta is to be measured, by the calls so far."""
        return self._calls % UPDATES == 1

    def look(self, G: Callable[[Tensor], Tensor], iterations: int | None) -> None:
        """Refine the stretches: by ``iterations``, or, if None, one of them at times.

        >>> watch = Watch(torch.zeros(2), torch.zeros(2), steps=0)
        >>> watch.look(lambda v: torch.tensor([3.0, 0.5]) * v, 50)
        >>> round(watch.largest, 4), round(watch.smallest, 4)
        (3.0, 0.5)
        """
        turn = self._calls % CYCLE
        times = FIRST if iterations is None and not self._calls else iterations
        self._calls += 1
        for _ in range(int(turn == 0) if times is None else times):
            self._top, self.largest = _iterate(self._top, G(self._top), 0.0)
        for _ in range(int(turn == CYCLE // 2) if times is None else times):
            self._bottom, self.smallest = _iterate(self._bottom, G(self._bottom), self.largest)


def _iterate(v: Tensor, Gv: Tensor, shift: float) -> tuple[Tensor, float]:
    """The next vector, of (G - shift) v, and how much G stretched this one."""
    new = Gv - shift * v
    norm = float(new.norm())
    return (new / norm if norm > 0 else v), float(Gv.norm() / v.norm())


def diagnose(state: dict[str, Any], g: Tensor, s: Tensor, lr: float, watch: Watch, engine: Engine) -> dict[str, float]:
    """A group's numbers, after a step of -lr s where the gradient is g; may have the next update measured."""
    gradient, length = float(g.norm()), float(s.norm())
    numbers = {
        "gradient_norm": gradient,
        "momentum_norm": float(state["momentum"].norm()),
        "step_norm": state["last_lr"] * length,
        "descent_cosine": float(g.dot(s)) / (gradient * length) if gradient * length else float("nan"),
        "descent_fraction": watch.descent_fraction,
        "largest_stretch": lr * watch.largest,
        "smallest_stretch": lr * watch.smallest,
        "hypergradient_norm": engine.hypergradient_norm,
    }
    if "gate" in state:
        numbers["gate_weight"] = state["gate"][0]
    if "last_step" in state:  # the guard is on
        numbers["trust"] = state["guard"][1]
    engine.watched |= watch.due
    return numbers
