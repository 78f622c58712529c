"""The reference engine: a family's formulas as they are, in torch operations on any device. The others must agree."""

from __future__ import annotations

from torch import Tensor

from lodo.engines.base import Engine, Footprint, Lesson
from lodo.families import Preconditioner
from lodo.feed import RATE, fed
from lodo.layout import Layout
from lodo.meta import Learned, MetaOptimizer
from lodo.rounding import Bits, update_key
from lodo.scalars import Scalar, as_real


class ReferenceEngine(Engine):
    """Calls the family's formulas, and stores the whole hypergradient on the way."""

    def __init__(self, family: Preconditioner, layout: Layout, P: Tensor, save_activations: bool = True) -> None:
        super().__init__(family, layout, P, save_activations)
        self.P = P
        self._places: Tensor | None = None

    @staticmethod
    def footprint(family: Preconditioner, layout: Layout, meta: MetaOptimizer, save_activations: bool) -> Footprint:
        layers = family.layers(layout)
        weights = layers.number * layers.weights
        arrays = 1 + bool(meta.moments)  # the hypergradient and, for Adam, a denominator
        work = arrays * weights
        if meta.stored_dtype is not None:
            # moments are widened whole, and rounded layer by layer in 64-bit integers, with a place for each weight
            work += 2 * weights + 40 // layout.dtype.itemsize * layers.weights
        return Footprint(weights, family.index_count(layout), 0, family.work_count(layout) + work)

    def apply(self, theta: Tensor, v: Tensor) -> Tensor:
        return self.family.apply(theta, self.P, v)

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
        if lesson.learning is not False:
            gate = self._learn(theta, m, meta, lesson, gate, last)
        m.lerp_(g, 1 - beta)
        if last is not None:
            last.copy_(g)
        out.copy_(self.apply(theta, fed(m, last, gate)))
        return gate

    def _learn(
        self,
        theta: Tensor,
        m: Tensor,
        meta: MetaOptimizer,
        lesson: Lesson,
        gate: Learned | None,
        last: Tensor | None,
    ) -> Learned | None:
        """Update theta, and the gate if there is one, by the slope of the loss along the last step."""
        slope: Scalar = 0.0
        if gate is not None and last is not None:
            product = lesson.led_to.dot(self.apply(theta, m - last))
            slope = float(product) if self.on_host else product
        h = self.family.hypergradient(theta, self.P, fed(m, last, gate), lesson.led_to).mul_(lesson.scale)
        if self.watched:
            self.hypergradient_norm, self.watched = self.norm(h), False
        numbers = meta.masked(lesson.learning, meta.coefficients(as_real(lesson.t), lesson.meta_lr))
        bits = self._bits(lesson) if meta.stored_dtype is not None else None
        meta.update(theta, h, lesson.moments, numbers, self.family.layers(self.layout), bits)
        return None if gate is None else gate.updated(lesson.scale * slope, RATE, lesson.learning)

    def _bits(self, lesson: Lesson) -> Bits:
        if self._places is None:
            self._places = self.family.places(self.layout).to(self.layout.device)
        return Bits(update_key(lesson.seed, lesson.t), self._places)
