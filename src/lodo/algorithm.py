"""The paper's Algorithm 1 for one parameter group, with the options beyond it.

A step has two halves: every group reads its gradient and decides whether it can be used; if all agree, every group
steps. On the CPU the decision is a Python bool. On another device it is a 0-dim tensor that nobody waits for: a step
that is refused there is computed with coefficients that change nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lodo import feed
from lodo._checks import check_real
from lodo.engines import Lesson
from lodo.group import Network, Options, State
from lodo.guard import Guard
from lodo.layout import real
from lodo.meta import Learned, MetaOptimizer
from lodo.recipes import as_meta_optimizer
from lodo.safety import measured
from lodo.scalars import Flag, Scalar, logarithm, scalar_on, where

_GATE = 20 * feed.RATE  # more than the learned gate changes in one update: Adam's steps stay below 8 times its rate


class Outcome(NamedTuple):
    """What a step has led to, before x is moved."""

    state: State  # with theta, its moments, m and the last gradient as they are after the step
    s: Tensor  # the step over lr
    lr: Scalar
    guard: Guard
    gate: Learned | None
    t: Scalar  # updates of theta so far
    norm: Scalar  # of the gradient as it was used


class Reading(NamedTuple):
    """A group's gradient at the new x, before anything changes."""

    options: Options
    state: State
    network: Network
    moving: list[bool]  # which parameters have a gradient
    norm: Scalar  # of the gradient
    clip: Scalar  # the guard's factor for it
    usable: Flag  # False if it is not finite, or would make something infinite
    log_s: Scalar  # a bound on how far G stretches a vector after the step (`lodo.safety`)
    rehearsed: Outcome | None = None  # the step on copies, if it had to be rehearsed
    overshot: Flag = False  # True if the gradient itself is finite, but a step with it would overflow something


def read(options: Options, state: State, network: Network, moving: list[bool]) -> Reading:
    """Read a group's gradients into its vector g, and make sure that a step leaves everything finite."""
    network.g.read_gradients(options["params"], moving)
    norm: Any = network.engine.norm(network.g.vector)
    clip = state["guard"].clip(norm) if options["guard"] else 1.0
    if options["maximize"]:
        network.g.vector.neg_()
    meta = as_meta_optimizer(options["meta_optimizer"])
    usable = clip * norm < network.largest_norm  # False for NaN too
    if not network.engine.on_host and network.reads % meta.measure_every == 0:
        _measure(network, state, meta)
    network.reads += 1
    fits, log_s = _outlook(options, state, network, meta, norm * clip)
    reading = Reading(options, state, network, moving, norm, clip, usable, log_s)
    if not network.engine.on_host:
        overshot = usable & torch.logical_not(fits)  # type: ignore[arg-type]  # a tensor here
        return reading._replace(usable=usable & fits, overshot=overshot)
    return reading if fits or not usable else _looked_at_closely(reading, meta)


def step(reading: Reading, accepted: Flag = True) -> None:
    """Algorithm 1, from the moment the gradient g at the new x is known; if it was not accepted, nothing changes."""
    options, state, net = reading.options, reading.state, reading.network
    accepted = _decision(accepted, net)
    if accepted is False:  # on the CPU, beside a group on a device that has decided
        forget(reading)
        return
    outcome = reading.rehearsed or _advance(reading, state, net.s.vector, accepted)
    _adopt(outcome, state, net)
    taken = where(accepted, outcome.lr, 0.0) if isinstance(accepted, Tensor) else outcome.lr
    net.s.move(options["params"], reading.moving, taken, options["weight_decay"])  # x <- x - lr s
    if net.watch is not None:
        net.watch.note(net.g.vector, net.s.vector)
    _remember(reading, outcome, accepted)


