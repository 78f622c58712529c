"""LODO against Adam on the paper's noisy quadratic bowl, with the paper's tuned hyperparameters.

    make demo
    python demo/bowl.py --steps 20000 --seeds 1

The minimum of a quadratic bowl (n = 100, curvatures from 0.001 to 1) moves by Gaussian noise before every
gradient; the tracking error is the mean loss over the last 10 % of the run. Newton's method, which knows the
Hessian, reaches 7.41.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

from lodo import LODO

N = 100
CURVATURES = torch.logspace(-3, 0, N, dtype=torch.float64)  # the paper's appendix, "Noisy Quadratic Bowl"
NEWTON = 0.5 * float(CURVATURES.sum())  # the loss that the noise alone adds in one step
# The paper's tables of tuned hyperparameters and of tracking errors at 100k steps.
RIVALS: dict[str, Callable[[list[Tensor], int], Optimizer]] = {
    "LODO": lambda params, seed: LODO(params, lr=0.270, meta_lr=0.00096, beta=0.195, seed=seed),
    "Adam": lambda params, seed: torch.optim.Adam(params, lr=1.164, betas=(0.465, 0.9884), eps=1e-7),
}
PAPER = {"LODO": 8.99, "Adam": 15.28}
COLOURS = {"LODO": "#0072b2", "Adam": "#e69f00"}  # Okabe-Ito, told apart by colour-blind readers


def losses(name: str, seed: int, steps: int) -> Iterator[float]:
    """The loss at every step of one run."""
    rng = torch.Generator().manual_seed(seed)
    U = torch.linalg.qr(torch.randn(N, N, generator=rng, dtype=torch.float64))[0]
    H = ((U * CURVATURES) @ U.T).float()
    x, centre = torch.nn.Parameter(torch.zeros(N)), torch.zeros(N)
    opt = RIVALS[name]([x], seed)
    for _ in range(steps):
        centre += torch.randn(N, generator=rng)
        away = x.detach() - centre
        x.grad = H @ away
        yield 0.5 * float(away @ x.grad)
        opt.step()


def tracking_error(curve: np.ndarray) -> float:
    """The paper's figure: the mean loss over the last 10 %."""
    return float(curve[-len(curve) // 10 :].mean())


def run_all(steps: int, seeds: int) -> dict[str, list[np.ndarray]]:
    curves: dict[str, list[np.ndarray]] = {}
    with Progress() as progress:
        for name in RIVALS:
            task = progress.add_task(name, total=steps * seeds)
            for seed in range(seeds):
                curve = np.empty(steps)
                for t, loss in enumerate(losses(name, seed, steps)):
                    curve[t] = loss
                    if t % 500 == 499:
                        progress.advance(task, 500)
                curves.setdefault(name, []).append(curve)
            progress.update(task, completed=steps * seeds)
    return curves


def draw(curves: dict[str, list[np.ndarray]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, runs in curves.items():
        window = max(1, len(runs[0]) // 100)
        whole = len(runs[0]) // window * window
        smooth = np.stack([run[:whole].reshape(-1, window).mean(1) for run in runs])
        at, middle = np.arange(1, smooth.shape[1] + 1) * window, smooth.mean(0)
        axes.plot(at, middle, color=COLOURS[name], label=name)
        if len(runs) > 1:
            spread = smooth.std(0, ddof=1)
            axes.fill_between(at, middle - spread, middle + spread, color=COLOURS[name], alpha=0.25, lw=0)
    axes.axhline(NEWTON, color="black", ls=":", label=f"Newton's method ({NEWTON:.2f})")
    axes.set(xlabel="step", ylabel="loss (mean over 1 % of the run)", title="Noisy quadratic bowl, n = 100")
    axes.set_ylim(0, 2 * max(tracking_error(run) for runs in curves.values() for run in runs))
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="steps a run (the paper: 100,000)")
    parser.add_argument("--seeds", type=int, default=3, help="runs for each optimizer (the paper: 8)")
    parser.add_argument("--out", type=Path, default=Path("results/demo"), help="folder for the figure and the numbers")
    options = parser.parse_args()
    if options.steps < 10 or options.seeds < 1:
        parser.error(f"--steps must be >= 10 and --seeds >= 1, got {options.steps} and {options.seeds}")

    curves = run_all(options.steps, options.seeds)
    table = Table(title=f"Tracking error, {options.steps:,} steps, {options.seeds} seeds")
    for column in ("optimizer", "ours", "paper (100k steps)", "difference"):
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    rows = {}
    for name, runs in curves.items():
        errors = [tracking_error(run) for run in runs]
        middle, spread = mean(errors), stdev(errors) if len(errors) > 1 else float("nan")
        rows[name] = {"mean": middle, "std": spread if spread == spread else None, "paper": PAPER[name]}
        ours = f"{middle:.2f}" + (f" ± {spread:.2f}" if spread == spread else "")
        table.add_row(name, ours, f"{PAPER[name]:.2f}", f"{middle - PAPER[name]:+.2f}")
    table.add_row("Newton's method", f"{NEWTON:.2f}", "7.41", "")
    Console().print(table)

    options.out.mkdir(parents=True, exist_ok=True)
    draw(curves, options.out / "bowl.png")
    summary = {"steps": options.steps, "seeds": options.seeds, "newton": NEWTON, "rows": rows}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    average = {name: mean(map(tracking_error, runs)) for name, runs in curves.items()}
    ratio = average["Adam"] / average["LODO"]
    print(f"figure: {options.out / 'bowl.png'}")
    print(f"Adam's error is {ratio:.2f} times LODO's: LODO has learned the bowl's curvature while tracking it.")


if __name__ == "__main__":
    main()
