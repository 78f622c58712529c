"""All layers of the mixing network with perfect shuffles, on CPUs: no index arrays, no gathers.

A hidden vector has its k * blocks components in natural order, component c of block b at b * k + c. The
shuffle deals them out in k runs: input c of block b is component c * blocks + b of the vector below. Going up,
a tile therefore reads k contiguous runs and writes one, its outputs interleaved; going down it is the other way round.

Activations are rows of an array: with N + 1 rows all are kept, with 2 they take turns. Threads share the
chunks of a layer as in `lodo.engines.numba.permuted`.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from lodo.engines.numba.feeding import feed, learn_gate
from lodo.engines.numba.tiles import TILE, add_squares, copy, layer_key, pad, times, times_transposed, total, update
from lodo.meta import SCHEDULE_FREE

# Rows are taken out of a tile before they are looped over: only so does LLVM see that it may use vector instructions.


@njit(**TILE)
def _read_runs(a, blocks, t, X):
    """X[c, l] = input c of block t L + l; zero beyond the last block."""
    k, L = X.shape
    used = min(L, blocks - t * L)
    for c in range(k):
        run, row = a[c * blocks + t * L : c * blocks + t * L + used], X[c]
        for l in range(used):
            row[l] = run[l]
        for l in range(used, L):
            row[l] = 0


@njit(**TILE)
def _write_runs(X, blocks, t, a):
    k, L = X.shape
    used = min(L, blocks - t * L)
    for c in range(k):
        run, row = a[c * blocks + t * L : c * blocks + t * L + used], X[c]
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
        for r in range(8):
            row = Y[r]
            for l in range(used):
                run[8 * l + r] = row[l]
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


@njit(inline="always")
def _up(theta, v, a, E, chunks):
    """a[i] = a_i for every layer, from a_0 = v."""
    rows, blocks = a.shape[0], a.shape[1] // E.shape[2]
    pad(v, a[0])
    for i in range(theta.shape[0]):
        source, target = a[i % rows], a[(i + 1) % rows]
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                _read_runs(source, blocks, t, E[j, 0])
                times(theta[i, t], E[j, 0], E[j, 1])
                _interleave(E[j, 1], blocks, t, target)


@njit(inline="always")
def _up_and_down(theta, v, a, c, E, chunks, out):
    """out = G v, with a as in `_up` and c[i] = c_i; both may be one array."""
    N, rows, blocks = theta.shape[0], c.shape[0], c.shape[1] // E.shape[2]
    _up(theta, v, a, E, chunks)
    copy(a[N % a.shape[0]], c[N % rows])
    for i in range(N - 1, -1, -1):
        source, target = c[(i + 1) % rows], c[i % rows]
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                _deinterleave(source, blocks, t, E[j, 0])
                times_transposed(theta[i, t], E[j, 0], E[j, 1])
                _write_runs(E[j, 1], blocks, t, target)
    copy(c[0], out)


@njit(inline="always")
def _learn(theta, u, g, a, b, c, d, E, Q, chunks, kept, scale, down_to, kind, M, V, numbers, key, weights, watched):
    """Go up with g, then down from d_N = Gt g, updating each layer's theta on the way.

    Unless they were kept, go up with u for a too, and down from c_N = Gt u at the same time.
    The last d, G g in d[0], is not computed if ``down_to`` is 0. Returns the hypergradient's sum of squares over
    scale^2 if that is ``watched``.
    """
    squares = 0.0
    N, rows, blocks = theta.shape[0], c.shape[0], c.shape[1] // E.shape[2]
    if not kept:
        _up(theta, u, a, E, chunks)
        copy(a[N], c[N % rows])
    _up(theta, g, b, E, chunks)
    copy(b[N], d[N % 2])
    for i in range(N - 1, -1, -1):
        d_i, d_target = d[(i + 1) % 2], d[i % 2]
        c_i, c_target = c[(i + 1) % rows], c[i % rows]
        rms = 0.0
        if kind == SCHEDULE_FREE or watched:
            Q[:] = 0
            for j in prange(chunks.size - 1):
                for t in range(chunks[j], chunks[j + 1]):
                    _deinterleave(d_i, blocks, t, E[j, 0])
                    _deinterleave(c_i, blocks, t, E[j, 1])
                    _read_runs(a[i], blocks, t, E[j, 2])
                    _read_runs(b[i], blocks, t, E[j, 3])
                    add_squares(E[j, 0], E[j, 2], E[j, 1], E[j, 3], Q[j])
            layer = total(Q)
            squares += layer
            rms = abs(scale) * np.sqrt(layer / weights)
        bits = layer_key(key, i)
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                B = theta[i, t]
                _deinterleave(d_i, blocks, t, E[j, 0])
                _deinterleave(c_i, blocks, t, E[j, 1])
                _read_runs(a[i], blocks, t, E[j, 2])
                _read_runs(b[i], blocks, t, E[j, 3])
                if i > down_to:
                    times_transposed(B, E[j, 0], E[j, 4])
                    _write_runs(E[j, 4], blocks, t, d_target)
                if i > 0 and not kept:
                    times_transposed(B, E[j, 1], E[j, 4])
                    _write_runs(E[j, 4], blocks, t, c_target)
                update(
                    kind, B, M[i, t], V[i, t], E[j, 0], E[j, 2], E[j, 1], E[j, 3], scale, numbers, rms, bits,
                    t * B.size,
                )  # fmt: skip
    return squares


def apply(theta, P, v, work, out):
    """out = G v, leaving a and c as they are; P is empty."""
    _, b, _, _, E, _, chunks = work
    _up_and_down(theta, v, b, b, E, chunks, out)


def advance(
    theta, P, vectors, beta, work, kept, learning, scale, kind, M, V, numbers, key, weights, watched, gated, gate
):  # fmt: skip
    """As `lodo.engines.numba.permuted.advance`."""
    squares = 0.0
    a, b, c, d, E, Q, chunks = work
    u, m, g, last, led_to, out = vectors
    if learning:
        down_to = -1 if gated else 0
        squares = _learn(
            theta, u, led_to, a, b, c, d, E, Q, chunks, kept, scale, down_to, kind, M, V, numbers, key, weights,
            watched,
        )  # fmt: skip
        if gated:
            copy(d[0], out)  # G g, for a moment
            gate = learn_gate(gate, scale, out, m, last)
    feed(u, m, g, last, beta, gated, gate)
    way_up, way_down = (a, c) if kept else (c, d)
    _up_and_down(theta, u, way_up, way_down, E, chunks, out)
    return gate, abs(scale) * np.sqrt(squares)
