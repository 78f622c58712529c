"""What learns theta from the hypergradient h: Adam, SGD, and schedule-free averaging without a second moment.

`Learned` is Adam on a single number, for whatever is learned beside theta.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lodo import rounding
from lodo._checks import check_betas, check_int, check_real
from lodo.scalars import Flag, Scalar, add_product, add_quotient, add_scaled, exponential, largest, precise, where
from lodo.spelling import Spelled

SGD_, ADAM, SCHEDULE_FREE = range(3)  # what kernels call them

Coefficients = tuple[Scalar, Scalar, Scalar, Scalar, Scalar, Scalar, Scalar]


class Layers(NamedTuple):
    """How a family's weights are arranged: the first dimension of theta counts the layers if there are several."""

    number: int
    weights: int  # in each layer


class MetaOptimizer(Spelled):
    """An update rule for theta. ``moments`` names the theta-sized arrays that it keeps."""

    kind: ClassVar[int]
    moments: ClassVar[tuple[str, ...]] = ()
    identity: ClassVar[Coefficients]  # the coefficients with which an update changes nothing

    power: ClassVar[float] = 1.0  # of the hypergradient in the moments
    averages: ClassVar[bool] = False  # whether theta is an average with its moments
    measure_every: ClassVar[int] = 1  # steps after which a device measures G's stretch again (`lodo.safety`)

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The dtype of the moments, or None for theta's."""
        return None

    @abstractmethod
    def reach(self, log_h: Scalar, lr: float, layers: Layers, growth: float) -> Scalar:
        """A bound on how far one update changes the stretch of a layer (`lodo.safety`).

        Args:
            log_h: the logarithm of a bound on the hypergradient of each layer.
            lr: the rate.
            layers: how the weights are arranged.
            growth: how far a layer's stretch changes at most if all its entries change by 1.
        """

    def envelope(self, theta: Sequence[Scalar], moments: Sequence[Sequence[Scalar]]) -> Sequence[Scalar]:
        """Bounds on the stretch of each layer that later updates add their `reach` to, from those of theta now."""
        return theta

    @abstractmethod
    def coefficients(self, t: Scalar, lr: float) -> Coefficients:
        """The seven numbers of update ``t`` (counted from 1), computed once in double precision."""

    @abstractmethod
    def update(
        self,
        theta: Tensor,
        h: Tensor,
        moments: Sequence[Tensor],
        numbers: Coefficients,
        layers: Layers,
        random: rounding.Bits | None = None,
    ) -> None:
        """Change theta and the moments in place, given the coefficients; ``random`` rounds moments in bfloat16."""

    def start(self, moment: Tensor, theta: Tensor) -> None:
        """Fill a moment, which holds zeros, before the first update."""
        return

    def masked(self, learning: Flag, numbers: Coefficients) -> Coefficients:
        """The coefficients if ``learning`` holds; otherwise those with which nothing changes.

        >>> SGD().masked(torch.tensor(False), SGD().coefficients(1, 0.1))[0]
        tensor(0., dtype=torch.float64)
        """
        if learning is True:
            return numbers
        masked: Any = tuple(where(learning, yes, no) for yes, no in zip(numbers, self.identity, strict=True))
        return masked  # type: ignore[no-any-return]


@dataclass(frozen=True, repr=False)
class SGD(MetaOptimizer):
    """``theta -= lr h``.

    >>> SGD()
    sgd
    """

    kind: ClassVar[int] = SGD_
    identity: ClassVar[Coefficients] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    def reach(self, log_h: Scalar, lr: float, layers: Layers, growth: float) -> Scalar:
        return lr * exponential(log_h)

    def coefficients(self, t: Scalar, lr: float) -> Coefficients:
        return lr, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0

    def update(
        self,
        theta: Tensor,
        h: Tensor,
        moments: Sequence[Tensor],
        numbers: Coefficients,
        layers: Layers,
        random: rounding.Bits | None = None,
    ) -> None:
        add_scaled(theta, h, -numbers[0])


