"""A deep autoencoder on MNIST, a classic of second-order optimization."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from lodo.lab.tasks.network import ImageNetwork

BATCH = 64
WIDTHS = (784, 256, 64, 16, 64, 256, 784)


class Autoencoder(ImageNetwork):
    """Squeezes images of 28 x 28 pixels through 16 numbers and restores them.

    The widths are 784-256-64-16-64-256-784, with tanh between the layers. The loss is the cross-entropy in nats between
    the pixels, from 0 to 1, and the outputs, summed over the pixels of an image.

    Args:
        seed: draws the weights and the batches.
        batch: the number of images per step.
        digest: the digest that the data must have (see `lodo.lab.data.Dataset`); None accepts any data.
    """

    def __init__(self, seed: int, *, batch: int = BATCH, digest: str | None = None) -> None:
        super().__init__(seed, batch=batch, digest=digest)
        self.begin(autoencoder)

    def loss(self) -> Tensor:
        return self._mean_loss(self.images[self.batch["picks"]])

    def validate(self) -> dict[str, float]:
        return {"validation_loss": float(self._mean_loss(self.test_images))}

    def _mean_loss(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1).float() / 255
        restored = self.module(pixels)
        return binary_cross_entropy_with_logits(restored, pixels, reduction="sum") / len(images)


def autoencoder() -> nn.Sequential:
    """The network.

    >>> sum(p.numel() for p in autoencoder().parameters())
    437664
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(WIDTHS):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])
