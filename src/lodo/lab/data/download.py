"""Downloads that resume after an interruption, are checked, and appear whole or not at all."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lodo._checks import hint
from lodo.lab.data.base import BUNDLED, VARIABLE

if sys.platform != "win32":
    import fcntl

TIMEOUT = 20.0  # seconds without a byte before a connection is given up
_LOCK = ".lock"
_CHUNK = 1 << 16  # bytes


def download_missing(
    folder: Path, files: Sequence[str], source: str, download: Callable[[Sequence[str], Progress], None]
) -> None:
    """Call ``download`` with those of ``files`` that ``folder`` lacks, in one process at a time.

    ``source`` tells the user where to get the files if the download fails.
    """
    if not _missing(folder, files):
        return
    console = Console(stderr=True)
    made: list[Path] = []
    try:
        made += [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusively(folder, console), _progress_bars(console) as progress:
            if missing := _missing(folder, files):  # another process may have downloaded them in the meantime
                download(missing, progress)
    except OSError as error:
        _remove_empty(made)
        if missing := _missing(folder, files):
            raise ValueError(_advice(folder, missing, source, error)) from error


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders into which nothing was downloaded, the innermost first."""
    with suppress(OSError):
        if folders and os.listdir(folders[0]) == [_LOCK]:
            (folders[0] / _LOCK).unlink()
        for folder in folders:
            folder.rmdir()  # fails if there is anything in it


def _advice(folder: Path, missing: Sequence[str], source: str, error: OSError) -> str:
    are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
    return (
        f"data must be a folder with {folder.name}/ or the word {BUNDLED!r}, got {str(folder.parent)!r}"
        f"{hint(folder.parent.name, [BUNDLED])}\n--data {BUNDLED} needs no download.\n"
        f"{', '.join(missing)} {are} missing in {str(folder)!r} and cannot be downloaded: {error}. "
        f"Get {them} from {source} and put {them} into {str(folder)!r}, or name another folder that contains "
        f"{folder.name}/, with --data DIR or in the environment variable {VARIABLE}"
    )


def _missing(folder: Path, files: Sequence[str]) -> list[str]:
    return [name for name in files if not (folder / name).is_file()]


@contextmanager
def _exclusively(folder: Path, console: Console) -> Iterator[None]:
    """Wait until no other process is downloading into ``folder``; the lock of a killed process is released."""
    with (folder / _LOCK).open("w") as lock:
        if sys.platform != "win32":
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                console.print(f"waiting for another process that downloads into {escape(str(folder))}", soft_wrap=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _progress_bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def fetch(part: Path, urls: Sequence[str], checksum: str, progress: Progress, *, algorithm: str = "md5") -> None:
    """Download a file to ``part`` from the first of ``urls`` that delivers it, resuming what ``part`` already has.

    ``algorithm`` is the one of ``checksum``, a name that `hashlib.new` knows.
    """
    if part.is_file() and _checksum(part, algorithm) == checksum:
        return
    bar = progress.add_task(part.name.removesuffix(".part"), total=None)
    errors = []
    for url in urls:
        try:
            _fetch_from(url, part, checksum, algorithm, progress, bar)
        except (OSError, HTTPException) as error:
            errors.append(f"{url}: {error}")
        else:
            return
    raise OSError("; ".join(errors))


def _fetch_from(url: str, part: Path, checksum: str, algorithm: str, progress: Progress, bar: TaskID) -> None:
    """Download from one address; if a resumed file turns out wrong, start over once."""
    resumed = _size(part) > 0
    _receive_all(url, part, progress, bar)
    found = _checksum(part, algorithm)
    if found != checksum and resumed:
        part.unlink()
        _receive_all(url, part, progress, bar)
        found = _checksum(part, algorithm)
    if found != checksum:
        part.unlink()
        raise OSError(f"the {algorithm} of the file must be {checksum}, got {found}")


def _receive_all(url: str, part: Path, progress: Progress, bar: TaskID) -> None:
    """Reconnect after every broken connection, as long as each one delivers something."""
    while True:
        before = _size(part)
        try:
            return _receive(url, part, progress, bar)
        except (OSError, HTTPException):
            if _size(part) <= before:
                raise


def _receive(url: str, part: Path, progress: Progress, bar: TaskID) -> None:
    """Ask for what ``part`` lacks; if the server does not support ranges and sends everything, start over."""
    have = _size(part)
    try:
        response = _request(url, have)
    except HTTPError as error:
        with error:
            if have and error.code == 416:  # range not satisfiable: the server has no further bytes
                return
            raise
    with response:
        if response.status != 206:  # not partial content
            have = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise OSError(f"asked for the bytes from {have:,}, got {response.headers.get('Content-Range')!r}")
        length = response.headers.get("Content-Length")
        end = have + int(length) if length else None
        progress.reset(bar, total=end, completed=have)
        with part.open("ab" if have else "wb") as file:
            while have != end and (chunk := response.read1(_CHUNK)):
                file.write(chunk)
                file.flush()  # so that a kill loses nothing that was received
                have += len(chunk)
                progress.update(bar, completed=have)
            os.fsync(file.fileno())
    if end is not None and have < end:
        raise OSError(f"the connection ended after {have:,} of {end:,} bytes")


def _request(url: str, begin: int) -> HTTPResponse:
    """Open a connection that sends the file from the byte ``begin`` on, if the server supports that."""
    headers = {"User-Agent": "lodo"}
    if begin:
        headers["Range"] = f"bytes={begin}-"
    response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    return response


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def md5_of(content: bytes | bytearray) -> str:
    """The md5 checksum of some bytes, in hexadecimal.

    >>> md5_of(b"")
    'd41d8cd98f00b204e9800998ecf8427e'
    """
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _checksum(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
