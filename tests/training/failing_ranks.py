"""Ranks that die: `python failing_ranks.py FOLDER HOW` starts two, of which the second dies or stops in the way named.

The first writes what it hears of that to FOLDER/HOW.txt.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kron_ranks import SMALL, network, train
from ranks import rank
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from lodo import KronLODO

SECONDS = 8  # the process group's time-out


class Killed(dcp.FileSystemWriter):
    """Writes checkpoints, but the second rank is killed in the middle of it."""

    def write_data(self, plan, planner):
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)


def main(folder: Path, how: str) -> None:
    store = dist.FileStore(str(folder / f"{how} store"), 2)
    number = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=SECONDS))
    model = network()
    opt = KronLODO(model.parameters(), **SMALL, distribute=True)
    train(model, opt, range(3))
    try:
        if how == "checkpoint":
            for name, writer in (("old", dcp.FileSystemWriter), ("new", Killed)):
                state = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
                dcp.save(state, storage_writer=writer(folder / name))
                train(model, opt, range(3, 4))
        if number == 1:
            if how == "exit":
                os._exit(1)
            time.sleep(60)
        train(model, opt, range(3, 4))
    except Exception as error:
        (folder / f"{how}.txt").write_text(f"{type(error).__name__}: {error}")
        os._exit(0)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for place in (1, 0):
        os.environ["RANK"] = str(place)
        child = os.fork()
        if child == 0:
            main(Path(sys.argv[1]), sys.argv[2])
            os._exit(0)
        if place == 1:
            second = child
    os.waitpid(child, 0)
    os.kill(second, signal.SIGKILL)  # it may still be asleep
    os.waitpid(second, 0)
