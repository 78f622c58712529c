"""The examples run, and a run that the framework interrupts and resumes ends like an uninterrupted one."""

from __future__ import annotations

import copy
import importlib.util
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from lodo import LODO, KronLODO

EXAMPLES = Path(__file__).parents[2] / "examples"

# the frameworks emit warnings of their own, such as about few workers or coming releases
pytestmark = pytest.mark.filterwarnings("ignore")


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKERS = pytest.mark.parametrize("make", [KronLODO, partial(LODO, lr=0.1, recipe="robust")], ids=["kron", "lodo"])


def steps_of(opt):
    """The numbers of steps that the states of an optimizer have counted."""
    return {int(state["step"]) for state in opt.state.values() if "step" in state}


def alike(a, b):
    return all(map(torch.equal, a.parameters(), b.parameters()))


@MAKERS
def test_lightning(make, tmp_path):
    example = load("lightning_module")
    straight = example.train(4, tmp_path / "straight", make=make)
    half = example.train(2, tmp_path / "resumed", make=make)
    resumed = example.train(4, tmp_path / "resumed", resume=True, make=make)
    assert straight.trainer.global_step == resumed.trainer.global_step == 8
    assert alike(straight, resumed)
    assert not alike(half, resumed)
    assert steps_of(straight.trainer.optimizers[0]) == steps_of(resumed.trainer.optimizers[0]) == {8}


@pytest.mark.parametrize("optimizer", [(KronLODO, {"lr": 3e-3}), (LODO, {"lr": 0.3, "recipe": "robust"})])
def test_transformers(optimizer, tmp_path):
    example = load("transformers_trainer")
    straight = example.train(6, tmp_path / "straight", save_every=3, optimizer=optimizer)
    example.train(3, tmp_path / "resumed", save_every=3, optimizer=optimizer)
    resumed = example.train(6, tmp_path / "resumed", save_every=3, resume=True, optimizer=optimizer)
    assert alike(straight.model, resumed.model)
    opt = resumed.optimizer.optimizer
    assert isinstance(opt, optimizer[0])
    assert [group["weight_decay"] for group in opt.param_groups] == [0.01, 0.0]
    assert steps_of(opt) == {6}
    losses = [entry["loss"] for entry in straight.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


@MAKERS
def test_accelerate(make, tmp_path):
    example = load("accelerate_loop")
    straight, loss = example.train(4, tmp_path / "straight", make=make)
    half, before = example.train(2, tmp_path / "resumed", make=make)
    resumed, again = example.train(4, tmp_path / "resumed", resume=True, make=make)
    assert alike(straight, resumed)
    assert not alike(half, resumed)
    assert again == loss < before


@MAKERS
def test_tensorboard(make, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    numbers = load("tensorboard_diagnostics").train(20, tmp_path, make=make)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(numbers)
    one = "group0/0.weight/gain" if make is KronLODO else "group0/largest_stretch"
    assert [event.step for event in events.Scalars(one)] == [10, 20]
    for name, value in numbers.items():
        assert math.isfinite(value)
        assert events.Scalars(name)[-1].value == pytest.approx(value, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["accelerate_divided", "lightning_fsdp2", "transformers_ranks"])
def test_two_processes(example, tmp_path):
    """Trained, saved and resumed by the framework: bit for bit as without a break, on both processes."""
    program = Path(__file__).parent / "example_ranks.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
    done = subprocess.run([*launch, example, tmp_path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_the_notebook(tmp_path):
    """It is stored with its outputs, and runs from top to bottom."""
    path = EXAMPLES / "quickstart.ipynb"
    assert path.stat().st_size < 1_000_000
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    again = copy.deepcopy(stored)
    NotebookClient(again, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "stderr" not in path.read_text()
    for book in (stored, again):
        cells = [cell for cell in book.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        outputs = [output for cell in cells for output in cell.outputs]
        assert not [output for output in outputs if output.output_type == "error"]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
        printed = "".join(output.get("text", "") for output in outputs)
        assert all(name in printed for name in ("KronLODO", "AdamW", "distance from the inverse Hessian"))
        assert "True" in [output.get("data", {}).get("text/plain") for output in outputs], "resumed bit for bit"
