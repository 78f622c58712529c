"""Single numbers that decide a step: Python floats on the CPU, 0-dim tensors on any other device.

Turning a number of a device into a Python float makes the program wait for the device. So the same formulas work on
both kinds of numbers, and a choice between two values is `where` instead of ``if``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Scalar = float | Tensor  # a Python number, or a 0-dim tensor
Flag = bool | Tensor  # a Python truth value, or a 0-dim tensor of bools


def where(condition: Flag, yes: Scalar, no: Scalar) -> Scalar:
    """``yes`` if the condition holds, else ``no``.

    >>> where(True, 1.0, 2.0), where(torch.tensor(False), 1.0, 2.0)
    (1.0, tensor(2., dtype=torch.float64))
    """
    if not isinstance(condition, Tensor):
        return yes if condition else no
    return torch.where(condition, scalar_on(condition.device, yes), scalar_on(condition.device, no))


def largest(a: Scalar, b: Scalar) -> Scalar:
    """The larger of two numbers.

    >>> largest(1.0, 2.0), largest(torch.tensor(3.0), 2.0)
    (2.0, tensor(3., dtype=torch.float64))
    """
    return where(a > b, a, b)


def smallest(a: Scalar, b: Scalar) -> Scalar:
    """The smaller of two numbers.

    >>> smallest(1.0, 2.0)
    1.0
    """
    return where(a < b, a, b)


def scalar_on(device: torch.device, value: Scalar) -> Tensor:
    """A number as a 0-dim tensor on a device: an integer, or a real in double precision where the device has it.

    >>> scalar_on(torch.device("cpu"), 2.0), scalar_on(torch.device("cpu"), 3)
    (tensor(2., dtype=torch.float64), tensor(3))
    """
    if isinstance(value, Tensor):
        return value
    dtype = {bool: torch.bool, int: torch.int64}.get(type(value), precise(device))
    return torch.full((), value, dtype=dtype, device=device)  # a fill, which is no copy from the CPU


def as_real(value: Scalar) -> Scalar:
    """A number that powers can be taken of without a loss of precision.

    >>> as_real(torch.tensor(3)), as_real(3)
    (tensor(3., dtype=torch.float64), 3)
    """
    return value.to(precise(value.device)) if isinstance(value, Tensor) else value


def precise(device: torch.device) -> torch.dtype:
    """The most precise floating-point type that a device has.

    >>> precise(torch.device("cpu"))
    torch.float64
    """
    return torch.float32 if device.type == "mps" else torch.float64


def over(a: Scalar, b: Scalar) -> Scalar:
    """a / b, infinite if b is 0.

    >>> over(1.0, 2.0), over(0.0, 0.0), over(1.0, torch.tensor(0.0))
    (0.5, inf, tensor(inf, dtype=torch.float64))
    """
    return where(b > 0, a / where(b > 0, b, 1.0), math.inf)


def logarithm(value: Scalar) -> Scalar:
    """The natural logarithm, also of zero; NaN of what is NaN or negative.

    >>> logarithm(0.0), logarithm(torch.tensor(1.0))
    (-inf, tensor(0.))
    """
    if isinstance(value, Tensor):
        return value.log()
    if value > 0:
        return math.log(value)
    return -math.inf if value == 0 else math.nan


def exponential(value: Scalar) -> Scalar:
    """e to the power of a number, infinite where that is too large for a float.

    >>> exponential(0.0), exponential(1e6)
    (1.0, inf)
    """
    if isinstance(value, Tensor):
        return value.exp()
    return math.exp(value) if value < 700.0 else math.inf


def add_scaled(x: Tensor, y: Tensor, factor: Scalar) -> Tensor:
    """``x += factor * y``, in place.

    >>> add_scaled(torch.ones(2), torch.ones(2), 3.0)
    tensor([4., 4.])
    """
    if isinstance(factor, Tensor):
        return x.addcmul_(y, factor.to(y.dtype))
    return x.add_(y, alpha=factor)


def add_product(x: Tensor, y: Tensor, z: Tensor, factor: Scalar) -> Tensor:
    """``x += factor * y * z``, in place.

    >>> add_product(torch.ones(2), torch.ones(2), torch.ones(2), 3.0)
    tensor([4., 4.])
    """
    if isinstance(factor, Tensor):
        return x.add_(y.mul(z).mul_(factor))
    return x.addcmul_(y, z, value=factor)


def add_quotient(x: Tensor, y: Tensor, z: Tensor, factor: Scalar) -> Tensor:
    """``x += factor * y / z``, in place.

    >>> add_quotient(torch.ones(2), torch.ones(2), torch.ones(2), 3.0)
    tensor([4., 4.])
    """
    if isinstance(factor, Tensor):
        return x.add_(y.div(z).mul_(factor))
    return x.addcdiv_(y, z, value=factor)


def plain(value: Any) -> Any:
    """A number as a Python float or integer; waits for the device if it is on one.

    >>> plain(torch.tensor(2.0)), plain(3)
    (2.0, 3)
    """
    return value.item() if isinstance(value, Tensor) else value
