"""A step of KronLODO: its equations, on stacks of matrices. `lodo.kron` has them in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lodo.elementwise import is_host
from lodo.group import Options
from lodo.kron_formulas import NOISE, factors, newest_share, trust
from lodo.kron_learning import (
    constants_of,
    decay_rate,
    kept,
    learn_from_last_step,
    limit_of,
    pace_of,
)
from lodo.kron_state import coded, decoded, unit_of
from lodo.rounding import random_bits, round_to, update_key
from lodo.scalars import Flag, Scalar
from lodo.stacks import Bundle, Part, Stack

ADDED_FROM = 2**17  # numbers of a matrix from which its change is not worth keeping apart from it
HALVED_FROM = 512  # rows of a covariance from which it pays on a CPU to compute one triangle and copy the other

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


class Factors(NamedTuple):
    """What turns the averages M and V into M^ and R: one number for each parameter."""

    mean: Any  # M^ = mean M
    root: Any  # R = root sqrt(V) + least
    least: Any

    @classmethod
    def of(cls, options: Options, numbers: Mapping[str, Tensor]) -> Factors:
        """The factors after the last step."""
        t, decays = numbers["step"], (numbers["mean_decay"], numbers["square_decay"])
        norm_sq = numbers["norm_sq"] if options["basis"] == "kronecker" else 0 * t
        return cls(*factors(t, decays, norm_sq, numbers["size"], options["betas"][1], options["eps"]))

    def at(self, stack: Stack) -> Factors:
        """Those of a stack."""
        return Factors(*(factor[stack.rows].reshape(-1, 1, 1) for factor in self))


def newest_shares(options: Options, t: Any) -> list[Any]:
    """How much of M and of V the newest X and X^2 make up, at step t."""
    shares = {beta: newest_share(options["averaging"], beta, t) for beta in {*options["betas"]}}  # often one
    return [shares[beta] for beta in options["betas"]]


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
    step, learning = bundle.numbers["step"], "length" in bundle.numbers
    reading = Reading([], step.new_zeros(3, len(step)))
    found: Factors | None = None
    for part in bundle.parts:
        turned = turn_gradients(options, part)
        reading.parts.append(turned)
        if part.fused is not None:
            part.fused.slopes(turned.flat, bundle.fused, constants_of(options), reading.sums)
            continue
        found = found or (Factors.of(options, bundle.numbers) if learning else None)
        for stack, X in zip(part.stacks, turned.X, strict=True):
            reading.sums[:, stack.rows] = sums_of(options, stack, X, found and found.at(stack))
    return reading


def turn_gradients(options: Options, part: Part) -> Turned:
    """``X = P' G Q`` of every stack."""
    G = part.gradients()
    G = -G if options["maximize"] else G
    X = torch.empty_like(G)
    X[part.turned :].copy_(G[part.turned :])
    both = Turned(part.views(G), part.views(X), X)
    for stack, G_, X_ in zip(part.stacks, both.G, both.X, strict=True):
        if stack.has_bases:
            turned(G_, *stack.bases(), out=X_)
    return both


def sums_of(options: Options, stack: Stack, X: Tensor, factors: Factors | None) -> Tensor:
    """``|X|^2``, ``<X, M^ / R>`` and ``<X, U>`` of every matrix; ``<X, S>`` second where directions are orthogonal."""
    sums = X.new_zeros(3, len(X))
    sums[0] = inner(X, X)
    if stack.V is not None and factors is not None:
        sums[1] = inner(X, scaled_average(options, stack.M.to(X.dtype), stack.V.to(X.dtype), factors)[0])
    elif stack.S is not None:
        sums[1] = inner(X, stack.S.to(X.dtype))
    if stack.U is not None:
        sums[2] = inner(X, decoded(stack.U, X.dtype, unit_of(options["betas"][1])))
    return sums


