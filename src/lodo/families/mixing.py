"""The paper's mixing network (Eq. 2): block-diagonal matrices between random permutations, or between shuffles.

The network is ``G(theta) = (I 0) Gt^T Gt (I 0)^T`` with ``Gt = B_N P_N ... B_1 P_1``, each ``B_i`` block-diagonal with
k x k blocks, ``(P x)[j] = x[p[j]]``. The formulas are derived in docs/algorithm.md:

    up     a_i = B_i P_i a_{i-1}            down   c_{i-1} = P_i^T B_i^T c_i
    d(g . G m)/dB_i = d_i (P_i a_{i-1})^T + c_i (P_i b_{i-1})^T

with a, c the activations of m going up and of Gt m going down, b, d those of g and Gt g.

``theta[i, b]`` is block b of ``B_i``. Component c of block b of a hidden vector is at ``b * k + c``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lodo._checks import check_choice, check_int, check_real
from lodo.families.base import Preconditioner
from lodo.layout import Layout
from lodo.meta import Layers

MIXINGS = ("random", "shuffle")
LANES = 64  # blocks in a tile, at most: with k = 4 in float32 a tile is one 4 kB page
_DRAW = 64  # tiles whose blocks are drawn at once, to bound the memory of `init`


@dataclass(frozen=True, repr=False)
class Mixing(Preconditioner):
    """The paper's preconditioner.

    Args:
        depth: the number of layers N.
        block_size: the size k of the blocks.
        width: the hidden width over n; it is rounded down to whole blocks.
        mixing: ``"random"`` permutations between the layers (the paper's), or ``"shuffle"`` for the perfect shuffle
            (write the vector as k rows, read it by columns), which needs no index arrays and no gathers.

    Example:
        >>> family = Mixing(depth=16, block_size=4, width=2.0)
        >>> family.hidden(100)
        200
        >>> family.shape(Layout.flat(100))  # 50 blocks a layer
        (16, 50, 4, 4)
    """

    depth: int = 16
    block_size: int = 4
    width: float = 2.0
    mixing: str = "random"

    def __post_init__(self) -> None:
        check_int("depth", self.depth, low=1)
        check_int("block_size", self.block_size, low=1)
        check_real("width", self.width, low=1.0)
        check_choice("mixing", self.mixing, MIXINGS)
        for name, kind in (("depth", int), ("block_size", int), ("width", float)):
            object.__setattr__(self, name, kind(getattr(self, name)))  # one spelling of each network

    def hidden(self, n: int) -> int:
        """The hidden width, at least n and at least one block."""
        k = self.block_size
        return max(int(self.width * n / k) * k, -(-n // k) * k)

    def shape(self, layout: Layout) -> tuple[int, ...]:
        k = self.block_size
        return (self.depth, self.hidden(layout.n) // k, k, k)

    def layers(self, layout: Layout) -> Layers:
        return Layers(self.depth, self.hidden(layout.n) * self.block_size)

    def index_count(self, layout: Layout) -> int:
        return self.depth * self.hidden(layout.n) if self.mixing == "random" else 0

    def work_count(self, layout: Layout) -> int:
        return (4 * self.depth + self.block_size + 4) * self.hidden(layout.n)

    # ------------------------------------------------------------ what is drawn from the seed

    def fixed(self, layout: Layout, rng: torch.Generator) -> Tensor:
        """P_1 to P_N, one permutation a row; shuffles need nothing."""
        if self.mixing == "shuffle":
            return super().fixed(layout, rng)
        hidden = self.hidden(layout.n)
        natural = self._tile_order(layout)
        P = torch.empty(self.depth, hidden, dtype=torch.int32)
        for i, p in enumerate(P):
            drawn = torch.randperm(hidden, generator=rng)
            p[natural] = (drawn if i == 0 else natural[drawn]).int()
        return P

    def permutations(self, P: Tensor, layout: Layout) -> Tensor:
        """P_1 to P_N as (N, hidden), of random permutations and of shuffles alike."""
        if self.mixing == "random":
            return P.long()
        shuffle = torch.arange(self.hidden(layout.n), device=P.device).view(self.block_size, -1).T.reshape(-1)
        return shuffle.expand(self.depth, -1)

    def init(self, theta: Tensor, layout: Layout, rng: torch.Generator) -> None:
        """Make every block a random orthogonal matrix, so that G is the identity."""
        k, (tiles, lanes) = self.block_size, self.tiles(layout)
        pieces = [B[first * lanes : (first + _DRAW) * lanes] for B in theta for first in range(0, tiles, _DRAW)]
        counts = [min(_DRAW, tiles - first) * lanes for first in range(0, tiles, _DRAW)] * len(theta)
        with _one_thread():
            for blocks, drawn in zip(pieces, _gaussian(k, counts, rng), strict=True):
                _orthogonalize(drawn)
                blocks.copy_(drawn.permute(2, 0, 1)[: len(blocks)])

    def tiles(self, layout: Layout) -> tuple[int, int]:
        """How many tiles a layer has, and how many lanes each tile: the unit in which numbers are drawn.

        The engine for CPUs stores the blocks in such tiles. Lanes come in eights, for vector instructions, unless
        there are fewer blocks than that.

        >>> Mixing().tiles(Layout.flat(100))  # 50 blocks
        (1, 56)
        """
        blocks = self.hidden(layout.n) // self.block_size
        tiles = -(-blocks // LANES)
        lanes = -(-blocks // tiles)
        return tiles, lanes if tiles == 1 and lanes < 8 else -(-lanes // 8) * 8

    def _tile_order(self, layout: Layout) -> Tensor:
        """The components of a hidden vector in the order of tiles: first components of a tile's blocks, and so on."""
        k, (_, lanes) = self.block_size, self.tiles(layout)
        blocks = torch.arange(self.hidden(layout.n)).view(-1, k)
        return torch.cat([tile.T.reshape(-1) for tile in torch.split(blocks, lanes)])

    def places(self, layout: Layout) -> Tensor:
        """Where the weights of a layer are when blocks are stored in tiles, with the block index last."""
        k, (_, lanes) = self.block_size, self.tiles(layout)
        blocks = torch.arange(self.hidden(layout.n) // k)[:, None]
        entries = torch.arange(k * k)[None, :]
        return ((blocks // lanes * k * k + entries) * lanes + blocks % lanes).reshape(-1)

    # ------------------------------------------------------------ the network

    def apply(self, theta: Tensor, P: Tensor, v: Tensor) -> Tensor:
        return self._down(theta, P, self._up(theta, P, v)[1])[1][: v.numel()]

    def hypergradient(self, theta: Tensor, P: Tensor, m: Tensor, g: Tensor) -> Tensor:
        Pa, u = self._up(theta, P, m)
        Pb, w = self._up(theta, P, g)
        c, d = self._down(theta, P, u)[0], self._down(theta, P, w)[0]
        h = torch.empty_like(theta)
        for i in range(self.depth):
            torch.mul(d[i][:, :, None], Pa[i][:, None, :], out=h[i])
            h[i].addcmul_(c[i][:, :, None], Pb[i][:, None, :])
        return h

    def stretches(self, theta: Tensor) -> Tensor:
        """By Gershgorin's theorem for B^T B: exact for orthogonal blocks."""
        squares = [(B.mT @ B).abs().sum(2).amax() for B in theta]
        return torch.stack(squares).sqrt()

    def growth(self, layout: Layout) -> float:
        return float(self.block_size)

    def _up(self, theta: Tensor, P: Tensor, v: Tensor) -> tuple[list[Tensor], Tensor]:
        """``P_i a_{i-1}`` of every layer by blocks, and ``a_N = Gt v``."""
        gather, _ = self._wiring(P)
        a = theta.new_zeros(theta.shape[1] * self.block_size)
        a[: v.numel()] = v
        inputs = []
        for i, B in enumerate(theta):
            x = gather(i, a).view(-1, self.block_size)
            inputs.append(x)
            a = (B * x[:, None, :]).sum(2).view(-1)
        return inputs, a

    def _down(self, theta: Tensor, P: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
        """``c_i`` of every layer by blocks, starting from ``c_N = y``, and ``c_0 = Gt^T y``."""
        _, scatter = self._wiring(P)
        outputs = []
        for i in range(self.depth - 1, -1, -1):
            c = y.view(-1, self.block_size)
            outputs.append(c)
            y = scatter(i, (theta[i] * c[:, :, None]).sum(1).view(-1))
        return outputs[::-1], y

    def _wiring(self, P: Tensor) -> tuple[Callable[[int, Tensor], Tensor], Callable[[int, Tensor], Tensor]]:
        """Functions for ``P_i x`` and ``P_i^T x``."""
        k = self.block_size
        if self.mixing == "shuffle":
            return lambda i, x: x.view(k, -1).T.reshape(-1), lambda i, x: x.view(-1, k).T.reshape(-1)
        return lambda i, x: x[P[i]], lambda i, x: torch.empty_like(x).index_copy_(0, P[i].long(), x)


def _gaussian(k: int, counts: Sequence[int], rng: torch.Generator) -> Iterator[Tensor]:
    """Gaussian numbers as (k, k, count) in float64, for each count; the next ones are drawn meanwhile."""

    def draw(count: int) -> Tensor:
        return torch.randn(k, k, count, generator=rng, dtype=torch.float64)

    if sum(counts) < _DRAW * LANES:
        yield from map(draw, counts)
        return
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(draw, counts[0])
        for count in counts[1:]:
            drawn = ahead.result()
            ahead = pool.submit(draw, count)
            yield drawn
        yield ahead.result()


def _orthogonalize(q: Tensor) -> None:
    """Turn Gaussian k x k matrices, as (k, k, count), into uniformly random orthogonal ones.

    Gram-Schmidt on the rows, each projected twice, which is enough for full precision.
    """
    for r, v in enumerate(q):
        for before in [*q[:r], *q[:r]]:
            v.sub_(before * (before * v).sum(0))
        v.div_(v.square().sum(0).sqrt_())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: thousands of small parallel calls would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
