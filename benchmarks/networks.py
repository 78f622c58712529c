"""What does LODO cost beside a real network? Ratios measured side by side in one run.

    make bench                                          among the rest
    python benchmarks/networks.py --quick               smaller batches, and ResNet-8 instead of ResNet-18

The paper's two networks are trained for some steps by one optimizer after the other. A step is the network's own part,
which is the same for every optimizer, and `Optimizer.step`; the medians of the two are added, so that a neighbour's
burst does not decide a ratio. Images are random: how long a step takes does not depend on them. LODO itself would take
22 GB for ResNet-18, so that it recomputes its activations there; "LODO, shuffle" is the paper's algorithm with shuffles
instead of random permutations and moments in bfloat16, as is advised for networks of this size.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.optim import Optimizer

from lodo import LODO
from lodo.lab import data
from lodo.lab.run import threads
from lodo.lab.tasks.base import Task
from lodo.lab.tasks.cifar10 import Cifar10
from lodo.lab.tasks.mnist import Mnist

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-4),
    "LODO": lambda params: LODO(params, lr=1e-4, meta_lr=1e-5, save_activations=weights(params) < 5_000_000),
    "LODO, shuffle": lambda params: LODO(params, lr=1e-4, meta_lr=1e-5, mixing="shuffle", moment_dtype=torch.bfloat16),
    "LODO, robust": lambda params: LODO(params, lr=1e-4, meta_lr=1e-5, recipe="robust"),
}
TARGETS = {"image generation": 0.95, "resnet18": 0.60}  # steps a second, LODO over Adam
PAPER = {"image generation": 5.64 / 7.08, "resnet18": 0.0316 / 0.0793}


def weights(params: list[torch.nn.Parameter]) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in params)


def generator(batch: int, fused: bool = True) -> Task:
    """Image generation on images as large as MNIST's."""
    with data.using("digits"):
        task = Mnist(0, batch=batch, fused=fused)
    task.train = torch.randint(256, (len(task.train), 28, 28), dtype=torch.uint8)
    return task


def classifier(model: str, batch: int) -> Task:
    """Classification of images as large as CIFAR-10's."""
    with data.using("digits"):
        task = Cifar10(0, model=model, batch=batch)
    size = len(task.train[0])
    task.train = (torch.randint(256, (size, 3, 32, 32), dtype=torch.uint8), task.train[1])
    task.padding = 4
    return task


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def shares(name: str, task: Task, repeats: int, number: int | None) -> dict[str, float]:
    """Seconds of the network's part of a step, and of each optimizer's, medians; one optimizer at a time in memory."""
    network: list[float] = []
    result: dict[str, float] = {}
    with threads(number):
        task.evaluate()
        for optimizer, make in OPTIMIZERS.items():
            made = make(task.params)
            spent: list[float] = []
            for repeat in track(range(repeats + 1), f"{name}, {optimizer}"):
                task.draw()
                parts = seconds(task.evaluate), seconds(made.step)
                if repeat:  # the first one compiles and allocates
                    network.append(parts[0])
                    spent.append(parts[1])
            result[optimizer] = median(spent)
            del made
    return {"network": median(network), **result}


def fusion(batch: int, repeats: int) -> float:
    """Time of the image generator's part of a step on torch's convolutions over that on fused kernels, one thread."""
    tasks = {fused: generator(batch, fused) for fused in (True, False)}
    spent: dict[bool, list[float]] = {True: [], False: []}
    with threads(1):
        for repeat in track(range(repeats + 1), "image generation, fused or not"):
            for fused, task in tasks.items():
                took = seconds(task.evaluate)
                if repeat:
                    spent[fused].append(took)
    return median(spent[False]) / median(spent[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batches of 32 images, ResNet-8, few repeats")
    parser.add_argument("--only", choices=("generation", "resnet"), help="one of the two networks")
    parser.add_argument("--repeats", type=int, help="interleaved repeats (15 for image generation, 4 for ResNet-18)")
    parser.add_argument("--out", type=Path, default=Path("results/bench-networks.json"), help="where the JSON goes")
    options = parser.parse_args()
    batch, model = (32, "resnet8") if options.quick else (256, "resnet18")
    measured: dict[str, dict[str, float]] = {}
    gain = None
    if options.only != "resnet":
        repeats = options.repeats or (5 if options.quick else 15)
        gain = fusion(batch, max(1, repeats // 3))
        measured["image generation"] = shares("image generation", generator(batch), repeats, 1)
    if options.only != "generation":
        measured[model] = shares(model, classifier(model, batch), options.repeats or 4, None)
    table = Table(title=f"Steps a second over Adam's, batch {batch}, with targets in brackets")
    for column in ("network", "optimizer", "ours", "the paper's", "optimizer's share of a step"):
        table.add_column(column, justify="left" if column in ("network", "optimizer") else "right")
    ratios: dict[str, dict[str, float]] = {}
    for network, parts in measured.items():
        adam = parts["network"] + parts["Adam"]
        ratios[network] = {name: adam / (parts["network"] + parts[name]) for name in OPTIMIZERS}
        for name, ratio in ratios[network].items():
            target = TARGETS.get(network) if name in ("LODO", "LODO, shuffle") and not options.quick else None
            text = f"{ratio:.3f}"
            if target is not None:
                text = f"[{'green' if ratio >= target else 'red'}]{text}[/] (>= {target:.2f})"
            paper = f"{PAPER[network]:.2f}" if name == "LODO" and network in PAPER else ""
            table.add_row(network, name, text, paper, f"{parts[name] / (parts['network'] + parts[name]):.1%}")
    console = Console()
    console.print(table)
    if gain is not None:
        console.print(f"Image generation runs {gain:.1f} times as fast on fused kernels as on torch's convolutions.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"batch": batch, "fused_gain": gain, "seconds": measured, "steps_a_second_over_adam": ratios}
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
