"""What does LODO cost when it trains a real network? Ratios measured side by side in one run.

    make bench                                          together with the others
    python benchmarks/networks.py --quick               smaller batches, and ResNet-8 instead of ResNet-18

Each optimizer in turn trains the paper's two networks for some steps. A step consists of the network's part, which is
the same for every optimizer, and of `Optimizer.step`; the medians of the two are added, so that other load on the
machine does not decide a ratio. The images are random, since the time of a step does not depend on them. For
ResNet-18 LODO would need 22 GB, so it recomputes its activations there. "LODO, shuffle" is the paper's algorithm with
shuffles instead of random permutations and moments in bfloat16, as is advised for networks of this size.
"""

from __future__ import annotations

import argparse
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
from measuring import seconds_per_call, with_target, write

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-4),
    "LODO": lambda params: LODO(params, lr=1e-4, meta_lr=1e-5, save_activations=count_weights(params) < 5_000_000),
    "LODO, shuffle": lambda params: LODO(
        params,
        lr=1e-4,
        meta_lr=1e-5,
        preconditioner="mixing(mixing='shuffle')",
        meta_optimizer="adam(moment_dtype='bfloat16')",
    ),
    "LODO, robust": lambda params: LODO(params, lr=1e-4, meta_lr=1e-5, recipe="robust"),
    "LODO, compact": lambda params: LODO(params, lr=1e-4, meta_lr=1e-5, recipe="compact"),
}
TARGETS = {"image generation": 0.95, "resnet18": 0.60}  # steps per second, LODO over Adam
COMPACT = {"resnet18": 0.75}  # the same for the compact recipe
PAPER = {"image generation": 5.64 / 7.08, "resnet18": 0.0316 / 0.0793}


def count_weights(params: list[torch.nn.Parameter]) -> int:
    return sum(p.numel() for p in params)


def generator(batch: int, fused: bool = True) -> Task:
    """Image generation on random images of MNIST's size."""
    with data.using("digits"):
        task = Mnist(0, batch=batch, fused=fused)
    task.train = torch.randint(256, (len(task.train), 28, 28), dtype=torch.uint8)
    return task


def classifier(model: str, batch: int) -> Task:
    """Classification of random images of CIFAR-10's size."""
    with data.using("digits"):
        task = Cifar10(0, model=model, batch=batch)
    size = len(task.train[0])
    task.train = (torch.randint(256, (size, 3, 32, 32), dtype=torch.uint8), task.train[1])
    task.padding = 4
    return task


def parts_of_a_step(name: str, task: Task, repeats: int, number: int | None) -> dict[str, float]:
    """Median seconds of the network's part of a step and of each optimizer's; one optimizer at a time in memory."""
    network: list[float] = []
    parts: dict[str, float] = {}
    with threads(number):
        task.evaluate()
        for label, make in OPTIMIZERS.items():
            optimizer = make(task.params)
            steps: list[float] = []
            for repeat in track(range(repeats + 1), f"{name}, {label}"):
                task.draw()
                evaluation, step = seconds_per_call(task.evaluate), seconds_per_call(optimizer.step)
                if repeat > 0:  # the first step compiles and allocates
                    network.append(evaluation)
                    steps.append(step)
            parts[label] = median(steps)
            del optimizer
    return {"network": median(network), **parts}


def gain_by_fusion(batch: int, repeats: int) -> float:
    """How many times as fast the image generator is on fused kernels as on torch's convolutions, on one thread."""
    fused, plain = generator(batch, fused=True), generator(batch, fused=False)
    fused_seconds, plain_seconds = [], []
    with threads(1):
        for repeat in track(range(repeats + 1), "image generation, fused or not"):
            on_fused, on_plain = seconds_per_call(fused.evaluate), seconds_per_call(plain.evaluate)
            if repeat > 0:  # the first one compiles
                fused_seconds.append(on_fused)
                plain_seconds.append(on_plain)
    return median(plain_seconds) / median(fused_seconds)


def speeds(parts: dict[str, float]) -> dict[str, float]:
    """Steps per second of each optimizer over Adam's."""
    adam = parts["network"] + parts["Adam"]
    return {name: adam / (parts["network"] + parts[name]) for name in OPTIMIZERS}


def show(measured: dict[str, dict[str, float]], batch: int, targets: dict[str, float]) -> None:
    table = Table(title=f"Steps per second over Adam's, batch {batch}, with targets in brackets")
    for column in ("network", "optimizer", "ours", "the paper's", "optimizer's share of a step"):
        table.add_column(column, justify="left" if column in ("network", "optimizer") else "right")
    for network, parts in measured.items():
        for name, speed in speeds(parts).items():
            target = targets.get(network) if name in ("LODO", "LODO, shuffle") else None
            if targets and name == "LODO, compact":
                target = COMPACT.get(network)
            ours = with_target(f"{speed:.3f}", speed, target, at_least=True)
            paper = f"{PAPER[network]:.2f}" if name == "LODO" and network in PAPER else ""
            share = parts[name] / (parts["network"] + parts[name])
            table.add_row(network, name, ours, paper, f"{share:.1%}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batches of 32 images, ResNet-8, few repeats")
    parser.add_argument("--only", choices=("generation", "resnet"), help="one of the two networks")
    parser.add_argument("--repeats", type=int, help="steps that are timed (15 for image generation, 4 for ResNet-18)")
    parser.add_argument("--out", type=Path, default=Path("results/bench-networks.json"), help="where the JSON goes")
    options = parser.parse_args()
    batch, model = (32, "resnet8") if options.quick else (256, "resnet18")
    measured: dict[str, dict[str, float]] = {}
    gain = None
    if options.only != "resnet":
        repeats = options.repeats or (5 if options.quick else 15)
        gain = gain_by_fusion(batch, max(1, repeats // 3))
        measured["image generation"] = parts_of_a_step("image generation", generator(batch), repeats, 1)
    if options.only != "generation":
        measured[model] = parts_of_a_step(model, classifier(model, batch), options.repeats or 4, None)
    show(measured, batch, targets={} if options.quick else TARGETS)
    if gain is not None:
        print(f"Image generation runs {gain:.1f} times as fast on fused kernels as on torch's convolutions.")
    ratios = {network: speeds(parts) for network, parts in measured.items()}
    write(
        options.out,
        {"batch": batch, "fused_gain": gain, "seconds": measured, "steps_a_second_over_adam": ratios},
    )


if __name__ == "__main__":
    main()
