"""A user's own tasks, optimizers and experiments, from a folder of their own, wherever runs are done."""

from __future__ import annotations

import json
import sys

import distributed
import pytest
from typer.testing import CliRunner

from lodo.lab import compare, plugins
from lodo.lab.cli import app
from lodo.lab.executor import sweep
from lodo.lab.optimizers import build, parse, resolve
from lodo.lab.run import Run, load_curve
from lodo.lab.tasks import Task, find_task, make_task

MODULE = """
import torch
from torch.nn import Parameter

from lodo.lab.comparison import Comparison
from lodo.lab.tasks import Task


class Valley(Task):
    def __init__(self, seed, *, n=4):
        super().__init__(seed)
        self.params = [Parameter(torch.randn(n, generator=self.rng))]

    def loss(self):
        return FACTOR * self.params[0].square().sum()


def parabola():
    x = Parameter(torch.ones(3))
    return lambda: FACTOR * x.square().sum(), [x]


class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign(), alpha=self.param_groups[0]["lr"])
        return loss


def descent(params, rate):
    return torch.optim.SGD(params, lr=rate)


def nothing(params):
    return None


class OnValley(Comparison):
    optimizers = "adam"

    def __init__(self):
        super().__init__(__name__ + ":Valley")


NUMBER = 3
"""


def write(folder, name, factor=1.0):
    """A user's module with a factor of the losses, so that another version of it gives other curves."""
    (folder / f"{name}.py").write_text(MODULE.replace("FACTOR", f"{factor!r}"))


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """The name of a user's module in the current folder; every test has its own, as a process imports one once."""
    name = f"plugin_{abs(hash(request.node.nodeid))}"
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(folder, name)
    yield name
    sys.modules.pop(name, None)


def invoke(*args, code=0):
    result = CliRunner().invoke(app, [*map(str, args)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


# ---------------------------------------------------------------- names


def test_a_task_is_a_class_or_a_function(module):
    assert issubclass(find_task(f"{module}:Valley"), Task)
    assert len(make_task(f"{module}:Valley", {"n": 7}, 0).params[0]) == 7
    assert make_task(f"{module}:parabola", {}, 0).evaluate() == 3


def test_an_optimizer_is_a_class_or_a_function(module):
    signs, descent = parse(f"{module}:Signs(lr=0.5), {module}:descent(rate=2)")
    assert (signs.optimizer, signs.label) == (f"{module}:Signs", f"{module}:Signs (lr=0.5)")
    task = make_task("rosenbrock", {}, 0)
    assert build(signs.optimizer, task, 0, signs.options).defaults == {"lr": 0.5}
    assert build(descent.optimizer, task, 0, descent.options).defaults["lr"] == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}:Sings", r"the name after .*: must be one of 'Valley', .*; did you mean 'Signs'\?"),
        ("nowhere_to_be_found:Signs", r"nowhere_to_be_found must be a module .* got ModuleNotFoundError"),
        ("{}:", "a plug-in must be named as module:Name"),
        ("a b:C", "a plug-in must be named as module:Name"),
    ],
)
def test_names_that_lead_nowhere(name, said, module):
    with pytest.raises(ValueError, match=said):
        resolve(name.format(module))


