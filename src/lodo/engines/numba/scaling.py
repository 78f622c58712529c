"""What KronLODO does to every number of a weight, fused for CPUs in two passes.

As `lodo.kron_step.sums_of` and `lodo.kron_step.direction`. Parameters lie one after the other and are cut into pieces.
Sums are taken piece by piece, so that results depend neither on the number of threads nor much on the size of a
parameter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from lodo.engines.numba.tiles import _narrow, _random_bits, _widen

_SUM: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}}  # sums may be reordered


def _coded(u, like, unit, most):
    raise NotImplementedError


@overload(_coded, inline="always")
def _overload_coded(u, like, unit, most):  # a scaled gradient as it is stored: in units if it has 8 bits
    if like is types.int8:
        return lambda u, like, unit, most: np.int8(min(max(np.rint(u / unit), -most), most))
    return lambda u, like, unit, most: u


@njit(**_SUM)
def _piece_of_slopes(X, M, V, U, learning, gated, limit, mean, root, least):
    real = X.dtype.type
    xx = xn = xu = real(0)
    for j in range(X.size):
        x = X[j]
        xx += x * x
        if learning:
            n = mean * _widen(M[j]) / (root * np.sqrt(_widen(V[j])) + least)
            xn += x * min(max(n, -limit), limit)
        if gated:
            xu += x * real(U[j])
    return xx, xn, xu


def slopes(X, M, V, U, learning, gated, unit, limit, mean, root, least, starts, stops, owners, sums, found):
    """found = |X|^2, <X, M^ / R> and <X, U> of every parameter; the second if learning, the third if gated."""
    for k in prange(starts.size):
        i, piece = owners[k], slice(starts[k], stops[k])
        sums[k, 0], sums[k, 1], sums[k, 2] = _piece_of_slopes(
            X[piece], M[piece], V[piece], U[piece], learning, gated, X.dtype.type(limit), mean[i], root[i], least[i]
        )
    for k in range(starts.size):
        i = owners[k]
        found[0, i] += sums[k, 0]
        found[1, i] += sums[k, 1]
        found[2, i] += sums[k, 2] * X.dtype.type(unit)


@njit(**_SUM)
def _piece_of_direction(
    X, M, V, U, gated, unit, limit, key, place, share1, share2, mean, root, least, w, rate
):  # fmt: skip
    square, most = X.dtype.type(0), X.dtype.type(127)
    for j in range(X.size):
        x, m, v = X[j], _widen(M[j]), _widen(V[j])
        m += share1 * (x - m)
        v += share2 * (x * x - v)
        r = root * np.sqrt(v) + least
        s = min(max(mean * m / r, -limit), limit)
        if gated:
            u = min(max(x / r, -limit), limit)
            U[j] = _coded(u, U[j], unit, most)
            s = u + w * (s - u)
        bits = _random_bits(M[j], np.uint32(place + j), key)
        M[j], V[j] = _narrow(m, M[j], bits & np.uint32(0xFFFF)), _narrow(v, V[j], bits >> np.uint32(16))
        X[j] = rate * s
        square += s * s
    return square


def direction(
    X, M, V, U, gated, unit, limit, keys, share1, share2, mean, root, least, w, rate, starts, stops, owners,
    places, sums, found,
):  # fmt: skip
    """M, V and U after X has entered them, then X = rate S; and found[0] = |S|^2 of every parameter."""
    real = X.dtype.type
    for k in prange(starts.size):
        i, piece = owners[k], slice(starts[k], stops[k])
        sums[k, 0] = _piece_of_direction(
            X[piece], M[piece], V[piece], U[piece], gated, real(unit), real(limit), keys[i], places[k], share1[i],
            share2[i], mean[i], root[i], least[i], w[i], rate[i],
        )  # fmt: skip
    for k in range(starts.size):
        found[0, owners[k]] += sums[k, 0]
