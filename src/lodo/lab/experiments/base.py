"""The parts that every experiment has: a request, a plan of runs, results, and the class that ties them together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lodo._checks import check_int, check_real
from lodo.lab import data
from lodo.lab.experiments.catalog import Entry, counted
from lodo.lab.optimizers import Choice, hyperparameters, parse, with_settings
from lodo.lab.run import Curve, Run
from lodo.lab.show.plots import Figure
from lodo.lab.show.tables import Row
from lodo.lab.tasks import find_task
from lodo.spelling import spell_options


@dataclass(frozen=True)
class Request:
    """What the user asked for; `Experiment.request` fills in the rest."""

    evaluations: int | None
    seconds: float | None
    seeds: int
    choices: tuple[Choice, ...]
    task_options: Mapping[str, Any] = field(default_factory=dict)
    hyperparameters: str | None = None  # the file they were read from; None for the paper's
    options: Mapping[str, Any] = field(default_factory=dict)  # what only this experiment knows

    def __post_init__(self) -> None:
        check_int("seeds", self.seeds, low=1)
        if self.evaluations is not None:
            check_int("steps", self.evaluations, low=10)
        if self.seconds is not None:
            check_real("seconds", self.seconds, low=0.0, open_low=True)
        if self.evaluations is not None and self.seconds is not None:
            raise ValueError(
                f"steps or seconds must be given, not both, got {self.evaluations} steps and {self.seconds} seconds"
            )
        if not self.choices:
            raise ValueError("optimizers must name at least one, got none")
        labels = [choice.label for choice in self.choices]
        if len(set(labels)) < len(labels):
            raise ValueError(f"optimizers must be named once each, got {', '.join(labels)}")

    @property
    def first_axis(self) -> str | None:
        """The x axis that learning curves are shown over at first; the usual one if None."""
        return "seconds" if self.seconds else None

    @property
    def track_every(self) -> int:
        """Steps between measurements: a hundred of them in a run."""
        return max(1, self.evaluations // 100) if self.evaluations else 1000


class Cell(NamedTuple):
    """A place in a table: an optimizer, and the variant of the task if there are several."""

    label: str
    variant: str = ""


Plan = dict[Cell, list[Run]]
Results = Mapping[Cell, Sequence[Curve]]


class Experiment(ABC):
    """What is run, and what is shown of it.

    Args:
        entry: its name, title, task and sizes, as in the catalogue.
    """

    optimizers: str  # as on the command line
    tracks: ClassVar[bool] = True  # whether tasks measure anything on the way
    quick_task: ClassVar[Mapping[str, Any]] = {}  # options of the task that belong to the quick size
    pictures: ClassVar[tuple[str, ...]] = ()  # the names of the figures that `draw_pictures` may make
    row: ClassVar[type[Row]] = Row  # the kind of rows in its table
    least: ClassVar[int] = 1  # finished runs that a cell needs to be shown

    def __init__(self, entry: Entry) -> None:
        self.name = entry.name
        self.title = entry.title
        self.shows = entry.shows
        self.task = entry.task
        self.full = entry.full
        self.quick = entry.quick

    def request(
        self,
        *,
        quick: bool = False,
        evaluations: int | None = None,
        seconds: float | None = None,
        seeds: int | None = None,
        choices: Sequence[Choice] | None = None,
        task_options: Mapping[str, Any] | None = None,
        hyperparameters: Path | None = None,
        tasks: str | None = None,
    ) -> Request:
        """A request, with the experiment's own settings for whatever is left as None."""
        if tasks is not None:
            raise ValueError(f"tasks must be left out, since {self.name} has one task, got {tasks!r}")
        size = self.quick if quick else self.full
        if evaluations is None and seconds is None:
            evaluations = size.evaluations
        choices = self.parse(self.optimizers) if choices is None else choices
        return Request(
            evaluations,
            seconds,
            size.seeds if seeds is None else seeds,
            tuple(choices if hyperparameters is None else with_settings(choices, self.task, hyperparameters)),
            {**(self.quick_task if quick else {}), **(task_options or {})},
            None if hyperparameters is None else str(hyperparameters),
        )

    def add_rivals(self, path: Path) -> None:
        """Add the optimizers and the tasks of a TOML file, where an experiment takes one."""
        raise ValueError(f"rivals must be left out, since {self.name} takes no such file, got {str(path)!r}")

    @property
    def named(self) -> Mapping[str, Choice]:
        """Choices that only this experiment knows by name."""
        return {}

    def parse(self, optimizers: str) -> list[Choice]:
        """Optimizers as written on the command line."""
        return parse(optimizers, self.named)

    def spell(self, choice: Choice, names: Mapping[str, str] | None = None) -> str:
        """A choice as it is written on the command line; settings from elsewhere are not part of it.

        Args:
            choice: the optimizer and its options.
            names: what stands for a label on the command line; by default, what the experiment has named.
        """
        names = names or {named.label: name for name, named in self.named.items()}
        name = names.get(replace(choice, options={}).label, choice.optimizer)
        given = spell_options(choice.options)
        return f"{name}({given})" if given else name

    def words(self, request: Request) -> list[str] | None:
        """The options of the command for a request, apart from its data and folder; None for the usual ones."""
        return None

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command that runs it, without options."""
        return "lodo", "run", self.name

    def settled(self, request: Request) -> Request:
        """The request as it is stored: with whatever must not change when it is read again elsewhere."""
        return request

    def stored_requests(self, request: Request, digests: Callable[[str], set[str]]) -> Iterator[Request]:
        """A request for each of the data sets that stored runs were made with.

        Args:
            request: the request as it was stored.
            digests: the digests of the data of the stored runs of a task.
        """
        if find_task(self.task).dataset is None:
            yield request
            return
        for digest in sorted(digests(self.task)):
            yield replace(request, task_options={**request.task_options, "digest": digest})

    @abstractmethod
    def plan(self, request: Request) -> Plan:
        """The runs of every cell, by seed."""

    def further(self, request: Request, results: Results) -> Plan:
        """The cells that follow from results, such as the best setting on other seeds; known ones may be among them.

        It is asked again whenever what it returned is finished, until it returns nothing new.
        """
        return {}

    @abstractmethod
    def rows(self, request: Request, results: Results) -> list[Row]:
        """The table."""

    def read_row(self, fields: Mapping[str, Any]) -> Row:
        """A row of the table from its fields in a summary."""
        return self.row(**fields)

    @abstractmethod
    def figures(self, request: Request, results: Results) -> list[Figure]:
        """The figures; results may be a part of what was planned."""

    def draw_pictures(self, request: Request, results: Results) -> list[Figure]:
        """Figures that take long to make: they are made when the experiment is run, and the page shows their files."""
        return []

    @abstractmethod
    def sentence(self, rows: Sequence[Row]) -> str:
        """The result in one sentence."""

    def notes(self, request: Request, results: Results) -> list[str]:
        """Remarks below the table."""
        return []

    def needs(self, request: Request) -> list[str]:
        """What the user should know before anything is run, such as the memory that a run takes."""
        return []

    def size(self, request: Request) -> str:
        """The size of a request in words, with the task options that differ from the paper's."""
        length = f"{request.evaluations:,} steps" if request.evaluations else f"{request.seconds:g} s of training"
        changed = "".join(f", {name} = {value}" for name, value in request.task_options.items())
        return f"{length}, {counted(request.seeds, 'seed')}{changed}"

    def about(self, request: Request) -> str:
        """The size of what was run, beside the paper's."""
        step = "A step is one evaluation of the loss and its gradient."
        if request.task_options:
            return f"{self.size(request)}: not the paper's task. {step}"
        if request.evaluations == self.full.evaluations and request.seeds == self.full.seeds:
            return f"{self.size(request)}: the paper's size. {step}"
        paper = f"{self._paper_length(request)}, {counted(self.full.seeds, 'seed')}"
        return f"{self.size(request)}. The paper's figures are for {paper}. {step}"

    def _paper_length(self, request: Request) -> str:
        return f"{self.full.evaluations:,} steps"

    def make_run(self, choice: Choice, seed: int, request: Request, **task_options: Any) -> Run:
        """One run, with the paper's hyperparameters for what the choice leaves open.

        Among them may be a ``schedule`` for the rate, one of `lodo.lab.schedules.SCHEDULES`.
        """
        options = hyperparameters(self.task, choice)
        return Run(
            task=self.task,
            optimizer=choice.optimizer,
            seed=seed,
            evaluations=request.evaluations,
            seconds=request.seconds,
            task_options={**request.task_options, **task_options},
            schedule=options.pop("schedule", None),
            options=options,
            track_every=request.track_every if self.tracks else 0,
        )

    def by_choice(self, request: Request, **task_options: Any) -> Plan:
        """One cell for every optimizer."""
        return {
            Cell(choice.label): [self.make_run(choice, seed, request, **task_options) for seed in range(request.seeds)]
            for choice in request.choices
        }


