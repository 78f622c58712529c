"""Today's rivals: their rows, their libraries, shapes and states, and the experiment that compares them."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from torch.nn import Parameter
from typer.testing import CliRunner

from helpers import same
from interruptions import interrupted, same_but_for_time
from lodo.lab import experiments
from lodo.lab.cli import app
from lodo.lab.experiments.base import step_time, tail
from lodo.lab.experiments.beyond.rivals import RivalRow
from lodo.lab.optimizers import (
    COSTS,
    Choice,
    build,
    hyperparameters,
    needs_graph,
    paper_hyperparameters,
    parse,
    resolve,
)
from lodo.lab.optimizers.adapters import Eager, Reshaped
from lodo.lab.optimizers.bowl_rivals import Known, bowl_rivals, make_rival
from lodo.lab.run import Curve, Run, execute, load_curve
from lodo.lab.show.draw import canvas, draw
from lodo.lab.show.labels import Point, label_points, overlap
from lodo.lab.show.tables import markdown
from lodo.lab.tasks.bowl import Bowl
from lodo.lab.tasks.rosenbrock import Rosenbrock

NAMES = list(bowl_rivals())
EXPERIMENT = experiments.load("bowl-rivals")


def settings(name, **changed):
    choice = bowl_rivals()[name].choice
    return choice.optimizer, {**hyperparameters("bowl", choice), **changed}


def advance(task, optimizer, steps):
    losses = []
    for _ in range(steps):
        task.draw()
        losses.append(optimizer.step(lambda: task.evaluate(needs_graph(optimizer))))
    return losses


# ---------------------------------------------------------------- the rows


@pytest.mark.parametrize("name", NAMES)
def test_every_row_runs(name):
    rival = bowl_rivals()[name]
    assert resolve(rival.choice.optimizer) == rival.choice.optimizer
    task = Bowl(0)
    optimizer, options = settings(name)
    made = build(optimizer, task, 0, options)
    torch.manual_seed(0)
    losses = advance(task, made, 4)
    assert all(loss > 0 for loss in losses)
    assert not torch.equal(task.x, torch.zeros(100))
    assert task.x.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_every_row_resumes_bit_for_bit(name, tmp_path, monkeypatch):
    sooner = {"start_preconditioning_step": 3, "preconditioning_compute_steps": 4} if name == "shampoo" else {}
    optimizer, options = settings(name, **sooner)
    run = Run("bowl", optimizer, 0, 24, options=options, track_every=10)
    execute(run, tmp_path / "whole")
    for after in (1, 9):
        interrupted(run, tmp_path / "parts", monkeypatch, after)
    execute(run, tmp_path / "parts")
    same_but_for_time(load_curve(run, tmp_path / "parts"), load_curve(run, tmp_path / "whole"))


@pytest.mark.parametrize("name", ["shampoo", "kron_heavyball", "psgd_lra_7", "soap_10x10", "schedulefree_adamw"])
def test_a_state_that_is_loaded_is_the_state_that_was_saved(name):
    """Also what torch would cast to the parameter's precision on loading."""
    optimizer, options = settings(name)
    tasks = [Bowl(0), Bowl(0)]
    first, second = (build(optimizer, task, 0, options) for task in tasks)
    advance(tasks[0], first, 5)
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(copy.deepcopy(state))
    assert same(second.state_dict(), state)
    advance(tasks[0], first, 2)
    assert same(second.state_dict(), state)  # nothing is shared


