"""What do the kernels of a step need on a GPU? Registers, spills and shared memory, compiled without a GPU.

    pip install triton==3.7.1                      beside the CPU build of torch 2.13
    python benchmarks/registers.py
    python benchmarks/registers.py --quick         one optimizer at a small size, for one GPU

There is no clock here. The functions of a layer are traced on the CPU for tensors of any size, as in a run; then
their graphs are told that the tensors are on a GPU. Inductor writes Triton kernels for them, fused as for that GPU,
and Triton compiles these to machine code. Inductor has several candidates for most kernels, which differ in block
size; on a GPU it would choose among them with a clock. Here all of them are compiled. The table has ranges over the
kernels of a pass and their candidates; the JSON has each.

Registers and spills are those of a thread. What does not fit into registers is spilled to memory, which is slow: zero
is best. A multiprocessor has 65,536 registers, and room for 64 warps of 32 threads: with up to 32 registers a thread,
all 64 warps can be resident at once, with more only some of them. Kernels and bytes are counted as in compiled.py, but
for a GPU: in the first table for one pass through a layer, in the second for a step.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import _InProcessFxCompile
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_map
from torch.utils._triton import has_triton_package

from compiled import MOST_BYTES, VARIANTS, parts, passes, roofline_bytes
from lodo.engines.compiled.graphs import options_for
from measuring import with_target, write

SIZE, QUICK_SIZE = 94_696, 300
GPUS = {"sm_80": 108, "sm_90": 132}  # multiprocessors: those of an A100 and an H100
REGISTERS, WARPS, THREADS = 65_536, 64, 32  # of a multiprocessor; threads of a warp
MISSING = "Triton is missing: pip install triton==3.7.1 beside the CPU build of torch 2.13"


class Kernel(NamedTuple):
    """A kernel as Inductor writes it."""

    name: str
    source: str


class Code(NamedTuple):
    """What Inductor writes for a call."""

    kernels: tuple[Kernel, ...]
    bytes: int  # of every array that a kernel reads or writes, once for each kernel


class Usage(NamedTuple):
    """What a compiled kernel needs."""

    registers: int  # a thread
    spilled: int  # bytes a thread
    shared: int  # bytes a block
    warps: int  # a block


class Written(Exception):  # noqa: N818  # not an error
    """Ends a compilation whose kernels have been written."""


# ---------------------------------------------------------------- Inductor writes kernels


@contextmanager
def pretended(gpu: str) -> Iterator[None]:
    """Inductor and Triton take the GPU for one of this machine."""
    import triton
    from triton.backends.compiler import GPUTarget

    capability = int(gpu.removeprefix("sm_"))
    properties = SimpleNamespace(
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=GPUS[gpu],
        regs_per_multiprocessor=REGISTERS,
        max_threads_per_multi_processor=WARPS * THREADS,
        max_threads_per_block=1024,
        warp_size=THREADS,
    )
    stand_ins: dict[tuple[object, str], object] = {
        (torch.cuda, "get_device_properties"): lambda device=None: properties,
        (torch.cuda, "get_device_capability"): lambda device=None: divmod(capability, 10),
        (torch.cuda, "current_device"): lambda: 0,
        (torch.cuda, "device"): lambda device: nullcontext(),
        (CudaInterface, "get_device_properties"): staticmethod(lambda device=None: properties),
        (CudaInterface, "is_bf16_supported"): staticmethod(lambda including_emulation=False: True),
        (torch._inductor.scheduler, "has_triton"): lambda: True,
        (torch._inductor.runtime.triton_helpers, "set_driver_to_gpu"): lambda: None,
        (triton.runtime.driver, "_active"): SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32)
        ),
    }
    with ExitStack() as stack:
        for (owner, name), stand_in in stand_ins.items():
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(config.patch(use_static_triton_launcher=False))
        DeviceProperties.create.cache_clear()
        yield
    DeviceProperties.create.cache_clear()


def written(call: partial[Any]) -> Code:
    """What Inductor writes for a call on the GPU that is `pretended`; nothing is run."""
    found: list[Code] = []
    lower = _InProcessFxCompile.codegen_and_compile

    def lower_for_gpu(self: Any, graph: GraphModule, inputs: Any, *rest: Any) -> Any:
        return lower(self, on_gpu(graph), [moved(x) for x in inputs], *rest)

    def keep_code(graph: GraphLowering) -> None:
        code, _ = graph.codegen()
        total = sum(node.get_read_write_buffers_sizes() for node in graph.scheduler.nodes)
        found.append(Code(tuple(in_code(code.value)), total))
        raise Written

    torch._dynamo.reset()
    options = {**options_for(call.func.__name__, "cuda"), "fx_graph_cache": False}
    compiled = torch.compile(call.func, fullgraph=True, dynamic=True, options=options)
    with (
        patch.object(_InProcessFxCompile, "codegen_and_compile", lower_for_gpu),
        patch.object(GraphLowering, "_compile_to_module", keep_code),
    ):
        try:
            compiled(*call.args, **call.keywords)
        except Exception:  # torch wraps what ends it
            if not found:
                raise
    return found[0]


def on_gpu(graph: GraphModule) -> GraphModule:
    """The graph, changed in place, as if its tensors were on a GPU."""
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    return graph


def moved(x: Any) -> Any:
    """A tensor without values on a GPU, in place of one on the CPU; anything else as it is."""
    if not isinstance(x, FakeTensor):
        return x
    like = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(x.fake_mode, like, torch.device("cuda", 0))


def in_code(code: str) -> Iterator[Kernel]:
    """The Triton kernels in a module that Inductor wrote.

    >>> list(in_code("k = async_compile.triton('k', 'def k(): ...', device_str='cuda')"))
    [Kernel(name='k', source='def k(): ...')]
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "triton":
            name, source = (ast.literal_eval(argument) for argument in node.args)
            yield Kernel(name, source)


