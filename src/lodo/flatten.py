"""A parameter group and one flat vector: there and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lodo.distributed import local, local_gradient


def real(x: Tensor) -> Tensor:
    """What this rank holds of a tensor, if it is complex as a real one with a last dimension of 2."""
    x = local(x)
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def count(params: Sequence[Tensor]) -> int:
    """n: how many real numbers of the parameters this rank holds.

    >>> count([torch.zeros(2, 3), torch.zeros(4, dtype=torch.complex64), torch.tensor(1.0)])
    15
    """
    return sum(local(p).numel() * (2 if p.is_complex() else 1) for p in params)


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
        self._masked: Tensor | None = None
        parts = torch.split(self.vector, [shape.numel() for shape in shapes])
        self.views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def read_gradients(self, params: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Copy the gradients in, zero where there is none."""
        views = self.views
        if len(views) == 1 and (only := local_gradient(params[0])) is not None:
            views[0].copy_(real(only))  # quicker than a list of one
            return
        if False in present:
            torch._foreach_zero_([v for v, there in zip(views, present, strict=True) if not there])
            views = [v for v, there in zip(views, present, strict=True) if there]
        torch._foreach_copy_(views, [real(g) for p in params if (g := local_gradient(p)) is not None])

    def only(self, chosen: Sequence[bool]) -> Tensor:
        """The vector with zeros where a parameter is not chosen; the vector itself if all are."""
        if False not in chosen:
            return self.vector
        if self._masked is None:
            self._masked = torch.empty_like(self.vector)
        kept = [v if one else torch.zeros_like(v) for v, one in zip(self.views, chosen, strict=True)]
        return torch.cat([v.reshape(-1) for v in kept], out=self._masked)

    def move(self, params: Sequence[Tensor], moving: Sequence[bool], lr: float, weight_decay: float) -> None:
        """``x <- (1 - lr * weight_decay) x - lr * vector`` for the parameters that are moving."""
        if len(params) == 1 and not weight_decay:
            real(params[0]).add_(self.views[0], alpha=-lr)  # quicker than a list of one
            return
        xs, steps = [real(p) for p in params], self.views
        if False in moving:
            xs = [x for x, moves in zip(xs, moving, strict=True) if moves]
            steps = [v for v, moves in zip(steps, moving, strict=True) if moves]
        if weight_decay:
            torch._foreach_mul_(xs, 1 - lr * weight_decay)
        torch._foreach_add_(xs, steps, alpha=-lr)
