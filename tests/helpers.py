"""What several tests need; above all, handing an optimizer's network to the oracle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
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


def places(opt: LODO, group: int = 0) -> Tensor:
    """Where each weight of a layer, in the oracle's order, is stored."""
    family, n = opt._families[group], opt._network(group).n
    if not isinstance(family, Mixing):
        return torch.arange(family.layers(n).weights)
    k, L = family.block_size, family.tiles(n)[1]
    block, r, c = (
        x.reshape(-1) for x in torch.meshgrid(*map(torch.arange, (family.hidden(n) // k, k, k)), indexing="ij")
    )
    return ((block // L * k + r) * k + c) * L + block % L


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
    options, net = opt.param_groups[group], opt._network(group)
    theta = natural(opt, opt._state(group)["theta"], group)
    settings = {
        "lr": float(options["lr"]),
        "meta_lr": options["meta_lr"],
        "beta": options["beta"],
        "meta": options["meta_optimizer"],
        "betas": options["meta_betas"],
        "eps": options["meta_eps"],
        "weight_decay": options["weight_decay"],
        "layered": isinstance(opt._families[group], (Mixing, Residual)),
        "gated": options["momentum"] == "learned",
        "window": options["meta_window"],
        "rounding": oracle.Rounding(net.rounding_seed, places(opt, group)) if options["moment_dtype"] else None,
        "guard": oracle.Guard() if options["guard"] else None,
        **settings,
    }
    return oracle.AutogradLODO(x, matrix(opt, group), theta, **settings)


def assert_agree(opt: LODO, x: Tensor, truth: oracle.AutogradLODO, tolerance: float, group: int = 0) -> None:
    """x and all of the state are the oracle's, relative to their size."""
    state = opt._state(group)
    assert difference(x, truth.x) < tolerance
    assert difference(state["momentum"], truth.m) < tolerance
    assert difference(natural(opt, state["theta"], group), truth.theta) < tolerance
    if "exp_avg" in state:
        # single precision now and then rounds the other way, which is 1 part in 256
        rounded = state["exp_avg"].dtype == torch.bfloat16 and state["theta"].dtype == torch.float32
        for name, expected in (("exp_avg", truth.adam.M), ("exp_avg_sq", truth.adam.V)):
            assert difference(natural(opt, state[name], group), expected) < (1e-3 if rounded else tolerance)
    if "z" in state:
        assert difference(natural(opt, state["z"], group), truth.z) < tolerance
    assert ("gate" in state) == truth.gated
    if truth.gated:
        assert state["gate"][0] == pytest.approx(float(truth.w.detach()), rel=tolerance)
    if truth.guard is not None:
        assert state["guard"] == pytest.approx((truth.guard.usual, truth.guard.trust), rel=tolerance)


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


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype))


def give_gradients(params: list[torch.nn.Parameter]) -> None:
    for p in params:
        p.grad = torch.randn(p.shape, dtype=torch.float64).to(p.dtype)


def snapshot(opt: LODO) -> Any:
    """Everything that a refused call must not touch."""
    params = [p.detach().clone() for group in opt.param_groups for p in group["params"]]
    return params, copy.deepcopy(opt.state_dict())


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
