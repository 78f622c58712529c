"""A small imitation of MNIST in files of its format, and whether the real one is at hand."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np

from lodo.lab.data import MNIST_FILES, VARIABLE

REAL = (Path(os.environ.get(VARIABLE, "nowhere")) / "mnist" / MNIST_FILES[0]).is_file()


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as an idx file, not yet compressed."""
    sizes = b"".join(size.to_bytes(4) for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def imitation(train: int = 300, test: int = 100, seed: int = 0) -> list[np.ndarray]:
    """Images and labels to train and to test on: ten random patterns under noise."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 200, (10, 28, 28))
    arrays = []
    for number in (train, test):
        labels = rng.integers(0, 10, number)
        arrays += [patterns[labels] + rng.integers(0, 56, (number, 28, 28)), labels]
    return arrays


def write_mnist(folder: Path, arrays: list[np.ndarray] | None = None, level: int = 9) -> Path:
    """Write the four files into ``folder / "mnist"`` and return ``folder``."""
    (folder / "mnist").mkdir(parents=True)
    for name, array in zip(MNIST_FILES, imitation() if arrays is None else arrays, strict=True):
        (folder / "mnist" / name).write_bytes(gzip.compress(idx(array), level))
    return folder
