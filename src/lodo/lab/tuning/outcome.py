"""A search from its start to its result: trials, finals, winner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from optuna.exceptions import OptunaError

from lodo._checks import check_int
from lodo.lab.experiments.catalog import counted
from lodo.lab.files import check_folder
from lodo.lab.tuning.evolution import EvolutionSampler
from lodo.lab.tuning.finals import FINALISTS, PAPERS, START, Finalist, Finals, finalists, reference
from lodo.lab.tuning.search import Search
from lodo.lab.tuning.study import finished_trials, run_study, without_secrets

OnProgress = Callable[[int, int, str], None]  # is called with the numbers of finished and of all trials, and a text


@dataclass(frozen=True)
class Outcome:
    """The result of a search.

    Args:
        search: the search.
        study: its study.
        finals: its finals, if there were any.
        last: the study of the finals.
    """

    search: Search
    study: optuna.Study
    finals: Finals | None = None
    last: optuna.Study | None = None

    @cached_property
    def rows(self) -> list[tuple[Finalist, list[float]]]:
        """The finalists, the winner first, with their losses by seed."""
        if self.finals is None or self.last is None:
            return [(each, []) for each in finalists(self.search, self.study)[:1]]
        rows = [row for row in self._finals if row[0].origin not in (PAPERS, START)]
        return sorted(rows, key=lambda row: fmean(row[1]))

    @property
    def reference(self) -> tuple[Finalist, list[float]] | None:
        """The values that the winner has to beat, with their losses by seed; None if they were not run."""
        return next((row for row in self._finals if row[0].origin in (PAPERS, START)), None)

    @property
    def worse(self) -> str:
        """A warning if the winner is worse than the reference on the same seeds; else empty."""
        if self.reference is None:
            return ""
        (known, theirs), ours = self.reference, fmean(self.rows[0][1])
        if ours <= fmean(theirs):
            return ""
        return (
            f"The tuned values are WORSE than {known.origin}: a loss of {ours:.4g} against {fmean(theirs):.4g} on the "
            "same seeds. Do not use them; search for longer, or start closer."
        )

    @property
    def _finals(self) -> list[tuple[Finalist, list[float]]]:
        if self.finals is None or self.last is None:
            return []
        return list(zip(self.finals.finalists, self.finals.losses(self.last), strict=True))

    @property
    def params(self) -> Mapping[str, float]:
        """The parameters of the winner, as they stand in the study."""
        if not self.rows:
            raise ValueError("no trial of the search has ended with a finite loss; start it from smaller rates")
        return self.rows[0][0].params


def run_search(
    search: Search,
    storage: str,
    out: Path,
    *,
    confirm: int,
    on_progress: OnProgress = lambda done, total, text: None,
    **options: Any,
) -> Outcome:
    """Start or continue a search, and return when its result is known.

    Args:
        search: the search.
        storage: address of the database that has the studies.
        out: the folder for runs.
        confirm: number of seeds of the finals; 0 for no finals.
        on_progress: called whenever a trial has finished.
        options: as for `lodo.lab.tuning.study.run_study`.
    """
    check_int("confirm", confirm, low=0)
    for folder in (out / "runs", out / "tune" / search.name):
        check_folder("out", folder)
    expected = search.number + confirm * (FINALISTS + 1)
    try:
        study = run_study(
            search, storage, out, on_progress=partial(_report_search, search, expected, on_progress), **options
        )
        candidates = finalists(search, study)
        if not confirm or not candidates:
            return Outcome(search, study)
        finals = Finals(search, (*candidates, reference(search)), confirm)
        last = run_study(finals, storage, out, on_progress=partial(_report_finals, finals, on_progress), **options)
    except OptunaError as error:
        raise OSError(f"storage failed: {without_secrets(str(error), storage)}") from error
    return Outcome(search, study, finals, last)


def _report_search(search: Search, expected: int, on_progress: OnProgress, study: optuna.Study) -> None:
    trials = finished_trials(search, study)
    generation = search.generation(len(trials))
    values = [t.value for t in trials if t.value is not None and search.generation(t.number) == generation]
    words = []
    if isinstance(search.optuna_sampler, EvolutionSampler):
        words.append(f"generation {generation + 1} of {len(search.schedule.noise)}")
        words.append(f"{search.schedule.steps[generation]:,} steps")
    if values:
        words.append(f"lowest loss {min(values):.4g}")
    on_progress(len(trials), expected, ", ".join(words))


def _report_finals(finals: Finals, on_progress: OnProgress, study: optuna.Study) -> None:
    before, done = finals.search.number, len(finished_trials(finals, study))
    words = f"finals: {counted(len(finals.finalists), 'candidate')} on {counted(finals.seeds, 'seed')}"
    on_progress(before + done, before + finals.number, words)
