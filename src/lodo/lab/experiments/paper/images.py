"""What the experiments with real networks share: tables that rank optimizers, and learning curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, stdev
from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lodo.lab import data
from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, by_label, digest_of, tail
from lodo.lab.run import Curve
from lodo.lab.show.figures import Style, band, binned, canvas, styles
from lodo.lab.show.plots import Paths, Plot, late_focus, tracked_curves
from lodo.lab.show.plots import learning_curves as curves_plot
from lodo.lab.show.tables import Paper, Row, measure, with_spread

SPEED = "steps a second, while runs shared the machine"


@dataclass(frozen=True)
class RankedRow(Row):
    """A figure with its rank in its table, ours and the paper's, so that runs of another size can be compared too.

    Seeds share their data and first weights, so that the difference from the best is surer than either mean: ``behind``
    is its mean over seeds, and ``behind_std`` the spread.
    """

    columns: ClassVar[tuple[str, ...]] = (
        "optimizer", "ours", "rank", "from the best", "paper, full size", "paper's rank", "seeds"
    )  # fmt: skip

    rank: int | None = None
    paper_rank: int | None = None
    behind: float | None = None
    behind_std: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        ranks = ["" if rank is None else str(rank) for rank in (self.rank, self.paper_rank)]
        paper = with_spread(self.paper_mean, self.paper_std)
        behind = f"{self.behind:+.2g}" if self.behind else ""
        behind += f" ± {self.behind_std:.1g}" if self.behind and self.behind_std else ""
        return self.optimizer, self.ours, ranks[0], behind, paper, ranks[1], self.runs


def ranked(rows: Sequence[Row], values: Sequence[Sequence[float]], largest_first: bool = False) -> list[Row]:
    """The rows of one table, from these values of each seed, with their ranks among the paper's and among ours."""
    sign = -1 if largest_first else 1

    def ranks(values: Mapping[str, float | None]) -> dict[str, int]:
        order = sorted((sign * value, name) for name, value in values.items() if value is not None)
        return {name: i + 1 for i, (_, name) in enumerate(order)}

    ours = ranks({row.optimizer: row.mean for row in rows})
    paper = ranks({row.optimizer: row.paper_mean for row in rows})
    best = next((of for row, of in zip(rows, values, strict=True) if ours.get(row.optimizer) == 1), [])
    found: list[Row] = []
    for row, of in zip(rows, values, strict=True):
        pairs = [mine - other for mine, other in zip(of, best, strict=False) if math.isfinite(mine - other)]
        found.append(
            RankedRow(
                **asdict(row),
                rank=ours.get(row.optimizer),
                paper_rank=paper.get(row.optimizer),
                behind=mean(pairs) if pairs else None,
                behind_std=stdev(pairs) if len(pairs) > 1 else None,
            )
        )
    return found


