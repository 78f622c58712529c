"""The vocabulary of figures, as plain data: Matplotlib (`draw`) and the page's script (`interactive`) draw the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lodo.lab.show.styles import Style, styles

Mark = Literal["line", "points", "both", "area"]
Symbol = Literal["circle", "ring", "bar", "cross", "star", "dash"]


@dataclass(frozen=True)
class Axis:
    """One axis of a plot.

    Args:
        label: what is written beside it; or a label for each of several choices, of which the page lets its reader
            choose one and a printed figure shows the first.
        log: whether it is logarithmic.
        range: the part that is shown at first; everything if None.
        ticks: the only places with ticks, and what is written there.
        reversed: whether it runs from large to small.
        whole: whether its ticks are integers.
    """

    label: str | Mapping[str, str] = ""
    log: bool = False
    range: tuple[float, float] | None = None
    ticks: Mapping[float, str] | None = None
    reversed: bool = False
    whole: bool = False

    @property
    def choices(self) -> Mapping[str, str]:
        """Labels by name of the choice; a single one is called ``"x"``.

        >>> Axis("step").choices
        {'x': 'step'}
        """
        return {"x": self.label} if isinstance(self.label, str) else self.label


@dataclass(frozen=True)
class Line:
    """A line or a set of points. Lines that share a label share their entry in the legend.

    Args:
        label: its name in the legend, which also decides its style unless one is given.
        x: where its points are; for an axis with several choices, on each of them.
        y: their heights.
        low, high: the spread around them: a band around a line, error bars at points, the outline of an area.
        note: what the legend adds, such as how many seeds diverged.
        names: the name of each point.
        style: its colour and dashes; None takes those of the label.
        mark: whether it is a line, points, both, or the area between ``low`` and ``high``.
        symbol: the shape of its points.
        size: the size of its points.
    """

    label: str
    x: np.ndarray | Mapping[str, np.ndarray]
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    note: str = ""
    names: Sequence[str] = ()
    style: Style | None = None
    mark: Mark = "line"
    symbol: Symbol = "circle"
    size: float = 4.0

    def along(self, choice: str) -> np.ndarray:
        """Where its points are on one choice of the x axis."""
        return self.x if isinstance(self.x, np.ndarray) else self.x[choice]


@dataclass(frozen=True)
class Shade:
    """A horizontal stripe behind the lines."""

    low: float
    high: float
    style: Style


@dataclass(frozen=True)
class Plot:
    """Lines and points over an x axis.

    Args:
        name: what it is called within its figure, and within the section of the page that has it.
        title: its heading.
        x: its horizontal axis.
        y: its vertical axis.
        lines: what is drawn.
        levels: horizontal lines by name.
        shades: stripes behind everything.
        by_time: whether a printed figure has a second panel for it, with seconds as its x axis.
        write_names: whether a printed figure has the names of points beside them; the page tells them on hovering.
    """

    name: str
    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    levels: Mapping[str, float] = field(default_factory=dict)
    shades: Sequence[Shade] = ()
    by_time: bool = False
    write_names: bool = False


@dataclass(frozen=True)
class Contours:
    """Trajectories in the plane over the contours of a function, step by step.

    Args:
        name, title: as of a plot.
        paths: x, y and the loss after every step, by label; the first entry is the start.
        x, y, height: the grid of the contours, and the logarithm to base 10 of the function there.
        levels: first, last and distance of the contours, as logarithms.
        marked: points with a star, by name.
        first: number of steps that are shown at first.
    """

    name: str
    title: str
    paths: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    x: np.ndarray
    y: np.ndarray
    height: np.ndarray
    levels: tuple[float, float, float]
    marked: Mapping[str, tuple[float, float]]
    first: int


@dataclass(frozen=True)
class HeatMap:
    """A matrix in colours, red above zero and blue below; all heat maps of a figure share one scale.

    Args:
        name, title: as of a plot.
        values: the matrix.
        x: what is written below it.
        linear: up to this size colours go with the value, beyond with its logarithm; None for the value alone.
    """

    name: str
    title: str
    values: np.ndarray
    x: str = ""
    linear: float | None = None


@dataclass(frozen=True)
class Pixels:
    """A grey image. The page shows the printed file of a figure that has any."""

    name: str
    title: str
    values: np.ndarray
    range: tuple[float, float]


Panel = Plot | Contours | HeatMap | Pixels


@dataclass(frozen=True)
class Figure:
    """Panels in a grid.

    Args:
        name: the name of its files, without the ending.
        panels: what is drawn, row by row.
        columns: panels in a row.
        size: width and height of a panel in inches; narrow panels stand side by side on the page too.
        shared_legend: whether a printed figure has one legend below all panels instead of one in each.
    """

    name: str
    panels: Sequence[Panel]
    columns: int = 1
    size: tuple[float, float] = (6.0, 3.8)
    shared_legend: bool = False

    @property
    def styles(self) -> dict[str, Style]:
        """The style of every label, the same in all panels."""
        labels: list[str] = []
        for panel in self.panels:
            if isinstance(panel, Plot):
                labels += [line.label for line in panel.lines if line.style is None]
            elif isinstance(panel, Contours):
                labels += panel.paths
        return styles(labels)

    @property
    def largest(self) -> float:
        """The largest size of a number in the heat maps, which share one scale of colours."""
        return max(
            (float(np.abs(panel.values).max()) for panel in self.panels if isinstance(panel, HeatMap)), default=0.0
        )
