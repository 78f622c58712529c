"""What training with LODO costs beside LODO itself: ratios measured side by side in one run.

    python benchmarks/training.py                  about five minutes on two cores
    python benchmarks/training.py --quick          a smaller model, fewer repeats

DDP: two gloo processes of one thread each step on a model in DDP and on a plain one in turn, after the gradients were
averaged. FSDP2: how many numbers of state a rank holds, over a single process. Diagnostics: ten steps and one call,
over ten steps. Targets are in brackets.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
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
from torch.nn.parallel import DistributedDataParallel

from lodo import LODO

N = 94_696
TARGETS = {"ddp_step_over_plain": 1.05, "fsdp_state_over_single": 0.51, "diagnostics_over_plain": 1.02}
LABELS = {
    "ddp_step_over_plain": "a step under DDP, over a step on plain parameters",
    "ddp_checked_over_plain": "the same with check_sync_every=100, over a hundred steps",
    "fsdp_state_over_single": "state of a rank under FSDP2 with two ranks, over a single process",
    "fsdp_step_over_single": "a step of a rank under FSDP2 with two ranks, over a single process",
    "diagnostics_over_plain": "ten steps and one call of diagnostics, over ten steps",
}


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def rotated(names: list[str], by: int) -> list[str]:
    """Begin with another one each time."""
    return names[by % len(names) :] + names[: by % len(names)]


def model_of(n: int) -> nn.Module:
    """A linear map with about n weights."""
    torch.manual_seed(0)
    side = int(n**0.5)
    return nn.Linear(side, n // side, bias=False)


def held(opt: LODO) -> int:
    """Numbers of state on this rank."""
    return sum(x.numel() for x in opt._state(0).values() if isinstance(x, torch.Tensor))


def on_rank(rank: int, n: int, repeats: int, folder: str) -> None:
    """Both ranks take every turn at the same time; the first one writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    wrapped = DistributedDataParallel(model_of(n))
    plain, checked, sharded = model_of(n), model_of(n), model_of(n)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    models = {"ddp": wrapped, "plain": plain, "checked": checked, "fsdp": sharded}
    opts = {name: LODO(model.parameters(), lr=1e-3) for name, model in models.items()}
    opts["checked"].check_sync_every = 1
    x = torch.randn(4, next(plain.parameters()).shape[1])
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(repeats + 3):
        for name in rotated(list(models), repeat):  # nobody always comes after the same one
            model = models[name]
            opts[name].zero_grad()
            model(x).square().mean().backward()
            dist.barrier()
            spent = timed(opts[name].step)
            if repeat >= 3:
                seconds[name].append(spent)
    if rank == 0:
        over = {name: median(map(truediv, values, seconds["plain"])) for name, values in seconds.items()}
        ratios = {
            "ddp_step_over_plain": over["ddp"],
            "ddp_checked_over_plain": (99 + over["checked"]) / 100,
            "fsdp_state_over_single": held(opts["fsdp"]) / held(opts["plain"]),
            "fsdp_step_over_single": over["fsdp"],
        }
        Path(folder, "ratios.json").write_text(json.dumps(ratios))
    dist.barrier()
    dist.destroy_process_group()


def distributed(n: int, repeats: int) -> dict[str, float]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    fork = multiprocessing.get_context("fork")  # nothing has started a thread yet
    with tempfile.TemporaryDirectory() as folder:
        ranks = [fork.Process(target=on_rank, args=(r, n, repeats, folder)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        ratios: dict[str, float] = json.loads(Path(folder, "ratios.json").read_text())
        return ratios


def diagnostics(n: int, repeats: int) -> dict[str, float]:
    """Sixteen calls, a whole cycle of what they do in turn, over as many rounds without."""
    g = torch.randn(n, generator=torch.Generator().manual_seed(0))

    def made() -> LODO:
        x = nn.Parameter(torch.zeros(n))
        x.grad = g.clone()
        return LODO([x], lr=1e-3)

    plain, watched = made(), made()

    def rounds(opt: LODO, look: Callable[[], object]) -> None:
        for _ in range(10):
            opt.step()
        look()

    turns: dict[str, Any] = {
        "plain": lambda: rounds(plain, lambda: None),
        "watched": lambda: rounds(watched, watched.diagnostics),
    }
    for call in turns.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(16 * repeats):
        for name, call in turns.items():
            seconds[name].append(timed(call))
    cycles = [
        sum(seconds["watched"][i : i + 16]) / sum(seconds["plain"][i : i + 16]) for i in range(0, 16 * repeats, 16)
    ]
    return {"diagnostics_over_plain": median(cycles)}


def show(ratios: dict[str, float]) -> None:
    table = Table(title="LODO in training, ratios with targets in brackets")
    table.add_column("figure")
    table.add_column("ratio", justify="right")
    for name, value in ratios.items():
        target = TARGETS.get(name)
        text = f"{value:.3f}"
        if target is not None:
            text = f"[{'green' if value <= target else 'red'}]{text}[/] (<= {target:g})"
        table.add_row(LABELS[name], text)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=N, help="number of parameters")
    parser.add_argument("--repeats", type=int, default=None, help="interleaved repeats")
    parser.add_argument("--quick", action="store_true", help="10,000 parameters, few repeats")
    parser.add_argument("--out", type=Path, default=Path("results/training.json"), help="where the JSON goes")
    options = parser.parse_args()
    n = 10_000 if options.quick else options.size
    repeats = options.repeats or (1 if options.quick else 5)
    ratios = {**distributed(n, 40 * repeats), **diagnostics(n, repeats)}
    show(ratios)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"n": n, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
