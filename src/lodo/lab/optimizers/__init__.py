"""Every optimizer by name: the paper's, and those of other libraries."""

from __future__ import annotations

import difflib
import functools
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lodo import LODO
from lodo.lab.optimizers import keras
from lodo.lab.optimizers.frozen import FrozenLODO
from lodo.lab.optimizers.l2l_weights import make_l2l, weights_digest
from lodo.lab.optimizers.lbfgs import StochasticLBFGS
from lodo.lab.optimizers.libraries import OF_THE_EXTRA, library_versions, make, of_extra, of_pytorch_optimizer, of_torch
from lodo.lab.optimizers.second_order import BFGS, LevenbergMarquardt, Newton
from lodo.lab.tasks import Task
from lodo.spelling import parse_calls

__all__ = [
    "BASELINES",
    "COSTS",
    "QUADRATIC",
    "Baseline",
    "Choice",
    "build",
    "decays",
    "hyperparameters",
    "library_versions",
    "needs_graph",
    "paper_hyperparameters",
    "parse",
    "with_settings",
]

COSTS = LINEAR, LOGLINEAR, _, QUADRATIC = "O(n)", "O(n log n)", "O(n^1.5)", ">= O(n^2)"


@dataclass(frozen=True)
class Baseline:
    """An optimizer of the paper: how tables call it, what a step costs, and how it is made."""

    label: str
    cost: str
    make: Callable[..., Optimizer]  # (task, seed, **hyperparameters)


def _plain(make: Callable[..., Optimizer], **fixed: Any) -> Callable[..., Optimizer]:
    return lambda task, seed, /, **options: make(task.params, **fixed, **options)


def _seeded(make: Callable[..., Optimizer], **fixed: Any) -> Callable[..., Optimizer]:
    return lambda task, seed, /, **options: make(task.params, **fixed, **{"seed": seed, **options})


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
    "lodo_diagonal": Baseline("LODO-Diagonal", LINEAR, _seeded(LODO, preconditioner="diagonal")),
    "lodo_global": Baseline("LODO-Global", LINEAR, _seeded(LODO, preconditioner="scalar")),
    "lodo_residuals": Baseline("LODO-Residuals", LOGLINEAR, _seeded(LODO, preconditioner="residual")),
    "lodo_no_momentum": Baseline("LODO-No-Momentum", LOGLINEAR, _seeded(LODO, beta=0.0)),
    "lodo_sgd": Baseline("LODO-SGD", LOGLINEAR, _seeded(LODO, meta_optimizer="sgd")),
    "lodo_frozen": Baseline("LODO, frozen", LOGLINEAR, _seeded(FrozenLODO)),
    "bfgs": Baseline("BFGS", QUADRATIC, _plain(BFGS)),
    "lm": Baseline("Levenberg-Marquardt", QUADRATIC, _knowing_the_hessian(LevenbergMarquardt)),
    "newton": Baseline("Newton", QUADRATIC, _knowing_the_hessian(Newton)),
}


@dataclass(frozen=True)
class Choice:
    """An optimizer as the user named it, with the options that differ from its settings.

    Args:
        optimizer: its full name, as `resolve` gives it.
        options: what the user gave.
        title: how tables and figures call it without those; the optimizer's name if None.
        settings: its hyperparameters without those; the paper's for the task if None.
    """

    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    title: str | None = None
    settings: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        """How tables and figures call it."""
        known = BASELINES.get(self.optimizer)
        name = self.title or (known.label if known else self.optimizer)
        given = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{name} ({given})" if given else name


def parse(text: str, named: Mapping[str, Choice] | None = None) -> list[Choice]:
    """Optimizers as written on the command line: names, or calls with options.

    ``named`` has choices that go by names of their own.

    >>> parse("lodo, lodo(beta=0.5), torch.AdamW(lr=0.1, betas=(0.9, 0.99))")[1].label
    'LODO (beta=0.5)'
    >>> parse("fast(lr=2)", {"fast": Choice("adam", title="Fast Adam", settings={"lr": 1})})[0].label
    'Fast Adam (lr=2)'
    """
    named = named or {}
    try:
        calls = parse_calls(text)
    except SyntaxError as error:
        raise ValueError(f"optimizers must be names or calls such as adam, lodo(beta=0.5), got {text!r}") from error
    return [
        replace(named[name.lower()], options=options) if name.lower() in named else Choice(resolve(name), options)
        for name, options in calls
    ]


