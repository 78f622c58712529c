"""Several processes: DDP, FSDP2, DTensors and their checkpoints (the checks themselves are in ranks.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent))

import kron_ranks
import ranks


def outcomes(tmp_path_factory, program, *worlds):
    """The folder in which all ranks have written what became of each check; made once, whoever comes first."""
    base = tmp_path_factory.getbasetemp()
    name = "-".join([Path(program).stem, *map(str, worlds)])
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            subprocess.run([sys.executable, program, folder, *map(str, worlds)], check=True, timeout=800)
    return folder


def assert_ok(folder, check, world):
    for rank in range(world):
        outcome = folder / str(world) / f"{check}-{rank}.txt"
        assert outcome.exists(), f"rank {rank} did not get to {check}"
        text = outcome.read_text()
        assert text == "ok", f"rank {rank}:\n{text}"


@pytest.mark.parametrize("world", ranks.WORLDS)
@pytest.mark.parametrize("check", ranks.CHECKS)
def test_ranks(check, world, tmp_path_factory):
    assert_ok(outcomes(tmp_path_factory, ranks.__file__), check, world)


KRON = [check for checks in kron_ranks.PASSES.values() for check in checks]


@pytest.mark.parametrize("check", KRON)
def test_two_ranks_of_kron(check, tmp_path_factory):
    assert_ok(outcomes(tmp_path_factory, kron_ranks.__file__, 2), check, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("check", KRON)
def test_one_to_four_ranks_of_kron(check, world, tmp_path_factory):
    """Checkpoints of every number of ranks are loaded on every other."""
    assert_ok(outcomes(tmp_path_factory, kron_ranks.__file__, 1, 2, 3, 4), check, world)
