"""From the curves of the seeds that report to the rows of the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev

from lodo.lab.experiments.base import step_time
from lodo.lab.experiments.beyond.networks.entries import OURS, UNTOUCHED
from lodo.lab.experiments.beyond.networks.metrics import (
    best_validation,
    estimate,
    final_loss,
    mean_ratio,
    paired_difference,
    paired_ratio,
    ranks,
    seconds_to,
    steps_to,
)
from lodo.lab.experiments.beyond.networks.rows import CostRow, OverallRow, TaskRow
from lodo.lab.run import Curve
from lodo.lab.show.tables import Row

TRAINING = "training loss over the last 10 %"
VALIDATION = "best validation loss"
STEPS = "steps to AdamW's final training loss"
SECONDS = "seconds to AdamW's final training loss"
COSTS = "time and memory of a step"
OVER = "over that of tuned AdamW, over all tasks"

Reports = Mapping[str, Mapping[str, Sequence[Curve]]]  # task -> optimizer -> curves
Values = Mapping[str, Mapping[str, Mapping[int, float | None]]]  # task -> optimizer -> seed -> value


def overall_metric(metric: str) -> str:
    """The heading of the table of a quantity over all tasks."""
    return f"{metric}, {OVER}"


def losses(reports: Reports, value: Callable[[Curve], float | None]) -> Values:
    """A quantity of every run."""
    return {
        task: {label: {curve.run.seed: value(curve) for curve in curves} for label, curves in by_label.items()}
        for task, by_label in reports.items()
    }


def ways(reports: Reports, reference: str, way: Callable[[Curve, float], float | None]) -> Values:
    """The way of every run to the final loss of the reference on the same seed; None where it never gets there."""
    found: dict[str, dict[str, dict[int, float | None]]] = {}
    for task, by_label in reports.items():
        targets = {curve.run.seed: final_loss(curve) for curve in by_label.get(reference, ())}
        found[task] = {
            label: {c.run.seed: way(c, targets[c.run.seed]) for c in curves if c.run.seed in targets}
            for label, curves in by_label.items()
        }
    return found


def against_metric(metric: str, ours: str) -> str:
    """The heading of the table that compares one of ours with each of the others."""
    return f"{metric}, {ours} over each of the others"


def rows(reports: Reports, reference: str, ranked: Collection[str]) -> list[Row]:
    """All tables: over all tasks, ours beside each of the others, costs, and task by task.

    Only the optimizers in ``ranked`` have ranks.
    """
    every: dict[str, Values] = {
        TRAINING: losses(reports, final_loss),
        VALIDATION: losses(reports, best_validation),
        STEPS: ways(reports, reference, steps_to),
        SECONDS: ways(reports, reference, seconds_to),
    }
    by_task = {
        metric: task_rows(metric, values, reference, ranked, to_target=metric in (STEPS, SECONDS))
        for metric, values in every.items()
    }
    overall = [row for metric, found in by_task.items() for row in overall_rows(overall_metric(metric), found)]
    against = [
        row
        for ours in (OURS, UNTOUCHED)
        for what in (TRAINING, VALIDATION)
        for row in rows_against(ours, what, every[what])
    ]
    by_task_rows = (row for found in by_task.values() for row in found)
    return [*overall, *against, *cost_rows(reports, reference), *by_task_rows]


def rows_against(ours: str, metric: str, values: Values) -> list[OverallRow]:
    """Ratios of our quantity to that of each of the others, on the tasks that both have."""
    labels = dict.fromkeys(label for by_label in values.values() for label in by_label if label != ours)
    made = []
    for label in labels:
        both = {
            task: {name: each[name] for name in (ours, label)}
            for task, each in values.items()
            if ours in each and label in each
        }
        found = [row for row in task_rows(metric, both, label) if row.optimizer == ours]
        made += [replace(row, optimizer=label) for row in overall_rows(against_metric(metric, ours), found)]
    return sorted(made, key=lambda row: math.inf if row.mean is None else -row.mean)


def task_rows(
    metric: str, values: Values, reference: str, ranked: Collection[str] = (), *, to_target: bool = False
) -> list[TaskRow]:
    """The rows of one quantity, task by task.

    A value of None was not measured or, with ``to_target``, never got there.
    """
    found = []
    for task, by_label in values.items():
        means = {label: _mean(per_seed) for label, per_seed in by_label.items()}
        there = {label: value for label, value in means.items() if value is not None and label in ranked}
        places = {} if to_target else ranks(there)
        theirs = by_label.get(reference, {})
        for label, per_seed in by_label.items():
            found.append(_task_row(metric, task, label, per_seed, theirs, places.get(label), to_target))
    return found


def _task_row(
    metric: str,
    task: str,
    label: str,
    per_seed: Mapping[int, float | None],
    theirs: Mapping[int, float | None],
    rank: float | None,
    to_target: bool,
) -> TaskRow:
    there = {seed: value for seed, value in per_seed.items() if value is not None}
    diverged = sum(math.isinf(value) for value in there.values())
    middle, error = estimate(list(there.values())) if there and len(there) == len(per_seed) else (math.inf, None)
    finite = math.isfinite(middle)
    base = {seed: value for seed, value in theirs.items() if value is not None}
    difference = paired_difference(there, base) if finite else None
    ratio = paired_ratio(there, base) if finite else None
    return TaskRow(
        label,
        metric,
        middle if finite else None,
        stdev(there.values()) if finite and len(there) > 1 else None,
        len(per_seed),
        diverged,
        task=task,
        error=error,
        difference=difference.mean if difference else None,
        difference_error=difference.error if difference else None,
        ratio=ratio.mean if ratio else None,
        ratio_error=ratio.error if ratio else None,
        rank=rank,
        reached=len(there) if to_target else None,
    )


def _mean(per_seed: Mapping[int, float | None]) -> float | None:
    """The mean over seeds; infinite if any diverged, None if any was not measured."""
    values = list(per_seed.values())
    there = [value for value in values if value is not None]
    return estimate(there).mean if there and len(there) == len(values) else None


def overall_rows(heading: str, found: Sequence[TaskRow]) -> list[OverallRow]:
    """One quantity over all tasks, the lowest geometric mean first."""
    tasks = list(dict.fromkeys(row.task for row in found))
    made = []
    for label in dict.fromkeys(row.optimizer for row in found):
        own = [row for row in found if row.optimizer == label]
        lost = [row for row in own if row.diverged and row.reached is None]
        ratios = {row.task: row.ratio for row in own if row.ratio is not None}
        middle = mean_ratio(ratios.values()) if ratios and not lost else None
        relative = [row.ratio_error / row.ratio for row in own if row.ratio and row.ratio_error is not None]
        places = [row.rank for row in own if row.rank is not None]
        worst = lost[0].task if lost else max(ratios, key=lambda task: ratios[task], default="")
        made.append(
            OverallRow(
                label,
                heading,
                middle,
                None,
                max((row.seeds for row in own), default=0),
                len(lost),
                error=middle * math.hypot(*relative) / len(ratios) if middle and len(relative) == len(ratios) else None,
                worst=None if lost else ratios.get(worst),
                worst_task=worst,
                tasks=len(ratios),
                of=len(tasks),
                rank=mean(places) if places else None,
            )
        )
    return sorted(made, key=lambda row: (-row.tasks, math.inf if row.mean is None else row.mean))


def cost_rows(reports: Reports, reference: str) -> list[CostRow]:
    """Times over the reference's, and memory, over all tasks."""
    times = {
        task: {label: step_time(curves) for label, curves in by_label.items()} for task, by_label in reports.items()
    }
    made = []
    for label in dict.fromkeys(label for by_label in reports.values() for label in by_label):
        ratios = {
            task: found[label] / found[reference]
            for task, found in times.items()
            if label in found and reference in found
        }
        memory = [
            curve.state_bytes
            for by_label in reports.values()
            for curve in by_label.get(label, ())
            if curve.state_bytes is not None
        ]
        worst = max(ratios, key=lambda task: ratios[task], default="")
        seeds = max(len(by_label.get(label, ())) for by_label in reports.values())
        made.append(
            CostRow(
                label,
                COSTS,
                mean_ratio(ratios.values()) if ratios else None,
                None,
                seeds,
                0,
                worst=ratios.get(worst),
                worst_task=worst,
                bytes_a_weight=mean(memory) if memory else None,
            )
        )
    return sorted(made, key=lambda row: math.inf if row.mean is None else row.mean)
