"""Table 1 and Figure 2: tracking the minimum of the noisy quadratic bowl."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from lodo._checks import check_real
from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, by_label, repeats, tail
from lodo.lab.optimizers import OPTIMIZERS, QUADRATIC
from lodo.lab.run import Curve
from lodo.lab.show.curves import Groups, learning_curves, tracked_curves
from lodo.lab.show.plots import Axis, Figure, Plot
from lodo.lab.show.styles import styles
from lodo.lab.show.tables import Paper, Row, measure
from lodo.lab.tasks.bowl import newton_loss

LOSS = "loss over the last 10 %, on fresh batches"
COUNTED = "loss over the last 10 %, as the paper counts: every evaluation of a batch"
SIGMA = "sigma at the end, estimated"
SIGMA_EXACT = "sigma at the end, exact"
# The paper's Table 1, and for sigma its table over noise variances at v = 1.
AT_100K: dict[str, Paper] = {
    "Adam": (15.28, 0.07),
    "Momentum": (16.59, 0.08),
    "RMSprop": (22.37, 0.06),
    "Yogi": (15.35, 0.10),
    "L-BFGS (authors' slip)": (49.30, 1.04),
    "O-LBFGS": (13.96, 0.08),
    "L2LBGDBGD": (14.79, 0.08),
    "LODO": (8.99, 0.05),
    "Levenberg-Marquardt": (7.40, 0.02),
    "Newton": (7.41, None),
}
AT_300_SECONDS: dict[str, Paper] = {
    "Adam": (15.26, 0.08),
    "Momentum": (16.56, 0.05),
    "RMSprop": (22.47, 0.13),
    "Yogi": (15.16, 0.05),
    "L-BFGS (authors' slip)": (40.60, 1.40),
    "O-LBFGS": (10.80, 0.17),
    "L2LBGDBGD": (14.81, 0.10),
    "LODO": (10.05, 0.22),
    "Levenberg-Marquardt": (7.35, 0.07),
    "Newton": (7.41, None),
}
PAPER_SIGMA: Paper = (0.7490, None)


class BowlExperiment(Experiment):
    """Every optimizer of Table 1."""

    optimizers = "adam, momentum, rmsprop, yogi, lbfgs, lbfgs_slip, olbfgs, l2l, lodo, bfgs, lm, newton"

    def plan(self, request: Request) -> Plan:
        check_noise(request)
        return self.by_choice(request)

    def rows(self, request: Request, results: Results) -> list[Row]:
        paper = {} if request.task_options else AT_100K if request.seconds is None else AT_300_SECONDS
        none: Paper = (None, None)
        rows: list[Row] = []
        counted: list[Row] = []  # of those that the paper counts in another way
        for (label, _), curves in results.items():
            fresh, paper_counts = partial(tracking_error, fresh=True), paper.get(label, none)
            if any(map(repeats, curves)):
                rows.append(measure(label, LOSS, curves, fresh))
                counted.append(measure(label, COUNTED, curves, tracking_error, paper_counts))
            else:
                rows.append(measure(label, LOSS, curves, fresh, paper_counts))
        rows += counted
        for metric, column in ((SIGMA, "sigma"), (SIGMA_EXACT, "sigma_exact")):
            rows += [
                measure(
                    cell.label,
                    metric,
                    curves,
                    partial(last, column=column),
                    PAPER_SIGMA if paper and cell.label == "LODO" else none,
                )
                for cell, curves in results.items()
                if any(column in curve.columns for curve in curves)
            ]
        return rows

    def notes(self, request: Request, results: Results) -> list[str]:
        best = newton_loss(**request.task_options)
        costs: dict[str, list[str]] = {}
        for known in OPTIMIZERS.values():
            if Cell(known.label) in results:
                costs.setdefault(known.cost, []).append(known.label)
        listed = "; ".join(f"{cost}: {', '.join(names)}" for cost, names in costs.items())
        notes = [f"Cost of a step: {listed}."] if costs else []
        notes += [f"The best possible loss, which is what the noise adds in one step, is {best:.4g}."]
        if any(repeats(curve) for curves in results.values() for curve in curves):
            notes.append(
                "L-BFGS and O-LBFGS evaluate every batch twice, before and after they move; each evaluation is a step. "
                "The first table has the evaluations before alone, which is what every other optimizer is judged by. "
                "The paper averages both, as the second table does."
            )
        notes.append("The figure shows fresh batches alone and ends at 12 times Newton's loss.")
        notes.append("A run counts as diverged if its loss is not finite or worse than that of a run that never moves.")
        if Cell("BFGS") in results:
            notes.append("The paper reports BFGS as diverged.")
        return notes

    def figures(self, request: Request, results: Results) -> list[Figure]:
        groups = by_label(results)
        distance, curves = distance_plot(request, groups), tracking_plot("curves", request, groups)
        return [Figure(self.name, [distance, curves] if distance.lines else [curves], columns=2)]

    def sentence(self, rows: Sequence[Row]) -> str:
        losses = {row.optimizer: row.mean for row in rows if row.metric == LOSS and row.mean is not None}
        return compare_with_rivals(losses, "tracks the moving minimum with a loss on fresh batches of")

    def _paper_length(self, request: Request) -> str:
        return super()._paper_length(request) if request.seconds is None else "300 s on its machine"


def check_noise(request: Request) -> None:
    """Refuse a bowl without noise, whose minimum does not move."""
    check_real("v", request.task_options.get("v", 1.0), low=0.0, open_low=True)


def distance_plot(request: Request, groups: Groups) -> Plot:
    """How far G is from the inverse Hessian, over the run: estimated, and exact where n is small."""
    y = Axis(r"$\sigma = \|I - GH\|_F / \sqrt{n}$")
    estimated, exact = (
        tracked_curves("sigma", "Distance from the inverse Hessian", groups, column, y=y, first=request.first_axis)
        for column in ("sigma", "sigma_exact")
    )
    looks = styles(groups)
    dashed = [
        replace(line, label=f"{line.label}, exact", style=replace(looks[line.label], dash="--")) for line in exact.lines
    ]
    return replace(estimated, lines=[*estimated.lines, *dashed], levels={"$G = 0$": 1.0})


def tracking_plot(name: str, request: Request, groups: Groups, title: str = "Tracking the moving minimum") -> Plot:
    """The loss on fresh batches, with Newton's as a level."""
    best = newton_loss(**request.task_options)
    return learning_curves(
        name,
        title,
        {label: curves for label, curves in groups.items() if label != "Newton"},
        y=Axis("loss on fresh batches", log=True, range=(0.85 * best, 12 * best)),
        first=request.first_axis,
        fine=lambda curve: not curve.diverged and tracking_error(curve) < math.inf,
        levels={f"Newton ({best:.4g})": best},
    )


