"""Small imitations of MNIST and CIFAR-10 in the original file formats, and whether the real data is available."""

from __future__ import annotations

import gzip
import os
import socket
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np

from lodo.lab.data import CIFAR10_FILES, MNIST_FILES, VARIABLE, load_mnist, mnist, using

_GIVEN = Path(os.environ.get(VARIABLE) or "nowhere")
REAL = (_GIVEN / "mnist" / MNIST_FILES[0]).is_file()
REAL_CIFAR10 = (_GIVEN / "cifar-10-batches-bin" / CIFAR10_FILES[0]).is_file()
REAL_TEXT = (_GIVEN / "text" / "shakespeare.txt").is_file()


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as the content of an idx file, before compression."""
    sizes = b"".join(size.to_bytes(4) for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def imitation(train: int = 300, test: int = 100, seed: int = 0) -> list[np.ndarray]:
    """Training images, training labels, test images and test labels: ten random patterns with noise."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 200, (10, 28, 28))
    arrays = []
    for number in (train, test):
        labels = rng.integers(0, 10, number)
        arrays += [patterns[labels] + rng.integers(0, 56, (number, 28, 28)), labels]
    return arrays


def mnist_files(arrays: list[np.ndarray] | None = None, level: int = 9) -> dict[str, bytes]:
    """The contents of the four files, by name."""
    arrays = imitation() if arrays is None else arrays
    return {name: gzip.compress(idx(array), level, mtime=0) for name, array in zip(MNIST_FILES, arrays, strict=True)}


def write_mnist(folder: Path, arrays: list[np.ndarray] | None = None, level: int = 9) -> Path:
    """Write the four files into ``folder / "mnist"`` and return ``folder``."""
    return _write(folder, "mnist", mnist_files(arrays, level))


def cifar10_files(number: int = 4, seed: int = 0) -> dict[str, bytes]:
    """The contents of six files with ``number`` random images each, by name."""
    rng = np.random.default_rng(seed)
    files = {}
    for name in CIFAR10_FILES:
        labels, pixels = rng.integers(0, 10, (number, 1)), rng.integers(0, 256, (number, 3072))
        files[name] = np.hstack([labels, pixels]).astype(np.uint8).tobytes()
    return files


def write_cifar10(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    """Write the six files into ``folder / "cifar-10-batches-bin"`` and return ``folder``."""
    return _write(folder, "cifar-10-batches-bin", cifar10_files() if files is None else files)


def _write(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    (folder / name).mkdir(parents=True)
    for file, content in files.items():
        (folder / name / file).write_bytes(content)
    return folder


def take_offline(monkeypatch, cache: Path) -> str:
    """Replace all mirrors by an address at which no server listens, and the user's cache by ``cache``.

    Returns that address.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        unreachable = f"http://127.0.0.1:{free.getsockname()[1]}/"
    monkeypatch.setattr("lodo.lab.data.mnist.MNIST_MIRRORS", (unreachable,))
    monkeypatch.setattr("lodo.lab.data.cifar10.CIFAR10_ARCHIVE", unreachable + "cifar-10-binary.tar.gz")
    monkeypatch.setattr("lodo.lab.data.text.TEXT_MIRRORS", (unreachable + "input.txt",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("no_proxy", "*")
    return unreachable


def read_mnist_elsewhere(folder: Path, mirror: str, md5: dict[str, str], log: Path, answer) -> None:
    """In another process: read MNIST in ``folder`` and send its digest to ``answer``; messages go to ``log``."""
    os.environ["no_proxy"] = "*"
    mnist.MNIST_MIRRORS, mnist.MNIST_MD5 = (mirror,), md5
    with log.open("w", buffering=1) as messages, redirect_stderr(messages), using(folder):
        answer.send(load_mnist().digest)
