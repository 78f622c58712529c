"""Elementwise functions of short vectors, which may be tensors or arrays.

Formulas that use nothing else are written once: `lodo.engines.numba.formulas` lets kernels compile them for single
numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_host(device: torch.device) -> bool:
    """Whether numbers on a device are there at once."""
    return device.type == "cpu"


def library(x: Any) -> Any:
    """What has the functions for an array or for a tensor; what is used here has the same names in both.

    >>> library(np.ones(1)).__name__, library(torch.ones(1)).__name__
    ('numpy', 'torch')
    """
    return torch if isinstance(x, Tensor) else np


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, else ``no``.

    >>> choose(torch.tensor([True, False]), torch.ones(2), 3.0)
    tensor([1., 3.])
    """
    return library(condition).where(condition, yes, no)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two entries.

    >>> minimum(np.array([1.0, 2.0]), np.array([3.0, 0.0]))
    array([1., 0.])
    """
    return library(a).minimum(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two entries.

    >>> maximum(np.array([1.0, 2.0]), np.array([3.0, 0.0]))
    array([3., 2.])
    """
    return library(a).maximum(a, b)


def clip(x: Any, low: float, high: float) -> Any:
    """x, limited to [low, high].

    >>> clip(torch.tensor([-1.0, 0.5, 3.0]), 0.0, 1.0)
    tensor([0.0000, 0.5000, 1.0000])
    """
    return x.clip(low, high)


def log1p(x: Any) -> Any:
    """``log(1 + x)``.

    >>> log1p(np.zeros(1))
    array([0.])
    """
    return library(x).log1p(x)


def power(beta: float, t: Any) -> Any:
    """``beta ** t``; of tensors on the CPU through NumPy, because torch rounds the end of a vector in another way.

    >>> power(0.5, torch.tensor([1.0, 2.0]))
    tensor([0.5000, 0.2500])
    """
    return torch.from_numpy(beta ** t.numpy()) if isinstance(t, Tensor) and is_host(t.device) else beta**t