# ---------------------------------------------------------------- Triton compiles them


def usages(kernel: Kernel) -> tuple[Usage, ...]:
    """What each candidate of a kernel needs on the GPU that it was written for, which has to be `pretended`."""
    tuner = getattr(PyCodeCache.load(kernel.source), kernel.name)
    tuner.precompile(warm_cache_only=True)
    return tuple(usage(result.kernel) for result in tuner.compile_results)


def usage(binary: Any) -> Usage:
    """What cuobjdump, which comes with Triton, says about a compiled kernel."""
    import triton

    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = resources(text)
    shared = max(found["SHARED"], binary.metadata.shared)  # cuobjdump does not see what is asked for at the launch
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], shared, binary.metadata.num_warps)


def resources(text: str) -> dict[str, int]:
    """The figures of a kernel in the output of cuobjdump.

    >>> resources(" Function k:\\n  REG:40 STACK:0 SHARED:16 LOCAL:8 CONSTANT[0]:600 TEXTURE:0")["REG"]
    40
    """
    return {name: int(figure) for name, figure in re.findall(r"\b([A-Z]+):(\d+)", text)}


def resident(used: Usage) -> int:
    """The warps that a multiprocessor has registers for, in whole blocks. A thread's registers come in eights.

    >>> resident(Usage(registers=33, spilled=0, shared=0, warps=4))
    48
    """
    fitting = min(WARPS, REGISTERS // (THREADS * 8 * -(-used.registers // 8)))
    return fitting // used.warps * used.warps


# ---------------------------------------------------------------- results


def measure(n: int, options: dict[str, Any], gpu: str) -> dict[str, dict[str, Any]]:
    """What the kernels of each pass through a layer need, and what a step does; equal passes have one entry."""
    calls: dict[partial[Any], list[str]] = {}
    for name, call in passes(n, options).items():
        calls.setdefault(call, []).append(name)
    with pretended(gpu):
        found = {tuple(names): summary(n, written(call)) for call, names in calls.items()}
    family, meta = parts(options)
    total = family.depth * sum(len(names) * needed["bytes_per_parameter"] for names, needed in found.items())
    step = {
        "kernels": family.depth * sum(len(names) * len(needed["kernels"]) for names, needed in found.items()),
        "bytes_per_parameter": total,
        "bytes_over_roofline": total * n / roofline_bytes(n, family, meta),
        "registers": widest(needed["registers"] for needed in found.values()),
        "spilled_bytes": widest(needed["spilled_bytes"] for needed in found.values()),
    }
    return {"passes": {", ".join(names): needed for names, needed in found.items()}, "step": step}


def summary(n: int, code: Code) -> dict[str, Any]:
    """The bytes of a call, and the ranges over all of its kernels and all candidates of a kernel."""
    found = [usages(kernel) for kernel in code.kernels]
    every = [one for candidates in found for one in candidates]
    return {
        "bytes_per_parameter": code.bytes / n,
        "kernels": [[one._asdict() for one in candidates] for candidates in found],
        "registers": span(every, lambda one: one.registers),
        "spilled_bytes": span(every, lambda one: one.spilled),
        "shared_bytes": span(every, lambda one: one.shared),
        "resident_warps": span(every, resident),
    }


def span(every: list[Usage], figure: Callable[[Usage], int]) -> tuple[int, int]:
    """The least and the most of a figure."""
    figures = [figure(one) for one in every]
    return min(figures), max(figures)


def widest(spans: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The range that has all of the ranges in it.

    >>> widest([(24, 40), (32, 72)])
    (24, 72)
    """
    least, most = zip(*spans, strict=True)
    return min(least), max(most)


def as_text(least_and_most: tuple[int, int]) -> str:
    """A range as text.

    >>> as_text((24, 40)), as_text((32, 32))
    ('24-40', '32')
    """
    return "-".join(str(one) for one in dict.fromkeys(least_and_most))


def show(n: int, results: dict[str, dict[str, dict[str, dict[str, Any]]]]) -> None:
    table = Table(title=f"The Triton kernels of a layer, compiled for GPUs (n = {n:,})")
    figures = ("registers", "spilled_bytes", "shared_bytes", "resident_warps")
    for column in (
        "optimizer",
        "GPU",
        "pass",
        "kernels",
        "bytes per parameter",
        *(name.replace("_", " ") for name in figures),
    ):
        table.add_column(column, justify="left" if column in ("optimizer", "GPU", "pass") else "right")
    for variant, gpus in results.items():
        for gpu, found in gpus.items():
            for name, needed in found["passes"].items():
                texts = [as_text(needed[figure]) for figure in figures]
                counts = (str(len(needed["kernels"])), f"{needed['bytes_per_parameter']:.0f}")
                table.add_row(variant, gpu, name, *counts, *texts)
    Console().print(table)
    show_steps(n, results)


def show_steps(n: int, results: dict[str, dict[str, dict[str, dict[str, Any]]]]) -> None:
    table = Table(title=f"A step on a GPU, counted in these kernels (n = {n:,}), with targets in brackets")
    columns = ("kernels", "bytes per parameter", "over the roofline's", "registers", "spilled bytes")
    for column in ("optimizer", "GPU", *columns):
        table.add_column(column, justify="left" if column in ("optimizer", "GPU") else "right")
    for variant, gpus in results.items():
        for gpu, found in gpus.items():
            step = found["step"]
            ratio = step["bytes_over_roofline"]
            table.add_row(
                variant,
                gpu,
                str(step["kernels"]),
                f"{step['bytes_per_parameter']:,.0f}",
                with_target(f"{ratio:.2f}", ratio, MOST_BYTES, at_least=False),
                as_text(step["registers"]),
                as_text(step["spilled_bytes"]),
            )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=SIZE, help="number of parameters")
    parser.add_argument("--only", choices=tuple(VARIANTS), help="one of the optimizers")
    parser.add_argument("--quick", action="store_true", help=f"the first optimizer at n = {QUICK_SIZE}, for one GPU")
    parser.add_argument("--out", type=Path, default=Path("results/bench-registers.json"), help="where the JSON goes")
    options = parser.parse_args()
    if not has_triton_package():
        print(MISSING)
        return
    n = QUICK_SIZE if options.quick else options.size
    variants = [options.only] if options.only else list(VARIANTS)[: 1 if options.quick else None]
    gpus = list(GPUS)[-1:] if options.quick else list(GPUS)
    results = {name: {gpu: measure(n, VARIANTS[name], gpu) for gpu in gpus} for name in variants}
    show(n, results)
    write(options.out, {"n": n, "torch": torch.__version__, "results": results})


if __name__ == "__main__":
    main()
