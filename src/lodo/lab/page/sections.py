"""Makes the sections of the page from a folder of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lodo.lab.experiments.base import Experiment, environments
from lodo.lab.experiments.catalog import duration
from lodo.lab.page.commands import out_words, quoted, run_command, theory_command, tune_command
from lodo.lab.page.render import Gap, Picture, Section, html_of
from lodo.lab.page.results import StoredResults, read_summary
from lodo.lab.settings import read_settings
from lodo.lab.show.interactive import FIGURES, as_json
from lodo.lab.tuning import CONFIRM


def experiment_section(stored: StoredResults, folder: Path, command: str | None = None) -> Section:
    """What the page shows of an experiment.

    Args:
        stored: what there is of it.
        folder: the folder of results.
        command: what repeats it; the usual command if None.
    """
    experiment, request, results = stored.experiment, stored.request, stored.results
    if command is None:
        command = run_command(experiment, request, folder, results)
    if request is None:
        taken = read_settings("durations").get(experiment.name)
        times = f"{duration(taken['quick'])}, without --quick {duration(taken['full'])}" if taken else ""
        gap = Gap(times, quoted([*experiment.command, "--quick", *out_words(folder)]))
        return Section(experiment.name, experiment.title, experiment.shows, gaps=[gap])
    return Section(
        experiment.name,
        experiment.title,
        experiment.shows,
        about=experiment.about(request),
        says=experiment.sentence(stored.rows) if stored.rows else "",
        rows=stored.rows,
        figures=[as_json(figure) for figure in experiment.figures(request, results)] if results else (),
        pictures=[picture for picture in _pictures(experiment, folder) if picture.path.is_file()],
        notes=experiment.notes(request, results) if results else (),
        gaps=[*_gaps(stored, command), *_picture_gaps(experiment, folder, command)],
        command=command,
        made_with=environments(results) or _summary_made_with(experiment, folder),
    )


def _gaps(stored: StoredResults, command: str) -> Iterator[Gap]:
    planned = len(stored.missing) + sum(1 for _ in stored.curves)
    if not stored.results:
        yield Gap("The table is from a summary: its curves are not in this folder. This command makes them:", command)
    elif stored.missing:
        names = ", ".join(dict.fromkeys(run.optimizer for run in stored.missing))
        yield Gap(f"{len(stored.missing)} of {planned} runs are missing ({names}). This command makes them:", command)


def _pictures(experiment: Experiment, folder: Path) -> list[Picture]:
    return [Picture(name.replace("-", " "), folder / experiment.name / f"{name}.png") for name in experiment.pictures]


def _picture_gaps(experiment: Experiment, folder: Path, command: str) -> Iterator[Gap]:
    for picture in _pictures(experiment, folder):
        if not picture.path.is_file():
            yield Gap(f"The picture {picture.path.name} is missing. This command makes it:", command)


def _summary_made_with(experiment: Experiment, folder: Path) -> list[dict[str, str]]:
    found = (read_summary(folder / experiment.name / "summary.json") or {}).get("environments")
    every = found if isinstance(found, list) else []
    return [{str(k): str(v) for k, v in one.items()} for one in every if isinstance(one, dict)]


def theory_section(name: str, folder: Path) -> Section:
    """A part of the theory: its claims, the evidence and the figures."""
    home = folder / "theory" / name
    summary = read_summary(home / "summary.json")
    text = home / "text.md"
    settings = (summary or {}).get("settings")
    command = theory_command(name, settings if isinstance(settings, Mapping) else {}, folder)
    if summary is None or not text.is_file():
        return Section(f"theory-{name}", f"Theory: {name}", gaps=[Gap("", command)])
    heading, _, words = text.read_text(encoding="utf-8").partition("\n")
    figures = read_figures(home)
    for figure in figures:
        words = words.replace(f"![{figure['name']}]({figure['name']}.png)\n", "")  # shown as a plot instead
    return Section(
        f"theory-{name}",
        f"Theory: {heading.removeprefix('# ')}",
        words=html_of(words, home),
        figures=figures,
        command=command,
    )


def tuning_section(home: Path, folder: Path) -> Section | None:
    """A search for hyperparameters: the tuned values beside the paper's, and its trials."""
    summary, table = read_summary(home / "summary.json"), home / "table.md"
    if summary is None or not table.is_file():
        return None
    heading, _, words = table.read_text(encoding="utf-8").partition("\n")
    figures = read_figures(home)
    command = tune_command(summary.get("search"), folder, summary.get("confirm", CONFIRM))
    picture = Picture("every trial, and the values that they led to", home / "generations.png")
    pictures = [picture] if picture.path.is_file() and not figures else []
    gap = Gap("The figure of its trials is missing. This command makes it:", command)
    return Section(
        f"tune-{home.name}",
        heading.removeprefix("# "),
        words=html_of(words, home),
        figures=figures,
        pictures=pictures,
        gaps=() if figures or pictures else [gap],
        command=command,
    )


def read_figures(folder: Path) -> list[dict[str, Any]]:
    """The figures that `lodo.lab.show.interactive.write_json` has left in a folder; none if there are none."""
    stored = read_summary(folder / FIGURES)
    return [] if stored is None else list(stored.get("figures", []))
