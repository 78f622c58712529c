"""KronLODO in a custom training loop with Accelerate, its work divided between processes.

Run `torchrun --nproc-per-node 2 examples/accelerate_divided.py`; add `--resume` to continue a run. Accelerate uses DDP
on CPUs: every process has the whole model, and with `distribute=True` each holds and computes its share of KronLODO.
`save_state` saves all of it, for any number of processes. On GPUs, an Accelerator with an FSDP2 plugin shards the model
as well, and nothing else changes: KronLODO follows the parameters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lodo import KronLODO


def train(epochs: int, folder: Path, resume: bool = False) -> tuple[nn.Module, float]:
    """Train for ``epochs`` in total and return the model and its last loss.

    With ``resume``, continue from the state saved in ``folder``.
    """
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(256, 4)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = KronLODO(model.parameters(), distribute=True)
    data = DataLoader(TensorDataset(x, torch.sin(x).sum(1, keepdim=True)), batch_size=32)
    model, opt, data = accelerator.prepare(model, opt, data)
    start = 0
    if resume:
        accelerator.load_state(str(folder))
        start = int((folder / "epoch.txt").read_text())
    for _ in range(start, epochs):
        for inputs, targets in data:
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    accelerator.save_state(str(folder))  # on every process: each has a part of the state
    (folder / "epoch.txt").write_text(str(epochs))
    accelerator.wait_for_everyone()
    return accelerator.unwrap_model(model), float(accelerator.reduce(loss.detach(), "mean"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("results/accelerate_divided"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    _, last = train(options.epochs, options.folder, options.resume)
    print(f"loss {last:.4f}, state in {options.folder}")
