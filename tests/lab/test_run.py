"""Runs on disk: finished once, resumed bit for bit, never trusted when damaged."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pytorch_optimizer import ScheduleFreeAdamW

from interruptions import interrupted, same_but_for_time
from lodo import LODO
from lodo._checks import check_int
from lodo.lab import run as module
from lodo.lab.files import load_state, read_checked, remove_leftovers, save_state
from lodo.lab.optimizers import build, evaluating, paper_hyperparameters, state_bytes
from lodo.lab.page.results import digests
from lodo.lab.run import FORMAT, Run, execute, load_curve, read_weights
from lodo.lab.tasks import TASKS, make_task
from lodo.lab.tasks.bowl import Bowl

EVERY = (
    "adam",
    "momentum",
    "rmsprop",
    "yogi",
    "lars",
    "lbfgs",
    "lbfgs_slip",
    "olbfgs",
    "l2l",
    "lodo",
    "bfgs",
    "lm",
    "newton",
)


def bowl(optimizer="lodo", evaluations=60, seed=0, **settings):
    settings.setdefault("options", paper_hyperparameters("bowl", optimizer))
    settings.setdefault("task_options", {"n": 12})
    return Run("bowl", optimizer, seed, evaluations, **settings)


@pytest.mark.parametrize("optimizer", EVERY)
def test_an_interrupted_run_resumes_bit_for_bit(optimizer, tmp_path, monkeypatch):
    run = bowl(optimizer, track_every=7)
    execute(run, tmp_path / "whole")
    for after in (1, 13):
        interrupted(run, tmp_path / "parts", monkeypatch, after)
        assert run.checkpoint_path(tmp_path / "parts").exists()
        assert load_curve(run, tmp_path / "parts") is None
    execute(run, tmp_path / "parts")
    same_but_for_time(load_curve(run, tmp_path / "parts"), load_curve(run, tmp_path / "whole"))
    assert [file.name for file in (tmp_path / "parts").iterdir()] == [run.path(tmp_path).name]


@pytest.mark.parametrize(
    "name", ["torch.AdamW", "torch.Rprop", "pytorch_optimizer.soap", "pytorch_optimizer.adahessian"]
)
def test_library_optimizers_resume_too(name, tmp_path, monkeypatch):
    run = bowl(name, 30, options={"lr": 0.1})
    execute(run, tmp_path / "whole")
    interrupted(run, tmp_path / "parts", monkeypatch, 11)
    execute(run, tmp_path / "parts")
    same_but_for_time(load_curve(run, tmp_path / "parts"), load_curve(run, tmp_path / "whole"))


def test_the_bowl_is_renewed_and_g_frozen_across_an_interruption(tmp_path, monkeypatch):
    options = {**paper_hyperparameters("bowl", "lodo"), "freeze_at": 20}
    run = bowl("lodo_frozen", 40, task_options={"n": 8, "renew_at": 20}, options=options)
    execute(run, tmp_path / "whole")
    for after in (15, 25):
        interrupted(run, tmp_path / str(after), monkeypatch, after)
        execute(run, tmp_path / str(after))
        same_but_for_time(load_curve(run, tmp_path / str(after)), load_curve(run, tmp_path / "whole"))


@pytest.mark.parametrize(
    "optimizer", ["lars", "adam", "pytorch_optimizer.schedulefreeadamw", "muon_adamw", "kron_lodo"]
)
def test_a_schedule_resumes_bit_for_bit(optimizer, tmp_path, monkeypatch):
    run = bowl(optimizer, track_every=7, schedule="cosine", options={"lr": 0.1})
    execute(run, tmp_path / "whole")
    interrupted(run, tmp_path / "parts", monkeypatch, after=13)
    execute(run, tmp_path / "parts")
    same_but_for_time(load_curve(run, tmp_path / "parts"), load_curve(run, tmp_path / "whole"))


def test_a_cosine_multiplies_the_first_rate(tmp_path):
    """Against torch's own schedule."""
    run = Run("rosenbrock", "torch.SGD", 0, 8, options={"lr": 1e-3}, schedule="cosine")
    curve = load_curve(run, execute(run, tmp_path).parent)
    task = make_task("rosenbrock", {}, 0)
    sgd = torch.optim.SGD(task.params, lr=1e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=8)
    losses = []
    for _ in range(8):
        task.draw()
        losses.append(sgd.step(task.evaluate))
        rates.step()
    np.testing.assert_allclose(curve["loss"], losses, rtol=1e-5)
    constant = Run("rosenbrock", "torch.SGD", 0, 8, options={"lr": 1e-3})
    assert not np.allclose(load_curve(constant, execute(constant, tmp_path).parent)["loss"], losses, rtol=1e-5)


