"""The middle of a block of the image generator, fused for CPUs: arctangent, three depthwise convolutions, arctangent.

Torch makes a pass over memory for each of these and takes 3 ns per number for an arctangent; a polynomial takes 0.5 ns.
Images are the innermost index, so that one row of pixels of all images is one contiguous loop. Arrays have the shape
(channel, row, column and image), and those that are convolved have a margin of zeros around each channel.

Letters: L is the number of images, a the input of the first arctangent and y its output, k the weights of the
convolutions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.autograd.function import Function

from lodo.engines.numba.compiling import CACHE

MULTIPLIER = 3  # output channels of the depthwise convolution for each input channel
_FLAGS: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract", "nsz"}}
_KERNEL: dict[str, Any] = {**_FLAGS, "cache": CACHE}
_SUMS: dict[str, Any] = {**_FLAGS, "fastmath": {"contract", "nsz", "reassoc"}}


def _coefficients(terms: int = 10) -> np.ndarray:
    """Coefficients of the polynomial in t^2 that equals arctan(t) / t within 2e-8 for t in [0, 1].

    It interpolates at the Chebyshev nodes.
    """
    z = (np.cos(np.pi * (np.arange(terms) + 0.5) / terms) + 1) / 2
    return np.linalg.solve(np.vander(z, terms, increasing=True), np.arctan(np.sqrt(z)) / np.sqrt(z))


_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9 = _coefficients().astype(np.float32)
_ONE, _QUARTER_TURN = np.float32(1), np.float32(np.pi / 2)


@njit(inline="always")
def _atan(x):
    size = abs(x)
    large = size > _ONE
    t = (_ONE if large else size) / (size if large else _ONE)
    z = t * t
    p = ((((_C9 * z + _C8) * z + _C7) * z + _C6) * z + _C5) * z + _C4
    p = t * ((((p * z + _C3) * z + _C2) * z + _C1) * z + _C0)
    return math.copysign(_QUARTER_TURN - p if large else p, x)


# Indices to which an offset is added are unsigned: a signed one might be negative, and the loop would not vectorise.


@njit(**_FLAGS)
def _atan_row(x, L, out):
    for i in range(x.size):
        out[np.uintp(i) + np.uintp(L)] = _atan(x[i])


@njit(**_FLAGS)
def _convolve_row(above, here, below, k, bias, L, out, slope):
    """Set out to the arctangent of the 3 x 3 convolution, and slope to its derivative."""
    k0, k1, k2, k3, k4, k5, k6, k7, k8 = k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], k[8]
    one, two = np.uintp(L), np.uintp(2 * L)
    for number in range(out.size):
        i = np.uintp(number)
        v = bias + k0 * above[i] + k1 * above[i + one] + k2 * above[i + two]
        v += k3 * here[i] + k4 * here[i + one] + k5 * here[i + two]
        v += k6 * below[i] + k7 * below[i + one] + k8 * below[i + two]
        out[i] = _atan(v)
        slope[i] = _ONE / (_ONE + v * v)


@njit(**_FLAGS)
def _times_row(x, y, L, out):
    for i in range(x.size):
        out[np.uintp(i) + np.uintp(L)] = x[i] * y[i]


@njit(**_SUMS)
def _correlate_row(g, above, here, below, L, sums):
    """Add one row's part to the gradients of the nine weights and of the bias."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = s8 = s9 = np.float32(0)
    one, two = np.uintp(L), np.uintp(2 * L)
    for number in range(g.size - 2 * L):
        i = np.uintp(number)
        x = g[i + one]
        s0 += x * above[i]
        s1 += x * above[i + one]
        s2 += x * above[i + two]
        s3 += x * here[i]
        s4 += x * here[i + one]
        s5 += x * here[i + two]
        s6 += x * below[i]
        s7 += x * below[i + one]
        s8 += x * below[i + two]
        s9 += x
    for j, s in enumerate((s0, s1, s2, s3, s4, s5, s6, s7, s8, s9)):
        sums[j] += s


