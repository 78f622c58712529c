"""Writes the result of a search: the tuned values beside the paper's, a file of them, and a figure of its trials."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from lodo.lab.experiments.catalog import counted
from lodo.lab.files import write_atomically
from lodo.lab.optimizers import paper_hyperparameters
from lodo.lab.show.columns import lay_out
from lodo.lab.show.draw import write_figures
from lodo.lab.show.interactive import write_json
from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.styles import BLACK, BLUE, GREEN, GREY, ORANGE, Style
from lodo.lab.tuning.evolution import EvolutionSampler
from lodo.lab.tuning.outcome import Outcome
from lodo.lab.tuning.search import Search
from lodo.lab.tuning.space import Space
from lodo.lab.tuning.study import finished_trials, without_password


def write_outcome(outcome: Outcome, storage: str, folder: Path, console: Console) -> Path:
    """Write everything into a folder and print it; returns the file of tuned hyperparameters."""
    search, study = outcome.search, outcome.study
    tuned, trials = search.tuned(outcome.params), finished_trials(search, study)
    paper = paper_hyperparameters(search.task, search.choice.optimizer)
    best = min((trial.value for trial in trials if trial.value is not None), default=None)
    diverged = sum(trial.state == TrialState.PRUNED for trial in trials)
    notes = [
        f"{len(trials)} trials, {diverged} diverged; lowest loss over the last 10 % of a trial's steps: "
        f"{'none' if best is None else f'{best:.5g}'}."
    ]
    if outcome.finals is not None:
        notes.append(
            f"The finalists were run again, {search.schedule.steps[-1]:,} steps on the same "
            f"{counted(outcome.finals.seeds, 'fresh seed')}; tuned is the best of them. The last row was run with them "
            "to compare, and is never the result. The paper takes the mean of the better half."
        )
    if outcome.worse:
        notes.append(outcome.worse)
    if search.schedule.rate_factor != 1:
        notes.append(f"The tuned lr has been multiplied by {search.schedule.rate_factor:g}, as in the paper.")
    title = f"Tuning of {search.choice.label} on {search.task}, sampler {search.sampler}"
    settings = folder / "tuned.toml"
    summary = {
        "study": search.name,
        "storage": without_password(storage),
        "search": search.settings,
        "confirm": outcome.finals.seeds if outcome.finals else 0,
        "tuned": tuned,
        "paper": paper,
        "best_loss": best,
        "trials": len(trials),
        "diverged": diverged,
        "generations": _generations(search, study),
        "finalists": [
            {
                "origin": finalist.origin,
                "values": search.tuned(finalist.params),
                "losses": [loss if math.isfinite(loss) else None for loss in losses],
            }
            for finalist, losses in outcome.rows
        ],
        "reference": None if outcome.reference is None else outcome.reference[0].origin,
        "worse_than_reference": bool(outcome.worse),
    }
    write_atomically(settings, toml(search, tuned).encode())
    write_atomically(folder / "summary.json", (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    tables = _tables(outcome, tuned, paper)
    lines = [f"# {title}", ""]
    for columns, rows in tables:
        lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += [*("| " + " | ".join(row) + " |" for row in rows), ""]
    lines += [f"- {note}" for note in notes]
    write_atomically(folder / "table.md", ("\n".join(lines) + "\n").encode())
    figure = trials_figure(outcome)
    (picture,) = write_figures([figure], folder, title)
    write_json([figure], folder)
    for number, (columns, rows) in enumerate(tables):
        heading = "" if number else title
        console.print(lay_out(heading, columns, [("", rows)], console.width), soft_wrap=True)
    for note in notes:
        console.print(f"- {note}", markup=False, highlight=False)
    console.print()
    for path in (folder / "summary.json", folder / "table.md", picture):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return settings


def _tables(
    outcome: Outcome, tuned: Mapping[str, float], paper: Mapping[str, Any]
) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """The tables of hyperparameters and, if there were finals, of finalists: columns and rows of text."""
    spaces = outcome.search.spaces
    values = [
        (space.name, _cell(space.start), _cell(tuned[space.name]), _cell(paper.get(space.name))) for space in spaces
    ]
    tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [
        (("hyperparameter", "start", "tuned", "paper"), list(values))
    ]
    if outcome.finals is not None:
        rows = []
        for finalist, losses in [*outcome.rows, *filter(None, [outcome.reference])]:
            of_it = outcome.search.tuned(finalist.params)
            spread = f" ± {stdev(losses):.2g}" if len(losses) > 1 and math.isfinite(max(losses)) else ""
            loss = f"{fmean(losses):.4g}{spread}" if math.isfinite(max(losses)) else "diverged"
            rows.append((finalist.origin, *(_cell(of_it[space.name]) for space in spaces), loss))
        tables.append((("finalist", *(space.name for space in spaces), "loss"), rows))
    return tables


def toml(search: Search, tuned: Mapping[str, float]) -> str:
    """The tuned values as a file for `lodo run --hyperparameters`.

    Options that were set by hand are included, so that the file alone says what was tuned.
    """
    options = search.with_tuned(tuned)
    inside = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    name = search.choice.optimizer
    return f"# study {search.name}\n[{_key(search.task)}]\n{_key(name)} = {{ {inside} }}\n"


def _key(name: str) -> str:
    """A name as a key of TOML, in quotes if it has dots or colons."""
    return name if name.replace("_", "").isalnum() else json.dumps(name)


def _generations(search: Search, study: optuna.Study) -> list[dict[str, Any]]:
    """For each generation of the paper's sampler: its mean, noise and steps, and the trials in its better half."""
    sampler = search.optuna_sampler
    if not isinstance(sampler, EvolutionSampler):
        return []
    return [
        {
            "mean": {
                space.name: space.value(math.exp(sampler.mean(study, g)[space.parameter])) for space in search.spaces
            },
            "noise": search.schedule.noise[g],
            "steps": search.schedule.steps[g],
            "better_half": sorted(trial.number for trial in sampler.get_parent_population(study, g + 1)),
        }
        for g in range(len(search.schedule.noise))
    ]