@dataclass(frozen=True, repr=False)
class Adam(MetaOptimizer):
    """Adam with bias correction; ``eps`` is added to the corrected root, as in torch.

    Args:
        betas: the decays of the two moments.
        eps: added to the root of the second moment.
        moment_dtype: ``"bfloat16"`` halves the moments. They are rounded stochastically when they are stored; the
            step is taken with the exact ones. None keeps them in theta's dtype.

    Example:
        >>> adam, theta, h = Adam(), torch.zeros(1), torch.tensor([5.0])
        >>> moments = [torch.zeros(1), torch.zeros(1)]
        >>> adam.update(theta, h, moments, adam.coefficients(1, lr=0.1), Layers(1, 1))  # the first step has length lr
        >>> theta
        tensor([-0.1000])
        >>> Adam(moment_dtype=torch.bfloat16)
        adam(moment_dtype='bfloat16')
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-7
    moment_dtype: str | torch.dtype | None = None

    kind: ClassVar[int] = ADAM
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    power: ClassVar[float] = 2.0
    measure_every: ClassVar[int] = 16  # its steps are short
    identity: ClassVar[Coefficients] = (1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        check_betas(self.betas)
        check_real("eps", self.eps, low=0.0, open_low=True)
        dtype = "bfloat16" if self.moment_dtype == torch.bfloat16 else self.moment_dtype
        if dtype not in (None, "bfloat16"):
            raise ValueError(
                f"moment_dtype must be 'bfloat16' or torch.bfloat16, or None for theta's dtype, got {dtype!r}"
            )
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))  # one spelling of each setting
        object.__setattr__(self, "eps", float(self.eps))
        object.__setattr__(self, "moment_dtype", dtype)

    @property
    def stored_dtype(self) -> torch.dtype | None:
        return None if self.moment_dtype is None else torch.bfloat16

    @cached_property
    def _longest(self) -> float:
        """A bound on the length of a step over lr: by the Cauchy-Schwarz inequality, with room for rounding."""
        b1, b2 = self.betas
        if b1 * b1 >= b2:
            return math.inf
        return 1 + 2 * (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))

    def reach(self, log_h: Scalar, lr: float, layers: Layers, growth: float) -> Scalar:
        return growth * lr * self._longest if lr else 0.0

    def coefficients(self, t: Scalar, lr: float) -> Coefficients:
        """The decay of each moment and what it takes in; the rate, the factor of the root, and eps."""
        b1, b2 = self.betas
        return b1, 1 - b1, b2, 1 - b2, lr / (1 - b1**t), (1 - b2**t) ** -0.5, self.eps

    def update(
        self,
        theta: Tensor,
        h: Tensor,
        moments: Sequence[Tensor],
        numbers: Coefficients,
        layers: Layers,
        random: rounding.Bits | None = None,
    ) -> None:
        b1, c1, b2, c2, rate, root, eps = numbers
        m, v = (moment.to(theta.dtype) for moment in moments)  # themselves if they have that dtype
        add_scaled(m.mul_(b1), h, c1)
        add_product(v.mul_(b2), h, h, c2)
        if random is not None:
            random.store(moments, (m, v), layers.number)
        add_quotient(theta, m, v.sqrt().mul_(root).add_(eps), -rate)


@dataclass(frozen=True, repr=False)
class ScheduleFree(MetaOptimizer):
    """Schedule-free averaging, with the root mean square of each layer in place of a second moment.

    ``z`` takes steps whose root mean square is lr; ``y``, which is theta, lies between z and the average of all z so
    far, in which z_t has weight t^2.

    Args:
        b: how far y lies from z towards the average.
        window: the number of updates over which to average; None averages over all of them.
        eps: added to the root mean square.

    Example:
        >>> rule, y, z, h = ScheduleFree(), torch.zeros(2), torch.zeros(2), torch.tensor([3.0, 4.0])
        >>> rule.update(y, h, [z], rule.coefficients(1, lr=0.1), Layers(1, 2))
        >>> z  # h over its root mean square, times lr
        tensor([-0.0849, -0.1131])
    """

    b: float = 0.93
    window: int | None = None
    eps: float = 1e-8

    spelled: ClassVar[str] = "schedule-free"
    kind: ClassVar[int] = SCHEDULE_FREE
    averages: ClassVar[bool] = True
    moments: ClassVar[tuple[str, ...]] = ("z",)
    identity: ClassVar[Coefficients] = (0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        check_real("b", self.b, low=0.0, high=1.0)
        check_real("eps", self.eps, low=0.0, open_low=True)
        if self.window is not None:
            check_int("window", self.window, low=1)
            object.__setattr__(self, "window", int(self.window))
        object.__setattr__(self, "b", float(self.b))  # one spelling of each setting
        object.__setattr__(self, "eps", float(self.eps))

    def start(self, moment: Tensor, theta: Tensor) -> None:
        moment.copy_(theta)

    def reach(self, log_h: Scalar, lr: float, layers: Layers, growth: float) -> Scalar:
        return lr * math.sqrt(layers.weights)  # the norm of a step of z

    def envelope(self, theta: Sequence[Scalar], moments: Sequence[Sequence[Scalar]]) -> Sequence[Scalar]:
        """Bounds on z and on the average x: y and the next x lie between them."""
        if self.b == 0:
            return moments[0]
        xs = [(y + (1 - self.b) * z) / self.b for y, z in zip(theta, moments[0], strict=True)]
        return [largest(x, z) for x, z in zip(xs, moments[0], strict=True)]

    def coefficients(self, t: Scalar, lr: float) -> Coefficients:
        """The rate; what y keeps, how far z is first taken out of it, how much of the new z comes in; eps."""
        c = 6 * t / ((t + 1) * (2 * t + 1))
        if self.window is not None:
            c = where(c > 1 / self.window, c, 1 / self.window)
        return lr, 1 - c, 1 - self.b, 1 - self.b * (1 - c), self.eps, 0.0, 0.0

    def update(
        self,
        theta: Tensor,
        h: Tensor,
        moments: Sequence[Tensor],
        numbers: Coefficients,
        layers: Layers,
        random: rounding.Bits | None = None,
    ) -> None:
        rate, keep, pull, push, eps, _, _ = numbers
        for y, z, h_ in zip(*(x.reshape(layers.number, -1) for x in (theta, moments[0], h)), strict=True):
            norm = torch.linalg.vector_norm(h_, dtype=precise(h_.device))
            rms = (norm if isinstance(rate, Tensor) else float(norm)) / layers.weights**0.5
            add_scaled(y, z, -pull).mul_(keep)
            add_scaled(z, h_, -rate / (rms + eps))
            add_scaled(y, z, push)


META_OPTIMIZERS: dict[str, type[MetaOptimizer]] = {"adam": Adam, "sgd": SGD, "schedule-free": ScheduleFree}


BETA1, BETA2, EPS = 0.9, 0.999, 1e-7  # of every single number


class Learned(NamedTuple):
    """A single number that Adam learns: its value, Adam's two moments, and the number of updates so far.

    >>> round(Learned(1.0).updated(slope=0.5, rate=1e-3).value, 6)  # the first step has the length of the rate
    0.999
    """

    value: Scalar
    exp_avg: Scalar = 0.0
    exp_avg_sq: Scalar = 0.0
    t: Scalar = 0

    def updated(self, slope: Scalar, rate: float, learning: Flag = True, beta2: float = BETA2) -> Learned:
        """One step of Adam down the slope, if ``learning`` holds. Works on vectors of numbers as well."""
        new = Learned(*adam_step(self, slope, rate, beta2))
        if learning is True:
            return new
        return Learned(*(where(learning, after, before) for after, before in zip(new, self, strict=True)))


def adam_step(number: Any, slope: Any, rate: float, beta2: float = BETA2) -> Any:
    """As `Learned.updated`, on a tuple of plain numbers; kernels compile it."""
    value, m, v, t = number
    m = BETA1 * m + (1 - BETA1) * slope
    v = beta2 * v + (1 - beta2) * slope * slope
    t = t + 1
    root = (v / (1 - beta2**t)) ** 0.5
    return value - rate * m / (1 - BETA1**t) / (root + EPS), m, v, t