@njit(**_FLAGS)
def _convolve_back_row(above, here, below, k, L, out):
    k0, k1, k2, k3, k4, k5, k6, k7, k8 = k[0], k[1], k[2], k[3], k[4], k[5], k[6], k[7], k[8]
    one, two = np.uintp(L), np.uintp(2 * L)
    for number in range(out.size):
        i = np.uintp(number)
        v = out[i] + k8 * above[i] + k7 * above[i + one] + k6 * above[i + two]
        v += k5 * here[i] + k4 * here[i + one] + k3 * here[i + two]
        out[i] = v + k2 * below[i] + k1 * below[i + one] + k0 * below[i + two]


@njit(**_FLAGS)
def _finish_row(total, a):
    for i in range(a.size):
        a[i] = total[i] / (_ONE + a[i] * a[i])


@njit(**_KERNEL)
def _forward(a, k, bias, L, y, out, slope):
    """Set y to arctan(a) inside its margin, out to arctan(k * y + bias), and slope to the derivative of the latter."""
    channels, rows, _ = a.shape
    for c in range(channels):
        for h in range(rows):
            _atan_row(a[c, h], L, y[c, h + 1])
        for o in range(MULTIPLIER * c, MULTIPLIER * (c + 1)):
            for h in range(rows):
                _convolve_row(y[c, h], y[c, h + 1], y[c, h + 2], k[o], bias[o], L, out[o, h], slope[o, h])


@njit(**_KERNEL)
def _backward(a, k, L, y, slope, g, margined, total, sums):
    """Replace a by its gradient, and add to sums the gradients of k and, in the last column, of the bias."""
    channels, rows, _ = a.shape
    for c in range(channels):
        total[:] = 0
        for o in range(MULTIPLIER * c, MULTIPLIER * (c + 1)):
            for h in range(rows):
                _times_row(g[o, h], slope[o, h], L, margined[h + 1])
            for h in range(rows):
                _correlate_row(margined[h + 1], y[c, h], y[c, h + 1], y[c, h + 2], L, sums[o])
                _convolve_back_row(margined[h], margined[h + 1], margined[h + 2], k[o], L, total[h])
        for h in range(rows):
            _finish_row(total[h], a[c, h])


class Block(Function):
    """``x + w3 atan(w2 * atan(w1 x + b1) + b2) + b3`` for x of (channel, row, column, image), in single precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        w1, b1, w2, b2, w3, b3 = weights
        _, rows, columns, L = x.shape
        flat = x.view(len(x), -1)
        a = torch.addmm(b1[:, None], w1, flat).view(len(w1), rows, -1)
        y = x.new_zeros(len(w1), rows + 2, (columns + 2) * L)
        out, slope = x.new_empty(2, len(w2), rows, columns * L)
        k = w2.view(-1, 9)
        _forward(a.numpy(), k.numpy(), b2.numpy(), L, y.numpy(), out.numpy(), slope.numpy())
        ctx.save_for_backward(x, w1, w2, w3, a, y, out, slope)
        return torch.add(flat, b3[:, None]).addmm_(w3, out.view(len(w2), -1)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, w1, w2, w3, kept, y, out, slope = ctx.saved_tensors
        channels, rows, columns, L = x.shape
        outputs = len(w2)
        flat = g.contiguous().view(channels, -1)
        a = kept.clone()  # its gradient overwrites it, and backward may be called again
        g_out = (w3.t() @ flat).view(outputs, rows, -1)
        sums = np.zeros((outputs, 10))
        margined = x.new_zeros(rows + 2, (columns + 2) * L)
        total = x.new_empty(rows, columns * L)
        k = w2.view(-1, 9)
        _backward(
            a.numpy(), k.numpy(), L, y.numpy(), slope.numpy(), g_out.numpy(), margined.numpy(), total.numpy(), sums
        )
        g_a, g_w2 = a.view(len(w1), -1), w2.new_tensor(sums)
        return (
            torch.addmm(flat, w1.t(), g_a).view(x.shape),
            g_a @ x.view(channels, -1).t(),
            g_a.sum(1),
            g_w2[:, :9].contiguous().view(w2.shape),
            g_w2[:, 9].clone(),
            flat @ out.view(outputs, -1).t(),
            flat.sum(1),
        )
