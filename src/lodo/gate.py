"""The learned momentum gate: what the network is fed is between the gradient and its average.

    u = (1 - w) g + w m,      dl/dw = -lr (G g') . (m - g)      with g' the gradient where the step led

w starts at 1, the paper's algorithm, and is learned by Adam; nothing keeps it within 0 and 1.
"""

from __future__ import annotations

from typing import NamedTuple

RATE, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-7


class Gate(NamedTuple):
    """w, its Adam's two moments, and how often it was updated."""

    w: float = 1.0
    exp_avg: float = 0.0
    exp_avg_sq: float = 0.0
    t: int = 0

    def learn(self, slope: float) -> Gate:
        """One step of Adam down the slope dl/dw.

        >>> round(Gate().learn(0.5).w, 6)  # the first step has length RATE
        0.999
        """
        return Gate(*updated(self, slope))


def updated(gate: tuple[float, float, float, int], slope: float) -> tuple[float, float, float, int]:
    """As `Gate.learn`, on plain numbers; kernels compile it."""
    w, m, v, t = gate
    m = BETA1 * m + (1 - BETA1) * slope
    v = BETA2 * v + (1 - BETA2) * slope * slope
    t += 1
    root = (v / (1 - BETA2**t)) ** 0.5
    return w - RATE * m / (1 - BETA1**t) / (root + EPS), m, v, t
