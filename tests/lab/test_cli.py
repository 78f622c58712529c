"""The command line answers at once: help, lists and typing errors import nothing heavy; names are completed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lodo import __version__
from lodo.lab import experiments
from lodo.lab.cli import app
from lodo.lab.experiments import CATALOG
from lodo.lab.tasks import TASKS

HEAVY = {"torch", "numpy", "matplotlib", "pyarrow", "dask", "distributed", "optuna", "scipy", "plotly", "rich"}
# runs the command, then prints the names of all modules that have been imported
COMMAND = """
import json, sys
from lodo.__main__ import main
try:
    main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(sys.modules)]))
"""


def run(*args):
    """The exit code of a command in a fresh process, what it printed, and the modules that it imported."""
    process = subprocess.run([sys.executable, "-c", COMMAND, *args], check=True, capture_output=True, text=True)
    *printed, last = process.stdout.splitlines()
    code, modules = json.loads(last)
    return code, "\n".join([*printed, process.stderr]), modules


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--help",), 0, "Usage"),
        (("-h",), 0, "Usage"),
        (("run", "-h"), 0, "lodo(beta=0.5)"),
        (("--version",), 0, __version__),
        (("run", "--list"), 0, "bowl-rivals"),
        (("run", "mnist-momentum", "--list"), 0, "300,000 steps, 1 seed\n"),
        (("run", "--help"), 0, "lodo(beta=0.5)"),
        (("rnu",), 2, "Did you mean 'run'?"),
        (("run", "bwol"), 2, "did you mean 'bowl'?"),
        (("run", "bowl", "--stepps", "3"), 2, "--steps"),
        (("run", "bowl", "--task", "n="), 1, "task must be options"),
        (("compare", "rosenbork"), 2, "did you mean 'rosenbrock'?"),
        (("tune", "bowl", "--optimizer", "lodo", "--schedule", "qick"), 2, "did you mean 'quick'?"),
        (("tune", "bowl", "--optimizer", "lodo", "--sampler", "cmeas"), 2, "did you mean 'cmaes'?"),
        (("theory", "sadle"), 2, "did you mean 'saddle'?"),
        (("run", "cnn"), 2, "lodo compare cnn, or lodo run networks --tasks cnn"),
        (("run", "bowl", "--steps", "3"), 2, "steps must be an integer >= 10, got 3"),
        (
            ("run", "bowl", "--checkpoint-every", "-1"),
            2,
            "checkpoint_every must be a finite number in [0.0, inf), got -1",
        ),
        (("compare", "bowl", "--workers", "-1"), 2, "workers must be an integer >= 0, got -1"),
        (("tune", "bowl", "--optimizer", "lodo", "--trials", "0"), 2, "trials must be an integer >= 1, got 0"),
        (("theory", "saddle", "--seed", "-1"), 2, "seed must be an integer >= 0, got -1"),
        (("train-l2l", "--episodes", "0"), 2, "episodes must be an integer >= 1, got 0"),
    ],
)
def test_an_answer_that_needs_nothing_heavy_imports_nothing_heavy(args, code, said):
    ended, printed, modules = run(*args)
    assert (ended or 0) == code, printed
    assert said in printed
    assert {name.partition(".")[0] for name in modules} & HEAVY == set()
    assert len(modules) < 400


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("run bwol", 2, r"NAME must be one of 'bowl', .*, got 'bwol'; did you mean 'bowl'\?"),
        ("compare rosenbork", 2, r"TASK must be one of .*, got 'rosenbork'; did you mean 'rosenbrock'\?"),
        ("theory sadle", 2, r"NAME must be one of .*, got 'sadle'; did you mean 'saddle'\?"),
        (
            "run cnn",
            2,
            "NAME must be an experiment, got 'cnn', which is a task: lodo compare cnn, or lodo run networks .*",
        ),
        ("compare networks", 2, "TASK must be a task, got 'networks', which is an experiment: lodo run networks"),
        ("tune bowl --optimizer lodo --schedule qick", 2, r"schedule must be one of 'paper', 'quick', got 'qick'; .*"),
        ("rnu", 2, "no such command 'rnu'. Did you mean 'run'?".replace("?", r"\?")),
        ("run bowl --stepps 3", 2, r"no such option: --stepps .*"),
        ("run bowl --steps three", 2, r"invalid value for '--steps': .*integer"),
        ("tune bowl", 2, r"missing option '--optimizer'"),
        ("run bowl --steps 3", 2, r"steps must be an integer >= 10, got 3"),
        ("run bowl --task n=", 1, r"task must be options .*, got 'n=': .*"),
        ("report nowhere", 1, r"RUNS must be a folder of results, got 'nowhere'"),
    ],
)
def test_all_errors_have_one_form(words, code, said):
    """One line for the error and, if a word of the command is wrong, one that says where the words are explained."""
    result = CliRunner().invoke(app, words.split(), prog_name="lodo")
    assert result.exit_code == code
    assert not result.stdout
    first, *others = result.stderr.splitlines()
    assert re.fullmatch(f"error: {said}", first), first
    command = words.split()[0]
    assert others == ([f"see: lodo {'' if command == 'rnu' else f'{command} '}--help"] if code == 2 else [])


def test_help_has_the_numbers_of_each_command():
    for command, steps, seeds in (
        ("run", "the experiment's number", "the experiment's number"),
        ("compare", "1,000", "3"),
    ):
        text = " ".join(CliRunner().invoke(app, [command, "--help"]).stdout.split())
        assert f"in each run. Default: {steps}." in text
        assert f"runs of each optimizer. Default: {seeds}." in text


def test_no_line_of_the_help_is_cut_off():
    assert "..." not in CliRunner().invoke(app, ["--help"]).stdout.replace("[ARGS]...", "")


def test_what_to_run_for_a_task_that_is_no_experiment():
    """What the message names can be run."""
    known = experiments.load("networks")
    for name in set(TASKS) - set(CATALOG):
        said = CliRunner().invoke(app, ["run", name]).output
        assert f"lodo compare {name}" in " ".join(said.split())
        if "lodo run networks" in said:
            assert known.request(tasks=name)
        else:
            assert name == "wide_bowl"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("lodo run bowl-", [name for name in CATALOG if name.startswith("bowl-")]),
        ("lodo compare m", ["mlp", "mnist"]),
        ("lodo tune bowl --optimizer lodo_d", ["lodo_diagonal"]),
        ("lodo tune bowl --sampler c", ["cmaes"]),
        ("lodo tune bowl --schedule q", ["quick"]),
        ("lodo theory s", ["saddle"]),
    ],
)
def test_names_are_completed_in_the_shell(words, expected):
    settings = {
        "_LODO_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "import sys; sys.argv = ['lodo']; from lodo.__main__ import main; main()"
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings}).stdout
    assert completed.split() == expected
