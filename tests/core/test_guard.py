"""The guard: outliers and sudden changes are survived, and a run without them does not notice it."""

from __future__ import annotations

import copy

import pytest
import torch

from helpers import difference, give_gradients, network, parameter, same, snapshot
from lodo import LODO, Mixing
from lodo.guard import Guard


def pair(n=30, dtype=torch.float32, **options):
    """The same optimizer with and without the guard, on parameters of its own."""
    xs = [parameter(n, dtype=dtype)]
    xs.append(torch.nn.Parameter(xs[0].detach().clone()))
    return [(x, LODO([x], guard=guard, **options)) for x, guard in zip(xs, (True, False), strict=True)]


class Bowl:
    """A noisy bowl whose centre wanders; curvatures from 0.01 to 1, turned round by `swap`."""

    def __init__(self, n=20, seed=3):
        self.rng = torch.Generator().manual_seed(seed)
        self.D, self.centre = torch.logspace(-2, 0, n), torch.zeros(n)

    def swap(self):
        self.D = self.D.flip(0)

    def __call__(self, x):
        """The loss; x gets its gradient."""
        self.centre += 0.1 * torch.randn(len(self.centre), generator=self.rng)
        away = x.detach() - self.centre
        x.grad = self.D * away
        return float((0.5 * self.D * away**2).sum())


def on_the_bowl(steps, swap_at, **options):
    """The losses, and the smallest trust; as far as the run goes."""
    bowl, x = Bowl(), torch.nn.Parameter(torch.zeros(20))
    opt = LODO([x], **{"lr": 1.0, "beta": 0.3, "meta_lr": 2e-3, "preconditioner": Mixing(8), **options})
    losses, trust = [], [1.0]
    for t in range(steps):
        if t == swap_at:
            bowl.swap()
        losses.append(bowl(x))
        try:
            opt.step()
        except FloatingPointError:
            break
        trust.append(opt._state(0)["guard"].trust)
    return losses, min(trust)


@pytest.mark.parametrize(("recipe", "mixing"), [("paper", "random"), ("robust", "shuffle")])
def test_an_undisturbed_run_is_the_same_bit_by_bit(recipe, mixing, backend):
    family = Mixing(4, mixing=mixing)
    (x, guarded), (y, plain) = pair(20, lr=0.5, recipe=recipe, backend=backend, preconditioner=family)
    bowls = Bowl(), Bowl()
    for _ in range(200):
        bowls[0](x)
        bowls[1](y)
        guarded.step()
        plain.step()
        assert guarded._state(0)["guard"].trust == 1.0
    assert torch.equal(x, y)
    assert torch.equal(guarded._state(0)["theta"], plain._state(0)["theta"])


@pytest.mark.parametrize("meta", ["adam", "sgd", "schedule-free"])
def test_an_outlier_does_not_throw_it_off(meta, backend):
    (x, guarded), (y, plain) = pair(lr=0.1, meta_optimizer=meta, backend=backend, preconditioner=Mixing(4), beta=0.5)
    before, refused = x.detach().clone(), False
    for t in range(60):
        give_gradients([x])
        if t == 40:
            x.grad *= 1000
            before = [p.detach().clone() for p in (x, y)]
            thetas = [opt._state(0)["theta"].clone() for opt in (guarded, plain)]
        y.grad = x.grad.clone()
        guarded.step()
        try:
            plain.step()
        except FloatingPointError:  # theta is so large that a step would be infinite
            assert meta == "sgd"
            refused = True
        if t == 40:
            moved = [float((p.detach() - b).norm()) for p, b in zip((x, y), before, strict=True)]
            learned = [
                float((opt._state(0)["theta"] - b).norm()) for opt, b in zip((guarded, plain), thetas, strict=True)
            ]
            assert moved[0] < 0.02 * moved[1]
            assert moved[0] < 5 * 0.1 * 30**0.5  # no further than a gradient of five times the usual takes it
            if meta == "sgd":
                assert learned[0] < 0.02 * learned[1]
    if meta == "adam":  # the second moment remembers an outlier for a thousand steps
        v = [float(opt._state(0)["exp_avg_sq"].sum()) for opt in (guarded, plain)]
        assert v[0] < 1e-3 * v[1]
    near, far = (float((p.detach() - b).norm()) for p, b in zip((x, y), before, strict=True))
    assert near < 10
    assert far > 20 * near
    assert refused == (meta == "sgd")


