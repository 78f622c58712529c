"""Functions compiled by torch.compile at their first use: once for all layers and for groups of all sizes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from lodo._notice import notice

_SIZE = 4099  # no other size is the same, nor a multiple: torch would take them for one
_DEVICES = ("cuda", "xpu")  # beside the CPU: where Inductor writes Triton kernels, which need double precision
OPTIONS: dict[str, Any] = {
    "assert_indirect_indexing": False,  # permutations have been drawn here and checked when they were loaded
    "realize_reads_threshold": 32,  # the hypergradient is computed where it is used, not stored
    "realize_opcount_threshold": 1000,
    "max_pointwise_cat_inputs": 0,  # rows of a product are written where they belong, not selected by masks
}
_ON_CPUS: dict[str, Any] = {
    "cpp_cache_precompile_headers": False,  # compiling headers takes longer than it saves for a few functions
    "aot_inductor.enable_line_tables": False,  # for debuggers
}
_WITHOUT_TRIALS: dict[str, Any] = {"cpp.vec_isa_ok": True}
_ON_DEVICES: dict[str, Any] = {
    "realize_acc_reads_threshold": 1000,  # as realize_reads_threshold, for a value that is used once
}
_ROWS_ON_DEVICES: dict[str, Any] = {
    "max_complex_pointwise_cat_inputs": 0,  # as max_pointwise_cat_inputs, which is not enough where masks are possible
}


def options_for(function: str, device: str) -> dict[str, Any]:
    """Inductor's options for a function and a type of device, as far as this version of torch has them.

    Going up, Inductor fuses the gather into rows that are written where they belong, but not into masked ones. Going
    down, it fuses the scatter with masked rows only. For CPUs it never writes masked rows.
    """
    if device == "cpu":
        more = {**_ON_CPUS, **(_WITHOUT_TRIALS if trusted() else {})}
    else:
        more = {**_ON_DEVICES, **(_ROWS_ON_DEVICES if function == "rise" else {})}
    return {**OPTIONS, **{name: value for name, value in more.items() if _is_option(name)}}


def trusted() -> bool:
    """Whether torch's own kernels use AVX-512. Then Inductor can, and need not compile programs to find it out."""
    from torch._inductor import config

    return torch.backends.cpu.get_cpu_capability() == "AVX512" and config.cpp.vec_isa_ok is None


def _is_option(name: str) -> bool:
    from torch._inductor import config

    try:
        attrgetter(name)(config)
    except AttributeError:
        return False
    return True


def missing_for(device: torch.device) -> str:
    """What torch.compile needs on this device and does not have, in words; empty if nothing is missing.

    >>> missing_for(torch.device("meta"))
    "a CPU, or a device for which Inductor writes Triton kernels ('cuda', 'xpu')"
    """
    if device.type == "cpu":
        return "" if _has_cpp_compiler() else "a C++ compiler (g++ or clang++, or the environment variable CXX)"
    if device.type not in _DEVICES:
        return "a CPU, or a device for which Inductor writes Triton kernels ('cuda', 'xpu')"
    if not has_triton_package():
        return "Triton (pip install triton)"
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] < 7:
        return "a GPU of compute capability 7.0 or newer, which Triton's kernels run on"
    return ""


@cache
def _has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return shutil.which(get_cpp_compiler()) is not None
    except InvalidCxxCompiler:
        return False


class Graph:
    """A compiled function; a first call says so if it takes over two seconds.

    The last dimension of tensors may have any size. It is compiled with stand-ins of one size: what is compiled then
    depends neither on the sizes that a run begins with nor on where a layer begins in memory.

    Torch keeps what it has compiled under a function's code and gives up after eight variants. So every setting has
    code of its own, which differs in its name.
    """

    def __init__(self, function: Callable[..., Any], setting: str) -> None:
        assert isinstance(function, FunctionType)
        name = f"{function.__name__}_{setting}"
        twin = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
        twin.__kwdefaults__ = function.__kwdefaults__
        self._name = function.__name__
        options = options_for(function.__name__, setting.partition("_")[0])
        self._compiled = torch.compile(twin, fullgraph=True, dynamic=True, options=options)
        self._called = False

    def __call__(self, *arguments: Any, **constants: Any) -> Any:
        if not self._called:
            with notice(
                f"lodo: torch.compile compiles {self._name} for this machine (once; the result is kept on disk) ..."
            ):
                self._compiled(*stand_in(arguments), **constants)
            self._called = True
        return self._compiled(*arguments, **constants)


def stand_in(x: Any) -> Any:
    """Zeros in place of each tensor, of a size that stands for any other; a last dimension of 1 stays as it is.

    >>> [one.shape for one in stand_in([torch.ones(2, 50), torch.ones(3, 1)])]
    [torch.Size([2, 4099]), torch.Size([3, 1])]
    """
    if isinstance(x, (list, tuple)):
        return type(x)(stand_in(one) for one in x)
    if not isinstance(x, Tensor):
        return x
    zeros = x.new_zeros([*x.shape[:-1], 1 if x.shape[-1] == 1 else _SIZE] if x.dim() else [])
    for dim in range(x.dim() - 1):
        torch._dynamo.mark_static(zeros, dim)
    return zeros


@cache
def graph(function: Callable[..., Any], setting: str) -> Graph:
    """The compiled function for a setting, of which there is one in a process."""
    return Graph(function, setting)
