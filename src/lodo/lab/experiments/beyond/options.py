"""What each of LODO's options beyond the paper does to the bowl: one row an option. Not in the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lodo.lab.experiments.base import Cell, Experiment, Plan, Request, Results, by_label, tail
from lodo.lab.experiments.paper.bowl import draw_curves, tracking_plot
from lodo.lab.optimizers import Choice
from lodo.lab.run import Curve
from lodo.lab.show.figures import band, canvas, styles
from lodo.lab.show.plots import Line, Paths, Plot
from lodo.lab.show.tables import Row, measure
from lodo.lab.tasks import newton_loss

_DEFAULTS: dict[str, Any] = {"lr": 1.0, "beta": 0.9, "meta_lr": 0.001}
_TUNED: dict[str, Any] = {"lr": 0.27, "beta": 0.195, "meta_lr": 0.00096}  # the paper's, as in paper.toml
_FREE: dict[str, Any] = {"meta_optimizer": "schedule-free", "meta_lr": 0.0025}
_FREE_TUNED: dict[str, Any] = {**_TUNED, **_FREE, "beta": 0.1}
_BEST: dict[str, Any] = {
    **_DEFAULTS, **_FREE, "momentum": "learned", "mixing": "shuffle", "block_size": 8, "depth": 8,
}  # fmt: skip
_PAPER, _ROBUST, _COMBINED = "paper", "robust recipe", "schedule-free + gate + shuffle, k = 8"


@dataclass(frozen=True)
class Table:
    """A task, how long it is run, and LODO's settings by label."""

    heading: str
    rows: Mapping[str, Mapping[str, Any]]
    share: float = 1.0  # of the steps asked for
    task: Mapping[str, Any] | None = None
    renewed: bool = False  # a new bowl at half time


