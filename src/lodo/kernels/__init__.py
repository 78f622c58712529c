"""The mixing network's few operations, written once per kind of machine."""

from __future__ import annotations

import logging
from functools import cache

import torch

BACKENDS = ("auto", "reference", "numba")


@cache
def has_numba() -> bool:
    """Can Numba be used? One that is installed but does not load is reported once."""
    try:
        import numba  # noqa: F401  # only to see whether it loads
    except ModuleNotFoundError:
        return False
    except ImportError as error:
        logging.getLogger("lodo").warning("lodo: Numba is installed but does not load (%s)", error)
        return False
    return True


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
            "backend='numba' needs Numba, which is not installed or does not load (pip install numba); "
            "backend='auto' works without it"
        )
    if backend == "auto":
        return "numba" if device.type == "cpu" and has_numba() else "reference"
    return backend
