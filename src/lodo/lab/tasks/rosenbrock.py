"""The rescaled Rosenbrock function (the paper's Section 5.2)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lodo._checks import check_real
from lodo.lab.tasks.base import Task

START = (-0.5, 2.0)


class Rosenbrock(Task):
    """``0.01 (x - 1)^2 + (x^2 - y)^2`` from (-0.5, 2), in double precision.

    Args:
        seed: draws the noise on the starting point; nothing else is random.
        jitter: the standard deviation of Gaussian noise on the starting point.

    Example:
        >>> round(Rosenbrock(seed=0).evaluate(), 4)
        3.085
    """

    def __init__(self, seed: int, *, jitter: float = 0.0) -> None:
        super().__init__(seed)
        check_real("jitter", jitter, low=0.0)
        start = torch.tensor(START, dtype=torch.float64)
        self.params = [Parameter(start + jitter * torch.randn(2, generator=self.rng, dtype=torch.float64))]

    def loss(self) -> Tensor:
        x, y = self.params[0]
        return rosenbrock(x, y)

    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        """The position."""
        x, y = self.params[0].tolist()
        return {"x": x, "y": y}


def rosenbrock(x: Tensor, y: Tensor) -> Tensor:
    """The rescaled Rosenbrock function, elementwise.

    >>> rosenbrock(torch.tensor(2.0), torch.tensor(1.0))
    tensor(9.0100)
    """
    return 0.01 * (x - 1) ** 2 + (x**2 - y) ** 2
