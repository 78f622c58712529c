"""The guard: what keeps a learned preconditioner from running away when the problem suddenly changes.

A preconditioner that has learned to take long steps along flat directions is dangerous when those directions turn
steep: each step overshoots by the ratio of the curvatures, and the gradient grows by that factor at every step. Two
signs show it at once, and both cost O(n) or less:

* The gradient is many times longer than recent gradients. It is then shortened to `LIMIT` times their root mean
  square, so that a single step throws neither x nor the meta-optimizer's memory far off. That alone deals with a
  gradient that is an outlier by itself.
* The loss rises along the step that led there: ``g . (x_{t+1} - x_t) > 0``, so the step went past a minimum. Steps are
  then trusted half as much, again and again while that goes on, until theta has unlearned its long steps. Afterwards
  trust recovers by 2 % at every step that did not lead uphill and whose gradient was not shortened.

A run whose gradients stay within `LIMIT` times their recent average is not affected: it is the same bit for bit.
The average follows a lasting change of the gradient's size by up to 11 % a step.
"""

from __future__ import annotations

from typing import NamedTuple

from lodo.scalars import Flag, Scalar, largest, smallest, where

LIMIT = 5.0  # times the average; gradients of the noisy bowl stay below 3 times
DECAY = 0.99  # of the average of squared norms
SHRINKAGE, RECOVERY, LEAST = 0.5, 1.02, 1e-6  # of trust


class Guard(NamedTuple):
    """The root mean square of recent gradient norms (0 before the first), and how far steps are trusted."""

    average: Scalar = 0.0
    trust: Scalar = 1.0

    def clip(self, norm: Scalar) -> Scalar:
        """The factor for a gradient of this norm.

        >>> Guard(average=2.0).clip(9.0), Guard(average=2.0).clip(1000.0)
        (1.0, 0.01)
        """
        most = LIMIT * self.average
        outlier = (most > 0.0) & (most < norm)
        return where(outlier, most / where(outlier, norm, 1.0), 1.0)

    def after(self, norm: Scalar, clipped: Flag, uphill: Flag) -> Guard:
        """The guard after a gradient of ``norm`` that may have been clipped, and may point uphill along the last step.

        >>> Guard(average=1.0, trust=0.5).after(1.0, clipped=True, uphill=True)
        Guard(average=1.0, trust=0.25)
        """
        running = DECAY * self.average**2 + (1 - DECAY) * norm**2
        average = where(self.average > 0, running, norm**2) ** 0.5
        average = where(norm > 0, average, self.average)  # a gradient of zero tells nothing about others
        when_uphill = where(clipped, SHRINKAGE, 1.0)
        when_downhill = where(clipped, 1.0, RECOVERY)
        trust = where(uphill, when_uphill, when_downhill) * self.trust
        return Guard(average, smallest(1.0, largest(LEAST, trust)))
