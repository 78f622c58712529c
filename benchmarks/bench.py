"""How long does a step take, and how much memory? Ratios measured side by side in one run.

    make bench                                     all sizes, about six minutes on two cores
    python benchmarks/bench.py --quick             the two smaller sizes, fewer repeats
    python benchmarks/bench.py --sizes 5000

LODO, LODO with shuffle mixing, with the robust and with the compact recipe, a plain autograd LODO (the tests' oracle),
torch.optim.Adam and a test of the memory bandwidth take turns, and their medians are compared.
The roofline is the time it takes to read and write what a fused step has to (9 passes over theta and 15 over the
hidden vectors, or 11 without indices; docs/algorithm.md counts them) at the bandwidth of `a = b + s c`, which is
measured in the same run.
"""

from __future__ import annotations

import argparse
import math
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

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import oracle
from lodo import LODO, Mixing
from lodo.engines.numba.mixing import NumbaMixing
from lodo.engines.numba.pages import huge_zeros
from lodo.layout import Layout
from measuring import seconds_per_call, with_target, write

SIZES = (100, 94_696, 1_000_000)
TARGETS: dict[tuple[str, int], float] = {  # a lower bound for "autograd", upper bounds for the others
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
    **{("compact", n): 0.6 for n in (94_696, 1_000_000)},
    **{("compact_memory", n): 800 for n in (94_696, 1_000_000)},
    **{("compact_resting", n): 560 for n in (94_696, 1_000_000)},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "lodo": {},
    "shuffle": {"preconditioner": Mixing(mixing="shuffle")},
    "robust": {"recipe": "robust"},
    "compact": {"recipe": "compact"},
}
TRIAD = 24_000_000  # numbers in each of the three arrays of the bandwidth test
SMALL = 10_000  # below this size a step is too short to be timed alone, and its memory too little to be measured


def plain_autograd(n: int) -> oracle.AutogradLODO:
    """The straightforward implementation: differentiate the loss through the last step."""
    family, layout, rng = Mixing(), Layout.flat(n), torch.Generator().manual_seed(0)
    G = oracle.mixing(list(family.permutations(family.fixed(layout, rng), layout)))
    theta = torch.empty(family.shape(layout))
    family.init(theta, layout, rng)
    return oracle.AutogradLODO(torch.zeros(n), G, theta, lr=1e-3, meta_lr=1e-3, beta=0.9)


@njit(parallel=True, fastmath=True)
def _triad(a: Any, b: Any, c: Any, s: Any) -> None:
    for i in prange(a.size):
        a[i] = b[i] + s * c[i]


def roofline_bytes(n: int, mixing: str = "random") -> int:
    family = Mixing()
    hidden = family.hidden(n)
    return 4 * family.depth * hidden * (9 * family.block_size + (15 if mixing == "random" else 11))


@contextmanager
def kernel_clock(lodo: LODO) -> Iterator[list[float]]:
    """Collect the seconds that ``lodo`` spends in each call of its compiled kernels."""
    spent: list[float] = []
    engine = lodo._groups[0].ready(lodo.param_groups[0]).engine
    assert isinstance(engine, NumbaMixing)
    assert engine._work is not None
    known = engine._work.run._known
    before = dict(known)

    def clocked(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: object) -> Any:
            start = time.perf_counter()
            result = call(*arguments)
            spent.append(time.perf_counter() - start)
            return result

        return run

    known.update({kernel: clocked(call) for kernel, call in before.items()})
    try:
        yield spent
    finally:
        known.update(before)


def measure(n: int, repeats: int) -> dict[str, float]:
    """The ratios for n parameters, and some of the times they are made of."""
    g = torch.randn(n, generator=torch.Generator().manual_seed(0))
    # The gradient never changes, so a network that learned from it would grow without end: it learns next to nothing.
    lodos = {name: LODO([with_gradient(g)], lr=1e-3, meta_lr=1e-12, **options) for name, options in VARIANTS.items()}
    seconds = interleaved(contenders(lodos, g), repeats, f"n = {n:,}")
    bandwidth = 12 * TRIAD / seconds["triad"]
    peak, _ = measure_memory(n, "lodo")
    robust_peak, resting = measure_memory(n, "robust")
    compact_peak, compact_resting = measure_memory(n, "compact")
    outside = outside_kernels(lodos["lodo"], 2000 if n < SMALL else repeats)
    return {
        "autograd_over_lodo": seconds["autograd"] / seconds["lodo"],
        "lodo_over_roofline": seconds["lodo"] / (roofline_bytes(n) / bandwidth),
        "lodo_over_adam": seconds["lodo"] / seconds["adam"],
        "outside_kernels_us": 1e6 * outside,
        "bytes_per_parameter": peak,
        "shuffle_over_lodo": seconds["shuffle"] / seconds["lodo"],
        "shuffle_over_roofline": seconds["shuffle"] / (roofline_bytes(n, "shuffle") / bandwidth),
        "robust_over_lodo": seconds["robust"] / seconds["lodo"],
        "robust_bytes_per_parameter": robust_peak,
        "robust_resting_bytes_per_parameter": resting,
        "compact_over_robust": seconds["compact"] / seconds["robust"],
        "compact_bytes_per_parameter": compact_peak,
        "compact_resting_bytes_per_parameter": compact_resting,
        "lodo_ms": 1e3 * seconds["lodo"],
        "bandwidth_gb": bandwidth / 1e9,
    }


