"""Measure how long experiments take here, for ``lodo run --list``: ``python tools/durations.py [NAME ...]``.

Full sizes may take weeks, so experiments are timed by sampling: every kind of run in a plan for a second, and the
time for an evaluation multiplied by the evaluations of all runs, plus what it takes to start. What counts is the
processors' time divided by their number, so it hardly matters what else the machine does.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lodo.lab import experiments
from lodo.lab.executor import load_finished
from lodo.lab.experiments.base import Experiment, Request, step_time
from lodo.lab.files import write_atomically
from lodo.lab.run import Curve, Run, environment, execute, processor
from lodo.lab.tasks import find_task

FILE = Path(__file__).parents[1] / "src" / "lodo" / "lab" / "settings" / "durations.toml"
CORES = os.cpu_count() or 1
SAMPLE = 1.0  # second of training
Samples = dict[tuple[str, str], Curve]  # by task and optimizer
SLOW = 10.0  # seconds a step: of a task this slow, one kind of run stands for all


def main(names: list[str]) -> None:
    """Measure the named experiments, or all, and store what was measured."""
    stored = tomllib.loads(FILE.read_text()) if FILE.is_file() else {}
    start = starting()
    for name in names or experiments.CATALOG:
        with tempfile.TemporaryDirectory(prefix="lodo-durations-") as scratch:
            samples: Samples = {}
            stored[name] = {
                size: start + training(experiments.load(name), size == "quick", Path(scratch), samples)
                for size in ("quick", "full")
            }
        print(name, stored[name], flush=True)
        write_atomically(FILE, as_toml(stored).encode())


def as_toml(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """What is stored: this machine, and seconds to two digits."""
    lines = [
        f"{name} = {{ quick = {seconds[name]['quick']:.2g}, full = {seconds[name]['full']:.2g} }}"
        for name in experiments.CATALOG
        if name in seconds
    ]
    head = "# Seconds, extrapolated by tools/durations.py from a second of every kind of run."
    return "\n".join([head, f'machine = "{machine()}"', *lines, ""])


def machine() -> str:
    """This machine in a few words."""
    name = re.sub(r"\(R\)|\(TM\)| Processor", "", processor())  # short: `lodo run --list` has 80 columns
    return f"{CORES} cores, {name}, torch {environment()['torch']}"


def starting() -> float:
    """Seconds for a command whose training takes next to no time: imports, workers, figures."""
    with tempfile.TemporaryDirectory(prefix="lodo-durations-") as scratch:
        command = [sys.executable, "-m", "lodo", "run", "rosenbrock", "--quick", "--out", scratch]
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime) / CORES


def training(experiment: Experiment, quick: bool, scratch: Path, samples: Samples) -> float:
    """Seconds that all runs would take, one on each core."""
    request = experiment.settled(experiment.request(quick=quick))
    runs = sampled(experiment, request, scratch, samples)
    return sum((run.evaluations or 0) * 1e-6 * step_time([curve]) for run, curve in runs) / CORES


def sampled(experiment: Experiment, request: Request, scratch: Path, samples: Samples) -> Iterator[tuple[Run, Curve]]:
    """Every run of a request, with a short run of its kind."""
    todo, results = experiment.plan(request), {}
    while todo:
        for cell, runs in todo.items():
            results[cell] = [replace(sample(run, scratch, samples), run=run) for run in runs]
            yield from zip(runs, results[cell], strict=True)
        todo = {cell: runs for cell, runs in experiment.further(request, results).items() if cell not in results}


def sample(run: Run, scratch: Path, samples: Samples) -> Curve:
    """A part of a run, or of one that takes as long for an evaluation: rates and seeds do not matter."""
    words = sorted((name, value) for name, value in run.options.items() if not isinstance(value, float))
    kind = f"{run.task} {json.dumps(run.task_options, sort_keys=True)}", f"{run.optimizer} {words}"
    if kind in samples:
        return samples[kind]
    for known, curve in samples.items():
        if known[0] == kind[0] and curve["seconds"][-1] > SLOW * len(curve["step"]):
            return curve
    short = replace(run, schedule=None, track_every=0, task_options=without_tests(run))
    curve = done(replace(short, evaluations=2), scratch)  # compiles
    if curve["seconds"][-1] - curve["seconds"][0] < SLOW:
        curve = done(replace(short, evaluations=None, seconds=SAMPLE), scratch)
    samples[kind] = curve
    return curve


def without_tests(run: Run) -> dict[str, Any]:
    """The options of a run's task, with next to no data for tests, which take long and are not timed."""
    known = inspect.signature(find_task(run.task)).parameters
    return {**run.task_options, **{name: 16 for name in ("test_size", "validation_size") if name in known}}


def done(run: Run, scratch: Path) -> Curve:
    """A finished run. Its seconds are those of the processor, if its task runs on one thread."""
    execute(run, scratch)
    return load_finished(run, scratch)


if __name__ == "__main__":
    main(sys.argv[1:])
