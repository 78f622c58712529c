"""A tensor whose work one rank does for all, as `lodo.ownership` divides it: its stand-in, its state, its layout.

What other ranks hold of a state takes no memory here; when it is saved, it is laid out as the parameter is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lodo.distributed import local, shard_of, whole
from lodo.group import Options
from lodo.kron_state import fresh_state, outline, restored
from lodo.planning import Entry, Piece, rows_of
from lodo.stacks import Bundle, State, bundled, state_dtype

NOTHING = torch.empty(0)


class Item:
    """A parameter whose work one rank does for all.

    Args:
        p: the parameter, of which this rank may hold a piece.
        index: of its group.
        name: by which errors call it.
    """

    def __init__(self, p: Any, index: int, name: str) -> None:
        self.p, self.index, self.name = p, index, name
        self.is_sharded = shard_of(p).parts > 1
        self.entry: Entry
        self.sources: dict[int, Piece]
        self.stand_in: Parameter | None = None  # on its owner: a whole tensor in the parameter's place
        self.grad = NOTHING  # this rank's piece, during a step

    @property
    def dtype(self) -> torch.dtype:
        """Of what is sent back: weights as they are, changes of pieces such that they are rounded once, when added."""
        return self.p.dtype if self.p.dtype.itemsize >= 4 or not self.is_sharded else state_dtype(self.p)

    def blank(self) -> Tensor:
        """A whole tensor of zeros that takes no memory."""
        return torch.zeros((), dtype=self.dtype, device=local(self.p).device).expand(self.p.shape)

    def piece(self) -> Piece:
        """What this rank holds."""
        if not hasattr(self.p, "device_mesh"):
            return Piece.whole(self.p.shape)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        sizes, starts = compute_local_shape_and_global_offset(self.p.shape, self.p.device_mesh, self.p.placements)
        return Piece(tuple(starts), tuple(sizes))

    def layout(self, place: int, ranks: Sequence[int], shape: Sequence[int]) -> Piece:
        """What a rank holds of a tensor of the saved state: rows, as if torch had sharded it."""
        if not self.is_sharded or not shape:
            return Piece.whole(shape)
        mesh = self.p.device_mesh
        coordinates = (mesh.mesh == ranks[place]).nonzero()[0].tolist()
        start, size = 0, shape[0]
        for parts, part, placement in zip(mesh.shape, coordinates, self.p.placements, strict=True):
            if not placement.is_replicate():
                (first,), (size,) = rows_of((size,), parts, part)
                start += first
        return Piece((start, *(0,) * (len(shape) - 1)), (size, *shape[1:]))

    def as_saved(self, piece: Tensor, shape: torch.Size) -> Tensor:
        """What this rank holds of a tensor of the saved state: a DTensor if the parameter is sharded."""
        if not self.is_sharded or not shape:
            return piece.clone()
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = self.p.device_mesh
        placements = [Replicate() if placement.is_replicate() else Shard(0) for placement in self.p.placements]
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(piece.clone(), mesh, placements, run_check=False, shape=shape, stride=strides)

    def fresh(self, options: Options) -> State:
        """The state before the first step; what another rank holds takes no memory here."""
        if self.stand_in is not None:
            return fresh_state(self.blank(), options)
        return self._elsewhere(fresh_state(outline(self.p), options))

    def restored(self, options: Options, loaded: State) -> State:
        """A loaded state; every rank that holds a piece has to ask for it."""
        if self.stand_in is not None:
            return restored(self.stand_in, options, loaded)
        skipped = int(torch.as_tensor(loaded.get("skipped", 0)))
        for value in loaded.values():
            whole(value)  # a rank cannot gather alone
        return self._elsewhere(fresh_state(outline(self.p), options), skipped)

    def _elsewhere(self, state: State, skipped: int = 0) -> State:
        """Zeros in the place of what another rank holds, all the same one; but skipped steps are counted everywhere."""
        device = local(self.p).device
        zeros = {name: torch.zeros((), dtype=x.dtype, device=device).expand(x.shape) for name, x in state.items()}
        zeros["skipped"].fill_(skipped)
        return zeros


class Round:
    """Tensors that travel together, and the stacks of those that this rank owns, with the places of their groups."""

    def __init__(self, items: Sequence[Item], states: Mapping[Tensor, State], backend: str) -> None:
        self.items = list(items)
        own: dict[int, list[Item]] = {}
        for item in items:
            if item.stand_in is not None:
                own.setdefault(item.index, []).append(item)
        self.bundles: list[tuple[int, Bundle]] = []
        for index, few in own.items():
            stand_ins = [item.stand_in for item in few if item.stand_in is not None]
            self.bundles += [(index, b) for b in bundled(stand_ins, [states[item.p] for item in few], backend)]
