"""KronLODO on many processes: every tensor has an owner, a rank that does its work for all and holds its state.

Bases need whole matrices, so the owner of a tensor that is sharded gathers its gradient and scatters the change::

    gather     pieces of gradients to their owners      (not under DDP, where everyone has whole gradients)
    step       of the owners, on whole tensors
    scatter    changes to everyone who holds a piece    W = (1 - decay) W + change
                                                        (under DDP new weights, which everyone holds)

All that two ranks have to tell each other is one message a round. While one round is worked on, the gradients of the
next and the changes of the last one travel. A step's first messages begin with whether the sender's gradients can be
used, so that all ranks step or none does. Who owns what, and in which round, is decided in `lodo.planning`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lodo.distributed import local, local_gradient, shard_of
from lodo.group import Options, name_of
from lodo.kron_learning import decay_rate
from lodo.kron_state import memory_of, outline
from lodo.layout import real
from lodo.messages import Expected, Transfer
from lodo.owned import NOTHING, Item, Round
from lodo.planning import Entry, Piece, assigned, cost_of, in_rounds
from lodo.scalars import Flag
from lodo.stacks import Bundle, State, state_dtype

Take = Callable[[int, Bundle, Flag], None]  # a step of a bundle of a group


class Circle:
    """The ranks among which some tensors are divided.

    Args:
        ranks: of the circle, in the order of the process group.
        group: the process group.
        items: the tensors.
    """

    def __init__(self, ranks: Sequence[int], group: Any, items: Sequence[Item]) -> None:
        self.ranks, self.group, self.items = ranks, group, list(items)
        self.place = ranks.index(dist.get_rank())
        self.device = local(items[0].p).device
        self.rounds: list[Round] = []
        self._first: Transfer | None = None  # the gradients of the first round
        self._flag: Flag = True
        self.active: list[int] = []

    # ------------------------------------------------------------ who owns what

    def share_out(self, groups: Sequence[Options], owners: dict[Tensor, int]) -> None:
        """Decide who owns what; what had an owner keeps it."""
        works = {item.p: _work(item.p, groups[item.index]) for item in self.items}
        loads = [[0.0, 0.0] for _ in self.ranks]
        for p in (item.p for item in self.items if item.p in owners):
            loads[owners[p]] = [load + x for load, x in zip(loads[owners[p]], works[p], strict=True)]
        new = [item.p for item in self.items if item.p not in owners]
        owners.update(zip(new, assigned([works[p] for p in new], loads), strict=True))

    def meet(self, owners: Mapping[Tensor, int]) -> None:
        """Let all ranks know who holds which pieces."""
        own = [(item.name, tuple(item.p.shape), str(item.p.dtype), *item.piece()) for item in self.items]
        everyone: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(everyone, own, group=self.group)
        for rank, theirs in zip(self.ranks, everyone, strict=True):
            if [entry[:3] for entry in theirs] != [entry[:3] for entry in own]:
                raise ValueError(
                    f"all ranks need the same parameters in the same order, but rank {rank} has "
                    f"{_first_difference(theirs, own)}"
                )
        entries = []
        for j, item in enumerate(self.items):
            pieces = tuple(Piece(*theirs[j][3:]) for theirs in everyone)
            sizes = item.p.element_size(), item.dtype.itemsize
            entries.append(Entry(tuple(item.p.shape), *sizes, pieces, owners[item.p]))
        for item, entry in zip(self.items, in_rounds(entries), strict=True):
            item.entry, item.sources = entry, entry.sources()
            if entry.owner == self.place:
                item.stand_in = Parameter(item.blank(), requires_grad=False)
        self.gathers = any(item.sources for item in self.items)

    # ------------------------------------------------------------ a step

    def ready(self, groups: Sequence[Options], states: dict[Tensor, State], backend: str) -> None:
        """Find the gradients; if others than in the last step have one, make new stacks."""
        active = [item for item in self.items if item.p.grad is not None]
        for item in active:
            grad = local_gradient(item.p)
            assert grad is not None
            item.grad = grad
        ids = [id(x) for item in active for x in (item, states.get(item.p))]
        if ids == self.active and all(bundle.holds() for each in self.rounds for _, bundle in each.bundles):
            return
        for item in active:
            if not states[item.p]:
                states[item.p] = item.fresh(groups[item.index])
        rounds: dict[int, list[Item]] = {item.entry.round: [] for item in sorted(active, key=lambda i: i.entry.round)}
        for item in active:
            rounds[item.entry.round].append(item)
        self.rounds = [Round(items, states, backend) for items in rounds.values()]
        self.active = [id(x) for item in active for x in (item, states[item.p])]

    def squares(self) -> list[Tensor]:
        """Bounds on the squares of the gradients' norms, as far as this rank can see."""
        found = []
        for dtype in (torch.float32, torch.float64):
            grads = [real(item.grad) for each in self.rounds for item in each.items if state_dtype(item.p) == dtype]
            if grads:
                norms = torch.stack(torch._foreach_norm(grads, 2, dtype))
                found.append(norms.square() * (len(self.ranks) if self.gathers else 1))
        return found

    def agree(self, fine: Flag) -> tuple[Flag, int | None]:
        """Whether all ranks' gradients can be used, and a rank whose cannot; sends the first gradients along."""
        self._flag = fine
        if not self.gathers or not self.rounds:
            return fine, None
        self._first = self._gather(0)
        flags = [tensors[0][0] if tensors else None for tensors in self._first.wait()]
        known = [flag for flag in flags if flag is not None]
        if isinstance(fine, Tensor):
            return torch.stack([fine, *(flag.bool() for flag in known)]).all(), None
        complaining = [r for r, flag in zip(self.ranks, flags, strict=True) if flag is not None and not int(flag)]
        return fine and not complaining, complaining[0] if complaining else None

    def refuse(self) -> None:
        """Where gradients are not gathered, others hear of a refusal with the changes, of which there are none."""
        if self.rounds and not self.gathers:
            for item in self.rounds[0].items:
                self._fill_in(item, [])
            self._check_flags(self._scatter(0).wait())
        for each in self.rounds:
            self._release(each)

    def step(self, groups: Sequence[Options], ok: Flag, take: Take) -> None:
        """Work on what this rank owns, round by round, while gradients of the next and changes of the last travel."""
        coming, sent = self._first, None
        self._first = None
        for number, each in enumerate(self.rounds):
            following = self._gather(number + 1) if self.gathers and number + 1 < len(self.rounds) else None
            self._fill(each, coming)
            for index, bundle in each.bundles:
                take(index, bundle, ok)
            if sent is not None:
                self._apply(groups, number - 1, sent, ok)
            coming, sent = following, self._scatter(number)
        if sent is not None:
            self._apply(groups, len(self.rounds) - 1, sent, ok)

    def _header(self, number: int, is_first: bool) -> list[Tensor]:
        """What begins a step's first messages."""
        if number or not is_first:
            return []
        flag = self._flag if isinstance(self._flag, Tensor) else torch.tensor(self._flag, device=self.device)
        return [flag.to(torch.int64).reshape(1)]

    def _gather(self, number: int) -> Transfer:
        """Send this rank's pieces of gradients to their owners."""
        each, header = self.rounds[number], self._header(number, True)
        sent, expected = self._empty(header)
        for item in each.items:
            if self.place in item.sources:
                sent[item.entry.owner].append(item.grad)
            elif item.stand_in is not None:
                for rank, piece in item.sources.items():
                    expected[rank].append((piece.sizes, item.grad.dtype))
        return Transfer(self.group, sent, expected, self.device)

    def _fill(self, each: Round, coming: Transfer | None) -> None:
        """Put whole gradients in the place of what this rank owns, and zeros instead of weights that are sharded."""
        received = [iter(tensors) for tensors in coming.wait()] if coming is not None else []
        if each is self.rounds[0]:
            for tensors in received:
                next(tensors, None)  # the header
        for item in each.items:
            self._fill_in(item, received)

    def _fill_in(self, item: Item, received: Sequence[Iterator[Tensor]]) -> None:
        if item.stand_in is None:
            return
        if not item.is_sharded:  # the weights themselves, which are moved where they are
            item.stand_in.data, item.stand_in.grad = local(item.p).data, item.grad.to(item.dtype)
            return
        G = torch.empty(item.p.shape, dtype=item.dtype, device=self.device)
        item.entry.pieces[self.place].of(G).copy_(item.grad)
        for rank, piece in item.sources.items():
            piece.of(G).copy_(next(received[rank]))
        item.stand_in.data, item.stand_in.grad = torch.zeros_like(G), G

    def _scatter(self, number: int) -> Transfer:
        """Send changes to everyone who holds a piece, and weights to everyone who holds all."""
        sent, expected = self._empty(self._header(number, not self.gathers))
        for item in self.rounds[number].items:
            owner, pieces = item.entry.owner, item.entry.pieces
            if item.stand_in is None:
                expected[owner].append((pieces[self.place].sizes, item.dtype))
                continue
            for rank, piece in enumerate(pieces):
                if rank != owner:
                    sent[rank].append(piece.of(item.stand_in.data))
        return Transfer(self.group, sent, expected, self.device)

    def _empty(self, header: list[Tensor]) -> tuple[list[list[Tensor]], list[list[Expected]]]:
        """Messages with nothing but a header."""
        like: list[Expected] = [((1,), torch.int64)] if header else []
        others = [place != self.place for place in range(len(self.ranks))]
        return [[*header] if other else [] for other in others], [[*like] if other else [] for other in others]

    def _apply(self, groups: Sequence[Options], number: int, sent: Transfer, ok: Flag) -> None:
        """``W = (1 - decay) W + change`` for pieces; weights that are whole are replaced."""
        received = sent.wait()
        if number == 0 and not self.gathers:
            self._check_flags(received)
            received = [tensors[1:] for tensors in received]
        each, changes = self.rounds[number], [iter(tensors) for tensors in received]
        moved: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for item in each.items:
            if item.stand_in is not None:
                change = item.entry.pieces[self.place].of(item.stand_in.data)
            else:
                change = next(changes[item.entry.owner])
            if item.is_sharded:
                weights, steps = moved.setdefault(item.index, ([], []))
                weights.append(local(item.p))
                steps.append(change)
            elif item.stand_in is None:
                local(item.p).copy_(change)
        for index, (weights, steps) in moved.items():
            options = groups[index]
            decay = 1 - decay_rate(options) * (ok.to(torch.float32) if isinstance(ok, Tensor) else 1.0)
            if isinstance(decay, Tensor) or decay != 1:
                torch._foreach_mul_(weights, decay)
            torch._foreach_add_(weights, steps)
        self._release(each)

    def _release(self, each: Round) -> None:
        for item in each.items:
            item.grad = NOTHING
            if item.stand_in is not None:
                item.stand_in.grad, item.stand_in.data = None, item.blank()

    def _check_flags(self, received: Sequence[Sequence[Tensor]]) -> None:
        """Where everyone has whole gradients, all ranks must find them usable, or none."""
        if isinstance(self._flag, Tensor):
            return
        for rank, tensors in zip(self.ranks, received, strict=True):
            if tensors and bool(tensors[0]) != self._flag:
                ranks = (rank, dist.get_rank()) if self._flag else (dist.get_rank(), rank)
                raise RuntimeError(
                    f"a gradient on rank {ranks[0]} is not finite or too large, but none on rank {ranks[1]} is: with "
                    "distribute=True all ranks need the same gradients, as under DDP. Restart from a checkpoint"
                )

    # ------------------------------------------------------------ states

    def saved(self, states: Mapping[Tensor, State]) -> dict[Tensor, State]:
        """The states as they are saved: laid out as the parameters are, on every rank."""
        found: dict[Tensor, State] = {}
        for number in sorted({item.entry.round for item in self.items}):
            items = [item for item in self.items if item.entry.round == number and states.get(item.p)]
            sent, expected = self._empty([])
            for item in items:
                for x in states[item.p].values():
                    if item.stand_in is None:
                        piece = item.layout(self.place, self.ranks, x.shape)
                        expected[item.entry.owner].append((piece.sizes, x.dtype))
                        continue
                    for rank in set(range(len(self.ranks))) - {self.place}:
                        sent[rank].append(item.layout(rank, self.ranks, x.shape).of(x))
            received = [iter(tensors) for tensors in Transfer(self.group, sent, expected, self.device).wait()]
            for item in items:
                found[item.p] = {}
                for name, x in states[item.p].items():
                    own = item.layout(self.place, self.ranks, x.shape).of(x)
                    piece_ = own if item.stand_in is not None else next(received[item.entry.owner])
                    found[item.p][name] = item.as_saved(piece_, x.shape)
        return found