def test_a_schedule_is_part_of_the_address_and_none_is_not():
    plain = bowl("adam")
    assert "schedule" not in plain.settings
    assert bowl("adam", schedule="cosine").name != plain.name
    with pytest.raises(ValueError, match="schedule must be one of 'cosine', 'warmup_cosine', got 'linear'"):
        bowl("adam", schedule="linear")


def test_schedule_free_is_measured_at_its_average_and_trains_on(tmp_path):
    """Measuring swaps the weights for their average and back: the losses stay the same, bit for bit."""
    options = {"lr": 0.1}
    runs = [bowl("pytorch_optimizer.schedulefreeadamw", track_every=every, options=options) for every in (0, 7)]
    silent, measured = (load_curve(run, execute(run, tmp_path).parent) for run in runs)
    np.testing.assert_array_equal(silent["loss"], measured["loss"])
    x = torch.nn.Parameter(torch.ones(3))
    optimizer = ScheduleFreeAdamW([x], lr=0.1)
    for _ in range(3):
        x.grad = x.detach().clone()
        optimizer.step()
    before = x.detach().clone()
    with evaluating(optimizer, [x]):
        assert not torch.equal(x, before)
    assert torch.equal(x, before)


def test_the_memory_of_the_state_is_kept(tmp_path):
    for optimizer, size in (("torch.SGD", 0), ("momentum", 4), ("torch.AdamW", 8)):
        run = bowl(optimizer, options={"lr": 1e-3})
        assert load_curve(run, execute(run, tmp_path).parent).state_bytes == pytest.approx(size, abs=0.5)
    params = [torch.nn.Parameter(torch.ones(size)) for size in (40, 60)]
    lodo = LODO(params, preconditioner="diagonal", meta_optimizer="sgd", backend="reference")
    for p in params:
        p.grad = torch.ones_like(p)
    lodo.step()
    assert 8 <= state_bytes(lodo) / 100 < 9  # theta and the momentum, of which parameters have parts


def test_a_finished_run_is_not_repeated(tmp_path, monkeypatch):
    run = bowl("adam")
    path = execute(run, tmp_path)
    before = path.read_bytes()
    monkeypatch.setattr(module, "Training", None)
    assert execute(run, tmp_path) == path
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["empty", "cut", "altered", "foreign", "text"])
def test_a_damaged_file_is_noticed_and_made_again(damage, tmp_path, caplog):
    run, other = bowl("adam"), bowl("adam", seed=1)
    path = execute(run, tmp_path)
    good, whole = load_curve(run, tmp_path), path.read_bytes()
    execute(other, tmp_path)
    altered = bytearray(whole)
    column = pq.read_metadata(path).row_group(0).column(2)
    altered[column.data_page_offset + column.total_compressed_size - 1] ^= 1  # the end of a column
    path.write_bytes(
        {
            "empty": b"",
            "cut": whole[:-100],
            "altered": bytes(altered),
            "foreign": other.path(tmp_path).read_bytes(),
            "text": b"step,loss\n1,2\n",
        }[damage]
    )
    assert load_curve(run, tmp_path) is None
    assert path.name in caplog.text
    execute(run, tmp_path)
    same_but_for_time(load_curve(run, tmp_path), good)


@pytest.mark.parametrize(
    "metadata",
    [None, "", "{}", "[]", "null", "3", '"text"', "settings", "steps", "diverged", "final", "environment"],
)
def test_metadata_of_another_shape_are_damage(metadata, tmp_path, caplog):
    """The metadata are another text, or one of their entries is null."""
    run = bowl("adam", evaluations=30)
    path = execute(run, tmp_path)
    table = pq.read_table(path)
    whole = json.loads(table.schema.metadata[b"lodo"])
    if metadata in whole:
        metadata = json.dumps({**whole, metadata: None})
    pq.write_table(table.replace_schema_metadata(None if metadata is None else {"lodo": metadata}), path)
    assert digests(tmp_path, "bowl") == set()
    assert load_curve(run, tmp_path) is None
    assert f"{path} is damaged and will be made again" in caplog.text
    execute(run, tmp_path)
    assert len(load_curve(run, tmp_path)["loss"]) == 30


