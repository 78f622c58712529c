"""bowl-options: every option that it shows is what it says, and its figures follow from the curves."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lodo import LODO
from lodo.lab import experiments
from lodo.lab.experiments.beyond import options
from lodo.lab.optimizers import build, parse
from lodo.lab.pipeline import run_experiment
from lodo.lab.run import Curve
from lodo.lab.tasks import make_task

EXPERIMENT = experiments.load("bowl-options")


def plan(**asked):
    return EXPERIMENT.plan(EXPERIMENT.request(**{"evaluations": 1000, "seeds": 1, **asked}))


def test_every_setting_is_one_that_lodo_accepts():
    for runs in plan().values():
        task = make_task("bowl", runs[0].task_options, 0)
        assert isinstance(build("lodo", task, 0, runs[0].options), LODO)


def test_every_option_appears_alone_and_differs_from_the_papers():
    tuned = options._TUNED
    alone = [row for row in options.TABLES[0].rows.values() if tuned.items() <= row.items() and row != tuned]
    shown = {key: value for row in alone for key, value in row.items() if key not in tuned}
    assert shown == {
        "preconditioner": "mixing(mixing='shuffle')",
        "meta_optimizer": "adam(moment_dtype='bfloat16')",
        "guard": True,
    }
    defaults = LODO([make_task("bowl", {}, 0).x]).defaults
    assert {name: defaults[name] for name in options._DEFAULTS} == options._DEFAULTS  # untouched, as they are called
    assert tuned == {name: run_of("lodo").options[name] for name in tuned}  # the paper's


def run_of(optimizers):
    bowl = experiments.load("bowl")
    request = bowl.request(evaluations=100, seeds=1, choices=parse(optimizers))
    return next(iter(bowl.plan(request).values()))[0]


def test_lengths_and_tasks_of_the_tables():
    lengths = {cell.variant: (runs[0].evaluations, dict(runs[0].task_options)) for cell, runs in plan().items()}
    assert lengths == {
        "the paper's bowl": (1000, {}),
        "n = 1000": (200, {"n": 1000}),
        "n = 1000, a short run": (100, {"n": 1000}),
        "a Hessian that rotates": (500, {"rotation": 0.0002}),
        "a new bowl at half time": (1000, {"renew_at": 500}),
    }


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"evaluations": None, "seconds": 3.0}, "steps must be given for bowl-options"),
        ({"choices": parse("lodo(beta=0.5)")}, "optimizers and hyperparameters must not be given for bowl-options"),
        ({"choices": parse("adam")}, "optimizers and hyperparameters must not be given for bowl-options"),
        ({"task_options": {"n": 50}}, "task must not be given for bowl-options.*'n': 50"),
    ],
)
def test_what_cannot_be_asked_for(asked, message):
    with pytest.raises(ValueError, match=message):
        plan(**asked)


def curve_of(losses):
    run = next(runs[0] for cell, runs in plan().items() if cell.variant == "a new bowl at half time")
    return Curve(replace(run, evaluations=len(losses)), False, {"loss": np.asarray(losses, dtype=np.float32)})


def test_figures_of_the_change():
    """Level 10 before the change at 500, 80 for 150 steps after it, then 15."""
    curve = curve_of([10.0] * 500 + [80.0] * 150 + [15.0] * 350)
    assert options._before(curve) == pytest.approx(10)
    assert options._later(curve) == pytest.approx(15)  # steps 150 to 200 after it
    assert options._level(curve) == pytest.approx(1.5)
    assert options._back(curve) == 200  # the second hundred has a mean of 47.5
    assert options._back(curve_of([10.0] * 1000)) == 0
    assert options._back(curve_of([10.0] * 500 + [80.0] * 500)) == 500  # never
    assert options._back(curve_of([10.0] * 500 + [math.nan] * 500)) == 500


@pytest.mark.slow
def test_the_whole_experiment_in_small(tmp_path):
    request = EXPERIMENT.request(evaluations=100, seeds=2)
    run_experiment(EXPERIMENT, request, tmp_path, workers=0)
    summary = json.loads((tmp_path / "bowl-options" / "summary.json").read_text())
    rows = {(row["optimizer"], row["metric"]): row for row in summary["rows"]}
    metric = "the paper's bowl, 100 steps: loss over the last 10 %"
    same = [rows[label, metric] for label in ("paper, tuned", "tuned, guard")]
    assert same[0]["mean"] == same[1]["mean"]  # nothing to guard against here
    assert same[1]["first"] == same[0]["mean"]
    table = (tmp_path / "bowl-options" / "table.md").read_text()
    assert "| tuned, guard | " in table
    assert "+0.0 %" in table
    assert (tmp_path / "bowl-options" / "bowl-options.png").stat().st_size > 10_000
