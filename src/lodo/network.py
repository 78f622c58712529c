"""What a group's network needs at run time and no checkpoint holds."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lodo import memory
from lodo._notice import notice
from lodo.diagnostics import Watch
from lodo.distributed import local
from lodo.flatten import Flat, count
from lodo.gate import Gate
from lodo.guard import Guard
from lodo.meta import MetaOptimizer
from lodo.preconditioners import Preconditioner


class Network:
    """One group's permutations, flat vectors and engine, and the state that a fresh one starts with."""

    def __init__(
        self,
        family: Preconditioner,
        params: Sequence[Tensor],
        seed: int,
        index: int,
        backend: str,
        save_activations: bool = True,
    ) -> None:
        self.n = count(params)
        self._family = family
        self._fused = family.fused(backend, params[0].device)
        self._seed = (seed, index)
        P = family.fixed(self.n, self._generator(0))
        self.fingerprint = zlib.crc32(P.numpy().data)  # tells whether a state was saved with this P
        self._device = params[0].device
        self.g, self.s = Flat(params), Flat(params)  # the gradient; the step over lr
        self._dtype = self.g.vector.dtype
        self.largest = math.sqrt(torch.finfo(self._dtype).max)  # what can be squared
        self.engine = family.engine(P.to(self._device), backend, save_activations)
        self.rounding_seed = int(self._generator(2).initial_seed()) & 0xFFFFFFFF
        self.watch: Watch | None = None  # from the first call of diagnostics on
        self._numels = [local(p).numel() for p in params]

    def _generator(self, stream: int) -> torch.Generator:
        """A random stream of this seed and group; 0 draws P, 1 draws theta_0, 2 rounds moments."""
        entropy = np.random.SeedSequence([*self._seed, stream]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(entropy[0]))

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        if self._fused:
            return memory.huge_zeros(shape, dtype or self._dtype)
        return torch.zeros(tuple(shape), dtype=dtype or self._dtype, device=self._device)

    def initial_state(self, meta: MetaOptimizer, moment_dtype: torch.dtype | None, gated: bool) -> dict[str, Any]:
        """theta_0, zeros, and no step taken."""
        shape = self._family.shape(self.n)
        theta = memory.huge_zeros(shape, self._dtype)
        with notice("lodo: drawing a network of %s weights ...", f"{theta.numel():,}"):
            self._family.init(theta, self.n, self._generator(1))
        theta = theta.to(self._device)
        moments = {name: self._zeros(shape, moment_dtype) for name in meta.moments}
        for moment in moments.values():
            meta.start(moment, theta)
        gate = {"gate": tuple(Gate()), "last_gradient": torch.zeros_like(self.g.vector)} if gated else {}
        return {
            "step": 0,
            "meta_step": 0,
            "last_lr": 0.0,  # no step was taken yet
            "moved": [True] * len(self._numels),
            "numels": self._numels,
            "momentum_bound": 0.0,
            "fed_bound": 0.0,
            "guard": tuple(Guard()),
            "skipped": 0,
            "fingerprint": self.fingerprint,
            "momentum": torch.zeros_like(self.g.vector),
            "theta": theta,
            **moments,
            **gate,
        }

    def restored(
        self, state: dict[str, Any], moments: Sequence[str], moment_dtype: torch.dtype | None
    ) -> dict[str, Any]:
        """A copy of a saved state, in this network's dtypes and on its device."""
        return {
            name: self._zeros(value.shape, moment_dtype if name in moments else None).copy_(value)
            if isinstance(value, Tensor)
            else value
            for name, value in state.items()
        }

    def check_state(self, state: dict[str, Any], moments: Sequence[str], gated: bool, index: int) -> None:
        """Does a saved state belong to this network?"""
        shape = self._family.shape(self.n)
        vectors = ("momentum", "last_gradient") if gated else ("momentum",)
        needed = {**dict.fromkeys(vectors, (self.n,)), **dict.fromkeys(("theta", *moments), shape)}
        for name, expected in needed.items():
            found = tuple(state[name].shape) if isinstance(state.get(name), Tensor) else None
            if found != expected:
                raise ValueError(
                    f"group {index} of the state has {name} of shape {found}, but n = {self.n:,} and "
                    f"{self._family} need {expected}"
                )
        if state["numels"] != self._numels:
            raise ValueError(
                f"group {index} of the state has parameters of {state['numels']} elements, ours have {self._numels}"
            )
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"group {index} of the state was learned with other permutations than its seed gives here "
                "(another release of torch may draw them differently)"
            )
