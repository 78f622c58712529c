"""Every optimizer by name: the paper's, those of other libraries, and your own.

The names are plain data; the module of an optimizer is imported when one is made.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lodo.lab.plugins import OptionError, check_options, import_object, is_plugin, option_names, words_of
from lodo.lab.settings import read_settings
from lodo.spelling import parse_calls

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from lodo.lab.tasks import Task

__all__ = [
    "COSTS",
    "OPTIMIZERS",
    "QUADRATIC",
    "Choice",
    "OptimizerEntry",
    "build",
    "evaluating",
    "hyperparameters",
    "needs_graph",
    "paper_hyperparameters",
    "parse",
    "resolve",
    "state_bytes",
    "with_settings",
]

COSTS = LINEAR, LOGLINEAR, KRONECKER, QUADRATIC = "O(n)", "O(n log n)", "O(n^1.5)", ">= O(n^2)"

Factory = Callable[..., "Optimizer"]  # (task, seed, **hyperparameters)


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that goes by a short name.

    Args:
        label: its name in tables and figures.
        cost: the cost of a step, one of `COSTS`.
        make: a function of the task, the seed and the hyperparameters that returns the optimizer.
    """

    label: str
    cost: str
    make: Factory


def _of_params(path: str, **fixed: Any) -> Factory:
    """A factory for what ``path`` names, which is called with the parameters and the hyperparameters."""

    def make(task: Task, seed: int, /, **options: Any) -> Optimizer:
        kind = import_object(path)
        check_options(options, option_names(kind, "params", *fixed))
        optimizer: Optimizer = kind(task.params, **fixed, **options)
        return optimizer

    return make


def _of_params_and_seed(path: str, **fixed: Any) -> Factory:
    """The same for one that draws random numbers; a seed among the hyperparameters replaces the run's."""

    def make(task: Task, seed: int, /, **options: Any) -> Optimizer:
        return _of_params(path, **fixed)(task, seed, **{"seed": seed, **options})

    return make


def _of_params_and_hessian(path: str) -> Factory:
    """The same for one that needs the task's Hessian."""

    def make(task: Task, seed: int, /, **options: Any) -> Optimizer:
        return _of_params(path, hessian=task.hessian)(task, seed, **options)

    return make


def _l2l(task: Task, seed: int, /, **options: Any) -> Optimizer:
    from lodo.lab.optimizers.l2l_weights import make_l2l

    check_options(options, option_names(make_l2l, "task"))
    return make_l2l(task, **options)


def _muon(task: Task, seed: int, /, **options: Any) -> Optimizer:
    from lodo.lab.optimizers.muon import MuonAndAdamW, make_muon

    check_options(options, option_names(MuonAndAdamW, "hidden", "others"))
    return make_muon(task, **options)


def _kron_averaged(task: Task, seed: int, /, **options: Any) -> Optimizer:
    from lodo.lab.optimizers.adapters import Averaged

    return Averaged(_of_params("lodo:KronLODO")(task, seed, **options))


_LBFGS = "lodo.lab.optimizers.lbfgs:StochasticLBFGS"
_LODO = "lodo:LODO"

OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adam": OptimizerEntry("Adam", LINEAR, _of_params("lodo.lab.optimizers.keras:adam")),
    "momentum": OptimizerEntry("Momentum", LINEAR, _of_params("lodo.lab.optimizers.keras:momentum")),
    "rmsprop": OptimizerEntry("RMSprop", LINEAR, _of_params("lodo.lab.optimizers.keras:RMSprop")),
    "yogi": OptimizerEntry("Yogi", LINEAR, _of_params("lodo.lab.optimizers.keras:yogi")),
    "lars": OptimizerEntry("LARS", LINEAR, _of_params("lodo.lab.optimizers.keras:lars")),
    "lbfgs": OptimizerEntry("L-BFGS", LINEAR, _of_params(_LBFGS, scaling="newest")),
    "lbfgs_slip": OptimizerEntry("L-BFGS (authors' slip)", LINEAR, _of_params(_LBFGS, scaling="slip")),
    "olbfgs": OptimizerEntry("O-LBFGS", LINEAR, _of_params(_LBFGS, scaling="mean")),
    "l2l": OptimizerEntry("L2LBGDBGD", LINEAR, _l2l),
    "lodo": OptimizerEntry("LODO", LOGLINEAR, _of_params_and_seed(_LODO)),
    "lodo_diagonal": OptimizerEntry("LODO-Diagonal", LINEAR, _of_params_and_seed(_LODO, preconditioner="diagonal")),
    "lodo_global": OptimizerEntry("LODO-Global", LINEAR, _of_params_and_seed(_LODO, preconditioner="scalar")),
    "lodo_residuals": OptimizerEntry(
        "LODO-Residuals", LOGLINEAR, _of_params_and_seed(_LODO, preconditioner="residual")
    ),
    "lodo_no_momentum": OptimizerEntry("LODO-No-Momentum", LOGLINEAR, _of_params_and_seed(_LODO, beta=0.0)),
    "lodo_sgd": OptimizerEntry("LODO-SGD", LOGLINEAR, _of_params_and_seed(_LODO, meta_optimizer="sgd")),
    "lodo_frozen": OptimizerEntry(
        "LODO, frozen", LOGLINEAR, _of_params_and_seed("lodo.lab.optimizers.frozen:FrozenLODO")
    ),
    "kron_lodo": OptimizerEntry("KronLODO", KRONECKER, _of_params("lodo:KronLODO")),
    "kron_lodo_averaged": OptimizerEntry("KronLODO, averaged", KRONECKER, _kron_averaged),
    "muon_adamw": OptimizerEntry("Muon and AdamW", KRONECKER, _muon),
    "dog": OptimizerEntry("DoG", LINEAR, _of_params("lodo.lab.optimizers.rate_free:DoG")),
    "mechanic": OptimizerEntry("Mechanic", LINEAR, _of_params("lodo.lab.optimizers.rate_free:Mechanic")),
    "hdm": OptimizerEntry("HDM", LINEAR, _of_params("lodo.lab.optimizers.rate_free:HDM")),
    "bfgs": OptimizerEntry("BFGS", QUADRATIC, _of_params("lodo.lab.optimizers.second_order:BFGS")),
    "lm": OptimizerEntry(
        "Levenberg-Marquardt", QUADRATIC, _of_params_and_hessian("lodo.lab.optimizers.second_order:LevenbergMarquardt")
    ),
    "newton": OptimizerEntry("Newton", QUADRATIC, _of_params_and_hessian("lodo.lab.optimizers.second_order:Newton")),
}


