"""A small network on real digits: MNIST averaged down to 8 x 8 pixels, or scikit-learn's, which have 8 x 8."""

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

SIDE = 8  # pixels
CLASSES = 10
HIDDEN = (64, 32)
BATCH = 128


class Mlp(Task):
    """Classifies digits of 8 x 8 pixels with tanh layers; the loss is the cross-entropy of a random batch.

    The weights start as N(0, 1 / fan-in), the biases as 0. A batch is drawn from all training images with
    replacement.

    Args:
        seed: draws the weights and the batches.
        hidden: the widths of the hidden layers.
        batch: images a step.
        digest: if given, that of the data (`lodo.lab.data.Dataset`), which is then checked.
    """

    dataset: ClassVar[str | None] = "mnist"

    def __init__(
        self, seed: int, *, hidden: Sequence[int] = HIDDEN, batch: int = BATCH, digest: str | None = None
    ) -> None:
        super().__init__(seed)
        if not isinstance(hidden, (tuple, list)):
            raise ValueError(f"hidden must be the widths of the hidden layers, such as (32, 32), got {hidden!r}")
        for i, width in enumerate(hidden):
            check_int(f"hidden[{i}]", width, low=1)
        check_int("batch", batch, low=1)
        digits = data.load("mnist")
        data.check_digest(digits, digest)
        self.train, self.test = _small(digits)
        self.params = []
        widths = (SIDE**2, *hidden, CLASSES)
        for fan_in, fan_out in pairwise(widths):
            weight = torch.randn(fan_out, fan_in, generator=self.rng) / fan_in**0.5
            self.params += [Parameter(weight), Parameter(torch.zeros(fan_out))]
        self.batch = torch.zeros(batch, dtype=torch.int64)
        self.draw()

    def draw(self) -> None:
        """Take other images."""
        torch.randint(len(self.train[0]), self.batch.shape, generator=self.rng, out=self.batch)

    def loss(self) -> Tensor:
        images, labels = self.train
        return cross_entropy(self._scores(images[self.batch]), labels[self.batch])

    def _scores(self, x: Tensor) -> Tensor:
        *hidden, last = zip(self.params[::2], self.params[1::2], strict=True)
        for weight, bias in hidden:
            x = linear(x, weight, bias).tanh()
        return linear(x, *last)

    @torch.no_grad()
    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        """The share of test images that are recognised."""
        images, labels = self.test
        return {"test_accuracy": float((self._scores(images).argmax(1) == labels).double().mean())}

    def buffers(self) -> dict[str, Tensor]:
        return {"batch": self.batch}


@functools.lru_cache(maxsize=1)
def _small(digits: data.Dataset) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images as rows of 64 numbers, normalised with the training set's mean and deviation."""
    sums = shrink(digits.train.images), shrink(digits.test.images)
    mean, deviation = sums[0].double().mean(), sums[0].double().std()
    train, test = (((each - mean) / deviation).float() for each in sums)
    return (train, digits.train.labels.long()), (test, digits.test.labels.long())


def shrink(images: Tensor) -> Tensor:
    """28 x 28 bytes to rows of 8 x 8 sums: the margin of 2 pixels is left out, and 3 x 3 pixels are added up.

    Images of 8 x 8 bytes become rows as they are.

    >>> shrink(torch.full((1, 28, 28), 100, dtype=torch.uint8))[0, :3]
    tensor([900, 900, 900], dtype=torch.int32)
    """
    if images.shape[-1] == SIDE:
        return images.flatten(1).int()
    side = 3 * SIDE
    margin = (images.shape[-1] - side) // 2
    inner = images[:, margin : margin + side, margin : margin + side]
    return inner.reshape(-1, SIDE, 3, SIDE, 3).sum((2, 4), dtype=torch.int32).flatten(1)
