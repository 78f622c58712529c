"""The demo, the benchmark and the README do what they say."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bowl():
    return load(ROOT / "demo" / "bowl.py")


def test_lodo_tracks_the_noisy_bowl_better_than_adam(bowl):
    """The paper's central claim at 20,000 steps, with the paper's hyperparameters."""
    errors = {name: bowl.tracking_error(np.array(list(bowl.losses(name, 0, 20_000)))) for name in bowl.RIVALS}
    assert pytest.approx(7.4118, abs=1e-4) == bowl.NEWTON
    assert bowl.NEWTON < errors["LODO"] < 10.2
    assert errors["Adam"] == pytest.approx(15.2, abs=0.6)


def test_demo_prints_a_table_and_draws(tmp_path):
    command = [sys.executable, ROOT / "demo" / "bowl.py", "--steps", "400", "--seeds", "2", "--out", tmp_path]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "LODO" in out
    assert "Newton" in out
    assert (tmp_path / "bowl.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["rows"]) == {"LODO", "Adam"}
    assert all(math.isfinite(row["mean"]) for row in summary["rows"].values())


def test_benchmark_writes_ratios(tmp_path):
    out = tmp_path / "bench.json"
    command = [sys.executable, ROOT / "benchmarks" / "bench.py", "--sizes", "300", "--repeats", "2", "--out", out]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "speed over plain autograd" in text
    result = json.loads(out.read_text())["results"]["300"]
    assert result["autograd_over_lodo"] > 0
    assert result["lodo_over_roofline"] > 0


def test_benchmark_measures_memory():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux")
    command = [sys.executable, ROOT / "benchmarks" / "bench.py", "--memory", "30000"]
    measured = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 1900 < measured < 2400  # a stored hypergradient would be 512 more


def test_roofline_counts_the_passes():
    bench = load(ROOT / "benchmarks" / "bench.py")
    n, hidden = 94_696, 189_392
    assert bench.roofline_bytes(n) == 4 * (9 * 16 * 4 * hidden + 15 * 16 * hidden)


@pytest.mark.parametrize("path", ["README.md", "docs/algorithm.md"])
def test_code_in_the_documents_runs(path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, path, "exec"), {})
