"""The hypergradient is what it claims to be: the slope of the loss, and the theory's recurrence."""

import pytest
import torch

from helpers import BACKENDS, FAMILIES, natural, network, quadratic
from lodo import LODO
from lodo.engines import ReferenceEngine

DEPTH = {"mixing": "mixing(depth=3)", "residual": "residual(depth=3)"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_against_finite_differences_of_the_loss(family, backend):
    """With SGD as the meta-optimizer, theta moves by -meta_lr times the slope of the loss after the step."""
    n, lr, meta_lr = 9, 0.02, 1.0
    f, _ = quadratic(n)
    x = torch.nn.Parameter(torch.randn(n, dtype=torch.float64))
    family = DEPTH.get(family, family)
    opt = LODO([x], lr=lr, meta_lr=meta_lr, beta=0.6, preconditioner=family, meta_optimizer="sgd", backend=backend)

    def step():
        opt.zero_grad()
        f(x).backward()
        opt.step()

    step()
    step()
    before = x.detach() + opt.precondition(opt._state(0)["momentum"])  # where the last step started
    state = opt._state(0)
    theta, m = natural(opt, state["theta"]).clone(), state["momentum"].clone()
    engine = network(opt).engine
    plain = ReferenceEngine(engine.family, engine.layout, network(opt).draw_permutations(engine.family, engine.layout))
    step()
    hypergradient = (theta - natural(opt, state["theta"])) / meta_lr

    def loss_after_step(theta):
        return float(f(before - lr * plain.apply(theta, m)))

    flat = theta.reshape(-1)
    live = hypergradient.reshape(-1).nonzero()[:, 0]
    assert len(live) > 0
    for j in live[torch.randperm(len(live))[:25]]:
        bump = torch.zeros_like(flat)
        bump[j] = 1e-4
        up, down = loss_after_step((flat + bump).view_as(theta)), loss_after_step((flat - bump).view_as(theta))
        assert float(hypergradient.reshape(-1)[j]) == pytest.approx((up - down) / 2e-4, rel=1e-5, abs=1e-9)


def test_dense_sgd_follows_equations_5_and_6():
    """A_{t+1} = A_t - alpha H b_{t+1} b_t^T H^2 and b_{t+1} = A_t b_t - s_t on the noisy quadratic."""
    n, alpha = 8, 0.01
    _, H = quadratic(n)
    x = torch.nn.Parameter(torch.zeros(n, dtype=torch.float64))
    opt = LODO([x], lr=1.0, meta_lr=alpha, beta=0.0, preconditioner="dense", meta_optimizer="sgd")
    eye = torch.eye(n, dtype=torch.float64)
    centre = torch.randn(n, dtype=torch.float64)

    A, b = eye - opt.preconditioner_matrix() @ H, x.detach() - centre
    last = torch.zeros_like(b)  # the first call only steps: nothing to learn from
    for _ in range(50):
        x.grad = H @ (x.detach() - centre)
        opt.step()
        A = A - alpha * H @ torch.outer(b, last) @ H @ H
        assert torch.allclose(eye - opt.preconditioner_matrix() @ H, A, atol=1e-13, rtol=0)
        s = torch.randn(n, dtype=torch.float64)
        centre += s
        last, b = b, A @ b - s
        assert torch.allclose(x.detach() - centre, b, atol=1e-13, rtol=0)
