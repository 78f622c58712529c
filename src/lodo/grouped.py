"""What the halves of LODO share: its groups, and where their states are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim.optimizer import Optimizer

from lodo import distributed
from lodo.group import Group, Options, State, name_of
from lodo.recipes import as_meta_optimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


SAVED_ONLY = ("format", "fingerprint", "numels")  # names of a saved state whose values are found when it is saved


class Grouped(Optimizer):
    """An optimizer with one `Group` for each of its ``param_groups``."""

    _groups: list[Group]
    _meshes: list[DeviceMesh]
    _steps_since_sync: int
    backend: str
    save_activations: bool

    def _pairs(self) -> Iterator[tuple[Group, Options]]:
        """Every group with its options."""
        if len(self.param_groups) != len(self._groups):
            raise RuntimeError(
                f"there are {len(self.param_groups)} parameter groups but {len(self._groups)} were added: use "
                "add_param_group; groups cannot be removed from LODO, so build a new optimizer instead"
            )
        return zip(self._groups, self.param_groups, strict=True)

    def _state(self, index: int) -> State:
        """A group's state, which sits under its first parameter that is not frozen."""
        group, options = self._groups[index], self.param_groups[index]
        state: State = self.state[options["params"][group.holder]]
        if not state:
            meta = as_meta_optimizer(options["meta_optimizer"])
            state = group.ready(options).initial_state(meta, options["momentum"] == "learned")
            self._place(group, options, state)
        return state

    def _place(self, group: Group, options: Options, state: State) -> None:
        """Put a group's state under its holder, and under every other parameter its own part of the momentum.

        Torch expects a state under every parameter. A flat distributed checkpoint (`flatten_optimizer_state_dict`) is
        read name by name, for the names in memory; so what exists in saved states only has a name here as well.
        """
        shard = group.layout.shard
        names = dict.fromkeys(SAVED_ONLY) if shard.parts == 1 else distributed.names(shard)
        for p, momentum in zip(options["params"], group.layout.split(state["momentum"]), strict=True):
            self.state[p] = {"momentum": momentum} | (names if shard.parts > 1 else {})
        state.update(names)
        self.state[options["params"][group.holder]] = state

    def _note_empty(self, group: Group, options: Options) -> None:
        """Let torch's checkpoints see that a rank which holds nothing of a group has begun, as other ranks have."""
        if group.layout.shard.parts > 1:
            for p in options["params"]:
                self.state[p] = {"shards": group.layout.shard.parts}

    def _pending_memory(self) -> int:
        """The bytes that groups have yet to allocate."""
        pending = 0
        for group, options in zip(self._groups, self.param_groups, strict=False):
            if group.n and not self.state.get(options["params"][group.holder]):
                pending += group.estimate(options).total
        return pending

    def _find_meshes(self) -> None:
        """Note the meshes over which any of the parameters is split."""
        self._meshes = distributed.meshes(p for options in self.param_groups for p in options["params"])

    def _check_sync(self, every: int) -> None:
        """Every so many steps, compare the ranks' parameters and states, of groups that are not sharded."""
        self._steps_since_sync += 1
        if self._steps_since_sync < every:
            return
        self._steps_since_sync = 0
        named: list[tuple[str, Tensor]] = []
        for group, options in self._pairs():
            if group.layout.shard.parts == 1 and group.n:
                params = options["params"]
                names = [name_of(options, group.index, j).rstrip(",") for j in range(len(params))]
                named += zip(names, map(distributed.local, params), strict=True)
                state = self.state[params[group.holder]]
                named += [(f"{name} of group {group.index}", x) for name, x in state.items() if isinstance(x, Tensor)]
        distributed.check_sync(named)