SUDDEN = {
    "paper": {},
    "robust": {"recipe": "robust", "preconditioner": Mixing(8, mixing="shuffle")},
    "schedule-free": {"meta_optimizer": "schedule-free"},
}


@pytest.mark.parametrize("options", SUDDEN.values(), ids=SUDDEN)
def test_a_sudden_change_of_the_curvature_is_survived(options):
    plain, _ = on_the_bowl(3000, 1500, **options, guard=False)
    losses, trust = on_the_bowl(3000, 1500, **options, guard=True)
    assert plain[:1500] == losses[:1500]
    assert max(plain) > 1e15
    if "meta_optimizer" not in options:
        assert len(plain) < 1600  # it ran away, until its gradients could not be squared
    assert len(losses) == 3000
    assert max(losses) < 1000
    assert sum(losses[-300:]) < 2 * sum(losses[1200:1500])  # and learned the new curvature
    assert trust <= 0.5


def test_the_change_is_survived_on_every_backend(backend):
    options = {"meta_lr": 1e-2, "preconditioner": Mixing(3), "backend": backend}
    plain, _ = on_the_bowl(500, 250, **options, guard=False)
    losses, trust = on_the_bowl(500, 250, **options, guard=True)
    assert max(plain) > 1e15
    assert len(losses) == 500
    assert max(losses) < 1000
    assert trust <= 0.5


@pytest.mark.parametrize("factor", [100.0, 1e-3])
def test_the_average_follows_a_lasting_change(factor):
    """Gradients that stay longer are let through in the end, and steps are no longer shortened."""
    x = parameter(200, dtype=torch.float32)
    opt = LODO([x], lr=1e-4, guard=True, preconditioner=Mixing(2))
    clipped = []
    for t in range(5000):
        x.grad = torch.randn(200) * (1.0 if t < 100 else factor)
        norm = float(x.grad.norm())
        clipped.append(opt._state(0)["guard"].clip(norm) < 1)
        opt.step()
    assert not any(clipped[:100])
    assert any(clipped[100:]) == (factor > 1)
    assert not any(clipped[200:])
    average, trust = opt._state(0)["guard"]
    assert trust == 1.0
    assert average == pytest.approx(factor * 200**0.5, rel=0.05)


def test_a_shortened_gradient_lengthens_the_average_by_up_to_11_percent():
    before = Guard(average=2.0)
    clip = before.clip(1e6)
    assert clip * 1e6 == pytest.approx(10.0)
    assert before.after(clip * 1e6, True, False).average == pytest.approx(2 * (0.99 + 0.01 * 25) ** 0.5)
    assert before.after(clip * 1e6, True, False).average < 1.12 * before.average


def test_what_is_at_the_limit_passes():
    guard = Guard(average=2.0)
    assert guard.clip(10.0) == 1.0
    assert guard.clip(10.001) < 1.0
    assert Guard().clip(1e30) == 1.0  # nothing to compare with yet
    assert Guard().after(3.0, False, False) == Guard(average=3.0)
    assert Guard().after(0.0, False, False) == Guard()  # zeros teach nothing
    assert Guard(average=3.0).after(0.0, False, False) == Guard(average=3.0)


def test_trust_is_halved_while_steps_overshoot_and_comes_back():
    guard = Guard(average=1.0)
    for _ in range(3):
        guard = guard.after(1.0, clipped=True, uphill=True)
    assert guard.trust == 0.125
    for clipped, uphill in ((False, True), (True, False)):  # neither good nor bad news
        guard = guard.after(1.0, clipped, uphill)
    assert guard.trust == 0.125
    for _ in range(104):
        guard = guard.after(1.0, clipped=False, uphill=False)
    assert guard.trust < 1.0
    for _ in range(2):
        guard = guard.after(1.0, clipped=False, uphill=False)
    assert guard.trust == 1.0
    for _ in range(100):
        guard = guard.after(1.0, clipped=True, uphill=True)
    assert guard.trust == 1e-6  # and no less, so that there is a way back


