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

WRITTEN_OUT = 4  # block sizes up to which each row is a sum of its own: faster on CPUs, but slow to compile for more


# ---------------------------------------------------------------- the mixing network


def rise(B: Tensor, p: Tensor | None, *xs: Tensor) -> list[Tensor]:
    """``B P x`` of each x; for the shuffle as (blocks, k), which is to be seen as (k, blocks)."""
    if p is None:
        return [_product(B, x, 1).contiguous() for x in xs]  # seen so in the graph, it would take two kernels
    return [_product(B, _inputs(x, p), 0) for x in xs]


def fall(B: Tensor, p: Tensor | None, *ys: Tensor) -> list[Tensor]:
    """``P^T B^T y`` of each y."""
    return [_scattered(_product(B.transpose(0, 1), _outputs(y, p), 0), p) for y in ys]


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
    mean = squares(a, b, c, d, p) / B.numel() if rule is schedule_free else numbers
    rule(B, moments, h, mean, numbers, noise)


def learn_and_fall(
    rows: Sequence[Tensor],
    p: Tensor | None,
    zs: Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    numbers: Tensor,
    *,
    both: bool,
) -> list[Tensor]:
    """`learn` by schedule-free and `fall` of d, or of d and c, in one pass over B, which is given row by row.

    What is summed over all blocks depends on vectors only: it is known before this pass.
    """
    D, C, Pa, Pb = _outputs(d, p), _outputs(c, p), _inputs(a, p), _inputs(b, p)
    mean = squares(a, b, c, d, p) / (len(rows) * rows[0].numel())
    q = None if p is None else p.abs()  # p again: of an index that also gathers, Inductor's C++ does not compile
    below = [_scattered(_dot(rows, Y), q) for Y in ((D, C) if both else (D,))]
    for row, z, D_r, C_r in zip(rows, zs, D, C, strict=True):
        schedule_free(row, [z], D_r * Pa + C_r * Pb, mean, numbers, ())
    return below


def squares(a: Tensor, b: Tensor, c: Tensor, d: Tensor, p: Tensor | None) -> Tensor:
    """The sum of the squares of the hypergradient's entries."""
    return sum_of_squares(_outputs(d, p), _inputs(a, p), _outputs(c, p), _inputs(b, p))


def _inputs(x: Tensor, p: Tensor | None) -> Tensor:
    """``P x``, input c of block b at ``[c, b]``."""
    return x if p is None else x.view(-1)[p]


def _outputs(y: Tensor, p: Tensor | None) -> Tensor:
    """A vector above a layer, component c of block b at ``[c, b]``."""
    return y.view(-1).view(y.shape[::-1]).t() if p is None else y


def _scattered(y: Tensor, p: Tensor | None) -> Tensor:
    """``P^T y``."""
    return y if p is None else torch.empty_like(y).view(-1).index_put_((p,), y).view(y.shape)


def _product(B: Tensor, x: Tensor, dim: int) -> Tensor:
    """``B x`` block by block; dimension ``dim`` of the result counts the components of a block."""
    if len(B) <= WRITTEN_OUT:
        return torch.stack([_dot(row, x) for row in B.unbind()], dim)
    whole = _dot(B.transpose(0, 1), x)
    return whole if dim == 0 else whole.t()


def _dot(A: Tensor | Sequence[Tensor], x: Tensor) -> Tensor:
    """The sum of ``A[c] x[c]`` over c, in this order."""
    total = A[0] * x[0]
    for c in range(1, len(x)):
        total = total + A[c] * x[c]
    return total


# ---------------------------------------------------------------- the residual network


def residual_rise(w: Tensor, p: Tensor, *xs: Tensor) -> list[Tensor]:
    """``x + w P x`` of each x."""
    return [x + w * x[p] for x in xs]


def residual_fall(w: Tensor, p: Tensor, *ys: Tensor) -> list[Tensor]:
    """``y + P^T (w y)`` of each y."""
    return [_scattered(y[p] + w * y, p) for y in ys]


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
    mean = sum_of_squares(*(v[None] for v in vectors)) / w.numel() if rule is schedule_free else numbers
    rule(w, moments, d * Pa + c * Pb, mean, numbers, noise)
