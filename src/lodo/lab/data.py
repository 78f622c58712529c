"""Data sets on disk: found, checked and read.

They are in one folder, given by ``--data`` or in the environment variable LODO_DATA, with a subfolder for each set.
The path is no part of a run: a digest of the data is, so that the same data is the same run on every machine.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VARIABLE = "LODO_DATA"
MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
MNIST_DIGEST = "b2d8f5bf3917"  # of the original files


@dataclass(frozen=True, eq=False)
class Labelled:
    """Images (number x height x width, bytes) and their labels (bytes)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Dataset:
    """What to train on, what to test on, and a digest that tells this data from other data."""

    train: Labelled
    test: Labelled
    digest: str


@contextmanager
def using(folder: Path | None) -> Iterator[None]:
    """Let this process, and those it starts meanwhile, find data in ``folder``; None changes nothing."""
    before = os.environ.get(VARIABLE)
    if folder is not None:
        os.environ[VARIABLE] = str(folder.absolute())
    try:
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before
        elif folder is not None:
            del os.environ[VARIABLE]


def mnist() -> Dataset:
    """MNIST's digits, from the four original files in the subfolder ``mnist``; read once a process."""
    return _mnist(_subfolder("mnist", MNIST_FILES))


def check_digest(found: Dataset, wanted: str | None) -> None:
    """Refuse data that is not what a run was planned with."""
    if wanted is not None and wanted != found.digest:
        raise ValueError(
            f"digest must be that of the data in {os.environ.get(VARIABLE)!r}, {found.digest!r}, got {wanted!r}: "
            "the run was planned with other data"
        )


def _subfolder(name: str, files: tuple[str, ...]) -> Path:
    """Where a set is, if all its files are there."""
    hint = f"give the folder that holds {name}/ by --data DIR or in the environment variable {VARIABLE}"
    given = os.environ.get(VARIABLE)
    if not given:
        raise ValueError(f"data must be a folder with {name}/ in it, got none: {hint}; {name}/ has {', '.join(files)}")
    folder = Path(given).absolute() / name
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ValueError(
            f"data must be a folder with {name}/ in it, got {given!r}: "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing in {str(folder)!r}; {hint}"
        )
    return folder


@functools.cache
def _mnist(folder: Path) -> Dataset:
    images, labels, test_images, test_labels = (folder / name for name in MNIST_FILES)
    digest = hashlib.sha256()
    train, test = _digits(images, labels, digest), _digits(test_images, test_labels, digest)
    return Dataset(train, test, digest.hexdigest()[:12])


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
        raise ValueError(f"{path} is cut short, damaged or not gzipped: {error}") from error
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
