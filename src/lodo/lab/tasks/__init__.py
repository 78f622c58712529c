"""What is optimized: a stream of losses, one fresh batch a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lodo._checks import check_choice
from lodo.lab.tasks.base import Task
from lodo.lab.tasks.bowl import Bowl, newton_loss
from lodo.lab.tasks.cifar10 import Cifar10
from lodo.lab.tasks.mlp import Mlp
from lodo.lab.tasks.mnist import Mnist
from lodo.lab.tasks.rosenbrock import Rosenbrock

__all__ = ["TASKS", "Bowl", "Cifar10", "Mlp", "Mnist", "Rosenbrock", "Task", "make_task", "newton_loss"]

TASKS: dict[str, type[Task]] = {"bowl": Bowl, "rosenbrock": Rosenbrock, "mlp": Mlp, "mnist": Mnist, "cifar10": Cifar10}


def make_task(name: str, options: Mapping[str, Any], seed: int) -> Task:
    """A fresh task by its name.

    >>> make_task("bowl", {"n": 10}, seed=0).params[0].shape
    torch.Size([10])
    """
    check_choice("task", name, tuple(TASKS))
    try:
        return TASKS[name](seed, **options)
    except TypeError as error:
        raise ValueError(f"{name} cannot be made with the options {dict(options)}: {error}") from error
