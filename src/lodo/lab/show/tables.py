"""Tables of results beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from statistics import mean, stdev
from typing import ClassVar, NamedTuple

from rich.text import Text

from lodo.lab.run import Curve
from lodo.lab.show.columns import lay_out

Paper = tuple[float | None, float | None]  # mean and standard deviation, where the paper gives them
Value = Callable[[Curve], float | None]  # the result of a run; None if it was not measured


@dataclass(frozen=True)
class Row:
    """One result: the mean over the seeds that did not diverge, and their standard deviation.

    An experiment with more to show has a subclass with further fields, ``columns`` and `cells`.
    """

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "ours", "paper", "difference", "seeds")

    optimizer: str
    metric: str
    mean: float | None
    std: float | None
    seeds: int
    diverged: int
    paper_mean: float | None = None
    paper_std: float | None = None

    @property
    def section(self) -> str:
        """The heading above the row in its table; empty for none."""
        return ""

    @property
    def ours(self) -> str:
        """The result as text."""
        if self.mean is None:
            return "diverged" if self.diverged else "not measured"
        return with_spread(self.mean, self.std)

    @property
    def runs(self) -> str:
        """The number of seeds, and how many of them diverged, as text."""
        return str(self.seeds) + (f" ({self.diverged} diverged)" if self.diverged and self.mean is not None else "")

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of ``columns``."""
        difference = ""
        if self.mean is not None and self.paper_mean:
            ratio, decades = self.mean / self.paper_mean - 1, self.mean - self.paper_mean
            difference = f"{decades:+.1f} decades" if self.metric.startswith("log10") else f"{100 * ratio:+.1f} %"
        paper = with_spread(self.paper_mean, self.paper_std)
        if self.paper_mean is not None and self.paper_std is None:
            paper = f"{self.paper_mean:.7g}"  # as the paper prints it
        return self.optimizer, self.ours, paper, difference, self.runs


def measure(optimizer: str, metric: str, curves: Sequence[Curve], value: Value, paper: Paper = (None, None)) -> Row:
    """A row from the curves of all seeds.

    A value that is not finite counts as diverged. A run without a value, because the quantity was not measured in it,
    does not count at all.
    """
    every = [math.nan if curve.diverged else value(curve) for curve in curves]
    values = [v for v in every if v is not None]
    finite = [v for v in values if math.isfinite(v)]
    return Row(
        optimizer=optimizer,
        metric=metric,
        mean=mean(finite) if finite else None,
        std=stdev(finite) if len(finite) > 1 else None,
        seeds=len(values),
        diverged=len(values) - len(finite),
        paper_mean=paper[0],
        paper_std=paper[1],
    )


def with_spread(middle: float | None, spread: float | None) -> str:
    """A mean and, unless all seeds agree, its standard deviation, to digits that suit the size of the mean.

    >>> with_spread(8.9312, 0.0271), with_spread(0.00104, 2e-5), with_spread(18602.71, 0.0), with_spread(None, None)
    ('8.93 ± 0.03', '1.040e-03 ± 2.0e-05', '18603', '')
    """
    if middle is None:
        return ""
    size = abs(middle)
    if not 0.01 <= size < 1e7 and size > 0:
        return f"{middle:.3e}" + (f" ± {spread:.1e}" if spread else "")
    digits = 4 if size < 2 else 2 if size < 1000 else 0
    return f"{middle:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread else "")


class Table(NamedTuple):
    """The rows of one metric as text."""

    metric: str
    columns: list[str]
    sections: list[tuple[str, list[list[str]]]]  # rows below their headings, which may be empty


def tables_of(rows: Iterable[Row]) -> list[Table]:
    """One table for each metric, in their order; a column in which no row has anything is left out."""
    return [_table(metric, list(group)) for metric, group in groupby(rows, key=lambda row: row.metric)]


def _table(metric: str, rows: Sequence[Row]) -> Table:
    filled = [any(cells) for cells in zip(*(row.cells for row in rows), strict=True)]
    return Table(
        metric,
        list(compress(rows[0].columns, filled)),
        [
            (section, [list(compress(row.cells, filled)) for row in members])
            for section, members in groupby(rows, key=lambda row: row.section)
        ],
    )


def markdown(title: str, about: str, rows: Iterable[Row], notes: Iterable[str]) -> str:
    """All tables of an experiment as a Markdown file."""
    lines = [f"# {title}", "", about, ""]
    for metric, columns, sections in tables_of(rows):
        lines += [f"## {metric}", "", _line(columns), _line(["---"] * len(columns))]
        for section, members in sections:
            lines += [_line([f"**{section}**", *[""] * (len(columns) - 1)])] if section else []
            lines += map(_line, members)
        lines.append("")
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def terminal(table: Table, width: int) -> Text:
    """A table for a terminal of this width."""
    return lay_out(table.metric, table.columns, table.sections, width, strong="LODO")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
