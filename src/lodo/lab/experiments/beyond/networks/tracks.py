"""The tracks that report on several seeds: every optimizer tuned, and every optimizer as it comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lodo.lab.experiments.base import Plan, Request, Results
from lodo.lab.experiments.beyond.networks.base import (
    Entrant,
    NetworksExperiment,
    entrants,
    grid_size,
    reported,
    tried,
    workloads,
)
from lodo.lab.experiments.beyond.networks.entries import OURS, REFERENCE, TUNED, UNTOUCHED
from lodo.lab.experiments.beyond.networks.figures import curve_figure, ratio_figure
from lodo.lab.experiments.beyond.networks.rows import OverallRow, SettingRow
from lodo.lab.experiments.beyond.networks.standings import TRAINING, VALIDATION, Reports, overall_metric, rows
from lodo.lab.experiments.beyond.networks.trials import CONSTANT, Trial, best, edge, grid, rate
from lodo.lab.show.plots import Figure
from lodo.lab.show.tables import Row

SETTINGS = "settings that were chosen on the tuning seed"


class TunedTrack(NetworksExperiment):
    """Every optimizer at the best of as many trials."""

    track = "tuned"
    reference = REFERENCE
    adds_reference = True

    def tuned(self, request: Request) -> list[Entrant]:
        """The optimizers that are tuned."""
        return entrants(request)

    def untouched(self, request: Request) -> list[Entrant]:
        """The optimizers that are shown at their library's defaults: ours, beside itself tuned."""
        return [Entrant(UNTOUCHED, each.choice) for each in entrants(request) if each.label == OURS]

    def reporting(self, request: Request) -> list[Entrant]:
        """The optimizers whose results are shown."""
        return [*self.tuned(request), *self.untouched(request)]

    def plan(self, request: Request) -> Plan:
        """The grid on the tuning seed, and what is untouched on the seeds that report."""
        plan: Plan = {}
        for name in workloads(request):
            for entrant in self.tuned(request):
                plan |= self.tuning_cells(request, name, entrant, grid(grid_size(request)))
            for entrant in self.untouched(request):
                plan |= self.report_cell(request, name, entrant, Trial(0, CONSTANT))
        return plan

    def further(self, request: Request, results: Results) -> Plan:
        """Further rates where the best was at an edge; then the best setting on the other seeds."""
        return self.after_tuning(request, results, self.tuned(request))

    def reports(self, request: Request, results: Results) -> Reports:
        """The curves of the seeds that report, by task and optimizer."""
        return {
            name: {
                entrant.label: results[reported(entrant, name)]
                for entrant in self.reporting(request)
                if reported(entrant, name) in results
            }
            for name in workloads(request)
        }

    def rows(self, request: Request, results: Results) -> list[Row]:
        reports = {name: found for name, found in self.reports(request, results).items() if found}
        ranked = [entrant.label for entrant in entrants(request)]
        return [*(rows(reports, self.reference, ranked) if reports else []), *self._setting_rows(request, results)]

    def _setting_rows(self, request: Request, results: Results) -> list[SettingRow]:
        found = []
        number = grid_size(request)
        for name in workloads(request):
            for entrant in self.tuned(request):
                losses = tried(results, name, entrant, number)
                if not losses:
                    continue
                trial = best(losses)
                loss, every = losses[trial], {each.power for each in losses}
                added = len(every) - number
                found.append(
                    SettingRow(
                        entrant.label,
                        SETTINGS,
                        loss if math.isfinite(loss) else None,
                        None,
                        1,
                        int(math.isinf(loss)),
                        task=name,
                        lr=rate(entrant.default, trial.power),
                        schedule=trial.schedule,
                        rates=number,
                        added=added if max(every) > number // 2 else -added,
                        at_edge=bool(edge(losses)),
                    )
                )
        return found

    def figures(self, request: Request, results: Results) -> list[Figure]:
        reports = {name: found for name, found in self.reports(request, results).items() if found}
        found = self.rows(request, results)
        overall = [row for row in found if isinstance(row, OverallRow)]
        if not reports or not overall:
            return []
        return [
            curve_figure(f"{self.name}-curves", reports),
            *ratio_figure(f"{self.name}-ratios", found, self.reference),
        ]

    def sentence(self, rows: Sequence[Row]) -> str:
        parts = []
        for metric, name in ((TRAINING, "in training"), (VALIDATION, "in validation")):
            found = {
                row.optimizer: row.mean
                for row in rows
                if row.metric == overall_metric(metric) and row.mean is not None and row.optimizer != self.reference
            }
            if not found:
                continue
            lowest = min(found, key=lambda label: found[label])
            ours = [f"{label} has {found[label]:.3f}" for label in found if label.startswith(OURS) and label != lowest]
            above = f"{self.reference} itself is lowest; of the others, " if found[lowest] > 1 else ""
            parts.append(", ".join([f"{name} {above}{lowest} is lowest with {found[lowest]:.3f}", *ours]))
        if not parts:
            return f"Nothing to compare: no optimizer but {self.reference} has a ratio on every task."
        return f"Geometric means of the losses over tuned AdamW's: {'; '.join(parts)}."

    def notes(self, request: Request, results: Results) -> list[str]:
        small = "This is the small size: runs that are this short show how it works, not which optimizer is better."
        return [
            *([small] if request.options.get("quick") else []),
            *self._about_settings(request),
            *(
                f"On {name}, of {load.steps:,} steps, the trials had {load.tuning_steps:,}."
                for name, load in workloads(request).items()
                if load.tuning_steps is not None
            ),
            "A seed draws the same first weights and the same batches for all optimizers. Differences and ratios are "
            "taken seed by seed; s.e. is their standard error, that of a geometric mean from those of its tasks.",
            "Steps and seconds are counted until the mean training loss over a tenth of the run's steps is as low as "
            "AdamW's at its end on the same seed. Seconds are processor time on one thread, without the first "
            "step and without measurements. On a machine whose speed changes from hour to hour, those of runs that are "
            "hours apart do not compare.",
            "A run whose loss became infinite or NaN has diverged, and counts as the worst. Losses that are not "
            "positive have no ratio. Schedule-free is validated at its average, and its training loss is that of the "
            "point where it trains.",
            *about_processors(self.reports(request, results)),
        ]

    def _about_settings(self, request: Request) -> list[str]:
        number = grid_size(request)
        return [
            f"Each optimizer had {2 * number} trials per task on seed 0, which is not among those that report: "
            f"{number} rates around the library's default, sqrt(10) apart, each constant and with a warm-up over a "
            "twentieth of the run and a cosine to zero. The lowest training loss over the last 10 % was chosen. Where "
            "it was at the edge of the rates, up to 3 more were tried.",
            *(f"{each.label} has its default setting, no schedule and no rank." for each in self.untouched(request)),
        ]

    def about(self, request: Request) -> str:
        return f"{self.size(request)}, settings chosen on another seed. Not in the paper."


