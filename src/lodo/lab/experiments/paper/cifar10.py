"""Image classification: ResNet-18 on CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from lodo.estimate import available, memory_estimate, readable
from lodo.lab import data
from lodo.lab.experiments.base import Request, Results, tail
from lodo.lab.experiments.paper.images import SPEED, NetworkExperiment, last_tracked, speed
from lodo.lab.optimizers import hyperparameters
from lodo.lab.show.tables import Paper, Row
from lodo.lab.tasks.resnet import count_weights

TRAINING = "training loss over the last 10 %"
ACCURACY = "test accuracy over the last 10 %"
AT_3000: dict[str, dict[str, Paper]] = {
    TRAINING: {
        "Adam": (0.326, 0.008),
        "Momentum": (0.386, 0.010),
        "RMSprop": (2.380, 0.375),
        "Yogi": (0.398, 0.006),
        "LARS": (0.296, 0.026),
        "LODO": (0.624, 0.027),
    },
    ACCURACY: {
        "Adam": (0.873, 0.002),
        "Momentum": (0.881, 0.006),
        "RMSprop": (0.434, 0.043),
        "Yogi": (0.885, 0.003),
        "LARS": (0.872, 0.006),
        "LODO": (0.845, 0.009),
    },
}
AT_24K_SECONDS: dict[str, dict[str, Paper]] = {
    TRAINING: {
        "Adam": (0.446, 0.016),
        "Momentum": (0.563, 0.031),
        "RMSprop": (2.077, 0.191),
        "Yogi": (0.552, 0.022),
        "LARS": (0.403, 0.034),
        "LODO": (1.377, 0.110),
    },
    ACCURACY: {
        "Adam": (0.863, 0.003),
        "Momentum": (0.864, 0.008),
        "RMSprop": (0.466, 0.040),
        "Yogi": (0.869, 0.005),
        "LARS": (0.864, 0.007),
        "LODO": (0.674, 0.035),
    },
}
PAPER_SPEED: dict[str, Paper] = {
    "Adam": (0.0793, 0.0003),
    "Momentum": (0.0794, 0.0002),
    "RMSprop": (0.0794, 0.0001),
    "Yogi": (0.0791, 0.0004),
    "LARS": (0.0788, 0.0003),
    "LODO": (0.0316, 0.0003),
}


class Cifar10Experiment(NetworkExperiment):
    """The paper's six optimizers, and LODO with the robust recipe, which needs two thirds of the memory."""

    dataset = "cifar10"
    digest = data.CIFAR10_DIGEST
    tracked = ("test_accuracy", "test accuracy")
    quick_task: ClassVar[Mapping[str, Any]] = {"model": "resnet8", "batch": 64, "train_size": 1_000, "test_size": 250}
    optimizers = "adam, momentum, rmsprop, yogi, lars, lodo, lodo(recipe='robust')"

    def rows(self, request: Request, results: Results) -> list[Row]:
        paper = AT_3000 if request.seconds is None else AT_24K_SECONDS
        accuracy = partial(last_tracked, column="test_accuracy")
        return [
            *self.table(TRAINING, results, tail, paper[TRAINING]),
            *self.table(ACCURACY, results, accuracy, paper[ACCURACY], largest_first=True),
            *self.table(SPEED, results, speed, PAPER_SPEED, largest_first=True),
        ]

    def notes(self, request: Request, results: Results) -> list[str]:
        model = request.task_options.get("model", "resnet18")
        return [
            f"{model}, {count_weights(model):,} weights; padded, cropped and mirrored images; the loss has an L2 term.",
            *super().notes(request, results),
        ]

    def needs(self, request: Request) -> list[str]:
        """How much memory LODO's state needs, and how much is available."""
        n = count_weights(request.task_options.get("model", "resnet18"))
        free = available(torch.device("cpu"))
        lines = []
        for choice in request.choices:
            if choice.optimizer == "lodo":
                options = hyperparameters(self.task, choice)
                shaping = {name: options[name] for name in _SHAPING if name in options}
                lines.append(f"{choice.label} needs {memory_estimate(n, **shaping)} for {n:,} weights.")
        if lines and free is not None:
            lines.append(
                f"{readable(free)} is available, shared by as many runs as there are --workers; --workers 0 "
                "does one run at a time, on all cores."
            )
        return lines


_SHAPING = ("preconditioner", "momentum", "meta_optimizer", "save_activations", "recipe")  # what memory depends on
