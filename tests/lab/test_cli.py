"""The command line answers at once: help, lists and typing errors import nothing heavy; names are completed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lodo import __version__
from lodo.lab.cli import app
from lodo.lab.experiments import CATALOG
from lodo.lab.optimizers import OPTIMIZERS
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
        (("--version",), 0, __version__),
        (("run", "--list"), 0, "bowl-rivals"),
        (("run", "--help"), 0, "lodo(beta=0.5)"),
        (("rnu",), 2, "Did you mean 'run'?"),
        (("run", "bwol"), 2, "did you mean 'bowl'?"),
        (("run", "bowl", "--stepps", "3"), 2, "--steps"),
        (("run", "bowl", "--task", "n="), 1, "task must be options"),
        (("compare", "rosenbork"), 2, "did you mean 'rosenbrock'?"),
        (("tune", "bowl", "--optimizer", "lodo", "--schedule", "qick"), 2, "did you mean 'quick'?"),
        (("tune", "bowl", "--optimizer", "lodo", "--sampler", "cmeas"), 2, "did you mean 'cmaes'?"),
        (("theory", "sadle"), 2, "did you mean 'saddle'?"),
    ],
)
def test_an_answer_that_needs_nothing_heavy_imports_nothing_heavy(args, code, said):
    ended, printed, modules = run(*args)
    assert (ended or 0) == code, printed
    assert said in printed
    assert {name.partition(".")[0] for name in modules} & HEAVY == set()
    assert len(modules) < 400


def test_the_list_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printed = CliRunner().invoke(app, ["run", "--list"]).output
    assert max(map(len, printed.splitlines())) <= 80
    for name in (*CATALOG, *TASKS, *OPTIMIZERS):
        assert name in printed


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
