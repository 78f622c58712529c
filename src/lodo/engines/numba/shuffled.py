"""All layers of the mixing network with perfect shuffles, on CPUs: no index arrays, no gathers.

A hidden vector has its k * blocks components in natural order, component c of block b at b * k + c. The
shuffle deals them out in k runs: input c of block b is component c * blocks + b of the vector below. Going up,
a tile therefore reads k contiguous runs and writes one, its outputs interleaved; going down it is the other way round.

Activations 1 to N - 1 are rows of an array. Those at the bottom are what comes in and goes out, shorter by the padding;
those at the top are computed where they are used, since there a tile's outputs are its inputs on the way down. Going
down, a tile writes where it would read going up: so what goes down may take the place of what went up. Threads share
the chunks of a layer as in `lodo.engines.numba.permuted`.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from lodo.engines.numba.feeding import feed, learn_gate
from lodo.engines.numba.tiles import TILE, add_squares, borrowed, layer_key, times, times_transposed, total, update
from lodo.meta import SCHEDULE_FREE

# Rows are taken out of a tile before they are looped over: only so does LLVM see that it may use vector instructions.


@njit(**TILE)
def _read_runs(a, blocks, t, X):
    """X[c, l] = input c of block t L + l; zero beyond the last block and beyond the end of ``a``."""
    k, L = X.shape
    for c in range(k):
        start = c * blocks + t * L
        used = max(0, min(L, blocks - t * L, a.size - start))
        run, row = a[start : start + used], X[c]
        for l in range(used):
            row[l] = run[l]
        for l in range(used, L):
            row[l] = 0


@njit(**TILE)
def _write_runs(X, blocks, t, a):
    """The other way round, as far as ``a`` goes."""
    k, L = X.shape
    for c in range(k):
        start = c * blocks + t * L
        used = max(0, min(L, blocks - t * L, a.size - start))
        run, row = a[start : start + used], X[c]
        for l in range(used):
            run[l] = row[l]


@njit(**TILE)
def _interleave(Y, blocks, t, a):
    """Component r of block t L + l of ``a`` = Y[r, l]."""
    k, L = Y.shape
    used = min(L, blocks - t * L)
    run = a[t * L * k : (t * L + used) * k]
    if k == 4:
        Y0, Y1, Y2, Y3 = Y[0], Y[1], Y[2], Y[3]
        for l in range(used):
            run[4 * l] = Y0[l]
            run[4 * l + 1] = Y1[l]
            run[4 * l + 2] = Y2[l]
            run[4 * l + 3] = Y3[l]
    elif k == 8:
        Y0, Y1, Y2, Y3, Y4, Y5, Y6, Y7 = Y[0], Y[1], Y[2], Y[3], Y[4], Y[5], Y[6], Y[7]
        for l in range(used):
            run[8 * l] = Y0[l]
            run[8 * l + 1] = Y1[l]
            run[8 * l + 2] = Y2[l]
            run[8 * l + 3] = Y3[l]
            run[8 * l + 4] = Y4[l]
            run[8 * l + 5] = Y5[l]
            run[8 * l + 6] = Y6[l]
            run[8 * l + 7] = Y7[l]
    else:
        for r in range(k):
            row = Y[r]
            for l in range(used):
                run[k * l + r] = row[l]


@njit(**TILE)
def _deinterleave(a, blocks, t, Y):
    """Y[r, l] = component r of block t L + l of ``a``; zero beyond the last block."""
    k, L = Y.shape
    used = min(L, blocks - t * L)
    run = a[t * L * k : (t * L + used) * k]
    for r in range(k):
        row = Y[r]
        if k == 4:
            for l in range(used):
                row[l] = run[4 * l + r]
        elif k == 8:
            for l in range(used):
                row[l] = run[8 * l + r]
        else:
            for l in range(used):
                row[l] = run[k * l + r]
        for l in range(used, L):
            row[l] = 0


@njit(**TILE)
def _rise(B, a, blocks, t, E, target):
    """The tile's part of one layer up, from ``a`` to ``target``."""
    _read_runs(a, blocks, t, E[0])
    times(B, E[0], E[1])
    _interleave(E[1], blocks, t, target)


@njit(**TILE)
def _meet(B, is_top, a, b, c, d, blocks, t, E):
    """E[0] to E[3] = d and c above the tile's blocks, P a and P b below them; at the top, d is B P b and c is B P a."""
    _read_runs(a, blocks, t, E[2])
    _read_runs(b, blocks, t, E[3])
    if is_top:
        times(B, E[3], E[0])
        times(B, E[2], E[1])
    else:
        _deinterleave(d, blocks, t, E[0])
        _deinterleave(c, blocks, t, E[1])


@njit(**TILE)
def _row(end, x, i):
    """Activation i: ``end`` if i is 0, otherwise a row of x."""
    return end if i == 0 else x[(i - 1) % x.shape[0]]


