"""States as they are saved: theta in natural order, tensors and numbers only, checked before anything is loaded.

A group's state sits under its first parameter that is not frozen, its holder; the others have their part of the
momentum, because torch expects a state under every parameter. What is kept in memory and what is saved differ: an
engine packs theta as it likes, and small tuples become tensors, because torch's tools know nothing else.
"""

from __future__ import annotations

import operator
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict

from lodo import distributed
from lodo.engines.numba import storage
from lodo.estimate import as_family
from lodo.families import Mixing
from lodo.group import Group, Network, Options, State, lasting_tensors
from lodo.grouped import Grouped
from lodo.guard import Guard
from lodo.layout import Layout
from lodo.meta import Learned, MetaOptimizer
from lodo.recipes import as_meta_optimizer
from lodo.scalars import plain

FORMAT = 3  # of a group's state; 0.1.0 has none, and 2 nested the states of shards
_COUNTS = ("step", "meta_step", "skipped")
_REALS = ("last_lr", "momentum_bound", "fed_bound")


class Load(NamedTuple):
    """What a group takes from a loaded state."""

    network: Network | None  # None on a rank that holds nothing of the group
    holder: int  # the parameter that its state sits under
    state: State | None  # None if nothing was learned yet


# ---------------------------------------------------------------- saving


def as_saved(group: Group, network: Network, options: Options, state: State) -> State:
    """A group's state as it is written to a file."""
    engine = network.engine
    moments = as_meta_optimizer(options["meta_optimizer"]).moments
    packed = {"theta", *moments}
    plainly: State = {"format": FORMAT, "fingerprint": network.fingerprint}
    plainly |= {name: plain(state[name]) for name in (*_COUNTS, *_REALS)}
    plainly["guard"] = _tensor(state["guard"])
    plainly["moved"] = torch.as_tensor(state["moved"]).cpu()
    plainly["numels"] = torch.tensor(group.layout.numels)
    if "gate" in state:
        plainly["gate"] = _tensor(state["gate"])
    for name, value in state.items():
        if isinstance(value, Tensor) and name not in plainly:
            plainly[name] = engine.unpack(value) if name in packed else value
    return plainly


def entries(group: Group, network: Network, options: Options, state: State) -> list[State]:
    """What is written to a file for each parameter of a group."""
    saved: list[State] = [{"momentum": part} for part in group.layout.split(state["momentum"])]
    saved[group.holder] = as_saved(group, network, options, state)
    return [distributed.wrap(entry, group.layout.shard) for entry in saved]


def _tensor(numbers: Sequence[Any]) -> Tensor:
    return torch.tensor([plain(number) for number in numbers], dtype=torch.float64)


# ---------------------------------------------------------------- loading


def restored(network: Network, meta: MetaOptimizer, loaded: State) -> State:
    """A copy of a saved state in the network's dtypes, layout and device."""
    engine = network.engine
    layout = engine.layout
    state: State = {name: network.number(int(loaded[name])) for name in _COUNTS}
    state |= {name: network.number(float(loaded[name])) for name in _REALS}
    state["guard"] = Guard(*(network.number(x) for x in loaded["guard"].tolist()))
    state["moved"] = loaded["moved"].tolist()
    if "gate" in loaded:
        value, first, second, t = loaded["gate"].tolist()
        count = int(t) if engine.on_host else t
        state["gate"] = Learned(*map(network.number, (value, first, second, count)))
    with lasting_tensors():
        for name in ("theta", *meta.moments):
            dtype = (meta.stored_dtype if name in meta.moments else None) or layout.dtype
            state[name] = engine.pack(loaded[name].to(dtype))
        for name in ("momentum", "last_gradient", "last_step"):
            if name in loaded:
                state[name] = torch.zeros_like(network.g.vector).copy_(loaded[name])
    return state


