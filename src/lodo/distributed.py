"""Many processes: shards of parameters, one decision for all ranks, and ranks that drift apart.

Under FSDP2 (`fully_shard`) and tensor parallelism a parameter is a DTensor, of which every rank holds a part. A group's
vector x is then this rank's parts, one after the other, with a network of their own: G is block-diagonal along the
shards, and a rank's state is as large as its share. Nothing but one number a step is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PART = 1 << 20  # numbers of a tensor that are added at once


def local(x: Tensor) -> Tensor:
    """What this rank holds of a DTensor; any other tensor as it is.

    >>> x = torch.zeros(2)
    >>> local(x) is x
    True
    """
    return x._local_tensor if hasattr(x, "_local_tensor") else x


def local_gradient(p: Tensor) -> Tensor | None:
    """What this rank holds of the gradient, laid out as the parameter is.

    >>> local_gradient(torch.zeros(2)) is None
    True
    """
    g = p.grad
    if g is None or not hasattr(g, "placements"):
        return g
    if g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return local(g)


def is_distributed() -> bool:
    """Whether this is one of several processes.

    >>> is_distributed()
    False
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def whole(x: Any) -> Any:
    """All of a DTensor, which every rank of its mesh has to ask for; anything else as it is.

    >>> whole(3)
    3
    """
    return x.full_tensor() if hasattr(x, "full_tensor") else x


class Shard(NamedTuple):
    """Which part of its parameters a rank holds, and how many parts there are.

    >>> Shard(1, 2).label
    'shard 1 of 2'
    """

    part: int = 0
    parts: int = 1

    @property
    def label(self) -> str:
        return f"shard {self.part} of {self.parts}"


def shard_of(x: Tensor) -> Shard:
    """The part of ``x`` on this rank; the whole of a plain tensor, and of a DTensor that is replicated.

    >>> shard_of(torch.zeros(2))
    Shard(part=0, parts=1)
    """
    mesh: DeviceMesh | None = getattr(x, "device_mesh", None)
    if mesh is None:
        return Shard()
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh} of a parameter; give it its own parameters")
    part, parts = 0, 1
    for size, coordinate, placement in zip(mesh.shape, coordinates, x.placements, strict=True):  # type: ignore[attr-defined]
        if not placement.is_replicate():
            part, parts = part * size + coordinate, parts * size
    return Shard(part, parts)


def meshes(params: Iterable[Tensor]) -> list[DeviceMesh]:
    """The meshes over which any of the parameters is split, each once.

    >>> meshes([torch.zeros(2)])
    []
    """
    return list(dict.fromkeys(p.device_mesh for p in params if shard_of(p).parts > 1))  # type: ignore[attr-defined]


def complaining_rank(complains: bool, over: Sequence[DeviceMesh]) -> int | None:
    """A rank that complains, the same one on every rank of the meshes; None if none does.

    >>> complaining_rank(False, []) is None
    True
    """
    if not over:
        return 0 if complains else None
    found = torch.tensor([dist.get_rank() if complains else -1], device=over[0].device_type)
    for mesh in over:
        for dimension in range(mesh.ndim):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return None if int(found) < 0 else int(found)


def nobody_complains(fine: Tensor, over: Sequence[DeviceMesh]) -> Tensor:
    """Whether ``fine``, a 0-dim tensor of bools, holds on every rank of the meshes; nobody waits for the answer.

    >>> nobody_complains(torch.tensor(True), [])
    tensor(True)
    """
    if not over:
        return fine
    least = fine.to(torch.int32)
    for mesh in over:
        for dimension in range(mesh.ndim):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(dimension))
    return least > 0


# ---------------------------------------------------------------- states of shards


def wrap(state: dict[str, Any], shard: Shard) -> dict[str, Any]:
    """A state with names that say whose it is: distributed checkpoints take equal names for equal contents.

    >>> wrap({"step": 3}, Shard(1, 2))
    {'shards': 2, 'shard 1 of 2.step': 3}
    >>> wrap({"step": 3}, Shard())
    {'step': 3}
    """
    if shard.parts == 1:
        return state
    return {"shards": shard.parts, **{f"{shard.label}.{name}": value for name, value in state.items()}}


def names(shard: Shard) -> dict[str, Any]:
    """What torch (from 2.10 on) needs to find in memory in order to read a shard's state from a flat checkpoint.

    >>> names(Shard(1, 2))
    {'shards': 2, 'shard 1 of 2': None}
    """
    return {"shards": shard.parts, shard.label: None}


def unwrap(state: dict[str, Any], shard: Shard) -> dict[str, Any] | None:
    """This shard's own state; None if the state was saved with other shards.

    It may be nested: lodo 0.1.0 saved it so, and so does torch read it from a flat checkpoint.

    >>> unwrap({"shards": 2, "shard 1 of 2.step": 3}, Shard(1, 2))
    {'step': 3}
    >>> unwrap({"shards": 2, "shard 1 of 2": {"step": 3}}, Shard(1, 2))
    {'step': 3}
    >>> unwrap({"shards": 2, "shard 1 of 2.step": 3}, Shard(0, 3)) is None
    True
    """
    if state.get("shards", 1) != shard.parts:
        return None
    if shard.parts == 1:
        return state
    prefix = f"{shard.label}."
    flat = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return flat or state.get(shard.label) or None


# ---------------------------------------------------------------- ranks that drift apart


def checksum(x: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as integers: one number, the same for the same bits.

    >>> int(checksum(torch.tensor([1.0, 2.0]))) == 0x3F800000 + 0x40000000
    True
    """
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    parts = torch.split(x.detach().reshape(-1).view(integer), _PART)  # torch widens what it adds, a part at a time
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()


def drifted(table: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Rows that are not like most others, or not like the first where no row is: row -> columns that differ.

    >>> drifted([[1, 2], [1, 2], [1, 3]])
    {2: [1]}
    >>> drifted([[1, 2], [7, 2]])
    {1: [0]}
    """
    rows = [tuple(row) for row in table]
    usual, _ = Counter(rows).most_common(1)[0]  # the earliest of equally frequent ones
    return {
        r: [c for c, (ours, theirs) in enumerate(zip(row, usual, strict=True)) if ours != theirs]
        for r, row in enumerate(rows)
        if row != usual
    }


def check_sync(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise on every rank, naming the ranks and what differs, unless all ranks hold the same bits."""
    if not named or not is_distributed():
        return
    ours = torch.stack([checksum(x).to(named[0][1].device) for _, x in named])
    gathered = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, ours)
    found = drifted([row.tolist() for row in gathered])
    if found:
        parts = "; ".join(f"rank {r} in {', '.join(named[c][0] for c in columns)}" for r, columns in found.items())
        raise RuntimeError(
            f"ranks have drifted apart (check_sync_every): {parts}, compared with "
            f"{'most ranks' if len(gathered) > 2 else 'rank 0'}. All ranks need the same seed, parameters and gradients"
        )
