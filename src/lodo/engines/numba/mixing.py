"""The mixing network on CPUs, fused with Numba.

`tiles` has what happens to a tile, `permuted` and `shuffled` the passes over all layers for the two kinds of mixing;
here they are given memory and called.

A step keeps ``P_i a_{i-1}`` and ``c_i`` of what was fed for the lesson of the next step, so that it reads theta four
times and writes it once; or, to save memory, it computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lodo import feed
from lodo import meta as metas
from lodo.engines.base import Engine, Footprint, Lesson
from lodo.engines.numba import feeding, permuted, shuffled, storage, tiles
from lodo.engines.numba.compiling import CACHE, Caller, Kernel, version_of
from lodo.engines.numba.pages import Memory, give_back, huge_zeros, passing_zeros
from lodo.families import Mixing, Preconditioner
from lodo.layout import Layout
from lodo.meta import Learned, MetaOptimizer
from lodo.rounding import update_key
from lodo.scalars import Scalar

PARALLEL_FROM = 64  # tiles a layer from which a second thread pays
_CHUNKS = 128  # parts of a layer that threads share; a fixed number, so that results do not depend on theirs
_KEEP_BELOW = 1 << 20  # bytes of work arrays that are not worth giving back between steps
_PAGED_FROM = 1 << 16  # bytes of an array that is worth pages of its own

_SOURCES = (feed, metas, feeding, permuted, shuffled, tiles)  # of which kernels are compiled
_VERSION = version_of(_SOURCES)
_APPLY = {"random": Kernel(permuted.apply, _VERSION), "shuffle": Kernel(shuffled.apply, _VERSION)}
_ADVANCE = {"random": Kernel(permuted.advance, _VERSION), "shuffle": Kernel(shuffled.advance, _VERSION)}


@njit(cache=CACHE, fastmath={"contract", "reassoc"})
def _norm(v: Any) -> Any:
    square = 0.0
    for x in v:
        square += np.float64(x) * np.float64(x)
    return np.sqrt(square)


@njit(cache=CACHE, error_model="numpy", fastmath={"contract", "nsz"})
def _gershgorin(theta: Any, squares: Any) -> None:
    """For each layer, the largest row sum of |B^T B| over all its blocks: no eigenvalue of B^T B is larger."""
    N, T, k, _, L = theta.shape
    products, row = np.empty(L, theta.dtype), np.empty(L, theta.dtype)
    for i in range(N):
        squares[i] = 0.0
        for t in range(T):
            B = theta[i, t]
            for r in range(k):
                row[:] = 0
                for s in range(k):
                    products[:] = 0
                    for c in range(k):
                        for l in range(L):
                            products[l] += B[c, r, l] * B[c, s, l]
                    for l in range(L):
                        row[l] += abs(products[l])
                squares[i] = max(squares[i], row.max())


# ---------------------------------------------------------------- the engine


class NumbaMixing(Engine):
    """Runs the mixing network with the fused kernels, on as many threads as torch uses."""

    family: Mixing

    def __init__(self, family: Preconditioner, layout: Layout, P: Tensor, save_activations: bool = True) -> None:
        assert isinstance(family, Mixing)
        super().__init__(family, layout, P, save_activations)
        self._apply, self._advance = _APPLY[family.mixing], _ADVANCE[family.mixing]
        self._save = save_activations
        self._P = storage.pack_permutations(P, family, layout) if family.mixing == "random" else None
        self._work: _Work | None = None  # made at the first use
        self._kept: tuple[object, ...] = ()  # whose activations the work arrays hold

    # ------------------------------------------------------------ memory

    @staticmethod
    def footprint(family: Preconditioner, layout: Layout, meta: MetaOptimizer, save_activations: bool) -> Footprint:
        assert isinstance(family, Mixing)
        N, T, k, _, L = storage.packed_shape(family, layout)
        if family.mixing == "random":
            numbers = (3 * N + 2 if save_activations else 2 * N + 4) * T * k * L
            indices = N * T * k * L
        else:
            numbers = (3 if save_activations else 2) * max(1, N - 1) * family.hidden(layout.n)
            indices = 0
        kept = numbers if save_activations else 0
        return Footprint(N * T * k * k * L, indices, kept, numbers - kept)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return huge_zeros(shape, dtype or self.layout.dtype)

    def pack(self, natural: Tensor) -> Tensor:
        packed = self.zeros(storage.packed_shape(self.family, self.layout), natural.dtype)
        return storage.pack(natural, packed)

    def copied(self, tensor: Tensor) -> Tensor:
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)

    def unpack(self, packed: Tensor) -> Tensor:
        return storage.unpack(packed, self.family.hidden(self.layout.n) // self.family.block_size)

    # ------------------------------------------------------------ arithmetic

    def norm(self, v: Tensor) -> float:
        return float(_norm(v.numpy() if self._work is None else self._work.arrays(v)[0]))

    def stretches(self, packed: Tensor) -> list[float]:
        squares = np.empty(len(packed))
        _gershgorin(packed.numpy(), squares)
        return np.sqrt(squares).tolist()  # type: ignore[no-any-return]  # NumPy's list of floats

    def forget(self) -> None:
        self._kept = ()
        if self._work is not None:
            self._work.forget()

    def apply(self, theta: Tensor, v: Tensor) -> Tensor:
        w, out = self._begin(theta), torch.empty_like(v)
        w.run(self._apply, theta.numpy(), w.P, v.contiguous().numpy(), w.scratch(), out.numpy())
        w.end()
        return out

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
        w = self._begin(theta)
        learning, led_to, scale, moments, t, meta_lr, seed = lesson
        numbers = meta.coefficients(t, meta_lr) if learning else meta.identity
        if learning and self._kept != _belonging(theta, m, last, gate):
            self._feed_again(theta, m, out, meta, lesson, gate, last)
        M, V = (*moments, theta, theta)[:2]  # a kernel does not touch those that its meta-optimizer has no use for
        past = m if last is None else last
        B, m_, g_, out_, led_to_, M_, V_, past_ = w.arrays(theta, m, g, out, led_to, M, V, past)
        u = m_ if last is None else w.fed(m.numel())
        key = update_key(seed, t) if M.dtype == torch.bfloat16 else 0
        watched = self.watched and learning
        after, norm = w.run(
            self._advance, B, w.P, (u, m_, g_, past_, led_to_, out_), beta, w.scratch(), self._save, learning,
            scale, meta.kind, M_, V_, numbers, key, w.weights, watched, gate is not None,
            tuple(gate or feed.START),
        )  # fmt: skip
        if watched:
            self.hypergradient_norm, self.watched = norm, False
        w.end()
        gate = None if gate is None else Learned(*after)
        self._kept = _belonging(theta, m, last, gate)
        return gate

    def _feed_again(
        self,
        theta: Tensor,
        m: Tensor,
        out: Tensor,
        meta: MetaOptimizer,
        lesson: Lesson,
        gate: Learned | None,
        last: Tensor | None,
    ) -> None:
        """Compute the last step's activations again: they are not in memory after a state has been loaded."""
        before = m if last is None else last.clone()  # a copy, because kernels may round overlapping arrays differently
        self.advance(theta, m, before, 1.0, out, meta, lesson._replace(learning=False), gate, last)
        self._begin(theta).forget()

    def _begin(self, theta: Tensor) -> _Work:
        if self._work is None:
            weights = self.family.layers(self.layout).weights
            if self._P is None:
                self._work = _ShuffledWork(theta, np.empty(0, np.uint32), weights, self._save)
            else:
                indices = self._P.numpy().view(np.uint32)  # unsigned: no negative indices
                self._work = _PermutedWork(theta, indices, weights, self._save)
        return self._work


