"""How fast and how large is a step? Ratios measured side by side in one run.

    make bench                                     all sizes, about six minutes on two cores
    python benchmarks/bench.py --quick             the two smaller sizes, fewer repeats
    python benchmarks/bench.py --sizes 5000

LODO, LODO with shuffle mixing and with the robust recipe, a plain autograd LODO (the tests' oracle), torch.optim.Adam
and the memory bandwidth take turns; the medians are compared.
The roofline is what a fused step has to read and write (9 passes over theta, 15 over the hidden vectors, 11 without
indices; docs/algorithm.md counts them) over the bandwidth of `a = b + s c` measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import oracle
from lodo import LODO, Mixing
from lodo.memory import huge_zeros

SIZES = (100, 94_696, 1_000_000)
TARGETS: dict[tuple[str, int], float] = {  # at least for "autograd", at most for the others
    ("autograd", 100): 60,
    ("autograd", 94_696): 6,
    ("autograd", 1_000_000): 4,
    ("roofline", 94_696): 1.6,
    ("roofline", 1_000_000): 2.5,
    ("memory", 94_696): 2150,
    ("memory", 1_000_000): 2150,
    ("outside", 100): 50,
    ("shuffle", 1_000_000): 0.6,
    ("shuffle_roofline", 1_000_000): 1.5,
    ("resting", 94_696): 1100,
    ("resting", 1_000_000): 1100,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "lodo": {},
    "shuffle": {"mixing": "shuffle"},
    "robust": {"recipe": "robust"},
}
TRIAD = 24_000_000  # numbers in each of its three arrays


def plain_autograd(n: int) -> oracle.AutogradLODO:
    """What one would write first: differentiate the loss through the last step."""
    family, rng = Mixing(), torch.Generator().manual_seed(0)
    G = oracle.mixing(list(family.permutations(family.fixed(n, rng), n)))
    theta = torch.empty(family.shape(n))
    family.init(theta, n, rng)
    return oracle.AutogradLODO(torch.zeros(n), G, family.blocks(theta, n), lr=1e-3, meta_lr=1e-3, beta=0.9)


@njit(parallel=True, fastmath=True)
def _triad(a: Any, b: Any, c: Any, s: Any) -> None:
    for i in prange(a.size):
        a[i] = b[i] + s * c[i]


def roofline_bytes(n: int, mixing: str = "random") -> int:
    family = Mixing()
    hidden = family.hidden(n)
    return 4 * family.depth * hidden * (9 * family.block_size + (15 if mixing == "random" else 11))


def timed(call: Callable[[], object], times: int) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


@contextmanager
def kernel_clock(lodo: LODO) -> Iterator[list[float]]:
    """Collects the seconds that ``lodo`` spends inside its compiled kernels."""
    spent: list[float] = []
    ready = lodo._network(0).engine._work._ready  # type: ignore[attr-defined]  # it is a FusedMixing
    before = dict(ready)

    def clocked(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: object) -> Any:
            start = time.perf_counter()
            result = call(*arguments)
            spent.append(time.perf_counter() - start)
            return result

        return run

    ready.update({kernel: clocked(call) for kernel, call in before.items()})
    try:
        yield spent
    finally:
        ready.update(before)


def measure(n: int, repeats: int) -> dict[str, float]:
    """Medians of interleaved repeats, in seconds, and what follows from them."""
    rng = torch.Generator().manual_seed(0)
    g = torch.randn(n, generator=rng)
    lodos = {name: LODO([with_gradient(g)], lr=1e-3, **options) for name, options in VARIANTS.items()}
    lodo, adam, plain = lodos["lodo"], torch.optim.Adam([with_gradient(g)]), plain_autograd(n)
    a, b, c = (huge_zeros((TRIAD,), torch.float32).fill_(1.0).numpy() for _ in range(3))  # written: real pages
    small = n < 10_000
    turns: dict[str, tuple[Callable[[], object], int]] = {
        **{name: (made.step, 50 if small else 1) for name, made in lodos.items()},
        "autograd": (lambda: plain.step(lambda x: g @ x), 3 if small else 1),
        "adam": (adam.step, 50 if small else 1),
        "triad": (lambda: _triad(a, b, c, np.float32(1.1)), 1),
    }
    for call, _ in turns.values():
        for _ in range(3):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in track(range(repeats), f"n = {n:,}"):
        for name, (call, times) in turns.items():
            seconds[name].append(timed(call, times))
    result = {name: median(values) for name, values in seconds.items()}
    bandwidth = 12 * TRIAD / result["triad"]
    peak, _ = measure_memory(n, "lodo")
    robust_peak, resting = measure_memory(n, "robust")
    with kernel_clock(lodo) as spent:
        outside = []
        for _ in range(2000 if small else repeats):
            spent.clear()
            outside.append(timed(lodo.step, 1) - sum(spent))
    return {
        "autograd_over_lodo": result["autograd"] / result["lodo"],
        "lodo_over_roofline": result["lodo"] / (roofline_bytes(n) / bandwidth),
        "lodo_over_adam": result["lodo"] / result["adam"],
        "outside_kernels_us": 1e6 * median(outside),
        "bytes_per_parameter": peak,
        "shuffle_over_lodo": result["shuffle"] / result["lodo"],
        "shuffle_over_roofline": result["shuffle"] / (roofline_bytes(n, "shuffle") / bandwidth),
        "robust_over_lodo": result["robust"] / result["lodo"],
        "robust_bytes_per_parameter": robust_peak,
        "robust_resting_bytes_per_parameter": resting,
        "lodo_ms": 1e3 * result["lodo"],
        "bandwidth_gb": bandwidth / 1e9,
    }


def with_gradient(g: torch.Tensor) -> torch.nn.Parameter:
    x = torch.nn.Parameter(torch.zeros_like(g))
    x.grad = g.clone()
    return x


def measure_memory(n: int, variant: str) -> tuple[float, float]:
    """Peak memory of construction and three steps, and what stays then: bytes a parameter, in a process of its own."""
    if not Path("/proc/self/clear_refs").exists() or n < 10_000:
        return float("nan"), float("nan")
    command = [sys.executable, __file__, "--memory", str(n), "--variant", variant]
    peak, resting = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(peak), float(resting)


def print_memory(n: int, variant: str) -> None:
    def rss(key: str) -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

    def train(n: int) -> None:
        x = with_gradient(torch.randn(n))
        before = rss("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        opt = LODO([x], lr=1e-3, **VARIANTS[variant])
        for _ in range(3):
            opt.step()
        if n != warm_up:
            resting = rss("VmRSS")
            peak = max(rss("VmHWM"), resting)  # the kernel notes a new peak a little late
            print((peak - before) / n, (resting - before) / n)

    warm_up = 10_000  # loads Numba, its compiled kernels and its threads
    train(warm_up)
    train(n)


def verdict(key: str, n: int, value: float) -> str:
    """The value, green where it meets its target and red where it does not."""
    if value != value:
        return "-"
    text = f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
    target = TARGETS.get((key, n))
    if target is None:
        return text
    good = value >= target if key == "autograd" else value <= target
    return f"[{'green' if good else 'red'}]{text}[/] ({'>=' if key == 'autograd' else '<='} {target:g})"


def show(results: dict[int, dict[str, float]]) -> None:
    rows = {
        "autograd": ("speed over plain autograd LODO", "autograd_over_lodo"),
        "roofline": ("time over the memory roofline", "lodo_over_roofline"),
        "adam": ("time over torch.optim.Adam", "lodo_over_adam"),
        "memory": ("peak extra memory, bytes a parameter", "bytes_per_parameter"),
        "outside": ("outside kernels, us a step", "outside_kernels_us"),
        "shuffle": ("shuffle mixing: time over random mixing", "shuffle_over_lodo"),
        "shuffle_roofline": ("shuffle mixing: time over its roofline", "shuffle_over_roofline"),
        "robust": ("robust recipe: time over the paper's", "robust_over_lodo"),
        "robust_memory": ("robust recipe: peak extra memory, bytes a parameter", "robust_bytes_per_parameter"),
        "resting": ("robust recipe: stays between steps, bytes a parameter", "robust_resting_bytes_per_parameter"),
    }
    table = Table(title="LODO, float32, with targets in brackets")
    table.add_column("figure")
    for n in results:
        table.add_column(f"n = {n:,}", justify="right")
    for key, (label, field) in rows.items():
        table.add_row(label, *(verdict(key, n, result[field]) for n, result in results.items()))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="numbers of parameters")
    parser.add_argument("--repeats", type=int, default=None, help="interleaved repeats (15, or 7 from a million on)")
    parser.add_argument("--quick", action="store_true", help="n = 100 and 94,696 with 7 repeats")
    parser.add_argument("--out", type=Path, default=Path("results/bench.json"), help="where the JSON goes")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=tuple(VARIANTS), default="lodo", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print_memory(options.memory, options.variant)
        return
    sizes = options.sizes or (SIZES[:2] if options.quick else SIZES)
    results = {}
    for n in sizes:
        repeats = options.repeats or (7 if options.quick or n >= 1_000_000 else 15)
        results[n] = measure(n, repeats)
    show(results)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
