"""Saddle points repel LODO (the paper's Section 4.2 and its lemma)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch.optim import SGD, Adam, Optimizer

from lodo import LODO, Mixing
from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.styles import BLACK, BLUES, Style
from lodo.lab.theory.base import Claim, Finding, Matrix, slope, symmetric


class Escape(NamedTuple):
    """The most negative eigenvalue of G H, its eigenvector y, and y^T H y."""

    value: float
    direction: np.ndarray
    curvature: float


def negative_eigenvalue(G: Matrix, H: Matrix) -> Escape:
    """The most negative eigenvalue of G H.

    It is found from the symmetric matrix L^T H L with G = L L^T, which has the same eigenvalues.

    >>> escape = negative_eigenvalue(np.diag([1.0, 0.1]), np.array([[1.0, 2.0], [2.0, 1.0]]))
    >>> escape.value < 0, escape.curvature < 0
    (True, True)
    """
    L = np.linalg.cholesky(G)
    values, vectors = np.linalg.eigh(L.T @ H @ L)
    y = L @ vectors[:, 0]
    y /= np.linalg.norm(y)
    return Escape(float(values[0]), y, float(y @ H @ y))


def random_mixing_matrix(n: int, scale: float, rng: np.random.Generator) -> tuple[LODO, torch.nn.Parameter]:
    """LODO in double precision that does not learn, with blocks that are ``scale`` away from orthogonal."""
    x = torch.nn.Parameter(torch.zeros(n, dtype=torch.float64))
    opt = LODO([x], lr=0.1, meta_lr=1e-300, beta=0.0, preconditioner=Mixing(depth=8), seed=int(rng.integers(2**31)))
    x.grad = torch.zeros_like(x)
    opt.step()  # theta is drawn
    theta = opt.state[x]["theta"]
    theta += scale * torch.from_numpy(rng.standard_normal(theta.shape)) * (theta != 0)
    return opt, x


def growth(opt: LODO, x: torch.nn.Parameter, H: Matrix, start: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The norm of the displacement and the loss at each step, from a start near the saddle."""
    hessian = torch.from_numpy(H)
    with torch.no_grad():
        x.copy_(torch.from_numpy(start))
    norms, losses = [], []
    for _ in range(steps):
        x.grad = hessian @ x.detach()
        norms.append(float(x.detach().norm()))
        losses.append(0.5 * float(x.detach() @ x.grad))
        opt.step()
    return np.array(norms), np.array(losses)


def escape_time(
    make: Callable[[list[torch.nn.Parameter]], Optimizer], H: Matrix, start: np.ndarray, limit: int
) -> float:
    """Steps until the loss has fallen as far as a unit step along the steepest descent would take it; inf if never."""
    hessian = torch.from_numpy(H)
    x = torch.nn.Parameter(torch.from_numpy(start.copy()))
    opt = make([x])
    goal = 0.5 * float(np.linalg.eigvalsh(H)[0])
    for t in range(limit):
        x.grad = hessian @ x.detach()
        if 0.5 * float(x.detach() @ x.grad) < goal:
            return float(t)
        opt.step()
    return float("inf")


def run(quick: bool = False, seed: int = 0) -> Finding:
    """Check the claims of Section 4.2."""
    rng = np.random.default_rng(seed)
    lemma, lemma_numbers = _lemma(rng, 200 if quick else 2000)
    rate, rate_numbers, figure = _growth(rng)
    escape, escape_numbers, times = _escapes(rng, quick)
    return Finding(
        "saddle",
        "Saddle points repel LODO",
        (lemma, rate, escape),
        {**lemma_numbers, **rate_numbers, **escape_numbers},
        [figure, times],
    )


def _lemma(rng: np.random.Generator, cases: int) -> tuple[Claim, dict[str, float]]:
    worst, curvature = -np.inf, -np.inf
    for _ in range(cases):
        n = int(rng.integers(2, 12))
        G = symmetric(np.exp(3 * rng.standard_normal(n)), rng)
        spectrum = np.exp(rng.standard_normal(n))
        spectrum[: int(rng.integers(1, n + 1))] *= -1
        found = negative_eigenvalue(G, symmetric(spectrum, rng))
        worst, curvature = max(worst, found.value), max(curvature, found.curvature)
    claim = Claim(
        "For G > 0 and H with a negative eigenvalue, G H has one too, with an eigenvector along which H curves down.",
        worst < 0 and curvature < 0,
        f"In {cases:,} random pairs of up to 11 dimensions the eigenvalue nearest to zero was {worst:.1e}, the "
        f"curvature along its eigenvector nearest to zero {curvature:.1e}.",
        "G must be positive definite. LODO's is positive semidefinite by construction, and singular only if a product "
        "of its blocks loses a direction.",
    )
    return claim, {"least_negative_eigenvalue": worst, "least_negative_curvature": curvature}


