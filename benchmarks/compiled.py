"""What does a step cost on a device? Kernels and bytes, counted in the graphs that torch.compile makes of it.

    make bench                                     together with the others
    python benchmarks/compiled.py --sizes 94696

There is no clock here: counts say what a device has to do, not how long it takes. Inductor fuses the operations of a
layer into kernels; of each kernel, the bytes of every array that it reads or writes count once. The graphs are those
that it makes for CPUs, one for each function; the rules for fusing are mostly the same for a GPU, but not all.
The roofline's bytes are those that docs/algorithm.md counts for a fused step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch._inductor.graph import GraphLowering

from lodo import LODO
from lodo.engines.compiled import graphs
from lodo.estimate import as_family
from lodo.families import Mixing
from lodo.layout import Layout
from measuring import with_target, write

SIZES = (94_696, 1_000_000)
VARIANTS: dict[str, dict[str, Any]] = {
    "LODO": {},
    "LODO, shuffle": {"preconditioner": "mixing(mixing='shuffle')"},
    "LODO, robust": {"recipe": "robust"},
    "LODO, compact": {"recipe": "compact"},
}
MOST_BYTES, MOST_LAUNCHES = 1.25, 5


class Cost(NamedTuple):
    """Of one call of a compiled function."""

    launches: int
    bytes: int


@contextmanager
def counted() -> Iterator[list[Cost]]:
    """The cost of every graph that is compiled meanwhile."""
    costs: list[Cost] = []
    codegen = GraphLowering.codegen

    def counting(self: GraphLowering) -> Any:
        result = codegen(self)
        total, nodes, _ = self.count_bytes()
        costs.append(Cost(sum(size > 0 for _, size in nodes), total))
        return result

    GraphLowering.codegen = counting  # type: ignore[method-assign]
    try:
        yield costs
    finally:
        GraphLowering.codegen = codegen  # type: ignore[method-assign]


def measure(n: int, options: dict[str, Any]) -> dict[str, float]:
    """The kernels and bytes of a step of n parameters, summed over all calls of compiled functions."""
    graphs.graph.cache_clear()  # compiled anew: sizes are those of the first call
    torch._dynamo.reset()
    x = torch.nn.Parameter(torch.zeros(n))
    opt = LODO([x], lr=1e-3, meta_lr=1e-12, backend="compiled", **options)
    called: list[tuple[str, Cost]] = []
    known: dict[tuple[int, int], Cost] = {}
    call = graphs.Graph.__call__

    def noted(self: graphs.Graph, *arguments: Any, **constants: Any) -> Any:
        key = id(self), len(arguments)
        with counted() as costs:
            result = call(self, *arguments, **constants)
        if costs:
            known[key] = costs[0]
        called.append((self._name, known[key]))
        return result

    graphs.Graph.__call__ = noted  # type: ignore[method-assign]
    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            for _ in range(3):
                x.grad = torch.randn(n)
                called.clear()  # the last step counts: the first one does not learn
                opt.step()
    finally:
        graphs.Graph.__call__ = call  # type: ignore[method-assign]
    family = as_family(opt.param_groups[0]["preconditioner"])
    assert isinstance(family, Mixing)
    total = sum(cost.bytes for _, cost in called)
    return {
        "launches": sum(cost.launches for _, cost in called),
        "launches_a_layer_and_pass": max(cost.launches for _, cost in called),
        "bytes_per_parameter": total / n,
        "roofline_bytes_per_parameter": roofline_bytes(n, family, opt) / n,
        "bytes_over_roofline": total / roofline_bytes(n, family, opt),
    }


def roofline_bytes(n: int, family: Mixing, opt: LODO) -> int:
    """What a fused step reads and writes: 4 reads of theta and one write, each moment once each way, vectors."""
    layers = family.layers(Layout.flat(n))
    moments = 2 * 2 * (2 if "bfloat16" in opt.param_groups[0]["meta_optimizer"] else 4)  # two, read and written
    vectors = 15 if family.mixing == "random" else 11
    return layers.number * (layers.weights * (5 * 4 + moments) + 4 * vectors * family.hidden(n))


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
