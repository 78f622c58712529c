"""Messages between ranks: many tensors of any dtypes, to every rank one message."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lodo.planning import padded

Expected = tuple[tuple[int, ...], torch.dtype]  # the shape and dtype of a tensor in a message


class Transfer:
    """One message to every rank of a group and one from each, under way.

    Args:
        group: of processes.
        sent: the tensors for each rank.
        expected: what each rank sends here.
        device: where messages are.
    """

    def __init__(
        self,
        group: Any,
        sent: Sequence[Sequence[Tensor]],
        expected: Sequence[Sequence[Expected]],
        device: torch.device,
    ) -> None:
        self._expected = expected
        self._coming = [_length(tensors) for tensors in expected]
        going = [_length([(x.shape, x.dtype) for x in tensors]) for tensors in sent]
        self._received, message = (
            torch.empty(sum(sizes), dtype=torch.uint8, device=device) for sizes in (self._coming, going)
        )
        self._sent: Tensor | None = message  # which must live until it has been sent
        for tensors, part in zip(sent, torch.split_with_sizes(message, going), strict=True):
            for x, place in zip(tensors, _unpacked(part, [(x.shape, x.dtype) for x in tensors]), strict=True):
                place.copy_(x)
        with _lost_ranks():
            self._work: Any = dist.all_to_all_single(
                self._received, message, self._coming, going, group=group, async_op=True
            )

    def wait(self) -> list[list[Tensor]]:
        """What each rank has sent, as views of the message."""
        if self._work is not None:
            with _lost_ranks():
                self._work.wait()
            self._work = self._sent = None
        parts = torch.split_with_sizes(self._received, self._coming)
        return [_unpacked(part, tensors) for part, tensors in zip(parts, self._expected, strict=True)]


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """Say what a broken connection means."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "KronLODO could not exchange gradients and changes with the other ranks: one of them has ended, or has not "
            "called step (or state_dict) within the process group's time-out. This step is incomplete; restart all "
            f"ranks from a checkpoint. The process group says: {error}"
        ) from error


def _length(tensors: Sequence[Expected]) -> int:
    return sum(padded(math.prod(shape) * dtype.itemsize) for shape, dtype in tensors)


def _unpacked(message: Tensor, tensors: Sequence[Expected]) -> list[Tensor]:
    """Views of a message, of bytes, as the tensors it consists of."""
    found, start = [], 0
    for shape, dtype in tensors:
        size = math.prod(shape) * dtype.itemsize
        found.append(message[start : start + size].view(dtype).view(shape))
        start += padded(size)
    return found
