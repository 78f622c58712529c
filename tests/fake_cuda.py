"""CUDA tensors on a machine that has no CUDA: they have shapes and devices, but no values.

`FakeTensorMode` raises where a value would be needed, which is where a real program would wait for the device.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


def taken(x, index):
    """``x[index]`` by torch's operators."""
    dim = 0
    for one in index if isinstance(index, tuple) else (index,):
        if one is None:
            x = x.unsqueeze(dim)
        elif isinstance(one, int):
            x = x.select(dim, one)
            continue
        elif isinstance(one, slice):
            assert one.step is None
            x = torch.ops.aten.slice.Tensor(x, dim, one.start, one.stop)
        else:
            x = torch.ops.aten.index.Tensor(x, [None] * dim + [one.long()])
        dim += 1
    return x


class WithoutCuda(TorchFunctionMode):
    """A build of torch for CPUs has no guard for CUDA devices.

    Python's ways to copy and to index ask for one, even of fake tensors; torch's operators do not.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **kwargs)
        if func is torch.Tensor.contiguous:
            return torch.ops.aten.clone.default(*args, memory_format=torch.contiguous_format)
        if func is torch.Tensor.__getitem__:
            return taken(*args)
        if func is torch.Tensor.__setitem__:
            x, index, value = args
            value = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
            torch.ops.aten.copy_.default(taken(x, index), value)
            return None
        if func is torch.Tensor.to:
            x, *where = args
            for one in where:
                kwargs["dtype" if isinstance(one, torch.dtype) else "device"] = one
            kwargs.pop("copy", None)
            return torch.ops.aten._to_copy.default(x, **kwargs)
        if func in (torch.Tensor.double, torch.Tensor.long, torch.Tensor.float, torch.Tensor.int):
            dtype = getattr(torch, func.__name__)
            return torch.ops.aten._to_copy.default(args[0], dtype=dtype)
        return func(*args, **kwargs)


@contextmanager
def fake_cuda():
    """Lets tensors be made and used on the device "cuda"."""
    with FakeTensorMode() as mode, WithoutCuda():
        yield mode
