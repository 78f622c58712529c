"""Families of preconditioners ``G(theta)``: one file each, all behind `Preconditioner`."""

from lodo.families.base import Preconditioner
from lodo.families.mixing import Mixing
from lodo.families.residual import Residual
from lodo.families.simple import Dense, Diagonal, Scalar

__all__ = ["FAMILIES", "Dense", "Diagonal", "Mixing", "Preconditioner", "Residual", "Scalar"]

FAMILIES: dict[str, type[Preconditioner]] = {
    "mixing": Mixing,
    "residual": Residual,
    "diagonal": Diagonal,
    "scalar": Scalar,
    "dense": Dense,
}