def test_what_the_file_may_say():
    text = """
        [adam]
        [mine]
        label = "My Adam"
        optimizer = "adam"
        cost = "O(n^1.5)"
        options = { lr = 0.5, beta1 = "None" }
        known = { error = 3.5, steps = 100 }
        note = "it is mine."
    """
    adam, mine = (make_rival(name, fields) for name, fields in tomllib.loads(text).items())
    assert (adam.choice.label, adam.cost, adam.known, adam.note) == ("Adam", "O(n)", None, "")
    assert hyperparameters("bowl", adam.choice) == paper_hyperparameters("bowl", "adam")
    assert mine.choice.label == "My Adam"
    assert hyperparameters("bowl", mine.choice) == {"lr": 0.5, "beta1": None}  # and nothing of the paper's
    assert (mine.cost, mine.known, mine.note) == ("O(n^1.5)", Known(3.5, 100), "it is mine.")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[a]\noptimizer = "torch.SGD"', r"cost of \[a\] must be one of 'O\(n\)', .* got None"),
        ('[adam]\ncost = "O(1)"', r"cost of \[adam\] must be one of .* got 'O\(1\)'"),
        ("[adam]\nlr = 1.0", r"a field of \[adam\] must be one of 'optimizer', .* got 'lr'"),
    ],
)
def test_what_the_file_may_not_say(text, said):
    ((name, fields),) = tomllib.loads(text).items()
    with pytest.raises(ValueError, match=said):
        make_rival(name, fields)


def test_every_row_of_the_file_is_read():
    rows = tomllib.loads(resources.files("lodo.lab.settings").joinpath("rivals.toml").read_text())
    assert list(rows) == NAMES
    assert len({rival.choice.label for rival in bowl_rivals().values()}) == len(rows)
    assert {rival.cost for rival in bowl_rivals().values()} == {*COSTS}


# ---------------------------------------------------------------- names and libraries


def test_names_of_the_extra_on_the_command_line():
    choices = parse("heavyball.psgdkron(lr=0.1), SCHEDULEFREE.AdamWScheduleFree")
    assert [choice.optimizer for choice in choices] == ["heavyball.PSGDKron", "schedulefree.AdamWScheduleFree"]
    with pytest.raises(
        ValueError, match=r"^unknown optimizer 'heavyball.PSGDKro'; did .* of .*heavyball or schedulefree"
    ):
        resolve("heavyball.PSGDKro")
    with pytest.raises(ValueError, match=r"did you mean 'heavyball\.PSGDKron'"):
        resolve("heavyball.PSGDKro")
    with pytest.raises(ValueError, match="has no option 'rate'"):
        build("heavyball.PSGDKron", Bowl(0), 0, {"rate": 1})


def test_rivals_by_name_with_options():
    lra, sgd, lodo = EXPERIMENT.parse("PSGD_LRA_10(rank=3), torch.SGD(lr=0.1), lodo")
    assert lra.label == "PSGD-LRA, rank 10 (rank=3)"
    options = hyperparameters("bowl", lra)
    assert (options["rank"], options["lr"], options["update_clipping"]) == (3, 0.7, None)
    assert sgd == Choice("torch.SGD", {"lr": 0.1})
    assert hyperparameters("bowl", lodo) == paper_hyperparameters("bowl", "lodo")


def test_schedule_free_trains_where_its_loss_is_taken():
    """At y, between the average and the fast iterate, written out."""
    lr, beta1, beta2 = 0.5, 0.3, 0.9
    task, again = Bowl(0, n=6), Bowl(0, n=6)
    optimizer = build("schedulefree.AdamWScheduleFree", task, 0, {"lr": lr, "betas": (beta1, beta2), "eps": 0.0})
    x, z, v = (torch.zeros(6) for _ in range(3))
    for t, loss in enumerate(advance(task, optimizer, 8), 1):
        again.draw()
        again.x.data = (1 - beta1) * z + beta1 * x
        assert again.evaluate() == pytest.approx(loss, rel=1e-4)
        v = beta2 * v + (1 - beta2) * again.x.grad**2
        z = z - lr * again.x.grad / (v / (1 - beta2**t)).sqrt()
        x = (1 - 1 / t) * x + z / t