def loads(groups: Sequence[Group], ours: Sequence[Options], given: dict[str, Any], on_reshard: str) -> list[Load]:
    """What each group takes from a state dict that `modern` has been through, or an error that says what differs."""
    theirs = given["param_groups"]
    if len(theirs) != len(groups):
        raise ValueError(f"the state has {len(theirs)} parameter groups, this optimizer {len(groups)}")
    if any("preconditioner" not in other for other in theirs):
        raise ValueError("the state must be one of LODO, got that of another optimizer")
    found = []
    for group, own, other in zip(groups, ours, theirs, strict=True):
        if len(other["params"]) != len(own["params"]):
            raise ValueError(
                f"group {group.index} of the state has {len(other['params'])} parameters, ours {len(own['params'])}"
            )
        for key, alike in _ALIKE.items():
            if key not in other or not alike(other[key], own[key]):
                raise ValueError(
                    f"group {group.index} of the state has {key} = {other.get(key)!r}, ours is {own[key]!r}"
                )
        found.append(_load(group, other, given["state"], on_reshard))
    return found


def completed(ours: Options, theirs: Options) -> Options:
    """A saved group's options; what an earlier release did not save stays as it is here.

    >>> completed({"params": [], "lr": 1.0, "maximize": False}, {"params": [0], "lr": 0.1})
    {'lr': 0.1, 'maximize': False, 'params': [0]}
    """
    of_the_parameters = ("params", "param_names")
    return {name: value for name, value in ours.items() if name not in of_the_parameters} | theirs


def _same_moments(theirs: str, ours: str) -> bool:
    """Whether two meta-optimizers keep the same arrays; their rates and decays come with the state, as in torch.

    >>> _same_moments("adam(eps=1e-8)", "adam"), _same_moments("adam(moment_dtype='bfloat16')", "adam")
    (True, False)
    """
    a, b = as_meta_optimizer(theirs), as_meta_optimizer(ours)
    return type(a) is type(b) and a.stored_dtype == b.stored_dtype


# What a loaded state must agree with, and when it does.
_ALIKE: dict[str, Callable[[Any, Any], bool]] = {
    "preconditioner": operator.eq,
    "meta_optimizer": _same_moments,
    "momentum": operator.eq,
}


def _load(group: Group, options: Options, states: dict[Any, State], on_reshard: str) -> Load:
    holder, state = _own_state(group, options["params"], states, on_reshard)
    if not group.n:
        return Load(None, holder, state)
    network = group.drawn(options["seed"])
    if state:
        _check_state(group, network, options, state)
    return Load(network, holder, state)


def _own_state(
    group: Group, keys: Sequence[Any], states: dict[Any, State], on_reshard: str
) -> tuple[int, State | None]:
    """Under which parameter a group's state was saved, and this rank's part of it.

    The state is None if nothing was learned, and empty on a rank that holds nothing of the group.
    """
    shard = group.layout.shard
    present = {j: states[key] for j, key in enumerate(keys) if key in states}
    if not present:
        return group.holder, None
    own = {j: distributed.unwrap(entry, shard) for j, entry in present.items()}
    for j, part in own.items():
        if part and "theta" in part:
            return j, part
    count = next((entry.get("shards", 1) for entry in present.values() if entry), shard.parts)
    if count == shard.parts and not group.n:
        return group.holder, {}
    if any(own.values()) or not any(present.values()):
        raise ValueError(
            f"group {group.index} of the state has entries for its parameters, but nothing that was learned: it "
            "was lost on the way. Torch's distributed checkpoints drop the state of a frozen parameter"
        )
    problem = f"group {group.index} of the state was learned in {count} shards, and this rank holds {shard.label}"
    if on_reshard == "raise":
        raise ValueError(
            f"{problem}: G cannot be divided anew. Load it on {count} ranks, or pass on_reshard='restart' to "
            "start with a fresh G"
        )
    warnings.warn(f"{problem}: G starts afresh (on_reshard='restart')", stacklevel=7)
    return group.holder, None


