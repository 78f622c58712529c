"""Make the gallery: paths over three classic surfaces, and G as it learns. ``python docs/gallery.py`` takes a minute.

Paths and settings go to ``docs/gallery/figures.json``, from which the site makes its interactive plots (docs/hooks.py);
the pictures and the animations are files beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.animation import FuncAnimation, PillowWriter
from rich.progress import track
from torch import Tensor

from lodo import LODO, Mixing
from lodo.lab.optimizers import build
from lodo.lab.run import threads
from lodo.lab.show.draw import canvas, look, write_figures
from lodo.lab.show.interactive import write_json
from lodo.lab.show.plots import Contours, Figure
from lodo.lab.show.styles import BLACK, BLUE
from lodo.lab.tasks.base import Task
from lodo.lab.tasks.bowl import Bowl
from lodo.lab.tasks.rosenbrock import rosenbrock

HOME = Path(__file__).parent / "gallery"
STEPS = 200
RATES = tuple(float(f"{rate:.1g}") for rate in np.geomspace(1e-3, 3.0, 8))  # each optimizer has its best


def beale(x: Tensor, y: Tensor) -> Tensor:
    """Beale's function, elementwise: steep walls around a flat valley.

    >>> beale(torch.tensor(3.0), torch.tensor(0.5))
    tensor(0.)
    """
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def rastrigin(x: Tensor, y: Tensor) -> Tensor:
    """Rastrigin's function, elementwise: a bowl full of local minima.

    >>> rastrigin(torch.tensor(0.0), torch.tensor(0.0))
    tensor(0.)
    """
    return 20 + x**2 + y**2 - 10 * torch.cos(2 * math.pi * x) - 10 * torch.cos(2 * math.pi * y)


@dataclass(frozen=True)
class Surface:
    """A function of the plane, where paths start, its minimum, and what is drawn of it."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor]
    start: tuple[float, float]
    minimum: tuple[float, float]
    x: tuple[float, float]
    y: tuple[float, float]
    levels: tuple[float, float, float]


SURFACES = (
    Surface("rosenbrock", rosenbrock, (-0.5, 2.0), (1.0, 1.0), (-2.2, 2.2), (-1.2, 3.2), (-1.5, 1.2, 0.3)),
    Surface("beale", beale, (1.0, 1.5), (3.0, 0.5), (-0.5, 4.5), (-1.5, 2.5), (-1.5, 3.0, 0.5)),
    Surface("rastrigin", rastrigin, (1.7, -1.4), (0.0, 0.0), (-2.6, 2.6), (-2.6, 2.6), (0.0, 1.6, 0.2)),
)
OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "LODO": ("lodo", {"meta_lr": 1e-3, "beta": 0.9}),
    "KronLODO": ("kron_lodo", {}),
    "Adam": ("torch.Adam", {}),
    "Momentum": ("torch.SGD", {"momentum": 0.9}),
    "L-BFGS": ("lbfgs", {}),
}


class OnSurface(Task):
    """A surface as a task."""

    def __init__(self, surface: Surface) -> None:
        super().__init__(seed=0)
        self.function = surface.function
        self.params = [torch.nn.Parameter(torch.tensor(surface.start, dtype=torch.float64))]

    def loss(self) -> Tensor:
        """The height of the surface."""
        return self.function(*self.params[0])


def follow(surface: Surface, optimizer: str, options: Mapping[str, Any], steps: int = STEPS) -> np.ndarray:
    """Where an optimizer is before the first step and after each: x, y and the height."""
    torch.manual_seed(0)
    task = OnSurface(surface)
    opt = build(optimizer, task, 0, dict(options))
    path = [*task.params[0].tolist(), task.loss().item()]
    for _ in range(steps):
        try:
            opt.step(task.evaluate)
        except FloatingPointError:  # LODO refuses to go on when it has diverged
            path += [math.nan] * 3
            continue
        path += [*task.params[0].tolist(), task.loss().item()]
    return np.array(path).reshape(-1, 3).T


