"""KronLODO's passes over all weights on CPUs: `scaling` has them; they are given memory and called here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lodo import elementwise, kron_formulas, meta
from lodo.engines.numba import formulas, scaling, tiles
from lodo.engines.numba.compiling import Caller, Kernel, version_of
from lodo.kron_formulas import Constants, Pace
from lodo.rounding import mix, update_key

_PIECE = 1 << 14  # numbers of a parameter that are summed together
_PARALLEL_FROM = 1 << 17  # numbers from which a second thread pays

_SOURCES = (elementwise, formulas, kron_formulas, meta, scaling, tiles)  # of which kernels are compiled
_VERSION = version_of(_SOURCES)
_SLOPES, _DIRECTION = Kernel(scaling.slopes, _VERSION), Kernel(scaling.direction, _VERSION)
_TRUSTED, _LEARN = Kernel(scaling.trusted, _VERSION), Kernel(scaling.learn, _VERSION)


@cache
def _caller(parallel: bool, *_dtypes: object) -> Caller:
    """One for all arguments of these types: parameters may be bundled anew at every step."""
    return Caller(parallel)


class FusedNumbers:
    """The numbers of which each parameter of a bundle has one, and how c and w among them are learned.

    Args:
        numbers: all of them, by name, each a vector.
    """

    def __init__(self, numbers: Mapping[str, Tensor]) -> None:
        # where there is none of a name, counts stand in, which are not touched
        given = {name: numbers.get(name, numbers["step"]).numpy() for name in scaling.NUMBERS}
        self.arrays = tuple(given.values())
        self.has = tuple(name in numbers for name in ("gain", "gate", "norm_sq"))
        self._trusted = torch.ones_like(numbers["step"])
        self._call = _caller(False, numbers["step"].dtype)

    def trusted(self, sums: Tensor, constants: Constants) -> Tensor | None:
        """What shortens each gradient; None if nothing does."""
        found = self._trusted
        is_any = self._call(_TRUSTED, self.arrays, sums[0].numpy(), constants, found.numpy())
        return found if is_any else None

    def learn(self, sums: Tensor, pace: Pace, constants: Constants) -> None:
        """Learn c and w from the last step, and count this one."""
        pace = Pace(*map(float, pace))
        self._call(_LEARN, self.arrays, self.has, sums.numpy(), pace, constants)


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
        self._coded = U is not None and U.dtype == torch.int8
        self._short = M.dtype == torch.bfloat16
        self._arrays = [_array(M), _array(V), _array(V if U is None else U)]  # the last is not touched without a gate
        pieces = [(i, n * j // count, n * (j + 1) // count) for i, n in enumerate(sizes) for count in [-(-n // _PIECE)]
                  for j in range(count)]  # fmt: skip
        owners, places, ends = np.array(pieces, np.int64).reshape(-1, 3).T
        offsets = np.cumsum([0, *sizes])[owners]
        self._pieces = offsets + places, offsets + ends, owners + first, places.copy()
        self._sums = np.zeros((len(places), 3), np.float64 if dtype == torch.float64 else np.float32)
        self._call = _caller(sum(sizes) >= _PARALLEL_FROM, dtype, *(x.dtype for x in self._arrays))

    def slopes(self, X: Tensor, numbers: FusedNumbers, constants: Constants, found: Tensor) -> None:
        """Write |X|^2, ``<X, M^ / R>`` and ``<X, U>`` of every parameter into ``found``, which has zeros there."""
        self._call(
            _SLOPES, X.numpy(), *self._arrays, numbers.arrays, numbers.has, self._coded,
            constants, self._pieces, self._sums, found.numpy(),
        )  # fmt: skip

    def direction(self, X: Tensor, numbers: FusedNumbers, lr: float, constants: Constants) -> None:
        """X becomes ``rate S``, after it has entered the averages, and the length of S is noted."""
        t = numbers.arrays[0]
        keys = (mix(update_key(0, t.astype(np.int64))) if self._short else t).astype(np.uint32)
        self._call(
            _DIRECTION, X.numpy(), *self._arrays, numbers.arrays, numbers.has, keys, lr,
            constants, self._pieces, self._sums,
        )  # fmt: skip


def _array(x: Tensor) -> Any:
    """A tensor as an array; NumPy has no bfloat16, of which kernels get the bits."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
