"""What every family of preconditioners offers, and the engine that runs one.

Letters, here and in every family: ``theta`` the learned weights, ``P`` what was drawn once
from the seed and is never learned, ``m`` the momentum, ``g`` the gradient, ``n`` the number of
parameters. ``G(theta)`` is the paper's matrix without its factor ``alpha_0``: the learning rate
is applied by the optimizer, after preconditioning.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lodo.gate import Gate
from lodo.meta import Layers, MetaOptimizer


class Preconditioner(ABC):
    """A family of n x n matrices ``G(theta)``.

    A family is a small immutable description (make it a frozen dataclass), never a holder of
    tensors, so that one object can serve many parameter groups. A new one needs four methods:

    >>> from dataclasses import dataclass
    >>> import torch
    >>> from lodo import LODO
    >>> @dataclass(frozen=True)
    ... class Signs(Preconditioner):
    ...     '''G = diag(theta)^2: a diagonal that cannot turn negative.'''
    ...     def shape(self, n):
    ...         return (n,)
    ...     def init(self, theta, n, rng):
    ...         theta.fill_(1.0)
    ...     def apply(self, theta, P, v):
    ...         return theta**2 * v
    ...     def hypergradient(self, theta, P, m, g):
    ...         return 2 * theta * g * m
    >>> x = torch.nn.Parameter(torch.ones(3))
    >>> LODO([x], lr=0.5, preconditioner=Signs()).preconditioner_matrix().diagonal()
    tensor([0.5000, 0.5000, 0.5000])
    """

    @abstractmethod
    def shape(self, n: int) -> tuple[int, ...]:
        """The shape of theta."""

    @abstractmethod
    def init(self, theta: Tensor, n: int, rng: torch.Generator) -> None:
        """Fill ``theta`` (on the CPU, any float dtype) with theta_0."""

    @abstractmethod
    def apply(self, theta: Tensor, P: Tensor, v: Tensor) -> Tensor:
        """``G(theta) v``."""

    @abstractmethod
    def hypergradient(self, theta: Tensor, P: Tensor, m: Tensor, g: Tensor) -> Tensor:
        """The derivative of ``g . G(theta) m`` with respect to theta, in theta's shape: a new tensor."""

    def fixed(self, n: int, rng: torch.Generator) -> Tensor:
        """What is drawn once and never learned (int32, on the CPU); nothing by default."""
        return torch.empty(0, dtype=torch.int32)

    def index_count(self, n: int) -> int:
        """How many int32 numbers `fixed` holds."""
        return 0

    def layers(self, n: int) -> Layers:
        """How the weights are arranged; as one layer by default."""
        return Layers(1, prod(self.shape(n)))

    def work_count(self, n: int, fused: bool, save_activations: bool = True) -> int:
        """How many activations, in theta's dtype, a step holds at its peak."""
        return 0

    def fused(self, backend: str, device: torch.device) -> bool:
        """Does the engine for this backend and device avoid storing the hypergradient?"""
        return False

    def engine(self, P: Tensor, backend: str, save_activations: bool = True) -> Engine:
        """What runs this family; a family with fused kernels returns its own."""
        return Engine(self, P)


class Lesson(NamedTuple):
    """What the last step led to."""

    learning: bool  # False if there was no last step
    led_to: Tensor  # the gradient where it led, zero where nothing moved
    scale: float  # -lr of that step: the hypergradient is scale * d(led_to . G(theta) m)/d theta
    moments: Sequence[Tensor]  # the meta-optimizer's, changed in place
    t: int  # counts its updates, from 1
    meta_lr: float
    seed: int = 0  # for the rounding of moments in bfloat16


class Engine:
    """Runs a family step after step. This one calls the family's formulas as they are.

    A faster engine may keep what one step computed for the lesson of the next.
    """

    def __init__(self, family: Preconditioner, P: Tensor) -> None:
        self.family = family
        self.P = P
        self.watched = False  # set it to have the norm of the next hypergradient
        self.hypergradient_norm = math.nan

    def apply(self, theta: Tensor, v: Tensor) -> Tensor:
        """``G(theta) v``, leaving no trace."""
        return self.family.apply(theta, self.P, v)

    def norm(self, v: Tensor) -> float:
        """The Euclidean norm; NaN or infinite if any entry is."""
        double = None if v.device.type == "mps" else torch.float64  # which has no double precision
        return float(torch.linalg.vector_norm(v, dtype=double))

    def advance(
        self,
        theta: Tensor,
        m: Tensor,
        g: Tensor,
        beta: float,
        out: Tensor,
        meta: MetaOptimizer,
        lesson: Lesson,
        gate: Gate | None = None,
        last: Tensor | None = None,
    ) -> Gate | None:
        """Learn theta from the last step, average g into m, and put the next step ``G(theta) u`` into ``out``.

        What is fed is ``u = m``. With a gate, which is learned too, it is ``(1 - w) g + w m``; ``last`` is the g of the
        last step, and of this one afterwards. Returns the gate as it is now.
        """
        n, P = m.numel(), self.P
        if lesson.learning:
            if gate and last is not None:
                slope = lesson.led_to.dot(self.family.apply(theta, P, m - last))
            h = self.family.hypergradient(theta, P, fed(m, last, gate), lesson.led_to).mul_(lesson.scale)
            if self.watched:
                self.hypergradient_norm, self.watched = self.norm(h), False
            meta.update(theta, h, lesson.moments, lesson.t, lesson.meta_lr, self.family.layers(n), lesson.seed)
            gate = gate and gate.learn(lesson.scale * float(slope))
        m.lerp_(g, 1 - beta)
        if last is not None:
            last.copy_(g)
        out.copy_(self.family.apply(theta, P, fed(m, last, gate)))
        return gate


def fed(m: Tensor, g: Tensor | None, gate: Gate | None) -> Tensor:
    """What the network is fed: m, or ``(1 - w) g + w m``."""
    return m if gate is None or g is None else g.mul(1 - gate.w).add_(m, alpha=gate.w)
