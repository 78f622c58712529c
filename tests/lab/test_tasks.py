"""The tasks against their formulas, their randomness and their checkpoints; sigma against dense matrices."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from helpers import matrix, natural, same
from lodo import LODO
from lodo.lab.data import using
from lodo.lab.run import threads
from lodo.lab.sigma import estimated_sigma, exact_sigma
from lodo.lab.tasks import TASKS, Task, bowl, find_task, make_task
from lodo.lab.tasks.bowl import Bowl, newton_loss
from lodo.lab.tasks.rosenbrock import Rosenbrock
from lodo.lab.tasks.wide_bowl import WideBowl

F64 = torch.float64


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """As in a run."""
    with threads(1):
        yield


def double_bowl(seed=0, **options):
    return Bowl(seed, dtype="float64", **options)


def wander(task, steps):
    """Take some steps of gradient descent; return all losses, gradients and buffers on the way."""
    seen = []
    for _ in range(steps):
        task.draw()
        loss = task.evaluate()
        grads = [p.grad.clone() for p in task.params]
        seen.append((loss, grads, {name: buffer.clone() for name, buffer in task.buffers().items()}))
        with torch.no_grad():
            for p in task.params:
                p.sub_(p.grad, alpha=0.1)
    return seen


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


# ---------------------------------------------------------------- losses, gradients, Hessians


@given(n=st.integers(1, 30), condition=st.floats(1, 1e5), seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_the_bowls_gradient_agrees_with_autograd(n, condition, seed):
    task = double_bowl(seed, n=n, condition=condition)
    task.draw()
    with torch.no_grad():
        task.x.copy_(torch.randn(n, dtype=F64))
    for create_graph in (False, True):
        loss, grad = task.evaluate(create_graph), task.x.grad.detach().clone()
        expected = Task.evaluate(task)
        assert math.isclose(loss, expected, rel_tol=1e-12)
        torch.testing.assert_close(grad, task.x.grad, rtol=1e-12, atol=1e-14)


def test_the_bowls_loss_in_numbers():
    task = double_bowl(n=5, v=2.0)
    task.draw()
    with torch.no_grad():
        task.x.copy_(torch.arange(5.0))
    away = np.arange(5.0) - task.centre.numpy()
    assert math.isclose(task.evaluate(), 0.5 * away @ task.H.numpy() @ away, rel_tol=1e-13)
    np.testing.assert_allclose(task.x.grad, task.H.numpy() @ away, rtol=1e-12)


@pytest.mark.parametrize("task", [Bowl(0, n=4), WideBowl(0, n=4), Rosenbrock(0)], ids=lambda task: type(task).__name__)
def test_gradients_have_a_graph_only_on_request(task):
    task.draw()
    task.evaluate()
    assert task.params[0].grad.grad_fn is None
    task.evaluate(create_graph=True)
    grad = task.params[0].grad
    (product,) = torch.autograd.grad(grad.sum(), task.params)
    torch.testing.assert_close(product, task.hessian().sum(0))


def test_evaluating_replaces_the_gradient():
    for task in (Bowl(0, n=4), WideBowl(0, n=4), Rosenbrock(0)):
        task.draw()
        first = task.evaluate(), task.params[0].grad.clone()
        assert same(first, (task.evaluate(), task.params[0].grad))


@pytest.mark.parametrize("n", [1, 7])
def test_the_generic_hessian_of_the_bowl(n):
    task = double_bowl(n=n)
    task.draw()
    assert torch.equal(task.hessian(), task.H)
    with torch.no_grad():  # as in an optimizer's step
        torch.testing.assert_close(Task.hessian(task), task.H, rtol=1e-13, atol=1e-15)


@given(x=st.floats(-3, 3), y=st.floats(-3, 3))
@settings(max_examples=20)
def test_the_generic_hessian_of_rosenbrock(x, y):
    task = Rosenbrock(0)
    task.params[0].data.copy_(torch.tensor([x, y], dtype=F64))
    expected = torch.tensor([[0.02 + 12 * x**2 - 4 * y, -4 * x], [-4 * x, 2]], dtype=F64)
    torch.testing.assert_close(task.hessian(), expected, rtol=1e-13, atol=1e-13)


def test_the_generic_hessian_of_several_parameters():
    """The rows are in the order of the parameters; one parameter enters the loss linearly."""

    class Mixed(Task):
        def __init__(self, seed):
            super().__init__(seed)
            self.params = [Parameter(torch.randn(shape, generator=self.rng, dtype=F64)) for shape in ((2, 3), (), (2,))]

        def loss(self):
            a, b, c = self.params
            return (a**3).sum() * c[0] + b + c[1] ** 2

    task = Mixed(0)
    a, _, c = (p.detach() for p in task.params)
    expected = torch.zeros(9, 9, dtype=F64)
    expected[range(6), range(6)] = 6 * a.view(-1) * c[0]
    expected[:6, 7] = expected[7, :6] = 3 * a.view(-1) ** 2
    expected[8, 8] = 2
    torch.testing.assert_close(task.hessian(), expected)


@given(n=st.integers(1, 40), condition=st.floats(1, 1e6), seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_the_bowls_spectrum(n, condition, seed):
    task = double_bowl(seed, n=n, condition=condition)
    H = task.H.numpy()
    np.testing.assert_allclose(H, H.T, atol=1e-15)
    np.testing.assert_allclose(np.linalg.eigvalsh(H), np.geomspace(1 / condition, 1, n), rtol=1e-12, atol=1e-14)


@given(n=st.integers(1, 60), condition=st.floats(1, 1e4), seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_the_wide_bowl_is_a_bowl(n, condition, seed):
    """Its products are those of a symmetric matrix with the bowl's curvatures, and its gradient is autograd's."""
    task = WideBowl(seed, n=n, condition=condition)
    H = torch.stack([task.product(e) for e in torch.eye(n)]).numpy()
    np.testing.assert_allclose(H, H.T, atol=1e-6)
    np.testing.assert_allclose(np.linalg.eigvalsh(H.astype(float)), np.geomspace(1 / condition, 1, n), atol=1e-5)
    task.draw()
    loss, grad = task.evaluate(), task.x.grad
    assert math.isclose(loss, Task.evaluate(task), rel_tol=1e-5)
    torch.testing.assert_close(grad, task.x.grad, rtol=1e-4, atol=1e-5)


def test_the_wide_bowls_eigenvectors_are_spread_and_differ_by_seed():
    """As those of a random rotation: the largest of 500 entries of about 1 / sqrt(500) is a few times that."""
    U = [
        np.linalg.eigh(torch.stack([WideBowl(seed, n=500).product(e) for e in torch.eye(500)]).numpy())[1]
        for seed in (0, 1)
    ]
    assert all(np.abs(V).max() * math.sqrt(500) < 6 for V in U)
    assert np.abs(np.diag(U[0].T @ U[1])).mean() < 0.1


def test_the_bowls_directions_are_random():
    """The mean of H over rotations is the mean curvature times the identity."""
    mean = torch.stack([double_bowl(seed, n=3, condition=10).H for seed in range(400)]).mean(0)
    curvature = double_bowl(n=3, condition=10).D.mean()
    torch.testing.assert_close(mean, curvature * torch.eye(3, dtype=F64), rtol=0, atol=0.08)


@given(n=st.integers(1, 50), condition=st.floats(1, 1e4), v=st.floats(0, 10))
@settings(max_examples=20)
def test_newton_loss(n, condition, v):
    expected = 0.5 * v * np.geomspace(1 / condition, 1, n).sum()
    options = {
        "n": n,
        "condition": condition,
        "v": v,
        "dtype": "float64",
        "renew_at": 3,
    }  # all options of a task are accepted
    assert math.isclose(newton_loss(**options), expected, rel_tol=1e-12)


def test_newton_loss_is_the_papers_value_and_what_jumping_to_the_centre_gives():
    assert round(newton_loss(), 4) == 7.4118
    task = double_bowl(v=2.0)
    losses = []
    for _ in range(2000):
        task.draw()
        losses.append(task.evaluate())
        task.x.data.copy_(task.centre)
    # the variance of 0.5 xi^T H xi is v^2 sum(D^2) / 2
    error = 2.0 * math.sqrt(0.5 * float((task.D**2).sum()) / len(losses))
    assert abs(np.mean(losses) - newton_loss(v=2.0)) < 4 * error


@pytest.mark.parametrize(("x", "y", "value"), [(1, 1, 0), (-0.5, 2, 3.085), (0, 0, 0.01), (2, 1, 9.01)])
def test_rosenbrocks_values(x, y, value):
    task = Rosenbrock(0)
    task.params[0].data.copy_(torch.tensor([x, y]))
    assert math.isclose(task.evaluate(), value, rel_tol=1e-14)
    if value == 0:
        assert not task.params[0].grad.any()
        assert (torch.linalg.eigvalsh(task.hessian()) > 0).all()


def test_rosenbrocks_start_and_jitter():
    assert same(Rosenbrock(3).params[0].detach(), torch.tensor([-0.5, 2], dtype=F64))
    starts = torch.stack([Rosenbrock(seed, jitter=0.1).params[0].detach() for seed in range(500)])
    away = (starts - torch.tensor([-0.5, 2])) / 0.1
    assert away.mean(0).abs().max() < 4 / math.sqrt(500)
    assert abs(away.var() - 1) < 4 * math.sqrt(2 / 1000)
    assert torch.equal(starts[7], Rosenbrock(7, jitter=0.1).params[0])


def test_rosenbrock_tracks_its_position():
    task = Rosenbrock(0)
    assert task.tracked(torch.optim.SGD(task.params), 0) == {"x": -0.5, "y": 2.0}


# ---------------------------------------------------------------- randomness


def test_the_centre_moves_only_in_draw():
    task = Bowl(0, n=6)
    optimizer = LODO(task.params)
    assert not task.centre.any()
    task.draw()
    before = task.centre.clone(), task.rng.get_state(), task.H.clone(), task.x.detach().clone()
    task.evaluate()
    task.evaluate(create_graph=True)
    task.loss()
    task.hessian()
    task.tracked(optimizer, 3)
    task.state_dict()
    assert same(before, (task.centre, task.rng.get_state(), task.H, task.x.detach()))
    task.draw()
    assert not torch.equal(task.centre, before[0])
    assert same(before[2:], (task.H, task.x.detach()))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("v", [0.25, 3.0])
def test_the_variance_of_the_noise(v, dtype):
    task = Bowl(0, v=v, dtype=dtype)
    path = [task.centre.clone()]
    for _ in range(1000):
        task.draw()
        path.append(task.centre.clone())
    moves = torch.stack(path).double().diff(dim=0)
    count = moves.numel()
    assert abs(float(moves.var()) / v - 1) < 4 * math.sqrt(2 / count)
    assert abs(float(moves.mean())) < 4 * math.sqrt(v / count)
    assert abs(float((moves[1:] * moves[:-1]).mean())) < 4 * v / math.sqrt(count)


def test_without_noise_nothing_moves():
    task = Bowl(0, n=5, v=0)
    task.draw()
    assert not task.centre.any()
    assert task.evaluate() == newton_loss(n=5, v=0) == 0


@pytest.mark.parametrize(
    ("name", "options"), [("bowl", {"n": 5}), ("bowl", {"n": 5, "renew_at": 2}), ("wide_bowl", {"n": 5})]
)
def test_the_seed_determines_everything(name, options):
    runs = [wander(make_task(name, options, seed), 4) for seed in (5, 5, 6)]
    torch.manual_seed(99)  # torch's global generator has no influence
    runs.append(wander(make_task(name, options, 5), 4))
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[3])
    assert not any(same(a, b) for a, b in zip(runs[0], runs[2], strict=True))


# ---------------------------------------------------------------- renewal and rotation


def test_a_new_bowl_begins():
    task, plain = Bowl(0, n=5, renew_at=3), Bowl(0, n=5)
    H = task.H.clone()
    for _ in range(3):
        task.draw()
        plain.draw()
        task.x.data.add_(1.0)
        assert torch.equal(task.centre, plain.centre)
        assert torch.equal(task.H, H)
    x = task.x
    task.draw()  # the fourth
    assert not torch.equal(task.H, H)
    spectra = [torch.linalg.eigvalsh(M.double()) for M in (task.H, H)]
    torch.testing.assert_close(*spectra, rtol=1e-4, atol=1e-6)
    assert task.params[0] is task.x is x
    assert not task.x.any()
    away = task.x.detach() - task.centre
    assert away.all()  # one draw has moved the minimum from the origin
    task.evaluate()
    assert torch.equal(task.x.grad, task.H @ away)
    renewed = task.H.clone()
    task.x.data.add_(1.0)
    for _ in range(5):  # it is renewed only once
        task.draw()
        assert torch.equal(task.H, renewed)
        assert (task.x == 1).all()


def test_a_new_bowl_begins_at_the_origin():
    """The centre then has the variance v of a single draw, however far it had moved before."""
    away = []
    for seed in range(300):
        task = Bowl(seed, n=2, v=4, renew_at=20)
        for _ in range(21):
            task.draw()
        away.append(task.centre.clone())
    assert abs(float(torch.stack(away).var()) / 4 - 1) < 4 * math.sqrt(2 / 600)


def test_a_rotating_bowl_turns_by_the_angle_and_keeps_its_curvatures():
    task = double_bowl(n=6, rotation=0.05)
    for _ in range(3):
        before = task.U.clone()
        task.draw()
        angles = torch.linalg.eigvals(task.U @ before.T).angle()
        assert math.isclose(float(angles.square().mean().sqrt()), 0.05, rel_tol=1e-9)
        torch.testing.assert_close(task.H, (task.U * task.D) @ task.U.T)
        torch.testing.assert_close(torch.linalg.eigvalsh(task.H), task.D)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("saved_at", [0, 4, 6])
@pytest.mark.parametrize("renew_at", [None, 3, 4, 5, 8])
@pytest.mark.parametrize("through_file", [False, True])
def test_a_bowl_resumes_bit_for_bit(renew_at, saved_at, through_file):
    """Also before, at and after a renewal; the state has everything, so the seed of the other task does not matter."""
    task, other = (Bowl(seed, n=5, renew_at=renew_at) for seed in (1, 2))
    wander(task, saved_at)
    state = through_a_file(task.state_dict()) if through_file else task.state_dict()
    other.load_state_dict(state)
    assert same(wander(task, 6), wander(other, 6))
    assert torch.equal(task.x, other.x)
    assert same(task.state_dict(), other.state_dict())


def test_a_bowl_returns_to_its_checkpoint():
    """A task that has gone past its checkpoint, and past a renewal, can return to the checkpoint."""
    task = Bowl(1, n=5, renew_at=5)
    wander(task, 3)
    state = through_a_file(task.state_dict())
    seen = wander(task, 6)
    task.load_state_dict(state)
    assert same(wander(task, 6), seen)


def test_a_rotating_bowl_resumes_bit_for_bit():
    task, other = (Bowl(1, n=5, rotation=0.1) for _ in range(2))
    wander(task, 3)
    other.load_state_dict(through_a_file(task.state_dict()))
    assert same(wander(task, 3), wander(other, 3))


@pytest.mark.parametrize(("name", "options"), [("rosenbrock", {"jitter": 0.1}), ("wide_bowl", {"n": 6})])
def test_other_surfaces_resume_bit_for_bit(name, options):
    task, other = (make_task(name, options, seed) for seed in (1, 2))
    wander(task, 3)
    other.load_state_dict(through_a_file(task.state_dict()))
    assert same(wander(task, 3), wander(other, 3))
    assert torch.equal(task.params[0], other.params[0])


def test_a_state_of_other_parameters_is_refused():
    with pytest.raises(ValueError, match="argument"):
        Bowl(0, n=5).load_state_dict({**Bowl(0, n=5).state_dict(), "params": []})


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("task", "name", "value"),
    [
        ("bowl", "n", 0),
        ("bowl", "n", 2.5),
        ("bowl", "n", True),
        ("bowl", "condition", 0.5),
        ("bowl", "condition", math.inf),
        ("bowl", "condition", "large"),
        ("bowl", "v", -1.0),
        ("bowl", "v", math.nan),
        ("bowl", "dtype", "float16"),
        ("bowl", "dtype", torch.float64),
        ("bowl", "rotation", -0.1),
        ("bowl", "rotation", math.nan),
        ("bowl", "renew_at", 0),
        ("bowl", "renew_at", 1.5),
        ("wide_bowl", "n", 0),
        ("wide_bowl", "condition", 0.5),
        ("wide_bowl", "v", -1.0),
        ("rosenbrock", "jitter", -0.1),
        ("rosenbrock", "jitter", math.nan),
        ("rosenbrock", "jitter", "some"),
    ],
)
def test_bad_options_are_named(task, name, value):
    with pytest.raises(ValueError, match=f"^{name} must be") as error:
        make_task(task, {name: value}, 0)
    assert repr(value) in str(error.value)


def test_one_dimension_cannot_rotate():
    with pytest.raises(ValueError, match=r"^n must be an integer >= 2, got 1"):
        Bowl(0, n=1, rotation=0.1)


def test_unknown_names():
    with pytest.raises(ValueError, match=r"^task must be one of 'bowl', 'wide_bowl', 'rosenbrock'.*got 'bowls'"):
        make_task("bowls", {}, 0)
    with pytest.raises(ValueError, match=r"^rosenbrock has no option 'n'. Its options: jitter$"):
        make_task("rosenbrock", {"n": 3}, 0)


def test_tasks_by_name(tmp_path):
    with using("digits"):
        for name in TASKS:
            assert type(make_task(name, {}, 0)) is find_task(name)
        assert find_task("bowl") is Bowl
    task = make_task("bowl", {"n": 7, "v": 2.0, "dtype": "float64"}, 4)
    assert (len(task.x), task.v, task.x.dtype, task.seed) == (7, 2.0, F64, 4)
    assert Bowl(0).x.dtype == torch.float32
    assert (len(Bowl(0).x), Bowl(0).v, Bowl(0).renew_at) == (100, 1.0, None)


# ---------------------------------------------------------------- sigma


def trained(steps=40, n=12, dtype="float64", **options):
    task = Bowl(0, n=n, condition=100, dtype=dtype)
    optimizer = LODO(task.params, lr=0.3, meta_lr=3e-3, beta=0.2, **options)
    for _ in range(steps):
        task.draw()
        task.evaluate()
        optimizer.step()
    return optimizer, task.H


def by_hand(optimizer, H):
    """I - G H, computed with the oracle's network."""
    G, theta = matrix(optimizer), natural(optimizer, optimizer._state(0)["theta"])
    columns = [G(theta, e) for e in torch.eye(len(H), dtype=H.dtype)]
    lr = optimizer.param_groups[0]["lr"]
    return np.eye(len(H)) - lr * torch.stack(columns, dim=1).double().numpy() @ H.double().numpy()


