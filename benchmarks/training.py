"""What do DDP, FSDP2 and diagnostics add to the cost of LODO? Ratios measured side by side in one run.

    python benchmarks/training.py                  about five minutes on two cores
    python benchmarks/training.py --quick          a smaller model, fewer repeats

DDP: two gloo processes of one thread each step in turn on a model in DDP and on a plain one; averaging the gradients
is not timed. FSDP2: the size of a rank's state, over that of a single process. Diagnostics: ten steps and one call,
over ten steps. Targets are in brackets.
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

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lodo import LODO
from measuring import seconds_per_call, with_target, write

N = 94_696
TARGETS = {"ddp_step_over_plain": 1.05, "fsdp_state_over_single": 0.51, "diagnostics_over_plain": 1.02}
LABELS = {
    "ddp_step_over_plain": "a step under DDP, over a step on plain parameters",
    "ddp_checked_over_plain": "the same with check_sync_every=100, over a hundred steps",
    "fsdp_state_over_single": "state of a rank under FSDP2 with two ranks, over a single process",
    "fsdp_step_over_single": "a step of a rank under FSDP2 with two ranks, over a single process",
    "diagnostics_over_plain": "ten steps and one call of diagnostics, over ten steps",
}


def rotated(names: list[str], by: int) -> list[str]:
    """The same names in the same circular order, beginning with another one each time."""
    return names[by % len(names) :] + names[: by % len(names)]


def model_of(n: int) -> nn.Module:
    """A linear map with about n weights."""
    torch.manual_seed(0)
    side = int(n**0.5)
    return nn.Linear(side, n // side, bias=False)


def state_size(opt: LODO) -> int:
    """The number of numbers in the optimizer's state on this rank."""
    return sum(x.numel() for x in opt._state(0).values() if isinstance(x, torch.Tensor))


def on_rank(rank: int, n: int, repeats: int, folder: str) -> None:
    """Time the steps; both ranks take every turn at the same time, and rank 0 writes the ratios."""
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
        for name in rotated(list(models), repeat):
            model = models[name]
            opts[name].zero_grad()
            model(x).square().mean().backward()
            dist.barrier()
            spent = seconds_per_call(opts[name].step)
            if repeat >= 3:  # warmed up
                seconds[name].append(spent)
    if rank == 0:
        over = {name: median(map(truediv, values, seconds["plain"])) for name, values in seconds.items()}
        ratios = {
            "ddp_step_over_plain": over["ddp"],
            "ddp_checked_over_plain": (99 + over["checked"]) / 100,
            "fsdp_state_over_single": state_size(opts["fsdp"]) / state_size(opts["plain"]),
            "fsdp_step_over_single": over["fsdp"],
        }
        Path(folder, "ratios.json").write_text(json.dumps(ratios))
    dist.barrier()
    dist.destroy_process_group()


def distributed(n: int, repeats: int) -> dict[str, float]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    fork = multiprocessing.get_context("fork")  # safe: no thread has been started yet
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
    """The time of sixteen rounds of ten steps and a call, over sixteen rounds without the call.

    The calls do different things in turn, and sixteen are a whole cycle.
    """
    g = torch.randn(n, generator=torch.Generator().manual_seed(0))

    def optimizer() -> LODO:
        x = nn.Parameter(torch.zeros(n))
        x.grad = g.clone()
        return LODO([x], lr=1e-3)

    plain, watched = optimizer(), optimizer()

    def ten_steps() -> None:
        for _ in range(10):
            plain.step()

    def ten_steps_and_a_call() -> None:
        for _ in range(10):
            watched.step()
        watched.diagnostics()

    ten_steps()  # warm up
    ten_steps_and_a_call()
    ratios = []
    for _ in range(repeats):
        without = with_calls = 0.0
        for _ in range(16):
            without += seconds_per_call(ten_steps)
            with_calls += seconds_per_call(ten_steps_and_a_call)
        ratios.append(with_calls / without)
    return {"diagnostics_over_plain": median(ratios)}


def show(ratios: dict[str, float]) -> None:
    table = Table(title="LODO in training, ratios with targets in brackets")
    table.add_column("figure")
    table.add_column("ratio", justify="right")
    for name, value in ratios.items():
        table.add_row(LABELS[name], with_target(f"{value:.3f}", value, TARGETS.get(name), at_least=False))
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
    write(options.out, {"n": n, "ratios": ratios})


if __name__ == "__main__":
    main()
