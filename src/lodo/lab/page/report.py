"""The sections of the page of a whole folder of results, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lodo.lab.comparison import Comparison
from lodo.lab.experiments import CATALOG, load
from lodo.lab.experiments.base import Experiment
from lodo.lab.page.render import Section
from lodo.lab.page.results import read_results, read_summary
from lodo.lab.page.sections import experiment_section, theory_section, tuning_section
from lodo.lab.tasks import find_task
from lodo.lab.theory.parts import PARTS

log = logging.getLogger(__name__)

SectionReader = tuple[str, Callable[[], Section | None]]


def section_readers(folder: Path) -> list[SectionReader]:
    """For every section of the page: what it is called, and a function that reads it, or None if there is nothing."""
    experiments = [*map(load, CATALOG), *_comparisons(folder)]
    of_experiments: list[SectionReader] = [(each.name, partial(_read, each, folder)) for each in experiments]
    of_theory: list[SectionReader] = [(f"theory {name}", partial(theory_section, name, folder)) for name in PARTS]
    searches = sorted(folder.glob("tune/*/"))
    of_searches: list[SectionReader] = [(path.name, partial(tuning_section, path, folder)) for path in searches]
    return [*of_experiments, *of_theory, *of_searches]


def _read(experiment: Experiment, folder: Path) -> Section:
    return experiment_section(read_results(experiment, folder), folder)


def _comparisons(folder: Path) -> list[Comparison]:
    summaries = [read_summary(path) for path in sorted(folder.glob("compare-*/summary.json"))]
    tasks = [str(summary.get("task")) for summary in summaries if summary is not None]
    return [Comparison(task) for task in tasks if _is_there(task)]


def _is_there(task: str) -> bool:
    """Whether a task can be found; your own can where its module can be imported."""
    try:
        find_task(task)
    except ValueError as error:
        log.warning("a comparison is left out, because its task cannot be found: %s", error)
        return False
    return True
