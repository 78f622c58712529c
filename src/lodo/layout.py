"""The parameters of a group and one flat vector: there and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from lodo.distributed import Shard, local, local_gradient, shard_of
from lodo.scalars import Scalar


def real(x: Tensor) -> Tensor:
    """What this rank holds of a tensor; a complex tensor becomes a real one with a last dimension of 2."""
    x = local(x)
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


@dataclass(frozen=True)
class Layout:
    """What a group's flat vector x consists of on this rank.

    Args:
        shapes: the shapes of the parameters, of which each complex number counts as two real ones.
        dtype: the precision of the vector: float64 if any parameter has it, else float32.
        device: where the parameters are.
        shard: which part of its parameters this rank holds.

    Example:
        >>> layout = Layout.of([torch.zeros(2, 3), torch.zeros(4, dtype=torch.complex64), torch.tensor(1.0)])
        >>> layout.n, layout.shapes
        (15, ((2, 3), (4, 2), ()))
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")  # noqa: RUF009  # immutable
    shard: Shard = Shard()  # noqa: RUF009  # immutable

    @classmethod
    def of(cls, params: Sequence[Tensor]) -> Layout:
        """The layout of these parameters."""
        shapes = tuple(tuple(real(p.detach()).shape) for p in params)
        double = any(p.dtype in (torch.float64, torch.complex128) for p in params)
        device = params[0].device if params else torch.device("cpu")
        shard = shard_of(params[0]) if params else Shard()
        return cls(shapes, torch.float64 if double else torch.float32, device, shard)

    @classmethod
    def flat(
        cls, n: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", shard: Shard | None = None
    ) -> Layout:
        """The layout of one parameter of ``n`` numbers.

        >>> Layout.flat(7).n
        7
        """
        return cls(((n,),), dtype, torch.device(device), shard or Shard())

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """How many numbers each parameter has."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def n(self) -> int:
        """The length of the vector."""
        return sum(self.numels)

    def split(self, vector: Tensor) -> list[Tensor]:
        """One view of the vector for each parameter, in the parameter's shape.

        >>> Layout.of([torch.zeros(2, 2), torch.tensor(0.0)]).split(torch.arange(5.0))[1]
        tensor(4.)
        """
        parts = torch.split(vector, list(self.numels))
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class Flat:
    """A flat vector with one view of each parameter's shape.

    >>> flat = Flat(Layout.of([torch.zeros(2, 2), torch.tensor(0.0)]))
    >>> flat.views[1].fill_(7)
    tensor(7.)
    >>> flat.vector
    tensor([0., 0., 0., 0., 7.])
    """

    def __init__(self, layout: Layout) -> None:
        self.vector = torch.zeros(layout.n, dtype=layout.dtype, device=layout.device)
        self._masked: Tensor | None = None
        self.views = layout.split(self.vector)

    def read_gradients(self, params: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Copy the gradients in, and zeros where there is none."""
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

    def weighted(self, flags: Tensor) -> Tensor:
        """As `only`, for truth values on the device."""
        parts = [v.reshape(-1) * flag for v, flag in zip(self.views, flags.unbind(), strict=True)]
        return torch.cat(parts)

    def move(self, params: Sequence[Tensor], moving: Sequence[bool], lr: Scalar, weight_decay: float) -> None:
        """``x <- (1 - lr * weight_decay) x - lr * vector`` for the parameters that are moving."""
        if isinstance(lr, Tensor):
            self._move_on_device(params, moving, lr, weight_decay)
            return
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

    def lands(
        self, params: Sequence[Tensor], moving: Sequence[bool], vector: Tensor, lr: Scalar, weight_decay: float
    ) -> bool:
        """Whether a move by another vector would leave all parameters finite."""
        parts = torch.split(vector, [view.numel() for view in self.views])
        for p, moves, view, part in zip(params, moving, self.views, parts, strict=True):
            if moves:
                x = real(p).detach()
                after = (x * (1 - lr * weight_decay)).add_(part.view(view.shape), alpha=-float(lr))
                if not bool(torch.isfinite(after).all()):
                    return False
        return True

    def _move_on_device(self, params: Sequence[Tensor], moving: Sequence[bool], lr: Tensor, decay: float) -> None:
        """As `move`, for an lr that is a number on the device."""
        xs = [real(p) for p, moves in zip(params, moving, strict=True) if moves]
        steps = [v for v, moves in zip(self.views, moving, strict=True) if moves]
        if decay:
            torch._foreach_mul_(xs, 1 - lr * decay)
        torch._foreach_sub_(xs, torch._foreach_mul(steps, lr.to(self.vector.dtype)))
