"""The guard: what keeps a learned preconditioner from running away when the problem suddenly changes.

A preconditioner that has learned to take long steps along flat directions is dangerous when those directions turn
steep: each step overshoots by the ratio of the curvatures, and the gradient grows by that factor at every step. Two
things show it at once, and both cost O(n) or less:

* The gradient is many times longer than gradients have been lately. It is then shortened to `LIMIT` times their root
  mean square, so that neither x nor the meta-optimizer's memory is thrown far off by what one step brings. That
  alone deals with a gradient that is an outlier by itself.
* The loss rises along the step that led there: ``g . (x_{t+1} - x_t) > 0``, the step went past a minimum. Then steps
  are trusted half as much, again and again while that goes on, until theta has unlearned its long steps. Afterwards
  trust comes back by 2 % at every step that did not lead uphill.

Nothing happens to a run whose gradients stay within `LIMIT` times their recent average: it is the same, bit by bit.
The average follows a lasting change of the gradient's size, by up to 11 % a step.
"""

from __future__ import annotations

from typing import NamedTuple

LIMIT = 5.0  # times the average: gradients of the noisy bowl stay below 3 times
DECAY = 0.99  # of the average of squared norms
RECOVERY, LEAST = 1.02, 1e-6  # of trust


class Guard(NamedTuple):
    """The root mean square of recent gradient norms (0 before the first), and how far steps are trusted."""

    average: float = 0.0
    trust: float = 1.0

    def clip(self, norm: float) -> float:
        """The factor for a gradient of this norm.

        >>> Guard(average=2.0).clip(9.0), Guard(average=2.0).clip(1000.0)
        (1.0, 0.01)
        """
        most = LIMIT * self.average
        return most / norm if 0.0 < most < norm else 1.0

    def after(self, norm: float, clipped: bool, uphill: bool) -> Guard:
        """After a gradient of ``norm`` that may have been shortened, and may point uphill along the last step.

        >>> Guard(average=1.0, trust=0.5).after(1.0, clipped=True, uphill=True)
        Guard(average=1.0, trust=0.25)
        """
        square = DECAY * self.average**2 + (1 - DECAY) * norm**2 if self.average else norm**2
        average = square**0.5 if norm else self.average  # a gradient of zero tells nothing about others
        factor = (0.5 if clipped else 1.0) if uphill else (1.0 if clipped else RECOVERY)
        return Guard(average, min(1.0, max(LEAST, factor * self.trust)))
