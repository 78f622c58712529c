"""Image generation on MNIST: the paper's largest comparison of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from lodo._checks import check_bool, check_int
from lodo.lab import data
from lodo.lab.tasks.base import Task
from lodo.lab.tasks.generator import fused_scores, initial_weights, inputs, scores

BATCH = 256
HELD_OUT = 64  # images, the last of the training set, that are held out for validation
CHUNK = 16  # images that go through the network at once


class Mnist(Task):
    """Predicts one random pixel of each image of a random batch, given the pixels before it.

    The loss is the mean cross-entropy in nats. The images of a batch are drawn with replacement.

    Args:
        seed: draws the weights and the batches.
        batch: the number of images per step.
        validation_size: the number of pixels of the held-out images on which the validation loss is measured, always
            the same random ones; None for all pixels of all 64 images, as in the paper.
        test_size: the same for the test images.
        fused: whether the network runs on fused kernels (True) or on torch's convolutions (False).
        digest: the digest that the data must have (see `lodo.lab.data.Dataset`); None accepts any data.
    """

    dataset: ClassVar[str | None] = "mnist"
    keeps_weights: ClassVar[bool] = True

    def __init__(
        self,
        seed: int,
        *,
        batch: int = BATCH,
        validation_size: int | None = None,
        test_size: int | None = None,
        fused: bool = True,
        digest: str | None = None,
    ) -> None:
        super().__init__(seed)
        check_int("batch", batch, low=1)
        check_bool("fused", fused)
        digits = data.load("mnist")
        data.check_digest(digits, digest)
        images = digits.train.images
        if len(images) <= HELD_OUT:
            raise ValueError(f"data must have more than {HELD_OUT} training images, got {len(images)}")
        self.train, self.validation, self.test = images[:-HELD_OUT], images[-HELD_OUT:], digits.test.images
        for name, size in (("validation_size", validation_size), ("test_size", test_size)):
            if size is not None:
                check_int(name, size, low=1)
        self.validation_size, self.test_size = validation_size, test_size
        self.scores = fused_scores if fused else scores
        self.params = initial_weights(self.rng)
        self.picks = torch.zeros(batch, dtype=torch.int64)  # which training images
        self.queries = torch.zeros(batch, dtype=torch.int64)  # which pixel of each
        self.draw()

    def draw(self) -> None:
        """Draw a batch of images, and a pixel of each."""
        torch.randint(len(self.train), self.picks.shape, generator=self.rng, out=self.picks)
        torch.randint(self.train[0].numel(), self.queries.shape, generator=self.rng, out=self.queries)

    def loss(self) -> Tensor:
        return _total_loss(scores, self.params, self.train[self.picks], self.queries) / len(self.picks)

    def evaluate(self, create_graph: bool = False) -> float:
        """As in `Task`; the fused kernels take chunks of the batch that fit into the processor's cache."""
        if create_graph or self.scores is scores:
            return super().evaluate(create_graph)
        total = 0.0
        for p in self.params:
            p.grad = None
        images = self.train[self.picks]
        for start in range(0, len(images), CHUNK):
            chunk = slice(start, start + CHUNK)
            with torch.enable_grad():
                loss = _total_loss(self.scores, self.params, images[chunk], self.queries[chunk]) / len(images)
                grads = torch.autograd.grad(loss, self.params)
            for p, g in zip(self.params, grads, strict=True):
                p.grad = g if p.grad is None else p.grad.add_(g)
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def mean_loss(self, images: Tensor, size: int | None) -> float:
        """The mean loss over ``size`` pixels of ``images``, always the same random ones, or over all if it is None."""
        if size is None:
            pixels = torch.arange(images.numel())
        else:
            pixels = torch.randint(images.numel(), (size,), generator=torch.Generator().manual_seed(0))
        total, pixels_per_image = 0.0, images[0].numel()
        for chunk in torch.split(pixels, CHUNK):
            picks, queries = chunk // pixels_per_image, chunk % pixels_per_image
            total += float(_total_loss(self.scores, self.params, images[picks], queries))
        return total / len(pixels)

    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        """The loss on the held-out images."""
        return {"validation_loss": self.mean_loss(self.validation, self.validation_size)}

    def final(self) -> dict[str, float]:
        """The loss on the test images."""
        return {"test_loss": self.mean_loss(self.test, self.test_size)}

    def buffers(self) -> dict[str, Tensor]:
        return {"picks": self.picks, "queries": self.queries}


Network = Callable[[Sequence[Tensor], Tensor], Tensor]


def _total_loss(network: Network, weights: Sequence[Tensor], images: Tensor, queries: Tensor) -> Tensor:
    """The sum of the cross-entropies of the queried pixels."""
    brightness = images.flatten(1).gather(1, queries[:, None])[:, 0].long()
    return cross_entropy(network(weights, inputs(images, queries)), brightness, reduction="sum")
