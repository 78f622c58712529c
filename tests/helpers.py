"""What several tests need; above all, handing an optimizer's network to the oracle."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import oracle
from lodo import LODO, Dense, Diagonal, Mixing, Residual, Scalar
from lodo.meta import SGD, Adam, ScheduleFree
from lodo.recipes import as_meta_optimizer

FAMILIES = ("mixing", "residual", "diagonal", "scalar", "dense")
BACKENDS = ("reference", "numba")


def group_of(opt: LODO, group: int = 0) -> Any:
    """The run-time object of a group."""
    return opt._groups[group]


def network(opt: LODO, group: int = 0) -> Any:
    """A group's network, drawn if it was not yet."""
    return opt._groups[group].ready(opt.param_groups[group])


def natural(opt: LODO, theta: Tensor, group: int = 0) -> Tensor:
    """theta, or a moment, in natural order, as the oracle has it."""
    return network(opt, group).engine.unpack(theta)


def permutations(opt: LODO, group: int = 0) -> Tensor:
    """P_1 to P_N in natural order."""
    family, layout = opt._groups[group].family, opt._groups[group].layout
    P = network(opt, group).draw_permutations(family, layout)
    return family.permutations(P, layout) if isinstance(family, Mixing) else P.long()


def matrix(opt: LODO, group: int = 0) -> oracle.Matrix:
    """The oracle's G with this optimizer's permutations."""
    family = opt._groups[group].family
    if isinstance(family, Mixing):
        return oracle.mixing(list(permutations(opt, group)))
    if isinstance(family, Residual):
        return oracle.residual(list(permutations(opt, group)))
    return {Diagonal: oracle.diagonal, Scalar: oracle.scalar, Dense: oracle.dense}[type(family)]


def places(opt: LODO, group: int = 0) -> Tensor:
    """The place of each weight of a layer, in natural order, that random bits depend on.

    Of the mixing network it is where the weight is when blocks are stored in tiles of L lanes, the block index last.
    """
    family, layout = opt._groups[group].family, opt._groups[group].layout
    if not isinstance(family, Mixing):
        return torch.arange(family.layers(layout).weights)
    k, L = family.block_size, family.tiles(layout)[1]
    block, r, c = (
        x.reshape(-1) for x in torch.meshgrid(*map(torch.arange, (family.hidden(layout.n) // k, k, k)), indexing="ij")
    )
    return ((block // L * k + r) * k + c) * L + block % L


def oracle_for(opt: LODO, x: Tensor, group: int = 0, **settings: Any) -> oracle.AutogradLODO:
    """An oracle that starts where this fresh optimizer stands."""
    options, meta = opt.param_groups[group], as_meta_optimizer(opt.param_groups[group]["meta_optimizer"])
    theta = natural(opt, opt._state(group)["theta"], group)
    seed = network(opt, group).rounding_seed
    kinds: dict[type, dict[str, Any]] = {
        Adam: {"meta": "adam", "betas": getattr(meta, "betas", None), "eps": getattr(meta, "eps", None)},
        SGD: {"meta": "sgd"},
        ScheduleFree: {
            "meta": "schedule-free", "betas": (getattr(meta, "b", 0.0), 0.0), "window": getattr(meta, "window", None),
        },
    }  # fmt: skip
    settings = {
        "lr": float(options["lr"]),
        "meta_lr": options["meta_lr"],
        "beta": options["beta"],
        **kinds[type(meta)],
        "weight_decay": options["weight_decay"],
        "layered": isinstance(opt._groups[group].family, (Mixing, Residual)),
        "gated": options["momentum"] == "learned",
        "rounding": oracle.Rounding(seed, places(opt, group)) if meta.stored_dtype else None,
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
        assert state["gate"].value == pytest.approx(float(truth.w.detach()), rel=tolerance)
    if truth.guard is not None:
        assert tuple(state["guard"]) == pytest.approx((truth.guard.usual, truth.guard.trust), rel=tolerance)


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