def _growth(rng: np.random.Generator) -> tuple[Claim, dict[str, float], Figure]:
    n, steps = 20, 400
    spectrum = np.geomspace(0.1, 2.0, n)
    spectrum[0] = -0.3
    H = symmetric(spectrum, rng)
    at = np.arange(float(steps))
    distances, predictions, depths = [], [], []
    worst, lowest = 0.0, np.inf
    for scale, color in zip((0.0, 0.05, 0.1), BLUES[1:], strict=True):
        opt, x = random_mixing_matrix(n, scale, rng)
        G = opt.preconditioner_matrix().numpy()
        found = negative_eigenvalue((G + G.T) / 2, H)
        norms, losses = growth(opt, x, H, 1e-6 * rng.standard_normal(n), steps)
        late = slice(steps // 2, None)
        measured = float(np.polyfit(np.arange(steps)[late], np.log(norms[late]), 1)[0])
        predicted = float(np.log1p(-found.value))
        worst, lowest = max(worst, abs(measured / predicted - 1)), min(lowest, float(losses[-1]))
        label = f"blocks off by {scale:g}: {measured:.5f}, predicted {predicted:.5f}"
        expected = norms[-1] * np.exp(predicted * (at - steps + 1))
        distances.append(Line(label, at, norms, style=Style(color)))
        predictions.append(Line("as predicted", at, expected, style=Style(BLACK, ":", 0.7)))
        depths.append(Line(f"blocks off by {scale:g}", at, np.where(losses < 0, -losses, np.nan), style=Style(color)))
    step = Axis("step")
    panels = [
        Plot(
            "distance",
            "It grows as log(1 - lambda) says",
            step,
            Axis("distance from the saddle", log=True),
            [*distances, *predictions],
        ),
        Plot("loss", "The loss falls", step, Axis("loss at the saddle minus loss", log=True), depths),
    ]
    claim = Claim(
        "With G fixed, the displacement grows by the factor 1 - lambda a step along y, and the loss falls.",
        worst < 1e-3 and lowest < 0,
        f"For the paper's network with three G, the measured rate differs from log(1 - lambda) by at most {worst:.1e} "
        "of it; the loss ends below the saddle's in all three.",
        "1 - lambda > 1 is the growth of this direction; others may grow too, where a step is too long for a large "
        "positive curvature (lambda > 2).",
    )
    figure = Figure("saddle", panels, columns=2, size=(4.6, 3.6))
    return claim, {"largest_relative_error_of_the_rate": worst}, figure


def _escapes(rng: np.random.Generator, quick: bool) -> tuple[Claim, dict[str, object], Figure]:
    n, limit = 20, 20_000
    curvatures = np.geomspace(0.01, 1.0, 5 if quick else 9)
    makers: dict[str, Callable[[list[torch.nn.Parameter]], Optimizer]] = {
        "LODO": lambda params: LODO(params, lr=0.1, meta_lr=1e-3, beta=0.9, seed=1),
        "LODO, G fixed": lambda params: LODO(params, lr=0.1, meta_lr=1e-300, beta=0.0, seed=1),
        "SGD": lambda params: SGD(params, lr=0.1),
        "Adam": lambda params: Adam(params, lr=0.001),
    }
    seeds = 2 if quick else 5
    times: dict[str, np.ndarray] = {name: np.zeros((len(curvatures), seeds)) for name in makers}
    for i, curvature in enumerate(curvatures):
        for j in range(seeds):
            spectrum = np.concatenate([[-curvature], np.geomspace(0.1, 1.0, n - 1)])
            H, start = symmetric(spectrum, rng), 1e-3 * rng.standard_normal(n)
            for name, make in makers.items():
                times[name][i, j] = escape_time(make, H, start, limit)
    middle = {name: np.median(values, axis=1) for name, values in times.items()}
    lines = [Line(name, curvatures, values, mark="both") for name, values in middle.items()]
    lines = [
        replace(line, symbol="ring", size=11) if line.label == "LODO, G fixed" else line  # its times are SGD's
        for line in lines
    ]
    plot = Plot(
        "escape",
        "Escape from a saddle",
        Axis("negative curvature", log=True),
        Axis("steps until the loss is clearly below", log=True),
        lines,
    )
    ratio = float(np.median(middle["SGD"] / middle["LODO"]))
    power = slope(curvatures, middle["LODO"])
    claim = Claim(
        "The full LODO, which learns, escapes.",
        bool(np.isfinite(times["LODO"]).all()),
        f"From 0.001 away it escaped from all {len(curvatures) * seeds} saddles, in 1 / {ratio:.1f} of the steps "
        f"that SGD needs at the same lr of 0.1 (median over curvatures from {curvatures[0]:g} to {curvatures[-1]:g}); "
        f"its time goes with the curvature to the power of {power:.2f}.",
        "On a saddle the loss falls without end, so that a learned G only grows. Adam's steps (lr 0.001) have a fixed "
        "length, whatever the curvature: flat saddles do not hold it.",
    )
    numbers = {
        name: {f"{c:.3g}": t for c, t in zip(curvatures, values, strict=True)} for name, values in middle.items()
    }
    return claim, {"escape_steps": numbers}, Figure("saddle-escape", [plot])
