"""The paper's evolutionary algorithm (its appendix "Hyperparameters") as a sampler of Optuna's."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseGASampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from lodo.lab.tuning.space import Schedule, Space


class EvolutionSampler(BaseGASampler):
    """Individuals are Gaussian around a mean; the next mean is that of the better half.

    A trial's number is its place: generation ``number // population``. What it gets depends on the seed, its number and
    the finished generations alone, not on when or by whom it is asked for. A generation can be sampled once the one
    before has finished, so that `Study.optimize` must not run several trials at once; `lodo.lab.tuning.tune` can.

    Trials that did not complete, such as those that diverged, are no parents; where fewer than half of a generation
    completed, all of these are. After a generation without any the mean stays.

    Args:
        spaces: the hyperparameters.
        schedule: the generations.
        seed: draws everything random.

    Example:
        >>> import optuna
        >>> optuna.logging.set_verbosity(optuna.logging.ERROR)
        >>> schedule = Schedule(population=16, noise=(3, 2, 1, 0.5), steps=(10, 10, 10, 10))
        >>> sampler = EvolutionSampler([Space("lr", "rate", 1.0)], schedule, seed=0)
        >>> study = optuna.create_study(sampler=sampler)
        >>> study.optimize(lambda trial: math.log(trial.suggest_float("lr", 1e-9, 1e9, log=True) / 20) ** 2, 64)
        >>> bool(10 < math.exp(sampler.mean(study, generation=4)["lr"]) < 40)
        True
    """

    def __init__(self, spaces: Sequence[Space], schedule: Schedule, seed: int) -> None:
        super().__init__(population_size=schedule.population)
        self.starts = {space.parameter: space.place for space in spaces}
        self.schedule, self.seed = schedule, seed

    def get_trial_generation(self, study: Study, trial: FrozenTrial) -> int:
        return trial.number // self.schedule.population

    def get_population(self, study: Study, generation: int) -> list[FrozenTrial]:
        """The trials of a generation that have completed."""
        return [trial for trial in self._generation(study, generation) if trial.state == TrialState.COMPLETE]

    def select_parent(self, study: Study, generation: int) -> list[FrozenTrial]:
        """The better half of the generation before, of those that completed."""
        if not self.finished(study, generation - 1):
            raise RuntimeError(
                f"generation {generation - 1} must have finished before generation {generation} is sampled; "
                "Study.optimize must have n_jobs = 1"
            )
        population = sorted(self.get_population(study, generation - 1), key=lambda trial: trial.value or 0.0)
        return population[: self.schedule.population // 2]

    def finished(self, study: Study, generation: int) -> bool:
        """Whether all trials of a generation have ended, one way or another."""
        ended = [trial for trial in self._generation(study, generation) if trial.state.is_finished()]
        return len(ended) == self.schedule.population

    def mean(self, study: Study, generation: int) -> dict[str, float]:
        """Around what a generation is drawn: the mean of its parents' parameters, in natural logarithms."""
        if generation == 0:
            return self.starts
        parents = self.get_parent_population(study, generation)
        if not parents:
            return self.mean(study, generation - 1)
        return {name: fmean(math.log(trial.params[name]) for trial in parents) for name in self.starts}  # in any order

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """One parameter of a trial, within its bounds."""
        if param_name not in self.starts:
            raise ValueError(f"parameters must be among {', '.join(self.starts)}, got {param_name!r}")
        assert isinstance(param_distribution, FloatDistribution | IntDistribution)
        generation = self.get_trial_generation(study, trial)
        rng = np.random.default_rng([self.seed, trial.number, zlib.crc32(param_name.encode())])
        place = self.mean(study, generation)[param_name] + self._noise(generation) * rng.standard_normal()
        p = math.exp(min(max(place, math.log(param_distribution.low)), math.log(param_distribution.high)))
        p = round(p) if isinstance(param_distribution, IntDistribution) else p
        return min(max(p, param_distribution.low), param_distribution.high)

    def _noise(self, generation: int) -> float:
        """A generation's; the last one's for trials beyond the schedule."""
        return self.schedule.noise[min(generation, len(self.schedule.noise) - 1)]

    def _generation(self, study: Study, generation: int) -> list[FrozenTrial]:
        first = generation * self.schedule.population
        return study.get_trials(deepcopy=False)[first : first + self.schedule.population]
