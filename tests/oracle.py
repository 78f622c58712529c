"""The oracle: LODO written as plainly as the paper, with autograd for everything.

Nothing here comes from `lodo`. A network is handed over as numbers (blocks and permutations), the
hypergradient is whatever torch's autograd finds by differentiating the loss through the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


class AutogradLODO:
    """Algorithm 1 for one vector x."""

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
    ) -> None:
        self.x, self.G = x.detach().clone(), G
        self.theta = theta.detach().clone().requires_grad_()
        self.lr, self.meta_lr, self.beta = lr, meta_lr, beta
        self.meta, self.betas, self.eps, self.weight_decay = meta, betas, eps, weight_decay
        self.m = torch.zeros_like(self.x)
        self.M, self.V, self.t = torch.zeros_like(theta), torch.zeros_like(theta), 0
        self.x.requires_grad_()  # later x depend on theta through the last step

    def step(self, f: Callable[[Tensor], Tensor], moves: Tensor | None = None) -> float:
        """One step on the loss f; ``moves`` marks the coordinates that have a gradient."""
        moves = torch.ones_like(self.x) if moves is None else moves
        loss = f(torch.where(moves.bool(), self.x, self.x.detach()))
        if self.x.is_leaf:  # no step yet, or one of length zero
            (g,) = torch.autograd.grad(loss, [self.x])
        else:
            g, h = torch.autograd.grad(loss, [self.x, self.theta])
            self._learn(h)
        self.m = self.beta * self.m + (1 - self.beta) * g
        x = self.x.detach()
        if self.lr == 0:
            self.x = x.requires_grad_()
        else:
            decayed = x * (1 - self.lr * self.weight_decay * moves)
            self.x = decayed - self.lr * moves * self.G(self.theta, self.m)
        return float(loss.detach())

    def _learn(self, h: Tensor) -> None:
        theta = self.theta.detach()
        self.t += 1
        if self.meta == "sgd":
            theta = theta - self.meta_lr * h
        else:
            b1, b2 = self.betas
            self.M = b1 * self.M + (1 - b1) * h
            self.V = b2 * self.V + (1 - b2) * h**2
            M, V = self.M / (1 - b1**self.t), self.V / (1 - b2**self.t)
            theta = theta - self.meta_lr * M / (V.sqrt() + self.eps)
        self.theta = theta.requires_grad_()
