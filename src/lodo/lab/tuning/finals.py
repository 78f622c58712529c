"""The end of a search: its best candidates run again on fresh seeds, and the best of these is the result.

The paper takes the mean of the last generation's better half, which nobody has run. Where runs with too high a rate
diverge that mean is too careful, and the lowest loss of a single run is luck; a second look costs little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from lodo._checks import check_int
from lodo.lab.run import Run
from lodo.lab.tuning.search import Search

FINALISTS = 4


@dataclass(frozen=True)
class Finalist:
    """A candidate: where it comes from, and its parameters as a study has them."""

    origin: str
    params: Mapping[str, float]


def finalists(search: Search, study: Study) -> tuple[Finalist, ...]:
    """Who may be the result of a finished search: the one that its sampler stands for, then the best trials.

    With the paper's sampler these are the mean of the last generation's better half and the best of that generation.
    """
    best = [Finalist(f"trial {trial.number}", trial.params) for trial in search.best(study)]
    mean = search.mean(study)
    if mean is not None:
        best.insert(0, Finalist("mean of the better half", mean))
    return tuple(best[:FINALISTS])


@dataclass(frozen=True)
class Finals:
    """Every finalist on the same few seeds, which no trial of the search had.

    It is a study of its own beside the search's, so that processes share and continue it alike.

    Args:
        search: a finished one.
        finalists: of it.
        seeds: how many.
    """

    search: Search
    finalists: tuple[Finalist, ...]
    seeds: int

    def __post_init__(self) -> None:
        check_int("confirm", self.seeds, low=1)

    @property
    def name(self) -> str:
        """What its study is called."""
        return f"{self.search.name}-finals"

    @property
    def settings(self) -> dict[str, Any]:
        """What determines it, for its study."""
        return {**self.search.settings, "finalists": [dict(each.params) for each in self.finalists]}

    @property
    def number(self) -> int:
        """Of trials."""
        return len(self.finalists) * self.seeds

    @cached_property
    def made_sampler(self) -> BaseSampler:
        """Optuna's side of it."""
        return _Given([each.params for each in self.finalists])

    def may_begin(self, number: int, study: Study) -> bool:
        """Whether what a trial depends on is known."""
        return True

    @property
    def start(self) -> Run:
        """A run that shows whether the others can be made."""
        return self.search.start

    def suggest(self, trial: optuna.Trial) -> dict[str, float]:
        """A trial's parameters."""
        return self.search.suggest(trial)

    def run(self, number: int, params: Mapping[str, float]) -> Run:
        """What a trial does: as long a run as the search's last, on a seed of the finals."""
        return self.search.run(self.search.number + number // len(self.finalists), params)

    def losses(self, study: Study) -> list[list[float]]:
        """Of each finalist, by seed; a run that diverged is infinite."""
        ended = study.get_trials(deepcopy=False)[: self.number]
        found = [math.inf if trial.value is None else trial.value for trial in ended]
        return [found[i :: len(self.finalists)] for i in range(len(self.finalists))]


class _Given(BaseSampler):
    """Hands out parameters, in turn."""

    def __init__(self, given: Sequence[Mapping[str, float]]) -> None:
        self.given = given

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.given[trial.number % len(self.given)][param_name]
