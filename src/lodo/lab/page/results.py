"""Reads what a folder holds of an experiment: the request, the curves that are there, the table."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results
from lodo.lab.optimizers import Choice
from lodo.lab.run import Curve, Run, file_name, load_curve, read_metadata
from lodo.lab.show.tables import Row

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredResults:
    """What is stored of an experiment.

    Args:
        experiment: the experiment.
        request: what was asked for; None if it was never run.
        results: the curves of every cell that has enough of them: its first seeds, without a gap.
        rows: its table, from the curves, or from the summary if the curves are gone.
        missing: runs that were planned and are not there.
    """

    experiment: Experiment
    request: Request | None = None
    results: Results = field(default_factory=dict)
    rows: Sequence[Row] = ()
    missing: Sequence[Run] = ()

    @property
    def curves(self) -> Iterator[Curve]:
        """All curves of all cells."""
        return (curve for curves in self.results.values() for curve in curves)


def read_results(experiment: Experiment, folder: Path) -> StoredResults:
    """What a folder has of an experiment, for the request in its summary or else for its usual sizes.

    A summary alone is enough for the table; curves alone are enough for everything.
    """
    summary = read_summary(folder / experiment.name / "summary.json")
    asked = None if summary is None else read_request(summary.get("settings"))
    usual = [experiment.request(), experiment.request(quick=True)]
    missing: Sequence[Run] = ()
    for request in [asked] if asked else usual:
        try:
            results, missing = _curves(experiment, request, folder / "runs")
        except ValueError as error:  # a module of one's own that is not in this folder
            log.warning("of %s, only the stored table is shown: %s", experiment.name, error)
            continue
        if results:
            return StoredResults(experiment, request, results, experiment.rows(request, results), missing)
    if summary is None or asked is None:
        return StoredResults(experiment)
    return StoredResults(experiment, asked, rows=_rows(experiment, summary.get("rows")), missing=missing)


def read_summary(path: Path) -> dict[str, Any] | None:
    """A JSON file, or None if it is not there or cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read: %s", path, error)
        return None
    return found if isinstance(found, dict) else None


def read_request(settings: Any) -> Request | None:
    """The request in the settings of a summary, or None if they are not those of a request.

    >>> read_request({"evaluations": 10, "seconds": None, "seeds": 1, "choices": [{"optimizer": "lodo"}]}).seeds
    1
    """
    try:
        choices = tuple(Choice(**choice) for choice in settings["choices"])
        return Request(**{**settings, "choices": choices})
    except (KeyError, TypeError, ValueError) as error:
        log.warning("a summary has settings that are not a request's: %r", error)
        return None


def _rows(experiment: Experiment, rows: Any) -> list[Row]:
    try:
        return [experiment.read_row(row) for row in rows]
    except (KeyError, TypeError) as error:
        log.warning("the summary of %s has rows of another version: %s", experiment.name, error)
        return []


def _curves(experiment: Experiment, request: Request, runs: Path) -> tuple[Results, list[Run]]:
    """The curves of every cell up to its first missing seed, and the missing runs."""
    most: tuple[Results, list[Run]] | None = None
    for stored in experiment.stored_requests(request, partial(digests, runs)):
        results: dict[Cell, list[Curve]] = {}
        missing: list[Run] = []
        plan: Plan = {}
        todo = experiment.plan(stored)
        while todo:
            for cell, planned in todo.items():
                curves = [load_curve(run, runs) for run in planned]
                missing += [run for run, curve in zip(planned, curves, strict=True) if curve is None]
                first = _until_missing(curves)
                if len(first) >= experiment.least:
                    results[cell] = first
            plan |= todo
            todo = {cell: new for cell, new in experiment.further(stored, results).items() if cell not in plan}
        if most is None or len(results) > len(most[0]):
            most = results, missing
    return most or ({}, [])


def _until_missing(curves: Sequence[Curve | None]) -> list[Curve]:
    """The first curves, up to one that is not there."""
    first: list[Curve] = []
    for curve in curves:
        if curve is None:
            break
        first.append(curve)
    return first


def digests(runs: Path, task: str) -> set[str]:
    """The digests of the data that the runs of a task were made with."""
    every = map(_task_options, runs.glob(f"{file_name(task)}-*.parquet"))
    return {str(options["digest"]) for options in every if "digest" in options}


def _task_options(path: Path) -> Mapping[str, Any]:
    """The options of the task of a run, from its file; none if the file is damaged."""
    try:
        options = read_metadata(pq.read_schema(path))["settings"].get("task_options")
    except (OSError, pa.ArrowException, ValueError):
        return {}
    return options if isinstance(options, dict) else {}
