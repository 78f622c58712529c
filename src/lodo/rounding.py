"""Stochastic rounding to bfloat16, the same on every backend and device.

A number is rounded up or down at random so that it is right on average. Without that, an average that changes by
less than bfloat16 can resolve (1 part in 256) would never change. The random bits are a hash of the number's layer
and its place there, of the update and of the group's seed, so a run is reproducible in any order of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MASK = 0xFFFFFFFF  # numbers stay within 32 bits


def mix(x: Any) -> Any:
    """Scramble 32-bit integers (a number, or a tensor of int64): two rounds of multiply and xor-shift, one to one.

    >>> mix(1), mix(torch.tensor([1, 2])).tolist()
    (1753845952, [1753845952, 3507691905])
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D & MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK
    return x ^ (x >> 16)


def update_key(seed: int, t: Any) -> Any:
    """The key of update ``t``, which may be a 0-dim tensor."""
    return mix((seed + t) & MASK)


def random_bits(key: Any, layer: int, places: Tensor) -> Tensor:
    """32 random bits for each place of a layer, as int64."""
    bits: Tensor = mix((places + mix((key + layer) & MASK)) & MASK)
    return bits


def round_to(stored: Tensor, value: Tensor, bits: Tensor) -> None:
    """``stored`` (bfloat16) = ``value``, rounded up if its 16 lost bits and the 16 random ones add up to a carry.

    >>> stored = torch.zeros(2, dtype=torch.bfloat16)
    >>> round_to(stored, torch.tensor([1.003, 1.003]), torch.tensor([0, 0xFFFF]))
    >>> stored
    tensor([1.0000, 1.0078], dtype=torch.bfloat16)
    """
    whole = value.float().view(torch.int32).long() + bits
    stored.view(torch.int16).copy_((whole >> 16).to(torch.int16))


class Bits(NamedTuple):
    """The random bits of one update.

    Args:
        key: the update's key.
        places: the place of each of a layer's weights, which its bits depend on.
    """

    key: Any
    places: Tensor

    def store(self, stored: Sequence[Tensor], exact: Sequence[Tensor], layers: int) -> None:
        """Round Adam's two moments to bfloat16, layer by layer."""
        for i in range(layers):
            m, v = (x.view(layers, -1)[i] for x in stored)
            m_exact, v_exact = (x.view(layers, -1)[i] for x in exact)
            bits = random_bits(self.key, i, self.places)
            round_to(m, m_exact, bits & 0xFFFF)
            round_to(v, v_exact, bits >> 16)
