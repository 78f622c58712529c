r"""KronLODO: LODO for networks. It learns one gain and one gate per tensor, in the bases of the gradients' covariances.

Tensors are matrices here, kernels as out x rest. With G the gradient, P and Q orthogonal, ^ bias-corrected::

    X  = P' G Q
    c += meta_lr Adam[ <X, S> / (|X| |S|) ]         S the last direction: W moved by -lr e^c S, dl/dc = -lr e^c <X, S>
    w += gate_lr Adam[ <X, D> / (|X| |S|) ]         D = dS/dw of the last step; w within [0, 1], starts at 1
    c  within bounds that anneal                    as 1 / (1 + t / anneal), see `bounds`
    A, B = averages of G G', G' G                   over as many steps as M
    P <- qr(A P), Q <- qr(B Q), M turned along      every `refresh_every` steps, later less often
    M, V = averages of X, X^2                       M over ever more steps, `averaging` t of them
    R  = sqrt(V^) + eps + 1e-5 sqrt(mean of V^)     below that there are only rounding errors
    S  = ((1 - w) X + w M^) / R,                    D = (M^ - X) / R
    W -= lr e^c P S Q'

A dimension of 1, above ``max_dim``, or more than 16 times the other has the identity for its basis. Of the last step,
X / R is kept for <X, D>; in 8 bits unless parameters are in double precision (`lodo.kron_state.unit_of`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from lodo._checks import check_bool, check_choice, check_int
from lodo.checkpoint import completed, load_between
from lodo.distributed import check_sync, is_distributed, local
from lodo.engines import check_backend
from lodo.estimate import readable
from lodo.group import Options, name_of
from lodo.kron_state import (
    FIRST,
    KronMemory,
    check_options,
    check_params,
    check_rate,
    check_state,
    coded,
    decoded,
    diagnose,
    fresh_state,
    memory_of,
    restored,
    spelled_dtype,
    unit_of,
)
from lodo.meta import BETA2, adam_step
from lodo.ownership import Division, owned_here, replicated
from lodo.refusal import SKIP, WORTH_A_WARNING, check_dense, look_back
from lodo.rounding import random_bits, round_to, update_key
from lodo.scalars import Flag, Scalar, largest, logarithm, over, plain, where
from lodo.stacks import Bundle, Part, Stack, bundled

NOISE = 1e-5  # of a gradient's mean size: what is smaller may be a rounding error
CATCHING_UP = 10.0  # how many times faster c is learned until lr e^c has once been `FIRST`
GAIN_BETA2 = 0.99  # of the Adam that learns c; w has the usual 0.999
LONGEST = 0.03  # the largest lr e^c of any step: how far a step may move the weights, in the root mean square
ADDED_FROM = 2**17  # numbers of a matrix from which its change is not worth keeping apart from it
OUTLIER = 5.0  # how many times as long as recent gradients one may be
HALVED_FROM = 512  # rows of a covariance from which it pays on a CPU to compute one triangle and copy the other
WIDEST = math.log(1e6)  # c stays within this range, so that e^c never overflows

# ---------------------------------------------------------------- the equations, on stacks of matrices


def turned(G: Tensor, P: Tensor | None, Q: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``P' G Q``, where None is the identity.

    >>> turned(torch.tensor([[[1.0, 2.0]]]), None, torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]))
    tensor([[[2., 1.]]])
    """
    return _product([None if P is None else P.mT, G, Q], out)


def turned_back(S: Tensor, P: Tensor | None, Q: Tensor | None, out: Tensor | None = None) -> Tensor:
    """``P S Q'``, where None is the identity.

    >>> turned_back(torch.tensor([[[1.0, 2.0]]]), None, torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]))
    tensor([[[2., 1.]]])
    """
    return _product([P, S, None if Q is None else Q.mT], out)


def _product(factors: Sequence[Tensor | None], out: Tensor | None = None) -> Tensor:
    """The product of those that are not None, in ``out`` if there is more than one."""
    first, *others = [X for X in factors if X is not None]
    for i, X in enumerate(others, 1):
        first = torch.bmm(first, X, out=out if i == len(others) else None)
    return first


def refreshed(A: Tensor, P: Tensor) -> Tensor:
    """``qr(A P)``: an orthogonal iteration towards the eigenvectors of A.

    A is scaled to a mean eigenvalue of 1, so it may be of any size, and has `NOISE` added to its eigenvalues: where
    gradients have never been, P stays.

    >>> refreshed(torch.tensor([[[0.0, 1e-30], [1e-30, 1e-30]]]), torch.eye(2)[None]).abs()
    tensor([[[5.0068e-06, 1.0000e+00],
             [1.0000e+00, 5.0068e-06]]])
    """
    size = A.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).unsqueeze(-1)
    Z: Tensor = torch.linalg.qr(torch.baddbmm(P, A / torch.where(size > 0, size, 1), P, beta=NOISE))[0]
    return Z


def inner(X: Tensor, Y: Tensor) -> Tensor:
    """``<X, Y>`` of each pair of matrices in two stacks.

    >>> inner(torch.ones(2, 1, 3), torch.ones(2, 1, 3))
    tensor([3., 3.])
    """
    return (X * Y).flatten(1).sum(1)  # not a batched product: its rounding depends on what else is in the stack


