"""A small vision transformer on MNIST (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from lodo.lab.tasks.network import Classifier
from lodo.lab.tasks.transformer import Block, positions

BATCH = 16
SIDE = 28  # of an image, in pixels
PATCH = 4
WIDTH = 64
HEADS = 4
BLOCKS = 2
CLASSES = 10


class Vit(Classifier):
    """Tells digits of 28 x 28 pixels apart with a transformer of two blocks; the loss is the cross-entropy.

    The 49 patches of 4 x 4 pixels are mapped to the width of 64 and get learned positions. After the blocks, a layer
    norm and the mean over the patches, a linear layer gives the logits.

    Args:
        seed: draws the weights and the batches.
        batch: the number of images per step.
        digest: the digest that the data must have (see `lodo.lab.data.Dataset`); None accepts any data.
    """

    validation_size: ClassVar[int] = 500

    def __init__(self, seed: int, *, batch: int = BATCH, digest: str | None = None) -> None:
        super().__init__(seed, batch=batch, digest=digest)
        self.begin(VisionTransformer)


class VisionTransformer(nn.Module):
    """The network.

    >>> sum(p.numel() for p in VisionTransformer().parameters())
    104970
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH**2, WIDTH)
        self.positions = positions((SIDE // PATCH) ** 2, WIDTH, deviation=0.3)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, causal=False) for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        across = SIDE // PATCH
        squares = images.reshape(-1, across, PATCH, across, PATCH).transpose(2, 3)  # image, row, column, y, x
        patches = squares.reshape(-1, across**2, PATCH**2)
        x = self.blocks(self.patches(patches) + self.positions)
        logits: Tensor = self.last(self.norm(x).mean(1))
        return logits
