"""What a data set is, and which folder it is read from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

from torch import Tensor

VARIABLE = "LODO_DATA"
BUNDLED = "digits"  # given instead of a folder: the digits that come with scikit-learn
DIGEST_LENGTH = 12  # hexadecimal digits


@dataclass(frozen=True, eq=False)
class Labelled:
    """Images of bytes, image x row x column or image x colour x row x column, and one label (a byte) for each."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set, a test set, and a digest that identifies their content."""

    train: Labelled
    test: Labelled
    digest: str


@contextmanager
def using(folder: str | Path | None) -> Iterator[None]:
    """Make ``folder`` the data folder of this process and of those it starts in the meantime; None changes nothing.

    The word ``digits`` stands for data that needs no files; for a folder of that name, write ``./digits`` or its
    absolute path. A text file takes the place of the folder for the tasks with text.

    >>> with using("digits"):
    ...     os.environ[VARIABLE]
    'digits'
    """
    before = os.environ.get(VARIABLE)
    if folder is not None:
        _check_spelling("data", str(folder))
        os.environ[VARIABLE] = BUNDLED if str(folder) == BUNDLED else str(Path(folder).absolute())
    try:
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before
        elif folder is not None:
            del os.environ[VARIABLE]


def _check_spelling(name: str, word: str) -> None:
    """Refuse a word that is almost ``digits`` and names nothing that is there; ``name`` is what the word was given as.

    >>> _check_spelling("data", "./digit")  # a folder
    """
    if word != BUNDLED and not Path(word).exists() and get_close_matches(word.lower(), [BUNDLED], cutoff=0.9):
        raise ValueError(
            f"{name} must be {BUNDLED!r}, a text file or a folder, got {word!r}; did you mean {BUNDLED!r}? "
            f"For a new folder of this name, write './{word}'"
        )


def data_folder() -> Path:
    """The folder named by the environment variable, or else one in the user's cache."""
    given = os.environ.get(VARIABLE)
    if given == BUNDLED:
        raise ValueError(f"data must be a folder for this data set, got {BUNDLED!r}, which is a data set itself")
    if given:
        _check_spelling(VARIABLE, given)
        return Path(given).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "lodo" / "data"


class Digested(Protocol):
    """Data with a digest that identifies its content."""

    @property
    def digest(self) -> str: ...


def check_digest(found: Digested, wanted: str | None) -> None:
    """Refuse data other than the data a run was planned with; None accepts any."""
    if wanted is not None and wanted != found.digest:
        where = os.environ.get(VARIABLE) or str(data_folder())
        raise ValueError(
            f"digest must be that of the data in {where!r}, {found.digest!r}, got {wanted!r}: "
            "the run was planned with other data"
        )


def check_labels(path: Path, labels: Tensor) -> None:
    """Refuse labels that are not one of ten classes; ``path`` is the file they come from."""
    largest = int(labels.max())
    if largest > 9:
        raise ValueError(f"{path} must have labels from 0 to 9, got {largest}")
