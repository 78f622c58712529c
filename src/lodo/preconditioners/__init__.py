"""Families of preconditioners ``G(theta)``: one a file, all behind `Preconditioner`."""

from lodo.preconditioners.base import Engine, Lesson, Preconditioner
from lodo.preconditioners.mixing import Mixing
from lodo.preconditioners.residual import Residual
from lodo.preconditioners.select import select
from lodo.preconditioners.simple import Dense, Diagonal, Scalar

__all__ = ["Dense", "Diagonal", "Engine", "Lesson", "Mixing", "Preconditioner", "Residual", "Scalar", "select"]
