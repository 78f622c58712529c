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
SHARE = 0.1  # of a batch in batch norm's running statistics
_TESTED_AT_ONCE = 500  # images


class Cifar10(Task):
    """Classifies small images; the loss is the mean cross-entropy of a batch, plus an L2 term.

    A batch is the next part of a random order of all training images; when these have been used up, there is another
    order. An image is padded with black by an eighth of its side, cropped at a random place to its size, mirrored or
    not, and normalised channel by channel with the mean and deviation of the training images. Until the first `draw`
    the batch has the first images as they are.

    The gradient is summed over micro-batches, each with its own statistics in batch norm. Running statistics move
    once a drawn batch, by a tenth of the way to the mean over its micro-batches.

    Args:
        seed: draws the weights, the batches and how images are changed.
        model: ``"resnet18"`` (the paper's), ``"resnet20"`` or ``"resnet8"``.
        batch: images a step.
        micro_batch: images in memory at once; at least ``batch``, or a divisor of it.
        train_size: how many training images there are, the first ones; all if None.
        test_size: how many test images there are, the first ones; all if None.
        l2: times the sum of squares of all weights of convolutions and of the last layer, but not of biases and batch
            norm. There is no factor 1/2, as in Keras.
        digest: if given, that of the data (`lodo.lab.data.Dataset`), which is then checked.
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
        check_int("batch", batch, low=2)  # batch norm needs two
        check_int("micro_batch", micro_batch, low=2)
        if micro_batch < batch and batch % micro_batch:
            raise ValueError(
                f"micro_batch must be at least batch or a divisor of it, so that all micro-batches are alike, "
                f"got {micro_batch} with batch = {batch}"
            )
        check_real("l2", l2, low=0.0)
        self.model = resnet(model, self.rng)
        self.params = list(self.model.parameters())
        self.decayed = [p for p in self.params if p.ndim > 1]
        self.l2, self.micro_batch = l2, min(batch, micro_batch)
        found = data.load("cifar10")
        data.check_digest(found, digest)
        self.train = _first("train_size", train_size, found.train)
        self.test = _first("test_size", test_size, found.test)
        self.mean, self.deviation = moments(self.train[0])
        size = len(self.train[0])
        self.padding = self.train[0].shape[-1] // 8
        self.order, self.used = torch.arange(size), torch.tensor(size)
        self.batch = torch.arange(batch) % size
        self.corner = torch.full((batch, 2), self.padding)
        self.mirrored = torch.zeros(batch, dtype=torch.bool)
        self.fresh = torch.tensor(True)  # not yet in the running statistics

    def draw(self) -> None:
        """Take the next images of the order, and decide how they are changed."""
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
        """The loss on the current batch, as one micro-batch; running statistics stay."""
        return self._error(slice(None)) + self._penalty()

    def evaluate(self, create_graph: bool = False) -> float:
        """As in `Task`, one micro-batch after the other."""
        batch, micro = len(self.batch), self.micro_batch
        parts = batch // micro
        shares = statistics_shares(parts) if self.fresh else [0.0] * parts
        if create_graph:
            if parts > 1:
                raise ValueError(
                    f"create_graph must be False with {parts} micro-batches, got True: "
                    f"an optimizer that differentiates the gradient needs micro_batch >= batch = {batch}"
                )
            with moving_statistics(self.model, shares[0]):
                value = super().evaluate(create_graph)
        else:
            value = self._accumulate([slice(at, at + micro) for at in range(0, batch, micro)], shares)
        self.fresh.fill_(False)
        return value

    def _accumulate(self, parts: list[slice], shares: list[float]) -> float:
        for p in self.params:
            p.grad = None
        total = torch.zeros(())
        for part, share in zip(parts, shares, strict=True):
            with torch.enable_grad(), moving_statistics(self.model, share):
                error = self._error(part)
                error.backward()  # type: ignore[no-untyped-call]
            total += error.detach()
        with torch.no_grad():
            total += self._penalty()
            for p in self.decayed:
                assert p.grad is not None
                p.grad.add_(p, alpha=2 * self.l2)
        return float(total)

    def _error(self, part: slice) -> Tensor:
        """The cross-entropy of a part of the batch, as a share of the mean over all of it."""
        images, labels = self.train
        chosen = self.batch[part]
        changed = augmented(images[chosen], self.corner[part], self.mirrored[part], self.padding)
        scores = self.model(self._normalised(changed))
        return cross_entropy(scores, labels[chosen], reduction="sum") / len(self.batch)

    def _penalty(self) -> Tensor:
        return self.l2 * torch.stack([p.square().sum() for p in self.decayed]).sum()

    def _normalised(self, images: Tensor) -> Tensor:
        """Bytes to numbers, in the order in memory that convolutions like best."""
        numbers = images.float().sub_(self.mean[:, None, None]).div_(self.deviation[:, None, None])
        return numbers.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        """The share of test images that are recognised, and their mean cross-entropy."""
        right, error, number = 0, 0.0, len(self.test[0])
        self.model.eval()
        for some, truth in zip(*(torch.split(each, _TESTED_AT_ONCE) for each in self.test), strict=True):
            scores = self.model(self._normalised(some))
            right += int((scores.argmax(1) == truth).sum())
            error += float(cross_entropy(scores, truth, reduction="sum"))
        self.model.train()
        return {"test_accuracy": right / number, "test_loss": error / number}

    def buffers(self) -> dict[str, Tensor]:
        own = ("order", "used", "batch", "corner", "mirrored", "fresh")
        return {**{name: getattr(self, name) for name in own}, **dict(self.model.named_buffers())}


def statistics_shares(parts: int) -> list[float]:
    """How far running statistics move with each micro-batch, so that all count alike and are `SHARE` together.

    >>> statistics_shares(1), [round(share, 5) for share in statistics_shares(2)]
    ([0.1], [0.05263, 0.05])
    """
    return [SHARE / (parts - later * SHARE) for later in reversed(range(parts))]


def augmented(images: Tensor, corner: Tensor, mirrored: Tensor, padding: int) -> Tensor:
    """Every image padded with zeros, cropped to its size from its own corner (row, column), then mirrored or not.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> augmented(image, torch.tensor([[2, 1]]), torch.tensor([True]), padding=1)
    tensor([[[[4, 3],
              [0, 0]]]], dtype=torch.uint8)
    """
    number, channels, height, width = images.shape
    padded = pad(images, (padding, padding, padding, padding))
    across = torch.arange(width)
    rows = corner[:, :1] + torch.arange(height)
    columns = corner[:, 1:] + torch.where(mirrored[:, None], across.flip(0), across)
    at = (rows[:, :, None] * padded.shape[-1] + columns[:, None]).view(number, 1, -1)
    return padded.flatten(2).gather(2, at.expand(-1, channels, -1)).view(images.shape)


def moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of images of bytes; counted, so that nothing is rounded.

    >>> moments(torch.tensor([[[[1, 3]], [[5, 5]]]], dtype=torch.uint8))
    (tensor([2., 5.]), tensor([1., 0.]))
    """
    values = torch.arange(256, dtype=torch.float64)
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])
    shares = counts / counts.sum(1, keepdim=True).double()
    mean = shares @ values
    variance = (shares * (values - mean[:, None]).square()).sum(1)
    return mean.float(), variance.sqrt().float()


def _first(name: str, size: int | None, found: data.Labelled) -> tuple[Tensor, Tensor]:
    """So many images, in three colours, and their labels."""
    if size is not None:
        check_int(name, size, low=1, high=len(found.images))
    images = found.images[:size]
    colours = images if images.ndim == 4 else images[:, None].expand(-1, 3, -1, -1)
    return colours, found.labels[:size].long()
