"""Tuning: which rates and schedules are tried, which is the best, and when the grid is extended. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

CONSTANT, COSINE = "constant", "warmup_cosine"  # without a warm-up, rivals do worse on transformers
SCHEDULES = (CONSTANT, COSINE)
MORE = 3  # rates that may be added at an edge of the grid


class Trial(NamedTuple):
    """A setting: the rate, as a power of sqrt(10) times the library's default, and the schedule."""

    power: int
    schedule: str


def rate(default: float, power: int) -> float:
    """A rate of the grid, to three digits, so that it is the same number everywhere.

    >>> rate(1e-3, 0), rate(1e-3, 1), rate(2.5e-3, -2)
    (0.001, 0.00316, 0.00025)
    """
    return default if power == 0 else float(f"{default * 10 ** (power / 2):.3g}")


def powers(number: int) -> range:
    """The powers of a grid of so many rates around the default.

    >>> list(powers(5))
    [-2, -1, 0, 1, 2]
    """
    return range(-(number // 2), number // 2 + 1)


def grid(number: int) -> list[Trial]:
    """Every rate with every schedule.

    >>> len(grid(5))
    10
    """
    return [Trial(power, schedule) for power in powers(number) for schedule in SCHEDULES]


def best(losses: Mapping[Trial, float]) -> Trial:
    """The trial with the lowest loss; among equals, such as when all diverged, that with the lowest rate.

    >>> best({Trial(0, "constant"): 2.0, Trial(1, "warmup_cosine"): 1.0})
    Trial(power=1, schedule='warmup_cosine')
    """
    return min(sorted(losses), key=lambda trial: losses[trial])


def edge(losses: Mapping[Trial, float]) -> int:
    """Where the best rate is: at the lower edge of those that were tried (-1), at the upper (1), or between (0).

    >>> edge({Trial(0, "constant"): 2.0, Trial(1, "constant"): math.inf})
    -1
    """
    tried = [trial.power for trial in losses]
    found = best(losses).power
    return -1 if found == min(tried) else 1 if found == max(tried) else 0


def next_power(losses: Mapping[Trial, float], number: int) -> int | None:
    """The rate to try next beyond a grid of ``number`` rates; None if the best is between others or enough were added.

    >>> next_power({trial: -trial.power for trial in grid(5)}, 5)
    3
    """
    tried = {trial.power for trial in losses}
    side = edge(losses)
    if not side or len(tried) - len(powers(number)) >= MORE:
        return None
    return min(tried) - 1 if side < 0 else max(tried) + 1


def width_in_decades(losses: Mapping[int, float], tolerance: float = 0.05) -> float:
    """Decades of rates around the best whose loss is within the tolerance of the best; by power of sqrt(10).

    Between two rates the loss is taken to be a straight line over the logarithm of the rate, up to a rate at which it
    diverged.

    >>> width_in_decades({0: 1.5, 1: 1.0, 2: 1.0, 3: 1.1}), width_in_decades({0: 1.0, 1: math.inf})
    (0.8, 0.0)
    """
    order = sorted(losses)
    if not all(second - first == 1 for first, second in itertools.pairwise(order)):
        raise ValueError(f"losses must have every power between the first and the last, got {order}")
    lowest = min(losses.values())
    if not math.isfinite(lowest):
        return 0.0
    limit = lowest * (1 + tolerance)
    start = order.index(min(order, key=lambda power: losses[power]))
    right = _reach([losses[power] for power in order[start:]], limit)
    left = _reach([losses[power] for power in order[start::-1]], limit)
    return round((left + right) / 2, 6)


def _reach(losses: list[float], limit: float) -> float:
    """How many places of a list, which begins below the limit, are below it, with a part of the last."""
    for i, (low, high) in enumerate(itertools.pairwise(losses)):
        if high > limit:
            return i + ((limit - low) / (high - low) if math.isfinite(high) else 0.0)
    return float(len(losses) - 1)