def orthogonal(M: Tensor, steps: int = 5) -> Tensor:
    """About the nearest matrix with orthonormal rows or columns, by Newton-Schulz iterations, as Muon has it.

    The singular values end between about 0.7 and 1.2.

    >>> torch.linalg.svdvals(orthogonal(torch.diag(torch.tensor([5.0, 1.0]))[None])).round(decimals=1)
    tensor([[0.8000, 0.7000]])
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = M.shape[-2] > M.shape[-1]
    X: Tensor = M.mT if tall else M
    X = X / torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        XX = X @ X.mT
        X = a * X + (b * XX + c * XX @ XX) @ X
    found: Tensor = X.mT if tall else X
    return found


# ---------------------------------------------------------------- a step of a bundle of parameters


def share(beta: float, ok: Flag, like: Tensor) -> float | Tensor:
    """How much of a new value enters an average: 1 - beta, or nothing if a device refuses the step.

    >>> share(0.75, torch.tensor(False), torch.ones(1))
    tensor(0.)
    """
    return (1 - beta) * ok.to(like.dtype) if isinstance(ok, Tensor) else 1 - beta


def kept(ok: Flag, new: Tensor, old: Tensor) -> Tensor:
    """What replaces the old value: the new one, unless a device refuses the step."""
    return torch.where(ok, new, old) if isinstance(ok, Tensor) else new


def power(beta: float, t: Any) -> Any:
    """``beta ** t`` of arrays, or of tensors: of those through NumPy, because in torch an entry's place matters.

    >>> power(0.5, torch.tensor([1.0, 2.0]))
    tensor([0.5000, 0.2500])
    """
    return torch.from_numpy(beta ** t.numpy()) if isinstance(t, Tensor) and is_host(t.device) else beta**t


class Factors(NamedTuple):
    """What turns the averages M and V into M^ and R: one number for each parameter."""

    mean: Any  # M^ = mean M
    root: Any  # R = root sqrt(V) + least
    least: Any

    @classmethod
    def of(cls, options: Options, numbers: Mapping[str, Any]) -> Factors:
        """The factors after the last step, of tensors or of arrays."""
        is_first = numbers["step"] == 0
        root = (1 - power(options["betas"][1], numbers["step"] + is_first)) ** -0.5
        least = options["eps"] + 0 * root
        if options["basis"] == "kronecker":
            least = least + NOISE * root * (numbers["norm_sq"] / numbers["size"]) ** 0.5
        return cls(1 / (1 - numbers["mean_decay"] + is_first), root, least)

    def at(self, stack: Stack) -> Factors:
        """Those of a stack."""
        return Factors(*(factor[stack.rows].reshape(-1, 1, 1) for factor in self))


def newest_share(options: Options, t: Any) -> Any:
    """How much of M the newest X makes up, at step t: 1 - b1 at first, and 1 / (averaging t) later.

    So M reaches back over more and more steps, a constant part of the run. That calms the steps as annealing does, but
    takes away only noise.

    >>> newest_share({"betas": (0.95, 0.95), "averaging": 0.1}, torch.tensor([1.0, 400.0]))
    tensor([0.0500, 0.0250])
    """
    share = 1 - options["betas"][0] + 0 * t
    if not options["averaging"]:
        return share
    later = 1 / (options["averaging"] * (t + (t == 0)))
    return torch.minimum(share, later) if isinstance(t, Tensor) else np.minimum(share, later)


class Turned(NamedTuple):
    """The gradients of a part, and the same in the bases."""

    G: list[Tensor]  # of every stack
    X: list[Tensor]  # of every stack, views of:
    flat: Tensor


class Reading(NamedTuple):
    """What the gradients of a bundle say."""

    parts: list[Turned]
    sums: Tensor  # |X|^2, <X, M^ / R> and <X, U> of every parameter, the last two with the last step's M^, R and U

    def scaled(self, parts: Sequence[Part], factors: Tensor) -> Reading:
        """With the gradient of every parameter times a factor; X is changed in place."""
        given = []
        for part, turned in zip(parts, self.parts, strict=True):
            each = [factors[stack.rows].reshape(-1, 1, 1) for stack in part.stacks]
            given.append(turned._replace(G=[G * factor for G, factor in zip(turned.G, each, strict=True)]))
            for X, factor in zip(turned.X, each, strict=True):
                X.mul_(factor)
        return Reading(given, self.sums * torch.stack([factors.square(), factors, factors]))

    def masked(self, parts: Sequence[Part], ok: Tensor) -> Reading:
        """Zeros, if a device refuses the step."""
        given = []
        for part, turned in zip(parts, self.parts, strict=True):
            flat = torch.where(ok, turned.flat, 0)
            given.append(Turned([torch.where(ok, G, 0) for G in turned.G], part.views(flat), flat))
        return Reading(given, torch.where(ok, self.sums, 0))


def read(options: Options, bundle: Bundle) -> Reading:
    """Turn the gradients; nothing changes yet."""
    step, unit = bundle.numbers["step"], unit_of(options["betas"][1])
    reading = Reading([], step.new_zeros(3, len(step)))
    learning = "length" in bundle.numbers
    factors = Factors.of(options, bundle.arrays or bundle.numbers) if learning else None
    for part in bundle.parts:
        turned = turn_gradients(options, part)
        reading.parts.append(turned)
        if part.fused is not None:
            part.fused.slopes(turned.flat, learning, unit, factors or [bundle.arrays["step"]] * 3, reading.sums)
            continue
        for stack, X in zip(part.stacks, turned.X, strict=True):
            reading.sums[:, stack.rows] = sums_of(stack, X, factors and factors.at(stack), unit)
    return reading


def turn_gradients(options: Options, part: Part) -> Turned:
    """``X = P' G Q`` of every stack."""
    G = part.gradients()
    G = -G if options["maximize"] else G
    X = torch.empty_like(G)
    X[: part.plain].copy_(G[: part.plain])
    both = Turned(part.views(G), part.views(X), X)
    for stack, G_, X_ in zip(part.stacks, both.G, both.X, strict=True):
        if stack.has_bases:
            turned(G_, *stack.bases(), out=X_)
    return both


