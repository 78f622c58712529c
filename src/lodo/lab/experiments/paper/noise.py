"""The appendix's table and figure over noise variances."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, repeats
from lodo.lab.experiments.paper.bowl import compare_with_rivals, last, tracking_error
from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.tables import Paper, Row, measure
from lodo.lab.tasks.bowl import newton_loss

VARIANCES = (0.01, 0.1, 1.0, 10.0, 100.0)
PAPER: dict[str, tuple[float, ...]] = {
    "Adam": (2.03, 2.95, 15.23, 314.05, 18602.71),
    "Momentum": (0.17, 1.67, 16.52, 164.95, 1672.73),
    "RMSprop": (1.44, 3.20, 22.50, 1683.13, 28973.22),
    "Yogi": (0.17, 1.80, 15.51, 209.83, 7002.78),
    "L-BFGS (authors' slip)": (0.50, 4.89, 48.04, 494.04, 4962.88),
    "O-LBFGS": (0.14, 1.40, 14.13, 141.46, 1405.51),
    "LODO": (0.09, 0.89, 8.94, 89.54, 887.94),
    "Newton": (0.07, 0.74, 7.41, 74.12, 741.18),
}
PAPER_SIGMA = (0.7444, 0.7421, 0.7490, 0.7479, 0.7533)


def _loss(v: float) -> str:
    """The metric of a table."""
    return f"loss on fresh batches, v = {v:g}"


class NoiseExperiment(Experiment):
    """The bowl with weaker and stronger noise, hyperparameters untouched."""

    optimizers = "adam, momentum, rmsprop, yogi, lbfgs, lbfgs_slip, olbfgs, lodo, newton"

    def plan(self, request: Request) -> Plan:
        if "v" in request.task_options:
            raise ValueError(f"v must not be among the task's options, because {self.name} sets it itself")
        return {
            Cell(choice.label, f"{v:g}"): [
                self.make_run(choice, seed, request, **({} if v == 1 else {"v": v})) for seed in range(request.seeds)
            ]
            for v in VARIANCES
            for choice in request.choices
        }

    def rows(self, request: Request, results: Results) -> list[Row]:
        paper = {} if request.task_options else PAPER
        rows: list[Row] = []
        for i, v in enumerate(VARIANCES):
            there = {cell.label: curves for cell, curves in results.items() if cell.variant == f"{v:g}"}
            counted: list[Row] = []  # of those that the paper counts in another way
            for label, curves in there.items():
                fresh = partial(tracking_error, fresh=True)
                reported: Paper = (paper[label][i], None) if label in paper else (None, None)
                if any(map(repeats, curves)):
                    rows.append(measure(label, _loss(v), curves, fresh))
                    counted.append(measure(label, f"{_loss(v)}, as the paper counts", curves, tracking_error, reported))
                else:
                    rows.append(measure(label, _loss(v), curves, fresh, reported))
            rows += counted
        for i, v in enumerate(VARIANCES):
            for cell, curves in results.items():
                if cell.variant == f"{v:g}" and any("sigma" in curve.columns for curve in curves):
                    reported = (PAPER_SIGMA[i], None) if paper and cell.label == "LODO" else (None, None)
                    rows.append(
                        measure(cell.label, f"sigma, v = {v:g}", curves, lambda curve: last(curve, "sigma"), reported)
                    )
        return rows

    def notes(self, request: Request, results: Results) -> list[str]:
        notes = ["The paper prints two decimals, so its smallest values are only known to about 5 %."]
        if any(repeats(curve) for curves in results.values() for curve in curves):
            notes.append("Losses are those of fresh batches; the paper also counts the second evaluation of a batch.")
        return notes

    def figures(self, request: Request, results: Results) -> list[Figure]:
        best = {v: newton_loss(v=v, **request.task_options) for v in VARIANCES}
        rows = {(row.optimizer, row.metric): row for row in self.rows(request, results)}
        losses, ratios = [], []
        for label in dict.fromkeys(cell.label for cell in results):
            there = [(v, row) for v in VARIANCES if (row := rows.get((label, _loss(v)))) and row.mean]
            v = np.array([v for v, _ in there])
            mean = np.array([row.mean for _, row in there])
            std = np.array([row.std or 0.0 for _, row in there])
            over = np.array([best[v] for v, _ in there])
            losses.append(Line(label, v, mean, mean - std, mean + std, mark="both", size=3))
            ratios.append(Line(label, v, mean / over, (mean - std) / over, (mean + std) / over, mark="both", size=3))
        x = Axis("noise variance $v$", log=True)
        panels = [
            Plot("losses", "Tracking error", x, Axis("loss on fresh batches", log=True), losses),
            Plot("ratios", "Tracking error over the best possible", x, Axis("loss over Newton's", log=True), ratios),
        ]
        return [Figure(self.name, panels, columns=2, shared_legend=True)]

    def sentence(self, rows: Sequence[Row]) -> str:
        ratios = [
            row.mean / v
            for v in VARIANCES
            for row in rows
            if row.optimizer == "LODO" and row.metric == _loss(v) and row.mean is not None
        ]
        at_one = {row.optimizer: row.mean for row in rows if row.metric == _loss(1) and row.mean is not None}
        if len(ratios) < 2:
            return compare_with_rivals(at_one, "tracks the moving minimum at v = 1 with a loss of")
        return (
            f"LODO's loss over v stays within {max(ratios) / min(ratios) - 1:.1%} "
            f"while v grows from {VARIANCES[0]:g} to {VARIANCES[-1]:g}; "
            + compare_with_rivals(at_one, "at v = 1 has a loss of")
        )
