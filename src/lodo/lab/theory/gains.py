"""What a gain and a gate converge to that look one step ahead, what that costs, and the regret beside OSGM's bound.

The quadratic has curvatures q, noise of variance r in its gradient, and a minimum that moves by noise of variance v.
Its error b, with a gain a and a gate w between the gradient and its average, is the linear recursion

    g = q b + noise,   m' = beta m + (1 - beta) g,   S = (1 - w) g + w m',   b' = b - a S - drift

so its covariance in the long run, and with it everything that a greedy learner looks at, follows from a Lyapunov
equation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import brentq, minimize

from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.styles import BLACK, BLUE, BLUES, GREEN, GREY, ORANGE, Style
from lodo.lab.theory.base import Claim, Finding, symmetric
from lodo.lab.theory.regret import Regret, lodo_run, osgm, regret

BETA = 0.95  # of KronLODO's average


@dataclass(frozen=True)
class Noisy:
    """A quadratic: curvatures ``q``, variances ``r`` of its gradient's noise, and ``v`` of its minimum's moves."""

    q: np.ndarray
    r: np.ndarray
    v: float = 0.0


# ------------------------------------------------------------ where a greedy gain and gate stand still


@dataclass(frozen=True)
class Standing:
    """What a gain and a gate lead to in the long run.

    Args:
        loss: the mean of ``sum q b^2 / 2``.
        gain_slope: the mean of <g', S>, zero where a greedy gain stands still.
        gate_slope: the mean of <g', S's derivative by w>, zero where a greedy gate does.
    """

    loss: float
    gain_slope: float
    gate_slope: float


def standing(task: Noisy, a: float, w: float, beta: float = BETA) -> Standing:
    """The long run of one gain and one gate.

    >>> one = Noisy(np.array([0.5]), np.array([1.0]))
    >>> found = standing(one, 0.4, 0.0)  # of plain SGD: a r / (2 (2 - a q))
    >>> bool(np.isclose(found.loss, 0.4 / (2 * (2 - 0.2))))
    True
    """
    loss = gain = gate = 0.0
    for q, r in zip(task.q, task.r, strict=True):
        to_g = 1 - w + w * (1 - beta)  # S = to_g g + w beta m
        step = np.array([[1 - a * to_g * q, -a * w * beta], [(1 - beta) * q, beta]])
        kick = np.array([-a * to_g, 1 - beta])
        C = solve_discrete_lyapunov(step, r * np.outer(kick, kick) + task.v * np.diag([1.0, 0.0]))
        forward = step[0] @ C  # the covariance of b' with (b, m), apart from the new noise
        with_g, with_m = q * forward[0] + r * kick[0], forward[1]
        loss += q * C[0, 0] / 2
        gain += q * (to_g * with_g + w * beta * with_m)
        gate += q * (-beta * with_g + beta * with_m)
    return Standing(loss, gain, gate)


def greedy_gain(task: Noisy, w: float, beta: float = BETA) -> float:
    """The gain at which successive steps are uncorrelated, for a given gate."""
    most = 1.9 / task.q.max()
    return float(brentq(lambda a: standing(task, a, w, beta).gain_slope, 1e-4 * most, most))


def greedy_pair(task: Noisy, beta: float = BETA) -> tuple[float, float]:
    """The gain and the gate in [0, 1] at which both stand still."""

    def slope(w: float) -> float:
        return standing(task, greedy_gain(task, w, beta), w, beta).gate_slope

    low, high = slope(0.0), slope(1.0)
    w = 0.0 if low <= 0 else 1.0 if high >= 0 else float(brentq(slope, 0.0, 1.0))
    return greedy_gain(task, w, beta), w


def best_pair(task: Noisy, beta: float = BETA) -> tuple[float, float]:
    """The constant gain and gate with the lowest loss in the long run."""
    most = 1.9 / task.q.max()

    def loss(pair: np.ndarray) -> float:
        return standing(task, most / (1 + np.exp(-pair[0])), 1 / (1 + np.exp(-pair[1])), beta).loss

    found = minimize(loss, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-9}).x
    return float(most / (1 + np.exp(-found[0]))), float(1 / (1 + np.exp(-found[1])))


def learned_pair(
    task: Noisy, rng: np.random.Generator, *, steps: int, runs: int, directions: bool = False, beta: float = BETA
) -> tuple[np.ndarray, np.ndarray]:
    """Gains and gates, by step and run, of learners that look one step ahead, in the long run.

    What they learn from is divided by its root mean square so far, as Adam does, or with ``directions`` by the lengths
    of gradient and step, as KronLODO does.
    """
    shape = (runs, len(task.q))
    b, m, S, D = (np.zeros(shape) for _ in range(4))
    c, w = np.full(runs, np.log(0.2 / task.q.max())), np.full(runs, 0.5)
    gains, gates = np.empty((steps, runs)), np.empty((steps, runs))
    sizes = np.full(2, 1e-30)
    for t in range(steps):
        g = task.q * b + np.sqrt(task.r) * rng.standard_normal(shape)
        slopes = np.stack([(g * S).sum(1), (g * D).sum(1)])
        sizes += ((slopes**2).mean(1) - sizes) / (t + 1)
        lengths = np.linalg.norm(g, axis=1) * np.linalg.norm(S, axis=1) + 1e-30
        slopes = slopes / lengths if directions else slopes / np.sqrt(sizes + 1e-30)[:, None]
        rate = 0.1 / (1 + t / 1000)  # falling, so that they come to rest
        c = c + rate * slopes[0]
        w = np.clip(w + rate * slopes[1], 0.0, 1.0)
        m = beta * m + (1 - beta) * g
        S, D = (1 - w[:, None]) * g + w[:, None] * m, m - g
        b = b - np.exp(c)[:, None] * S - np.sqrt(task.v) * rng.standard_normal(shape)
        gains[t], gates[t] = np.exp(c), w
    return gains, gates


# ------------------------------------------------------------ the short-horizon bias


def expected_loss(task: Noisy, rates: np.ndarray) -> np.ndarray:
    """The expected loss before the first and after every step of SGD at these rates, from ``E[b^2] = 1 / q``.

    >>> task = Noisy(np.array([1.0, 0.1]), np.array([0.0, 0.0]))
    >>> expected_loss(task, np.array([1.0])).round(6).tolist()
    [1.0, 0.405]
    """
    e, losses = 1 / task.q, [len(task.q) / 2]
    for a in rates:
        e = (1 - a * task.q) ** 2 * e + a**2 * task.r
        losses.append(float(task.q @ e) / 2)
    return np.array(losses)


def greedy_rates(task: Noisy, steps: int) -> np.ndarray:
    """The rates that make the next loss as low as possible, step by step."""
    e, rates = 1 / task.q, np.empty(steps)
    for t in range(steps):
        a = float(task.q**2 @ e) / float(task.q**3 @ e + task.q @ task.r)
        e = (1 - a * task.q) ** 2 * e + a**2 * task.r
        rates[t] = a
    return rates


def best_rates(task: Noisy, steps: int) -> np.ndarray:
    """The rates that make the last loss as low as possible, by L-BFGS from the greedy ones and from a constant."""

    def last_loss(logs: np.ndarray) -> tuple[float, np.ndarray]:
        rates, errors = np.exp(logs), np.empty((steps + 1, len(task.q)))
        errors[0] = 1 / task.q
        for t, a in enumerate(rates):
            errors[t + 1] = (1 - a * task.q) ** 2 * errors[t] + a**2 * task.r
        back, slopes = task.q / 2, np.empty(steps)
        for t in range(steps - 1, -1, -1):
            a = rates[t]
            slopes[t] = back @ (-2 * task.q * (1 - a * task.q) * errors[t] + 2 * a * task.r)
            back = back * (1 - a * task.q) ** 2
        scale = max(float(task.q @ errors[-1]) / 2, 1e-300)
        return float(np.log(scale)), slopes * rates / scale

    bounds = [(np.log(1e-6), np.log(1.99 / task.q.max()))] * steps
    starts = [np.log(greedy_rates(task, steps)), np.full(steps, np.log(0.5 / task.q.max()))]
    found = [
        minimize(last_loss, np.clip(start, *bounds[0]), jac=True, method="L-BFGS-B", bounds=bounds,
                 options={"maxiter": 150})
        for start in starts
    ]  # fmt: skip
    return np.asarray(np.exp(min(found, key=lambda each: float(each.fun)).x))


# ------------------------------------------------------------ claims


def run(quick: bool = False, seed: int = 0) -> Finding:
    """All three: where the greedy ones stand still, the short-horizon bias, and regret."""
    rng = np.random.default_rng(seed)
    parts = [_standing_still(rng, quick), _bias(quick), _regret(rng, quick)]
    return Finding(
        "gains",
        "Greedy gains and gates",
        tuple(claim for claims, _, _ in parts for claim in claims),
        {name: value for _, numbers, _ in parts for name, value in numbers.items()},
        [figure for _, _, figure in parts],
    )


_Part = tuple[list[Claim], Mapping[str, object], Figure]


def _standing_still(rng: np.random.Generator, quick: bool) -> _Part:
    """The gain and the gate of learners, beside the points where the greedy ones stand still and the best ones."""
    drifts = np.array([0.01, 0.02, 0.05, 0.1])
    one = [Noisy(np.array([0.5]), np.array([1.0]), float(v)) for v in drifts]
    kalman = np.array([(-v * 0.5 + np.sqrt((v * 0.5) ** 2 + 4 * v)) / 2 for v in drifts])
    alone = np.array([greedy_gain(task, 0.0) for task in one])
    q = np.geomspace(0.02, 1.0, 5)
    many = [Noisy(q, q, float(v)) for v in drifts]
    greedy, best = (np.array([pair(task) for task in many]) for pair in (greedy_pair, best_pair))
    steps, runs = (8_000, 32) if quick else (40_000, 32)

    def rest(task: Noisy, directions: bool) -> list[float]:
        learned = learned_pair(task, rng, steps=steps, runs=runs, directions=directions)
        return [float(values[-steps // 4 :].mean()) for values in learned]

    ends, by_direction = (np.array([rest(task, directions) for task in many]) for directions in (False, True))
    over = np.array([standing(t, *g).loss / standing(t, *b).loss for t, g, b in zip(many, greedy, best, strict=True)])
    x = Axis("variance of the minimum's moves, $v$", log=True)
    panels = [
        Plot(which, title, x, Axis(label, log=log), [
            Line("learned, mean of runs", drifts, ends[:, i], style=Style(BLUE), mark="both"),
            Line("learned from directions alone", drifts, by_direction[:, i], style=Style(BLUES[1]), mark="both"),
            Line("where greed stands still", drifts, greedy[:, i], style=Style(BLACK, "--")),
            Line("the best constant pair", drifts, best[:, i], style=Style(GREEN, ":"), mark="both"),
        ])
        for i, (which, title, label, log) in enumerate((
            ("gain", "The gain", "$a$", True), ("gate", "The gate", "$w$", False)
        ))
    ]  # fmt: skip
    off = float(np.abs(np.log(ends[:, 0] / greedy[:, 0])).max())
    claims = [
        Claim(
            "With one curvature, the greedy gain is the steady gain of a Kalman filter: nothing is lost by greed.",
            bool(np.allclose(alone, kalman, rtol=1e-6)),
            f"Both are {alone[0]:.4f} at v = {drifts[0]:g} and {alone[-1]:.4f} at v = {drifts[-1]:g}; they differ by "
            f"{float(np.abs(alone / kalman - 1).max()):.0e}. Without drift the gain that stands still is zero.",
        ),
        Claim(
            "A learned log-gain and gate come to rest near where the greedy ones stand still: gains within a quarter, "
            "gates within 0.15.",
            off < 0.25 and bool((np.abs(ends[:, 1] - greedy[:, 1]) < 0.15).all()),
            f"Five curvatures, condition 50: learned gains {_listed(ends[:, 0])}, computed {_listed(greedy[:, 0])}; "
            f"gates {_listed(ends[:, 1])}, computed {_listed(greedy[:, 1])} (v = {_listed(drifts)}; {steps} steps, "
            f"mean of {runs} runs over the last quarter).",
            f"Learners that see directions alone, as KronLODO's, rest elsewhere: gains {_listed(by_direction[:, 0])}, "
            f"gates {_listed(by_direction[:, 1])}. The long-run loss at the greedy point is {over.min():.2f} to "
            f"{over.max():.2f} times that of the best constant pair, whose gains are {_listed(best[:, 0])}.",
        ),
    ]
    numbers = {
        "learned": ends.tolist(),
        "greedy": greedy.tolist(),
        "best": best.tolist(),
        "loss_over_best": over.tolist(),
    }
    return claims, numbers, Figure("gains", panels, columns=2, size=(4.4, 3.4))


def _bias(quick: bool) -> _Part:
    """The greedy schedule beside the best one, over noise and horizon."""
    q = np.geomspace(0.01, 1.0, 8)
    noises = (0.0, 0.001, 0.01, 0.1)
    horizons = np.array([10, 30, 100] if quick else [10, 30, 100, 300, 1000])
    lines, ratios, rates = [], {}, {}
    for noise, color in zip(noises, (GREY, *BLUES[1:]), strict=True):
        task = Noisy(q, noise * q)
        greedy = greedy_rates(task, int(horizons[-1]))
        best = {int(T): best_rates(task, int(T)) for T in horizons}
        losses = expected_loss(task, greedy)
        ratios[noise] = np.array([losses[T] / expected_loss(task, best[T])[-1] for T in best])
        rates[noise] = greedy, best[int(horizons[-1])]
        lines.append(Line(f"noise {noise:g}", horizons.astype(float), ratios[noise], style=Style(color), mark="both"))
    greedy, best_one = rates[noises[-1]]
    step = np.arange(1.0, len(greedy) + 1)
    panels = [
        Plot("rates", f"Rates, noise {noises[-1]:g}", Axis("step", log=True), Axis("rate $a$", log=True), [
            Line("greedy", step, greedy, style=Style(ORANGE)),
            Line(f"best for {len(greedy)} steps", step, best_one, style=Style(BLACK)),
        ]),
        Plot("losses", "Expected loss", Axis("step", log=True), Axis("loss", log=True), [
            Line(name, np.arange(1.0, len(r) + 2), expected_loss(Noisy(q, noises[-1] * q), r), style=Style(color))
            for name, r, color in (("greedy", greedy, ORANGE), (f"best for {len(greedy)} steps", best_one, BLACK))
        ]),
        Plot("ratio", "What greed costs", Axis("horizon $T$", log=True), Axis("greedy / best loss at $T$", log=True),
             lines),
    ]  # fmt: skip
    last = np.array([ratios[noise][-1] for noise in noises[1:]])
    early = len(greedy) // 10
    small = float(best_one[early] / greedy[early])
    claim = Claim(
        "Short-horizon bias (Wu et al. 2018): the greedy schedule falls too early, the more so the longer the run.",
        bool(all((np.diff(ratios[noise]) > 0).all() for noise in noises[1:]) and small > 1),
        f"Eight curvatures, condition 100, noise in proportion to curvature. After {horizons[-1]} steps the greedy "
        f"loss is {_listed(last)} times the best schedule's at noise {_listed(np.array(noises[1:]))}; after "
        f"{horizons[0]} steps {_listed(np.array([ratios[noise][0] for noise in noises[1:]]))}. A tenth of the "
        f"way, the best rate is {small:.3g} times the greedy one.",
        f"Without noise the greedy loss is {ratios[0.0][-1]:.3g} times the best: steepest descent, too, looks only one "
        "step ahead. With one curvature greed costs nothing.",
    )
    numbers = {"bias": {str(noise): values.tolist() for noise, values in ratios.items()}, "horizons": horizons.tolist()}
    return [claim], numbers, Figure("gains-bias", panels, columns=3, size=(4.2, 3.4))


def _regret(rng: np.random.Generator, quick: bool) -> _Part:
    """LODO's two simplest families beside OSGM and its bound, with a minimum at rest and with one that moves."""
    n, steps = 20, 150 if quick else 600
    # Most of the Hessian lies along the axes, or a diagonal would have nothing to find.
    H = np.diag(np.geomspace(1.0, 30.0, n)) + symmetric(np.linspace(0.0, 0.3, n), rng)
    eta = 0.5 / float(np.linalg.eigvalsh(H)[-1])
    start, noise = rng.standard_normal(n), rng.standard_normal((steps, n))
    panels, numbers, kept = [], {}, True
    for name, moves in (("at rest", 0 * noise), ("moving", noise)):
        for family, wide in (("scalar", 1), ("diagonal", n)):
            path = np.concatenate([start[None], moves])
            theirs = regret(H, *osgm(H, path, eta, wide), eta)
            ours = regret(H, *lodo_run(H, path, family, 1e-2), eta)
            kept = kept and bool((theirs.regret <= theirs.bound).all())
            half = ours.regret[len(ours.regret) // 2]
            numbers[f"{family}, {name}"] = {
                "lodo": float(ours.regret[-1]), "doubling": float(ours.regret[-1] / half),
                "osgm": float(theirs.regret[-1]), "bound": float(theirs.bound[-1]),
            }  # fmt: skip
            panels.append(_regret_plot(family, name, ours, theirs))
    growth = {name: each["doubling"] for name, each in numbers.items()}
    claim = Claim(
        "OSGM's regret stays below its bound. LODO's grows with every step where gradients vanish, and more and more "
        "slowly where the minimum keeps moving.",
        kept and all((value > 1.9) == name.endswith("rest") for name, value in growth.items()),
        f"n = {n}, up to {steps} steps, loss h(P) = (f(x - P g) - f(x)) / |g|^2. Regret of LODO / of OSGM / its bound: "
        + "; ".join(f"{k}: {e['lodo']:.3g} / {e['osgm']:.3g} / {e['bound']:.3g}" for k, e in numbers.items())
        + f". Twice the steps bring LODO's regret to {_listed(np.array([*growth.values()]))} times what it was.",
        "The bound holds for OSGM, which divides its hypergradient by |g|^2. LODO does not, so it learns less and less "
        "as gradients vanish, and no bound of this kind is known for it. The paper's bowl, whose minimum keeps moving, "
        "is the case it is made for. LODO starts at 1 / L, OSGM at zero.",
    )
    return [claim], {"regret": numbers}, Figure("gains-regret", panels, columns=2, size=(4.4, 3.2))


def _regret_plot(family: str, name: str, ours: Regret, theirs: Regret) -> Plot:
    def line(label: str, values: np.ndarray, style: Style | None = None) -> Line:
        return Line(label, np.arange(1.0, len(values) + 1), np.maximum(values, 1e-3), style=style)

    lines = [
        line("LODO", ours.regret),
        line("OSGM", theirs.regret, Style(ORANGE)),
        line("OSGM's bound", theirs.bound, Style(ORANGE, "--")),
    ]
    x, y = Axis("step $K$", log=True), Axis("regret after $K$ steps", log=True)
    return Plot(f"{family}-{name.replace(' ', '-')}", f"$G$ a {family}, minimum {name}", x, y, lines)


def _listed(values: np.ndarray) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
