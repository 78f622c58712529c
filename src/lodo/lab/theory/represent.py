"""The constructive half of the paper's Theorem 4.2: theta with which LODO's network is a given sparse linear network.

LODO's half network is ``Gt = B_N P_N ... B_1 P_1`` with given permutations and free 2 x 2 blocks. As in the proof, a
sparse matrix with at most nt weights is made of copies (a forest that fans out), weights, and sums (a forest that fans
in); between them wires are permuted, which M layers of swaps can do if their random pairings allow it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_HALF_BITS = 18  # swaps that are tried on each side when two searches meet
_TRIES = 64  # random settings of the layers that are not searched
_KEEP, _SWAP = np.eye(2), np.array([[0.0, 1.0], [1.0, 0.0]])


@dataclass(frozen=True)
class Represented:
    """The result of `represent`.

    Args:
        blocks: (N, nt / 2, 2, 2), the blocks of every layer in order: theta in its natural form.
        depth: how many of the N layers the construction needs; the rest pass everything on.
    """

    blocks: Tensor
    depth: int

    def matrix(self, permutations: Tensor) -> Tensor:
        """``B_N P_N ... B_1 P_1`` as a matrix."""
        return product(self.blocks, permutations)


def product(blocks: Tensor, permutations: Tensor) -> Tensor:
    """``B_N P_N ... B_1 P_1``, with ``(P x)[j] = x[p[j]]``.

    >>> swap = torch.tensor([[[[0.0, 1.0], [1.0, 0.0]]]])
    >>> product(swap, torch.tensor([[1, 0]]))
    tensor([[1., 0.],
            [0., 1.]])
    """
    hidden = permutations.shape[1]
    out = torch.eye(hidden, dtype=blocks.dtype)
    for B, p in zip(blocks, permutations, strict=True):
        out = (B @ out[p].view(hidden // 2, 2, hidden)).reshape(hidden, hidden)
    return out


def represent(F: Sequence[Tensor | np.ndarray], permutations: Tensor) -> Represented | None:
    """Blocks with which the network with these permutations is a product of sparse matrices; None if none was found.

    Args:
        F: the matrices of a sparse linear network, the first one applied first. Each has at most nt rows, columns and
            nonzero entries; smaller ones stand for their top left corner, the rest being zero.
        permutations: (N, nt), as `lodo.Mixing.permutations` gives them for ``block_size=2``.

    The layers are divided evenly among the permutations that the construction needs, ``2 ceil(log2 k) + 1`` for each
    matrix whose rows and columns have at most k entries: one fewer than in the proof, where two of them meet.

    Example:
        >>> rng = torch.Generator().manual_seed(0)
        >>> P = torch.stack([torch.randperm(8, generator=rng) for _ in range(12)])
        >>> found = represent([np.diag([1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 5.0])], P)
        >>> found.matrix(P).diagonal()
        tensor([1., 2., 3., 4., 0., 0., 0., 5.], dtype=torch.float64)
    """
    p = permutations.numpy()
    depth, nt = p.shape
    if nt % 2:
        raise ValueError(f"permutations must be of an even number of elements, got {nt}")
    stages = [stage for matrix in F for stage in _stages(_square(matrix, nt), nt)]
    each = depth // len(stages)
    if each == 0:
        raise ValueError(f"permutations must be at least {len(stages)} for this network, got {depth}")
    blocks = np.tile(_KEEP, (depth, nt // 2, 1, 1))
    rng = np.random.default_rng(0)
    for i, stage in enumerate(stages):
        first, last = i * each, (i + 1) * each if i + 1 < len(stages) else depth
        routed = route(stage.sources, p[first:last], rng)
        if routed is None:
            return None
        swapped = np.where(routed[:, :, None, None], _SWAP, _KEEP)
        blocks[first:last] = swapped
        blocks[last - 1] = stage.blocks @ swapped[-1]  # block-diagonal matrices in a row are one
    return Represented(torch.from_numpy(blocks), depth)


@dataclass(frozen=True)
class _Stage:
    """Wires are permuted, ``y[j] = x[sources[j]]``, then each pair goes through its block."""

    sources: np.ndarray
    blocks: np.ndarray


def _square(matrix: Tensor | np.ndarray, nt: int) -> np.ndarray:
    given = np.asarray(matrix, dtype=np.float64)
    if given.ndim != 2 or max(given.shape) > nt:
        raise ValueError(f"F must have matrices of at most {nt} rows and columns, got one of shape {given.shape}")
    if np.count_nonzero(given) > nt:
        raise ValueError(f"F must have at most {nt} nonzero entries a matrix, got {np.count_nonzero(given)}")
    whole = np.zeros((nt, nt))
    whole[: given.shape[0], : given.shape[1]] = given
    return whole


def _stages(matrix: np.ndarray, nt: int) -> list[_Stage]:
    """A matrix as permutations and blocks: copies, weights, sums."""
    rows, columns = np.nonzero(matrix)
    weights = matrix[rows, columns]
    k = max([1, *np.bincount(rows), *np.bincount(columns)]) if len(rows) else 1
    levels = math.ceil(math.log2(k))
    out, ends = _fan_out(columns, nt, levels)
    back, begins = _fan_out(rows, nt, levels)
    # the wire of each connection after the fan-out must come to where the fan-in, a fan-out read backwards, begins
    join = np.full(nt, -1)
    scale = np.zeros(nt)
    join[begins], scale[begins] = ends, weights
    join = _completed(join)
    weighing = np.stack([np.diag(pair) for pair in scale.reshape(-1, 2)])
    gathered = [_Stage(join, weighing)]
    for stage in reversed(back):
        # backwards: the transposed block, then the inverse permutation, which is put before the next stage's block
        gathered[-1] = _Stage(gathered[-1].sources, stage.blocks.transpose(0, 2, 1) @ gathered[-1].blocks)
        gathered.append(_Stage(np.argsort(stage.sources), np.tile(_KEEP, (nt // 2, 1, 1))))
    return [*out, *gathered]


def _fan_out(owners: np.ndarray, nt: int, levels: int) -> tuple[list[_Stage], np.ndarray]:
    """Stages that copy the value on wire ``owners[e]`` to a wire of connection e's own, and these wires.

    A value that m connections need is copied ``ceil(log2 m)`` times over, onto wires that nothing needs any more.
    """
    needs: dict[int, list[int]] = defaultdict(list)  # wire -> connections that its value is for
    for e, owner in enumerate(owners):
        needs[int(owner)].append(e)
    stages = []
    for level in reversed(range(levels)):
        sources, blocks = np.full(nt, -1), np.tile(_KEEP, (nt // 2, 1, 1))
        kept: dict[int, list[int]] = {}
        pair, single = 0, []
        for wire, connections in needs.items():
            if len(connections) > 2**level:  # too many for the levels that are left
                sources[2 * pair] = wire
                blocks[pair] = [[1.0, 0.0], [1.0, 0.0]]
                half = (len(connections) + 1) // 2
                kept[2 * pair], kept[2 * pair + 1] = connections[:half], connections[half:]
                pair += 1
            else:
                single.append((wire, connections))
        for place, (wire, connections) in enumerate(single, start=2 * pair):
            sources[place] = wire
            kept[place] = connections
        stages.append(_Stage(_completed(sources), blocks))
        needs = kept
    ends = np.zeros(len(owners), dtype=np.int64)
    for wire, connections in needs.items():
        for e in connections:
            ends[e] = wire
    return stages, ends


def _completed(sources: np.ndarray) -> np.ndarray:
    """A permutation with these sources; -1 takes what is left."""
    left = iter(np.setdiff1d(np.arange(len(sources)), sources))
    return np.array([next(left) if source < 0 else source for source in sources])


def route(target: np.ndarray, permutations: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """Which pairs to swap in each layer so that together they are ``y[j] = x[target[j]]``; None if none was found.

    From both ends: all swaps of the first layers, and all of the last ones backwards, until they meet. Layers beyond
    what can be searched are set at random, a number of times.

    >>> rng = np.random.default_rng(0)
    >>> P = np.stack([rng.permutation(6) for _ in range(8)])
    >>> route(np.array([5, 4, 3, 2, 1, 0]), P, rng).shape
    (8, 3)
    """
    depth, nt = permutations.shape
    pairs = nt // 2
    half = min(max(1, _HALF_BITS // pairs), (depth + 1) // 2)
    low, high = half, min(half, depth - half)
    fixed = depth - low - high
    for _ in range(_TRIES if fixed else 1):
        middle = rng.integers(0, 2, (fixed, pairs)).astype(bool)
        now, front = _all_swaps(np.arange(nt), permutations[:low])
        for swaps, p in zip(middle, permutations[low : low + fixed], strict=True):
            now = _swapped(now[:, p], swaps)
        end, back = _all_swaps_back(np.asarray(target), permutations[low + fixed :])
        met = _meet(now, end)
        if met is not None:
            return np.concatenate([front[met[0]], middle, back[met[1]]])
    return None


def _swapped(rows: np.ndarray, swaps: np.ndarray) -> np.ndarray:
    """Rows with the chosen pairs swapped."""
    nt = rows.shape[1]
    order = np.arange(nt).reshape(-1, 2)
    order[swaps] = order[swaps][:, ::-1]
    return rows[:, order.ravel()]


def _patterns(pairs: int) -> np.ndarray:
    return np.asarray((np.arange(2**pairs)[:, None] >> np.arange(pairs)) & 1 == 1)


def _all_swaps(start: np.ndarray, permutations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every list that these layers can make of ``start``, one in each row, and the swaps (row, layer, pair)."""
    rows, pairs = start[None], len(start) // 2
    told = np.zeros((1, 0, pairs), dtype=bool)
    patterns = _patterns(pairs)
    for p in permutations:
        rows = np.concatenate([_swapped(rows[:, p], swaps) for swaps in patterns])
        told = np.concatenate([np.concatenate([told, np.tile(swaps, (len(told), 1, 1))], axis=1) for swaps in patterns])
    return rows, told


def _all_swaps_back(target: np.ndarray, permutations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every list from which these layers can make the target, one in each row, and the swaps that do it."""
    rows, pairs = target[None], len(target) // 2
    told = np.zeros((1, 0, pairs), dtype=bool)
    patterns = _patterns(pairs)
    for p in permutations[::-1]:
        undo = np.argsort(p)
        rows = np.concatenate([_swapped(rows, swaps)[:, undo] for swaps in patterns])
        told = np.concatenate([np.concatenate([np.tile(swaps, (len(told), 1, 1)), told], axis=1) for swaps in patterns])
    return rows, told


def _meet(rows: np.ndarray, others: np.ndarray) -> tuple[int, int] | None:
    """The places of a row that both have; None if they share none."""
    a, b = (np.ascontiguousarray(r.astype(np.uint8)).view(f"V{r.shape[1]}").ravel() for r in (rows, others))
    common, first, second = np.intersect1d(a, b, return_indices=True)
    return (int(first[0]), int(second[0])) if len(common) else None
