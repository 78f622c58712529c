"""What the meta-optimizers do to the weights of one layer, as pure torch operations for torch.compile.

Letters: ``B`` the weights, ``h`` their hypergradient without its factor ``scale``, ``numbers`` the scale and the seven
coefficients of the meta-optimizer in double precision (`lodo.meta`): one tensor, so that none of them is compiled in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lodo.meta import ADAM, SCHEDULE_FREE, SGD_
from lodo.rounding import MASK, mix

_LOST = 0xFFFF  # the bits of a float32 that bfloat16 has no room for

Rule = Callable[[Tensor, Sequence[Tensor], Tensor, Tensor, Tensor, Sequence[Tensor]], None]


def sgd(
    B: Tensor, moments: Sequence[Tensor], h: Tensor, mean: Tensor, numbers: Tensor, noise: Sequence[Tensor]
) -> None:
    """``B -= rate h``."""
    scale, rate, *_ = numbers.to(B.dtype).unbind()
    B.copy_(B - rate * (scale * h))


def adam(
    B: Tensor, moments: Sequence[Tensor], h: Tensor, mean: Tensor, numbers: Tensor, noise: Sequence[Tensor]
) -> None:
    """Adam; moments in bfloat16 are rounded by the random bits of `lodo.rounding`."""
    scale, b1, c1, b2, c2, rate, root, eps = numbers.to(B.dtype).unbind()
    M, V = moments
    h = scale * h
    m = b1 * M.to(B.dtype) + c1 * h
    v = b2 * V.to(B.dtype) + c2 * (h * h)
    B.copy_(B - rate * m / (v.sqrt() * root + eps))
    if M.dtype == torch.bfloat16 and noise:
        key, first, offsets = noise
        bits = mix((first + offsets + key) & MASK)
        m, v = _rounded(m, bits & _LOST), _rounded(v, bits >> 16)
    M.copy_(m)
    V.copy_(v)


def schedule_free(
    B: Tensor, moments: Sequence[Tensor], h: Tensor, mean: Tensor, numbers: Tensor, noise: Sequence[Tensor]
) -> None:
    """``z' = z - rate h / (rms + eps)``, ``y <- keep (y - pull z) + push z'``; y is B, ``mean`` that of h^2."""
    scale, rate, keep, pull, push, eps, *_ = numbers.unbind()
    rms = scale.abs() * mean.sqrt()
    step, keep, pull, push = (x.to(B.dtype) for x in (rate * scale / (rms + eps), keep, pull, push))
    (z,) = moments
    new = z - step * h
    B.copy_(keep * (B - pull * z) + push * new)
    z.copy_(new)


def _rounded(value: Tensor, bits: Tensor) -> Tensor:
    """``value`` with the 16 bits that bfloat16 has no room for cut off, after random ones have been added."""
    whole = value.float().view(torch.int32) + bits.to(torch.int32)
    return (whole & ~_LOST).view(torch.float32).to(torch.bfloat16)


RULES: dict[int, Rule] = {SGD_: sgd, ADAM: adam, SCHEDULE_FREE: schedule_free}


def sum_of_squares(d: Tensor, Pa: Tensor, c: Tensor, Pb: Tensor) -> Tensor:
    """The sum of the squares of all entries of ``d Pa^T + c Pb^T``, block by block, in double precision.

    Each is (k, blocks). Rounding can make a block's sum negative where the two products cancel: it counts as zero.
    """
    d, Pa, c, Pb = (x.double() for x in (d, Pa, c, Pb))
    pairs = ((d, d), (Pa, Pa), (c, c), (Pb, Pb), (d, c), (Pa, Pb))
    dd, aa, cc, bb, dc, ab = (sum(x * y for x, y in zip(X, Y, strict=True)) for X, Y in pairs)
    blocks: Tensor = dd * aa + cc * bb + 2 * dc * ab
    return blocks.clamp_min(0.0).sum()
