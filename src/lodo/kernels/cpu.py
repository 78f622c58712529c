"""The mixing network on CPUs, fused with Numba.

One pass a layer: a tile's inputs are gathered, multiplied by its blocks and written (going up), or
multiplied and scattered (going down). The update pass computes the hypergradient of a tile and
applies the meta-optimizer to it in registers, so that the hypergradient is never stored. Tiles are
(k, k, L) with the block index last, so every inner loop runs over contiguous lanes and vectorises,
square roots and divisions included; k = 4 has its sums written out.

A step keeps ``P_i a_{i-1}`` and ``c_i`` of the momentum for the lesson of the next, so that it reads theta four
times and writes it once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from lodo._notice import notice
from lodo.memory import huge_zeros
from lodo.meta import Adam, MetaOptimizer
from lodo.preconditioners.base import Engine, Lesson, Preconditioner

PARALLEL_FROM = 64  # tiles a layer from which a second thread pays
_CHUNKS = 128  # parts of a layer that threads share; a fixed number, so that results do not depend on theirs

_MAX_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set when Numba loads
_log = logging.getLogger("lodo")

# ---------------------------------------------------------------- one tile


def _can_cache() -> bool:
    """Is there a place on disk for compiled kernels?"""
    try:
        njit(cache=True)(lambda: None)
    except RuntimeError:
        _log.warning("lodo: no writable folder for compiled kernels (set NUMBA_CACHE_DIR): compiling in every process")
        return False
    return True


# "contract" and "nsz" allow fused multiply-adds and nothing else: no reordering, so that results
# do not depend on the number of threads. The NumPy error model has no branch in a division.
_TILE: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz"}, "cache": _can_cache()}


@njit(**_TILE)
def _gather(x, p, out):  # out = P x
    for j in range(p.size):
        out[j] = x[p[j]]


@njit(**_TILE)
def _scatter(x, p, out):  # out = P^T x
    for j in range(p.size):
        out[p[j]] = x[j]


@njit(**_TILE)
def _times(B, x, out):  # out = B x
    k, _, L = B.shape
    for r in range(k):
        if k == 4:
            for l in range(L):
                out[r, l] = B[r, 0, l] * x[0, l] + B[r, 1, l] * x[1, l] + B[r, 2, l] * x[2, l] + B[r, 3, l] * x[3, l]
        else:
            for l in range(L):
                out[r, l] = B[r, 0, l] * x[0, l]
            for c in range(1, k):
                for l in range(L):
                    out[r, l] += B[r, c, l] * x[c, l]


@njit(**_TILE)
def _times_transposed(B, x, out):  # out = B^T x
    k, _, L = B.shape
    for r in range(k):
        if k == 4:
            for l in range(L):
                out[r, l] = B[0, r, l] * x[0, l] + B[1, r, l] * x[1, l] + B[2, r, l] * x[2, l] + B[3, r, l] * x[3, l]
        else:
            for l in range(L):
                out[r, l] = B[0, r, l] * x[0, l]
            for c in range(1, k):
                for l in range(L):
                    out[r, l] += B[c, r, l] * x[c, l]


@njit(**_TILE)
def _sgd(B, d, Pa, c, Pb, scale, rate):
    k, _, L = B.shape
    for r in range(k):
        for s in range(k):
            for l in range(L):
                B[r, s, l] -= rate * (scale * (d[r, l] * Pa[s, l] + c[r, l] * Pb[s, l]))


@njit(**_TILE)
def _adam(B, M, V, d, Pa, c, Pb, scale, b1, c1, b2, c2, rate, root, eps):
    k, _, L = B.shape
    for r in range(k):
        for s in range(k):
            for l in range(L):
                h = scale * (d[r, l] * Pa[s, l] + c[r, l] * Pb[s, l])
                m = b1 * M[r, s, l] + c1 * h
                v = b2 * V[r, s, l] + c2 * (h * h)
                M[r, s, l] = m
                V[r, s, l] = v
                B[r, s, l] -= rate * m / (np.sqrt(v) * root + eps)


@njit(cache=_TILE["cache"], fastmath={"contract", "reassoc"})
def _norm(v):
    square = 0.0
    for x in v:
        square += np.float64(x) * np.float64(x)
    return np.sqrt(square)


# ---------------------------------------------------------------- all layers
# Hidden vectors are (T, k, L), activations (N, T, k, L). Threads share the chunks of a layer: chunk j is tiles
# chunks[j] to chunks[j + 1], and has a spare tile E[j]. x and y are hidden vectors for passing activations on.
# These functions are inlined where they are called, so that `prange` means threads in a kernel compiled for
# many and a plain loop in one compiled for one.


@njit(inline="always")
def _up(theta, P, v, x, y, chunks, inputs):
    """inputs[i] = P_i a_{i-1} for every layer, from a_0 = v; returns a_N, which is x or y."""
    N = theta.shape[0]
    x.reshape(-1)[: v.size] = v
    x.reshape(-1)[v.size :] = 0
    for i in range(N):
        source = (x if i % 2 == 0 else y).reshape(-1)
        target = y if i % 2 == 0 else x
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                _gather(source, P[i, t], inputs[i, t].reshape(-1))
                _times(theta[i, t], inputs[i, t], target[t])
    return x if N % 2 == 0 else y


@njit(inline="always")
def _up_and_down(theta, P, v, x, y, E, chunks, inputs, outputs, out):
    """out = G v, with inputs as in `_up` and outputs[i] = c_i; both may be one array."""
    outputs[-1] = _up(theta, P, v, x, y, chunks, inputs)
    for i in range(theta.shape[0] - 1, -1, -1):
        target = (y if i == 0 else outputs[i - 1]).reshape(-1)
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                _times_transposed(theta[i, t], outputs[i, t], E[j])
                _scatter(E[j].reshape(-1), P[i, t], target)
    out[:] = y.reshape(-1)[: out.size]


@njit(inline="always")
def _learn(theta, P, g, x, y, E, chunks, Pa, Pb, c, scale, adam, M, V, numbers):
    """Go up with g, then down from d_N = Gt g, updating each layer's theta on the way."""
    N, real = theta.shape[0], theta.dtype.type
    b1, c1, b2, c2, rate, root, eps = numbers
    w = _up(theta, P, g, x, y, chunks, Pb)
    z = y if N % 2 == 0 else x  # the one that w is not
    for i in range(N - 1, -1, -1):
        d = w if (N - 1 - i) % 2 == 0 else z
        target = (z if (N - 1 - i) % 2 == 0 else w).reshape(-1)
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                if i > 0:
                    _times_transposed(theta[i, t], d[t], E[j])
                    _scatter(E[j].reshape(-1), P[i, t], target)
                if adam:
                    _adam(
                        theta[i, t], M[i, t], V[i, t], d[t], Pa[i, t], c[i, t], Pb[i, t], real(scale),
                        real(b1), real(c1), real(b2), real(c2), real(rate), real(root), real(eps),
                    )  # fmt: skip
                else:
                    _sgd(theta[i, t], d[t], Pa[i, t], c[i, t], Pb[i, t], real(scale), real(rate))