TABLES = (
    Table(
        "the paper's bowl",
        {
            f"{_PAPER}, tuned": _TUNED,
            "tuned, shuffle": {**_TUNED, "mixing": "shuffle"},
            "tuned, permuted shuffle": {**_TUNED, "mixing": "permuted-shuffle"},
            "tuned, bfloat16 moments": {**_TUNED, "moment_dtype": "bfloat16"},
            "tuned, guard": {**_TUNED, "guard": True},
            "tuned, schedule-free": _FREE_TUNED,
            f"{_PAPER}, untouched defaults": _DEFAULTS,
            "defaults, learned gate": {**_DEFAULTS, "momentum": "learned"},
            f"defaults, {_ROBUST}": {**_DEFAULTS, "recipe": "robust"},
            f"defaults, {_COMBINED}": _BEST,
        },
    ),
    Table(
        "n = 1000",
        {
            f"{_PAPER}, tuned": _TUNED,
            "tuned, shuffle": {**_TUNED, "mixing": "shuffle"},
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
    """A figure beside that of the table's first row."""

    columns: ClassVar[tuple[str, ...]] = ("optimizer", "ours", "against the first", "seeds")

    first: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        against = f"{100 * (self.mean / self.first - 1):+.1f} %" if self.mean and self.first else ""
        return self.optimizer, self.ours, against, self.runs


class OptionsExperiment(Experiment):
    """The paper's algorithm with each option alone (schedule-free at rates that suit it), and combinations."""

    optimizers = "lodo"
    tracks = False
    row = OptionRow

    def plan(self, request: Request) -> Plan:
        if request.evaluations is None:
            raise ValueError(f"steps must be given for {self.name} instead of seconds: the change comes half-way")
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
            rows += _compared(f"{table.heading}: {_BEFORE}", whole, _before)  # also of runs that diverge later
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
            "The Hessian that rotates turns a direction by 0.0002 a step, on average. The new bowl has another "
            "Hessian of the same curvatures.",
            f"Loss before the change: the mean of the last {half // 10:,} steps. Loss after: of steps "
            f"{round(0.3 * half):,} to {round(0.4 * half):,} after it. Below twice that before: means of 100 steps.",
        ]

    def about(self, request: Request) -> str:
        size = f"{self.size(request)}; tables say where it is fewer steps."
        return f"{size} A step is one evaluation of the loss and its gradient."

    def figures(self, request: Request, results: Results) -> dict[str, Figure]:
        figure, (left, right) = canvas(2)
        first = {cell: curves for cell, curves in results.items() if cell.variant == TABLES[0].heading}
        draw_curves(left, first, "evaluations", newton_loss())
        left.set_ylim(0.97 * newton_loss(), 2.5 * newton_loss())
        left.set_yticks([8, 9, 10, 12, 15])
        _draw_change(right, {c: curves for c, curves in results.items() if c.variant == TABLES[-1].heading})
        return {"bowl-options": figure}

    def plots(self, request: Request, results: Results) -> list[Plot | Paths]:
        plots: list[Plot | Paths] = []
        for number, table in enumerate(TABLES):
            if not (there := by_label(results, table.heading)):
                continue
            if table.renewed:
                plots.append(_change_plot(f"{self.name}-change", there))
            else:
                best = newton_loss(**{k: v for k, v in (table.task or {}).items() if k == "n"})
                asked = replace(request, task_options=table.task or {})
                plot = tracking_plot(f"{self.name}-curves-{number}", asked, there, table.heading.capitalize())
                plots.append(replace(plot, focus=(0.97 * best, 3 * best)))
        return plots

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
    """In a short run, at the same share of what comes after the change."""
    at = _change(curve)
    return float(_losses(curve)[at + round(0.3 * at) : at + round(0.4 * at)].mean())


def _level(curve: Curve) -> float:
    return _later(curve) / _before(curve)


def _back(curve: Curve) -> float:
    """The end of the last stretch of 100 steps whose mean is above twice the level before; at most that of the run."""
    at, stretch = _change(curve), 100
    after = _losses(curve)[at:]
    means = after[: len(after) // stretch * stretch].reshape(-1, stretch).mean(1)
    above = np.flatnonzero(~(means < 2 * _before(curve)))
    if not len(above):
        return 0.0
    return float(stretch * (above[-1] + 1))


def _draw_change(axes: Axes, results: Results) -> None:
    """The loss around the change."""
    looks = styles(cell.label for cell in results)
    for cell, curves in results.items():
        at = _change(curves[0])
        window = partial(_around, at=at, width=max(1, at // 1000))
        drawn = [window(curve) for curve in curves]
        shortest = min(len(y) for y in drawn)
        x = (np.arange(shortest) + 0.5) * max(1, at // 1000) - at // 10
        label = f"{cell.label} (diverges)" if any(curve.diverged for curve in curves) else cell.label
        band(axes, x, np.stack([y[:shortest] for y in drawn]), label, looks[cell.label])
    axes.axhline(newton_loss(), color="black", ls=":", label=f"Newton ({newton_loss():.4g})")
    axes.set_yscale("log")
    axes.set_ylim(5, 1e5)
    axes.set(xlabel="steps after the change", ylabel="loss", title="A new bowl at half time")
    axes.legend()


def _change_plot(name: str, groups: Mapping[str, Sequence[Curve]]) -> Plot:
    lines = []
    for label, curves in groups.items():
        at = _change(curves[0])
        width = max(1, at // 250)
        drawn = [_around(curve, at, width) for curve in curves]
        y = np.stack([one[: min(map(len, drawn))] for one in drawn])
        x = (np.arange(y.shape[1]) + 0.5) * width - at // 10
        lost = sum(curve.diverged for curve in curves)
        note = f"{lost} of {len(curves)} diverge" if lost else ""
        lines.append(Line(label, {"after": x}, y.mean(0), y.min(0), y.max(0), note))
    return Plot(
        name,
        TABLES[-1].heading.capitalize(),
        {"after": "steps after the change"},
        "loss, and from the lowest to the highest seed",
        lines,
        log_y=True,
        focus=(5, 1e5),
        levels={f"Newton ({newton_loss():.4g})": newton_loss()},
    )


def _around(curve: Curve, at: int, width: int) -> np.ndarray:
    """Means of ``width`` losses, from a tenth of the first half before the change to its length after."""
    losses = _losses(curve)[at - at // 10 : at + at // 2]
    means: np.ndarray = losses[: len(losses) // width * width].reshape(-1, width).mean(1)
    return means
