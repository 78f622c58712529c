"""The laboratory: tasks, optimizers, runs on disk, sweeps, and the paper's experiments.

It needs the extra ``lab``: ``pip install '.[lab]'`` in the folder of the repository. The library itself never
imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lodo.lab.comparison import compare as compare

__all__ = ["compare"]


def __getattr__(name: str) -> Any:
    """Import `compare` when it is asked for, so that importing a part of the laboratory does not import all of it."""
    if name == "compare":
        from lodo.lab.comparison import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
