"""A parameter group and one flat vector: there and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def real(x: Tensor) -> Tensor:
    """A complex tensor as a real one with a last dimension of 2; anything else as it is."""
    return torch.view_as_real(x) if x.is_complex() else x


def count(params: Sequence[Tensor]) -> int:
    """n: how many real numbers the parameters hold.

    >>> count([torch.zeros(2, 3), torch.zeros(4, dtype=torch.complex64), torch.tensor(1.0)])
    15
    """
    return sum(p.numel() * (2 if p.is_complex() else 1) for p in params)


def compute_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """float64 if any parameter has that precision, float32 for all others.

    >>> compute_dtype([torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)])
    torch.float32
    """
    double = {torch.float64, torch.complex128}
    return torch.float64 if any(p.dtype in double for p in params) else torch.float32


class Flat:
    """A flat vector with one view of each parameter's shape.

    >>> flat = Flat([torch.zeros(2, 2), torch.tensor(0.0)])
    >>> flat.views[1].fill_(7)
    tensor(7.)
    >>> flat.vector
    tensor([0., 0., 0., 0., 7.])
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        shapes = [real(p.detach()).shape for p in params]
        dtype, device = compute_dtype(params), params[0].device
        self.vector = torch.zeros(count(params), dtype=dtype, device=device)
        parts = self.vector.split([shape.numel() for shape in shapes])
        self.views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def read_gradients(self, params: Sequence[Tensor]) -> list[bool]:
        """Copy the gradients in, zero where there is none; tell which parameters have one."""
        present = [p.grad is not None for p in params]
        grads = [real(p.grad) for p in params if p.grad is not None]
        if len(grads) < len(present):
            torch._foreach_zero_([v for v, there in zip(self.views, present, strict=True) if not there])
        if grads:
            views = [v for v, there in zip(self.views, present, strict=True) if there]
            torch._foreach_copy_(views, grads)
        return present

    def only(self, chosen: Sequence[bool]) -> Tensor:
        """The vector with zeros where a parameter is not chosen; the vector itself if all are."""
        if all(chosen):
            return self.vector
        mask = torch.zeros_like(self.vector)
        for view, v, one in zip(mask.split([v.numel() for v in self.views]), self.views, chosen, strict=True):
            if one:
                view.copy_(v.reshape(-1))
        return mask

    def move(self, params: Sequence[Tensor], moving: Sequence[bool], lr: float, weight_decay: float) -> None:
        """``x <- (1 - lr * weight_decay) x - lr * vector`` for the parameters that are moving."""
        xs = [real(p) for p, moves in zip(params, moving, strict=True) if moves]
        steps = [v for v, moves in zip(self.views, moving, strict=True) if moves]
        if weight_decay:
            torch._foreach_mul_(xs, 1 - lr * weight_decay)
        torch._foreach_add_(xs, steps, alpha=-lr)
