"""Lists shuffled by random pairings with optional swaps (the paper's Definition 4.1), computed over the whole group.

A layer pairs up all of nt elements (nt even) and swaps each pair or does not. Which permutations a sequence of layers
can make, and with which probability if each swap is made with probability 1/2, is a vector over all nt! permutations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import permutations

import numpy as np

Pairing = tuple[tuple[int, int], ...]


def pairings(nt: int) -> list[Pairing]:
    """All ways to pair up nt elements.

    >>> pairings(4)
    [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]
    """

    def of(rest: tuple[int, ...]) -> Iterator[Pairing]:
        if not rest:
            yield ()
            return
        first, *others = rest
        for partner in others:
            for more in of(tuple(i for i in others if i != partner)):
                yield ((first, partner), *more)

    return list(of(tuple(range(nt))))


class Group:
    """All permutations of nt elements, as rows, and what swapping two positions does to each.

    >>> group = Group(4)
    >>> len(group.rows), group.support([pairings(4)[0], pairings(4)[1]])
    (24, 16)
    """

    def __init__(self, nt: int) -> None:
        self.nt = nt
        self.rows = np.array(list(permutations(range(nt))), dtype=np.int8)

    @cached_property
    def _ranks(self) -> np.ndarray:
        """Place of a permutation in the table, by its digits."""
        table = np.zeros(self.nt**self.nt, dtype=np.int32)
        table[self._code(self.rows)] = np.arange(len(self.rows))
        return table

    def _code(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows.astype(np.int64) @ self.nt ** np.arange(self.nt, dtype=np.int64))

    @cached_property
    def swaps(self) -> dict[tuple[int, int], np.ndarray]:
        """For each two positions, where every permutation goes when they are swapped."""
        found = {}
        for i in range(self.nt):
            for j in range(i + 1, self.nt):
                rows = self.rows.copy()
                rows[:, [i, j]] = rows[:, [j, i]]
                found[i, j] = self._ranks[self._code(rows)]
        return found

    def layer(self, p: np.ndarray, pairing: Pairing) -> np.ndarray:
        """The distribution after a layer whose pairs are each swapped with probability 1/2."""
        for pair in pairing:
            p = (p + p[self.swaps[pair]]) / 2
        return p

    @cached_property
    def start(self) -> np.ndarray:
        """All weight on the identity."""
        p = np.zeros(len(self.rows))
        p[0] = 1.0
        return p

    def distribution(self, sequence: list[Pairing]) -> np.ndarray:
        """Over all permutations, given the pairings and not the swaps."""
        p = self.start
        for pairing in sequence:
            p = self.layer(p, pairing)
        return p

    def support(self, sequence: list[Pairing]) -> int:
        """The number of permutations that some choice of swaps produces."""
        return int((self.distribution(sequence) > 0).sum())


def entropy(p: np.ndarray) -> float:
    """The entropy of a distribution in nats."""
    q = p[p > 0]
    return float(-(q * np.log(q)).sum())


def exact_epsilon(nt: int, depth: int) -> tuple[list[float], list[float]]:
    """Definition 4.1's epsilon and the mean fraction of permutations that can be made, for depths 1 to ``depth``.

    Over all sequences of pairings; the first one may be fixed, as renaming elements turns any into any.

    >>> epsilon, reached = exact_epsilon(4, 2)
    >>> round(epsilon[0] / math.log(2), 6), round(reached[0] * 24)  # log2 4! - 2 bits, four permutations
    (2.584963, 4)
    """
    group, every = Group(nt), pairings(nt)
    sums, counts = np.zeros((depth, 2)), np.zeros(depth)

    def visit(p: np.ndarray, level: int) -> None:
        sums[level] += math.log(len(p)) - entropy(p), (p > 0).mean()
        counts[level] += 1
        if level + 1 < depth:
            for pairing in every:
                visit(group.layer(p, pairing), level + 1)

    visit(group.layer(group.start, every[0]), 0)
    means = sums / counts[:, None]
    return [max(0.0, float(e)) for e in means[:, 0]], [float(f) for f in means[:, 1]]


def sampled_epsilon(nt: int, depth: int, samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The same for random sequences of pairings: one row for each sequence, one column for each depth."""
    group = Group(nt)
    gaps, reached = np.empty((samples, depth)), np.empty((samples, depth))
    for i in range(samples):
        p = group.start
        for level in range(depth):
            order = rng.permutation(nt)
            pairing = tuple((int(min(a, b)), int(max(a, b))) for a, b in order.reshape(-1, 2))
            p = group.layer(p, pairing)
            gaps[i, level], reached[i, level] = math.log(len(p)) - entropy(p), (p > 0).mean()
    return gaps, reached
