"""The Rosenbrock function: the appendix's table, the learning curves and the trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from matplotlib.figure import Figure

from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results
from lodo.lab.run import Curve
from lodo.lab.show.figures import canvas, styles
from lodo.lab.show.plots import Paths, Plot
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

    optimizers = "adam, rmsprop, momentum, yogi, lodo, lodo(width=2.0)"

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

    def figures(self, request: Request, results: Results) -> dict[str, Figure]:
        return {"rosenbrock-curves": _curves(results), "rosenbrock-trajectories": _trajectories(results)}

    def plots(self, request: Request, results: Results) -> list[Plot | Paths]:
        return [*super().plots(request, results), *trajectories(results)]

    def notes(self, request: Request, results: Results) -> list[str]:
        return [
            "Only LODO is random here, by its permutations and blocks; the others give the same run for every seed.",
            "The hidden layers are 8 wide, as in the authors' code; 'LODO (width=2.0)' has the 4 of the paper's text.",
            "RMSprop's run is chaotic: a change of its start by 1e-14 alters the figure twofold.",
            "Momentum's figure does not follow from the printed hyperparameters (docs/reproduction.md).",
        ]

    def sentence(self, rows: Sequence[Row]) -> str:
        means = {row.optimizer: row.mean for row in rows if row.mean is not None}
        order = sorted(means, key=lambda name: means[name])
        return "Lowest loss at the end first: " + ", ".join(f"{name} {means[name]:.3g}" for name in order) + "."


def late(curve: Curve) -> float:
    """The mean loss over the last tenth of the run, both ends included: the paper's steps 180 to 200 are 21."""
    evaluations = curve["evaluations"]
    return float(curve["loss"][evaluations >= 0.9 * evaluations[-1]].astype(np.float64).mean())


def trajectories(results: Results) -> list[Paths]:
    """The paths of the first seeds over the contours."""
    paths = {}
    for cell, (first, *_) in results.items():
        if "x" in first.columns:
            x, y = (np.append(start, first[name]) for name, start in zip("xy", START, strict=True))
            paths[cell.label] = (x, y, rosenbrock(torch.from_numpy(x), torch.from_numpy(y)).numpy())
    if not paths:
        return []
    x, y = np.linspace(-2.2, 2.2, 133), np.linspace(-1.2, 3.2, 133)
    height = rosenbrock(torch.from_numpy(x)[None, :], torch.from_numpy(y)[:, None]).numpy()
    marked = {"start": START, "minimum": MINIMUM}
    title = "Trajectories of the first seed"
    return [Paths("rosenbrock-paths", title, paths, x, y, np.log10(np.maximum(height, 1e-4)), marked, SHOWN)]


def _metric(request: Request) -> str:
    end = request.evaluations
    return f"mean loss over steps {end * 9 // 10} to {end}" if end else "mean loss over the last 10 %"


def _curves(results: Results) -> Figure:
    figure, (axes,) = canvas()
    looks = styles(cell.label for cell in results)
    for cell, curves in results.items():
        drawn = looks[cell.label]
        logs = [np.log(np.maximum(curve["loss"], 1e-300)) for curve in curves if not curve.diverged]
        if not logs:
            continue
        shortest = min(map(len, logs))
        values = np.stack([log[:shortest] for log in logs])
        at, middle = np.arange(1, shortest + 1), values.mean(0)
        axes.plot(at, np.exp(middle), color=drawn.color, ls=drawn.ls, label=cell.label)
        if len(values) > 1 and np.any(spread := values.std(0, ddof=1)):
            axes.fill_between(at, np.exp(middle - spread), np.exp(middle + spread), color=drawn.color, alpha=0.2, lw=0)
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss", title="Rosenbrock function")
    axes.legend()
    return figure


def _trajectories(results: Results) -> Figure:
    figure, (axes,) = canvas(size=(6.5, 4.6))
    x, y = torch.meshgrid(torch.linspace(-2.2, 2.2, 400), torch.linspace(-1.2, 3.2, 400), indexing="xy")
    axes.contour(x, y, rosenbrock(x, y), levels=np.logspace(-3, 1.2, 15), colors="0.8", linewidths=0.6)
    looks = styles(cell.label for cell in results)
    for cell, curves in results.items():
        drawn, first = looks[cell.label], curves[0]
        if "x" in first.columns:
            path = [np.append(start, first[name][:SHOWN]) for name, start in zip("xy", START, strict=True)]
            axes.plot(*path, color=drawn.color, ls=drawn.ls, lw=0.9, marker="o", ms=1.8, label=cell.label)
    axes.plot(*START, marker="*", color="red", ms=12, ls="none", label="start", zorder=5)
    axes.plot(*MINIMUM, marker="*", color="green", ms=12, ls="none", label="minimum", zorder=5)
    axes.set(xlim=(-2.2, 2.2), ylim=(-1.2, 3.2), xlabel="x", ylabel="y", title=f"The first {SHOWN} steps, first seed")
    axes.grid(visible=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
