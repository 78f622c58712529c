"""Comparisons of one's own: a function that returns a loss and its parameters, or a task of the laboratory."""

from __future__ import annotations

import io
import json
import re
import shlex
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn import Parameter
from typer.testing import CliRunner

import lodo.lab
from lodo import LODO
from lodo.lab import cli
from lodo.lab.comparison import LOSS, TIME, Comparison
from lodo.lab.experiments.beyond.networks.entries import own_entries
from lodo.lab.optimizers import OPTIMIZERS
from lodo.lab.page.report import section_readers
from lodo.lab.page.results import read_results
from lodo.lab.page.sections import experiment_section
from lodo.lab.pipeline import run_experiment
from lodo.lab.tasks import TASKS, Task

QUIET = Console(quiet=True)


def invoke(*args, code=0):
    result = CliRunner().invoke(cli.app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def regression():
    """A line through noisy points, a fresh batch for every loss."""
    model = torch.nn.Linear(3, 1)

    def loss():
        x = torch.randn(16, 3)
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    return loss, model.parameters(), lambda: {"bias": abs(model.bias.item())}


def compare(task, optimizers, **options):
    return lodo.lab.compare(task, optimizers, **{"steps": 20, "seeds": 2, "page": None, "console": QUIET, **options})


def test_a_function_of_ones_own(tmp_path):
    page = tmp_path / "page.html"
    found = compare(regression, "lodo(lr=0.05), adam(lr=0.1)", steps=60, page=page)
    assert found.page == page
    assert {row.metric for row in found.rows} == {LOSS, TIME, "bias at the end"}
    losses = {row.optimizer: row.mean for row in found.rows if row.metric == LOSS}
    assert losses.keys() == {"LODO (lr=0.05)", "Adam (lr=0.1)"} == found.curves.keys()
    assert max(losses.values()) < 1.5  # from about 4
    text = page.read_text()
    assert "Comparison on regression" in text
    assert "To make it again" not in text  # nobody knows the code
    assert not re.search(r"/tmp/|own-\d", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))


def accuracies():
    """A parabola whose accuracy is known at the end of every optimizer's runs."""
    x = Parameter(torch.ones(1))
    return lambda: x.square().sum(), [x], lambda: {"accuracy": 1 - 0.5 * x.item(), "distance": x.item()}


def test_accuracies_are_compared_with_the_highest():
    found = compare(accuracies, {"still": "torch.SGD(lr=0.0)", "moves": "torch.SGD(lr=0.5)"})  # ends in the minimum
    tables = {row.metric: row.columns[2] for row in found.rows}
    assert tables["accuracy at the end"] == "against the highest"
    assert tables[LOSS] == tables[TIME] == tables["distance at the end"] == "against the lowest"
    cells = {row.optimizer: row.cells[2] for row in found.rows if row.metric == "accuracy at the end"}
    assert cells == {"still": "-50.0 %", "moves": ""}
    summary_row = next(row for row in found.rows if row.metric == "accuracy at the end")
    assert Comparison("bowl").read_row(asdict(summary_row)) == summary_row


def test_files_are_named_only_if_they_are_kept(tmp_path):
    text = io.StringIO()
    compare(regression, "adam", seeds=1, console=Console(file=text, width=200))
    assert TIME in text.getvalue()
    assert not re.search(r"summary\.json|table\.md|png|/lodo-", text.getvalue())
    compare("rosenbrock", "adam", seeds=1, out=tmp_path, console=Console(file=text, width=200))
    named = re.findall("^wrote (.*)$", text.getvalue(), flags=re.MULTILINE)
    folder = tmp_path / "compare-rosenbrock"
    assert set(named) == {str(path) for path in folder.iterdir() if path.suffix in (".json", ".md", ".png")}


