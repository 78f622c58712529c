"""KronLODO in the Trainer of Transformers.

Run `python examples/transformers_trainer.py`; add `--resume` to continue a run. With `optimizer_cls_and_kwargs` the
Trainer constructs KronLODO itself, with one group for weights with decay and one for the rest, and its checkpoints
contain its state. The model is a tiny GPT-2 that learns to count; it is trained from scratch, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from lodo import KronLODO


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of consecutive digits, such as 7 8 9 0 1 2 3 4."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) + i) % 10
        return {"input_ids": tokens, "labels": tokens}


def train(
    steps: int,
    folder: Path,
    save_every: int = 10,
    resume: bool = False,
    warmup: int = 2,
    optimizer: tuple[Any, dict[str, Any]] = (KronLODO, {"lr": 3e-3}),
) -> Trainer:
    """Train for ``steps`` in total; with ``resume``, continue from the last checkpoint in ``folder``."""
    set_seed(0)
    config = GPT2Config(vocab_size=10, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=optimizer[1]["lr"],
        weight_decay=0.01,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=warmup,
        save_steps=save_every,
        logging_steps=save_every,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=Counting(),
        optimizer_cls_and_kwargs=optimizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("results/transformers"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    done = train(options.steps, options.folder, resume=options.resume)
    print(f"loss {done.state.log_history[-1]['train_loss']:.4f}, checkpoints in {options.folder}")
