"""What the tracks share: the request, the runs, and the cells they are in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from lodo._checks import check_choice, check_int, check_real
from lodo.lab import data
from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results
from lodo.lab.experiments.beyond.networks.entries import REFERENCE, Entries, Workload, own_entries, read_entries
from lodo.lab.experiments.beyond.networks.metrics import final_loss
from lodo.lab.experiments.beyond.networks.rows import TaskRow, read_row
from lodo.lab.experiments.beyond.networks.trials import (
    CONSTANT,
    SCHEDULES,
    Trial,
    best,
    grid,
    next_power,
    rate,
)
from lodo.lab.experiments.catalog import TRACKS, Entry, counted
from lodo.lab.optimizers import Choice
from lodo.lab.plugins import is_plugin
from lodo.lab.run import Run
from lodo.lab.show.tables import Row
from lodo.lab.tasks import TASKS, find_task
from lodo.spelling import spell_options

TUNING_SEED = 0  # the seeds after it report
RATES, FEW_RATES = 5, 3  # of the grid, at full size and with --quick
MEASUREMENTS = 20  # of the validation loss, in a run


@dataclass(frozen=True)
class Entrant:
    """An optimizer in a track: its name in tables, what it is, and its library's default rate."""

    label: str
    choice: Choice

    @property
    def default(self) -> float:
        """The rate around which others are tried."""
        return float(self.options["lr"])

    @property
    def options(self) -> dict[str, Any]:
        """Its hyperparameters at the default rate."""
        return {**(self.choice.settings or {}), **self.choice.options}


