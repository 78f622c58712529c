"""Looking inside: numbers to log, products with G, and G as a matrix.

| number | what it is |
|---|---|
| ``gradient_norm``, ``momentum_norm`` | of the last gradient g as it was used (after the guard), and of the average m |
| ``step_norm`` | how far the last step moved x, not counting weight decay |
| ``descent_cosine`` | between the last step and -g: 1 is steepest descent, below 0 the step leads uphill |
| ``descent_fraction`` | the fraction of the steps since the first call that had a cosine above 0 |
| ``largest_stretch``, ``smallest_stretch`` | estimates of the most and least that G, without lr, stretches a vector |
| ``stretch_ratio`` | the largest stretch over the smallest |
| ``hypergradient_norm`` | of the first update of theta after the first call, the fifth and so on; absent before that |
| ``gate_weight``, ``trust`` | of the learned momentum gate and of the guard, where they are on |

The stretches are the extreme ones in a Krylov space, which begins with the vectors that were stretched most and least
the last time, so they follow G as it changes. The first call goes on until they have converged; the 3rd, 5th, 9th, 17th
and 33rd, and from there on every 32nd, takes four products with G. The estimate of the largest stretch is a lower
bound, that of the smallest an upper bound.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lodo._checks import check_int
from lodo.group import Network, Options, State
from lodo.grouped import Grouped
from lodo.scalars import plain
from lodo.watch import Watch

MATRIX_LIMIT = 4096  # the largest n whose preconditioner is written out


class Inspectable(Grouped):
    """The half of LODO that looks inside."""

    @torch.no_grad()
    def precondition(self, v: Tensor, group: int = 0) -> Tensor:
        """``lr G v`` for a flat vector.

        Example:
            >>> from lodo import LODO
            >>> x = torch.nn.Parameter(torch.zeros(3))
            >>> LODO([x], lr=0.5).precondition(torch.tensor([1.0, 2.0, 3.0]))
            tensor([0.5000, 1.0000, 1.5000])
        """
        options = self._existing(group)
        theta = self._state(group)["theta"]
        return product(self._groups[group].ready(options), theta, v, float(options["lr"]), group)

    @torch.no_grad()
    def preconditioner_matrix(self, group: int = 0) -> Tensor:
        """``lr`` G as an n x n matrix, for n up to 4096.

        Example:
            >>> from lodo import LODO
            >>> x = torch.nn.Parameter(torch.zeros(2))
            >>> LODO([x], lr=0.5, preconditioner="diagonal").preconditioner_matrix()
            tensor([[0.5000, 0.0000],
                    [0.0000, 0.5000]])
        """
        options = self._existing(group)
        theta = self._state(group)["theta"]
        return matrix(self._groups[group].ready(options), theta, float(options["lr"]), group)

    def _existing(self, group: int) -> Options:
        if not isinstance(group, int) or not 0 <= group < len(self._groups):
            raise ValueError(f"group must be an index from 0 to {len(self._groups) - 1}, got {group!r}")
        if not self._groups[group].n:
            raise ValueError(f"group must be one that has parameters, and group {group} has none")
        return self.param_groups[group]

    @torch.no_grad()
    def diagnostics(self, power_iterations: int | None = None) -> dict[str, float]:
        """Numbers to log, by name, of every group that has parameters on this rank.

        Watching begins with the first call: `lodo.inspect` explains what each number means and costs. A call every ten
        steps is meant to be cheap, so the stretches of G are refined in few of the calls.

        Args:
            power_iterations: refine the stretches by so many products with G, now; 50 are enough for most.

        Example:
            >>> from lodo import LODO
            >>> x = torch.nn.Parameter(torch.ones(3))
            >>> opt = LODO([x], lr=0.5)
            >>> x.grad = torch.tensor([3.0, 0.0, 4.0])
            >>> opt.step()
            >>> numbers = opt.diagnostics()
            >>> round(numbers["group0/gradient_norm"], 6), round(numbers["group0/largest_stretch"], 6)
            (5.0, 1.0)
        """
        if power_iterations is not None:
            check_int("power_iterations", power_iterations, low=0)
        numbers: dict[str, float] = {}
        for group, options in self._pairs():
            if group.n:
                measured = diagnose(group.ready(options), self._state(group.index), power_iterations)
                numbers.update({f"group{group.index}/{name}": value for name, value in measured.items()})
        return {**numbers, "skipped_steps": float(self.skipped_steps)}

    @property
    def skipped_steps(self) -> int:
        """How many steps ``nonfinite="skip"`` has skipped."""
        # Hooks may keep other things among the states.
        states = [state for state in self.state.values() if isinstance(state, dict)]
        return sum(int(plain(state.get("skipped", 0))) for state in states)

    def __repr__(self) -> str:
        lines = [super().__repr__()[:-1].rstrip()]
        for group, options in self._pairs():
            memory = group.estimate(options)
            lines.append(f"network {group.index}: n = {group.n:,}, {group.family}, memory {memory}")
        lines.append(f"backend: {self.backend!r}, save_activations: {self.save_activations}")
        return "\n".join([*lines, ")"])


def diagnose(network: Network, state: State, iterations: int | None = None) -> dict[str, float]:
    """A group's numbers; watching begins with the first call. May have the next update of theta measured."""
    g, s, engine = network.g.vector, network.s.vector, network.engine
    if network.watch is None:
        network.watch = Watch(g, s, plain(state["step"]))
    watch = network.watch
    watch.look(partial(engine.apply, state["theta"]), iterations)
    gradient, length = float(g.norm()), float(s.norm())
    numbers = {
        "gradient_norm": gradient,
        "momentum_norm": float(state["momentum"].norm()),
        "step_norm": plain(state["last_lr"]) * length,
        "descent_cosine": float(g.dot(s)) / (gradient * length) if gradient * length else float("nan"),
        "descent_fraction": watch.descent_fraction,
        "largest_stretch": watch.largest,
        "smallest_stretch": watch.smallest,
        "stretch_ratio": watch.largest / watch.smallest if watch.smallest else float("inf"),
    }
    hypergradient = plain(engine.hypergradient_norm)
    if not math.isnan(hypergradient):
        numbers["hypergradient_norm"] = hypergradient
    if "gate" in state:
        numbers["gate_weight"] = plain(state["gate"].value)
    if "last_step" in state:  # the guard is on
        numbers["trust"] = plain(state["guard"].trust)
    engine.watched = engine.watched or watch.due
    return numbers


def product(network: Network, theta: Tensor, v: Any, lr: float, group: int) -> Tensor:
    """``lr G v`` for a flat vector, in its own dtype and on its own device."""
    n = network.engine.layout.n
    if not isinstance(v, Tensor) or v.shape != (n,) or not v.is_floating_point():
        given = f"{tuple(v.shape)}, {v.dtype}" if isinstance(v, Tensor) else type(v).__name__
        raise ValueError(
            f"v must be a floating-point tensor of shape ({n},), one number a parameter of group {group}, got {given}"
        )
    return (network.engine.apply(theta, v.detach().to(theta).contiguous()) * lr).to(v)


def matrix(network: Network, theta: Tensor, lr: float, group: int) -> Tensor:
    """``lr G`` as an n x n matrix, for n up to `MATRIX_LIMIT`."""
    n = network.engine.layout.n
    if n > MATRIX_LIMIT:
        raise ValueError(
            f"group {group} has n = {n:,}: its matrix would have {n * n:,} entries, and n up to {MATRIX_LIMIT} "
            "is allowed; use precondition(v) for products with G"
        )
    unit = torch.eye(n, dtype=theta.dtype, device=theta.device)
    return torch.stack([product(network, theta, e, lr, group) for e in unit], dim=1)
