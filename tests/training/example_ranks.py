"""Train with an example, stop, resume and compare: `torchrun --nproc-per-node 2 example_ranks.py EXAMPLE FOLDER`."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import gathered, whole

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
warnings.simplefilter("ignore")  # the frameworks' own


def accelerate_divided(folder: Path) -> list[torch.nn.Module]:
    from accelerate_divided import train

    straight, loss = train(4, folder / "straight")
    half, before = train(2, folder / "resumed")
    resumed, again = train(4, folder / "resumed", resume=True)
    assert again == loss < before
    return [straight, resumed, half]


def lightning_fsdp2(folder: Path) -> list[torch.nn.Module]:
    from lightning_fsdp2 import train

    straight = train(4, folder / "straight")
    half = train(2, folder / "resumed")
    resumed = train(4, folder / "resumed", resume=True)
    assert straight.trainer.global_step == resumed.trainer.global_step == 8
    assert all(hasattr(p, "device_mesh") for p in resumed.parameters())
    return [straight, resumed, half]


def transformers_ranks(folder: Path) -> list[torch.nn.Module]:
    from transformers_ranks import train

    straight = train(6, folder / "straight", save_every=3)
    half = train(3, folder / "resumed", save_every=3)
    resumed = train(6, folder / "resumed", save_every=3, resume=True)
    assert resumed.optimizer.optimizer.param_groups[0]["steps"] == 6
    return [straight.model, resumed.model, half.model]


if __name__ == "__main__":
    torch.set_num_threads(1)
    straight, resumed, half = map(whole, globals()[sys.argv[1]](Path(sys.argv[2])))
    assert dist.get_world_size() == 2
    assert all(map(torch.equal, straight, resumed))
    assert not all(map(torch.equal, half, resumed))
    for x in resumed:
        assert all(torch.equal(x, other) for other in gathered(x))
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo may still let go of tensors, which aborts a process whose interpreter is ending
