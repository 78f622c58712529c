"""A comparison of the user's own: any optimizers on any task, none of the paper's figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

from matplotlib.figure import Figure

from lodo.lab.experiments.base import Experiment, Plan, Request, Results, by_label, digest_of, tail
from lodo.lab.experiments.catalog import Entry, Size
from lodo.lab.experiments.paper.bowl import last
from lodo.lab.experiments.paper.rosenbrock import trajectories
from lodo.lab.run import COLUMNS, Curve
from lodo.lab.show.figures import band, binned, canvas, styles
from lodo.lab.show.plots import Paths, Plot, learning_curves, tracked_curves
from lodo.lab.show.tables import Row, measure
from lodo.lab.tasks import TASKS

LOSS = "loss over the last 10 %"
TIME = "microseconds of training an evaluation, while runs shared the machine"


@dataclass(frozen=True)
class ComparedRow(Row):
    """A figure beside the lowest of its table."""

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "mean ± s.d.", "against the lowest", "seeds")

    lowest: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        above = f"{100 * (self.mean / self.lowest - 1):+.1f} %" if self.mean and self.lowest else ""
        return self.optimizer, self.ours, above if self.mean != self.lowest else "", self.runs


class Comparison(Experiment):
    """Optimizers on one task.

    Args:
        task: its name, as in `lodo.lab.tasks.TASKS`.
    """

    optimizers = "lodo, adam"
    row = ComparedRow

    def __init__(self, task: str) -> None:
        size = Size(evaluations=1_000, seeds=3)
        super().__init__(
            Entry(f"compare-{task}", f"Comparison on {task}", "a comparison of your own", task, full=size, quick=size)
        )

    @property
    def command(self) -> tuple[str, ...]:
        return "lodo", "compare", self.task

    def plan(self, request: Request) -> Plan:
        dataset = TASKS[self.task].dataset
        more = {} if dataset is None else {"digest": digest_of(request, dataset)}
        return {
            cell: [self.make_run(choice, seed, request, **more) for seed in range(request.seeds)]
            for choice, cell in zip(request.choices, self.by_choice(request), strict=True)
        }

    def rows(self, request: Request, results: Results) -> list[Row]:
        rows = _table(LOSS, results, tail)
        for column in tracked_columns(results):
            rows += _table(f"{column} at the end", results, partial(last, column=column))
        for name in dict.fromkeys(name for curves in results.values() for curve in curves for name in curve.final):
            rows += _table(f"{name}, measured once", results, partial(_final, name=name))
        return rows + _table(TIME, results, lambda curve: 1e6 * float(curve["seconds"][-1] / curve["evaluations"][-1]))

    def figures(self, request: Request, results: Results) -> dict[str, Figure]:
        figure, every = canvas(2)
        looks = styles(cell.label for cell in results)
        for axes, x, label in zip(every, ("evaluations", "seconds"), ("step", "seconds of training"), strict=True):
            for cell, curves in results.items():
                if fine := [curve for curve in curves if not curve.diverged]:
                    band(axes, *binned(fine, x), cell.label, looks[cell.label])
            if all(bottom > 0 for bottom in _lowest(results)):
                axes.set_yscale("log")
            axes.set(xlabel=label, ylabel="loss")
        if every[1].get_legend_handles_labels()[0]:
            every[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        return {self.name: figure}

    def plots(self, request: Request, results: Results) -> list[Plot | Paths]:
        groups = by_label(results)
        first = "seconds" if request.seconds else "step"
        positive = all(bottom > 0 for bottom in _lowest(results))
        curves = learning_curves(f"{self.name}-curves", "Learning curves", groups, first=first, log_y=positive)
        tracked = [
            tracked_curves(f"{self.name}-{column}", column, column, groups, column)
            for column in tracked_columns(results)
        ]
        paths = trajectories(results) if self.task == "rosenbrock" else []
        return [curves, *(plot for plot in tracked if plot is not None), *paths]

    def sentence(self, rows: Sequence[Row]) -> str:
        means = {row.optimizer: row.mean for row in rows if row.metric == LOSS and row.mean is not None}
        order = sorted(means, key=lambda name: means[name])
        return f"Lowest loss first: {', '.join(f'{n} {means[n]:.4g}' for n in order)}." if order else "All diverged."

    def notes(self, request: Request, results: Results) -> list[str]:
        return ["Every optimizer has the settings that it was given: a comparison is as fair as the tuning before it."]

    def about(self, request: Request) -> str:
        return f"{self.size(request)}. A step is one evaluation of the loss and its gradient."


def tracked_columns(results: Results) -> list[str]:
    """What tasks measured on the way."""
    every = (name for curves in results.values() for curve in curves for name in curve.columns)
    return [name for name in dict.fromkeys(every) if name not in ("step", *COLUMNS)]


def _final(curve: Curve, name: str) -> float:
    return curve.final.get(name, math.nan)


def _lowest(results: Results) -> list[float]:
    return [float(c["loss"].min()) for curves in results.values() for c in curves if not c.diverged]


def _table(metric: str, results: Results, value: Callable[[Curve], float]) -> list[Row]:
    rows = [measure(cell.label, metric, curves, value) for cell, curves in results.items()]
    lowest = min((row.mean for row in rows if row.mean is not None and row.mean > 0), default=None)
    return [ComparedRow(**asdict(row), lowest=lowest) for row in rows]
