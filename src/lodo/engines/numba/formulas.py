"""KronLODO's formulas for single numbers.

They are compiled from the text that tensors and arrays use. Kernels call them with numbers in double precision.
"""

from __future__ import annotations

import math

from numba.extending import overload, register_jitable

from lodo import elementwise, kron_formulas, meta
from lodo.engines.numba.tiles import STRICT


@overload(elementwise.choose, jit_options=STRICT)
def _choose(condition, yes, no):
    return lambda condition, yes, no: yes if condition else no


@overload(elementwise.minimum, jit_options=STRICT)
def _minimum(a, b):
    return lambda a, b: min(a, b)


@overload(elementwise.maximum, jit_options=STRICT)
def _maximum(a, b):
    return lambda a, b: max(a, b)


@overload(elementwise.clip, jit_options=STRICT)
def _clip(x, low, high):
    return lambda x, low, high: min(max(x, low), high)


@overload(elementwise.log1p, jit_options=STRICT)
def _log1p(x):
    return lambda x: math.log1p(x)


@overload(elementwise.power, jit_options=STRICT)
def _power(beta, t):
    return lambda beta, t: beta**t


FORMULAS = (
    kron_formulas.bounds, kron_formulas.cosines, kron_formulas.factors, kron_formulas.learned,
    kron_formulas.newest_share, kron_formulas.next_gain, kron_formulas.next_gate, kron_formulas.settled,
    kron_formulas.trust, meta.adam_step,
)  # fmt: skip
for _formula in FORMULAS:
    register_jitable(**STRICT)(_formula)