@pytest.mark.parametrize("options", [{"meta_lr": 1e-4}, {"preconditioner": "diagonal"}])
def test_trust_does_not_come_back_before_theta_has_learned(options):
    """A curvature a thousand times larger, and a theta that follows slowly: no second, slower divergence."""
    rng = torch.Generator().manual_seed(0)
    D, centre, x = 1000 ** torch.linspace(-1, 0, 30), torch.zeros(30), torch.nn.Parameter(torch.zeros(30))
    opt, losses = LODO([x], lr=1.0, guard=True, **options), []
    for t in range(4000):
        D = D * 1000 if t == 1000 else D
        centre += torch.randn(30, generator=rng)
        away = x.detach() - centre
        x.grad = D * away
        losses.append(float((D * away**2).sum()) / (1000 if t >= 1000 else 1))
        opt.step()
    assert max(losses[1010:]) < 1000 * sum(losses[900:1000]) / 100  # 1e5 times and more if trust came back at once
    assert sum(losses[1010:3000]) / 1990 < 2 * sum(losses[500:1000]) / 500


def test_only_an_outlier_against_the_last_step_costs_trust(backend):
    """One that points the way of the last step is shortened and no more; nor does an ordinary one cost anything."""
    for back, long, trust in ((True, True, 0.5), (False, True, 1.0), (True, False, 1.0)):
        x = parameter(10)
        opt = LODO([x], lr=0.1, beta=0.0, guard=True, backend=backend)
        first = torch.randn(10, dtype=torch.float64)
        x.grad = first.clone()
        opt.step()
        x.grad = (-first if back else first) * (100 if long else 1)  # the step was -0.1 first
        opt.step()
        average, now = opt._state(0)["guard"]
        assert now == trust
        expected = float(first.norm()) * ((0.99 + 0.01 * 25) ** 0.5 if long else 1)
        assert average == pytest.approx(expected)


def test_trust_shortens_the_step_and_what_is_learned_from_it(backend):
    """A run in which trust is t is one with lr t times as large."""
    x, y = parameter(10), parameter(10)
    y.data.copy_(x.detach())
    guarded, plain = (
        LODO([p], lr=0.1, weight_decay=0.3, guard=p is x, backend=backend, preconditioner="diagonal") for p in (x, y)
    )
    x.grad = 0.1 + torch.rand(10, dtype=torch.float64)
    y.grad = x.grad.clone()
    guarded.step()
    plain.step()
    guarded._state(0)["guard"] = guarded._state(0)["guard"]._replace(trust=0.25)
    trust = 0.25
    for _ in range(20):
        trust *= 1.02
        x.grad = 0.1 + torch.rand(10, dtype=torch.float64)  # downhill along steps that are averages of such
        y.grad = x.grad.clone()
        plain.param_groups[0]["lr"] = 0.1 * trust
        guarded.step()
        plain.step()
        assert guarded._state(0)["guard"].trust == pytest.approx(trust)
    assert difference(x, y) < 1e-12
    assert difference(guarded._state(0)["theta"], plain._state(0)["theta"]) < 1e-12


def test_groups_are_guarded_separately(backend):
    """An outlier in one group is no matter to another, and an unguarded group takes it as it is."""
    params = [parameter(12) for _ in range(3)]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]

    def optimizer(params):
        a, b, c = params
        groups = [{"params": [a]}, {"params": [b]}, {"params": [c], "guard": False}]
        return LODO(groups, lr=0.1, guard=True, backend=backend, preconditioner=Mixing(3))

    opt, calm = optimizer(params), optimizer(twins)
    for t in range(12):
        give_gradients(params)
        for p, twin in zip(params, twins, strict=True):
            twin.grad = p.grad.clone()
        if t == 8:
            params[0].grad *= 1e4
            params[2].grad *= 1e4
            start = params[2].detach().clone()
        opt.step()
        calm.step()
        if t == 8:
            assert float((params[2].detach() - start).norm()) > 100
    assert not torch.equal(params[0], twins[0])
    assert torch.equal(params[1], twins[1])
    assert opt._state(0)["guard"].average > calm._state(0)["guard"].average
    assert opt._state(1)["guard"] == calm._state(1)["guard"]
    assert opt._state(2)["guard"] == Guard()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_gradients_are_still_refused(bad, backend):
    a, b = parameter(7, dtype=torch.float32), parameter(3, dtype=torch.float32)
    opt = LODO([{"params": [a]}, {"params": [b]}], lr=0.1, guard=True, backend=backend)
    for _ in range(4):
        give_gradients([a, b])
        opt.step()
    before = snapshot(opt)
    give_gradients([a, b])
    b.grad[1] = bad
    with pytest.raises(FloatingPointError, match=r"gradient of parameter 0 of group 1, shape \(3,\), is not finite"):
        opt.step()
    assert same(snapshot(opt), before)


