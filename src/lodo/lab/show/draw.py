"""Draws figures with Matplotlib, and writes them as PNG and PDF or as SVG."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.axis
import matplotlib.image
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import AsinhNorm, Normalize
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from lodo.lab.files import write_atomically
from lodo.lab.show.labels import Point, label_points
from lodo.lab.show.plots import Axis, Contours, Figure, HeatMap, Line, Panel, Pixels, Plot
from lodo.lab.show.styles import BLACK, Dashes, Style

_RC: Any = {
    "figure.dpi": 150,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "mathtext.fontset": "dejavusans",  # formulas in the letters of the text
    "pdf.fonttype": 42,  # text stays text
}
_SYMBOLS: dict[str, dict[str, Any]] = {
    "circle": {"marker": "o"},
    "ring": {"marker": "o", "mfc": "white"},
    "bar": {"marker": "|"},
    "cross": {"marker": "x"},
    "star": {"marker": "*", "mec": "black", "mew": 0.5},
    "dash": {"marker": "_"},
}
_TITLE, _CAPTION, _LEGEND = 10, 13, 16  # letters in an inch
_HANDLE = 8  # the width of a legend's piece of line, in letters
_INSIDE = 6  # labels that fit into a plot; a longer legend stands beside it
_LONG = 10_000  # numbers from here on are so long that an axis has room for few of them
_COLORS = "RdBu_r"


def look() -> AbstractContextManager[None]:
    """The common look, while figures are drawn and saved."""
    context: AbstractContextManager[None] = mpl.rc_context(_RC)
    return context


def canvas(columns: int = 1, rows: int = 1, size: tuple[float, float] = (6.0, 3.8)) -> tuple[Drawing, list[Axes]]:
    """An empty drawing and its axes, row by row; ``size`` is that of one panel in inches."""
    drawing = Drawing(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return drawing, list(drawing.subplots(rows, columns, squeeze=False).flat)


def write_figures(figures: Iterable[Figure], folder: Path, caption: str = "") -> list[Path]:
    """Draw figures and write each as PNG and PDF; returns the PNG files."""
    with look():
        return [save(draw(figure, caption), folder / figure.name)[0] for figure in figures]


def draw(figure: Figure, caption: str = "") -> Drawing:
    """A figure, with a caption above it.

    >>> line = Line("LODO", np.arange(3.0), np.arange(3.0))
    >>> len(draw(Figure("f", [Plot("a", "A", Axis("step"), Axis("loss"), [line])])).axes)
    1
    """
    shown = [_Shown(panel, choice) for panel in figure.panels for choice in _printed(panel)]
    columns = min(figure.columns, len(shown))
    drawing, every = canvas(columns, math.ceil(len(shown) / columns), figure.size)
    styles = figure.styles
    maps: list[Axes] = []
    for axes, one in zip(every, shown, strict=False):
        axes.set_title(textwrap.fill(one.title, int(_TITLE * figure.size[0])) if "$" not in one.title else one.title)
        if isinstance(one.panel, Plot):
            _draw_plot(axes, one.panel, one.choice, styles)
        elif isinstance(one.panel, Contours):
            _draw_contours(axes, one.panel, styles)
        elif isinstance(one.panel, HeatMap):
            _draw_heat_map(axes, one.panel, figure.largest)
            maps.append(axes)
        else:
            _draw_pixels(axes, one.panel)
    for axes in every[len(shown) :]:
        axes.set_visible(False)
    if maps:
        drawing.colorbar(maps[0].get_images()[0], ax=maps, shrink=0.8)
    if caption:
        drawing.suptitle(textwrap.fill(caption, int(_CAPTION * drawing.get_figwidth())), fontsize="small", color="0.4")
    _add_legends(drawing, every, figure)
    return drawing


@dataclass(frozen=True)
class _Shown:
    """A panel and the choice of its x axis that is drawn."""

    panel: Panel
    choice: str

    @property
    def title(self) -> str:
        if len(_printed(self.panel)) < 2:
            return self.panel.title
        return f"{self.panel.title}, by {'time' if self.choice == 'seconds' else 'step'}"


def _printed(panel: Panel) -> Sequence[str]:
    if not isinstance(panel, Plot):
        return [""]
    first = next(iter(panel.x.choices))
    return [first, "seconds"] if panel.by_time and first != "seconds" else [first]


def _draw_plot(axes: Axes, plot: Plot, choice: str, styles: Mapping[str, Style]) -> None:
    for shade in plot.shades:
        axes.axhspan(shade.low, shade.high, color=shade.style.color, alpha=0.15, lw=0)
    for line in plot.lines:
        _draw_line(axes, line, choice, line.style or styles[line.label])
    for name, height in plot.levels.items():
        axes.axhline(height, color=BLACK, ls=":", lw=1, label=name)
    axes.set(xlabel=plot.x.choices[choice], ylabel=next(iter(plot.y.choices.values())))
    if plot.write_names:
        axes.margins(x=0.12, y=0.08)
    _set_scale(axes, "x", plot.x)
    _set_scale(axes, "y", plot.y)


def _draw_line(axes: Axes, line: Line, choice: str, style: Style) -> None:
    x = line.along(choice)
    label = f"{line.label} ({line.note})" if line.note else line.label
    dashes = _dashes(style.dash)
    if line.mark == "area":
        assert line.low is not None
        assert line.high is not None
        axes.fill_between(x, line.low, line.high, color=style.color, alpha=0.5, lw=0, label=label)
        axes.plot(x, line.high, color=style.color, lw=1)
        return
    shape: dict[str, Any] = {} if line.mark == "line" else {**_SYMBOLS[line.symbol], "ms": line.size}
    axes.plot(
        x,
        line.y,
        color=style.color,
        ls="none" if line.mark == "points" else dashes,
        lw=style.width,
        label=label,
        **shape,
    )
    if line.low is None or line.high is None or not np.any(line.high != line.low):
        return
    if line.mark == "line":
        axes.fill_between(x, line.low, line.high, color=style.color, alpha=0.2, lw=0)
    else:
        axes.vlines(x, line.low, line.high, color=style.color, lw=1)


def _dashes(dash: Dashes) -> Any:
    return dash if isinstance(dash, str) else (0, dash)


def _set_scale(axes: Axes, which: str, axis: Axis) -> None:
    """Scale, limits and ticks of one axis."""
    drawn: matplotlib.axis.Axis = getattr(axes, f"{which}axis")
    if axis.log:
        axes.set(**{f"{which}scale": "log"})
    if axis.range is not None:
        axes.set(**{f"{which}lim": axis.range})
    if axis.reversed:
        drawn.set_inverted(True)
    if axis.ticks is not None:
        drawn.set_ticks(list(axis.ticks), list(axis.ticks.values()), minor=False)
        drawn.set_minor_locator(NullLocator())
        if which == "y":
            axes.tick_params(axis="y", labelsize="small")
            axes.grid(visible=False, axis="y")
    elif axis.log:
        _set_plain_ticks(drawn)
    elif which == "x" and max(drawn.get_view_interval()) > _LONG:
        drawn.set_major_locator(MaxNLocator(5, integer=axis.whole))
    elif axis.whole:
        drawn.set_major_locator(MaxNLocator(integer=True))


def _set_plain_ticks(drawn: matplotlib.axis.Axis) -> None:
    """Plain numbers on a logarithmic axis that is too short for powers of ten."""
    low, high = sorted(drawn.get_view_interval())
    decades = math.log10(high / low) if low > 0 and math.isfinite(high) else math.inf
    if decades > 2:
        return
    subs = (1, 1.5, 2, 3, 5, 7) if decades > 0.6 else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)
    drawn.set_major_locator(LogLocator(subs=subs))
    drawn.set_major_formatter("{x:g}")
    drawn.set_minor_locator(NullLocator())


def _draw_contours(axes: Axes, contours: Contours, styles: Mapping[str, Style]) -> None:
    start, end, size = contours.levels
    heights = np.arange(start, end + size / 2, size)
    axes.contour(
        contours.x, contours.y, contours.height, levels=heights, colors="0.8", linewidths=0.6, linestyles="solid"
    )
    for label, (x, y, _) in contours.paths.items():
        style, shown = styles[label], slice(0, contours.first + 1)
        axes.plot(
            x[shown], y[shown], color=style.color, ls=_dashes(style.dash), lw=0.9, marker="o", ms=1.8, label=label
        )
    for name, place in contours.marked.items():
        color = "green" if name == "minimum" else "red"
        axes.plot(*place, marker="*", color=color, ms=12, ls="none", label=name, zorder=5)
    axes.set(xlim=contours.x[[0, -1]], ylim=contours.y[[0, -1]], xlabel="$x$", ylabel="$y$")
    axes.set_title(f"{contours.title}, {contours.first} steps")
    axes.grid(visible=False)


def _draw_heat_map(axes: Axes, shown: HeatMap, largest: float) -> None:
    norm = Normalize(-largest, largest) if shown.linear is None else AsinhNorm(shown.linear, -largest, largest)
    axes.imshow(shown.values, cmap=_COLORS, norm=norm)
    axes.set_xlabel(shown.x)
    axes.grid(visible=False)


def _draw_pixels(axes: Axes, shown: Pixels) -> None:
    axes.imshow(shown.values, cmap="gray", vmin=shown.range[0], vmax=shown.range[1])
    axes.set_title(shown.title, fontsize="small")
    axes.set_axis_off()


def _add_legends(drawing: Drawing, every: Sequence[Axes], figure: Figure) -> None:
    """One legend for all panels, or one in or beside each; then the names of points, which keep clear of it."""
    if figure.shared_legend:
        entries = {label: handle for axes in every for label, handle in _entries(axes).items()}
        if entries:
            columns = int(_LEGEND * drawing.get_figwidth()) // (max(map(len, entries)) + _HANDLE)
            columns = max(1, min(4, len(entries), columns))
            drawing.legend(
                list(entries.values()), list(entries), loc="outside lower center", ncols=columns, fontsize="small"
            )
        return
    plots = [panel for panel in figure.panels for _ in _printed(panel)]
    for axes, panel in zip(every, plots, strict=False):
        entries = _entries(axes)
        legend: list[Artist] = []
        if entries:
            legend = [axes.legend(list(entries.values()), list(entries), **_place(panel, entries))]
        if isinstance(panel, Plot) and panel.write_names:
            _write_names(axes, panel, figure.styles, legend)


def _place(panel: Panel, entries: Mapping[str, Artist]) -> dict[str, Any]:
    if isinstance(panel, Plot) and panel.write_names:
        return {"loc": "upper right"}
    if len(entries) > _INSIDE:
        return {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    return {"fontsize": "small"}


def _entries(axes: Axes) -> dict[str, Artist]:
    """What a legend shows: the first line of each label."""
    entries: dict[str, Artist] = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        if label:
            entries.setdefault(str(label), handle)
    return entries


def _write_names(axes: Axes, plot: Plot, styles: Mapping[str, Style], avoid: Sequence[Artist]) -> None:
    choice = next(iter(plot.x.choices))
    points = [
        Point(
            float(x),
            float(y),
            name,
            (line.style or styles[line.label]).color,
            "bold" if name.startswith("LODO") else "normal",
        )
        for line in plot.lines
        for x, y, name in zip(line.along(choice), line.y, line.names, strict=True)
    ]
    levels = [line for line in axes.get_lines() if line.get_label() in plot.levels]
    label_points(axes, points, avoid=[*avoid, *levels])


def save(drawing: Drawing, path: Path) -> list[Path]:
    """Write a drawing as PNG and PDF."""
    written = []
    for kind in ("png", "pdf"):
        buffer = io.BytesIO()
        drawing.savefig(buffer, format=kind)
        target = path.with_name(f"{path.name}.{kind}")
        write_atomically(target, buffer.getvalue())
        written.append(target)
    return written


def save_svg(drawing: Drawing, path: Path) -> None:
    """Write a drawing as SVG, the same file for the same drawing."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "lodo", "svg.fonttype": "path"}):
        drawing.savefig(buffer, format="svg", metadata={"Date": None})
    write_atomically(path, buffer.getvalue())


def save_picture(pixels: np.ndarray, path: Path, zoom: int = 4) -> None:
    """Write grey bytes as a PNG, every pixel ``zoom`` wide."""
    buffer = io.BytesIO()
    matplotlib.image.imsave(buffer, np.kron(pixels, np.ones((zoom, zoom))), cmap="gray", vmin=0, vmax=255, format="png")
    write_atomically(path, buffer.getvalue())
