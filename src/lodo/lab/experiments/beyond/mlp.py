"""A small network on real digits: every method at the best of several settings. Not in the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import mean, stdev
from typing import Any, ClassVar

import numpy as np

from lodo.lab import data
from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, digest_of, tail
from lodo.lab.experiments.paper.bowl import last
from lodo.lab.optimizers import Choice
from lodo.lab.run import Curve, Run
from lodo.lab.show.curves import learning_curves, tracked_curves
from lodo.lab.show.plots import Axis, Figure, Line, Plot, Shade
from lodo.lab.show.styles import Style, styles
from lodo.lab.show.tables import Row, Value, measure
from lodo.lab.tasks.mlp import BATCH, CLASSES, HIDDEN, SIDE

TUNING = 2  # seeds that choose the settings; the later ones are held out
PAPER, ROBUST = "LODO", "LODO (recipe='robust')"
# six settings of each method, around the best that were found on the tuning seeds
GRID = """
    adam(lr=0.001), adam(lr=0.002), adam(lr=0.003), adam(lr=0.004), adam(lr=0.006), adam(lr=0.01),
    momentum(lr=0.02), momentum(lr=0.04), momentum(lr=0.07), momentum(lr=0.1), momentum(lr=0.14), momentum(lr=0.2),
    lodo(beta=0.8, lr=0.7, meta_lr=0.0005), lodo(beta=0.9, lr=0.7, meta_lr=0.0005),
    lodo(beta=0.8, lr=1.0, meta_lr=0.0003), lodo(beta=0.9, lr=1.0, meta_lr=0.0003),
    lodo(beta=0.8, lr=1.0, meta_lr=0.0005), lodo(beta=0.9, lr=1.0, meta_lr=0.0005),
    lodo(recipe='robust', lr=0.7, meta_lr=0.0003), lodo(recipe='robust', lr=1.0, meta_lr=0.0003),
    lodo(recipe='robust', lr=0.7, meta_lr=0.0005), lodo(recipe='robust', lr=1.0, meta_lr=0.0005),
    lodo(recipe='robust', lr=0.7, meta_lr=0.001), lodo(recipe='robust', lr=1.0, meta_lr=0.001),
