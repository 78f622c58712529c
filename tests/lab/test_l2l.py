"""L2LBGDBGD: its equations, its state, its training."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch

from lodo.lab.optimizers.l2l import HIDDEN, L2L, Net, bowls, losses, preprocess, restore, tracking_error, train

SHAPES = [(), (1,), (3, 1, 4), (0, 2), (7,)]
TINY = {"episodes": 30, "n": 5, "batch": 2, "check_every": 10, "check_steps": 100}


@pytest.fixture
def weights():
    state = Net(torch.Generator().manual_seed(3)).state_dict()
    return {name: 5 * w for name, w in state.items()}  # far from the linear regime


def parameters(shapes, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in shapes]


def gradients(params, steps, seed=1):
    """Over many orders of magnitude, on both sides of exp(-10)."""
    rng = torch.Generator().manual_seed(seed)

    def draw(p):
        size = torch.rand(p.shape, generator=rng) * 20 - 15
        return (torch.randn(p.shape, generator=rng).sign() * size.exp()).to(p.dtype)

    return [[draw(p) for p in params] for _ in range(steps)]


def play(opt, params, steps):
    for grads in steps:
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        opt.step()


# ---------------------------------------------------------------- the equations


def features(g):
    if abs(g) >= math.exp(-10):
        return [math.log(abs(g)) / 10, math.copysign(1, g)]
    return [-1.0, math.exp(10) * g]


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def lstm_by_hand(W, b, x, h, c):
    """Scalar by scalar; rows of W are the input, forget and output gates and the candidate."""
    z = [sum(w * y for w, y in zip(row, x + h, strict=True)) + bias for row, (bias,) in zip(W, b, strict=True)]
    for j in range(20):
        c[j] = sigmoid(z[20 + j]) * c[j] + sigmoid(z[j]) * math.tanh(z[60 + j])
        h[j] = sigmoid(z[40 + j]) * math.tanh(c[j])


def test_steps_are_the_papers_equations(weights):
    (x,) = parameters([(4,)], torch.float64)
    expected = x.tolist()
    steps = gradients([x], 3)
    steps[1][0][0] = 0.0
    play(L2L([x], weights), [x], steps)
    W = {name: w.double().tolist() for name, w in weights.items()}
    for k in range(4):
        h1, c1, h2, c2 = ([0.0] * 20 for _ in range(4))
        for (g,) in steps:
            lstm_by_hand(W["W1"], W["b1"], features(float(g[k])), h1, c1)
            lstm_by_hand(W["W2"], W["b2"], h1, h2, c2)
            expected[k] += 0.1 * (sum(w * h for w, h in zip(W["w"][0], h2, strict=True)) + W["b"][0][0])
    assert x.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_layer_is_torchs_lstm(weights):
    """torch orders its gates input, forget, candidate, output, and has two biases."""
    net = restore(weights)
    cell = torch.nn.LSTMCell(2, HIDDEN)
    ours = (0, 1, 3, 2)
    W = torch.cat([net.W1.detach().chunk(4)[k] for k in ours])
    b = torch.cat([net.b1.detach().chunk(4)[k] for k in ours]).squeeze(1)
    cell.load_state_dict({"weight_ih": W[:, :2], "weight_hh": W[:, 2:], "bias_ih": b, "bias_hh": torch.zeros_like(b)})
    g, memory = torch.randn(6), tuple(torch.randn(HIDDEN, 6) for _ in range(4))
    _, (h1, c1, _, _) = net(g, memory)
    h, c = cell(preprocess(g).T, (memory[0].T, memory[1].T))
    torch.testing.assert_close(h1.T, h)
    torch.testing.assert_close(c1.T, c)


def test_preprocessing_is_continuous_and_finite():
    edge = math.exp(-10)
    g = torch.tensor([edge * (1 - 1e-9), edge * (1 + 1e-9), -edge, 0.0, 1e-300], dtype=torch.float64)
    expected = torch.tensor([features(float(x)) for x in g], dtype=torch.float64).T
    torch.testing.assert_close(preprocess(g), expected)


# ---------------------------------------------------------------- the optimizer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_resume_is_bit_for_bit(weights, dtype):
    a = parameters(SHAPES, dtype)
    opt = L2L(a, weights)
    play(opt, a, gradients(a, 5))
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    b = copy.deepcopy(a)
    resumed = L2L(b, weights)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    after = gradients(a, 5, seed=2)
    play(opt, a, after)
    play(resumed, b, after)
    assert all(map(torch.equal, a, b))
    assert all(s.dtype == dtype for state in resumed.state.values() for s in state.values())


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_continue_alike(weights, how):
    a = parameters(SHAPES)
    opt = L2L(a, weights)
    play(opt, a, gradients(a, 3))
    b, twin = how((a, opt))
    after = gradients(a, 3, seed=2)
    play(opt, a, after)
    play(twin, b, after)
    assert all(map(torch.equal, a, b))


def test_coordinates_do_not_see_each_other(weights):
    many = parameters(SHAPES, torch.float64)
    flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in many]))
    steps = gradients(many, 6)
    play(L2L([{"params": many[:2]}, {"params": many[2:]}], weights), many, steps)
    play(L2L([flat], weights), [flat], [[torch.cat([g.flatten() for g in grads])] for grads in steps])
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in many]), flat.detach(), rtol=1e-12, atol=0)


def test_layout_does_not_matter(weights):
    a = torch.nn.Parameter(torch.randn(4, 3))
    b = torch.nn.Parameter(a.detach().clone(memory_format=torch.contiguous_format).T.contiguous().T)
    g = torch.randn(3, 4).T
    play(L2L([a], weights), [a], [[g.contiguous()]])
    play(L2L([b], weights), [b], [[g]])
    assert torch.equal(a, b)


def test_a_parameter_without_gradient_waits(weights):
    a, b = parameters([(2,), (3,)])
    opt, before = L2L([a, b], weights), b.detach().clone()
    a.grad = torch.ones(2)
    opt.step()
    assert torch.equal(b, before)
    assert b not in opt.state
    assert set(opt.state[a]) == {"h1", "c1", "h2", "c2"}


def test_the_closure_comes_first_and_records_gradients(weights):
    a, b = parameters([(3,)]), parameters([(3,)])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = a[0].square().sum()
        loss.backward()
        return loss

    expected = b[0].detach().square().sum()
    opt = L2L(a, weights)
    assert torch.equal(opt.step(closure).detach(), expected)
    play(L2L(b, weights), b, [[2 * b[0].detach()]])
    assert calls == [True]
    assert torch.equal(a[0], b[0])
    assert not any(s.requires_grad for s in opt.state[a[0]].values())


def test_the_weights_are_copied(weights):
    a, b = parameters([(3,)]), parameters([(3,)])
    opt = L2L(a, weights)
    play(L2L(b, weights), b, [[torch.ones(3)]])
    for w in weights.values():
        w.zero_()
    play(opt, a, [[torch.ones(3)]])
    assert torch.equal(a[0], b[0])


# ---------------------------------------------------------------- training


def test_bowls_have_the_papers_curvatures():
    H = bowls(2, 100, torch.Generator().manual_seed(0)).double()
    D = torch.logspace(-3, 0, 100, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.eigvalsh(H), D.expand(2, 100), rtol=0, atol=1e-6)
    assert not torch.allclose(H[0], H[1])


def test_the_tracking_error_is_what_the_optimizer_reaches(weights):
    """Training and use agree: the same bowl, step by step, through the optimizer."""
    rng = torch.Generator().manual_seed(4)
    H = bowls(1, 6, rng)
    trained = tracking_error(restore(weights), H, 2.0, 10, rng.clone_state())
    x, centre, curve = torch.nn.Parameter(torch.zeros(6)), torch.zeros(6), []
    opt = L2L([x], weights)
    for _ in range(11):
        centre = centre + 2.0**0.5 * torch.randn(1, 6, generator=rng)[0]
        away = x.detach() - centre
        x.grad = H[0] @ away
        curve.append(0.5 * float(away @ x.grad))
        opt.step()
    assert trained == pytest.approx(sum(curve[-5:]) / 5, rel=1e-5)  # the first loss comes before any step


def test_the_meta_gradient_drops_second_derivatives(weights):
    """Within an unroll it is the sum of dloss/dx through the steps alone, whose inputs are constants."""
    H, net = bowls(1, 4, torch.Generator().manual_seed(0)), restore(weights)
    first, second = losses(net, H, 1.0, 2, 4, torch.Generator().manual_seed(1))
    ours = torch.autograd.grad(second, list(net.parameters()))

    rng = torch.Generator().manual_seed(1)
    x, centre, memory, slopes, read, start = torch.zeros(4), torch.zeros(4), net.blank(4), [], [], []
    with torch.no_grad():
        for _ in range(5):
            centre = centre + torch.randn(1, 4, generator=rng)[0]
            slopes.append(H[0] @ (x - centre))
            read.append(slopes[-1])
            start.append(memory)
            step, memory = net(slopes[-1], memory)
            x = x + step
    one, memory = net(read[2], start[2])
    two, _ = net(read[3], memory)
    surrogate = (one @ (slopes[3] + slopes[4]) + two @ slopes[4]) / 2
    for a, b in zip(ours, torch.autograd.grad(surrogate, list(net.parameters())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert first.requires_grad


@pytest.mark.slow
def test_training_depends_on_its_seed_alone():
    settings = {**TINY, "episodes": 4, "check_every": 2}
    before = torch.get_rng_state()
    a = train(seed=1, **settings)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    with torch.no_grad():
        b = train(seed=1, **settings)
    c = train(seed=2, **settings)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a)
    assert not any(w.requires_grad for w in a.values())


@pytest.mark.slow
def test_training_learns_to_track():
    done = []
    trained = train(**TINY, on_progress=done.append)
    assert done == list(range(1, 31))
    rng = torch.Generator().manual_seed(1234)
    H = bowls(4, 5, rng)
    untrained = Net(torch.Generator().manual_seed(0))
    errors = [tracking_error(net, H, 1.0, 200, rng.clone_state()) for net in (untrained, restore(trained))]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1), ("episodes", 0), ("lr", 0.0), ("lr", math.nan), ("unroll", 0), ("length", 0), ("length", 30),
        ("n", 2.5), ("v", -1.0), ("batch", 0), ("check_every", 0), ("check_steps", True),
    ],
)  # fmt: skip
def test_bad_settings_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*got {value!r}"):
        train(**{**TINY, name: value})


@pytest.mark.slow
def test_a_training_that_diverges_says_so():
    with pytest.raises(FloatingPointError, match=r"lr = 1e\+30"):
        train(**{**TINY, "episodes": 2, "lr": 1e30})


@pytest.mark.parametrize("bad", [None, {}, {"w": torch.zeros(3)}, {"w": 1.0}, 3.0])
def test_bad_weights_are_named(bad):
    with pytest.raises(ValueError, match=r"^net_state must .*W1.*\(80, 22\).*got "):
        L2L(parameters([(2,)]), bad)


def test_weights_of_another_size_are_refused(weights):
    with pytest.raises(ValueError, match=r"^net_state must .*got .*\(80, 23\)"):
        L2L(parameters([(2,)]), {**weights, "W1": torch.zeros(80, 23)})
