"""What KronLODO does to every number of a stack, fused for CPUs in two passes.

As `lodo.kron.last_slopes` and `lodo.kron.direction`. A matrix is cut into pieces, and sums are taken piece by piece, so
that results depend neither on the number of threads nor much on the size of the matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

_SUM: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz", "reassoc"}}  # sums may be reordered


@njit(**_SUM)
def _piece_of_slopes(X, M, V, U, gated, root, least):
    xn = xu = X.dtype.type(0)
    for j in range(X.size):
        xn += X[j] * M[j] / (root * np.sqrt(V[j]) + least)
        if gated:
            xu += X[j] * U[j]
    return xn, xu


def slopes(X, M, V, U, gated, mean, root, least, sums):
    """sums[i, piece] = <X, M^ / R> and <X, U> of a piece of matrix i."""
    n, pieces = X.shape[1], sums.shape[1]
    for k in prange(X.shape[0] * pieces):
        i, j = k // pieces, k % pieces
        piece = slice(j * n // pieces, (j + 1) * n // pieces)
        xn, xu = _piece_of_slopes(X[i, piece], M[i, piece], V[i, piece], U[i, piece], gated, root[i], least[i])
        sums[i, j, 0], sums[i, j, 1] = mean[i] * xn, xu


@njit(**_SUM)
def _piece_of_direction(X, M, V, U, gated, share1, share2, mean, root, least, w, rate, S):
    square = X.dtype.type(0)
    for j in range(X.size):
        x = X[j]
        m = M[j] + share1 * (x - M[j])
        v = V[j] + share2 * (x * x - V[j])
        r = root * np.sqrt(v) + least
        s = mean * m / r
        if gated:
            u = x / r
            U[j] = u
            s = u + w * (s - u)
        M[j], V[j], S[j] = m, v, rate * s
        square += s * s
    return square


def direction(X, M, V, U, gated, share1, share2, mean, root, least, w, rate, S, sums):
    """M, V and U after X has entered them, S times the rate, and sums[i, piece, 0] = |S|^2 of a piece of matrix i."""
    n, pieces = X.shape[1], sums.shape[1]
    real = X.dtype.type
    for k in prange(X.shape[0] * pieces):
        i, j = k // pieces, k % pieces
        piece = slice(j * n // pieces, (j + 1) * n // pieces)
        sums[i, j, 0] = _piece_of_direction(
            X[i, piece], M[i, piece], V[i, piece], U[i, piece], gated, real(share1), real(share2), mean[i], root[i],
            least[i], w[i], rate[i], S[i, piece],
        )  # fmt: skip
