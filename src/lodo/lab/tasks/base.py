"""What every task offers, and how a function becomes a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

Loss = Callable[[], Tensor]
Measure = Callable[[], Mapping[str, float]]
Problem = tuple[Loss, Iterable[Parameter]] | tuple[Loss, Iterable[Parameter], Measure]


class Task(ABC):
    """Draws a fresh batch and returns a loss on it, again and again.

    A subclass fills ``params`` and defines `loss`; it defines `draw` if its batches differ, and `buffers` if it has
    tensors other than its parameters that change. Everything random comes from ``rng``.

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

    threads: ClassVar[int | None] = 1  # one, so that results do not depend on the number; None for torch's own number
    dataset: ClassVar[str | None] = None  # the data set that it reads, a key of `lodo.lab.data.LOADERS`
    keeps_weights: ClassVar[bool] = False  # whether a run writes its final weights to a file
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
        """Numbers to record in the curve, such as the position, after ``step`` steps."""
        return {}

    def final(self) -> dict[str, float]:
        """Numbers that are measured once, at the end of a run."""
        return {}

    def buffers(self) -> dict[str, Tensor]:
        """Tensors other than the parameters that change over time, for checkpoints."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state of the task, for a checkpoint."""
        return {
            "rng": self.rng.get_state(),
            "params": [p.detach() for p in self.params],
            "buffers": self.buffers(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Return to a state that `state_dict` gave."""
        self.rng.set_state(state["rng"])
        with torch.no_grad():
            for p, value in zip(self.params, state["params"], strict=True):
                p.copy_(value)
            for name, buffer in self.buffers().items():
                buffer.copy_(state["buffers"][name])


def as_task(name: str, found: Any) -> type[Task]:
    """A subclass of `Task` as it is, and any other function turned into one."""
    if isinstance(found, type) and issubclass(found, Task):
        return found
    if isinstance(found, type) or not callable(found):
        raise ValueError(f"task must be a subclass of Task or a function, got {found!r} for {name!r}")
    return task_from_function(found)


def task_from_function(make: Callable[[], Problem], number_of_threads: int = 1) -> type[Task]:
    """A task from a function that returns a loss, the parameters and, optionally, a function that measures.

    >>> def parabola():
    ...     x = Parameter(torch.ones(2))
    ...     return lambda: x.square().sum(), [x]
    >>> task_from_function(parabola)(seed=0).evaluate()
    2.0
    """

    class FunctionTask(Task):
        """What the function returns, as a task."""

        threads = number_of_threads

        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            problem = make()
            if not isinstance(problem, tuple) or len(problem) not in (2, 3):
                raise ValueError(
                    f"task must return a function for the loss, the parameters and, optionally, a function that "
                    f"measures, got {problem!r}"
                )
            self._loss, params = problem[0], problem[1]
            self._measure: Measure = problem[2] if len(problem) == 3 else dict
            self.params = list(params)
            self._batch, self._after = torch.get_rng_state(), torch.get_rng_state()

        def buffers(self) -> dict[str, Tensor]:
            return {"after": self._after}

        def draw(self) -> None:
            self._batch = self._after.clone()

        def loss(self) -> Tensor:
            outside = torch.get_rng_state()  # an optimizer may draw numbers too: they have no part in the batches
            torch.set_rng_state(self._batch)  # so that a second evaluation uses the same batch
            loss = self._loss()
            self._after.copy_(torch.get_rng_state())
            torch.set_rng_state(outside)
            return loss

        def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
            before = torch.get_rng_state()
            measured = {name: float(value) for name, value in self._measure().items()}
            torch.set_rng_state(before)
            return measured

    return FunctionTask
