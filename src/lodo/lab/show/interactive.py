"""A figure as JSON, for the script of the page to draw with Plotly."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lodo.lab.files import write_atomically
from lodo.lab.show.formulas import as_html, as_text
from lodo.lab.show.plots import Axis, Contours, Figure, HeatMap, Line, Panel, Plot
from lodo.lab.show.styles import DARK, LIGHT, Style, readable

FIGURES = "figures.json"  # the file of the figures that are read back from a folder
DIGITS = 5  # significant ones, of a number on the page
_NARROW = 5.0  # inches: such panels stand side by side on the page
_DASHES = {"-": "solid", ":": "dot", "--": "dash"}

Number = float | int | None


def as_json(figure: Figure) -> dict[str, Any]:
    """What the page's script needs to draw a figure.

    >>> plot = Plot("a", "A", Axis("step"), Axis("loss"), [Line("LODO", np.array([1.0]), np.array([2.0]))])
    >>> as_json(Figure("f", [plot]))["panels"][0]["lines"][0]["y"]
    [2]
    """
    styles, largest = figure.styles, figure.largest
    return {
        "name": figure.name,
        "narrow": figure.size[0] < _NARROW and len(figure.panels) > 1,
        "panels": [_panel(panel, styles, largest) for panel in figure.panels],
    }


def write_json(figures: Iterable[Figure], folder: Path) -> None:
    """Write figures into a folder, for the page."""
    text = json.dumps({"figures": [as_json(figure) for figure in figures]}, separators=(",", ":"), allow_nan=False)
    write_atomically(folder / FIGURES, text.encode())


def _panel(panel: Panel, styles: Mapping[str, Style], largest: float) -> dict[str, Any]:
    if isinstance(panel, Plot):
        made = _plot(panel, styles)
    elif isinstance(panel, Contours):
        made = _contours(panel, styles)
    elif isinstance(panel, HeatMap):
        made = _heat_map(panel, largest)
    else:
        raise TypeError(f"panel must be a plot, contours or a heat map, got {panel}; the page shows images from files")
    return {"name": panel.name, "title": as_text(panel.title), **made}


def _plot(plot: Plot, styles: Mapping[str, Style]) -> dict[str, Any]:
    return {
        "kind": "plot",
        "choices": {name: as_html(label) for name, label in plot.x.choices.items()},
        "x": _axis(plot.x),
        "y": {"label": as_html(next(iter(plot.y.choices.values()))), **_axis(plot.y)},
        "lines": [{**_line(line, plot.x.choices), **_look(line.style or styles[line.label])} for line in plot.lines],
        "levels": {as_html(name): _rounded(value) for name, value in plot.levels.items()},
        "shades": [{"low": shade.low, "high": shade.high, **_look(shade.style)} for shade in plot.shades],
    }


def _axis(axis: Axis) -> dict[str, Any]:
    return {
        "log": axis.log,
        "range": None if axis.range is None else numbers(axis.range),
        "ticks": None if axis.ticks is None else [[float(at), as_html(text)] for at, text in axis.ticks.items()],
        "reversed": axis.reversed,
        "whole": axis.whole,
    }


def _line(line: Line, choices: Mapping[str, str]) -> dict[str, Any]:
    """A line as data; its places on an axis that are the same as on the first are left out."""
    first, *others = choices
    x = {first: numbers(line.along(first))}
    for choice in others:
        if (there := numbers(line.along(choice))) != x[first]:
            x[choice] = there
    made: dict[str, Any] = {
        "label": as_text(line.label), "x": x, "y": numbers(line.y),
        "mark": line.mark, "symbol": line.symbol, "size": line.size,
    }  # fmt: skip
    if line.low is not None and line.high is not None and np.any(line.high != line.low):
        made |= {"low": numbers(line.low), "high": numbers(line.high)}
    if line.note:
        made["note"] = line.note
    if line.names:
        made["names"] = list(line.names)
    return made


def _contours(contours: Contours, styles: Mapping[str, Style]) -> dict[str, Any]:
    start, end, size = contours.levels
    return {
        "kind": "contours",
        "contour": {
            "x": numbers(contours.x),
            "y": numbers(contours.y),
            "z": [numbers(row, digits=4) for row in contours.height],
        },
        "levels": {"start": start, "end": end, "size": size},
        "marked": {name: list(place) for name, place in contours.marked.items()},
        "first": contours.first,
        "steps": max(len(x) for x, _, _ in contours.paths.values()) - 1,
        "lines": [
            {"label": as_text(label), "x": numbers(x), "y": numbers(y), "loss": numbers(loss), **_look(styles[label])}
            for label, (x, y, loss) in contours.paths.items()
        ],
    }


def _heat_map(shown: HeatMap, largest: float) -> dict[str, Any]:
    """The values, what their colours go with, and the largest that a colour stands for."""
    made = {
        "kind": "heat",
        "x": as_html(shown.x),
        "values": [numbers(row, digits=3) for row in shown.values],
        "lines": [],
    }
    if shown.linear is None:
        return {**made, "largest": largest}
    colors = [numbers(np.arcsinh(row / shown.linear), digits=3) for row in shown.values]
    return {**made, "colors": colors, "largest": math.asinh(largest / shown.linear)}


def _look(style: Style) -> dict[str, str]:
    """A style as Plotly names it, for both backgrounds."""
    return {
        "light": readable(style.color, LIGHT),
        "dark": readable(style.color, DARK),
        "dash": _DASHES[style.dash]
        if isinstance(style.dash, str)
        else ",".join(f"{2 * part}px" for part in style.dash),
    }


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
