"""From a name to a configured family."""

from __future__ import annotations

from lodo._checks import check_choice
from lodo.preconditioners.base import Preconditioner
from lodo.preconditioners.mixing import Mixing
from lodo.preconditioners.residual import Residual
from lodo.preconditioners.simple import Dense, Diagonal, Scalar

NAMES = ("mixing", "residual", "diagonal", "scalar", "dense")


def select(
    preconditioner: str | Preconditioner,
    depth: int | None = None,
    block_size: int = 4,
    width: float = 2.0,
    mixing: str = "random",
) -> Preconditioner:
    """The family called ``preconditioner``; a configured object is taken as it is.

    >>> select("mixing")
    Mixing(depth=16, block_size=4, width=2.0, mixing='random')
    >>> select("residual")
    Residual(depth=64, width=2.0)
    """
    if isinstance(preconditioner, Preconditioner):
        return preconditioner
    check_choice("preconditioner", preconditioner, NAMES)
    if preconditioner == "mixing":
        return Mixing(16 if depth is None else depth, block_size, width, mixing)
    if preconditioner == "residual":
        return Residual(64 if depth is None else depth, width)
    if preconditioner == "diagonal":
        return Diagonal()
    return Scalar() if preconditioner == "scalar" else Dense()
