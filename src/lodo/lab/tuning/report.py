"""What a search leaves: the tuned values beside the paper's, a file of them, and a picture of its generations."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import optuna
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from lodo.lab.files import write_atomically
from lodo.lab.optimizers import paper_hyperparameters
from lodo.lab.show.figures import canvas, look, save
from lodo.lab.tuning.evolution import EvolutionSampler
from lodo.lab.tuning.outcome import Outcome
from lodo.lab.tuning.search import Search
from lodo.lab.tuning.space import Space
from lodo.lab.tuning.study import finished_trials, without_password

_BLUE, _GREY, _ORANGE, _GREEN = "#0072b2", "#999999", "#d55e00", "#009e73"


def write(outcome: Outcome, storage: str, folder: Path, console: Console) -> Path:
    """All of it, into a folder; returns the file of hyperparameters."""
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
            f"The finalists were run again, {search.schedule.steps[-1]:,} steps on the same {outcome.finals.seeds} "
            "fresh seeds; tuned is the best of them. The paper takes the mean of the better half."
        )
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
    with look():
        figure = draw(outcome)
        figure.suptitle(title, fontsize="small", color="0.4")
        picture = save(figure, folder / "generations")[0]
    for number, (columns, rows) in enumerate(tables):
        table = Table(title=None if number else title, title_justify="left")
        for place, column in enumerate(columns):
            table.add_column(column, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in notes:
        console.print(f"- {note}", markup=False, highlight=False)
    console.print(f"\nfigure: {picture}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"numbers: {folder / 'summary.json'}, {folder / 'table.md'}", highlight=False, soft_wrap=True)
    return settings


def _tables(
    outcome: Outcome, tuned: Mapping[str, float], paper: Mapping[str, Any]
) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """The hyperparameters, and the finalists if there were finals: columns and rows of text."""
    spaces = outcome.search.spaces
    values = [
        (space.name, _cell(space.start), _cell(tuned[space.name]), _cell(paper.get(space.name))) for space in spaces
    ]
    tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [
        (("hyperparameter", "start", "tuned", "paper"), list(values))
    ]
    if outcome.finals is not None:
        rows = []
        for finalist, losses in outcome.rows:
            of_it = outcome.search.tuned(finalist.params)
            spread = f" ± {stdev(losses):.2g}" if len(losses) > 1 and math.isfinite(max(losses)) else ""
            loss = f"{fmean(losses):.4g}{spread}" if math.isfinite(max(losses)) else "diverged"
            rows.append((finalist.origin, *(_cell(of_it[space.name]) for space in spaces), loss))
        tables.append((("finalist", *(space.name for space in spaces), "loss"), rows))
    return tables


def toml(search: Search, tuned: Mapping[str, float]) -> str:
    """The tuned values as `lodo run --hyperparameters` takes them.

    What was set by hand is among them, so that the file alone says what was tuned.
    """
    options: dict[str, Any] = {**search.choice.options, **tuned}
    inside = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    name = search.choice.optimizer
    key = json.dumps(name) if "." in name else name
    return f"# study {search.name}\n[{search.task}]\n{key} = {{ {inside} }}\n"


def _generations(search: Search, study: optuna.Study) -> list[dict[str, Any]]:
    """Of each generation of the paper's sampler: around what it was drawn, and who its better half was."""
    sampler = search.made_sampler
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


def draw(outcome: Outcome) -> Figure:
    """The loss and each hyperparameter of every trial, the better halves marked, the result and the paper's values."""
    search, study = outcome.search, outcome.study
    trials = finished_trials(search, study)
    sampler = search.made_sampler
    panels = 1 + len(search.spaces)
    columns = min(panels, 2)
    figure, axes = canvas(columns, math.ceil(panels / columns), size=(4.6, 3.2))
    if isinstance(sampler, EvolutionSampler):
        shift = np.random.default_rng(0).uniform(-0.3, 0.3, search.number)
        at = {trial.number: search.generation(trial.number) + shift[trial.number] for trial in trials}
        generations = range(len(search.schedule.noise))
        good = {trial.number for g in generations for trial in sampler.get_parent_population(study, g + 1)}
        label, marked, end = "generation", "better half", len(search.schedule.noise)
    else:
        at = {trial.number: float(trial.number) for trial in trials}
        good = {study.best_trial.number} if any(trial.value is not None for trial in trials) else set()
        label, marked, end = "trial", "best", search.number
    groups: dict[str, tuple[list[FrozenTrial], dict[str, Any]]] = {
        "diverged": ([t for t in trials if t.value is None], {"marker": "x", "color": _ORANGE}),
        "others": ([t for t in trials if t.value is not None and t.number not in good], {"color": _GREY}),
        marked: ([t for t in trials if t.number in good], {"color": _BLUE}),
    }
    losses = [trial.value for trial in trials if trial.value is not None]
    if losses and min(losses) > 0:
        axes[0].set_yscale("log")
        axes[0].set_ylim(min(losses) / 1.5, 1.5 * float(np.percentile(losses, 90)))  # a few explode, but are finite
    axes[0].set(xlabel=label, ylabel="loss over the last 10 %")
    for name, (members, look_of) in groups.items():
        with_loss = [trial for trial in members if trial.value is not None]
        axes[0].scatter(
            [at[t.number] for t in with_loss], [t.value or 0.0 for t in with_loss], s=9, label=name, **look_of
        )
        for space, place in zip(search.spaces, axes[1:], strict=False):
            place.scatter([at[t.number] for t in members], [t.params[space.parameter] for t in members], s=9, **look_of)
    paper = paper_hyperparameters(search.task, search.choice.optimizer)
    for space, place in zip(search.spaces, axes[1:], strict=False):
        _finish(place, space, label, paper.get(space.name), search.schedule.rate_factor if space.name == "lr" else 1.0)
        if isinstance(sampler, EvolutionSampler):
            means = [math.exp(sampler.mean(study, g)[space.parameter]) for g in generations]
            place.plot(list(generations), means, color="black", lw=1, marker="_", label="mean")
        result = outcome.params[space.parameter]
        place.plot(end, result, ls="none", marker="*", ms=10, color=_GREEN, mec="black", mew=0.5, label="tuned")
    for place in axes[:panels]:
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
    for place in axes[:2]:
        if place.get_legend_handles_labels()[0]:
            place.legend(fontsize="x-small")
    for unused in axes[panels:]:
        unused.set_axis_off()
    return figure


def _finish(place: Axes, space: Space, label: str, paper: float | None, factor: float) -> None:
    place.set_yscale("log")
    if paper is not None:
        p = paper / factor if space.kind == "rate" else 1 - paper
        place.axhline(p, color=_ORANGE, lw=1, ls="--", label="paper" if factor == 1 else "paper, before its factor")
    place.set(xlabel=label, ylabel=space.parameter)
    if space.kind == "decay":
        place.invert_yaxis()  # larger decays above


def _cell(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"
