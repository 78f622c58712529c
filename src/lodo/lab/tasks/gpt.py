"""A small transformer that predicts the characters of a text."""

from __future__ import annotations

import functools

from torch import Tensor, nn

from lodo.lab.tasks.network import WINDOWS, TextNetwork
from lodo.lab.tasks.transformer import Block, positions

BATCH = 32
CONTEXT = 64
WIDTH = 64
HEADS = 4
BLOCKS = 3
DEVIATION = 0.02  # of the initial embeddings


class Gpt(TextNetwork):
    """Predicts the next character of a text with a transformer; the loss is the mean cross-entropy in nats.

    Three blocks of width 64 with four heads look back at up to 64 characters. A batch consists of windows at random
    places of the first nine tenths of the text. For validation, there are windows at fixed places of the rest.

    Args:
        seed: draws the weights and the batches.
        batch: the number of windows per step.
        windows: the number of windows for validation.
        digest: the digest that the text must have (see `lodo.lab.data.Text`); None accepts any text.
    """

    def __init__(self, seed: int, *, batch: int = BATCH, windows: int = WINDOWS, digest: str | None = None) -> None:
        super().__init__(seed, batch=batch, context=CONTEXT, windows=windows, digest=digest)
        self.begin(functools.partial(CharacterTransformer, len(self.text.characters)))


class CharacterTransformer(nn.Module):
    """The network for a text with this number of characters; maps indices to logits.

    >>> sum(p.numel() for p in CharacterTransformer(84).parameters())
    165012
    """

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        nn.init.normal_(self.characters.weight, std=DEVIATION)
        self.positions = positions(CONTEXT, WIDTH, DEVIATION)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, causal=True) for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, characters)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.blocks(self.characters(indices) + self.positions)
        logits: Tensor = self.last(self.norm(x))
        return logits
