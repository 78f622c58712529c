"""What happens to one tile: products with its blocks, and the update of its weights.

A tile is (k, k, L) with the block index last, so every inner loop runs over contiguous lanes and vectorises, square
roots and divisions included; k = 4 and k = 8 have their sums written out (for k = 16, whose tiles do not fit into the
first-level cache, that gains nothing). The update computes the hypergradient of a tile
and applies the meta-optimizer to it in registers, so that the hypergradient is never stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from lodo.meta import ADAM, SCHEDULE_FREE

# "contract" and "nsz" allow fused multiply-adds and nothing else: no reordering, so that results
# do not depend on the number of threads. The NumPy error model has no branch in a division.
TILE: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz"}}
# No fused multiply-adds either: the compiler would choose which of two products of a sum to fuse, and could choose
# differently in a kernel for many threads.
STRICT: Any = {"error_model": "numpy", "fastmath": False}


def _borrowed(typing_context, x):
    """An array, or a tuple of arrays, whose users are not counted: whoever calls a kernel keeps its arguments alive.

    Otherwise Numba counts every view that a kernel takes, with atomic operations: a sixth of a step in a profile.
    """

    def uncounted(context, builder, kind, value):
        if isinstance(kind, types.Tuple | types.UniTuple):
            items = [
                uncounted(context, builder, item, builder.extract_value(value, i)) for i, item in enumerate(kind.types)
            ]
            return context.make_tuple(builder, kind, items)
        array = context.make_helper(builder, kind, value=value)
        array.meminfo = context.get_constant_null(types.MemInfoPointer(types.voidptr))
        return array._getvalue()

    def generate(context, builder, signature, arguments):
        return uncounted(context, builder, x, *arguments)

    return x(x), generate


borrowed: Any = intrinsic(_borrowed)


# Vectors are copied in loops: for `out[:] = x`, Numba compiles the text of an error about shapes, which takes seconds,
# and in a kernel for many threads it takes the assignment for dead code if `out` comes out of a tuple.


@njit(**TILE)
def copy(x, out):
    for j in range(out.size):
        out[j] = x[j]


@njit(**TILE)
def pad(v, out):  # out = v and then zeros
    for j in range(v.size):
        out[j] = v[j]
    for j in range(v.size, out.size):
        out[j] = 0


@njit(**TILE)
def times(B, x, out):  # out = B x
    k, _, L = B.shape
    for r in range(k):
        if k == 4:
            for l in range(L):
                out[r, l] = B[r, 0, l] * x[0, l] + B[r, 1, l] * x[1, l] + B[r, 2, l] * x[2, l] + B[r, 3, l] * x[3, l]
        elif k == 8:
            for l in range(L):
                out[r, l] = (
                    B[r, 0, l] * x[0, l] + B[r, 1, l] * x[1, l] + B[r, 2, l] * x[2, l] + B[r, 3, l] * x[3, l]
                    + B[r, 4, l] * x[4, l] + B[r, 5, l] * x[5, l] + B[r, 6, l] * x[6, l] + B[r, 7, l] * x[7, l]
                )  # fmt: skip
        else:
            for l in range(L):
                out[r, l] = B[r, 0, l] * x[0, l]
            for c in range(1, k):
                for l in range(L):
                    out[r, l] += B[r, c, l] * x[c, l]


@njit(**TILE)
def times_transposed(B, x, out):  # out = B^T x
    k, _, L = B.shape
    for r in range(k):
        if k == 4:
            for l in range(L):
                out[r, l] = B[0, r, l] * x[0, l] + B[1, r, l] * x[1, l] + B[2, r, l] * x[2, l] + B[3, r, l] * x[3, l]
        elif k == 8:
            for l in range(L):
                out[r, l] = (
                    B[0, r, l] * x[0, l] + B[1, r, l] * x[1, l] + B[2, r, l] * x[2, l] + B[3, r, l] * x[3, l]
                    + B[4, r, l] * x[4, l] + B[5, r, l] * x[5, l] + B[6, r, l] * x[6, l] + B[7, r, l] * x[7, l]
                )  # fmt: skip
        else:
            for l in range(L):
                out[r, l] = B[0, r, l] * x[0, l]
            for c in range(1, k):
                for l in range(L):
                    out[r, l] += B[c, r, l] * x[c, l]


# ---------------------------------------------------------------- moments in bfloat16
# as in lodo.rounding; a moment that is stored whole passes through unchanged


def _random_bits(like, counter, key):
    raise NotImplementedError


def _widen(stored):
    raise NotImplementedError


def _narrow(value, like, bits):
    raise NotImplementedError


@njit(inline="always")
def _mix(x):
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@njit(**TILE)
def layer_key(key, i):
    return _mix(np.uint32(np.uint32(key) + np.uint32(i)))


@overload(_random_bits, inline="always")
def _overload_random_bits(like, counter, key):
    if like is types.uint16:
        return lambda like, counter, key: _mix(np.uint32(counter + key))
    return lambda like, counter, key: np.uint32(0)


@overload(_widen, inline="always")
def _overload_widen(stored):
    if stored is types.uint16:
        return lambda stored: np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)
    return lambda stored: stored


@overload(_narrow, inline="always")
def _overload_narrow(value, like, bits):
    if like is types.uint16:
        return lambda value, like, bits: np.uint16(
            np.uint32(np.float32(value).view(np.uint32) + np.uint32(bits)) >> np.uint32(16)
        )
    return lambda value, like, bits: value


# ---------------------------------------------------------------- the update


@njit(**TILE)
def _sgd(B, d, Pa, c, Pb, scale, rate):
    k, _, L = B.shape
    for r in range(k):
        for s in range(k):
            for l in range(L):
                B[r, s, l] -= rate * (scale * (d[r, l] * Pa[s, l] + c[r, l] * Pb[s, l]))


@njit(**TILE)
def _adam(B, M, V, d, Pa, c, Pb, scale, b1, c1, b2, c2, rate, root, eps, key, start):
    k, _, L = B.shape
    for r in range(k):
        for s in range(k):
            first = np.uint32(start + (r * k + s) * L)
            for l in range(L):
                bits = _random_bits(M[r, s, l], np.uint32(first + np.uint32(l)), key)
                h = scale * (d[r, l] * Pa[s, l] + c[r, l] * Pb[s, l])
                m = b1 * _widen(M[r, s, l]) + c1 * h
                v = b2 * _widen(V[r, s, l]) + c2 * (h * h)
                M[r, s, l] = _narrow(m, M[r, s, l], np.uint32(bits & np.uint32(0xFFFF)))
                V[r, s, l] = _narrow(v, V[r, s, l], np.uint32(bits >> np.uint32(16)))
                B[r, s, l] -= rate * m / (np.sqrt(v) * root + eps)


@njit(**TILE)
def _schedule_free(B, Z, d, Pa, c, Pb, step, keep, pull, push):
    """y <- keep (y - pull z) + push z',  z' = z - step h."""
    k, _, L = B.shape
    for r in range(k):
        for s in range(k):
            for l in range(L):
                z = Z[r, s, l]
                new = z - step * (d[r, l] * Pa[s, l] + c[r, l] * Pb[s, l])
                B[r, s, l] = keep * (B[r, s, l] - pull * z) + push * new
                Z[r, s, l] = new


@njit(inline="always")
def _add_squares(k, d, Pa, c, Pb, total):
    for l in range(d.shape[1]):
        dd = cc = dc = aa = bb = ab = 0.0
        for r in range(k):
            d_, c_, a_, b_ = np.float64(d[r, l]), np.float64(c[r, l]), np.float64(Pa[r, l]), np.float64(Pb[r, l])
            dd += d_ * d_
            cc += c_ * c_
            dc += d_ * c_
            aa += a_ * a_
            bb += b_ * b_
            ab += a_ * b_
        total[l] += max(0.0, dd * aa + cc * bb + 2 * dc * ab)


@njit(**TILE)
def add_squares(d, Pa, c, Pb, total):
    """Add the squares of the entries of d Pa^T + c Pb^T of every block to its lane of ``total``.

    In double precision: single precision would lose d^2 below 1e-23, and the sum could then be negative. It still can
    be, by rounding, where the two products cancel, and counts as zero.
    """
    k = d.shape[0]
    if k == 4:  # a constant, so that the loop over it is unrolled and the one over lanes vectorises
        _add_squares(4, d, Pa, c, Pb, total)
    elif k == 8:
        _add_squares(8, d, Pa, c, Pb, total)
    else:
        _add_squares(k, d, Pa, c, Pb, total)


@njit(**TILE)
def total(Q):  # in one order, which Q.sum() would not have in a kernel for many threads
    summed = 0.0
    for j in range(Q.shape[0]):
        for l in range(Q.shape[1]):
            summed += Q[j, l]
    return summed


@njit(**TILE)
def update(kind, B, M, V, d, Pa, c, Pb, scale, numbers, rms, key, start):
    """One tile's weights and moments, from d, P a, c, P b of its blocks."""
    real = B.dtype.type
    if kind == ADAM:
        b1, c1, b2, c2, rate, root, eps = numbers
        _adam(
            B, M, V, d, Pa, c, Pb, real(scale), real(b1), real(c1), real(b2), real(c2), real(rate), real(root),
            real(eps), key, start,
        )  # fmt: skip
    elif kind == SCHEDULE_FREE:
        rate, keep, pull, push, eps, _, _ = numbers
        _schedule_free(B, M, d, Pa, c, Pb, real(rate * scale / (rms + eps)), real(keep), real(pull), real(push))
    else:
        _sgd(B, d, Pa, c, Pb, real(scale), real(numbers[0]))