def _advance(reading: Reading, state: State, s: Tensor, accepted: Flag) -> Outcome:
    """Learn from where the last step led, and compute the next: changes the tensors of ``state``, and ``s``."""
    options, net = reading.options, reading.network
    lr, beta = _lr(options["lr"], net), options["beta"]
    g, last_g = net.g.vector, state.get("last_gradient")
    norm = _shorten(g, reading.norm, reading.clip)
    keep = beta  # how much of m to keep
    if isinstance(accepted, Tensor):
        unchanged = torch.zeros_like(g) if last_g is None else last_g
        g.copy_(torch.where(accepted, g, unchanged))
        keep = where(accepted, beta, 1.0)
    learning = accepted & (state["last_lr"] != 0)  # if the last call moved x: learn from where that led
    led_to = _where_moved(state, net)
    guard = state["guard"]
    if options["guard"] or "last_step" in state:
        _keep_last_step(state, net.s.vector)
    if options["guard"]:
        guard = guard.after(norm, reading.clip < 1.0, _uphill(guard, net, led_to, reading.clip, learning))
        lr = lr * guard.trust

    t = state["meta_step"] + learning
    meta = as_meta_optimizer(options["meta_optimizer"])
    moments = [state[name] for name in meta.moments]
    lesson = Lesson(learning, led_to, -state["last_lr"], moments, t, options["meta_lr"], net.rounding_seed)
    # theta <- theta + Adam(...);  m <- beta m + (1 - beta) g;  s <- G(theta) u, u = m or, gated, (1 - w) g + w m
    gate = net.engine.advance(state["theta"], state["momentum"], g, keep, s, meta, lesson, state.get("gate"), last_g)
    return Outcome(state, s, lr, guard, gate, t, norm)


def _adopt(outcome: Outcome, state: State, net: Network) -> None:
    """Take over what was computed on copies."""
    if outcome.state is not state:
        for name, value in outcome.state.items():
            if isinstance(value, Tensor) and name != "last_step":
                state[name].copy_(value)
        net.s.vector.copy_(outcome.s)
        if "last_step" in outcome.state:
            state["last_step"] = net.s.vector


# ---------------------------------------------------------------- what a step could do at worst


def _outlook(options: Options, state: State, net: Network, meta: MetaOptimizer, norm: Any) -> tuple[Flag, Scalar]:
    """Whether the step leaves everything finite for sure, and the bound log S after it."""
    limits = net.limits(options["params"], meta)
    log_s: Any = net.log_s
    hypergradient: Any = logarithm(2.0 * state["last_lr"] * state["fed_bound"] * norm) + log_s
    if not net.engine.on_host or state["last_lr"] != 0:  # else there is nothing to learn from
        change: Any = meta.reach(hypergradient, options["meta_lr"], net.layers, net.growth)
        log_s = log_s + 2.0 * net.layers.number * change  # log(sigma + x) <= log(sigma) + x
    fed: Any = options["beta"] * state["momentum_bound"] + (1 - options["beta"]) * norm
    if "gate" in state:
        w: Any = state["gate"].value
        fed = (abs(w) + _GATE) * fed + (abs(1 - w) + _GATE) * norm
    step = logarithm(_lr(options["lr"], net) * fed) + log_s
    fits = (hypergradient < limits.hypergradient) & (step < limits.step)
    if limits.position < math.inf:
        fits = fits & (_position(options["params"], net) < limits.position)
    return fits, log_s


def _looked_at_closely(reading: Reading, meta: MetaOptimizer) -> Reading:
    """The reading once more, with S measured; rehearsed if that is not enough to be sure."""
    net = reading.network
    _measure(net, reading.state, meta)
    fits, log_s = _outlook(reading.options, reading.state, net, meta, reading.norm * reading.clip)
    if fits:
        return reading._replace(log_s=log_s)
    rehearsed = _rehearsed(reading)
    refused = rehearsed is None
    return reading._replace(usable=not refused, log_s=math.inf, rehearsed=rehearsed, overshot=refused)


def _measure(net: Network, state: State, meta: MetaOptimizer) -> None:
    net.log_s = measured(net.engine, state["theta"], [state[name] for name in meta.moments], meta)


def _position(params: list[Tensor], net: Network) -> Scalar:
    """The logarithm of the largest parameter."""
    sizes = [real(p).abs().amax().to(net.g.vector.dtype) for p in params if p.numel()]
    most = torch.stack(sizes).amax()
    return logarithm(float(most) if net.engine.on_host else most)


