"""What trains theta, on the hypergradient h: Adam, SGD, and schedule-free without a second moment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lodo import rounding

SGD_, ADAM, SCHEDULE_FREE = range(3)  # what kernels call them


class Layers(NamedTuple):
    """How a family's weights are arranged: theta's first dimension counts layers if there are several."""

    number: int
    weights: int  # of one layer, without padding


class MetaOptimizer(ABC):
    """An update rule for theta. ``moments`` names the theta-sized arrays it keeps."""

    kind: ClassVar[int]
    moments: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def coefficients(self, t: int, lr: float) -> tuple[float, ...]:
        """The seven numbers of update ``t`` (counted from 1), computed once in double precision."""

    @abstractmethod
    def update(
        self, theta: Tensor, h: Tensor, moments: Sequence[Tensor], t: int, lr: float, layers: Layers, seed: int = 0
    ) -> None:
        """Change theta and the moments in place; ``seed`` is for the rounding of moments in bfloat16."""

    def start(self, moment: Tensor, theta: Tensor) -> None:
        """Fill a moment, which holds zeros, before the first update."""
        return


@dataclass(frozen=True)
class SGD(MetaOptimizer):
    """``theta -= lr h``."""

    kind: ClassVar[int] = SGD_

    def coefficients(self, t: int, lr: float) -> tuple[float, ...]:
        return lr, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0

    def update(
        self, theta: Tensor, h: Tensor, moments: Sequence[Tensor], t: int, lr: float, layers: Layers, seed: int = 0
    ) -> None:
        theta.add_(h, alpha=-lr)


@dataclass(frozen=True)
class Adam(MetaOptimizer):
    """Adam with bias correction; ``eps`` is added to the corrected root, as in torch.

    Moments in bfloat16 are rounded stochastically when they are stored; the step is taken with the exact ones.

    >>> theta, h = torch.zeros(1), torch.tensor([5.0])
    >>> moments = [torch.zeros(1), torch.zeros(1)]
    >>> Adam().update(theta, h, moments, t=1, lr=0.1, layers=Layers(1, 1))  # the first step has length lr
    >>> theta
    tensor([-0.1000])
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-7

    kind: ClassVar[int] = ADAM
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def coefficients(self, t: int, lr: float) -> tuple[float, ...]:
        """beta1, 1 - beta1, beta2, 1 - beta2, the rate, 1 / sqrt of v's correction, eps."""
        b1, b2 = self.betas
        return b1, 1 - b1, b2, 1 - b2, lr / (1 - b1**t), (1 - b2**t) ** -0.5, self.eps

    def update(
        self, theta: Tensor, h: Tensor, moments: Sequence[Tensor], t: int, lr: float, layers: Layers, seed: int = 0
    ) -> None:
        b1, c1, b2, c2, rate, root, eps = self.coefficients(t, lr)
        m, v = (moment.to(theta.dtype) for moment in moments)  # themselves if they have that dtype
        m.mul_(b1).add_(h, alpha=c1)
        v.mul_(b2).addcmul_(h, h, value=c2)
        if moments[0].dtype == torch.bfloat16:
            self._store(moments, (m, v), rounding.update_key(seed, t), layers)
        theta.addcdiv_(m, v.sqrt().mul_(root).add_(eps), value=-rate)

    @staticmethod
    def _store(moments: Sequence[Tensor], exact: Sequence[Tensor], key: int, layers: Layers) -> None:
        for i in range(layers.number):
            (m, v), (m_, v_) = ([x.view(layers.number, -1)[i] for x in pair] for pair in (moments, exact))
            bits = rounding.random_bits(key, i, m.numel(), m.device)
            rounding.round_to(m, m_, bits & 0xFFFF)
            rounding.round_to(v, v_, bits >> 16)


@dataclass(frozen=True)
class ScheduleFree(MetaOptimizer):
    """Schedule-free averaging, with each layer's root mean square in place of a second moment.

    ``z`` takes steps of rms lr; ``y``, which is theta, lies between z and the average of all z (the later ones weigh
    more: as t^2). ``window`` bounds how far back the average reaches, in updates.

    >>> y, z, h = torch.zeros(2), torch.zeros(2), torch.tensor([3.0, 4.0])
    >>> ScheduleFree().update(y, h, [z], t=1, lr=0.1, layers=Layers(1, 2))
    >>> z  # h over its rms, times lr
    tensor([-0.0849, -0.1131])
    """

    b: float = 0.93
    window: int | None = None
    eps: float = 1e-8

    kind: ClassVar[int] = SCHEDULE_FREE
    moments: ClassVar[tuple[str, ...]] = ("z",)

    def start(self, moment: Tensor, theta: Tensor) -> None:
        moment.copy_(theta)

    def coefficients(self, t: int, lr: float) -> tuple[float, ...]:
        """The rate; what y keeps, how far z is first taken out of it, how much of the new z comes in; eps."""
        c = max(6 * t / ((t + 1) * (2 * t + 1)), 1 / self.window if self.window else 0.0)
        return lr, 1 - c, 1 - self.b, 1 - self.b * (1 - c), self.eps, 0.0, 0.0

    def update(
        self, theta: Tensor, h: Tensor, moments: Sequence[Tensor], t: int, lr: float, layers: Layers, seed: int = 0
    ) -> None:
        rate, keep, pull, push, eps, _, _ = self.coefficients(t, lr)
        for y, z, h_ in zip(*(x.view(layers.number, -1) for x in (theta, moments[0], h)), strict=True):
            rms = float(torch.linalg.vector_norm(h_, dtype=torch.float64)) / layers.weights**0.5
            y.sub_(z, alpha=pull).mul_(keep)
            z.sub_(h_, alpha=rate / (rms + eps))
            y.add_(z, alpha=push)


META_OPTIMIZERS = ("adam", "sgd", "schedule-free")


def default_betas(name: str) -> tuple[float, float]:
    """The decays of ``name`` where the caller gives none; schedule-free uses the first alone, as its b."""
    return (ScheduleFree.b, 0.999) if name == "schedule-free" else Adam.betas


@cache
def make(
    name: str, betas: tuple[float, float] | None = None, eps: float = Adam.eps, window: int | None = None
) -> MetaOptimizer:
    """The meta-optimizer called ``name``.

    >>> make("sgd")
    SGD()
    """
    betas = betas or default_betas(name)
    if name == "schedule-free":
        return ScheduleFree(betas[0], window)
    return SGD() if name == "sgd" else Adam(betas, eps)
