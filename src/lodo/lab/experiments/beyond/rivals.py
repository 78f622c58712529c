"""Today's optimizers beside the paper's on the noisy quadratic bowl: the loss they reach, and the cost of a step."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, step_time
from lodo.lab.experiments.paper.bowl import (
    AT_100K,
    LOSS,
    check_noise,
    compare_with_rivals,
    tracking_error,
    tracking_plot,
)
from lodo.lab.optimizers import COSTS, OPTIMIZERS, QUADRATIC, Choice
from lodo.lab.optimizers.bowl_rivals import Known, bowl_rivals
from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.styles import Style
from lodo.lab.show.tables import Row, measure
from lodo.lab.tasks.bowl import newton_loss

_ADAM, _LODO = "Adam", Cell("LODO")  # times are compared with Adam's; LODO is in every panel
_PANEL = 9  # curves that fit into one panel
_COLORS = dict(zip((*COSTS, ""), ("#0072b2", "#d55e00", "#009e73", "#882255", "#7f7f7f"), strict=True))


@dataclass(frozen=True)
class RivalRow(Row):
    """A result with its cost class, its time, and the error of earlier runs."""

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "error", "seeds", "µs a step", "x Adam", "known", "difference")

    cost: str = ""
    microseconds: float = 0.0
    times_adam: float | None = None
    known: float | None = None
    known_steps: int | None = None
    steps: int | None = None

    @property
    def section(self) -> str:
        return heading(self.cost)

    @property
    def cells(self) -> tuple[str, ...]:
        known, difference = "", ""
        if self.known is not None and self.known_steps is not None:
            known = f"{self.known:g} ({_short(self.known_steps)})"
            if self.mean is not None and self.steps == self.known_steps:
                difference = f"{100 * (self.mean / self.known - 1):+.1f} %"
        times = "" if self.times_adam is None else f"{self.times_adam:.1f}"
        return self.optimizer, self.ours, self.runs, f"{self.microseconds:.0f}", times, known, difference


def _short(steps: int) -> str:
    return f"{steps // 1000}k" if steps % 1000 == 0 else f"{steps:,}"


class RivalsExperiment(Experiment):
    """Every row of rivals.toml."""

    optimizers = ", ".join(bowl_rivals())
    tracks = False
    row = RivalRow

    @property
    def named(self) -> Mapping[str, Choice]:
        """The rows of rivals.toml."""
        return {name: rival.choice for name, rival in bowl_rivals().items()}

    def plan(self, request: Request) -> Plan:
        check_noise(request)
        return self.by_choice(request)

    def rows(self, request: Request, results: Results) -> list[Row]:
        costs, knowns = _costs(request), {} if request.task_options else _knowns()
        times = {cell.label: step_time(curves) for cell, curves in results.items()}
        rows: list[RivalRow] = []
        for (label, _), curves in results.items():
            row = measure(label, LOSS, curves, partial(tracking_error, fresh=True))
            known = knowns.get(label)
            rows.append(
                RivalRow(
                    **asdict(row),
                    cost=costs[label],
                    microseconds=times[label],
                    times_adam=times[label] / times[_ADAM] if _ADAM in times else None,
                    known=known.error if known else None,
                    known_steps=known.steps if known else None,
                    steps=request.evaluations,
                )
            )
        order = [*COSTS, ""]
        return [*sorted(rows, key=lambda row: (order.index(row.cost), math.inf if row.mean is None else row.mean))]

    def notes(self, request: Request, results: Results) -> list[str]:
        best = newton_loss(**request.task_options)
        notes = [
            f"The best possible loss, what the noise adds in one step, is {best:.4g}.",
            "Losses are those of fresh batches, where the optimizer asks for the gradient. A "
            "run counts as diverged if its loss is not finite or worse than that of a run that never moves.",
            "Settings were tuned on one seed of this bowl. Known errors are means of other seeds, or the paper's, and "
            "compared with ours after as many steps.",
            "Times are medians over parts of all runs. They are those of whole training steps, with the work of the "
            "bowl, on one thread, while the workers shared the machine. At n = 100 calls cost more than arithmetic.",
        ]
        there = [rival for rival in bowl_rivals().values() if rival.note and Cell(rival.choice.label) in results]
        of_rivals = [
            f"{'; '.join(rival.choice.label for rival in there if rival.note == text)}: {text}"
            for text in dict.fromkeys(rival.note for rival in there)
        ]
        return notes + of_rivals

    def figures(self, request: Request, results: Results) -> list[Figure]:
        rows = [row for row in self.rows(request, results) if isinstance(row, RivalRow)]
        classes = [panel for cost in (*COSTS, "") for panel in _panels(results, _costs(request), cost) if panel[1]]
        curves = [
            tracking_plot(
                f"curves-{number}",
                request,
                {cell.label: results[cell] for cell in results if cell in group or cell == _LODO},
                title,
            )
            for number, (title, group) in enumerate(classes)
        ]
        return [
            Figure(self.name, [costs_plot(rows, newton_loss(**request.task_options))], size=(9.0, 6.0)),
            Figure(f"{self.name}-curves", curves, columns=2, size=(6.6, 3.8)),
        ]

    def sentence(self, rows: Sequence[Row]) -> str:
        losses = {row.optimizer: row.mean for row in rows if row.mean is not None}
        own = [label for label in losses if _is_ours(label)]
        ours = min(own, key=lambda label: losses[label], default="LODO")
        dense = {row.optimizer for row in rows if isinstance(row, RivalRow) and row.cost == QUADRATIC}
        verb = "tracks the moving minimum with a loss of"
        return compare_with_rivals(losses, verb, ours=ours, left_out=dense | {*own})

    def about(self, request: Request) -> str:
        """The size of what was run."""
        task = "Not the bowl that the settings were tuned on. " if request.task_options else ""
        return f"{self.size(request)}. {task}A step is one evaluation of the loss and its gradient."


def _is_ours(label: str) -> bool:
    return label.startswith("LODO")


def _costs(request: Request) -> dict[str, str]:
    """The cost class of every choice; empty where it is not known."""
    by_title = {rival.choice.label: rival.cost for rival in bowl_rivals().values()}
    by_name = {name: known.cost for name, known in OPTIMIZERS.items()}
    return {
        choice.label: by_title.get(choice.title or choice.label, by_name.get(choice.optimizer, ""))
        for choice in request.choices
    }


def _knowns() -> dict[str, Known]:
    """Known errors by label, from rivals.toml and from the paper."""
    paper = {label: Known(mean, 100_000) for label, (mean, _) in AT_100K.items() if mean is not None}
    return paper | {rival.choice.label: rival.known for rival in bowl_rivals().values() if rival.known}


def costs_plot(rows: Sequence[RivalRow], best: float) -> Plot:
    """Error against time a step: one point an optimizer, one colour a cost class."""
    lines = []
    for cost in dict.fromkeys(row.cost for row in rows):
        there = [(row, row.mean) for row in rows if row.cost == cost and row.mean is not None]
        y, spread = np.array([mean for _, mean in there]), np.array([row.std or 0.0 for row, _ in there])
        lines.append(
            Line(
                set_heading(cost),
                np.array([row.microseconds for row, _ in there]),
                y,
                y - spread,
                y + spread,
                names=[row.optimizer for row, _ in there],
                style=Style(_COLORS[cost]),
                mark="points",
                size=5,
            )
        )
    return Plot(
        "costs",
        "What they reach, and how long a step takes",
        Axis("microseconds a step", log=True),
        Axis(LOSS, log=True),
        lines,
        levels={f"Newton ({best:.4g})": best},
        write_names=True,
    )


def _panels(results: Results, costs: Mapping[str, str], cost: str) -> list[tuple[str, list[Cell]]]:
    """The optimizers of a class, in two panels if there are too many for one: the paper's, and the others."""
    cells = [cell for cell in results if costs[cell.label] == cost]
    paper = {known.label for known in OPTIMIZERS.values()}
    if len(cells) <= _PANEL:
        return [(set_heading(cost), cells)]
    return [
        (f"{set_heading(cost)}, the paper's", [cell for cell in cells if cell.label in paper]),
        (f"{set_heading(cost)}, others", [cell for cell in cells if cell.label not in paper]),
    ]


def heading(cost: str) -> str:
    """The heading of a cost class in tables."""
    return f"{cost} a step" if cost else "cost not known"


def set_heading(cost: str) -> str:
    r"""The same in figures, with its formula set.

    >>> set_heading(">= O(n^2)"), set_heading("O(n log n)")
    ('$\\geq O(n^{2})$ a step', '$O(n\\,\\mathrm{log}\\,n)$ a step')
    """
    formula = re.sub(r"\^([\d.]+)", r"^{\1}", cost).replace(">=", r"\geq").replace(" log ", r"\,\mathrm{log}\,")
    return heading(f"${formula}$" if cost else "")
