"""Groups on a device other than the CPU: a step never waits for it, and a refused step changes nothing there.

There is no such device here: `fake_cuda` stands in for one. What the numbers on a device do is checked on the CPU, by
an engine that keeps them as tensors as if it were on a device.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from fake_cuda import fake_cuda
from helpers import difference, parameter
from lodo import LODO, Mixing
from lodo.engines import ReferenceEngine
from lodo.engines.compiled.engine import CompiledEngine

BACKENDS = ("reference", "compiled")
OPTIONS = {
    "paper": {},
    "shuffle": {"preconditioner": Mixing(depth=3, mixing="shuffle")},
    "residual": {"preconditioner": "residual(depth=3)"},
    "diagonal": {"preconditioner": "diagonal"},
    "scalar": {"preconditioner": "scalar"},
    "dense": {"preconditioner": "dense"},
    "gate": {"momentum": "learned"},
    "guard": {"guard": True},
    "sgd": {"meta_optimizer": "sgd", "meta_lr": 1e-4},
    "schedule-free": {"meta_optimizer": "schedule-free(window=4)"},
    "bfloat16": {"meta_optimizer": "adam(moment_dtype='bfloat16')"},
    "robust": {"recipe": "robust"},
    "weight decay": {"weight_decay": 0.1, "maximize": True},
}


@pytest.fixture
def cuda():
    with fake_cuda() as mode:
        yield mode


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    """What is compiled otherwise runs as it is written: every operation of it is seen here."""
    monkeypatch.setattr("lodo.engines.missing_for", lambda device: "")
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("save", [True, False])
def test_a_step_on_a_device_never_waits_for_it(name, backend, save, cuda):
    x = torch.nn.Parameter(torch.randn(30, device="cuda"))
    y = torch.nn.Parameter(torch.randn(3, 4, device="cuda"))
    options = {"preconditioner": Mixing(depth=3), **OPTIONS[name]}
    opt = LODO([x, y], lr=0.1, nonfinite="skip", backend=backend, save_activations=save, **options)
    for step in range(4):
        x.grad = torch.randn(30, device="cuda")
        y.grad = None if step == 2 else torch.randn(3, 4, device="cuda")
        opt.param_groups[0]["lr"] = 0.1 / (step + 1)
        opt.step()
    state = opt._state(0)
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    assert {value.device.type for value in [*tensors, *state["guard"]]} == {"cuda"}
    assert x.device.type == "cuda"


def test_the_mode_does_notice_waiting(cuda):
    x = torch.nn.Parameter(torch.randn(30, device="cuda"))
    opt = LODO([x], lr=0.1, nonfinite="skip")
    x.grad = torch.randn(30, device="cuda")
    opt.step()
    with pytest.raises(DataDependentOutputException):
        _ = opt.skipped_steps


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_lr_stays_on_the_device(backend, cuda):
    x = torch.nn.Parameter(torch.randn(30, device="cuda"))
    opt = LODO([x], lr=0.1, nonfinite="skip", guard=True, backend=backend)
    opt.param_groups[0]["lr"] = torch.full((), 0.1, device="cuda")
    for _ in range(3):
        x.grad = torch.randn(30, device="cuda")
        opt.step()


# ---------------------------------------------------------------- the same numbers, with values


@pytest.fixture
def as_if_on_a_device(monkeypatch):
    """The engines keep their numbers as tensors on the CPU too."""
    for engine in (ReferenceEngine, CompiledEngine):
        monkeypatch.setattr(engine, "on_host", property(lambda engine: False))


def gradients(params, steps, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [[torch.randn(p.shape, generator=rng, dtype=torch.float64) for p in params] for _ in range(steps)]


def play(opt, params, steps):
    for step in steps:
        for p, g in zip(params, step, strict=True):
            p.grad = None if g is None else g.clone()
        opt.step()


def trained(steps, **options):
    torch.manual_seed(3)
    params = [parameter(30), parameter(3, 4)]
    opt = LODO(params, **{"lr": 0.1, "preconditioner": Mixing(depth=3), "backend": "reference", **options})
    play(opt, params, steps)
    return params, opt


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_on_a_device_give_the_same_run(name, backend, monkeypatch):
    steps = gradients([torch.empty(30), torch.empty(3, 4)], 12)
    steps[4][1] = steps[7][1] = None  # not every parameter has a gradient in every step
    steps[9] = [1000 * g for g in steps[9]]  # an outlier, for the guard
    expected, plain = trained(steps, **OPTIONS[name])
    for engine in (ReferenceEngine, CompiledEngine):
        monkeypatch.setattr(engine, "on_host", property(lambda engine: False))
    found, opt = trained(steps, **OPTIONS[name], backend=backend)
    assert isinstance(opt._state(0)["last_lr"], torch.Tensor)
    tolerance = 1e-6 if "bfloat16" in str(OPTIONS[name]) or name == "robust" else 1e-12
    assert all(difference(a, b) < tolerance for a, b in zip(found, expected, strict=True))
    ours, theirs = opt.state_dict()["state"][0], plain.state_dict()["state"][0]
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.bfloat16:
            assert torch.allclose(ours[key], value, rtol=1e-6, atol=1e-9), key


@pytest.mark.usefixtures("as_if_on_a_device")
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e200])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refused_step_changes_nothing(name, backend, bad):
    shapes = [torch.empty(30), torch.empty(3, 4)]
    before, after = gradients(shapes, 5), gradients(shapes, 5, seed=1)
    poison = [g.clone() for g in before[0]]
    poison[0][3] = bad
    expected, plain = trained([*before, *after], nonfinite="skip", backend=backend, **OPTIONS[name])
    found, opt = trained([*before, poison, poison, *after], nonfinite="skip", backend=backend, **OPTIONS[name])
    outlier = bad == 1e200 and OPTIONS[name].get("guard", OPTIONS[name].get("recipe") == "robust")
    if outlier:  # the guard shortens what is finite
        assert all(bool(torch.isfinite(p).all()) for p in found)
        return
    assert opt.skipped_steps == 2
    assert plain.skipped_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    ours, theirs = opt.state_dict()["state"][0], plain.state_dict()["state"][0]
    for key, value in theirs.items():
        if key != "skipped":
            assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("devices", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("poisoned", [0, 1])
def test_a_step_is_refused_by_all_groups_and_counted_once(devices, poisoned, monkeypatch):
    """Wherever the groups are."""
    params = [parameter(30), parameter(12)]
    opt = LODO([{"params": [p]} for p in params], lr=0.1, backend="reference", nonfinite="skip")
    sizes = {p.numel(): on_device for p, on_device in zip(params, devices, strict=True)}
    monkeypatch.setattr(ReferenceEngine, "on_host", property(lambda engine: not sizes[engine.layout.n]))
    good = gradients(params, 4)
    play(opt, params, good[:2])
    before = [p.detach().clone() for p in params]
    bad = [g.clone() for g in good[2]]
    bad[poisoned][3] = math.nan
    play(opt, params, [bad, bad])
    assert all(map(torch.equal, params, before))
    assert opt.skipped_steps == 2
    play(opt, params, good[2:])
    assert opt.skipped_steps == 2
    assert not any(map(torch.equal, params, before))
    assert all(bool(torch.isfinite(p).all()) for p in params)


@pytest.mark.usefixtures("as_if_on_a_device")
def test_a_refused_step_raises_at_the_next_one():
    x = parameter(5)
    opt = LODO([x], lr=0.1, backend="reference")
    start = x.detach().clone()
    x.grad = torch.full((5,), math.nan, dtype=torch.float64)
    opt.step()
    assert torch.equal(x, start)
    x.grad = torch.ones(5, dtype=torch.float64)
    with pytest.raises(FloatingPointError, match=r"of the last step was not finite.*changed nothing.*nonfinite='skip'"):
        opt.step()
    assert torch.equal(x, start)
    opt.step()  # it was said once
    assert not torch.equal(x, start)


@pytest.mark.usefixtures("as_if_on_a_device")
def test_what_is_kept_on_a_device_is_used_in_the_next_step(monkeypatch):
    """Although a device scales the momentum after every step, by a factor that is 1 unless the step was refused."""
    shapes = [torch.empty(30), torch.empty(3, 4)]
    params, opt = trained(gradients(shapes, 3), backend="compiled")
    engine = opt._groups[0].network.engine
    fed = []
    monkeypatch.setattr(engine, "_fed", lambda *x: fed.append(x) or CompiledEngine._fed(engine, *x))
    play(opt, params, gradients(shapes, 1, seed=1))
    assert len(fed) == 1  # what is fed now, not what was fed before


@pytest.mark.usefixtures("as_if_on_a_device")
@pytest.mark.parametrize("name", ["paper", "gate", "guard", "robust", "schedule-free"])
def test_a_state_goes_from_a_device_to_the_cpu_and_back(name):
    steps = gradients([torch.empty(30), torch.empty(3, 4)], 10)
    expected, _ = trained(steps, **OPTIONS[name])
    params, opt = trained(steps[:5], **OPTIONS[name])
    resumed = LODO(params, **{"lr": 0.1, "preconditioner": Mixing(depth=3), "backend": "reference", **OPTIONS[name]})
    resumed.load_state_dict(opt.state_dict())
    play(resumed, params, steps[5:])
    assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))
