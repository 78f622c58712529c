"""One parameter group of LODO at run time: its layout, its network, its engine, and the state it starts with."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lodo import feed
from lodo._notice import notice
from lodo.distributed import shard_of
from lodo.engines import Engine, engine_for
from lodo.engines.numba.pages import huge_zeros
from lodo.estimate import MemoryEstimate, check_fits, estimate
from lodo.families import Preconditioner
from lodo.guard import Guard
from lodo.layout import Flat, Layout
from lodo.meta import Learned, MetaOptimizer
from lodo.recipes import as_meta_optimizer
from lodo.safety import Limits
from lodo.scalars import Scalar, scalar_on
from lodo.watch import Watch

Options = dict[str, Any]  # an entry of `param_groups`
State = dict[str, Any]  # an entry of `Optimizer.state`


class Group:
    """What a parameter group needs beside its options and its state. None of it is saved.

    Args:
        index: its place among the groups, on which its random numbers depend.
        options: its entry of ``param_groups``.
        family: its preconditioner.
        backend, save_activations: as for `LODO`.
    """

    def __init__(
        self, index: int, options: Options, family: Preconditioner, backend: str, save_activations: bool
    ) -> None:
        self.index = index
        self.family = family
        self.layout = Layout.of(options["params"])
        self.backend, self.save_activations = backend, save_activations
        # Torch's distributed checkpoints drop the state of a frozen parameter.
        trained = [j for j, p in enumerate(options["params"]) if p.requires_grad]
        self.holder = trained[0] if trained else 0  # the parameter that the state sits under
        self.network: Network | None = None  # drawn at the first use

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "network": None}  # a copy draws its own

    @property
    def n(self) -> int:
        """How many numbers this rank holds."""
        return self.layout.n

    def check_fits(self, options: Options, pending: int) -> None:
        """Raise MemoryError if the group cannot fit beside ``pending`` bytes that others have yet to allocate."""
        if self.n:
            what = f"LODO's state for group {self.index} ({self.n:,} parameters, {self.family})"
            check_fits(self.estimate(options), pending, self.layout.device, what)

    def drawn(self, seed: int) -> Network:
        """A network drawn from a seed.

        Each shard is drawn as if it were a group of one process: the same draw there, and another on every rank.
        """
        shard = self.layout.shard
        with lasting_tensors():
            return Network(self, (seed, self.index * shard.parts + shard.part))

    def ready(self, options: Options) -> Network:
        """The group's network, drawn from its seed at the first use."""
        if self.network is None:
            self.network = self.drawn(options["seed"])
        return self.network

    def estimate(self, options: Options) -> MemoryEstimate:
        """The memory that the group takes."""
        return estimate(
            self.family,
            self.layout,
            as_meta_optimizer(options["meta_optimizer"]),
            gated=options["momentum"] == "learned",
            save_activations=self.save_activations,
            backend=self.backend,
        )


