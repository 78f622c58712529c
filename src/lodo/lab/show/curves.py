"""Turns the curves of runs into lines: means and spreads over seeds, thinned for display."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lodo.lab.run import Curve
from lodo.lab.show.plots import Axis, Line, Plot

POINTS = 160  # at most, in a line
PROGRESS = {
    "evaluations": "step: an evaluation of the loss and its gradient",
    "step": "update: a fresh batch",
    "seconds": "seconds of training",
}

Groups = Mapping[str, Sequence[Curve]]  # the curves of every seed, by label


def progress(groups: Groups, first: str | None = None) -> dict[str, str]:
    """The choices of an x axis along runs, beginning with ``first``.

    A step is one evaluation of the loss and its gradient, as in the paper. Only where an optimizer evaluates a batch
    several times are updates another choice.

    >>> progress({}, first="seconds")
    {'seconds': 'seconds of training', 'step': 'step'}
    """
    twice = any(curve["evaluations"][-1] > curve["step"][-1] for curves in groups.values() for curve in curves)
    choices = PROGRESS if twice else {"step": "step", "seconds": PROGRESS["seconds"]}
    return dict(choices) if first is None else {first: PROGRESS[first], **choices}


def learning_curves(
    name: str,
    title: str,
    groups: Groups,
    *,
    y: Axis,
    first: str | None = None,
    fine: Callable[[Curve], bool] = lambda curve: not curve.diverged,
    geometric: bool = False,
    **look: Any,
) -> Plot:
    """The loss of every group over the run: mean and spread over its seeds, without those that diverged.

    Args:
        name, title, y: of the plot.
        groups: the curves.
        first: the x axis that is shown first; the evaluations of the loss if None.
        fine: which curves are drawn; the others are counted in the legend.
        geometric: whether mean and spread are those of logarithms.
        look: further arguments of the plot.
    """
    lines = []
    for label, curves in groups.items():
        drawn = [curve for curve in curves if fine(curve)]
        note = _lost(len(curves) - len(drawn), len(curves))
        lines.append(mean_line(label, thinned(drawn), note, geometric) if drawn else _empty(label, note))
    return Plot(name, title, Axis(progress(groups, first)), y, lines, **look)


def tracked_curves(
    name: str, title: str, groups: Groups, column: str, *, y: Axis, first: str | None = None, **look: Any
) -> Plot:
    """A quantity that was measured on the way, of every group that has it: mean and spread over its seeds."""
    lines = []
    for label, curves in groups.items():
        measured = [measurements(curve, column) for curve in curves if not curve.diverged and column in curve.columns]
        length = min((len(each["value"]) for each in measured), default=0)
        if length:
            columns = {
                axis: np.stack([each[axis][:length].astype(np.float64) for each in measured]) for axis in measured[0]
            }
            lines.append(mean_line(label, columns, _lost(sum(curve.diverged for curve in curves), len(curves))))
    return Plot(name, title, Axis(progress(groups, first)), y, lines, **look)


def mean_line(label: str, columns: Mapping[str, np.ndarray], note: str = "", geometric: bool = False) -> Line:
    """The mean over rows of ``value``, and one standard deviation around it.

    Where that would pass zero though no seed does, which a logarithmic axis cannot show, the band ends at the lowest
    seed.
    """
    values = columns["value"]
    x = {axis: columns[axis].mean(0) for axis in PROGRESS}
    if geometric:
        logs = np.log(np.maximum(values, 1e-300))
        middle, spread = logs.mean(0), logs.std(0, ddof=1) if len(logs) > 1 else np.zeros(logs.shape[1])
        return Line(label, x, np.exp(middle), np.exp(middle - spread), np.exp(middle + spread), note)
    middle = values.mean(0)
    if len(values) == 1:
        return Line(label, x, middle, note=note)
    spread, lowest = values.std(0, ddof=1), values.min(0)
    low = np.where((middle - spread <= 0) & (lowest > 0), lowest, middle - spread)
    return Line(label, x, middle, low, middle + spread, note)


def _lost(diverged: int, seeds: int) -> str:
    """What the legend says of seeds that are not drawn."""
    return f"{diverged} of {seeds} diverged" if diverged else ""


def _empty(label: str, note: str) -> Line:
    """A group of which nothing can be drawn, for the legend."""
    nothing = np.empty(0)
    return Line(label, dict.fromkeys(PROGRESS, nothing), nothing, note=note)


def late_range(lines: Sequence[Line]) -> tuple[float, float] | None:
    """The part of the y axis that most lines are in after their first steps: one that explodes flattens no other."""
    late = [line.y[len(line.y) // 10 :] for line in lines]
    ranges = np.array([(part.min(), part.max()) for part in late if part.size and np.isfinite(part).all()])
    if not len(ranges):
        return None
    low, high = float(ranges[:, 0].min()), float(np.median(ranges[:, 1]))
    room = 0.15 * (high - low) or 1.0
    return low - room, high + room


def measurements(curve: Curve, column: str) -> dict[str, np.ndarray]:
    """A tracked quantity where it was measured, as ``value``, and where that is on every x axis."""
    there = ~np.isnan(curve[column])
    return {"value": curve[column][there], **{axis: curve[axis][there] for axis in PROGRESS}}


def thinned(curves: Sequence[Curve], points: int = POINTS, length: int | None = None) -> dict[str, np.ndarray]:
    """Losses as means over parts of the run, as ``value``, and the parts' middles on every x axis; a row is a curve.

    Parts are short at the start and never long, so that the curve is fine on a linear and on a logarithmic axis. All
    curves are shown up to the length of the shortest, or to ``length``.
    """
    length = length or min(len(curve["step"]) for curve in curves)
    edges = part_edges(length, points)
    sizes = np.diff(edges)

    def means(column: str) -> np.ndarray:
        rows = [np.add.reduceat(curve[column][:length].astype(np.float64), edges[:-1]) / sizes for curve in curves]
        return np.stack(rows)

    return {"value": means("loss"), **{axis: means(axis) for axis in PROGRESS}}


def part_edges(length: int, points: int = POINTS) -> np.ndarray:
    """The edges of at most so many parts of a run: every step while they are enough, else linear and logarithmic ones.

    >>> part_edges(4).tolist(), part_edges(1000, points=8).tolist()
    ([0, 1, 2, 3, 4], [0, 1, 10, 100, 250, 500, 750, 1000])
    """
    if length <= points:
        return np.arange(length + 1)
    half = points // 2
    every = np.concatenate([np.linspace(0, length, half + 1), np.geomspace(1, length, half)])
    return np.unique(np.round(every).astype(np.int64))
