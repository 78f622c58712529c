"""What is measured of runs, and how it is summed up over seeds and tasks. A run that diverged has an infinite loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean, mean, stdev
from typing import NamedTuple

import numpy as np

from lodo.lab.experiments.base import tail
from lodo.lab.run import Curve

VALIDATION = "validation_loss"  # what tasks call it
PART = 0.1  # of a run: the final loss is the mean over it, and smooth curves are trailing means over as many steps


def final_loss(curve: Curve) -> float:
    """The mean training loss over the last tenth of a run."""
    loss = math.nan if curve.diverged else tail(curve, fresh=True, part=PART)
    return loss if math.isfinite(loss) else math.inf


def best_validation(curve: Curve) -> float | None:
    """The lowest validation loss of a run; None if it was not measured."""
    if curve.diverged:
        return math.inf
    _, values = curve.tracked(VALIDATION)
    return float(values.min()) if len(values) else None


def steps_to(curve: Curve, target: float) -> int | None:
    """The first step whose trailing mean of the training loss, over a tenth of the run, is at most the target.

    The mean begins when there are that many steps. At the last step it is `final_loss`. None if it never gets there.
    """
    if curve.diverged or not math.isfinite(target):
        return None
    smooth = trailing_means(curve["loss"], _window(curve))
    there = np.flatnonzero(smooth <= target + 1e-12 * abs(target))
    return int(there[0]) + _window(curve) if len(there) else None


def seconds_to(curve: Curve, target: float) -> float | None:
    """The training time until then, without the first step, which may compile something."""
    steps = steps_to(curve, target)
    return None if steps is None else float(curve["seconds"][steps - 1] - curve["seconds"][0])


def trailing_means(values: np.ndarray, window: int) -> np.ndarray:
    """The means of every ``window`` successive values.

    >>> trailing_means(np.array([1.0, 2.0, 3.0, 5.0]), 2)
    array([1.5, 2.5, 4. ])
    """
    windows = np.lib.stride_tricks.sliding_window_view(values.astype(np.float64), window)
    means: np.ndarray = windows.mean(-1)  # not from running sums, which lose everything after a spike
    return means


def _window(curve: Curve) -> int:
    evaluations = curve["evaluations"].astype(np.int64)
    return int((evaluations > (1 - PART) * evaluations[-1]).sum())


class Estimate(NamedTuple):
    """A mean and its standard error; infinite if any value is, and without an error if there are too few."""

    mean: float
    error: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """The mean over seeds.

    >>> estimate([1.0, 3.0]), estimate([1.0, math.inf])
    (Estimate(mean=2.0, error=1.0), Estimate(mean=inf, error=None))
    """
    if not all(map(math.isfinite, values)):
        return Estimate(math.inf, None)
    return Estimate(mean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """Ours minus theirs on the seeds that both have; None if there is none, or if one of them is infinite.

    >>> paired_difference({1: 2.0, 2: 4.0}, {1: 1.0, 2: 2.0, 3: 9.0})
    Estimate(mean=1.5, error=0.5)
    """
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if not differences or not all(map(math.isfinite, differences)):
        return None
    return estimate(differences)


def paired_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """The ratio of the means on the seeds that both have; None if there is none, or if a mean is not positive.

    >>> paired_ratio({1: 1.0, 2: 2.0}, {1: 2.0, 2: 4.0, 3: 9.0}), paired_ratio({1: 1.0}, {1: -1.0})
    (Estimate(mean=0.5, error=0.0), None)
    """
    seeds = [seed for seed in ours if seed in theirs]
    above, below = ([each[seed] for seed in seeds] for each in (ours, theirs))
    if not seeds or not 0 < mean(above) < math.inf or not 0 < mean(below) < math.inf:
        return None
    ratio = mean(above) / mean(below)
    error = estimate([a - ratio * b for a, b in zip(above, below, strict=True)]).error  # to first order
    return Estimate(ratio, None if error is None else error / mean(below))


def ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Ranks from the lowest, 1, to the highest; equal ones share the mean of their places.

    >>> ranks({"a": 2.0, "b": math.inf, "c": 1.0, "d": math.inf})
    {'a': 2.0, 'b': 3.5, 'c': 1.0, 'd': 3.5}
    """
    order = sorted(values.values())
    return {name: order.index(value) + (1 + order.count(value)) / 2 for name, value in values.items()}


def mean_ratio(ratios: Iterable[float]) -> float:
    """The geometric mean; infinite if any ratio is.

    >>> mean_ratio([0.5, 2.0]), mean_ratio([0.5, math.inf])
    (1.0, inf)
    """
    every = list(ratios)
    return geometric_mean(every) if all(map(math.isfinite, every)) else math.inf
