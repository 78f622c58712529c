"""How a dense G is learned (the paper's Section 4.1 and its appendix), on the noisy quadratic.

The letters are the paper's: H the Hessian, A = I - G H, b = x - x*, s the noise, S its covariance summed over the past,
alpha the meta-learning rate, D and U the eigenvalues and eigenvectors of H, B = U^T A U.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import solve_discrete_lyapunov

from lodo import LODO
from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.styles import BLACK, BLUE, BLUES, GREEN, GREY, ORANGE, Style
from lodo.lab.theory.base import Claim, Finding, Matrix, slope, symmetric


class Trajectory(NamedTuple):
    """A_0, A_1, ... and b_0, b_1, ..."""

    A: np.ndarray
    b: np.ndarray


def recursion(H: Matrix, alpha: float, A: Matrix, b: np.ndarray, s: np.ndarray) -> Trajectory:
    """Equations 5 and 6: ``b' = A b - s``, ``A' = A - alpha H b' b^T H^2``.

    Args:
        H: the Hessian.
        alpha: the meta-learning rate.
        A: A_0.
        b: b_0.
        s: the noise, one row for each step.
    """
    every_A, every_b = np.empty((len(s) + 1, *A.shape)), np.empty((len(s) + 1, len(b)))
    every_A[0], every_b[0] = A, b
    HH = H @ H
    for t, noise in enumerate(s):
        new = A @ b - noise
        A, b = A - alpha * np.outer(H @ new, b @ HH), new
        every_A[t + 1], every_b[t + 1] = A, b
    return Trajectory(every_A, every_b)


def frozen_recursion(H: Matrix, alpha: float, A: Matrix, b: np.ndarray, s: np.ndarray) -> Trajectory:
    """The approximation of Equation 7: as `recursion`, but b moves by A_0 all the time: ``b' = A_0 b - s``."""
    every_A, every_b = np.empty((len(s) + 1, *A.shape)), np.empty((len(s) + 1, len(b)))
    every_A[0], every_b[0] = A, b
    first, HH = A, H @ H
    for t, noise in enumerate(s):
        new = first @ b - noise
        A, b = A - alpha * np.outer(H @ new, b @ HH), new
        every_A[t + 1], every_b[t + 1] = A, b
    return Trajectory(every_A, every_b)


def optimizer(H: Matrix, alpha: float, b: np.ndarray, s: np.ndarray) -> Trajectory:
    """The trajectory of LODO itself, with a dense G from the identity, an SGD meta-optimizer and no momentum."""
    hessian = torch.from_numpy(H)
    x = torch.nn.Parameter(torch.from_numpy(b.copy()))
    best = torch.zeros_like(x)
    opt = LODO([x], lr=1.0, meta_lr=alpha, beta=0.0, preconditioner="dense", meta_optimizer="sgd")
    every_A, every_b = [np.eye(len(b)) - H], [b.copy()]
    for noise in s:
        x.grad = hessian @ (x.detach() - best)
        opt.step()
        best += torch.from_numpy(noise)
        every_b.append((x.detach() - best).numpy().copy())
        every_A.append(np.eye(len(b)) - opt.preconditioner_matrix().numpy() @ H)
    # A_t is learned one step after b_t is reached, and the first step learns nothing
    x.grad = hessian @ (x.detach() - best)
    opt.step()
    every_A.append(np.eye(len(b)) - opt.preconditioner_matrix().numpy() @ H)
    return Trajectory(np.stack(every_A[1:]), np.stack(every_b))


def accumulated(A: Matrix, sigma: Matrix) -> Matrix:
    """``sum_n A^n sigma (A^n)^T``, by the equation that it solves: S = A S A^T + sigma."""
    return np.asarray(solve_discrete_lyapunov(A, sigma))


def velocity(H: Matrix, A: Matrix, sigma: Matrix) -> Matrix:
    """Equation 10: ``dA/dt = -H A S H^2``."""
    return np.asarray(-H @ A @ accumulated(A, sigma) @ H @ H)


