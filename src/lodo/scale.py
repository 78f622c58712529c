"""What KronLODO holds, computes and sends on many devices, added up before anything is run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lodo._checks import check_bool, check_int
from lodo.estimate import readable
from lodo.kron import KronLODO
from lodo.kron_state import memory_of
from lodo.planning import Entry, Piece, Traffic, assigned, cost_of, flops_of, in_rounds, rows_of, traffic


class Plan(NamedTuple):
    """What KronLODO does on several devices; "most" is the rank that has most of it."""

    world: int
    weights: int
    state: int  # bytes, on all ranks together
    most_state: int
    flops: float  # of a step, on all ranks together
    most_flops: float
    messages: int  # that a rank sends in a step
    most_bytes: int  # that a rank sends in a step
    bytes: int  # that all ranks send in a step
    gradient_bytes: int  # that all ranks send to reduce the gradients
    owners: tuple[int, ...]  # of the tensors

    @property
    def state_share(self) -> float:
        """The part of all state that is on the rank with most of it; 1 / world would be even."""
        return self.most_state / self.state

    @property
    def speedup(self) -> float:
        """How many times fewer FLOPs than all the rank with most of them has; ``world`` would be even."""
        return self.flops / self.most_flops

    def __str__(self) -> str:
        return (
            f"{self.weights / 1e6:.1f} million weights on {self.world} ranks: {readable(self.most_state)} of state on "
            f"the fullest ({self.state_share:.1%} of all), {self.most_flops / 1e9:.1f} GFLOPs a step on "
            f"the busiest ({self.speedup:.1f} times fewer than undivided), {self.messages} messages and "
            f"{readable(self.most_bytes)} sent ({self.bytes / max(self.gradient_bytes, 1):.2f} times what reducing the "
            "gradients sends)"
        )


def plan(model: nn.Module | Iterable[Sequence[int]], *, world: int, sharded: bool = True, **options: object) -> Plan:
    """What a step of KronLODO sends, holds and computes on ``world`` ranks, before anything is run.

    Args:
        model: a model, which may be on the device "meta", or the shapes of its tensors in float32.
        world: the number of ranks.
        sharded: as with FSDP2 (``fully_shard``), where gradients are gathered and changes scattered. False is for
            ``distribute=True`` under DDP, where changes are sent and nothing else.
        options: of `lodo.KronLODO`.

    Example:
        >>> import lodo
        >>> plan = lodo.plan([(768, 768)] * 4, world=2)
        >>> plan.state_share, plan.messages, plan.bytes / plan.gradient_bytes
        (0.5, 2, 1.00000...)
        >>> print(lodo.plan([(768, 768)] * 4, world=4, max_dim=512))  # doctest: +ELLIPSIS
        2.4 million weights on 4 ranks: ...
    """
    check_int("world", world, low=1)
    check_bool("sharded", sharded)
    params = _tensors(model)
    chosen = KronLODO([nn.Parameter(torch.zeros(1))], **options).param_groups[0]  # type: ignore[arg-type]
    states = [memory_of(p, chosen).total for p in params]
    flops = [flops_of(p, chosen) for p in params]
    loads = [[0.0, 0.0] for _ in range(world)]
    owners = assigned([(cost_of(p, chosen), s) for p, s in zip(params, states, strict=True)], loads)
    entries = in_rounds([_entry(p, owner, world, sharded) for p, owner in zip(params, owners, strict=True)])
    sent = traffic(entries, world) if world > 1 else [Traffic(0, 0)]
    weights = sum(p.numel() for p in params)
    reduced = sum(p.numel() * p.element_size() for p in params) * (world - 1)

    def most(values: Sequence[float]) -> float:
        return max(sum(v for v, o in zip(values, owners, strict=True) if o == rank) for rank in range(world))

    return Plan(
        world,
        weights,
        sum(states),
        int(most(states)),
        sum(flops),
        most(flops),
        sent[0].messages,
        max(each.bytes for each in sent),
        sum(each.bytes for each in sent),
        reduced if sharded else 2 * reduced,  # scattered sums, which DDP gathers as well
        tuple(owners),
    )


def _tensors(model: nn.Module | Iterable[Sequence[int]]) -> list[Tensor]:
    """The tensors to train, without contents."""
    if isinstance(model, nn.Module):
        params: list[Tensor] = [p for p in model.parameters() if p.requires_grad and p.numel()]
        found = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in params]
    else:
        found = [torch.empty(tuple(shape), device="meta") for shape in model]
    if not found:
        raise ValueError("model must have tensors to train, got none")
    return found


def _entry(p: Tensor, owner: int, world: int, sharded: bool) -> Entry:
    whole = Piece.whole(p.shape)
    split = sharded and p.dim() > 0
    pieces = tuple(rows_of(p.shape, world, rank) if split else whole for rank in range(world))
    size = p.element_size()
    return Entry(tuple(p.shape), size, max(size, 4) if sharded else size, pieces, owner)
