"""How long does it take to reach tuned AdamW's loss? The optimizers train side by side, on one thread.

    python benchmarks/seconds.py                                 eight networks, about half an hour
    python benchmarks/seconds.py --optimizers 'KronLODO untouched' --tasks 'mlp, cnn'

The runs of `lodo run networks` are hours apart, and so fast and slow hours of a machine become differences between
optimizers. Here every optimizer trains the network of the first seed again, with the setting of the stored runs, and
they take turns: each does a hundredth of its steps, then the next one. Stored runs say how many steps an optimizer
needs to AdamW's final loss on every seed; the seconds are those that as many steps take here, in processor time and
without the first step, which may compile something. Ratios are to tuned AdamW's; targets are in brackets.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lodo._checks import check_choice
from lodo.lab import experiments
from lodo.lab.experiments.beyond.networks.entries import REFERENCE, UNTOUCHED
from lodo.lab.experiments.beyond.networks.metrics import mean_ratio, steps_to
from lodo.lab.experiments.beyond.networks.standings import Reports, ways
from lodo.lab.experiments.beyond.networks.tracks import TunedTrack
from lodo.lab.page.results import read_results
from lodo.lab.run import Curve, Run, Training, threads
from measuring import with_target, write

ROUNDS = 100
FASTER_ON = 5  # of eight networks KronLODO untouched is to need less time than AdamW


def trained(runs: Sequence[Run], task: str) -> dict[Run, Training]:
    """All runs, done in turn."""
    with threads(1):
        trainings = {run: Training(replace(run, track_every=0)) for run in runs}
        for number in track(range(ROUNDS), task, transient=True):
            until = (number + 1) / ROUNDS
            for training in trainings.values():
                while training.fraction < until and not training.over:
                    training.advance(until)
    return trainings


def measured(found: Mapping[str, Sequence[Curve]], task: str) -> dict[str, dict[str, float]]:
    """The seconds to AdamW's loss and those of a step, over AdamW's, of optimizers that get there on every seed."""
    steps = {label: list(each.values()) for label, each in ways({task: found}, REFERENCE, steps_to)[task].items()}
    needed = {label: [int(n) for n in each if n] for label, each in steps.items() if each and all(each)}
    first = {label: found[label][0].run for label in needed}
    trainings = trained(list(dict.fromkeys(first.values())), task)
    seconds = {label: trainings[run].columns["seconds"] for label, run in first.items()}
    to_loss = {label: fmean(seconds[label][n - 1] - seconds[label][0] for n in needed[label]) for label in needed}
    step = {label: (values[-1] - values[0]) / (len(values) - 1) for label, values in seconds.items()}
    return {
        label: {"seconds": to_loss[label] / to_loss[REFERENCE], "step": step[label] / step[REFERENCE]}
        for label in needed
        if label != REFERENCE
    }


def stored(folder: Path, tasks: str | None, optimizers: str | None) -> Reports:
    """The curves of the tuned track, of every task and optimizer that is asked for."""
    tuned = experiments.load("networks")
    assert isinstance(tuned, TunedTrack)
    results = read_results(tuned, folder)
    if results.request is None:
        raise SystemExit(f"{folder} has no runs of `lodo run networks`")
    reports = {name: found for name, found in tuned.reports(results.request, results.results).items() if found}
    labels = list(dict.fromkeys(label for found in reports.values() for label in found))
    chosen_tasks, chosen = _named("tasks", tasks, list(reports)), _named("optimizers", optimizers, labels)
    return {
        name: {label: curves for label, curves in reports[name].items() if label in (REFERENCE, *chosen)}
        for name in chosen_tasks
    }


def _named(what: str, given: str | None, known: Sequence[str]) -> Sequence[str]:
    names = known if given is None else [name.strip() for name in given.split(",")]
    try:
        for name in names:
            check_choice(what, name, known)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    return names


def show(found: Mapping[str, Mapping[str, Mapping[str, float]]], what: str, title: str) -> None:
    labels = list(dict.fromkeys(label for values in found.values() for label in values))
    each = {label: [values[label][what] for values in found.values() if label in values] for label in labels}
    table = Table("network", *labels)
    for task, values in found.items():
        table.add_row(task, *(f"{values[label][what]:.2f}" if label in values else "" for label in labels))
    table.add_row("geometric mean", *(f"{mean_ratio(x):.2f}" if len(x) == len(found) else "" for x in each.values()))
    Console().print(f"\n{title}", table, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("docs/results"), help="where finished runs are")
    parser.add_argument("--tasks", default=None, help="the networks, separated by commas (default: all that are there)")
    parser.add_argument("--optimizers", default=None, help="as tables call them, separated by commas (default: all)")
    parser.add_argument("--out", type=Path, default=Path("results/seconds.json"), help="where the JSON goes")
    args = parser.parse_args()
    reports = stored(args.results, args.tasks, args.optimizers)
    found = {task: measured(curves, task) for task, curves in reports.items()}
    show(found, "seconds", "seconds to tuned AdamW's final training loss, over AdamW's")
    show(found, "step", "seconds of a step with its passes, over AdamW's")
    if ours := [values[UNTOUCHED]["seconds"] for values in found.values() if UNTOUCHED in values]:
        faster = sum(seconds < 1 for seconds in ours)
        target = FASTER_ON if len(ours) == 8 else None
        count = with_target(f"{faster} of {len(ours)}", faster, target, at_least=True)
        Console().print(f"{UNTOUCHED} needs less time than AdamW on {count}")
    write(args.out, found)


if __name__ == "__main__":
    main()
