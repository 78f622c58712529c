"""How the kernels for CPUs store a mixing network: in tiles of blocks.

``theta[i, t, r, c, l]`` is entry (r, c) of block ``t * L + l`` of ``B_i``: blocks are stored in tiles of up to 64 with
the block index last, so that one vector instruction serves as many blocks as it has lanes, whatever k is, and a
tile is one contiguous run of memory. A hidden vector has the matching order ``x[t, c, l]`` = component c of block
``t * L + l``. The last tile may have a few unused lanes: their weights are zero, and the permutations keep zeros there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lodo.families import Mixing
from lodo.layout import Layout


def packed_shape(family: Mixing, layout: Layout) -> tuple[int, int, int, int, int]:
    """The shape of theta in tiles.

    >>> packed_shape(Mixing(), Layout.flat(100))  # 50 blocks a layer, in one tile of 56 lanes
    (16, 1, 4, 4, 56)
    """
    k, (T, L) = family.block_size, family.tiles(layout)
    return family.depth, T, k, k, L


def pack(natural: Tensor, packed: Tensor) -> Tensor:
    """Copy blocks (N, blocks, k, k) into zeroed tiles (N, T, k, k, L), tile by tile."""
    blocks, (N, T, k, _, L) = natural.shape[1], packed.shape
    whole = blocks // L
    packed[:, :whole].copy_(natural[:, : whole * L].view(N, whole, L, k, k).permute(0, 1, 3, 4, 2))
    if whole < T:
        packed[:, whole, :, :, : blocks - whole * L].copy_(natural[:, whole * L :].permute(0, 2, 3, 1))
    return packed


def unpack(packed: Tensor, blocks: int) -> Tensor:
    """Blocks (N, blocks, k, k) from tiles (N, T, k, k, L).

    >>> natural = torch.arange(24.0).view(1, 6, 2, 2)
    >>> packed = pack(natural, torch.zeros(1, 2, 2, 2, 4))
    >>> torch.equal(unpack(packed, 6), natural)
    True
    """
    N, T, k, _, L = packed.shape
    natural = packed.new_empty(N, blocks, k, k)
    whole = blocks // L
    natural[:, : whole * L].view(N, whole, L, k, k).copy_(packed[:, :whole].permute(0, 1, 4, 2, 3))
    if whole < T:
        natural[:, whole * L :].copy_(packed[:, whole, :, :, : blocks - whole * L].permute(0, 3, 1, 2))
    return natural


def pack_permutations(P: Tensor, family: Mixing, layout: Layout) -> Tensor:
    """P_1 to P_N over hidden vectors in tiles, one a row; unused lanes go to themselves.

    P_1 reads the input, which is stored as it is: n numbers, then zeros.
    """
    k, hidden, (T, L) = family.block_size, family.hidden(layout.n), family.tiles(layout)
    stored = T * k * L
    component = torch.arange(T * L * k).view(T, L, k).transpose(1, 2).reshape(-1)  # of each stored number
    used = component < hidden
    place = torch.empty(hidden, dtype=torch.int32)  # of each component
    place[component[used]] = torch.arange(stored, dtype=torch.int32)[used]
    packed = torch.empty(family.depth, stored, dtype=torch.int32)
    for i, (natural, row) in enumerate(zip(P, packed, strict=True)):
        sources = natural[component[used]]
        row[used] = sources if i == 0 else place[sources.long()]
        unused = torch.arange(stored, dtype=torch.int32)[~used]
        row[~used] = unused if i > 0 else torch.arange(hidden, stored, dtype=torch.int32)
    return packed
