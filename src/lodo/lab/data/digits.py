"""Scikit-learn's digits of 8 x 8 pixels: small, and available without any file."""

from __future__ import annotations

import functools
import hashlib
from importlib import import_module

import torch

from lodo.lab.data.base import DIGEST_LENGTH, Dataset, Labelled

DIGITS_DIGEST = "ce885ddbfdef"
_TRAIN = 1500  # the first images; the other 297 are the test set


@functools.cache
def load_digits() -> Dataset:
    """1,797 digits of 8 x 8 pixels, with shades from 0 to 16 scaled to 0 to 255; read once per process.

    >>> load_digits().test.labels[:5]
    tensor([1, 7, 4, 6, 3], dtype=torch.uint8)
    """
    try:
        found = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise ValueError(
            "the digits need scikit-learn, which is not installed: pip install '.[lab]' in the folder of the repository"
        ) from error
    images = (torch.from_numpy(found.images).long() * 255 // 16).byte()
    labels = torch.from_numpy(found.target).byte()
    train = Labelled(images[:_TRAIN], labels[:_TRAIN])
    test = Labelled(images[_TRAIN:], labels[_TRAIN:])
    digest = hashlib.sha256()
    for tensor in (train.images, train.labels, test.images, test.labels):
        digest.update(tensor.numpy().tobytes())
    return Dataset(train, test, digest.hexdigest()[:DIGEST_LENGTH])
