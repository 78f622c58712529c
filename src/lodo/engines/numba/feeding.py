"""What is fed to the network, on CPUs.

The flags have to be written out: without flags, njit inherits those of its first caller.
"""

from __future__ import annotations

from numba import njit

from lodo.engines.numba.tiles import STRICT
from lodo.feed import RATE
from lodo.meta import adam_step

_adam_step = njit(**STRICT)(adam_step)


@njit(**STRICT)
def learn_gate(gate, scale, Gg, m, last):
    """The gate after the last step, from G g and from the momentum and the gradient that it mixed."""
    slope = 0.0
    for j in range(m.size):
        slope += float(Gg[j]) * (float(m[j]) - float(last[j]))
    return _adam_step(gate, scale * slope, RATE)


@njit(**STRICT)
def feed(u, m, g, last, beta, gated, gate):
    """m = beta m + (1 - beta) g, and u = m or, if gated, (1 - w) g + w m; ``last`` remembers g."""
    real = m.dtype.type
    keep, take = real(beta), real(1 - beta)
    w, rest = real(gate[0]), real(1 - gate[0])
    for j in range(m.size):
        m[j] = keep * m[j] + take * g[j]
        if gated:
            u[j] = rest * g[j] + w * m[j]
            last[j] = g[j]
