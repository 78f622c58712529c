"""The experiments: one file for each table or figure of the paper, and some that the paper does not have.

Importing this package imports none of them: `CATALOG` says what there is, and `load` imports the one that is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lodo._checks import check_choice
from lodo.lab.experiments.catalog import CATALOG, Entry, Size

if TYPE_CHECKING:
    from lodo.lab.experiments.base import Experiment

__all__ = ["CATALOG", "Entry", "Size", "load"]


def load(name: str) -> Experiment:
    """Import an experiment of the catalogue.

    >>> load("rosenbrock").title
    'Rosenbrock function'
    """
    check_choice("experiment", name, CATALOG)
    entry = CATALOG[name]
    module, _, kind = entry.path.partition(":")
    experiment: Experiment = getattr(importlib.import_module(f"lodo.lab.experiments.{module}"), kind)(entry)
    return experiment
