"""A search: the runs of its trials, and its result."""

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
from lodo.lab.plugins import source_digests
from lodo.lab.run import Run, file_name
from lodo.lab.tasks import find_task
from lodo.lab.tuning import PAPER, SAMPLERS
from lodo.lab.tuning.evolution import EvolutionSampler
from lodo.lab.tuning.space import Schedule, Space, find_schedule, find_spaces, parse_spaces
from lodo.spelling import named_options, spell

NESTED = "__"  # between the name of a configured object and that of its option, as in preconditioner__depth
_FIRST_SEED = 1000  # of the runs, so that experiments use other seeds than those that values were tuned on


@dataclass(frozen=True)
class Search:
    """What determines a search.

    Args:
        task: the name of the task, as `lodo.lab.tasks.find_task` takes it.
        choice: the optimizer, with the options that stay fixed.
        spaces: the hyperparameters to tune.
        schedule: the generations of the paper's algorithm. Other samplers train every trial for as many steps as the
            last generation, and have as many trials as take as long as all generations together.
        sampler: ``"paper"``, or a name of `SAMPLERS`.
        task_options: options of the task that differ from its defaults.
        seed: the seed of the trials and, together with a trial's number, of its run.
        trials: number of trials, for samplers other than the paper's.

    Example:
        >>> search = Search("bowl", Choice("lodo"), find_spaces("lodo"), find_schedule("paper", "bowl"))
        >>> search.number, search.make_run(35, {"lr": 0.5, "meta_lr": 1e-3, "1 - beta": 0.25}).options["beta"]
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
        """The name of its study: readable, and different for different searches."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:8]
        return f"{file_name(self.task)}-{file_name(self.choice.optimizer)}-{self.sampler}-{digest}"

    @property
    def settings(self) -> dict[str, Any]:
        """All that determines the search, to be stored in its study."""
        settings = {**asdict(self), "base": self._fixed}
        sources = source_digests(self.task, self.choice.optimizer)
        return {**settings, "sources": sources} if sources else settings

    @property
    def number(self) -> int:
        """Number of trials."""
        if self.sampler == PAPER:
            return self.schedule.trials
        work = self.schedule.population * sum(self.schedule.steps)
        return self.trials or max(1, round(work / self.schedule.steps[-1]))

    @cached_property
    def optuna_sampler(self) -> BaseSampler:
        """The sampler as an object of Optuna."""
        if self.sampler == PAPER:
            return EvolutionSampler(self.spaces, self.schedule, self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            sampler: BaseSampler = getattr(optuna.samplers, SAMPLERS[self.sampler])(seed=self.seed)
        return sampler

    def generation(self, number: int) -> int:
        """The generation of a trial. With other samplers than the paper's, every trial is in the last one."""
        last = len(self.schedule.noise) - 1
        return min(number // self.schedule.population, last) if self.sampler == PAPER else last

    def may_begin(self, number: int, study: optuna.Study) -> bool:
        """Whether the trial can begin: with the paper's sampler, when the generation before has finished."""
        generation = self.generation(number)
        if generation == 0 or not isinstance(self.optuna_sampler, EvolutionSampler):
            return True
        return self.optuna_sampler.finished(study, generation - 1)

    @property
    def start(self) -> Run:
        """The run with the values that the paper's sampler starts from."""
        return self.make_run(0, {s.parameter: s.start if s.kind == "rate" else 1 - s.start for s in self.spaces})

    def suggest(self, trial: optuna.Trial) -> dict[str, float]:
        """The parameters of a trial."""
        bounded = self.sampler != PAPER
        for space in self.spaces:
            allowed = space.distribution(bounded)
            if isinstance(allowed, optuna.distributions.IntDistribution):
                trial.suggest_int(space.parameter, allowed.low, allowed.high, log=True)
            else:
                trial.suggest_float(space.parameter, allowed.low, allowed.high, log=True)
        return trial.params

    def make_run(self, number: int, params: Mapping[str, float]) -> Run:
        """The run of a trial."""
        return Run(
            task=self.task,
            optimizer=self.choice.optimizer,
            seed=_FIRST_SEED * (self.seed + 1) + number,
            evaluations=self.schedule.steps[self.generation(number)],
            task_options=self.task_options,
            options=merge_nested({**self._fixed, **self._values(params)}),
        )

    def _values(self, params: Mapping[str, float]) -> dict[str, float]:
        """The hyperparameters for a study's parameters."""
        return {space.name: space.value(params[space.parameter]) for space in self.spaces}

    @property
    def _fixed(self) -> dict[str, Any]:
        """The hyperparameters that are not tuned."""
        tuned = {space.name for space in self.spaces}
        settings = hyperparameters(self.task, self.choice)
        return {name: value for name, value in settings.items() if name not in tuned}

    def best(self, study: optuna.Study) -> list[FrozenTrial]:
        """The trials that are as long as the last ones and did not diverge, best first."""
        last = self.generation(self.number)
        done = [trial for trial in study.get_trials(deepcopy=False)[: self.number] if trial.value is not None]
        return sorted((t for t in done if self.generation(t.number) == last), key=lambda trial: trial.value or 0.0)

    def mean(self, study: optuna.Study) -> dict[str, float] | None:
        """The paper's result, the mean of the last generation's better half; None with other samplers."""
        sampler = self.optuna_sampler
        if not isinstance(sampler, EvolutionSampler):
            return None
        places = sampler.mean(study, len(self.schedule.noise))
        return {space.parameter: space.nearest(math.exp(places[space.parameter])) for space in self.spaces}

    def tuned(self, params: Mapping[str, float]) -> dict[str, float]:
        """The hyperparameters for a study's parameters, with the learning rate times the schedule's factor."""
        values = self._values(params)
        if "lr" in values:
            values["lr"] *= self.schedule.rate_factor
        return values

    def with_tuned(self, tuned: Mapping[str, float]) -> dict[str, Any]:
        """The options that were given with the optimizer and the tuned ones, as the optimizer takes them."""
        holders = {name.partition(NESTED)[0] for name in tuned if NESTED in name}
        configured = {name: self._fixed[name] for name in holders if name in self._fixed}
        return merge_nested({**configured, **self.choice.options, **tuned})


def merge_nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Write an option such as ``preconditioner__depth`` into the text of ``preconditioner``.

    >>> merge_nested({"lr": 0.1, "preconditioner": "mixing(width=4.0)", "preconditioner__depth": 8})
    {'lr': 0.1, 'preconditioner': 'mixing(width=4.0, depth=8)'}
    """
    merged = {name: value for name, value in options.items() if NESTED not in name}
    for name, value in options.items():
        holder, nested, option = name.partition(NESTED)
        if nested:
            if not isinstance(merged.get(holder), str):
                raise ValueError(
                    f"space must have {name} only if the optimizer is given with {holder} as text, such as "
                    f"lodo(preconditioner='mixing') for preconditioner__depth, got {merged.get(holder)!r}"
                )
            kind, inner = named_options(holder, merged[holder], "mixing(depth=8)")
            merged[holder] = spell(kind, {**inner, option: value})
    return merged


def plan_search(
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
    """A search from the texts of the command line.

    Options that are given with the optimizer stay fixed, even if its default space would vary them. If the task needs
    a data set, it is loaded, and its digest becomes part of the search.

    >>> [space.name for space in plan_search("bowl", "lodo(beta=0.5)").spaces]
    ['lr', 'meta_lr']
    """
    choices = parse(optimizer)
    if len(choices) != 1:
        raise ValueError(f"optimizer must be one, got {optimizer!r}")
    (choice,) = choices
    if space is None:
        tuned = tuple(each for each in find_spaces(choice.optimizer) if each.name not in choice.options)
    else:
        tuned = parse_spaces(space)
    options = dict(task_options or {})
    dataset = find_task(task).dataset
    if dataset is not None:
        options["digest"] = data.load(dataset).digest
    return Search(task, choice, tuned, find_schedule(schedule, task), sampler, options, seed, trials)
