"""Monitor KronLODO or LODO in TensorBoard.

Run `python examples/tensorboard_diagnostics.py`, then `tensorboard --logdir results/tensorboard`. `opt.diagnostics()`
returns a flat dict of numbers. W&B accepts the same dict: `wandb.log(opt.diagnostics(), step=t)`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from lodo import LODO, KronLODO


def train(
    steps: int, folder: Path, every: int = 10, make: Callable[..., KronLODO | LODO] = KronLODO
) -> dict[str, float]:
    """Train for ``steps``, log after every ``every`` of them, and return the last numbers logged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = make(model.named_parameters(), nonfinite="skip")
    numbers = opt.diagnostics()
    with SummaryWriter(str(folder)) as writer:
        for t in range(1, steps + 1):
            x = torch.randn(64, 4)
            loss = (model(x) - torch.sin(x).sum(1, keepdim=True)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            if t % every == 0:
                numbers = {"loss": float(loss.detach()), **opt.diagnostics()}
                for name, value in numbers.items():
                    writer.add_scalar(name, value, t)
    return numbers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path("results/tensorboard"))
    options = parser.parse_args()
    for name, value in train(options.steps, options.folder).items():
        print(f"{name:32} {value:.4g}")