Contenders = dict[str, tuple[Callable[[], object], int]]  # what is timed, and how often in a row


def contenders(lodos: dict[str, LODO], g: torch.Tensor) -> Contenders:
    """A step of each optimizer with the gradient g, and the bandwidth test."""
    n, small = len(g), len(g) < SMALL
    adam, plain = torch.optim.Adam([with_gradient(g)]), plain_autograd(n)
    a, b, c = (huge_zeros((TRIAD,), torch.float32).fill_(1.0).numpy() for _ in range(3))  # filled: pages are real
    return {
        **{name: (lodo.step, 50 if small else 1) for name, lodo in lodos.items()},
        "autograd": (lambda: plain.step(lambda x: g @ x), 3 if small else 1),
        "adam": (adam.step, 50 if small else 1),
        "triad": (lambda: _triad(a, b, c, np.float32(1.1)), 1),
    }


def interleaved(calls: Contenders, repeats: int, title: str) -> dict[str, float]:
    """The median time of each, in seconds; they take turns, so that a disturbance hits all of them."""
    for call, _ in calls.values():
        for _ in range(3):  # warm up
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in track(range(repeats), title):
        for name, (call, times) in calls.items():
            seconds[name].append(seconds_per_call(call, times))
    return {name: median(values) for name, values in seconds.items()}


def outside_kernels(lodo: LODO, steps: int) -> float:
    """The median time of a step without its compiled kernels, in seconds."""
    outside = []
    with kernel_clock(lodo) as spent:
        for _ in range(steps):
            spent.clear()
            whole = seconds_per_call(lodo.step)
            outside.append(whole - sum(spent))
    return median(outside)


def with_gradient(g: torch.Tensor) -> torch.nn.Parameter:
    x = torch.nn.Parameter(torch.zeros_like(g))
    x.grad = g.clone()
    return x


def measure_memory(n: int, variant: str) -> tuple[float, float]:
    """Bytes per parameter at the peak of construction and three steps, and after them; measured in a fresh process."""
    if not Path("/proc/self/clear_refs").exists() or n < SMALL:
        return float("nan"), float("nan")
    command = [sys.executable, __file__, "--memory", str(n), "--variant", variant]
    peak, resting = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(peak), float(resting)


def print_memory(n: int, variant: str) -> None:
    """In the fresh process: print the two figures of `measure_memory`."""
    extra_memory(SMALL, variant)  # loads Numba, its compiled kernels and its threads
    peak, resting = extra_memory(n, variant)
    print(peak / n, resting / n)


def extra_memory(n: int, variant: str) -> tuple[int, int]:
    """The bytes that an optimizer of n parameters adds to this process, at their peak and after three steps."""
    x = with_gradient(torch.randn(n))
    before = process_memory("Rss")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    opt = LODO([x], lr=1e-3, meta_lr=1e-12, **VARIANTS[variant])
    for _ in range(3):
        opt.step()
    resting = process_memory("Rss")
    peak = max(process_memory("VmHWM"), resting)  # Linux records a new peak with a little delay
    return peak - before, resting - process_memory("LazyFree") - before


def process_memory(key: str) -> int:
    """What Linux reports, in bytes: Rss now, LazyFree of it what anybody may take, VmHWM at the peak."""
    lines = "".join(Path(f"/proc/self/{name}").read_text() for name in ("status", "smaps_rollup")).splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def verdict(key: str, n: int, value: float) -> str:
    """The value and its target, or a dash for a value that was not measured."""
    if math.isnan(value):
        return "-"
    if value >= 100:
        text = f"{value:,.0f}"
    elif value >= 10:
        text = f"{value:.1f}"
    else:
        text = f"{value:.2f}"
    return with_target(text, value, TARGETS.get((key, n)), at_least=key == "autograd")


def show(results: dict[int, dict[str, float]]) -> None:
    rows = {
        "autograd": ("speed over plain autograd LODO", "autograd_over_lodo"),
        "roofline": ("time over the memory roofline", "lodo_over_roofline"),
        "adam": ("time over torch.optim.Adam", "lodo_over_adam"),
        "memory": ("peak extra memory, bytes per parameter", "bytes_per_parameter"),
        "outside": ("outside the kernels, us per step", "outside_kernels_us"),
        "shuffle": ("shuffle mixing: time over random mixing", "shuffle_over_lodo"),
        "shuffle_roofline": ("shuffle mixing: time over its roofline", "shuffle_over_roofline"),
        "robust": ("robust recipe: time over the paper's", "robust_over_lodo"),
        "robust_memory": ("robust recipe: peak extra memory, bytes per parameter", "robust_bytes_per_parameter"),
        "resting": (
            "robust recipe: extra memory between steps, bytes per parameter",
            "robust_resting_bytes_per_parameter",
        ),
        "compact": ("compact recipe: time over the robust one's", "compact_over_robust"),
        "compact_memory": ("compact recipe: peak extra memory, bytes per parameter", "compact_bytes_per_parameter"),
        "compact_resting": (
            "compact recipe: extra memory between steps, bytes per parameter",
            "compact_resting_bytes_per_parameter",
        ),
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
    parser.add_argument(
        "--repeats", type=int, default=None, help="interleaved repeats (default 15, or 7 from a million on)"
    )
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
    write(options.out, {"machine": machine, "results": results})


if __name__ == "__main__":
    main()
