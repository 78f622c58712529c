"""The figures: learning curves, ratios to AdamW and losses over rates, all as small multiples or rows of dots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lodo.lab.experiments.beyond.networks.rows import OverallRow, TaskRow
from lodo.lab.experiments.beyond.networks.standings import TRAINING, VALIDATION, Reports, overall_metric
from lodo.lab.show.curves import learning_curves
from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.styles import BLACK, BLUE, GREEN, GREY, ORANGE, Style
from lodo.lab.show.tables import Row

_LOOKS = {
    "KronLODO": Style(BLUE, width=2.0),
    "KronLODO untouched": Style("#332288", (2, 2), width=1.4),
    "AdamW": Style(BLACK, width=1.6),
    "AdamW tuned": Style(BLACK, width=1.6),
    "SOAP": Style(ORANGE),
    "Muon": Style(GREEN),
    "PSGD-Kron": Style("#cc79a7"),
    "Schedule-free": Style("#e69f00", (5, 1)),
    "Prodigy": Style("#882255", (3, 1)),
    "Lion": Style("#44aa99", (1, 1)),
    "SGD momentum": Style(GREY, (3, 1)),
    "LODO robust": Style("#56b4e9", (5, 1)),
}
_SMALL = (4.4, 3.1)
_THIN = 1.5  # wider lines have a band for the spread over seeds
_SPARE = ("#117733", "#999933", "#aa4499", "#661100")


def looks(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each optimizer.

    >>> looks(["KronLODO", "mine"])["mine"].color
    '#117733'
    """
    others = [label for label in dict.fromkeys(labels) if label not in _LOOKS]
    spare = {label: Style(_SPARE[i % len(_SPARE)], (2, 1)) for i, label in enumerate(others)}
    if "AdamW tuned" in labels and "AdamW" in labels:
        spare["AdamW"] = Style(BLACK, (1, 1))
    return {label: spare.get(label) or _LOOKS[label] for label in labels}


def curve_figure(name: str, reports: Reports) -> Figure:
    """Learning curves: a panel for each task, a line for each optimizer."""
    styles = looks([label for by_label in reports.values() for label in by_label])
    panels = []
    for task, by_label in reports.items():
        plot = learning_curves(task, task, by_label, y=Axis("training loss", log=True))
        lines = [_styled(line, styles[line.label]) for line in plot.lines]
        y = Axis("training loss", log=True, range=_shown(lines))
        panels.append(Plot(plot.name, plot.title, plot.x, y, lines))
    return Figure(name, panels, columns=min(3, len(panels)), size=_SMALL, shared_legend=True)


def _styled(line: Line, style: Style) -> Line:
    low, high = (line.low, line.high) if style.width > _THIN else (None, None)  # more bands would hide the lines
    return Line(line.label, line.x, line.y, low, high, line.note, style=style)


def _shown(lines: Sequence[Line]) -> tuple[float, float] | None:
    """The part of a logarithmic axis in which the lines are after their first steps."""
    there = [line.y for line in lines if line.y.size and (line.y > 0).all()]
    if not there:
        return None
    low = min(float(y.min()) for y in there)
    high = float(np.median([y[len(y) // 8 :].max() for y in there]))
    return (0.97 * low, 1.1 * high) if high > low else None


def ratio_figure(name: str, rows: Sequence[Row], reference: str) -> list[Figure]:
    """Ratios to tuned AdamW: a row of dots for each optimizer, one for each task, and the geometric mean."""
    panels = []
    for metric, title in ((TRAINING, "Training loss"), (VALIDATION, "Best validation loss")):
        overall = [row for row in rows if isinstance(row, OverallRow) and row.metric == overall_metric(metric)]
        found = [row for row in rows if isinstance(row, TaskRow) and row.metric == metric and row.ratio is not None]
        labels = [row.optimizer for row in overall if row.optimizer != reference]
        if not found or not labels:
            continue
        panels.append(_ratio_plot(metric, title, labels, overall, found))
    height = 1.3 + 0.3 * max((len(panel.y.ticks or ()) for panel in panels), default=0)
    return [Figure(name, panels, columns=2, size=(5.6, height), shared_legend=True)] if panels else []


def _ratio_plot(
    metric: str, title: str, labels: Sequence[str], overall: Sequence[OverallRow], found: Sequence[TaskRow]
) -> Plot:
    colors = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#882255", "#999933", "#332288", "#7f7f7f")
    lines = []
    for i, task in enumerate(dict.fromkeys(row.task for row in found)):
        there = [row for row in found if row.task == task and row.optimizer in labels]
        lines.append(
            Line(
                task,
                np.array([row.ratio for row in there], dtype=float),
                np.array([labels.index(row.optimizer) for row in there], dtype=float),
                names=[f"{row.optimizer}: {task}" for row in there],
                style=Style(colors[i % len(colors)]),
                mark="points",
                size=4.5,
            )
        )
    means = [row for row in overall if row.mean is not None and row.optimizer in labels]
    lines.append(
        Line(
            "geometric mean",
            np.array([row.mean for row in means], dtype=float),
            np.array([labels.index(row.optimizer) for row in means], dtype=float),
            names=[f"{row.optimizer}: geometric mean" for row in means],
            style=Style(BLACK),
            mark="points",
            symbol="bar",
            size=14,
        )
    )
    rows = Axis(ticks={float(i): label for i, label in enumerate(labels)}, reversed=True)
    ones = Line("tuned AdamW", np.ones(2), np.array([-0.5, len(labels) - 0.5]), style=Style(GREY, ":"))
    return Plot(metric.split()[0], f"{title} over tuned AdamW's", Axis("ratio", log=True), rows, [ones, *lines])


def rate_figure(name: str, losses: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Figure:
    """Final loss against the rate: a panel for each task, a line for each optimizer."""
    styles = looks([label for by_label in losses.values() for label in by_label])
    panels = []
    for task, by_label in losses.items():
        lines = []
        for label, found in by_label.items():
            x = np.array([10 ** (power / 2) for power in found])
            height = np.array([loss if math.isfinite(loss) else math.nan for loss in found.values()])
            diverged = int(np.isnan(height).sum())
            note = f"{diverged} diverged" if diverged and len(losses) == 1 else ""
            lines.append(Line(label, x, height, note=note, style=styles[label], mark="both", size=3))
        finite = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
        bests = [float(np.nanmin(line.y)) for line in lines if np.isfinite(line.y).any()]
        y_range = (0.97 * float(finite.min()), 4 * float(np.median(bests))) if len(finite) else None
        y = Axis("training loss, last 10 %", log=True, range=y_range)
        panels.append(Plot(task, task, Axis("rate over the library's default", log=True), y, lines))
    return Figure(name, panels, columns=min(3, len(panels)), size=_SMALL, shared_legend=True)
