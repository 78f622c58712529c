"""What runs a family on a device: a registry from (family, backend) to the engine, and the backend of each device.

A new engine is one entry in `ENGINES`. Without an entry, the reference engine serves any family on any device.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch

from lodo.engines.base import Engine, Footprint, Lesson
from lodo.engines.compiled.graphs import missing_for
from lodo.engines.reference import ReferenceEngine
from lodo.families import Mixing, Preconditioner, Residual

__all__ = [
    "BACKENDS",
    "ENGINES",
    "Engine",
    "Footprint",
    "Lesson",
    "ReferenceEngine",
    "check_backend",
    "engine_for",
    "has_numba",
]

BACKENDS = ("auto", "reference", "numba", "compiled")


class Place(NamedTuple):
    """Where an engine is: its module and its class, which are imported when it is needed."""

    module: str
    name: str


ENGINES: dict[tuple[type[Preconditioner], str], Place] = {
    (Mixing, "numba"): Place("lodo.engines.numba.mixing", "NumbaMixing"),
    (Mixing, "compiled"): Place("lodo.engines.compiled.engine", "CompiledMixing"),
    (Residual, "compiled"): Place("lodo.engines.compiled.engine", "CompiledResidual"),
}


@cache
def has_numba() -> bool:
    """Whether Numba can be used; an installation that does not load is reported once."""
    try:
        import numba  # noqa: F401  # only to see whether it loads
    except ModuleNotFoundError:
        return False
    except ImportError as error:
        logging.getLogger("lodo").warning("lodo: Numba is installed but does not load (%s)", error)
        return False
    return True


def check_backend(backend: str, device: torch.device) -> None:
    """Raise an error that says what is missing if the backend cannot be used on this device.

    >>> check_backend("reference", torch.device("cpu"))
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
    if backend == "compiled" and (missing := missing_for(device)):
        raise ValueError(
            f"backend='compiled' needs {missing} for parameters on {str(device)!r}; backend='auto' works without it"
        )


def engine_for(family: Preconditioner, device: torch.device, backend: str = "auto") -> type[Engine]:
    """The class of the engine that runs a family on a device.

    >>> engine_for(Mixing(), torch.device("cpu"), "reference").__name__
    'ReferenceEngine'
    """
    check_backend(backend, device)
    place = ENGINES.get((type(family), _automatic(device) if backend == "auto" else backend))
    if place is None:
        return ReferenceEngine
    found: type[Engine] = getattr(import_module(place.module), place.name)
    return found


def _automatic(device: torch.device) -> str:
    """Numba on CPUs, torch.compile on devices that it serves, and the reference where they are missing."""
    if device.type == "cpu":
        return "numba" if has_numba() else "reference"
    return "reference" if missing_for(device) else "compiled"
