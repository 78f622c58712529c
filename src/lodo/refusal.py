"""Gradients that cannot be learned from: one decision for all groups and ranks, and what is said about it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lodo import distributed
from lodo.algorithm import Reading, forget
from lodo.group import Options, name_of
from lodo.scalars import Flag, plain

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WORTH_A_WARNING = (20, 200, 2000)  # steps that were skipped in a row
SKIP = "Pass nonfinite='skip' to skip such steps instead"


def agreed(readings: Sequence[Reading], meshes: Sequence[DeviceMesh]) -> tuple[Flag, int]:
    """Whether all gradients can be used, on every rank of the meshes, and a rank that has one which cannot.

    The answer is a Python bool if all groups are on the CPU, else a 0-dim tensor, so that nobody waits for a device.

    >>> agreed([], [])
    (True, 0)
    """
    here, on_device = True, None
    for reading in readings:
        flag = reading.usable
        if not isinstance(flag, Tensor):
            here = here and flag
        elif on_device is None:
            on_device = flag
        else:
            on_device = on_device & flag.to(on_device.device)
    if on_device is not None:
        return distributed.nobody_complains(on_device & here, meshes), 0
    if not meshes:
        return here, 0
    rank = distributed.complaining_rank(not here, meshes)
    return rank is None, rank or 0


def refuse(nonfinite: str, readings: Sequence[Reading], rank: int, in_a_row: int) -> None:
    """Raise, or count the step as skipped, because of a gradient here or on another rank.

    Args:
        nonfinite: as for `LODO`.
        readings: of all groups.
        rank: that has such a gradient.
        in_a_row: how many steps have been refused without one that was not, this one included. Only counted on the CPU:
            a device's refusals are counted there, in `skipped_steps`.
    """
    refused = [reading for reading in readings if reading.usable is False]
    if nonfinite == "skip":
        if in_a_row in WORTH_A_WARNING:
            why = _problem(refused[0]) if refused else f"a gradient on rank {rank} is not finite or too large"
            warnings.warn(
                f"LODO has skipped {in_a_row} steps in a row, the last one because {why}. Look at the loss; a smaller "
                "lr, clipped gradients or guard=True may help, or go back to a checkpoint",
                stacklevel=6,
            )
        noted = [*refused, *readings][:1]  # empty on a rank that holds no parameters
        for reading in noted:
            reading.state["skipped"] += 1
        for reading in readings:
            forget(reading)
        return
    if not refused:
        raise FloatingPointError(
            f"a gradient on rank {rank} is not finite or too large; nothing was changed on any rank. {SKIP}"
        )
    raise FloatingPointError(f"{_problem(refused[0])}; nothing was changed. {SKIP}")


def _problem(reading: Reading) -> str:
    """What is wrong with a gradient."""
    options, state, network = reading.options, reading.state, reading.network
    index = network.index
    for j, view in enumerate(network.g.views):
        if not bool(torch.isfinite(view).all()):
            return f"the gradient of {name_of(options, index, j)} is not finite"
    step = plain(state["last_lr"] * state["fed_bound"])
    after = f", after a step with lr * |u| of at most {step:.3g}" if step else ""
    return (
        f"the gradient of group {index} is too large for {network.g.vector.dtype}: "
        f"its norm is {plain(reading.norm):.3g}{after}"
    )


def look_back(refused: Tensor, nonfinite: str) -> None:
    """Raise if a device refused the step before this one; the device has had a whole step to finish it."""
    if nonfinite == "raise" and bool(refused):
        raise FloatingPointError(
            f"a gradient of the last step was not finite or too large; the step changed nothing. {SKIP}"
        )


def check_dense(options: Options, index: int) -> None:
    """Raise an error that names the parameter if a gradient is sparse."""
    for j, p in enumerate(options["params"]):
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise RuntimeError(
                f"sparse gradients are not supported, but {name_of(options, index, j)} has one "
                f"(layout {p.grad.layout}); use a dense gradient, such as sparse=False in nn.Embedding"
            )
