"""Adapters for optimizers of other libraries whose steps or state need special treatment."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lodo.lab.optimizers.base import Closure

State = dict[str, Any]


class Adapter(Optimizer):
    """Passes everything on to another optimizer; a subclass changes a method or two."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner  # nothing else: whatever is not found here is looked up in `inner`

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, as while a copy is being made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Take one step."""
        return self.inner.step() if closure is None else self.inner.step(closure)

    def state_dict(self) -> State:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        self.inner.load_state_dict(state_dict)


class Averaged(Adapter):
    """Judged at the average of its weights over the last tenth of the steps so far, as torch's AveragedModel keeps it.

    Training is not changed by it.

    Example:
        >>> x = Parameter(torch.zeros(1))
        >>> optimizer = Averaged(torch.optim.SGD([x], lr=1.0))
        >>> for _ in range(20):
        ...     x.grad = -torch.ones(1)
        ...     optimizer.step()
        >>> optimizer.eval()
        >>> round(x.item(), 2)  # behind, by less than the two steps over which it averages
        19.09
    """

    PART = 0.1  # of the steps so far

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.steps = 0
        self.average = [p.detach().clone() for p in self._params()]

    def _params(self) -> list[Tensor]:
        return [p.detach() for group in self.inner.param_groups for p in group["params"]]

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Take one step, and average."""
        loss = super().step(closure)
        self.steps += 1
        torch._foreach_lerp_(self.average, self._params(), min(1.0, 1 / (self.PART * self.steps)))
        return loss

    def eval(self) -> None:
        """Let the parameters hold the average; whoever calls it puts back what they were."""
        torch._foreach_copy_(self._params(), self.average)

    def train(self) -> None:
        """Training goes on."""

    def state_dict(self) -> State:
        return {**super().state_dict(), "average": self.average, "average_steps": self.steps}

    def load_state_dict(self, state_dict: State) -> None:
        own = ("average", "average_steps")
        super().load_state_dict({name: value for name, value in state_dict.items() if name not in own})
        torch._foreach_copy_(self.average, state_dict["average"])
        self.steps = state_dict["average_steps"]


class Reshaped(Adapter):
    """Shows the task's single parameter to an optimizer in another shape.

    Both shapes share their memory, and before every step they share the gradient.

    Example:
        >>> x = Parameter(torch.zeros(4))
        >>> optimizer = Reshaped([x], (2, 2), lambda params: torch.optim.SGD(params, lr=0.5))
        >>> x.grad = torch.ones(4)
        >>> optimizer.step()
        >>> x.tolist(), optimizer.param_groups[0]["params"][0].shape
        ([-0.5, -0.5, -0.5, -0.5], torch.Size([2, 2]))
    """

    def __init__(
        self, params: Sequence[Parameter], shape: Sequence[int], make: Callable[[list[Parameter]], Optimizer]
    ) -> None:
        if len(params) != 1:
            raise ValueError(f"view must be left out unless the task has one parameter, got {len(params)} parameters")
        (self.x,) = params
        self.seen = Parameter(self.x.detach().view(*shape))
        super().__init__(make([self.seen]))

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Take one step."""
        if closure is None:
            self._show_gradient()
            return super().step()

        def evaluate() -> float:
            loss = closure()
            self._show_gradient()
            return loss

        return super().step(evaluate)

    def _show_gradient(self) -> None:
        self.seen.grad = None if self.x.grad is None else self.x.grad.view_as(self.seen)


class Eager(Adapter):
    """An optimizer of heavyball, which would otherwise compile every operation at its first use.

    The switch for that is a variable of heavyball's module, so it is set only during a step. The state contains the
    schedule as a pickle, which is left out: the constructor makes the same schedule, and checkpoints never contain
    code. The state also has numbers in double precision, which torch would cast to the parameter's dtype on loading;
    they are replaced by copies that are not cast.
    """

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self._utils: Any = importlib.import_module("heavyball.utils")

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Take one step."""
        before, self._utils.compile_mode = self._utils.compile_mode, None
        try:
            return super().step(closure)
        finally:
            self._utils.compile_mode = before

    def state_dict(self) -> State:
        return _without_pickles(super().state_dict())

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(_without_pickles(state_dict))
        params = [p for group in self.inner.param_groups for p in group["params"]]
        for i, state in state_dict["state"].items():
            self.inner.state[params[i]] = copy.deepcopy(state)


def _without_pickles(state: State) -> State:
    return {**state, "heavyball": {k: v for k, v in state.get("heavyball", {}).items() if k != "precond_schedule"}}


class ShampooState(Adapter):
    """pytorch_optimizer's ScalableShampoo, whose state has objects that must not be in a checkpoint.

    Only their tensors are saved, and are put into new objects on loading.
    """

    _OBJECTS = ("pre_conditioner", "graft")

    def state_dict(self) -> State:
        whole = super().state_dict()
        return {**whole, "state": {i: {k: self._plain(k, v) for k, v in s.items()} for i, s in whole["state"].items()}}

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)
        plain = dict(self.inner.state)
        self.inner.state.clear()
        for group in self.inner.param_groups:
            self._make_objects(group, plain)
        for p, saved in plain.items():
            for key, value in saved.items():
                if key in self._OBJECTS:
                    vars(self.inner.state[p][key]).update(value)
                else:
                    self.inner.state[p][key] = value

    def _make_objects(self, group: State, known: Collection[Tensor]) -> None:
        """Let the library make a new state for each parameter that had one."""
        started, count = "step" in group, group.get("step")
        gradients = [p.grad for p in group["params"]]
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p in known else None
        self.inner.init_group(group)  # type: ignore[attr-defined]  # pytorch_optimizer's
        for p, gradient in zip(group["params"], gradients, strict=True):
            p.grad = gradient
        if started:
            group["step"] = count

    def _plain(self, key: str, value: Any) -> Any:
        if key not in self._OBJECTS:
            return value
        return {name: attribute for name, attribute in vars(value).items() if _has_only_tensors(attribute)}


def _has_only_tensors(value: Any) -> bool:
    """Whether it is a tensor, or a list of tensors."""
    return isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(v, Tensor) for v in value))
