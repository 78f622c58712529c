"""Tensors of equal shape, stacked, so that one batched operation serves them all.

Every parameter has a state of its own, made of tensors. The matrices of parameters that have the same shape are rows
of one larger tensor here, and those of stacks lie one after the other, so that a pass over all weights is one loop. The
single numbers of all parameters are entries of one vector. What is under a parameter in ``optimizer.state`` are views
of those, so it can be saved and loaded as if there were no stacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.nn import Parameter

from lodo.distributed import local_gradient
from lodo.engines import has_numba
from lodo.layout import real

State = dict[str, Tensor]  # of one parameter
LARGEST = 2**21  # numbers in a stack of several matrices: larger ones gain nothing from being stacked
ALIGNED = 16  # numbers: matrices begin at multiples of it, because the rounding of products may depend on that
FLAT = ("exp_avg", "exp_avg_sq", "scaled_grad", "direction")  # what has one number for each weight


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


def are_real(params: Sequence[Parameter]) -> bool:
    """Whether parameters can be used as they are: they are real, and whole on this rank."""
    return all(type(p) is Parameter and not p.is_complex() for p in params)


class Stack:
    """Parameters of one shape and dtype, and their states.

    Args:
        params: the parameters.
        states: their states, whose bases and covariances become rows of stacked ones.
        flat: the other matrices of these states, by name, one after the other.
        numbers: the numbers of all parameters of the `Bundle`.
        rows: the places of these parameters among them.
    """

    def __init__(
        self, params: Sequence[Parameter], states: Sequence[State], flat: State, numbers: State, rows: slice
    ) -> None:
        self.params = list(params)
        self._real = are_real(params)
        self.rows = rows
        self.shape = matrix_shape(params[0])
        self.dtype = state_dtype(params[0])
        self.numbers = {name: vector[rows] for name, vector in numbers.items()}
        matrices = [name for name, x in _tensors(states[0]).items() if x.dim() and name not in flat]
        tensors = {name: _stacked(name, states) for name in matrices}
        tensors |= {name: x.view(len(params), *self.shape) for name, x in flat.items()}
        self.A, self.B = tensors.get("left_covariance"), tensors.get("right_covariance")
        self.P, self.Q = tensors.get("left_basis"), tensors.get("right_basis")
        self.M, self.V = tensors["exp_avg"], tensors.get("exp_avg_sq")
        self.U, self.S = tensors.get("scaled_grad"), tensors.get("direction")
        bases = [X for X in (self.P, self.Q) if X is not None]
        self.has_bases, self._whole = bool(bases), all(X.dtype == self.dtype for X in bases)

    def bases(self) -> tuple[Tensor | None, Tensor | None]:
        """P and Q in the dtype in which the step is computed."""
        if self._whole:
            return self.P, self.Q
        return None if self.P is None else self.P.to(self.dtype), None if self.Q is None else self.Q.to(self.dtype)

    def weights(self) -> list[Tensor]:
        """The parameters as real tensors."""
        return list(self.params) if self._real else list(map(real, self.params))

    def matrices(self) -> list[Tensor] | None:
        """The parameters as matrices that share their memory; None unless all can be, and have the state's dtype."""
        fits = self._real and all(W.dtype == self.dtype and W.is_contiguous() for W in self.params)
        return [W.view(self.shape) for W in self.params] if fits else None


