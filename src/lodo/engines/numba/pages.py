"""Large arrays on pages of their own."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

HUGE_FROM = 1 << 22  # bytes from which an array asks for huge pages


def huge_zeros(shape: Sequence[int], dtype: torch.dtype, least: int = HUGE_FROM) -> Tensor:
    """Zeros on the CPU, page-aligned and on huge pages from ``least`` bytes on, where the system has them.

    Random gathers over a vector of millions of numbers miss the address cache on 4 kB pages. Such an array also
    returns its memory to the system when it is freed, which malloc's smaller ones do not.

    >>> huge_zeros((2, 3), torch.float32).sum()
    tensor(0.)
    """
    return _zeros(shape, dtype, least, huge=True)


def passing_zeros(shape: Sequence[int], dtype: torch.dtype, least: int) -> Tensor:
    """As `huge_zeros`, on ordinary pages, for an array that is soon freed and is read and written in order.

    A virtual machine may hand free memory back to its host, in whole huge pages. Getting them again took four to five
    times as long as clearing as many small pages that a network had just freed.

    >>> passing_zeros((2, 3), torch.float32, least=0).sum()
    tensor(0.)
    """
    return _zeros(shape, dtype, least, huge=False)


def _zeros(shape: Sequence[int], dtype: torch.dtype, least: int, huge: bool) -> Tensor:
    size = prod(shape) * dtype.itemsize
    if size < max(1, least) or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never shared with a forked process
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
