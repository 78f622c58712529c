"""Tuning: the paper's evolutionary search, or one of Optuna's samplers, on the same workers as experiments."""

from __future__ import annotations

PAPER = "paper"
CONFIRM = 4  # number of seeds of the finals, unless told otherwise
SAMPLERS = {  # the other samplers, with the names of Optuna's classes
    "tpe": "TPESampler",
    "cmaes": "CmaEsSampler",
    "gp": "GPSampler",
    "qmc": "QMCSampler",
    "random": "RandomSampler",
}
