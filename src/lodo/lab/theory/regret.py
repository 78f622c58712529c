"""Regret of LODO's scalar and diagonal families, and of OSGM, against the best fixed matrix in hindsight.

OSGM is "Gradient Methods with Online Scaling" (Gao, Chu, Ye and Udell, COLT 2025), with hypergradient feedback.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lodo import LODO
from lodo.lab.theory.base import Matrix

_VANISHED = 1e-12  # of the first gradient


@dataclass(frozen=True)
class Regret:
    """Along a run: regret against the best fixed matrix of the family in hindsight, and OSGM's bound on it.

    The loss of a matrix P at x is OSGM's, ``h(P) = (f(x - P grad) - f(x)) / |grad|^2``.
    """

    regret: np.ndarray
    bound: np.ndarray


def regret(H: Matrix, gradients: np.ndarray, thetas: np.ndarray, eta: float) -> Regret:
    """The regret of ``thetas`` (a scalar or a diagonal for each step) at these gradients of a quadratic.

    The bound is that of online gradient descent with step ``eta``, which OSGM is: ``|P_1 - P|^2 / (2 eta) + (eta / 2)
    sum |grad h|^2``. It holds for OSGM's own sequence; for another it is a mark to compare with.
    """
    wide = thetas.shape[1]
    linear, curved = np.zeros(wide), np.zeros((wide, wide))
    paid = slopes = 0.0
    regrets, bounds = [], []
    for g, theta in zip(gradients, thetas, strict=True):
        size = g @ g
        J = g[:, None] if wide == 1 else np.diag(g)  # P g = J theta
        A, c = J.T @ H @ J / size, J.T @ g / size
        linear, curved = linear + c, curved + A
        paid += float(theta @ A @ theta / 2 - c @ theta)
        slope = A @ theta - c
        slopes += float(slope @ slope)
        best = np.linalg.lstsq(curved, linear, rcond=None)[0]
        regrets.append(paid - float(best @ curved @ best / 2 - linear @ best))
        bounds.append(float((thetas[0] - best) @ (thetas[0] - best)) / (2 * eta) + eta / 2 * slopes)
    return Regret(np.array(regrets), np.array(bounds))


def osgm(H: Matrix, moves: np.ndarray, eta: float, wide: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradients and thetas of OSGM: online gradient descent on h for a scalar (``wide`` 1) or a diagonal, from zero.

    The minimum moves after every step; OSGM sees the gradient before it does. It ends where gradients vanish.
    """
    b, theta = moves[0], np.zeros(wide)
    gradients, thetas = [], []
    for move in moves[1:]:
        g = H @ b
        if np.linalg.norm(g) < _VANISHED * np.linalg.norm(H @ moves[0]):
            break
        gradients.append(g)
        thetas.append(theta)
        b = b - theta * g
        product = (H @ b) * g / (g @ g)
        theta = theta + eta * (product.sum(keepdims=True) if wide == 1 else product)
        b = b + move
    return np.array(gradients), np.array(thetas)


def lodo_run(H: Matrix, moves: np.ndarray, family: str, meta_lr: float) -> tuple[np.ndarray, np.ndarray]:
    """Gradients, and thetas times lr, of LODO with a scalar or a diagonal, lr = 1 / L and no momentum."""
    x = torch.nn.Parameter(torch.tensor(moves[0]))
    lr = 1 / float(np.linalg.eigvalsh(H)[-1])
    opt = LODO([x], lr=lr, meta_lr=meta_lr, beta=0.0, preconditioner=family, backend="reference")
    gradients, thetas = [], []
    for move in moves[1:]:
        g = H @ x.detach().numpy()
        x.grad = torch.tensor(g)
        opt.step()  # learns from this gradient, then steps
        gradients.append(g)
        thetas.append(lr * opt.state[x]["theta"].detach().numpy())
        with torch.no_grad():
            x.add_(torch.tensor(move))
    return np.array(gradients), np.array(thetas)
