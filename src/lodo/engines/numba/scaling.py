"""What KronLODO does to every number of a weight, fused for CPUs in two passes, and between them to c and w.

As `lodo.kron_step.sums_of`, `lodo.kron_step.learn` and `lodo.kron_step.direction`. Parameters lie one after the other
and are cut into pieces. Sums are taken piece by piece, so that results depend neither on the number of threads nor much
on the size of a parameter.

``numbers`` are those of all parameters, in the order of `NUMBERS`, and ``has`` says which of them there are: a gain, a
gate, the size of recent gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from lodo.engines.numba.tiles import STRICT, _narrow, _random_bits, _widen
from lodo.kron_formulas import cosines, factors, newest_share, next_gain, next_gate, trust

NUMBERS = (
    "step", "mean_decay", "square_decay", "norm_sq", "size", "length",
    "gain", "gain_exp_avg", "gain_exp_avg_sq", "gain_highest", "gate", "gate_exp_avg", "gate_exp_avg_sq",
)  # fmt: skip

_SUM: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}}  # sums may be reordered


def _coded(u, like, unit, most):
    raise NotImplementedError


@overload(_coded, inline="always")
def _overload_coded(u, like, unit, most):  # a scaled gradient as it is stored: in units if it has 8 bits
    if like is types.int8:
        return lambda u, like, unit, most: np.int8(min(max(np.rint(u / unit), -most), most))
    return lambda u, like, unit, most: u


# ---------------------------------------------------------------- one number for each parameter


@njit(**STRICT)
def _factors(numbers, i, constants):
    t, mean_decay, square_decay, norm_sq, size = numbers[:5]
    squared = norm_sq[i] if constants.has_bases else norm_sq.dtype.type(0)
    return factors(t[i], (mean_decay[i], square_decay[i]), squared, size[i], constants.b2, constants.eps)


def trusted(numbers, squares, constants, found):
    """Write what shortens each gradient into ``found``; returns whether anything does."""
    t, norm_sq = numbers[0], numbers[3]
    is_any = False
    for i in range(t.size):
        found[i] = trust(norm_sq[i], t[i], squares[i], constants.b2)
        is_any |= found[i] < 1
    return is_any


def learn(numbers, has, sums, pace, constants):
    """Learn c and w from the last step, and count this one."""
    t, mean_decay, square_decay, norm_sq, _, length, c, c_m, c_v, highest, w, w_m, w_v = numbers
    has_gain, has_gate, has_norm = has
    averaging, b1, b2 = constants.averaging, constants.b1, constants.b2
    for i in range(t.size):
        if has_gain or has_gate:
            XX, XN, XU = np.float64(sums[0, i]), np.float64(sums[1, i]), np.float64(sums[2, i])
            gate = np.float64(w[i]) if has_gate else 1.0
            alignment, gate_slope = cosines(XX, XN, XU, gate, length[i])
            learning = t[i] > 0 and length[i] > 0
            if has_gain:
                gain = c[i], c_m[i], c_v[i]
                c[i], c_m[i], c_v[i], highest[i] = next_gain(gain, highest[i], t[i], -alignment, learning, pace)
            if has_gate:
                w[i], w_m[i], w_v[i] = next_gate((gate, w_m[i], w_v[i]), t[i], -gate_slope, learning, pace)
        t[i] += 1
        mean_decay[i] *= 1 - newest_share(averaging, b1, t[i])
        square_decay[i] *= 1 - newest_share(averaging, b2, t[i])
        if has_norm and sums[0, i] > 0:  # a gradient of zero says nothing about the size of others
            norm_sq[i] = b2 * norm_sq[i] + (1 - b2) * sums[0, i]


# ---------------------------------------------------------------- every number of a weight


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


def slopes(X, M, V, U, numbers, has, coded, constants, pieces, sums, found):
    """found = |X|^2, <X, M^ / R> and <X, U> of every parameter; the second if c or w is learned, the third if w is."""
    real = X.dtype.type
    starts, stops, owners, _ = pieces
    has_gain, has_gate, _ = has
    for k in prange(starts.size):
        i, piece = owners[k], slice(starts[k], stops[k])
        mean, root, least = _factors(numbers, i, constants)
        sums[k, 0], sums[k, 1], sums[k, 2] = _piece_of_slopes(
            X[piece], M[piece], V[piece], U[piece], has_gain or has_gate, has_gate, real(constants.limit), real(mean),
            real(root), real(least),
        )  # fmt: skip
    for k in range(starts.size):
        i = owners[k]
        found[0, i] += sums[k, 0]
        found[1, i] += sums[k, 1]
        found[2, i] += sums[k, 2] * real(constants.unit if coded else 1.0)


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


def direction(X, M, V, U, numbers, has, keys, lr, constants, pieces, sums):
    """M, V and U after X has entered them, then X = rate S; and the length of S, or 0 if lr is 0 and nothing moves."""
    real = X.dtype.type
    starts, stops, owners, places = pieces
    has_gain, has_gate, _ = has
    averaging, b1, b2 = constants.averaging, constants.b1, constants.b2
    t, c, w = numbers[0], numbers[6], numbers[10]
    length = numbers[5]  # apart: Numba might take writing to what comes out of a tuple for dead code
    for k in prange(starts.size):
        i, piece = owners[k], slice(starts[k], stops[k])
        mean, root, least = _factors(numbers, i, constants)
        gain = np.exp(c[i]) if has_gain else real(1)
        sums[k, 0] = _piece_of_direction(
            X[piece], M[piece], V[piece], U[piece], has_gate, real(constants.unit), real(constants.limit), keys[i],
            places[k], real(newest_share(averaging, b1, t[i])), real(newest_share(averaging, b2, t[i])), real(mean),
            real(root), real(least), w[i] if has_gate else real(1), real(-lr * gain),
        )  # fmt: skip
    if has_gain or has_gate:
        for k in range(starts.size):
            length[owners[k]] = 0
        for k in range(starts.size):
            length[owners[k]] += sums[k, 0]
        for k in range(starts.size):
            if places[k] == 0:
                length[owners[k]] = np.sqrt(length[owners[k]]) if lr > 0 else real(0)
