"""Draw the pictures of the documentation: ``python docs/pictures.py`` takes a few seconds."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.progress import track

from lodo import LODO, Mixing
from lodo.lab.show.draw import look, save_svg
from lodo.lab.show.wiring import draw_matrices, draw_network
from lodo.lab.tasks.bowl import Bowl

HOME = Path(__file__).parent / "pictures"
STEPS = (0, 300, 10_000)


def learned(steps: tuple[int, ...] = STEPS) -> tuple[LODO, dict[str, torch.Tensor]]:
    """A small LODO after tracking a noisy bowl, its G after some of the steps, and the inverse Hessian."""
    task = Bowl(0, n=8, condition=20.0)
    family = Mixing(depth=3, block_size=4, width=1.0)
    opt = LODO(task.params, lr=0.5, meta_lr=1e-3, beta=0.2, preconditioner=family, seed=0)
    matrices = {}
    for step in track(range(max(steps) + 1), "learning", transient=True):
        if step in steps:
            matrices["G at the start" if step == 0 else f"after {step:,} steps"] = opt.preconditioner_matrix()
        task.draw()
        opt.step(task.evaluate)
    return opt, {**matrices, "the inverse Hessian": torch.linalg.inv(task.hessian())}


def main() -> None:
    """Draw both pictures."""
    opt, matrices = learned()
    with look():
        save_svg(draw_network(opt), HOME / "network.svg")
        save_svg(draw_matrices(matrices), HOME / "learned.svg")


if __name__ == "__main__":
    main()
