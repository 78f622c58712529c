"""The laboratory's main claim, the demo and the benchmarks do what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lodo.lab import experiments
from lodo.lab.experiments.paper.bowl import LOSS
from lodo.lab.optimizers import parse
from lodo.lab.pipeline import run_experiment
from lodo.lab.tasks.bowl import newton_loss

ROOT = Path(__file__).parents[1]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_lodo_tracks_the_noisy_bowl_better_than_adam(tmp_path):
    """The paper's central claim at 20,000 steps, with the paper's hyperparameters."""
    experiment = experiments.load("bowl")
    request = experiment.request(evaluations=20_000, seeds=1, choices=parse("lodo, adam"))
    folder = run_experiment(experiment, request, tmp_path, workers=0)
    rows = json.loads((folder / "summary.json").read_text())["rows"]
    errors = {row["optimizer"]: row["mean"] for row in rows if row["metric"] == LOSS}
    sigma = next(row["mean"] for row in rows if "exact" in row["metric"])
    assert newton_loss() < errors["LODO"] < 10.2
    assert errors["Adam"] == pytest.approx(15.2, abs=0.6)
    assert sigma == pytest.approx(0.77, abs=0.03)


def test_the_demo_is_a_quick_bowl_and_a_small_network():
    makefile = (ROOT / "Makefile").read_text()
    assert "$(BIN)/lodo run bowl --quick\n" in makefile
    assert "$(BIN)/lodo compare mlp --data digits" in makefile
    assert "'kron_lodo, torch.AdamW, torch.AdamW(lr=0.01), torch.AdamW(lr=0.1)'" in makefile  # three rates


def benchmark(name, folder, *options):
    """What a benchmark prints, and the file it writes."""
    out = folder / f"{name}.json"
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", *options, "--out", out]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout, out


@pytest.mark.slow
def test_benchmark_of_kron(tmp_path):
    text, out = benchmark("kron", tmp_path, "--quick", "--repeats", "1")
    assert "bytes of state a weight" in text
    found = json.loads(out.read_text())
    assert found["bytes_a_weight"] == pytest.approx(11.4, abs=0.1)
    assert found["bytes_a_weight/bfloat16"] == pytest.approx(6.8, abs=0.1)
    assert all(ratio > 0 for ratio in found.values())


@pytest.mark.slow
def test_benchmark_of_seconds(tmp_path, monkeypatch):
    """Tuned runs are read; what does not get to AdamW's loss is left out; a name that is not there is refused."""
    monkeypatch.setenv("LODO_DATA", "digits")
    experiment = experiments.load("networks")
    choices = [experiment.named["adamw"], experiment.named["kron_lodo"], *parse("torch.SGD(lr=1e-9)")]
    request = experiment.request(quick=True, evaluations=30, seeds=2, choices=choices, tasks="mlp")
    run_experiment(experiment, request, tmp_path, workers=0)
    names = "KronLODO, torch.SGD (lr=1e-09)"
    text, out = benchmark("seconds", tmp_path, "--results", tmp_path, "--tasks", "mlp", "--optimizers", names)
    found = json.loads(out.read_text())
    assert list(found) == ["mlp"]
    assert list(found["mlp"]) == ["KronLODO"]
    assert found["mlp"]["KronLODO"]["seconds"] > 0
    assert found["mlp"]["KronLODO"]["step"] > 0
    assert "seconds to tuned AdamW's final" in text
    assert "KronLODO untouched" not in text
    with pytest.raises(subprocess.CalledProcessError) as error:
        benchmark("seconds", tmp_path, "--results", tmp_path, "--tasks", "mpl")
    assert "tasks must be one of 'mlp', got 'mpl'" in error.value.stderr
    with pytest.raises(subprocess.CalledProcessError) as error:
        benchmark("seconds", tmp_path, "--results", tmp_path / "elsewhere")
    assert "has no runs of `lodo run networks`" in error.value.stderr


@pytest.mark.slow
def test_benchmark_writes_ratios(tmp_path):
    text, out = benchmark("bench", tmp_path, "--sizes", "300", "--repeats", "2")
    assert "speed over plain autograd" in text
    result = json.loads(out.read_text())["results"]["300"]
    assert result["autograd_over_lodo"] > 0
    assert result["lodo_over_roofline"] > 0