def _apply(theta, P, v, work, out):
    """out = G v, leaving Pa and c as they are."""
    x, y, E, chunks, _, Pb, _ = work
    _up_and_down(theta, P, v, x, y, E, chunks, Pb, Pb, out)


def _advance(theta, P, m, g, beta, work, out, learning, led_to, scale, adam, M, V, numbers):
    """Learn from where the last step led, m = beta m + (1 - beta) g, out = G m; keep Pa and c for next time."""
    x, y, E, chunks, Pa, Pb, c = work
    if learning:
        _learn(theta, P, led_to, x, y, E, chunks, Pa, Pb, c, scale, adam, M, V, numbers)
    keep, take = theta.dtype.type(beta), theta.dtype.type(1 - beta)
    for j in range(m.size):
        m[j] = keep * m[j] + take * g[j]
    _up_and_down(theta, P, m, x, y, E, chunks, Pa, c, out)


class _Kernel:
    """A pass compiled twice, each at its first use: for one thread and for many.

    Numba's disk cache does not tell the two apart by itself, so each has a name of its own.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        assert isinstance(function, FunctionType)
        self._name = function.__name__.strip("_")
        self.serial, self._parallel = (self._compile(function, parallel) for parallel in (False, True))

    @staticmethod
    def _compile(function: FunctionType, parallel: bool) -> Callable[..., None]:
        name = f"{function.__name__}_{'parallel' if parallel else 'serial'}"
        twin = FunctionType(function.__code__, function.__globals__, name)
        twin.__qualname__, twin.__module__ = name, function.__module__
        compiled: Callable[..., None] = njit(parallel=parallel, **_TILE)(twin)
        return compiled

    def parallel(self, *arguments: object) -> None:
        """Run on as many threads as torch uses, leaving Numba's own setting as it was."""
        threads = min(torch.get_num_threads(), _MAX_THREADS)
        if threads == 1:
            return self.serial(*arguments)
        before = numba.get_num_threads()
        numba.set_num_threads(threads)
        try:
            return self._parallel(*arguments)
        finally:
            numba.set_num_threads(before)

    def first(self, call: Callable[..., None]) -> Callable[..., None]:
        """``call``, which may have to compile, and says so if that takes over two seconds."""

        def run(*arguments: object) -> None:
            with notice("lodo: compiling %s for this machine (once; the result is kept on disk) ...", self._name):
                call(*arguments)

        return run


