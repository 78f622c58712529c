"""What is fed to the network, on CPUs.

Without fused multiply-adds: which of two products of a sum is fused would be the compiler's choice, and another one in
a kernel for many threads. That must be said: what says nothing is compiled as the function that calls it first.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from lodo import gate as gates

_STRICT: dict[str, Any] = {"error_model": "numpy", "fastmath": False}
_updated = njit(**_STRICT)(gates.updated)


@njit(**_STRICT)
def learn_gate(gate, scale, Gg, m, last):
    """The gate after the last step, from G g, the momentum and the gradient it was between."""
    slope = 0.0
    for j in range(m.size):
        slope += float(Gg[j]) * (float(m[j]) - float(last[j]))
    return _updated(gate, scale * slope)


@njit(**_STRICT)
def feed(u, m, g, last, beta, gated, gate):
    """m = beta m + (1 - beta) g, and u = m or, gated, (1 - w) g + w m; ``last`` remembers g."""
    real = m.dtype.type
    keep, take = real(beta), real(1 - beta)
    w, rest = real(gate[0]), real(1 - gate[0])
    for j in range(m.size):
        m[j] = keep * m[j] + take * g[j]
        if gated:
            u[j] = rest * g[j] + w * m[j]
            last[j] = g[j]
