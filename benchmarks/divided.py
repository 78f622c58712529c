"""What does dividing KronLODO's work between processes save, and what does it send? Ratios measured in one run.

    python benchmarks/divided.py                  about two minutes on two cores
    python benchmarks/divided.py --quick          a smaller transformer, fewer repeats

Two gloo processes of one thread each step on a character GPT of 3.2 million weights, in turn: undivided, as under DDP;
divided (`distribute=True`); and sharded by FSDP2. A turn is ten steps, so that bases are refreshed once in each. The
gradients are there already; what is timed is the step with all its messages. Targets are in brackets.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kron import CharacterGPT
from lodo import KronLODO
from measuring import seconds_per_call, with_target, write

STEPS = 10
TARGETS = {
    "divided_step": 0.65,
    "divided_bytes": 2.1,
    "sharded_bytes": 2.1,
    "divided_state": 0.55,
    "sharded_state": 0.55,
}
LABELS = {
    "divided_step": "a divided step, over an undivided one",
    "sharded_step": "a step under FSDP2, over an undivided one",
    "divided_bytes": "bytes sent by a divided step, over those of DDP's reduction of the gradients",
    "sharded_bytes": "bytes sent by a step under FSDP2, over those of its reduction of the gradients",
    "divided_state": "state of the fuller rank, divided, over that of a single process",
    "sharded_state": "the same under FSDP2",
}


class Counter:
    """Counts the bytes that this rank sends to others in all-to-all messages."""

    def __init__(self) -> None:
        self.bytes = 0
        self._original = dist.all_to_all_single
        dist.all_to_all_single = self._send  # type: ignore[assignment]

    def _send(self, received: Any, sent: Any, coming: list[int], going: list[int], **rest: Any) -> Any:
        self.bytes += sum(going) - going[dist.get_rank()]
        return self._original(received, sent, coming, going, **rest)


def state_size(opt: KronLODO) -> int:
    """The bytes of the state on this rank."""
    tensors = [x for state in opt.state.values() for x in state.values() if x.dim() and any(x.stride())]
    return sum(x.numel() * x.element_size() for x in tensors)


def with_gradients(model: nn.Module) -> nn.Module:
    """The model with a random gradient, the same on both ranks."""
    rng = torch.Generator().manual_seed(0)
    for p in model.parameters():
        g = torch.randn(p.shape, generator=rng)
        if isinstance(p, DTensor):
            rows = g.chunk(dist.get_world_size())
            part = rows[dist.get_rank()] if dist.get_rank() < len(rows) else g[:0]
            p.grad = DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        else:
            p.grad = g
    return model


def on_rank(rank: int, width: int, repeats: int, folder: str) -> None:
    """Both ranks take every turn at the same time, and rank 0 writes the ratios."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    counter = Counter()
    models = {name: CharacterGPT(width) for name in ("undivided", "divided", "sharded")}
    fully_shard(models["sharded"], mesh=init_device_mesh("cpu", (2,)))
    opts = {
        name: KronLODO(with_gradients(model).parameters(), distribute=name == "divided")
        for name, model in models.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in opts}
    sent: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, opt in opts.items():
            counter.bytes = 0
            dist.barrier()
            spent = seconds_per_call(opt.step, STEPS)
            dist.barrier()
            sent[name] = counter.bytes // STEPS
            if repeat:  # warmed up
                seconds[name].append(spent)
    weights = sum(p.numel() for p in models["undivided"].parameters())
    reduced = {"divided": 4 * weights, "sharded": 2 * weights}  # bytes of an all-reduce and of a reduce-scatter, on two
    found = {"weights": float(weights)}
    for name in ("divided", "sharded"):
        most = torch.tensor([float(sent[name]), float(state_size(opts[name])), median(
            map(truediv, seconds[name], seconds["undivided"])
        )])  # fmt: skip
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[f"{name}_step"] = float(most[2])
        found[f"{name}_bytes"] = float(most[0]) / reduced[name]
        found[f"{name}_state"] = float(most[1]) / state_size(opts["undivided"])
    if rank == 0:
        Path(folder, "ratios.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(width: int, repeats: int) -> dict[str, float]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    fork = multiprocessing.get_context("fork")  # safe: no thread has been started yet
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=on_rank, args=(r, width, repeats, folder)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        ratios: dict[str, float] = json.loads(Path(folder, "ratios.json").read_text())
        return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a width of 64, fewer repeats")
    parser.add_argument("--repeats", type=int, default=None, help="turns of ten steps each")
    parser.add_argument("--out", type=Path, default=Path("results/divided.json"), help="where the JSON goes")
    args = parser.parse_args()
    found = measured(64 if args.quick else 256, args.repeats or (2 if args.quick else 10))
    title = f"KronLODO on two processes, {found['weights'] / 1e6:.1f} million weights"
    table = Table(title=f"{title}: ratios, targets in brackets")
    table.add_column("figure")
    table.add_column("ratio", justify="right")
    for name, label in LABELS.items():
        table.add_row(label, with_target(f"{found[name]:.3f}", found[name], TARGETS.get(name), at_least=False))
    Console().print(table)
    write(args.out, found)


if __name__ == "__main__":
    main()
