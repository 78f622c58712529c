"""Optimizers of other libraries that need something done around their steps or their state."""

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


class Wrapped(Optimizer):
    """Another optimizer, whose groups and state these are; a subclass changes a method or two."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner  # and no more: whatever is not found here is looked up there

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Take one step."""
        return self.inner.step() if closure is None else self.inner.step(closure)

    def state_dict(self) -> State:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        self.inner.load_state_dict(state_dict)


class Reshaped(Wrapped):
    """Shows the task's one parameter to an optimizer in another shape.

    Both share their memory, and before every step the gradient is shared too.

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


class Eager(Wrapped):
    """One of heavyball, which would otherwise compile every operation at its first use.

    Its switch is a variable of the module, so it is set for the step alone. Its state carries its schedule as a pickle,
    which is left out: the constructor makes the same, and a checkpoint is never unpickled as code. It has numbers in
    double precision, which torch would cast to the parameter's on loading, so uncast copies are put in place.
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


class ShampooState(Wrapped):
    """pytorch_optimizer's ScalableShampoo, whose state has objects that no checkpoint may hold.

    Their tensors are saved alone, and put into new objects.
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
        """Let the library make a fresh state for each parameter that had one."""
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
        return {k: v for k, v in vars(value).items() if _is_numbers(v)} if key in self._OBJECTS else value


def _is_numbers(value: Any) -> bool:
    """Whether it is a tensor, or a list of nothing else."""
    return isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(v, Tensor) for v in value))
