"""Tuning: the paper's evolutionary search, or another of Optuna's, on the same workers as experiments."""
