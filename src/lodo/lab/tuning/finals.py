"""The end of a search: its best candidates are run again on fresh seeds, and the best of them is the result.

The paper takes the mean of the last generation's better half, which was never run itself. Where runs diverge at high
learning rates, that mean is too low, and the lowest loss of a single run may be luck. Running a few candidates again
costs little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from lodo._checks import check_int
from lodo.lab.optimizers import paper_hyperparameters
from lodo.lab.run import Run
from lodo.lab.tuning.search import Search

FINALISTS = 4
PAPERS, START = "the paper's values", "the values at the start"


@dataclass(frozen=True)
class Finalist:
    """A candidate: where it comes from, and its parameters as they stand in the study."""

    origin: str
    params: Mapping[str, float]


def finalists(search: Search, study: Study) -> tuple[Finalist, ...]:
    """The candidates for the result of a finished search: its best trials.

    With the paper's sampler they are those of the last generation, after the mean of its better half.
    """
    candidates = [Finalist(f"trial {trial.number}", trial.params) for trial in search.best(study)]
    mean = search.mean(study)
    if mean is not None:
        candidates.insert(0, Finalist("mean of the better half", mean))
    return tuple(candidates[:FINALISTS])


def reference(search: Search) -> Finalist:
    """What the result has to be better than: the paper's values, or those that the search starts from.

    It runs in the finals too, but is never the result.
    """
    paper = paper_hyperparameters(search.task, search.choice.optimizer)
    known = all(space.name in paper for space in search.spaces)
    params = {}
    for space in search.spaces:
        value = paper[space.name] if known else space.start
        if known and space.name == "lr":
            value /= search.schedule.rate_factor
        params[space.parameter] = value if space.kind == "rate" else 1 - value
    return Finalist(PAPERS if known else START, params)


@dataclass(frozen=True)
class Finals:
    """Every finalist on the same few seeds, none of which a trial of the search had.

    The finals have their own study, so that processes can share and continue them like the search.

    Args:
        search: a finished search.
        finalists: its finalists.
        seeds: number of runs of each finalist.
    """

    search: Search
    finalists: tuple[Finalist, ...]
    seeds: int

    def __post_init__(self) -> None:
        check_int("confirm", self.seeds, low=1)

    @property
    def name(self) -> str:
        """The name of the study."""
        return f"{self.search.name}-finals-2"  # those of 0.1.0 had no reference

    @property
    def settings(self) -> dict[str, Any]:
        """All that determines the finals, to be stored in the study."""
        return {**self.search.settings, "finalists": [dict(each.params) for each in self.finalists]}

    @property
    def number(self) -> int:
        """Number of trials."""
        return len(self.finalists) * self.seeds

    @cached_property
    def optuna_sampler(self) -> _InTurn:
        """A sampler that hands out the finalists in turn."""
        return _InTurn([each.params for each in self.finalists])

    def may_begin(self, number: int, study: Study) -> bool:
        """Whether the trial can begin: those of the finals always can."""
        return True

    @property
    def start(self) -> Run:
        """A run to check before the others."""
        return self.search.start

    def suggest(self, trial: optuna.Trial) -> dict[str, float]:
        """The parameters of a trial."""
        return self.search.suggest(trial)

    def make_run(self, number: int, params: Mapping[str, float]) -> Run:
        """The run of a trial: as long as the search's last runs, on a seed of the finals."""
        return self.search.make_run(self.search.number + number // len(self.finalists), params)

    def losses(self, study: Study) -> list[list[float]]:
        """The losses of each finalist, by seed; infinite for a run that diverged."""
        trials = study.get_trials(deepcopy=False)[: self.number]
        values = [math.inf if trial.value is None else trial.value for trial in trials]
        return [values[i :: len(self.finalists)] for i in range(len(self.finalists))]


class _InTurn(RandomSampler):
    """Hands out the given parameters in turn."""

    def __init__(self, params: Sequence[Mapping[str, float]]) -> None:
        super().__init__()
        self.params = params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.params[trial.number % len(self.params)][param_name]
