"""Optimizers that learn while they optimize: KronLODO for networks, and the paper's LODO."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lodo.estimate import MemoryEstimate as MemoryEstimate
    from lodo.estimate import memory_estimate as memory_estimate
    from lodo.families import Dense as Dense
    from lodo.families import Diagonal as Diagonal
    from lodo.families import Mixing as Mixing
    from lodo.families import Preconditioner as Preconditioner
    from lodo.families import Residual as Residual
    from lodo.families import Scalar as Scalar
    from lodo.kron import KronLODO as KronLODO
    from lodo.optimizer import LODO as LODO
    from lodo.scale import Plan as Plan
    from lodo.scale import plan as plan

    __version__: str

# Where each public name is. They are imported when they are asked for, so that `lodo --help` need not import torch.
_HOMES = {
    "LODO": "lodo.optimizer",
    "KronLODO": "lodo.kron",
    "Dense": "lodo.families",
    "Diagonal": "lodo.families",
    "MemoryEstimate": "lodo.estimate",
    "Mixing": "lodo.families",
    "Plan": "lodo.scale",
    "Preconditioner": "lodo.families",
    "Residual": "lodo.families",
    "Scalar": "lodo.families",
    "memory_estimate": "lodo.estimate",
    "plan": "lodo.scale",
}

__all__ = [
    "LODO",
    "Dense",
    "Diagonal",
    "KronLODO",
    "MemoryEstimate",
    "Mixing",
    "Plan",
    "Preconditioner",
    "Residual",
    "Scalar",
    "memory_estimate",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("lodo")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