class Division:
    """The tensors of an optimizer whose work is divided between ranks; empty if every rank does all of it.

    Args:
        groups: the parameter groups.
        owners: who owns what, as places in the circles; it is added to.
        distribute: whether to divide work on tensors that every rank has whole.
    """

    def __init__(self, groups: Sequence[Options], owners: dict[Tensor, int], distribute: bool) -> None:
        self.sizes = [len(options["params"]) for options in groups]
        self.items = {item.p: item for item in _items(groups, distribute)}
        self.complaining: int | None = None
        self.circles: list[Circle] = []
        for ranks, items in _by_ranks(self.items.values()).items():
            group = _group_of(ranks, items[0].p)
            circle = Circle(dist.get_process_group_ranks(group), group, items)
            circle.share_out(groups, owners)
            circle.meet(owners)
            self.circles.append(circle)

    def covers(self, groups: Sequence[Options]) -> bool:
        """Whether no parameters have been added since."""
        return self.sizes == [len(options["params"]) for options in groups]

    def forget_stacks(self) -> None:
        """After states have been replaced."""
        for circle in self.circles:
            circle.rounds, circle.active = [], []

    def ready(self, groups: Sequence[Options], states: dict[Tensor, State], backend: str) -> None:
        """Before a step."""
        for circle in self.circles:
            circle.ready(groups, states, backend)

    def squares(self) -> list[Tensor]:
        """As `Circle.squares`, of all."""
        return [x for circle in self.circles for x in circle.squares()]

    def agree(self, fine: Flag) -> Flag:
        """Whether the gradients can be used on all ranks, given whether they can here."""
        self.complaining = None
        for circle in self.circles:
            fine, rank = circle.agree(fine)
            self.complaining = rank if self.complaining is None else self.complaining
        return fine

    def refuse(self, states: Mapping[Tensor, State], count: bool) -> None:
        """Take no step; ``count`` it as skipped."""
        for circle in self.circles:
            circle.refuse()
            for each in circle.rounds:
                for item in each.items:
                    states[item.p]["skipped"] += count

    def step(self, groups: Sequence[Options], ok: Flag, take: Take) -> None:
        """Take the step that `agree` has begun."""
        for circle in self.circles:
            circle.step(groups, ok, take)

    def saved(self, states: Mapping[Tensor, State]) -> dict[Tensor, State]:
        """As `Circle.saved`, of all."""
        return {p: state for circle in self.circles for p, state in circle.saved(states).items()}

    def together(self, error: Exception | None) -> None:
        """Raise an error on every rank if there is one on any."""
        for circle in self.circles:
            everyone: list[Any] = [None] * len(circle.ranks)
            dist.all_gather_object(everyone, None if error is None else str(error), group=circle.group)
            for rank, theirs in zip(circle.ranks, everyone, strict=True):
                if theirs is not None and error is None:
                    error = ValueError(f"on rank {rank}: {theirs}")
        if error is not None:
            raise error


