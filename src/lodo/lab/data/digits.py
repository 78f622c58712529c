"""Scikit-learn's digits of 8 x 8 pixels: small, and there without any file."""

from __future__ import annotations

import functools
import hashlib
from importlib import import_module

import torch
from torch import Tensor

from lodo.lab.data.base import Dataset, Labelled

DIGITS_DIGEST = "ce885ddbfdef"
_TRAIN = 1500  # the first images; the other 297 are for testing


@functools.cache
def load_digits() -> Dataset:
    """1,797 digits of 8 x 8 pixels, their shades from 0 to 16 spread over a byte; read once a process.

    >>> load_digits().test.labels[:5]
    tensor([1, 7, 4, 6, 3], dtype=torch.uint8)
    """
    try:
        found = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise ValueError(f"digits need scikit-learn, of the extra lab: pip install 'lodo[lab]' ({error})") from error
    images = (torch.from_numpy(found.images).long() * 255 // 16).byte()
    labels = torch.from_numpy(found.target).byte()
    train = Labelled(images[:_TRAIN], labels[:_TRAIN])
    test = Labelled(images[_TRAIN:], labels[_TRAIN:])
    return Dataset(train, test, _digest(train.images, train.labels, test.images, test.labels))


def _digest(*parts: Tensor) -> str:
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:12]
