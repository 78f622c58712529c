"""The mixing network's few operations, written once per kind of machine."""

from __future__ import annotations

from importlib.util import find_spec

import torch

BACKENDS = ("auto", "reference", "numba")


def has_numba() -> bool:
    """Is Numba installed?"""
    return find_spec("numba") is not None


def resolve(backend: str, device: torch.device) -> str:
    """The backend that ``backend`` means on ``device``, or an error that says what is missing.

    >>> resolve("reference", torch.device("cpu"))
    'reference'
    """
    if backend == "numba" and device.type != "cpu":
        raise ValueError(
            f"backend='numba' runs on CPU tensors only, but the parameters are on {str(device)!r}; "
            "use backend='auto' or 'reference'"
        )
    if backend == "numba" and not has_numba():
        raise ValueError(
            "backend='numba' needs Numba, which is not installed (pip install 'lodo[fast]'); "
            "backend='auto' works without it"
        )
    if backend == "auto":
        return "numba" if device.type == "cpu" and has_numba() else "reference"
    return backend
