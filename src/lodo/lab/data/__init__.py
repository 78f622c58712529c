"""Data sets: found on disk or downloaded, checked and read.

All of them live in one folder, with a subfolder for each. ``--data`` or the environment variable LODO_DATA names that
folder; otherwise it is in the user's cache. The word ``digits`` instead of a folder stands for scikit-learn's small
digits, which need no files. A run records a digest of its data and not the path, so the same data gives the same run
on every machine.
"""

from __future__ import annotations

import os

from lodo._checks import check_choice
from lodo.lab.data.base import BUNDLED, VARIABLE, Dataset, Labelled, check_digest, using
from lodo.lab.data.cifar10 import CIFAR10_DIGEST, CIFAR10_FILES, load_cifar10, read_batch
from lodo.lab.data.digits import DIGITS_DIGEST, load_digits
from lodo.lab.data.mnist import MNIST_DIGEST, MNIST_FILES, load_mnist, read_idx

__all__ = [
    "CIFAR10_DIGEST",
    "CIFAR10_FILES",
    "DIGITS_DIGEST",
    "LOADERS",
    "MNIST_DIGEST",
    "MNIST_FILES",
    "VARIABLE",
    "Dataset",
    "Labelled",
    "check_digest",
    "load",
    "load_cifar10",
    "load_digits",
    "load_mnist",
    "read_batch",
    "read_idx",
    "using",
]

LOADERS = {"mnist": load_mnist, "cifar10": load_cifar10}


def load(name: str) -> Dataset:
    """The data set of this name, or the small digits in its place if ``digits`` is given as the folder.

    >>> with using("digits"):
    ...     load("mnist").train.images.shape
    torch.Size([1500, 8, 8])
    """
    check_choice("name", name, LOADERS)
    if os.environ.get(VARIABLE) == BUNDLED:
        return load_digits()
    return LOADERS[name]()
