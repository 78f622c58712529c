"""The mixing network on CPUs, fused with Numba.

One pass a layer: a tile's inputs are gathered, multiplied by its blocks and written (going up), or
multiplied and scattered (going down). The update pass computes the hypergradient of a tile and
applies the meta-optimizer to it in registers, so that the hypergradient is never stored. Tiles are
(k, k, L) with the block index last, so every inner loop runs over contiguous lanes and vectorises,
square roots and divisions included; k = 4 has its sums written out.

`FusedMixing.step` keeps ``P_i a_{i-1}`` and ``c_i`` of the momentum for the `learn` that follows, so
that a whole step reads theta four times and writes it once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import numba
import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from lodo.memory import huge_zeros
from lodo.meta import Adam, MetaOptimizer
from lodo.preconditioners.base import Engine, Preconditioner

PARALLEL_FROM = 32  # tiles a layer from which a second thread pays

_MAX_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set when Numba loads
_log = logging.getLogger("lodo")

# ---------------------------------------------------------------- one tile

# "contract" and "nsz" allow fused multiply-adds and nothing else: no reordering, so that results
# do not depend on the number of threads. The NumPy error model has no branch in a division.
_TILE: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz"}, "cache": True}


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


# ---------------------------------------------------------------- all layers


def _up(theta, P, v, x0, x1, inputs, out):
    """inputs[i] = P_i a_{i-1} for every layer, out = a_N, from a_0 = v; x0 and x1 are scratch."""
    N, T = theta.shape[:2]
    for i in range(N):
        source = (v if i == 0 else x0 if i % 2 == 0 else x1).reshape(-1)
        target = out if i == N - 1 else x1 if i % 2 == 0 else x0
        for t in prange(T):
            _gather(source, P[i, t], inputs[i, t].reshape(-1))
            _times(theta[i, t], inputs[i, t], target[t])


def _down(theta, P, outputs, out):
    """outputs[i] = c_i for every layer, out = c_0, from outputs[N-1] = c_N."""
    N, T, k, _, L = theta.shape
    for i in range(N - 1, -1, -1):
        target = (out if i == 0 else outputs[i - 1]).reshape(-1)
        for t in prange(T):
            x = np.empty((k, L), theta.dtype)
            _times_transposed(theta[i, t], outputs[i, t], x)
            _scatter(x.reshape(-1), P[i, t], target)


def _learn_sgd(theta, P, Pa, c, Pb, w, x1, numbers):
    """Go down from d_N = w (overwritten), updating each layer's theta on the way; x1 is scratch."""
    N, T, k, _, L = theta.shape
    scale, rate = numbers
    for i in range(N - 1, -1, -1):
        d = w if (N - 1 - i) % 2 == 0 else x1
        target = (x1 if (N - 1 - i) % 2 == 0 else w).reshape(-1)
        for t in prange(T):
            if i > 0:
                x = np.empty((k, L), theta.dtype)
                _times_transposed(theta[i, t], d[t], x)
                _scatter(x.reshape(-1), P[i, t], target)
            _sgd(theta[i, t], d[t], Pa[i, t], c[i, t], Pb[i, t], scale, rate)


def _learn_adam(theta, M, V, P, Pa, c, Pb, w, x1, numbers):
    """As `_learn_sgd`, with Adam and its moments M and V."""
    N, T, k, _, L = theta.shape
    scale, b1, c1, b2, c2, rate, root, eps = numbers
    for i in range(N - 1, -1, -1):
        d = w if (N - 1 - i) % 2 == 0 else x1
        target = (x1 if (N - 1 - i) % 2 == 0 else w).reshape(-1)
        for t in prange(T):
            if i > 0:
                x = np.empty((k, L), theta.dtype)
                _times_transposed(theta[i, t], d[t], x)
                _scatter(x.reshape(-1), P[i, t], target)
            _adam(
                theta[i, t], M[i, t], V[i, t], d[t], Pa[i, t], c[i, t], Pb[i, t],
                scale, b1, c1, b2, c2, rate, root, eps,
            )  # fmt: skip


def _compiled(function: Callable[..., None], parallel: bool) -> Callable[..., None]:
    """``function`` compiled for one thread or for many.

    Numba's disk cache does not tell the two apart by itself, so each has a name of its own.
    """
    assert isinstance(function, FunctionType)
    name = function.__name__ + ("_parallel" if parallel else "_serial")
    twin = FunctionType(function.__code__, function.__globals__, name)
    twin.__qualname__, twin.__module__ = name, function.__module__
    compiled: Callable[..., None] = njit(parallel=parallel, **_TILE)(twin)
    return compiled