def resolve(name: str) -> str:
    """The full name of an optimizer; case does not matter.

    >>> resolve("Adam"), resolve("AdamW"), resolve("lion")
    ('adam', 'torch.AdamW', 'pytorch_optimizer.lion')
    """
    library, _, short = name.rpartition(".")
    library, short = library.lower(), short.lower()
    if not library and short in BASELINES:
        return short
    if library in ("", "torch", "torch.optim") and short in of_torch():
        return f"torch.{of_torch()[short]}"
    if library in ("", "pytorch_optimizer") and short in of_pytorch_optimizer():
        return f"pytorch_optimizer.{short}"
    extra = of_extra(library) if library in OF_THE_EXTRA else {}
    if short in extra:
        return f"{library}.{extra[short]}"
    near = difflib.get_close_matches(short, extra or [*BASELINES, *of_torch(), *of_pytorch_optimizer()], n=1)
    hint = f"; did you mean {extra.get(near[0], near[0])}?" if near else ""
    raise ValueError(
        f"optimizers must be among {', '.join(BASELINES)}, or an optimizer of torch.optim, pytorch_optimizer, "
        f"{' or '.join(OF_THE_EXTRA)}, got {name!r}{hint}"
    )


def build(name: str, task: Task, seed: int, options: Mapping[str, Any]) -> Optimizer:
    """The optimizer of a task's parameters, by its full name.

    >>> from lodo.lab.tasks import make_task
    >>> build("torch.SGD", make_task("rosenbrock", {}, 0), 0, {"lr": 0.1}).defaults["lr"]
    0.1
    """
    try:
        if name in BASELINES:
            return BASELINES[name].make(task, seed, **options)
        return make(name, task, options)
    except (TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise ValueError(f"{name} cannot be made with the options {dict(options)}: {error}") from error


def needs_graph(optimizer: Optimizer) -> bool:
    """Whether it differentiates the gradient again, as pytorch_optimizer's AdaHessian and SophiaH do."""
    return type(optimizer).__name__ in ("AdaHessian", "SophiaH")


def decays(name: str) -> bool:
    """Whether its rate falls over a run as (1 - progress)^2, as LARS's does in the paper."""
    return name == "lars"


@functools.cache
def _paper() -> dict[str, dict[str, dict[str, Any]]]:
    text = resources.files("lodo.lab.settings").joinpath("paper.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def paper_hyperparameters(task: str, optimizer: str) -> dict[str, Any]:
    """The paper's tuned values, or nothing where it gives none.

    >>> paper_hyperparameters("bowl", "adam")
    {'lr': 1.164, 'beta1': 0.465, 'beta2': 0.9884}
    >>> paper_hyperparameters("bowl", "torch.AdamW")
    {}
    """
    return dict(_paper().get(task, {}).get(optimizer, {}))


def with_settings(choices: Sequence[Choice], task: str, path: Path) -> list[Choice]:
    """The choices with the hyperparameters that a TOML file of the form of paper.toml has for the task.

    What the file leaves open is the paper's; an optimizer that it names and that is not chosen does not matter.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get(task, {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"hyperparameters must be a TOML file, got {str(path)!r}: {error}") from error
    try:
        table = {resolve(name): dict(values) for name, values in table.items()}
        json.dumps(table, allow_nan=False)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"hyperparameters must have a table of numbers for each optimizer in [{task}], got {str(path)!r}: {error}"
        ) from error
    if not table.keys() & {choice.optimizer for choice in choices if choice.settings is None}:
        raise ValueError(
            f"hyperparameters must name in [{task}] an optimizer that is run here without settings of its own, "
            f"got {str(path)!r}"
        )
    return [
        replace(choice, settings={**paper_hyperparameters(task, choice.optimizer), **table[choice.optimizer]})
        if choice.settings is None and choice.optimizer in table
        else choice
        for choice in choices
    ]


def hyperparameters(task: str, choice: Choice) -> dict[str, Any]:
    """Everything that a run of this choice depends on: its settings or the paper's, then the user's options."""
    settings = paper_hyperparameters(task, choice.optimizer) if choice.settings is None else choice.settings
    options = {**settings, **choice.options}
    if choice.optimizer == "l2l":
        if options.get("weights") is not None:
            options["weights"] = str(Path(options["weights"]).absolute())  # a worker may stand elsewhere
        options["digest"] = weights_digest(options.get("weights"))
    return options