_APPLY, _ADVANCE = _Kernel(_apply), _Kernel(_advance)

# ---------------------------------------------------------------- the engine


class FusedMixing(Engine):
    """Runs the mixing network with the fused kernels, on as many threads as torch uses."""

    def __init__(self, family: Preconditioner, P: Tensor) -> None:
        super().__init__(family, P)
        self._work: _Work | None = None  # made at the first use, when theta's dtype is known
        self._kept: tuple[int, ...] = ()  # whose activations work.Pa and work.c hold

    def apply(self, theta: Tensor, v: Tensor) -> Tensor:
        w, out = self._begin(theta), torch.empty_like(v)
        w.run(_APPLY, theta.numpy(), w.P, v.numpy(), w.scratch, out.numpy())
        return out

    def norm(self, v: Tensor) -> float:
        return float(_norm(v.numpy() if self._work is None else self._work.arrays(v)[0]))

    def advance(
        self, theta: Tensor, m: Tensor, g: Tensor, beta: float, out: Tensor, meta: MetaOptimizer, lesson: Lesson
    ) -> None:
        w = self._begin(theta)
        # torch counts what it writes to a tensor
        now = theta.data_ptr(), theta._version, m.data_ptr(), m._version
        learning, led_to, scale, moments, t, meta_lr = lesson
        if learning and self._kept != now:  # the first step after loading a state: go up and down again
            self.advance(theta, m, m, 1.0, out, meta, lesson._replace(learning=False))
        self._kept = now
        adam, numbers = isinstance(meta, Adam), meta.coefficients(t, meta_lr)
        if not adam:
            numbers, moments = (0.0, 0.0, 0.0, 0.0, *numbers, 0.0, 0.0), (theta, theta)  # what SGD does not use
        B, m_, g_, out_, led_to_, M, V = w.arrays(theta, m, g, out, led_to, *moments)
        w.run(_ADVANCE, B, w.P, m_, g_, beta, w.scratch, out_, learning, led_to_, scale, adam, M, V, numbers)

    def _begin(self, theta: Tensor) -> _Work:
        if self._work is None:
            self._work = _Work(theta, self.P)
        return self._work


class _Work:
    """The arrays a step needs beside the state."""

    def __init__(self, theta: Tensor, P: Tensor) -> None:
        N, T, k, _, L = theta.shape

        def zeros(*shape: int) -> Any:
            return huge_zeros(shape, theta.dtype).numpy()

        self._large = T >= PARALLEL_FROM
        self.P = P.numpy().view(np.uint32).reshape(N, T, k * L)  # unsigned: no negative indices
        chunks = np.linspace(0, T, 1 + (_CHUNKS if self._large else 1)).astype(np.int64)
        x, y, E = zeros(T, k, L), zeros(T, k, L), zeros(len(chunks) - 1, k, L)
        Pa, Pb, c = (zeros(N, T, k, L) for _ in range(3))
        self.scratch = (x, y, E, chunks, Pa, Pb, c)
        self._ready: dict[_Kernel, Callable[..., None]] = {}  # what has been called before
        self._known: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def run(self, kernel: _Kernel, *arguments: object) -> None:
        call = self._ready.get(kernel)
        if call is None:
            call = self._ready[kernel] = kernel.parallel if self._large else kernel.serial
            call = kernel.first(call)
        call(*arguments)

    def arrays(self, *tensors: Tensor) -> tuple[Any, ...]:
        """The tensors as arrays, made anew only when one of them is elsewhere than before."""
        key = tuple([x.data_ptr() for x in tensors])
        known = self._known.get(key)
        if known is None:
            if len(self._known) == 3:  # more than a run needs: some are of tensors that were replaced
                self._known.clear()
            known = self._known[key] = tuple(x.numpy() for x in tensors)  # keeps their memory, so no address returns
        return known