def scaled_average(options: Options, M: Tensor, V: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
    """``M^ / R``, within limits, and ``R``."""
    R = V.sqrt().mul_(factors.root).add_(factors.least)
    return clipped(M.mul(factors.mean).div_(R), limit_of(options)), R


def clipped(x: Tensor, limit: float) -> Tensor:
    """x in place, with entries between -limit and limit.

    >>> clipped(torch.tensor([-3.0, 0.5]), 1.0)
    tensor([-1.0000,  0.5000])
    """
    return x if math.isinf(limit) else x.clamp_(-limit, limit)


def advance(options: Options, bundle: Bundle, reading: Reading, rise: Scalar, ok: Flag) -> None:
    """Learn from the last step, then take the next one.

    Args:
        options: of the parameter group.
        bundle: its parameters and their states.
        reading: of their gradients.
        rise: how far lr is above its highest so far, from `follow_rate`.
        ok: whether the gradients can be used. If a device finds that they cannot, nothing changes.
    """
    if isinstance(ok, Tensor):
        reading = reading.masked(bundle.parts, ok)
    plain = not any(isinstance(x, Tensor) for x in (ok, rise, options["lr"]))
    if bundle.fused is not None and plain:
        reading = learn_fused(options, bundle, reading, rise)
    else:
        reading = learn(options, bundle, reading, rise, ok, as_arrays=plain and is_host(reading.sums.device))
    decay = decay_rate(options)
    if isinstance(decay, Tensor):  # perhaps on another device of the group
        decay = decay.to(reading.sums.device)
    interval, refresh_interval = intervals(options)
    enters, refresh = options["steps"] % interval == 0, options["steps"] % refresh_interval == 0
    beta = 1 - interval / covariance_steps(options)
    for part, each in zip(bundle.parts, reading.parts, strict=True):
        for stack, G, X in zip(part.stacks, each.G, each.X, strict=True):
            if stack.has_bases and enters:
                follow_covariances(stack, G, X, beta, refresh, ok)
        next_steps(options, bundle, part, each, ok)
        move(part, each.X, 1 - decay * share(0.0, ok, reading.sums))


def learn(options: Options, bundle: Bundle, reading: Reading, rise: Scalar, ok: Flag, as_arrays: bool) -> Reading:
    """Learn c and w from the last step and count this one; gradients that are too long are shortened first."""
    numbers = bundle.numbers

    def short(x: Tensor) -> Any:
        """A short vector; on the CPU as an array, because NumPy takes a fraction of torch's time."""
        return x.numpy() if as_arrays else x

    ours = {name: short(x) for name, x in numbers.items()}
    with np.errstate(over="ignore", divide="ignore"):  # as in torch, infinite
        if options["guard"]:
            found = trust(ours["norm_sq"], ours["step"], short(reading.sums[0]), options["betas"][1])
            trusted = found if isinstance(found, Tensor) else torch.from_numpy(found)
            if not is_host(trusted.device) or bool((found < 1).any()):
                reading = reading.scaled(bundle.parts, trusted)
        if "length" in ours:
            learn_from_last_step(options, ours, short(reading.sums), rise, ok)
    ours["step"] += ok
    counts = share(0.0, ok, reading.sums)
    for name, newest in zip(("mean_decay", "square_decay"), newest_shares(options, ours["step"]), strict=True):
        ours[name] *= 1 - newest * counts
    if "norm_sq" in numbers:
        squares = reading.sums[0]
        seen = (squares > 0).to(squares.dtype)  # a gradient of zero says nothing about the size of others
        numbers["norm_sq"].lerp_(squares, seen * share(options["betas"][1], ok, squares))
    if isinstance(ok, Tensor):
        numbers["skipped"].add_(torch.logical_not(ok))
    return reading


def learn_fused(options: Options, bundle: Bundle, reading: Reading, rise: Scalar) -> Reading:
    """As `learn`, in a kernel for CPUs."""
    constants = constants_of(options)
    trusted = bundle.fused.trusted(reading.sums, constants) if options["guard"] else None
    if trusted is not None:
        reading = reading.scaled(bundle.parts, trusted)
    bundle.fused.learn(reading.sums, pace_of(options, rise), constants)
    return reading


def follow_covariances(stack: Stack, G: Tensor, X: Tensor, beta: float, refresh: bool, ok: Flag) -> None:
    """Average the covariances; if it is time, refresh the bases and turn M and X along."""
    A, B = stack.A, stack.B
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
    frequent. Such an average needs fewer gradients: half as many, the first time and every other time after it.

    >>> options = {"betas": (0.95, 0.95), "averaging": 0.1, "refresh_every": 10}
    >>> [intervals({**options, "steps": steps}) for steps in (0, 399, 999, 19_999)]
    [(1, 10), (2, 20), (2, 40), (8, 640)]
    """
    longer = covariance_steps(options) * (1 - options["betas"][1])
    doublings = max(0, math.frexp(longer + 1e-6)[1] - 1)  # rounded down
    return 1 << (doublings + 1) // 2, int(options["refresh_every"]) << doublings


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


def next_steps(options: Options, bundle: Bundle, part: Part, turned: Turned, ok: Flag) -> None:
    """X becomes ``rate S``, after it has entered the averages M and V; notes |S|, or 0 if lr is 0 and nothing moves."""
    numbers, lr = bundle.numbers, options["lr"]
    if part.fused is not None and not isinstance(ok, Tensor):  # beside parameters on a device, it must be masked
        part.fused.direction(turned.flat, bundle.fused, float(lr), constants_of(options))
        return
    squares = torch.zeros_like(numbers["step"])
    gains = numbers["gain"].exp() if "gain" in numbers else torch.ones_like(squares)
    rates = -lr * share(0.0, ok, squares) * gains
    found = Factors.of(options, numbers)
    for stack, X in zip(part.stacks, turned.X, strict=True):
        S = direction(options, stack, X, found.at(stack), ok)
        squares[stack.rows] = inner(S, S)
        torch.mul(S, rates[stack.rows].reshape(-1, 1, 1), out=X)
    if "length" in numbers:
        length = numbers["length"][part.rows]
        length.copy_(kept(ok, squares[part.rows].sqrt() * (lr > 0), length))


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
    newest, newest_square = (x.reshape(-1, 1, 1) for x in newest_shares(options, stack.numbers["step"]))
    bits = bits_of(stack) if stack.M.dtype == torch.bfloat16 else None
    M = averaged(stack.M, X, newest * share(0.0, ok, X), None if bits is None else bits & 0xFFFF)
    if stack.V is None:
        S = orthogonal(torch.lerp(X, M, 1 - newest)) * (
            0.2 * math.sqrt(max(stack.shape))
        )  # about as long as Adam's steps are
        if stack.S is not None:
            stack.S.copy_(kept(ok, S, stack.S))
        return S
    V = averaged(stack.V, X.square(), newest_square * share(0.0, ok, X), None if bits is None else bits >> 16)
    N, R = scaled_average(options, M, V, factors)
    if stack.U is None:
        return N
    U = clipped(X / R, limit_of(options))
    stack.U.copy_(kept(ok, coded(U, stack.U.dtype, unit_of(options["betas"][1])), stack.U))
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


def usable(squares: Sequence[Tensor]) -> Flag:
    """Whether all gradients can be used: their squares are finite. A tensor if any of them is on a device."""
    if all(is_host(x.device) for x in squares):
        return all(float(x.amax()) < torch.finfo(x.dtype).max / 4 for x in squares)  # which is False for NaN
    device = next(x.device for x in squares if not is_host(x.device))
    return torch.stack([(x.amax() < torch.finfo(x.dtype).max / 4).to(device) for x in squares]).all()


def step_at_once(options: Options, rise: Scalar, bundle: Bundle, ok: Flag) -> None:
    """Read and advance a bundle, once it is known that its gradients can be used."""
    reading = read(options, bundle)
    advance(options, bundle, reading, rise, ok.to(reading.sums.device) if isinstance(ok, Tensor) else ok)