@dataclass(frozen=True)
class Choice:
    """An optimizer that the user chose, with the options that differ from its settings.

    Args:
        optimizer: its full name, as `resolve` gives it.
        options: the options that the user gave.
        title: its name in tables and figures, before the options; the optimizer's own label if None.
        settings: its hyperparameters apart from those options; the paper's for the task if None.
    """

    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    title: str | None = None
    settings: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        entry = OPTIMIZERS.get(self.optimizer)
        name = self.title or (entry.label if entry else self.optimizer)
        given = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{name} ({given})" if given else name


def parse(text: str, named: Mapping[str, Choice] | None = None) -> list[Choice]:
    """Optimizers as written on the command line: names, or calls with options.

    ``named`` maps further names to choices.

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
        replace(named[name.lower()], options=options)
        if name.lower() in named
        else Choice(resolve(name, named), options)
        for name, options in calls
    ]


def resolve(name: str, named: Iterable[str] = ()) -> str:
    """The full name of an optimizer; upper and lower case are the same, except in your own ``module:Name``.

    An error also suggests the names in ``named``.

    >>> resolve("Adam"), resolve("AdamW"), resolve("lion")
    ('adam', 'torch.AdamW', 'pytorch_optimizer.lion')
    """
    if is_plugin(name):
        import_object(name)
        return name
    if name.lower() in OPTIMIZERS:
        return name.lower()
    from lodo.lab.optimizers.libraries import (
        EXTRA_LIBRARIES,
        extra_optimizers,
        pytorch_optimizer_classes,
        pytorch_optimizer_names,
        torch_optimizers,
    )

    library, _, short = name.lower().rpartition(".")
    if library in ("", "torch", "torch.optim") and short in torch_optimizers():
        return f"torch.{torch_optimizers()[short]}"
    possible = library == "pytorch_optimizer" or (not library and short in pytorch_optimizer_classes())
    if possible and short in pytorch_optimizer_names():
        return f"pytorch_optimizer.{short}"
    extra = extra_optimizers(library) if library in EXTRA_LIBRARIES else {}
    if short in extra:
        return f"{library}.{extra[short]}"
    raise ValueError(
        f"unknown optimizer {name!r}{_hint(library, short, extra, named)} optimizers must be among "
        f"{', '.join(dict.fromkeys((*named, *OPTIMIZERS)))}, an optimizer of torch.optim, pytorch_optimizer, "
        f"{' or '.join(EXTRA_LIBRARIES)}, or your own as module:Name"
    )


def _hint(library: str, short: str, extra: Mapping[str, str], named: Iterable[str]) -> str:
    """The end of a clause that suggests the closest name: of its library, or else of those that load fast, if any."""
    from lodo.lab.optimizers.libraries import pytorch_optimizer_names, torch_optimizers

    if library == "pytorch_optimizer":
        extra = {name: name for name in pytorch_optimizer_names()}
    ours = {name: name for name in (*named, *OPTIMIZERS)}
    torchs = {lower: f"torch.{name}" for lower, name in torch_optimizers().items()}
    fast = {**ours, **torchs} if library.startswith("torch") else {**torchs, **ours}
    known = {lower: f"{library}.{name}" for lower, name in extra.items()} or fast
    close = difflib.get_close_matches(short, known, n=1)
    if not close and known is fast:
        known = {name: f"pytorch_optimizer.{name}" for name in pytorch_optimizer_names()}
        close = difflib.get_close_matches(short, known, n=1)
    return f"; did you mean {known[close[0]]!r}?" if close else ";"


def build(name: str, task: Task, seed: int, options: Mapping[str, Any]) -> Optimizer:
    """The optimizer of a task's parameters, by its full name.

    >>> from lodo.lab.tasks import make_task
    >>> build("torch.SGD", make_task("rosenbrock", {}, 0), 0, {"lr": 0.1}).defaults["lr"]
    0.1
    """
    try:
        if name in OPTIMIZERS:
            return OPTIMIZERS[name].make(task, seed, **options)
        if is_plugin(name):
            return _build_plugin(name, task, options)
        from lodo.lab.optimizers.libraries import make_library_optimizer

        return make_library_optimizer(name, task, options)
    except OptionError as error:
        raise ValueError(f"{name} {error}") from error
    except (TypeError, AttributeError, RuntimeError, ImportError) as error:
        raise ValueError(f"{name} cannot be made with the options {words_of(options)}: {error}") from error


def _build_plugin(name: str, task: Task, options: Mapping[str, Any]) -> Optimizer:
    from torch.optim import Optimizer

    optimizer = import_object(name)(task.params, **options)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{name} must be a torch Optimizer, or a function of the parameters that returns one, got {optimizer!r}"
        )
    return optimizer


def needs_graph(optimizer: Optimizer) -> bool:
    """Whether it differentiates the gradient again, as pytorch_optimizer's AdaHessian and SophiaH do."""
    return type(optimizer).__name__ in ("AdaHessian", "SophiaH")