def _check_state(group: Group, network: Network, options: Options, state: State) -> None:
    """Raise an error unless a saved state belongs to this network."""
    layout, meta = group.layout, as_meta_optimizer(options["meta_optimizer"])
    where = f"group {group.index} of the state"
    if state.get("format", FORMAT) > FORMAT:
        raise ValueError(f"{where} has format {state['format']}, which a later release of lodo saved; ours is {FORMAT}")
    needed = [*_COUNTS, *_REALS, "guard", "moved", "numels", "fingerprint"]
    vectors = ["momentum"]
    if options["momentum"] == "learned":
        needed.append("gate")
        vectors.append("last_gradient")
    missing = [name for name in needed if name not in state]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}: it was not saved by LODO, or is damaged")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(vectors, (layout.n,))
    shapes |= {name: group.family.shape(layout) for name in ("theta", *meta.moments)}
    for name, expected in shapes.items():
        found = tuple(state[name].shape) if isinstance(state.get(name), Tensor) else None
        if found != expected:
            raise ValueError(
                f"{where} has {name} of shape {found}, but n = {layout.n:,} and {group.family} need {expected}"
            )
    for name in shapes:
        if not bool(torch.isfinite(state[name]).all()):
            raise ValueError(f"{where} has numbers in {name} that are not finite: it was damaged before it was saved")
    numels = state["numels"].tolist()
    if numels != list(layout.numels):
        raise ValueError(f"{where} has parameters of {numels} elements, ours have {list(layout.numels)}")
    if state["fingerprint"] != network.fingerprint:
        raise ValueError(
            f"{where} was learned with other permutations than its seed gives here "
            "(another release of torch may draw them differently)"
        )


# ---------------------------------------------------------------- states of 0.1.0


def modern(groups: Sequence[Group], given: dict[str, Any]) -> dict[str, Any]:
    """A state dict in today's form; one saved by 0.1.0 is converted."""
    options = given.get("param_groups", [])
    if not any("meta_betas" in theirs for theirs in options):
        return given
    states = dict(given["state"])
    converted = []
    for group, theirs in zip(groups, options, strict=False):
        new = _modern_options(group, theirs)
        converted.append(new)
        for key in theirs["params"]:
            if states.get(key):
                states[key] = _modern_state(group, new, states[key])
    return {**given, "param_groups": [*converted, *options[len(converted) :]], "state": states}


def _modern_options(group: Group, theirs: Options) -> Options:
    kept = {name: value for name, value in theirs.items() if not name.startswith("meta_") and name != "moment_dtype"}
    betas, dtype = theirs["meta_betas"], theirs["moment_dtype"]
    spelled = {
        "adam": f"adam(betas={tuple(betas)}, eps={theirs['meta_eps']}, moment_dtype={'bfloat16' if dtype else None!r})",
        "sgd": "sgd",
        "schedule-free": f"schedule-free(b={betas[0]}, window={theirs['meta_window']})",
    }[theirs["meta_optimizer"]]
    family = theirs["preconditioner"]
    if "permuted-shuffle" in family:
        raise ValueError(
            f"group {group.index} of the state was saved by lodo 0.1.0 with mixing='permuted-shuffle', which no longer "
            "exists, so it cannot be loaded; lodo 0.1.0 can still continue the run"
        )
    if family.split("(")[0] in ("Mixing", "Residual", "Diagonal", "Scalar", "Dense"):
        family = repr(as_family(family))
    meta = repr(as_meta_optimizer(spelled))
    return {**kept, "preconditioner": family, "meta_lr": theirs["meta_lr"], "meta_optimizer": meta}


def _modern_state(group: Group, options: Options, old: State) -> State:
    """A group's state, or a shard's, with theta in natural order and tensors instead of lists."""
    if "shards" in old:
        return {name: _modern_state(group, options, x) if isinstance(x, dict) else x for name, x in old.items()}
    new = dict(old)
    moments = as_meta_optimizer(options["meta_optimizer"]).moments
    layout = Layout.flat(sum(old["numels"]), shard=group.layout.shard)
    if isinstance(group.family, Mixing):
        new |= {name: storage.unpack(old[name], group.family.shape(layout)[1]) for name in ("theta", *moments)}
        new["fingerprint"] = _modern_fingerprint(group, options["seed"], old["fingerprint"])
    new |= {name: torch.tensor(old[name], dtype=torch.float64) for name in ("guard", "gate") if name in old}
    new |= {"moved": torch.tensor(old["moved"]), "numels": torch.tensor(old["numels"]), "format": FORMAT}
    return new


