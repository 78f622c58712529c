r"""KronLODO: LODO for networks. It learns one gain and one gate per tensor, in the bases of the gradients' covariances.

Tensors are matrices here, kernels as out x rest. With G the gradient, P and Q orthogonal, ^ bias-corrected::

    X  = P' G Q
    c += meta_lr Adam[ <X, S> / (|X| |S|) ]         S the last direction: W moved by -lr e^c S, dl/dc = -lr e^c <X, S>
    w += gate_lr Adam[ <X, D> / (|X| |S|) ]         D = dS/dw of the last step; w within [0, 1], starts at 1
    c  within bounds that anneal                    as 1 / (1 + t / anneal), see `lodo.kron_formulas.bounds`
    A, B = averages of G G', G' G                   over as many steps as M and V
    P <- qr(A P), Q <- qr(B Q), M turned along      every `refresh_every` steps, later less often
    M, V = averages of X, X^2                       over ever more steps, `averaging` t of them
    R  = sqrt(V^) + eps + 1e-5 sqrt(mean of V^)     below that there are only rounding errors
    S  = (1 - w) X / R + w M^ / R,                  D = M^ / R - X / R; entries of both quotients have a limit
    W  = (1 - lr' weight_decay) W - lr e^c P S Q'   lr' annealed, without a gain

A dimension of 1, above ``max_dim``, or more than 16 times the other has the identity for its basis. Of the last step,
X / R is kept for <X, D>; in 8 bits unless parameters are in double precision (`lodo.kron_state.unit_of`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from lodo._checks import check_bool, check_choice, check_group, check_int
from lodo.checkpoint import completed, load_between
from lodo.distributed import check_sync, is_distributed, local
from lodo.engines import check_backend
from lodo.estimate import readable
from lodo.group import Options, name_of
from lodo.kron_learning import compare_rates, follow_rate
from lodo.kron_state import (
    MAX_DIM,
    STRUCTURE,
    KronMemory,
    check_options,
    check_params,
    check_rate,
    check_state,
    check_structure,
    diagnose,
    fresh_state,
    made,
    memory_of,
    restored,
    spelled_dtype,
    warn_of_width,
    with_plain_rate,
)
from lodo.kron_step import Reading, advance, read, step_at_once, usable
from lodo.layout import real
from lodo.ownership import Division, owned_here, replicated
from lodo.refusal import SKIP, WORTH_A_WARNING, check_dense, look_back
from lodo.scalars import plain
from lodo.stacks import Bundle, bundled, unstacked
from lodo.stacks import state_dtype as dtype_of_state

COUNTS: Options = {  # of every group
    "steps": 0,
    "refused": 0,
    "peak_lr": 0.0,
    "top_lr": 0.0,
    "last_lr": 0.0,
    "unchanged": 0,
    "scheduled": 0,
}


class KronLODO(Optimizer):
    r"""LODO for networks: gains and gates learned by hypergradients, in the bases of the gradients' covariances.

    For a weight matrix :math:`W` with gradient :math:`G`, the steps are SOAP's,

    .. math::
        W \leftarrow W - \alpha e^c P S Q^\top, \qquad
        S = \frac{(1 - w) X + w \hat M}{\sqrt{\hat V} + \epsilon}, \qquad X = P^\top G Q,

    and every tensor learns its own log-gain :math:`c` and gate :math:`w` while it is optimized. There is nothing to
    tune, and no schedule is needed. In runs of several thousand steps, a cosine on ``lr`` helps.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the length of the first steps, at most 3e-3 where gains are learned. After that the gains lengthen or
            shorten them. Any scheduler may change it. If groups have different ``lr``, those below 3e-3 stay as much
            slower than the fastest group as they were given, at first and at most.
        meta_lr: the rate at which the log-gains are learned.
        betas: the decays of M and V at the start of the run (see ``averaging``); the second is also that of the
            covariances.
        weight_decay: decoupled, as in AdamW: ``W`` shrinks by ``lr * weight_decay``. Where gains are learned, the
            ``lr`` of this is at most 3e-3 and anneals as steps do (see ``anneal``), whatever the gains are.
        eps: added to the root of V.
        maximize: maximize the objective instead.
        basis: ``"kronecker"`` (the eigenvectors of the gradients' covariances), ``"orthogonal"`` (Muon's direction; no
            gate is learned), or ``"none"`` (Adam's direction, for embeddings and heads).
        gains: learn a gain for every tensor.
        gate: learn how much of the average M and how much of the gradient itself makes the direction.
        gate_lr: the rate at which the gate is learned.
        averaging: M, V and the covariances average over this part of all steps so far, once that is more than ``betas``
            make it. 0 leaves the averages as ``betas`` make them.
        anneal: a tensor's steps become smaller no faster than ``1 / (1 + t / anneal)``. ``math.inf`` keeps them up,
            for a schedule to bring them down; 0 lets them fall as the hypergradient wants, which is too fast for long
            runs.
        max_dim: larger dimensions have no basis, nor have those that are more than 16 times the other dimension. Set it
            to the width of a model that is wider.
        refresh_every: the number of steps between refreshes of the bases. It doubles each time the number of steps over
            which the covariances are averaged has doubled (see ``averaging``). Steps are counted by group: parameters
            that have gradients in turns need groups of their own.
        guard: shorten a gradient that is more than 5 times as long as those before it, tensor by tensor; and let no
            entry of X / R or M / R be larger than ``1 / sqrt(1 - betas[1])``, as may happen where gradients are rare.
        state_dtype: ``"bfloat16"`` halves M, V and the bases. M and V are rounded stochastically when they are stored;
            the step is taken with the exact ones. The bases are in float16, which is more precise between -1 and 1. The
            covariances stay whole, because their small eigenvalues would be lost. None keeps everything in float32, or
            in float64 for parameters in double precision.
        backend: ``"auto"`` (Numba on the CPU if it is installed), ``"numba"`` or ``"reference"``.
        nonfinite: what to do if a gradient is NaN, infinite, or so large that its square would be: ``"raise"`` an
            error, or ``"skip"`` the step and count it in `skipped_steps`. Either way nothing changes. On a device other
            than the CPU, the error comes with the next step, so that no step waits for the device; and a refused step
            counts for the next refresh of the bases, and as a step of a schedule.
        distribute: under DDP, divide the work between the ranks: each tensor has an owner, which takes its step,
            sends it to the others and alone holds its state. The result is the same, bit for bit. Work on parameters
            that are sharded (FSDP2, tensor parallelism) is always divided.
        check_sync_every: every so many steps, compare the tensors of which all ranks hold copies, and raise an error
            that names the rank that differs. None compares nothing.

    All but ``backend``, ``nonfinite``, ``distribute`` and ``check_sync_every`` may differ between groups. A group also
    keeps account: of ``steps``, and how many of these a device has ``refused``; of the highest ``lr`` so far, its own
    (``peak_lr``) and any group's (``top_lr``); of the ``last_lr``, how many steps it has been ``unchanged``, and how
    many steps were ``scheduled``, with an ``lr`` that had fallen and still changed. If work is divided, `step`,
    `state_dict` and `load_state_dict` have to be called on every rank.

    Example:
        >>> import torch
        >>> from lodo import KronLODO
        >>> model = torch.nn.Linear(4, 1)
        >>> opt = KronLODO(model.parameters())
        >>> x, y = torch.randn(8, 4), torch.randn(8, 1)
        >>> for _ in range(3):
        ...     loss = (model(x) - y).square().mean()
        ...     loss.backward()
        ...     opt.step()
        ...     opt.zero_grad()
    """

    _active: list[list[int]]  # of each group, the parameters that had a gradient in the last step
    _stacked: list[list[Bundle]]  # and their stacks
    _structure: list[Options]  # and what these are made for; nothing before the first step
    _refused: Tensor | None  # whether a device refused the last step; not read back yet
    _refused_in_a_row: int
    _division: Division | None = None  # of the work between ranks; made when it is needed

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        meta_lr: float = 1e-2,
        betas: tuple[float, float] = (0.95, 0.95),
        *,
        weight_decay: float = 0.03,
        eps: float = 1e-8,
        maximize: bool = False,
        basis: str = "kronecker",
        gains: bool = True,
        gate: bool = True,
        gate_lr: float = 1e-3,
        averaging: float = 0.1,
        anneal: float = 1500.0,
        max_dim: int = MAX_DIM,
        refresh_every: int = 10,
        guard: bool = True,
        state_dtype: str | torch.dtype | None = None,
        backend: str = "auto",
        nonfinite: str = "raise",
        distribute: bool = False,
        check_sync_every: int | None = None,
    ) -> None:
        check_choice("backend", backend, ("auto", "reference", "numba"))
        check_choice("nonfinite", nonfinite, ("raise", "skip"))
        check_bool("distribute", distribute)
        if check_sync_every is not None:
            check_int("check_sync_every", check_sync_every, low=1)
        self.backend, self.nonfinite, self.distribute = backend, nonfinite, distribute
        self.check_sync_every, self._steps_since_sync = check_sync_every, 0
        self._owners: dict[Tensor, int] = {}
        self._forget_stacks()
        defaults = {
            "lr": lr,
            "meta_lr": meta_lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "eps": eps,
            "maximize": maximize,
            "basis": basis,
            "gains": gains,
            "gate": gate,
            "gate_lr": gate_lr,
            "averaging": averaging,
            "anneal": anneal,
            "max_dim": max_dim,
            "refresh_every": refresh_every,
            "guard": guard,
            "state_dtype": spelled_dtype(state_dtype),
        }
        check_options(defaults)
        super().__init__(params, with_plain_rate(defaults))

    # ------------------------------------------------------------ the step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Learn from the last step, then take the next one.

        Args:
            closure: evaluates the model again and returns the loss; called once if given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with ExitStack() as exactly:
            for kind in {p.device.type for options in self.param_groups for p in options["params"]}:
                if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                    exactly.enter_context(torch.autocast(kind, enabled=False))
            self._step()
        return loss

    def _step(self) -> None:
        refused, self._refused = self._refused, None
        if refused is not None:
            look_back(refused, self.nonfinite)
        if len(self._stacked) != len(self.param_groups):  # somebody has assigned others
            self._forget_stacks()
        division = self._divided()
        readings = []
        for index, options in enumerate(self.param_groups):
            readings += [(index, bundle, self._read(index, bundle)) for bundle in self._bundles(index, options)]
        division.ready(self.param_groups, self.state, self.backend)
        ok = division.agree(usable([*(reading.sums[0] for *_, reading in readings), *division.squares()]))
        if ok is False:
            self._refuse()
            return
        self._refused_in_a_row = 0
        rises = [follow_rate(options) for options in self.param_groups]
        compare_rates(self.param_groups)
        for index, bundle, reading in readings:
            here = ok.to(reading.sums.device) if isinstance(ok, Tensor) else ok
            advance(self.param_groups[index], bundle, reading, rises[index], here)
        division.step(self.param_groups, ok, lambda i, *rest: step_at_once(self.param_groups[i], rises[i], *rest))
        self._refused = torch.logical_not(ok) if isinstance(ok, Tensor) else None
        for options in self.param_groups:
            if any(p.grad is not None and p.numel() for p in options["params"]):
                options["steps"] += 1
                if self._refused is not None:
                    options["refused"] = options["refused"] + self._refused
        self._check_sync(division)

    def _read(self, index: int, bundle: Bundle) -> Reading:
        """What the gradients of a bundle say; an error names the parameter."""
        try:
            return read(self.param_groups[index], bundle)
        except RuntimeError:
            check_dense(self.param_groups[index], index)
            raise

    def _divided(self) -> Division:
        """What is divided between ranks."""
        if self._division is None or not self._division.covers(self.param_groups):
            self._division = Division(self.param_groups, self._owners, self.distribute)
        return self._division

    def _check_sync(self, division: Division) -> None:
        """Every so many steps, compare what all ranks hold."""
        self._steps_since_sync += 1
        if self.check_sync_every is not None and self._steps_since_sync >= self.check_sync_every:
            self._steps_since_sync = 0
            if is_distributed():
                check_sync(replicated(self.param_groups, self.state, division.items))

    def _bundles(self, index: int, options: Options) -> list[Bundle]:
        """The parameters of a group that have a gradient, in stacks; those of the last step if nothing has changed."""
        check_rate(options, index)
        check_structure(options, index, self._structure[index])
        elsewhere = self._divided().items
        active = [p for p in options["params"] if p.grad is not None and p.numel() and p not in elsewhere]
        ids = [id(x) for p in active for x in (p, self.state.get(p))]
        bundles = self._stacked[index]
        if ids == self._active[index] and all(bundle.holds() for bundle in bundles):
            return bundles
        check_dense(options, index)
        for p in active:
            state = self.state.get(p) or {}
            if "step" not in state:
                self.state[p] = {**state, **fresh_state(p, options)}
            elif state["step"].dtype != dtype_of_state(p):  # the model has been cast
                self.state[p] = restored(p, options, state)
        for p in {*options["params"]} - {*active, *elsewhere}:
            if p in self.state:
                self.state[p] = unstacked(self.state[p])
        self._active[index] = [id(x) for p in active for x in (p, self.state[p])]
        self._structure[index] = {name: options[name] for name in STRUCTURE} if active else {}
        self._stacked[index] = bundled(active, [self.state[p] for p in active], self.backend)
        return self._stacked[index]

    def _refuse(self) -> None:
        """Raise, or count the step as skipped."""
        problem = self._problem()
        self._divided().refuse(self.state, count=self.nonfinite == "skip")
        if self.nonfinite == "raise":
            raise FloatingPointError(f"{problem}; nothing was changed. {SKIP}")
        self._refused_in_a_row += 1
        if self._refused_in_a_row in WORTH_A_WARNING:
            warnings.warn(
                f"KronLODO has skipped {self._refused_in_a_row} steps in a row, the last one because {problem}. Look "
                "at the loss, the data and the loss scale; clipped gradients may help, or go back to a checkpoint",
                stacklevel=5,
            )
        for bundles in self._stacked:
            for bundle in bundles:
                bundle.numbers["skipped"] += 1

    def _problem(self) -> str:
        for index, options in enumerate(self.param_groups):
            for j, p in enumerate(options["params"]):
                if p.grad is not None and not bool(torch.isfinite(local(p.grad)).all()):
                    return f"the gradient of {name_of(options, index, j)} is not finite"
        rank = self._divided().complaining
        if rank is not None:
            return f"a gradient on rank {rank} is not finite or too large"
        norms = {
            (index, j): float(real(local(p.grad)).double().norm())
            for index, options in enumerate(self.param_groups)
            for j, p in enumerate(options["params"])
            if p.grad is not None
        }
        index, j = max(norms, key=lambda place: norms[place])
        where = name_of(self.param_groups[index], index, j)
        return f"the gradient of {where} is too large: its norm is {norms[index, j]:.3g}"

    # ------------------------------------------------------------ groups and states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; allowed at any time."""
        check_group(param_group, "KronLODO", self.defaults, ("backend", "nonfinite", "distribute", "check_sync_every"))
        if "state_dtype" in param_group:
            param_group["state_dtype"] = spelled_dtype(param_group["state_dtype"])
        check_options({**self.defaults, **param_group})
        index = len(self.param_groups)
        super().add_param_group({**with_plain_rate(param_group), **COUNTS})
        try:
            check_params(self.param_groups[index], index)
            for p in self.param_groups[index]["params"]:
                check_backend(self.backend, p.device)
        except Exception:
            del self.param_groups[index]
            raise
        self._active.append([])
        self._structure.append({})
        self._stacked.append([])
        warn_of_width(self.param_groups[index], index)

    def _forget_stacks(self) -> None:
        """Before the first step, and after states have been replaced."""
        groups = getattr(self, "param_groups", [])
        self._active, self._stacked, self._structure = [[] for _ in groups], [[] for _ in groups], [{} for _ in groups]
        if self._division is not None:
            self._division.forget_stacks()
        self._refused, self._refused_in_a_row = None, 0

    def __getstate__(self) -> dict[str, Any]:
        own = ("backend", "nonfinite", "distribute", "check_sync_every", "_steps_since_sync", "_owners")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_stacks()

    def state_dict(self) -> StateDict:
        """The state as torch has it; what is divided between ranks is laid out as the parameters are."""
        packed = super().state_dict()
        saved = self._divided().saved(self.state)
        for options, theirs in zip(self.param_groups, packed["param_groups"], strict=True):
            packed["state"].update({i: saved[p] for p, i in zip(options["params"], theirs["params"], strict=True)
                                    if p in saved})  # fmt: skip
        return packed

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state that `state_dict` has returned; it is checked before anything changes."""
        given: list[StateDict] = []
        division = self._divided()

        def check(_: Optimizer, loaded: StateDict) -> StateDict:
            try:
                check_state(self.param_groups, loaded)
            except ValueError as error:
                division.together(error)
            else:
                division.together(None)
            given.append(loaded)
            return {**loaded, "param_groups": list(map(completed, self.param_groups, loaded["param_groups"]))}

        def restore(_: Optimizer) -> None:
            """Replace what torch has cast to the parameters' dtypes."""
            for options, theirs in zip(self.param_groups, given[0]["param_groups"], strict=True):
                for p, key in zip(options["params"], theirs["params"], strict=True):
                    if key in given[0]["state"]:
                        restore_one = division.items[p].restored if p in division.items else partial(restored, p)
                        self.state[p] = restore_one(options, given[0]["state"][key])
            self._forget_stacks()

        load_between(self, state_dict, check, restore)

    # ------------------------------------------------------------ looking inside

    @property
    def skipped_steps(self) -> int:
        """How many steps ``nonfinite="skip"`` has skipped."""
        states = [state for state in self.state.values() if isinstance(state, dict) and "skipped" in state]
        return max((int(plain(state["skipped"])) for state in states), default=0)

    @torch.no_grad()
    def diagnostics(self) -> dict[str, float]:
        """Numbers to log, by name, of every parameter that has taken a step (if work is divided: and is owned here).

        ======================  ========================================================================
        ``gain``                e^c
        ``gate``                w: 1 follows the average of the gradients, 0 the last gradient
        ``alignment``           the recent mean of the cosine between a gradient and the step before it
        ``step_norm``           the length of the last step, at the present ``lr`` and without weight decay
        ``left_condition``      of the covariance of the gradient's rows: its largest over its smallest
        ``right_condition``     eigenvalue, estimated in its basis; the same for the columns
        ======================  ========================================================================

        Example:
            >>> from lodo import KronLODO
            >>> x = torch.nn.Parameter(torch.ones(2, 2))
            >>> opt = KronLODO([x])
            >>> x.grad = torch.ones(2, 2)
            >>> opt.step()
            >>> opt.diagnostics()["group0/parameter0/gain"]
            1.0
        """
        numbers: dict[str, float] = {}
        here = owned_here(self.param_groups, self._owners, self.distribute)
        for index, options in enumerate(self.param_groups):
            for j, p in enumerate(options["params"]):
                name = options["param_names"][j] if "param_names" in options else f"parameter{j}"
                measured = diagnose(options, self.state.get(p, {})) if here(p) else {}
                numbers.update({f"group{index}/{name}/{what}": value for what, value in measured.items()})
        return {**numbers, "skipped_steps": float(self.skipped_steps)}

    def memory_estimate(self) -> KronMemory:
        """The bytes of state between steps, also before the first one. Parameters may be on the device "meta".

        If work is divided between ranks, it is what this rank holds.

        Example:
            >>> from lodo import KronLODO
            >>> with torch.device("meta"):
            ...     model = torch.nn.Linear(768, 768)
            >>> print(KronLODO(model.parameters()).memory_estimate())
            14.8 MB (averages 4.7 MB, directions 590.6 kB, bases 4.7 MB, covariances 4.7 MB, numbers 104 B)
        """
        here = owned_here(self.param_groups, self._owners, self.distribute)
        pairs = [(p, options) for options in self.param_groups for p in made(options) if p.numel() and here(p)]
        each = [memory_of(p, options) for p, options in pairs]
        return KronMemory(*map(sum, zip(KronMemory(0, 0, 0, 0, 0), *each, strict=True)))

    def __repr__(self) -> str:
        kept_bytes = self.memory_estimate().total
        weights = sum(p.numel() for options in self.param_groups for p in made(options))
        each = f" ({kept_bytes / weights:.1f} bytes a weight)" if weights else ""
        memory = f"memory: {readable(kept_bytes)}{each}, nonfinite: {self.nonfinite!r}"
        return f"{super().__repr__()[:-1].rstrip()}\n{memory}\n)"
