"""Image classification with a residual network (the paper's Section 5.4): ResNet-18 on CIFAR-10."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.optim import Optimizer

from lodo._checks import check_int, check_real
from lodo.lab import data
from lodo.lab.tasks.base import Task
from lodo.lab.tasks.resnet import moving_statistics, resnet

BATCH = 2048
MICRO_BATCH = 256
L2 = 1e-4
MOMENTUM = 0.1  # of the running statistics of batch norm, in torch's sense
_TESTED_AT_ONCE = 500  # images


class Cifar10(Task):
    """Classifies small images; the loss is the mean cross-entropy of a batch, plus an L2 term.

    Batches are taken in turn from a random order of all training images; a new order is drawn once all have been used.
    An image is padded with black by an eighth of its side, cropped to its size at a random place, mirrored with
    probability 1/2, and normalised channel by channel with the mean and standard deviation of the training images.
    Before the first `draw`, the batch consists of the first images, unchanged.

    The gradient is summed over micro-batches, each normalised with its own statistics by batch norm. The running
    statistics are updated once for every batch drawn, with momentum 0.1 and the mean over its micro-batches.

    Args:
        seed: draws the weights, the batches and the augmentation.
        model: ``"resnet18"`` (the paper's), ``"resnet20"``, ``"resnet8"``, or ``"narrow8"``, a ResNet-8 of half the
            width.
        batch: the number of images per step.
        micro_batch: the number of images in memory at once: at least ``batch``, or a divisor of it.
        train_size: the number of training images, the first ones; None for all.
        test_size: the number of test images, the first ones; None for all.
        l2: the factor of the L2 term, the sum of squares of all weights of convolutions and of the last layer, without
            biases and batch norm. As in Keras, there is no factor 1/2.
        digest: the digest that the data must have (see `lodo.lab.data.Dataset`); None accepts any data.
    """

    threads: ClassVar[int | None] = None
    dataset: ClassVar[str | None] = "cifar10"

    def __init__(
        self,
        seed: int,
        *,
        model: str = "resnet18",
        batch: int = BATCH,
        micro_batch: int = MICRO_BATCH,
        train_size: int | None = None,
        test_size: int | None = None,
        l2: float = L2,
        digest: str | None = None,
    ) -> None:
        super().__init__(seed)
        check_int("batch", batch, low=2)  # batch norm needs two images
        check_int("micro_batch", micro_batch, low=2)
        if micro_batch < batch and batch % micro_batch:
            raise ValueError(
                f"micro_batch must be at least batch or a divisor of it, so that all micro-batches have the same size, "
                f"got {micro_batch} with batch = {batch}"
            )
        check_real("l2", l2, low=0.0)
        self.model = resnet(model, self.rng)
        self.params = list(self.model.parameters())
        self.decayed = [p for p in self.params if p.ndim > 1]
        self.l2, self.micro_batch = l2, min(batch, micro_batch)
        found = data.load("cifar10")
        data.check_digest(found, digest)
        self.train = _first_images("train_size", train_size, found.train)
        self.test = _first_images("test_size", test_size, found.test)
        self.mean, self.deviation = moments(self.train[0])
        size = len(self.train[0])
        self.padding = self.train[0].shape[-1] // 8
        self.order = torch.arange(size)
        self.used = torch.tensor(size)  # how much of the order; all of it, so that the first draw makes a new one
        self.batch = torch.arange(batch) % size
        self.corner = torch.full((batch, 2), self.padding)
        self.mirrored = torch.zeros(batch, dtype=torch.bool)
        self.fresh = torch.tensor(True)  # whether the running statistics do not include this batch yet

    def draw(self) -> None:
        """Take the next images of the order, and draw how they are augmented."""
        batch, size = len(self.batch), len(self.order)
        taken = 0
        while taken < batch:
            if self.used == size:
                torch.randperm(size, generator=self.rng, out=self.order)
                self.used.zero_()
            part = self.order[int(self.used) :][: batch - taken]
            self.batch[taken : taken + len(part)] = part
            self.used += len(part)
            taken += len(part)
        torch.randint(2 * self.padding + 1, (batch, 2), generator=self.rng, out=self.corner)
        self.mirrored.copy_(torch.randint(2, (batch,), generator=self.rng))
        self.fresh.fill_(True)

    def loss(self) -> Tensor:
        """The loss on the current batch, as a single micro-batch; the running statistics do not change."""
        return self._cross_entropy(slice(None)) + self._penalty()

    def evaluate(self, create_graph: bool = False) -> float:
        """As in `Task`, one micro-batch after the other."""
        batch, micro = len(self.batch), self.micro_batch
        parts = batch // micro
        momenta = micro_batch_momenta(parts) if self.fresh else [0.0] * parts
        if create_graph:
            if parts > 1:
                raise ValueError(
                    f"create_graph must be False with {parts} micro-batches, got True: "
                    f"an optimizer that differentiates the gradient needs micro_batch >= batch = {batch}"
                )
            with moving_statistics(self.model, momenta[0]):
                value = super().evaluate(create_graph)
        else:
            value = self._accumulate([slice(at, at + micro) for at in range(0, batch, micro)], momenta)
        self.fresh.fill_(False)
        return value

    def _accumulate(self, parts: list[slice], momenta: list[float]) -> float:
        """The loss, and its gradient in the parameters' ``grad``, summed over parts of the batch."""
        for p in self.params:
            p.grad = None
        total = torch.zeros(())
        for part, momentum in zip(parts, momenta, strict=True):
            with torch.enable_grad(), moving_statistics(self.model, momentum):
                loss = self._cross_entropy(part)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        with torch.no_grad():
            total += self._penalty()
            for p in self.decayed:
                assert p.grad is not None
                p.grad.add_(p, alpha=2 * self.l2)
        return float(total)

    def _cross_entropy(self, part: slice) -> Tensor:
        """The cross-entropy summed over a part of the batch, divided by the size of the whole batch."""
        images, labels = self.train
        picks = self.batch[part]
        shown = augmented(images[picks], self.corner[part], self.mirrored[part], self.padding)
        logits = self.model(self._normalised(shown))
        return cross_entropy(logits, labels[picks], reduction="sum") / len(self.batch)

    def _penalty(self) -> Tensor:
        return self.l2 * torch.stack([p.square().sum() for p in self.decayed]).sum()

    def _normalised(self, images: Tensor) -> Tensor:
        """Bytes to floating-point numbers, in the memory format that is fastest for convolutions."""
        numbers = images.float().sub_(self.mean[:, None, None]).div_(self.deviation[:, None, None])
        return numbers.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        """The accuracy and the mean cross-entropy on the test images."""
        images, labels = self.test
        correct, loss = 0, 0.0
        self.model.eval()
        for start in range(0, len(images), _TESTED_AT_ONCE):
            part = slice(start, start + _TESTED_AT_ONCE)
            logits = self.model(self._normalised(images[part]))
            correct += int((logits.argmax(1) == labels[part]).sum())
            loss += float(cross_entropy(logits, labels[part], reduction="sum"))
        self.model.train()
        return {"test_accuracy": correct / len(images), "test_loss": loss / len(images)}

    def buffers(self) -> dict[str, Tensor]:
        return {
            "order": self.order,
            "used": self.used,
            "batch": self.batch,
            "corner": self.corner,
            "mirrored": self.mirrored,
            "fresh": self.fresh,
            **dict(self.model.named_buffers()),
        }


def micro_batch_momenta(parts: int) -> list[float]:
    """The momentum of batch norm for each micro-batch, so that all weigh the same, together `MOMENTUM`.

    >>> micro_batch_momenta(1), [round(momentum, 5) for momentum in micro_batch_momenta(2)]
    ([0.1], [0.05263, 0.05])
    """
    return [MOMENTUM / (parts - later * MOMENTUM) for later in reversed(range(parts))]


def augmented(images: Tensor, corner: Tensor, mirrored: Tensor, padding: int) -> Tensor:
    """Pad every image with zeros, crop it to its size at its corner (row, column), and mirror it if it is to be.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> augmented(image, torch.tensor([[2, 1]]), torch.tensor([True]), padding=1)
    tensor([[[[4, 3],
              [0, 0]]]], dtype=torch.uint8)
    """
    number, channels, height, width = images.shape
    padded = pad(images, (padding, padding, padding, padding))
    left_to_right = torch.arange(width)
    rows = corner[:, :1] + torch.arange(height)
    columns = corner[:, 1:] + torch.where(mirrored[:, None], left_to_right.flip(0), left_to_right)
    pixels = (rows[:, :, None] * padded.shape[-1] + columns[:, None]).view(number, 1, -1)
    return padded.flatten(2).gather(2, pixels.expand(-1, channels, -1)).view(images.shape)


def moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of images of bytes, from exact counts of their values.

    >>> moments(torch.tensor([[[[1, 3]], [[5, 5]]]], dtype=torch.uint8))
    (tensor([2., 5.]), tensor([1., 0.]))
    """
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])
    shares = counts / counts.sum(1, keepdim=True).double()
    mean = shares @ values
    variance = (shares * (values - mean[:, None]).square()).sum(1)
    return mean.float(), variance.sqrt().float()


def _first_images(name: str, size: int | None, found: data.Labelled) -> tuple[Tensor, Tensor]:
    """The first ``size`` images, in three colours, and their labels; all if ``size`` is None."""
    if size is not None:
        check_int(name, size, low=1, high=len(found.images))
    images = found.images[:size]
    colours = images if images.ndim == 4 else images[:, None].expand(-1, 3, -1, -1)
    return colours, found.labels[:size].long()
