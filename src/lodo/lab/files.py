"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lodo.lab.interrupts import cleaning_up

_DIGEST = hashlib.sha256().digest_size
_PIECE = 4 * 2**20  # bytes that are read at a time


def check_folder(name: str, folder: Path) -> None:
    """Check that files can be written to a folder, which need not exist yet; an error names the argument ``name``.

    >>> import tempfile
    >>> check_folder("out", Path(tempfile.mkdtemp()) / "a" / "b")
    >>> check_folder("out", Path("/dev/null/results"))
    Traceback (most recent call last):
    ValueError: out must be a folder that can be written to, got '/dev/null/results': Not a directory: '/dev/null'
    """
    existing = folder.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"0")
    except OSError as error:
        reason = f"{error.strerror}: {str(existing)!r}"
        raise ValueError(f"{name} must be a folder that can be written to, got {str(folder)!r}: {reason}") from error


def check_file(name: str, path: Path) -> None:
    """Check that a file can be written; an error names the argument ``name``."""
    if path.is_dir():
        raise ValueError(f"{name} must be a file that can be written, got the folder {str(path)!r}")
    check_folder(f"the folder of {name}", path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that replaces ``path`` when all has been written, so that no reader sees an unfinished file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with cleaning_up(partial(temporary.unlink, missing_ok=True)):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, completely or not at all.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a" / "b.txt"
    >>> write_atomically(target, b"whole")
    >>> target.read_bytes()
    b'whole'
    """
    with replacing(path) as file:
        file.write(data)


def remove_leftovers(path: Path) -> None:
    """Delete old temporary files of killed writers of ``path``; those of the last hour may still be written to."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > 3600:
                leftover.unlink()


def write_checked(path: Path, data: bytes) -> None:
    """Write ``data`` preceded by its digest, for `read_checked`."""
    write_atomically(path, hashlib.sha256(data).digest() + data)


def read_checked(path: Path) -> bytes | None:
    """The data that `write_checked` wrote, or None if the file is missing, cut short or altered.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "file"
    >>> write_checked(target, b"data")
    >>> read_checked(target)
    b'data'
    >>> target.write_bytes(target.read_bytes()[:-1])
    35
    >>> read_checked(target) is None
    True
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, data = content[:_DIGEST], content[_DIGEST:]
    return data if hashlib.sha256(data).digest() == digest else None


class _Hashing:
    """Writes to a file and hashes what it writes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save_state(path: Path, state: object) -> None:
    """Write tensors and plain data as `torch.save` does, followed by a digest, without copying them in memory."""
    with replacing(path) as file:
        hashing = _Hashing(file)
        try:
            torch.save(state, hashing)  # type: ignore[arg-type]  # torch.save needs only these two methods
        except RuntimeError as error:
            raise _hidden_cause(error) from None
        file.write(hashing.hash.digest())


def _hidden_cause(error: BaseException) -> BaseException:
    """What made `torch.save` fail. After an interrupt or a full disk it fails again when it closes its archive."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def load_state(path: Path) -> Any | None:
    """The state that `save_state` wrote, or None if the file is missing, cut short or altered.

    Tensors are mapped from the file and read when they are used. Only tensors and plain data are ever created.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "state"
    >>> save_state(target, {"step": 3, "x": torch.ones(2)})
    >>> load_state(target)
    {'step': 3, 'x': tensor([1., 1.])}
    """
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size - _DIGEST
            digest = hashlib.sha256()
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                digest.update(piece)
                left -= len(piece)
            complete = left == 0 and file.read() == digest.digest()
    except FileNotFoundError:
        return None
    return torch.load(path, weights_only=True, mmap=True) if complete else None
