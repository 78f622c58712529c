"""The blocks of transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

RATIO = 4  # of the hidden width of the two-layer network to the width of the block


class Block(nn.Module):
    """Attention and a two-layer network with GELU, each after a layer norm and added to its input.

    Maps sequences (sequence x position x width) to sequences of the same shape.

    >>> Block(width=64, heads=4, causal=True)(torch.zeros(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, RATIO * width)
        self.out = nn.Linear(RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.attention_norm(x))
        added: Tensor = self.out(gelu(self.hidden(self.norm(x))))
        return x + added

    def _attention(self, x: Tensor) -> Tensor:
        number, length, width = x.shape
        parts = self.attention_in(x).view(number, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        attended: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(number, length, width))
        return attended


def positions(length: int, width: int, deviation: float) -> nn.Parameter:
    """What is added to each position of a sequence: learned, and N(0, deviation^2) at first.

    The deviation should be about that of what it is added to, or else attention is blind to positions for long.
    """
    return nn.Parameter(deviation * torch.randn(length, width))
