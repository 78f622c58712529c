"""Methods with an n x n matrix: Newton, Levenberg-Marquardt, BFGS."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lodo._checks import check_real
from lodo.lab.optimizers.base import VectorOptimizer


class HessianOptimizer(VectorOptimizer):
    """``x -= M g``, with a matrix M that is computed from the task's Hessian.

    M is computed in double precision, and again only when the Hessian has changed.
    """

    def __init__(self, params: ParamsT, hessian: Callable[[], Tensor], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.hessian = hessian
        self._H = self._M = torch.empty(0)
        self._version = -1

    @abstractmethod
    def matrix(self, H: Tensor) -> Tensor:
        """M for H, in double precision."""

    def displacement(self, g: Tensor) -> Tensor:
        H = self.hessian()
        if H is not self._H or H._version != self._version:
            self._H, self._version = H, H._version
            self._M = self.matrix(H.double()).to(g.dtype)
        return -(self._M @ g)


class Newton(HessianOptimizer):
    """``x -= lr H^-1 g``.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> x.grad = torch.tensor([3.0, 2.0])
        >>> Newton([x], lambda: torch.diag(torch.tensor([1.0, 0.5]))).step()
        >>> x.tolist()
        [0.0, 0.0]
    """

    def __init__(self, params: ParamsT, hessian: Callable[[], Tensor], lr: float = 1.0) -> None:
        check_real("lr", lr, low=0.0)
        super().__init__(params, hessian, {"lr": lr})

    def matrix(self, H: Tensor) -> Tensor:
        inverse: Tensor = torch.linalg.inv(H)
        return inverse

    def displacement(self, g: Tensor) -> Tensor:
        return super().displacement(g).mul_(self.param_groups[0]["lr"])


class LevenbergMarquardt(HessianOptimizer):
    """``x -= (H^2 + damping diag(H^2))^-1 H g``."""

    def __init__(self, params: ParamsT, hessian: Callable[[], Tensor], damping: float = 1.0) -> None:
        check_real("damping", damping, low=0.0)
        super().__init__(params, hessian, {"damping": damping})

    def matrix(self, H: Tensor) -> Tensor:
        A = H @ H
        A.diagonal().mul_(1 + self.param_groups[0]["damping"])
        M: Tensor = torch.linalg.solve(A, H)
        return M


class BFGS(VectorOptimizer):
    """The textbook update of an inverse Hessian B, from successive gradients on different batches.

    The difference y of two gradients contains the noise of both batches as if it were curvature, which is why BFGS
    diverges on the noisy bowl. ``B`` starts as the identity.
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
