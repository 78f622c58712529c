"""What the network is fed: the gradient average m, or a learned mean of m and the gradient.

    u = (1 - w) g + w m,      dl/dw = -lr (G g') . (m - g)      with g' the gradient where the step led

w starts at 1, which is the paper's algorithm, and Adam learns it. It may leave the range from 0 to 1.
"""

from __future__ import annotations

from torch import Tensor

from lodo.meta import Learned
from lodo.scalars import add_scaled

RATE = 1e-3  # at which w is learned
START = Learned(1.0)


def fed(m: Tensor, g: Tensor | None, gate: Learned | None) -> Tensor:
    """``m`` without a gate, or ``(1 - w) g + w m``.

    >>> import torch
    >>> fed(torch.ones(2), torch.zeros(2), Learned(0.25))
    tensor([0.2500, 0.2500])
    """
    if gate is None or g is None:
        return m
    w = gate.value
    return add_scaled(g.mul(1 - w), m, w)