class Part:
    """Neighbouring stacks. What they have for every number of a weight is in one flat tensor each, for fused passes.

    Args:
        params: the parameters.
        states: their states, of which ``flat`` names what becomes flat.
        flat: those names.
        runs: the places of the stacks among the parameters of the `Bundle`.
        numbers: the numbers of all parameters of the `Bundle`.
        fused: whether to use the fused passes for CPUs.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        states: Sequence[State],
        flat: Sequence[str],
        runs: Sequence[slice],
        numbers: State,
        fused: bool,
    ) -> None:
        self.rows = rows = slice(runs[0].start, runs[-1].stop)
        self.params = list(params[rows])
        self._real = are_real(self.params)
        sizes = [real(p).numel() for p in self.params]
        self.flat = tensors = {name: _flattened(name, states[rows], sizes) for name in flat}
        self.lengths = [sum(sizes[run.start - rows.start : run.stop - rows.start]) for run in runs]
        pieces = {name: torch.split_with_sizes(x, self.lengths) for name, x in tensors.items()}
        self.stacks = [
            Stack(params[run], states[run], {name: xs[i] for name, xs in pieces.items()}, numbers, run)
            for i, run in enumerate(runs)
        ]
        self.turned = sum(n for n, stack in zip(self.lengths, self.stacks, strict=True) if stack.has_bases)
        self.dtype = self.stacks[0].dtype
        self.fused: Any = None
        if fused and "exp_avg_sq" in tensors:
            from lodo.engines.numba.kron import FusedPasses  # here, because Numba may be missing

            M, V, U = tensors["exp_avg"], tensors["exp_avg_sq"], tensors.get("scaled_grad")
            self.fused = FusedPasses(M, V, U, sizes, rows.start, self.dtype)

    def gradients(self) -> Tensor:
        """All gradients, flat, in the state's dtype. This may be a gradient itself, and must not be changed."""
        if not self._real:  # a copy even of a single one: FSDP2's begin anywhere in its buffers (see `ALIGNED`)
            grads = [local_gradient(p) for p in self.params]
            return torch.cat([real(g).reshape(-1) for g in grads if g is not None]).to(self.dtype)
        flat: Tensor = _flatten_dense_tensors([p.grad for p in self.params if p.grad is not None])  # type: ignore[no-untyped-call]
        return flat.to(self.dtype)

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor as stacks of matrices."""
        pieces = torch.split_with_sizes(flat, self.lengths)
        return [x.view(stack.M.shape) for stack, x in zip(self.stacks, pieces, strict=True)]


class Bundle:
    """The parameters of a group that are on one device and have states of one dtype.

    Args:
        params: the parameters, sorted: those that can be stacked are neighbours.
        states: their states.
        backend: as for `lodo.KronLODO`.
    """

    def __init__(self, params: Sequence[Parameter], states: Sequence[State], backend: str) -> None:
        fused = backend != "reference" and params[0].device.type == "cpu" and has_numba()
        self.numbers = {name: _stacked(name, states) for name, x in _tensors(states[0]).items() if not x.dim()}
        self.parts = [Part(params, states, flat, runs, self.numbers, fused) for flat, runs in _parts(params, states)]
        sizes = [real(p).numel() for p in params]
        first = self.numbers["step"]
        self.numbers["size"] = torch.tensor(sizes, dtype=first.dtype, device=first.device)  # a constant, in no state
        self.fused: Any = None
        if fused:
            from lodo.engines.numba.kron import FusedNumbers  # here, because Numba may be missing

            self.fused = FusedNumbers(self.numbers)
        self._params, self._dtypes = list(params), [p.dtype for p in params]
        self._states = list(states)
        self._seen = [x for state in states for x in state.values()]
        own = [*self.numbers.values(), *(x for part in self.parts for x in part.flat.values())]
        self._own = own if fused else []  # of which there are arrays
        self._places = [x.data_ptr() for x in self._own]

    def holds(self) -> bool:
        """Whether the states are still the ones that were stacked, and where they were.

        A loaded state brings tensors of its own; sending a state to another process moves it into shared memory, where
        arrays would not follow; and a model may have been cast.
        """
        found = [x for state in self._states for x in state.values()]
        return (
            len(found) == len(self._seen)
            and all(map(is_, found, self._seen))
            and [x.data_ptr() for x in self._own] == self._places
            and [p.dtype for p in self._params] == self._dtypes
        )


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


def unstacked(state: State) -> State:
    """The state of a parameter that leaves its stacks, which would otherwise be kept in memory for it alone.

    >>> whole = torch.zeros(2, 3)
    >>> unstacked({"exp_avg": whole[0]})["exp_avg"].untyped_storage().nbytes()
    12
    """
    views = {name: x for name, x in _tensors(state).items() if x.untyped_storage().nbytes() != x.nbytes}
    return {**state, **{name: x.clone() for name, x in views.items()}}


def _tensors(state: State) -> State:
    """A state without what others may have put beside it."""
    return {name: x for name, x in state.items() if isinstance(x, Tensor)}


def _kind(p: Parameter, state: State) -> tuple[Any, ...]:
    """What parameters must have in common to be stacked; those whose places need not be aligned come last."""
    return not _has_products(state), _is_odd(state), tuple(p.shape), str(p.dtype), tuple(state)


def _runs(params: Sequence[Parameter], states: Sequence[State]) -> list[slice]:
    """Neighbours of one kind, as many as make a stack of at most `LARGEST` numbers."""
    runs: list[slice] = []
    kind = None
    for i, (p, state) in enumerate(zip(params, states, strict=True)):
        own = _kind(p, state)
        full = bool(runs) and (i + 1 - runs[-1].start) * p.numel() > LARGEST
        if own != kind or full or (_has_products(state) and _is_odd(state)):
            runs.append(slice(i, i + 1))
        else:
            runs[-1] = slice(runs[-1].start, i + 1)
        kind = own
    return runs


def _has_products(state: State) -> bool:
    """Whether a step multiplies matrices: not for a vector, nor without bases."""
    return "exp_avg_sq" not in state or "left_basis" in state or "right_basis" in state


def _is_odd(state: State) -> bool:
    """Whether what follows one of its matrices is not aligned."""
    return any(x.numel() % ALIGNED for x in _tensors(state).values() if x.dim())


def _parts(params: Sequence[Parameter], states: Sequence[State]) -> list[tuple[tuple[str, ...], list[slice]]]:
    """Neighbouring runs that keep the same flat tensors, of at most `LARGEST` numbers; and the names of those."""
    parts: list[tuple[tuple[str, ...], list[slice]]] = []
    room = 0
    for run in _runs(params, states):
        flat = tuple(name for name in FLAT if name in states[run.start])
        size = sum(p.numel() for p in params[run])
        aligned = (LARGEST - room) % ALIGNED == 0 or not _has_products(states[run.start])
        if parts and parts[-1][0] == flat and size <= room and aligned:
            parts[-1][1].append(run)
        else:
            parts.append((flat, [run]))
            room = LARGEST
        room -= size
    return parts


def _stacked(name: str, states: Sequence[State]) -> Tensor:
    """The states' tensors of one name in one tensor, of which the states get views."""
    together = torch.stack([state[name] for state in states])
    for state, row in zip(states, together.unbind(), strict=True):
        state[name] = row
    return together


def _flattened(name: str, states: Sequence[State], sizes: Sequence[int]) -> Tensor:
    """The states' tensors of one name, one after the other in a flat one, of which the states get views."""
    together = torch.cat([state[name].reshape(-1) for state in states])
    for state, piece in zip(states, torch.split_with_sizes(together, list(sizes)), strict=True):
        state[name] = piece.view(state[name].shape)
    return together
