"""CIFAR-10, from the six files of its binary release."""

from __future__ import annotations

import functools
import hashlib
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from lodo.lab.data.base import Dataset, Labelled, data_folder
from lodo.lab.data.download import complete, fetch
from lodo.lab.files import remove_leftovers, write_atomically

CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR10_FILES = tuple(CIFAR10_MD5)
CIFAR10_DIGEST = "013ba16d14ec"  # of the original files
CIFAR10_ARCHIVE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"  # in the data folder and in the archive
RECORDS = 10_000  # a file
_SHAPE = (3, 32, 32)  # red, green, blue
_RECORD = 1 + 3 * 32 * 32  # the label and the pixels


def load_cifar10() -> Dataset:
    """CIFAR-10, from the six files in the subfolder ``cifar-10-batches-bin``; read once a process.

    Files that are missing are downloaded. Files with fewer images than the original ones, all six of them, are used as
    they are; the digest tells.
    """
    return _cifar10(data_folder() / FOLDER)


@functools.cache
def _cifar10(folder: Path) -> Dataset:
    complete(folder, CIFAR10_FILES, CIFAR10_ARCHIVE, functools.partial(_download, folder))
    digest = hashlib.sha256()
    *train, test = (read_batch(folder / name, digest) for name in CIFAR10_FILES)
    counts = {name: len(batch) for name, batch in zip(CIFAR10_FILES, (*train, test), strict=True)}
    short = min(counts, key=lambda name: counts[name])
    if counts[short] < RECORDS == max(counts.values()):
        raise ValueError(f"{folder / short} is cut short: it has {counts[short]:,} images, others {RECORDS:,}")
    return Dataset(_labelled(torch.cat(train)), _labelled(test), digest.hexdigest()[:12])


def _labelled(records: Tensor) -> Labelled:
    return Labelled(records[:, 1:].reshape(-1, *_SHAPE), records[:, 0].clone())


def read_batch(path: Path, digest: hashlib._Hash | None = None) -> Tensor:
    """A row of bytes for each image of a batch: its label, then its pixels; the file's content goes into ``digest``.

    A file of 10,000 images must be the original; one with fewer can be anything.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "test_batch.bin"
        >>> _ = file.write_bytes(bytes([7]) + bytes(3072) + bytes([2]) + bytes(3072))
        >>> read_batch(file)[:, 0]
        tensor([7, 2], dtype=torch.uint8)
    """
    content = bytearray(path.read_bytes())
    number, rest = divmod(len(content), _RECORD)
    if rest or not 1 <= number <= RECORDS:
        raise ValueError(
            f"{path} is cut short or not a batch of CIFAR-10: it must have 1 to {RECORDS:,} images of {_RECORD:,} "
            f"bytes, got {len(content):,} bytes"
        )
    records = torch.frombuffer(content, dtype=torch.uint8).view(number, _RECORD)
    if records[:, 0].max() > 9:
        raise ValueError(f"{path} must have labels from 0 to 9, got {int(records[:, 0].max())}")
    if number == RECORDS and (md5 := _md5(content)) != (wanted := CIFAR10_MD5.get(path.name)):
        raise ValueError(f"{path} is damaged: it must have the md5 {wanted}, got {md5}; delete it to download it anew")
    if digest is not None:
        digest.update(content)
    return records


def _download(folder: Path, missing: Sequence[str], progress: Progress) -> None:
    part = folder / f"{CIFAR10_ARCHIVE.rsplit('/', 1)[1]}.part"
    fetch(part, [CIFAR10_ARCHIVE], CIFAR10_ARCHIVE_MD5, progress)
    try:
        _unpack(part, missing)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise OSError(f"{part} cannot be unpacked: {error}") from error
    part.unlink()


def _unpack(path: Path, names: Sequence[str]) -> None:
    """Place these files of the archive beside it, and nothing else that may be in it."""
    wanted = {f"{FOLDER}/{name}": name for name in names}
    with tarfile.open(path) as archive:
        for member in archive:  # in one pass: going back in it would unpack it again
            name = wanted.get(member.name)
            file = archive.extractfile(member) if name and member.isfile() else None
            if name is None or file is None:
                continue
            content = file.read()
            if (md5 := _md5(content)) != CIFAR10_MD5[name]:
                raise OSError(f"{name} in {path} must have the md5 {CIFAR10_MD5[name]}, got {md5}")
            remove_leftovers(path.with_name(name))
            write_atomically(path.with_name(name), content)
            del wanted[member.name]
    if wanted:
        raise OSError(f"{path} must have {', '.join(wanted)} in it")


def _md5(content: bytes | bytearray) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
