"""Dividing KronLODO's work between processes: who owns which tensor, and what a step then sends, holds and computes.

Nothing here communicates. `lodo.ownership` does what is planned here, and `lodo.scale` adds it up beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lodo.group import Options
from lodo.kron_state import has_basis
from lodo.layout import real
from lodo.stacks import matrix_shape

ROUND = 2**22  # numbers of one owner that travel together; the next ones travel while these are worked on
ALIGNED = 8  # bytes: every tensor in a message begins at a multiple of it
HEADER = 8  # bytes at the start of a step's first messages: whether the sender's gradients can be used
PASSES = 30  # about the FLOPs a weight of the passes over all weights
WAITING, QR = 4, 4  # how much longer a FLOP of these passes, and of a QR decomposition, takes than one of a product


class Piece(NamedTuple):
    """The part of a tensor that a rank holds.

    >>> import torch
    >>> Piece((1, 0), (2, 2)).of(torch.arange(6).reshape(3, 2))
    tensor([[2, 3],
            [4, 5]])
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Piece:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, x: Tensor) -> Tensor:
        """A view of this part of a whole tensor."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            x = x.narrow(dim, start, size)
        return x


def rows_of(shape: Sequence[int], parts: int, part: int) -> Piece:
    """The rows that a rank holds of a tensor that is split evenly along its first dimension, as torch splits.

    >>> [rows_of((5, 2), 3, part).sizes for part in range(3)]
    [(2, 2), (2, 2), (1, 2)]
    """
    most = -(-shape[0] // parts)
    start, stop = min(part * most, shape[0]), min((part + 1) * most, shape[0])
    return Piece((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))


class Entry(NamedTuple):
    """A tensor whose work one rank does for all.

    Args:
        shape: of the whole tensor.
        grad_size: the bytes of a number of its gradient.
        change_size: the bytes of a number of what its owner sends back.
        pieces: what each rank holds of it.
        owner: the rank that does the work, as a place in the circle of ranks.
        round: with which others it travels.
    """

    shape: tuple[int, ...]
    grad_size: int
    change_size: int
    pieces: tuple[Piece, ...]
    owner: int = 0
    round: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def sources(self) -> dict[int, Piece]:
        """Which ranks send the owner which piece of the gradient; the nearest ones, if several hold the same piece.

        >>> halves = (Piece((0,), (2,)), Piece((2,), (2,)))
        >>> Entry((4,), 4, 4, halves * 2, owner=2).sources()
        {3: Piece(starts=(2,), sizes=(2,))}
        """
        own = self.pieces[self.owner]
        replica = len(self.pieces) // self.pieces.count(own)  # the ranks that hold one copy, of which there may be more
        found: dict[Piece, int] = {}
        for rank, piece in enumerate(self.pieces):
            if piece.numel and piece != own and own.numel < self.numel:
                nearest = found.get(piece, rank)
                found[piece] = min(nearest, rank, key=lambda r: abs(r // replica - self.owner // replica))
        return {rank: piece for piece, rank in found.items()}


def padded(size: int) -> int:
    """Bytes, rounded up to a multiple of `ALIGNED`.

    >>> padded(9)
    16
    """
    return -(-size // ALIGNED) * ALIGNED


# ---------------------------------------------------------------- cost, owners and rounds


def products_of(p: Tensor, options: Options) -> float:
    """The FLOPs of a step's matrix products for one tensor, those of a refresh spread over the steps between two.

    This is the start of a run: later, refreshes become rarer, and not every gradient enters the covariances.

    >>> import torch
    >>> products_of(torch.empty(8, 4), {"basis": "kronecker", "max_dim": 4, "refresh_every": 8})
    880.0
    """
    m, n = matrix_shape(p)
    total: float = 0.0
    if options["basis"] == "orthogonal" and m > 1:
        short, long = min(m, n), max(m, n)
        return float(5 * (4 * short**2 * long + 2 * short**3))
    refresh_every: int = options["refresh_every"]
    for d, other in _bases(p, options):
        each = 2 * d * d * other  # P' G, G G' and P S are each such a product
        total += 3 * each + (3 * each + 2 * d**3) / refresh_every  # M back, M and X again, and A P
    return total


def _bases(p: Tensor, options: Options) -> list[tuple[int, int]]:
    """The dimensions that have a basis, each with the other one."""
    m, n = matrix_shape(p)
    if options["basis"] != "kronecker" or real(p).dim() < 2:
        return []
    return [(d, other) for d, other in ((m, n), (n, m)) if has_basis(d, other, options["max_dim"])]


def decompositions_of(p: Tensor, options: Options) -> float:
    """The FLOPs of a step's QR decompositions for one tensor, spread over the steps between two refreshes."""
    total: float = sum(8 / 3 * d**3 for d, _ in _bases(p, options)) / options["refresh_every"]
    return total