def test_all_optimizers_start_alike_and_seeds_differ():
    found = compare(regression, "adam(lr=0.1), torch.SGD(lr=0.01)")
    adam, sgd = found.curves.values()
    for a, b in zip(adam, sgd, strict=True):
        assert a["loss"][0] == b["loss"][0]
    assert adam[0]["loss"][0] != adam[1]["loss"][0]
    again = compare(regression, "adam(lr=0.1)").curves["Adam (lr=0.1)"]
    np.testing.assert_array_equal(again[1]["loss"], adam[1]["loss"])


class Drawing(torch.optim.SGD):
    """Draws a random number in every step."""

    def step(self, closure):
        loss = super().step(closure)
        torch.rand(1)
        return loss


def test_an_optimizer_that_draws_numbers_gets_the_same_batches():
    found = compare(
        regression, {"plain": "torch.SGD(lr=0.01)", "drawing": lambda params: Drawing(params, lr=0.01)}, seeds=1
    )
    (plain,), (drawing,) = found.curves.values()
    np.testing.assert_array_equal(plain["loss"], drawing["loss"])


def test_losses_below_zero_have_no_ratios():
    def shifted():
        x = torch.nn.Parameter(torch.ones(2))
        return lambda: x.square().sum() - 1, [x]

    found = compare(shifted, "torch.SGD(lr=0.1), torch.SGD(lr=0.0)", seeds=1)
    lines = [row for row in found.rows if row.metric == LOSS]
    assert [row.cells[2] for row in lines] == ["", ""]


def test_networks_are_compared_by_what_is_made_for_them():
    assert [choice.optimizer for choice in Comparison("mlp").request().choices] == ["kron_lodo", "torch.AdamW"]
    assert [choice.optimizer for choice in Comparison("bowl").request().choices] == ["lodo", "adam"]