def _modern_fingerprint(group: Group, seed: int, old: int) -> int:
    """Today's fingerprint if the old one, a checksum of 0.1.0's tiles, matches; otherwise the old, to be refused."""
    if not isinstance(group.family, Mixing) or group.family.mixing != "random" or not group.n:
        return old
    network = group.drawn(seed)
    P = network.draw_permutations(group.family, group.layout)
    tiles = storage.pack_permutations(P, group.family, group.layout)
    return network.fingerprint if zlib.crc32(tiles.numpy().data) == old else old


# ---------------------------------------------------------------- the optimizer's half


def load_between(
    optimizer: Optimizer,
    state_dict: StateDict,
    check: Callable[[Optimizer, StateDict], StateDict | None],
    restore: Callable[[Optimizer], None],
) -> None:
    """Load a state as torch does; ``check`` comes right before that, and ``restore`` right after it.

    Hooks of the user's run before the one and after the other.
    """
    hooks = (
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    )
    try:
        Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        for hook in hooks:
            hook.remove()


class Resumable(Grouped):
    """The half of LODO that saves and loads."""

    on_reshard: str
    _refused: Tensor | None
    _refused_in_a_row: int

    def state_dict(self) -> StateDict:
        """The state as torch has it, with theta in natural order whatever the engine."""
        if not self._repeats_groups():
            self._pairs()  # raises an error that says what is wrong
        packed = super().state_dict()
        for group, options, saved in zip(self._groups, self.param_groups, packed["param_groups"], strict=False):
            if group.n and saved["params"][group.holder] in packed["state"]:
                state = self._state(group.index)
                written = entries(group, group.ready(options), options, state)
                packed["state"].update(zip(saved["params"], written, strict=True))
        return packed

    def _repeats_groups(self) -> bool:
        """Whether the groups that were not added with `add_param_group`, if any, repeat parameters that were."""
        added, others = self.param_groups[: len(self._groups)], self.param_groups[len(self._groups) :]
        known = {p for options in added for p in options["params"]}
        return len(added) == len(self._groups) and known.issuperset(p for options in others for p in options["params"])

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state, also one that 0.1.0 saved; refuse one that does not fit before anything changes.

        Torch casts a state to its parameter's dtype, which would ruin theta in a bfloat16 model, and shares its tensors
        with ``state_dict``. Here tensors are copied in the network's own dtype.
        """
        found: list[Load] = []

        def check(_: Optimizer, given: StateDict) -> StateDict:
            converted = modern(self._groups, given)
            found.extend(loads(self._groups, self.param_groups, converted, self.on_reshard))
            return {**converted, "param_groups": list(map(completed, self.param_groups, converted["param_groups"]))}

        def restore(_: Optimizer) -> None:
            for group, options, load in zip(self._groups, self.param_groups, found, strict=True):
                self._restore(group, options, load)

        load_between(self, state_dict, check, restore)

    def _restore(self, group: Group, options: Options, load: Load) -> None:
        """Replace what torch has cast by copies in the network's own dtype."""
        group.network, group.holder = load.network, load.holder
        for p in options["params"]:
            self.state.pop(p, None)
        if load.state is None:
            return
        if load.network is None:
            self._note_empty(group, options)
            return
        meta = as_meta_optimizer(options["meta_optimizer"])
        self._place(group, options, restored(load.network, meta, load.state))

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies: states as they are saved, so that another engine can read them."""
        kept = (
            "backend", "nonfinite", "check_sync_every", "on_reshard", "save_activations",
            "_recipe", "_default_family", "_groups", "_steps_since_sync",
        )  # fmt: skip
        whole = {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}
        states = dict(whole["state"])
        for group, options in zip(self._groups, self.param_groups, strict=False):
            if group.n and states.get(options["params"][group.holder]):
                saved = as_saved(group, group.ready(options), options, self._state(group.index))
                states[options["params"][group.holder]] = saved
        return {**whole, "state": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._refused, self._refused_in_a_row = None, 0
        if "_groups" not in state:  # torch is loading a state dict; our hook does the rest
            return
        self._find_meshes()
        self.state = defaultdict(dict, self.state)
        for group, options in zip(self._groups, self.param_groups, strict=False):
            if group.n and self.state.get(options["params"][group.holder]):
                saved = self.state[options["params"][group.holder]]
                meta = as_meta_optimizer(options["meta_optimizer"])
                self._place(group, options, restored(group.ready(options), meta, saved))
