"""What a step could do at worst, so that nothing that is learned ever becomes infinite.

G is a product of layers. Let sigma_i >= 1 bound how far layer i stretches a vector, and let S be the product of all
sigma_i^2. Then

    every activation of a vector v is at most          |v| S
    the hypergradient of each layer is at most         H = 2 lr |g| |u| S
    the next step is at most                           lr |u'| S'

where u is what the network was fed, primes mark the next step, and S' is S after theta's update; the meta-optimizer
bounds that update. Only log S is kept. It grows by the worst case at every update and is measured afresh when the bound
becomes too loose, so an ordinary step costs a few operations on single numbers.

If a bound is still too large, `lodo.algorithm` rehearses the step on copies: it is taken if all that it would change
stays finite, and refused otherwise. On a device, where nobody waits for the answer, the bound itself decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lodo.engines import Engine
from lodo.meta import MetaOptimizer
from lodo.scalars import Scalar, logarithm

_ROOM = 1e-6  # the part of a dtype's range that a step may reach without a closer look
_HALF_ROOM = 0.25  # the same for float16, whose range is short; there the parameters are looked at as well


class Limits(NamedTuple):
    """The logarithms of the largest numbers that a group may come to.

    >>> from lodo.meta import Adam
    >>> limits = Limits.of(torch.float64, [torch.float64], Adam(moment_dtype="bfloat16"))
    >>> round(limits.hypergradient / math.log(10))  # its square must fit into bfloat16
    19
    """

    hypergradient: float
    step: float
    position: float  # of the parameters themselves; infinite if they need not be looked at

    @classmethod
    def of(cls, theta: torch.dtype, params: Sequence[torch.dtype], meta: MetaOptimizer) -> Limits:
        """The limits of these dtypes; theta's is the one that everything is computed in."""
        ranges = {dtype: math.log(torch.finfo(dtype).max) for dtype in {theta, *params}}
        moments = math.log(torch.finfo(meta.stored_dtype or theta).max) / meta.power
        reachable = min(ranges.values())
        half = torch.float16 in params
        return cls(
            hypergradient=min(ranges[theta], moments) - math.log(4.0),
            step=reachable + math.log(_HALF_ROOM if half else _ROOM),
            position=reachable - math.log(2.0) if half else math.inf,
        )


def measured(engine: Engine, theta: Tensor, moments: Sequence[Tensor], meta: MetaOptimizer) -> Scalar:
    """log S of this theta."""
    averaged = [engine.stretches(moment) for moment in moments] if meta.averages else []
    sigmas = meta.envelope(engine.stretches(theta), averaged)
    return sum((2.0 * logarithm(_at_least_one(sigma)) for sigma in sigmas), start=0.0)


def _at_least_one(sigma: Scalar) -> Scalar:
    return sigma.clamp_min(1.0) if isinstance(sigma, Tensor) else max(1.0, sigma)
