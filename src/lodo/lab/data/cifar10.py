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

from lodo.lab.data.base import DIGEST_LENGTH, Dataset, Labelled, check_labels, data_folder
from lodo.lab.data.download import download_missing, fetch, md5_of
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
FOLDER = "cifar-10-batches-bin"  # its name in the data folder and in the archive
RECORDS = 10_000  # images in a file
_SHAPE = (3, 32, 32)  # of an image: red, green and blue, rows, columns
_RECORD = 1 + 3 * 32 * 32  # bytes of an image: its label, then its pixels


def load_cifar10() -> Dataset:
    """CIFAR-10, from the six files in the subfolder ``cifar-10-batches-bin``; read once per process.

    Missing files are downloaded. If all six files have fewer images than the original ones, they are used as they
    are; their digest then differs from `CIFAR10_DIGEST`.
    """
    return _cifar10(data_folder() / FOLDER)


@functools.cache
def _cifar10(folder: Path) -> Dataset:
    download_missing(folder, CIFAR10_FILES, CIFAR10_ARCHIVE, functools.partial(_download, folder))
    digest = hashlib.sha256()
    batches = [read_batch(folder / name, digest) for name in CIFAR10_FILES]
    _check_sizes(folder, [len(batch) for batch in batches])
    *train, test = batches
    return Dataset(_labelled(torch.cat(train)), _labelled(test), digest.hexdigest()[:DIGEST_LENGTH])


def _check_sizes(folder: Path, sizes: Sequence[int]) -> None:
    """Refuse a file that is shorter than the original if another file has its original size."""
    shortest = min(sizes)
    if shortest < RECORDS and max(sizes) == RECORDS:
        path = folder / CIFAR10_FILES[sizes.index(shortest)]
        raise ValueError(f"{path} is cut short: it has {shortest:,} images, others have {RECORDS:,}")


def _labelled(records: Tensor) -> Labelled:
    return Labelled(records[:, 1:].reshape(-1, *_SHAPE), records[:, 0].clone())


def read_batch(path: Path, digest: hashlib._Hash | None = None) -> Tensor:
    """Read a batch as one row of bytes per image, its label and its pixels, and add the content to ``digest``.

    A file of 10,000 images must be the original one; a file with fewer images may hold any.

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
            f"bytes each, got {len(content):,} bytes"
        )
    records = torch.frombuffer(content, dtype=torch.uint8).view(number, _RECORD)
    check_labels(path, records[:, 0])
    if number == RECORDS:
        md5, wanted = md5_of(content), CIFAR10_MD5.get(path.name)
        if md5 != wanted:
            raise ValueError(f"{path} is damaged: its md5 must be {wanted}, got {md5}; delete it to download it again")
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
    """Extract the named files next to the archive, and nothing else the archive may hold."""
    wanted = {f"{FOLDER}/{name}": name for name in names}
    with tarfile.open(path) as archive:
        for member in archive:  # in one pass: looking back would decompress the archive again
            if member.name not in wanted or not member.isfile():
                continue
            name = wanted.pop(member.name)
            file = archive.extractfile(member)
            assert file is not None  # it is a regular file
            content = file.read()
            if (md5 := md5_of(content)) != CIFAR10_MD5[name]:
                raise OSError(f"the md5 of {name} in {path} must be {CIFAR10_MD5[name]}, got {md5}")
            remove_leftovers(path.with_name(name))
            write_atomically(path.with_name(name), content)
    if wanted:
        raise OSError(f"{path} must contain {', '.join(wanted)}")
