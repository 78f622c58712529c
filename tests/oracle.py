"""The oracle: LODO written as plainly as the paper, with autograd for everything.

Nothing here comes from `lodo`. A network is handed over as numbers (blocks and permutations), the
hypergradient is whatever torch's autograd finds by differentiating the loss through the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Matrix = Callable[[Tensor, Tensor], Tensor]  # (theta, v) -> G(theta) v


def mixing(perms: Sequence[Tensor]) -> Matrix:
    """Eq. 2 with theta of shape (N, hidden / k, k, k) and (P x)[j] = x[p[j]]."""
    inverses = [torch.argsort(p) for p in perms]

    def G(theta: Tensor, v: Tensor) -> Tensor:
        k = theta.shape[-1]
        x = torch.nn.functional.pad(v, (0, len(perms[0]) - len(v)))
        for B, p in zip(theta, perms, strict=True):
            x = torch.matmul(B, x[p].view(-1, k, 1)).view(-1)
        for B, q in zip(theta.flip(0), inverses[::-1], strict=True):
            x = torch.matmul(B.mT, x.view(-1, k, 1)).view(-1)[q]
        return x[: len(v)]

    return G


def residual(perms: Sequence[Tensor]) -> Matrix:
    """Layers x + w_i * P_i x, a diagonal in the middle (theta's last row), then the transposes."""
    inverses = [torch.argsort(p) for p in perms]

    def G(theta: Tensor, v: Tensor) -> Tensor:
        x = torch.nn.functional.pad(v, (0, len(perms[0]) - len(v)))
        for w, p in zip(theta[:-1], perms, strict=True):
            x = x + w * x[p]
        x = theta[-1] * x
        for w, q in zip(theta[:-1].flip(0), inverses[::-1], strict=True):
            x = x + (w * x)[q]
        return x[: len(v)]

    return G


def diagonal(theta: Tensor, v: Tensor) -> Tensor:
    return theta * v


def scalar(theta: Tensor, v: Tensor) -> Tensor:
    return theta * v


def dense(theta: Tensor, v: Tensor) -> Tensor:
    return theta @ v


class Adam:
    """Adam for one tensor or number: how far to go down a slope."""

    def __init__(self, rate: float, betas: tuple[float, float], eps: float) -> None:
        self.rate, self.betas, self.eps = rate, betas, eps
        self.M, self.V, self.t = torch.zeros(()), torch.zeros(()), 0

    def __call__(self, h: Tensor) -> Tensor:
        (b1, b2), self.t = self.betas, self.t + 1
        self.M = b1 * self.M + (1 - b1) * h
        self.V = b2 * self.V + (1 - b2) * h**2
        M, V = self.M / (1 - b1**self.t), self.V / (1 - b2**self.t)
        return -self.rate * M / (V.sqrt() + self.eps)


def scramble(x: Any) -> Any:
    """A hash of 32 bits ("lowbias32"), of a number or of an array."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 16


class Rounding:
    """Moments in bfloat16, whose 16 lost bits are carried over at random.

    ``places`` says where each weight of a layer is stored there: the random bits depend on it.
    """

    def __init__(self, seed: int, places: Tensor) -> None:
        self.seed, self.places = seed, places.numpy().astype(np.uint64)

    def __call__(self, M: Tensor, V: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """The moments of all layers, after update ``t``."""
        key = scramble((self.seed + t) % 2**32)
        layers = [scramble((self.places + scramble((key + i) % 2**32)) % 2**32) for i in range(len(M))]
        bits = np.stack(layers).reshape(M.shape)
        return self._cut(M, bits % 2**16), self._cut(V, bits // 2**16)

    @staticmethod
    def _cut(x: Tensor, noise: np.ndarray) -> Tensor:
        bits = x.numpy().astype(np.float32).view(np.uint32) + noise
        cut = (bits // 2**16 * 2**16).astype(np.uint32)
        return torch.from_numpy(cut.view(np.float32)).to(x.dtype)


class Guard:
    """Shortens gradients that are over 5 times as long as usual; halves the steps if they also point back.

    Steps grow again by 2 % whenever a gradient neither was shortened nor points back.
    """

    def __init__(self) -> None:
        self.usual, self.trust = 0.0, 1.0

    def clip(self, g: Tensor, step: Tensor | None) -> float:
        """The factor for a gradient to which ``step`` led (None if there was none)."""
        norm = float(g.norm())
        clip = 5 * self.usual / norm if self.usual > 0 and norm > 5 * self.usual else 1.0
        uphill = step is not None and float(g @ step) > 0
        if clip < 1 and uphill:
            self.trust = max(self.trust / 2, 1e-6)
        elif clip == 1 and not uphill:
            self.trust = min(self.trust * 1.02, 1.0)
        if norm == 0:
            return clip
        norm *= clip
        self.usual = (0.99 * self.usual**2 + 0.01 * norm**2) ** 0.5 if self.usual > 0 else norm
        return clip


class AutogradLODO:
    """Algorithm 1 for one vector x, and what goes beyond it.

    ``layered`` says whether theta's first dimension counts layers; if not, it is one layer.
    """

    def __init__(
        self,
        x: Tensor,
        G: Matrix,
        theta: Tensor,
        *,
        lr: float,
        meta_lr: float,
        beta: float,
        meta: str = "adam",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-7,
        weight_decay: float = 0.0,
        layered: bool = False,
        gated: bool = False,
        window: int | None = None,
        rounding: Rounding | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.x, self.G = x.detach().clone(), G
        self.theta = theta.detach().clone().requires_grad_()
        self.lr, self.meta_lr, self.beta = lr, meta_lr, beta
        self.meta, self.b, self.window, self.weight_decay = meta, betas[0], window, weight_decay
        self.layered, self.gated, self.rounding, self.guard = layered, gated, rounding, guard
        self.m = torch.zeros_like(self.x)
        self.w = torch.tensor(1.0, dtype=torch.float64).requires_grad_()  # the paper's: fed is m alone
        self.adam, self.adam_of_w = Adam(meta_lr, betas, eps), Adam(1e-3, (0.9, 0.999), 1e-7)
        self.z, self.t = theta.detach().clone(), 0
        self.x.requires_grad_()  # later x depend on theta and w through the last step
        self.last_step: Tensor | None = None

    def step(self, f: Callable[[Tensor], Tensor], moves: Tensor | None = None) -> float:
        """One step on the loss f; ``moves`` marks the coordinates that have a gradient."""
        moves = torch.ones_like(self.x) if moves is None else moves
        loss = f(torch.where(moves.bool(), self.x, self.x.detach()))
        lr = self.lr
        if self.last_step is None:  # no step yet, or one of length zero
            (g,) = torch.autograd.grad(loss, [self.x])
        else:
            g, h, slope = torch.autograd.grad(loss, [self.x, self.theta, self.w])
        if self.guard is not None:
            clip = self.guard.clip(g, self.last_step)
            lr *= self.guard.trust
            g = clip * g
        else:
            clip = 1.0
        if self.last_step is not None:
            self._learn(clip * h)
            if self.gated:
                self.w = (self.w.detach() + self.adam_of_w(clip * slope)).requires_grad_()
        self.m = self.beta * self.m + (1 - self.beta) * g
        u = (1 - self.w) * g + self.w * self.m
        x = self.x.detach()
        if lr == 0:
            self.x, self.last_step = x.requires_grad_(), None
        else:
            step = -lr * moves * self.G(self.theta, u)
            self.x, self.last_step = x * (1 - lr * self.weight_decay * moves) + step, step.detach()
        return float(loss.detach())

    def _learn(self, h: Tensor) -> None:
        self.t += 1
        theta = self.theta.detach()
        if self.meta == "sgd":
            theta = theta - self.meta_lr * h
        elif self.meta == "adam":
            theta = theta + self.adam(h)
            if self.rounding is not None:
                layers = len(theta) if self.layered else 1
                M, V = (x.reshape(layers, -1) for x in (self.adam.M, self.adam.V))
                self.adam.M, self.adam.V = (x.view_as(theta) for x in self.rounding(M, V, self.t))
        else:
            theta = self._schedule_free(theta, h)
        self.theta = theta.requires_grad_()

    def _schedule_free(self, y: Tensor, h: Tensor) -> Tensor:
        t, b, z = self.t, self.b, self.z
        c = 6 * t / ((t + 1) * (2 * t + 1))
        if self.window is not None:
            c = max(c, 1 / self.window)
        rms = (
            h.square().mean(tuple(range(1, h.dim())), keepdim=True).sqrt() if self.layered else h.square().mean().sqrt()
        )
        self.z = z - self.meta_lr * h / (rms + 1e-8)
        return (1 - c) * (y - (1 - b) * z) + (1 - b * (1 - c)) * self.z
