"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import uuid
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path`` and rename it there: a reader never sees a part of it.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a" / "b.txt"
    >>> write_atomically(target, b"whole")
    >>> target.read_bytes()
    b'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def remove_leftovers(path: Path) -> None:
    """Delete what killed writers of ``path`` left behind; what is younger than an hour may belong to a living one."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > 3600:
                leftover.unlink()


def write_checked(path: Path, data: bytes) -> None:
    """Write ``data`` with its digest in front, for `read_checked`."""
    write_atomically(path, hashlib.sha256(data).digest() + data)


def read_checked(path: Path) -> bytes | None:
    """What `write_checked` wrote, or None if the file is missing, cut short or altered.

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
