"""What KronLODO learns, one gain c and one gate w for each tensor, and the bounds that keep c awake.

Gains and gates of all parameters are entries of short vectors: tensors on a device, arrays on the CPU, because NumPy
takes a fraction of torch's time for them. The functions here take either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lodo.group import Options
from lodo.kron_state import FIRST
from lodo.meta import BETA2, adam_step
from lodo.scalars import Flag, Scalar, as_real, largest, logarithm, over, smallest, where

CATCHING_UP = 10.0  # how many times faster c is learned until lr e^c has once been `FIRST`
GAIN_BETA2 = 0.99  # of the Adam that learns c; w has the usual 0.999
MOVING = 0.1  # of all steps so far: lr is under a schedule if it has changed within them
LONGEST = 0.03  # the largest lr e^c of any step: how far a step may move the weights, in the root mean square
OUTLIER = 5.0  # how many times as long as recent gradients one may be
WIDEST = math.log(1e6)  # c stays within this range, so that e^c never overflows


def library(x: Any) -> Any:
    """What has the functions for an array or for a tensor; what is used here has the same names in both.

    >>> library(np.ones(1)).__name__, library(torch.ones(1)).__name__
    ('numpy', 'torch')
    """
    return torch if isinstance(x, Tensor) else np


def power(beta: float, t: Any) -> Any:
    """``beta ** t`` of arrays, or of tensors: through NumPy, because torch rounds the end of a vector in another way.

    >>> power(0.5, torch.tensor([1.0, 2.0]))
    tensor([0.5000, 0.2500])
    """
    return torch.from_numpy(beta ** t.numpy()) if isinstance(t, Tensor) and is_host(t.device) else beta**t


def is_host(device: torch.device) -> bool:
    """Whether numbers on a device are there at once."""
    return device.type == "cpu"


def kept(ok: Flag, new: Tensor, old: Tensor) -> Tensor:
    """What replaces the old value: the new one, unless a device refuses the step."""
    return torch.where(ok, new, old) if isinstance(ok, Tensor) else new


def learn_from_last_step(options: Options, numbers: dict[str, Any], sums: Any, rise: Scalar, ok: Flag) -> None:
    """Update c and w with the cosines of X with the last step's S and D."""
    XX, XN, XU = sums
    XS, XD = (XU + numbers["gate"] * (XN - XU), XN - XU) if "gate" in numbers else (XN, XU)  # XU is 0 then
    scale = XX**0.5 * numbers["length"]  # |X| |S|
    scale = library(scale).where(scale > 0, scale, math.inf)
    learn(options, numbers, XS / scale, XD / scale, rise, ok)


def learn(options: Options, numbers: dict[str, Any], alignment: Any, gate_slope: Any, rise: Scalar, ok: Flag) -> None:
    """Update c and w, where there was a last step that moved something."""
    t = numbers["step"]
    xp = library(t)
    learning = (t > 0) & ok & (numbers["length"] > 0)
    if "gain" in numbers:
        behind = numbers["gain_highest"] < logarithm(over(FIRST, full_rate(options)))
        rate = options["meta_lr"] * xp.where(behind, CATCHING_UP, xp.ones_like(t))
        c = _learned(numbers, "gain", -alignment, rate, learning, GAIN_BETA2)
        fall, ceiling = bounds(options, t)
        c = xp.minimum(settled(c, rise), ceiling)
        highest = xp.maximum(settled(numbers["gain_highest"], rise), c)
        numbers["gain_highest"][:] = kept(ok, highest, numbers["gain_highest"])
        numbers["gain"][:] = kept(ok, xp.maximum(c, highest - fall).clip(-WIDEST, WIDEST), numbers["gain"])
    if "gate" in numbers:
        numbers["gate"][:] = _learned(numbers, "gate", -gate_slope, options["gate_lr"], learning).clip(0, 1)


def settled(c: Any, rise: Scalar) -> Any:
    """c after a warm-up has raised lr: what c has gained already is not multiplied by it.

    >>> settled(torch.tensor([3.0, 1.0, -1.0]), 2.0)
    tensor([ 1.,  0., -1.])
    """
    return library(c).maximum(c.clip(max=0), c - rise)


def _learned(numbers: dict[str, Any], name: str, slope: Any, rate: Any, learning: Any, beta2: float = BETA2) -> Any:
    """The new value of a learned number; Adam's moments of it are updated."""
    t = numbers["step"]
    before = value, first, second = [numbers[each] for each in (name, f"{name}_exp_avg", f"{name}_exp_avg_sq")]
    after = adam_step((*before, t - 1 + (t == 0)), slope, rate, beta2)
    where = library(t).where
    first[:], second[:] = where(learning, after[1], first), where(learning, after[2], second)
    return where(learning, after[0], value)