def tracking_error(curve: Curve, fresh: bool = False) -> float:
    """The error that the paper reports; NaN for a run that did worse than one that never moves."""
    standing_still = newton_loss(**curve.run.task_options) * len(curve["step"])
    return error if (error := tail(curve, fresh=fresh)) < standing_still else math.nan


def last(curve: Curve, column: str) -> float | None:
    """The last measurement of a tracked quantity; None if there is none."""
    values = curve.tracked(column)[1]
    return float(values[-1]) if len(values) else None


_DENSE = frozenset(known.label for known in OPTIMIZERS.values() if known.cost == QUADRATIC)


def compare_with_rivals(
    losses: dict[str, float], verb: str, *, ours: str = "LODO", left_out: Collection[str] = _DENSE
) -> str:
    """A sentence that compares LODO with the best rival, leaving out those that a large network could not afford."""
    left_out = {ours, *left_out}
    rivals = {name: loss for name, loss in losses.items() if not {name, name.partition(" (")[0]} & left_out}
    if ours not in losses or not rivals:
        return "Nothing to compare: run LODO and at least one rival."
    rival = min(rivals, key=lambda name: rivals[name])
    loss, theirs = losses[ours], rivals[rival]
    return (
        f"{ours} {verb} {loss:.4g}, {abs(1 - loss / theirs):.0%} {'below' if loss < theirs else 'ABOVE'} "
        f"the best rival without an n x n matrix ({rival}, {theirs:.4g})."
    )
