"""What the experiments with real networks share: tables that rank optimizers, and learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean, stdev
from typing import ClassVar

import numpy as np

from lodo.lab import data
from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, by_label, digest_of, step_time, tail
from lodo.lab.run import Curve
from lodo.lab.show.curves import Groups, late_range, learning_curves, mean_line, progress, thinned, tracked_curves
from lodo.lab.show.plots import Axis, Figure, Plot
from lodo.lab.show.tables import Paper, Row, Value, measure, with_spread

SPEED = "steps a second, while runs shared the machine"


@dataclass(frozen=True)
class RankedRow(Row):
    """A result with its rank, ours and the paper's, so that runs of another size can be compared too.

    All optimizers see the same data and first weights for a seed, so the difference from the best is more certain than
    either mean: ``behind`` is its mean over seeds and ``behind_std`` its standard deviation.
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


def ranked(rows: Sequence[Row], values: Sequence[Sequence[float | None]], largest_first: bool = False) -> list[Row]:
    """Rows with their ranks, among ours and among the paper's; ``values`` are those of each seed, where it has one."""
    sign = -1 if largest_first else 1

    def ranks(values: Mapping[str, float | None]) -> dict[str, int]:
        order = sorted((sign * value, name) for name, value in values.items() if value is not None)
        return {name: i + 1 for i, (_, name) in enumerate(order)}

    ours = ranks({row.optimizer: row.mean for row in rows})
    paper = ranks({row.optimizer: row.paper_mean for row in rows})
    best = next((of for row, of in zip(rows, values, strict=True) if ours.get(row.optimizer) == 1), [])
    found: list[Row] = []
    for row, of in zip(rows, values, strict=True):
        both = [(a, b) for a, b in zip(of, best, strict=False) if a is not None and b is not None]
        pairs = [mine - other for mine, other in both if math.isfinite(mine - other)]
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
    """Optimizers on a network and real data; a subclass names the data, the metrics and the paper's results."""

    dataset: ClassVar[str]
    digest: ClassVar[str]  # that of the original data
    measurements: ClassVar[int] = 30  # of the tracked column, in a run
    tracked: ClassVar[tuple[str, str]]  # the column that is plotted, and its label
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
        value: Value,
        paper: Mapping[str, Paper],
        largest_first: bool = False,
    ) -> list[Row]:
        """One ranked table."""
        none: Paper = (None, None)
        rows = [
            measure(cell.label, metric, curves, value, paper.get(cell.label, none)) for cell, curves in results.items()
        ]
        values = [[None if c.diverged else value(c) for c in curves] for curves in results.values()]
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

    def figures(self, request: Request, results: Results) -> list[Figure]:
        groups, first, (column, label) = by_label(results), request.first_axis, self.tracked
        training = learning_curves("curves", "Training", groups, y=Axis("training loss"), first=first, by_time=True)
        tracked = tracked_curves(column, label.capitalize(), groups, column, y=Axis(label), first=first)
        panels = [training, difference_plot(groups), tracked]
        closer = [replace(plot, y=replace(plot.y, range=late_range(plot.lines))) for plot in panels if plot.lines]
        return [Figure(self.name, closer, columns=2, size=(5.6, 3.8), shared_legend=True)]

    def sentence(self, rows: Sequence[Row]) -> str:
        first = [row for row in rows if row.metric == rows[0].metric and row.mean is not None]
        order = sorted(first, key=lambda row: row.mean or 0.0)
        named = ", ".join(f"{row.optimizer} {row.mean:.4g}" for row in order)
        return f"Lowest {rows[0].metric} first: {named}." if order else "Every run diverged."


def speed(curve: Curve) -> float:
    """Steps a second of training, as far as its median tells."""
    evaluations_a_step = float(curve["evaluations"][-1] / len(curve["step"]))
    return 1e6 / (step_time([curve]) * evaluations_a_step)


def last_tracked(curve: Curve, column: str) -> float | None:
    """The mean over the last tenth of the measurements of a tracked quantity; None if there are none."""
    values = curve.tracked(column)[1]
    return float(values[-max(1, len(values) // 10) :].mean()) if len(values) else None


def difference_plot(groups: Groups) -> Plot:
    """Training losses minus those of the best optimizer on the same seed."""
    whole = {label: curves for label, curves in groups.items() if not any(curve.diverged for curve in curves)}
    if not whole:
        return Plot("difference", "Training", Axis("step"), Axis("difference of training losses"), [])
    best = min(whole, key=lambda label: mean(tail(curve) for curve in whole[label]))
    length = min(len(curve["step"]) for curves in whole.values() for curve in curves)
    losses = {label: thinned(curves, points=40, length=length) for label, curves in whole.items()}
    lines = [
        mean_line(label, {**columns, "value": columns["value"] - losses[best]["value"]})
        for label, columns in losses.items()
        if len(whole[label]) == len(whole[best])
    ]
    title = f"Training, from {best} on the same seed"
    return Plot("difference", title, Axis(progress(whole)), Axis("difference of training losses"), lines)
