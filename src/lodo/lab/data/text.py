"""Text, character by character: your own file, works of Shakespeare, or the source of Python's standard library."""

from __future__ import annotations

import functools
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from lodo.lab.data.base import BUNDLED, DIGEST_LENGTH, VARIABLE, data_folder
from lodo.lab.data.download import download_missing, fetch

SHAKESPEARE = "shakespeare.txt"
SHAKESPEARE_DIGEST = "2351fe17efb0"  # of the works in the public domain, 5.06 MB
SMALL_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # what is downloaded
TEXT_MIRRORS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
    "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
)
MODULES = (  # of the standard library: each a single file in all versions of Python since 3.11
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "difflib",
    "doctest",
    "enum",
    "fractions",
    "ftplib",
    "functools",
    "heapq",
    "inspect",
    "ipaddress",
    "mailbox",
    "optparse",
    "pickle",
    "platform",
    "random",
    "shutil",
    "smtplib",
    "socket",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "tokenize",
    "typing",
    "uuid",
)
_CODES = 0x110000  # of Unicode


@dataclass(frozen=True, eq=False)
class Text:
    """A text for training and one for validation as indices into ``characters``, and a digest of the whole.

    The first nine tenths of the text are for training, the rest is for validation.
    """

    train: Tensor
    validation: Tensor
    characters: str
    digest: str


def load_text() -> Text:
    """The text in the file that ``--data`` names, or else ``text/shakespeare.txt`` in the data folder.

    If that file is missing, a smaller one is downloaded (1.1 MB). A file that exists is used, whatever its content.
    """
    given = os.environ.get(VARIABLE)
    if given and given != BUNDLED and Path(given).is_file():
        return _text(Path(given).absolute())
    return _shakespeare(data_folder() / "text")


def load_library() -> Text:
    """The source of a part of Python's standard library, which needs no files; it depends on the version of Python.

    >>> "def " in "".join(load_library().characters[i] for i in load_library().train[:20_000])
    True
    """
    return _library(Path(sysconfig.get_path("stdlib")))


@functools.cache
def _shakespeare(folder: Path) -> Text:
    download_missing(folder, [SHAKESPEARE], " or ".join(TEXT_MIRRORS), functools.partial(_download, folder))
    return _text(folder / SHAKESPEARE)


def _download(folder: Path, missing: Sequence[str], progress: Progress) -> None:
    for name in missing:
        part = folder / f"{name}.part"
        fetch(part, TEXT_MIRRORS, SMALL_SHAKESPEARE_SHA256, progress, algorithm="sha256")
        part.replace(folder / name)


@functools.cache
def _text(path: Path) -> Text:
    return read_text(path)


@functools.cache
def _library(folder: Path) -> Text:
    try:
        content = b"".join((folder / f"{name}.py").read_bytes() for name in MODULES)
    except OSError as error:
        raise ValueError(
            f"the source of Python's standard library is incomplete: {error}; name a text file with --data instead"
        ) from error
    return _encoded(str(folder), content)


def read_text(path: Path) -> Text:
    """Read a file of UTF-8.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "abba.txt"
    >>> _ = file.write_text("abbaabbaab" * 2)
    >>> text = read_text(file)
    >>> text.characters, text.train[:4].tolist(), text.validation.tolist()
    ('ab', [0, 1, 1, 0], [0, 1])
    """
    return _encoded(str(path), path.read_bytes())


def _encoded(path: str, content: bytes) -> Text:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8: {error}") from error
    if not text:
        raise ValueError(f"{path} must be a text, got an empty file")
    codes = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    occurs = torch.zeros(_CODES, dtype=torch.bool)
    occurs[codes] = True
    characters = "".join(map(chr, occurs.nonzero()[:, 0].tolist()))
    dtype = torch.uint8 if len(characters) <= 256 else torch.int32
    indices = (occurs.cumsum(0) - 1).to(dtype)[codes]
    split = len(text) * 9 // 10
    digest = hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]
    return Text(indices[:split], indices[split:], characters, digest)
