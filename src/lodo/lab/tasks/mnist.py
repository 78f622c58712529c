"""Image generation on MNIST's digits: the paper's largest comparison of optimizers."""

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
HELD_OUT = 64  # training images that are for validation instead: the last ones
CHUNK = 16  # images that go through the network at once


class Mnist(Task):
    """The cross-entropy, in nats, of one random pixel of each image of a random batch, given the pixels before it.

    The images of a batch are drawn with replacement.

    Args:
        seed: draws the weights and the batches.
        batch: images a step.
        validation_size: how many pixels of the held-out images the validation loss is measured on, always the same
            random ones; None for all pixels of all 64, as in the paper.
        test_size: the same for the test images.
        fused: whether the network runs on kernels of its own or on torch's convolutions.
        digest: if given, that of the data (`lodo.lab.data.Dataset`), which is then checked.
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
        self.picks, self.queries = torch.zeros(2, batch, dtype=torch.int64)
        self.draw()

    def draw(self) -> None:
        """Take other images, and another pixel of each."""
        torch.randint(len(self.train), self.picks.shape, generator=self.rng, out=self.picks)
        torch.randint(self.train[0].numel(), self.queries.shape, generator=self.rng, out=self.queries)

    def loss(self) -> Tensor:
        return _sum(scores, self.params, self.train[self.picks], self.queries) / len(self.picks)

    def evaluate(self, create_graph: bool = False) -> float:
        """As `Task.evaluate`, in chunks that fit the processor's cache."""
        if create_graph or self.scores is scores:
            return super().evaluate(create_graph)
        total = 0.0
        for p in self.params:
            p.grad = None
        images = self.train[self.picks]
        for at in range(0, len(images), CHUNK):
            part = slice(at, at + CHUNK)
            with torch.enable_grad():
                loss = _sum(self.scores, self.params, images[part], self.queries[part]) / len(images)
                grads = torch.autograd.grad(loss, self.params)
            for p, g in zip(self.params, grads, strict=True):
                p.grad = g if p.grad is None else p.grad.add_(g)
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def measured(self, images: Tensor, size: int | None) -> float:
        """The mean loss over so many pixels, or all of them."""
        pixels = images.numel()
        drawn = torch.Generator().manual_seed(0)
        asked = torch.arange(pixels) if size is None else torch.randint(pixels, (size,), generator=drawn)
        total, each = 0.0, images[0].numel()
        for at in range(0, len(asked), CHUNK):
            part = asked[at : at + CHUNK]
            total += float(_sum(self.scores, self.params, images[part // each], part % each))
        return total / len(asked)

    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        return {"validation_loss": self.measured(self.validation, self.validation_size)}

    def final(self) -> dict[str, float]:
        return {"test_loss": self.measured(self.test, self.test_size)}

    def buffers(self) -> dict[str, Tensor]:
        return {"picks": self.picks, "queries": self.queries}


Network = Callable[[Sequence[Tensor], Tensor], Tensor]


def _sum(network: Network, weights: Sequence[Tensor], images: Tensor, queries: Tensor) -> Tensor:
    brightness = images.flatten(1).gather(1, queries[:, None])[:, 0].long()
    return cross_entropy(network(weights, inputs(images, queries)), brightness, reduction="sum")
