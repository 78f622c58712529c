"""KronLODO in a custom training loop with Accelerate.

Run `python examples/accelerate_loop.py`; add `--resume` to continue a run. `prepare` wraps KronLODO like any
other optimizer, including gradient accumulation and clipping, and `save_state` saves its state. With `accelerate
launch` the same file trains on several processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lodo import KronLODO


def train(
    epochs: int, folder: Path, resume: bool = False, make: Callable[..., Optimizer] = KronLODO
) -> tuple[nn.Module, float]:
    """Train for ``epochs`` in total and return the model and its last loss.

    With ``resume``, continue from the state saved in ``folder``.
    """
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    x = torch.randn(256, 4)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.5, total_iters=5)
    data = DataLoader(TensorDataset(x, torch.sin(x).sum(1, keepdim=True)), batch_size=64)
    model, opt, data, schedule = accelerator.prepare(model, opt, data, schedule)
    start = 0
    if resume:
        accelerator.load_state(str(folder))
        start = int((folder / "epoch.txt").read_text())
    for _ in range(start, epochs):
        for inputs, targets in data:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                schedule.step()
                opt.zero_grad()
    accelerator.save_state(str(folder))
    (folder / "epoch.txt").write_text(str(epochs))
    return accelerator.unwrap_model(model), float(loss.detach())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("results/accelerate"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    _, last = train(options.epochs, options.folder, options.resume)
    print(f"loss {last:.4f}, state in {options.folder}")
