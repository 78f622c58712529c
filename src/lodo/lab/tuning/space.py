"""The hyperparameters that a search varies, on a logarithmic scale, and the paper's schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import FloatDistribution, IntDistribution

from lodo._checks import check_choice, check_int, check_real
from lodo.lab.settings import read_settings
from lodo.lab.tasks import check_task
from lodo.spelling import parse_calls

KINDS = ("rate", "decay")
_UNBOUNDED = 1e-30, 1e30  # bounds for Optuna, which requires some, where a search has none
_SPAN = 1e3  # other samplers look for a rate from start / _SPAN to start * _SPAN
_DECAYS = 1e-5, 1.0  # the range in which they look for 1 - decay


@dataclass(frozen=True)
class Space:
    """A hyperparameter x and where to look for it.

    The parameter of the study is p = x for a rate and p = 1 - x for a decay, on a logarithmic scale.

    Args:
        name: the optimizer's option.
        kind: ``"rate"`` for positive numbers, varied in ln x, or ``"decay"`` for numbers in [0, 1), in ln(1 - x).
        start: where the paper's search starts. An integer makes all values integers.
        low: the smallest value allowed; None for no bound.
        high: the largest value allowed; None for no bound.

    Example:
        >>> beta = Space("beta", "decay", 0.9)
        >>> beta.parameter, round(beta.place, 6), beta.value(math.exp(-1))
        ('1 - beta', -2.302585, 0.6321205588285577)
    """

    name: str
    kind: str
    start: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        whole = self.kind == "rate" and isinstance(self.start, int)
        below = 1.0 - 1e-12 if self.kind == "decay" else math.inf
        least = 1.0 if whole else 0.0
        for what, value in (("start", self.start), ("low", self.low), ("high", self.high)):
            if value is not None:
                said = f"{what} of {self.name}"
                check_real(said, value, low=least, high=below, open_low=self.kind == "rate" and not whole)
                if whole:
                    check_int(said, value, low=1)
        low = self.start if self.low is None else self.low
        high = self.start if self.high is None else self.high
        if not low <= self.start <= high:
            raise ValueError(f"start of {self.name} must be from low = {low} to high = {high}, got {self.start}")
        if low == high and self.low is not None:
            raise ValueError(f"low of {self.name} must be less than high = {high}, got {low}")

    @property
    def whole(self) -> bool:
        """Whether values are integers."""
        return self.kind == "rate" and isinstance(self.start, int)

    @property
    def parameter(self) -> str:
        """The name of the study's parameter."""
        return self.name if self.kind == "rate" else f"1 - {self.name}"

    @property
    def place(self) -> float:
        """The start as a coordinate: ln p."""
        return math.log(self.start if self.kind == "rate" else 1 - self.start)

    def value(self, p: float) -> float:
        """The hyperparameter, from a study's parameter."""
        return p if self.kind == "rate" else 1 - p

    def distribution(self, bounded: bool) -> FloatDistribution | IntDistribution:
        """The range for Optuna; ``bounded`` is for samplers that look everywhere between the bounds."""
        if self.kind == "decay":
            least, most = _DECAYS if bounded else (_UNBOUNDED[0], 1.0)
            low = least if self.high is None else 1 - self.high
            return FloatDistribution(low, most if self.low is None else 1 - self.low, log=True)
        least, most = (self.start / _SPAN, self.start * _SPAN) if bounded else _UNBOUNDED
        if self.whole:
            most = min(most, 2.0**53)
            low, high = self.low or max(1, int(least)), self.high or int(most)
            return IntDistribution(int(low), int(high), log=True)
        return FloatDistribution(self.low or least, self.high or most, log=True)

    def nearest(self, p: float) -> float:
        """The closest allowed value of a study's parameter."""
        allowed = self.distribution(bounded=False)
        return min(max(round(p) if self.whole else p, allowed.low), allowed.high)


@dataclass(frozen=True)
class Schedule:
    """The generations of a search, with one entry of ``noise`` and ``steps`` for each.

    Args:
        population: number of individuals in a generation.
        noise: standard deviations of individuals around their generation's mean, in natural logarithms.
        steps: number of evaluations of the loss that an individual is trained for.
        rate_factor: factor by which the tuned learning rate ``lr`` is multiplied in the end.
    """

    population: int
    noise: tuple[float, ...]
    steps: tuple[int, ...]
    rate_factor: float = 1.0

    def __post_init__(self) -> None:
        check_int("population", self.population, low=2)
        if not self.noise or len(self.noise) != len(self.steps):
            raise ValueError(
                f"noise and steps must have one entry each for every generation, got {self.noise} and {self.steps}"
            )
        for sigma in self.noise:
            check_real("noise", sigma, low=0.0, open_low=True)
        for steps in self.steps:
            check_int("steps", steps, low=10)

    @property
    def trials(self) -> int:
        """Number of individuals in all generations."""
        return self.population * len(self.noise)


def find_schedule(name: str, task: str) -> Schedule:
    """The schedule of a task in settings/schedules.toml; your own tasks, and those that are not there, share one.

    >>> find_schedule("paper", "cifar10").steps[-3:]
    (200, 300, 500)
    """
    schedules = read_settings("schedules")
    check_choice("schedule", name, schedules)
    check_task(task)
    found = schedules[name].get(task, schedules[name]["module:Name"])
    return Schedule(**{**found, "noise": tuple(found["noise"]), "steps": tuple(found["steps"])})


def find_spaces(optimizer: str) -> tuple[Space, ...]:
    """The hyperparameters of an optimizer that are tuned by default, from settings/spaces.toml.

    >>> [space.name for space in find_spaces("lodo")]
    ['lr', 'meta_lr', 'beta']
    """
    spaces = read_settings("spaces")
    if optimizer not in spaces:
        raise ValueError(
            f"space must be given for {optimizer}, such as 'rate(lr=0.001), decay(beta=0.9)': only "
            f"{', '.join(spaces)} have a default"
        )
    return tuple(_make_spaces(spaces[optimizer]))


def _make_spaces(kinds: Mapping[str, Mapping[str, Any]]) -> Sequence[Space]:
    """One space for each option of each kind; a value is the start, or start, low and high."""
    return [
        Space(name, kind, *(value if isinstance(value, tuple | list) else (value,)))
        for kind, options in kinds.items()
        for name, value in options.items()
    ]


def parse_spaces(text: str) -> tuple[Space, ...]:
    """Spaces from the text of the command line.

    >>> parse_spaces("rate(lr=0.001, preconditioner__depth=(16, 4, 64)), decay(beta=0.9)")[1]
    Space(name='preconditioner__depth', kind='rate', start=16, low=4, high=64)
    """
    try:
        calls = parse_calls(text)
        for kind, _ in calls:
            check_choice("space", kind, KINDS)
        found = [space for kind, options in calls for space in _make_spaces({kind: options})]
        if not found:
            raise ValueError("no hyperparameter is named")
        names = [space.name for space in found]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)} must be given once")
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            "space must have starts, or (start, low, high), such as 'rate(lr=0.001, eps=(1e-8, 1e-12, 1e-3)), "
            f"decay(beta=0.9)', got {text!r}: {error}"
        ) from error
    return tuple(found)
