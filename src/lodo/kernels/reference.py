"""The mixing network in torch operations: any device, any dtype, the truth for the fast kernels.

Shapes: theta (N, T, k, k, L), hidden vectors (T*k*L,); see `lodo.preconditioners.mixing`. A `Wiring` knows the
permutations. The formulas are derived in docs/algorithm.md:

    up     a_i = B_i P_i a_{i-1}            down   c_{i-1} = P_i^T B_i^T c_i
    d(g . G m)/dB_i = d_i (P_i a_{i-1})^T + c_i (P_i b_{i-1})^T

with a, c the activations of m going up and of Gt m going down, b, d those of g and Gt g.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Wiring(Protocol):
    """The permutations of a network."""

    def enter(self, theta: Tensor, v: Tensor) -> Tensor:
        """The hidden vector of v."""

    def leave(self, a: Tensor, n: int) -> Tensor:
        """The n numbers back, the transpose of `enter`."""

    def gather(self, i: int, a: Tensor) -> Tensor:
        """``P_i a`` (i counts from 0)."""

    def scatter(self, i: int, x: Tensor) -> Tensor:
        """``P_i^T x``."""


class Permuted:
    """Permutations as index arrays, one a row of ``P``."""

    def __init__(self, P: Tensor) -> None:
        self.P = P

    def enter(self, theta: Tensor, v: Tensor) -> Tensor:
        a = theta.new_zeros(self.P.shape[1])
        a[: v.numel()] = v
        return a

    def leave(self, a: Tensor, n: int) -> Tensor:
        return a[:n]

    def gather(self, i: int, a: Tensor) -> Tensor:
        return a[self.P[i]]

    def scatter(self, i: int, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[self.P[i]] = x
        return out


class Shuffled:
    """Perfect shuffles of ``blocks * k`` components in tiles of L blocks, and perhaps places ``q`` for the input."""

    def __init__(self, blocks: int, k: int, L: int, q: Tensor) -> None:
        self.blocks, self.k, self.L = blocks, k, L
        self.q = q.long() if q.numel() else None
        self.T = -(-blocks // L)

    def enter(self, theta: Tensor, v: Tensor) -> Tensor:
        a = theta.new_zeros(self.blocks * self.k)
        if self.q is None:
            a[: v.numel()] = v
        else:
            a[self.q] = v
        return self._stored(a.view(-1, self.k))

    def leave(self, a: Tensor, n: int) -> Tensor:
        natural = self._natural(a).reshape(-1)
        return natural[:n] if self.q is None else natural[self.q]

    def gather(self, i: int, a: Tensor) -> Tensor:
        """The natural order cut into k runs, run c giving every block its input c."""
        return self._stored(self._natural(a).reshape(self.k, self.blocks).T)

    def scatter(self, i: int, x: Tensor) -> Tensor:
        return self._stored(self._natural(x).T.reshape(self.blocks, self.k))

    def _natural(self, a: Tensor) -> Tensor:
        """Stored (T, k, L) to (blocks, k)."""
        return a.view(self.T, self.k, self.L).transpose(1, 2).reshape(-1, self.k)[: self.blocks]

    def _stored(self, x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, 0, self.T * self.L - self.blocks))
        return padded.view(self.T, self.L, self.k).transpose(1, 2).reshape(-1)


def up(theta: Tensor, wiring: Wiring, v: Tensor) -> tuple[list[Tensor], Tensor]:
    """``P_i a_{i-1}`` of every layer, and ``a_N = Gt v``."""
    _, T, k, _, L = theta.shape
    a = wiring.enter(theta, v)
    inputs = []
    for i, B in enumerate(theta):
        x = wiring.gather(i, a).view(T, 1, k, L)
        inputs.append(x)
        a = (B * x).sum(2).view(-1)
    return inputs, a


def down(theta: Tensor, wiring: Wiring, y: Tensor) -> tuple[list[Tensor], Tensor]:
    """``c_i`` of every layer, starting from ``c_N = y``, and ``c_0 = Gt^T y``."""
    N, T, k, _, L = theta.shape
    outputs = []
    for i in range(N - 1, -1, -1):
        c = y.view(T, k, 1, L)
        outputs.append(c)
        y = wiring.scatter(i, (theta[i] * c).sum(1).view(-1))
    return outputs[::-1], y


def apply(theta: Tensor, wiring: Wiring, v: Tensor) -> Tensor:
    """``(I 0) Gt^T Gt (I 0)^T v``."""
    return wiring.leave(down(theta, wiring, up(theta, wiring, v)[1])[1], v.numel())


def hypergradient(theta: Tensor, wiring: Wiring, m: Tensor, g: Tensor) -> Tensor:
    """The derivative of ``g . G(theta) m`` with respect to theta."""
    Pa, u = up(theta, wiring, m)
    Pb, w = up(theta, wiring, g)
    c, d = down(theta, wiring, u)[0], down(theta, wiring, w)[0]
    h = torch.empty_like(theta)
    for i in range(theta.shape[0]):
        torch.mul(d[i], Pa[i], out=h[i])
        h[i].addcmul_(c[i], Pb[i])
    return h
