"""Tensors of equal shape, stacked, so that one batched operation serves them all.

Every parameter has a state of its own, made of tensors. The matrices of parameters that have the same shape are rows
of one larger tensor here, and the single numbers of all parameters are entries of one vector. What is under a parameter
in ``optimizer.state`` are views of those, so it can be saved and loaded as if there were no stacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lodo.engines import has_numba
from lodo.layout import real

State = dict[str, Tensor]  # of one parameter
LARGEST = 2**21  # numbers in a stack of several matrices: larger ones gain nothing from being stacked


def matrix_shape(p: Tensor) -> tuple[int, int]:
    """A parameter as a matrix: kernels as out x rest, vectors as one row, complex numbers as two real ones.

    >>> matrix_shape(torch.zeros(8, 3, 5, 5)), matrix_shape(torch.zeros(7)), matrix_shape(torch.zeros(2, 3).cfloat())
    ((8, 75), (1, 7), (2, 6))
    """
    p = real(p)
    rows = p.shape[0] if p.dim() > 1 else 1
    return rows, p.numel() // max(rows, 1)


def state_dtype(p: Tensor) -> torch.dtype:
    """The dtype in which a parameter's state is computed: float64 in double precision, else float32.

    >>> state_dtype(torch.zeros(1, dtype=torch.bfloat16)), state_dtype(torch.zeros(1, dtype=torch.complex128))
    (torch.float32, torch.float64)
    """
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


class Stack:
    """Parameters of one shape and dtype, and their states.

    Args:
        params: the parameters.
        states: their states, whose matrices become rows of stacked ones.
        numbers: the numbers of all parameters of the `Bundle`.
        rows: the places of these parameters among them.
        fused: whether to use the fused passes for CPUs.
    """

    def __init__(
        self, params: Sequence[Parameter], states: Sequence[State], numbers: State, rows: slice, fused: bool
    ) -> None:
        self.params = list(params)
        self.rows = rows
        self.shape = matrix_shape(params[0])
        self.dtype = state_dtype(params[0])
        self.numbers = {name: vector[rows] for name, vector in numbers.items()}
        self.tensors = {name: _stacked(name, states) for name in states[0] if states[0][name].dim()}
        self.A, self.B = self.tensors.get("left_covariance"), self.tensors.get("right_covariance")
        self.P, self.Q = self.tensors.get("left_basis"), self.tensors.get("right_basis")
        self.M, self.V = self.tensors["exp_avg"], self.tensors.get("exp_avg_sq")
        self.U, self.S = self.tensors.get("scaled_grad"), self.tensors.get("direction")
        self.fused: Any = None
        if fused and self.V is not None:
            from lodo.engines.numba.kron import FusedStack  # here, because Numba may be missing

            self.fused = FusedStack(self.M, self.V, self.U)

    def gradient(self) -> Tensor:
        """The gradients, as a stack of matrices in the state's dtype."""
        grads = [real(p.grad) for p in self.params if p.grad is not None]
        together = grads[0][None] if len(grads) == 1 else torch.stack(grads)
        return together.to(self.dtype).reshape(len(grads), *self.shape)

    def move(self, change: Tensor, decay: float | Tensor) -> None:
        """``W = decay W + change`` for every parameter."""
        weights = [real(p) for p in self.params]
        if isinstance(decay, Tensor) or decay != 1:
            torch._foreach_mul_(weights, decay)
        torch._foreach_add_(weights, change.reshape(len(weights), *weights[0].shape).unbind())


class Bundle:
    """The parameters of a group that are on one device and have states of one dtype.

    Args:
        params: the parameters, sorted: those that can be stacked are neighbours.
        states: their states.
        backend: as for `lodo.KronLODO`.
    """

    def __init__(self, params: Sequence[Parameter], states: Sequence[State], backend: str) -> None:
        fused = backend != "reference" and params[0].device.type == "cpu" and has_numba()
        self.numbers = {name: _stacked(name, states) for name in states[0] if not states[0][name].dim()}
        self.stacks = [Stack(params[rows], states[rows], self.numbers, rows, fused) for rows in _runs(params, states)]
        sizes = [stack.shape[0] * stack.shape[1] for stack in self.stacks for _ in stack.params]
        first = self.numbers["step"]
        self.sizes = torch.tensor(sizes, dtype=first.dtype).to(first.device)
        self._seen = [(state, name, value) for state in states for name, value in state.items()]

    def holds(self) -> bool:
        """Whether the states are still the ones that were stacked: a loaded state brings tensors of its own."""
        return all(state.get(name) is value for state, name, value in self._seen)


def bundled(params: Sequence[Parameter], states: Sequence[State], backend: str) -> list[Bundle]:
    """Parameters and their states in bundles of stacks."""
    bundles: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        bundles.setdefault((p.device, state_dtype(p)), []).append(i)
    found = []
    for indices in bundles.values():
        order = sorted(indices, key=lambda i: _kind(params[i], states[i]))  # stable: equal ones keep their order
        found.append(Bundle([params[i] for i in order], [states[i] for i in order], backend))
    return found


def _kind(p: Parameter, state: State) -> tuple[Any, ...]:
    """What parameters must have in common to be stacked."""
    return tuple(p.shape), str(p.dtype), tuple(state)


def _runs(params: Sequence[Parameter], states: Sequence[State]) -> list[slice]:
    """Neighbours of one kind, as many as make a stack of at most `LARGEST` numbers."""
    runs: list[slice] = []
    kind = None
    for i, (p, state) in enumerate(zip(params, states, strict=True)):
        own = _kind(p, state)
        full = bool(runs) and (i + 1 - runs[-1].start) * p.numel() > LARGEST
        if own != kind or full:
            runs.append(slice(i, i + 1))
        else:
            runs[-1] = slice(runs[-1].start, i + 1)
        kind = own
    return runs


def _stacked(name: str, states: Sequence[State]) -> Tensor:
    """The states' tensors of one name in one tensor, of which the states get views."""
    together = torch.stack([state[name] for state in states])
    for state, row in zip(states, together.unbind(), strict=True):
        state[name] = row
    return together
