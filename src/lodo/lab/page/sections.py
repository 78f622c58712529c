"""From a folder of results to the sections of the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lodo.lab.experiments import CATALOG, load
from lodo.lab.experiments.base import Experiment, environments
from lodo.lab.experiments.comparison import Comparison
from lodo.lab.page.commands import quoted, run_command, theory_command, tune_command
from lodo.lab.page.render import Gap, Picture, Section, markdown
from lodo.lab.page.results import Found, find, read_summary
from lodo.lab.tasks import TASKS
from lodo.lab.theory.parts import PARTS
from lodo.lab.tuning import CONFIRM

Part = tuple[str, Any]  # what is being read, in words, and a function that reads it


def section(found: Found, folder: Path, redo: str | None = None) -> Section:
    """What the page shows of an experiment; ``redo`` is the command that makes it again, if it is not the usual one."""
    experiment, request = found.experiment, found.request
    command = run_command(experiment, request, folder, found.results) if redo is None else redo
    if request is None:
        small = quoted([*experiment.command, "--quick"])
        gap = Gap(f"Not run yet. A small variant takes about a minute: {small}. At full size:", command)
        return Section(experiment.name, experiment.title, experiment.shows, gaps=[gap])
    results = found.results
    return Section(
        experiment.name,
        experiment.title,
        experiment.shows,
        about=experiment.about(request),
        says=experiment.sentence(found.rows) if found.rows else "",
        rows=found.rows,
        plots=experiment.plots(request, results) if results else (),
        pictures=[picture for picture in _pictures(experiment, folder) if picture.path.is_file()],
        notes=experiment.notes(request, results) if results else (),
        gaps=[*_gaps(found, command), *_picture_gaps(experiment, folder, command)],
        command=command,
        made_with=environments(results) or _summary_made_with(experiment, folder),
    )


def _gaps(found: Found, command: str) -> Iterator[Gap]:
    planned = len(found.missing) + sum(1 for _ in found.curves)
    if not found.results:
        yield Gap("The table is that of a summary: its curves are not in this folder. They are made by", command)
    elif found.missing:
        names = ", ".join(dict.fromkeys(run.optimizer for run in found.missing))
        yield Gap(f"{len(found.missing)} of {planned} runs are missing ({names}). They are made by", command)


def _pictures(experiment: Experiment, folder: Path) -> list[Picture]:
    return [Picture(name.replace("-", " "), folder / experiment.name / f"{name}.png") for name in experiment.pictures]


def _picture_gaps(experiment: Experiment, folder: Path, command: str) -> Iterator[Gap]:
    for picture in _pictures(experiment, folder):
        if not picture.path.is_file():
            yield Gap(f"The picture {picture.path.name} is missing. It is made by", command)


def _summary_made_with(experiment: Experiment, folder: Path) -> list[dict[str, str]]:
    found = (read_summary(folder / experiment.name / "summary.json") or {}).get("environments")
    every = found if isinstance(found, list) else []
    return [{str(k): str(v) for k, v in one.items()} for one in every if isinstance(one, dict)]


def theory_section(name: str, folder: Path) -> Section:
    """A part of the theory: its claims, what was found, and its figures."""
    home = folder / "theory" / name
    summary = read_summary(home / "summary.json")
    text = home / "text.md"
    settings = (summary or {}).get("settings")
    command = theory_command(name, settings if isinstance(settings, Mapping) else {}, folder)
    if summary is None or not text.is_file():
        return Section(f"theory-{name}", f"Theory: {name}", gaps=[Gap("Not computed yet. It is made by", command)])
    heading, _, words = text.read_text(encoding="utf-8").partition("\n")
    return Section(
        f"theory-{name}", f"Theory: {heading.removeprefix('# ')}", words=markdown(words, home), command=command
    )


def tuning_section(home: Path, folder: Path) -> Section | None:
    """A search for hyperparameters: what was tuned, beside the paper's, and its generations."""
    summary, table = read_summary(home / "summary.json"), home / "table.md"
    if summary is None or not table.is_file():
        return None
    heading, _, words = table.read_text(encoding="utf-8").partition("\n")
    picture = Picture("every trial by generation, and the values that they led to", home / "generations.png")
    command = tune_command(summary.get("search"), folder, summary.get("confirm", CONFIRM))
    there = picture.path.is_file()
    return Section(
        f"tune-{home.name}",
        heading.removeprefix("# "),
        words=markdown(words, home),
        pictures=[picture] if there else (),
        gaps=() if there else [Gap("The picture of its generations is missing. It is made by", command)],
        command=command,
    )


def parts(folder: Path) -> list[Part]:
    """Every section that the page of a folder has, unread: its name, and a function that reads it or finds nothing."""
    experiments = [*map(load, CATALOG), *_comparisons(folder)]
    read = [(one.name, lambda one=one: section(find(one, folder), folder)) for one in experiments]
    theory = [(f"theory {name}", lambda name=name: theory_section(name, folder)) for name in PARTS]
    tunings = [(path.name, lambda path=path: tuning_section(path, folder)) for path in sorted(folder.glob("tune/*/"))]
    return [*read, *theory, *tunings]


def _comparisons(folder: Path) -> list[Comparison]:
    names = [path.parent.name.removeprefix("compare-") for path in sorted(folder.glob("compare-*/summary.json"))]
    return [Comparison(name) for name in names if name in TASKS]
