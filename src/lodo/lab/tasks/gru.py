"""A small recurrent network that predicts the characters of a text."""

from __future__ import annotations

import functools

from torch import Tensor, nn

from lodo.lab.tasks.network import WINDOWS, TextNetwork

BATCH = 16
CONTEXT = 32
UNITS = 96


class Gru(TextNetwork):
    """Predicts the next character of a text with gated recurrent units; the loss is the mean cross-entropy in nats.

    One layer of 96 units reads windows of 32 characters from a state of zeros. A batch consists of windows at random
    places of the first nine tenths of the text. For validation, there are windows at fixed places of the rest.

    Args:
        seed: draws the weights and the batches.
        batch: the number of windows per step.
        windows: the number of windows for validation.
        digest: the digest that the text must have (see `lodo.lab.data.Text`); None accepts any text.
    """

    def __init__(self, seed: int, *, batch: int = BATCH, windows: int = WINDOWS, digest: str | None = None) -> None:
        super().__init__(seed, batch=batch, context=CONTEXT, windows=windows, digest=digest)
        self.begin(functools.partial(Recurrent, len(self.text.characters)))


class Recurrent(nn.Module):
    """The network for a text with this number of characters; maps indices to logits.

    >>> sum(p.numel() for p in Recurrent(84).parameters())
    72084
    """

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, UNITS)
        self.units = nn.GRU(UNITS, UNITS, batch_first=True)
        self.last = nn.Linear(UNITS, characters)

    def forward(self, indices: Tensor) -> Tensor:
        states, _ = self.units(self.characters(indices))
        logits: Tensor = self.last(states)
        return logits
