"""The mixing network and the residual network, layer by layer through torch.compile.

`layers` has what happens in one layer and `updates` what the meta-optimizers do; here the layers are called one after
the other. A layer is compiled once and serves all layers of all groups, whatever their size; numbers that change from
step to step are tensors, so that they are not compiled in. Nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lodo.engines.base import Engine, Footprint, Lesson
from lodo.engines.compiled import layers
from lodo.engines.compiled.graphs import graph
from lodo.engines.compiled.updates import RULES, sum_of_squares
from lodo.families import Mixing, Preconditioner, Residual
from lodo.feed import RATE, fed
from lodo.layout import Layout
from lodo.meta import SCHEDULE_FREE, Learned, MetaOptimizer
from lodo.rounding import MASK, mix, update_key
from lodo.scalars import Scalar, as_real, precise, scalar_on


class Kept(NamedTuple):
    """The activations of what was fed, and to what they belong."""

    owners: tuple[object, ...]  # theta, m, the last gradient, the gate
    versions: tuple[int, ...]  # torch counts what it writes to a tensor
    a: list[Tensor]
    c: list[Tensor]


class CompiledEngine(Engine):
    """What the two networks have in common: the chain of layers up and down, and the step."""

    _rise: Callable[..., list[Tensor]]
    _fall: Callable[..., list[Tensor]]
    _learn: Callable[..., None]

    def __init__(self, family: Preconditioner, layout: Layout, P: Tensor, save_activations: bool = True) -> None:
        super().__init__(family, layout, P, save_activations)
        self._save = save_activations
        self._kept: Kept | None = None
        self._noise: list[Tensor] | None = None  # where weights are stored, on which their random bits depend
        self._hidden = family.layers(layout).weights
        self._shape: tuple[int, ...] = (self._hidden,)  # of the vectors between layers
        self._P: Sequence[Tensor | None] = ()

    @property
    def _setting(self) -> str:
        """What functions are compiled for separately; sizes are not among it."""
        return f"{self.layout.device.type}_{str(self.layout.dtype).removeprefix('torch.')}"

    def forget(self) -> None:
        self._kept = None

    def decay(self, m: Tensor, factor: Scalar) -> None:
        super().decay(m, factor)
        if self._kept is not None:  # still good enough: nothing is learned from a step after which m decays
            self._kept = self._kept._replace(versions=_versions(self._kept.owners))

    # ------------------------------------------------------------ the chain

    def _padded(self, v: Tensor) -> Tensor:
        a = v.new_zeros(self._hidden)
        a[: v.numel()] = v
        return a.view(self._shape)

    def _up(self, theta: Tensor, *vectors: Tensor) -> list[list[Tensor]]:
        """The activations a_0 to a_N of each vector."""
        steps = [[self._padded(v) for v in vectors]]
        for i in range(len(self._P)):
            steps.append(self._raise(theta, i, *steps[-1]))
        return [list(activations) for activations in zip(*steps, strict=True)]

    def _down(self, theta: Tensor, y: Tensor) -> list[Tensor]:
        """The activations c_0 to c_N going down from c_N = y."""
        c = [y]
        for i in range(len(self._P) - 1, -1, -1):
            c += self._lower(theta, i, c[-1])
        return c[::-1]

    def _raise(self, theta: Tensor, i: int, *xs: Tensor) -> list[Tensor]:
        """Each x through layer i, going up."""
        rise = graph(self._rise, f"{self._setting}_{len(xs)}")
        return [x.view(self._shape) for x in rise(theta[i], self._P[i], *xs)]

    def _lower(self, theta: Tensor, i: int, *ys: Tensor) -> list[Tensor]:
        """Each y through layer i, going down."""
        fall = graph(self._fall, f"{self._setting}_{len(ys)}")
        return fall(theta[i], self._P[i], *ys)  # type: ignore[no-any-return]

    def _turn(self, theta: Tensor, a: Tensor) -> Tensor:
        """Where going up ends and going down begins: c_N from a_N."""
        return a

    def apply(self, theta: Tensor, v: Tensor) -> Tensor:
        x = self._padded(v)
        for i in range(len(self._P)):
            (x,) = self._raise(theta, i, x)
        x = self._turn(theta, x)
        for i in range(len(self._P) - 1, -1, -1):
            (x,) = self._lower(theta, i, x)
        return x.view(-1)[: v.numel()]

    # ------------------------------------------------------------ the step

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
            gate = self._taught(theta, m, meta, lesson, gate, last)
        self._kept = None
        m.lerp_(g, 1 - beta)
        if last is not None:
            last.copy_(g)
        u = fed(m, last, gate)
        if not self._save:
            out.copy_(self.apply(theta, u))
            return gate
        a, c = self._fed(theta, u)
        out.copy_(c[0].view(-1)[: out.numel()])
        owners = (theta, m, last, gate)
        self._kept = Kept(owners, _versions(owners), a, c)
        return gate

    def _fed(self, theta: Tensor, u: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The activations of u, going up and going down."""
        (a,) = self._up(theta, u)
        return a, self._down(theta, self._turn(theta, a[-1]))

    def _taught(
        self,
        theta: Tensor,
        m: Tensor,
        meta: MetaOptimizer,
        lesson: Lesson,
        gate: Learned | None,
        last: Tensor | None,
    ) -> Learned | None:
        """Update theta, and the gate if there is one, by the slope of the loss along the last step."""
        kept, self._kept = self._kept, None
        owners = (theta, m, last, gate)
        if not self._save:
            a, b = self._up(theta, fed(m, last, gate), lesson.led_to)
            c: list[Tensor] = []
        else:
            if kept is not None and _same(kept, owners):
                a, c = kept.a, kept.c
            else:  # after a state has been loaded
                a, c = self._fed(theta, fed(m, last, gate))
            (b,) = self._up(theta, lesson.led_to)
        Gg = self._sweep(theta, meta, lesson, a, b, c)
        if gate is None or last is None:
            return gate
        product = Gg.view(-1)[: m.numel()].dot(m - last)
        slope = float(product) if self.on_host else product
        return gate.updated(lesson.scale * slope, RATE, lesson.learning)

    def _sweep(
        self, theta: Tensor, meta: MetaOptimizer, lesson: Lesson, a: list[Tensor], b: list[Tensor], c: list[Tensor]
    ) -> Tensor:
        """Go down from d_N, updating each layer on the way; returns d_0 = G g. Without c, that goes down as well.

        Takes the lists apart, so that activations are freed when they have been used.
        """
        both = not c
        numbers, noise = self._numbers(meta, lesson), self._bits(meta, lesson)
        squares = self._squares_at_turn(a[-1], b[-1]) if self.watched else 0.0
        d, top = self._learn_turn(theta, meta, lesson, a.pop(), b.pop(), numbers, noise)
        above = top if both else c.pop()
        for i in range(len(self._P) - 1, -1, -1):
            moments = [moment[i] for moment in lesson.moments]
            if self.watched:
                squares = squares + self._squares(d, a[-1], above, b[-1], self._P[i])
            below = self._learn_layer(theta, meta, i, moments, (a.pop(), b.pop(), above, d), numbers, noise[i], both)
            d, above = below if both else (*below, c.pop())
        if self.watched:
            self._note_norm(squares, lesson.scale)
        return d

    def _learn_layer(
        self,
        theta: Tensor,
        meta: MetaOptimizer,
        i: int,
        moments: Sequence[Tensor],
        abcd: tuple[Tensor, Tensor, Tensor, Tensor],
        numbers: Tensor,
        noise: Sequence[Tensor],
        both: bool,
    ) -> list[Tensor]:
        """Update layer i; returns d below it, and c below it if ``both`` go down."""
        learn = graph(self._learn, f"{self._setting}_{_described(meta)}")
        _, _, c, d = abcd
        below = self._lower(theta, i, d, c) if both else self._lower(theta, i, d)
        learn(theta[i], self._P[i], moments, *abcd, numbers, noise, rule=RULES[meta.kind])
        return below

    def _learn_turn(
        self,
        theta: Tensor,
        meta: MetaOptimizer,
        lesson: Lesson,
        a: Tensor,
        b: Tensor,
        numbers: Tensor,
        noise: Sequence[Sequence[Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """d_N and c_N, after whatever is learned between going up and going down."""
        return b, a

    # ------------------------------------------------------------ numbers

    def _numbers(self, meta: MetaOptimizer, lesson: Lesson) -> Tensor:
        """The scale and the coefficients as a column."""
        coefficients = meta.masked(lesson.learning, meta.coefficients(as_real(lesson.t), lesson.meta_lr))
        numbers = (lesson.scale, *coefficients)
        device = self.layout.device
        if self.on_host:
            return torch.tensor(numbers, dtype=precise(device), device=device).view(-1, 1)
        return torch.stack([scalar_on(device, x).to(precise(device)) for x in numbers]).view(-1, 1)

    def _bits(self, meta: MetaOptimizer, lesson: Lesson) -> Sequence[Sequence[Tensor]]:
        """For each layer, the key of its random bits and the places of its weights; nothing if they are not needed."""
        number = self.family.layers(self.layout).number
        if meta.stored_dtype is None:
            return [()] * number
        if self._noise is None:
            self._noise = [x.to(self.layout.device) for x in self._places()]
        layers_ = torch.arange(number, device=self.layout.device)
        keys = mix((layers_ + update_key(lesson.seed, lesson.t)) & MASK)
        return [(key, *self._noise) for key in keys.unbind()]

    def _places(self) -> Sequence[Tensor]:
        """Two tensors whose sum, broadcast, is the place of each of a layer's weights."""
        raise NotImplementedError

    def _squares(self, d: Tensor, a: Tensor, c: Tensor, b: Tensor, p: Tensor | None) -> Tensor:
        """The sum of squares of a layer's hypergradient over scale^2, for diagnostics."""
        raise NotImplementedError

    def _squares_at_turn(self, a: Tensor, b: Tensor) -> Scalar:
        """The same for what is learned between going up and going down."""
        return 0.0

    def _note_norm(self, squares: Any, scale: Any) -> None:
        norm = abs(scale) * squares**0.5
        self.hypergradient_norm, self.watched = (float(norm) if self.on_host else norm), False


class CompiledMixing(CompiledEngine):
    """Runs the mixing network. theta is stored as (N, k, k, blocks)."""

    family: Mixing
    _rise = staticmethod(layers.rise)
    _fall = staticmethod(layers.fall)
    _learn = staticmethod(layers.learn)

    def __init__(self, family: Preconditioner, layout: Layout, P: Tensor, save_activations: bool = True) -> None:
        assert isinstance(family, Mixing)
        super().__init__(family, layout, P, save_activations)
        k, self._hidden = family.block_size, family.hidden(layout.n)
        self._shape = (k, self._hidden // k)
        self._P = [None] * family.depth if family.mixing == "shuffle" else _turned(P, k)

    @property
    def _setting(self) -> str:
        return f"{super()._setting}_{self.family.mixing}_{self.family.block_size}"

    @staticmethod
    def footprint(family: Preconditioner, layout: Layout, meta: MetaOptimizer, save_activations: bool) -> Footprint:
        assert isinstance(family, Mixing)
        return _footprint(family, layout, family.hidden(layout.n), meta, save_activations)

    def pack(self, natural: Tensor) -> Tensor:
        packed = self.zeros([natural.shape[i] for i in (0, 2, 3, 1)], natural.dtype)
        return packed.copy_(natural.to(self.layout.device).permute(0, 2, 3, 1))

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.permute(0, 3, 1, 2)

    def _places(self) -> Sequence[Tensor]:
        k, (_, lanes) = self.family.block_size, self.family.tiles(self.layout)
        blocks = torch.arange(self._hidden // k)
        offsets = torch.arange(k * k).view(k, k, 1) * lanes
        return blocks // lanes * (k * k * lanes) + blocks % lanes, offsets

    def _learn_layer(
        self,
        theta: Tensor,
        meta: MetaOptimizer,
        i: int,
        moments: Sequence[Tensor],
        abcd: tuple[Tensor, Tensor, Tensor, Tensor],
        numbers: Tensor,
        noise: Sequence[Tensor],
        both: bool,
    ) -> list[Tensor]:
        if meta.kind != SCHEDULE_FREE or self.family.block_size > layers.WRITTEN_OUT:
            return super()._learn_layer(theta, meta, i, moments, abcd, numbers, noise, both)
        learn = graph(layers.learn_and_fall, f"{self._setting}_{both}")
        rows, zs = (x.unbind() for x in (theta[i], *moments))
        return learn(rows, self._P[i], zs, *abcd, numbers, both=both)  # type: ignore[no-any-return]

    def _squares(self, d: Tensor, a: Tensor, c: Tensor, b: Tensor, p: Tensor | None) -> Tensor:
        return layers.squares(a, b, c, d, p)


class CompiledResidual(CompiledEngine):
    """Runs the residual network."""

    family: Residual
    _rise = staticmethod(layers.residual_rise)
    _fall = staticmethod(layers.residual_fall)
    _learn = staticmethod(layers.residual_learn)

    def __init__(self, family: Preconditioner, layout: Layout, P: Tensor, save_activations: bool = True) -> None:
        assert isinstance(family, Residual)
        super().__init__(family, layout, P, save_activations)
        self._P = P.unbind()

    @property
    def _setting(self) -> str:
        return f"{super()._setting}_residual"

    @staticmethod
    def footprint(family: Preconditioner, layout: Layout, meta: MetaOptimizer, save_activations: bool) -> Footprint:
        return _footprint(family, layout, family.layers(layout).weights, meta, save_activations)

    def _turn(self, theta: Tensor, a: Tensor) -> Tensor:
        return theta[-1] * a

    def _learn_turn(
        self,
        theta: Tensor,
        meta: MetaOptimizer,
        lesson: Lesson,
        a: Tensor,
        b: Tensor,
        numbers: Tensor,
        noise: Sequence[Sequence[Tensor]],
    ) -> tuple[Tensor, Tensor]:
        learn = graph(layers.residual_learn_middle, f"{self._setting}_{_described(meta)}")
        moments = [moment[-1] for moment in lesson.moments]
        d, c = self._turn(theta, b), self._turn(theta, a)
        learn(theta[-1], moments, a, b, numbers, noise[-1], rule=RULES[meta.kind])
        return d, c

    def _places(self) -> Sequence[Tensor]:
        return torch.arange(self._hidden), torch.zeros(1, dtype=torch.int64)

    def _squares_at_turn(self, a: Tensor, b: Tensor) -> Scalar:
        return (a.double() * b.double()).square().sum()

    def _squares(self, d: Tensor, a: Tensor, c: Tensor, b: Tensor, p: Tensor | None) -> Tensor:
        return sum_of_squares(*(v[None] for v in (d, a[p], c, b[p])))


def _footprint(
    family: Preconditioner, layout: Layout, hidden: int, meta: MetaOptimizer, save_activations: bool
) -> Footprint:
    """theta and indices as they are; a and c are kept, b and a few vectors exist during a step."""
    layers_ = family.layers(layout)
    rows = layers_.number + 1
    kept = 2 * rows * hidden if save_activations else 0
    work = (rows + 4) * hidden if save_activations else (2 * rows + 6) * hidden
    return Footprint(layers_.number * layers_.weights, family.index_count(layout), kept, work)


def _turned(P: Tensor, k: int) -> Sequence[Tensor]:
    """The permutations as (k, blocks), of vectors that are (k, blocks) themselves; the lowest is not."""
    P = P.view(len(P), -1, k).transpose(1, 2).contiguous()
    P[1:] = P[1:] % k * P.shape[-1] + P[1:] // k
    return P.unbind()


def _described(meta: MetaOptimizer) -> str:
    """What a learning layer is compiled for."""
    return f"{type(meta).__name__}_{meta.stored_dtype is not None}"


def _versions(owners: tuple[object, ...]) -> tuple[int, ...]:
    return tuple(x._version for x in owners if isinstance(x, Tensor))


def _same(kept: Kept, owners: tuple[object, ...]) -> bool:
    """Whether nobody has written to what the activations belong to."""
    same = all(a is b for a, b in zip(kept.owners, owners, strict=True))
    return same and kept.versions == _versions(owners)
