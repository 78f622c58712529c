"""Every optimizer by name: the paper's, torch's and pytorch_optimizer's."""

from __future__ import annotations

import difflib
import functools
import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import pytorch_optimizer
import torch
from torch.optim import Optimizer

from lodo import LODO
from lodo.lab.baselines import keras
from lodo.lab.baselines.frozen import FrozenLODO
from lodo.lab.baselines.lbfgs import StochasticLBFGS
from lodo.lab.baselines.second_order import BFGS, LevenbergMarquardt, Newton
from lodo.lab.baselines.weights import make_l2l, weights_digest
from lodo.lab.calls import parse_calls
from lodo.lab.tasks import Task

__all__ = [
    "BASELINES",
    "QUADRATIC",
    "Baseline",
    "Choice",
    "build",
    "hyperparameters",
    "needs_graph",
    "paper_hyperparameters",
    "parse",
]

LINEAR, LOGLINEAR, QUADRATIC = "O(n)", "O(n log n)", ">= O(n^2)"


@dataclass(frozen=True)
class Baseline:
    """An optimizer of the paper: how tables call it, what a step costs, and how it is made."""

    label: str
    cost: str
    make: Callable[..., Optimizer]  # (task, seed, **hyperparameters)


def _plain(make: Callable[..., Optimizer], **fixed: Any) -> Callable[..., Optimizer]:
    return lambda task, seed, /, **options: make(task.params, **fixed, **options)


