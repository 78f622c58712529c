"""What every part of the theory returns: claims, the evidence for them, and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lodo.lab.show.plots import Figure

Matrix = np.ndarray


@dataclass(frozen=True)
class Claim:
    """A statement of the paper and what the numbers say.

    Args:
        text: the statement, in a sentence.
        holds: whether it held wherever it was checked within its conditions.
        evidence: the numbers that show it.
        limits: where it stops holding, or what it does not say; may be empty.
    """

    text: str
    holds: bool
    evidence: str
    limits: str = ""


@dataclass(frozen=True)
class Finding:
    """One part of the theory: its claims, its numbers and its figures."""

    name: str
    title: str
    claims: tuple[Claim, ...]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[Figure] = ()


def rotation(n: int, rng: np.random.Generator) -> Matrix:
    """A random orthogonal matrix.

    >>> U = rotation(3, np.random.default_rng(0))
    >>> bool(np.allclose(U @ U.T, np.eye(3)))
    True
    """
    q, r = np.linalg.qr(rng.standard_normal((n, n)))
    return np.asarray(q * np.sign(np.diag(r)))


def symmetric(spectrum: np.ndarray, rng: np.random.Generator) -> Matrix:
    """A symmetric matrix with these eigenvalues in random directions."""
    U = rotation(len(spectrum), rng)
    return np.asarray((U * spectrum) @ U.T)


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """The slope of y over x on logarithmic scales: the power that fits best.

    >>> round(slope(np.array([1.0, 2.0, 4.0]), np.array([3.0, 12.0, 48.0])), 6)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
