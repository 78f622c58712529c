"""Places labels beside points so that they do not cover each other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

_DISTANCES = (6, 12, 18, 25, 33, 42, 52, 64, 78, 94)  # points from the marker
_DIRECTIONS = (0, 180, 35, -35, 145, -145, 90, -90, 15, -15, 165, -165, 65, -65, 115, -115)  # degrees
_OWN, _OTHER = 4.5, 8.0  # points kept free around a label's own marker, and around the others
_MARGIN = 1.0  # points kept free around a label and around what it must not cover


class Point(NamedTuple):
    """A place in data coordinates, and what to write beside it."""

    x: float
    y: float
    text: str
    color: str
    weight: str = "normal"


def label_points(axes: Axes, points: Sequence[Point], *, avoid: Sequence[Artist] = (), fontsize: float = 7.5) -> None:
    """Write every point's label beside it, further away with a thin line where there is no room.

    The limits and scales of the axes must be final. The most crowded points come first. Artists to avoid, such as a
    legend or a level line, are kept free too.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # type: ignore[union-attr]  # lays the axes out
    dot = figure.dpi / 72  # pixels a point
    places = [(float(x), float(y)) for x, y in (axes.transData.transform((p.x, p.y)) for p in points)]
    markers = [_around(place, _OTHER * dot) for place in places]
    taken = [artist.get_window_extent().padded(_MARGIN * dot) for artist in avoid]  # a line has no height
    inside = axes.get_window_extent()
    for i in _most_crowded_first(places):
        width, height = _text_size(axes, points[i], fontsize)
        full = [*taken, *markers[:i], *markers[i + 1 :], _around(places[i], _OWN * dot)]
        distance, box = find_room(places[i], (width + 2 * _MARGIN * dot, height), full, inside, dot)
        _write(axes, points[i], places[i], box, fontsize, line=distance > _DISTANCES[0])
        taken.append(box)


def find_room(
    place: tuple[float, float], size: tuple[float, float], taken: Iterable[Bbox], inside: Bbox, dot: float = 1.0
) -> tuple[float, Bbox]:
    """The nearest box of this size beside a place that covers nothing, or else the one that covers least.

    >>> taken = [Bbox.from_extents(-4, -4, 4, 4), Bbox.from_extents(5, -4, 90, 4)]
    >>> distance, box = find_room((0, 0), (20, 6), taken, Bbox.from_extents(-100, -100, 100, 100))
    >>> distance, float(box.x1)  # to the left, because there is something on the right
    (6, -6.0)
    """
    taken = list(taken)
    best, least = (math.inf, Bbox.unit()), math.inf
    for distance in _DISTANCES:
        for angle in _DIRECTIONS:
            box = _beside(place, size, distance * dot, angle)
            covered = sum(overlap(box, other) for other in taken) + box.width * box.height - overlap(box, inside)
            if covered < least - 1e-6:
                best, least = (distance, box), covered
        if least <= 1e-6:
            break
    return best


def overlap(a: Bbox, b: Bbox) -> float:
    """The area that two boxes share.

    >>> overlap(Bbox.from_extents(0, 0, 2, 2), Bbox.from_extents(1, 1, 5, 5))
    1.0
    """
    width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(max(width, 0.0) * max(height, 0.0))


def _most_crowded_first(places: Sequence[tuple[float, float]]) -> list[int]:
    def crowding(i: int) -> float:
        return sum(1 / (1 + math.dist(places[i], place)) for place in places)

    return sorted(range(len(places)), key=crowding, reverse=True)


def _beside(place: tuple[float, float], size: tuple[float, float], distance: float, angle: float) -> Bbox:
    """A box held by its side or corner that faces the place."""
    (x, y), (width, height) = place, size
    across, up = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    left = x + distance * across - width * (0.0 if across > 0.3 else 1.0 if across < -0.3 else 0.5)
    low = y + distance * up - height * (0.0 if up > 0.3 else 1.0 if up < -0.3 else 0.5)
    return Bbox.from_bounds(left, low, width, height)


def _around(place: tuple[float, float], reach: float) -> Bbox:
    return Bbox.from_bounds(place[0] - reach, place[1] - reach, 2 * reach, 2 * reach)


def _text_size(axes: Axes, point: Point, fontsize: float) -> tuple[float, float]:
    probe = axes.text(point.x, point.y, point.text, fontsize=fontsize, weight=point.weight)
    extent = probe.get_window_extent()
    probe.remove()
    return extent.width, extent.height


def _write(axes: Axes, point: Point, place: tuple[float, float], box: Bbox, fontsize: float, line: bool) -> None:
    dot = axes.figure.dpi / 72
    x, y = ((box.x0 + box.x1) / 2 - place[0]) / dot, ((box.y0 + box.y1) / 2 - place[1]) / dot
    nearest = tuple(
        min(max((at - low) / size, 0.0), 1.0)
        for at, low, size in ((place[0], box.x0, box.width), (place[1], box.y0, box.height))
    )
    look = {"arrowstyle": "-", "lw": 0.5, "color": point.color, "shrinkA": 0, "shrinkB": 3, "relpos": nearest}
    axes.annotate(
        point.text,
        (point.x, point.y),
        (x, y),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=fontsize,
        color=point.color,
        weight=point.weight,
        arrowprops=look if line else None,
    )
