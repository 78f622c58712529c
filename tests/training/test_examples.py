"""The examples run, and a run that the framework interrupts and resumes ends like an uninterrupted one."""

from __future__ import annotations

import copy
import importlib.util
import math
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"

# the frameworks emit warnings of their own, such as about few workers or coming releases
pytestmark = pytest.mark.filterwarnings("ignore")


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def alike(a, b):
    return all(map(torch.equal, a.parameters(), b.parameters()))


def test_lightning(tmp_path):
    example = load("lightning_module")
    straight = example.train(4, tmp_path / "straight")
    half = example.train(2, tmp_path / "resumed")
    resumed = example.train(4, tmp_path / "resumed", resume=True)
    assert straight.trainer.global_step == resumed.trainer.global_step == 8
    assert alike(straight, resumed)
    assert not alike(half, resumed)
    assert straight.trainer.optimizers[0]._state(0)["step"] == resumed.trainer.optimizers[0]._state(0)["step"] == 8


def test_transformers(tmp_path):
    example = load("transformers_trainer")
    straight = example.train(6, tmp_path / "straight", save_every=3)
    example.train(3, tmp_path / "resumed", save_every=3)
    resumed = example.train(6, tmp_path / "resumed", save_every=3, resume=True)
    assert alike(straight.model, resumed.model)
    opt = resumed.optimizer.optimizer
    assert isinstance(opt, example.LODO)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.01, 0.0]
    assert [opt._state(i)["step"] for i in (0, 1)] == [6, 6]
    losses = [entry["loss"] for entry in straight.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_accelerate(tmp_path):
    example = load("accelerate_loop")
    straight, loss = example.train(4, tmp_path / "straight")
    half, before = example.train(2, tmp_path / "resumed")
    resumed, again = example.train(4, tmp_path / "resumed", resume=True)
    assert alike(straight, resumed)
    assert not alike(half, resumed)
    assert again == loss < before


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    numbers = load("tensorboard_diagnostics").train(20, tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(numbers)
    assert [event.step for event in events.Scalars("group0/largest_stretch")] == [10, 20]
    for name, value in numbers.items():
        assert math.isfinite(value)
        assert events.Scalars(name)[-1].value == pytest.approx(value, rel=1e-6)


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