class UntouchedTrack(TunedTrack):
    """Every optimizer at its library's defaults, beside tuned AdamW."""

    track = "untouched"
    reference = TUNED
    adds_reference = False

    def tuned(self, request: Request) -> list[Entrant]:
        return [Entrant(TUNED, replace(self.named["adamw"], title=TUNED))]

    def untouched(self, request: Request) -> list[Entrant]:
        return entrants(request)

    def _about_settings(self, request: Request) -> list[str]:
        number = grid_size(request)
        return [
            "Each optimizer has one setting for all tasks, without a schedule: its library's defaults, except where "
            f"networks.toml says otherwise. AdamW tuned is the best of at least {2 * number} trials per task on "
            "another seed, as in the track 'tuned', and has no rank.",
        ]

    def about(self, request: Request) -> str:
        return f"{self.size(request)}, each optimizer at its library's defaults. Not in the paper."


def about_processors(reports: Reports) -> list[str]:
    """A warning if times cannot be compared, since runs were made on several kinds of machines."""
    curves = [curve for several in reports.values() for found in several.values() for curve in found]
    kinds = sorted({str(curve.environment.get("processor", "not known")) for curve in curves})
    if len(kinds) < 2:
        return []
    return [f"These runs were made on different processors, {' and '.join(kinds)}: their seconds do not compare."]