def _seeded(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    return lambda task, seed, /, **options: make(task.params, **{"seed": seed, **options})


def _knowing_the_hessian(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    return lambda task, seed, /, **options: make(task.params, task.hessian, **options)


BASELINES: dict[str, Baseline] = {
    "adam": Baseline("Adam", LINEAR, _plain(keras.adam)),
    "momentum": Baseline("Momentum", LINEAR, _plain(keras.momentum)),
    "rmsprop": Baseline("RMSprop", LINEAR, _plain(keras.RMSprop)),
    "yogi": Baseline("Yogi", LINEAR, _plain(keras.yogi)),
    "lars": Baseline("LARS", LINEAR, _plain(keras.lars)),
    "lbfgs": Baseline("L-BFGS", LINEAR, _plain(StochasticLBFGS, scaling="newest")),
    "lbfgs_slip": Baseline("L-BFGS (authors' slip)", LINEAR, _plain(StochasticLBFGS, scaling="slip")),
    "olbfgs": Baseline("O-LBFGS", LINEAR, _plain(StochasticLBFGS, scaling="mean")),
    "l2l": Baseline("L2LBGDBGD", LINEAR, make_l2l),
    "lodo": Baseline("LODO", LOGLINEAR, _seeded(LODO)),
    "lodo_frozen": Baseline("LODO, frozen", LOGLINEAR, _seeded(FrozenLODO)),
    "bfgs": Baseline("BFGS", QUADRATIC, _plain(BFGS)),
    "lm": Baseline("Levenberg-Marquardt", QUADRATIC, _knowing_the_hessian(LevenbergMarquardt)),
    "newton": Baseline("Newton", QUADRATIC, _knowing_the_hessian(Newton)),
}


@dataclass(frozen=True)
class Choice:
    """An optimizer as the user named it, with the options that differ from the task's defaults."""

    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How tables and figures call it."""
        known = BASELINES.get(self.optimizer)
        name = known.label if known else self.optimizer
        given = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{name} ({given})" if given else name


def parse(text: str) -> list[Choice]:
    """Optimizers as written on the command line: names, or calls with options.

    >>> parse("lodo, lodo(beta=0.5), torch.AdamW(lr=0.1, betas=(0.9, 0.99))")[1].label
    'LODO (beta=0.5)'
    """
    try:
        return [Choice(resolve(name), options) for name, options in parse_calls(text)]
    except SyntaxError as error:
        raise ValueError(f"optimizers must be names or calls such as adam, lodo(beta=0.5), got {text!r}") from error


def resolve(name: str) -> str:
    """The full name of an optimizer; case does not matter.

    >>> resolve("Adam"), resolve("AdamW"), resolve("lion")
    ('adam', 'torch.AdamW', 'pytorch_optimizer.lion')
    """
    library, _, short = name.rpartition(".")
    library = library.lower()
    if not library and short.lower() in BASELINES:
        return short.lower()
    if library in ("", "torch", "torch.optim") and short.lower() in _of_torch():
        return f"torch.{_of_torch()[short.lower()]}"
    if library in ("", "pytorch_optimizer") and short.lower() in _of_pytorch_optimizer():
        return f"pytorch_optimizer.{short.lower()}"
    known = [*BASELINES, *_of_torch(), *_of_pytorch_optimizer()]
    near = difflib.get_close_matches(short.lower(), known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(
        f"optimizers must be among {', '.join(BASELINES)}, or an optimizer of torch.optim or pytorch_optimizer, "
        f"got {name!r}{hint}"
    )


@functools.cache
def _of_torch() -> dict[str, str]:
    every = vars(torch.optim).items()
    return {
        name.lower(): name
        for name, kind in every
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }


@functools.cache
def _of_pytorch_optimizer() -> frozenset[str]:
    return frozenset(pytorch_optimizer.get_supported_optimizers())


# of pytorch_optimizer: they want to be told which parameters are theirs
_MUON_AND_KIN = ("adago", "adamuon", "muon", "muonclip", "normuon")


def build(name: str, task: Task, seed: int, options: Mapping[str, Any]) -> Optimizer:
    """The optimizer of a task's parameters, by its full name.

    >>> from lodo.lab.tasks import make_task
    >>> build("torch.SGD", make_task("rosenbrock", {}, 0), 0, {"lr": 0.1}).defaults["lr"]
    0.1
    """
    try:
        if name in BASELINES:
            return BASELINES[name].make(task, seed, **options)
        library, _, short = name.partition(".")
        kind = getattr(torch.optim, short) if library == "torch" else pytorch_optimizer.load_optimizer(short)
        _check_names(kind, options)
        params: Any = [{"params": task.params, "use_muon": True}] if short in _MUON_AND_KIN else task.params
        made: Optimizer = kind(params, **options)
    except (TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise ValueError(f"{name} cannot be made with the options {dict(options)}: {error}") from error
    return made


def _check_names(kind: type[Optimizer], options: Mapping[str, Any]) -> None:
    """Refuse options that the class does not name; many of pytorch_optimizer's would ignore them."""
    named = [name for name in inspect.signature(kind).parameters if name not in ("params", "kwargs")]
    for name in options:
        if name not in named:
            raise TypeError(f"{name} is not among {', '.join(named)}")


def needs_graph(optimizer: Optimizer) -> bool:
    """Whether it differentiates the gradient again, as pytorch_optimizer's AdaHessian and SophiaH do."""
    return type(optimizer).__name__ in ("AdaHessian", "SophiaH")


@functools.cache
def _paper() -> dict[str, dict[str, dict[str, float]]]:
    text = resources.files("lodo.lab").joinpath("paper.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def paper_hyperparameters(task: str, optimizer: str) -> dict[str, float]:
    """The paper's tuned values, or nothing where it gives none.

    >>> paper_hyperparameters("bowl", "adam")
    {'lr': 1.164, 'beta1': 0.465, 'beta2': 0.9884}
    >>> paper_hyperparameters("bowl", "torch.AdamW")
    {}
    """
    return dict(_paper().get(task, {}).get(optimizer, {}))


def hyperparameters(task: str, choice: Choice) -> dict[str, Any]:
    """Everything that a run of this choice depends on: the paper's tuned values, then the choice's own."""
    options = {**paper_hyperparameters(task, choice.optimizer), **choice.options}
    if choice.optimizer == "l2l":
        if options.get("weights") is not None:
            options["weights"] = str(Path(options["weights"]).absolute())  # a worker may stand elsewhere
        options["digest"] = weights_digest(options.get("weights"))
    return options
