"""The mixing network in torch operations: any device, any dtype, the truth for the fast kernels.

Shapes: theta (N, T, k, k, L), P (N, T*k*L), hidden vectors (T*k*L,); see
`lodo.preconditioners.mixing`. The formulas are derived in docs/algorithm.md:

    up     a_i = B_i P_i a_{i-1}            down   c_{i-1} = P_i^T B_i^T c_i
    d(g . G m)/dB_i = d_i (P_i a_{i-1})^T + c_i (P_i b_{i-1})^T

with a, c the activations of m going up and of Gt m going down, b, d those of g and Gt g.
"""

from __future__ import annotations

import torch
from torch import Tensor


def up(theta: Tensor, P: Tensor, v: Tensor) -> tuple[list[Tensor], Tensor]:
    """``P_i a_{i-1}`` of every layer, and ``a_N = Gt v``."""
    _, T, k, _, L = theta.shape
    a = theta.new_zeros(P.shape[1])
    a[: v.numel()] = v
    inputs = []
    for B, p in zip(theta, P, strict=True):
        x = a[p].view(T, 1, k, L)
        inputs.append(x)
        a = (B * x).sum(2).view(-1)
    return inputs, a


def down(theta: Tensor, P: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
    """``c_i`` of every layer, starting from ``c_N = y``, and ``c_0 = Gt^T y``."""
    _, T, k, _, L = theta.shape
    outputs = []
    for B, p in zip(theta.flip(0), P.flip(0), strict=True):
        c = y.view(T, k, 1, L)
        outputs.append(c)
        y = torch.empty_like(y)
        y[p] = (B * c).sum(1).view(-1)
    return outputs[::-1], y


def apply(theta: Tensor, P: Tensor, v: Tensor) -> Tensor:
    """``(I 0) Gt^T Gt (I 0)^T v``."""
    return down(theta, P, up(theta, P, v)[1])[1][: v.numel()]


def hypergradient(theta: Tensor, P: Tensor, m: Tensor, g: Tensor) -> Tensor:
    """The derivative of ``g . G(theta) m`` with respect to theta."""
    Pa, u = up(theta, P, m)
    Pb, w = up(theta, P, g)
    c, d = down(theta, P, u)[0], down(theta, P, w)[0]
    h = torch.empty_like(theta)
    for i in range(theta.shape[0]):
        torch.mul(d[i], Pa[i], out=h[i])
        h[i].addcmul_(c[i], Pb[i])
    return h
