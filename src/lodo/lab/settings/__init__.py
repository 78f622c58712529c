"""Settings as TOML files: hyperparameters, rivals on the bowl and on networks, search spaces, schedules, durations."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any


@functools.cache
def read_settings(name: str) -> dict[str, Any]:
    """The content of ``name.toml`` in this folder.

    >>> read_settings("paper")["bowl"]["momentum"]
    {'lr': 1.394, 'beta': 0.529}
    """
    return tomllib.loads(resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