class _Work:
    """The arrays a step needs beside the state; without ``save``, the system may take large ones between steps."""

    def __init__(self, theta: Tensor, P: Any, weights: int, save: bool) -> None:
        N, T, k, _, L = theta.shape
        self._dtype, self._sizes, self._save = theta.dtype, (N, T, k, L), save
        self.weights, self._hidden = weights, weights // k  # in a layer
        self.P = P
        is_large = T >= PARALLEL_FROM
        self.run = Caller(parallel=is_large)
        self._chunks = np.linspace(0, T, 1 + (_CHUNKS if is_large else 1)).astype(np.int64)
        self._u = np.empty(0)
        self._scratch: tuple[Any, ...] | None = None
        self._memories: list[Memory] = []  # of the scratch
        self._known: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def _zeros(self, *shape: int, huge: bool = True) -> Any:
        x, memory = passing_zeros(shape, self._dtype, _PAGED_FROM, huge)
        if memory is not None:
            self._memories.append(memory)
        return x.numpy()

    def _in_order(self, *shape: int) -> Any:
        """An array for activations that is read and written in order."""
        return self._zeros(*shape, huge=self._save)

    def fed(self, n: int) -> Any:
        """A vector for what is fed."""
        if not self._u.size:
            self._u = huge_zeros((n,), self._dtype, least=_PAGED_FROM).numpy()
        return self._u

    def _spare(self) -> tuple[Any, Any]:
        """Tiles and lanes for each chunk."""
        _, _, k, L = self._sizes
        return self._zeros(len(self._chunks) - 1, 5, k, L), np.zeros((len(self._chunks) - 1, L))

    def _make(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def scratch(self) -> tuple[Any, ...]:
        """The arrays that a pass works in."""
        if self._scratch is None:
            self._memories = []
            self._scratch = self._make()
        return self._scratch

    def end(self) -> None:
        """The step is over: give back what is large and need not be kept."""
        if self._save or self._scratch is None or sum(a.nbytes for a in self._scratch) <= _KEEP_BELOW:
            return
        if not give_back(self._memories):
            self._scratch = None
            self._memories = []

    def forget(self) -> None:
        """Let go of tensors that will not come again."""
        self._known.clear()

    def arrays(self, *tensors: Tensor) -> tuple[Any, ...]:
        """The tensors as arrays, made anew only when one of them is elsewhere than before."""
        key = tuple([x.data_ptr() for x in tensors])
        known = self._known.get(key)
        if known is None:
            if len(self._known) == 3:  # more than a run needs: some are of tensors that were replaced
                self._known.clear()
            known = self._known[key] = tuple(_array(x) for x in tensors)  # keeps their memory, so no address returns
        return known


class _PermutedWork(_Work):
    def __init__(self, theta: Tensor, P: Any, weights: int, save: bool) -> None:
        super().__init__(theta, P, weights, save)
        N, T, k, L = self._sizes
        self.P = P.reshape(N, T, k * L)

    def _make(self) -> tuple[Any, ...]:
        N, T, k, L = self._sizes
        x, y = self._zeros(T, k, L), self._zeros(T, k, L)
        Pa, Pb, c = self._in_order(N, T, k, L), self._in_order(N, T, k, L), self._zeros(N if self._save else 2, T, k, L)
        return (x, y, *self._spare(), self._chunks, Pa, Pb, c)


class _ShuffledWork(_Work):
    def _make(self) -> tuple[Any, ...]:
        a, b, *c = (self._in_order(max(1, self._sizes[0] - 1), self._hidden) for _ in range(3 if self._save else 2))
        return (a, b, *(c or [a]), *self._spare(), self._chunks)


def _belonging(theta: Tensor, m: Tensor, last: Tensor | None, gate: Learned | None) -> tuple[object, ...]:
    """Tells whether activations belong to these: torch counts what it writes to a tensor."""
    key = theta.data_ptr(), theta._version, m.data_ptr(), m._version
    return key if last is None else (*key, last.data_ptr(), last._version, gate)


def _array(x: Tensor) -> Any:
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
