"""A small residual network on CIFAR-10."""

from __future__ import annotations

from typing import ClassVar

from torch.optim import Optimizer

from lodo.lab.tasks.cifar10 import Cifar10

BATCH = 32
VALIDATION = 1000  # images


class Resnet8(Cifar10):
    """The task `cifar10` with a ResNet-8 of half the width, batches of 32 and no L2 term: the loss is a cross-entropy.

    The first 1,000 test images are for validation.

    Args:
        seed: draws the weights, the batches and the augmentation.
        batch: the number of images per step.
        digest: the digest that the data must have (see `lodo.lab.data.Dataset`); None accepts any data.
    """

    threads: ClassVar[int | None] = 1

    def __init__(self, seed: int, *, batch: int = BATCH, digest: str | None = None) -> None:
        super().__init__(seed, model="narrow8", batch=batch, micro_batch=batch, l2=0.0, digest=digest)
        images, labels = self.test
        self.test = images[:VALIDATION], labels[:VALIDATION]

    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        """The mean cross-entropy and the accuracy on the validation images."""
        found = super().tracked(optimizer, step)
        return {"test_accuracy": found["test_accuracy"], "validation_loss": found["test_loss"]}