@pytest.mark.parametrize("family", ["mixing", "diagonal", "dense"])
def test_exact_sigma(family):
    optimizer, H = trained(preconditioner=family)
    start = LODO([Parameter(torch.zeros(len(H), dtype=F64))], lr=0.3, preconditioner=family)
    expected = np.sqrt((by_hand(optimizer, H) ** 2).sum() / len(H))
    assert math.isclose(exact_sigma(optimizer, H), expected, rel_tol=1e-10)
    assert abs(exact_sigma(optimizer, H) - exact_sigma(start, H)) > 1e-3


def test_exact_sigma_in_single_precision():
    optimizer, H = trained(dtype="float32")
    expected = np.linalg.norm(by_hand(optimizer, H)) / np.sqrt(len(H))
    assert math.isclose(exact_sigma(optimizer, H), expected, rel_tol=1e-5)


def test_estimated_sigma_is_within_its_error():
    """For a random unit u, |A u|^2 has mean tr(M) / n and variance 2 (|M|^2 - tr(M)^2 / n) / (n (n + 2)), M = A^T A."""
    optimizer, H = trained()
    n, A = len(H), by_hand(optimizer, H)
    M = A.T @ A
    mean = np.trace(M) / n
    variance = 2 * ((M**2).sum() - np.trace(M) ** 2 / n) / (n * (n + 2))
    for samples in (100, 25):
        estimates = [
            estimated_sigma(optimizer, H, torch.Generator().manual_seed(seed), *([] if samples == 100 else [samples]))
            for seed in range(40)
        ]
        scores = (np.square(estimates) - mean) / math.sqrt(variance / samples)
        assert abs(scores.mean()) < 4 / math.sqrt(40)
        assert abs(scores.std() - 1) < 4 / math.sqrt(2 * 40)
    assert abs(math.sqrt(mean) - exact_sigma(optimizer, H)) < 1e-10


