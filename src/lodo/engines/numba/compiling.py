"""Kernels compiled by Numba at their first use, and kept on disk for other processes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numba
import torch
from filelock import FileLock, Timeout
from numba import njit

from lodo._notice import notice
from lodo.engines.numba.tiles import TILE

MAX_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set when Numba loads
_WAIT = 120.0  # seconds for another process that compiles the same kernel

_log = logging.getLogger("lodo")


def _can_cache() -> bool:
    """Whether there is a place on disk for compiled kernels."""
    try:
        njit(cache=True)(lambda: None)
    except RuntimeError:
        _log.warning("lodo: no writable folder for compiled kernels (set NUMBA_CACHE_DIR): compiling in every process")
        return False
    return True


CACHE = _can_cache()


def version_of(modules: Sequence[ModuleType]) -> str:
    """A hash of the modules' source code."""
    sources = [Path(str(module.__file__)).read_bytes() for module in modules]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:8]


class Kernel:
    """A function that is compiled twice, each time at its first use: for one thread and for many.

    Numba's disk cache neither tells the two apart nor notices that a function which they call has changed. So each has
    a name of its own, which contains a version made of all the sources.
    """

    def __init__(self, function: Callable[..., Any], version: str) -> None:
        assert isinstance(function, FunctionType)
        self.name, self._version = function.__name__, version
        self.serial = self._compile(function, parallel=False)
        self._parallel = self._compile(function, parallel=True)

    def _compile(self, function: FunctionType, parallel: bool) -> Callable[..., Any]:
        name = f"{function.__name__}_{'parallel' if parallel else 'serial'}_{self._version}"
        twin = FunctionType(function.__code__, function.__globals__, name)
        twin.__qualname__, twin.__module__ = name, function.__module__
        compiled: Callable[..., Any] = njit(parallel=parallel, cache=CACHE, **TILE)(twin)
        return compiled

    def parallel(self, *arguments: object) -> Any:
        """Run on as many threads as torch uses, leaving Numba's own setting as it was."""
        threads = min(torch.get_num_threads(), MAX_THREADS)
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
            compiled_before = self._misses()
            with self._alone(arguments), notice(lambda: self._news(compiled_before)):
                return call(*arguments)

        return run

    def _misses(self) -> int:
        """How often a kernel was not found on disk."""
        kernels: tuple[Any, ...] = (self.serial, self._parallel)
        return sum(int(sum(kernel.stats.cache_misses.values())) for kernel in kernels)

    def _news(self, compiled_before: int) -> str:
        """What takes long: nothing is said of a first call that compiles nothing."""
        if CACHE and self._misses() == compiled_before:
            return ""
        kept = "once; the result is kept on disk" if CACHE else "in every process: there is no folder to keep it in"
        return f"lodo: compiling {self.name} for this machine ({kept}) ..."

    @contextmanager
    def _alone(self, arguments: tuple[object, ...]) -> Iterator[None]:
        """Let one process at a time compile for these types, so that the others find the result on disk."""
        if not CACHE:
            yield
            return
        types = hashlib.sha256(repr([numba.typeof(x) for x in arguments]).encode()).hexdigest()[:16]  # type: ignore[no-untyped-call]
        folder = Path(self.serial.stats.cache_path)  # type: ignore[attr-defined]  # Numba's dispatcher
        lock = FileLock(folder / f"{self.name}_{types}_{self._version}.lock")
        with suppress(OSError, Timeout), notice(f"lodo: waiting for another process that compiles {self.name} ..."):
            lock.acquire(timeout=_WAIT)
        try:
            yield
        finally:
            lock.release()


class Caller:
    """Calls kernels on one thread, or on as many as torch uses; always with arguments of the same types.

    Args:
        parallel: whether to use many threads.
    """

    def __init__(self, parallel: bool) -> None:
        self._parallel = parallel
        self._known: dict[Kernel, Callable[..., Any]] = {}  # what has been called before

    def __call__(self, kernel: Kernel, *arguments: object) -> Any:
        """Call a kernel; its first call may have to compile it."""
        call = self._known.get(kernel)
        if call is None:
            call = self._known[kernel] = kernel.parallel if self._parallel else kernel.serial
            call = kernel.first(call)
        return call(*arguments)
