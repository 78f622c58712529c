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

    Both gradients of a pair are taken on the same batch, so that every step evaluates it twice and needs a closure.
    The learning rate falls as :math:`\eta_t = \mathrm{lr}\, \tau / (\tau + t)`.

    Args:
        params: the parameters, in one group.
        lr: the initial learning rate.
        tau: the time scale on which it falls, in steps.
        memory: number of pairs that are kept.
        first: scale of the very first step, when there is no pair yet. If the gradient does not grow along so small a
            step, as may happen by rounding in single precision, a step that is ten times as long is tried next, up to
            a scale of 1.
        scaling: the initial matrix of the two-loop recursion is a multiple of the identity: ``s.y / y.y`` of the
            ``"newest"`` pair (L-BFGS), the ``"mean"`` over all pairs (O-LBFGS), or that of the oldest s with the newest
            y (``"slip"``), as in the authors' code by an indexing slip.

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
        """Evaluate the same batch again at the new point and keep the pair."""
        assert closure is not None
        with torch.enable_grad():
            closure()
        memory, size = self.memory, self.param_groups[0]["memory"]
        y = self.gradient() - g
        memory["t"] += 1
        if s @ y > 0:  # otherwise the matrix would not stay positive definite
            memory["S"] = torch.cat([memory["S"], s[None]])[-size:]
            memory["Y"] = torch.cat([memory["Y"], y[None]])[-size:]
        else:
            memory["first"] = min(10 * memory["first"], max(1.0, self.param_groups[0]["first"]))


def two_loop(g: Tensor, S: Tensor, Y: Tensor, scaling: str) -> Tensor:
    """The approximate inverse Hessian times g; the pairs are the rows of S and Y, the oldest first.

    The two loops of the usual recursion solve two triangular systems with the matrix ``R = triu(S Y^T)``. The first
    gives the alphas, the second gives the differences alpha - beta.
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
