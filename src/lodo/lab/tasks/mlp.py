"""A small network on real digits of 8 x 8 pixels: MNIST, averaged down, or scikit-learn's digits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy, linear
from torch.optim import Optimizer

from lodo._checks import check_int
from lodo.lab import data
from lodo.lab.tasks.base import Task
from lodo.lab.tasks.network import classified

SIDE = 8  # pixels
CLASSES = 10
HIDDEN = (64, 32)
BATCH = 128


class Mlp(Task):
    """Classifies digits of 8 x 8 pixels with tanh layers; the loss is the cross-entropy of a random batch.

    The initial weights are N(0, 1 / fan-in), the initial biases 0. A batch is drawn from all training images with
    replacement.

    Args:
        seed: draws the weights and the batches.
        hidden: the widths of the hidden layers.
        batch: the number of images per step.
        digest: the digest that the data must have (see `lodo.lab.data.Dataset`); None accepts any data.
    """

    dataset: ClassVar[str | None] = "mnist"

    def __init__(
        self, seed: int, *, hidden: Sequence[int] = HIDDEN, batch: int = BATCH, digest: str | None = None
    ) -> None:
        super().__init__(seed)
        if not isinstance(hidden, (tuple, list)):
            raise ValueError(f"hidden must be the widths of the hidden layers, for example (32, 32), got {hidden!r}")
        for i, width in enumerate(hidden):
            check_int(f"hidden[{i}]", width, low=1)
        check_int("batch", batch, low=1)
        digits = data.load("mnist")
        data.check_digest(digits, digest)
        self.train, self.test = _normalised(digits)
        self.params = []
        widths = (SIDE**2, *hidden, CLASSES)
        for fan_in, fan_out in pairwise(widths):
            weight = torch.randn(fan_out, fan_in, generator=self.rng) / fan_in**0.5
            self.params += [Parameter(weight), Parameter(torch.zeros(fan_out))]
        self.batch = torch.zeros(batch, dtype=torch.int64)
        self.draw()

    def draw(self) -> None:
        """Draw a batch of images."""
        torch.randint(len(self.train[0]), self.batch.shape, generator=self.rng, out=self.batch)

    def loss(self) -> Tensor:
        images, labels = self.train
        return cross_entropy(self._logits(images[self.batch]), labels[self.batch])

    def _logits(self, x: Tensor) -> Tensor:
        *hidden, last = zip(self.params[::2], self.params[1::2], strict=True)
        for weight, bias in hidden:
            x = linear(x, weight, bias).tanh()
        return linear(x, *last)

    @torch.no_grad()
    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        """The accuracy and the mean cross-entropy on the test images."""
        images, labels = self.test
        return classified(self._logits(images), labels)

    def buffers(self) -> dict[str, Tensor]:
        return {"batch": self.batch}


@functools.lru_cache(maxsize=1)
def _normalised(digits: data.Dataset) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The training set and the test set: images as rows of 64 numbers, and labels.

    The images are normalised with the mean and the standard deviation of all pixels of the training set.
    """
    train, test = shrink(digits.train.images), shrink(digits.test.images)
    mean, deviation = train.double().mean(), train.double().std()
    train, test = ((images - mean) / deviation for images in (train, test))
    return (train.float(), digits.train.labels.long()), (test.float(), digits.test.labels.long())


def shrink(images: Tensor) -> Tensor:
    """Reduce images of 28 x 28 bytes to rows of 8 x 8 sums.

    The margin of 2 pixels is dropped, and squares of 3 x 3 pixels are summed. Images of 8 x 8 bytes are only flattened.

    >>> shrink(torch.full((1, 28, 28), 100, dtype=torch.uint8))[0, :3]
    tensor([900, 900, 900], dtype=torch.int32)
    """
    if images.shape[-1] == SIDE:
        return images.flatten(1).int()
    side = 3 * SIDE
    margin = (images.shape[-1] - side) // 2
    inner = images[:, margin : margin + side, margin : margin + side]
    return inner.reshape(-1, SIDE, 3, SIDE, 3).sum((2, 4), dtype=torch.int32).flatten(1)
