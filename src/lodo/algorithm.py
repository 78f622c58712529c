"""The paper's Algorithm 1 for one parameter group, with the options beyond it."""

from __future__ import annotations

from typing import Any

from lodo import options
from lodo.gate import Gate
from lodo.guard import Guard
from lodo.network import Network
from lodo.preconditioners import Lesson


def step_group(
    group: dict[str, Any], net: Network, state: dict[str, Any], moving: list[bool], norm: float, clip: float
) -> None:
    """Algorithm 1 for one group, from the moment the gradient g at the new x is known."""
    lr, last_lr, beta = float(group["lr"]), state["last_lr"], float(group["beta"])
    meta_optimizer, g, s = options.meta_optimizer(group), net.g.vector, net.s.vector
    if clip < 1.0:
        g.mul_(clip)
        norm *= clip
    learning = last_lr != 0  # if the last call moved x: learn from where that led
    led_to = net.g.only(state["moved"])  # what did not move had no part in it
    if (group["guard"] or "last_step" in state) and state.setdefault("last_step", s) is not s:  # a loaded state
        state["last_step"] = s.copy_(state["last_step"])
    if group["guard"]:
        guard = Guard(*state["guard"])
        alarmed = learning and (clip < 1.0 or guard.trust < 1.0)
        uphill = alarmed and float(led_to.dot(s)) < 0  # x moved by -lr s
        guard = guard.after(norm, clip < 1.0, uphill)
        state["guard"] = tuple(guard)
        lr *= guard.trust

    t = state["meta_step"] = state["meta_step"] + learning
    moments = [state[name] for name in meta_optimizer.moments]
    lesson = Lesson(learning, led_to, -last_lr, moments, t or 1, group["meta_lr"], net.rounding_seed)
    gate = Gate(*state["gate"]) if "gate" in state else None
    # theta <- theta + Adam(...);  m <- beta m + (1 - beta) g;  s <- G(theta) u, u = m or, gated, (1 - w) g + w m
    gate = net.engine.advance(
        state["theta"], state["momentum"], g, beta, s, meta_optimizer, lesson, gate, state.get("last_gradient")
    )
    net.s.move(group["params"], moving, lr, group["weight_decay"])  # x <- x - lr s
    if net.watch is not None:
        net.watch.note(g, s)

    state["last_lr"], state["moved"] = lr, moving
    bound = state["momentum_bound"] = beta * state["momentum_bound"] + (1 - beta) * norm  # >= |m|
    state["fed_bound"] = bound  # >= |u|
    if gate is not None:
        state["gate"] = tuple(gate)
        state["fed_bound"] = abs(gate.w) * bound + abs(1 - gate.w) * norm
    state["step"] += 1
