"""What every task offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer


class Task(ABC):
    """Draws a fresh batch and returns a loss on it, again and again.

    A subclass fills ``params`` and writes `loss`; `draw` if its batches differ, `buffers` if it has
    tensors beside its parameters that change. Everything random comes from ``rng``.

    Example:
        >>> class Parabola(Task):
        ...     def __init__(self, seed):
        ...         super().__init__(seed)
        ...         self.params = [Parameter(torch.ones(2))]
        ...     def loss(self):
        ...         return self.params[0].square().sum()
        >>> task = Parabola(seed=0)
        >>> task.evaluate(), task.params[0].grad
        (2.0, tensor([2., 2.]))
    """

    threads: ClassVar[int | None] = 1  # so that numbers do not depend on it; None for as many as torch uses
    dataset: ClassVar[str | None] = None  # what it reads, a key of `lodo.lab.data.LOADERS`
    keeps_weights: ClassVar[bool] = False  # whether the weights at the end of a run are worth a file
    params: list[Parameter]

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    @abstractmethod
    def loss(self) -> Tensor:
        """The loss on the current batch."""

    def draw(self) -> None:
        """Take a fresh batch."""
        return

    def evaluate(self, create_graph: bool = False) -> float:
        """The loss on the current batch; its gradient goes into the parameters' ``grad``."""
        for p in self.params:
            p.grad = None
        with torch.enable_grad():
            loss = self.loss()
            grads = torch.autograd.grad(loss, self.params, create_graph=create_graph)
        for p, g in zip(self.params, grads, strict=True):
            p.grad = g
        return float(loss.detach())

    def hessian(self) -> Tensor:
        """The Hessian of the loss on the current batch, over all parameters as one vector."""
        with torch.enable_grad():
            grads = torch.autograd.grad(self.loss(), self.params, create_graph=True)
            rows = [
                torch.autograd.grad(entry, self.params, retain_graph=True, materialize_grads=True)
                for entry in parameters_to_vector(grads)
            ]
        return torch.stack([parameters_to_vector(row) for row in rows])

    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        """Numbers worth a column in the curve, such as the position, after so many steps."""
        return {}

    def final(self) -> dict[str, float]:
        """Numbers that are measured once, at the end."""
        return {}

    def buffers(self) -> dict[str, Tensor]:
        """Tensors beside the parameters that change over time."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Where the task stands, for a checkpoint."""
        return {
            "rng": self.rng.get_state(),
            "params": [p.detach() for p in self.params],
            "buffers": self.buffers(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to where `state_dict` was taken."""
        self.rng.set_state(state["rng"])
        with torch.no_grad():
            for p, value in zip(self.params, state["params"], strict=True):
                p.copy_(value)
            for name, buffer in self.buffers().items():
                buffer.copy_(state["buffers"][name])
