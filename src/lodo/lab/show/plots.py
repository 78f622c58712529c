"""Interactive plots as plain data: what the page draws. Curves are thinned here for display, never in the files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lodo.lab.run import Curve
from lodo.lab.show.colours import DARK, LIGHT, readable
from lodo.lab.show.figures import Dashes, Style, styles

POINTS = 160  # of a curve on the page
DIGITS = 5
AXES = {"step": "step", "evaluations": "evaluations of the loss and its gradient", "seconds": "seconds of training"}
_DASHES = {"-": "solid", ":": "dot"}

Number = float | int | None


@dataclass(frozen=True)
class Line:
    """One optimizer in a plot.

    Args:
        label: its name, by which it has its colour.
        x: where its points are, on each of the plot's axes.
        y: its values.
        low, high: the spread around them, if there are several seeds.
        note: what the legend adds, such as how many seeds diverged.
        text: what hovering adds to each point.
    """

    label: str
    x: Mapping[str, np.ndarray]
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    note: str = ""
    text: Sequence[str] = ()


@dataclass(frozen=True)
class Plot:
    """Lines over one or several x axes that the reader chooses from; the first is shown first.

    ``levels`` are horizontal lines by name; ``focus`` is the part of the y axis that is shown at first.
    """

    name: str
    title: str
    axes: Mapping[str, str]
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    marks: str = "lines"  # or "markers", or "lines+markers"
    levels: Mapping[str, float] = field(default_factory=dict)
    focus: tuple[float, float] | None = None
    colors: Mapping[str, Style] | None = None  # by label, if they are not the optimizers' own

    @property
    def data(self) -> dict[str, Any]:
        """What the page needs to draw it."""
        looks = self.colors or styles(line.label for line in self.lines)
        return {
            "kind": "lines",
            "title": self.title,
            "axes": dict(self.axes),
            "y": self.y,
            "logX": self.log_x,
            "logY": self.log_y,
            "marks": self.marks,
            "levels": {name: _rounded(value) for name, value in self.levels.items()},
            "focus": None if self.focus is None else numbers(self.focus),
            "lines": [{**_line(line, self.axes), **drawn(looks[line.label])} for line in self.lines],
        }


@dataclass(frozen=True)
class Paths:
    """Trajectories in the plane over contours, by step.

    Args:
        name, title: as of a plot.
        paths: x, y and the loss after every step, by label; the first entry is the start.
        x, y, height: the grid of the contours, and the logarithm to base 10 of the function there.
        marked: points worth a mark, by name.
        first: steps that are shown at first.
    """

    name: str
    title: str
    paths: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    x: np.ndarray
    y: np.ndarray
    height: np.ndarray
    marked: Mapping[str, tuple[float, float]]
    first: int

    @property
    def data(self) -> dict[str, Any]:
        """What the page needs to draw it."""
        looks = styles(self.paths)
        return {
            "kind": "paths",
            "title": self.title,
            "contour": {
                "x": numbers(self.x),
                "y": numbers(self.y),
                "z": [numbers(row, digits=4) for row in self.height],
            },
            "marked": {name: list(place) for name, place in self.marked.items()},
            "first": self.first,
            "steps": max(len(x) for x, _, _ in self.paths.values()) - 1,
            "lines": [
                {"label": label, "x": numbers(x), "y": numbers(y), "loss": numbers(loss), **drawn(looks[label])}
                for label, (x, y, loss) in self.paths.items()
            ],
        }


def drawn(style: Style) -> dict[str, str]:
    """A style as Plotly names it, for both backgrounds.

    >>> drawn(Style("#0072b2", ":"))
    {'light': '#0072b2', 'dark': '#0072b2', 'dash': 'dot'}
    """
    return {
        "light": readable(style.color, LIGHT),
        "dark": readable(style.color, DARK),
        "dash": _dash(style.ls),
    }


def _dash(dashes: Dashes) -> str:
    return _DASHES[dashes] if isinstance(dashes, str) else ",".join(f"{2 * part}px" for part in dashes[1])


def learning_curves(
    name: str,
    title: str,
    groups: Mapping[str, Sequence[Curve]],
    *,
    first: str = "step",
    fine: Callable[[Curve], bool] = lambda curve: not curve.diverged,
    **look: Any,
) -> Plot:
    """The loss of every group over the run, mean and spread over its seeds without those that diverged."""
    lines = []
    for label, curves in groups.items():
        good = [curve for curve in curves if fine(curve)]
        lost = len(curves) - len(good)
        note = f"{lost} of {len(curves)} diverged" if lost else ""
        lines.append(_mean_line(label, thinned(good), note) if good else _nothing(label, note))
    axes = {first: AXES[first], **AXES}
    return Plot(name, title, axes, "loss on fresh batches", lines, **look)


def tracked_curves(
    name: str, title: str, y: str, groups: Mapping[str, Sequence[Curve]], column: str, **look: Any
) -> Plot | None:
    """A tracked quantity of every group that has it, mean and spread over its seeds; None if there is none."""
    lines = []
    for label, curves in groups.items():
        measured = [measurements(curve, column) for curve in curves if not curve.diverged and column in curve.columns]
        if measured and (length := min(len(one["value"]) for one in measured)):
            lines.append(_mean_line(label, {axis: _stacked(measured, axis, length) for axis in measured[0]}))
    return Plot(name, title, AXES, y, lines, **look) if lines else None


def late_focus(lines: Sequence[Line]) -> tuple[float, float] | None:
    """The part of the y axis that most lines are in after their first steps: one that explodes flattens no other."""
    late = [line.y[len(line.y) // 10 :] for line in lines]
    ranges = np.array([(part.min(), part.max()) for part in late if part.size and np.isfinite(part).all()])
    if not len(ranges):
        return None
    low, high = float(ranges[:, 0].min()), float(np.median(ranges[:, 1]))
    room = 0.15 * (high - low) or 1.0
    return low - room, high + room


def measurements(curve: Curve, column: str) -> dict[str, np.ndarray]:
    """A tracked quantity where it was measured, as ``value``, and where that is on every axis."""
    there = ~np.isnan(curve[column])
    return {"value": curve[column][there], **{axis: curve[axis][there] for axis in AXES}}


def thinned(curves: Sequence[Curve], points: int = POINTS) -> dict[str, np.ndarray]:
    """Losses of all curves as means over parts of the run, as ``value``, and the parts' middles on every axis.

    Parts are short at the start and never long, so that the curve is fine on a linear and on a logarithmic axis. A
    row is a curve; the shortest curve's length is shown of all.
    """
    length = min(len(curve["step"]) for curve in curves)
    edges = parts(length, points)
    sizes = np.diff(edges)

    def means(column: str) -> np.ndarray:
        rows = [np.add.reduceat(curve[column][:length].astype(np.float64), edges[:-1]) / sizes for curve in curves]
        return np.stack(rows)

    return {"value": means("loss"), **{axis: means(axis) for axis in AXES}}


def parts(length: int, points: int = POINTS) -> np.ndarray:
    """The edges of at most so many parts of a run: every step while they are enough, else linear and logarithmic ones.

    >>> parts(4).tolist(), parts(1000, points=8).tolist()
    ([0, 1, 2, 3, 4], [0, 1, 10, 100, 250, 500, 750, 1000])
    """
    if length <= points:
        return np.arange(length + 1)
    half = points // 2
    every = np.concatenate([np.linspace(0, length, half + 1), np.geomspace(1, length, half)])
    return np.unique(np.round(every).astype(np.int64))


def numbers(values: Iterable[float], digits: int = DIGITS) -> list[Number]:
    """Numbers to so many significant digits, in as few characters as JSON allows; null where there is none.

    >>> numbers([0.123456789, 100000.0, math.nan])
    [0.12346, 100000, None]
    """
    return [_rounded(value, digits) for value in values]


def _rounded(value: float, digits: int = DIGITS) -> Number:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e9 else short


def _stacked(measured: Sequence[Mapping[str, np.ndarray]], axis: str, length: int) -> np.ndarray:
    return np.stack([one[axis][:length].astype(np.float64) for one in measured])


def _mean_line(label: str, columns: Mapping[str, np.ndarray], note: str = "") -> Line:
    """The mean over rows, and one standard deviation around it.

    Where that would pass zero though no seed does, which a logarithmic axis cannot show, the band ends at the lowest
    seed.
    """
    values = columns["value"]
    x = {axis: columns[axis].mean(0) for axis in AXES}
    middle = values.mean(0)
    if len(values) == 1:
        return Line(label, x, middle, note=note)
    spread, lowest = values.std(0, ddof=1), values.min(0)
    low = np.where((middle - spread <= 0) & (lowest > 0), lowest, middle - spread)
    return Line(label, x, middle, low, middle + spread, note)


def _nothing(label: str, note: str) -> Line:
    empty = np.empty(0)
    return Line(label, dict.fromkeys(AXES, empty), empty, note=note)


def _line(line: Line, axes: Mapping[str, str]) -> dict[str, Any]:
    """A line as data; an axis that is the same as the first is left out."""
    first, *others = axes
    x = {first: numbers(line.x[first])}
    for axis in others:
        if (there := numbers(line.x[axis])) != x[first]:
            x[axis] = there
    made: dict[str, Any] = {"label": line.label, "x": x, "y": numbers(line.y)}
    if line.low is not None and line.high is not None and np.any(line.high > line.low):
        made |= {"low": numbers(line.low), "high": numbers(line.high)}
    if line.note:
        made["note"] = line.note
    if line.text:
        made["text"] = list(line.text)
    return made