# ---------------------------------------------------------------- who shares what


def owned_here(groups: Sequence[Options], owners: Mapping[Tensor, int], distribute: bool) -> Callable[[Tensor], bool]:
    """Which parameters' states this rank holds, or will hold; nothing is sent."""
    items = _items(groups, distribute)
    known = dict(owners)
    places: dict[Tensor, int] = {}
    for ranks, few in _by_ranks(items).items():
        circle = Circle(ranks, None, few)
        circle.share_out(groups, known)
        places |= dict.fromkeys((item.p for item in few), circle.place)
    return lambda p: p not in places or known[p] == places[p]


def replicated(
    groups: Sequence[Options], states: Mapping[Tensor, State], divided: Container[Tensor]
) -> list[tuple[str, Tensor]]:
    """What every rank holds a copy of, with names: parameters, and states unless they are divided."""
    named: list[tuple[str, Tensor]] = []
    for index, options in enumerate(groups):
        for j, p in enumerate(options["params"]):
            if p.numel() and _ranks_of(p) == tuple(range(dist.get_world_size())) and shard_of(p).parts == 1:
                name = name_of(options, index, j).rstrip(",")
                named.append((name, local(p)))
                if p not in divided:
                    named += [(f"{what} of {name}", x) for what, x in states.get(p, {}).items()]
    return named


