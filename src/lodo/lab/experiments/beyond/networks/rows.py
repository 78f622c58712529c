"""The rows of the tables, none of which is wider than 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar

from lodo.lab.show.tables import Row


def number(value: float | None) -> str:
    """A number to four digits, without an exponent where that is short; nothing for None.

    >>> number(0.123456), number(1234.5), number(0.000316), number(None)
    ('0.1235', '1234', '0.000316', '')
    """
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def with_error(value: float | None, error: float | None, sign: str = "") -> str:
    """A number and its standard error, to the digits of the error.

    >>> with_error(0.123456, 0.00123), with_error(-12.3, 4.56, "+"), with_error(1234.5, 12.0), with_error(2.5, None)
    ('0.1235 ± 0.0012', '-12.3 ± 4.6', '1234 ± 12', '2.5')
    """
    if value is None:
        return ""
    if not error:
        return f"{value:{sign}.4g}"
    if not 1e-4 <= error < 1e5:
        return f"{value:{sign}.3g} ± {error:.1g}"
    digits = next((places for places in range(6) if error >= 10 ** (1 - places)), 6)
    return f"{value:{sign}.{digits}f} ± {error:.{digits}f}"


@dataclass(frozen=True)
class TaskRow(Row):
    """A quantity of an optimizer on a task: mean and standard error over seeds, and what it is beside AdamW's.

    ``ratio_error`` is the standard error of the ratio of the means. ``reached`` is the number of seeds that got to
    AdamW's loss, where the quantity is the way to it.
    """

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "mean ± s.e.", "minus AdamW's", "ratio", "rank")

    task: str = ""
    error: float | None = None
    difference: float | None = None
    difference_error: float | None = None
    ratio: float | None = None
    ratio_error: float | None = None
    rank: float | None = None
    reached: int | None = None

    @property
    def section(self) -> str:
        return self.task

    @property
    def cells(self) -> tuple[str, ...]:
        text = with_error(self.mean, self.error)
        if self.mean is None and self.diverged:
            text = "diverged" if self.diverged == self.seeds else f"{self.diverged} of {self.seeds} diverged"
        elif self.mean is None:
            text = "not measured" if self.reached is None else f"in {self.reached} of {self.seeds} runs"
        difference = with_error(self.difference, self.difference_error, "+")
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        return self.optimizer, text, difference, ratio, "" if self.rank is None else f"{self.rank:g}"


@dataclass(frozen=True)
class OverallRow(Row):
    """Ratios over all tasks: their geometric mean and its standard error, the worst task, the mean rank.

    ``mean`` is None if a run of any task diverged. ``tasks`` is the number of tasks that count, ``of`` that of all.
    """

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "geometric mean ± s.e.", "worst task", "tasks", "mean rank")

    error: float | None = None
    worst: float | None = None
    worst_task: str = ""
    tasks: int = 0
    of: int = 0
    rank: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        mean = "diverged" if self.diverged else "" if self.mean is None else f"{self.mean:.3f}"
        mean += f" ± {self.error:.3f}" if mean and self.error else ""
        worst = "diverged" if self.diverged else "" if self.worst is None else f"{self.worst:.3f}"
        rank = "" if self.rank is None else f"{self.rank:.1f}"
        return self.optimizer, mean, f"{worst} {self.worst_task}".strip(), f"{self.tasks}/{self.of}", rank


@dataclass(frozen=True)
class CostRow(Row):
    """What a step costs: its time over AdamW's, and the memory of the optimizer's state."""

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "step / AdamW's", "worst task", "bytes a weight")

    worst: float | None = None
    worst_task: str = ""
    bytes_a_weight: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        time = "" if self.mean is None else f"{self.mean:.2f}"
        worst = "" if self.worst is None else f"{self.worst:.2f} {self.worst_task}"
        memory = "" if self.bytes_a_weight is None else f"{self.bytes_a_weight:.1f}"
        return self.optimizer, time, worst, memory


@dataclass(frozen=True)
class SettingRow(Row):
    """The setting that was chosen on the tuning seed; ``mean`` is its loss there.

    ``added`` rates were tried beyond the grid, below it if negative; ``at_edge`` tells that the best is still the last.
    """

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "rate", "schedule", "tuning loss", "rates tried")

    task: str = ""
    lr: float = 0.0
    schedule: str = ""
    rates: int = 0
    added: int = 0
    at_edge: bool = False

    @property
    def section(self) -> str:
        return self.task

    @property
    def cells(self) -> tuple[str, ...]:
        tried = str(self.rates)
        if self.added:
            tried += f" + {abs(self.added)} {'higher' if self.added > 0 else 'lower'}"
        if self.at_edge:
            tried += ", at edge"
        loss = "diverged" if self.mean is None else number(self.mean)
        return self.optimizer, f"{self.lr:.3g}", self.schedule, loss, tried


@dataclass(frozen=True)
class RateRow(Row):
    """How wide the range of good rates is on a task; ``mean`` is the loss at the best rate."""

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "best rate", "its loss", "decades", "diverged")

    task: str = ""
    lr: float = 0.0
    decades: float = 0.0
    rates: int = 0

    @property
    def section(self) -> str:
        return self.task

    @property
    def cells(self) -> tuple[str, ...]:
        loss = "diverged" if self.mean is None else number(self.mean)
        lost = f"{self.diverged} of {self.rates}" if self.diverged else ""
        return self.optimizer, f"{self.lr:.3g}", loss, f"{self.decades:.2f}", lost


@dataclass(frozen=True)
class WidthRow(Row):
    """The same over all tasks: ``mean`` is the median of the decades."""

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "median", "narrowest", "widest", "tasks")

    least: float = 0.0
    least_task: str = ""
    most: float = 0.0
    most_task: str = ""
    tasks: int = 0

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.optimizer,
            "" if self.mean is None else f"{self.mean:.2f}",
            f"{self.least:.2f} {self.least_task}",
            f"{self.most:.2f} {self.most_task}",
            str(self.tasks),
        )


_KINDS: tuple[type[Row], ...] = (TaskRow, OverallRow, CostRow, SettingRow, RateRow, WidthRow)


def read_row(fields: Mapping[str, Any]) -> Row:
    """A row from its fields in a summary: its kind is the one that has the same fields."""
    for kind in _KINDS:
        if fields.keys() == {each.name for each in dataclass_fields(kind)}:
            return kind(**fields)
    raise TypeError(f"no kind of row has the fields {', '.join(fields)}")
