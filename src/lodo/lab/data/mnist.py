"""MNIST, from its four original files."""

from __future__ import annotations

import functools
import gzip
import hashlib
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from lodo.lab.data.base import Dataset, Labelled, data_folder
from lodo.lab.data.download import complete, fetch

MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
MNIST_FILES = tuple(MNIST_MD5)
MNIST_DIGEST = "b2d8f5bf3917"  # of the original files
MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


def load_mnist() -> Dataset:
    """MNIST's digits, from the four original files in the subfolder ``mnist``; read once a process.

    Files that are missing are downloaded. Files that are there are used, also if they are not the original ones: the
    digest tells.
    """
    return _mnist(data_folder() / "mnist")


@functools.cache
def _mnist(folder: Path) -> Dataset:
    complete(folder, MNIST_FILES, " or ".join(MNIST_MIRRORS), functools.partial(_download, folder))
    images, labels, test_images, test_labels = (folder / name for name in MNIST_FILES)
    digest = hashlib.sha256()
    train, test = _digits(images, labels, digest), _digits(test_images, test_labels, digest)
    return Dataset(train, test, digest.hexdigest()[:12])


def _download(folder: Path, missing: Sequence[str], progress: Progress) -> None:
    for name in missing:
        part = folder / f"{name}.part"
        fetch(part, [mirror + name for mirror in MNIST_MIRRORS], MNIST_MD5[name], progress)
        part.replace(folder / name)


def _digits(images: Path, labels: Path, digest: hashlib._Hash) -> Labelled:
    """Images of 28 x 28 pixels and their labels, from two files that belong together."""
    found = Labelled(read_idx(images, 3, digest), read_idx(labels, 1, digest))
    number, height, width = found.images.shape
    if (height, width) != (28, 28):
        raise ValueError(f"{images} must have images of 28 x 28 pixels, got {height} x {width}")
    if len(found.labels) != number:
        raise ValueError(f"{labels} must have a label for each of {number:,} images, got {len(found.labels):,}")
    if found.labels.max() > 9:
        raise ValueError(f"{labels} must have labels from 0 to 9, got {int(found.labels.max())}")
    return found


def read_idx(path: Path, dimensions: int, digest: hashlib._Hash | None = None) -> Tensor:
    """An array of bytes from a gzipped idx file; its unpacked content goes into ``digest``.

    The file has the bytes 0, 0, 8 (for bytes), the number of dimensions, each dimension as four bytes, then the
    numbers, the last dimension fastest.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "labels.gz"
        >>> _ = file.write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1])))
        >>> read_idx(file, dimensions=1)
        tensor([7, 2, 1], dtype=torch.uint8)
    """
    try:
        content = bytearray(gzip.decompress(path.read_bytes()))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is cut short, damaged or not gzipped: {error}; delete it to download it anew"
        ) from error
    head = 4 + 4 * dimensions
    wanted = bytes([0, 0, 8, dimensions])
    if content[:4] != wanted:
        raise ValueError(f"{path} must be an idx file that begins with {wanted.hex()}, got {content[:4].hex()}")
    shape = [int.from_bytes(content[at : at + 4]) for at in range(4, head, 4)]
    if len(content) != head + math.prod(shape):
        raise ValueError(f"{path} must have {head + math.prod(shape):,} bytes unpacked, got {len(content):,}")
    if 0 in shape:
        raise ValueError(f"{path} must not be empty, got the dimensions {shape}")
    if digest is not None:
        digest.update(content)
    return torch.frombuffer(content, dtype=torch.uint8, offset=head).view(shape)