def trials_figure(outcome: Outcome) -> Figure:
    """The loss and each hyperparameter of every trial, the better halves marked, the result and the paper's values."""
    search, study = outcome.search, outcome.study
    trials = finished_trials(search, study)
    losses = [trial.value for trial in trials if trial.value is not None]
    positive = bool(losses) and min(losses) > 0
    # a few losses explode, but are finite
    shown = (min(losses) / 1.5, 1.5 * float(np.percentile(losses, 90))) if positive else None
    x = Axis("generation" if isinstance(search.optuna_sampler, EvolutionSampler) else "trial", whole=True)
    groups = _groups(search, study)
    loss = Plot(
        "loss",
        "Loss over the last 10 %",
        x,
        Axis("loss over the last 10 %", log=positive, range=shown),
        [
            _points(search, label, [t for t in members if t.value is not None], lambda trial: trial.value or 0.0)
            for label, members in groups.items()
        ],
    )
    panels = [loss, *(_space_plot(outcome, space, groups, x) for space in search.spaces)]
    return Figure("generations", panels, columns=2, size=(4.6, 3.2))


def _space_plot(outcome: Outcome, space: Space, groups: Mapping[str, Sequence[FrozenTrial]], x: Axis) -> Plot:
    """One hyperparameter of every trial."""
    search, study, sampler = outcome.search, outcome.study, outcome.search.optuna_sampler
    lines = [
        _points(search, label, members, lambda trial: trial.params[space.parameter])
        for label, members in groups.items()
    ]
    end = search.number
    if isinstance(sampler, EvolutionSampler):
        end = len(search.schedule.noise)
        means = np.array([math.exp(sampler.mean(study, g)[space.parameter]) for g in range(end)])
        lines.append(
            Line("mean", np.arange(float(end)), means, style=Style(BLACK, width=1), mark="both", symbol="dash")
        )
    result = np.array([outcome.params[space.parameter]])
    lines.append(
        Line("tuned", np.array([float(end)]), result, style=Style(GREEN), mark="points", symbol="star", size=10)
    )
    return Plot(
        space.name,
        space.name,
        x,
        Axis(space.parameter, log=True, reversed=space.kind == "decay"),  # larger decays above
        lines,
        levels=_paper_level(search, space),
    )


def _paper_level(search: Search, space: Space) -> dict[str, float]:
    """The paper's value of a hyperparameter, where it gives one, as the search varies it."""
    paper = paper_hyperparameters(search.task, search.choice.optimizer).get(space.name)
    if paper is None:
        return {}
    if space.kind != "rate":
        return {"paper": 1 - paper}
    factor = search.schedule.rate_factor if space.name == "lr" else 1.0
    return {"paper" if factor == 1 else "paper, before its factor": paper / factor}


def _groups(search: Search, study: optuna.Study) -> dict[str, list[FrozenTrial]]:
    """Trials by how they ended: diverged, in the better half of their generation or the best of all, others."""
    trials, sampler = finished_trials(search, study), search.optuna_sampler
    if isinstance(sampler, EvolutionSampler):
        generations = range(len(search.schedule.noise))
        best = {trial.number for g in generations for trial in sampler.get_parent_population(study, g + 1)}
        marked = "better half"
    else:
        best = {study.best_trial.number} if any(trial.value is not None for trial in trials) else set()
        marked = "best"
    return {
        "diverged": [trial for trial in trials if trial.value is None],
        "others": [trial for trial in trials if trial.value is not None and trial.number not in best],
        marked: [trial for trial in trials if trial.number in best],
    }


def _points(search: Search, label: str, members: Sequence[FrozenTrial], value: Callable[[FrozenTrial], float]) -> Line:
    """One point a trial, at its generation with some scatter or at its number."""
    color = {"diverged": ORANGE, "others": GREY}.get(label, BLUE)
    return Line(
        label,
        np.array([_place(search, trial.number) for trial in members]),
        np.array([value(trial) for trial in members]),
        names=[f"trial {trial.number}" for trial in members],
        style=Style(color),
        mark="points",
        symbol="cross" if label == "diverged" else "circle",
        size=3,
    )


def _place(search: Search, number: int) -> float:
    """Where a trial is on the x axis."""
    if not isinstance(search.optuna_sampler, EvolutionSampler):
        return float(number)
    scatter = np.random.default_rng(number).uniform(-0.3, 0.3)
    return search.generation(number) + float(scatter)


def _cell(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"
