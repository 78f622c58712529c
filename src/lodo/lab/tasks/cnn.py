"""A small convolutional network on MNIST."""

from __future__ import annotations

from torch import nn

from lodo.lab.tasks.network import Classifier

BATCH = 64
WIDTHS = (16, 32, 64)
GROUPS = 4
CLASSES = 10


class Cnn(Classifier):
    """Tells digits of 28 x 28 pixels apart with three strided convolutions; the loss is the cross-entropy.

    The convolutions of 3 x 3 with stride 2 have 16, 32 and 64 channels. Group norm with 4 groups and a ReLU follow
    each. A linear layer maps the remaining 4 x 4 pixels to the logits.

    Args:
        seed: draws the weights and the batches.
        batch: the number of images per step.
        digest: the digest that the data must have (see `lodo.lab.data.Dataset`); None accepts any data.
    """

    def __init__(self, seed: int, *, batch: int = BATCH, digest: str | None = None) -> None:
        super().__init__(seed, batch=batch, digest=digest)
        self.begin(cnn)


def cnn() -> nn.Sequential:
    """The network.

    >>> sum(p.numel() for p in cnn().parameters())
    33770
    """
    layers: list[nn.Module] = []
    fan_in = 1
    for width in WIDTHS:
        layers += [nn.Conv2d(fan_in, width, 3, stride=2, padding=1), nn.GroupNorm(GROUPS, width), nn.ReLU()]
        fan_in = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(fan_in * 4 * 4, CLASSES))
