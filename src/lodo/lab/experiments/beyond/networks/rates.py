"""The track over rates: how the final loss depends on the learning rate, and how wide the range of good ones is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from lodo.lab.experiments.base import Plan, Request, Results
from lodo.lab.experiments.beyond.networks.base import (
    Entrant,
    NetworksExperiment,
    entrants,
    tuning_cell,
    workloads,
)
from lodo.lab.experiments.beyond.networks.entries import OURS, REFERENCE, Workload
from lodo.lab.experiments.beyond.networks.figures import rate_figure
from lodo.lab.experiments.beyond.networks.metrics import final_loss
from lodo.lab.experiments.beyond.networks.rows import RateRow, WidthRow
from lodo.lab.experiments.beyond.networks.trials import CONSTANT, Trial, powers, rate, width_in_decades
from lodo.lab.show.plots import Figure
from lodo.lab.show.tables import Row

MANY, FEWER = 9, 5  # rates, at full size and with --quick
TOLERANCE = 0.05
OVERALL = "decades of rates within 5 % of the best, over all tasks"
EVERY = "decades of rates within 5 % of the best, task by task"

Losses = Mapping[str, Mapping[str, Mapping[int, float]]]  # task -> optimizer -> power -> loss


class RatesTrack(NetworksExperiment):
    """Every optimizer over four decades of constant rates, on the tuning seed."""

    track = "rates"

    def request(self, **given: Any) -> Request:
        """A request; there is one seed, that of tuning."""
        if given.get("seeds") not in (None, 1):
            raise ValueError(f"seeds must be left out, since rates are tried on the tuning seed, got {given['seeds']}")
        return super().request(**given)

    def find_workloads(self, tasks: str | None, quick: bool, steps: int | None) -> dict[str, Workload]:
        """The tasks, with trials as long as the runs: here they are what is shown."""
        found = super().find_workloads(tasks, quick, steps)
        return {name: replace(load, tuning_steps=None) for name, load in found.items()}

    def plan(self, request: Request) -> Plan:
        plan: Plan = {}
        for name in workloads(request):
            for entrant in entrants(request):
                plan |= self.tuning_cells(request, name, entrant, [Trial(p, CONSTANT) for p in _powers(request)])
        return plan

    def losses(self, request: Request, results: Results) -> Losses:
        """The final losses, where all rates are finished."""
        found: dict[str, dict[str, dict[int, float]]] = {}
        for name in workloads(request):
            for entrant in entrants(request):
                cells = {power: tuning_cell(entrant, name, Trial(power, CONSTANT)) for power in _powers(request)}
                if all(cell in results for cell in cells.values()):
                    losses = {power: final_loss(results[cell][0]) for power, cell in cells.items()}
                    found.setdefault(name, {})[entrant.label] = losses
        return found

    def rows(self, request: Request, results: Results) -> list[Row]:
        found = self.losses(request, results)
        by_label = {entrant.label: entrant for entrant in entrants(request)}
        every = [
            rate_row(name, by_label[label], losses)
            for name, several in found.items()
            for label, losses in several.items()
        ]
        return [*width_rows(every), *every]

    def figures(self, request: Request, results: Results) -> list[Figure]:
        found = self.losses(request, results)
        return [rate_figure(self.name, found)] if found else []

    def sentence(self, rows: Sequence[Row]) -> str:
        medians = {row.optimizer: row.mean for row in rows if isinstance(row, WidthRow) and row.mean is not None}
        if not medians:
            return "Nothing to show: no optimizer has finished all rates."
        widest = max(medians, key=lambda label: medians[label])
        shown = [label for label in dict.fromkeys((OURS, REFERENCE, widest)) if label in medians]
        said = ", ".join(f"{label} {medians[label]:.2f}" for label in shown)
        most = f"; {widest} has the most" if len(medians) > 1 else ""
        return f"Decades of rates within 5 % of the best, median over tasks: {said}{most}."

    def notes(self, request: Request, results: Results) -> list[str]:
        return [
            f"{len(_powers(request))} constant rates around the library's default, sqrt(10) apart, on seed 0. The loss "
            "is the mean training loss over the last 10 %.",
            "A range is the one around the best rate, with straight lines between the rates that were tried, up to the "
            "last that did not diverge. It never extends beyond the rates that were tried.",
        ]

    def _seeds(self, request: Request) -> str:
        return f"{len(_powers(request))} rates on one seed"

    def about(self, request: Request) -> str:
        return f"{self.size(request)}. Not in the paper."


def _powers(request: Request) -> range:
    return powers(FEWER if request.options.get("quick") else MANY)


def rate_row(name: str, entrant: Entrant, losses: Mapping[int, float]) -> RateRow:
    """The best rate of an optimizer on a task, and how far from it others are as good."""
    best = min(losses, key=lambda power: losses[power])
    return RateRow(
        entrant.label,
        EVERY,
        losses[best] if math.isfinite(losses[best]) else None,
        None,
        1,
        sum(map(math.isinf, losses.values())),
        task=name,
        lr=rate(entrant.default, best),
        decades=width_in_decades(losses, TOLERANCE),
        rates=len(losses),
    )


def width_rows(every: Sequence[RateRow]) -> list[WidthRow]:
    """The median over tasks, the widest range first."""
    made = []
    for label in dict.fromkeys(row.optimizer for row in every):
        widths = {row.task: row.decades for row in every if row.optimizer == label}
        least, most = min(widths, key=lambda task: widths[task]), max(widths, key=lambda task: widths[task])
        made.append(
            WidthRow(
                label,
                OVERALL,
                median(widths.values()),
                None,
                1,
                0,
                least=widths[least],
                least_task=least,
                most=widths[most],
                most_task=most,
                tasks=len(widths),
            )
        )
    return sorted(made, key=lambda row: -(row.mean or 0.0))
