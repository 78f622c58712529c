"""Base classes of the optimizers that the laboratory implements itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

Closure = Callable[[], float]


class OwnOptimizer(Optimizer):
    """Calls the closure as every torch optimizer does; a subclass defines `move`."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.move(closure)
        return loss

    @abstractmethod
    def move(self, closure: Closure | None) -> None:
        """Move the parameters, which have their gradients."""


class ElementwiseOptimizer(OwnOptimizer):
    """Moves every parameter by itself; a subclass defines `move_one`."""

    def move(self, closure: Closure | None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move_one(p, p.grad, group)

    @abstractmethod
    def move_one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        """Move one parameter, given its gradient."""


class VectorOptimizer(OwnOptimizer):
    """Treats all parameters of one group as one vector x; a subclass defines `displacement`."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        if len(self.param_groups) != 1:
            raise ValueError(
                f"params must be one group for {type(self).__name__}, which takes all parameters as one vector, "
                f"got {len(self.param_groups)} groups"
            )

    def move(self, closure: Closure | None) -> None:
        g = self.gradient()
        s = self.displacement(g)
        self.add(s)
        self.after(s, g, closure)

    @abstractmethod
    def displacement(self, g: Tensor) -> Tensor:
        """The step to take, given the gradient."""

    def after(self, s: Tensor, g: Tensor, closure: Closure | None) -> None:
        """Learn from the step ``s`` taken at gradient ``g``."""
        return

    def add(self, s: Tensor) -> None:
        """Move x by s."""
        for p, change in zip(self.params, torch.split(s, [p.numel() for p in self.params]), strict=True):
            p.add_(change.view_as(p))

    @property
    def params(self) -> list[Tensor]:
        """The parameters, in order."""
        params: list[Tensor] = self.param_groups[0]["params"]
        return params

    @property
    def memory(self) -> dict[str, Any]:
        """The state that is kept from step to step, stored under the first parameter."""
        memory: dict[str, Any] = self.state[self.params[0]]
        return memory

    def position(self) -> Tensor:
        """x, as a copy."""
        return torch.cat([p.detach().reshape(-1) for p in self.params])

    def gradient(self) -> Tensor:
        """All gradients as one vector; a missing one is zero."""
        return torch.cat(
            [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in self.params]
        )