@pytest.mark.parametrize("lr", [0.27, 1.5])
def test_sigma_at_the_start(lr):
    """G = lr I, so the eigenvalues of I - G H are 1 - lr D."""
    task = double_bowl(n=50)
    optimizer = LODO(task.params, lr=lr)
    expected = math.sqrt(float((1 - lr * task.D).square().mean()))
    assert math.isclose(exact_sigma(optimizer, task.H), expected, rel_tol=1e-10)
    assert math.isclose(
        estimated_sigma(optimizer, task.H, torch.Generator().manual_seed(0), 2000), expected, rel_tol=0.02
    )
    isotropic = 0.5 * torch.eye(50, dtype=F64)  # where all directions give the same value
    assert math.isclose(estimated_sigma(optimizer, isotropic, torch.Generator(), 1), abs(1 - lr / 2), rel_tol=1e-10)


def test_the_bowl_tracks_sigma(monkeypatch):
    task = Bowl(3, n=8)
    optimizer = LODO(task.params, lr=0.3)
    tracked = task.tracked(optimizer, 10)
    assert tracked.keys() == {"sigma", "sigma_exact"}
    assert tracked["sigma_exact"] == exact_sigma(optimizer, task.H)
    assert 0.5 < tracked["sigma"] / tracked["sigma_exact"] < 2
    assert task.tracked(optimizer, 10) == tracked
    assert task.tracked(optimizer, 11)["sigma"] != tracked["sigma"]
    other = Bowl(4, n=8)
    other.H = task.H
    assert other.tracked(optimizer, 10)["sigma"] != tracked["sigma"]
    assert task.tracked(torch.optim.SGD(task.params), 10) == {}
    monkeypatch.setattr(bowl, "_EXACT_UP_TO", 7)
    assert task.tracked(optimizer, 10) == {"sigma": tracked["sigma"]}
