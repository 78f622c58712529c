"""Image generation on MNIST: the table of optimizers, the ablations, the effect of momentum, and drawn digits."""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from rich.progress import track

from lodo.lab import data
from lodo.lab.experiments.base import Plan, Request, Results, tail
from lodo.lab.experiments.paper.images import SPEED, NetworkExperiment, speed
from lodo.lab.optimizers import paper_hyperparameters
from lodo.lab.run import Curve, read_weights, threads
from lodo.lab.show.plots import Axis, Figure, Line, Pixels, Plot
from lodo.lab.show.tables import Paper, Row
from lodo.lab.tasks.generator import inputs, sample

log = logging.getLogger(__name__)

TRAINING = "training loss over the last 10 %, nats a pixel"
TEST = "test loss at the end, nats a pixel"
# The paper's tables: training loss, test loss and steps a second, after 300k steps and after 50k seconds.
AT_300K: dict[str, dict[str, Paper]] = {
    TRAINING: {
        "Adam": (0.830, 0.005),
        "Momentum": (0.708, 0.005),
        "RMSprop": (0.917, 0.010),
        "Yogi": (0.683, 0.002),
        "LARS": (0.701, 0.006),
        "LODO": (0.696, 0.004),
        "LODO-Global": (0.770, 0.035),
        "LODO-Residuals": (0.701, 0.004),
        "LODO-No-Momentum": (0.753, 0.007),
        "LODO-SGD": (0.709, 0.004),
    },
    TEST: {
        "Adam": (0.809, None),
        "Momentum": (0.689, None),
        "RMSprop": (0.931, None),
        "Yogi": (0.686, None),
        "LARS": (0.688, None),
        "LODO": (0.689, None),
        "LODO-Global": (0.747, None),
        "LODO-Residuals": (0.693, None),
        "LODO-No-Momentum": (0.750, None),
        "LODO-SGD": (0.698, None),
    },
}
AT_50K_SECONDS: dict[str, dict[str, Paper]] = {
    TRAINING: {
        "Adam": (0.859, 0.009),
        "Momentum": (0.698, 0.005),
        "RMSprop": (0.920, 0.014),
        "Yogi": (0.677, 0.003),
        "LARS": (0.702, 0.006),
        "LODO": (0.698, 0.005),
        "LODO-Global": (0.919, 0.139),
        "LODO-Residuals": (0.750, 0.008),
        "LODO-No-Momentum": (0.756, 0.007),
        "LODO-SGD": (0.714, 0.004),
    },
    TEST: {
        "Adam": (0.854, None),
        "Momentum": (0.685, None),
        "RMSprop": (0.899, None),
        "Yogi": (0.674, None),
        "LARS": (0.688, None),
        "LODO": (0.689, None),
        "LODO-Global": (0.801, None),
        "LODO-Residuals": (0.741, None),
        "LODO-No-Momentum": (0.752, None),
        "LODO-SGD": (0.707, None),
    },
}
PAPER_SPEED: dict[str, Paper] = {
    "Adam": (7.08, 0.03),
    "Momentum": (7.10, 0.03),
    "RMSprop": (7.10, 0.02),
    "Yogi": (7.42, 0.02),
    "LARS": (5.89, 0.02),
    "LODO": (5.64, 0.02),
    "LODO-Diagonal": (9.92, 0.09),
    "LODO-Global": (9.92, 0.03),
    "LODO-Residuals": (3.31, 0.03),
    "LODO-No-Momentum": (5.46, 0.06),
    "LODO-SGD": (5.44, 0.02),
}
_LARGEST_BETA = paper_hyperparameters("mnist", "lodo")["beta"]
BETAS = [round(1 - (1 - _LARGEST_BETA) ** (i / 7), 4) for i in range(8)]  # 1 - beta on a logarithmic grid
GRID = 16  # drawn images of each optimizer


class MnistExperiment(NetworkExperiment):
    """The paper's six optimizers, and LODO with the robust recipe."""

    dataset = "mnist"
    digest = data.MNIST_DIGEST
    tracked = ("validation_loss", "validation loss")
    pictures: ClassVar[tuple[str, ...]] = ("mnist-inputs", "mnist-samples")
    quick_task: ClassVar[Mapping[str, Any]] = {"batch": 32, "validation_size": 500, "test_size": 1_000}
    optimizers = "adam, momentum, rmsprop, yogi, lars, lodo, lodo(recipe='robust')"

    def rows(self, request: Request, results: Results) -> list[Row]:
        paper = AT_300K if request.seconds is None else AT_50K_SECONDS
        return [
            *self.table(TRAINING, results, tail, paper[TRAINING]),
            *self.table(TEST, results, test_loss, paper[TEST]),
            *self.table(SPEED, results, speed, PAPER_SPEED, largest_first=True),
        ]

    def notes(self, request: Request, results: Results) -> list[str]:
        notes = [
            "The loss is the cross-entropy of one pixel's brightness in 256 steps, given the pixels before it; one "
            f"random pixel of each of {request.task_options.get('batch', 256)} images makes a batch.",
            *super().notes(request, results),
        ]
        for name, option in (("Validation", "validation_size"), ("Test", "test_size")):
            size = request.task_options.get(option)
            notes.append(f"{name}: {'all pixels' if size is None else f'{size:,} random pixels'} of its images.")
        return notes

    def draw_pictures(self, request: Request, results: Results) -> list[Figure]:
        return [draw_inputs(f"{self.name}-inputs"), *draw_samples(f"{self.name}-samples", results)]


