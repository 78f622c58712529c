"""The paper's simpler matrices: a scalar, a diagonal, and the dense one of its theory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lodo.families.base import Preconditioner
from lodo.layout import Layout


@dataclass(frozen=True, repr=False)
class Scalar(Preconditioner):
    """LODO-Global: ``G = theta I`` with a single number, 1 at the start.

    >>> Scalar().shape(Layout.flat(7))
    (1,)
    """

    def shape(self, layout: Layout) -> tuple[int, ...]:
        return (1,)

    def init(self, theta: Tensor, layout: Layout, rng: torch.Generator) -> None:
        theta.fill_(1.0)

    def apply(self, theta: Tensor, P: Tensor, v: Tensor) -> Tensor:
        return theta * v

    def hypergradient(self, theta: Tensor, P: Tensor, m: Tensor, g: Tensor) -> Tensor:
        return g.dot(m).reshape(1)

    def stretches(self, theta: Tensor) -> Tensor:
        return theta.abs()


@dataclass(frozen=True, repr=False)
class Diagonal(Preconditioner):
    """LODO-Diagonal: ``G = diag(theta)``, ones at the start.

    >>> Diagonal().shape(Layout.flat(7))
    (7,)
    """

    def shape(self, layout: Layout) -> tuple[int, ...]:
        return (layout.n,)

    def init(self, theta: Tensor, layout: Layout, rng: torch.Generator) -> None:
        theta.fill_(1.0)

    def apply(self, theta: Tensor, P: Tensor, v: Tensor) -> Tensor:
        return theta * v

    def hypergradient(self, theta: Tensor, P: Tensor, m: Tensor, g: Tensor) -> Tensor:
        return g * m

    def stretches(self, theta: Tensor) -> Tensor:
        return theta.abs().amax(0, keepdim=True)


@dataclass(frozen=True, repr=False)
class Dense(Preconditioner):
    """The full matrix of the paper's Section 4.1: ``G = theta``, the identity at the start.

    It is learned entry by entry, and nothing keeps it symmetric. With ``meta_optimizer="sgd"`` and ``beta=0`` it
    follows the paper's Equations 5 and 6.

    >>> Dense().shape(Layout.flat(7))
    (7, 7)
    """

    def shape(self, layout: Layout) -> tuple[int, ...]:
        return (layout.n, layout.n)

    def init(self, theta: Tensor, layout: Layout, rng: torch.Generator) -> None:
        theta.zero_().fill_diagonal_(1.0)

    def apply(self, theta: Tensor, P: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(theta.device.type, enabled=False):  # in theta's own precision
            return theta @ v

    def hypergradient(self, theta: Tensor, P: Tensor, m: Tensor, g: Tensor) -> Tensor:
        return torch.outer(g, m)

    def stretches(self, theta: Tensor) -> Tensor:
        return theta.square().sum().sqrt().reshape(1)

    def growth(self, layout: Layout) -> float:
        return float(layout.n)
