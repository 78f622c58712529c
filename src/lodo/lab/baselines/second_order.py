"""Methods with an n x n matrix: Newton, Levenberg-Marquardt, BFGS."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lodo._checks import check_real
from lodo.lab.baselines.vector import VectorOptimizer


class Newton(VectorOptimizer):
    """``x -= lr H^-1 g``, with the Hessian given by the task.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> x.grad = torch.tensor([3.0, 2.0])
        >>> Newton([x], lambda: torch.diag(torch.tensor([1.0, 0.5]))).step()
        >>> x.tolist()
        [0.0, 0.0]
    """

    def __init__(self, params: ParamsT, hessian: Callable[[], Tensor], lr: float = 1.0) -> None:
        check_real("lr", lr, low=0.0)
        super().__init__(params, {"lr": lr})
        self.hessian = hessian

    def displacement(self, g: Tensor) -> Tensor:
        s: Tensor = torch.linalg.solve(self.hessian(), g).mul_(-self.param_groups[0]["lr"])
        return s


class LevenbergMarquardt(VectorOptimizer):
    """``x -= (H^2 + damping diag(H^2))^-1 H g``, solved in double precision because H is squared."""

    def __init__(self, params: ParamsT, hessian: Callable[[], Tensor], damping: float = 1.0) -> None:
        check_real("damping", damping, low=0.0)
        super().__init__(params, {"damping": damping})
        self.hessian = hessian

    def displacement(self, g: Tensor) -> Tensor:
        H = self.hessian().double()
        A = H @ H
        A.diagonal().mul_(1 + self.param_groups[0]["damping"])
        s: Tensor = torch.linalg.solve(A, H @ g.double())
        return -s.to(g.dtype)


class BFGS(VectorOptimizer):
    """The textbook update of an inverse Hessian B, from successive gradients on different batches.

    The noise between two batches enters y as if it were curvature, which is why it diverges on the
    noisy bowl. ``B`` starts as the identity.
    """

    def __init__(self, params: ParamsT, lr: float = 0.01) -> None:
        check_real("lr", lr, low=0.0)
        super().__init__(params, {"lr": lr})

    def displacement(self, g: Tensor) -> Tensor:
        memory = self.memory
        if not memory:
            memory["B"] = torch.eye(len(g), dtype=g.dtype, device=g.device)
        else:
            _update(memory["B"], memory["s"], g - memory["g"])
        memory["g"], memory["s"] = g, torch.mv(memory["B"], g).mul_(-self.param_groups[0]["lr"])
        s: Tensor = memory["s"]
        return s


def _update(B: Tensor, s: Tensor, y: Tensor) -> None:
    """``B = (I - s y^T / s.y) B (I - y s^T / s.y) + s s^T / s.y``, written out."""
    sy, By = s @ y, B @ y
    B.addr_(s, s, beta=1, alpha=float((sy + y @ By) / sy**2))
    B.sub_(torch.outer(By / sy, s)).sub_(torch.outer(s, By / sy))