@contextmanager
def evaluating(optimizer: Optimizer, params: Sequence[Tensor]) -> Iterator[None]:
    """Let the parameters hold what the optimizer wants to be judged by, for a while.

    Schedule-free optimizers train at one point and return another, their average: ``eval`` and ``train`` of their
    libraries go from one to the other. Afterwards the parameters are what they were, bit for bit.

    >>> import torch
    >>> x = torch.nn.Parameter(torch.ones(1))
    >>> with evaluating(torch.optim.SGD([x], lr=0.1), [x]):
    ...     x.item()
    1.0
    """
    switch = getattr(optimizer, "eval", None)
    if switch is None:
        yield
        return
    before = [p.detach().clone() for p in params]
    switch()
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]  # whoever has eval has it too
        for p, value in zip(params, before, strict=True):
            p.data.copy_(value)


def state_bytes(optimizer: Optimizer) -> int:
    """The memory that its state takes, as far as it is tensors.

    >>> import torch
    >>> x = torch.nn.Parameter(torch.ones(10))
    >>> sgd = torch.optim.SGD([x], lr=0.1, momentum=0.9)
    >>> x.sum().backward(); sgd.step(); state_bytes(sgd)
    40
    """
    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if hasattr(value, "untyped_storage"):
            storage = value.untyped_storage()  # which views of one tensor share
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, Mapping):
            for each in value.values():
                visit(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                visit(each)

    state = optimizer.state_dict()  # a variable, so that no tensor is freed and its address used again
    visit(state)
    return sum(seen.values())


def paper_hyperparameters(task: str, optimizer: str) -> dict[str, Any]:
    """The paper's tuned values, or nothing where it gives none.

    >>> paper_hyperparameters("bowl", "adam")
    {'lr': 1.164, 'beta1': 0.465, 'beta2': 0.9884}
    >>> paper_hyperparameters("bowl", "torch.AdamW")
    {}
    """
    return dict(read_settings("paper").get(task, {}).get(optimizer, {}))


def with_settings(choices: Sequence[Choice], task: str, path: Path) -> list[Choice]:
    """The choices with the hyperparameters that a TOML file, written like paper.toml, has for the task.

    A value that the file leaves out is the paper's. Optimizers in the file that are not chosen are ignored.
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
            f"hyperparameters must name in [{task}] at least one of the chosen optimizers that has no settings of its "
            f"own, got {str(path)!r}"
        )
    return [
        replace(choice, settings={**paper_hyperparameters(task, choice.optimizer), **table[choice.optimizer]})
        if choice.settings is None and choice.optimizer in table
        else choice
        for choice in choices
    ]


def hyperparameters(task: str, choice: Choice) -> dict[str, Any]:
    """All hyperparameters of a run of this choice: its settings or the paper's, then the user's options."""
    settings = paper_hyperparameters(task, choice.optimizer) if choice.settings is None else choice.settings
    options = {**settings, **choice.options}
    if choice.optimizer == "l2l":
        from lodo.lab.optimizers.l2l_weights import weights_digest

        if options.get("weights") is not None:
            options["weights"] = str(Path(options["weights"]).absolute())  # a worker may have another current folder
        options["digest"] = weights_digest(options.get("weights"))
    return options