"""
HELD_OUT = "loss over the last 10 %, best setting, held-out seeds"
ACCURACY = "test accuracy at the end, %, best setting, held-out seeds"
BY_BETA = "loss over the last 10 %, best setting of each beta, held-out seeds"
EVERY = "loss over the last 10 %, every setting, tuning seeds"


@dataclass(frozen=True)
class SettingRow(Row):
    """The result of a method with one of its settings, and the standard error of the mean."""

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "setting", "mean ± s.d.", "standard error", "seeds")

    setting: str = ""
    error: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        error = "" if self.error is None else f"{self.error:.2g}"
        return self.optimizer, self.setting, self.ours, error, self.runs


class MlpExperiment(Experiment):
    """Settings are chosen on the tuning seeds alone, and results are those of the held-out seeds alone."""

    optimizers = GRID
    row = SettingRow
    least = TUNING + 1

    def plan(self, request: Request) -> Plan:
        """All settings on all seeds, the tuning seeds first."""
        found = digest_of(request, "mnist")
        every = max(1, request.evaluations // 10) if request.evaluations else 1000

        def runs(choice: Choice) -> list[Run]:
            seeds = range(TUNING + request.seeds)
            return [replace(self.make_run(choice, seed, request, digest=found), track_every=every) for seed in seeds]

        return {cell_of(choice): runs(choice) for choice in request.choices}

    def rows(self, request: Request, results: Results) -> list[Row]:
        best = list(chosen(results).values())
        held_out = {cell: curves[TUNING:] for cell, curves in results.items()}
        tuning = {cell: curves[:TUNING] for cell, curves in results.items()}
        return [
            *(_row(cell, HELD_OUT, held_out[cell], tail) for cell in best),
            *(_row(cell, ACCURACY, held_out[cell], _accuracy) for cell in best),
            *(_row(cell, BY_BETA, held_out[cell], tail) for cell in _best_of_each_beta(results)),
            *(_row(cell, EVERY, curves, tail) for cell, curves in tuning.items()),
        ]

    def notes(self, request: Request, results: Results) -> list[str]:
        widths = (SIDE**2, *request.task_options.get("hidden", HIDDEN), CLASSES)
        weights = sum((a + 1) * b for a, b in pairwise(widths))
        notes = [
            f"Layers of {'-'.join(map(str, widths))} with tanh between them, {weights:,} weights; cross-entropy of "
            f"{request.task_options.get('batch', BATCH)} images drawn with replacement.",
            _source(results),
            f"Of every method's settings the one with the lowest mean loss on the {TUNING} tuning seeds was chosen. A "
            "seed draws the same first weights and the same batches for all methods.",
        ]
        if paired := paired_difference(results):
            notes.append(
                f"Seed by seed, {ROBUST} minus {PAPER}, both at their best: {paired[0]:+.4f} with a standard error of "
                f"{paired[1]:.4f}."
            )
        return notes

    def figures(self, request: Request, results: Results) -> list[Figure]:
        best = chosen(results)
        looks = styles(best)
        groups = {_label(cell): results[cell][TUNING:] for cell in best.values()}
        by_label = {_label(cell): looks[method] for method, cell in best.items()}
        first = request.first_axis
        y = Axis("loss on fresh batches", log=True)
        curves = learning_curves("curves", "Best settings, held-out seeds", groups, y=y, first=first)
        accuracy = tracked_curves(
            "accuracy", "Test accuracy", groups, "test_accuracy", y=Axis("test accuracy"), first=first
        )
        curves, accuracy = (
            replace(plot, lines=[replace(line, style=by_label[line.label]) for line in plot.lines])
            for plot in (curves, accuracy)
        )
        height = max(4.0, 1.2 + 0.19 * len(results))
        figures = [Figure(self.name, [curves, settings_plot(results)], columns=2, size=(6.5, height))]
        return [*figures, Figure(f"{self.name}-accuracy", [accuracy])] if accuracy.lines else figures

    def sentence(self, rows: Sequence[Row]) -> str:
        losses = {row.optimizer: row.mean for row in rows if row.metric == HELD_OUT and row.mean is not None}
        ours = ROBUST if ROBUST in losses else PAPER
        rivals = [method for method in losses if method not in (PAPER, ROBUST)]
        compared = []
        if ours != PAPER and PAPER in losses:
            compared.append((PAPER, "the paper's algorithm at its best beta"))
        if ours in losses and rivals:
            best = min(rivals, key=lambda method: losses[method])
            compared.append((best, f"the best rival, {best}"))
        if not compared:
            return "Nothing to compare: run LODO and at least one rival."
        parts = []
        for theirs, name in compared:
            ratio = losses[ours] / losses[theirs]
            side = "below" if ratio < 1 else "ABOVE"
            parts.append(f"{abs(1 - ratio):.1%} {side} {name} ({losses[theirs]:.4f})")
        return f"{ours} has a loss of {losses[ours]:.4f}, {' and '.join(parts)}."

    def size(self, request: Request) -> str:
        return super().size(request).replace(" seed", " held-out seed")

    def about(self, request: Request) -> str:
        step = "A step is one evaluation of the loss and its gradient."
        return f"{self.size(request)}, settings chosen on {TUNING} others. Not in the paper. {step}"


def cell_of(choice: Choice) -> Cell:
    """The method and its setting: numbers are tuned, while words and switches make it another method.

    >>> cell_of(Choice("lodo", {"recipe": "robust", "lr": 0.3}))
    Cell(label="LODO (recipe='robust')", variant='lr=0.3')
    """
    words = {name: value for name, value in choice.options.items() if value is None or isinstance(value, (str, bool))}
    numbers = [f"{name}={value!r}" for name, value in choice.options.items() if name not in words]
    return Cell(Choice(choice.optimizer, words).label, ", ".join(numbers))


def chosen(results: Results) -> dict[str, Cell]:
    """The setting of every method that did best on the tuning seeds."""
    best: dict[str, Cell] = {}
    for cell in sorted(results, key=lambda cell: tuning_loss(results[cell])):
        best.setdefault(cell.label, cell)
    return {cell.label: best[cell.label] for cell in results}  # in the order of the results


def tuning_loss(curves: Sequence[Curve]) -> float:
    """The mean final loss over the tuning seeds; infinite if any diverged."""
    return mean(math.inf if curve.diverged else tail(curve) for curve in curves[:TUNING])


def paired_difference(results: Results) -> tuple[float, float] | None:
    """The robust recipe's loss minus the paper's over the held-out seeds: mean and standard error, if there is one."""
    best = chosen(results)
    if PAPER not in best or ROBUST not in best:
        return None
    pairs = zip(results[best[ROBUST]][TUNING:], results[best[PAPER]][TUNING:], strict=True)
    differences = [tail(a) - tail(b) for a, b in pairs if not (a.diverged or b.diverged)]
    if len(differences) < 2:
        return None
    return mean(differences), stdev(differences) / math.sqrt(len(differences))


def _best_of_each_beta(results: Results) -> list[Cell]:
    """The best setting for each beta of every method that was tried with several."""
    betas: dict[str, dict[float, dict[Cell, Sequence[Curve]]]] = {}
    for cell, curves in results.items():
        options = curves[0].run.options
        if "beta" in options:
            betas.setdefault(cell.label, {}).setdefault(options["beta"], {})[cell] = curves
    return [chosen(part)[label] for label, parts in betas.items() if len(parts) > 1 for part in parts.values()]


def _row(cell: Cell, metric: str, curves: Sequence[Curve], value: Value) -> SettingRow:
    row = measure(cell.label, metric, curves, value)
    error = None if row.std is None else row.std / math.sqrt(row.seeds - row.diverged)
    return SettingRow(**asdict(row), setting=cell.variant, error=error)


def _source(results: Results) -> str:
    """A sentence about the data, recognized by its digest."""
    digests = {curve.run.task_options.get("digest") for curves in results.values() for curve in curves}
    if digests == {data.DIGITS_DIGEST}:
        return "The data is NOT MNIST but scikit-learn's digits, images of 8 x 8 pixels as they are."
    images = "the central 24 x 24 pixels of its images, averaged 3 by 3"
    if digests == {data.MNIST_DIGEST}:
        return f"The data is the original MNIST: {images}."
    return f"The data is NOT the original MNIST but other files in the data folder: {images}."


def _label(cell: Cell) -> str:
    return ": ".join(filter(None, cell))


def _accuracy(curve: Curve) -> float | None:
    accuracy = last(curve, "test_accuracy")
    return None if accuracy is None else 100 * accuracy


def settings_plot(results: Results) -> Plot:
    """The loss at the end for every setting: its mean over tuning seeds, and every held-out seed."""
    looks, best = styles(cell.label for cell in results), chosen(results)
    lines, shades = [], []
    for row, (cell, curves) in enumerate(results.items()):
        style = Style(looks[cell.label].color)
        if best[cell.label] == cell:
            shades.append(Shade(row - 0.45, row + 0.45, style))
        losses = np.array([tail(curve) for curve in curves[TUNING:] if not curve.diverged])
        lines.append(_points("a held-out seed", losses, row, style, _label(cell), symbol="bar", size=7))
        loss = np.array([loss for loss in [tuning_loss(curves)] if math.isfinite(loss)])
        lines.append(_points("mean over tuning seeds", loss, row, style, _label(cell), symbol="ring", size=4.5))
    return Plot(
        "settings",
        "Every setting (the chosen one shaded)",
        Axis("loss over the last 10 %", log=True),
        Axis(ticks={row: _label(cell) for row, cell in enumerate(results)}, reversed=True),
        lines,
        shades=shades,
    )


def _points(label: str, losses: np.ndarray, row: int, style: Style, name: str, **shape: Any) -> Line:
    """Points in one row of the plot of settings."""
    places = np.full(len(losses), float(row))
    return Line(label, losses, places, names=[name] * len(losses), style=style, mark="points", **shape)