@pytest.mark.parametrize(("variant", "most"), [("lodo", 2450), ("robust", 1150)])
@pytest.mark.slow
def test_benchmark_measures_memory(variant, most):
    """At rest: a stored hypergradient would be 512 more, moments in float32 too."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux")
    command = [sys.executable, ROOT / "benchmarks" / "bench.py", "--memory", "150000", "--variant", variant]
    peak, resting = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert 0.9 * most - 200 < resting < most
    assert resting <= peak


@pytest.mark.slow
def test_benchmark_beside_networks(tmp_path):
    text, out = benchmark("networks", tmp_path, "--quick", "--repeats", "1")
    assert "times as fast on fused kernels" in text
    result = json.loads(out.read_text())
    assert result["fused_gain"] > 0
    assert result["seconds"].keys() == {"image generation", "resnet8"}
    for ratios in result["steps_a_second_over_adam"].values():
        assert ratios.pop("Adam") == 1
        assert all(0 < ratio < 1.1 for ratio in ratios.values())


@pytest.mark.slow
def test_benchmark_of_training(tmp_path):
    text, out = benchmark("training", tmp_path, "--size", "1000", "--repeats", "1")
    assert "FSDP2" in text
    ratios = json.loads(out.read_text())["ratios"]
    assert 0.45 < ratios["fsdp_state_over_single"] < 0.55
    assert all(ratio > 0 for ratio in ratios.values())


@pytest.mark.slow
def test_benchmark_of_ranks(tmp_path):
    text, out = benchmark("divided", tmp_path, "--quick", "--repeats", "1")
    assert "a divided step" in text
    found = json.loads(out.read_text())
    assert found["divided_bytes"] == pytest.approx(0.5, abs=0.01)
    assert found["sharded_bytes"] == pytest.approx(1.0, abs=0.01)
    assert found["divided_state"] < 0.55
    assert found["divided_step"] > 0


@pytest.mark.slow
def test_benchmark_of_registers(tmp_path):
    pytest.importorskip("triton")
    text, out = benchmark("registers", tmp_path, "--quick")
    assert "The Triton kernels of a layer" in text
    assert "A step on a GPU" in text
    measured = json.loads(out.read_text())["results"]["LODO"]["sm_90"]
    found, step = measured["passes"], measured["step"]
    assert found.keys() == {"up with g, up with u", "down with g, down with u", "learning"}
    assert len(found["learning"]["kernels"]) == 1
    assert found["learning"]["bytes_per_parameter"] > 2 * 4 * 4 * (3 + 3)  # theta and two moments, read and written
    for needed in found.values():
        least, most = needed["registers"]
        assert 8 <= least <= most <= 255
        assert needed["spilled_bytes"] == [0, 0]
        assert {one["registers"] for candidates in needed["kernels"] for one in candidates} >= {least, most}
    assert step["kernels"] == 16 * 5
    assert step["bytes_over_roofline"] <= 1.25
    assert step["spilled_bytes"] == [0, 0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where it is imported
@pytest.mark.parametrize(
    ("variant", "kernels", "bytes_"),
    [
        ("LODO", (1, 1, 1, 1, 1), 472),
        ("LODO, shuffle", (1, 1, 1, 1, 1), 416),
        ("LODO, robust", (1, 1, 1, 1, 1), 388),
        ("LODO, compact", (1, 1, 1, 1, 1), 642),
        ("LODO, schedule-free", (1, 3, 1, 1), 400),  # a sum over all blocks takes two kernels
    ],
)
def test_a_layer_is_fused_on_a_gpu(variant, kernels, bytes_, monkeypatch):
    """A kernel for each pass, and no more bytes a parameter and layer than docs/performance.md says."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    registers = load(ROOT / "benchmarks" / "registers.py")
    n = 94_696
    with registers.pretended("sm_90"):
        codes = [registers.written(call) for call in registers.passes(n, registers.VARIANTS[variant]).values()]
    assert tuple(len(code.kernels) for code in codes) == kernels
    assert sum(code.bytes for code in codes) / n < 1.01 * bytes_


def test_without_triton_the_benchmark_of_registers_says_so(tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    text, out = benchmark("registers", tmp_path)
    assert "pip install triton==3.7.1 beside the CPU build of torch" in text
    assert not out.exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where it is imported
def test_figures_of_a_compiled_kernel(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    registers = load(ROOT / "benchmarks" / "registers.py")
    text = " Function k:\n  REG:40 STACK:8 SHARED:16 LOCAL:0 CONSTANT[0]:600 TEXTURE:0 SURFACE:0 SAMPLER:0"
    assert registers.resources(text) == {
        "REG": 40,
        "STACK": 8,
        "SHARED": 16,
        "LOCAL": 0,
        "TEXTURE": 0,
        "SURFACE": 0,
        "SAMPLER": 0,
    }
    used = [registers.Usage(n, spilled=0, shared=0, warps=warps) for n, warps in ((32, 8), (33, 4), (64, 8), (255, 4))]
    assert [registers.resident(one) for one in used] == [64, 48, 32, 8]
    assert registers.as_text((24, 40)) == "24-40"
    assert registers.as_text((32, 32)) == "32"


def test_roofline_counts_the_passes():
    bench = load(ROOT / "benchmarks" / "bench.py")
    n, hidden = 94_696, 189_392
    assert bench.roofline_bytes(n) == 4 * (9 * 16 * 4 * hidden + 15 * 16 * hidden)


def test_durations_count_every_run(tmp_path, monkeypatch):
    """An experiment takes its evaluations times what one takes, shared by the cores; what is stored can be read."""
    durations = load(ROOT / "tools" / "durations.py")
    monkeypatch.setattr(durations, "SAMPLE", 0.05)
    monkeypatch.setattr(durations, "step_time", lambda curves: 2e6 * len(curves))  # two seconds
    experiment, samples = experiments.load("rosenbrock"), {}
    runs = [run for runs in experiment.plan(experiment.request()).values() for run in runs]
    taken = durations.training(experiment, False, tmp_path, samples)
    assert taken == pytest.approx(200 * 2 * len(runs) / durations.CORES)
    assert 1 < len(samples) < len(runs)  # seeds do not matter
    stored = tomllib.loads(durations.as_toml({"rosenbrock": {"quick": 21.7, "full": 1234.0}}))
    assert stored["rosenbrock"] == {"quick": 22, "full": 1200}
    assert "cores" in stored["machine"]
