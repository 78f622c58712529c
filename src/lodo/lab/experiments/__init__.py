"""One file per table or figure of the paper: what to run, and what the paper reports."""

from __future__ import annotations

from lodo.lab.experiments.base import Experiment, Request
from lodo.lab.experiments.beyond.mlp import MlpExperiment
from lodo.lab.experiments.beyond.options import OptionsExperiment
from lodo.lab.experiments.beyond.rivals import RivalsExperiment
from lodo.lab.experiments.paper.bowl import BowlExperiment
from lodo.lab.experiments.paper.cifar10 import Cifar10Experiment
from lodo.lab.experiments.paper.frozen import FrozenExperiment
from lodo.lab.experiments.paper.mnist import AblationsExperiment, MnistExperiment, MomentumExperiment
from lodo.lab.experiments.paper.noise import NoiseExperiment
from lodo.lab.experiments.paper.rosenbrock import RosenbrockExperiment

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