def test_skipping_continues_as_if_nothing_had_been(backend):
    x, y = parameter(9), parameter(9)
    y.data.copy_(x.detach())
    skipping, clean = (LODO([p], lr=0.1, nonfinite="skip", recipe="robust", backend=backend) for p in (x, y))
    for t in range(12):
        if t % 3 == 0:  # the very first call included
            x.grad = torch.full((9,), float("nan"), dtype=torch.float64)
            skipping.step()
        give_gradients([y])
        x.grad = y.grad.clone()
        skipping.step()
        clean.step()
    assert torch.equal(x, y)
    assert skipping.skipped_steps == 4
    assert skipping._state(0)["guard"] == clean._state(0)["guard"]


@pytest.mark.parametrize("family", ["mixing", "diagonal"])
def test_a_huge_finite_gradient_is_survived(family, backend):
    """1e30 cannot even be squared in float32."""
    (x, guarded), (y, plain) = pair(12, lr=0.1, preconditioner=family, backend=backend)
    for _ in range(5):
        give_gradients([x])
        y.grad = x.grad.clone()
        guarded.step()
        plain.step()
    before = x.detach().clone()
    x.grad = 1e30 * torch.randn(12)
    y.grad = x.grad.clone()
    guarded.step()
    assert float((x.detach() - before).norm()) < 5
    with pytest.raises(FloatingPointError, match="too large"):
        plain.step()
    for _ in range(20):
        give_gradients([x])
        guarded.step()
    assert float((x.detach() - before).norm()) < 20
    assert all(torch.isfinite(v).all() for v in guarded._state(0).values() if isinstance(v, torch.Tensor))


def test_the_very_first_gradient_has_nothing_to_be_compared_with():
    x = parameter(4, dtype=torch.float32)
    opt = LODO([x], lr=0.1, guard=True)
    x.grad = torch.full((4,), 1e30)
    with pytest.raises(FloatingPointError, match="too large"):
        opt.step()
    x.grad = torch.zeros(4)
    opt.step()
    assert opt._state(0)["guard"] == Guard()
    x.grad = torch.full((4,), 100.0)
    before = x.detach().clone()
    opt.step()
    assert torch.allclose(before - x.detach(), torch.full((4,), 0.1 * 0.1 * 100))


def test_the_guard_can_be_switched_on_and_off_during_a_run():
    x, y = parameter(10), parameter(10)
    y.data.copy_(x.detach())
    switched, plain = (LODO([p], lr=0.1, preconditioner=Mixing(3)) for p in (x, y))
    for t in range(30):
        switched.param_groups[0]["guard"] = t % 10 >= 5
        give_gradients([x])
        y.grad = x.grad.clone()
        switched.step()
        plain.step()
    assert torch.equal(x, y)
    assert switched._state(0)["guard"].average > 0


def test_the_step_that_is_remembered_is_no_second_copy():
    x = parameter(10)
    opt = LODO([x], lr=0.1, guard=True)
    for _ in range(3):
        give_gradients([x])
        opt.step()
    net = network(opt)
    assert opt._state(0)["last_step"].data_ptr() == net.s.vector.data_ptr()
    twin = copy.deepcopy(opt)
    y = twin.param_groups[0]["params"][0]
    give_gradients([y])
    twin.step()
    assert twin._state(0)["last_step"].data_ptr() == network(twin).s.vector.data_ptr() != net.s.vector.data_ptr()
