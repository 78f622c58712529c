"""Table 1 and Figure 2: tracking the minimum of the noisy quadratic bowl."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from lodo._checks import check_real
from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, by_label, repeats, tail
from lodo.lab.optimizers import BASELINES, QUADRATIC
from lodo.lab.run import Curve
from lodo.lab.show.figures import band, binned, canvas, styles
from lodo.lab.show.plots import Paths, Plot, learning_curves, tracked_curves
from lodo.lab.show.tables import Paper, Row, measure
from lodo.lab.tasks import newton_loss

LOSS = "loss over the last 10 %"
FRESH = "loss over the last 10 %, fresh batches only"
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
        rows = [
            measure(cell.label, LOSS, curves, tracking_error, paper.get(cell.label, none))
            for cell, curves in results.items()
        ]
        rows += [
            measure(cell.label, FRESH, curves, partial(tracking_error, fresh=True))
            for cell, curves in results.items()
            if any(map(repeats, curves))
        ]
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
        for known in BASELINES.values():
            if Cell(known.label) in results:
                costs.setdefault(known.cost, []).append(known.label)
        listed = "; ".join(f"{cost}: {', '.join(names)}" for cost, names in costs.items())
        notes = [f"Cost of a step: {listed}."] if costs else []
        notes += [f"The best possible loss, what the noise adds in one step, is {best:.4g}."]
        if any(repeats(curve) for curves in results.values() for curve in curves):
            notes.append(
                "L-BFGS and O-LBFGS evaluate every batch twice, before and after their step. The paper averages both; "
                "the second table has the first alone, which is what every other optimizer is judged by."
            )
        notes.append("The figure shows fresh batches alone and ends at 12 times Newton's loss.")
        notes.append("A run counts as diverged if its loss is not finite or worse than that of never having moved.")
        if Cell("BFGS") in results:
            notes.append("The paper reports BFGS as diverged.")
        return notes

    def figures(self, request: Request, results: Results) -> dict[str, Figure]:
        figure, (left, right) = canvas(2)
        draw_sigma(left, results)
        draw_curves(
            right, results, "seconds" if request.seconds else "evaluations", newton_loss(**request.task_options)
        )
        return {"bowl": figure}

    def plots(self, request: Request, results: Results) -> list[Plot | Paths]:
        curves = tracking_plot(f"{self.name}-curves", request, by_label(results))
        columns = {"sigma": "Distance from the inverse Hessian, estimated", "sigma_exact": "The same, exact"}
        sigmas = [
            tracked_curves(
                f"{self.name}-{column}", title, "sigma = |I - G H| / sqrt(n)", by_label(results), column,
                levels={"G = 0": 1.0},
            )
            for column, title in columns.items()
        ]  # fmt: skip
        return [curves, *filter(None, sigmas)]

    def sentence(self, rows: Sequence[Row]) -> str:
        losses = {row.optimizer: row.mean for row in rows if row.metric in (LOSS, FRESH) and row.mean is not None}
        return compare(losses, "tracks the moving minimum with a loss of")  # on fresh batches, for all

    def _paper_length(self, request: Request) -> str:
        return super()._paper_length(request) if request.seconds is None else "300 s on its machine"


def check_noise(request: Request) -> None:
    """Without noise there is nothing to track."""
    check_real("v", request.task_options.get("v", 1.0), low=0.0, open_low=True)


def draw_sigma(axes: Axes, results: Results) -> None:
    """How far G is from the inverse Hessian, over the run."""
    looks = styles(cell.label for cell in results)
    for cell, curves in results.items():
        measured = [curve.tracked("sigma") for curve in curves if not curve.diverged and "sigma" in curve.columns]
        if measured:
            shortest = min(len(values) for _, values in measured)
            band(
                axes,
                measured[0][0][:shortest],
                np.stack([values[:shortest] for _, values in measured]),
                cell.label,
                looks[cell.label],
            )
    axes.axhline(1, color="black", lw=0.8, ls="--", label="G = 0")
    axes.set(xlabel="step", ylabel=r"$\sigma = \|I - G H\|_F / \sqrt{n}$", title="Distance from the inverse Hessian")
    axes.legend()


def tracking_plot(
    name: str, request: Request, groups: Mapping[str, Sequence[Curve]], title: str = "Tracking the moving minimum"
) -> Plot:
    """The loss on fresh batches, with Newton's as a level."""
    best = newton_loss(**request.task_options)
    return learning_curves(
        name,
        title,
        {label: curves for label, curves in groups.items() if label != "Newton"},
        first="seconds" if request.seconds else "step",
        fine=lambda curve: not curve.diverged and tracking_error(curve) < math.inf,
        log_y=True,
        levels={f"Newton ({best:.4g})": best},
        focus=(0.85 * best, 12 * best),
    )


def draw_curves(axes: Axes, results: Results, x: str, best: float) -> None:
    """Loss on fresh batches by step or by second, mean and spread over seeds, with Newton's line."""
    looks = styles(cell.label for cell in results)
    for cell, curves in results.items():
        fine = [curve for curve in curves if not curve.diverged and tracking_error(curve) < math.inf]
        lost = len(curves) - len(fine)
        label = f"{cell.label} ({lost} of {len(curves)} diverged)" if lost else cell.label
        if fine and cell.label != "Newton":
            band(axes, *binned(fine, x), label, looks[cell.label])
        elif not fine:
            axes.plot([], [], color=looks[cell.label].color, ls=looks[cell.label].ls, label=label)
    axes.axhline(best, color="black", ls=":", label=f"Newton ({best:.4g})")
    axes.set_yscale("log")
    axes.set_ylim(0.85 * best, 12 * best)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(
        xlabel="step" if x == "evaluations" else "seconds of training",
        ylabel="loss on fresh batches",
        title="Tracking the moving minimum (mean and s.d. over seeds)",
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def tracking_error(curve: Curve, fresh: bool = False) -> float:
    """The paper's figure; NaN for a run that did worse than never having moved."""
    standing_still = newton_loss(**curve.run.task_options) * len(curve["step"])
    return error if (error := tail(curve, fresh=fresh)) < standing_still else math.nan


def last(curve: Curve, column: str) -> float:
    """The last measurement of a tracked quantity."""
    values = curve.tracked(column)[1]
    return float(values[-1]) if len(values) else math.nan


_DENSE = frozenset(known.label for known in BASELINES.values() if known.cost == QUADRATIC)


def compare(losses: dict[str, float], verb: str, *, ours: str = "LODO", left_out: Collection[str] = _DENSE) -> str:
    """LODO against the best of the others, without those that a large network could not afford."""
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
