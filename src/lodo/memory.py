"""How much memory a network takes, whether that fits, and large arrays on huge pages."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lodo import meta, options
from lodo._checks import check_bool, check_choice, check_int
from lodo.kernels import BACKENDS
from lodo.preconditioners import Preconditioner, select

_HUGE_FROM = 1 << 22  # bytes from which an array asks for huge pages


class MemoryEstimate(NamedTuple):
    """Bytes, by what they are for; ``total`` is the most that exists at once, ``resting`` what stays between steps."""

    theta: int
    moments: int
    indices: int
    activations: int  # kept from step to step
    work: int  # there during a step only
    vectors: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def resting(self) -> int:
        return self.total - self.work

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {readable(size)}" for name, size in zip(self._fields, self, strict=True))
        return f"{readable(self.total)} ({parts})"


def memory_estimate(
    n: int,
    preconditioner: str | Preconditioner = "mixing",
    *,
    depth: int | None = None,
    block_size: int = 4,
    width: float = 2.0,
    mixing: str | None = None,
    momentum: str | None = None,
    meta_optimizer: str = "adam",
    moment_dtype: torch.dtype | str | None = None,
    save_activations: bool | None = None,
    recipe: str = "paper",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    device: torch.device | str = "cpu",
) -> MemoryEstimate:
    """The memory LODO needs for ``n`` parameters, beside the parameters and their gradients.

    Args:
        n: number of parameters in the group.
        preconditioner: as for `LODO`, as are ``depth``, ``block_size``, ``width``,
            ``mixing``, ``momentum``, ``meta_optimizer``, ``moment_dtype``, ``save_activations``, ``recipe`` and
            ``backend``.
        dtype: theta's dtype: float64 for float64 parameters, float32 for all others.
        device: where the parameters are.

    Example:
        >>> memory_estimate(94_696).theta // 94_696  # 128 float32 numbers a parameter
        512
        >>> memory_estimate(1000, "diagonal").theta
        4000
        >>> memory_estimate(94_696, recipe="robust").moments // 94_696  # in bfloat16
        512
    """
    check_int("n", n, low=0)
    check_choice("meta_optimizer", meta_optimizer, meta.META_OPTIMIZERS)
    check_choice("backend", backend, BACKENDS)
    chosen = options.from_recipe(recipe, mixing=mixing, momentum=momentum, save_activations=save_activations)
    half = options.moment_dtype(moment_dtype, meta_optimizer, recipe)
    save = chosen["save_activations"]
    check_choice("momentum", chosen["momentum"], options.MOMENTA)
    check_bool("save_activations", save)
    family = select(preconditioner, depth, block_size, width, chosen["mixing"])
    fused = family.fused(backend, torch.device(device))
    item = dtype.itemsize
    weights = prod(family.shape(n)) if n else 0
    moments = len(meta.make(meta_optimizer).moments)
    activations = item * family.work_count(n, fused, save) if n else 0
    # an engine that is not fused stores the hypergradient and, for Adam, a denominator; moments in bfloat16 are
    # widened whole and rounded a layer at a time in 64-bit integers
    arrays = 0 if fused else 1 + bool(moments) + (2 if half else 0)
    temporary = arrays * item * weights + (0 if fused or not half else 32 * weights // family.layers(n).number)
    kept = activations if fused and save else 0
    return MemoryEstimate(
        theta=weights * item,
        moments=weights * (half or dtype).itemsize * moments,
        indices=4 * family.index_count(n) if n else 0,
        activations=kept,
        work=activations - kept + temporary,
        vectors=(5 if chosen["momentum"] == "learned" else 3) * item * n,
    )


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``, or None if that cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    bounds = [_meminfo(), _cgroup()]
    return min((bound for bound in bounds if bound is not None), default=None)


def check_fits(needed: MemoryEstimate, earlier: int, device: torch.device, what: str) -> None:
    """Raise MemoryError if ``needed`` and what ``earlier`` groups will take cannot fit."""
    free = available(device)
    if free is not None and needed.total + earlier > free:
        others = f", and {readable(earlier)} for the groups before it" if earlier else ""
        raise MemoryError(
            f"{what} needs {needed}{others}; {readable(free)} is available on {str(device)!r}. "
            "Use recipe='robust' (two thirds of the memory), a smaller depth, width or block_size, "
            "preconditioner='diagonal', meta_optimizer='sgd', or train fewer parameters with LODO"
        )


def readable(size: int) -> str:
    """A number of bytes for people.

    >>> readable(203_000_000)
    '203.0 MB'
    """
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.1f} GB"


def huge_zeros(shape: Sequence[int], dtype: torch.dtype, least: int = _HUGE_FROM) -> Tensor:
    """Zeros on the CPU, from ``least`` bytes on page-aligned and on huge pages where the system has them.

    Random gathers over a vector of millions of numbers miss the address cache on 4 kB pages. Such an array also gives
    its memory back to the system when it is freed, which smaller ones of malloc do not.

    >>> huge_zeros((2, 3), torch.float32).sum()
    tensor(0.)
    """
    size = prod(shape) * dtype.itemsize
    if size < least or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never shared with a forked process
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def _meminfo() -> int | None:
    """What the system says is available: Linux's estimate, else all physical memory."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _cgroup(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the container's limit leaves, if there is one; cached files can be dropped and do not count."""
    try:
        limit = int((root / "memory.max").read_text())  # "max" is not a number: no limit
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["active_file"]) + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None
