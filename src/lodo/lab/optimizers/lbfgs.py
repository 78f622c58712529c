"""L-BFGS and O-LBFGS without a line search (Schraudolph, Yu and Guenter 2007)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lodo._checks import check_choice, check_int, check_real
from lodo.lab.optimizers.base import Closure, VectorOptimizer

SCALINGS = ("newest", "mean", "slip")


class StochasticLBFGS(VectorOptimizer):
    r"""A limited-memory quasi-Newton method on batches.

    Both gradients of a pair are taken on the same batch, so every step evaluates twice and needs a
    closure. The rate falls as :math:`\eta_t = \mathrm{lr}\, \tau / (\tau + t)`.

    Args:
        params: one group.
        lr: the rate at the start.
        tau: the time scale of its fall, in steps.
        memory: pairs remembered.
        first: scale of the very first step, which has no pair yet. As long as the gradient does not grow
            along it, which in single precision is what rounding leaves of so small a step, it is tried again ten
            times as long, up to 1.
        scaling: the initial matrix of the two-loop recursion as a multiple of the identity, ``s.y / y.y``
            over the ``"newest"`` pair (L-BFGS), the ``"mean"`` over all pairs (O-LBFGS), or, as an indexing
            slip in the authors' code has it, the oldest s with the newest y (``"slip"``).

    Example:
        >>> x = torch.nn.Parameter(torch.ones(3))
        >>> opt = StochasticLBFGS([x], tau=1e9)
        >>> def closure():
        ...     x.grad = x.detach() * torch.tensor([1.0, 0.1, 0.01])
        ...     return float(x.detach() @ x.grad)
        >>> for _ in range(20):
        ...     loss = opt.step(closure)
        >>> loss < 1e-3
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        tau: float = 1e4,
        *,
        memory: int = 48,
        first: float = 1e-10,
        scaling: str = "newest",
    ) -> None:
        check_real("lr", lr, low=0.0)
        check_real("tau", tau, low=0.0, open_low=True)
        check_int("memory", memory, low=1)
        check_real("first", first, low=0.0, open_low=True)
        check_choice("scaling", scaling, SCALINGS)
        super().__init__(params, {"lr": lr, "tau": tau, "memory": memory, "first": first, "scaling": scaling})

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Take one step; the closure is called before and after it."""
        if closure is None:
            raise ValueError("closure must be given to L-BFGS, which evaluates every batch twice, got None")
        return super().step(closure)

    def displacement(self, g: Tensor) -> Tensor:
        group, memory = self.param_groups[0], self.memory
        if not memory:
            memory.update(t=0, first=group["first"], S=g.new_empty(0, len(g)), Y=g.new_empty(0, len(g)))
        if not len(memory["S"]):
            return g * -float(memory["first"])
        eta = float(group["lr"] * group["tau"] / (group["tau"] + memory["t"]))
        return -eta * two_loop(g, memory["S"], memory["Y"], group["scaling"])

    def after(self, s: Tensor, g: Tensor, closure: Closure | None) -> None:
        """Evaluate the same batch again at the new point and remember the pair."""
        assert closure is not None
        with torch.enable_grad():
            closure()
        memory, size = self.memory, self.param_groups[0]["memory"]
        y = self.gradient() - g
        memory["t"] += 1
        if s @ y > 0:  # else the curvature along s is not positive, and the matrix would not stay so
            memory["S"] = torch.cat([memory["S"], s[None]])[-size:]
            memory["Y"] = torch.cat([memory["Y"], y[None]])[-size:]
        else:
            memory["first"] = min(10 * memory["first"], max(1.0, self.param_groups[0]["first"]))


def two_loop(g: Tensor, S: Tensor, Y: Tensor, scaling: str) -> Tensor:
    """The approximate inverse Hessian times g; pairs in the rows of S and Y, the oldest first.

    The two loops of the usual recursion are the substitutions of two triangular systems in
    ``R = triu(S Y^T)``: the first gives the alphas, the second what the betas leave of them.
    """
    R = (S @ Y.T).triu_()
    sy = R.diagonal()
    yy = (Y * Y).sum(1)
    s = S[0 if scaling == "slip" else -1]
    gamma = (sy / yy).mean() if scaling == "mean" else s @ Y[-1] / yy[-1]
    alpha = torch.linalg.solve_triangular(R, (S @ g)[:, None], upper=True)[:, 0]
    q = g - alpha @ Y
    rest = torch.linalg.solve_triangular(R.T, (sy * alpha - gamma * (Y @ q))[:, None], upper=False)[:, 0]
    product: Tensor = gamma * q + rest @ S
    return product
