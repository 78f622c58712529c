"""The commands that repeat a result."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lodo.lab.data import DIGITS_DIGEST, load_library
from lodo.lab.experiments.base import Experiment, Request, Results
from lodo.lab.tasks import find_task
from lodo.lab.tuning import CONFIRM
from lodo.spelling import spell_options


def run_command(experiment: Experiment, request: Request | None, out: Path, results: Results) -> str:
    """The command for an experiment with a request; without a request, at full size.

    >>> from lodo.lab.experiments import load
    >>> bowl = load("bowl")
    >>> request = bowl.request(quick=True, choices=bowl.parse("lodo, lodo(beta=0.5)"), task_options={"n": 50})
    >>> run_command(bowl, request, Path("results"), {})
    "lodo run bowl --quick --optimizers 'lodo, lodo(beta=0.5)' --task n=50"
    """
    words = [*experiment.command]
    own = None if request is None else experiment.words(request)
    if own is not None:
        words += own
    elif request is not None:
        words += _size(experiment, request)
        if not _same_choices(experiment, request):
            words += ["--optimizers", ", ".join(map(experiment.spell, request.choices))]
        if options := _task_options(experiment, request):
            words += ["--task", spell_options(options)]
        if request.hyperparameters:
            words += ["--hyperparameters", request.hyperparameters]
    words += ["--data", "digits"] if _needs_no_files(results) else []
    return quoted([*words, *out_words(out)])


def _needs_no_files(results: Results) -> bool:
    """Whether all data of the runs was what ``--data digits`` stands for."""
    runs = [curve.run for curves in results.values() for curve in curves]
    used = {(run.task, run.task_options["digest"]) for run in runs if run.task_options.get("digest")}
    return bool(used) and all(
        digest == (load_library().digest if find_task(task).dataset == "text" else DIGITS_DIGEST)
        for task, digest in used
    )


def theory_command(name: str, settings: Mapping[str, Any], out: Path) -> str:
    """The command for a part of the theory.

    >>> theory_command("saddle", {"quick": True, "seed": 0}, Path("results"))
    'lodo theory saddle --quick'
    """
    words = ["lodo", "theory", name, *(["--quick"] if settings.get("quick") else [])]
    words += ["--seed", str(settings["seed"])] if settings.get("seed") else []
    return quoted([*words, *out_words(out)])


def tune_command(search: Any, out: Path, confirm: Any = CONFIRM) -> str:
    """The command for a search, from the settings in its summary and the number of seeds in its finals."""
    search = search if isinstance(search, Mapping) else {}
    choice, task = search.get("choice", {}), str(search.get("task", "TASK"))
    given, optimizer = spell_options(choice.get("options", {})), str(choice.get("optimizer", "NAME"))
    words = ["lodo", "tune", task, "--optimizer", f"{optimizer}({given})" if given else optimizer]
    words += _schedule(search.get("schedule"), task)
    for option in ("sampler", "seed", "trials"):
        if (value := search.get(option)) not in (None, 0, "paper"):
            words += [f"--{option}", str(value)]
    words += [] if confirm == CONFIRM else ["--confirm", str(confirm)]
    words += _space(search.get("spaces"), optimizer, choice.get("options", {}))
    options = search.get("task_options", {})
    plain = {name: value for name, value in options.items() if name != "digest"}
    words += ["--task", spell_options(plain)] if plain else []
    words += ["--data", "digits"] if options.get("digest") == DIGITS_DIGEST else []
    return quoted([*words, *out_words(out)])


def _schedule(found: Any, task: str) -> list[str]:
    from lodo.lab.tuning.space import find_schedule  # Optuna takes a second to import

    try:
        quick = json.dumps(asdict(find_schedule("quick", task)))
    except ValueError:
        return []
    return ["--schedule", "quick"] if json.dumps(found) == quick else []


def _space(found: Any, optimizer: str, fixed: Mapping[str, Any]) -> list[str]:
    """The option for a search space; none if it is the optimizer's usual one without the fixed options."""
    from lodo.lab.tuning.space import find_spaces

    every = found if isinstance(found, list) else []
    try:
        usual = [asdict(space) for space in find_spaces(optimizer) if space.name not in fixed]
    except ValueError:
        usual = []
    if not every or every == usual:
        return []
    bounded = [
        f"{each['kind']}({each['name']}="
        + (f"{each['start']!r})" if each["low"] is None else f"({each['start']!r}, {each['low']!r}, {each['high']!r}))")
        for each in every
    ]
    return ["--space", ", ".join(bounded)]


def quoted(words: Iterable[str]) -> str:
    """Words, quoted for a shell."""
    return " ".join(map(shlex.quote, words))


def out_words(out: Path) -> list[str]:
    """The option for the folder of results; none for the usual one."""
    return [] if out == Path("results") else ["--out", str(out)]


def is_quick(experiment: Experiment, request: Request) -> bool:
    """Whether a request is for the experiment's quick size."""
    small = experiment.quick_task.items() <= dict(request.task_options).items()
    return request.evaluations == experiment.quick.evaluations and small and experiment.quick != experiment.full


def _size(experiment: Experiment, request: Request) -> list[str]:
    quick = is_quick(experiment, request)
    size = experiment.quick if quick else experiment.full
    words = ["--quick"] if quick else []
    if request.seconds is not None:
        words += ["--seconds", f"{request.seconds:g}"]
    elif request.evaluations != size.evaluations:
        words += ["--steps", str(request.evaluations)]
    return words + (["--seeds", str(request.seeds)] if request.seeds != size.seeds else [])


def _task_options(experiment: Experiment, request: Request) -> dict[str, Any]:
    given = experiment.quick_task if is_quick(experiment, request) else {}
    return {name: value for name, value in request.task_options.items() if name not in given}


def _same_choices(experiment: Experiment, request: Request) -> bool:
    """Whether a request has the usual optimizers; a file of hyperparameters only changes their settings."""
    usual, asked = experiment.parse(experiment.optimizers), list(request.choices)
    if request.hyperparameters:
        return [experiment.spell(choice) for choice in usual] == [experiment.spell(choice) for choice in asked]
    return usual == asked
