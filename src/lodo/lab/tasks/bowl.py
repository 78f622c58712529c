"""The noisy quadratic bowl (the paper's Section 5.1 and its appendix)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lodo import LODO
from lodo._checks import check_choice, check_int, check_real
from lodo.lab.sigma import estimated_sigma, exact_sigma
from lodo.lab.tasks.base import Task

DTYPES = {"float32": torch.float32, "float64": torch.float64}
_EXACT_UP_TO = 1000  # dimensions: an exact sigma takes n products with G


def curvatures(n: int = 100, condition: float = 1000.0) -> Tensor:
    """The eigenvalues of the bowl: a geometric progression from ``1 / condition`` to 1."""
    return condition ** torch.linspace(-1, 0, n, dtype=torch.float64)


def newton_loss(*, n: int = 100, condition: float = 1000.0, v: float = 1.0, **_: object) -> float:
    """The lowest possible mean loss on such a bowl: that of Newton's method, which only the noise of one step raises.

    >>> round(newton_loss(), 4)
    7.4118
    """
    return 0.5 * v * float(curvatures(n, condition).sum())


class Bowl(Task):
    """A quadratic whose minimum moves by Gaussian noise at every draw.

    The Hessian is ``H = U D U^T`` with a random rotation U and curvatures D in geometric progression from
    ``1 / condition`` to 1. Both x and the minimum start at the origin.

    Args:
        seed: draws U and the noise.
        n: the dimension.
        condition: the condition number, the largest curvature over the smallest.
        v: the variance of the noise.
        dtype: ``"float32"`` or ``"float64"``.
        renew_at: the number of draws after which a new bowl begins, at the origin and with another U; None for never.
        rotation: the angle, in radians, by which a direction turns at every draw (root mean square over directions):
            U is multiplied by a fixed random rotation.

    Example:
        >>> bowl = Bowl(seed=0)
        >>> bowl.draw()
        >>> bowl.evaluate() > 0
        True
    """

    def __init__(
        self,
        seed: int,
        *,
        n: int = 100,
        condition: float = 1000.0,
        v: float = 1.0,
        dtype: str = "float32",
        renew_at: int | None = None,
        rotation: float = 0.0,
    ) -> None:
        super().__init__(seed)
        check_real("rotation", rotation, low=0.0)
        check_int("n", n, low=2 if rotation else 1)
        check_real("condition", condition, low=1.0)
        check_real("v", v, low=0.0)
        check_choice("dtype", dtype, tuple(DTYPES))
        if renew_at is not None:
            check_int("renew_at", renew_at, low=1)
        self.D = curvatures(n, condition)
        self.seed, self.v, self.renew_at = seed, v, renew_at
        self.steps = torch.zeros((), dtype=torch.int64)  # draws so far; counted only if the bowl is renewed
        self.x = Parameter(torch.zeros(n, dtype=DTYPES[dtype]))
        self.params = [self.x]
        self.centre = torch.zeros_like(self.x.data)
        self.U = self._random_rotation()
        self.H = self._hessian()
        self.R = self._rotation_by(rotation) if rotation else None

    def _random_rotation(self) -> Tensor:
        n = len(self.D)
        U: Tensor = torch.linalg.qr(torch.randn(n, n, generator=self.rng, dtype=torch.float64))[0]
        return U

    def _rotation_by(self, angle: float) -> Tensor:
        """A random rotation whose angles have the root mean square ``angle``."""
        n = len(self.D)
        K = torch.randn(n, n, generator=self.rng, dtype=torch.float64)
        K = K - K.T
        R: Tensor = torch.linalg.matrix_exp(K * (angle * n**0.5 / torch.linalg.matrix_norm(K)))
        return R

    def _hessian(self) -> Tensor:
        return ((self.U * self.D) @ self.U.T).to(self.x.dtype)

    def draw(self) -> None:
        """Move the minimum, after renewing or rotating the bowl if the options say so."""
        if self.renew_at is not None:
            if self.steps == self.renew_at:
                self._renew()
            self.steps += 1
        if self.R is not None:
            self.U = self.R @ self.U
            self.H = self._hessian()
        self.centre.add_(torch.randn(self.centre.shape, generator=self.rng, dtype=self.x.dtype), alpha=self.v**0.5)

    def _renew(self) -> None:
        self.U = self._random_rotation()
        self.H = self._hessian()
        self.x.data.zero_()
        self.centre.zero_()

    def loss(self) -> Tensor:
        away = self.x - self.centre
        return 0.5 * away @ (self.H @ away)

    def evaluate(self, create_graph: bool = False) -> float:
        """As in `Task`, without autograd: the gradient of a quadratic is H (x - centre)."""
        if create_graph:
            return super().evaluate(create_graph)
        away = self.x.detach() - self.centre
        self.x.grad = self.H @ away
        return 0.5 * float(away @ self.x.grad)

    def hessian(self) -> Tensor:
        return self.H

    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        """For LODO, sigma by the paper's estimator and, for small n, also its exact value."""
        if not isinstance(optimizer, LODO):
            return {}
        probes = torch.Generator().manual_seed((self.seed * 1_000_003 + step) % 2**63)
        sigma = {"sigma": estimated_sigma(optimizer, self.H, probes)}
        if len(self.D) <= _EXACT_UP_TO:
            sigma["sigma_exact"] = exact_sigma(optimizer, self.H)
        return sigma

    def buffers(self) -> dict[str, Tensor]:
        return {"centre": self.centre, "H": self.H, "U": self.U, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As in `Task`, but U also gets back its memory layout, on which the rounding of products with it depends."""
        super().load_state_dict(state)
        self.U = state["buffers"]["U"].clone()
