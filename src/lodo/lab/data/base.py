"""What a data set is, and the folder that data is looked for in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

VARIABLE = "LODO_DATA"
BUNDLED = "digits"  # in place of a folder


@dataclass(frozen=True, eq=False)
class Labelled:
    """Images (number x height x width, or number x colors x height x width, bytes) and their labels (bytes)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Dataset:
    """What to train on, what to test on, and a digest that tells this data from other data."""

    train: Labelled
    test: Labelled
    digest: str


@contextmanager
def using(folder: str | Path | None) -> Iterator[None]:
    """Let this process, and those it starts meanwhile, find data in ``folder``; None changes nothing.

    The word ``digits`` stands for scikit-learn's small digits; a folder of that name is given as the text ``./digits``
    or by its whole path.

    >>> with using("digits"):
    ...     os.environ[VARIABLE]
    'digits'
    """
    before = os.environ.get(VARIABLE)
    if folder is not None:
        os.environ[VARIABLE] = BUNDLED if str(folder) == BUNDLED else str(Path(folder).absolute())
    try:
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before
        elif folder is not None:
            del os.environ[VARIABLE]


def data_folder() -> Path:
    """The folder that was given, else one in the user's cache."""
    given = os.environ.get(VARIABLE)
    if given == BUNDLED:
        raise ValueError(f"data must be a folder for this set, got {BUNDLED!r}, which is a set by itself")
    if given:
        return Path(given).absolute()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "lodo" / "data"


def check_digest(found: Dataset, wanted: str | None) -> None:
    """Refuse data that is not what a run was planned with."""
    if wanted is not None and wanted != found.digest:
        where = os.environ.get(VARIABLE) or str(data_folder())
        raise ValueError(
            f"digest must be that of the data in {where!r}, {found.digest!r}, got {wanted!r}: "
            "the run was planned with other data"
        )
