"""The tiles in which the fused kernels store a mixing network, against plain indexing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lodo import Mixing
from lodo.engines.numba.storage import pack, pack_permutations, packed_shape, unpack
from lodo.layout import Layout

FAMILIES = st.builds(
    Mixing, depth=st.integers(1, 3), block_size=st.integers(1, 8), width=st.sampled_from([1.0, 1.3, 2.0, 3.0])
)
LAYOUTS = st.integers(1, 700).map(Layout.flat)


def weights(family, layout):
    """Blocks in natural order: all different, none zero."""
    shape = family.shape(layout)
    return 1.0 + torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def tiled(x, family, layout):
    """A hidden vector in the order ``x[t, c, l]`` = component c of block ``t * L + l``, with zeros in unused lanes."""
    k, (T, L) = family.block_size, family.tiles(layout)
    blocks = torch.zeros(T * L, k, dtype=x.dtype)
    blocks[: x.numel() // k] = x.view(-1, k)
    return blocks.view(T, L, k).transpose(1, 2).reshape(-1)


@given(FAMILIES, LAYOUTS)
def test_packing_and_unpacking_are_inverse(family, layout):
    theta = weights(family, layout)
    packed = pack(theta, torch.zeros(packed_shape(family, layout), dtype=theta.dtype))
    assert torch.equal(unpack(packed, theta.shape[1]), theta)
    assert packed.count_nonzero() == theta.numel()  # unused lanes hold zeros
    again = pack(unpack(packed, theta.shape[1]), torch.zeros_like(packed))
    assert torch.equal(again, packed)


@given(FAMILIES, LAYOUTS)
def test_every_weight_is_where_it_is_said_to_be(family, layout):
    """In the tile and the lane of its block; `places`, on which random bits depend, counts the same way."""
    theta = weights(family, layout)
    packed = pack(theta, torch.zeros(packed_shape(family, layout), dtype=theta.dtype))
    L = packed.shape[-1]
    for b in range(theta.shape[1]):
        assert torch.equal(packed[:, b // L, :, :, b % L], theta[:, b])
    places = family.places(layout)
    assert torch.equal(packed.flatten(1)[:, places], theta.flatten(1))


@given(FAMILIES, LAYOUTS)
def test_permutations_do_in_tiles_what_they_do_in_natural_order(family, layout):
    P = family.fixed(layout, torch.Generator().manual_seed(layout.n))
    packed = pack_permutations(P, family, layout).long()
    stored = packed.shape[1]
    assert torch.equal(packed.sort(1).values, torch.arange(stored).expand(family.depth, -1))
    x = torch.zeros(family.hidden(layout.n))
    x[: layout.n] = 1.0 + torch.arange(layout.n)
    padded = torch.cat([x, torch.zeros(stored - x.numel())])  # the input is stored as it is
    assert torch.equal(padded[packed[0]], tiled(x[P[0]], family, layout))
    hidden = torch.randperm(x.numel()) + 1.0
    for natural, row in zip(P[1:], packed[1:], strict=True):
        assert torch.equal(tiled(hidden, family, layout)[row], tiled(hidden[natural], family, layout))
