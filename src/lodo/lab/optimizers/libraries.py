"""Optimizers of other libraries: their names, and what each needs to run here."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lodo.lab.optimizers.adapters import Eager, Reshaped, ShampooState
from lodo.lab.plugins import check_options
from lodo.lab.tasks import Task

EXTRA_LIBRARIES = ("heavyball", "schedulefree")  # installed by the extra `rivals`, and imported only when needed
# optimizers of pytorch_optimizer that must be told which parameters to treat by Muon's method
_LIKE_MUON = ("adago", "adamuon", "muon", "muonclip", "normuon")


@functools.cache
def torch_optimizers() -> dict[str, str]:
    """The optimizers of torch.optim: their names by the same names in lower case."""
    return _optimizers(torch.optim)


@functools.cache
def pytorch_optimizer_classes() -> frozenset[str]:
    """The classes in the files of pytorch_optimizer, in lower case: what else could be one of its names?

    They are found without importing it, which takes seconds. Classes that it takes from torch are not among them.
    """
    spec = find_spec("pytorch_optimizer")
    files = [file for folder in (spec and spec.submodule_search_locations) or () for file in Path(folder).rglob("*.py")]
    return frozenset(
        name.lower()
        for file in files
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    )


@functools.cache
def pytorch_optimizer_names() -> frozenset[str]:
    """The names by which pytorch_optimizer knows its optimizers."""
    import pytorch_optimizer  # takes a second

    return frozenset(pytorch_optimizer.get_supported_optimizers())


@functools.cache
def extra_optimizers(library: str) -> dict[str, str]:
    """The optimizers of one of `EXTRA_LIBRARIES`: their names by the same names in lower case."""
    return _optimizers(_imported(library))


def _optimizers(module: ModuleType) -> dict[str, str]:
    return {
        name.lower(): name
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }


def _imported(library: str) -> ModuleType:
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"optimizers of {library} need the package {error.name}, which is not installed: pip install '.[rivals]' "
            "in the folder of the repository"
        ) from error


def library_versions() -> dict[str, str]:
    """The versions of the libraries that are installed.

    >>> library_versions()["pytorch_optimizer"] == version("pytorch_optimizer")
    True
    """
    found = {}
    for library in ("pytorch_optimizer", *EXTRA_LIBRARIES):
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def make_library_optimizer(name: str, task: Task, options: Mapping[str, Any]) -> Optimizer:
    """A library's optimizer by its full name, ready to train.

    The option ``view`` is the shape in which the optimizer sees the task's single parameter.

    >>> from lodo.lab.tasks import make_task
    >>> sgd = make_library_optimizer("torch.SGD", make_task("bowl", {}, 0), {"lr": 0.1, "view": (10, 10)})
    >>> sgd.param_groups[0]["params"][0].shape
    torch.Size([10, 10])
    """
    options = dict(options)
    shape = options.pop("view", None)
    kind = _kind(name)
    check_options(options, [*_names(kind), "view"])

    def make(params: list[Parameter]) -> Optimizer:
        return _adapted(name, kind(_groups(name, params), **options))

    return make(task.params) if shape is None else Reshaped(task.params, shape, make)


def _kind(name: str) -> type[Optimizer]:
    library, _, short = name.partition(".")
    if library == "pytorch_optimizer":
        import pytorch_optimizer

        return pytorch_optimizer.load_optimizer(short)
    kind: type[Optimizer] = getattr(torch.optim if library == "torch" else _imported(library), short)
    return kind


def _names(kind: type[Optimizer]) -> list[str]:
    """The options that the class names itself; many classes of pytorch_optimizer ignore all others."""
    return [name for name in inspect.signature(kind).parameters if name not in ("params", "kwargs")]


def _groups(name: str, params: list[Parameter]) -> Any:
    return [{"params": params, "use_muon": True}] if name.rpartition(".")[2] in _LIKE_MUON else params


def _adapted(name: str, optimizer: Optimizer) -> Optimizer:
    if name.startswith("heavyball."):
        return Eager(optimizer)
    if name == "pytorch_optimizer.scalableshampoo":
        return ShampooState(optimizer)
    if name.startswith("schedulefree."):
        optimizer.train()  # type: ignore[attr-defined]  # so that the loss and its gradient are taken at the training point
    return optimizer
