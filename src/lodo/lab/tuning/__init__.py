"""Tuning: the paper's evolutionary search, or another of Optuna's, on the same workers as experiments."""

PAPER = "paper"
CONFIRM = 4  # seeds of the finals, usually
SAMPLERS = {  # others, by the names of Optuna's classes
    "tpe": "TPESampler",
    "cmaes": "CmaEsSampler",
    "gp": "GPSampler",
    "qmc": "QMCSampler",
    "random": "RandomSampler",
}
