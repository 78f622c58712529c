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

from lodo.lab.data.base import DIGEST_LENGTH, Dataset, Labelled, check_labels, data_folder
from lodo.lab.data.download import download_missing, fetch

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
_BYTES = 8  # the code of the idx format for unsigned bytes


def load_mnist() -> Dataset:
    """MNIST, from the four original files in the subfolder ``mnist``; read once per process.

    Missing files are downloaded. Files that exist are used even if they are not the original ones; their digest then
    differs from `MNIST_DIGEST`.
    """
    return _mnist(data_folder() / "mnist")


@functools.cache
def _mnist(folder: Path) -> Dataset:
    download_missing(folder, MNIST_FILES, " or ".join(MNIST_MIRRORS), functools.partial(_download, folder))
    images, labels, test_images, test_labels = (folder / name for name in MNIST_FILES)
    digest = hashlib.sha256()
    train = _labelled(images, labels, digest)
    test = _labelled(test_images, test_labels, digest)
    return Dataset(train, test, digest.hexdigest()[:DIGEST_LENGTH])


def _download(folder: Path, missing: Sequence[str], progress: Progress) -> None:
    for name in missing:
        part = folder / f"{name}.part"
        fetch(part, [mirror + name for mirror in MNIST_MIRRORS], MNIST_MD5[name], progress)
        part.replace(folder / name)


def _labelled(images: Path, labels: Path, digest: hashlib._Hash) -> Labelled:
    """Images of 28 x 28 pixels and their labels, from two files that belong together."""
    found = Labelled(read_idx(images, 3, digest), read_idx(labels, 1, digest))
    number, height, width = found.images.shape
    if (height, width) != (28, 28):
        raise ValueError(f"{images} must have images of 28 x 28 pixels, got {height} x {width}")
    if len(found.labels) != number:
        raise ValueError(f"{labels} must have a label for each of {number:,} images, got {len(found.labels):,}")
    check_labels(labels, found.labels)
    return found


def read_idx(path: Path, dimensions: int, digest: hashlib._Hash | None = None) -> Tensor:
    """Read an array of bytes from a gzipped idx file and add its unpacked content to ``digest``.

    The unpacked file has two zero bytes, the code of the element type (8 for bytes), the number of dimensions, the
    size of each dimension as a four-byte integer, and the elements in row-major order.

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
            f"{path} is cut short, damaged or not gzipped: {error}; delete it to download it again"
        ) from error
    magic = bytes([0, 0, _BYTES, dimensions])
    if content[:4] != magic:
        raise ValueError(f"{path} must be an idx file that begins with {magic.hex()}, got {content[:4].hex()}")
    header = 4 + 4 * dimensions
    shape = [int.from_bytes(content[at : at + 4]) for at in range(4, header, 4)]
    size = header + math.prod(shape)
    if len(content) != size:
        raise ValueError(f"{path} must have {size:,} bytes when unpacked, got {len(content):,}")
    if 0 in shape:
        raise ValueError(f"{path} must not be empty, got the dimensions {shape}")
    if digest is not None:
        digest.update(content)
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(shape)
