"""The mixing network on CPUs, fused with Numba.

`lodo.kernels.tiles` has what happens to a tile, `permuted` and `shuffled` the passes over all layers for the two
kinds of mixing; here they are compiled, given memory and called.

A step keeps ``P_i a_{i-1}`` and ``c_i`` of what was fed for the lesson of the next, so that it reads theta four
times and writes it once; or, to save memory, it computes them again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from filelock import FileLock, Timeout
from numba import njit
from torch import Tensor

from lodo import gate as gates
from lodo import meta as metas
from lodo._notice import notice
from lodo.gate import Gate
from lodo.kernels import gating, permuted, shuffled, tiles
from lodo.memory import huge_zeros
from lodo.meta import MetaOptimizer
from lodo.preconditioners.base import Engine, Lesson, Preconditioner
from lodo.rounding import update_key

PARALLEL_FROM = 64  # tiles a layer from which a second thread pays
_CHUNKS = 128  # parts of a layer that threads share; a fixed number, so that results do not depend on theirs
_KEEP_BELOW = 1 << 20  # bytes of work arrays that are not worth freeing between steps
_PATIENCE = 120.0  # seconds to wait for another process that compiles the same
_PAGED_FROM = 1 << 16  # bytes of an array that is worth pages of its own

_MAX_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set when Numba loads


_log = logging.getLogger("lodo")


def _can_cache() -> bool:
    """Is there a place on disk for compiled kernels?"""
    try:
        njit(cache=True)(lambda: None)
    except RuntimeError:
        _log.warning("lodo: no writable folder for compiled kernels (set NUMBA_CACHE_DIR): compiling in every process")
        return False
    return True


CACHE = _can_cache()
_SOURCES = [Path(str(module.__file__)) for module in (gates, metas, gating, permuted, shuffled, tiles)]
_VERSION = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:8]


class _Kernel:
    """A pass compiled twice, each at its first use: for one thread and for many.

    Numba's disk cache tells neither the two apart nor what was compiled before a function that they call was changed,
    so each has a name of its own, with a version made of all their sources.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        assert isinstance(function, FunctionType)
        self._name = function.__name__
        self.serial, self._parallel = (self._compile(function, parallel) for parallel in (False, True))

    @staticmethod
    def _compile(function: FunctionType, parallel: bool) -> Callable[..., Any]:
        name = f"{function.__name__}_{'parallel' if parallel else 'serial'}_{_VERSION}"
        twin = FunctionType(function.__code__, function.__globals__, name)
        twin.__qualname__, twin.__module__ = name, function.__module__
        compiled: Callable[..., Any] = njit(parallel=parallel, cache=CACHE, **tiles.TILE)(twin)
        return compiled

    def parallel(self, *arguments: object) -> Any:
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

    def first(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, which may have to compile, and says so if that takes over two seconds."""

        def run(*arguments: object) -> Any:
            words = "lodo: compiling %s for this machine (once; the result is kept on disk) ..."
            with notice(words, self._name), self._alone(arguments):
                return call(*arguments)

        return run

    @contextmanager
    def _alone(self, arguments: tuple[object, ...]) -> Iterator[None]:
        """Let one process compile at a time for these types, so that others find the result on disk."""
        if not CACHE:
            yield
            return
        types = hashlib.sha256(repr([numba.typeof(x) for x in arguments]).encode()).hexdigest()[:16]  # type: ignore[no-untyped-call]
        lock = FileLock(Path(self.serial.stats.cache_path) / f"{self._name}_{types}_{_VERSION}.lock")  # type: ignore[attr-defined]
        with suppress(OSError, Timeout):
            lock.acquire(timeout=_PATIENCE)
        try:
            yield
        finally:
            lock.release()


_APPLY = {"random": _Kernel(permuted.apply), "shuffle": _Kernel(shuffled.apply)}
_ADVANCE = {"random": _Kernel(permuted.advance), "shuffle": _Kernel(shuffled.advance)}


@njit(cache=CACHE, fastmath={"contract", "reassoc"})
def _norm(v: Any) -> Any:
    square = 0.0
    for x in v:
        square += np.float64(x) * np.float64(x)
    return np.sqrt(square)


# ---------------------------------------------------------------- the engine


class FusedMixing(Engine):
    """Runs the mixing network with the fused kernels, on as many threads as torch uses."""

    def __init__(self, family: Preconditioner, P: Tensor, mixing: str, save_activations: bool) -> None:
        super().__init__(family, P)
        self._kernels = _APPLY[mixing], _ADVANCE[mixing]
        self._save = save_activations
        self._work: _Work | None = None  # made at the first use, when theta's dtype is known
        self._kept: tuple[object, ...] = ()  # whose activations the work arrays hold

    def apply(self, theta: Tensor, v: Tensor) -> Tensor:
        w, out = self._begin(theta, v.numel()), torch.empty_like(v)
        w.run(self._kernels[0], theta.numpy(), w.P, v.numpy(), w.scratch(), out.numpy())
        w.end()
        return out

    def norm(self, v: Tensor) -> float:
        return float(_norm(v.numpy() if self._work is None else self._work.arrays(v)[0]))

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
        w = self._begin(theta, m.numel())
        learning, led_to, scale, moments, t, meta_lr, seed = lesson
        if learning and self._kept != _belonging(theta, m, last, gate):
            # the first step after loading a state: feed what was fed again
            again = lesson._replace(learning=False)
            before = m if last is None else last.clone()  # not itself: kernels may round overlapping arrays otherwise
            self.advance(theta, m, before, 1.0, out, meta, again, gate, last)
            w.forget()
        M, V = (*moments, theta, theta)[:2]  # what a kernel does not use is of no matter
        past = m if last is None else last
        B, m_, g_, out_, led_to_, M_, V_, past_ = w.arrays(theta, m, g, out, led_to, M, V, past)
        u = m_ if last is None else w.fed(m.numel())
        key = update_key(seed, t) if M.dtype == torch.bfloat16 else 0
        watched = self.watched and learning
        after, norm = w.run(
            self._kernels[1], B, w.P, (u, m_, g_, past_, led_to_, out_), beta, w.scratch(), self._save, learning,
            scale, meta.kind, M_, V_, meta.coefficients(t, meta_lr), key, w.weights, watched, gate is not None,
            tuple(gate or Gate()),
        )  # fmt: skip
        if watched:
            self.hypergradient_norm, self.watched = norm, False
        w.end()
        gate = None if gate is None else Gate(*after)
        self._kept = _belonging(theta, m, last, gate)
        return gate

    def _begin(self, theta: Tensor, n: int) -> _Work:
        if self._work is None:
            kind = _Shuffled if self._kernels[0] is _APPLY["shuffle"] else _Permuted
            self._work = kind(theta, self.P, self.family.layers(n).weights, self._save)
        return self._work


class _Work:
    """The arrays a step needs beside the state; without ``save`` large ones are there during a step only."""

    def __init__(self, theta: Tensor, P: Tensor, weights: int, save: bool) -> None:
        N, T, k, _, L = theta.shape
        self._dtype, self._sizes, self._save = theta.dtype, (N, T, k, L), save
        self.weights, self._hidden = weights, weights // k  # in a layer
        self.P = P.numpy().view(np.uint32)  # unsigned: no negative indices
        self._large = T >= PARALLEL_FROM
        self._chunks = np.linspace(0, T, 1 + (_CHUNKS if self._large else 1)).astype(np.int64)
        self._u = self._zeros(0)
        self._scratch: tuple[Any, ...] | None = None
        self._ready: dict[_Kernel, Callable[..., Any]] = {}  # what has been called before
        self._known: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def _zeros(self, *shape: int) -> Any:
        return huge_zeros(shape, self._dtype, least=_PAGED_FROM).numpy()

    def fed(self, n: int) -> Any:
        """A vector for what is fed."""
        if not self._u.size:
            self._u = self._zeros(n)
        return self._u

    def _spare(self) -> tuple[Any, Any]:
        """Tiles and lanes for each chunk."""
        _, _, k, L = self._sizes
        return self._zeros(len(self._chunks) - 1, 5, k, L), np.zeros((len(self._chunks) - 1, L))

    def _make(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def scratch(self) -> tuple[Any, ...]:
        if self._scratch is None:
            self._scratch = self._make()
        return self._scratch

    def end(self) -> None:
        """The step is over: free what is large and need not be kept."""
        if not self._save and self._scratch is not None and sum(a.nbytes for a in self._scratch) > _KEEP_BELOW:
            self._scratch = None

    def run(self, kernel: _Kernel, *arguments: object) -> Any:
        call = self._ready.get(kernel)
        if call is None:
            call = self._ready[kernel] = kernel.parallel if self._large else kernel.serial
            call = kernel.first(call)
        return call(*arguments)

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


class _Permuted(_Work):
    def __init__(self, theta: Tensor, P: Tensor, weights: int, save: bool) -> None:
        super().__init__(theta, P, weights, save)
        N, T, k, L = self._sizes
        self.P = self.P.reshape(N, T, k * L)

    def _make(self) -> tuple[Any, ...]:
        N, T, k, L = self._sizes
        x, y = self._zeros(T, k, L), self._zeros(T, k, L)
        Pa, Pb, c = self._zeros(N, T, k, L), self._zeros(N, T, k, L), self._zeros(N if self._save else 2, T, k, L)
        return (x, y, *self._spare(), self._chunks, Pa, Pb, c)


class _Shuffled(_Work):
    def _make(self) -> tuple[Any, ...]:
        N, hidden = self._sizes[0], self._hidden
        a, b, c = (self._zeros(rows, hidden) for rows in (N + 1, N + 1, N + 1 if self._save else 2))
        return (a, b, c, self._zeros(2, hidden), *self._spare(), self._chunks)


def _belonging(theta: Tensor, m: Tensor, last: Tensor | None, gate: Gate | None) -> tuple[object, ...]:
    """Tells whether activations belong to these: torch counts what it writes to a tensor."""
    key = theta.data_ptr(), theta._version, m.data_ptr(), m._version
    return key if last is None else (*key, last.data_ptr(), last._version, gate)


def _array(x: Tensor) -> Any:
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
