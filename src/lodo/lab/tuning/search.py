"""A search: which runs its trials are, and what comes out of it."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from lodo._checks import check_choice, check_int
from lodo.lab import data
from lodo.lab.optimizers import Choice, hyperparameters, parse
from lodo.lab.run import Run
from lodo.lab.tasks import TASKS
from lodo.lab.tuning import PAPER, SAMPLERS
from lodo.lab.tuning.evolution import EvolutionSampler
from lodo.lab.tuning.space import Schedule, Space, parse_spaces, spaces
from lodo.lab.tuning.space import schedule as made_schedule

_FIRST_SEED = 1000  # of the runs, so that tuned values are tried on seeds that they were not tuned on


@dataclass(frozen=True)
class Search:
    """What determines a search.

    Args:
        task: its name, as in `lodo.lab.tasks.TASKS`.
        choice: the optimizer, with the options that stay as they are.
        spaces: what is tuned.
        schedule: the generations of the paper's algorithm. Other samplers train every trial as long as its last
            generation, and have as many trials as take as long as all of its generations.
        sampler: ``"paper"``, or a name of `SAMPLERS`.
        task_options: what differs from the task's defaults.
        seed: draws the trials and, with a trial's number, its run.
        trials: how many there are, for other samplers than the paper's.

    Example:
        >>> from lodo.lab.tuning.space import schedule, spaces
        >>> search = Search("bowl", Choice("lodo"), spaces("lodo"), schedule("paper", "bowl"))
        >>> search.number, search.run(35, {"lr": 0.5, "meta_lr": 1e-3, "1 - beta": 0.25}).options["beta"]
        (320, 0.75)
    """

    task: str
    choice: Choice
    spaces: tuple[Space, ...]
    schedule: Schedule
    sampler: str = PAPER
    task_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    trials: int | None = None

    def __post_init__(self) -> None:
        check_choice("sampler", self.sampler, (PAPER, *SAMPLERS))
        check_int("seed", self.seed, low=0)
        if self.trials is not None:
            check_int("trials", self.trials, low=1)
            if self.sampler == PAPER:
                raise ValueError(f"trials must be left to the schedule of the paper's sampler, got {self.trials}")
        fixed = [space.name for space in self.spaces if space.name in self.choice.options]
        if fixed or not self.spaces:
            raise ValueError(
                f"space must have hyperparameters that the optimizer's options leave open, got {', '.join(fixed)}"
            )

    @cached_property
    def name(self) -> str:
        """What its study is called: readable, and different for different searches."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]
        return f"{self.task}-{self.choice.optimizer}-{self.sampler}-{digest}"

    @property
    def settings(self) -> dict[str, Any]:
        """What determines it, for its study."""
        return {**asdict(self), "base": self._base}

    @property
    def number(self) -> int:
        """Of trials."""
        if self.sampler == PAPER:
            return self.schedule.trials
        work = self.schedule.population * sum(self.schedule.steps)
        return self.trials or max(1, round(work / self.schedule.steps[-1]))

    @cached_property
    def made_sampler(self) -> BaseSampler:
        """Optuna's side of it."""
        if self.sampler == PAPER:
            return EvolutionSampler(self.spaces, self.schedule, self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            made: BaseSampler = getattr(optuna.samplers, SAMPLERS[self.sampler])(seed=self.seed)
        return made

    def generation(self, number: int) -> int:
        """Which generation a trial is in; all are in the last one without the paper's sampler, and beyond the end."""
        last = len(self.schedule.noise) - 1
        return min(number // self.schedule.population, last) if self.sampler == PAPER else last

    def may_begin(self, number: int, study: optuna.Study) -> bool:
        """Whether what a trial depends on is known."""
        sampler, generation = self.made_sampler, self.generation(number)
        return not isinstance(sampler, EvolutionSampler) or generation == 0 or sampler.finished(study, generation - 1)

    @property
    def start(self) -> Run:
        """The run of the values that the paper's sampler starts from."""
        return self.run(0, {s.parameter: s.start if s.kind == "rate" else 1 - s.start for s in self.spaces})

    def suggest(self, trial: optuna.Trial) -> dict[str, float]:
        """A trial's parameters."""
        bounded = self.sampler != PAPER
        for space in self.spaces:
            allowed = space.distribution(bounded)
            if isinstance(allowed, optuna.distributions.IntDistribution):
                trial.suggest_int(space.parameter, allowed.low, allowed.high, log=True)
            else:
                trial.suggest_float(space.parameter, allowed.low, allowed.high, log=True)
        return trial.params

    def run(self, number: int, params: Mapping[str, float]) -> Run:
        """What a trial does."""
        return Run(
            task=self.task,
            optimizer=self.choice.optimizer,
            seed=_FIRST_SEED * (self.seed + 1) + number,
            evaluations=self.schedule.steps[self.generation(number)],
            task_options=self.task_options,
            options={**self._base, **{space.name: space.value(params[space.parameter]) for space in self.spaces}},
        )

    @property
    def _base(self) -> dict[str, Any]:
        """What stays as it is."""
        tuned = {space.name for space in self.spaces}
        settings = hyperparameters(self.task, self.choice)
        return {name: value for name, value in settings.items() if name not in tuned}

    def best(self, study: optuna.Study) -> list[FrozenTrial]:
        """The trials as long as the last ones, best first, without those that diverged."""
        last = self.generation(self.number)
        done = [trial for trial in study.get_trials(deepcopy=False)[: self.number] if trial.value is not None]
        return sorted((t for t in done if self.generation(t.number) == last), key=lambda trial: trial.value or 0.0)

    def mean(self, study: optuna.Study) -> dict[str, float] | None:
        """The paper's result: the mean of the last generation's better half. Other samplers have none."""
        sampler = self.made_sampler
        if not isinstance(sampler, EvolutionSampler):
            return None
        places = sampler.mean(study, len(self.schedule.noise))
        return {space.parameter: space.nearest(math.exp(places[space.parameter])) for space in self.spaces}

    def tuned(self, params: Mapping[str, float]) -> dict[str, float]:
        """The hyperparameters of a study's parameters, with what the schedule does to rates in the end."""
        values = {space.name: space.value(params[space.parameter]) for space in self.spaces}
        if "lr" in values:
            values["lr"] *= self.schedule.rate_factor
        return values


def plan(
    task: str,
    optimizer: str,
    *,
    schedule: str = PAPER,
    sampler: str = PAPER,
    space: str | None = None,
    trials: int | None = None,
    seed: int = 0,
    task_options: Mapping[str, Any] | None = None,
) -> Search:
    """A search as written on the command line.

    Options that are given with the optimizer stay fixed, also where its own space would vary them. The data of a task
    that has some must be there, and what they are becomes part of the search.

    >>> [space.name for space in plan("bowl", "lodo(beta=0.5)").spaces]
    ['lr', 'meta_lr']
    """
    choices = parse(optimizer)
    if len(choices) != 1:
        raise ValueError(f"optimizer must be one, got {optimizer!r}")
    (choice,) = choices
    if space is None:
        tuned = tuple(each for each in spaces(choice.optimizer) if each.name not in choice.options)
    else:
        tuned = parse_spaces(space)
    options = dict(task_options or {})
    dataset = TASKS[task].dataset
    if dataset is not None:
        options["digest"] = data.load(dataset).digest
    return Search(task, choice, tuned, made_schedule(schedule, task), sampler, options, seed, trials)
