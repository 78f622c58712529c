"""Sweeps on real processes, disturbed the way real ones are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import distributed
import numpy as np
import psutil
import pytest
from filelock import FileLock
from typer.testing import CliRunner

from lodo.lab.cli import app
from lodo.lab.executor import RunError, sweep
from lodo.lab.run import Run, execute, load_curve

SETTINGS = ("--steps", "15000", "--seeds", "2", "--optimizers", "lodo, olbfgs", "--checkpoint-every", "0.2")


def lodo(*args, **kwargs):
    """The command in a process group of its own, as a shell starts it."""
    command = [sys.executable, "-m", "lodo", "run", "bowl", *SETTINGS, *map(str, args)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
        **kwargs,
    )


def heed_interrupts():
    """A shell starts background commands so that they ignore Ctrl-C; the tests may be among them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process, code=0):
    out, _ = process.communicate(timeout=180)
    assert process.returncode == code, out
    return out


def workers_of(process):
    every = psutil.Process(process.pid).children(recursive=True)
    return [child for child in every if "spawn_main" in " ".join(child.cmdline())]


def wait_for(condition, process):
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def checkpoints(out):
    return list((out / "runs").glob("*.checkpoint"))


def finished(out):
    return list((out / "runs").glob("*.parquet"))


def summary(out):
    content = json.loads((out / "bowl" / "summary.json").read_text())
    del content["timings"]
    return content


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What comes out without any trouble; computed once, whichever process of the tests comes first."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "undisturbed"
    with FileLock(f"{out}.lock"):
        if not (out / "bowl" / "summary.json").exists():
            finish(lodo("--out", out, "--workers", 0))
    return summary(out)


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(undisturbed, tmp_path):
    process = lodo("--out", tmp_path, "--workers", 2)
    wait_for(lambda: len(checkpoints(tmp_path)) == 2, process)
    workers_of(process)[0].send_signal(signal.SIGKILL)
    time.sleep(1.5)
    for worker in workers_of(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGKILL)
    finish(process)
    assert summary(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_killed_command_continues(undisturbed, tmp_path):
    process = lodo("--out", tmp_path, "--workers", 2)
    wait_for(lambda: len(checkpoints(tmp_path)) == 2, process)
    workers = workers_of(process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert psutil.wait_procs(workers, timeout=20)[1] == []  # nobody goes on alone
    done = finished(tmp_path)
    assert len(done) < 4
    before = {file: file.stat().st_mtime_ns for file in done}
    finish(lodo("--out", tmp_path, "--workers", 2))
    assert summary(tmp_path) == undisturbed
    assert {file: file.stat().st_mtime_ns for file in done} == before


@pytest.mark.slow
def test_interrupting_leaves_a_resumable_state_and_says_so(undisturbed, tmp_path):
    process = lodo("--out", tmp_path, "--workers", 2)
    wait_for(lambda: checkpoints(tmp_path), process)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal sends for Ctrl-C
    sent = time.monotonic()
    out = finish(process, code=130)
    assert time.monotonic() - sent < 2
    assert "the same command continues" in " ".join(out.split())
    assert "Traceback" not in out
    assert not (tmp_path / "bowl").exists()
    finish(lodo("--out", tmp_path, "--workers", 2))
    assert summary(tmp_path) == undisturbed
    assert checkpoints(tmp_path) == []


@pytest.mark.slow
def test_terminating_leaves_no_process_and_no_temporary_file(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = lodo("--out", tmp_path / "out", "--workers", 2, env={**os.environ, "TMPDIR": str(temporary)})
    wait_for(lambda: checkpoints(tmp_path / "out"), process)
    assert any(path.name.startswith("lodo-dask-") for path in temporary.iterdir())
    workers = workers_of(process)
    process.terminate()
    out = finish(process, code=143)
    assert "Terminated. Finished runs and checkpoints are kept" in out
    assert "Traceback" not in out
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's cache
    assert left == []
    assert list((tmp_path / "out").rglob("*.tmp")) == []
    assert psutil.wait_procs(workers, timeout=5)[1] == []


@pytest.fixture(scope="module")
def cluster():
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=3, dashboard_address="127.0.0.1:0", silence_logs=50
    ) as local:
        yield local


def test_a_running_scheduler_can_be_used(cluster, tmp_path):
    runs = [Run("bowl", "adam", seed, 200, task_options={"n": 5}) for seed in range(3)]
    heard = {}
    sweep(runs, tmp_path / "there", scheduler=cluster.scheduler_address, on_progress=heard.__setitem__)
    assert heard == dict.fromkeys(runs, 1.0)  # three threads of one process, which take turns
    for run in runs:
        execute(run, tmp_path / "here")
        np.testing.assert_array_equal(
            load_curve(run, tmp_path / "here")["loss"], load_curve(run, tmp_path / "there")["loss"]
        )


@pytest.mark.slow
def test_a_scheduler_on_the_command_line(cluster, tmp_path):
    args = ["run", "rosenbrock", "--quick", "--scheduler", cluster.scheduler_address, "--out", str(tmp_path)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rosenbrock" / "summary.json").read_text())["rows"]
    assert all(row["seeds"] == 2 for row in rows)
    at = {row["optimizer"]: row["mean"] / row["paper_mean"] for row in rows if row["paper_mean"]}
    for label in ("Adam", "Yogi"):
        assert at[label] == pytest.approx(1, rel=0.003)
    assert at["LODO"] == pytest.approx(1, rel=0.08)  # two seeds


def test_two_sweeps_on_one_scheduler_do_not_meet(cluster, tmp_path):
    runs = [Run("bowl", "adam", seed, 300, task_options={"n": 5}) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for name in ("a", "b"):
            pool.submit(sweep, runs, tmp_path / name, scheduler=cluster.scheduler_address)
    for run in runs:
        np.testing.assert_array_equal(load_curve(run, tmp_path / "a")["loss"], load_curve(run, tmp_path / "b")["loss"])


def test_a_run_that_fails_is_named_and_the_others_are_kept(cluster, tmp_path):
    good = Run("rosenbrock", "adam", 0, 50)
    bad = Run("rosenbrock", "torch.SparseAdam", 0, 50)  # refuses dense gradients at its first step
    with pytest.raises(RunError, match=bad.name):
        sweep([good, bad], tmp_path, scheduler=cluster.scheduler_address)
    with pytest.raises(RunError, match=bad.name):
        sweep([bad], tmp_path, workers=0)
    sweep([good], tmp_path, workers=0)
    assert load_curve(good, tmp_path) is not None


def test_a_folder_that_the_cluster_does_not_share_is_noticed(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("lodo.lab.executor.load_curve", lambda run, folder: None)
    with pytest.raises(RunError, match="share"):
        sweep([Run("rosenbrock", "adam", 0, 20)], tmp_path, scheduler=cluster.scheduler_address)


def test_a_bad_option_is_refused_before_anything_runs(tmp_path):
    runs = [Run("rosenbrock", "adam", 0, 50), Run("rosenbrock", "adam", 0, 50, options={"beta3": 1})]
    with pytest.raises(ValueError, match="beta3"):
        sweep(runs, tmp_path, workers=0)
    assert list(tmp_path.iterdir()) == []


def test_finished_runs_and_duplicates_cost_nothing(tmp_path):
    run = Run("rosenbrock", "adam", 0, 50)
    sweep([run], tmp_path, workers=0)
    before = run.path(tmp_path).stat().st_mtime_ns
    heard = []
    sweep([run, run], tmp_path, workers=4, on_progress=lambda run, done: heard.append(done))  # no cluster is started
    assert run.path(tmp_path).stat().st_mtime_ns == before
    assert heard == [1.0]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("foo", "missing port number in address 'foo'"),
        ("tcp://127.0.0.1:1", "[Errno "),
        ("http://localhost:8786", "unknown address scheme 'http'"),
    ],
)
@pytest.mark.parametrize("command", ["run bowl --quick", "compare bowl", "tune bowl --optimizer adam"])
def test_a_scheduler_that_does_not_answer_is_one_error(command, address, reason, tmp_path):
    result = CliRunner().invoke(app, [*command.split(), "--scheduler", address, "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert not result.stdout
    assert result.stderr.startswith("error: scheduler must be the address of a running Dask scheduler, such as tcp://")
    assert f"got '{address}': {reason}" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_workers_must_not_be_negative(tmp_path):
    with pytest.raises(ValueError, match="workers must be an integer >= 0, got -1"):
        sweep([Run("rosenbrock", "adam", 0, 50)], tmp_path, workers=-1)
