"""KronLODO's formulas for single numbers: what a tensor learns from a step, and what scales its averages.

They take short vectors with an entry for each tensor, and kernels compile the same text for one entry.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from lodo.elementwise import choose, clip, log1p, maximum, minimum, power
from lodo.meta import BETA2, adam_step

CATCHING_UP = 10.0  # how many times faster c is learned until lr e^c has once been `lodo.kron_state.FIRST`
GAIN_BETA2 = 0.99  # of the Adam that learns c; w has the usual 0.999
NOISE = 1e-5  # of a gradient's mean size: what is smaller may be a rounding error
OUTLIER = 5.0  # how many times as long as recent gradients one may be
WIDEST = math.log(1e6)  # c stays within this range, so that e^c never overflows


class Pace(NamedTuple):
    """How fast the tensors of a group learn, and the bounds of c: what they all have in common."""

    meta_lr: float
    gate_lr: float
    anneal: float
    scheduled: Any
    first: Any  # c is behind as long as it has not been as high as this
    ceiling: Any  # of c, before annealing
    fallen: Any  # by how much a schedule has lowered the logarithm of lr
    rise: Any  # how far lr is above its highest so far


class Constants(NamedTuple):
    """What kernels need to know of the options, beside rates."""

    averaging: float
    b1: float
    b2: float
    eps: float
    limit: float  # of the entries of X / R and of M^ / R
    unit: float  # of scaled gradients in 8 bits
    has_bases: bool


def cosines(XX: Any, XN: Any, XU: Any, w: Any, length: Any) -> tuple[Any, Any]:
    """``<X, S>`` and ``<X, D>`` with the last S and D, both over ``|X| |S|``; XU is 0 and w is 1 without a gate."""
    scale = XX**0.5 * length  # |X| |S|
    scale = choose(scale > 0, scale, math.inf)
    return (XU + w * (XN - XU)) / scale, (XN - XU) / scale


def next_gain(gain: Any, highest: Any, t: Any, slope: Any, learning: Any, pace: Pace) -> tuple[Any, Any, Any, Any]:
    """c with its two moments, and its highest so far, after one step of Adam."""
    rate = pace.meta_lr * choose(highest < pace.first, CATCHING_UP, 0 * t + 1)
    c, m, v = learned(gain, t, slope, rate, learning, GAIN_BETA2)
    fall, ceiling = bounds(t, pace)
    c = minimum(settled(c, pace.rise), ceiling)
    highest = maximum(settled(highest, pace.rise), c)
    return clip(maximum(c, highest - fall), -WIDEST, WIDEST), m, v, highest


def next_gate(gate: Any, t: Any, slope: Any, learning: Any, pace: Pace) -> tuple[Any, Any, Any]:
    """w with its two moments, after one step of Adam."""
    w, m, v = learned(gate, t, slope, pace.gate_lr, learning, BETA2)
    return clip(w, 0.0, 1.0), m, v


def learned(number: Any, t: Any, slope: Any, rate: Any, learning: Any, beta2: float) -> tuple[Any, Any, Any]:
    """A number and its two moments, after one step of Adam where there is something to learn."""
    before, m_before, v_before = number
    value, m, v, _ = adam_step((before, m_before, v_before, t - 1 + (t == 0)), slope, rate, beta2)
    return choose(learning, value, before), choose(learning, m, m_before), choose(learning, v, v_before)


def settled(c: Any, rise: Any) -> Any:
    """c after a warm-up has raised lr: what c has gained already is not multiplied by it.

    >>> import torch
    >>> settled(torch.tensor([3.0, 1.0, -1.0]), 2.0)
    tensor([ 1.,  0., -1.])
    """
    return maximum(clip(c, -math.inf, 0.0), c - rise)


def bounds(t: Any, pace: Pace) -> tuple[Any, Any]:
    """How far c may fall below its highest, and how high it may rise.

    Learned greedily, c falls asleep in long runs, because the next step always looks better with less noise. So lr e^c
    falls no faster than 1 / (1 + t / anneal) from its highest, where t counts steps at a constant lr: once a schedule
    takes lr down, annealing is its job, and what lr has fallen counts.
    On data that a network can fit exactly, c rises without end, because every step helps until one breaks everything.
    So lr e^c stays below `lodo.kron_learning.LONGEST`, or the highest lr if that is larger, annealed likewise; and
    below a part of that in a group that is slower than others (see `lodo.kron_learning.full_rate`).
    """
    if not pace.anneal:
        return 0 * t + math.inf, 0 * t + pace.ceiling
    annealed = log1p(clip(t - pace.scheduled, 0.0, math.inf) / pace.anneal)
    fall = clip(annealed - pace.fallen, 0.0, math.inf)
    return fall, pace.ceiling - fall


def trust(norm_sq: Any, t: Any, squares: Any, b2: float) -> Any:
    """1, or what shortens a gradient to `OUTLIER` times the recent ones, given its square and their average.

    A gradient that is a thousand times too long would otherwise rule V and the covariances for hundreds of steps, and M
    for longer.

    >>> import torch
    >>> trust(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 100.0]), 0.5)
    tensor([1.0000, 0.5000])
    """
    limit = OUTLIER**2 * norm_sq / (1 - power(b2, t) + (t == 0))  # 0 before the first step
    is_outlier = (limit > 0) & (squares > limit)
    return choose(is_outlier, limit / choose(is_outlier, squares, 1.0), 1.0) ** 0.5


def newest_share(averaging: float, beta: float, t: Any) -> Any:
    """How much of M or V the newest X or X^2 makes up, at step t: 1 - beta at first, and 1 / (averaging t) later.

    So M reaches back over more and more steps, a constant part of the run. That calms the steps as annealing does, but
    takes away only noise. V reaches back as far: if it forgot faster than M, M / sqrt(V) would grow without end
    wherever gradients are rare, as in the rows of an embedding.

    >>> import torch
    >>> newest_share(0.1, 0.95, torch.tensor([1.0, 400.0]))
    tensor([0.0500, 0.0250])
    """
    share = 1 - beta + 0 * t
    if not averaging:
        return share
    return minimum(share, 1 / (averaging * (t + (t == 0))))


def factors(t: Any, decays: Any, norm_sq: Any, size: Any, b2: float, eps: float) -> tuple[Any, Any, Any]:
    """What turns the averages M and V after step t into M^ = mean M and R = root sqrt(V) + least."""
    mean_decay, square_decay = decays
    is_first = t == 0
    recent = norm_sq / (1 - power(b2, t + is_first) + (norm_sq == 0))
    least = eps + NOISE * (recent / size) ** 0.5
    return 1 / (1 - mean_decay + is_first), (1 - square_decay + is_first) ** -0.5, least
