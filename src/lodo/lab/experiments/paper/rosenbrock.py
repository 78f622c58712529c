"""The Rosenbrock function: the appendix's table, the learning curves and the trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, by_label
from lodo.lab.optimizers import Choice, paper_hyperparameters
from lodo.lab.run import Curve
from lodo.lab.show.curves import learning_curves
from lodo.lab.show.plots import Axis, Contours, Figure
from lodo.lab.show.tables import Paper, Row, measure
from lodo.lab.tasks.rosenbrock import START, rosenbrock

PAPER: dict[str, Paper] = {
    "Adam": (0.00005342, None),
    "RMSprop": (0.0008967, None),
    "Momentum": (0.01397, None),
    "Yogi": (0.0007916, None),
    "LODO": (0.001040, 0.00002140),
}
MINIMUM = (1.0, 1.0)
SHOWN = 100  # steps of the trajectories, as in the paper's figure


class RosenbrockExperiment(Experiment):
    """Two parameters, a curved valley, no noise."""

    optimizers = "adam, rmsprop, momentum, yogi, lodo, lodo_narrow"

    @property
    def named(self) -> Mapping[str, Choice]:
        """LODO with hidden layers as wide as the paper's text says, instead of the authors' code."""
        settings = {**paper_hyperparameters(self.task, "lodo"), "preconditioner": "mixing(width=2.0)"}
        return {"lodo_narrow": Choice("lodo", title="LODO (width 2)", settings=settings)}

    def plan(self, request: Request) -> Plan:
        return {
            Cell(choice.label): [
                replace(self.make_run(choice, seed, request), track_every=1) for seed in range(request.seeds)
            ]
            for choice in request.choices
        }

    def rows(self, request: Request, results: Results) -> list[Row]:
        paper = {} if request.task_options else PAPER
        return [
            measure(cell.label, _metric(request), curves, late, paper.get(cell.label, (None, None)))
            for cell, curves in results.items()
        ]

    def figures(self, request: Request, results: Results) -> list[Figure]:
        curves = learning_curves(
            "curves",
            "Rosenbrock function",
            by_label(results),
            y=Axis("loss", log=True),
            first=request.first_axis,
            geometric=True,
        )
        return [Figure(f"{self.name}-curves", [curves]), *trajectories(f"{self.name}-trajectories", results)]

    def notes(self, request: Request, results: Results) -> list[str]:
        return [
            "Only LODO is random here, by its permutations and blocks; the others repeat one run for every seed.",
            "The hidden layers are 8 wide, as in the authors' code; 'LODO (width 2)' has the 4 of the paper's text.",
            "RMSprop's run is chaotic: moving its start by 1e-14 changes the result by a factor of two.",
            "Momentum's figure does not follow from the printed hyperparameters (docs/reproduction.md).",
        ]

    def sentence(self, rows: Sequence[Row]) -> str:
        means = {row.optimizer: row.mean for row in rows if row.mean is not None}
        order = sorted(means, key=lambda name: means[name])
        return "Lowest loss at the end first: " + ", ".join(f"{name} {means[name]:.3g}" for name in order) + "."


def late(curve: Curve) -> float:
    """The mean loss over the last tenth of the run, both ends included, as in the paper: steps 180 to 200."""
    evaluations = curve["evaluations"]
    return float(curve["loss"][evaluations >= 0.9 * evaluations[-1]].astype(np.float64).mean())


def trajectories(name: str, results: Results) -> list[Figure]:
    """The paths of the first seeds over the contours; no figure if none were recorded."""
    paths = {}
    marked = {"start": START, "minimum": MINIMUM}
    for cell, (first, *_) in results.items():
        if "x" in first.columns and not np.isnan(first["x"]).any():  # every step was measured
            x, y = (first[column].astype(np.float64) for column in "xy")
            if first.run.task_options.get("jitter"):
                marked.pop("start", None)  # it is another one for every seed
            else:
                x, y = (np.append(start, values) for start, values in zip(START, (x, y), strict=True))
            paths[cell.label] = (x, y, rosenbrock(torch.from_numpy(x), torch.from_numpy(y)).numpy())
    if not paths:
        return []
    x, y = np.linspace(-2.2, 2.2, 133), np.linspace(-1.2, 3.2, 133)
    height = rosenbrock(torch.from_numpy(x)[None, :], torch.from_numpy(y)[:, None]).numpy()
    contours = Contours(
        "paths",
        "Trajectories of the first seed",
        paths,
        x,
        y,
        np.log10(np.maximum(height, 1e-4)),
        levels=(-1.5, 1.2, 0.3),
        marked=marked,
        first=SHOWN,
    )
    return [Figure(name, [contours], size=(6.5, 4.6))]


def _metric(request: Request) -> str:
    end = request.evaluations
    return f"mean loss over steps {end * 9 // 10} to {end}" if end else "mean loss over the last 10 %"
