"""Data sets: found on disk or downloaded, checked and read.

They are in one folder, given by ``--data`` or in the environment variable LODO_DATA, else in the user's cache, with a
subfolder for each set. The word ``digits`` in place of a folder stands for scikit-learn's small digits, which need no
files. The path is no part of a run: a digest of the data is, so that the same data is the same run on every machine.
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
    "MNIST_DIGEST",
    "MNIST_FILES",
    "SETS",
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

SETS = {"mnist": load_mnist, "cifar10": load_cifar10}


def load(name: str) -> Dataset:
    """The set of this name; the small digits in its place if ``digits`` is given as the data.

    >>> with using("digits"):
    ...     load("mnist").train.images.shape
    torch.Size([1500, 8, 8])
    """
    check_choice("name", name, SETS)
    return load_digits() if os.environ.get(VARIABLE) == BUNDLED else SETS[name]()