def test_a_lack_of_memory_is_said_in_words(monkeypatch, tmp_path):
    monkeypatch.setattr("lodo.estimate.available", lambda device: 1_000_000)
    words = ["compare", "wide_bowl", "--task", "n=4096", "--steps", "10", "--seeds", "1", "--optimizers", "lodo"]
    result = CliRunner().invoke(cli.app, [*words, "--workers", "0", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert re.search("^error: .* needs .* is available on 'cpu'. KronLODO", result.output, re.MULTILINE)


def test_the_paths_on_rosenbrock_are_whole(tmp_path):
    experiment = Comparison("rosenbrock")

    def drawn(folder, **options):
        request = experiment.request(evaluations=200, seeds=1, choices=experiment.parse("adam"), task_options=options)
        run_experiment(experiment, request, folder, workers=0)
        figures = experiment.figures(request, read_results(experiment, folder).results)
        (contours,) = [panel for figure in figures for panel in figure.panels if panel.name == "paths"]
        assert np.isfinite(contours.paths["Adam"]).all()
        return contours

    assert len(drawn(tmp_path / "usual").paths["Adam"][0]) == 201
    jittered = drawn(tmp_path / "jittered", jitter=0.5)  # it starts elsewhere for every seed
    assert len(jittered.paths["Adam"][0]) == 200
    assert "start" not in jittered.marked


def test_the_lowest_of_a_loss_that_was_measured_on_the_way():
    def task():
        x = torch.nn.Parameter(torch.ones(1))
        return lambda: x.sum(), [x], lambda: {"validation_loss": (x.detach() + 1.5).square()}  # which x passes by

    found = compare(task, "torch.SGD(lr=0.5)", seeds=1, steps=10)
    rows = {row.metric: row.mean for row in found.rows}
    assert (rows["validation_loss at the end"], rows["validation_loss, lowest"]) == (6.25, 0.0)


def test_a_task_of_ones_own_has_a_small_size():
    experiment = Comparison("rosenbrock")
    small, full = experiment.request(quick=True), experiment.request()
    assert (small.evaluations, small.seeds) == (100, 1)
    assert (full.evaluations, full.seeds) == (1000, 3)


class Twice(torch.optim.Optimizer):
    """Evaluates every batch twice and moves in between."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure):
        first = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p -= group["lr"] * p.grad
        closure()
        return first


def test_a_second_evaluation_is_of_the_same_batch():
    (curve,) = compare(regression, {"still": lambda params: Twice(params, lr=0.0)}, seeds=1).curves["still"]
    np.testing.assert_array_equal(curve["repeat_loss"], curve["loss"])
    assert len(set(curve["loss"])) == len(curve["loss"]) == 10  # fresh ones from step to step


def test_labels_of_ones_own_and_optimizers_that_no_library_has():
    known = dict(OPTIMIZERS)
    found = compare(
        regression,
        {"mine": lambda params: LODO(params, lr=0.02, seed=1), "usual": "torch.AdamW(lr=0.1)", "bare": "adam"},
        seeds=1,
    )
    assert list(found.curves) == ["mine", "usual", "bare"]
    assert found.curves["usual"][0].run.options == {"lr": 0.1}
    assert known == OPTIMIZERS


def test_a_subclass_of_task():
    class Parabola(Task):
        def __init__(self, seed):
            super().__init__(seed)
            self.params = [Parameter(torch.ones(2, dtype=torch.float64))]

        def loss(self):
            return self.params[0].square().sum() - 5  # below zero: no logarithmic axis

    known = dict(TASKS)
    found = compare(Parabola, "torch.SGD(lr=0.1)")
    assert found.curves["torch.SGD (lr=0.1)"][0]["loss"][-1] == pytest.approx(-5, abs=1e-3)
    assert known == TASKS


def test_the_callers_random_numbers_stay_as_they_are():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    compare(regression, "adam")
    torch.testing.assert_close(torch.rand(2), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_as_many_as_asked_for(threads):
    seen = set()

    def task():
        x = Parameter(torch.ones(2))

        def loss():
            seen.add(torch.get_num_threads())
            return x.square().sum()

        return loss, [x]

    compare(task, "adam", seeds=1, threads=threads)
    assert seen == {threads}


@pytest.mark.parametrize(
    ("task", "optimizers", "options", "said"),
    [
        (lambda: torch.ones(2), "adam", {}, "task must return a function for the loss, the parameters"),
        (regression, "adam, sdg", {}, "did you mean"),
        (regression, {"two": "adam, lodo"}, {}, "optimizers must have one under 'two', got 'adam, lodo'"),
        (regression, "adam", {"workers": 2}, "must be left out for a task of your own"),
        (regression, "adam", {"steps": 2}, "steps must be an integer >= 10, got 2"),
        (regression, "adam", {"threads": 0}, "threads must be an integer >= 1, got 0"),
        ("bawl", "adam", {}, "task must be one of 'bowl'"),
        (type("Bowl", (Task,), {}), "adam", {}, "task must have a name of its own, got 'bowl'"),
        (dict, "adam", {}, "task must be a function, a subclass of Task or a name, got <class 'dict'>"),
    ],
)
def test_errors_say_what_is_wrong(task, optimizers, options, said):
    tasks, known = dict(TASKS), dict(OPTIMIZERS)
    with pytest.raises(ValueError, match=re.escape(said)):
        compare(task, optimizers, **options)
    assert (tasks, known) == (TASKS, OPTIMIZERS)


@pytest.mark.slow
def test_the_laboratorys_tasks_keep_their_runs(tmp_path):
    compare("rosenbrock", "adam", out=tmp_path, task_options={"jitter": 0.1})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert len(before) == 2
    found = compare("rosenbrock", "adam", out=tmp_path, task_options={"jitter": 0.1})
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert {"x at the end", "y at the end"} < {row.metric for row in found.rows}


def test_the_command_writes_a_page_and_is_on_it(tmp_path):
    page, out = tmp_path / "page.html", tmp_path / "out"
    words = ["compare", "rosenbrock", "--steps", 30, "--seeds", 1, "--optimizers", "lodo, torch.SGD(lr=0.01)"]
    said = invoke(*words, "--workers", 0, "--out", out, "-o", page)
    assert f"page: {page}" in said
    text = page.read_text()
    shown = re.search(r"To repeat it: <code>(.*?)</code>", text).group(1).replace("&#39;", "'")
    assert shlex.split(shown) == ["lodo", *map(str, words), "--out", str(out)]
    summary = json.loads((out / "compare-rosenbrock" / "summary.json").read_text())
    assert [row["optimizer"] for row in summary["rows"] if row["metric"] == LOSS] == ["LODO", "torch.SGD (lr=0.01)"]


@pytest.mark.parametrize(("task", "said"), [("gru", True), ("rosenbrock", False)])
def test_optimizers_of_the_networks_go_by_their_names_on_their_tasks(task, said):
    comparison = Comparison(task)
    if not said:
        with pytest.raises(ValueError, match="unknown optimizer 'psgd'"):
            comparison.parse("psgd")
        return
    every = ", ".join(own_entries().rivals)
    chosen = {choice.label: choice for choice in comparison.parse(f"{every}, muon(lr=0.1)")}
    assert len(chosen) == len(own_entries().rivals) + 1
    assert chosen["PSGD-Kron"].settings == {"lr": 0.001}
    assert chosen["SGD momentum"].settings == {"lr": 0.001, "momentum": 0.9}
    assert chosen["Muon (lr=0.1)"].optimizer == "muon_adamw"
    assert chosen["KronLODO"].settings is None, "the laboratory's own name keeps its meaning"
    assert comparison.spell(chosen["Muon (lr=0.1)"]) == "muon(lr=0.1)"


def test_a_rival_whose_sigma_was_not_measured_is_healthy(tmp_path):
    words = ["bowl", "--optimizers", "lodo, torch.AdamW(lr=1.0)", "--steps", 100, "--seeds", 2]
    said = invoke("compare", *words, "--workers", 0, "--out", tmp_path, "-o", tmp_path / "page.html")
    assert "diverged" not in said
    rows = json.loads((tmp_path / "compare-bowl" / "summary.json").read_text())["rows"]
    assert {row["diverged"] for row in rows} == {0}
    assert [row["optimizer"] for row in rows if "sigma" in row["metric"]] == ["LODO", "LODO"]
    assert "diverged" not in (tmp_path / "compare-bowl" / "table.md").read_text()


class Compiles(torch.optim.SGD):
    """Takes long for its first step, as if it compiled something."""

    def step(self, closure):
        if not self.state:
            self.state["compiled"] = True
            time.sleep(0.3)
        return super().step(closure)


def test_timings_do_not_count_first_calls(tmp_path):
    found = compare(regression, {"compiles": lambda params: Compiles(params, lr=0.01)}, out=None)
    (row,) = [row for row in found.rows if row.metric == TIME]
    assert row.mean < 0.3e6 / 20, "the mean over all 20 steps would be above"


def test_a_report_has_comparisons_too(tmp_path):
    compare("rosenbrock", "adam, lodo", out=tmp_path)
    assert "compare-rosenbrock" in [name for name, _ in section_readers(tmp_path)]
    shown = experiment_section(read_results(Comparison("rosenbrock"), tmp_path), tmp_path)
    assert shown.command.startswith("lodo compare rosenbrock --steps 20 --seeds 2 --optimizers 'adam, lodo'")
    assert [[panel["name"] for panel in figure["panels"]] for figure in shown.figures] == [
        ["curves", "x", "y"],
        ["paths"],
    ]
    assert not shown.gaps


def test_a_task_that_is_not_known_is_named():
    assert "TASK must be one of 'bowl'" in invoke("compare", "bawl", code=2)


def test_compare_is_a_function_whatever_was_imported_before():
    import lodo.lab.comparison

    assert lodo.lab.compare is lodo.lab.comparison.compare
    from lodo.lab import compare as imported

    assert imported is lodo.lab.comparison.compare
