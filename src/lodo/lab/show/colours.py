"""Colours that can be seen on light and on dark paper."""

from __future__ import annotations

LIGHT, DARK = "#ffffff", "#14171c"  # the page's two backgrounds
CONTRAST = 3.0  # what WCAG 2 asks of lines in charts


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
