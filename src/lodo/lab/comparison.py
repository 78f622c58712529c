"""One's own comparison: any optimizers on any task, as an experiment and as the Python function `compare`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from torch.nn import Parameter
from torch.optim import Optimizer

from lodo._checks import check_int
from lodo.lab.experiments import load
from lodo.lab.experiments.base import Experiment, Plan, Request, Results, by_label, digest_of, step_time, tail
from lodo.lab.experiments.beyond.networks.entries import own_entries
from lodo.lab.experiments.catalog import COMPARED, COMPARED_QUICKLY, Entry
from lodo.lab.experiments.paper.bowl import last
from lodo.lab.experiments.paper.rosenbrock import trajectories
from lodo.lab.files import check_file
from lodo.lab.optimizers import OPTIMIZERS, Choice, OptimizerEntry, parse
from lodo.lab.page.commands import run_command
from lodo.lab.page.render import write_page
from lodo.lab.page.results import StoredResults, read_results
from lodo.lab.page.sections import experiment_section
from lodo.lab.pipeline import run_experiment
from lodo.lab.plugins import import_object, is_plugin
from lodo.lab.run import COLUMNS, Curve, file_name
from lodo.lab.show.curves import learning_curves, tracked_curves
from lodo.lab.show.plots import Axis, Figure
from lodo.lab.show.tables import Row, Value, measure
from lodo.lab.tasks import TASKS, Task, check_task, find_task
from lodo.lab.tasks.base import Problem, task_from_function

LOSS = "loss over the last 10 %, on fresh batches"
TIME = "median microseconds per evaluation"

_FUNCTIONS = ("bowl", "wide_bowl", "rosenbrock")  # tasks that are no networks

Maker = Callable[[list[Parameter]], Optimizer]


def compared(ratio: float) -> str:
    """How far a mean is above or below another, in words that stay short.

    >>> compared(1.295), compared(0.9), compared(7912.34)
    ('+29.5 %', '-10.0 %', '7,912 times')
    """
    if ratio >= 1e6:
        return f"{ratio:.1e} times"
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{100 * (ratio - 1):+.1f} %"


@dataclass(frozen=True)
class ComparedRow(Row):
    """A result, compared with the lowest of its table."""

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "mean ± s.d.", "against the lowest", "seeds")

    reference: float | None = None  # the mean of the row that the others are compared with

    @property
    def cells(self) -> tuple[str, ...]:
        difference = compared(self.mean / self.reference) if self.mean and self.reference else ""
        return self.optimizer, self.ours, difference if self.mean != self.reference else "", self.runs


@dataclass(frozen=True)
class AccuracyRow(ComparedRow):
    """An accuracy, compared with the highest of its table."""

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "mean ± s.d.", "against the highest", "seeds")


class Comparison(Experiment):
    """Optimizers on one task.

    Args:
        task: its name, as `lodo.lab.tasks.find_task` takes it.
    """

    optimizers = ""  # those that suit the task, unless a subclass names others

    def __init__(self, task: str) -> None:
        self.optimizers = self.optimizers or ("lodo, adam" if task in _FUNCTIONS else "kron_lodo, torch.AdamW")
        super().__init__(
            Entry(
                f"compare-{file_name(task)}",
                f"Comparison on {task}",
                "a comparison of your own",
                task,
                full=COMPARED,
                quick=COMPARED_QUICKLY,
            )
        )

    @property
    def named(self) -> Mapping[str, Choice]:
        """On the tasks of `lodo run networks`, its optimizers; the laboratory's own keep their meaning."""
        entries = own_entries()
        if self.task not in entries.tasks:
            return {}
        return {name: choice for name, choice in entries.rivals.items() if name not in OPTIMIZERS}

    @property
    def command(self) -> tuple[str, ...]:
        return "lodo", "compare", self.task

    def plan(self, request: Request) -> Plan:
        dataset = find_task(self.task).dataset
        options = {} if dataset is None else {"digest": digest_of(request, dataset)}
        plan = self.by_choice(request, **options)
        if self.task == "rosenbrock":  # every step, for the paths
            plan = {cell: [replace(run, track_every=1) for run in runs] for cell, runs in plan.items()}
        return plan

    def rows(self, request: Request, results: Results) -> list[Row]:
        rows = _compared_rows(LOSS, results, partial(tail, fresh=True))
        for column in tracked_columns(results):
            rows += _compared_rows(f"{column} at the end", results, partial(last, column=column))
            if column.endswith("_loss"):
                rows += _compared_rows(f"{column}, lowest", results, partial(_lowest, column=column))
        for name in dict.fromkeys(name for curves in results.values() for curve in curves for name in curve.final):
            rows += _compared_rows(f"{name}, measured once", results, partial(_final, name=name))
        return rows + _compared_rows(TIME, results, lambda curve: step_time([curve]))

    def read_row(self, fields: Mapping[str, Any]) -> Row:
        return _kind(fields["metric"])(**fields)

    def figures(self, request: Request, results: Results) -> list[Figure]:
        groups, first = by_label(results), request.first_axis
        y = Axis("loss", log=_all_positive(results))
        curves = learning_curves("curves", "Learning curves", groups, y=y, first=first, by_time=True)
        tracked = [
            tracked_curves(column, column, groups, column, y=Axis(column), first=first)
            for column in tracked_columns(results)
        ]
        panels = [curves, *(plot for plot in tracked if plot.lines)]
        figures = [Figure(self.name, panels, columns=2, shared_legend=True)]
        return [*figures, *trajectories(f"{self.name}-trajectories", results)] if self.task == "rosenbrock" else figures

    def sentence(self, rows: Sequence[Row]) -> str:
        means = {row.optimizer: row.mean for row in rows if row.metric == LOSS and row.mean is not None}
        if not means:
            return "All diverged."
        order = sorted(means, key=lambda name: means[name])
        return f"Lowest loss first: {', '.join(f'{name} {means[name]:.4g}' for name in order)}."

    def notes(self, request: Request, results: Results) -> list[str]:
        return [
            "Tune every optimizer before you compare: otherwise you compare learning rates.",
            "Times are longer if anything else runs on the machine, such as other workers.",
        ]

    def about(self, request: Request) -> str:
        return f"{self.size(request)}. A step is one evaluation of the loss and its gradient."