@pytest.mark.parametrize("column", ["step", "evaluations", "loss"])
def test_a_curve_without_its_columns_is_damage(column, tmp_path, caplog):
    run = bowl("adam", evaluations=30)
    path = execute(run, tmp_path)
    table = pq.read_table(path)
    without = table.drop_columns([column])
    words = table.set_column(table.column_names.index(column), column, pa.array(["text"] * 30))
    for damaged in (without, words):
        pq.write_table(damaged, path)
        assert load_curve(run, tmp_path) is None
    assert caplog.text.count(f"must have a column {column} of numbers") == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "altered", "foreign"])
def test_a_damaged_checkpoint_is_noticed_and_not_used(damage, tmp_path, monkeypatch, caplog):
    run, other = bowl("adam"), bowl("adam", seed=1)
    execute(run, tmp_path / "whole")
    for each in (run, other):
        interrupted(each, tmp_path, monkeypatch, 9)
    path = run.checkpoint_path(tmp_path)
    whole = path.read_bytes()
    altered = bytearray(whole)
    altered[-len(whole) // 3] ^= 1
    foreign = other.checkpoint_path(tmp_path).read_bytes()
    path.write_bytes({"empty": b"", "cut": whole[:-1], "altered": bytes(altered), "foreign": foreign}[damage])
    execute(run, tmp_path)
    assert path.name in caplog.text
    same_but_for_time(load_curve(run, tmp_path), load_curve(run, tmp_path / "whole"))


def test_a_checkpoint_that_the_optimizer_refuses_is_not_used(tmp_path, monkeypatch, caplog):
    run = bowl("lodo")
    execute(run, tmp_path / "whole")
    interrupted(run, tmp_path, monkeypatch, 9)
    path = run.checkpoint_path(tmp_path)
    state = load_state(path)
    state["optimizer"]["param_groups"].append({})
    save_state(path, state)
    execute(run, tmp_path)
    assert "parameter groups" in caplog.text
    same_but_for_time(load_curve(run, tmp_path), load_curve(run, tmp_path / "whole"))


def test_a_checkpoint_is_never_unpickled_as_code(tmp_path):
    """A well-formed file with a hostile object in it is refused by torch."""
    run = bowl("adam")
    program = f"""
        import os
        from pathlib import Path
        from lodo.lab.files import save_state
        class Hostile:
            def __reduce__(self):
                return os.mkdir, ({str(tmp_path / "owned")!r},)
        save_state(Path({str(run.checkpoint_path(tmp_path))!r}), {{"settings": Hostile()}})
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    execute(run, tmp_path)
    assert not (tmp_path / "owned").exists()
    assert load_curve(run, tmp_path) is not None


def test_a_diverged_run_is_recorded_as_such(tmp_path):
    for optimizer, options in (
        ("momentum", {"lr": 1e3, "beta": 0.9}),
        ("lodo", {"lr": 1e3, "beta": 0.0}),
        ("pytorch_optimizer.shampoo", {"lr": 1e20}),  # ends in an error of linear algebra
    ):
        run = bowl(optimizer, 500, options=options)
        execute(run, tmp_path)
        curve = load_curve(run, tmp_path)
        assert curve.diverged
        assert 1 < len(curve["step"]) < 500


def test_a_run_that_has_ended_leaves_no_checkpoint_to_go_on_from(tmp_path, monkeypatch):
    """Otherwise, after a kill at its very end, a diverged run would go on as if nothing had happened."""
    saved = []
    monkeypatch.setattr("lodo.lab.run.Training.save", lambda self, path: saved.append(self.over))
    for run in (bowl("momentum", 500, options={"lr": 1e3, "beta": 0.9}), bowl("adam", 500)):
        execute(run, tmp_path, checkpoint_every=0.0)
    assert not any(saved)


class Erratic(Bowl):
    """Measures something else on the way."""

    def tracked(self, optimizer, step):
        return {"odd" if step % 2 else "even": float(step)}


def test_a_quantity_may_be_measured_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "erratic", Erratic)
    run = Run("erratic", "adam", 0, 12, options={"lr": 0.1}, task_options={"n": 5}, track_every=3)
    execute(run, tmp_path)
    curve = load_curve(run, tmp_path)
    for name, steps in (("odd", [3, 9]), ("even", [6, 12])):
        assert curve["step"][~np.isnan(curve[name])].tolist() == steps
        assert curve[name][~np.isnan(curve[name])].tolist() == steps


def test_the_file_opens_with_pandas(tmp_path):
    run = bowl("lodo", track_every=20)
    frame = pd.read_parquet(execute(run, tmp_path))
    assert list(frame.columns) == [
        "step",
        "evaluations",
        "seconds",
        "loss",
        "repeat_loss",
        "sigma",
        "sigma_exact",
    ]
    assert list(frame.step) == list(range(1, 61))
    assert frame.seconds.is_monotonic_increasing
    assert frame.seconds.iloc[0] > 0
    assert list(frame.index[frame.sigma.notna()] + 1) == [20, 40, 60]
    assert frame.repeat_loss.isna().all()


def test_a_long_curve_is_compact(tmp_path):
    path = execute(bowl("momentum", 5000, task_options={"n": 2}), tmp_path)
    assert path.stat().st_size < 5000 * 8


def test_every_evaluation_counts(tmp_path):
    run = bowl("olbfgs", 30)
    execute(run, tmp_path)
    curve = load_curve(run, tmp_path)
    assert list(curve["evaluations"]) == list(range(2, 31, 2))
    assert np.all(curve["repeat_loss"][5:] < curve["loss"][5:])  # the same batch after the step


def test_measuring_takes_no_training_time_and_changes_nothing(tmp_path, monkeypatch):
    plain, tracked = bowl("lodo"), bowl("lodo", track_every=1)
    execute(plain, tmp_path)

    def slow(self, optimizer, step):
        time.sleep(0.02)
        return {"sigma": 1.0}

    monkeypatch.setattr("lodo.lab.tasks.bowl.Bowl.tracked", slow)
    execute(tracked, tmp_path)
    assert load_curve(tracked, tmp_path)["seconds"][-1] < 60 * 0.02
    np.testing.assert_array_equal(load_curve(plain, tmp_path)["loss"], load_curve(tracked, tmp_path)["loss"])


def test_seconds_end_a_run(tmp_path):
    run = bowl("adam", None, seconds=0.4)
    execute(run, tmp_path)
    seconds = load_curve(run, tmp_path)["seconds"]
    assert seconds[-1] >= 0.4
    assert seconds[-2] < 0.4


def test_the_same_settings_have_the_same_address_in_any_order():
    a = bowl("adam", options={"lr": 1.0, "beta1": 0.5})
    assert a.name == bowl("adam", options={"beta1": 0.5, "lr": 1.0}).name
    others = [
        bowl("adam", options={"lr": 1.0, "beta1": 0.4}),
        bowl("yogi", options=a.options),
        bowl("adam", options=a.options, seed=1),
        bowl("adam", options=a.options, evaluations=61),
        bowl("adam", options=a.options, track_every=1),
        bowl("adam", options=a.options, task_options={"n": 13}),
    ]
    assert len({run.name for run in [a, *others]}) == 7


def test_the_numbers_are_the_same_in_another_process_and_the_callers_are_left_alone(tmp_path):
    run = bowl("lodo", 200, task_options={})
    torch.manual_seed(5)
    expected, threads = torch.rand(3), torch.get_num_threads()
    torch.manual_seed(5)
    execute(run, tmp_path / "here")
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    program = f"""
        from pathlib import Path
        from lodo.lab.run import Run, execute
        execute(Run("bowl", "lodo", 0, 200, options={dict(run.options)!r}), Path({str(tmp_path / "there")!r}))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    same_but_for_time(load_curve(run, tmp_path / "here"), load_curve(run, tmp_path / "there"))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"seed": -1}, "seed"),
        ({"evaluations": 0}, "evaluations"),
        ({"evaluations": None}, "evaluations or seconds"),
        ({"seconds": 0.0}, "seconds"),
        ({"track_every": -2}, "track_every"),
    ],
)
def test_bad_settings_are_named(settings, name):
    with pytest.raises(ValueError, match=name):
        Run("bowl", "adam", **{"seed": 0, "evaluations": 10, **settings})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "bowel"}, "task must be one of 'bowl', .*, got 'bowel'"),
        ({"options": {"learning_rate": 1}}, "learning_rate"),
        ({"task_options": {"n": 0}}, "n must be"),
        ({"task_options": {"size": 3}}, "size"),
    ],
)
def test_check_says_what_the_run_would_end_with(settings, said):
    run = Run(**{"task": "bowl", "optimizer": "adam", "seed": 0, "evaluations": 10, **settings})
    with pytest.raises(ValueError, match=said):
        run.check()


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    target = tmp_path / "file"
    program = f"""
        import itertools
        from pathlib import Path
        from lodo.lab.files import write_checked
        for i in itertools.count():
            write_checked(Path({str(target)!r}), bytes([i % 256]) * 3_000_000)
    """
    for delay in (0.0, 0.011, 0.023, 0.037, 0.05):
        writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
        while not target.exists():
            time.sleep(0.005)
        time.sleep(delay)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        data = read_checked(target)
        assert data is not None
        assert len(set(data)) == 1
        assert len(data) == 3_000_000
    for leftover in tmp_path.glob(".*"):
        remove_leftovers(target)
        assert leftover.exists()  # it may belong to a living writer
        os.utime(leftover, (0, 0))
    remove_leftovers(target)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_a_full_disk_costs_the_checkpoint_but_not_the_run(tmp_path):
    """Files may not grow beyond 9 kB: checkpoints fail, the run goes on, and says what it could not write."""
    program = f"""
        import logging, resource, sys
        from pathlib import Path
        from lodo.lab import run as module
        logging.basicConfig()
        module._LOOK_EVERY = 0.01
        folder = Path({str(tmp_path)!r})
        run = module.Run("bowl", "adam", 0, int(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))
        module.execute(run, folder, checkpoint_every=-1)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    short = subprocess.run([*command, "300"], capture_output=True, text=True)
    assert short.returncode == 0, short.stderr
    assert "no checkpoint" in short.stderr
    assert load_curve(Run("bowl", "adam", 0, 300), tmp_path) is not None
    long = subprocess.run([*command, "4000"], capture_output=True, text=True)
    assert long.returncode != 0
    assert "File too large" in long.stderr
    assert [file.name for file in tmp_path.iterdir()] == [Run("bowl", "adam", 0, 300).path(tmp_path).name]


def test_a_repeated_loss_that_is_not_finite_is_diverged(tmp_path, monkeypatch):
    """Also in the very last step."""
    losses = iter([1.0, 1.0, 1.0, float("nan")])
    monkeypatch.setattr("lodo.lab.tasks.bowl.Bowl.evaluate", lambda self, graph=False: next(losses))
    monkeypatch.setattr("lodo.lab.optimizers.lbfgs.StochasticLBFGS.gradient", lambda self: torch.ones(12))
    run = bowl("olbfgs", 4)
    execute(run, tmp_path)
    assert load_curve(run, tmp_path).diverged


def test_the_callers_random_numbers_are_left_alone_and_libraries_draw_from_the_seed(tmp_path, monkeypatch):
    drawn = []

    def step(self, closure):
        drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
        return closure()

    monkeypatch.setattr(torch.optim.Adagrad, "step", step)
    run = bowl("torch.Adagrad", 6, options={})
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.rand(()).item(), np.random.rand(), random.random()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    execute(run, tmp_path / "whole")
    assert before == (torch.rand(()).item(), np.random.rand(), random.random())
    whole, drawn[:] = list(drawn), []
    interrupted(run, tmp_path / "parts", monkeypatch, 3)
    monkeypatch.setattr(torch.optim.Adagrad, "step", step)
    del drawn[3:]  # what was drawn after the last checkpoint is drawn again
    execute(run, tmp_path / "parts")
    assert drawn == whole


def test_metadata_tells_what_the_numbers_were_made_with(tmp_path):
    import pyarrow.parquet as pq

    run = bowl("adam")
    about = json.loads(pq.read_schema(execute(run, tmp_path)).metadata[b"lodo"])
    assert about["settings"]["optimizer"] == "adam"
    assert about["environment"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert about["environment"].keys() >= {"lodo", "numba", "numpy", "pytorch_optimizer", "python"}
    assert about["environment"].keys() >= {"machine", "processor", "cores"}
    assert about["steps"] == 60
    assert about["diverged"] is False


# ---------------------------------------------------------------- what a run ends with


class Kept(Bowl):
    """A bowl whose weights are worth a file, and with something to measure at the end."""

    keeps_weights = True
    measured = 0

    def final(self):
        Kept.measured += 1
        return {"first": float(self.x.detach()[0]), "third": 1 / 3, "none": float("nan")}


def kept(monkeypatch, optimizer="adam", evaluations=20, **settings):
    monkeypatch.setitem(TASKS, "kept", Kept)
    Kept.measured = 0
    settings.setdefault("options", paper_hyperparameters("bowl", optimizer))
    return Run("kept", optimizer, 0, evaluations, task_options={"n": 5}, **settings)


def test_what_is_measured_at_the_end_is_stored(tmp_path, monkeypatch):
    run = kept(monkeypatch)
    execute(run, tmp_path)
    final = load_curve(run, tmp_path).final
    assert final.keys() == {"first", "third", "none"}
    assert final["third"] == 1 / 3
    assert np.isnan(final["none"])
    execute(run, tmp_path)
    assert Kept.measured == 1


def test_the_weights_are_those_at_the_end(tmp_path, monkeypatch):
    run = kept(monkeypatch)
    execute(run, tmp_path)
    curve = load_curve(run, tmp_path)
    assert curve.weights == run.weights_path(tmp_path)
    settings, (x,) = read_weights(curve.weights)
    assert settings == json.loads(run.settings)
    assert settings["format"] == FORMAT
    task = Kept(0, n=5)
    optimizer = build("adam", task, 0, run.options)
    for _ in range(20):
        task.draw()
        optimizer.step(task.evaluate)
    assert torch.equal(x, task.x)
    assert float(x[0]) == curve.final["first"]
    assert not x.requires_grad
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".parquet", ".weights"]


def test_the_weights_are_those_that_were_measured(tmp_path, monkeypatch):
    """Schedule-free is measured at its average, not where it trains."""
    run = kept(monkeypatch, "pytorch_optimizer.schedulefreeadamw", options={"lr": 0.1})
    execute(run, tmp_path)
    curve = load_curve(run, tmp_path)
    _, (x,) = read_weights(curve.weights)
    assert float(x[0]) == curve.final["first"]


def test_a_task_that_keeps_nothing_has_no_weights(tmp_path):
    run = bowl("adam")
    execute(run, tmp_path)
    curve = load_curve(run, tmp_path)
    assert (curve.final, curve.weights) == ({}, None)
    assert [file.suffix for file in tmp_path.iterdir()] == [".parquet"]


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, monkeypatch):
    run = kept(monkeypatch, "lodo")
    execute(run, tmp_path / "whole")
    interrupted(run, tmp_path / "parts", pytest.MonkeyPatch(), 7)
    assert not run.weights_path(tmp_path / "parts").exists()
    execute(run, tmp_path / "parts")
    whole, parts = load_curve(run, tmp_path / "whole"), load_curve(run, tmp_path / "parts")
    assert torch.equal(*(read_weights(curve.weights)[1][0] for curve in (whole, parts)))
    assert whole.final["first"] == parts.final["first"]


def test_weights_where_a_checkpoint_stands(tmp_path, monkeypatch):
    run = kept(monkeypatch)
    interrupted(run, tmp_path, pytest.MonkeyPatch(), 7)
    settings, (x,) = read_weights(run.checkpoint_path(tmp_path))
    assert settings == json.loads(run.settings)
    short = kept(monkeypatch, evaluations=7)
    execute(short, tmp_path)
    assert torch.equal(x, read_weights(short.weights_path(tmp_path))[1][0])


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer", "altered", "text"])
def test_damaged_weights_are_refused_by_name(damage, tmp_path, monkeypatch):
    run = kept(monkeypatch)
    execute(run, tmp_path)
    path = run.weights_path(tmp_path)
    whole = path.read_bytes()
    altered = bytearray(whole)
    altered[len(whole) // 2] ^= 1
    contents = {"empty": b"", "cut": whole[:-1], "longer": whole + b"0", "altered": bytes(altered), "text": b"x = 1\n"}
    path.unlink()
    if damage != "missing":
        path.write_bytes(contents[damage])
    with pytest.raises(ValueError, match="must be a whole file of weights or a checkpoint") as error:
        read_weights(path)
    assert str(error.value).startswith(str(path))


def test_a_diverged_run_has_no_weights_and_nothing_at_the_end(tmp_path, monkeypatch):
    run = kept(monkeypatch, "momentum", 500, options={"lr": 1e3, "beta": 0.9})
    execute(run, tmp_path)
    curve = load_curve(run, tmp_path)
    assert curve.diverged
    assert (curve.final, curve.weights) == ({}, None)
    assert Kept.measured == 0
    assert [file.suffix for file in tmp_path.iterdir()] == [".parquet"]


def test_a_kill_while_the_end_is_measured_costs_what_comes_after_the_checkpoint(tmp_path, monkeypatch):
    run = kept(monkeypatch)
    execute(run, tmp_path / "whole")

    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Kept, "final", killed)
        with pytest.raises(KeyboardInterrupt):
            execute(run, tmp_path, checkpoint_every=0)
    assert load_curve(run, tmp_path) is None
    execute(run, tmp_path)
    same_but_for_time(load_curve(run, tmp_path), load_curve(run, tmp_path / "whole"))


# ---------------------------------------------------------------- rates


def rates_of(run, monkeypatch):
    """A list that gets the rates of every step of a run."""
    rates = []

    def watched(*args):
        optimizer = build(*args)
        optimizer.register_step_pre_hook(lambda it, *_: rates.append([group["lr"] for group in it.param_groups]))
        return optimizer

    monkeypatch.setattr(module, "build", watched)
    return rates


FALLING = [[0.3 * (1 - step / 25) ** 2] for step in range(25)]


def test_the_rate_of_lars_falls_with_the_square_of_what_is_left(tmp_path, monkeypatch):
    run = bowl("lars", 25, options={"lr": 0.3, "beta": 0.5})
    rates = rates_of(run, monkeypatch)
    execute(run, tmp_path)
    assert rates == FALLING


def test_the_rate_of_lars_goes_on_where_it_was(tmp_path, monkeypatch):
    run = bowl("lars", 25, options={"lr": 0.3, "beta": 0.5})
    rates = rates_of(run, monkeypatch)
    for after in (4, 7):
        interrupted(run, tmp_path, pytest.MonkeyPatch(), after)
    assert rates == FALLING[:5] + FALLING[4:12]  # the step after the last checkpoint is done again
    rates.clear()
    execute(run, tmp_path)
    assert rates == FALLING[11:]


def test_the_rate_of_lars_falls_with_time_if_that_ends_the_run(tmp_path, monkeypatch):
    run = bowl("lars", None, seconds=0.2, options={"lr": 0.3, "beta": 0.5})
    rates = rates_of(run, monkeypatch)
    execute(run, tmp_path)
    rates = [rate for (rate,) in rates]
    assert rates[0] == 0.3
    assert rates == sorted(rates, reverse=True)
    assert 0 <= rates[-1] < 0.03
    before = load_curve(run, tmp_path)["seconds"][:-1].astype(float)
    np.testing.assert_allclose(rates[1:], 0.3 * (1 - before / 0.2) ** 2, atol=1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "yogi", "lodo", "pytorch_optimizer.lars", "torch.SGD"])
def test_other_rates_stay(optimizer, tmp_path, monkeypatch):
    run = bowl(optimizer, 12, options={"lr": 0.03})
    rates = rates_of(run, monkeypatch)
    execute(run, tmp_path)
    assert rates == [[0.03]] * 12


# ---------------------------------------------------------------- whole numbers


@pytest.mark.parametrize("value", [1, 5, np.int64(3)])
def test_whole_numbers_within_bounds(value):
    check_int("depth", value, low=1, high=5)


@pytest.mark.parametrize(
    ("value", "bounds", "said"),
    [
        (6, {"high": 5}, "depth must be an integer >= 1 and <= 5, got 6"),
        (0, {"high": 5}, "depth must be an integer >= 1 and <= 5, got 0"),
        (2.0, {"high": 5}, "depth must be an integer >= 1 and <= 5, got 2.0"),
        (True, {"high": 5}, "depth must be an integer >= 1 and <= 5, got True"),
        (0, {}, "depth must be an integer >= 1, got 0"),
    ],
)
def test_whole_numbers_out_of_bounds(value, bounds, said):
    with pytest.raises(ValueError, match="depth") as error:
        check_int("depth", value, low=1, **bounds)
    assert str(error.value) == said
