"""From a request to files: plan, sweep, read back, write the table and the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from lodo._checks import check_int
from lodo.lab.executor import OnProgress, check_scheduler, load_finished, sweep
from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, environments, step_time
from lodo.lab.experiments.catalog import duration
from lodo.lab.files import check_folder, write_atomically
from lodo.lab.run import Curve, Run
from lodo.lab.show import tables

_LOG_EVERY = 60.0  # seconds between lines where there are no progress bars, since output goes to a file


def run_experiment(
    experiment: Experiment,
    request: Request,
    out: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    checkpoint_every: float = 10.0,
    console: Console | None = None,
    keep: bool = True,
) -> Path:
    """Run an experiment to its end and return the folder of its results.

    Curves are written to ``out/runs``, which all experiments share; ``summary.json``, ``table.md`` and the
    figures are written to ``out/<name>``. With ``keep`` False, for a folder that is deleted afterwards, no figures are
    drawn and no files are named. A script that calls this with workers needs the usual ``if __name__ == "__main__":``
    around the call.
    """
    console = console or Console()
    request = experiment.settled(request)
    todo = experiment.plan(request)
    folder = out / experiment.name
    if workers is not None:
        check_int("workers", workers, low=0)  # before a folder is made
    check_folder("out", folder)
    if scheduler is not None:
        check_scheduler(scheduler)
    for line in experiment.needs(request):
        console.print(line, markup=False, highlight=False)
    results: dict[Cell, list[Curve]] = {}
    while todo:
        with _progress_bars(todo, console) as on_progress:
            sweep(
                seed_after_seed(todo),
                out / "runs",
                workers=workers,
                scheduler=scheduler,
                on_progress=on_progress,
                checkpoint_every=checkpoint_every,
            )
        results |= {cell: [load_finished(run, out / "runs") for run in runs] for cell, runs in todo.items()}
        todo = {cell: runs for cell, runs in experiment.further(request, results).items() if cell not in results}
    _write(experiment, request, results, folder, console)
    if keep:
        figures = _draw(experiment, request, results, folder)
        for path in (folder / "summary.json", folder / "table.md", *figures):
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    return folder


def seed_after_seed(plan: Plan) -> list[Run]:
    """The runs of a plan: the first of every cell, then the second of every cell that has one."""
    return [run for of_seed in zip_longest(*plan.values()) for run in of_seed if run is not None]


def _write(experiment: Experiment, request: Request, results: Results, folder: Path, console: Console) -> None:
    rows, notes = experiment.rows(request, results), experiment.notes(request, results)
    summary = {
        "experiment": experiment.name,
        "task": experiment.task,
        "settings": asdict(request),
        "rows": [asdict(row) for row in rows],
        "timings": _timings(results),
        "environments": environments(results),
    }
    about = experiment.about(request)
    if request.hyperparameters:
        about += f" Hyperparameters from {request.hyperparameters}."
    write_atomically(folder / "summary.json", (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())
    write_atomically(folder / "table.md", tables.markdown(experiment.title, about, rows, notes).encode())
    say = partial(console.print, markup=False, highlight=False)
    say(f"{experiment.title}: {about}")
    for table in tables.tables_of(rows):
        console.print(tables.terminal(table, console.width), soft_wrap=True)
    for note in notes:
        say(f"- {note}")
    say(f"\n{experiment.sentence(rows)}\n", style="bold")


def _draw(experiment: Experiment, request: Request, results: Results, folder: Path) -> list[Path]:
    """Write the figures and return their PNG files."""
    from lodo.lab.show.draw import write_figures  # Matplotlib takes a second to import

    figures = [*experiment.figures(request, results), *experiment.draw_pictures(request, results)]
    return write_figures(figures, folder, f"{experiment.title}: {experiment.size(request)}")


def _timings(results: Results) -> dict[str, float]:
    """Microseconds of training for each evaluation, as a median."""
    return {" ".join(filter(None, cell)): step_time(curves) for cell, curves in results.items()}


@contextmanager
def _progress_bars(plan: Plan, console: Console) -> Iterator[OnProgress]:
    """A bar for every optimizer and one for all together, with the time left; in a log file, a line now and then."""
    columns = (
        TextColumn(
            "{task.description}",
            table_column=Column(no_wrap=True, overflow="ellipsis", max_width=max(20, console.width - 56)),
        ),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True),
    )
    by_label: dict[str, list[Run]] = {}
    for cell, runs in plan.items():
        by_label.setdefault(cell.label, []).extend(runs)
    label_of = {run: label for label, runs in by_label.items() for run in runs}
    done = dict.fromkeys(label_of, 0.0)
    logged = time.monotonic()
    with Progress(*columns, console=console) as progress:
        total = progress.add_task("[bold]all[/bold]", total=len(label_of), state="")
        bars = {
            label: progress.add_task(escape(label), total=len(runs), state="waiting")
            for label, runs in by_label.items()
        }

        def on_progress(run: Run, fraction: float) -> None:
            nonlocal logged
            done[run] = max(fraction, done[run])
            label = label_of[run]
            for bar, runs in ((bars[label], by_label[label]), (total, list(done))):
                fractions = [done[each] for each in runs]
                finished = sum(fraction >= 1 for fraction in fractions)
                progress.update(bar, completed=sum(fractions), state=f"{finished}/{len(fractions)} runs")
            if not console.is_terminal and time.monotonic() - logged >= _LOG_EVERY:
                logged, left = time.monotonic(), progress.tasks[total].time_remaining
                expected = "" if left is None else f", about {duration(left)} left"
                console.print(f"{progress.tasks[total].fields['state']} finished{expected}", highlight=False)

        yield on_progress
