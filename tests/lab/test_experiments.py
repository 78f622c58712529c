"""Experiments end to end at small sizes, and the figures that go into their tables."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from lodo.lab import experiments, pipeline
from lodo.lab.cli import app
from lodo.lab.experiments.base import Cell, tail
from lodo.lab.experiments.paper.bowl import AT_100K, COUNTED, LOSS, last, tracking_error
from lodo.lab.experiments.paper.rosenbrock import late
from lodo.lab.optimizers import Choice, parse
from lodo.lab.pipeline import run_experiment
from lodo.lab.run import Curve, Run, load_curve
from lodo.lab.show.curves import progress
from lodo.lab.show.styles import styles
from lodo.lab.show.tables import Row, markdown, measure, tables_of

ROW_KEYS = {"optimizer", "metric", "mean", "std", "seeds", "diverged", "paper_mean", "paper_std"}


def invoke(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def curve(losses, *, repeats=None, diverged=False, task="bowl", **task_options):
    """A curve as if it had been run: one evaluation a step, or two where the same batch was evaluated again."""
    steps = np.arange(1, len(losses) + 1)
    again = np.full(len(losses), np.nan) if repeats is None else np.asarray(repeats, float)
    columns = {
        "step": steps,
        "evaluations": steps if repeats is None else 2 * steps,
        "seconds": 0.01 * steps,
        "loss": np.asarray(losses, float),
        "repeat_loss": again,
    }
    return Curve(Run(task, "adam", 0, len(losses), task_options=task_options), diverged, columns)


def test_the_tail_is_the_last_tenth():
    assert tail(curve(np.arange(1, 101))) == np.arange(91, 101).mean()
    assert tail(curve(np.arange(1, 12))) == 10.5  # evaluations after 9.9


def test_the_tail_counts_repeated_evaluations_as_the_paper_does():
    c = curve(np.full(50, 10.0), repeats=np.full(50, 4.0))
    assert tail(c) == 7.0
    assert tail(c, fresh=True) == 10.0


def test_rosenbrock_averages_steps_180_to_200_with_both_ends():
    assert late(curve(np.arange(1, 201), task="rosenbrock")) == np.arange(180, 201).mean()


def test_worse_than_standing_still_is_diverged():
    assert tracking_error(curve(np.full(100, 700.0))) == 700  # never moving: 7.41 times 100
    assert math.isnan(tracking_error(curve(np.full(100, 750.0))))
    assert math.isnan(tracking_error(curve(np.full(100, 750.0), repeats=np.full(100, 700.0)), fresh=True))
    assert tracking_error(curve(np.full(100, 7000.0), v=10.0)) == 7000


def test_a_row_averages_the_seeds_that_did_not_diverge():
    row = measure("Adam", "loss", [curve([1.0]), curve([3.0]), curve([9.0], diverged=True)], tail, (2.5, 0.1))
    assert row == Row("Adam", "loss", 2.0, pytest.approx(2**0.5), 3, 1, 2.5, 0.1)
    assert row.cells == ("Adam", "2.00 ± 1.41", "2.50 ± 0.10", "-20.0 %", "3 (1 diverged)")
    gone = measure("BFGS", "loss", [curve([1.0], diverged=True)], tail)
    assert (gone.mean, gone.std, gone.diverged) == (None, None, 1)
    assert gone.cells[1] == "diverged"


def test_a_column_in_which_no_row_has_anything_is_left_out():
    own, compared = Row("Mine", "loss", 2.0, None, 3, 0), Row("Adam", "loss", 2.0, None, 3, 0, 2.5)
    assert "| Mine | 2.00 | 3 |" in markdown("", "", [own], [])
    assert "| Mine | 2.00 |  |  | 3 |" in markdown("", "", [own, compared], [])
    (table,) = tables_of([own])
    assert table == ("loss", ["optimizer", "ours", "seeds"], [("", [["Mine", "2.00", "3"]])])


def test_what_was_not_measured_has_not_diverged():
    with_sigma = replace(curve([1.0, 2.0]), columns={**curve([1.0, 2.0]).columns, "sigma": np.array([math.nan, 0.5])})
    sigma = partial(last, column="sigma")
    row = measure("LODO", "sigma", [with_sigma, curve([1.0]), curve([1.0], diverged=True)], sigma)
    assert (row.mean, row.seeds, row.diverged) == (0.5, 2, 1)
    none = measure("Adam", "sigma", [curve([1.0]), curve([2.0])], sigma)
    assert (none.mean, none.seeds, none.diverged, none.ours) == (None, 0, 0, "not measured")


def test_markdown_has_one_table_for_each_metric():
    a, sigma = Row("A", "loss", 1.0, None, 1, 0, 2.0), Row("A", "sigma", 0.5, None, 1, 0, 0.4)
    text = markdown("Title", "About.", [a, Row("B", "loss", 2.0, None, 1, 0), sigma], ["A note."])
    assert text.count("| optimizer | ours | paper | difference | seeds |") == 2
    assert "| B | 2.00 |  |  | 1 |" in text
    assert text.endswith("- A note.\n")


def test_a_log_file_says_now_and_then_how_far_runs_are(monkeypatch):
    monkeypatch.setattr(pipeline, "_LOG_EVERY", 0.0)
    runs = [Run("bowl", "adam", seed, 10) for seed in range(2)]
    log = io.StringIO()
    with pipeline._progress_bars({Cell("Adam"): runs}, Console(file=log, width=80)) as on_progress:
        on_progress(runs[0], 1.0)
        on_progress(runs[1], 0.5)
    assert [line[:17] for line in log.getvalue().splitlines()[:2]] == ["1/2 runs finished"] * 2


def test_every_optimizer_of_the_paper_has_a_style_of_its_own():
    labels = [
        choice.label
        for experiment in map(experiments.load, experiments.CATALOG)
        for choice in experiment.parse(experiment.optimizers)
    ]
    plain = {label for label in labels if "=" not in label}
    assert len(set(styles(plain).values())) == len(plain)
    many = [f"LODO (beta={i})" for i in range(20)]
    assert len(set(styles(["LODO", *many]).values())) == 21


def test_the_list_of_experiments_is_there_at_once():
    """What `lodo run --list` shows needs none of the large packages."""
    code = """
        import sys
        from lodo.lab.experiments import CATALOG
        assert len(CATALOG) == 14
        heavy = {"torch", "numpy", "matplotlib", "scipy", "pyarrow", "pandas", "rich", "optuna"}
        assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_an_experiment_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"experiment must be one of 'bowl', .*, got 'bowel'"):
        experiments.load("bowel")


