"""What `diagnostics` reports is what is so."""

from __future__ import annotations

import pytest
import torch

from helpers import BACKENDS, FAMILIES, network, parameter
from lodo import LODO, Mixing, watch


def trained(steps: int = 30, n: int = 12, **options: object) -> tuple[torch.nn.Parameter, LODO]:
    x = parameter(n)
    opt = LODO([x], **{"lr": 0.2, "meta_lr": 0.01, **options})
    curvature = torch.linspace(0.1, 1.5, n, dtype=torch.float64)
    for _ in range(steps):
        x.grad = curvature * x.detach()
        opt.step()
    return x, opt


@pytest.mark.parametrize("recipe", ["paper", "robust"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_norms_and_cosine_are_those_of_the_last_step(backend, recipe):
    x, opt = trained(backend=backend, recipe=recipe)
    before = x.detach().clone()
    x.grad = x.grad.norm() * torch.randn(12, dtype=torch.float64) / 4  # nothing for the guard to clip
    opt.step()
    numbers = opt.diagnostics()
    step = x.detach() - before
    assert numbers["group0/gradient_norm"] == pytest.approx(float(x.grad.norm()))
    assert numbers["group0/momentum_norm"] == pytest.approx(float(opt._state(0)["momentum"].norm()))
    assert numbers["group0/step_norm"] == pytest.approx(float(step.norm()))
    cosine = torch.nn.functional.cosine_similarity(step, -x.grad, dim=0)
    assert numbers["group0/descent_cosine"] == pytest.approx(float(cosine))
    assert ("group0/gate_weight" in numbers) == ("group0/trust" in numbers) == (recipe == "robust")
    assert all(isinstance(value, float) for value in numbers.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_stretches_are_within_and_near_those_of_the_matrix(family):
    _, opt = trained(preconditioner=family)
    exact = torch.linalg.svdvals(opt.preconditioner_matrix() / opt.param_groups[0]["lr"])
    first, many = opt.diagnostics(), opt.diagnostics(power_iterations=400)
    for numbers, near in ((first, 0.05), (many, 0.02)):
        assert numbers["group0/largest_stretch"] <= exact[0] * (1 + 1e-9)
        assert numbers["group0/smallest_stretch"] >= exact[-1] * (1 - 1e-9)
        if family != "dense":  # which need not be symmetric
            assert numbers["group0/largest_stretch"] >= exact[0] * (1 - near)
    if family != "dense":
        assert many["group0/smallest_stretch"] <= exact[-1] * 1.2
    if family == "mixing":
        assert float(exact[0] / exact[-1]) > 1.2


def test_stretches_get_better_from_call_to_call():
    _, opt = trained(n=60)
    exact = float(torch.linalg.svdvals(opt.preconditioner_matrix() / opt.param_groups[0]["lr"])[0])
    first = opt.diagnostics(power_iterations=2)["group0/largest_stretch"]
    assert opt.diagnostics()["group0/largest_stretch"] == first  # not every call takes the time
    for _ in range(4 * watch.CYCLE):
        last = opt.diagnostics()["group0/largest_stretch"]
    assert first < last <= exact * (1 + 1e-9)


@pytest.mark.parametrize("family", ["mixing", "residual"])
def test_stretches_follow_a_run_from_its_start(family):
    """Also if the first call comes before anything is learned, when G is the identity."""
    x, opt = trained(0, n=60, preconditioner=family)
    for t in range(800):
        if t % 10 == 0:
            opt.diagnostics()
        x.grad = torch.linspace(0.1, 1.5, 60, dtype=torch.float64) * x.detach() + 0.1 * torch.randn_like(x)
        opt.step()
    for _ in range(watch.CYCLE):  # of which one takes the time
        numbers = opt.diagnostics()
    exact = torch.linalg.svdvals(opt.preconditioner_matrix() / opt.param_groups[0]["lr"])
    assert float(exact[0] / exact[-1]) > 2
    assert numbers["group0/stretch_ratio"] == pytest.approx(float(exact[0] / exact[-1]), rel=0.25)


@pytest.mark.parametrize("mixing", ["random", "shuffle"])
@pytest.mark.parametrize("meta", ["adam", "sgd", "schedule-free"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_hypergradients_norm(backend, meta, mixing):
    """Against the family's own formula, from the same point of the same run."""
    torch.manual_seed(0)
    family = Mixing(mixing=mixing)
    x, opt = trained(3, backend=backend, meta_optimizer=meta, preconditioner=family)
    assert "group0/hypergradient_norm" not in opt.diagnostics()
    torch.manual_seed(0)
    _, truth = trained(3, backend="reference", meta_optimizer=meta, preconditioner=family)
    P, state = network(truth).engine.P, truth._state(0)
    g = x.grad = torch.randn(12, dtype=torch.float64)
    h = family.hypergradient(state["theta"], P, state["momentum"], g) * state["last_lr"]
    opt.step()
    x.grad = None
    opt.step()  # nothing moves, nothing is measured
    assert opt.diagnostics()["group0/hypergradient_norm"] == pytest.approx(float(h.norm()), rel=1e-9)


def test_one_update_in_four_calls_is_measured():
    x, opt = trained(3)
    values = []
    for scale in range(1, 11):
        opt.diagnostics()
        x.grad = torch.full((12,), float(scale), dtype=torch.float64)
        opt.step()
        values.append(network(opt).engine.hypergradient_norm)
    assert len(set(values)) == 3
    assert values[0] == values[3] != values[4] == values[7] != values[8]


def test_the_fraction_of_descents_counts_every_step_from_the_first_call_on():
    x, opt = trained(4, n=2, beta=0.9, meta_lr=0.0)
    for g in ([1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]):
        x.grad = torch.tensor(g, dtype=torch.float64)
        opt._state(0)["momentum"].copy_(torch.tensor([9.0, 0.0]))  # all steps go one way
        opt.step()
        if g == [1.0, 0.0]:
            opt.diagnostics()
    assert opt.diagnostics()["group0/descent_fraction"] == pytest.approx(3 / 5)


@pytest.mark.parametrize("recipe", ["paper", "robust"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_watching_changes_nothing(backend, recipe):
    for every in (1, 7):
        torch.manual_seed(0)
        y, watched = trained(0, backend=backend, recipe=recipe)
        torch.manual_seed(0)
        x, opt = trained(0, backend=backend, recipe=recipe)
        for t in range(25):
            for p, o in ((x, opt), (y, watched)):
                p.grad = torch.linspace(0.1, 1.5, 12, dtype=torch.float64) * p.detach()
                o.step()
            if t % every == 0:
                watched.diagnostics()
        assert torch.equal(x, y)
        assert torch.equal(opt._state(0)["theta"], watched._state(0)["theta"])
        assert opt.state_dict()["state"][0].keys() == watched.state_dict()["state"][0].keys()


def test_groups_are_told_apart_and_skips_are_counted():
    a, b, empty = parameter(4), parameter(3), torch.nn.Parameter(torch.zeros(0))
    opt = LODO([{"params": [a]}, {"params": [b], "lr": 0.5}, {"params": [empty]}], lr=0.1, nonfinite="skip")
    numbers = opt.diagnostics()  # before any step
    assert numbers["group0/largest_stretch"] == pytest.approx(1)
    assert numbers["group1/smallest_stretch"] == pytest.approx(1)
    assert numbers["group0/step_norm"] == 0
    assert not any(name.startswith("group2") for name in numbers)
    a.grad, b.grad = torch.ones_like(a), torch.full_like(b, float("nan"))
    opt.step()
    assert opt.diagnostics()["skipped_steps"] == 1


@pytest.mark.parametrize("value", [-1, 1.5, "many"])
def test_power_iterations_are_checked(value):
    with pytest.raises(ValueError, match="power_iterations must be an integer >= 0"):
        LODO([parameter(2)]).diagnostics(power_iterations=value)