def test_a_module_with_an_error_is_named(module, tmp_path):
    (tmp_path / "mine" / "broken_plugin.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"broken_plugin must be a module .* got ZeroDivisionError: division by zero"):
        resolve("broken_plugin:Signs")


def test_objects_of_another_kind_are_refused(module):
    with pytest.raises(ValueError, match=r"task must be a subclass of Task or a function, got 3"):
        find_task(f"{module}:NUMBER")
    with pytest.raises(ValueError, match=r"task must be a subclass of Task or a function, got <class"):
        find_task(f"{module}:Signs")
    with pytest.raises(ValueError, match=r":nothing must be a torch Optimizer, .* got None"):
        build(f"{module}:nothing", make_task("rosenbrock", {}, 0), 0, {})
    with pytest.raises(ValueError, match=r":Signs cannot be made with the options \{'rate': 1\}"):
        build(f"{module}:Signs", make_task("rosenbrock", {}, 0), 0, {"rate": 1})


# ---------------------------------------------------------------- addresses


def test_the_address_of_a_run_has_a_digest_of_the_code(module, tmp_path):
    first = Run(f"{module}:Valley", "adam", 0, 20)
    assert list(first.sources) == [module]
    assert ":" not in first.name
    assert Run(f"{module}:Valley", "adam", 0, 20).name == first.name
    assert Run("rosenbrock", f"{module}:Signs", 0, 20).sources == first.sources
    assert "sources" not in json.loads(Run("rosenbrock", "adam", 0, 20).settings)
    write(tmp_path / "mine", module, 0.125)
    plugins._forget(module)  # as in a new process
    assert Run(f"{module}:Valley", "adam", 0, 20).name != first.name


def test_a_run_is_refused_where_the_code_is_another(module, tmp_path):
    run = Run(f"{module}:Valley", "adam", 0, 20, sources={module: "0123456789ab"})
    with pytest.raises(RuntimeError, match=f"{module} must be the module that the run was planned with"):
        sweep([run], tmp_path, workers=0)


# ---------------------------------------------------------------- commands


def test_compare_in_this_process(module, tmp_path):
    args = ("--optimizers", f"{module}:Signs(lr=0.1), lodo", "--steps", 20, "--seeds", 1, "--workers", 0)
    invoke("compare", f"{module}:Valley", *args, "--task", "n=6", "--page", "page.html")
    found = summary(tmp_path / "mine" / "results" / f"compare-{module}.Valley")
    assert found["task"] == f"{module}:Valley"
    assert {row["optimizer"] for row in found["rows"]} == {f"{module}:Signs (lr=0.1)", "LODO"}
    assert f"lodo compare {module}:Valley" in (tmp_path / "mine" / "page.html").read_text()
    invoke("report", "results")
    assert f"Comparison on {module}:Valley" in (tmp_path / "mine" / "report.html").read_text()


def test_run_takes_tasks_and_experiments(module, tmp_path):
    args = ("--steps", 20, "--seeds", 1, "--workers", 0)
    invoke("run", f"{module}:parabola", "--optimizers", f"{module}:descent(rate=0.1)", *args)
    invoke("run", f"{module}:OnValley", *args)
    results = tmp_path / "mine" / "results"
    assert {row["optimizer"] for row in summary(results / f"compare-{module}.Valley")["rows"]} == {"Adam"}
    assert (results / f"compare-{module}.parabola" / f"compare-{module}.parabola.png").exists()


@pytest.mark.slow
def test_tune_and_use_what_was_tuned(module, tmp_path):
    space = ("--space", "rate(lr=0.01)", "--schedule", "quick", "--confirm", 0, "--workers", 0)
    said = invoke("tune", f"{module}:Valley", "--optimizer", f"{module}:Signs", *space)
    _, _, command = said.partition("use them: lodo ")
    assert f"run {module}:Valley --optimizers {module}:Signs --hyperparameters" in command
    invoke(*command.split(), "--steps", 20, "--seeds", 1, "--workers", 0)


def test_compare_from_python(module):
    found = compare(f"{module}:parabola", f"{module}:Signs(lr=0.1)", steps=20, seeds=1, page=None)
    assert list(found.curves) == [f"{module}:Signs (lr=0.1)"]


@pytest.mark.slow
def test_local_workers(module, tmp_path):
    args = ("--optimizers", f"{module}:Signs", "--steps", 20, "--seeds", 2, "--workers", 2)
    invoke("compare", f"{module}:Valley", *args)
    assert len(list((tmp_path / "mine" / "results" / "runs").glob("*.parquet"))) == 2


@pytest.mark.slow
def test_a_worker_of_a_scheduler_imports_edited_code_again(module, tmp_path, monkeypatch):
    """The worker was started in another folder, and keeps the module between two sweeps."""
    first = []
    monkeypatch.chdir(tmp_path)
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=50
    ) as cluster:
        monkeypatch.chdir(tmp_path / "mine")
        for factor in (1.0, 0.125):
            write(tmp_path / "mine", module, factor)
            plugins._forget(module)
            run = Run(f"{module}:parabola", f"{module}:Signs", 0, 20)
            sweep([run], tmp_path / "runs", scheduler=cluster.scheduler_address)
            first.append(load_curve(run, tmp_path / "runs")["loss"][0])
    assert first == [3.0, 0.375]
