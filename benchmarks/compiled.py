"""What does a step cost on a device? Kernels and bytes, counted in the graphs that torch.compile makes of it.

    make bench                                     together with the others
    python benchmarks/compiled.py --sizes 94696

There is no clock here: counts say what a device has to do, not how long it takes. Inductor fuses the operations of a
layer into kernels; of each kernel, the bytes of every array that it reads or writes count once. Fused as for CPUs:
registers.py counts what is fused for GPUs. A few operations on vectors of n numbers and on single numbers, which are
not compiled, are not counted. The roofline's bytes are those that docs/algorithm.md counts for a fused step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._inductor.graph import GraphLowering

from lodo.engines.compiled import layers
from lodo.engines.compiled.graphs import OPTIONS
from lodo.engines.compiled.updates import RULES
from lodo.estimate import as_family
from lodo.families import Mixing
from lodo.layout import Layout
from lodo.meta import SCHEDULE_FREE, MetaOptimizer
from lodo.recipes import as_meta_optimizer, from_recipe
from measuring import with_target, write

SIZES = (94_696, 1_000_000)
VARIANTS: dict[str, dict[str, Any]] = {
    "LODO": {"recipe": "paper"},
    "LODO, shuffle": {"recipe": "paper", "preconditioner": "mixing(mixing='shuffle')"},
    "LODO, robust": {"recipe": "robust"},
    "LODO, compact": {"recipe": "compact"},
    "LODO, schedule-free": {"recipe": "paper", "meta_optimizer": "schedule-free"},
}
MOST_BYTES, MOST_LAUNCHES = 1.25, 5


class Cost(NamedTuple):
    """Of one call of a compiled function."""

    launches: int
    bytes: int


class Counted(Exception):  # noqa: N818  # not an error
    """Ends a compilation that has been counted."""


def cost(function: Callable[..., Any], *arguments: Any, **constants: Any) -> Cost:
    """The kernels and bytes of a call, from the graph that Inductor makes of it; nothing is run."""
    found: list[Cost] = []
    fuse = GraphLowering._update_scheduler

    def count(graph: GraphLowering) -> None:
        fuse(graph)
        total, nodes, _ = graph.count_bytes()
        found.append(Cost(sum(size > 0 for _, size in nodes), total))
        raise Counted

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS)
    with (
        patch.object(GraphLowering, "_update_scheduler", count),
        suppress(Exception),  # torch wraps what ends it
    ):
        compiled(*arguments, **constants)
    if not found:
        raise RuntimeError(f"{function.__name__} was not compiled")
    return found[0]


def parts(options: dict[str, Any]) -> tuple[Mixing, MetaOptimizer]:
    """The network and the meta-optimizer."""
    chosen = from_recipe(**options)
    family = as_family(chosen["preconditioner"])
    assert isinstance(family, Mixing)
    return family, as_meta_optimizer(chosen["meta_optimizer"])


def passes(n: int, options: dict[str, Any]) -> dict[str, partial[Any]]:
    """What is called for each layer in a step of n parameters, in its order."""
    family, meta = parts(options)
    saved: bool = from_recipe(**options)["save_activations"]
    k, hidden = family.block_size, family.hidden(n)
    B, v = torch.empty(k, k, hidden // k), torch.empty(k, hidden // k)
    p = torch.zeros(k, hidden // k, dtype=torch.int32) if family.mixing == "random" else None
    lesson = (torch.zeros(8, 1, dtype=torch.float64), noise(B, meta))
    moments = [torch.empty_like(B, dtype=meta.stored_dtype) for _ in meta.moments]
    up, down = partial(layers.rise, B, p, v), partial(layers.fall, B, p, v)
    vectors = (v, v.clone(), v.clone(), v.clone())
    learning: dict[str, partial[Any]] = {
        "down with g": down if saved else partial(layers.fall, B, p, v, v.clone()),
        "learning": partial(layers.learn, B, p, moments, *vectors, *lesson, rule=RULES[meta.kind]),
    }
    if meta.kind == SCHEDULE_FREE and k <= layers.WRITTEN_OUT:
        rows, zs = ([row.clone() for row in x] for x in (B, *moments))
        joined = partial(layers.learn_and_fall, rows, p, zs, *vectors, lesson[0], both=not saved)
        learning = {"down with g and learning": joined}
    return {
        "up with g": up if saved else partial(layers.rise, B, p, v, v.clone()),
        **learning,
        "up with u": up,
        "down with u": down,
    }


def measure(n: int, options: dict[str, Any]) -> dict[str, float]:
    """The kernels and bytes of a step of n parameters: all layers go up and down with g, learning, and with u."""
    family, meta = parts(options)
    costs = {name: cost(call.func, *call.args, **call.keywords) for name, call in passes(n, options).items()}
    total = family.depth * sum(one.bytes for one in costs.values())
    roofline = roofline_bytes(n, family, meta)
    return {
        "launches": family.depth * sum(one.launches for one in costs.values()),
        "launches_a_layer_and_pass": max(
            sum(one.launches for name, one in costs.items() if "down with g" in name or "learning" in name),
            costs["up with g"].launches,
        ),
        "bytes_per_parameter": total / n,
        "roofline_bytes_per_parameter": roofline / n,
        "bytes_over_roofline": total / roofline,
    }


def noise(B: Tensor, meta: MetaOptimizer) -> tuple[Tensor, ...]:
    """What the random bits of a layer depend on."""
    if meta.stored_dtype is None:
        return ()
    k, _, blocks = B.shape
    return torch.tensor(1), torch.zeros(blocks, dtype=torch.int64), torch.zeros(k, k, 1, dtype=torch.int64)


def roofline_bytes(n: int, family: Mixing, meta: MetaOptimizer) -> int:
    """What a fused step reads and writes: theta is read 4 times and written once, each moment read and written."""
    weights = family.layers(Layout.flat(n))
    moments = 2 * len(meta.moments) * (meta.stored_dtype or torch.float32).itemsize
    vectors = 15 if family.mixing == "random" else 11
    return weights.number * (weights.weights * (5 * 4 + moments) + 4 * vectors * family.hidden(n))


def show(results: dict[int, dict[str, dict[str, float]]]) -> None:
    table = Table(title="A step through torch.compile, counted in its graphs, with targets in brackets")
    for column in (
        "n",
        "optimizer",
        "kernels",
        "kernels a layer and pass",
        "bytes per parameter",
        "over the roofline's",
    ):
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    for n, variants in results.items():
        for name, found in variants.items():
            most, ratio = found["launches_a_layer_and_pass"], found["bytes_over_roofline"]
            table.add_row(
                f"{n:,}",
                name,
                f"{found['launches']:.0f}",
                with_target(f"{most:.0f}", most, MOST_LAUNCHES, at_least=False),
                f"{found['bytes_per_parameter']:,.0f}",
                with_target(f"{ratio:.2f}", ratio, MOST_BYTES, at_least=False),
            )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of parameters")
    parser.add_argument("--only", choices=tuple(VARIANTS), help="one of the optimizers")
    parser.add_argument("--out", type=Path, default=Path("results/bench-compiled.json"), help="where the JSON goes")
    options = parser.parse_args()
    chosen = [options.only] if options.only else list(VARIANTS)
    results = {n: {name: measure(n, VARIANTS[name]) for name in chosen} for n in options.sizes}
    show(results)
    write(options.out, results)


if __name__ == "__main__":
    main()
