"""KronLODO's stacks on CPUs: `scaling` has the passes, which are given memory and called here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lodo.engines.numba import scaling
from lodo.engines.numba.compiling import Kernel, version_of

_PIECE = 1 << 14  # numbers of a matrix that are summed together
_PARALLEL_FROM = 1 << 17  # numbers in a stack from which a second thread pays

_VERSION = version_of([scaling])
_SLOPES, _DIRECTION = Kernel(scaling.slopes, _VERSION), Kernel(scaling.direction, _VERSION)


class FusedStack:
    """The passes over the matrices of one stack.

    Args:
        M, V: the averages, (b, m, n).
        U: the scaled gradient, or None if no gate is learned.
    """

    def __init__(self, M: Tensor, V: Tensor, U: Tensor | None) -> None:
        self._shape = M.shape
        self._M, self._V = _rows(M), _rows(V)
        self._gated = U is not None
        self._U = self._V if U is None else _rows(U)  # not touched without a gate
        b, n = self._M.shape
        self._sums = np.zeros((b, -(-n // _PIECE), 2), self._M.dtype)
        self._large = b * n >= _PARALLEL_FROM
        self._ready: set[Kernel] = set()

    def slopes(self, X: Tensor, mean: Any, root: Any, least: Any) -> tuple[Tensor, Tensor]:
        """``<X, M^ / R>`` and ``<X, U>`` of every matrix."""
        self._run(_SLOPES, _rows(X), self._M, self._V, self._U, self._gated, mean, root, least, self._sums)
        sums = self._sums.sum(1)
        return torch.from_numpy(sums[:, 0]), torch.from_numpy(sums[:, 1])

    def direction(
        self, X: Tensor, betas: tuple[float, float], mean: Any, root: Any, least: Any, gate: Any, rate: Any
    ) -> tuple[Tensor, Tensor]:
        """``rate S``, after X has entered the averages, and |S|."""
        S = torch.empty(self._shape, dtype=X.dtype)
        self._run(
            _DIRECTION, _rows(X), self._M, self._V, self._U, self._gated, 1 - betas[0], 1 - betas[1], mean, root, least,
            gate, rate, _rows(S), self._sums,
        )  # fmt: skip
        return S, torch.from_numpy(np.sqrt(self._sums[:, :, 0].sum(1)))

    def _run(self, kernel: Kernel, *arguments: object) -> None:
        call = kernel.parallel if self._large else kernel.serial
        if kernel not in self._ready:
            self._ready.add(kernel)
            call = kernel.first(call)  # may have to compile
        call(*arguments)


def _rows(x: Tensor) -> Any:
    """A stack of matrices as an array that has a matrix in every row."""
    return x.reshape(len(x), -1).numpy()
