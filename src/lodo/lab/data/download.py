"""Files from the network: continued after an interruption, checked, and there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lodo.lab.data.base import BUNDLED, VARIABLE

if sys.platform != "win32":
    import fcntl

TIMEOUT = 20.0  # seconds without a byte
_CHUNK = 1 << 16


def complete(
    folder: Path, files: Sequence[str], source: str, download: Callable[[Sequence[str], Progress], None]
) -> None:
    """See to it that ``folder`` has all ``files``: ``download`` brings the missing ones, one process at a time."""
    if not _missing(folder, files):
        return
    console = Console(stderr=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder, console), _bars(console) as progress:
            if missing := _missing(folder, files):  # another process may have brought them
                download(missing, progress)
    except OSError as error:
        if not (missing := _missing(folder, files)):
            return
        are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise ValueError(
            f"{', '.join(missing)} {are} missing in {str(folder)!r} and cannot be downloaded: {error}. "
            f"Get {them} from {source} and put {them} into {str(folder)!r}, or give another folder, one that has "
            f"{folder.name}/ in it, by --data DIR or in the environment variable {VARIABLE}; "
            f"--data {BUNDLED} needs no download"
        ) from error


def _missing(folder: Path, files: Sequence[str]) -> list[str]:
    return [name for name in files if not (folder / name).is_file()]


@contextmanager
def _alone(folder: Path, console: Console) -> Iterator[None]:
    """Wait until no other process downloads into ``folder``; one that was killed holds up nobody."""
    with (folder / ".lock").open("w") as lock:
        if sys.platform != "win32":
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                console.print(f"another process downloads into {escape(str(folder))}: waiting for it", soft_wrap=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def fetch(part: Path, urls: Sequence[str], md5: str, progress: Progress) -> None:
    """Bring a file from the first of ``urls`` that has it to ``part``, continuing what is there of it."""
    if part.is_file() and _md5(part) == md5:
        return
    bar = progress.add_task(part.name.removesuffix(".part"), total=None)
    said = []
    for url in urls:
        try:
            _fetch_from(url, part, md5, progress, bar)
        except (OSError, HTTPException) as error:
            said.append(f"{url}: {error}")
        else:
            return
    raise OSError("; ".join(said))


def _fetch_from(url: str, part: Path, md5: str, progress: Progress, bar: TaskID) -> None:
    resumed = _size(part) > 0
    while True:  # as long as every connection brings the end nearer
        before = _size(part)
        try:
            _receive(url, part, progress, bar)
            break
        except (OSError, HTTPException):
            if _size(part) <= before:
                raise
    if (found := _md5(part)) == md5:
        return
    part.unlink()
    if not resumed:
        raise OSError(f"the file must have the md5 {md5}, got {found}")
    _fetch_from(url, part, md5, progress, bar)


def _receive(url: str, part: Path, progress: Progress, bar: TaskID) -> None:
    """Ask for what ``part`` lacks; a server that does not know ranges sends all, and ``part`` begins anew."""
    have = _size(part)
    request = Request(url, headers={"User-Agent": "lodo"} | ({"Range": f"bytes={have}-"} if have else {}))
    try:
        answer = urlopen(request, timeout=TIMEOUT)
    except HTTPError as error:
        with error:
            if have and error.code == 416:  # there is nothing behind what is there
                return
            raise
    with answer:
        if answer.status == 206 and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise OSError(f"asked for the bytes from {have:,}, got {answer.headers.get('Content-Range')!r}")
        have = have if answer.status == 206 else 0
        length = answer.headers.get("Content-Length")
        end = have + int(length) if length else None
        progress.reset(bar, total=end, completed=have)
        with part.open("ab" if have else "wb") as file:
            while have != end and (chunk := answer.read1(_CHUNK)):
                file.write(chunk)
                file.flush()  # a kill shall cost nothing that was received
                have += len(chunk)
                progress.update(bar, completed=have)
            os.fsync(file.fileno())
    if end is not None and have < end:
        raise OSError(f"the connection ended after {have:,} of {end:,} bytes")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
