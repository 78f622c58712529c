"""Large arrays on pages of their own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

Memory = mmap.mmap
HUGE_FROM = 1 << 22  # bytes from which an array asks for huge pages


def huge_zeros(shape: Sequence[int], dtype: torch.dtype, least: int = HUGE_FROM) -> Tensor:
    """Zeros on the CPU, page-aligned and on huge pages from ``least`` bytes on, where the system has them.

    Random gathers over a vector of millions of numbers miss the address cache on 4 kB pages. Such an array also
    returns its memory to the system when it is freed, which malloc's smaller ones do not.

    >>> huge_zeros((2, 3), torch.float32).sum()
    tensor(0.)
    """
    return _zeros(shape, dtype, least, huge=True)[0]


def passing_zeros(shape: Sequence[int], dtype: torch.dtype, least: int, huge: bool) -> tuple[Tensor, Memory | None]:
    """As `huge_zeros`, for an array that is not needed all the time, and its memory, for `give_back`.

    On huge pages only if it is asked for, because a virtual machine may hand free memory back to its host, in whole
    huge pages. Getting them again took four to five times as long as clearing as many small pages that a network had
    just freed.

    >>> passing_zeros((2, 3), torch.float32, least=0, huge=False)[0].sum()
    tensor(0.)
    """
    return _zeros(shape, dtype, least, huge)


def give_back(memories: Sequence[Memory]) -> bool:
    """Let the system take these pages if it needs memory, until something is written there again.

    What they hold may be lost. While nobody needs them, they stay: allocating and clearing them at every step took a
    fifth of LODO's time on a virtual machine, and left the caches cold.

    Returns:
        Whether the system can. If not, the arrays have to be freed.

    >>> give_back([])
    False
    """
    if not memories or not hasattr(mmap, "MADV_FREE"):
        return False
    try:
        for memory in memories:
            memory.madvise(mmap.MADV_FREE)
    except OSError:  # an old Linux, or memory that is locked
        return False
    return True


def _zeros(shape: Sequence[int], dtype: torch.dtype, least: int, huge: bool) -> tuple[Tensor, Memory | None]:
    size = prod(shape) * dtype.itemsize
    if size < max(1, least) or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu"), None
    memory = Memory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never shared with a forked process
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape)), memory