class NetworkExperiment(Experiment):
    """Optimizers on a network and real data; a subclass names the data, the metrics and the paper's figures."""

    dataset: ClassVar[str]
    digest: ClassVar[str]  # of the original data
    measurements: ClassVar[int] = 30  # of what is tracked, in a run
    tracked: ClassVar[tuple[str, str]]  # the column that is shown, and its name
    row = RankedRow

    def plan(self, request: Request) -> Plan:
        found = digest_of(request, self.dataset)
        every = max(1, request.evaluations // self.measurements) if request.evaluations else 1000
        return {
            Cell(choice.label): [
                replace(self.make_run(choice, seed, request, digest=found), track_every=every)
                for seed in range(request.seeds)
            ]
            for choice in request.choices
        }

    def table(
        self,
        metric: str,
        results: Results,
        value: Callable[[Curve], float],
        paper: Mapping[str, Paper],
        largest_first: bool = False,
    ) -> list[Row]:
        """One ranked table."""
        none: Paper = (None, None)
        rows = [
            measure(cell.label, metric, curves, value, paper.get(cell.label, none)) for cell, curves in results.items()
        ]
        values = [[math.nan if c.diverged else value(c) for c in curves] for curves in results.values()]
        return ranked(rows, values, largest_first)

    def notes(self, request: Request, results: Results) -> list[str]:
        digests = {str(curve.run.task_options.get("digest")) for curves in results.values() for curve in curves}
        names = {self.digest: f"the original {self.dataset}", data.DIGITS_DIGEST: "scikit-learn's 8 x 8 digits"}
        which = " and ".join(sorted(names.get(digest, "files that are NOT the original") for digest in digests))
        notes = [
            f"Data: {which}.",
            '"From the best" is the mean difference from the best row on the same seed, which has the same data and '
            "first weights.",
        ]
        speeds = {cell.label: np.mean([speed(curve) for curve in curves]) for cell, curves in results.items()}
        if "LODO" in speeds and "Adam" in speeds:
            notes.append(f"LODO takes {speeds['LODO'] / speeds['Adam']:.2f} times as many steps a second as Adam.")
        return notes

    def plots(self, request: Request, results: Results) -> list[Plot | Paths]:
        groups, (column, label) = by_label(results), self.tracked
        first = "seconds" if request.seconds else "step"
        plots = [
            curves_plot(f"{self.name}-curves", "Training", groups, first=first),
            tracked_curves(f"{self.name}-{column}", label.capitalize(), label, groups, column),
        ]
        return [replace(plot, focus=late_focus(plot.lines)) for plot in plots if plot is not None]

    def sentence(self, rows: Sequence[Row]) -> str:
        first = [row for row in rows if row.metric == rows[0].metric and row.mean is not None]
        order = sorted(first, key=lambda row: row.mean or 0.0)
        named = ", ".join(f"{row.optimizer} {row.mean:.4g}" for row in order)
        return f"Lowest {rows[0].metric} first: {named}." if order else "Every run diverged."


def speed(curve: Curve) -> float:
    """Steps a second of training."""
    return float(len(curve["step"]) / curve["seconds"][-1])


def last_tracked(curve: Curve, column: str) -> float:
    """The mean over the last tenth of the measurements of a tracked quantity."""
    values = curve.tracked(column)[1]
    return float(values[-max(1, len(values) // 10) :].mean()) if len(values) else float("nan")


def learning_curves(results: Results, tracked: str, label: str) -> Figure:
    """Training loss by step, by time and beside the best optimizer's, and a tracked quantity by step."""
    figure, (by_step, by_time, beside, last) = canvas(2, 2, size=(5.6, 3.8))
    looks = styles(cell.label for cell in results)
    whole = {cell: curves for cell, curves in results.items() if not any(curve.diverged for curve in curves)}
    best = min(whole, key=lambda cell: mean(tail(curve) for curve in whole[cell]), default=None)
    for cell, curves in results.items():
        fine = [curve for curve in curves if not curve.diverged]
        lost = len(curves) - len(fine)
        name = f"{cell.label} ({lost} of {len(curves)} diverged)" if lost else cell.label
        drawn = looks[cell.label]
        if not fine:
            by_step.plot([], [], color=drawn.color, ls=drawn.ls, label=name)
            continue
        band(by_step, *binned(fine, bins=60), name, drawn)
        steps, losses = binned(fine, bins=20)
        band(by_time, seconds_at(fine, steps), losses, name, drawn)
        if best is not None and cell in whole and len(whole[cell]) == len(whole[best]):
            band(beside, steps, losses - binned(whole[best], bins=20)[1], name, drawn)
        _draw_tracked(last, fine, tracked, name, drawn)
    by_step.set(xlabel="step", ylabel="training loss", title="Training, by step")
    by_time.set(xlabel="seconds of training", ylabel="training loss", title="Training, by time")
    of = "the best" if best is None else best.label
    beside.set(xlabel="step", ylabel="difference of training losses", title=f"Training, from {of} on the same seed")
    last.set(xlabel="step", ylabel=label, title=f"{label.capitalize()}, by step")
    for axes in (by_step, by_time, beside, last):
        _focus(axes)
    figure.legend(*by_step.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def seconds_at(curves: Sequence[Curve], steps: np.ndarray) -> np.ndarray:
    """How long training took until these steps, in the mean."""
    every = [np.interp(steps, curve["evaluations"], curve["seconds"].astype(np.float64)) for curve in curves]
    middle: np.ndarray = np.stack(every).mean(0)
    return middle


def _draw_tracked(axes: Axes, curves: Sequence[Curve], column: str, name: str, drawn: Style) -> None:
    measured = [curve.tracked(column) for curve in curves]
    length = min(len(values) for _, values in measured)
    if length:
        values = np.stack([values[:length] for _, values in measured])
        band(axes, measured[0][0][:length], values, name, drawn)


def _focus(axes: Axes) -> None:
    """Show what most curves do after their first steps: one that explodes does not flatten the others."""
    drawn = [np.asarray(line.get_ydata(), dtype=np.float64) for line in axes.get_lines()]
    late = [part[len(part) // 10 :] for part in drawn]
    ranges = np.array([(part.min(), part.max()) for part in late if part.size and np.isfinite(part).all()])
    if len(ranges):
        low, high = ranges[:, 0].min(), np.median(ranges[:, 1])
        room = 0.15 * (high - low) or 1.0
        axes.set_ylim(low - room, high + room)