class AblationsExperiment(MnistExperiment):
    """LODO, and LODO without one of its parts."""

    optimizers = "lodo, lodo_diagonal, lodo_global, lodo_residuals, lodo_no_momentum, lodo_sgd"
    pictures = ("mnist-ablations-samples",)

    def notes(self, request: Request, results: Results) -> list[str]:
        return [
            *super().notes(request, results),
            "LODO-Global is one learned rate and LODO-No-Momentum is LODO with beta = 0, as the paper's text says. In "
            "the authors' code the first builds the diagonal class and the second the residual one, so "
            "the paper's results for these two may not be what they claim.",
            "The paper reports LODO-Diagonal as diverged.",
        ]


class MomentumExperiment(MnistExperiment):
    """LODO with eight values of beta, from none to the paper's best."""

    optimizers = ", ".join(f"lodo(beta={beta})" for beta in BETAS)
    pictures = ()

    def plan(self, request: Request) -> Plan:
        plan = super().plan(request)
        for cell, (run, *_) in plan.items():
            if "beta" not in run.options:
                raise ValueError(f"optimizers must have an option beta, such as lodo(beta=0.5), got {cell.label}")
        return plan

    def figures(self, request: Request, results: Results) -> list[Figure]:
        rows = self.table(TRAINING, results, tail, {})
        betas = [float(curves[0].run.options["beta"]) for curves in results.values()]
        found = sorted(zip(betas, rows, strict=True), key=lambda point: point[0])
        there = [(b, row.mean, row.std or 0.0) for b, row in found if row.mean is not None and not row.diverged]
        beta, mean, std = np.array(there).reshape(-1, 3).T
        lines = [Line("LODO", 1 - beta, mean, mean - std, mean + std, names=list(map(_named, beta)), mark="both")]
        if lost := {b: f"{row.diverged} of {row.seeds} runs" for b, row in found if row.diverged}:
            height = np.full(len(lost), (mean + std).max(initial=1.0))
            names = [f"{_named(b)}: {runs}" for b, runs in lost.items()]
            place = 1 - np.array(list(lost))
            lines.append(Line("diverged", place, height, names=names, mark="points", symbol="cross", size=7))
        x = Axis(r"$\beta$", log=True, ticks={1 - b: f"{b:g}" for b, _ in found}, reversed=True)
        by_beta = Plot("beta", "The momentum of LODO", x, Axis("training loss over the last 10 %"), lines)
        (curves,) = super().figures(request, results)
        return [Figure(self.name, [by_beta]), replace(curves, name=f"{self.name}-curves")]

    def draw_pictures(self, request: Request, results: Results) -> list[Figure]:
        return []


def _named(beta: float) -> str:
    return f"beta = {beta:g}"


def test_loss(curve: Curve) -> float | None:
    """The loss on the test images after the last step; None if it was not measured."""
    return curve.final.get("test_loss")


test_loss.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest thinks


def draw_inputs(name: str) -> Figure:
    """What the network sees of five images: the paper's picture of preprocessed data."""
    images = data.load("mnist").train.images[:5]
    side = images.shape[-1]
    queries = (side * side * torch.tensor([0.3, 0.45, 0.55, 0.7, 0.9])).long() + 3
    x = inputs(images, queries).numpy()
    titles = ("known pixels", "left of the query", "known", "row", "column")
    panels = [
        Pixels(
            f"{row}-{column}",
            title if row == 0 else "",
            x[column, :, :, row],
            (0.0 if column == 0 else -1.0, 1.0),
        )
        for row in range(len(images))
        for column, title in enumerate(titles)
    ]
    return Figure(name, panels, columns=len(titles), size=(1.1, 1.1))


def draw_samples(name: str, results: Results) -> list[Figure]:
    """A grid of images drawn by the network of each optimizer's first seed; no figure if no network was kept."""
    networks = {cell.label: curves[0].weights for cell, curves in results.items() if curves[0].weights is not None}
    if not networks:
        return []
    side = data.load("mnist").train.images.shape[-1]
    panels = []
    for label, path in track(networks.items(), "drawing digits", transient=True):
        assert path is not None
        try:
            weights = read_weights(path)[1]
        except ValueError as error:
            log.warning("no images of %s are drawn: %s", label, error)
            continue
        images = grid(draw_images(weights, GRID, side, seed=0))
        panels.append(Pixels(label, textwrap.fill(label, 32), images, (0.0, 255.0)))
    return [Figure(name, panels, columns=4, size=(2.4, 2.6))] if panels else []


def draw_images(weights: Sequence[torch.Tensor], number: int, side: int, seed: int) -> np.ndarray:
    """Images drawn pixel by pixel, as image x row x column."""
    with threads(1):
        return sample(weights, number, side, torch.Generator().manual_seed(seed)).numpy()


def grid(images: np.ndarray) -> np.ndarray:
    """Images side by side, in a grid that is as square as their number allows.

    >>> grid(np.ones((4, 2, 3))).shape
    (4, 6)
    """
    number, rows, columns = images.shape
    across = math.ceil(math.sqrt(number))
    down = math.ceil(number / across)
    whole = np.zeros((down * across, rows, columns), dtype=images.dtype)
    whole[:number] = images
    return whole.reshape(down, across, rows, columns).swapaxes(1, 2).reshape(down * rows, across * columns)
