"""The effect of each of LODO's options beyond the paper on the bowl, one row for each. Not in the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any, ClassVar

import numpy as np

from lodo import LODO
from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, by_label, tail
from lodo.lab.experiments.paper.bowl import tracking_plot
from lodo.lab.optimizers import Choice, paper_hyperparameters
from lodo.lab.optimizers.bowl_rivals import bowl_rivals
from lodo.lab.run import Curve
from lodo.lab.show.curves import Groups
from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.tables import Row, measure
from lodo.lab.tasks.bowl import newton_loss
from lodo.recipes import RECIPES

_DEFAULTS: dict[str, Any] = {
    **{name: signature(LODO).parameters[name].default for name in ("lr", "beta")},
    "meta_lr": RECIPES["paper"]["meta_lr"],
}
_TUNED: dict[str, Any] = paper_hyperparameters("bowl", "lodo")
_BEST: dict[str, Any] = dict(bowl_rivals()["lodo_schedule_free"].choice.settings or {})
_FREE: dict[str, Any] = {name: _BEST[name] for name in ("meta_optimizer", "meta_lr")}
_FREE_TUNED: dict[str, Any] = {**_TUNED, **_FREE, "beta": 0.1}
_SHUFFLE = "mixing(mixing='shuffle')"
_DEEP = "mixing(depth=12, block_size=8, mixing='shuffle')"
_PAPER, _ROBUST, _COMBINED = "paper", "robust recipe", "schedule-free + gate + shuffle, k = 8"


@dataclass(frozen=True)
class Table:
    """A task, how long it is run, and the settings of LODO by label."""

    heading: str
    rows: Mapping[str, Mapping[str, Any]]
    share: float = 1.0  # of the steps asked for
    task: Mapping[str, Any] | None = None
    renewed: bool = False  # a new bowl at half time

    @property
    def title(self) -> str:
        """The heading with a capital letter, unless it begins with a formula."""
        return self.heading if self.heading.startswith("n =") else self.heading[0].upper() + self.heading[1:]


TABLES = (
    Table(
        "the paper's bowl",
        {
            f"{_PAPER}, tuned": _TUNED,
            "tuned, shuffle": {**_TUNED, "preconditioner": _SHUFFLE},
            "tuned, bfloat16 moments": {**_TUNED, "meta_optimizer": "adam(moment_dtype='bfloat16')"},
            "tuned, guard": {**_TUNED, "guard": True},
            "tuned, schedule-free": _FREE_TUNED,
            f"{_PAPER}, untouched defaults": _DEFAULTS,
            "defaults, learned gate": {**_DEFAULTS, "momentum": "learned"},
            f"defaults, {_ROBUST}": {**_DEFAULTS, "recipe": "robust"},
            f"defaults, {_COMBINED}": _BEST,
            f"defaults, {_COMBINED}, depth 12": {**_BEST, "preconditioner": _DEEP},
        },
    ),
    Table(
        "n = 1000",
        {
            f"{_PAPER}, tuned": _TUNED,
            "tuned, shuffle": {**_TUNED, "preconditioner": _SHUFFLE},
            "tuned, schedule-free": {**_FREE_TUNED, "meta_lr": 0.001},
            f"defaults, {_ROBUST}": {**_DEFAULTS, "recipe": "robust"},
        },
        share=0.2,
        task={"n": 1000},
    ),
    Table(
        "n = 1000, a short run",
        {
            f"{_PAPER}, untouched defaults": _DEFAULTS,
            "defaults, learned gate": {**_DEFAULTS, "momentum": "learned"},
            f"defaults, {_ROBUST}": {**_DEFAULTS, "recipe": "robust"},
        },
        share=0.1,
        task={"n": 1000},
    ),
    Table(
        "a Hessian that rotates",
        {
            f"{_PAPER}, tuned": _TUNED,
            "tuned, schedule-free": _FREE_TUNED,
            f"defaults, {_ROBUST}": {**_DEFAULTS, "recipe": "robust"},
        },
        share=0.5,
        task={"rotation": 0.0002},
    ),
    Table(
        "a new bowl at half time",
        {
            f"{_PAPER}, tuned": _TUNED,
            "tuned, guard": {**_TUNED, "guard": True},
            "tuned, schedule-free, guard": {**_FREE_TUNED, "guard": True},
            f"defaults, {_ROBUST}": {**_DEFAULTS, "recipe": "robust"},
        },
        renewed=True,
    ),
)
_BEFORE, _LATER, _LEVEL, _BACK = (
    "loss before the change",
    "loss after the change",
    "loss after the change over that before",
    "steps after the change until the loss stays below twice that before",
)


@dataclass(frozen=True)
class OptionRow(Row):
    """A result, compared with that of the first row of the table."""

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "ours", "against the first", "seeds")

    first: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        against = f"{100 * (self.mean / self.first - 1):+.1f} %" if self.mean and self.first else ""
        return self.optimizer, self.ours, against, self.runs


class OptionsExperiment(Experiment):
    """The paper's algorithm with each option alone (schedule-free with a rate that suits it) and in combination."""

    optimizers = "lodo"
    tracks = False
    row = OptionRow

    def plan(self, request: Request) -> Plan:
        if request.evaluations is None:
            raise ValueError(f"steps must be given for {self.name} instead of seconds: the change comes at half time")
        if request.choices != (Choice("lodo"),):
            raise ValueError(
                f"optimizers and hyperparameters must not be given for {self.name}: it has its own settings of lodo"
            )
        if request.task_options:
            raise ValueError(
                f"task must not be given for {self.name}: it goes through its own, got {request.task_options}"
            )
        plan: Plan = {}
        for table in TABLES:
            asked = replace(request, evaluations=max(10, round(table.share * request.evaluations)))
            task = {**(table.task or {}), **({"renew_at": request.evaluations // 2} if table.renewed else {})}
            for label, options in table.rows.items():
                choice = Choice("lodo", title=label, settings=options)
                plan[Cell(label, table.heading)] = [
                    self.make_run(choice, seed, asked, **task) for seed in range(request.seeds)
                ]
        return plan

    def rows(self, request: Request, results: Results) -> list[Row]:
        rows: list[Row] = []
        for table in TABLES:
            there = {cell.label: curves for cell, curves in results.items() if cell.variant == table.heading}
            if not table.renewed:
                steps = round(table.share * (request.evaluations or 0))
                metric = f"{table.heading}, {steps:,} steps: loss over the last 10 %"
                rows += _compared(metric, there, tail)
                continue
            whole = {label: [replace(c, diverged=False) for c in curves] for label, curves in there.items()}
            rows += _compared(f"{table.heading}: {_BEFORE}", whole, _before)  # even if a run diverges later
            for metric, value in ((_LATER, _later), (_LEVEL, _level), (_BACK, _back)):
                rows += _compared(f"{table.heading}: {metric}", there, value)
        return rows

    def notes(self, request: Request, results: Results) -> list[str]:
        half = (request.evaluations or 0) // 2
        settings = "lr = {lr:g}, beta = {beta:g}, meta_lr = {meta_lr:g}"
        return [
            f"Tuned: {settings.format(**_TUNED)}, the paper's. Untouched defaults: {settings.format(**_DEFAULTS)}. "
            f"Schedule-free: beta = {_FREE_TUNED['beta']:g} and meta_lr = {_FREE['meta_lr']:g} (0.001 for n = 1000).",
            f"The best possible loss is {newton_loss():.4g}, for n = 1000 {newton_loss(n=1000):.4g}.",
            "The rotating Hessian turns a direction by 0.0002 a step on average. The new bowl has another "
            "Hessian of the same curvatures.",
            f"Loss before the change: the mean of the last {half // 10:,} steps. Loss after: of steps "
            f"{round(0.3 * half):,} to {round(0.4 * half):,} after it. Below twice that before: means of 100 steps.",
        ]

    def about(self, request: Request) -> str:
        size = f"{self.size(request)}; tables say where it is fewer steps."
        return f"{size} A step is one evaluation of the loss and its gradient."

    def figures(self, request: Request, results: Results) -> list[Figure]:
        panels = []
        for number, table in enumerate(TABLES):
            groups = by_label(results, table.heading)
            if groups and table.renewed:
                panels.append(change_plot(groups))
            elif groups:
                best = newton_loss(**{name: value for name, value in (table.task or {}).items() if name == "n"})
                asked = replace(request, task_options=table.task or {})
                plot = tracking_plot(f"curves-{number}", asked, groups, table.title)
                panels.append(replace(plot, y=replace(plot.y, range=(0.97 * best, 3 * best))))
        return [Figure(self.name, panels, columns=2, shared_legend=True)]

    def sentence(self, rows: Sequence[Row]) -> str:
        means = {row.optimizer: row.mean for row in rows if row.metric.startswith(f"{TABLES[0].heading},")}
        back = next((r for r in rows if r.optimizer == "tuned, guard" and _LEVEL in r.metric), None)
        level = f"{back.mean:.2f} times" if back and back.mean is not None else "not near"

        def loss(label: str) -> str:
            mean = means.get(label)
            return "no figure" if mean is None else f"{mean:.2f}"

        return (
            f"With untouched defaults the paper's algorithm has a loss of {loss(f'{_PAPER}, untouched defaults')}, "
            f"with the learned gate {loss('defaults, learned gate')}, in the best combination "
            f"{loss(f'defaults, {_COMBINED}')}; with the guard the loss after a sudden change "
            f"comes back to {level} that before."
        )


def _compared(metric: str, there: Mapping[str, Sequence[Curve]], value: Callable[[Curve], float]) -> list[Row]:
    rows = [measure(label, metric, curves, value) for label, curves in there.items()]
    return [OptionRow(**asdict(row), first=rows[0].mean if row is not rows[0] else None) for row in rows]


def _change(curve: Curve) -> int:
    return int(curve.run.task_options["renew_at"])


def _losses(curve: Curve) -> np.ndarray:
    return curve["loss"].astype(np.float64)


def _before(curve: Curve) -> float:
    at = _change(curve)
    return float(_losses(curve)[at - at // 10 : at].mean())


def _later(curve: Curve) -> float:
    """The mean loss from 0.3 to 0.4 times as many steps after the change as there were before it."""
    at = _change(curve)
    return float(_losses(curve)[at + round(0.3 * at) : at + round(0.4 * at)].mean())


def _level(curve: Curve) -> float:
    return _later(curve) / _before(curve)


def _back(curve: Curve) -> float:
    """Steps until the end of the last stretch of 100 steps whose mean is above twice the loss before the change."""
    at, stretch = _change(curve), 100
    after = _losses(curve)[at:]
    means = after[: len(after) // stretch * stretch].reshape(-1, stretch).mean(1)
    above = np.flatnonzero(~(means < 2 * _before(curve)))
    if not len(above):
        return 0.0
    return float(stretch * (above[-1] + 1))


def change_plot(groups: Groups) -> Plot:
    """The loss around the change, mean and range over seeds."""
    lines = []
    for label, curves in groups.items():
        at = _change(curves[0])
        width = max(1, at // 250)
        drawn = [_around(curve, at, width) for curve in curves]
        y = np.stack([losses[: min(map(len, drawn))] for losses in drawn])
        x = (np.arange(y.shape[1]) + 0.5) * width - at // 10
        lost = sum(curve.diverged for curve in curves)
        note = f"{lost} of {len(curves)} diverge" if lost else ""
        lines.append(Line(label, x, y.mean(0), y.min(0), y.max(0), note))
    return Plot(
        "change",
        TABLES[-1].title,
        Axis("steps after the change"),
        Axis("loss, and from the lowest to the highest seed", log=True, range=(5, 1e5)),
        lines,
        levels={f"Newton ({newton_loss():.4g})": newton_loss()},
    )


def _around(curve: Curve, at: int, width: int) -> np.ndarray:
    """Means of ``width`` losses each, from ``at / 10`` steps before the change to ``at / 2`` steps after it."""
    losses = _losses(curve)[at - at // 10 : at + at // 2]
    means: np.ndarray = losses[: len(losses) // width * width].reshape(-1, width).mean(1)
    return means
