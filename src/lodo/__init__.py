"""LODO, an optimizer that learns its own preconditioner while it optimizes."""

from importlib.metadata import version

from lodo.memory import MemoryEstimate, memory_estimate
from lodo.optimizer import LODO
from lodo.preconditioners import Dense, Diagonal, Mixing, Preconditioner, Residual, Scalar

__version__ = version("lodo")

__all__ = [
    "LODO",
    "Dense",
    "Diagonal",
    "MemoryEstimate",
    "Mixing",
    "Preconditioner",
    "Residual",
    "Scalar",
    "memory_estimate",
]