@pytest.mark.slow
def test_heavyball_leaves_torch_alone_and_is_not_imported_unasked():
    code = """
        import random, sys, warnings
        import numpy as np
        import sympy, torch
        from lodo.lab.optimizers import build, resolve
        from lodo.lab import experiments
        from lodo.lab.tasks.bowl import Bowl

        [experiments.load(name) for name in experiments.CATALOG]
        assert not {"heavyball", "schedulefree"} & sys.modules.keys()
        import torch._dynamo, torch._inductor.config  # which have warning filters of their own

        def settings():
            return (
                torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
                torch.get_num_threads(), torch.get_default_dtype(), torch.backends.cudnn.benchmark,
                torch.backends.cudnn.deterministic, torch.backends.opt_einsum.strategy, torch.is_grad_enabled(),
                torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate(), list(warnings.filters),
                torch._dynamo.config.get_config_copy(), torch._inductor.config.get_config_copy(),
            )

        before = settings()
        resolve("heavyball.PSGDKron"), resolve("schedulefree.AdamWScheduleFree")
        assert "heavyball" in sys.modules
        assert settings() == before
        task, options = Bowl(0), {"min_ndim_triangular": 1}
        optimizer = build("heavyball.PSGDKron", task, 0, options)
        state = torch.get_rng_state()
        for _ in range(3):
            task.draw()
            optimizer.step(task.evaluate)
        torch.set_rng_state(state)
        assert settings() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_heavyball_compiles_nothing_and_its_switch_is_put_back(monkeypatch):
    task = Bowl(0)
    optimizer = build("heavyball.PSGDLRA", task, 0, {"rank": 3})
    assert isinstance(optimizer, Eager)
    from heavyball import fusions, utils

    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(fusions, "compile", refuse)
    before = utils.compile_mode
    assert before is not None
    advance(task, optimizer, 3)
    assert utils.compile_mode == before

    def broken():
        assert utils.compile_mode is None
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(broken)
    assert utils.compile_mode == before
    with pytest.raises(AssertionError, match="compiled"):
        optimizer.inner.step(task.evaluate)


def test_no_pickle_is_saved_or_loaded():
    class Trap:
        def __reduce__(self):
            return exec, ("raise SystemExit('a pickle was loaded')",)

    task = Bowl(0)
    optimizer = build("heavyball.PSGDLRA", task, 0, {"rank": 3, "preconditioner_update_probability": 0.5})
    advance(task, optimizer, 3)
    state = optimizer.state_dict()
    assert not any(isinstance(value, bytes) for value in state["heavyball"].values())
    state["heavyball"]["precond_schedule"] = pickle.dumps(Trap())
    optimizer.load_state_dict(state)
    assert optimizer.precond_schedule == 0.5


@pytest.fixture
def without_heavyball(tmp_path):
    """Runs the command where heavyball is not installed."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "heavyball.py").write_text("raise ModuleNotFoundError(\"No module named 'heavyball'\", name='heavyball')")

    def run(*args):
        command = [sys.executable, "-m", "lodo", "run", *args, "--workers", "0", "--out", str(tmp_path / "out")]
        return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(folder)})

    return run


@pytest.mark.slow
def test_without_the_extra(without_heavyball, tmp_path):
    process = without_heavyball("bowl-rivals", "--steps", "20", "--seeds", "1")
    assert process.returncode == 1
    install = "pip install '.[rivals]' in the folder of the repository"
    said = f"error: optimizers of heavyball need the package heavyball, which is not installed: {install}\n"
    assert said in process.stderr
    assert not (tmp_path / "out").exists()
    process = without_heavyball("bowl-rivals", "--steps", "20", "--seeds", "1", "--optimizers", "adam, soap")
    assert process.returncode == 0, process.stdout


# ---------------------------------------------------------------- another shape


