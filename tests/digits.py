"""Small imitations of MNIST and CIFAR-10 in files of their formats, and whether the real ones are at hand."""

from __future__ import annotations

import gzip
import os
import socket
from pathlib import Path

import numpy as np

from lodo.lab.data import CIFAR10_FILES, MNIST_FILES, VARIABLE

_GIVEN = Path(os.environ.get(VARIABLE) or "nowhere")
REAL = (_GIVEN / "mnist" / MNIST_FILES[0]).is_file()
REAL_CIFAR10 = (_GIVEN / "cifar-10-batches-bin").is_dir()


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


def mnist_files(arrays: list[np.ndarray] | None = None, level: int = 9) -> dict[str, bytes]:
    """The four files by their names."""
    arrays = imitation() if arrays is None else arrays
    return {name: gzip.compress(idx(array), level, mtime=0) for name, array in zip(MNIST_FILES, arrays, strict=True)}


def write_mnist(folder: Path, arrays: list[np.ndarray] | None = None, level: int = 9) -> Path:
    """Write the four files into ``folder / "mnist"`` and return ``folder``."""
    return _write(folder, "mnist", mnist_files(arrays, level))


def cifar10_files(number: int = 4, seed: int = 0) -> dict[str, bytes]:
    """Six files of random images, ``number`` in each."""
    rng = np.random.default_rng(seed)
    return {
        name: np.hstack([rng.integers(0, 10, (number, 1)), rng.integers(0, 256, (number, 3072))])
        .astype(np.uint8)
        .tobytes()
        for name in CIFAR10_FILES
    }


def write_cifar10(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    """Write the six files into ``folder / "cifar-10-batches-bin"`` and return ``folder``."""
    return _write(folder, "cifar-10-batches-bin", cifar10_files() if files is None else files)


def _write(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    (folder / name).mkdir(parents=True)
    for file, content in files.items():
        (folder / name / file).write_bytes(content)
    return folder


def take_offline(monkeypatch, cache: Path) -> str:
    """Put nobody where the mirrors are, and the user's cache into ``cache``; return nobody's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/"
    monkeypatch.setattr("lodo.lab.data.mnist.MNIST_MIRRORS", (nobody,))
    monkeypatch.setattr("lodo.lab.data.cifar10.CIFAR10_ARCHIVE", nobody + "cifar-10-binary.tar.gz")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("no_proxy", "*")
    return nobody
