"""What LODO's network can represent (the paper's Section 4.3, Definition 4.1 and Theorem 4.2)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from lodo.lab.show.plots import Axis, Figure, Line, Plot
from lodo.lab.show.styles import BLUE, BLUES, GREEN, ORANGE, Style
from lodo.lab.theory.base import Claim, Finding, Matrix
from lodo.lab.theory.pairings import exact_epsilon, sampled_epsilon
from lodo.lab.theory.represent import product, represent, route

_COLORS = {4: BLUES[1], 6: BLUE, 8: ORANGE, 10: GREEN}


class Mixed(NamedTuple):
    """How well random pairings mix nt elements, for depths 1, 2, ..."""

    nt: int
    epsilon: np.ndarray  # Definition 4.1
    error: np.ndarray  # standard error of epsilon; 0 where it is exact
    reached: np.ndarray  # the mean fraction of permutations that can be made
    all_reached: np.ndarray  # the share of sequences that can make all

    @property
    def bound(self) -> np.ndarray:
        """The proof's lower bound on the fraction that can be made: Pinsker's inequality."""
        return np.asarray(1 - np.sqrt(self.epsilon / 2))


def mix(nt: int, depth: int, samples: int, rng: np.random.Generator, exact: int = 0) -> Mixed:
    """Epsilon by depth: exact up to depth ``exact``, and estimated from random sequences beyond it."""
    gaps, reached = sampled_epsilon(nt, depth, samples, rng)
    epsilon, error = gaps.mean(0), gaps.std(0, ddof=1) / math.sqrt(samples)
    fraction, whole = reached.mean(0), (reached == 1).mean(0)
    if exact:
        epsilon[:exact], fraction[:exact] = exact_epsilon(nt, exact)
        error[:exact] = 0.0
    return Mixed(nt, np.maximum(epsilon, 0.0), error, fraction, whole)


def falling(mixed: Mixed) -> np.ndarray:
    """The depths for a fit: less than a third of the entropy is missing, and epsilon is well above its error."""
    most = math.log(math.factorial(mixed.nt))
    return np.asarray((mixed.epsilon > 1e-9) & (mixed.epsilon < most / 3) & (mixed.error < 0.4 * mixed.epsilon))


def fit(mixed: Mixed) -> tuple[float, float]:
    """c1 and c2 of ``epsilon = c1 nt exp(-c2 N nt / 2)``."""
    N, good = np.arange(1, len(mixed.epsilon) + 1), falling(mixed)
    decay, start = np.polyfit(N[good] * mixed.nt / 2, np.log(mixed.epsilon[good] / mixed.nt), 1)
    return float(np.exp(start)), float(-decay)


def routing_success(nt: int, depth: int, tries: int, rng: np.random.Generator) -> float:
    """How often layers with random permutations can produce a random permutation."""
    found = 0
    for _ in range(tries):
        layers = np.stack([rng.permutation(nt) for _ in range(depth)])
        found += route(rng.permutation(nt), layers, rng) is not None
    return found / tries


def sparse_matrix(nt: int, k: int, rng: np.random.Generator) -> Matrix:
    """A random matrix with at most nt weights, at most k in each row and column, and k in one of each.

    >>> F = sparse_matrix(8, 4, np.random.default_rng(0))
    >>> int((F != 0).sum()), int((F != 0).sum(0).max()), int((F != 0).sum(1).max())
    (8, 4, 4)
    """
    there = np.zeros((nt, nt), dtype=bool)
    i, j = rng.integers(nt, size=2)
    there[i, j] = True
    there[i, rng.choice(np.delete(np.arange(nt), j), k - 1, replace=False)] = True
    there[rng.choice(np.delete(np.arange(nt), i), k - 1, replace=False), j] = True
    for place in rng.permutation(nt * nt):
        row, column = divmod(int(place), nt)
        if there.sum() < nt and there[row].sum() < k and there[:, column].sum() < k:
            there[row, column] = True
    return np.where(there, rng.standard_normal((nt, nt)), 0.0)


def permutations_needed(k: int) -> int:
    """The number of permutations that `represent` needs for a matrix with fans up to k.

    >>> [permutations_needed(k) for k in (1, 2, 3, 4)]
    [1, 3, 5, 5]
    """
    return 2 * math.ceil(math.log2(k)) + 1


def random_layers(nt: int, depth: int, rng: np.random.Generator) -> torch.Tensor:
    """Random permutations P_1 to P_N."""
    return torch.from_numpy(np.stack([rng.permutation(nt) for _ in range(depth)]))


def preconditioner(blocks: torch.Tensor, permutations: torch.Tensor, n: int) -> torch.Tensor:
    """``(I 0) Gt^T Gt (I 0)^T``."""
    half = product(blocks, permutations)[:, :n]
    return half.T @ half


def run(quick: bool = False, seed: int = 0) -> Finding:
    """Check the claims of Section 4.3."""
    rng = np.random.default_rng(seed)
    mixing = [
        mix(4, 12, 400 if quick else 4000, rng, exact=6 if quick else 8),
        mix(6, 10, 100 if quick else 1000, rng, exact=3 if quick else 4),
        mix(8, 10, 10 if quick else 100, rng),
    ]
    epsilon, numbers = _epsilon(mixing)
    reach, reach_numbers = _reach(mixing)
    built, built_numbers, built_figure = _construction(rng, quick)
    families, family_numbers = _families(rng)
    return Finding(
        "expressiveness",
        "What the network can represent",
        (epsilon, reach, built, families),
        {**numbers, **reach_numbers, **built_numbers, **family_numbers},
        [_mixing_figure(mixing), built_figure],
    )


def _epsilon(mixing: list[Mixed]) -> tuple[Claim, dict[str, object]]:
    fits = {mixed.nt: fit(mixed) for mixed in mixing}
    halves = {nt: math.exp(-c2 * nt / 2) for nt, (_, c2) in fits.items()}
    off = 0.0
    for mixed in mixing:
        c1, c2 = fits[mixed.nt]
        N, good = np.arange(1, len(mixed.epsilon) + 1), falling(mixed)
        predicted = c1 * mixed.nt * np.exp(-c2 * N * mixed.nt / 2)
        off = max(off, float(np.abs(np.log(mixed.epsilon[good] / predicted[good])).max()))
    said = "; ".join(f"nt = {nt}: c1 = {c1:.2f}, c2 = {c2:.3f}" for nt, (c1, c2) in fits.items())
    claim = Claim(
        "epsilon is about c1 nt exp(-c2 N nt / 2).",
        off < math.log(2),
        "For each nt, from where less than a third of the entropy is missing, it falls exponentially with depth, "
        f"within a factor of {math.exp(off):.2f} of a fit: {said}.",
        "c2 is not the same for all nt: a layer divides epsilon by "
        f"{', '.join(f'{1 / half:.2f} (nt = {nt})' for nt, half in halves.items())}, so that the exponent goes with "
        "the depth N rather than with N nt. The conjecture is for large nt, which this cannot reach.",
    )
    return claim, {
        "fits": {str(nt): {"c1": c1, "c2": c2, "factor_a_layer": halves[nt]} for nt, (c1, c2) in fits.items()},
        "epsilon": {str(mixed.nt): mixed.epsilon.tolist() for mixed in mixing},
    }


def _reach(mixing: list[Mixed]) -> tuple[Claim, dict[str, object]]:
    holds = all((mixed.reached >= mixed.bound - 1e-12).all() for mixed in mixing)
    deep = {mixed.nt: int(np.argmax(mixed.reached > 0.999)) + 1 for mixed in mixing if (mixed.reached > 0.999).any()}
    useful = {mixed.nt: 1 - math.factorial(mixed.nt) * math.sqrt(mixed.epsilon[-1] / 2) for mixed in mixing}
    claim = Claim(
        "Random pairings make at least the fraction 1 - sqrt(epsilon / 2) of all permutations, in the mean.",
        bool(holds),
        "So it was at every depth, exactly or within what was sampled. 99.9 % are reached at depth "
        f"{', '.join(f'{depth} (nt = {nt})' for nt, depth in deep.items())}.",
        "That all permutations can be made has probability 1 - nt! sqrt(epsilon / 2) at least, which says nothing "
        "until epsilon is below 2 / nt!^2: at the largest depth here it is "
        f"{', '.join(f'{value:.3g} (nt = {nt})' for nt, value in useful.items())}. In truth all were reached by "
        f"{', '.join(f'{mixed.all_reached[-1]:.0%} (nt = {mixed.nt})' for mixed in mixing)} of the sequences of that "
        "depth.",
    )
    return claim, {
        "reached": {str(mixed.nt): mixed.reached.tolist() for mixed in mixing},
        "bound": {str(mixed.nt): mixed.bound.tolist() for mixed in mixing},
    }


def _mixing_figure(mixing: list[Mixed]) -> Figure:
    missing, unreached = [], []
    for mixed in mixing:
        N, label, color = np.arange(1, len(mixed.epsilon) + 1), f"nt = {mixed.nt}", _COLORS[mixed.nt]
        seen, missed = mixed.epsilon > 1e-12, mixed.reached < 1
        epsilon, error = mixed.epsilon[seen], mixed.error[seen]
        c1, c2 = fit(mixed)
        fitted = c1 * mixed.nt * np.exp(-c2 * N * mixed.nt / 2)
        missing += [
            Line(label, N[seen], epsilon, epsilon - error, epsilon + error, style=Style(color), mark="points"),
            Line(label, N, fitted, style=Style(color, width=1)),
        ]
        unreached += [
            Line(label, N[missed], 1 - mixed.reached[missed], style=Style(color), mark="both"),
            Line(label, N, 1 - mixed.bound, style=Style(color, "--", 1)),
        ]
    depth = Axis("depth $N$", whole=True)
    panels = [
        Plot("epsilon", "Entropy that is missing, and fits", depth, Axis(r"$\epsilon$, nats", log=True), missing),
        Plot("reach", "... and the proof's bound (dashed)", depth, Axis("fraction out of reach", log=True), unreached),
    ]
    return Figure("expressiveness", panels, columns=2, size=(4.8, 3.8))


def _construction(rng: np.random.Generator, quick: bool) -> tuple[Claim, dict[str, object], Figure]:
    """Success rates of routing and of whole networks, by the depth that each permutation is given."""
    tries = 20 if quick else 100
    sizes = (4, 6, 8) if quick else (4, 6, 8, 10)
    depths = np.arange(1, 9 if quick else 11)
    routed = {nt: [routing_success(nt, int(M), tries, rng) for M in depths] for nt in sizes}
    networks, worst = {}, 0.0
    nt = 8
    for k in (1, 2, 4):
        rates = []
        for M in depths[2:]:
            found = 0
            for _ in range(tries // 4):
                F = [sparse_matrix(nt, k, rng) for _ in range(2)]
                P = random_layers(nt, 2 * permutations_needed(k) * int(M), rng)
                made = represent(F, P)
                if made is not None:
                    found += 1
                    worst = max(worst, float(np.abs(made.matrix(P).numpy() - F[1] @ F[0]).max()))
            rates.append(found / (tries // 4))
        networks[k] = rates
    routing = [
        Line(f"nt = {size}", depths, np.array(rates), style=Style(_COLORS[size]), mark="both")
        for size, rates in routed.items()
    ]
    building = [
        Line(f"fan-in and fan-out up to {k}", depths[2:], np.array(rates), style=Style(color), mark="both")
        for (k, rates), color in zip(networks.items(), (BLUES[1], BLUE, ORANGE), strict=True)
    ]
    success = Axis("success")
    panels = [
        Plot("routing", "One random permutation", Axis("layers $M$", whole=True), success, routing),
        Plot(
            "networks",
            f"A network of two sparse matrices, nt = {nt}",
            Axis("layers $M$ for each permutation", whole=True),
            success,
            building,
        ),
    ]
    figure = Figure("expressiveness-represent", panels, columns=2, size=(4.8, 3.8))
    last = {k: rates[-1] for k, rates in networks.items()}
    claim = Claim(
        "With depth 2 M d (ceil(log2 k) + 1) the network can be any linear network of depth d with at most nt weights "
        "a layer and fans up to k: theta is constructed.",
        worst < 1e-9 and min(last.values()) > 0.9,
        f"Where theta was found, the network was the wanted one to {worst:.0e}. With M = {depths[-1]} layers for each "
        "permutation, nt = 8 and d = 2 it was found in "
        f"{', '.join(f'{rate:.0%} (k = {k})' for k, rate in last.items())} of the cases, at a depth of M d (2 "
        "ceil(log2 k) + 1).",
        "The search finds swaps by meeting in the middle, which is exponential in nt: up to about nt = 10 here. A "
        "random permutation needs about log2(nt!) / (nt / 2) layers at the least, as so many swaps must be told apart.",
    )
    return (
        claim,
        {"routing": {str(k): v for k, v in routed.items()}, "networks": {str(k): v for k, v in networks.items()}},
        figure,
    )


def _families(rng: np.random.Generator) -> tuple[Claim, dict[str, object]]:
    """Scalar, diagonal and low-rank preconditioners, with G = (I 0) Gt^T Gt (I 0)^T."""
    n, nt, M = 4, 8, 8
    d = np.exp(rng.standard_normal(n))
    V = rng.standard_normal((2, n))
    targets = {
        "scalar": (0.7 * np.eye(n), math.sqrt(0.7) * np.eye(n)),
        "diagonal": (np.diag(d), np.diag(np.sqrt(d))),
        "rank 1": (np.outer(V[0], V[0]), V[:1]),
        "rank 2": (V.T @ V, V),
    }
    worst, depths = 0.0, {}
    for name, (wanted, half) in targets.items():
        k = int(max((half != 0).sum(0).max(), (half != 0).sum(1).max()))
        depths[name] = permutations_needed(k) * M
        for _ in range(20):
            P = random_layers(nt, depths[name], rng)
            made = represent([half], P)
            if made is not None:
                break
        else:
            worst = math.inf
            continue
        worst = max(worst, float(np.abs(preconditioner(made.blocks, P, n).numpy() - wanted).max()))
    claim = Claim(
        "Scalar, diagonal and low-rank preconditioners can be represented.",
        worst < 1e-9,
        f"For n = {n}, nt = {nt} all were constructed, to {worst:.0e}, at depths "
        f"{', '.join(f'{depth} ({name})' for name, depth in depths.items())}.",
        "G is positive semidefinite, so that indefinite ones cannot. Rank r needs r n <= nt weights in one matrix.",
    )
    return claim, {"family_depths": depths}
