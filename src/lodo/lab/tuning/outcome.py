"""A search from its beginning to its result: trials, finals, winner."""

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
from lodo.lab.tuning.evolution import EvolutionSampler
from lodo.lab.tuning.finals import FINALISTS, Finalist, Finals, finalists
from lodo.lab.tuning.search import Search
from lodo.lab.tuning.study import finished_trials, tune

Show = Callable[[int, int, str], None]  # trials that have ended, trials in all, where it stands in words


@dataclass(frozen=True)
class Outcome:
    """What came out of a search.

    Args:
        search: which one.
        study: its study.
        finals: its finals, if there were any.
        last: their study.
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
        rows = list(zip(self.finals.finalists, self.finals.losses(self.last), strict=True))
        return sorted(rows, key=lambda row: fmean(row[1]))

    @property
    def params(self) -> Mapping[str, float]:
        """The winner's, as a study has them."""
        if not self.rows:
            raise ValueError("no trial of the search has ended with a finite loss; start it from smaller rates")
        return self.rows[0][0].params


def conduct(
    search: Search, storage: str, out: Path, *, confirm: int, show: Show = lambda done, of, state: None, **options: Any
) -> Outcome:
    """Go on with a search until its result is known.

    Args:
        search: what to do.
        storage: address of the studies' database.
        out: the folder for runs.
        confirm: seeds of the finals; 0 has none.
        show: is told about progress.
        options: as for `lodo.lab.tuning.study.tune`.
    """
    check_int("confirm", confirm, low=0)
    expected = search.number + confirm * FINALISTS
    try:
        study = tune(search, storage, out, report=partial(_show_search, search, expected, show), **options)
        candidates = finalists(search, study)
        if not confirm or len(candidates) < 2:
            return Outcome(search, study)
        finals = Finals(search, candidates, confirm)
        last = tune(finals, storage, out, report=partial(_show_finals, finals, show), **options)
    except OptunaError as error:  # of the storage
        raise OSError(f"storage failed: {error}") from error
    return Outcome(search, study, finals, last)


def _show_search(search: Search, expected: int, show: Show, study: optuna.Study) -> None:
    trials = finished_trials(search, study)
    generation = search.generation(len(trials))
    values = [t.value for t in trials if t.value is not None and search.generation(t.number) == generation]
    words = f"lowest loss {min(values):.4g}" if values else ""
    if isinstance(search.made_sampler, EvolutionSampler):
        steps = (
            f"generation {generation + 1} of {len(search.schedule.noise)}, {search.schedule.steps[generation]:,} steps"
        )
        words = f"{steps}, {words}" if words else steps
    show(len(trials), expected, words)


def _show_finals(finals: Finals, show: Show, study: optuna.Study) -> None:
    before, done = finals.search.number, len(finished_trials(finals, study))
    words = f"finals: {len(finals.finalists)} candidates on {finals.seeds} seeds"
    show(before + done, before + finals.number, words)