def _rehearsed(reading: Reading) -> Outcome | None:
    """The step on copies; None if it would make anything infinite."""
    options, state, net = reading.options, reading.state, reading.network
    names = [name for name, value in state.items() if isinstance(value, Tensor) and name != "last_step"]
    copies = {**state, **{name: net.engine.copied(state[name]) for name in names}}
    outcome = _advance(reading, copies, torch.empty_like(net.s.vector), accepted=True)
    net.engine.forget()  # what it kept belongs to the copies
    numbers = [outcome.s, *(copies[name] for name in names)]
    finite = all(bool(torch.isfinite(x).all()) for x in numbers) and _all_finite(outcome.gate)
    lands = net.s.lands(options["params"], reading.moving, outcome.s, outcome.lr, options["weight_decay"])
    return outcome if finite and lands else None


def _all_finite(gate: Learned | None) -> bool:
    return gate is None or all(math.isfinite(number) for number in gate)


# ---------------------------------------------------------------- pieces of the step


def _decision(accepted: Flag, net: Network) -> Flag:
    """The common decision in the engine's kind of truth values."""
    if net.engine.on_host:
        return bool(accepted)
    return scalar_on(net.engine.layout.device, accepted).to(net.engine.layout.device)


def _lr(value: Scalar, net: Network) -> Scalar:
    """The rate in the engine's kind of numbers: a float on the CPU; a tensor on a device stays there."""
    if net.engine.on_host or not isinstance(value, Tensor):
        number = float(value)
        if not 0 <= number < math.inf:
            check_real("lr", number, low=0.0)  # somebody has changed it
        return number
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


def _remember(reading: Reading, outcome: Outcome, accepted: Flag) -> None:
    """Note what the next step has to know, if this one was accepted."""
    state, net, beta = reading.state, reading.network, reading.options["beta"]
    norm: Any = outcome.norm
    bound: Any = beta * state["momentum_bound"] + (1 - beta) * norm
    fed_bound = bound
    if outcome.gate is not None:
        state["gate"] = outcome.gate
        w: Any = outcome.gate.value
        fed_bound = abs(w) * bound + abs(1 - w) * norm
    if not isinstance(accepted, Tensor):
        state["guard"], state["last_lr"], state["moved"] = outcome.guard, outcome.lr, reading.moving
        state["momentum_bound"], state["fed_bound"] = bound, fed_bound
        state["meta_step"], state["step"] = outcome.t, state["step"] + 1
        net.log_s = reading.log_s
        return
    guards = zip(outcome.guard, state["guard"], strict=True)
    state["guard"] = Guard(*(where(accepted, new, old) for new, old in guards))
    decay = where(reading.overshot & (state["last_lr"] == 0), beta, 1.0)  # as in `forget`
    net.engine.decay(state["momentum"], decay)
    forgotten = where(reading.overshot, 0.0, state["last_lr"])
    state["last_lr"] = where(accepted, outcome.lr, forgotten)
    if reading.moving != state["moved"]:
        moved = (_flags(x, accepted.device) for x in (reading.moving, state["moved"]))
        state["moved"] = torch.where(accepted, *moved)
    state["momentum_bound"] = where(accepted, bound, state["momentum_bound"] * decay)
    state["fed_bound"] = where(accepted, fed_bound, state["fed_bound"])
    state["meta_step"] = outcome.t
    state["step"] = state["step"] + accepted
    net.log_s = where(accepted, reading.log_s, net.log_s)


def forget(reading: Reading) -> None:
    """Make room for later steps, after one was refused although its gradient is finite.

    First, do not learn from the last step: its length times the gradient there overflows, and would do so again with
    the next gradient. If that was not the reason, the momentum is too long for G, and decays as if there were no
    gradient. Without this, every later step would be refused too. With ``nonfinite="raise"`` on the CPU the caller
    decides what to do instead.
    """
    if reading.overshot is True:
        state, beta = reading.state, reading.options["beta"]
        if state["last_lr"] == 0:
            state["momentum"].mul_(beta)
            state["momentum_bound"] *= beta
        state["last_lr"] = 0.0


def _flags(moved: list[bool] | Tensor, device: torch.device) -> Tensor:
    """Truth values as a tensor, made without a copy from the CPU."""
    if isinstance(moved, Tensor):
        return moved
    return torch.stack([torch.full((), flag, dtype=torch.bool, device=device) for flag in moved])
