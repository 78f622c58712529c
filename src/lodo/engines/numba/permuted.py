"""All layers of the mixing network with random permutations, on CPUs.

One pass a layer: a tile's inputs are gathered, multiplied by its blocks and written (going up), or
multiplied and scattered (going down). Hidden vectors are (T, k, L), activations (N, T, k, L). Threads share the chunks
of a layer: chunk j is tiles chunks[j] to chunks[j + 1], and has spare tiles E[j] and spare lanes Q[j].

Functions are inlined where they are called, so that `prange` means threads in a kernel compiled for
many and a plain loop in one compiled for one.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from lodo.engines.numba.feeding import feed, learn_gate
from lodo.engines.numba.tiles import (
    TILE,
    add_squares,
    borrowed,
    copy,
    layer_key,
    pad,
    times,
    times_transposed,
    total,
    update,
)
from lodo.meta import SCHEDULE_FREE


@njit(**TILE)
def _gather(x, p, out):  # out = P x
    for j in range(p.size):
        out[j] = x[p[j]]


@njit(**TILE)
def _scatter(x, p, out):  # out = P^T x
    for j in range(p.size):
        out[p[j]] = x[j]


@njit(inline="always")
def _up(theta, P, v, x, y, chunks, inputs):
    """inputs[i] = P_i a_{i-1} for every layer, from a_0 = v; returns a_N, which is x or y.

    If ``inputs`` has one layer only, each layer overwrites the last.
    """
    N, kept = theta.shape[0], inputs.shape[0]
    pad(v, x.reshape(-1))
    for i in range(N):
        source = (x if i % 2 == 0 else y).reshape(-1)
        target = y if i % 2 == 0 else x
        Px = inputs[i % kept]
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                _gather(source, P[i, t], Px[t].reshape(-1))
                times(theta[i, t], Px[t], target[t])
    return x if N % 2 == 0 else y


@njit(inline="always")
def _up_and_down(theta, P, v, x, y, E, chunks, inputs, outputs, out):
    """out = G v, with inputs as in `_up` and outputs[i] = c_i; both may be one array.

    If ``outputs`` has two layers only, they take turns.
    """
    N, kept = theta.shape[0], outputs.shape[0]
    copy(_up(theta, P, v, x, y, chunks, inputs).reshape(-1), outputs[(N - 1) % kept].reshape(-1))
    for i in range(N - 1, -1, -1):
        c_i, target = outputs[i % kept], (y if i == 0 else outputs[(i - 1) % kept]).reshape(-1)
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                times_transposed(theta[i, t], c_i[t], E[j, 0])
                _scatter(E[j, 0].reshape(-1), P[i, t], target)
    copy(y.reshape(-1), out)


@njit(inline="always")
def _learn(
    theta, P, u, g, x, y, E, Q, chunks, Pa, Pb, c, kept, scale, down_to, kind, M, V, numbers, key, weights, watched
):  # fmt: skip
    """Go up with g, then down from d_N = Gt g, updating each layer's theta on the way.

    Unless they were kept, go up with u for Pa too, and down from c_N = Gt u at the same time.
    Layers below ``down_to`` are not gone through to the end: x or y is G g if that is -1, and is returned,
    with the hypergradient's sum of squares over scale^2 if that is ``watched``.
    """
    squares = 0.0
    N = theta.shape[0]
    turns = c.shape[0]
    if not kept:
        copy(_up(theta, P, u, x, y, chunks, Pa).reshape(-1), c[(N - 1) % turns].reshape(-1))
    w = _up(theta, P, g, x, y, chunks, Pb)
    z = y if N % 2 == 0 else x  # the one that w is not
    for i in range(N - 1, -1, -1):
        d = w if (N - 1 - i) % 2 == 0 else z
        target = (z if (N - 1 - i) % 2 == 0 else w).reshape(-1)
        c_target = c[(i - 1) % turns].reshape(-1)
        c_i = c[i % turns]
        rms = 0.0
        if kind == SCHEDULE_FREE or watched:
            Q[:] = 0
            for j in prange(chunks.size - 1):
                for t in range(chunks[j], chunks[j + 1]):
                    add_squares(d[t], Pa[i, t], c_i[t], Pb[i, t], Q[j])
            layer = total(Q)
            squares += layer
            rms = abs(scale) * np.sqrt(layer / weights)
        bits = layer_key(key, i)
        for j in prange(chunks.size - 1):
            for t in range(chunks[j], chunks[j + 1]):
                if i > down_to:
                    times_transposed(theta[i, t], d[t], E[j, 0])
                    _scatter(E[j, 0].reshape(-1), P[i, t], target)
                if i > 0 and not kept:
                    times_transposed(theta[i, t], c_i[t], E[j, 1])
                    _scatter(E[j, 1].reshape(-1), P[i, t], c_target)
                update(
                    kind, theta[i, t], M[i, t], V[i, t], d[t], Pa[i, t], c_i[t], Pb[i, t], scale, numbers, rms, bits,
                    t * theta[i, t].size,
                )  # fmt: skip
    return (z if N % 2 == 1 else w).reshape(-1), squares


def apply(theta, P, v, work, out):
    """out = G v, leaving Pa and c as they are."""
    theta, P, v, work, out = borrowed((theta, P, v, work, out))
    x, y, E, _, chunks, _, Pb, _ = work
    _up_and_down(theta, P, v, x, y, E, chunks, Pb, Pb, out)


def advance(
    theta, P, vectors, beta, work, kept, learning, scale, kind, M, V, numbers, key, weights, watched, gated, gate
):  # fmt: skip
    """Learn from where the last step led, m = beta m + (1 - beta) g, out = G u; keep Pa and c for next time.

    Returns the gate (u = m, or (1 - w) g + w m if it is learned) and the hypergradient's norm if that is ``watched``.
    """
    theta, P, vectors, work, M, V = borrowed((theta, P, vectors, work, M, V))
    squares = 0.0
    x, y, E, Q, chunks, Pa, Pb, c = work
    u, m, g, last, led_to, out = vectors
    if learning:
        down_to = -1 if gated else 0
        Gg, squares = _learn(
            theta, P, u, led_to, x, y, E, Q, chunks, Pa, Pb, c, kept, scale, down_to, kind, M, V, numbers, key, weights,
            watched,
        )  # fmt: skip
        if gated:
            gate = learn_gate(gate, scale, Gg, m, last)
    feed(u, m, g, last, beta, gated, gate)
    _up_and_down(theta, P, u, x, y, E, chunks, Pa, c, out)
    return gate, abs(scale) * np.sqrt(squares)