@pytest.mark.parametrize("name", ["torch.Adam", "torch.LBFGS", "torch.SGD"])
def test_the_shape_makes_no_difference_to_elementwise_methods(name):
    plain, seen = Bowl(0, n=6), Bowl(0, n=6)
    expected = advance(plain, build(name, plain, 0, {"lr": 0.1}), 5)
    assert advance(seen, build(name, seen, 0, {"lr": 0.1, "view": (2, 3)}), 5) == expected
    assert torch.equal(plain.x, seen.x)


def test_a_view_shares_memory_and_hands_on_the_gradient():
    x = Parameter(torch.arange(6.0))
    optimizer = Reshaped([x], (3, -1), lambda params: torch.optim.SGD(params, lr=1.0))
    (seen,) = optimizer.param_groups[0]["params"]
    assert seen.shape == (3, 2)
    assert seen.data_ptr() == x.data_ptr()
    optimizer.step()  # without a gradient
    assert torch.equal(x, torch.arange(6.0))
    x.grad = torch.ones(6)
    optimizer.step()
    assert torch.equal(x, torch.arange(6.0) - 1)
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 1.0


def test_muon_on_a_matrix_orthogonalizes():
    """On 10 x 10 the step has singular values near one; on a vector, norm one."""
    task = Bowl(0)
    advance(task, build("pytorch_optimizer.muon", task, 0, {"lr": 1.0, "view": (10, 10)}), 1)
    values = torch.linalg.svdvals(task.x.detach().view(10, 10))
    assert values.min() > 0.3
    assert values.max() < 1.7


@pytest.mark.parametrize(
    ("task", "view", "said"),
    [
        (Bowl(0, n=12), (5, 5), r"torch.SGD cannot be made with the options .*invalid for input of size 12"),
        (Bowl(0, n=12), "4x3", r"torch.SGD cannot be made with the options .*'view': '4x3'"),
        (Rosenbrock(0), (2, 3), r"size 2"),
    ],
)
def test_a_shape_that_does_not_fit(task, view, said):
    with pytest.raises(ValueError, match=said):
        build("torch.SGD", task, 0, {"lr": 0.1, "view": view})


def test_a_view_is_of_one_parameter():
    params = [Parameter(torch.zeros(2)), Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match="view must be left out unless the task has one parameter, got 2 parameters"):
        Reshaped(params, (2, 1), torch.optim.SGD)


# ---------------------------------------------------------------- what they reach


@pytest.mark.parametrize(
    ("name", "low", "high"), [("soap", 7, 9), ("shampoo", 7, 10), ("kron", 7, 11), ("adam", 14, 17), ("muon", 13, 16)]
)
def test_settings_are_good_ones(name, low, high, tmp_path):
    """After a few steps already; Newton's is 7.41."""
    sooner = {"start_preconditioning_step": 500, "preconditioning_compute_steps": 100} if name == "shampoo" else {}
    optimizer, options = settings(name, **sooner)
    run = Run("bowl", optimizer, 0, 2500, options=options)
    execute(run, tmp_path)
    assert low < tail(load_curve(run, tmp_path), part=0.2) < high


# ---------------------------------------------------------------- the experiment


def invoke(*args):
    result = CliRunner().invoke(app, ["run", "bowl-rivals", *map(str, args)])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.slow
