"""KronLODO's passes over all weights on CPUs: `scaling` has them; they are given memory and called here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lodo.engines.numba import scaling, tiles
from lodo.engines.numba.compiling import Kernel, version_of
from lodo.rounding import mix, update_key

_PIECE = 1 << 14  # numbers of a parameter that are summed together
_PARALLEL_FROM = 1 << 17  # numbers from which a second thread pays

_VERSION = version_of([scaling, tiles])
_SLOPES, _DIRECTION = Kernel(scaling.slopes, _VERSION), Kernel(scaling.direction, _VERSION)


class FusedPasses:
    """The passes over parameters that lie one after the other.

    Args:
        M, V: the averages, flat.
        U: the scaled gradients, or None if no gate is learned.
        sizes: of the parameters.
        first: the place of the first of them among those of its bundle.
        dtype: of X.
    """

    def __init__(
        self, M: Tensor, V: Tensor, U: Tensor | None, sizes: Sequence[int], first: int, dtype: torch.dtype
    ) -> None:
        self._gated, self._coded = U is not None, U is not None and U.dtype == torch.int8
        self._short = M.dtype == torch.bfloat16
        self._arrays = [_array(M), _array(V), _array(V if U is None else U)]  # the last is not touched without a gate
        pieces = [(i, n * j // count, n * (j + 1) // count) for i, n in enumerate(sizes) for count in [-(-n // _PIECE)]
                  for j in range(count)]  # fmt: skip
        owners, places, ends = np.array(pieces, np.int64).reshape(-1, 3).T
        offsets = np.cumsum([0, *sizes])[owners]
        self._pieces = offsets + places, offsets + ends, owners + first
        self._places = places.copy()
        self._sums = np.zeros((len(places), 3), np.float64 if dtype == torch.float64 else np.float32)
        self._large = sum(sizes) >= _PARALLEL_FROM
        self._ready: set[Kernel] = set()

    def slopes(
        self, X: Tensor, learning: bool, unit: float, limit: float, factors: Sequence[Any], found: Tensor
    ) -> None:
        """Write |X|^2, ``<X, M^ / R>`` and ``<X, U>`` of every parameter into ``found``, which has zeros there."""
        unit = unit if self._coded else 1.0
        self._run(
            _SLOPES, X.numpy(), *self._arrays, learning, learning and self._gated, unit, limit, *factors, *self._pieces,
            self._sums, found.numpy(),
        )  # fmt: skip

    def direction(self, X: Tensor, unit: float, limit: float, t: Any, numbers: Sequence[Any], found: Tensor) -> None:
        """X becomes ``rate S``, after it has entered the averages at step t; |S|^2 is written into ``found``."""
        keys = (mix(update_key(0, t.astype(np.int64))) if self._short else t).astype(np.uint32)
        self._run(
            _DIRECTION, X.numpy(), *self._arrays, self._gated, unit, limit, keys, *numbers, *self._pieces,
            self._places, self._sums, found.numpy(),
        )  # fmt: skip

    def _run(self, kernel: Kernel, *arguments: object) -> None:
        call = kernel.parallel if self._large else kernel.serial
        if kernel not in self._ready:
            self._ready.add(kernel)
            call = kernel.first(call)  # may have to compile
        call(*arguments)


def _array(x: Tensor) -> Any:
    """A tensor as an array; NumPy has no bfloat16, of which kernels get the bits."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
