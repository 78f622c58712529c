"""Ranks that die or stop (failing_ranks.py): the others end with an error that says so, and checkpoints stay whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

sys.path.insert(0, str(Path(__file__).parent))

import failing_ranks
import kron_ranks

from lodo import KronLODO

pytestmark = pytest.mark.slow


def heard(folder, how):
    """What the first rank hears of the second one's end."""
    subprocess.run([sys.executable, failing_ranks.__file__, folder, how], check=True, timeout=300)
    return (folder / f"{how}.txt").read_text()


@pytest.mark.parametrize("how", ["exit", "sleep"])
def test_others_end_with_a_clear_error(how, tmp_path):
    text = heard(tmp_path, how)
    assert text.startswith("RuntimeError: KronLODO could not exchange")
    assert "one of them has ended, or has not called step" in text
    assert "restart all ranks from a checkpoint" in text


@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # torch's words about saving in a single process
def test_a_checkpoint_that_is_interrupted_leaves_the_old_one_whole(tmp_path, monkeypatch):
    heard(tmp_path, "checkpoint")
    model = kron_ranks.network()
    opt = KronLODO(model.parameters(), **kron_ranks.SMALL)
    read = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
    with pytest.raises(dcp.api.CheckpointException, match=r"metadata"):
        dcp.load(read, checkpoint_id=tmp_path / "new")
    dcp.load(read, checkpoint_id=tmp_path / "old")
    set_model_state_dict(model, read["model"])
    set_optimizer_state_dict(model, opt, read["opt"])
    monkeypatch.setattr(kron_ranks, "rank", lambda: 0)
    kron_ranks.train(model, opt, range(3, 6))
    straight, _ = kron_ranks.alone(range(6))
    assert kron_ranks.same(model, straight)
