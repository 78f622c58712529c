"""One file per table or figure of the paper: what to run, and what the paper reports."""

from __future__ import annotations

from lodo.lab.experiments.base import Experiment, Request
from lodo.lab.experiments.bowl import BowlExperiment
from lodo.lab.experiments.cifar10 import Cifar10Experiment
from lodo.lab.experiments.frozen import FrozenExperiment
from lodo.lab.experiments.mlp import MlpExperiment
from lodo.lab.experiments.mnist import AblationsExperiment, MnistExperiment, MomentumExperiment
from lodo.lab.experiments.noise import NoiseExperiment
from lodo.lab.experiments.options import OptionsExperiment
from lodo.lab.experiments.rivals import RivalsExperiment
from lodo.lab.experiments.rosenbrock import RosenbrockExperiment

__all__ = ["EXPERIMENTS", "Experiment", "Request"]

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        BowlExperiment(),
        NoiseExperiment(),
        FrozenExperiment(),
        OptionsExperiment(),
        RivalsExperiment(),
        RosenbrockExperiment(),
        MlpExperiment(),
        MnistExperiment(),
        AblationsExperiment(),
        MomentumExperiment(),
        Cifar10Experiment(),
    )
}