def tracked_columns(results: Results) -> list[str]:
    """The columns that tasks measured on the way."""
    every = (name for curves in results.values() for curve in curves for name in curve.columns)
    return [name for name in dict.fromkeys(every) if name not in ("step", *COLUMNS)]


def _lowest(curve: Curve, column: str) -> float | None:
    values = curve.tracked(column)[1]
    return float(values.min()) if len(values) else None


def _final(curve: Curve, name: str) -> float | None:
    return curve.final.get(name)


def _all_positive(results: Results) -> bool:
    """Whether a logarithmic axis can show every loss."""
    return all(curve["loss"].min() > 0 for curves in results.values() for curve in curves if not curve.diverged)


def _compared_rows(metric: str, results: Results, value: Value) -> list[Row]:
    """A table with a row for every optimizer in whose runs the quantity was measured."""
    rows = [
        measure(cell.label, metric, curves, value)
        for cell, curves in results.items()
        if any(value(curve) is not None for curve in curves)
    ]
    means = [row.mean for row in rows if row.mean is not None]
    kind = _kind(metric)
    best = (max if kind is AccuracyRow else min)(means, default=0.0)
    return [kind(**asdict(row), reference=best if best > 0 else None) for row in rows]  # else ratios mean nothing


def _kind(metric: str) -> type[ComparedRow]:
    return AccuracyRow if "accuracy" in metric else ComparedRow


def find_experiment(name: str) -> Experiment:
    """An experiment by its name, or your own as ``module:Name``.

    The name after the colon is a subclass of `Experiment` that is made without arguments, or a task to compare on.

    >>> find_experiment("bowl").title, find_experiment("lodo.lab.tasks.bowl:Bowl").title
    ('Noisy quadratic bowl', 'Comparison on lodo.lab.tasks.bowl:Bowl')
    """
    if not is_plugin(name):
        return load(name)
    found: Any = import_object(name)
    if not isinstance(found, type) or not issubclass(found, Experiment):
        return Comparison(name)
    make: Callable[[], Experiment] = found
    return make()


@dataclass(frozen=True)
class Compared:
    """The result of a comparison: the rows of its tables, the curves of each optimizer by seed, and the page."""

    rows: Sequence[Row]
    curves: Mapping[str, Sequence[Curve]]
    page: Path | None


