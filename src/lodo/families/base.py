"""What every family of preconditioners offers.

Letters, here and in every family: ``theta`` the learned weights, ``P`` what is drawn once from the seed and never
learned, ``m`` the momentum, ``g`` the gradient, ``n`` the number of parameters. ``G(theta)`` is the paper's matrix
without its factor ``alpha_0``: the optimizer applies the learning rate after preconditioning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

import torch
from torch import Tensor

from lodo.layout import Layout
from lodo.meta import Layers
from lodo.spelling import Spelled


class Preconditioner(Spelled, ABC):
    """A family of n x n matrices ``G(theta)``.

    A family is a small immutable description (make it a frozen dataclass) and never holds tensors, so that one object
    can serve many parameter groups. A new family needs four methods:

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from lodo import LODO
    >>> @dataclass(frozen=True)
    ... class Squares(Preconditioner):
    ...     '''G = diag(theta)^2: a diagonal that cannot turn negative.'''
    ...     def shape(self, layout):
    ...         return (layout.n,)
    ...     def init(self, theta, layout, rng):
    ...         theta.fill_(1.0)
    ...     def apply(self, theta, P, v):
    ...         return theta**2 * v
    ...     def hypergradient(self, theta, P, m, g):
    ...         return 2 * theta * g * m
    >>> x = torch.nn.Parameter(torch.ones(3))
    >>> LODO([x], lr=0.5, preconditioner=Squares()).preconditioner_matrix().diagonal()
    tensor([0.5000, 0.5000, 0.5000])
    """

    @abstractmethod
    def shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape of theta."""

    @abstractmethod
    def init(self, theta: Tensor, layout: Layout, rng: torch.Generator) -> None:
        """Fill ``theta`` (on the CPU, in any floating-point dtype) with theta_0."""

    @abstractmethod
    def apply(self, theta: Tensor, P: Tensor, v: Tensor) -> Tensor:
        """``G(theta) v``."""

    @abstractmethod
    def hypergradient(self, theta: Tensor, P: Tensor, m: Tensor, g: Tensor) -> Tensor:
        """The derivative of ``g . G(theta) m`` with respect to theta, in theta's shape: a new tensor."""

    def fixed(self, layout: Layout, rng: torch.Generator) -> Tensor:
        """What is drawn once and never learned (int32, on the CPU); nothing by default."""
        return torch.empty(0, dtype=torch.int32)

    def index_count(self, layout: Layout) -> int:
        """How many int32 numbers `fixed` holds."""
        return 0

    def layers(self, layout: Layout) -> Layers:
        """How the weights are arranged; as one layer by default."""
        return Layers(1, prod(self.shape(layout)))

    def places(self, layout: Layout) -> Tensor:
        """The place of each of a layer's weights, on which the random bits of stochastic rounding depend (int64)."""
        return torch.arange(self.layers(layout).weights)

    def stretches(self, theta: Tensor) -> Tensor:
        """Upper bounds on how far each layer of G stretches a vector, at least 1, as one number a layer.

        Infinite by default, which is always right: then every step is rehearsed on copies first (`lodo.safety`).
        """
        return torch.full((1,), torch.inf, device=theta.device)

    def growth(self, layout: Layout) -> float:
        """How far a bound of `stretches` grows at most if all entries of theta change by 1."""
        return 1.0

    def work_count(self, layout: Layout) -> int:
        """How many activations, in theta's dtype, `apply` and `hypergradient` hold at their peak."""
        return 0