def flow(H: Matrix, A: Matrix, sigma: Matrix, times: np.ndarray) -> np.ndarray:
    """Solve Equation 10, starting at A, and return the solution at these times (alpha t for a trajectory)."""
    n = len(A)
    solved = solve_ivp(
        lambda _, a: velocity(H, a.reshape(n, n), sigma).ravel(),
        (0.0, float(times[-1])),
        A.ravel(),
        method="LSODA",
        t_eval=times,
        rtol=1e-9,
        atol=1e-12,
    )
    if not solved.success:
        raise FloatingPointError(f"the differential equation could not be integrated: {solved.message}")
    return np.asarray(solved.y.T.reshape(-1, n, n))


def scaled_error(H: Matrix, A: np.ndarray) -> np.ndarray:
    """``||B D^-1||_F``, which never grows along the flow; for one A or a stack of them.

    As B D^-1 = U^T A H^-1 U, it is the norm of A H^-1.
    """
    return np.asarray(np.linalg.norm(A @ np.linalg.inv(H), axis=(-2, -1)))


def mean_trajectory(
    H: Matrix, alpha: float, A: Matrix, sigma: float, times: np.ndarray, seeds: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The mean over seeds of A in Equations 5 and 6, at the steps nearest to times / alpha, and its standard error."""
    n = len(A)
    every, b, HH = np.repeat(A[None], seeds, 0), np.zeros((seeds, n)), H @ H
    wanted = {round(float(time) / alpha): i for i, time in enumerate(times)}
    mean, error = np.empty((2, len(times), n, n))
    for t in range(max(wanted) + 1):
        if t in wanted:
            mean[wanted[t]], error[wanted[t]] = every.mean(0), every.std(0) / np.sqrt(seeds)
        new = np.einsum("kij,kj->ki", every, b) - sigma * rng.standard_normal((seeds, n))
        every -= alpha * np.einsum("ki,kj->kij", new @ H, b @ HH)
        b = new
    return mean, error


@dataclass(frozen=True)
class Bound:
    """The proof's bound on ``||A_t - A'_t||_2``, and how far it is claimed to hold.

    Args:
        H: the Hessian.
        A: A_0, whose spectral norm must be less than 1.
        noise: the largest norm of s.
        alpha: the meta-learning rate.
    """

    H: Matrix
    A: Matrix
    noise: float
    alpha: float

    @property
    def b_max(self) -> float:
        """The largest norm that b' can have."""
        return self.noise / (1 - float(np.linalg.norm(self.A, 2)))

    @property
    def speed(self) -> float:
        return float(np.linalg.norm(self.H, 2) ** 3 * self.b_max**2)

    @property
    def R(self) -> float:  # noqa: N802  # the paper's letter
        """The largest r = alpha t for which the bound is claimed."""
        return 4 / 27 * (1 - float(np.linalg.norm(self.A, 2))) / self.speed - self.alpha

    def __call__(self, r: np.ndarray) -> np.ndarray:
        """The bound at r = alpha t."""
        return np.asarray(self.speed * r**2 / (2 * self.R) * (2 + r / (2 * self.R)))


def in_ball(radius: float, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Bounded noise, drawn uniformly from a ball: one vector in each row."""
    direction = rng.standard_normal(shape)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return np.asarray(direction * radius * rng.uniform(size=(shape[0], 1)) ** (1 / shape[1]))


def halving_time(H: Matrix, A: Matrix, sigma: Matrix) -> float:
    """The time that the flow takes to halve ``||B D^-1||_F``."""
    start, n = scaled_error(H, A), len(A)

    def left(_: float, a: np.ndarray) -> float:
        return float(scaled_error(H, a.reshape(n, n)) - start / 2)

    left.terminal = True  # type: ignore[attr-defined]
    solved = solve_ivp(
        lambda _, a: velocity(H, a.reshape(n, n), sigma).ravel(),
        (0.0, 1e9),
        A.ravel(),
        method="LSODA",
        events=left,
        rtol=1e-9,
        atol=1e-12,
    )
    return float(solved.t_events[0][0])


def run(quick: bool = False, seed: int = 0) -> Finding:
    """Check the claims of Section 4.1 and its appendix."""
    rng = np.random.default_rng(seed)
    H = symmetric(np.linspace(0.3, 1.2, 4 if quick else 6), rng)
    A, n = np.eye(len(H)) - H, len(H)  # G starts as the identity
    parts = (
        _equations(H, rng, steps=200 if quick else 1000),
        _averages(H, A, rng, quick),
        _monotone(H, rng, starts=20 if quick else 100),
        _rates(H, A, np.eye(n)),
        _theorem(H, A, rng, quick),
    )
    figures = [parts[1][2], parts[4][2]]
    numbers = {name: value for _, values, *_ in parts for name, value in values.items()}
    return Finding("dynamics", "Learning the inverse Hessian", tuple(part[0] for part in parts), numbers, figures)


def _equations(H: Matrix, rng: np.random.Generator, steps: int) -> tuple[Claim, dict[str, float]]:
    s = rng.standard_normal((steps, len(H)))
    b = rng.standard_normal(len(H))
    ours, theirs = optimizer(H, 0.01, b, s), recursion(H, 0.01, np.eye(len(H)) - H, b, s)
    off = max(
        float(np.abs(ours.A - theirs.A).max() / np.abs(theirs.A).max()),
        float(np.abs(ours.b - theirs.b).max() / np.abs(theirs.b).max()),
    )
    claim = Claim(
        "The optimizer follows A' = A - alpha H b' b^T H^2 and b' = A b - s.",
        off < 1e-11,
        f"Over {steps:,} steps the two differ by {off:.1e} of the largest entry: rounding.",
        "This is for a dense G, an SGD meta-optimizer and no momentum.",
    )
    return claim, {"equations_difference": off}


def _averages(H: Matrix, A: Matrix, rng: np.random.Generator, quick: bool) -> tuple[Claim, dict[str, object], Figure]:
    n, sigma = len(H), 1.0
    times = np.linspace(0.0, 16.0 if quick else 40.0, 9)
    path = flow(H, A, sigma**2 * np.eye(n), times)
    alphas = np.array([0.02, 0.01, 0.005] if quick else [0.016, 0.008, 0.004, 0.002])
    seeds = 200 if quick else 400
    means, errors = zip(
        *(mean_trajectory(H, float(alpha), A, sigma, times, seeds, rng) for alpha in alphas), strict=True
    )
    chance = np.array([3 * float(error.max() / np.abs(path[0]).max()) for error in errors])
    off = np.array([float(np.abs(mean - path).max() / np.abs(path[0]).max()) for mean in means])
    end = float(np.linalg.norm(path[-1]) / np.linalg.norm(path[0]))
    fine = np.linspace(0, times[-1], 100)
    flowing = flow(H, A, np.eye(n), fine)
    falling = [
        Line(rf"mean of runs, $\alpha$ = {alpha:g}", times, scaled_error(H, mean), style=Style(color), mark="points")
        for mean, alpha, color in zip(means, alphas, BLUES[-len(alphas) :], strict=True)
    ]
    falling.append(Line("the equation", fine, scaled_error(H, flowing), style=Style(BLACK, width=1)))
    differing = [
        Line("measured", alphas, off, style=Style(BLUE), mark="both"),
        Line("three standard errors of the mean", alphas, chance, style=Style(GREY, ":"), mark="both"),
    ]
    D, U = np.linalg.eigh(H)
    inside = np.stack([np.abs(np.diag(U.T @ a @ U)) for a in flowing])
    directions = [
        Line(f"curvature {D[i]:.2g}", fine, inside[:, i], style=Style(_shade_of_blue(strength)))
        for i, strength in enumerate(np.linspace(0.2, 1.0, n))
    ]
    time = Axis(r"$\alpha t$")
    ticks = {float(alpha): f"{alpha:g}" for alpha in alphas}
    panels = [
        Plot("error", "The error falls as the equation says", time, Axis(r"$\|B D^{-1}\|_F$", log=True), falling),
        Plot(
            "difference",
            "... as far as runs can tell",
            Axis(r"$\alpha$", log=True, ticks=ticks),
            Axis("largest difference, of $A_0$", log=True),
            differing,
        ),
        Plot(
            "directions",
            "Steep directions are learned first",
            time,
            Axis("$|B_{ii}|$", log=True, range=(1e-10, 1e3)),  # below are errors of the integration
            directions,
        ),
    ]
    figure = Figure("dynamics", panels, columns=3, size=(4.2, 3.6))
    power = slope(alphas, off)
    claim = Claim(
        "For small alpha, A follows dA/dt = -H A (sum A^n E[s s^T] A^nT) H^2, and G approaches H^-1.",
        bool(off[-1] < off[0] and off[-1] < 0.1 and end < 1),
        f"The mean over {seeds} runs differs from the equation by {off[0]:.1%} of A_0 at alpha = {alphas[0]:g} and by "
        f"{off[-1]:.1%} at alpha = {alphas[-1]:g} (alpha to the power of {power:.2f}), where three "
        f"standard errors of the mean are {chance[0]:.1%} and {chance[-1]:.1%}. At alpha t = {times[-1]:g} ||A|| is "
        f"{end:.2f} of what it was.",
        "Averages follow the equation; a single run fluctuates around it, by more the larger alpha is. The slowest "
        "direction's rate is the cube of its curvature.",
    )
    return claim, {"flow_differences": dict(zip(map(str, alphas.tolist()), off.tolist(), strict=True))}, figure


def _shade_of_blue(strength: float) -> str:
    """From nearly black at 0 to blue at 1."""
    return f"#00{round(255 * 0.45 * strength):02x}{round(255 * 0.7 * strength):02x}"


def _monotone(H: Matrix, rng: np.random.Generator, starts: int) -> tuple[Claim, dict[str, float]]:
    n = len(H)
    worst, grew, most = -np.inf, 0, 0.0
    for _ in range(starts):
        start = rng.standard_normal((n, n))
        start *= rng.uniform(0.1, 0.95) / np.linalg.norm(start, 2)
        root = rng.standard_normal((n, n))
        path = flow(H, start, root @ root.T / n, np.linspace(0.0, 20.0, 60))
        errors, plain = scaled_error(H, path), np.linalg.norm(path, axis=(1, 2))
        worst = max(worst, float((np.diff(errors) / errors[:-1]).max()))
        rise = float(plain.max() / plain[0])
        grew, most = grew + (rise > 1.001), max(most, rise)
    claim = Claim(
        "||B D^-1||_F never grows along the equation.",
        worst <= 1e-9,
        f"From {starts} random A with ||A||_2 < 1 and random noise covariances, its largest relative change from one "
        f"of 60 times to the next was {worst:.1e}.",
        f"||A||_F itself may grow on the way: it did from {grew} of these starts, at most to {most:.2f} times its "
        "size.",
    )
    return claim, {"largest_relative_growth": worst, "plain_norm_growth": most}


def _rates(H: Matrix, A: Matrix, sigma: Matrix) -> tuple[Claim, dict[str, float]]:
    factors = np.array([0.5, 1.0, 2.0, 4.0])
    curvature = np.array([halving_time(c * H, A, sigma) for c in factors])
    noise = np.array([halving_time(H, A, c**2 * sigma) for c in factors])
    powers = slope(factors, 1 / curvature), slope(factors, 1 / noise)
    claim = Claim(
        "The error falls faster with larger curvature and with larger noise.",
        bool(powers[0] > 0 and powers[1] > 0),
        f"With A_0 kept, the rate goes with the curvature to the power of {powers[0]:.3f} and with the noise's "
        f"standard deviation to the power of {powers[1]:.3f}; the equation says 3 and 2.",
        "At a fixed alpha: a larger curvature or noise also makes alpha's steps larger, and the equation needs them "
        "small.",
    )
    return claim, {"curvature_power": powers[0], "noise_power": powers[1]}


def _theorem(H: Matrix, A: Matrix, rng: np.random.Generator, quick: bool) -> tuple[Claim, dict[str, float], Figure]:
    radius = 1.0
    R = Bound(H, A, radius, 0.0).R
    alphas = R * np.array([1e-2, 1e-3] if quick else [3e-2, 1e-2, 3e-3, 1e-3])
    shares = np.array([0.03, 0.1, 0.3, 1.0])
    runs = 5 if quick else 20
    close = []
    worst, deviations = 0.0, np.empty((len(alphas), len(shares)))
    for i, (alpha, color) in enumerate(zip(alphas, BLUES[-len(alphas) :], strict=True)):
        bound = Bound(H, A, radius, float(alpha))
        steps = np.maximum(1, (shares * bound.R / alpha).astype(int))
        found = np.zeros(len(shares))
        for _ in range(runs):
            s = in_ball(radius, (int(steps[-1]), len(H)), rng)
            true, frozen = (f(H, float(alpha), A, np.zeros(len(H)), s) for f in (recursion, frozen_recursion))
            gap = np.linalg.norm(true.A[steps] - frozen.A[steps], 2, axis=(1, 2))
            found = np.maximum(found, gap)
            whole = np.linalg.norm(true.A[1:] - frozen.A[1:], 2, axis=(1, 2))
            r = alpha * np.arange(1, len(whole) + 1)
            worst = max(worst, float((whole / bound(r)).max()))
        deviations[i] = found / (shares * bound.R)
        seen = deviations[i] > 0  # nothing has parted in the very first steps
        label = rf"$\alpha$ = {alpha / R:.0e} $R$"
        close.append(Line(label, shares[seen], deviations[i][seen], style=Style(color), mark="both"))
    fine = np.geomspace(shares[0], 1, 50)
    bound = Bound(H, A, radius, float(alphas[-1]))
    allowed = bound(fine * bound.R) / (fine * bound.R)
    close.append(Line("the proof's bound", fine, allowed, style=Style(ORANGE, "--")))
    alpha = 0.002
    beyond = np.geomspace(0.1, 10.0 if quick else 30.0, 7)
    s = in_ball(radius, (int(beyond[-1] / alpha), len(H)), rng)
    true, frozen = (f(H, alpha, A, np.zeros(len(H)), s) for f in (recursion, frozen_recursion))
    steps = (beyond / alpha).astype(int)
    gaps = np.linalg.norm(true.A[steps] - frozen.A[steps], 2, axis=(1, 2))
    moved = np.linalg.norm(true.A[steps] - A, 2, axis=(1, 2))
    part = [
        Line(r"$\|A - A'\|_2$", beyond, gaps, style=Style(ORANGE), mark="both"),
        Line(r"$\|A - A_0\|_2$", beyond, moved, style=Style(GREEN), mark="both"),
    ]
    panels = [
        Plot(
            "close",
            "The frozen dynamics stay close",
            Axis("$r / R$", log=True),
            Axis(r"$\|A - A'\|_2 / r$", log=True),
            close,
        ),
        Plot("part", f"... and part when $A$ has moved ($R$ = {R:.2g})", Axis("$r$", log=True), Axis(log=True), part),
    ]
    shrinks = bool((deviations[-1][:-1] < deviations[-1][1:]).all())
    claim = Claim(
        "||A - A'||_2 / r vanishes as alpha and then r go to 0, and stays under the proof's bound up to r = R.",
        worst <= 1 and shrinks,
        f"With noise in a ball and R = {R:.2g}: the largest deviation was {worst:.1e} of the bound; at alpha = "
        f"{alphas[-1] / R:.0e} R it falls from {deviations[-1][-1]:.1e} at r = R to {deviations[-1][0]:.1e} at r = "
        f"{shares[0]:g} R.",
        f"The bound is far from tight, and R is short. At r = {beyond[-1]:g} A has moved by {moved[-1]:.2f} and the "
        f"frozen dynamics are off by {gaps[-1]:.2f}, so that t_0 has to be renewed on the way, as the paper says.",
    )
    figure = Figure("dynamics-theorem", panels, columns=2, size=(4.6, 3.6))
    return claim, {"R": R, "largest_share_of_the_bound": worst}, figure
