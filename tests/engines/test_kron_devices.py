"""KronLODO on a device other than the CPU: a step never waits for it, and a refused step changes nothing there."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import Parameter

import lodo.kron_learning
import lodo.kron_step
from fake_cuda import fake_cuda
from lodo import KronLODO

OPTIONS = {
    "untouched": {},
    "orthogonal": {"basis": "orthogonal"},
    "without bases": {"basis": "none"},
    "without gains": {"gains": False},
    "without gate": {"gate": False},
    "SOAP": {"gains": False, "gate": False, "refresh_every": 2},
    "greedy": {"anneal": 0.0},
    "bfloat16": {"state_dtype": "bfloat16", "refresh_every": 2},
    "weight decay": {"weight_decay": 0.1, "maximize": True},
}
SHAPES = [(6, 4), (6, 4), (5, 3, 2, 2), (9,), ()]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_on_a_device_never_waits_for_it(name):
    with fake_cuda():
        params = [Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
        opt = KronLODO(params, nonfinite="skip", **OPTIONS[name])
        for step in range(4):
            for p in params:
                p.grad = torch.randn(p.shape, device="cuda")
            if step == 2:
                params[1].grad = None
            opt.param_groups[0]["lr"] = 0.1 / (step + 1)
            opt.step()
        assert {value.device.type for p in params for value in (p, *opt.state[p].values())} == {"cuda"}
        with pytest.raises(DataDependentOutputException):
            _ = opt.skipped_steps  # which has to wait


def test_a_group_may_be_on_two_devices():
    with fake_cuda():
        params = [Parameter(torch.randn(4, 3, device=device)) for device in ("cuda:0", "cuda:1")]
        opt = KronLODO(params, nonfinite="skip")
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, device=p.device)
            opt.step()
        assert [{x.device for x in opt.state[p].values()} for p in params] == [{p.device} for p in params]


def test_a_tensor_lr_stays_on_the_device():
    with fake_cuda():
        x = Parameter(torch.randn(4, 3, device="cuda"))
        opt = KronLODO([x], nonfinite="skip")
        opt.param_groups[0]["lr"] = torch.full((), 0.1, device="cuda")
        for _ in range(3):
            x.grad = torch.randn(4, 3, device="cuda")
            opt.step()


# ---------------------------------------------------------------- the same numbers, with values


def without_host(monkeypatch):
    for module in (lodo.elementwise, lodo.kron_step):
        monkeypatch.setattr(module, "is_host", lambda device: False)


@pytest.fixture
def as_if_on_a_device(monkeypatch):
    """The decision stays a tensor on the CPU too."""
    without_host(monkeypatch)


def trained(steps, bad=None, **options):
    rng = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=rng, dtype=torch.float64)) for shape in SHAPES]
    opt = KronLODO(params, backend="reference", **options)
    for step in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=rng, dtype=p.dtype)
        opt.step()
        if step == bad:
            for p in params:
                p.grad = torch.full_like(p, math.nan) if p.dim() == 1 else torch.ones_like(p)
            opt.step()
    return params, opt


@pytest.mark.parametrize("name", OPTIONS)
def test_numbers_on_a_device_give_the_same_run(name, monkeypatch):
    expected, _ = trained(15, **OPTIONS[name])
    without_host(monkeypatch)
    found, opt = trained(15, **OPTIONS[name])
    assert opt._refused is not None
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=0)


@pytest.mark.usefixtures("as_if_on_a_device")
@pytest.mark.parametrize("anneal", [1500.0, math.inf])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_refused_step_changes_nothing(name, anneal):
    """A refused step counts towards the next refresh of the bases, so there is none here."""
    options = {"anneal": anneal, **OPTIONS[name], "nonfinite": "skip", "refresh_every": 100}
    expected, plain = trained(15, **options)
    found, opt = trained(15, bad=6, **options)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
        ours, theirs = opt.state[a], plain.state[b]
        assert all(torch.equal(ours[name], value) for name, value in theirs.items() if name != "skipped")
    assert (opt.skipped_steps, plain.skipped_steps) == (1, 0)


@pytest.mark.usefixtures("as_if_on_a_device")
def test_a_refused_step_changes_nothing_beside_a_device():
    """Parameters on the CPU have fused passes, which cannot be masked, and share the decision of those on a device."""
    x = Parameter(torch.ones(3, 2))
    opt = KronLODO([x], nonfinite="skip", backend="numba")
    for scale in (1.0, -0.5):
        x.grad = scale * torch.ones(3, 2)
        opt.step()
    before = {name: value.clone() for name, value in opt.state[x].items()}
    x.grad = torch.full((3, 2), math.nan)
    opt.step()
    assert all(torch.equal(value, before[name]) for name, value in opt.state[x].items() if name != "skipped")


@pytest.mark.usefixtures("as_if_on_a_device")
def test_an_error_comes_with_the_next_step():
    x = Parameter(torch.ones(3, 2))
    opt = KronLODO([x])
    x.grad = torch.full((3, 2), math.nan)
    opt.step()
    x.grad = torch.ones(3, 2)
    with pytest.raises(FloatingPointError, match="a gradient of the last step was not finite or too large"):
        opt.step()
    opt.step()
    assert opt.skipped_steps == 1
