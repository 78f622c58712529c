"""What runs a family on a device, step after step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lodo.families import Preconditioner
from lodo.layout import Layout
from lodo.meta import Learned, MetaOptimizer
from lodo.scalars import Flag, Scalar, precise


class Lesson(NamedTuple):
    """What the last step led to."""

    learning: Flag  # False if there was no last step
    led_to: Tensor  # the gradient where it led, zero where nothing moved
    scale: Scalar  # -lr of that step: the hypergradient is scale * d(led_to . G(theta) m)/d theta
    moments: Sequence[Tensor]  # the meta-optimizer's, changed in place
    t: Scalar  # the number of this update, counted from 1
    meta_lr: float
    seed: int = 0  # for the rounding of moments in bfloat16


class Footprint(NamedTuple):
    """Memory that an engine needs, in numbers of theta's dtype unless said otherwise."""

    weights: int  # of theta as it is stored, and of each moment
    indices: int  # int32 numbers
    activations: int  # kept between steps
    work: int  # needed during a step only


class Engine(ABC):
    """Runs a family for one group. An engine owns the layout of theta and of the moments in memory.

    Args:
        family: what to run.
        layout: the group's vector.
        P: what the family drew from the seed (`Preconditioner.fixed`), on the group's device.
        save_activations: whether to keep activations between steps, if the engine can.
    """

    def __init__(self, family: Preconditioner, layout: Layout, P: Tensor, save_activations: bool = True) -> None:
        self.family = family
        self.layout = layout
        self.watched = False  # set it to have the norm of the next hypergradient
        self.hypergradient_norm: Scalar = math.nan

    @cached_property
    def on_host(self) -> bool:
        """Whether its numbers are Python floats; on other devices they are 0-dim tensors."""
        return self.layout.device.type == "cpu"

    # ------------------------------------------------------------ memory

    @staticmethod
    @abstractmethod
    def footprint(family: Preconditioner, layout: Layout, meta: MetaOptimizer, save_activations: bool) -> Footprint:
        """The memory that an engine for this family and layout will need."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """An array for theta or a moment."""
        return torch.zeros(tuple(shape), dtype=dtype or self.layout.dtype, device=self.layout.device)

    def pack(self, natural: Tensor) -> Tensor:
        """theta, or a moment, from its natural order (a family's shape) into this engine's layout: a new tensor."""
        return natural.to(self.layout.device, copy=True, memory_format=torch.contiguous_format)

    def copied(self, tensor: Tensor) -> Tensor:
        """A copy of theta, a moment or a vector in the same layout."""
        return tensor.clone()

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse of `pack`; may be the tensor itself."""
        return packed

    # ------------------------------------------------------------ arithmetic

    def norm(self, v: Tensor) -> Scalar:
        """The Euclidean norm; NaN or infinite if any entry is."""
        norm = torch.linalg.vector_norm(v, dtype=precise(v.device))
        return float(norm) if self.on_host else norm

    def stretches(self, packed: Tensor) -> Sequence[Scalar]:
        """Upper bounds on how far each layer stretches a vector, of theta or of another array of its layout."""
        bounds = self.family.stretches(self.unpack(packed))
        return bounds.tolist() if self.on_host else bounds.unbind()

    def forget(self) -> None:
        """Let go of whatever is kept for the next lesson."""
        return

    def decay(self, m: Tensor, factor: Scalar) -> None:
        """Shorten the momentum after a refused step, from which nothing is learned."""
        m.mul_(factor)

    @abstractmethod
    def apply(self, theta: Tensor, v: Tensor) -> Tensor:
        """``G(theta) v``, leaving no trace."""

    @abstractmethod
    def advance(
        self,
        theta: Tensor,
        m: Tensor,
        g: Tensor,
        beta: Scalar,
        out: Tensor,
        meta: MetaOptimizer,
        lesson: Lesson,
        gate: Learned | None = None,
        last: Tensor | None = None,
    ) -> Learned | None:
        """Learn theta from the last step, average g into m, and put the next step ``G(theta) u`` into ``out``.

        What is fed is ``u = m``. With a gate, which is learned too, it is ``(1 - w) g + w m``; ``last`` is the g of the
        last step before the call, and of this one afterwards. Returns the gate after learning.
        """
