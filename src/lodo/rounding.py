"""Stochastic rounding to bfloat16, the same on every backend and device.

A number is rounded up or down at random so that it is right on average: without that, an average that changes by
less than bfloat16 can tell (1 part in 256) would never change. The random bits are a hash of where the number is (its
layer and its place there), of the update and of the group's seed, so that a run is reproducible in any order of work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def mix(x: Any) -> Any:
    """Scramble 32-bit integers (a number, or a tensor of int64): two rounds of multiply and xor-shift, one to one.

    >>> mix(1), mix(torch.tensor([1, 2])).tolist()
    (1753845952, [1753845952, 3507691905])
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def update_key(seed: int, t: int) -> int:
    """The key of update ``t``."""
    return int(mix((seed + t) & _MASK))


def random_bits(key: int, layer: int, count: int, device: torch.device) -> Tensor:
    """32 random bits for each of a layer's ``count`` numbers, as int64."""
    bits: Tensor = mix((torch.arange(count, device=device) + mix((key + layer) & _MASK)) & _MASK)
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
