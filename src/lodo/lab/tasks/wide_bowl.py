"""The noisy quadratic bowl in many dimensions: its eigenvectors are a fast transform, so that none are stored."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from lodo._checks import check_int, check_real
from lodo.lab.tasks.base import Task
from lodo.lab.tasks.bowl import curvatures


class WideBowl(Task):
    """The bowl with ``H = U D U^T`` where a product with U costs O(n log n).

    ``U = S W S' W``: W is the Hartley transform, which is symmetric and orthogonal, S and S' are diagonal with random
    signs. So every eigenvector has about n entries that are not small, as those of a random rotation have.

    Args:
        seed: draws the signs and the noise.
        n: the dimension.
        condition: the condition number, the largest curvature over the smallest.
        v: the variance of the noise.

    Example:
        >>> bowl = WideBowl(seed=0, n=1000)
        >>> bowl.draw()
        >>> bowl.evaluate() > 0
        True
    """

    def __init__(self, seed: int, *, n: int = 10_000, condition: float = 1000.0, v: float = 1.0) -> None:
        super().__init__(seed)
        check_int("n", n, low=1)
        check_real("condition", condition, low=1.0)
        check_real("v", v, low=0.0)
        self.v = v
        self.D = curvatures(n, condition).float()
        self.S = 1.0 - 2.0 * torch.randint(2, (2, n), generator=self.rng)
        self.x = Parameter(torch.zeros(n))
        self.params = [self.x]
        self.centre = torch.zeros(n)

    def draw(self) -> None:
        """Move the minimum."""
        self.centre.add_(torch.randn(self.centre.shape, generator=self.rng), alpha=self.v**0.5)

    def product(self, x: Tensor) -> Tensor:
        """``H x``."""
        S, S_ = self.S
        product: Tensor = S * hartley(S_ * hartley(self.D * hartley(S_ * hartley(S * x))))
        return product

    def loss(self) -> Tensor:
        away = self.x - self.centre
        return 0.5 * away @ self.product(away)

    def evaluate(self, create_graph: bool = False) -> float:
        """As in `Task`, without autograd: the gradient of a quadratic is H (x - centre)."""
        if create_graph:
            return super().evaluate(create_graph)
        away = self.x.detach() - self.centre
        self.x.grad = self.product(away)
        return 0.5 * float(away @ self.x.grad)

    def buffers(self) -> dict[str, Tensor]:
        return {"centre": self.centre, "S": self.S}


def hartley(x: Tensor) -> Tensor:
    """The Hartley transform, which is its own inverse: the real part of the Fourier transform minus the imaginary one.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> torch.allclose(hartley(hartley(x)), x)
    True
    """
    transformed = torch.fft.fft(x, norm="ortho")
    difference: Tensor = transformed.real - transformed.imag
    return difference
