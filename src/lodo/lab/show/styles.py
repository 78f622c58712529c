"""Colours and dashes: one style for each optimizer, on light and on dark paper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BLUE, ORANGE, GREEN, GREY, BLACK = "#0072b2", "#d55e00", "#009e73", "#7f7f7f", "#000000"
BLUES = ("#cfe3f0", "#8fc1de", "#4a97c5", BLUE)  # from light to dark, for a quantity that grows

LIGHT, DARK = "#ffffff", "#14171c"  # the page's two backgrounds
CONTRAST = 3.0  # what WCAG 2 asks of lines in charts

Dashes = str | tuple[int, ...]  # "-", ":", "--", or the lengths of strokes and gaps

# Colours of Okabe and Ito and of Paul Tol, chosen for colour-blind readers; dashes where one is used twice.
_STYLES: dict[str, tuple[str, Dashes]] = {
    "LODO": (BLUE, "-"),
    "KronLODO": ("#ee3377", "-"),
    "KronLODO untouched": ("#ee3377", (5, 1)),
    "Adam": ("#e69f00", "-"),
    "Momentum": (GREEN, "-"),
    "RMSprop": ("#cc79a7", "-"),
    "Yogi": (ORANGE, "-"),
    "LARS": ("#f0e442", "-"),
    "O-LBFGS": ("#56b4e9", "-"),
    "L-BFGS": (GREY, "-"),
    "L-BFGS (authors' slip)": (GREY, (5, 1)),
    "L2LBGDBGD": ("#332288", "-"),
    "BFGS": ("#882255", ":"),
    "Levenberg-Marquardt": ("#117733", ":"),
    "Newton": (BLACK, ":"),
}
_OTHERS = ["#aa4499", "#44aa99", "#999933", "#88ccee", "#ddcc77", "#661100"]
_DASHES: list[Dashes] = [(3, 1, 1, 1), (1, 1), (6, 2), "-", (8, 2, 2, 2), (2, 3)]


@dataclass(frozen=True)
class Style:
    """How a line is drawn.

    Args:
        color: as ``"#rrggbb"``.
        dash: ``"-"`` for a solid line, ``":"`` for dots, ``"--"`` for dashes, or lengths of strokes and gaps.
        width: of the line.
    """

    color: str
    dash: Dashes = "-"
    width: float = 1.2


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style for every label: the optimizer's own, or else one that no other label of the figure has.

    >>> styles(["LODO", "LODO (beta=0.5)", "LODO (beta=0.9)"])["LODO"].color
    '#0072b2'
    """
    labels = list(dict.fromkeys(labels))
    others = iter([Style(color, dashes) for dashes in _DASHES for color in _OTHERS] * len(labels))
    return {label: Style(*_STYLES[label]) if label in _STYLES else next(others) for label in labels}


def contrast(a: str, b: str) -> float:
    """The contrast ratio of two colours, 1 to 21, as WCAG 2 defines it.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    bright, dim = sorted((_luminance(a), _luminance(b)), reverse=True)
    return round((bright + 0.05) / (dim + 0.05), 3)


def readable(color: str, background: str) -> str:
    """The colour itself, or the nearest mixture with black or white that stands out from the background.

    >>> readable("#0072b2", LIGHT), readable("#000000", DARK)
    ('#0072b2', '#666666')
    """
    towards = 255 if _luminance(background) < 0.18 else 0
    for percent in range(101):
        mixed = "#" + "".join(f"{round(c + (towards - c) * percent / 100):02x}" for c in _channels(color))
        if contrast(mixed, background) >= CONTRAST:
            return mixed
    return mixed


def _channels(color: str) -> tuple[int, int, int]:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def _luminance(color: str) -> float:
    parts = [c / 255 for c in _channels(color)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