class NetworksExperiment(Experiment):
    """Optimizers on several tasks, the tasks and the optimizers from networks.toml."""

    optimizers = ", ".join(own_entries().usual_rivals)
    row = TaskRow
    track: str
    adds_reference: ClassVar[bool] = False  # AdamW is always among the optimizers

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry)
        self.entries: Entries = own_entries()
        self.rivals_file: str | None = None

    def add_rivals(self, path: Path) -> None:
        self.entries = self.entries | read_entries(path)
        self.rivals_file = str(path)

    @property
    def named(self) -> Mapping[str, Choice]:
        """The optimizers of networks.toml, and of a file that was added."""
        return self.entries.rivals

    @property
    def command(self) -> tuple[str, ...]:
        track = () if self.track == TRACKS[0] else ("--track", self.track)
        return "lodo", "run", "networks", *track

    # ------------------------------------------------------------ the request

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
        """A request; ``evaluations`` is the length of the runs on every task."""
        if seconds is not None:
            raise ValueError(f"seconds must be left out, since networks counts steps, got {seconds}")
        if hyperparameters is not None:
            raise ValueError(
                f"hyperparameters must be left out, since networks takes optimizers with --rivals, got "
                f"{str(hyperparameters)!r}"
            )
        names = self.entries.small_rivals if quick else self.entries.usual_rivals
        size = self.quick if quick else self.full
        chosen = [self.named[name] for name in names] if choices is None else list(choices)
        for choice in chosen:
            lr = Entrant(choice.label, choice).options.get("lr")
            if lr is None:
                raise ValueError(
                    f"lr of {choice.label} must be given, as in '{choice.label}(lr=0.001)', since rates are tried "
                    f"around it; it is known for {', '.join(self.named)}"
                )
            check_real(f"lr of {choice.label}", lr, low=0.0, open_low=True)
        return Request(
            None,
            None,
            size.seeds if seeds is None else seeds,
            tuple(self._with_reference(chosen) if self.adds_reference else chosen),
            dict(task_options or {}),
            options={
                "quick": quick,
                "tasks": {name: asdict(load) for name, load in self.find_workloads(tasks, quick, evaluations).items()},
                "names": {choice.label: name for name, choice in self.named.items()},
                "rivals": self.rivals_file,
                "steps": evaluations,
            },
        )

    def _with_reference(self, chosen: list[Choice]) -> list[Choice]:
        return chosen if REFERENCE in [choice.label for choice in chosen] else [self.named["adamw"], *chosen]

    def find_workloads(self, tasks: str | None, quick: bool, steps: int | None) -> dict[str, Workload]:
        """The tasks that are named, or the usual ones; ``steps`` sets one length for all."""
        entries = self.entries
        usual = entries.small_tasks if quick else {n: t for n, t in entries.tasks.items() if n not in entries.extra}
        names = list(usual) if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"tasks must be named once each, such as 'mlp, cnn', got {tasks!r}")
        if steps is not None:
            check_int("steps", steps, low=10)
        known = {**entries.tasks, **usual}
        made = {}
        for name in names:
            if name not in known and (is_plugin(name) or name in TASKS):
                if steps is None:
                    raise ValueError(f"steps must be given for {name}, which has no line in networks.toml, got None")
                made[name] = Workload(name, steps)
                continue
            check_choice("tasks", name, known)
            made[name] = known[name] if steps is None else replace(known[name], steps=steps, tuning_steps=None)
        return made

    def settled(self, request: Request) -> Request:
        """The request with the digests of the data, so that it needs no data when it is read again."""
        found = {name: self._digest(request, name) for name in workloads(request)}
        return replace(request, options={**request.options, "digests": found})

    def stored_requests(self, request: Request, digests: Callable[[str], set[str]]) -> Iterator[Request]:
        if "digests" in request.options:
            yield request
            return
        found: dict[str, str | None] = {}
        for name, load in workloads(request).items():
            every: set[str | None] = {*digests(load.task)} if find_task(load.task).dataset else {None}
            if len(every) != 1:  # nothing was run, or nobody knows which data is meant
                return
            (found[name],) = every
        yield replace(request, options={**request.options, "digests": found})

    def _digest(self, request: Request, name: str) -> str | None:
        known = request.options.get("digests", {})
        if name in known:
            return known[name]  # type: ignore[no-any-return]  # from JSON
        dataset = find_task(workloads(request)[name].task).dataset
        return None if dataset is None else data.load(dataset).digest

    # ------------------------------------------------------------ runs and cells

    def make_trial(self, request: Request, name: str, entrant: Entrant, trial: Trial, seed: int) -> Run:
        """The run of a setting on a task."""
        load, digest = workloads(request)[name], self._digest(request, name)
        steps = load.tuning_steps or load.steps if seed == TUNING_SEED else load.steps
        return Run(
            load.task,
            entrant.choice.optimizer,
            seed,
            steps,
            task_options={**load.options, **request.task_options, **({"digest": digest} if digest else {})},
            options={**entrant.options, "lr": rate(entrant.default, trial.power)},
            track_every=max(1, steps // MEASUREMENTS),
            schedule=None if trial.schedule == CONSTANT else trial.schedule,
        )

    def tuning_cells(self, request: Request, name: str, entrant: Entrant, trials: Sequence[Trial]) -> Plan:
        """Settings on the tuning seed, a cell each."""
        return {
            tuning_cell(entrant, name, trial): [self.make_trial(request, name, entrant, trial, TUNING_SEED)]
            for trial in trials
        }

    def report_cell(self, request: Request, name: str, entrant: Entrant, trial: Trial) -> Plan:
        """A setting on the seeds that report."""
        seeds = range(TUNING_SEED + 1, TUNING_SEED + 1 + request.seeds)
        return {reported(entrant, name): [self.make_trial(request, name, entrant, trial, seed) for seed in seeds]}

    def after_tuning(self, request: Request, results: Results, entrants: Sequence[Entrant]) -> Plan:
        """What follows for each task and optimizer with finished trials: further rates, or the best on other seeds."""
        plan: Plan = {}
        for name in workloads(request):
            for entrant in entrants:
                losses = tried(results, name, entrant, grid_size(request))
                if not losses:
                    continue
                power = next_power(losses, grid_size(request))
                if power is None:
                    plan |= self.report_cell(request, name, entrant, best(losses))
                else:
                    plan |= self.tuning_cells(request, name, entrant, [Trial(power, each) for each in SCHEDULES])
        return plan

    # ------------------------------------------------------------ words

    def read_row(self, fields: Mapping[str, Any]) -> Row:
        return read_row(fields)

    def words(self, request: Request) -> list[str]:
        quick = bool(request.options.get("quick"))
        loads, names = workloads(request), request.options.get("names", {})
        usual = self.request(quick=quick)
        words = ["--quick"] if quick else []
        if list(loads) != list(workloads(usual)):
            words += ["--tasks", ", ".join(loads)]
        if request.options.get("steps") is not None:
            words += ["--steps", str(request.options["steps"])]
        if request.seeds != usual.seeds:
            words += ["--seeds", str(request.seeds)]
        if request.choices != usual.choices:
            words += ["--optimizers", ", ".join(self.spell(choice, names) for choice in request.choices)]
        if request.options.get("rivals"):
            words += ["--rivals", request.options["rivals"]]
        if request.task_options:
            words += ["--task", spell_options(request.task_options)]
        return words

    def size(self, request: Request) -> str:
        loads = workloads(request)
        lengths = sorted({load.steps for load in loads.values()})
        steps = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
        changed = "".join(f", {name} = {value}" for name, value in request.task_options.items())
        return f"{counted(len(loads), 'task')} of {steps} steps, {self._seeds(request)}{changed}"

    def _seeds(self, request: Request) -> str:
        return counted(request.seeds, "seed")

    @abstractmethod
    def about(self, request: Request) -> str: ...


def workloads(request: Request) -> dict[str, Workload]:
    """The tasks of a request, by name."""
    return {name: Workload(**fields) for name, fields in request.options["tasks"].items()}


def entrants(request: Request) -> list[Entrant]:
    """The optimizers of a request."""
    return [Entrant(choice.label, choice) for choice in request.choices]


def grid_size(request: Request) -> int:
    """How many rates are tried at first."""
    return FEW_RATES if request.options.get("quick") else RATES


def tuning_cell(entrant: Entrant, name: str, trial: Trial) -> Cell:
    """The cell of a setting on the tuning seed."""
    return Cell(entrant.label, f"{name}, lr={rate(entrant.default, trial.power):g}, {trial.schedule}")


def reported(entrant: Entrant, name: str) -> Cell:
    """The cell of the seeds that report."""
    return Cell(entrant.label, f"{name}, reported")


def tried(results: Results, name: str, entrant: Entrant, number: int) -> dict[Trial, float]:
    """The losses of all trials that belong together: the grid and what follows from it; none without the whole grid."""
    losses: dict[Trial, float] = {}
    trials = grid(number)
    while True:
        cells = {trial: tuning_cell(entrant, name, trial) for trial in trials}
        if not all(cell in results for cell in cells.values()):
            return losses
        losses |= {trial: final_loss(results[cell][0]) for trial, cell in cells.items()}
        power = next_power(losses, number)
        if power is None:
            return losses
        trials = [Trial(power, schedule) for schedule in SCHEDULES]