def _items(groups: Sequence[Options], distribute: bool) -> list[Item]:
    """The parameters whose work is divided."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    return [
        Item(p, index, name_of(options, index, j))
        for index, options in enumerate(groups)
        for j, p in enumerate(options["params"])
        if p.numel() and (shard_of(p).parts > 1 or (distribute and len(_ranks_of(p)) > 1))
    ]


def _ranks_of(p: Tensor) -> tuple[int, ...]:
    mesh = getattr(p, "device_mesh", None)
    return tuple(range(dist.get_world_size())) if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))


def _by_ranks(items: Any) -> dict[tuple[int, ...], list[Item]]:
    found: dict[tuple[int, ...], list[Item]] = {}
    for item in items:
        found.setdefault(_ranks_of(item.p), []).append(item)
    return found


def _group_of(ranks: Sequence[int], p: Tensor) -> Any:
    """The process group of these ranks, which share a parameter."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    mesh: Any = p.device_mesh  # type: ignore[attr-defined]
    return mesh.get_group() if mesh.ndim == 1 else dist.new_group(list(ranks), use_local_synchronization=True)


def _work(p: Tensor, options: Options) -> tuple[float, float]:
    return cost_of(outline(p), options), float(memory_of(p, options).total)


def _first_difference(theirs: Sequence[Any], ours: Sequence[Any]) -> str:
    for one, other in zip(theirs, ours, strict=False):
        if one[:3] != other[:3]:
            return f"{one[0]} {one[2]}, where rank {dist.get_rank()} has {other[0]} {other[2]}"
    return f"{len(theirs)} of them, and rank {dist.get_rank()} has {len(ours)}"
