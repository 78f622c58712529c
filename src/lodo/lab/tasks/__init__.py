"""What is optimized: a stream of losses, one fresh batch a step.

Tasks go by name, and a task's module is imported when the task is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lodo._checks import check_choice
from lodo.lab.plugins import OptionError, check_options, import_object, is_plugin, option_names, words_of

if TYPE_CHECKING:
    from lodo.lab.tasks.base import Task as Task

__all__ = ["TASKS", "Task", "check_task", "find_task", "make_task"]

TASKS: dict[str, str | type[Task]] = {  # the class, or where it is
    "bowl": "lodo.lab.tasks.bowl:Bowl",
    "wide_bowl": "lodo.lab.tasks.wide_bowl:WideBowl",
    "rosenbrock": "lodo.lab.tasks.rosenbrock:Rosenbrock",
    "mlp": "lodo.lab.tasks.mlp:Mlp",
    "mnist": "lodo.lab.tasks.mnist:Mnist",
    "cifar10": "lodo.lab.tasks.cifar10:Cifar10",
    "autoencoder": "lodo.lab.tasks.autoencoder:Autoencoder",
    "cnn": "lodo.lab.tasks.cnn:Cnn",
    "resnet8": "lodo.lab.tasks.resnet8:Resnet8",
    "vit": "lodo.lab.tasks.vit:Vit",
    "gru": "lodo.lab.tasks.gru:Gru",
    "gpt": "lodo.lab.tasks.gpt:Gpt",
    "denoise": "lodo.lab.tasks.denoise:Denoise",
}


def __getattr__(name: str) -> Any:
    """`Task`, which needs torch, when it is asked for: the names of the tasks do not need it."""
    if name == "Task":
        from lodo.lab.tasks.base import Task

        return Task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check_task(name: str) -> None:
    """Raise an error unless ``name`` is one of `TASKS`, or of the form ``module:Name``.

    >>> check_task("mountain")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: task must be one of 'bowl', 'wide_bowl', 'rosenbrock', ..., got 'mountain'
    """
    if not is_plugin(name):
        check_choice("task", name, TASKS)


def find_task(name: str) -> type[Task]:
    """The class of a task: one of `TASKS`, or your own as ``module:Name``.

    The name after the colon is a subclass of `Task`, or a function of the kind that `lodo.lab.compare` takes.

    >>> find_task("bowl")
    <class 'lodo.lab.tasks.bowl.Bowl'>
    """
    check_task(name)
    found = TASKS.get(name, name)
    if not isinstance(found, str):
        return found
    from lodo.lab.tasks.base import as_task

    return as_task(name, import_object(found))


def make_task(name: str, options: Mapping[str, Any], seed: int) -> Task:
    """A fresh task by its name.

    >>> make_task("bowl", {"n": 10}, seed=0).params[0].shape
    torch.Size([10])
    """
    kind = find_task(name)
    try:
        return kind(seed, **options)
    except TypeError as error:
        try:
            check_options(options, option_names(kind, "seed"))
        except OptionError as unknown:
            raise ValueError(f"{name} {unknown}") from error
        raise ValueError(f"{name} cannot be made with the options {words_of(options)}: {error}") from error