@njit(inline="always")
def _up_and_down(theta, v, a, c, E, chunks, out):
    """out = G v, with a_i and c_i in a and c, which may be one array; at the top, a tile goes up and down at once."""
    N, blocks = theta.shape[0], c.shape[1] // E.shape[2]
    for i in range(N - 1):
        a_i, above = _row(v, a, i), _row(v, a, i + 1)
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                _rise(theta[i, t], a_i, blocks, t, E[j], above)
    for i in range(N - 1, -1, -1):
        a_i, c_i, below = _row(v, a, i), _row(out, c, i + 1), _row(out, c, i)
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                if i == N - 1:
                    _read_runs(a_i, blocks, t, E[j, 0])
                    times(theta[i, t], E[j, 0], E[j, 1])
                else:
                    _deinterleave(c_i, blocks, t, E[j, 1])
                times_transposed(theta[i, t], E[j, 1], E[j, 0])
                _write_runs(E[j, 0], blocks, t, below)


@njit(inline="always")
def _learn(
    theta, u, g, a, b, c, E, Q, chunks, kept, scale, down_to, kind, M, V, numbers, key, weights, watched, Gg
):  # fmt: skip
    """Go up with g, then down from d_N = Gt g, updating each layer's theta on the way.

    Unless they were kept, go up with u for a too, and down from c_N = Gt u at the same time: then c is a. Each d takes
    the place of a b. The last d, Gg, is not computed if ``down_to`` is 0. Returns the hypergradient's sum of squares
    over scale^2 if that is ``watched``.
    """
    squares = 0.0
    N, blocks = theta.shape[0], c.shape[1] // E.shape[2]
    for i in range(N - 1):
        a_i, b_i, a_above, b_above = _row(u, a, i), _row(g, b, i), _row(u, a, i + 1), _row(g, b, i + 1)
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                _rise(theta[i, t], b_i, blocks, t, E[j], b_above)
                if not kept:
                    _rise(theta[i, t], a_i, blocks, t, E[j], a_above)
    for i in range(N - 1, -1, -1):
        a_i, b_i, is_top = _row(u, a, i), _row(g, b, i), i == N - 1
        c_i, d_i, c_below, d_below = _row(u, c, i + 1), _row(Gg, b, i + 1), _row(u, c, i), _row(Gg, b, i)
        rms = 0.0
        if kind == SCHEDULE_FREE or watched:
            Q[:] = 0
            for j in prange(chunks.size - 1):
                for t in range(chunks[j], chunks[j + 1]):
                    _meet(theta[i, t], is_top, a_i, b_i, c_i, d_i, blocks, t, E[j])
                    add_squares(E[j, 0], E[j, 2], E[j, 1], E[j, 3], Q[j])
            layer = total(Q)
            squares += layer
            rms = abs(scale) * np.sqrt(layer / weights)
        bits = layer_key(key, i)
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                B = theta[i, t]
                _meet(B, is_top, a_i, b_i, c_i, d_i, blocks, t, E[j])
                if i > down_to:
                    times_transposed(B, E[j, 0], E[j, 4])
                    _write_runs(E[j, 4], blocks, t, d_below)
                if i > 0 and not kept:
                    times_transposed(B, E[j, 1], E[j, 4])
                    _write_runs(E[j, 4], blocks, t, c_below)
                update(
                    kind, B, M[i, t], V[i, t], E[j, 0], E[j, 2], E[j, 1], E[j, 3], scale, numbers, rms, bits,
                    t * B.size,
                )  # fmt: skip
    return squares


def apply(theta, P, v, work, out):
    """out = G v, leaving a and c as they are; P is empty."""
    theta, v, work, out = borrowed((theta, v, work, out))
    _, b, _, E, _, chunks = work
    _up_and_down(theta, v, b, b, E, chunks, out)


def advance(
    theta, P, vectors, beta, work, kept, learning, scale, kind, M, V, numbers, key, weights, watched, gated, gate
):  # fmt: skip
    """As `lodo.engines.numba.permuted.advance`."""
    theta, vectors, work, M, V = borrowed((theta, vectors, work, M, V))
    squares = 0.0
    a, b, c, E, Q, chunks = work
    u, m, g, last, led_to, out = vectors
    if learning:
        down_to = -1 if gated else 0
        squares = _learn(
            theta, u, led_to, a, b, c, E, Q, chunks, kept, scale, down_to, kind, M, V, numbers, key, weights, watched,
            out,
        )  # fmt: skip
        if gated:
            gate = learn_gate(gate, scale, out, m, last)
    feed(u, m, g, last, beta, gated, gate)
    _up_and_down(theta, u, a, c, E, chunks, out)
    return gate, abs(scale) * np.sqrt(squares)
