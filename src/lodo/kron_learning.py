"""What KronLODO learns, one gain c and one gate w for each tensor, and the bounds that keep c awake.

Gains and gates of all parameters are entries of short vectors: tensors on a device, arrays on the CPU, because NumPy
takes a fraction of torch's time for them; and a kernel takes a fraction of NumPy's, if there is Numba. The formulas are
in `lodo.kron_formulas`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lodo.group import Options
from lodo.kron_formulas import Constants, Pace, cosines, next_gain, next_gate
from lodo.kron_state import FIRST, unit_of
from lodo.scalars import Flag, Scalar, as_real, largest, logarithm, over, smallest, where

ENDS = ("", "_exp_avg", "_exp_avg_sq")  # of the names under which a learned number and its moments are kept
LONGEST = 0.03  # the largest lr e^c of any step: how far a step may move the weights, in the root mean square
MOVING = 0.1  # of all steps so far: lr is under a schedule if it has changed within them


def kept(ok: Flag, new: Tensor, old: Tensor) -> Tensor:
    """What replaces the old value: the new one, unless a device refuses the step."""
    return torch.where(ok, new, old) if isinstance(ok, Tensor) else new


def pace_of(options: Options, rise: Scalar) -> Pace:
    """That of a group, given how far lr is above its highest so far, from `follow_rate`."""
    full = full_rate(options)
    return Pace(
        options["meta_lr"], options["gate_lr"], options["anneal"], options["scheduled"],
        first=logarithm(over(FIRST, full)), ceiling=logarithm(over(largest(LONGEST, full), full)),
        fallen=logarithm(over(options["peak_lr"], options["lr"])), rise=rise,
    )  # fmt: skip


def constants_of(options: Options) -> Constants:
    """Those of a group."""
    averaging, (b1, b2), eps = float(options["averaging"]), options["betas"], float(options["eps"])
    has_bases = options["basis"] == "kronecker"
    return Constants(averaging, float(b1), float(b2), eps, limit_of(options), unit_of(b2), has_bases)


def limit_of(options: Options) -> float:
    """How large the entries of X / R and of M^ / R may be.

    V contains (1 - b2) X^2, at least at first, so they are smaller almost everywhere. But where gradients are rare, R
    may become far smaller than X, and after a refresh M has entries where V has none.

    >>> limit_of({"guard": True, "betas": (0.95, 0.75)}), limit_of({"guard": False})
    (2.0, inf)
    """
    return (1 - options["betas"][1]) ** -0.5 if options["guard"] else math.inf


def learn_from_last_step(options: Options, numbers: dict[str, Any], sums: Any, rise: Scalar, ok: Flag) -> None:
    """Update c and w with the cosines of X with the last step's S and D, where there was one that moved something."""
    t, pace = numbers["step"], pace_of(options, rise)
    learning = (t > 0) & ok & (numbers["length"] > 0)
    XX, XN, XU = sums
    alignment, gate_slope = cosines(XX, XN, XU, numbers.get("gate", 1.0), numbers["length"])
    if "gain" in numbers:
        gain, highest = [numbers[f"gain{end}"] for end in ENDS], numbers["gain_highest"]
        *after, highest_after = next_gain(gain, highest, t, -alignment, learning, pace)
        for old, new in zip([*gain, highest], [*after, highest_after], strict=True):
            old[:] = kept(ok, new, old)
    if "gate" in numbers:
        gate = [numbers[f"gate{end}"] for end in ENDS]
        for old, new in zip(gate, next_gate(gate, t, -gate_slope, learning, pace), strict=True):
            old[:] = new


def follow_rate(options: Options) -> Scalar:
    """Note the highest lr so far, and count the steps in which a schedule keeps lr below it.

    An lr that has fallen and stands still again, as after a plateau, is no schedule: steps go on to anneal.

    Returns:
        By how much the logarithm of the highest lr has risen, as it does in a warm-up; infinity after an lr of 0, so
        that nothing that was gained without moving counts (see `lodo.kron_formulas.settled`).

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
