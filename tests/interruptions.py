"""Runs that die on the way, and whether they come to the same end."""

from __future__ import annotations

import numpy as np
import pytest

from lodo.lab import run as module
from lodo.lab.files import load_state
from lodo.lab.run import execute


def same_but_for_time(a, b):
    assert a.columns.keys() == b.columns.keys()
    for name in a.columns.keys() - {"seconds"}:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


class Killed(BaseException):
    """Stands in for the end of the process."""


def interrupted(run, folder, monkeypatch, after):
    """Execute with a checkpoint at every opportunity, and die after so many of them."""
    left = after

    def progress(_):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    monkeypatch.setattr(module, "_BREATH", 0.0)  # a breath after every step
    with pytest.raises(Killed):
        execute(run, folder, checkpoint_every=-1, progress=progress)
    monkeypatch.undo()
    state = load_state(run.checkpoint_path(folder))
    assert 0 < state["evaluations"] < run.evaluations
