"""LODO: an optimizer that learns its own preconditioner while it optimizes.

Liao, Dangovski, Foerster, Soljacic: "Learning to Optimize Quasi-Newton Methods", TMLR 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from lodo import algorithm, refusal
from lodo._checks import check_choice, check_group, check_int
from lodo.checkpoint import Resumable
from lodo.engines import BACKENDS
from lodo.estimate import as_family
from lodo.families import Preconditioner
from lodo.group import Group, Options, check_params
from lodo.inspect import Inspectable
from lodo.meta import MetaOptimizer
from lodo.recipes import MOMENTA, as_meta_optimizer, complete, from_recipe

_profiler_enabled = torch._C._autograd._profiler_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_OF_THE_OPTIMIZER = ("backend", "check_sync_every", "nonfinite", "on_reshard", "recipe", "save_activations")


class LODO(Inspectable, Resumable):
    r"""Learns to optimize during optimization (the paper's Algorithm 1).

    Each parameter group is one vector :math:`x`, moved by a learned matrix :math:`G`:

    .. math::
        \theta_{t+1} &= \theta_t - \eta\, \mathrm{Adam}[\nabla_{\theta_t} \ell(x_{t+1})] \\
        m_{t+1} &= \beta m_t + (1 - \beta) \nabla \ell(x_{t+1}) \\
        x_{t+2} &= x_{t+1} - \alpha_0 G(\theta_{t+1}) m_{t+1}

    The step is linear in :math:`G`, so the hypergradient needs no second derivative and no retained
    graph: ``loss.backward(); opt.step(); opt.zero_grad()`` is all.

    Args:
        params: parameters, named parameters or parameter groups. Each group has its own network.
        lr: :math:`\alpha_0`, applied after preconditioning; any scheduler may change it.
        meta_lr: the rate at which theta is learned: 1e-3, and 3e-4 with ``recipe="compact"``, unless it is given.
        beta: the decay of the gradient average; 0 is LODO-No-Momentum.
        weight_decay: decoupled, as in AdamW: ``x`` shrinks by ``lr * weight_decay``.
        maximize: maximize the objective instead.
        preconditioner: the family of G: `Mixing` (the paper's network), `Residual`, `Diagonal`, `Scalar`, `Dense`, or
            one of your own. Text such as ``"mixing(depth=8)"`` or ``"diagonal"`` means the same.
        momentum: what the network is fed: ``"fixed"``, the gradient average m (the paper's), or ``"learned"``, a mean
            of m and the gradient whose weights are learned too, so that ``beta`` hardly matters.
        meta_optimizer: what learns theta: `lodo.meta.Adam`, `lodo.meta.SGD`, or `lodo.meta.ScheduleFree` (two
            theta-sized arrays instead of three; for long runs on problems that do not change). Text such as
            ``"adam(moment_dtype='bfloat16')"`` means the same.
        guard: survive outlier gradients and sudden changes of the curvature (`lodo.guard`).
        recipe: what the options left as None mean: ``"paper"``, or ``"robust"`` for
            ``preconditioner="mixing(mixing='shuffle')"``, ``momentum="learned"``,
            ``meta_optimizer="adam(moment_dtype='bfloat16')"``, ``save_activations=False`` and ``guard=True``; or
            ``"compact"``, the same with half as many weights, ``"mixing(depth=4, block_size=8, mixing='shuffle')"``,
            and ``meta_lr=3e-4``.
        seed: draws the network; the same on every backend and device.
        backend: ``"auto"`` (Numba on CPUs and torch.compile on CUDA, if they can be used there, else the reference),
            ``"numba"``, ``"compiled"`` (torch.compile, on CPUs too) or ``"reference"``.
        save_activations: False computes activations again instead of keeping them between steps. The reference never
            keeps any.
        nonfinite: what to do if a gradient is NaN, infinite, or so large that something would overflow: ``"raise"`` an
            error, or ``"skip"`` the step and count it in `skipped_steps`. Either way no parameter and nothing that was
            learned changes, on any rank. On a device other than the CPU, the error comes with the next step, so that no
            step waits for the device.
        check_sync_every: under DDP, how many steps apart the ranks check that they still hold the same parameters and
            state; the error names the rank. None never checks. Groups that are sharded differ by design.
        on_reshard: what happens when a state is loaded that was saved with another number of shards: ``"raise"`` an
            error, or ``"restart"`` with a fresh G and a warning.

    ``lr``, ``meta_lr``, ``beta``, ``weight_decay``, ``maximize``, ``preconditioner``, ``momentum``, ``meta_optimizer``,
    ``guard`` and ``seed`` may differ between groups.

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
        meta_lr: float | None = None,
        beta: float = 0.9,
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
        preconditioner: str | Preconditioner | None = None,
        momentum: str | None = None,
        meta_optimizer: str | MetaOptimizer | None = None,
        guard: bool | None = None,
        recipe: str = "paper",
        seed: int = 0,
        backend: str = "auto",
        save_activations: bool | None = None,
        nonfinite: str = "raise",
        check_sync_every: int | None = None,
        on_reshard: str = "raise",
    ) -> None:
        check_choice("backend", backend, BACKENDS)
        check_choice("nonfinite", nonfinite, ("raise", "skip"))
        check_choice("on_reshard", on_reshard, ("raise", "restart"))
        if check_sync_every is not None:
            check_int("check_sync_every", check_sync_every, low=1)
        chosen = from_recipe(
            recipe,
            meta_lr=meta_lr,
            preconditioner=preconditioner,
            momentum=momentum,
            meta_optimizer=meta_optimizer,
            save_activations=save_activations,
            guard=guard,
        )
        self.backend = backend
        self.nonfinite = nonfinite
        self.check_sync_every = check_sync_every
        self.on_reshard = on_reshard
        self.save_activations: bool = chosen["save_activations"]
        self._recipe = recipe
        self._default_family = _described(as_family(chosen["preconditioner"]))
        self._groups = []
        self._steps_since_sync = 0
        self._refused_in_a_row = 0
        self._refused: Tensor | None = None  # whether a device refused the last step; not read back yet
        defaults = {
            "lr": lr,
            "meta_lr": chosen["meta_lr"],
            "beta": beta,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "preconditioner": repr(self._default_family),  # groups hold plain data: they are saved
            "momentum": chosen["momentum"],
            "meta_optimizer": repr(as_meta_optimizer(chosen["meta_optimizer"])),
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
            self._step_groups()
        finally:
            _set_grad_enabled(recording)
        return loss

    _hooked_step = Optimizer.profile_hook_step(_step)
    _uncompiled_step = _disable_dynamo(_hooked_step)  # fused kernels cannot be traced, so the graph breaks around them

    def _step_groups(self) -> None:
        """Read and check every group's gradient, then let every group step."""
        refused, self._refused = self._refused, None
        if refused is not None:
            refusal.look_back(refused, self.nonfinite)
        readings = []
        for group, options in self._pairs():
            reading = self._read(group, options)
            if reading is not None:
                readings.append(reading)
        accepted, rank = refusal.agreed(readings, self._meshes)
        if accepted is False:
            self._refused_in_a_row += 1
            refusal.refuse(self.nonfinite, readings, rank, self._refused_in_a_row)
            return
        self._refused_in_a_row = 0
        for reading in readings:
            algorithm.step(reading, accepted)
        if isinstance(accepted, Tensor):
            self._refused = torch.logical_not(accepted)
            on_device = next(reading for reading in readings if not reading.network.engine.on_host)
            refused = self._refused.to(on_device.network.engine.layout.device)
            on_device.state["skipped"] = on_device.state["skipped"] + refused
        if self.check_sync_every is not None:
            self._check_sync(self.check_sync_every)

    def _read(self, group: Group, options: Options) -> algorithm.Reading | None:
        """A group's gradient; None for a group without any, which is left as it is."""
        moving = [p.grad is not None for p in options["params"]]
        if True not in moving:
            return None
        if options["momentum"] not in MOMENTA:
            raise ValueError(
                f"momentum of group {group.index} must be one of {', '.join(map(repr, MOMENTA))}, got "
                f"{options['momentum']!r}; if OneCycleLR or CyclicLR has changed it, pass cycle_momentum=False to that"
            )
        if not group.n:
            self._note_empty(group, options)
            return None
        network = group.network or group.ready(options)
        state = self.state[options["params"][group.holder]] or self._state(group.index)
        try:
            return algorithm.read(options, state, network, moving)
        except RuntimeError:
            refusal.check_dense(options, group.index)
            raise

    # ------------------------------------------------------------ groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with a fresh network of its own; allowed at any time."""
        check_group(param_group, "LODO", self.defaults, _OF_THE_OPTIMIZER)
        family = self._family(param_group.get("preconditioner"))
        options = {**self.defaults, **param_group, "preconditioner": repr(family)}
        index = len(self.param_groups)
        super().add_param_group(complete(options, self._recipe))
        added = self.param_groups[index]
        try:
            check_params(added, index)
            group = Group(index, added, family, self.backend, self.save_activations)
            group.check_fits(added, self._pending_memory())
        except Exception:
            del self.param_groups[index]
            raise
        self._groups.append(group)
        self._find_meshes()

    def _family(self, given: str | Preconditioner | None) -> Preconditioner:
        if given is None or given == repr(self._default_family):
            return self._default_family
        return _described(as_family(given))


def _described(family: Preconditioner) -> Preconditioner:
    """The family, if its repr tells it from others: by that a saved state is recognised."""
    if " at 0x" in repr(family):
        raise ValueError(
            "preconditioner must have a repr that describes it, so that a saved state can be recognised, "
            f"got {family!r}; make its class a frozen dataclass"
        )
    return family
