"""Optimizers that find their own rate: DoG, Mechanic, and hypergradient descent with a heavy ball.

DoG and Mechanic have packages of their authors. Mechanic's cannot continue from a saved state; DoG's can, but the
method is four lines.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lodo._checks import check_real
from lodo.lab.optimizers.base import Closure, VectorOptimizer

BETAS = (0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)  # how long each of Mechanic's learners remembers
_MOST = 0.9995  # the largest momentum that HDM may choose


class DoG(VectorOptimizer):
    """Distance over gradients (Ivgi et al., 2023): ``x -= lr r / sqrt(sum of |g|^2) g``.

    Args:
        params: the parameters, as one vector.
        lr: a factor of the rate.
        start: r is the largest distance from the first x so far, at first this times ``1 + |x|``.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> x.grad = torch.tensor([1.0, 0.0])
        >>> DoG([x], start=0.5).step()
        >>> x.tolist()
        [0.0, 4.0]
    """

    def __init__(self, params: ParamsT, lr: float = 1.0, start: float = 1e-6) -> None:
        check_real("lr", lr, low=0.0)
        check_real("start", start, low=0.0, open_low=True)
        super().__init__(params, {"lr": lr, "start": start})

    def displacement(self, g: Tensor) -> Tensor:
        memory, group, x = self.memory, self.param_groups[0], self.position()
        if not memory:
            memory.update(x0=x, r=group["start"] * (1 + x.norm()), squares=torch.zeros_like(x[0]))
        memory["r"] = torch.maximum(memory["r"], (x - memory["x0"]).norm())
        memory["squares"] += g @ g
        s: Tensor = -group["lr"] * memory["r"] / (memory["squares"] + 1e-8).sqrt() * g
        return s


class Mechanic(VectorOptimizer):
    """Momentum at a rate s that six online learners choose (Cutkosky et al., 2023).

    ``x = x0 + s D`` where D is the sum of the steps that momentum takes at rate 1, and s the sum of the learners' bets.
    Each bets by ``h = D . g``, the slope of the loss along D, forgetting at its own pace.

    Args:
        params: the parameters, as one vector.
        momentum: of the steps: ``m = momentum m + (1 - momentum) g``.
        decay: pulls x towards the origin, lambda in their paper.
        start: the first s.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> mechanic = Mechanic([x])
        >>> for _ in range(100):
        ...     x.grad = x.detach().clone()
        ...     mechanic.step()
        >>> bool(x.norm() < 1)
        True
    """

    def __init__(self, params: ParamsT, momentum: float = 0.0, decay: float = 0.01, start: float = 1e-8) -> None:
        check_real("momentum", momentum, low=0.0, high=1.0)
        check_real("decay", decay, low=0.0)
        check_real("start", start, low=0.0, open_low=True)
        super().__init__(params, {"momentum": momentum, "decay": decay, "start": start})

    def displacement(self, g: Tensor) -> Tensor:
        memory, group, x = self.memory, self.param_groups[0], self.position()
        betas = torch.tensor(BETAS, dtype=x.dtype)
        if not memory:
            memory.update(x0=x, D=torch.zeros_like(x), m=torch.zeros_like(x))
            memory.update({name: torch.zeros_like(betas) for name in ("bets", "reward", "squares")})
            memory["largest"] = torch.full_like(betas, 1e-6)
        pull = group["decay"] * memory["bets"].sum() * g.norm() / (x.norm() + 1e-8)
        h = memory["D"] @ (g + pull * x)
        memory["largest"] = torch.maximum(betas * memory["largest"], h.abs())
        memory["squares"] = betas**2 * memory["squares"] + h**2
        memory["reward"] = (betas * memory["reward"] - memory["bets"] * h).clamp_min(0.0)
        wealth = group["start"] / len(BETAS) * memory["largest"] + memory["reward"]
        memory["bets"] = wealth / (memory["squares"].sqrt() + 1e-8)
        memory["m"].lerp_(g, 1 - group["momentum"])
        memory["D"] -= memory["m"]
        s: Tensor = memory["x0"] + memory["bets"].sum() * memory["D"] - x
        return s


class HDM(VectorOptimizer):
    """Hypergradient descent with a heavy ball (Chu, Gao, Ye and Udell, 2025).

    ``x -= P g - b d`` where d is the last step. AdaGrad learns the diagonal P and the number b from the gradient at the
    end of the step, on the same batch, so every batch is evaluated twice. A step that raises the loss of
    its batch is taken back.

    Args:
        params: the parameters, as one vector.
        lr: AdaGrad's rate for P.
        momentum_lr: AdaGrad's rate for b.
        momentum: the first b.
        start: the first entries of P.
        damping: how much ``|d|^2`` counts beside ``|g|^2`` in the hypergradients, tau / 2 in their paper.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> def closure():
        ...     x.grad = x.detach().clone()
        ...     return float(0.5 * x.grad @ x.grad)
        >>> hdm = HDM([x])
        >>> losses = [hdm.step(closure) for _ in range(50)]
        >>> losses[-1] < 1e-3
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum_lr: float = 0.1,
        momentum: float = 0.95,
        start: float = 0.0,
        damping: float = 0.25,
    ) -> None:
        check_real("lr", lr, low=0.0)
        check_real("momentum_lr", momentum_lr, low=0.0)
        check_real("momentum", momentum, low=0.0, high=1.0)
        check_real("start", start, low=0.0)
        check_real("damping", damping, low=0.0)
        options = {"lr": lr, "momentum_lr": momentum_lr, "momentum": momentum, "start": start, "damping": damping}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Take one step; the closure is called before and after it."""
        if closure is None:
            raise ValueError("closure must be given to HDM, which evaluates every batch twice, got None")
        with torch.enable_grad():
            before = closure()
        g = self.gradient()
        s = self.displacement(g)
        self.add(s)
        with torch.enable_grad():
            after = closure()
        self._learn(g, self.gradient())
        if not after <= before:
            self.add(-s)
            s = torch.zeros_like(s)
        self.memory["d"] = s
        return before

    def displacement(self, g: Tensor) -> Tensor:
        memory, group = self.memory, self.param_groups[0]
        if not memory:
            memory.update(P=torch.full_like(g, group["start"]), b=torch.full_like(g[0], group["momentum"]))
            memory.update(d=torch.zeros_like(g), P_squares=torch.zeros_like(g), b_squares=torch.zeros_like(g[0]))
        s: Tensor = memory["b"] * memory["d"] - memory["P"] * g
        return s

    def _learn(self, g: Tensor, ahead: Tensor) -> None:
        """Update P and b by the gradient ``ahead``, at the end of the step."""
        memory, group = self.memory, self.param_groups[0]
        d = memory["d"]
        scale = 1 / (g @ g + group["damping"] * (d @ d)).clamp_min(torch.finfo(g.dtype).tiny)
        for name, h, rate in (
            ("P", -scale * ahead * g, group["lr"]),
            ("b", scale * (ahead @ d), group["momentum_lr"]),
        ):
            memory[f"{name}_squares"] += h**2
            memory[name] -= rate * h / (memory[f"{name}_squares"].sqrt() + 1e-12)
        memory["P"].clamp_min_(0.0)
        memory["b"].clamp_(0.0, _MOST)
