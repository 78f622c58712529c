"""One layer of a network, up, down and learning, as plain torch operations for torch.compile.

The mixing network (letters as in `lodo.families.mixing`): ``B[r, c, b]`` is entry (r, c) of block b, with the block
index last, so that neighbouring threads read neighbouring numbers. Hidden vectors are (k, blocks). ``p[c, b]`` is where
input c of block b comes from, counted through the vector below; there, component c of block b is at ``[c, b]``. For the
perfect shuffle p is None: component c of block b is number ``b * k + c``, and ``[c, b]`` is input c of block b.
Sums over a block are written out: a product is one pass over B without a reduction.

The residual network: ``w`` is a row of theta, ``p`` a permutation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lodo.engines.compiled.updates import Rule, schedule_free, sum_of_squares

_WRITTEN_OUT = 4  # block sizes up to which each row is a sum of its own: faster on CPUs, but slow to compile for more


# ---------------------------------------------------------------- the mixing network


def rise(B: Tensor, p: Tensor | None, *xs: Tensor) -> list[Tensor]:
    """``B P x`` of each x."""
    if p is None:
        return [_product(B, x, 1).reshape(x.shape) for x in xs]
    return [_product(B, _inputs(x, p), 0) for x in xs]


def fall(B: Tensor, p: Tensor | None, ys: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """``P^T B^T y`` of each y, written into ``outs`` if p scatters it."""
    downs = [_product(B.transpose(0, 1), _outputs(y, p), 0) for y in ys]
    if p is None:
        return downs
    return [out.view(-1).index_put_((p,), y).view(out.shape) for out, y in zip(outs, downs, strict=True)]


def learn(
    B: Tensor,
    p: Tensor | None,
    moments: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    numbers: Tensor,
    noise: Sequence[Tensor],
    *,
    rule: Rule,
) -> None:
    """Update B: its hypergradient is never stored. ``a`` and ``b`` are below the layer, ``c`` and ``d`` above it."""
    D, C, Pa, Pb = _outputs(d, p), _outputs(c, p), _inputs(a, p), _inputs(b, p)
    h = D[:, None] * Pa + C[:, None] * Pb
    rule(B, moments, h, squares(a, b, c, d, p) if rule is schedule_free else numbers, numbers, noise)


def squares(a: Tensor, b: Tensor, c: Tensor, d: Tensor, p: Tensor | None) -> Tensor:
    """The sum of the squares of the hypergradient's entries."""
    return sum_of_squares(_outputs(d, p), _inputs(a, p), _outputs(c, p), _inputs(b, p))


def _inputs(x: Tensor, p: Tensor | None) -> Tensor:
    """``P x``, input c of block b at ``[c, b]``."""
    return x if p is None else x.view(-1)[p]


def _outputs(y: Tensor, p: Tensor | None) -> Tensor:
    """A vector above a layer, component c of block b at ``[c, b]``."""
    return y.view(y.shape[::-1]).t() if p is None else y


def _product(B: Tensor, x: Tensor, dim: int) -> Tensor:
    """``B x`` block by block; dimension ``dim`` of the result counts the components of a block."""
    if len(B) <= _WRITTEN_OUT:
        return torch.stack([_dot(row, x) for row in B.unbind()], dim)
    whole = _dot(B.transpose(0, 1), x)
    return whole if dim == 0 else whole.t()


def _dot(A: Tensor, x: Tensor) -> Tensor:
    """The sum of ``A[c] x[c]`` over c, in this order."""
    total = A[0] * x[0]
    for c in range(1, len(x)):
        total = total + A[c] * x[c]
    return total


# ---------------------------------------------------------------- the residual network


def residual_rise(w: Tensor, p: Tensor, *xs: Tensor) -> list[Tensor]:
    """``x + w P x`` of each x."""
    return [x + w * x[p] for x in xs]


def residual_fall(w: Tensor, p: Tensor, ys: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """``y + P^T (w y)`` of each y: p is a permutation, so every number of ``outs`` is written once."""
    return [out.index_put_((p,), y[p] + w * y) for out, y in zip(outs, ys, strict=True)]


def residual_learn(
    w: Tensor,
    p: Tensor,
    moments: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    numbers: Tensor,
    noise: Sequence[Tensor],
    *,
    rule: Rule,
) -> None:
    """As `learn`."""
    _update_row(w, moments, (d, a[p], c, b[p]), numbers, noise, rule)


def residual_learn_middle(
    D: Tensor, moments: Sequence[Tensor], a: Tensor, b: Tensor, numbers: Tensor, noise: Sequence[Tensor], *, rule: Rule
) -> None:
    """Update the diagonal in the middle, whose h is ``a b``."""
    half = 0.5 * a
    _update_row(D, moments, (b, half, half, b), numbers, noise, rule)


def _update_row(
    w: Tensor,
    moments: Sequence[Tensor],
    vectors: Sequence[Tensor],
    numbers: Tensor,
    noise: Sequence[Tensor],
    rule: Rule,
) -> None:
    """Update a row by ``h = d Pa + c Pb``."""
    d, Pa, c, Pb = vectors
    squares = sum_of_squares(*(v[None] for v in vectors)) if rule is schedule_free else numbers
    rule(w, moments, d * Pa + c * Pb, squares, numbers, noise)
