"""The paper's evolutionary algorithm (its appendix "Hyperparameters") as an Optuna sampler."""

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
    """Individuals are Gaussian around a mean, and the next mean is that of the better half.

    A trial's number says which generation it is in: ``number // population``. Its parameters depend only on the seed,
    its number and the finished generations, not on when or by which process they are asked for. A generation can be
    sampled only when the one before has finished, so `Study.optimize` must not run several trials at once;
    `lodo.lab.tuning.study.run_study` can.

    Trials that did not complete, such as those that diverged, do not become parents. If fewer than half of a generation
    completed, all of these become parents. If none did, the mean stays where it is.

    Args:
        spaces: the hyperparameters to tune.
        schedule: the generations.
        seed: the seed of everything random.

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
        """The mean around which a generation is drawn: that of its parents' parameters, in natural logarithms."""
        if generation == 0:
            return self.starts
        parents = self.get_parent_population(study, generation)
        if not parents:
            return self.mean(study, generation - 1)
        return {name: fmean(math.log(trial.params[name]) for trial in parents) for name in self.starts}

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
        """The standard deviation of a generation; that of the last one for trials beyond the schedule."""
        return self.schedule.noise[min(generation, len(self.schedule.noise) - 1)]

    def _generation(self, study: Study, generation: int) -> list[FrozenTrial]:
        first = generation * self.schedule.population
        return study.get_trials(deepcopy=False)[first : first + self.schedule.population]
