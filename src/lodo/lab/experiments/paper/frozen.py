"""The paper's "Pretrained and Frozen Preconditioner": learn, freeze, move to a new bowl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results
from lodo.lab.experiments.paper.bowl import check_noise
from lodo.lab.optimizers import Choice, hyperparameters
from lodo.lab.run import Curve, Run
from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.styles import Style
from lodo.lab.show.tables import Paper, Row, measure

AFTER = 200  # steps after the change that are run
AT = 10  # "within 10 steps"
METRIC = f"log10 of the loss {AT} steps after the change"
LATER = f"log10 of the mean loss {AFTER // 2} to {AFTER} steps after the change"
PAPER: Paper = (round(math.log10(4.997e22), 2), None)
FROZEN = "frozen G, new bowl"
KEEPS = "G that keeps learning, new bowl"
FRESH = "fresh LODO, new bowl"
OWN = "frozen G, its own bowl"
_COLOURS = {FROZEN: "#aa4499", KEEPS: "#ddaa33", FRESH: "#0072b2", OWN: "#44aa99"}


class FrozenExperiment(Experiment):
    """A preconditioner that was learned on one bowl does harm on another."""

    optimizers = "lodo"

    def plan(self, request: Request) -> Plan:
        """Four cells, all LODO, in double precision because the losses exceed the range of single precision."""
        check_noise(request)
        if request.evaluations is None:
            raise ValueError("steps must be given for bowl-frozen instead of seconds: the change comes after them")
        if any(choice.optimizer != "lodo" for choice in request.choices) or len(request.choices) > 1:
            raise ValueError(f"optimizers must be lodo, with or without options, for {self.name}")
        learned = request.evaluations
        longer = replace(request, evaluations=learned + AFTER)
        fresh = replace(request, evaluations=AFTER)
        learning = request.choices[0]
        frozen = Choice("lodo_frozen", {**hyperparameters(self.task, learning), "freeze_at": learned})

        def runs(asked: Request, choice: Choice, **task_options: object) -> list[Run]:
            made = [
                self.make_run(choice, seed, asked, dtype="float64", **task_options) for seed in range(request.seeds)
            ]
            return [replace(run, track_every=0) for run in made]

        return {
            Cell(FROZEN): runs(longer, frozen, renew_at=learned),
            Cell(KEEPS): runs(longer, learning, renew_at=learned),
            Cell(FRESH): runs(fresh, learning),
            Cell(OWN): runs(longer, frozen),
        }

    def rows(self, request: Request, results: Results) -> list[Row]:
        paper = (None, None) if request.task_options else PAPER
        rows = []
        for cell, curves in results.items():
            alive = [replace(curve, diverged=len(_after(curve)) < AT) for curve in curves]  # ten steps after the change
            rows.append(measure(cell.label, METRIC, alive, _at, paper if cell.label == FROZEN else (None, None)))
        return rows + [measure(cell.label, LATER, curves, _later) for cell, curves in results.items()]

    def figures(self, request: Request, results: Results) -> list[Figure]:
        lines = [
            Line(cell.label, np.arange(1, len(losses) + 1), losses, style=Style(_COLOURS[cell.label], width=0.9))
            for cell, curves in results.items()
            for losses in map(_after, curves)
        ]
        title = f"After {request.evaluations:,} steps of learning, one line a seed"
        y = Axis("loss", log=True, range=(1e-1, 1e40))
        return [Figure(self.name, [Plot("after", title, Axis("steps after the change"), y, lines)])]

    def notes(self, request: Request, results: Results) -> list[str]:
        return ["One line of the figure is one seed. A run whose loss overflowed counts as diverged."]

    def sentence(self, rows: Sequence[Row]) -> str:
        means = {row.optimizer: row.mean for row in rows if row.metric == METRIC and row.mean is not None}
        frozen, keeps, fresh = (means.get(label, math.inf) for label in (FROZEN, KEEPS, FRESH))
        return (
            f"{AT} steps after the change the frozen preconditioner's loss is 10^{frozen:.1f}, that of one which keeps "
            f"learning 10^{keeps:.1f}, and that of a LODO that starts afresh 10^{fresh:.1f}."
        )


def _after(curve: Curve) -> np.ndarray:
    """The losses after the change: the last steps of a run that did not stop early."""
    planned = curve.run.evaluations
    assert planned is not None
    return curve["loss"].astype(np.float64)[max(0, planned - AFTER) :]


def _at(curve: Curve) -> float:
    return math.log10(_after(curve)[AT - 1])


def _later(curve: Curve) -> float:
    return math.log10(float(_after(curve)[AFTER // 2 :].mean()))
