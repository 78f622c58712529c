"""What figures share: colours, curves with spread, files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.image
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lodo.lab.files import write_atomically
from lodo.lab.run import Curve

Dashes = str | tuple[int, tuple[int, ...]]

# Colours of Okabe and Ito and of Paul Tol, chosen for colour-blind readers; dashes where one is used twice.
_STYLES: dict[str, tuple[str, Dashes]] = {
    "LODO": ("#0072b2", "-"),
    "Adam": ("#e69f00", "-"),
    "Momentum": ("#009e73", "-"),
    "RMSprop": ("#cc79a7", "-"),
    "Yogi": ("#d55e00", "-"),
    "LARS": ("#f0e442", "-"),
    "O-LBFGS": ("#56b4e9", "-"),
    "L-BFGS": ("#7f7f7f", "-"),
    "L-BFGS (authors' slip)": ("#7f7f7f", (0, (5, 1))),
    "L2LBGDBGD": ("#332288", "-"),
    "BFGS": ("#882255", ":"),
    "Levenberg-Marquardt": ("#117733", ":"),
    "Newton": ("#000000", ":"),
}
_OTHERS = ["#aa4499", "#44aa99", "#999933", "#88ccee", "#ddcc77", "#661100"]
_DASHES: list[Dashes] = [(0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 2)), "-"]
_RC: Any = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text
}


@dataclass(frozen=True)
class Style:
    """How an optimizer is drawn, the same in every figure."""

    color: str
    ls: Dashes


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style for every label: its own if it is of the paper, else one that no other label of the figure has.

    >>> styles(["LODO", "LODO (beta=0.5)", "LODO (beta=0.9)"])["LODO"].color
    '#0072b2'
    """
    labels = list(dict.fromkeys(labels))
    others = iter([Style(color, dashes) for dashes in _DASHES for color in _OTHERS] * len(labels))
    return {label: Style(*_STYLES[label]) if label in _STYLES else next(others) for label in labels}


def canvas(columns: int = 1, rows: int = 1, size: tuple[float, float] = (6.0, 3.8)) -> tuple[Figure, list[Axes]]:
    """An empty figure and its axes."""
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def look() -> AbstractContextManager[None]:
    """The common look, while figures are drawn and saved."""
    context: AbstractContextManager[None] = mpl.rc_context(_RC)
    return context


def binned(curves: Sequence[Curve], x: str = "evaluations", bins: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """The mean loss of each curve over equal parts of the run: their middles, and one row per curve."""
    bins = min(bins, *(len(curve["step"]) for curve in curves))
    end = max(float(curve[x][-1]) for curve in curves)
    edges = np.linspace(0, end, bins + 1)
    rows = []
    for curve in curves:
        at = np.clip(np.searchsorted(edges, curve[x], side="left") - 1, 0, bins - 1)
        counts = np.bincount(at, minlength=bins)
        sums = np.bincount(at, weights=curve["loss"].astype(np.float64), minlength=bins)
        rows.append(np.divide(sums, counts, out=np.full(bins, np.nan), where=counts > 0))
    return (edges[1:] + edges[:-1]) / 2, np.stack(rows)


def band(axes: Axes, x: np.ndarray, values: np.ndarray, label: str, drawn: Style) -> None:
    """The mean over seeds as a line and plus or minus one standard deviation as a band."""
    middle = values.mean(0)
    axes.plot(x, middle, color=drawn.color, ls=drawn.ls, lw=1.2, label=label)
    if len(values) > 1:
        spread = values.std(0, ddof=1)
        axes.fill_between(x, middle - spread, middle + spread, color=drawn.color, alpha=0.2, lw=0)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and PDF."""
    written = []
    for kind in ("png", "pdf"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind)
        target = path.with_suffix(f".{kind}")
        write_atomically(target, buffer.getvalue())
        written.append(target)
    return written


def save_svg(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, the same file for the same figure."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "lodo", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    write_atomically(path, buffer.getvalue())


def save_picture(pixels: np.ndarray, path: Path, zoom: int = 4) -> None:
    """Write grey bytes as a PNG, every pixel ``zoom`` wide."""
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, np.kron(pixels, np.ones((zoom, zoom))), cmap="gray", vmin=0, vmax=255, format="png")
    write_atomically(path, buffer.getvalue())
