"""KronLODO in Lightning with FSDP2, on two processes.

Run `python examples/lightning_fsdp2.py`, which starts both; add `--resume` to continue a run. `configure_model` shards
the network, `configure_optimizers` returns KronLODO, and Lightning's distributed checkpoints contain its state, which
fits any number of processes. Lightning's older `FSDPStrategy` needs a GPU; `ModelParallelStrategy` runs on CPUs too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lodo import KronLODO


class Sines(lightning.LightningModule):
    """Learns sin(x_1) + ... + sin(x_4)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 1))

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        loss: Tensor = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> KronLODO:
        return KronLODO(self.parameters())


def train(epochs: int, folder: Path, resume: bool = False) -> Sines:
    """Train for ``epochs`` in total; with ``resume``, continue from the last checkpoint."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(256, 4)
    data = DataLoader(TensorDataset(x, torch.sin(x).sum(1, keepdim=True)), batch_size=64)
    module = Sines()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        default_root_dir=folder,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = max(folder.glob("epoch=*.ckpt"), key=lambda path: path.stat().st_mtime) if resume else None
    trainer.fit(module, data, ckpt_path=last, weights_only=True)
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("results/lightning_fsdp2"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    trained = train(options.epochs, options.folder, options.resume)
    if trained.global_rank == 0:
        print(f"loss {trained.trainer.callback_metrics['loss']:.4f}, checkpoints in {options.folder}")
