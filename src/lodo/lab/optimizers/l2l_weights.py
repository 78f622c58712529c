"""Weights of L2LBGDBGD in files: those in the package, or those that ``lodo train-l2l`` wrote."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lodo.lab.files import read_checked, write_checked
from lodo.lab.optimizers.l2l import L2L, restore
from lodo.lab.tasks import Task

SHIPPED = "l2l.weights"  # made by `lodo train-l2l` with its defaults


def save_weights(path: Path, net_state: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Write trained weights and the settings of their training."""
    buffer = io.BytesIO()
    torch.save({"net_state": dict(net_state), "settings": dict(settings)}, buffer)
    write_checked(path, buffer.getvalue())


def load_weights(path: str | None = None) -> dict[str, Tensor]:
    """The weights of a file, or those in the package.

    >>> sorted(load_weights())
    ['W1', 'W2', 'b', 'b1', 'b2', 'w']
    """
    data = _read(path)
    try:
        state: dict[str, Tensor] = torch.load(io.BytesIO(data), weights_only=True)["net_state"]
        restore(state)
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"weights must be a file made by lodo train-l2l, got {path!r}: {error}") from error
    return state


def weights_digest(path: str | None = None) -> str:
    """A digest of the weights, for the address of a run."""
    state = load_weights(path)
    content = b"".join(state[name].numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(content).hexdigest()[:12]


def make_l2l(task: Task, weights: str | None = None, digest: str | None = None) -> L2L:
    """The optimizer with the weights of a file; ``digest``, if given, must be theirs."""
    if digest is not None and digest != weights_digest(weights):
        raise ValueError(f"digest must be that of the file {weights!r}, which has changed since, got {digest!r}")
    return L2L(task.params, load_weights(weights))


def _read(path: str | None) -> bytes:
    with resources.as_file(resources.files("lodo.lab.optimizers") / SHIPPED) as shipped:
        file = shipped if path is None else Path(path)
        data = read_checked(file)
    if data is None:
        problem = "is damaged" if file.exists() else "does not exist"
        raise ValueError(f"weights must be a file made by lodo train-l2l, got {str(file)!r}, which {problem}")
    return data
