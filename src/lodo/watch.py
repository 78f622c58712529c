"""What `lodo.inspect` keeps from call to call: counts of descents and power iterations for the stretches of G."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lodo.scalars import Scalar

FIRST = 200  # power iterations of the first call, for each stretch, at most
CONVERGED = 1e-3  # the relative change of a stretch below which its iterations end
CYCLE = 16  # calls in which each stretch is refined once
UPDATES = 4  # calls in which one update of theta is measured


class Watch:
    """What is kept from call to call and never saved: counts of descents, vectors of the power iterations.

    >>> g = torch.tensor([1.0, 2.0])
    >>> watch = Watch(g, g, steps=1)
    >>> watch.note(g, -g)
    >>> watch.descent_fraction
    0.5
    """

    def __init__(self, g: Tensor, s: Tensor, steps: int) -> None:
        self._steps = self._calls = 0
        self._descents: Scalar = 0
        rng = torch.Generator().manual_seed(0)
        self._top, self._bottom = (torch.randn(g.shape, generator=rng).to(g) for _ in range(2))
        self.largest = self.smallest = 0.0
        if steps:
            self.note(g, s)  # the step that was just taken

    def note(self, g: Tensor, s: Tensor) -> None:
        """Count a step of -lr s that was taken where the gradient is g."""
        self._steps += 1
        descends = g.dot(s) > 0
        self._descents = self._descents + (bool(descends) if g.device.type == "cpu" else descends)

    @property
    def descent_fraction(self) -> float:
        """Of the steps noted; nan if there was none."""
        return float(self._descents) / self._steps if self._steps else float("nan")

    @property
    def due(self) -> bool:
        """Whether the next update of theta is to be measured, by the number of calls so far."""
        return self._calls % UPDATES == 1

    def look(self, G: Callable[[Tensor], Tensor], iterations: int | None) -> None:
        """Refine the stretches by so many iterations; None refines until they converge, later one in some of the calls.

        >>> watch = Watch(torch.zeros(2), torch.zeros(2), steps=0)
        >>> watch.look(lambda v: torch.tensor([3.0, 0.5]) * v, None)
        >>> round(watch.largest, 2), round(watch.smallest, 2)
        (3.0, 0.5)
        """
        top, bottom = self._planned() if iterations is None else (iterations, iterations)
        converge = iterations is None and self._calls == 0
        self._calls += 1
        for _ in range(top):
            before = self.largest
            self._top, self.largest = _iterate(self._top, G(self._top), 0.0)
            if converge and abs(self.largest - before) <= CONVERGED * self.largest:
                break
        for _ in range(bottom):
            before = self.smallest
            self._bottom, self.smallest = _iterate(self._bottom, G(self._bottom), self.largest)
            if converge and abs(self.smallest - before) <= CONVERGED * self.largest:
                break
        self.largest = max(self.largest, self.smallest)  # both were seen

    def _planned(self) -> tuple[int, int]:
        """The iterations of this call for the largest and for the smallest stretch."""
        if self._calls == 0:
            return FIRST, FIRST
        turn = self._calls % CYCLE
        if turn == 0:
            return 1, 0
        return (0, 1) if turn == CYCLE // 2 else (0, 0)


def _iterate(v: Tensor, Gv: Tensor, shift: float) -> tuple[Tensor, float]:
    """The next vector, of (G - shift) v, and how much G stretched this one."""
    new = Gv - shift * v
    norm = float(new.norm())
    return (new / norm if norm > 0 else v), float(Gv.norm() / v.norm())
