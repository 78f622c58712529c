"""How a rate changes over a run: factors of the first rate, as functions of the part of the run that is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

Schedule = Callable[[float], float]


def cosine(done: float) -> float:
    """Half a period of a cosine, from 1 to 0.

    >>> cosine(0.0), cosine(0.5), cosine(1.0)
    (1.0, 0.5, 0.0)
    """
    return 0.5 * (1 + math.cos(math.pi * done))


def warmup_cosine(done: float) -> float:
    """The same after a rise from nearly 0 over the first twentieth of the run.

    >>> warmup_cosine(0.0), round(warmup_cosine(0.025), 2), warmup_cosine(0.5), warmup_cosine(1.0)
    (0.01, 0.51, 0.5, 0.0)
    """
    return min(1.0, 0.01 + done / 0.05) * cosine(done)


def _square(done: float) -> float:
    return (1 - done) ** 2


SCHEDULES: Mapping[str, Schedule] = MappingProxyType({"cosine": cosine, "warmup_cosine": warmup_cosine})


def schedule_of(optimizer: str, name: str | None) -> Schedule | None:
    """The schedule of a run; None for a constant rate. LARS's rate falls as (1 - done)^2, as in the paper.

    >>> schedule_of("lars", None)(0.5), schedule_of("lars", "cosine")(0.5), schedule_of("adam", None)
    (0.25, 0.5, None)
    """
    if name is not None:
        return SCHEDULES[name]
    return _square if optimizer == "lars" else None
