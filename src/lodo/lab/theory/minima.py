"""Where learning the inverse Hessian can end (the paper's appendix "LODO can Generalize")."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.styles import BLUE, GREY, Style
from lodo.lab.theory.base import Claim, Finding, Matrix, symmetric
from lodo.lab.theory.represent import product

Family = Callable[[Tensor], Tensor]  # from theta to G


def distance(G: Tensor, H: Tensor) -> Tensor:
    """``||I - G H||_F^2``."""
    return (torch.eye(len(H), dtype=H.dtype) - G @ H).square().sum()


def descend(family: Family, start: np.ndarray, H: Matrix, steps: int) -> float:
    """The distance at which descent from a start ends; the method is L-BFGS."""
    hessian = torch.from_numpy(H)

    def value(theta: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.from_numpy(theta).requires_grad_()
        loss = distance(family(x), hessian)
        (gradient,) = torch.autograd.grad(loss, x)
        return float(loss.detach()), gradient.numpy()

    options = {"maxiter": steps, "maxfun": 2 * steps, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 30}
    return float(minimize(value, start, jac=True, method="L-BFGS-B", options=options).fun)


def deep_linear(n: int, widths: tuple[int, ...]) -> tuple[Family, int]:
    """``G = W_d ... W_1`` with hidden layers of these widths, and how many numbers theta has.

    >>> family, size = deep_linear(2, (3,))
    >>> size, family(torch.ones(size)).tolist()
    (12, [[3.0, 3.0], [3.0, 3.0]])
    """
    sizes = (n, *widths, n)
    shapes = [(sizes[i + 1], sizes[i]) for i in range(len(sizes) - 1)]
    counts = [rows * columns for rows, columns in shapes]

    def family(theta: Tensor) -> Tensor:
        G = torch.eye(n, dtype=theta.dtype)
        for part, shape in zip(torch.split(theta, counts), shapes, strict=True):
            G = part.view(shape) @ G
        return G

    return family, sum(counts)


def mixing(n: int, depth: int, rng: np.random.Generator) -> tuple[Family, int]:
    """LODO's network with 2 x 2 blocks and nt = 2 n, and how many numbers theta has."""
    permutations = torch.from_numpy(np.stack([rng.permutation(2 * n) for _ in range(depth)]))

    def family(theta: Tensor) -> Tensor:
        half = product(theta.view(depth, n, 2, 2), permutations)[:, :n]
        return half.T @ half

    return family, depth * n * 4


def orthogonal_start(depth: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Random rotations and reflections in every block, as LODO starts."""
    q, r = np.linalg.qr(rng.standard_normal((depth * n, 2, 2)))
    return np.asarray((q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None]).ravel())


def run(quick: bool = False, seed: int = 0) -> Finding:
    """Check the claim of the appendix for three families."""
    rng = np.random.default_rng(seed)
    n, starts, steps = (4, 8, 600) if quick else (6, 40, 3000)
    H = symmetric(np.geomspace(0.3, 3.0, n), rng)
    results: dict[str, np.ndarray] = {}
    for name, widths in (("dense", ()), ("deep linear, 3 layers", (n, n)), ("deep linear, too narrow", (n // 2,))):
        family, size = deep_linear(n, widths)
        scale = 1 / np.sqrt(n)
        results[name] = np.array([descend(family, scale * rng.standard_normal(size), H, steps) for _ in range(starts)])
    for depth in (2, 4, 8) if quick else (2, 4, 8, 16):
        ends = []
        for _ in range(starts):
            family, _ = mixing(n, depth, rng)
            ends.append(descend(family, orthogonal_start(depth, n, rng), H, steps))
        results[f"LODO's network, depth {depth}"] = np.array(ends)
    wide = max(results["dense"].max(), results["deep linear, 3 layers"].max())
    narrow = results["deep linear, too narrow"]
    rank = float(np.sort(np.ones(n))[: n - n // 2].sum())  # what a G of rank n // 2 must miss
    dense_claim = Claim(
        "For a dense G, alone or as a product of layers at least as wide as n, every local minimum is the global one.",
        bool(wide < 1e-6),
        f"From {starts} random starts each, ||I - G H||^2 ended at {wide:.0e} at most, with one layer and with three.",
        f"Layers of width {n // 2} cannot do it: a G of that rank misses {rank:g} at least, and the ends were from "
        f"{narrow.min():.4g} to {narrow.max():.4g}, so that here too no worse minimum was met.",
    )
    bands = {name: (float(ends.min()), float(np.median(ends)), float(ends.max())) for name, ends in results.items()}
    sparse = {name: band for name, band in bands.items() if name.startswith("LODO")}
    best = list(sparse.values())[-1]
    first = next(iter(sparse.values()))
    sparse_claim = Claim(
        "LODO's sparse network may be expected to end near the best.",
        best[1] < 0.01 * n and best[1] < first[1],
        "The theorem does not cover it. Median (lowest to highest) end: "
        + "; ".join(
            f"{name.removeprefix('LODO' + chr(39) + 's network, ')}: {m:.2g} ({a:.2g} to {b:.2g})"
            for name, (a, m, b) in sparse.items()
        )
        + f"; ||I||^2 is {n}.",
        "Permutations differ between starts, so that the band is of networks as well as of starts. A deeper network "
        "has more parameters than G has entries, and then ends as well as a dense one.",
    )
    return Finding("minima", "Where learning can end", (dense_claim, sparse_claim), {"ends": bands}, [_figure(results)])


def _figure(results: dict[str, np.ndarray]) -> Figure:
    """A histogram of the ends for each family, one above the other."""
    floor, most = 1e-14, 10.0
    edges = np.geomspace(floor, most, 61)
    lines = []
    for row, (name, ends) in enumerate(results.items()):
        counts = np.histogram(np.clip(ends, 1.01 * floor, None), edges)[0]
        base = np.full(2 * len(counts), float(row))
        lines.append(
            Line(
                "LODO's network" if name.startswith("LODO") else "dense layers",
                np.repeat(edges, 2)[1:-1],
                base,
                low=base,
                high=base - 0.9 * np.repeat(counts, 2) / len(ends),
                names=[f"{name}: {count} of {len(ends)} starts" for count in np.repeat(counts, 2)],
                style=Style(BLUE if name.startswith("LODO") else GREY),
                mark="area",
            )
        )
    plot = Plot(
        "ends",
        "Where descent ends",
        Axis(r"$\|I - GH\|_F^2$", log=True, range=(floor, most)),
        Axis(ticks=dict(enumerate(results)), range=(-1.0, len(results) - 0.8), reversed=True),
        lines,
    )
    return Figure("minima", [plot], size=(7.0, 0.8 + 0.7 * len(results)))