def follow_rate(options: Options) -> Scalar:
    """Note the highest lr so far, and count the steps in which a schedule keeps lr below it.

    An lr that has fallen and stands still again, as after a plateau, is no schedule: steps go on to anneal.

    Returns:
        By how much the logarithm of the highest lr has risen, as it does in a warm-up; infinity after an lr of 0, so
        that nothing that was gained without moving counts (see `settled`).

    >>> options = {"steps": 100, "scheduled": 0, "last_lr": 0.5, "unchanged": 10}
    >>> [follow_rate(options | {"lr": lr, "peak_lr": peak}) for lr, peak in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.0))]
    [0.0, 0.0, inf]
    >>> for lr in (0.4, 0.5):
    ...     options |= {"lr": lr, "peak_lr": 1.0, "last_lr": 0.5, "unchanged": 10}
    ...     _ = follow_rate(options)
    ...     print(options["unchanged"], options["scheduled"])
    0 1
    11 1
    """
    lr, before = options["lr"], options["peak_lr"]
    if not isinstance(lr, Tensor):
        lr = float(lr)  # a number of NumPy would end up in checkpoints
    options["peak_lr"] = peak = largest(before, lr)
    options["unchanged"] = unchanged = where(lr == options["last_lr"], options["unchanged"] + 1, 0)
    is_scheduled = (lr < peak) & (unchanged <= MOVING * options["steps"])
    options["scheduled"] = options["scheduled"] + where(is_scheduled, 1, 0)
    options["last_lr"] = lr.clone() if isinstance(lr, Tensor) else lr
    return logarithm(over(peak, before))


def compare_rates(groups: Sequence[Options]) -> None:
    """Note in every group the highest lr that any group has had; among those whose lr are on one device."""
    highest: dict[Any, Scalar] = {}
    for options in groups:
        place = getattr(options["lr"], "device", None)
        highest[place] = largest(highest.get(place, 0.0), options["peak_lr"])
    for options in groups:
        options["top_lr"] = highest[getattr(options["lr"], "device", None)]


def full_rate(options: Options) -> Scalar:
    """The lr for which `FIRST` and `LONGEST` are meant: a group's own, or that of the fastest group if it is smaller.

    A group whose lr is a tenth of another's so gets a tenth of what the other may have, unless both are above `FIRST`.

    >>> [full_rate({"peak_lr": lr, "top_lr": top}) for lr, top in ((1e-4, 1e-4), (1e-4, 1e-3), (1e-4, 1.0), (0.1, 1.0))]
    [0.0001, 0.001, 0.003, 0.1]
    """
    return largest(options["peak_lr"], smallest(options["top_lr"], FIRST))


def bounds(options: Options, t: Any) -> tuple[Any, Any]:
    """How far c may fall below its highest, and how high it may rise.

    Learned greedily, c falls asleep in long runs, because the next step always looks better with less noise. So lr e^c
    falls no faster than 1 / (1 + t / anneal) from its highest, where t counts steps at a constant lr: once a schedule
    takes lr down, annealing is its job, and what lr has fallen counts.
    On data that a network can fit exactly, c rises without end, because every step helps until one breaks everything.
    So lr e^c stays below `LONGEST`, or the highest lr if that is larger, annealed likewise; and below a part of that in
    a group that is slower than others (see `full_rate`).
    """
    lr, peak, full = options["lr"], options["peak_lr"], full_rate(options)
    ceiling = logarithm(over(largest(LONGEST, full), full))
    if not options["anneal"]:
        return 0 * t + math.inf, ceiling + 0 * t
    annealed = library(t).log1p((t - options["scheduled"]).clip(min=0) / options["anneal"])
    fall = (annealed - logarithm(over(peak, lr))).clip(min=0)
    return fall, ceiling - fall


def decay_rate(options: Options) -> Scalar:
    """What part of the weights decays in a step: ``weight_decay`` times the lr of steps whose gain stays as it starts.

    Where gains are learned, that lr is at most `FIRST`, and anneals as the bounds of c do. If it stayed up while steps
    anneal, decay would take over in long runs.

    >>> options = {"weight_decay": 0.1, "gains": True, "anneal": 1000.0, "lr": 1e-3, "peak_lr": 1e-3}
    >>> [decay_rate({**options, "steps": steps, "refused": 0, "scheduled": 0}) for steps in (0, 1000)]
    [0.0001, 5e-05]
    """
    rate: Scalar = options["lr"]
    if options["gains"]:
        if options["anneal"]:
            t = as_real(largest(options["steps"] - options["refused"] - options["scheduled"], 0))
            rate = smallest(rate, options["peak_lr"] / (1 + t / options["anneal"]))
        rate = rate * smallest(1.0, over(FIRST, options["peak_lr"]))
    return rate * options["weight_decay"]  # type: ignore[no-any-return]  # an option is of any type


def trust(norm_sq: Any, t: Any, squares: Any, b2: float) -> Any:
    """1, or what shortens a gradient to `OUTLIER` times the recent ones, given its square and their average.

    A gradient that is a thousand times too long would otherwise rule V and the covariances for hundreds of steps, and M
    for longer.

    >>> trust(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 100.0]), 0.5)
    tensor([1.0000, 0.5000])
    """
    limit = OUTLIER**2 * norm_sq / (1 - power(b2, t) + (t == 0))  # 0 before the first step
    is_outlier = (limit > 0) & (squares > limit)
    where = library(t).where
    return where(is_outlier, limit / where(is_outlier, squares, 1), 1) ** 0.5