def flops_of(p: Tensor, options: Options) -> float:
    """The FLOPs of a step for one tensor."""
    return products_of(p, options) + decompositions_of(p, options) + PASSES * p.numel()


def cost_of(p: Tensor, options: Options) -> float:
    """How long a step takes for one tensor, in FLOPs of matrix products."""
    return products_of(p, options) + QR * decompositions_of(p, options) + WAITING * PASSES * p.numel()


def assigned(works: Sequence[tuple[float, float]], loads: list[list[float]]) -> list[int]:
    """Who owns each tensor: the longest work first, to whom it makes least difference in time or in memory.

    Args:
        works: the cost and the bytes of the state of each tensor.
        loads: the costs and the bytes that each rank has already; they are added to.

    >>> assigned([(1, 1), (3, 3), (2, 2)], [[0, 0], [0, 0]])
    [1, 0, 1]
    """
    totals = [sum(column) or 1 for column in zip(*works, *loads, strict=True)]
    owners = [0] * len(works)
    shares = [[value / total for value, total in zip(work, totals, strict=True)] for work in works]
    for i in sorted(range(len(works)), key=lambda i: (-max(shares[i]), i)):

        def after(rank: int, i: int = i) -> tuple[float, float, int]:
            both = [(load + x) / t for load, x, t in zip(loads[rank], works[i], totals, strict=True)]
            return max(both), sum(both), rank

        owners[i] = owner = min(range(len(loads)), key=after)
        loads[owner] = [load + x for load, x in zip(loads[owner], works[i], strict=True)]
    return owners


def in_rounds(entries: Sequence[Entry]) -> list[Entry]:
    """Give each owner's tensors their rounds, of at most `ROUND` numbers; equal shapes stay together.

    >>> [entry.round for entry in in_rounds([Entry((2**21,), 4, 4, ()) for _ in range(3)])]
    [0, 0, 1]
    """
    found = list(entries)
    filled: dict[int, tuple[int, int]] = {}  # owner -> round, numbers in it
    for i in sorted(range(len(found)), key=lambda i: (found[i].shape, i)):
        entry = found[i]
        number, size = filled.get(entry.owner, (0, 0))
        if size and size + entry.numel > ROUND:
            number, size = number + 1, 0
        filled[entry.owner] = number, size + entry.numel
        found[i] = entry._replace(round=number)
    return found


# ---------------------------------------------------------------- what a step sends


class Traffic(NamedTuple):
    """What a rank sends in a step."""

    messages: int
    bytes: int


def traffic(entries: Sequence[Entry], world: int) -> list[Traffic]:
    """What each rank sends in a step."""
    rounds = 1 + max(entry.round for entry in entries)
    given = [entry.sources() for entry in entries]
    gathers = any(given)
    sent = [HEADER * (world - 1)] * world
    for entry, sources in zip(entries, given, strict=True):
        for rank, piece in sources.items():
            sent[rank] += padded(piece.numel * entry.grad_size)
        sent[entry.owner] += sum(
            padded(piece.numel * entry.change_size) for rank, piece in enumerate(entry.pieces) if rank != entry.owner
        )
    return [Traffic((1 + gathers) * rounds * (world - 1), size) for size in sent]
