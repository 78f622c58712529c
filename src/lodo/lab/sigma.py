"""How far the learned G is from the inverse Hessian: ``sigma = sqrt(|I - G H|_F^2 / n)``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lodo import LODO


@torch.no_grad()
def exact_sigma(optimizer: LODO, H: Tensor) -> float:
    """Sigma from the whole matrix G: 1 for G = 0, and 0 for G = H^-1.

    >>> x = torch.nn.Parameter(torch.zeros(5))
    >>> round(exact_sigma(LODO([x], lr=0.5), torch.eye(5)), 6)
    0.5
    """
    G = optimizer.preconditioner_matrix()
    residual: Tensor = torch.eye(len(H), dtype=torch.float64) - G.double() @ H.double()
    return float(residual.norm()) / math.sqrt(len(H))


@torch.no_grad()
def estimated_sigma(optimizer: LODO, H: Tensor, rng: torch.Generator, samples: int = 100) -> float:
    """The paper's estimate: the mean of ``|(I - G H) u|^2`` over random unit vectors u.

    >>> x = torch.nn.Parameter(torch.zeros(5))
    >>> round(estimated_sigma(LODO([x], lr=0.5), torch.eye(5), torch.Generator()), 6)
    0.5
    """
    U = torch.randn(samples, len(H), generator=rng, dtype=H.dtype)
    U /= U.norm(dim=1, keepdim=True)
    squares = [(u - optimizer.precondition(H @ u)).double().square().sum() for u in U]
    return float(torch.stack(squares).mean().sqrt())