def sums_of(stack: Stack, X: Tensor, factors: Factors | None, unit: float) -> Tensor:
    """``|X|^2``, ``<X, M^ / R>`` and ``<X, U>`` of every matrix; ``<X, S>`` second where directions are orthogonal."""
    sums = X.new_zeros(3, len(X))
    sums[0] = inner(X, X)
    if stack.V is not None and factors is not None:
        sums[1] = inner(X, scaled_average(stack.M.to(X.dtype), stack.V.to(X.dtype), factors)[0])
    elif stack.S is not None:
        sums[1] = inner(X, stack.S.to(X.dtype))
    if stack.U is not None:
        sums[2] = inner(X, decoded(stack.U, X.dtype, unit))
    return sums


def scaled_average(M: Tensor, V: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
    """``M^ / R`` and ``R``."""
    R = V.sqrt().mul_(factors.root).add_(factors.least)
    return M.mul(factors.mean).div_(R), R


def advance(options: Options, bundle: Bundle, reading: Reading, rise: Scalar, ok: Flag) -> None:
    """Learn from the last step, then take the next one.

    Args:
        options: of the parameter group.
        bundle: its parameters and their states.
        reading: of their gradients.
        rise: how far lr is above its highest so far, from `follow_rate`.
        ok: whether the gradients can be used. If a device finds that they cannot, nothing changes.
    """
    numbers = bundle.numbers
    if isinstance(ok, Tensor):
        reading = reading.masked(bundle.parts, ok)
    quick = is_host(reading.sums.device) and not any(isinstance(x, Tensor) for x in (ok, rise, options["lr"]))

    def short(x: Tensor) -> Any:
        """A short vector; on the CPU as an array, because NumPy takes a fraction of torch's time."""
        return x.numpy() if quick else x

    ours = {name: short(x) for name, x in numbers.items()}
    if options["guard"]:
        found = trust(ours["norm_sq"], ours["step"], short(reading.sums[0]), options["betas"][1])
        factors = torch.as_tensor(found)
        if not is_host(factors.device) or bool((found < 1).any()):
            reading = reading.scaled(bundle.parts, factors)
    if "length" in ours:
        learn_from_last_step(options, ours, short(reading.sums), rise, ok)
    numbers["step"].add_(ok)
    numbers["mean_decay"].mul_(1 - newest_share(options, numbers["step"]) * share(0.0, ok, reading.sums))
    if "norm_sq" in numbers:
        numbers["norm_sq"].lerp_(reading.sums[0], share(options["betas"][1], ok, reading.sums))
    if isinstance(ok, Tensor):
        numbers["skipped"].add_(torch.logical_not(ok))
    lr = options["lr"] * share(0.0, ok, reading.sums)
    rates = -lr * (numbers["gain"].exp() if "gain" in numbers else torch.ones_like(numbers["step"]))
    enters, refresh = (options["steps"] % interval == 0 for interval in intervals(options))
    for part, each in zip(bundle.parts, reading.parts, strict=True):
        for stack, G, X in zip(part.stacks, each.G, each.X, strict=True):
            if stack.has_bases and enters:
                follow_covariances(options, stack, G, X, refresh, ok)
        next_steps(options, bundle, part, each, rates, ok)
        move(part, each.X, 1 - lr * options["weight_decay"])


def trust(norm_sq: Any, t: Any, squares: Any, b2: float) -> Any:
    """1, or what shortens a gradient to `OUTLIER` times the recent ones, given its square and their average.

    A gradient that is a thousand times too long would otherwise rule V and the covariances for hundreds of steps, and M
    for longer.

    >>> trust(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 100.0]), 0.5)
    tensor([1.0000, 0.5000])
    """
    limit = OUTLIER**2 * norm_sq / (1 - power(b2, t) + (t == 0))  # 0 before the first step
    is_outlier = (limit > 0) & (squares > limit)
    where = library(t).where
    return where(is_outlier, limit / where(is_outlier, squares, 1), 1) ** 0.5


def library(x: Any) -> Any:
    """What has the functions for an array or for a tensor; what is used here has the same names in both.

    >>> library(np.ones(1)).__name__, library(torch.ones(1)).__name__
    ('numpy', 'torch')
    """
    return torch if isinstance(x, Tensor) else np


def learn_from_last_step(options: Options, numbers: dict[str, Any], sums: Any, rise: Scalar, ok: Flag) -> None:
    """Update c and w with the cosines of X with the last step's S and D."""
    XX, XN, XU = sums
    XS, XD = (XU + numbers["gate"] * (XN - XU), XN - XU) if "gate" in numbers else (XN, XU)  # which is 0
    scale = XX**0.5 * numbers["length"]  # |X| |S|
    scale = library(scale).where(scale > 0, scale, math.inf)
    learn(options, numbers, XS / scale, XD / scale, rise, ok)


def learn(options: Options, numbers: dict[str, Any], alignment: Any, gate_slope: Any, rise: Scalar, ok: Flag) -> None:
    """Update c and w, where there was a last step."""
    t = numbers["step"]
    xp = library(t)
    learning = (t > 0) & ok
    if "gain" in numbers:
        behind = numbers["gain_highest"] < logarithm(over(FIRST, options["peak_lr"]))
        rate = options["meta_lr"] * xp.where(behind, CATCHING_UP, xp.ones_like(t))
        c = _learned(numbers, "gain", -alignment, rate, learning, GAIN_BETA2)
        fall, ceiling = bounds(options, t)
        c = xp.minimum(settled(c, rise), ceiling)
        highest = xp.maximum(settled(numbers["gain_highest"], rise), c)
        numbers["gain_highest"][:] = kept(ok, highest, numbers["gain_highest"])
        numbers["gain"][:] = kept(ok, xp.maximum(c, highest - fall).clip(-WIDEST, WIDEST), numbers["gain"])
    if "gate" in numbers:
        numbers["gate"][:] = _learned(numbers, "gate", -gate_slope, options["gate_lr"], learning).clip(0, 1)


def settled(c: Any, rise: Scalar) -> Any:
    """c after a warm-up has raised lr: what c has gained already is not multiplied by it.

    >>> settled(torch.tensor([3.0, 1.0, -1.0]), 2.0)
    tensor([ 1.,  0., -1.])
    """
    return library(c).maximum(c.clip(max=0), c - rise)


def _learned(numbers: dict[str, Any], name: str, slope: Any, rate: Any, learning: Any, beta2: float = BETA2) -> Any:
    """The new value of a learned number; Adam's moments of it are updated."""
    t = numbers["step"]
    before = value, first, second = [numbers[each] for each in (name, f"{name}_exp_avg", f"{name}_exp_avg_sq")]
    after = adam_step((*before, t - 1 + (t == 0)), slope, rate, beta2)
    where = library(t).where
    first[:], second[:] = where(learning, after[1], first), where(learning, after[2], second)
    return where(learning, after[0], value)


def follow_rate(options: Options) -> Scalar:
    """Note the highest lr so far, and count the steps in which a schedule keeps lr below it.

    Returns:
        By how much the logarithm of the highest lr has risen, as it does in a warm-up; 0 at first.
    """
    lr, before = options["lr"], options["peak_lr"]
    options["peak_lr"] = peak = largest(before, lr)
    options["scheduled"] = options["scheduled"] + (lr < peak)
    return where(before > 0, logarithm(over(peak, where(before > 0, before, 1.0))), 0.0)


def bounds(options: Options, t: Any) -> tuple[Any, Any]:
    """How far c may fall below its highest, and how high it may rise.

    Learned greedily, c falls asleep in long runs, because the next step always looks better with less noise. So lr e^c
    falls no faster than 1 / (1 + t / anneal) from its highest, where t counts steps at a constant lr: once a schedule
    takes lr down, annealing is its job, and what lr has fallen counts.
    On data that a network can fit exactly, c rises without end, because every step helps until one breaks everything.
    So lr e^c stays below `LONGEST`, or the highest lr if that is larger, annealed likewise.
    """
    lr, peak = options["lr"], options["peak_lr"]
    ceiling = logarithm(over(largest(LONGEST, peak), peak))
    if not options["anneal"]:
        return 0 * t + math.inf, ceiling + 0 * t
    annealed = library(t).log1p((t - options["scheduled"]).clip(min=0) / options["anneal"])
    fall = (annealed - logarithm(over(peak, lr))).clip(min=0)
    return fall, ceiling - fall


def follow_covariances(options: Options, stack: Stack, G: Tensor, X: Tensor, refresh: bool, ok: Flag) -> None:
    """Average the covariances; if it is time, refresh the bases and turn M and X along."""
    A, B = stack.A, stack.B
    beta = 1 - intervals(options)[0] / covariance_steps(options)
    if A is not None:
        average_product(A, G, G.mT, beta, ok)
    if B is not None:
        average_product(B, G.mT, G, beta, ok)
    if refresh:
        P, Q = stack.bases()
        mean = turned_back(stack.M.to(stack.dtype), P, Q)
        for covariance, basis, stored in ((A, P, stack.P), (B, Q, stack.Q)):
            if covariance is not None and basis is not None and stored is not None:
                stored.copy_(kept(ok, refreshed(covariance, basis), stored))
        P, Q = stack.bases()
        stack.M.copy_(kept(ok, turned(mean, P, Q), stack.M))
        turned(G, P, Q, out=X)


def covariance_steps(options: Options) -> float:
    """Over how many steps A and B are averaged: as many steps of the group as M over those of a parameter.

    >>> covariance_steps({"betas": (0.95, 0.95), "averaging": 0.1, "steps": 999})
    100.0
    """
    steps: float = max(options["averaging"] * (options["steps"] + 1), 1 / (1 - options["betas"][1]))
    return steps


def intervals(options: Options) -> tuple[int, int]:
    """The number of steps between gradients that enter A and B, and between refreshes.

    Whenever A and B are averaged over twice as many steps, they change half as fast: then refreshes become half as
    frequent. What is averaged needs less: its frequency is halved every other time.

    >>> options = {"betas": (0.95, 0.95), "averaging": 0.1, "refresh_every": 10}
    >>> [intervals({**options, "steps": steps}) for steps in (0, 399, 999, 19_999)]
    [(1, 10), (1, 20), (2, 40), (8, 640)]
    """
    longer = covariance_steps(options) * (1 - options["betas"][1])
    doublings = max(0, math.frexp(longer + 1e-6)[1] - 1)  # rounded down
    return 1 << doublings // 2, int(options["refresh_every"]) << doublings


def average_product(A: Tensor, G: Tensor, H: Tensor, beta: float, ok: Flag) -> None:
    """``A = beta A + (1 - beta) G H`` in place, where ``G H`` is symmetric: of large ones, half is computed.

    >>> A = torch.ones(1, 1, 1)
    >>> average_product(A, 2 * A, A, 0.5, True)
    >>> A.item()
    1.5
    """
    if isinstance(ok, Tensor):
        A.lerp_(G @ H, share(beta, ok, A))
    elif A.shape[1] < HALVED_FROM or A.device.type != "cpu":
        A.baddbmm_(G, H, beta=beta, alpha=1 - beta)
    else:
        edges = [A.shape[1] * i // 4 for i in range(5)]
        for A_, G_, H_ in zip(A, G, H, strict=True):
            for start, stop in pairwise(edges):
                A_[start:stop, start:].addmm_(G_[start:stop], H_[:, start:], beta=beta, alpha=1 - beta)
                A_[stop:, start:stop] = A_[start:stop, stop:].T


def next_steps(options: Options, bundle: Bundle, part: Part, turned: Turned, rates: Tensor, ok: Flag) -> None:
    """X becomes ``rate S``, after it has entered the averages M and V; notes |S|."""
    b2 = options["betas"][1]
    squares = torch.zeros_like(rates)[None]
    if part.fused is not None and not isinstance(ok, Tensor):  # beside parameters on a device, it must be masked
        rate = rates.numpy()
        arrays = bundle.arrays
        newest = newest_share(options, arrays["step"])
        numbers = newest, *Factors.of(options, arrays), arrays.get("gate", rate), rate
        part.fused.direction(turned.flat, 1 - b2, unit_of(b2), arrays["step"], numbers, squares)
    else:
        factors = Factors.of(options, bundle.numbers)
        for stack, X in zip(part.stacks, turned.X, strict=True):
            S = direction(options, stack, X, factors.at(stack), ok)
            squares[0, stack.rows] = inner(S, S)
            torch.mul(S, rates[stack.rows].reshape(-1, 1, 1), out=X)
    if "length" in bundle.numbers:
        length = bundle.numbers["length"][part.rows]
        length.copy_(kept(ok, squares[0, part.rows].sqrt(), length))


def move(part: Part, steps: Sequence[Tensor], decay: float | Tensor) -> None:
    """``W = decay W + P S Q'`` for every parameter; the last product is added to a large one where it lies."""
    weights: list[Tensor] = []
    changes: list[Tensor] = []
    for stack, S in zip(part.stacks, steps, strict=True):
        P, Q = stack.bases()
        factors = [X for X in (P, S, None if Q is None else Q.mT) if X is not None]
        matrices = stack.matrices() if math.prod(stack.shape) >= ADDED_FROM else None
        if matrices is None or len(factors) == 1 or isinstance(decay, Tensor):
            own = stack.weights()
            weights += own
            changes += _product(factors).reshape(len(own), *own[0].shape).unbind()
        else:
            for W, X, Y in zip(matrices, _product(factors[:-1]), factors[-1], strict=True):
                W.addmm_(X, Y, beta=decay)
    if weights and (isinstance(decay, Tensor) or decay != 1):
        torch._foreach_mul_(weights, decay)
    if weights:
        torch._foreach_add_(weights, changes)


def direction(options: Options, stack: Stack, X: Tensor, factors: Factors, ok: Flag) -> Tensor:
    """S, after X has entered the averages M and V."""
    b2, newest = options["betas"][1], newest_share(options, stack.numbers["step"]).reshape(-1, 1, 1)
    bits = bits_of(stack) if stack.M.dtype == torch.bfloat16 else None
    M = averaged(stack.M, X, newest * share(0.0, ok, X), None if bits is None else bits & 0xFFFF)
    if stack.V is None:
        S = orthogonal(torch.lerp(X, M, 1 - newest)) * (
            0.2 * math.sqrt(max(stack.shape))
        )  # about as long as Adam's steps are
        if stack.S is not None:
            stack.S.copy_(kept(ok, S, stack.S))
        return S
    V = averaged(stack.V, X.square(), share(b2, ok, X), None if bits is None else bits >> 16)
    N, R = scaled_average(M, V, factors)
    if stack.U is None:
        return N
    U = X / R
    stack.U.copy_(kept(ok, coded(U, stack.U.dtype, unit_of(b2)), stack.U))
    return torch.lerp(U, N, stack.numbers["gate"].reshape(-1, 1, 1))


def bits_of(stack: Stack) -> Tensor:
    """The random bits with which averages in bfloat16 are rounded: they depend on the step and on the place."""
    places = torch.arange(math.prod(stack.shape), device=stack.M.device).reshape(stack.shape)
    return random_bits(update_key(0, stack.numbers["step"].long().reshape(-1, 1, 1)), 0, places)


def averaged(stored: Tensor, X: Tensor, share: float | Tensor, bits: Tensor | None) -> Tensor:
    """The average after X has entered it; what is stored may be rounded, with random bits."""
    if bits is None:
        return stored.lerp_(X, share)
    exact = torch.lerp(stored.to(X.dtype), X, share)
    round_to(stored, exact, bits)
    return exact


# ---------------------------------------------------------------- the optimizer


class KronLODO(Optimizer):
    r"""LODO for networks: gains and gates learned by hypergradients, in the bases of the gradients' covariances.

    For a weight matrix :math:`W` with gradient :math:`G`, the steps are SOAP's,

    .. math::
        W \leftarrow W - \alpha e^c P S Q^\top, \qquad
        S = \frac{(1 - w) X + w \hat M}{\sqrt{\hat V} + \epsilon}, \qquad X = P^\top G Q,

    and every tensor learns its own log-gain :math:`c` and gate :math:`w` while it is optimized. There is nothing to
    tune, and no schedule is needed. If you know the length of the run, a cosine on ``lr`` helps.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: where the gains start, 3e-3 at most: from there they rise if it pays, and a too large ``lr`` does no harm.
            Any scheduler may change it.
        meta_lr: the rate at which the log-gains are learned.
        betas: the decays of the averages M and V, of M at the start of the run (see ``averaging``); the second is that
            of the covariances too.
        weight_decay: decoupled, as in AdamW: ``W`` shrinks by ``lr * weight_decay``.
        eps: added to the root of V.
        maximize: maximize the objective instead.
        basis: ``"kronecker"`` (the eigenvectors of the gradients' covariances), ``"orthogonal"`` (Muon's direction; no
            gate is learned), or ``"none"`` (Adam's direction, for embeddings and heads).
        gains: learn a gain for every tensor.
        gate: learn how much of the average M and how much of the gradient itself makes the direction.
        gate_lr: the rate at which the gate is learned.
        averaging: M and the covariances average over this part of all steps so far, once that is more than ``betas``
            make it. 0 leaves the averages as ``betas`` make them.
        anneal: a tensor's steps become smaller no faster than ``1 / (1 + t / anneal)``. ``math.inf`` keeps them up,
            for a schedule to bring them down; 0 lets them fall as the hypergradient wants, which is too fast for long
            runs.
        max_dim: larger dimensions have no basis, nor have those that are more than 16 times the other dimension.
        refresh_every: the number of steps between refreshes of the bases. It doubles whenever the covariances are
            averaged over twice as many steps as at first (see ``averaging``).
        guard: shorten a gradient that is more than 5 times as long as those before it, tensor by tensor.
        state_dtype: ``"bfloat16"`` halves M, V and the bases. M and V are rounded stochastically when they are stored;
            the step is taken with the exact ones. The covariances stay whole, because bfloat16 would lose their small
            eigenvalues. None keeps everything in float32, or in float64 for parameters in double precision.
        backend: ``"auto"`` (Numba on the CPU if it is installed), ``"numba"`` or ``"reference"``.
        nonfinite: what to do if a gradient is NaN, infinite, or so large that its square would be: ``"raise"`` an
            error, or ``"skip"`` the step and count it in `skipped_steps`. Either way nothing changes. On a device other
            than the CPU, the error comes with the next step, so that no step waits for the device.
        distribute: under DDP, divide the work between the ranks: each tensor has an owner, which takes its step,
            sends it to the others and alone holds its state. The result is the same, bit for bit. Work on parameters
            that are sharded (FSDP2, tensor parallelism) is always divided.
        check_sync_every: compare what all ranks hold copies of every so many steps, and raise an error that names the
            rank that differs. None compares nothing.

    All but ``backend``, ``nonfinite``, ``distribute`` and ``check_sync_every`` may differ between groups. If work is
    divided, `step`, `state_dict` and `load_state_dict` have to be called on every rank.

    Example:
        >>> import torch
        >>> from lodo import KronLODO
        >>> model = torch.nn.Linear(4, 1)
        >>> opt = KronLODO(model.parameters())
        >>> x, y = torch.randn(8, 4), torch.randn(8, 1)
        >>> for _ in range(3):
        ...     loss = (model(x) - y).square().mean()
        ...     loss.backward()
        ...     opt.step()
        ...     opt.zero_grad()
    """

    _active: list[list[int]]  # of each group, the parameters that had a gradient in the last step
    _stacked: list[list[Bundle]]  # and their stacks
    _refused: Tensor | None  # whether a device refused the last step; not read back yet
    _refused_in_a_row: int
    _division: Division | None = None  # of the work between ranks; made when it is needed

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        meta_lr: float = 1e-2,
        betas: tuple[float, float] = (0.95, 0.95),
        *,
        weight_decay: float = 0.0,
        eps: float = 1e-8,
        maximize: bool = False,
        basis: str = "kronecker",
        gains: bool = True,
        gate: bool = True,
        gate_lr: float = 1e-3,
        averaging: float = 0.1,
        anneal: float = 1500.0,
        max_dim: int = 1024,
        refresh_every: int = 10,
        guard: bool = True,
        state_dtype: str | torch.dtype | None = None,
        backend: str = "auto",
        nonfinite: str = "raise",
        distribute: bool = False,
        check_sync_every: int | None = None,
    ) -> None:
        check_choice("backend", backend, ("auto", "reference", "numba"))
        check_choice("nonfinite", nonfinite, ("raise", "skip"))
        check_bool("distribute", distribute)
        if check_sync_every is not None:
            check_int("check_sync_every", check_sync_every, low=1)
        self.backend, self.nonfinite, self.distribute = backend, nonfinite, distribute
        self.check_sync_every, self._steps_since_sync = check_sync_every, 0
        self._owners: dict[Tensor, int] = {}
        self._forget_stacks()
        defaults = {
            "lr": lr,
            "meta_lr": meta_lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "eps": eps,
            "maximize": maximize,
            "basis": basis,
            "gains": gains,
            "gate": gate,
            "gate_lr": gate_lr,
            "averaging": averaging,
            "anneal": anneal,
            "max_dim": max_dim,
            "refresh_every": refresh_every,
            "guard": guard,
            "state_dtype": spelled_dtype(state_dtype),
            "steps": 0,
            "peak_lr": 0.0,
            "scheduled": 0,
        }
        check_options(defaults)
        super().__init__(params, defaults)

    # ------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Learn from the last step, then take the next one.

        Args:
            closure: evaluates the model again and returns the loss; called once if given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refused, self._refused = self._refused, None
        if refused is not None:
            look_back(refused, self.nonfinite)
        division = self._divided()
        readings = []
        for index, options in enumerate(self.param_groups):
            readings += [(index, bundle, read(options, bundle)) for bundle in self._bundles(index, options)]
        division.ready(self.param_groups, self.state, self.backend)
        ok = division.agree(usable([*(reading.sums[0] for *_, reading in readings), *division.squares()]))
        if ok is False:
            self._refuse()
            return loss
        self._refused_in_a_row = 0
        rises = [follow_rate(options) for options in self.param_groups]
        for index, bundle, reading in readings:
            here = ok.to(reading.sums.device) if isinstance(ok, Tensor) else ok
            advance(self.param_groups[index], bundle, reading, rises[index], here)
        division.step(self.param_groups, ok, lambda i, *rest: step_at_once(self.param_groups[i], rises[i], *rest))
        for options in self.param_groups:
            options["steps"] += any(p.grad is not None and p.numel() for p in options["params"])
        if isinstance(ok, Tensor):
            self._refused = torch.logical_not(ok)
        self._check_sync(division)
        return loss

    def _divided(self) -> Division:
        """What is divided between ranks."""
        if self._division is None or not self._division.covers(self.param_groups):
            self._division = Division(self.param_groups, self._owners, self.distribute)
        return self._division

    def _check_sync(self, division: Division) -> None:
        """Every so many steps, compare what all ranks hold."""
        self._steps_since_sync += 1
        if self.check_sync_every is not None and self._steps_since_sync >= self.check_sync_every:
            self._steps_since_sync = 0
            if is_distributed():
                check_sync(replicated(self.param_groups, self.state, division.items))

    def _bundles(self, index: int, options: Options) -> list[Bundle]:
        """The parameters of a group that have a gradient, in stacks; those of the last step if nothing has changed."""
        check_rate(options, index)
        elsewhere = self._divided().items
        active = [p for p in options["params"] if p.grad is not None and p.numel() and p not in elsewhere]
        ids = list(map(id, active))
        bundles = self._stacked[index]
        if ids == self._active[index] and all(bundle.holds() for bundle in bundles):
            return bundles
        check_dense(options, index)
        for p in active:
            if not self.state[p]:
                self.state[p] = fresh_state(p, options)
        self._active[index] = ids
        self._stacked[index] = bundled(active, [self.state[p] for p in active], self.backend)
        return self._stacked[index]

    def _refuse(self) -> None:
        """Raise, or count the step as skipped."""
        problem = self._problem()
        self._divided().refuse(self.state, count=self.nonfinite == "skip")
        if self.nonfinite == "raise":
            raise FloatingPointError(f"{problem}; nothing was changed. {SKIP}")
        self._refused_in_a_row += 1
        if self._refused_in_a_row in WORTH_A_WARNING:
            warnings.warn(
                f"KronLODO has skipped {self._refused_in_a_row} steps in a row, the last one because {problem}. Look "
                "at the loss; a smaller lr or clipped gradients may help, or go back to a checkpoint",
                stacklevel=5,
            )
        for bundles in self._stacked:
            for bundle in bundles:
                bundle.numbers["skipped"] += 1

    def _problem(self) -> str:
        for index, options in enumerate(self.param_groups):
            for j, p in enumerate(options["params"]):
                if p.grad is not None and not bool(torch.isfinite(local(p.grad)).all()):
                    return f"the gradient of {name_of(options, index, j)} is not finite"
        rank = self._divided().complaining
        if rank is not None:
            return f"a gradient on rank {rank} is not finite or too large"
        return "a gradient is too large: its square is not finite"

    # ------------------------------------------------------------ groups and states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; allowed at any time."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        for name in ("backend", "nonfinite", "distribute", "check_sync_every"):
            if name in param_group:
                raise ValueError(f"{name} is not an option of a group (got {param_group[name]!r}); pass it to KronLODO")
        if "state_dtype" in param_group:
            param_group["state_dtype"] = spelled_dtype(param_group["state_dtype"])
        check_options({**self.defaults, **param_group})
        index = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            check_params(self.param_groups[index], index)
            for p in self.param_groups[index]["params"]:
                check_backend(self.backend, p.device)
        except Exception:
            del self.param_groups[index]
            raise
        self._active.append([])
        self._stacked.append([])

    def _forget_stacks(self) -> None:
        """Before the first step, and after states have been replaced."""
        groups = getattr(self, "param_groups", [])
        self._active, self._stacked = [[] for _ in groups], [[] for _ in groups]
        if self._division is not None:
            self._division.forget_stacks()
        self._refused, self._refused_in_a_row = None, 0

    def __getstate__(self) -> dict[str, Any]:
        own = ("backend", "nonfinite", "distribute", "check_sync_every", "_steps_since_sync", "_owners")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_stacks()

    def state_dict(self) -> StateDict:
        """The state as torch has it; what is divided between ranks is laid out as the parameters are."""
        packed = super().state_dict()
        saved = self._divided().saved(self.state)
        for options, theirs in zip(self.param_groups, packed["param_groups"], strict=True):
            packed["state"].update({i: saved[p] for p, i in zip(options["params"], theirs["params"], strict=True)
                                    if p in saved})  # fmt: skip
        return packed

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state that `state_dict` has returned; it is checked before anything changes."""
        given: list[StateDict] = []
        division = self._divided()

        def check(_: Optimizer, loaded: StateDict) -> StateDict:
            try:
                check_state(self.param_groups, loaded)
            except ValueError as error:
                division.together(error)
            else:
                division.together(None)
            given.append(loaded)
            return {**loaded, "param_groups": list(map(completed, self.param_groups, loaded["param_groups"]))}

        def restore(_: Optimizer) -> None:
            """Replace what torch has cast to the parameters' dtypes."""
            for options, theirs in zip(self.param_groups, given[0]["param_groups"], strict=True):
                for p, key in zip(options["params"], theirs["params"], strict=True):
                    if key in given[0]["state"]:
                        restore_one = division.items[p].restored if p in division.items else partial(restored, p)
                        self.state[p] = restore_one(options, given[0]["state"][key])
            self._forget_stacks()

        load_between(self, state_dict, check, restore)

    # ------------------------------------------------------------ looking inside

    @property
    def skipped_steps(self) -> int:
        """How many steps ``nonfinite="skip"`` has skipped."""
        states = [state for state in self.state.values() if isinstance(state, dict) and "skipped" in state]
        return max((int(plain(state["skipped"])) for state in states), default=0)

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """Numbers to log, by name, of every parameter that has taken a step (if work is divided: and is owned here).

        ======================  ========================================================================
        ``gain``                e^c
        ``gate``                w: 1 follows the average of the gradients, 0 the last gradient
        ``alignment``           the recent mean of the cosine between a gradient and the step before it
        ``step_norm``           how far the last step moved the parameter, not counting weight decay
        ``left_condition``      of the covariance of the gradient's rows: its largest over its smallest
        ``right_condition``     eigenvalue, estimated in its basis; the same for the columns
        ======================  ========================================================================

        Example:
            >>> from lodo import KronLODO
            >>> x = torch.nn.Parameter(torch.ones(2, 2))
            >>> opt = KronLODO([x])
            >>> x.grad = torch.ones(2, 2)
            >>> opt.step()
            >>> opt.diagnostics()["group0/parameter0/gain"]
            1.0
        """
        numbers: dict[str, float] = {}
        here = owned_here(self.param_groups, self._owners, self.distribute)
        for index, options in enumerate(self.param_groups):
            for j, p in enumerate(options["params"]):
                name = options["param_names"][j] if "param_names" in options else f"parameter{j}"
                measured = diagnose(options, self.state.get(p, {})) if here(p) else {}
                numbers.update({f"group{index}/{name}/{what}": value for what, value in measured.items()})
        return {**numbers, "skipped_steps": float(self.skipped_steps)}

    def memory_estimate(self) -> KronMemory:
        """The bytes of state between steps, also before the first one. Parameters may be on the device "meta".

        If work is divided between ranks, it is what this rank holds.

        Example:
            >>> from lodo import KronLODO
            >>> with torch.device("meta"):
            ...     model = torch.nn.Linear(768, 768)
            >>> print(KronLODO(model.parameters()).memory_estimate())
            14.8 MB (averages 4.7 MB, directions 590.6 kB, bases 4.7 MB, covariances 4.7 MB, numbers 96 B)
        """
        here = owned_here(self.param_groups, self._owners, self.distribute)
        pairs = [(p, options) for options in self.param_groups for p in options["params"] if p.numel() and here(p)]
        each = [memory_of(p, options) for p, options in pairs]
        return KronMemory(*map(sum, zip(KronMemory(0, 0, 0, 0, 0), *each, strict=True)))

    def __repr__(self) -> str:
        kept_bytes = self.memory_estimate().total
        weights = sum(p.numel() for options in self.param_groups for p in options["params"])
        each = f" ({kept_bytes / weights:.1f} bytes a weight)" if weights else ""
        memory = f"memory: {readable(kept_bytes)}{each}, nonfinite: {self.nonfinite!r}"
        return f"{super().__repr__()[:-1].rstrip()}\n{memory}\n)"


def step_at_once(options: Options, rise: Scalar, bundle: Bundle, ok: Flag) -> None:
    """Read and advance a bundle, once it is known that its gradients can be used."""
    reading = read(options, bundle)
    advance(options, bundle, reading, rise, ok.to(reading.sums.device) if isinstance(ok, Tensor) else ok)


def usable(squares: Sequence[Tensor]) -> Flag:
    """Whether all gradients can be used: their squares are finite. A tensor if any of them is on a device."""
    if all(is_host(x.device) for x in squares):
        return all(float(x.amax()) < torch.finfo(x.dtype).max / 4 for x in squares)  # which is False for NaN
    device = next(x.device for x in squares if not is_host(x.device))
    return torch.stack([(x.amax() < torch.finfo(x.dtype).max / 4).to(device) for x in squares]).all()


def is_host(device: torch.device) -> bool:
    """Whether numbers on a device are there at once."""
    return device.type == "cpu"