class Network:
    """A group's engine with its permutations, and the flat vectors that it works on."""

    def __init__(self, group: Group, seeds: tuple[int, int]) -> None:
        layout, family = group.layout, group.family
        self._seeds = seeds
        P = self.draw_permutations(family, layout)
        self.rounding_seed = int(self._generator(2).initial_seed()) & 0xFFFFFFFF
        kind = engine_for(family, layout.device, group.backend)
        self.index = group.index
        self.engine: Engine = kind(family, layout, P.to(layout.device), group.save_activations)
        self.g, self.s = Flat(layout), Flat(layout)  # the gradient; the step over lr
        self.largest_norm = math.sqrt(torch.finfo(layout.dtype).max)  # of a gradient: what can be squared
        self.log_s: Scalar = math.inf  # a bound on how far G stretches a vector (`lodo.safety`); not measured yet
        self.reads = 0  # of gradients
        self.layers, self.growth = family.layers(layout), family.growth(layout)
        self._known_limits: tuple[MetaOptimizer, Limits] | None = None
        self.watch: Watch | None = None  # from the first call of diagnostics on

    def _generator(self, stream: int) -> torch.Generator:
        """A random stream of the group: 0 draws P, 1 draws theta_0, 2 rounds moments."""
        entropy = np.random.SeedSequence([*self._seeds, stream]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0]))

    def draw_permutations(self, family: Preconditioner, layout: Layout) -> Tensor:
        """P, which the family draws once and never learns, in natural order."""
        return family.fixed(layout, self._generator(0))

    @cached_property
    def fingerprint(self) -> int:
        """A checksum that tells whether a state was saved with this P."""
        with lasting_tensors():
            P = self.draw_permutations(self.engine.family, self.engine.layout)
        return zlib.crc32(P.numpy().data)

    def limits(self, params: Sequence[Tensor], meta: MetaOptimizer) -> Limits:
        """The largest numbers that the group may come to."""
        if self._known_limits is None or self._known_limits[0] is not meta:
            dtypes = {p.dtype.to_real() for p in params}
            self._known_limits = meta, Limits.of(self.engine.layout.dtype, sorted(dtypes, key=str), meta)
        return self._known_limits[1]

    def initial_state(self, meta: MetaOptimizer, gated: bool) -> State:
        """theta_0, zeros, and no step taken."""
        layout, engine = self.engine.layout, self.engine
        with lasting_tensors():
            theta = self._draw_theta()
            moments = {name: engine.zeros(theta.shape, meta.stored_dtype) for name in meta.moments}
            for moment in moments.values():
                meta.start(moment, theta)
            state: State = {
                **{name: self.number(value) for name, value in _NUMBERS.items()},
                "guard": Guard(*map(self.number, Guard())),
                "moved": [True] * len(layout.shapes),
                "momentum": torch.zeros_like(self.g.vector),
                "theta": theta,
                **moments,
            }
            if gated:
                state["gate"] = feed.START if engine.on_host else Learned(*(self.number(float(x)) for x in feed.START))
                state["last_gradient"] = torch.zeros_like(self.g.vector)
        return state

    def number(self, value: Scalar) -> Scalar:
        """A number of the state: itself on the CPU, a 0-dim tensor on another device."""
        return value if self.engine.on_host else scalar_on(self.engine.layout.device, value)

    def _draw_theta(self) -> Tensor:
        layout, family = self.engine.layout, self.engine.family
        natural = huge_zeros(family.shape(layout), layout.dtype)
        with notice(f"lodo: drawing a network of {natural.numel():,} weights ..."):
            family.init(natural, layout, self._generator(1))
        return self.engine.pack(natural)


_NUMBERS: dict[str, float] = {
    "step": 0,
    "meta_step": 0,  # updates of theta
    "skipped": 0,
    "last_lr": 0.0,  # no step was taken yet
    "momentum_bound": 0.0,  # >= |m|
    "fed_bound": 0.0,  # >= |u|
}


def name_of(options: Options, index: int, j: int) -> str:
    """What errors call parameter ``j`` of group ``index``.

    >>> name_of({"params": [torch.zeros(2, 3)]}, 0, 0)
    'parameter 0 of group 0, shape (2, 3),'
    """
    name = f" {options['param_names'][j]!r}" if "param_names" in options else ""
    return f"parameter{name} {j} of group {index}, shape {tuple(options['params'][j].shape)},"


def check_resolved(options: Options, index: int, j: int) -> None:
    """Raise an error for a view that changes the signs of another tensor's numbers, to which nothing can be written."""
    p = options["params"][j]
    if not is_lazy(p) and (p.is_conj() or p.is_neg()):
        raise ValueError(
            f"{name_of(options, index, j)} is a view of conjugate or negative numbers; make it a tensor of its own by "
            "resolve_conj() or clone()"
        )


def check_params(options: Options, index: int) -> None:
    """Raise an error that names the parameter unless all can be in one group."""
    params = options["params"]
    for j, p in enumerate(params):
        name = name_of(options, index, j)
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(f"LODO trains floating-point and complex tensors, but {name} is {p.dtype}")
        check_resolved(options, index, j)
        if p.device != params[0].device:
            raise ValueError(
                f"the parameters of a group must be on one device, but {name} is on {str(p.device)!r} and the first "
                f"one on {str(params[0].device)!r}; give each device its own group"
            )
        here, first = shard_of(p), shard_of(params[0])
        if here != first:
            raise ValueError(
                f"the parameters of a group must be sharded alike, but this rank holds {here.label} of {name} and "
                f"{first.label} of the first one; give each kind its own group"
            )


@contextmanager
def lasting_tensors() -> Iterator[None]:
    """Tensors made here outlive an inference mode around the caller, and ignore a default device."""
    with torch.inference_mode(False), torch.device("cpu"):
        yield
