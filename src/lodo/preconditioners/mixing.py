"""The paper's mixing network (Eq. 2): block-diagonal matrices between random permutations, or between shuffles.

The network is ``G(theta) = (I 0) Gt^T Gt (I 0)^T`` with ``Gt = B_N P_N ... B_1 P_1``, each
``B_i`` block-diagonal with k x k blocks, ``(P x)[j] = x[p[j]]``.

Storage. ``theta[i, t, r, c, l]`` is entry (r, c) of block ``t * L + l`` of ``B_i``: blocks are
stored in tiles of up to 64 with the block index last, so that one vector instruction serves as many
blocks as it has lanes, whatever k is, and a tile is one contiguous run of memory. A hidden vector has
the matching order ``x[t, c, l]`` = component c of block ``t * L + l``. The last tile may have a few
unused lanes: their weights are zero, and the permutations keep zeros in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lodo import kernels
from lodo._checks import check_choice, check_int, check_real
from lodo.kernels import reference
from lodo.meta import Layers
from lodo.preconditioners.base import Engine, Preconditioner

MIXINGS = ("random", "shuffle", "permuted-shuffle")
LANES = 64  # blocks in a tile, at most: with k = 4 in float32 a tile is one 4 kB page
_DRAW = 64  # tiles whose blocks are drawn at once, to bound the memory of `init`


@dataclass(frozen=True)
class Mixing(Preconditioner):
    """The paper's preconditioner: depth N, block size k, hidden width floor(width * n / k) * k.

    The paper's permutations are ``mixing="random"``. With ``"shuffle"`` each is the perfect shuffle instead (write
    the vector as k rows, read it by columns), which needs no index arrays and no gathers; with
    ``"permuted-shuffle"`` the input is put at random places first.

    >>> family = Mixing(depth=16, block_size=4, width=2.0)
    >>> family.hidden(100)
    200
    >>> family.shape(100)  # 50 blocks a layer, in one tile of 56 lanes
    (16, 1, 4, 4, 56)
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

    def tiles(self, n: int) -> tuple[int, int]:
        """How many tiles a layer has, and how many lanes each tile.

        Lanes come in eights, for vector instructions, unless there are fewer blocks than that.
        """
        blocks = self.hidden(n) // self.block_size
        T = -(-blocks // LANES)
        L = -(-blocks // T)
        return T, L if T == 1 and L < 8 else -(-L // 8) * 8

    def shape(self, n: int) -> tuple[int, ...]:
        k = self.block_size
        T, L = self.tiles(n)
        return (self.depth, T, k, k, L)

    def fixed(self, n: int, rng: torch.Generator) -> Tensor:
        """P_1 to P_N over stored hidden vectors, one a row; unused lanes go to themselves.

        Shuffles need nothing; "permuted-shuffle" has the place of each input.
        """
        if self.mixing == "shuffle":
            return super().fixed(n, rng)
        if self.mixing == "permuted-shuffle":
            return torch.randperm(self.hidden(n), generator=rng)[:n].int()
        k, hidden, (T, L) = self.block_size, self.hidden(n), self.tiles(n)
        start, used = (T - 1) * k * L, hidden // k - (T - 1) * L  # of the last tile
        last = torch.arange(start, T * k * L, dtype=torch.int32).view(k, L)
        real, idle = last[:, :used].reshape(-1), last[:, used:].reshape(-1)
        P = torch.empty(self.depth, T * k * L, dtype=torch.int32)
        for i, p in enumerate(P):
            torch.randperm(hidden, generator=rng, out=p[:hidden])
            if i > 0:
                late = (p[:hidden] >= start).nonzero()[:, 0]
                p[late] = real[p[late] - start]
            p[real] = p[start:hidden].clone()
            # P_1 reads the input, which is stored plainly: n numbers, then zeros
            p[idle] = idle if i > 0 else torch.arange(hidden, T * k * L, dtype=torch.int32)
        return P

    def permutations(self, P: Tensor, n: int) -> Tensor:
        """P_1 to P_N as (N, hidden), over components in natural order: component c of block b is b * k + c."""
        k, hidden, (T, L) = self.block_size, self.hidden(n), self.tiles(n)
        if self.mixing != "random":
            shuffle = torch.arange(hidden, device=P.device).view(k, -1).T.reshape(-1)
            front = torch.arange(hidden, device=P.device)
            if P.numel():
                taken = torch.zeros_like(front, dtype=torch.bool).index_fill_(0, P.long(), True)
                front[P.long()] = torch.arange(n, device=P.device)
                front[~taken] = torch.arange(n, hidden, device=P.device)
            return torch.stack([front[shuffle], *[shuffle] * (self.depth - 1)])
        order = torch.arange(T * L * k, device=P.device).view(T, L, k).transpose(1, 2).reshape(-1)  # stored to natural
        stored = torch.argsort(order)[:hidden]
        return torch.cat([P[:1, stored], order[P[1:, stored]]]).long()

    def init(self, theta: Tensor, n: int, rng: torch.Generator) -> None:
        """Every block a random orthogonal matrix, so that G is the identity."""
        k = self.block_size
        T, L = self.tiles(n)
        for B in theta:
            for t in range(0, T, _DRAW):
                tiles = B[t : t + _DRAW]
                q = _random_orthogonal(k, len(tiles) * L, rng)
                tiles.copy_(q.view(k, k, len(tiles), L).permute(2, 0, 1, 3))
        used = self.hidden(n) // k - (T - 1) * L
        theta[:, -1, :, :, used:] = 0.0

    def blocks(self, theta: Tensor, n: int) -> Tensor:
        """theta as (N, hidden / k, k, k): the blocks of every layer in order (a copy).

        >>> family = Mixing(depth=2, block_size=2)
        >>> rng = torch.Generator().manual_seed(0)
        >>> theta = torch.empty(family.shape(5))
        >>> family.init(theta, 5, rng)
        >>> B = family.blocks(theta, 5)
        >>> B.shape, torch.allclose(B @ B.mT, torch.eye(2), atol=1e-6)
        (torch.Size([2, 5, 2, 2]), True)
        """
        k = self.block_size
        return theta.permute(0, 1, 4, 2, 3).reshape(self.depth, -1, k, k)[:, : self.hidden(n) // k]

    def _wiring(self, P: Tensor, n: int) -> reference.Wiring:
        if self.mixing == "random":
            return reference.Permuted(P)
        return reference.Shuffled(self.hidden(n) // self.block_size, self.block_size, self.tiles(n)[1], P)

    def apply(self, theta: Tensor, P: Tensor, v: Tensor) -> Tensor:
        return reference.apply(theta, self._wiring(P, v.numel()), v)

    def hypergradient(self, theta: Tensor, P: Tensor, m: Tensor, g: Tensor) -> Tensor:
        return reference.hypergradient(theta, self._wiring(P, m.numel()), m, g)

    def layers(self, n: int) -> Layers:
        return Layers(self.depth, self.hidden(n) * self.block_size)

    def index_count(self, n: int) -> int:
        if self.mixing != "random":
            return n if self.mixing == "permuted-shuffle" else 0
        return self.depth * self._stored(n)

    def _stored(self, n: int) -> int:
        """Numbers in a hidden vector with its unused lanes."""
        T, L = self.tiles(n)
        return T * self.block_size * L

    def work_count(self, n: int, fused: bool, save_activations: bool = True) -> int:
        N = self.depth
        if not fused:
            return (4 * N + self.block_size + 4) * self._stored(n)
        if self.mixing == "random":
            return (3 * N + 2 if save_activations else 2 * N + 4) * self._stored(n)
        return (3 * N + 5 if save_activations else 2 * N + 6) * self.hidden(n)

    def fused(self, backend: str, device: torch.device) -> bool:
        return kernels.resolve(backend, device) == "numba"

    def engine(self, P: Tensor, backend: str, save_activations: bool = True) -> Engine:
        if not self.fused(backend, P.device):
            return Engine(self, P)
        from lodo.kernels.cpu import FusedMixing

        return FusedMixing(self, P, "random" if self.mixing == "random" else "shuffle", save_activations)


def _random_orthogonal(k: int, count: int, rng: torch.Generator) -> Tensor:
    """``count`` uniformly random orthogonal k x k matrices, as (k, k, count) in float64.

    Gram-Schmidt on Gaussian rows, each projected twice, which is enough for full precision.
    """
    q = torch.randn(k, k, count, generator=rng, dtype=torch.float64)
    for r, v in enumerate(q):
        for before in [*q[:r], *q[:r]]:
            v.sub_(before * (before * v).sum(0))
        v.div_(v.square().sum(0).sqrt_())
    return q