def test_figures_are_described_without_matplotlib():
    code = """
        import sys
        from lodo.lab import experiments, pipeline
        for name in experiments.CATALOG:
            experiments.load(name)
        assert "matplotlib" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_the_papers_rows_are_all_there():
    labels = {choice.label for choice in parse(experiments.load("bowl").optimizers)}
    assert labels >= set(AT_100K)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("bowl", 300),
        pytest.param("bowl-noise", 60, marks=pytest.mark.slow),
        ("bowl-frozen", 60),
        ("rosenbrock", 40),
    ],
)
def test_an_experiment_writes_its_files(name, steps, tmp_path):
    """Every optimizer of every experiment, at a toy size."""
    out = invoke("run", name, "--steps", steps, "--seeds", 2, "--workers", 0, "--out", tmp_path)
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    assert summary["experiment"] == name
    assert summary["settings"]["evaluations"] == steps
    assert all(row.keys() == ROW_KEYS for row in summary["rows"])
    assert all(row["seeds"] == 2 for row in summary["rows"])
    assert any(row["mean"] is not None and row["paper_mean"] is not None for row in summary["rows"])
    table = (tmp_path / name / "table.md").read_text()
    experiment = experiments.load(name)
    for choice in experiment.parse(experiment.optimizers):
        assert choice.label in table or name == "bowl-frozen"
    figures = {file.suffix: file.read_bytes() for file in (tmp_path / name).iterdir()}
    assert figures[".png"].startswith(b"\x89PNG")
    assert figures[".pdf"].startswith(b"%PDF")
    assert "paper" in out
    assert f"{name}/summary.json" in out


def test_the_bowl_shows_both_ways_of_counting(tmp_path):
    words = ["--steps", 400, "--seeds", 1, "--optimizers", "olbfgs, lodo"]
    said = invoke("run", "bowl", *words, "--workers", 0, "--out", tmp_path)
    rows = json.loads((tmp_path / "bowl" / "summary.json").read_text())["rows"]
    counted = {(row["optimizer"], row["metric"]): row["mean"] for row in rows}
    assert counted["O-LBFGS", COUNTED] < counted["O-LBFGS", LOSS]
    assert ("LODO", COUNTED) not in counted
    assert [row["metric"] for row in rows if row["paper_mean"]][:2] == [LOSS, COUNTED], "beside what the paper counts"
    named = re.search(r"a loss on fresh batches of (\S+), .*? the best rival .*? \(O-LBFGS, (\S+)\)", said)
    assert named.groups() == tuple(f"{counted[name, LOSS]:.4g}" for name in ("LODO", "O-LBFGS")), (
        "as in the first table"
    )


def test_steps_and_updates_have_names_of_their_own():
    twice, once = curve(np.ones(9), repeats=np.ones(9)), curve(np.ones(9))
    assert progress({"A": [once]}) == {"step": "step", "seconds": "seconds of training"}
    assert list(progress({"A": [once], "B": [twice]}).values())[:2] == [
        "step: an evaluation of the loss and its gradient",
        "update: a fresh batch",
    ]


def test_noise_shares_its_runs_with_the_bowl(tmp_path):
    args = ("--steps", 50, "--seeds", 1, "--optimizers", "adam", "--workers", 0, "--out", tmp_path)
    invoke("run", "bowl", *args)
    (file,) = (tmp_path / "runs").iterdir()
    before = file.stat().st_mtime_ns
    invoke("run", "bowl-noise", *args)
    assert len(list((tmp_path / "runs").iterdir())) == 5
    assert file.stat().st_mtime_ns == before


@pytest.mark.slow
def test_freezing_is_what_explodes(tmp_path):
    """The learned G is right for its own bowl and ruinous on another; LODO that learns on the fly is fine."""
    invoke("run", "bowl-frozen", "--steps", 6000, "--seeds", 2, "--workers", 2, "--out", tmp_path)
    rows = json.loads((tmp_path / "bowl-frozen" / "summary.json").read_text())["rows"]
    at = {row["optimizer"]: row["mean"] for row in rows if row["metric"].endswith("10 steps after the change")}
    assert at["frozen G, new bowl"] > 4  # 10^4
    assert at["fresh LODO, new bowl"] < 2.5
    assert at["frozen G, its own bowl"] < 2


def test_library_optimizers_and_options_on_the_command_line(tmp_path):
    optimizers = (
        "lodo, lodo(beta=0.5), torch.AdamW(lr=0.5, betas=(0.5, 0.9)), pytorch_optimizer.Lion(lr=0.05), torch.LBFGS"
    )
    invoke("run", "bowl", "--steps", 60, "--seeds", 1, "--optimizers", optimizers, "--workers", 0, "--out", tmp_path)
    rows = json.loads((tmp_path / "bowl" / "summary.json").read_text())["rows"]
    labels = {row["optimizer"] for row in rows}
    assert labels == {
        "LODO",
        "LODO (beta=0.5)",
        "torch.AdamW (lr=0.5, betas=(0.5, 0.9))",
        "pytorch_optimizer.lion (lr=0.05)",
        "torch.LBFGS",
    }
    assert {row["optimizer"] for row in rows if row["paper_mean"] is not None} == {"LODO"}


def test_another_bowl_is_not_compared_with_the_papers(tmp_path):
    args = ("--steps", 60, "--seeds", 1, "--optimizers", "adam", "--workers", 0, "--out", tmp_path)
    invoke("run", "bowl", *args, "--task", "n=20, condition=10.0, v=4.0")
    summary = json.loads((tmp_path / "bowl" / "summary.json").read_text())
    assert summary["settings"]["task_options"] == {"n": 20, "condition": 10.0, "v": 4.0}
    assert all(row["paper_mean"] is None for row in summary["rows"])
    assert "n = 20, condition = 10.0, v = 4.0: not the paper's task" in (tmp_path / "bowl" / "table.md").read_text()


def test_a_librarys_optimizer_is_not_taken_for_the_papers(tmp_path):
    args = ("--steps", 20, "--seeds", 1, "--workers", 0, "--out", tmp_path / "[a]")
    out = invoke("run", "bowl", "--optimizers", "adam, torch.Adam, pytorch_optimizer.muon(lr=1.0)", *args)
    assert "[a]/bowl/bowl.png" in out.replace(" ", "")
    rows = json.loads((tmp_path / "[a]" / "bowl" / "summary.json").read_text())["rows"]
    assert [(row["optimizer"], row["paper_mean"]) for row in rows] == [
        ("Adam", 15.28),
        ("torch.Adam", None),
        ("pytorch_optimizer.muon (lr=1.0)", None),
    ]


def test_seconds_limit_every_run_and_use_the_papers_other_column(tmp_path):
    invoke("run", "bowl", "--seconds", 0.3, "--seeds", 1, "--optimizers", "adam", "--workers", 0, "--out", tmp_path)
    summary = json.loads((tmp_path / "bowl" / "summary.json").read_text())
    assert [row["paper_mean"] for row in summary["rows"]] == [15.26]
    experiment = experiments.load("bowl")
    request = experiment.request(seconds=0.3, seeds=1, choices=[Choice("adam")])
    (run,) = next(iter(experiment.plan(request).values()))
    assert load_curve(run, tmp_path / "runs")["seconds"][-1] == pytest.approx(0.3, abs=0.2)


def test_hyperparameters_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("[bowl]\nadam = { lr = 0.25 }\n[rosenbrock]\nadam = { lr = 9.0 }\n")
    args = ("--steps", 40, "--seeds", 1, "--optimizers", "adam, momentum", "--workers", 0, "--out", tmp_path)
    out = invoke("run", "bowl", *args, "--hyperparameters", "mine.toml")
    summary = json.loads((tmp_path / "bowl" / "summary.json").read_text())
    assert summary["settings"]["hyperparameters"] == "mine.toml"
    for text in (out, (tmp_path / "bowl" / "table.md").read_text()):
        assert "Hyperparameters from mine.toml." in text
    found = {}
    for file in (tmp_path / "runs").iterdir():
        settings = json.loads(pq.read_schema(file).metadata[b"lodo"])["settings"]
        found[settings["optimizer"]] = settings["options"]
    assert found == {"adam": {"lr": 0.25, "beta1": 0.465, "beta2": 0.9884}, "momentum": {"lr": 1.394, "beta": 0.529}}
    out = invoke("run", "bowl", *args)
    assert "Hyperparameters from" not in out
    assert len(list((tmp_path / "runs").iterdir())) == 3  # momentum's is the same


def test_from_python(tmp_path):
    experiment = experiments.load("rosenbrock")
    folder = run_experiment(experiment, experiment.request(seeds=1, choices=[Choice("adam")]), tmp_path, workers=0)
    (row,) = json.loads((folder / "summary.json").read_text())["rows"]
    assert row["mean"] == pytest.approx(row["paper_mean"], rel=0.01)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("bowel",),
            f"NAME must be one of {', '.join(map(repr, experiments.CATALOG))}, got 'bowel'; did you mean 'bowl'?",
        ),
        (("bowl", "--steps", "5"), "steps must be an integer >= 10, got 5"),
        (("bowl", "--seeds", "0"), "seeds must be an integer >= 1, got 0"),
        (("bowl", "--seconds", "-1"), "seconds must be a finite number in (0.0, inf), got -1"),
        (("bowl", "--workers", "-1"), "workers must be an integer >= 0, got -1"),
        (("bowl", "--optimizers", "addam"), "did you mean 'adam'?"),
        (("bowl", "--optimizers", "adam, adam"), "named once each"),
        (("bowl", "--optimizers", "adam(lr=1e999)"), "lr of adam must be a finite number"),
        (("bowl", "--optimizers", "adam(lr={1})"), "lr of adam must be"),
        (("bowl", "--optimizers", "adam(betas=[x])"), "[x]"),
        (("bowl", "--steps", "50", "--seconds", "3"), "not both"),
        (("bowl", "--task", "v=0.0"), "v must be"),
        (("bowl", "--optimizers", "adam(lr)"), "options must be given by name"),
        (("bowl", "--optimizers", "adam(lr=0.1"), "names or calls"),
        (("bowl", "--optimizers", "adam(beta9=0.1)"), "beta9"),
        (("bowl", "--optimizers", "l2l(weights='nowhere')"), "does not exist"),
        (("bowl", "--task", "n=-1"), "n must be an integer >= 1, got -1"),
        (("bowl", "--task", "n"), "task must be options"),
        (("bowl", "--task", "depth=3"), "depth"),
        (("bowl-noise", "--task", "v=3"), "v must not be"),
        (("bowl-frozen", "--optimizers", "adam"), "optimizers must be lodo"),
        (("bowl-frozen", "--seconds", "3"), "steps must be given"),
        (("bowl", "--hyperparameters", "nowhere.toml"), "hyperparameters must be a TOML file, got 'nowhere.toml'"),
        (("bowl", "--task", "batch=3"), "batch"),
        (("bowl", "--optimizers", "lodo_no_momentum(beta=0.5)"), "lodo_no_momentum has no option 'beta'"),
        (("mnist", "--data", "digits", "--task", "batch=0"), "batch must be an integer >= 1, got 0"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_written(args, said, tmp_path):
    result = CliRunner().invoke(app, ["run", *args, "--out", str(tmp_path / "out")])
    assert result.exit_code != 0
    plain = " ".join(result.output.replace("│", " ").split())
    assert said in plain
    assert "Traceback" not in plain
    assert not (tmp_path / "out").exists()


def test_the_list_names_experiments_and_optimizers():
    out = invoke("run", "--list")
    for name in (*experiments.CATALOG, "lbfgs_slip", "pytorch_optimizer"):
        assert name in out


def test_help_teaches():
    assert "lodo(beta=0.5)" in invoke("run", "--help").replace("│ ", "")
    for command in ([sys.executable, "-m", "lodo", "--help"],):
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "run" in out
        assert "sample" in out
        assert "train-l2l" in out


def test_without_the_extra_the_command_says_what_to_install(tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')\n")
    process = subprocess.run(
        [sys.executable, "-m", "lodo"], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert process.returncode == 1
    install = "pip install '.[lab]' in the folder of the repository"
    assert process.stderr == f"error: the command line needs typer, which is not installed: {install}\n"


def test_train_l2l_writes_weights_that_run(tmp_path):
    file = tmp_path / "my.weights"
    assert "wrote" in invoke("train-l2l", file, "--episodes", 2, "--seed", 3)
    args = ("--steps", 20, "--seeds", 1, "--workers", 0, "--out", tmp_path)
    invoke("run", "bowl", "--optimizers", f"l2l, l2l(weights={str(file)!r})", *args)
    runs = {file.name for file in (tmp_path / "runs").iterdir()}
    assert len(runs) == 2
    file.write_bytes(file.read_bytes()[:-1])
    assert "damaged" in invoke("run", "bowl", "--optimizers", f"l2l(weights={str(file)!r})", *args, code=1)
