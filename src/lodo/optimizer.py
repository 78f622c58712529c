"""LODO: an optimizer that learns its own preconditioner while it optimizes.

Liao, Dangovski, Foerster, Soljacic: "Learning to Optimize Quasi-Newton Methods", TMLR 2023.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    StateDict,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from lodo import distributed, memory, meta, options
from lodo._checks import check_bool, check_choice, check_int
from lodo.algorithm import step_group
from lodo.diagnostics import Watch, diagnose
from lodo.distributed import Shard
from lodo.flatten import compute_dtype, count
from lodo.guard import Guard
from lodo.kernels import BACKENDS, resolve
from lodo.network import Network
from lodo.preconditioners import Preconditioner, select
from lodo.preconditioners.mixing import MIXINGS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_profiler_enabled = torch._C._autograd._profiler_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_ARCHITECTURE = ("preconditioner", "meta_optimizer", "momentum", "moment_dtype")  # what a loaded state must agree with
_MATRIX_LIMIT = 4096  # the largest n whose preconditioner is written out


class _Refused(NamedTuple):
    """A group whose gradient cannot be learned from."""

    group: int
    state: dict[str, Any]
    norm: float


class _Load(NamedTuple):
    """What a group takes from a loaded state."""

    net: Network | None  # None on a rank that holds nothing of the group
    holder: int  # the parameter that its state sits under
    state: dict[str, Any] | None


class LODO(Optimizer):
    r"""Learns to optimize during optimization (the paper's Algorithm 1).

    Each parameter group is one vector :math:`x`, moved by a learned matrix :math:`G`:

    .. math::
        \theta_{t+1} &= \theta_t + \mathrm{Adam}(\nabla_{\theta_t} \ell(x_{t+1})) \\
        m_{t+1} &= \beta m_t + (1 - \beta) \nabla \ell(x_{t+1}) \\
        x_{t+2} &= x_{t+1} - \alpha_0 G(\theta_{t+1}) m_{t+1}

    The step is linear in :math:`G`, so the hypergradient needs no second derivative and no retained
    graph: ``loss.backward(); opt.step(); opt.zero_grad()`` is all.

    Args:
        params: parameters, named parameters or parameter groups. Each group has a network of its own.
        lr: :math:`\alpha_0`, applied after preconditioning; any scheduler may change it.
        meta_lr: the rate at which theta is learned.
        beta: the decay of the gradient average; 0 is LODO-No-Momentum.
        weight_decay: decoupled, as in AdamW: ``x`` shrinks by ``lr * weight_decay``.
        maximize: maximize the objective instead.
        preconditioner: ``"mixing"`` (the paper's network), ``"residual"``, ``"diagonal"``,
            ``"scalar"``, ``"dense"``, or a configured `Preconditioner`.
        depth: layers; 16 for ``"mixing"`` and 64 for ``"residual"`` if None.
        block_size: block size k of ``"mixing"``.
        width: hidden width over n, of ``"mixing"`` and ``"residual"``.
        mixing: of ``"mixing"``: ``"random"`` permutations (the paper's), ``"shuffle"`` for perfect shuffles, which
            need no index arrays and stream through memory, or ``"permuted-shuffle"``, one random permutation in front.
        momentum: what the network is fed: ``"fixed"``, the gradient average m (the paper's), or ``"learned"``, a mean
            of m and the gradient whose weights are learned too, which makes ``beta`` uncritical.
        meta_optimizer: what learns theta, ``"adam"``, ``"sgd"`` or ``"schedule-free"`` (two theta-sized arrays
            instead of three; for long runs on problems that do not change).
        meta_betas: Adam's decays, (0.9, 0.999) if None; of ``"schedule-free"`` the first one is its b, 0.93 if None.
        meta_eps: Adam's epsilon.
        meta_window: how many updates back ``"schedule-free"`` averages; all of them if None.
        moment_dtype: ``torch.bfloat16`` halves Adam's moments, with stochastic rounding; ``"own"`` is theta's dtype.
        save_activations: False computes activations again instead of keeping them between steps, which only the fused
            kernels do.
        guard: survive outlier gradients and sudden changes of the curvature (`lodo.guard`).
        recipe: what the options left as None mean: ``"paper"``, or ``"robust"`` for ``momentum="learned"``,
            ``mixing="shuffle"``, ``moment_dtype=torch.bfloat16``, ``save_activations=False`` and ``guard=True``.
            A configured `Preconditioner` keeps its own mixing.
        seed: draws the network; the same on every backend and device.
        backend: ``"auto"`` (Numba on the CPU if it is installed), ``"numba"`` or ``"reference"``.
        nonfinite: what a NaN or infinite gradient does: ``"raise"`` an error, or ``"skip"`` the
            step and count it in `skipped_steps`. Either way nothing changes, on no rank.
        check_sync_every: under DDP, how many steps apart ranks make sure that they still hold the same parameters and
            state; the error names the rank. None never does. Groups that are sharded differ by design.
        on_reshard: what loading a state does that was saved with another number of shards: ``"raise"`` an error, or
            ``"restart"`` with a fresh G and a warning.

    ``lr``, ``meta_lr``, ``beta``, ``weight_decay``, ``maximize``, ``preconditioner``, ``momentum``, ``meta_optimizer``,
    ``meta_betas``, ``meta_eps``, ``meta_window``, ``moment_dtype``, ``guard`` and ``seed`` may differ between groups.

    Example:
        >>> import torch
        >>> from lodo import LODO
        >>> model = torch.nn.Linear(4, 1)
        >>> opt = LODO(model.parameters(), lr=0.1)
        >>> x, y = torch.randn(8, 4), torch.randn(8, 1)
        >>> for _ in range(3):
        ...     loss = (model(x) - y).square().mean()
        ...     loss.backward()
        ...     opt.step()
        ...     opt.zero_grad()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        meta_lr: float = 1e-3,
        beta: float = 0.9,
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
        preconditioner: str | Preconditioner = "mixing",
        depth: int | None = None,
        block_size: int = 4,
        width: float = 2.0,
        mixing: str | None = None,
        momentum: str | None = None,
        meta_optimizer: str = "adam",
        meta_betas: tuple[float, float] | None = None,
        meta_eps: float = meta.Adam.eps,
        meta_window: int | None = None,
        moment_dtype: torch.dtype | str | None = None,
        save_activations: bool | None = None,
        guard: bool | None = None,
        recipe: str = "paper",
        seed: int = 0,
        backend: str = "auto",
        nonfinite: str = "raise",
        check_sync_every: int | None = None,
        on_reshard: str = "raise",
    ) -> None:
        check_choice("backend", backend, BACKENDS)
        check_choice("nonfinite", nonfinite, ("raise", "skip"))
        check_choice("on_reshard", on_reshard, ("raise", "restart"))
        if check_sync_every is not None:
            check_int("check_sync_every", check_sync_every, low=1)
        chosen = options.from_recipe(
            recipe, mixing=mixing, momentum=momentum, save_activations=save_activations, guard=guard
        )
        check_choice("mixing", chosen["mixing"], MIXINGS)
        check_bool("save_activations", chosen["save_activations"])
        if mixing is not None and preconditioner != "mixing":
            raise ValueError(
                f"mixing must be None unless preconditioner is 'mixing', got {mixing!r} with {preconditioner!r}; "
                "a configured family has its own, such as Mixing(mixing='shuffle')"
            )
        self._recipe = recipe
        self.backend = backend
        self.nonfinite = nonfinite
        self.check_sync_every = check_sync_every
        self.on_reshard = on_reshard
        self._unchecked = 0  # steps since ranks were compared
        self.save_activations: bool = chosen["save_activations"]
        self._sizes = (depth, block_size, width, chosen["mixing"])
        self._default = select(preconditioner, *self._sizes)
        self._families: list[Preconditioner] = []
        self._counts: list[int] = []  # n of each group, on this rank
        self._shards: list[Shard] = []  # which part of each group this rank holds
        self._meshes: list[DeviceMesh] = []  # over which any group is split
        self._holders: list[int] = []  # which parameter of each group its state sits under
        self._networks: list[Network | None] = []  # drawn at the first use
        defaults = {
            "lr": lr,
            "meta_lr": meta_lr,
            "beta": beta,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "preconditioner": repr(self._default),  # groups hold plain data: they are saved
            "momentum": chosen["momentum"],
            "meta_optimizer": meta_optimizer,
            "meta_betas": meta_betas,
            "meta_eps": meta_eps,
            "meta_window": meta_window,
            "moment_dtype": moment_dtype,
            "guard": chosen["guard"],
            "seed": seed,
        }
        super().__init__(params, defaults)

    # ------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Learn from the last step, then take the next one.

        Args:
            closure: evaluates the model again and returns the loss; called once if given.
        """
        if torch.compiler.is_compiling():
            return self._uncompiled_step(closure)
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or _profiler_enabled()
        ):
            return self._hooked_step(closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch's wrapper alone takes 10 us

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        recording = torch.is_grad_enabled()
        _set_grad_enabled(False)  # what torch.no_grad does, in a tenth of the time
        try:
            self._take_turns()
        finally:
            _set_grad_enabled(recording)
        return loss

    _hooked_step = Optimizer.profile_hook_step(_step)
    _uncompiled_step = _disable_dynamo(_hooked_step)  # fused kernels are no graph: it is broken around them

    def _take_turns(self) -> None:
        """Read and check every group's gradient, then let every group step."""
        turns: list[tuple[dict[str, Any], Network, dict[str, Any], list[bool], float, float]] = []
        refused: _Refused | None = None
        if len(self.param_groups) != len(self._networks):
            raise RuntimeError(
                f"there are {len(self.param_groups)} parameter groups but {len(self._networks)} were added: "
                "groups cannot be removed from LODO; build a new optimizer"
            )
        for i, group in enumerate(self.param_groups):
            params = group["params"]
            moving = [p.grad is not None for p in params]
            if True not in moving or not self._counts[i]:
                if self._shards[i].parts > 1 and True in moving:
                    self._note_empty(i)
                continue  # a group without any gradient is left as it is
            net = self._networks[i] or self._network(i)
            state = self.state[params[self._holders[i]]] or self._state(i)
            try:
                net.g.read_gradients(params, moving)
            except RuntimeError:
                self._check_dense(i)
                raise
            norm = net.engine.norm(net.g.vector)
            clip = Guard(*state["guard"]).clip(norm) if group["guard"] else 1.0
            # the hypergradient is at most about lr |g| |u|, and Adam squares it; False for NaN
            if not clip * norm * max(1.0, state["last_lr"] * state["fed_bound"]) < net.largest:
                refused = _Refused(i, state, norm)
                break
            if group["maximize"]:
                net.g.vector.neg_()
            turns.append((group, net, state, moving, norm, clip))
        if refused or self._meshes:
            rank = distributed.complaining_rank(refused is not None, self._meshes)
            if rank is not None:
                self._refuse(refused, turns[0][2] if turns else None, rank)
                return
        for turn in turns:
            step_group(*turn)
        if self.check_sync_every is not None:
            self._check_sync()

    def _refuse(self, refused: _Refused | None, another: dict[str, Any] | None, rank: int) -> None:
        """Raise, or count the step as skipped, for a gradient that cannot be learned from, here or on another rank."""
        if self.nonfinite == "skip":
            state = refused.state if refused else another
            if state is not None:  # which only a rank has that holds any parameters
                state["skipped"] += 1
            return
        if refused is None:
            raise FloatingPointError(
                f"a gradient on rank {rank} is not finite or too large; nothing was changed on any rank. "
                "Pass nonfinite='skip' to skip such steps instead"
            )
        i, state, norm = refused
        g = self._network(i).g
        step = state["last_lr"] * state["fed_bound"]
        problem = (
            f"the gradient of group {i} is too large for {g.vector.dtype}: "
            f"its norm is {norm:.3g}, after a step with lr * |u| of at most {step:.3g}"
        )
        for j, view in enumerate(g.views):
            if not bool(torch.isfinite(view).all()):
                problem = f"the gradient of {self._name(i, j)} is not finite"
                break
        raise FloatingPointError(f"{problem}; nothing was changed. Pass nonfinite='skip' to skip such steps instead")

    def _check_sync(self) -> None:
        """Every so many steps, compare the ranks' parameters and states, of groups that are not sharded."""
        self._unchecked += 1
        if self._unchecked < (self.check_sync_every or 1):
            return
        self._unchecked = 0
        named: list[tuple[str, Tensor]] = []
        for i, group in enumerate(self.param_groups):
            if self._shards[i].parts == 1 and self._counts[i]:
                named += [(self._name(i, j).rstrip(","), distributed.local(p)) for j, p in enumerate(group["params"])]
                state = self.state[group["params"][self._holders[i]]]
                named += [(f"{name} of group {i}", x) for name, x in state.items() if isinstance(x, Tensor)]
        distributed.check_sync(named)

    def _check_dense(self, i: int) -> None:
        for j, p in enumerate(self.param_groups[i]["params"]):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"LODO does not support sparse gradients, but {self._name(i, j)} has one "
                    f"(layout {p.grad.layout}); use a dense gradient, such as sparse=False in nn.Embedding"
                )

    def _name(self, i: int, j: int) -> str:
        """How to call parameter j of group i in an error."""
        group = self.param_groups[i]
        name = f" {group['param_names'][j]!r}" if "param_names" in group else ""
        return f"parameter{name} {j} of group {i}, shape {tuple(group['params'][j].shape)},"

    # ------------------------------------------------------------ groups and networks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with a fresh network of its own; allowed at any time."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        group = dict(param_group)
        chosen = group.get("preconditioner", self._default)
        family = self._default if chosen == repr(self._default) else select(chosen, *self._sizes)
        group["preconditioner"] = repr(family)
        if " at 0x" in group["preconditioner"]:
            raise ValueError(
                "preconditioner must have a repr that describes it, so that a saved state can be recognised, "
                f"got {family!r}; make its class a frozen dataclass"
            )
        for name in sorted(
            (
                {"depth", "block_size", "width", "mixing", "save_activations", "recipe", "backend", "nonfinite"}
                | {"check_sync_every", "on_reshard"}
            )
            & group.keys()
        ):
            raise ValueError(
                f"{name} is not an option of a group (got {group[name]!r}); "
                "give the group a configured family, such as preconditioner=Mixing(depth=8), or pass it to LODO"
            )
        group = options.complete({**self.defaults, **group}, self._recipe)
        before = len(self.param_groups)
        super().add_param_group(group)
        try:
            self._check_params(before, family)
        except Exception:
            del self.param_groups[before]
            raise
        params = self.param_groups[before]["params"]
        self._families.append(family)
        self._counts.append(count(params))
        self._shards.append(distributed.shard_of(params[0]) if params else Shard())
        # torch's distributed checkpoints drop the state of a parameter that is frozen
        self._holders.append(next((j for j, p in enumerate(params) if p.requires_grad), 0))
        self._networks.append(None)
        self._meshes = distributed.meshes(p for group in self.param_groups for p in group["params"])

    def _check_params(self, i: int, family: Preconditioner) -> None:
        params = self.param_groups[i]["params"]
        for j, p in enumerate(params):
            if not (p.is_floating_point() or p.is_complex()):
                raise TypeError(f"LODO trains floating-point and complex tensors, but {self._name(i, j)} is {p.dtype}")
            if p.device != params[0].device:
                raise ValueError(
                    f"the parameters of a group must be on one device, but {self._name(i, j)} is on "
                    f"{str(p.device)!r} and the first one on {str(params[0].device)!r}; give each device its own group"
                )
            here, first = distributed.shard_of(p), distributed.shard_of(params[0])
            if here != first:
                raise ValueError(
                    f"the parameters of a group must be sharded alike, but this rank holds {here.label} of "
                    f"{self._name(i, j)} and {first.label} of the first one; give each kind its own group"
                )
        if not params:
            return
        device = params[0].device
        resolve(self.backend, device)
        fresh = (k for k in range(i) if self._counts[k] and not self.state.get(self._holder(k)))
        pending = sum(self._estimate(k).total for k in fresh)  # what earlier groups have yet to allocate
        needed = self._estimate(i, family)
        memory.check_fits(
            needed, pending, device, f"LODO's state for group {i} ({count(params):,} parameters, {family})"
        )

    def _estimate(self, i: int, family: Preconditioner | None = None) -> memory.MemoryEstimate:
        group = self.param_groups[i]
        params = group["params"]
        return memory.memory_estimate(
            count(params),
            family or self._families[i],
            meta_optimizer=group["meta_optimizer"],
            moment_dtype=group["moment_dtype"] or "own",
            momentum=group["momentum"],
            save_activations=self.save_activations,
            dtype=compute_dtype(params),
            backend=self.backend,
            device=params[0].device if params else "cpu",
        )

    def _network(self, i: int) -> Network:
        """Group i's network, drawn from its seed at the first use."""
        network = self._networks[i]
        if network is None:
            group = self.param_groups[i]
            with _lasting_tensors():
                network = self._drawn(i, group["seed"])
            self._networks[i] = network
        return network

    def _drawn(self, i: int, seed: int) -> Network:
        # as if each shard were a group of one process: the same draw, and another one on every rank
        params, shard = self.param_groups[i]["params"], self._shards[i]
        index = i * shard.parts + shard.part
        return Network(self._families[i], params, seed, index, self.backend, self.save_activations)

    def _holder(self, i: int) -> Tensor:
        """The parameter of group i that the group's state sits under."""
        holder: Tensor = self.param_groups[i]["params"][self._holders[i]]
        return holder

    def _state(self, i: int) -> dict[str, Any]:
        """Group i's state, kept under the group's first parameter as torch's LBFGS does, or the first not frozen.

        The others have an empty one, because distributed checkpoints miss a parameter without any.
        """
        group, holder = self.param_groups[i], self._holder(i)
        state: dict[str, Any] = self.state[holder]
        if not state:
            with _lasting_tensors():
                meta, gated = options.meta_optimizer(group), group["momentum"] == "learned"
                state.update(self._network(i).initial_state(meta, group["moment_dtype"], gated))
            self.state.update({p: {} for p in group["params"] if p is not holder})
        return state

    def _note_empty(self, i: int) -> None:
        """Let torch's checkpoints see that an optimizer which holds nothing of group i has begun, as on other ranks."""
        for p in self.param_groups[i]["params"]:
            self.state.setdefault(p, {})

    # ------------------------------------------------------------ looking inside

    @torch.no_grad()
    def precondition(self, v: Tensor, group: int = 0) -> Tensor:
        """``G v`` for a flat vector, with ``lr`` as part of G.

        Example:
            >>> x = torch.nn.Parameter(torch.zeros(3))
            >>> LODO([x], lr=0.5).precondition(torch.tensor([1.0, 2.0, 3.0]))
            tensor([0.5000, 1.0000, 1.5000])
        """
        self._check_group(group)
        net, theta = self._network(group), self._state(group)["theta"]
        if not isinstance(v, Tensor) or v.shape != (net.n,) or not v.is_floating_point():
            given = f"{tuple(v.shape)}, {v.dtype}" if isinstance(v, Tensor) else type(v).__name__
            raise ValueError(
                f"v must be a floating-point tensor of shape ({net.n},), one number a parameter of group {group}, "
                f"got {given}"
            )
        lr = float(self.param_groups[group]["lr"])
        return (net.engine.apply(theta, v.detach().to(theta).contiguous()) * lr).to(v)

    def preconditioner_matrix(self, group: int = 0) -> Tensor:
        """G as an n x n matrix, for n up to 4096.

        Example:
            >>> x = torch.nn.Parameter(torch.zeros(2))
            >>> LODO([x], lr=0.5, preconditioner="diagonal").preconditioner_matrix()
            tensor([[0.5000, 0.0000],
                    [0.0000, 0.5000]])
        """
        self._check_group(group)
        n, theta = self._network(group).n, self._state(group)["theta"]
        if n > _MATRIX_LIMIT:
            raise ValueError(
                f"group {group} has n = {n:,}: its matrix would have {n * n:,} entries, and n up to {_MATRIX_LIMIT} "
                "is allowed; use precondition(v) for products with G"
            )
        unit = torch.eye(n, dtype=theta.dtype, device=theta.device)
        return torch.stack([self.precondition(e, group) for e in unit], dim=1)

    def _check_group(self, group: int) -> None:
        if not isinstance(group, int) or not 0 <= group < len(self.param_groups):
            raise ValueError(f"group must be an index from 0 to {len(self.param_groups) - 1}, got {group!r}")
        if not self._counts[group]:
            raise ValueError(f"group must be one that has parameters, and group {group} has none")

    @torch.no_grad()
    def diagnostics(self, power_iterations: int | None = None) -> dict[str, float]:
        """Numbers to log, by name, of every group that has parameters on this rank.

        Watching begins with the first call: `lodo.diagnostics` has what each number means and costs. A call every ten
        steps is meant to be cheap, so the stretches of G are refined by one product with G every eighth call.

        Args:
            power_iterations: refine both stretches by so many products with G each, now.

        Example:
            >>> x = torch.nn.Parameter(torch.ones(3))
            >>> opt = LODO([x], lr=0.5)
            >>> x.grad = torch.tensor([3.0, 0.0, 4.0])
            >>> opt.step()
            >>> numbers = opt.diagnostics()
            >>> round(numbers["group0/gradient_norm"], 6), round(numbers["group0/largest_stretch"], 6)
            (5.0, 0.5)
        """
        if power_iterations is not None:
            check_int("power_iterations", power_iterations, low=0)
        numbers: dict[str, float] = {}
        for i, group in enumerate(self.param_groups):
            if self._counts[i]:
                net, state = self._network(i), self._state(i)
                if net.watch is None:
                    net.watch = Watch(net.g.vector, net.s.vector, state["step"])
                net.watch.look(partial(net.engine.apply, state["theta"]), power_iterations)
                measured = diagnose(state, net.g.vector, net.s.vector, float(group["lr"]), net.watch, net.engine)
                numbers.update({f"group{i}/{name}": value for name, value in measured.items()})
        return {**numbers, "skipped_steps": float(self.skipped_steps)}

    @property
    def skipped_steps(self) -> int:
        """How many steps ``nonfinite="skip"`` has skipped."""
        return sum(state.get("skipped", 0) for state in self.state.values())

    def __repr__(self) -> str:
        lines = [super().__repr__()[:-1].rstrip()]
        for i, family in enumerate(self._families):
            lines.append(f"network {i}: n = {self._counts[i]:,}, {family}, memory {self._estimate(i)}")
        lines.append(f"backend: {self.backend!r}, save_activations: {self.save_activations}")
        return "\n".join([*lines, ")"])

    # ------------------------------------------------------------ saving and loading

    def state_dict(self) -> StateDict:
        """The state as torch has it; of a sharded group, under a name that says which shard it is of."""
        packed = super().state_dict()
        for i, group in enumerate(packed["param_groups"]):
            held = group["params"][self._holders[i]] if group["params"] else None
            if held in packed["state"]:
                packed["state"][held] = distributed.wrap(packed["state"][held], self._shards[i])
        return packed

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state; refuse one that does not fit before anything changes.

        torch casts a state to its parameter's dtype, which would ruin theta in a bfloat16 model, and
        shares its tensors with ``state_dict``. Here tensors are copied in the network's own dtype.
        """
        loads: list[_Load] = []

        def check(_: Optimizer, given: StateDict) -> None:
            with _lasting_tensors():
                loads.extend(self._loads(given))

        def restore(_: Optimizer) -> None:
            self._networks = [load.net for load in loads]
            for i, (group, (net, holder, state)) in enumerate(zip(self.param_groups, loads, strict=True)):
                self._holders[i] = holder
                known = [p for p in group["params"] if p in self.state]
                for p in known:  # what torch has cast
                    self.state.pop(p)
                if state is not None:
                    self.state.update({p: {} for p in known})
                if net and state:
                    with _lasting_tensors():
                        moments = options.meta_optimizer(group).moments
                        self.state[self._holder(i)] = net.restored(state, moments, group["moment_dtype"])

        hooks = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _loads(self, saved: StateDict) -> list[_Load]:
        """What each group takes from ``saved``, or an error that says what differs."""
        groups = saved["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the state has {len(groups)} parameter groups, this optimizer {len(self.param_groups)}")
        loads = []
        for i, (ours, theirs) in enumerate(zip(self.param_groups, groups, strict=True)):
            if len(theirs["params"]) != len(ours["params"]):
                raise ValueError(
                    f"group {i} of the state has {len(theirs['params'])} parameters, ours {len(ours['params'])}"
                )
            for key in _ARCHITECTURE:
                if theirs.get(key) != ours[key]:
                    raise ValueError(f"group {i} of the state has {key} = {theirs.get(key)!r}, ours is {ours[key]!r}")
            holder, state = self._own_state(i, theirs["params"], saved["state"])
            net = self._drawn(i, theirs["seed"]) if self._counts[i] else None
            if net and state:
                net.check_state(state, options.meta_optimizer(theirs).moments, theirs["momentum"] == "learned", i)
            loads.append(_Load(net, holder, state))
        return loads

    def _own_state(self, i: int, keys: list[Any], states: StateDict) -> tuple[int, dict[str, Any] | None]:
        """Under which parameter group i's state was saved, and this rank's part of it; None if there is nothing."""
        holder = next((j for j, key in enumerate(keys) if states.get(key)), None)
        if holder is None:
            if self._counts[i] and any(key in states for key in keys):
                raise ValueError(
                    f"group {i} of the state has entries for its parameters but nothing that was learned: it was lost "
                    "on the way. torch's distributed checkpoints drop the state of a parameter that is frozen"
                )
            return self._holders[i], None
        state = distributed.unwrap(states[keys[holder]], self._shards[i])
        if state is None:
            saved, ours = states[keys[holder]].get("shards", 1), self._shards[i]
            problem = f"group {i} of the state was learned in {saved} shards, and this rank holds {ours.label}"
            if self.on_reshard == "raise":
                raise ValueError(
                    f"{problem}: G cannot be divided anew. Load it on {saved} ranks, or pass on_reshard='restart' to "
                    "start with a fresh G"
                )
            warnings.warn(f"{problem}: G starts afresh (on_reshard='restart')", stacklevel=6)
            return self._holders[i], None
        return holder, state

    def __getstate__(self) -> dict[str, Any]:
        kept = (
            "backend", "nonfinite", "check_sync_every", "on_reshard", "save_activations",
            "_recipe", "_sizes", "_default", "_families", "_counts", "_shards", "_holders", "_unchecked",
        )  # fmt: skip
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._networks = [None] * len(self.param_groups)
        self._meshes = distributed.meshes(p for group in self.param_groups for p in group["params"])


@contextmanager
def _lasting_tensors() -> Iterator[None]:
    """Tensors made here outlive an inference mode around the caller, and ignore a default device."""
    with torch.inference_mode(False), torch.device("cpu"):
        yield
