"""What the tasks with a `torch.nn.Module` share: seeded weights and batches, and a fixed validation set."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import Optimizer

from lodo._checks import check_int
from lodo.lab import data
from lodo.lab.tasks.base import Task
from lodo.lab.tasks.cifar10 import moments

WINDOWS = 64  # of the validation text, unless a task is told otherwise


class Network(Task):
    """A task whose parameters are those of a module.

    A subclass says in `sample` what is random about a batch, in `loss` what is minimised and in `validate` what is
    measured; its ``__init__`` ends with `begin`.
    """

    module: nn.Module
    batch: dict[str, Tensor]

    def begin(self, make: Callable[[], nn.Module]) -> None:
        """Make the module, with weights that depend on the seed alone, and draw the first batch."""
        self.module = seeded(make, self.rng)
        self.params = list(self.module.parameters())
        self.draw()

    @abstractmethod
    def sample(self) -> dict[str, Tensor]:
        """Everything that is random about a batch, drawn from ``rng``."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """The loss on the validation set, as ``validation_loss``, and what else is measured there."""

    def draw(self) -> None:
        self.batch = self.sample()

    @torch.no_grad()
    def tracked(self, optimizer: Optimizer, step: int) -> dict[str, float]:
        """What `validate` measures."""
        return self.validate()

    def buffers(self) -> dict[str, Tensor]:
        return self.batch


class ImageNetwork(Network):
    """A network on MNIST; a batch is drawn from all training images with replacement.

    The first ``validation_size`` test images are for validation. Digits of 8 x 8 pixels are enlarged (see `enlarge`).

    Args:
        seed: draws the weights and the batches.
        batch: the number of images per step.
        digest: the digest that the data must have (see `lodo.lab.data.Dataset`); None accepts any data.
    """

    dataset: ClassVar[str | None] = "mnist"
    validation_size: ClassVar[int] = 1000

    def __init__(self, seed: int, *, batch: int, digest: str | None) -> None:
        super().__init__(seed)
        check_int("batch", batch, low=1)
        found = data.load("mnist")
        data.check_digest(found, digest)
        (self.images, self.labels), (test_images, test_labels) = _enlarged(found)
        self.test_images, self.test_labels = test_images[: self.validation_size], test_labels[: self.validation_size]
        self.size = batch

    def sample(self) -> dict[str, Tensor]:
        return {"picks": torch.randint(len(self.images), (self.size,), generator=self.rng)}


class Classifier(ImageNetwork):
    """Tells digits apart; the loss is the cross-entropy.

    The images (image x 1 x 28 x 28) are normalised with the mean and standard deviation of the training images.
    """

    def begin(self, make: Callable[[], nn.Module]) -> None:
        self.mean, self.deviation = (float(moment) for moment in _moments(self.images))
        super().begin(make)

    def loss(self) -> Tensor:
        picks = self.batch["picks"]
        return cross_entropy(self.logits(self.images[picks]), self.labels[picks])

    def logits(self, images: Tensor) -> Tensor:
        """The network's answer to images of bytes."""
        logits: Tensor = self.module((images[:, None].float() - self.mean) / self.deviation)
        return logits

    def validate(self) -> dict[str, float]:
        return classified(self.logits(self.test_images), self.test_labels)


class TextNetwork(Network):
    """Predicts every character of windows of a text from those before it; the loss is the mean cross-entropy in nats.

    A batch consists of windows at random places of the first nine tenths of the text. For validation, there are
    windows at fixed, equal distances in the rest.

    Args:
        seed: draws the weights and the batches.
        batch: the number of windows per step.
        context: the number of predicted characters of a window.
        windows: the number of windows for validation.
        digest: the digest that the text must have (see `lodo.lab.data.Text`); None accepts any text.
    """

    dataset: ClassVar[str | None] = "text"

    def __init__(self, seed: int, *, batch: int, context: int, windows: int, digest: str | None) -> None:
        super().__init__(seed)
        check_int("batch", batch, low=1)
        check_int("context", context, low=1)
        check_int("windows", windows, low=1)
        text = data.load("text")
        data.check_digest(text, digest)
        if len(text.validation) <= context:
            raise ValueError(
                f"data must be a text of at least {10 * context + 1:,} characters for windows of {context}, so that "
                f"the tenth for validation has one, got {len(text.train) + len(text.validation):,}"
            )
        self.text, self.size, self.context = text, batch, context
        self.fixed = torch.linspace(0, len(text.validation) - context - 1, windows, dtype=torch.float64).long()

    def sample(self) -> dict[str, Tensor]:
        return {"starts": torch.randint(len(self.text.train) - self.context, (self.size,), generator=self.rng)}

    def loss(self) -> Tensor:
        return self._mean_loss(self.text.train, self.batch["starts"])

    def validate(self) -> dict[str, float]:
        return {"validation_loss": float(self._mean_loss(self.text.validation, self.fixed))}

    def _mean_loss(self, text: Tensor, starts: Tensor) -> Tensor:
        windows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        logits: Tensor = self.module(windows[:, :-1])
        return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def seeded(make: Callable[[], nn.Module], rng: torch.Generator) -> nn.Module:
    """A module whose initial weights are drawn with a seed from ``rng``; torch's own generator is left as it was.

    >>> modules = [seeded(lambda: nn.Linear(2, 1), torch.Generator().manual_seed(0)) for _ in range(2)]
    >>> torch.equal(modules[0].weight, modules[1].weight)
    True
    """
    seed = int(torch.randint(2**31, (), generator=rng))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def classified(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The mean cross-entropy and the share of right answers.

    >>> classified(torch.tensor([[0.0, 0.0], [0.0, 9.0]]), torch.tensor([1, 1]))["test_accuracy"]
    0.5
    """
    return {
        "test_accuracy": float((logits.argmax(1) == labels).double().mean()),
        "validation_loss": float(cross_entropy(logits, labels)),
    }


def enlarge(images: Tensor) -> Tensor:
    """Enlarge images of 8 x 8 pixels to 28 x 28: squares of 3 x 3, and a margin of 2. Others stay as they are.

    >>> enlarge(torch.ones(1, 8, 8, dtype=torch.uint8))[0, 2, :4]
    tensor([0, 0, 1, 1], dtype=torch.uint8)
    """
    if images.shape[-1] != 8:
        return images
    return pad(images.repeat_interleave(3, 1).repeat_interleave(3, 2), (2, 2, 2, 2))


@functools.lru_cache(maxsize=1)
def _enlarged(found: data.Dataset) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The images and the labels for training, and those for validation."""
    train, test = ((enlarge(part.images), part.labels.long()) for part in (found.train, found.test))
    return train, test


@functools.lru_cache(maxsize=1)
def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    return moments(images[:, None])
