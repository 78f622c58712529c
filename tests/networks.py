"""Hands an optimizer's network to the oracle, as blocks and permutations in natural order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import oracle
from lodo import LODO, Dense, Diagonal, Mixing, Residual, Scalar

FAMILIES = ("mixing", "residual", "diagonal", "scalar", "dense")
BACKENDS = ("reference", "numba")


def natural(opt: LODO, theta: Tensor, group: int = 0) -> Tensor:
    """theta as the oracle has it."""
    family = opt._families[group]
    return family.blocks(theta, opt._network(group).n) if isinstance(family, Mixing) else theta


def matrix(opt: LODO, group: int = 0) -> oracle.Matrix:
    """The oracle's G with this optimizer's permutations."""
    family, net = opt._families[group], opt._network(group)
    if isinstance(family, Mixing):
        return oracle.mixing(list(family.permutations(net.engine.P, net.n)))
    if isinstance(family, Residual):
        return oracle.residual(list(net.engine.P.long()))
    return {Diagonal: oracle.diagonal, Scalar: oracle.scalar, Dense: oracle.dense}[type(family)]


def oracle_for(opt: LODO, x: Tensor, group: int = 0, **settings: Any) -> oracle.AutogradLODO:
    """An oracle that starts where this fresh optimizer stands."""
    options = opt.param_groups[group]
    theta = natural(opt, opt._state(group)["theta"], group)
    settings = {
        "lr": float(options["lr"]),
        "meta_lr": options["meta_lr"],
        "beta": options["beta"],
        "meta": options["meta_optimizer"],
        "betas": options["meta_betas"],
        "eps": options["meta_eps"],
        "weight_decay": options["weight_decay"],
        **settings,
    }
    return oracle.AutogradLODO(x, matrix(opt, group), theta, **settings)


def difference(a: Tensor, b: Tensor) -> float:
    """Relative to the size of b."""
    return float((a.detach() - b.detach()).norm() / b.detach().norm().clamp_min(1e-30))


def quadratic(n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A random convex quadratic with curvatures from 0.1 to 1, and its Hessian."""
    rng = torch.Generator().manual_seed(seed)
    Q = torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=torch.float64))[0]
    H = (Q * torch.linspace(0.1, 1, n, dtype=torch.float64)) @ Q.T
    H = ((H + H.T) / 2).to(dtype)

    def f(x: Tensor) -> Tensor:
        return 0.5 * x @ (H @ x)

    return f, H
