"""Runs that are killed and resumed, and whether they reach the same result."""

from __future__ import annotations

import numpy as np
import pytest

from lodo.lab import run as module
from lodo.lab.files import load_state
from lodo.lab.run import execute


def same_but_for_time(a, b):
    """All columns of two curves are equal bit for bit, except the measured seconds."""
    assert a.columns.keys() == b.columns.keys()
    for name in a.columns.keys() - {"seconds"}:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


class Killed(BaseException):
    """Stands in for the death of the process."""


def interrupted(run, folder, monkeypatch, after):
    """Execute with a checkpoint at every opportunity, and die after ``after`` of them."""
    checkpoints = 0

    def progress(_):
        nonlocal checkpoints
        checkpoints += 1
        if checkpoints > after:
            raise Killed

    monkeypatch.setattr(module, "_LOOK_EVERY", 0.0)  # look after every step
    with pytest.raises(Killed):
        execute(run, folder, checkpoint_every=-1, progress=progress)
    monkeypatch.undo()
    state = load_state(run.checkpoint_path(folder))
    assert 0 < state["evaluations"] < run.evaluations