class _Kernels:
    """The four passes, compiled for one thread or for many."""

    def __init__(self, parallel: bool) -> None:
        self.up = _compiled(_up, parallel)
        self.down = _compiled(_down, parallel)
        self.learn_sgd = _compiled(_learn_sgd, parallel)
        self.learn_adam = _compiled(_learn_adam, parallel)


_SERIAL, _PARALLEL = _Kernels(parallel=False), _Kernels(parallel=True)

# ---------------------------------------------------------------- the engine


@contextmanager
def _announced(name: str) -> Iterator[None]:
    """Say that ``name`` is being compiled, if that takes over two seconds."""
    message = "lodo: compiling %s for this machine (once; the result is kept on disk) ..."
    timer = threading.Timer(2.0, _log.warning, (message, name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class FusedMixing(Engine):
    """Runs the mixing network with the fused kernels, on as many threads as torch uses."""

    _compiled: ClassVar[set[tuple[str, torch.dtype]]] = set()  # what this process has compiled

    def __init__(self, family: Preconditioner, P: Tensor, n: int) -> None:
        super().__init__(family, P)
        self._n = n
        self._work: _Work | None = None
        self._kept: tuple[int, ...] | None = None  # whose activations work.Pa and work.c hold

    def apply(self, theta: Tensor, v: Tensor) -> Tensor:
        w = self._up(theta, v, "Pb")  # Pb is scratch outside `learn`: use it on both ways
        w.Pb[-1] = w.out
        self._run("down", theta, w.P, w.Pb, w.out)
        return w.result.clone()

    def step(self, theta: Tensor, m: Tensor) -> Tensor:
        w = self._up(theta, m, "Pa")
        w.c[-1] = w.out
        self._run("down", theta, w.P, w.c, w.out)
        self._kept = _identity(theta, m)
        return w.result

    def learn(
        self,
        theta: Tensor,
        m: Tensor,
        g: Tensor,
        scale: float,
        meta: MetaOptimizer,
        moments: Sequence[Tensor],
        t: int,
        meta_lr: float,
    ) -> None:
        if self._kept != _identity(theta, m):  # the first step after loading a state
            self.step(theta, m)
        self._kept = None
        w = self._up(theta, g, "Pb")
        numbers = tuple(map(w.out.dtype.type, (scale, *meta.coefficients(t, meta_lr))))
        kernel = "learn_adam" if isinstance(meta, Adam) else "learn_sgd"
        arrays = [moment.numpy() for moment in moments]
        self._run(kernel, theta, *arrays, w.P, w.Pa, w.c, w.Pb, w.out, w.x0, numbers)

    def _up(self, theta: Tensor, v: Tensor, inputs: str) -> _Work:
        if self._work is None:
            self._work = _Work(theta, self.P, self._n)
        w = self._work
        w.input.copy_(v)
        self._run("up", theta, w.P, w.v, w.x0, w.x1, getattr(w, inputs), w.out)
        return w

    def _run(self, name: str, theta: Tensor, *arguments: object) -> None:
        threads = min(torch.get_num_threads(), _MAX_THREADS)
        kernels = _PARALLEL if threads > 1 and theta.shape[1] >= PARALLEL_FROM else _SERIAL
        call = partial(getattr(kernels, name), theta.numpy(), *arguments)
        key = (f"{name} on {'many threads' if kernels is _PARALLEL else 'one thread'}", theta.dtype)
        if key not in self._compiled:
            with _announced(f"{name} for {theta.dtype}"):
                call()
            self._compiled.add(key)
        elif kernels is _SERIAL:
            call()
        else:
            before = numba.get_num_threads()
            numba.set_num_threads(threads)
            call()
            numba.set_num_threads(before)


class _Work:
    """The arrays a step needs beside the state."""

    def __init__(self, theta: Tensor, P: Tensor, n: int) -> None:
        N, T, k, _, L = theta.shape

        def zeros(*shape: int) -> Any:
            return huge_zeros(shape, theta.dtype).numpy()

        self.P = P.numpy().view(np.uint32).reshape(N, T, k * L)  # unsigned: no negative indices
        self.Pa, self.Pb, self.c = (zeros(N, T, k, L) for _ in range(3))
        self.v, self.x0, self.x1, self.out = (zeros(T, k, L) for _ in range(4))
        self.input = torch.from_numpy(self.v).view(-1)[:n]  # the rest of v stays zero
        self.result = torch.from_numpy(self.out).view(-1)[:n]


def _identity(theta: Tensor, m: Tensor) -> tuple[int, ...]:
    """Changes whenever torch writes to theta or m, or when either is another tensor."""
    return theta.data_ptr(), theta._version, m.data_ptr(), m._version
