"""What trains theta: Adam and SGD, on the hypergradient h."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from torch import Tensor


class MetaOptimizer(ABC):
    """An update rule for theta. ``moments`` names the theta-sized arrays it keeps."""

    moments: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def coefficients(self, t: int, lr: float) -> tuple[float, ...]:
        """The numbers of update ``t`` (counted from 1), computed once in double precision."""

    @abstractmethod
    def update(self, theta: Tensor, h: Tensor, moments: Sequence[Tensor], t: int, lr: float) -> None:
        """Change theta and the moments in place."""


@dataclass(frozen=True)
class SGD(MetaOptimizer):
    """``theta -= lr h``."""

    def coefficients(self, t: int, lr: float) -> tuple[float, ...]:
        return (lr,)

    def update(self, theta: Tensor, h: Tensor, moments: Sequence[Tensor], t: int, lr: float) -> None:
        theta.add_(h, alpha=-lr)


@dataclass(frozen=True)
class Adam(MetaOptimizer):
    """Adam with bias correction; ``eps`` is added to the corrected root, as in torch.

    >>> import torch
    >>> theta, h = torch.zeros(1), torch.tensor([5.0])
    >>> moments = [torch.zeros(1), torch.zeros(1)]
    >>> Adam().update(theta, h, moments, t=1, lr=0.1)  # the first step has length lr
    >>> theta
    tensor([-0.1000])
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-7

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def coefficients(self, t: int, lr: float) -> tuple[float, ...]:
        """beta1, 1 - beta1, beta2, 1 - beta2, the rate, 1 / sqrt of v's correction, eps."""
        b1, b2 = self.betas
        return b1, 1 - b1, b2, 1 - b2, lr / (1 - b1**t), (1 - b2**t) ** -0.5, self.eps

    def update(self, theta: Tensor, h: Tensor, moments: Sequence[Tensor], t: int, lr: float) -> None:
        m, v = moments
        b1, c1, b2, c2, rate, root, eps = self.coefficients(t, lr)
        m.mul_(b1).add_(h, alpha=c1)
        v.mul_(b2).addcmul_(h, h, value=c2)
        theta.addcdiv_(m, v.sqrt().mul_(root).add_(eps), value=-rate)


META_OPTIMIZERS = ("adam", "sgd")


@cache
def make(name: str, betas: tuple[float, float] = Adam.betas, eps: float = Adam.eps) -> MetaOptimizer:
    """The meta-optimizer called ``name``.

    >>> make("sgd")
    SGD()
    """
    return SGD() if name == "sgd" else Adam(betas, eps)