def compare(
    task: str | type[Task] | Callable[[], Problem],
    optimizers: str | Mapping[str, str | Maker],
    *,
    steps: int = 1_000,
    seeds: int = 3,
    page: str | Path | None = "compare.html",
    out: str | Path | None = None,
    workers: int = 0,
    threads: int = 1,
    task_options: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> Compared:
    """Train with every optimizer from the same starts on the same batches, and write one page that shows it all.

    Args:
        task: a function that makes the thing to optimize, anew for every run: it returns a function without arguments
            that returns a loss, and the parameters; a third function may return numbers to follow by name, such as
            an accuracy, and is called a hundred times a run. Or a subclass of `Task`, or the name of one of the
            laboratory's tasks.
        optimizers: as on the command line, ``"lodo(lr=0.1), adam, torch.SGD(lr=0.01)"``; or by labels of your own, each
            as on the command line or a function of the parameters that returns an optimizer.
        steps: evaluations of the loss and its gradient a run.
        seeds: runs of every optimizer. Everything that the task draws from torch's, NumPy's or Python's global
            generators is the same for all optimizers and differs between seeds.
        page: the HTML file to write; None writes none.
        out: a folder to keep curves and figures of one of the laboratory's tasks in; finished runs are then not done
            again. Those of your own tasks are never kept, since nobody knows whether the code is still the same.
        workers: processes, for the laboratory's tasks alone; 0 works in this one.
        threads: torch's, for a task of your own; more than one pays for large networks on an idle machine.
        task_options: options of one of the laboratory's tasks.
        console: where progress and tables go; the terminal if None.

    An optimizer that evaluates a batch twice, such as L-BFGS, gets the same batch if the loss draws it from torch's
    global generator.

    Example:
        >>> import torch
        >>> def task():
        ...     x = torch.nn.Parameter(torch.ones(3))
        ...     curvature = torch.tensor([1.0, 10.0, 100.0])
        ...     return lambda: (curvature * x.square()).sum(), [x]
        >>> found = compare(task, "lodo(lr=0.001), torch.SGD(lr=0.001)", steps=50, seeds=1, page=None,
        ...                 console=Console(quiet=True))
        >>> [row.optimizer for row in found.rows if row.metric.startswith("loss")]
        ['LODO (lr=0.001)', 'torch.SGD (lr=0.001)']
    """
    own = not isinstance(task, str)
    if own and (out is not None or workers or task_options):
        raise ValueError(
            f"out, workers and task_options must be left out for a task of your own, got {out!r}, {workers!r} and "
            f"{task_options!r}"
        )
    check_int("threads", threads, low=1)
    if page is not None:
        check_file("page", Path(page))
    console = console or Console()
    with (
        _known(task, threads) as name,
        _chosen(optimizers) as choices,
        tempfile.TemporaryDirectory(prefix="lodo-") as scratch,
    ):
        experiment = Comparison(name)
        request = experiment.request(
            evaluations=steps, seeds=seeds, choices=choices, task_options=dict(task_options or {})
        )
        folder = Path(scratch if out is None else out)
        run_experiment(experiment, request, folder, workers=workers, console=console, keep=out is not None)
        stored = read_results(experiment, folder)
        if page is not None:
            spelled = isinstance(task, str) and isinstance(optimizers, str)
            write_comparison(stored, Path(page), Path(out or "results") if spelled else None, console)
        return Compared(stored.rows, by_label(stored.results), None if page is None else Path(page))


def write_comparison(stored: StoredResults, page: Path, out: Path | None, console: Console) -> None:
    """Write the page of one comparison.

    Args:
        stored: what the comparison left.
        page: the HTML file.
        out: the folder that stands in the command to repeat the comparison; without one no command is shown.
        console: where the name of the page goes.
    """
    command = "" if out is None else run_command(stored.experiment, stored.request, out, stored.results)
    section = experiment_section(stored, out or Path(), command)
    write_page(page, stored.experiment.title, [section], "Click to hide or show curves.")
    console.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _known(task: str | type[Task] | Callable[[], Problem], threads: int) -> Iterator[str]:
    """Register a task of your own under its name while it is compared."""
    if isinstance(task, str):
        check_task(task)
        yield task
        return
    name = getattr(task, "__name__", type(task).__name__).strip("<>").lower()
    if isinstance(task, type) and not issubclass(task, Task):
        raise ValueError(f"task must be a function, a subclass of Task or a name, got {task!r}")
    if name in TASKS:
        raise ValueError(f"task must have a name of its own, got {name!r}, which is one of the laboratory's tasks")
    TASKS[name] = task if isinstance(task, type) else task_from_function(task, threads)
    try:
        yield name
    finally:
        del TASKS[name]


@contextmanager
def _chosen(optimizers: str | Mapping[str, str | Maker]) -> Iterator[list[Choice]]:
    """Choices for the optimizers, registering functions of your own while they are compared."""
    if isinstance(optimizers, str):
        yield parse(optimizers)
        return
    choices, added = [], []
    try:
        for number, (label, wanted) in enumerate(optimizers.items()):
            if isinstance(wanted, str):
                (choice,) = _one(label, wanted)
                choices.append(Choice(choice.optimizer, title=label, settings=choice.options))
            else:
                added.append(f"own-{number}")
                OPTIMIZERS[added[-1]] = OptimizerEntry(label, "", _making(wanted))
                choices.append(Choice(added[-1]))
        yield choices
    finally:
        for name in added:
            del OPTIMIZERS[name]


def _one(label: str, text: str) -> list[Choice]:
    found = parse(text)
    if len(found) != 1:
        raise ValueError(f"optimizers must have one under {label!r}, got {text!r}")
    return found


def _making(make: Maker) -> Callable[..., Optimizer]:
    return lambda task, seed, /: make(task.params)
