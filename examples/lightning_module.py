"""KronLODO in a LightningModule.

Run `python examples/lightning_module.py`; add `--resume` to continue a run. `configure_optimizers` returns KronLODO
like any other optimizer, and Lightning's checkpoints contain its state.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lodo import KronLODO


class Sines(lightning.LightningModule):
    """Learns sin(x_1) + ... + sin(x_4)."""

    def __init__(self, make: Callable[..., Optimizer] = KronLODO) -> None:
        super().__init__()
        self.make = make
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        opt = self.make(self.parameters())
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.99)}


def train(epochs: int, folder: Path, resume: bool = False, make: Callable[..., Optimizer] = KronLODO) -> Sines:
    """Train for ``epochs`` in total; with ``resume``, continue from the last checkpoint."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(256, 4)
    data = DataLoader(TensorDataset(x, torch.sin(x).sum(1, keepdim=True)), batch_size=128)
    module = Sines(make)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, data, ckpt_path=folder / "last.ckpt" if resume else None, weights_only=True)
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("results/lightning"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    trained = train(options.epochs, options.folder, options.resume)
    print(f"loss {trained.trainer.callback_metrics['loss']:.4f}, checkpoint in {options.folder}")