def test_the_experiment_writes_its_files(tmp_path):
    out = invoke("--steps", 30, "--seeds", 2, "--workers", 0, "--out", tmp_path)
    folder = tmp_path / "bowl-rivals"
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    assert {row["optimizer"] for row in rows} == {rival.choice.label for rival in bowl_rivals().values()}
    ranks = [(COSTS.index(row["cost"]), row["mean"] is None, row["mean"] or 0) for row in rows]
    assert ranks == sorted(ranks)
    by_label = {row["optimizer"]: row for row in rows}
    assert by_label["Adam"]["times_adam"] == 1
    assert all(
        row["times_adam"] == pytest.approx(row["microseconds"] / by_label["Adam"]["microseconds"]) for row in rows
    )
    assert all(row["seeds"] == 2 and row["steps"] == 30 for row in rows)
    assert (by_label["LODO"]["known"], by_label["LODO"]["known_steps"]) == (8.99, 100_000)
    assert (by_label["Muon"]["known"], by_label["O-LBFGS"]["known"]) == (14.2, 17.7)
    table = (folder / "table.md").read_text()
    headings = re.findall(r"\| \*\*(.*) a step\*\* \|", table)
    assert headings == list(COSTS)
    assert "| 14.2 (30k) |\n" in table  # nothing is compared after another number of steps, so there is no such column
    assert "| difference |" not in table
    assert "30 steps, 2 seeds" in table
    assert (folder / "bowl-rivals.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "bowl-rivals-curves.pdf").read_bytes().startswith(b"%PDF")
    assert "the best rival without an n x n matrix" in out


def test_another_bowl_has_no_known_errors(tmp_path):
    args = ("--steps", 30, "--seeds", 1, "--workers", 0, "--out", tmp_path)
    invoke("--optimizers", "muon, torch.SGD(lr=0.1)", "--task", "v=2.0", *args)
    rows = json.loads((tmp_path / "bowl-rivals" / "summary.json").read_text())["rows"]
    assert [(row["optimizer"], row["cost"], row["known"], row["times_adam"]) for row in rows] == [
        ("Muon", "O(n)", None, None),
        ("torch.SGD (lr=0.1)", "", None, None),
    ]
    assert "Not the bowl that the settings were tuned on" in (tmp_path / "bowl-rivals" / "table.md").read_text()


def test_an_option_does_not_change_the_class_of_a_rival_but_its_known_error_goes():
    request = EXPERIMENT.request(
        evaluations=30, seeds=1, choices=EXPERIMENT.parse("soap(lr=0.5), soap, lodo(beta=0.5)")
    )
    results = {cell: [timed(30, run=runs[0])] for cell, runs in EXPERIMENT.plan(request).items()}
    rows = {row.optimizer: row for row in EXPERIMENT.rows(request, results)}
    assert {label: (row.cost, row.known) for label, row in rows.items()} == {
        "LODO (beta=0.5)": ("O(n log n)", None),
        "SOAP, dense": (">= O(n^2)", 7.43),
        "SOAP, dense (lr=0.5)": (">= O(n^2)", None),
    }


def test_those_that_diverge_come_last_and_notes_are_of_those_that_are_there():
    request = EXPERIMENT.request(evaluations=30, seeds=1, choices=EXPERIMENT.parse("momentum, yogi, muon, psgd_lra_10"))
    results = {
        cell: [replace(timed(30, run=runs[0]), diverged=cell.label in ("Momentum", "Yogi"))]
        for cell, runs in EXPERIMENT.plan(request).items()
    }
    labels = [row.optimizer for row in EXPERIMENT.rows(request, results)]
    assert labels == ["Muon", "PSGD-LRA, rank 10", "Momentum", "Yogi"]
    notes = EXPERIMENT.notes(request, results)
    assert notes[-2:] == [
        "Muon: on a vector it is momentum divided by its norm.",
        "PSGD-LRA, rank 10: O(n r) with r the rank.",
    ]
    figures = EXPERIMENT.figures(request, results)
    assert [figure.name for figure in figures] == ["bowl-rivals", "bowl-rivals-curves"]
    assert [len(draw(figure).axes) for figure in figures] == [1, 1]


def timed(steps, *, seconds=1e-4, evaluations=1, run=None):
    at = np.arange(1, steps + 1)
    columns = {
        "step": at,
        "evaluations": evaluations * at,
        "seconds": np.cumsum(np.broadcast_to(seconds, steps)),
        "loss": np.full(steps, 8.0),
        "repeat_loss": np.full(steps, np.nan),
    }
    return Curve(run or Run("bowl", "adam", 0, steps), False, columns)


def test_the_time_of_a_step_is_a_median():
    assert step_time([timed(1000)]) == pytest.approx(100)
    assert step_time([timed(1000, evaluations=2)]) == pytest.approx(50)
    once_disturbed = np.full(1000, 1e-4)
    once_disturbed[:100] = 5.0
    assert step_time([timed(1000, seconds=once_disturbed)]) == pytest.approx(100)
    assert step_time([timed(1000), timed(1000), timed(1000, seconds=3e-4)]) == pytest.approx(100)
    assert step_time([timed(3)]) == pytest.approx(100)
    assert step_time([timed(1)]) == pytest.approx(100)
    compiling = np.full(20, 1e-4)
    compiling[:2] = 5.0
    assert step_time([timed(20, seconds=compiling)]) == pytest.approx(100)
    assert step_time([timed(2, seconds=compiling[[0, -1]])]) == pytest.approx(100), "the first step is left out"
    now_and_then = np.full(1000, 1e-4)
    now_and_then[::10] = 1.1e-3
    assert step_time([timed(1000, seconds=now_and_then)]) == pytest.approx(200, rel=0.01), "all work counts"


def test_a_row_is_compared_after_as_many_steps():
    row = RivalRow(
        "A", "loss", 9.0, 0.5, 4, 0, cost="O(n)", microseconds=120.4, known=10.0, known_steps=30_000, steps=30_000
    )
    assert row.cells == ("A", "9.00 ± 0.50", "4", "120", "", "10 (30k)", "-10.0 %")
    other = RivalRow("B", "loss", None, None, 4, 4, microseconds=9.0, times_adam=0.5, known=10.0, known_steps=1500)
    assert other.cells == ("B", "diverged", "4", "9", "0.5", "10 (1,500)", "")
    text = markdown("T", "about", [row, other], [])
    assert text.index("**O(n) a step**") < text.index("| A |") < text.index("**cost not known**") < text.index("| B |")


def test_the_sentence_compares_the_best_lodo_with_the_best_that_has_no_matrix():
    def row(label, mean, cost):
        return RivalRow(label, "loss", mean, None, 1, 0, cost=cost)

    rows = [row("A", 12.0, "O(n)"), row("LODO", 9.0, "O(n log n)"), row("LODO, new", 8.0, "O(n log n)")]
    rows += [row("B", 10.0, "O(n^1.5)"), row("C", 7.5, ">= O(n^2)")]
    assert EXPERIMENT.sentence(rows) == (
        "LODO, new tracks the moving minimum with a loss of 8, "
        "20% below the best rival without an n x n matrix (B, 10)."
    )
    assert "Nothing to compare" in EXPERIMENT.sentence([row("A", 12.0, "O(n)")])


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize("seed", range(3))
def test_labels_cover_neither_each_other_nor_a_marker(seed):
    rng = np.random.default_rng(seed)
    figure, (axes,) = canvas(size=(9, 6))
    axes.set(xlim=(0, 1), ylim=(0, 1))
    places = np.concatenate([rng.uniform(0.1, 0.9, (18, 2)), rng.normal(0.5, 0.03, (8, 2))])
    line = axes.axhline(0.5)
    legend = axes.legend(handles=[axes.plot([], [], label="something")[0]], loc="center left")
    label_points(axes, [Point(x, y, f"optimizer {i}", "k") for i, (x, y) in enumerate(places)], avoid=[legend, line])
    figure.draw_without_rendering()
    assert len(axes.texts) == len(places)
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # an annotation's own would have its line in it
    for i, box in enumerate(boxes):
        assert overlap(box, axes.get_window_extent()) == pytest.approx(box.width * box.height)
        assert overlap(box, legend.get_window_extent()) == 0
        assert not box.y0 < line.get_window_extent().y0 < box.y1
        assert not any(overlap(box, other) for other in boxes[:i])
        assert not any(box.contains(*place) for place in axes.transData.transform(places))
