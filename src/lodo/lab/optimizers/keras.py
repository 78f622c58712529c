"""The paper's first-order optimizers, with the conventions of Keras, which the paper's numbers come from.

A library's implementation is used where it matches or can be made to match; `tests/lab/test_optimizers.py` compares
each with its formula. Below, g is the gradient and every state starts at zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import ParamsT

from lodo._checks import check_real
from lodo.lab.optimizers.base import ElementwiseOptimizer

_LONG_AGO = 2**53  # a step count t at which 1 - beta^t is 1: no bias correction


def adam(params: ParamsT, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-7) -> Optimizer:
    """torch's Adam. Keras adds epsilon before the bias correction and torch after it, which hardly matters at 1e-7."""
    return Adam(params, lr=lr, betas=(beta1, beta2), eps=eps)


def momentum(params: ParamsT, lr: float = 1e-2, beta: float = 0.9) -> Optimizer:
    """``m = beta m - lr g; x += m``, which is torch's SGD with ``m / -lr`` as its buffer."""
    return SGD(params, lr=lr, momentum=beta)


def yogi(params: ParamsT, lr: float = 1e-2, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-3) -> Optimizer:
    """``m = beta1 m + (1-beta1) g; v += (1-beta2) sign(g^2-v) g^2; x -= lr m / (sqrt(v) + eps)``.

    The library corrects the bias of both averages, Keras that of neither: the step count starts so high that the
    correction is 1.
    """
    import pytorch_optimizer  # takes a second

    return pytorch_optimizer.Yogi(params, lr=lr, betas=(beta1, beta2), initial_accumulator=0.0, eps=eps, step=_LONG_AGO)


def lars(params: ParamsT, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.0) -> Optimizer:
    """``g = (g + weight_decay x) 0.001 |x| / (|g| + weight_decay |x|); m = beta m + g; x -= lr m``.

    The library's trust coefficient is 0.001; vectors take plain momentum steps without decay.
    """
    import pytorch_optimizer  # takes a second

    return pytorch_optimizer.LARS(params, lr=lr, momentum=beta, weight_decay=weight_decay)


class RMSprop(ElementwiseOptimizer):
    """``v = rho v + (1-rho) g^2; m = beta m + lr g / sqrt(v + eps); x -= m``.

    torch's RMSprop adds epsilon outside the root, which makes a difference where gradients are small.

    Example:
        >>> x = torch.nn.Parameter(torch.tensor([1.0]))
        >>> x.grad = torch.tensor([2.0])
        >>> RMSprop([x], lr=0.1, rho=0.75).step()
        >>> x
        Parameter containing:
        tensor([0.8000], requires_grad=True)
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, rho: float = 0.9, beta: float = 0.0, eps: float = 1e-7
    ) -> None:
        check_real("lr", lr, low=0.0)
        check_real("rho", rho, low=0.0, high=1.0)
        check_real("beta", beta, low=0.0, high=1.0)
        check_real("eps", eps, low=0.0)
        super().__init__(params, {"lr": lr, "rho": rho, "beta": beta, "eps": eps})

    def move_one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["v"], state["m"] = torch.zeros_like(p), torch.zeros_like(p)
        state["v"].mul_(group["rho"]).addcmul_(g, g, value=1 - group["rho"])
        state["m"].mul_(group["beta"]).addcdiv_(g, (state["v"] + group["eps"]).sqrt_(), value=group["lr"])
        p.sub_(state["m"])
