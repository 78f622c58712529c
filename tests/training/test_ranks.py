"""Several processes: DDP, FSDP2, DTensors and their checkpoints (the checks themselves are in ranks.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent))

import ranks


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    """The folder in which all ranks have written what became of each check; made once, whoever comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            subprocess.run([sys.executable, ranks.__file__, folder], check=True, timeout=800)
    return folder


@pytest.mark.parametrize("world", ranks.WORLDS)
@pytest.mark.parametrize("check", ranks.CHECKS)
def test_ranks(check, world, outcomes):
    for rank in range(world):
        outcome = outcomes / str(world) / f"{check}-{rank}.txt"
        assert outcome.exists(), f"rank {rank} did not get to {check}"
        text = outcome.read_text()
        assert text == "ok", f"rank {rank}:\n{text}"
