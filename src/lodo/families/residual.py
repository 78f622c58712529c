"""LODO-Residuals: layers ``x + w_i * P_i x`` and a learned diagonal in the middle.

``G(theta) = (I 0) Gt^T D Gt (I 0)^T`` with ``Gt = (I + diag(w_N) P_N) ... (I + diag(w_1) P_1)``.
Rows 0 to N-1 of theta are the ``w_i``, row N is D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lodo._checks import check_int, check_real
from lodo.families.base import Preconditioner
from lodo.layout import Layout
from lodo.meta import Layers


@dataclass(frozen=True, repr=False)
class Residual(Preconditioner):
    """Weighted permutations with residual connections, 64 layers of width 2n.

    >>> Residual().shape(Layout.flat(100))
    (65, 200)
    """

    depth: int = 64
    width: float = 2.0

    def __post_init__(self) -> None:
        check_int("depth", self.depth, low=1)
        check_real("width", self.width, low=1.0)
        object.__setattr__(self, "depth", int(self.depth))  # one spelling of each network
        object.__setattr__(self, "width", float(self.width))

    def hidden(self, n: int) -> int:
        """The width of the hidden layers."""
        return int(self.width * n)

    def shape(self, layout: Layout) -> tuple[int, ...]:
        return (self.depth + 1, self.hidden(layout.n))

    def fixed(self, layout: Layout, rng: torch.Generator) -> Tensor:
        hidden = self.hidden(layout.n)
        P = torch.empty(self.depth, hidden, dtype=torch.int32)
        for p in P:
            torch.randperm(hidden, generator=rng, out=p)
        return P

    def init(self, theta: Tensor, layout: Layout, rng: torch.Generator) -> None:
        """``w_i ~ N(0, 1/N)``, D = I."""
        for w in theta[:-1]:
            w.copy_(torch.randn(w.shape, generator=rng, dtype=torch.float64) / self.depth**0.5)
        theta[-1] = 1.0

    def apply(self, theta: Tensor, P: Tensor, v: Tensor) -> Tensor:
        c = theta[-1] * _up(theta, P, v)[-1]
        for w, p in zip(reversed(theta[:-1]), reversed(P), strict=True):
            c = _back(w, p, c)
        return c[: v.numel()]

    def hypergradient(self, theta: Tensor, P: Tensor, m: Tensor, g: Tensor) -> Tensor:
        a, b = _up(theta, P, m), _up(theta, P, g)
        c, d = theta[-1] * a[-1], theta[-1] * b[-1]
        h = torch.empty_like(theta)
        torch.mul(a[-1], b[-1], out=h[-1])
        for i in range(self.depth - 1, -1, -1):
            w, p = theta[i], P[i]
            torch.mul(d, a[i].index_select(0, p), out=h[i])
            h[i].addcmul_(c, b[i].index_select(0, p))
            c, d = _back(w, p, c), _back(w, p, d)
        return h

    def stretches(self, theta: Tensor) -> Tensor:
        sizes = theta.abs().amax(1)
        return torch.cat([1 + sizes[:-1], sizes[-1:]])

    def index_count(self, layout: Layout) -> int:
        return self.depth * self.hidden(layout.n)

    def layers(self, layout: Layout) -> Layers:
        return Layers(self.depth + 1, self.hidden(layout.n))

    def work_count(self, layout: Layout) -> int:
        return (2 * self.depth + 10) * self.hidden(layout.n)  # a and b


def _up(theta: Tensor, P: Tensor, v: Tensor) -> list[Tensor]:
    """The activations a_0 to a_N of v."""
    x = theta.new_zeros(theta.shape[1])
    x[: v.numel()] = v
    xs = [x]
    for w, p in zip(theta[:-1], P, strict=True):
        xs.append(torch.addcmul(xs[-1], w, xs[-1].index_select(0, p)))
    return xs


def _back(w: Tensor, p: Tensor, y: Tensor) -> Tensor:
    """``y + P^T (w * y)``."""
    return y.index_add(0, p, w * y)
