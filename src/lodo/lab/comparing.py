"""Compare optimizers on a task of the laboratory or on one's own, from Python."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lodo._checks import check_choice, check_int
from lodo.lab.experiments.base import by_label
from lodo.lab.experiments.comparison import Comparison
from lodo.lab.optimizers import BASELINES, Baseline, Choice, parse
from lodo.lab.page.commands import run_command
from lodo.lab.page.render import write_page
from lodo.lab.page.results import Found, find
from lodo.lab.page.sections import section
from lodo.lab.pipeline import conduct
from lodo.lab.run import Curve
from lodo.lab.show.tables import Row
from lodo.lab.tasks import TASKS, Task

Loss = Callable[[], Tensor]
Measure = Callable[[], Mapping[str, float]]
Made = tuple[Loss, Iterable[Parameter]] | tuple[Loss, Iterable[Parameter], Measure]
Maker = Callable[[list[Parameter]], Optimizer]


@dataclass(frozen=True)
class Compared:
    """What came out of a comparison: rows of figures, the curves of every optimizer by seed, and the page."""

    rows: Sequence[Row]
    curves: Mapping[str, Sequence[Curve]]
    page: Path | None


def compare(
    task: str | type[Task] | Callable[[], Made],
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
        >>> def task():
        ...     x = Parameter(torch.ones(3))
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
        conduct(experiment, request, folder, workers=workers, console=console, draw=out is not None)
        found = find(experiment, folder)
        if page is not None:
            spelled = isinstance(task, str) and isinstance(optimizers, str)
            write_comparison(found, Path(page), Path(out or "results") if spelled else None, console)
        return Compared(found.rows, by_label(found.results), None if page is None else Path(page))


def write_comparison(found: Found, page: Path, out: Path | None, console: Console) -> None:
    """The page of one comparison; ``out`` is the folder that the command to make it again has, None has no command."""
    redo = "" if out is None else run_command(found.experiment, found.request, out, found.results)
    shown = section(found, out or Path(), redo)
    write_page(page, found.experiment.title, [shown], "Every curve, hidden and shown as you like.")
    console.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _known(task: str | type[Task] | Callable[[], Made], threads: int) -> Iterator[str]:
    """Let a task of the user's own be found by its name for a while."""
    if isinstance(task, str):
        check_choice("task", task, TASKS)
        yield task
        return
    name = getattr(task, "__name__", type(task).__name__).strip("<>").lower()
    if isinstance(task, type) and not issubclass(task, Task):
        raise ValueError(f"task must be a function, a subclass of Task or a name, got {task!r}")
    if name in TASKS:
        raise ValueError(f"task must have a name of its own, got {name!r}, which is one of the laboratory's tasks")
    TASKS[name] = task if isinstance(task, type) else _from_function(task, threads)
    try:
        yield name
    finally:
        del TASKS[name]


def _from_function(make: Callable[[], Made], number: int) -> type[Task]:
    class Own(Task):
        """What the user's function returns, as a task."""

        threads = number

        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            made = make()
            if not isinstance(made, tuple) or len(made) not in (2, 3):
                raise ValueError(
                    f"task must return a function for the loss, the parameters and, if you like, a function that "
                    f"measures, got {made!r}"
                )
            self._loss, params = made[0], made[1]
            self._measure: Measure = made[2] if len(made) == 3 else dict
            self.params = list(params)
            self._batch = torch.get_rng_state()

        def draw(self) -> None:
            self._batch = torch.get_rng_state()

        def loss(self) -> Tensor:
            torch.set_rng_state(self._batch)  # so that a second evaluation is one of the same batch
            return self._loss()

        def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
            before = torch.get_rng_state()
            found = {name: float(value) for name, value in self._measure().items()}
            torch.set_rng_state(before)
            return found

    return Own


@contextmanager
def _chosen(optimizers: str | Mapping[str, str | Maker]) -> Iterator[list[Choice]]:
    """The choices that were named; optimizers of the user's own can be found for a while."""
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
                BASELINES[added[-1]] = Baseline(label, "", _making(wanted))
                choices.append(Choice(added[-1]))
        yield choices
    finally:
        for name in added:
            del BASELINES[name]


def _one(label: str, text: str) -> list[Choice]:
    found = parse(text)
    if len(found) != 1:
        raise ValueError(f"optimizers must have one under {label!r}, got {text!r}")
    return found


def _making(make: Maker) -> Callable[..., Optimizer]:
    return lambda task, seed, /: make(task.params)