def environments(results: Results) -> list[dict[str, str]]:
    """Versions and machines of the curves: one entry, unless some were made earlier or elsewhere."""
    every = [dict(curve.environment) for curves in results.values() for curve in curves]
    return [made for i, made in enumerate(every) if made not in every[:i]]


def digest_of(request: Request, dataset: str) -> str:
    """The digest of the data for a request: the one it names, or else that of the data in use."""
    return str(request.task_options.get("digest") or data.load(dataset).digest)


def by_label(results: Results, variant: str | None = None) -> dict[str, Sequence[Curve]]:
    """Curves by optimizer, of one variant of the task if there are several."""
    return {cell.label: curves for cell, curves in results.items() if variant is None or cell.variant == variant}


def tail(curve: Curve, *, fresh: bool = False, part: float = 0.1) -> float:
    """The mean loss over the last tenth of a run.

    The paper counts every evaluation, also the second one of a batch after the step (L-BFGS);
    ``fresh`` counts first evaluations only, like those of every other optimizer.
    """
    evaluations = curve["evaluations"].astype(np.int64)
    last = evaluations > (1 - part) * evaluations[-1]
    loss = curve["loss"][last].astype(np.float64)
    if fresh:
        return float(loss.mean())
    counts = np.diff(evaluations, prepend=0)[last]
    repeats = np.nan_to_num(curve["repeat_loss"][last].astype(np.float64)) * (counts - 1)
    return float((loss + repeats).sum() / counts.sum())


def repeats(curve: Curve) -> bool:
    """Whether batches were evaluated more than once."""
    return bool(curve["evaluations"][-1] > len(curve["step"]))


def step_time(curves: Sequence[Curve], parts: int = 100) -> float:
    """Microseconds of training for an evaluation and its share of a step: the median over equal parts of all runs.

    Parts are means over several steps where there are enough, because some optimizers do the bulk of their work in
    every tenth step. The first step, which may compile a kernel or draw a network, belongs to no part.
    """
    times: list[float] = []
    for curve in curves:
        steps = len(curve["step"])
        first = 1 if steps > 1 else 0
        number = min(parts, max(5, steps // 10), steps - first)
        edges = np.linspace(first, steps, number + 1).astype(int)
        seconds, evaluations = (np.append(0.0, curve[name])[edges] for name in ("seconds", "evaluations"))
        times.extend(1e6 * np.diff(seconds) / np.diff(evaluations))
    return float(np.median(times))
