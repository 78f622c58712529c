"""What `lodo.inspect` keeps from call to call: counts of descents, and the stretches of G."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lodo.scalars import Scalar

FIRST = 200  # products with G in the first call, at most
CONVERGED = 1e-3  # the relative change of the stretches below which they end
SPACE = 8  # products after which the space in which stretches are looked for begins anew
LATER, CYCLE = 4, 32  # products in one of so many later calls
ROUNDING = 1e-5  # of a vector: what is left of it may be rounding errors
UPDATES = 4  # calls in which one update of theta is measured


class Watch:
    """What is kept from call to call and never saved: counts of descents, a vector for the stretches.

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
        self._v = torch.randn(g.shape, generator=rng).to(g)
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
        """Refine the stretches by so many products with G; None: until they converge, and later by a few now and then.

        >>> watch = Watch(torch.zeros(2), torch.zeros(2), steps=0)
        >>> watch.look(lambda v: torch.tensor([3.0, 0.5]) * v, None)
        >>> round(watch.largest, 2), round(watch.smallest, 2)
        (3.0, 0.5)
        """
        left = self._planned() if iterations is None else iterations
        converge = iterations is None and self._calls == 0
        self._calls += 1
        while left > 0:
            before = self.largest, self.smallest
            products = max(2, min(SPACE, left))  # a space of one vector would stay as it is
            self._v, self.largest, self.smallest = extremes(G, self._v, products)
            left -= products
            changes = [abs(new - old) for new, old in zip((self.largest, self.smallest), before, strict=True)]
            if converge and max(changes) <= CONVERGED * self.largest:
                break

    def _planned(self) -> int:
        """The products with G of this call: many in the first, then a few, more often as long as G is young."""
        if self._calls == 0:
            return FIRST
        young = self._calls in (2, 4, 8, 16)
        return LATER if young or self._calls % CYCLE == 0 else 0


def extremes(G: Callable[[Tensor], Tensor], v: Tensor, size: int) -> tuple[Tensor, float, float]:
    """The vectors that G stretches most and least among all sums of v, G v, G G v and so on; and how much.

    Args:
        G: a linear function.
        v: a vector.
        size: the number of products with G, and the dimension of the space.

    Returns:
        The sum of the two vectors, from which to go on; the most and the least.
    """
    basis, images = [v / v.norm()], []
    while True:
        images.append(G(basis[-1]))
        new = images[-1]
        for _ in range(2):  # once is not orthogonal enough
            for u in basis:
                new = new - u.dot(new) * u
        norm = new.norm()
        if len(images) == size or not float(norm) > ROUNDING * float(images[-1].norm()):
            break
        basis.append(new / norm)
    U, stretches, _ = torch.linalg.svd(torch.stack(images), full_matrices=False)
    both = (U[:, 0] + U[:, -1]) @ torch.stack(basis)
    return both, float(stretches[0]), float(stretches[-1])
