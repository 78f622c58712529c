"""The paper's Algorithm 1 for one parameter group, with the options beyond it.

A step has two halves: every group reads its gradient and decides whether it can be used; if all agree, every group
steps. On the CPU the decision is a Python bool. On another device it is a 0-dim tensor that nobody waits for: a step
that is refused there is computed with coefficients that change nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lodo.engines import Lesson
from lodo.group import Network, Options, State
from lodo.guard import Guard
from lodo.meta import Learned
from lodo.recipes import as_meta_optimizer
from lodo.scalars import Flag, Scalar, largest, scalar_on, where


class Reading(NamedTuple):
    """A group's gradient at the new x, before anything changes."""

    options: Options
    state: State
    network: Network
    moving: list[bool]  # which parameters have a gradient
    norm: Scalar  # of the gradient
    clip: Scalar  # the guard's factor for it
    usable: Flag  # False if it is not finite, or too large to learn from


def read(options: Options, state: State, network: Network, moving: list[bool]) -> Reading:
    """Read a group's gradients into its vector g."""
    network.g.read_gradients(options["params"], moving)
    norm = network.engine.norm(network.g.vector)
    clip = state["guard"].clip(norm) if options["guard"] else 1.0
    # The hypergradient is at most about lr |g| |u|, and Adam squares it. The comparison is False for NaN.
    usable = clip * norm * largest(1.0, state["last_lr"] * state["fed_bound"]) < network.largest
    if options["maximize"]:
        network.g.vector.neg_()
    return Reading(options, state, network, moving, norm, clip, usable)


def step(reading: Reading, accepted: Flag = True) -> None:
    """Algorithm 1, from the moment the gradient g at the new x is known; if it was not accepted, nothing changes."""
    options, state, net, moving, norm, clip, _ = reading
    accepted = _decision(accepted, net)
    lr, beta = _number(options["lr"], net), options["beta"]
    g, s, last_g = net.g.vector, net.s.vector, state.get("last_gradient")
    norm = _shorten(g, norm, clip)
    keep = beta  # how much of m to keep
    if isinstance(accepted, Tensor):
        unchanged = torch.zeros_like(g) if last_g is None else last_g
        g.copy_(torch.where(accepted, g, unchanged))
        keep = where(accepted, beta, 1.0)
    learning = accepted & (state["last_lr"] != 0)  # if the last call moved x: learn from where that led
    led_to = _where_moved(state, net)
    guard = state["guard"]
    if options["guard"] or "last_step" in state:
        _keep_last_step(state, s)
    if options["guard"]:
        guard = guard.after(norm, clip < 1.0, _uphill(guard, net, led_to, clip, learning))
        lr = lr * guard.trust

    t = state["meta_step"] + learning
    meta = as_meta_optimizer(options["meta_optimizer"])
    moments = [state[name] for name in meta.moments]
    lesson = Lesson(learning, led_to, -state["last_lr"], moments, t, options["meta_lr"], net.rounding_seed)
    # theta <- theta + Adam(...);  m <- beta m + (1 - beta) g;  s <- G(theta) u, u = m or, gated, (1 - w) g + w m
    gate = net.engine.advance(state["theta"], state["momentum"], g, keep, s, meta, lesson, state.get("gate"), last_g)
    taken = where(accepted, lr, 0.0) if isinstance(accepted, Tensor) else lr
    net.s.move(options["params"], moving, taken, options["weight_decay"])  # x <- x - lr s
    if net.watch is not None:
        net.watch.note(g, s)
    _remember(state, accepted, lr=lr, moving=moving, guard=guard, gate=gate, t=t, norm=norm, beta=beta)


def _decision(accepted: Flag, net: Network) -> Flag:
    """The common decision in the engine's kind of truth values."""
    if net.engine.on_host:
        return bool(accepted)
    return scalar_on(net.engine.layout.device, accepted).to(net.engine.layout.device)


def _number(value: Scalar, net: Network) -> Scalar:
    """An option in the engine's kind of numbers: a float on the CPU; a tensor on a device stays there."""
    if net.engine.on_host or not isinstance(value, Tensor):
        return float(value)
    return value.to(net.engine.layout.device)


def _shorten(g: Tensor, norm: Scalar, clip: Scalar) -> Scalar:
    """Shorten the gradient to what the guard allows; returns its norm after that."""
    if isinstance(clip, Tensor) or clip < 1.0:
        g.mul_(clip)
    return norm * clip


def _where_moved(state: State, net: Network) -> Tensor:
    """The gradient where the last step led: what did not move had no part in it, and counts as zero."""
    moved = state["moved"]
    if isinstance(moved, Tensor):
        return net.g.weighted(moved)
    return net.g.only(moved)


def _keep_last_step(state: State, s: Tensor) -> None:
    """Let the state hold the step that led here, which stays in ``s``; a loaded state brings its own."""
    if "last_step" in state and state["last_step"] is not s:
        s.copy_(state["last_step"])
    state["last_step"] = s


def _uphill(guard: Guard, net: Network, led_to: Tensor, clip: Scalar, learning: Flag) -> Flag:
    """Whether the loss rises along the last step, ``-lr s``; on the CPU only if the guard would act on it."""
    s = net.s.vector
    if not net.engine.on_host:
        return learning & (led_to.dot(s) < 0)
    alarmed = learning and (clip < 1.0 or guard.trust < 1.0)
    return bool(alarmed and float(led_to.dot(s)) < 0)


def _remember(
    state: State,
    accepted: Flag,
    *,
    lr: Scalar,
    moving: list[bool],
    guard: Guard,
    gate: Learned | None,
    t: Scalar,
    norm: Scalar,
    beta: float,
) -> None:
    """Note what the next step has to know, if this one was accepted."""
    bound: Scalar = beta * state["momentum_bound"] + (1 - beta) * norm
    fed_bound = bound
    if gate is not None:
        state["gate"] = gate
        w: Any = gate.value
        fed_bound = abs(w) * bound + abs(1 - w) * norm
    if not isinstance(accepted, Tensor):
        state["guard"], state["last_lr"], state["moved"] = guard, lr, moving
        state["momentum_bound"], state["fed_bound"] = bound, fed_bound
        state["meta_step"], state["step"] = t, state["step"] + 1
        return
    state["guard"] = Guard(*(where(accepted, new, old) for new, old in zip(guard, state["guard"], strict=True)))
    state["last_lr"] = where(accepted, lr, state["last_lr"])
    if moving != state["moved"]:
        state["moved"] = torch.where(accepted, *(_flags(x, accepted.device) for x in (moving, state["moved"])))
    state["momentum_bound"] = where(accepted, bound, state["momentum_bound"])
    state["fed_bound"] = where(accepted, fed_bound, state["fed_bound"])
    state["meta_step"] = t
    state["step"] = state["step"] + accepted
    state["skipped"] = state["skipped"] + torch.logical_not(accepted)


def _flags(moved: list[bool] | Tensor, device: torch.device) -> Tensor:
    """Truth values as a tensor, made without a copy from the CPU."""
    if isinstance(moved, Tensor):
        return moved
    return torch.stack([torch.full((), flag, dtype=torch.bool, device=device) for flag in moved])