def best_path(surface: Surface, label: str) -> tuple[np.ndarray, float]:
    """The path with the lowest mean height over its second half, and its learning rate."""
    optimizer, options = OPTIMIZERS[label]

    def height(path: np.ndarray) -> float:
        late = path[2, STEPS // 2 :]
        return float(late.mean()) if np.isfinite(path).all() else math.inf

    paths = {rate: follow(surface, optimizer, {**options, "lr": rate}) for rate in RATES}
    rate = min(paths, key=lambda each: height(paths[each]))
    return paths[rate], rate


def surface_figure(surface: Surface) -> tuple[Figure, dict[str, dict[str, float]]]:
    """The paths of all optimizers over the contours; and each one's learning rate and its height in the end."""
    paths, ends = {}, {}
    for label in OPTIMIZERS:
        path, rate = best_path(surface, label)
        paths[label] = (path[0], path[1], path[2])
        ends[label] = {"lr": rate, "height": float(f"{path[2, -1]:.2g}")}
    x, y = np.linspace(*surface.x, 101), np.linspace(*surface.y, 101)
    height = surface.function(torch.from_numpy(x)[None, :], torch.from_numpy(y)[:, None]).numpy()
    marked = {"start": surface.start, "minimum": surface.minimum}
    logs, title = np.log10(np.maximum(height, 1e-4)), surface.name.capitalize()
    shown = Contours(surface.name, title, paths, x, y, logs, surface.levels, marked, first=STEPS)
    return Figure(surface.name, [shown], size=(6.5, 4.6)), ends


# ------------------------------------------------------------ G as it learns


def learning(n: int, condition: float, frames: int, steps: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Steps, G and the inverse Hessian of a bowl that LODO learns, more densely at the start."""
    task = Bowl(0, n=n, condition=condition)
    family = Mixing(depth=8, block_size=min(4, n), width=2.0)
    opt = LODO(task.params, lr=1.0, meta_lr=1e-3, beta=0.2, preconditioner=family, seed=0)
    inverse = np.linalg.inv(task.hessian().double().numpy())
    wanted = set(np.unique(np.round(np.geomspace(1, steps, frames)).astype(int)))
    yield 0, opt.preconditioner_matrix().double().numpy(), inverse
    for step in range(1, steps + 1):
        task.draw()
        opt.step(task.evaluate)
        if step in wanted:
            yield step, opt.preconditioner_matrix().double().numpy(), inverse


def animate_ellipses(path: Path, frames: int = 40, steps: int = 20_000) -> None:
    """Two dimensions: where G and the inverse Hessian send the unit circle."""
    every = list(learning(2, 10.0, frames, steps))
    angle = np.linspace(0, 2 * math.pi, 100)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    drawing, (axes,) = canvas(size=(4.0, 3.6))
    reach = 1.15 * np.abs(every[0][2] @ circle).max()
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    axes.plot(*(every[0][2] @ circle), color=BLACK, ls=":", label="$H^{-1}$")
    (line,) = axes.plot([], [], color=BLUE, lw=2, label="$G$")
    axes.legend(loc="upper right")

    def show(frame: int) -> list[Any]:
        step, G, _ = every[frame]
        line.set_data(*(G @ circle))
        return [line, axes.set_title(f"the unit circle under $G$, step {step:,}")]

    _save(drawing, show, len(every), path)


def animate_matrix(path: Path, frames: int = 40, steps: int = 20_000) -> None:
    """Twenty dimensions: G beside the inverse Hessian."""
    every = list(learning(20, 20.0, frames, steps))
    inverse = every[0][2]
    largest = np.abs(inverse).max()
    drawing, (left, right) = canvas(columns=2, size=(2.8, 3.1))
    images = [
        axes.imshow(values, cmap="RdBu_r", vmin=-largest, vmax=largest)
        for axes, values in ((left, every[0][1]), (right, inverse))
    ]
    for axes in (left, right):
        axes.set(xticks=[], yticks=[])
        axes.grid(visible=False)
    right.set_title("$H^{-1}$")

    def show(frame: int) -> list[Any]:
        step, G, H = every[frame]
        off = np.linalg.norm(np.eye(20) - G @ np.linalg.inv(H)) / math.sqrt(20)
        images[0].set_data(G)
        return [images[0], left.set_title(rf"$G$, step {step:,}, $\sigma$ = {off:.2f}")]

    _save(drawing, show, len(every), path)


def _save(drawing: Any, show: Callable[[int], list[Any]], frames: int, path: Path) -> None:
    """Write an animation that stays at its end for two seconds."""
    order = [*range(frames), *[frames - 1] * 16]
    FuncAnimation(drawing, show, frames=order).save(path, writer=PillowWriter(fps=8), dpi=90)


def main() -> None:
    """Make everything."""
    HOME.mkdir(exist_ok=True)
    with threads(1), look():
        made = {surface.name: surface_figure(surface) for surface in track(SURFACES, "surfaces")}
        figures = [figure for figure, _ in made.values()]
        ends = {name: found for name, (_, found) in made.items()}
        (HOME / "ends.json").write_text(json.dumps(ends, indent=1) + "\n")
        write_figures(figures, HOME)
        for pdf in HOME.glob("*.pdf"):
            pdf.unlink()
        write_json(figures, HOME)
        animate_ellipses(HOME / "bowl-2.gif")
        animate_matrix(HOME / "bowl-20.gif")


if __name__ == "__main__":
    main()
