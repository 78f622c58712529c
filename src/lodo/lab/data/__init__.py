"""Data sets: found on disk or downloaded, checked and read.

All of them live in one folder, with a subfolder for each. ``--data`` or the environment variable LODO_DATA names that
folder; otherwise it is in the user's cache. The word ``digits`` instead of a folder stands for data that needs no
files: scikit-learn's small digits for images, and the source of Python's standard library for text. A run records a
digest of its data and not the path, so the same data gives the same run on every machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, overload

from lodo._checks import check_choice
from lodo.lab.data.base import BUNDLED, VARIABLE, Dataset, Labelled, check_digest, using
from lodo.lab.data.cifar10 import CIFAR10_DIGEST, CIFAR10_FILES, load_cifar10, read_batch
from lodo.lab.data.digits import DIGITS_DIGEST, load_digits
from lodo.lab.data.mnist import MNIST_DIGEST, MNIST_FILES, load_mnist, read_idx
from lodo.lab.data.text import SHAKESPEARE_DIGEST, Text, load_library, load_text, read_text

__all__ = [
    "CIFAR10_DIGEST",
    "CIFAR10_FILES",
    "DIGITS_DIGEST",
    "LOADERS",
    "MNIST_DIGEST",
    "MNIST_FILES",
    "SHAKESPEARE_DIGEST",
    "VARIABLE",
    "Dataset",
    "Labelled",
    "Text",
    "check_digest",
    "load",
    "load_cifar10",
    "load_digits",
    "load_library",
    "load_mnist",
    "load_text",
    "read_batch",
    "read_idx",
    "read_text",
    "using",
]

LOADERS: dict[str, Callable[[], Dataset | Text]] = {"mnist": load_mnist, "cifar10": load_cifar10, "text": load_text}


@overload
def load(name: Literal["mnist", "cifar10"]) -> Dataset: ...
@overload
def load(name: Literal["text"]) -> Text: ...
@overload
def load(name: str) -> Dataset | Text: ...


def load(name: str) -> Dataset | Text:
    """The data set of this name, or what needs no files in its place if ``digits`` is given as the folder.

    >>> with using("digits"):
    ...     load("mnist").train.images.shape
    torch.Size([1500, 8, 8])
    """
    check_choice("name", name, LOADERS)
    if os.environ.get(VARIABLE) == BUNDLED:
        return load_library() if name == "text" else load_digits()
    return LOADERS[name]()
