"""How much memory a network takes, and whether that fits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from lodo._checks import check_choice, check_int
from lodo.engines import BACKENDS, engine_for
from lodo.families import FAMILIES, Preconditioner
from lodo.layout import Layout
from lodo.meta import MetaOptimizer
from lodo.recipes import as_meta_optimizer, from_recipe
from lodo.spelling import configured


class MemoryEstimate(NamedTuple):
    """Bytes, by what they are for; ``total`` is the most needed at once, ``resting`` what is needed between steps."""

    theta: int
    moments: int
    indices: int
    activations: int  # kept from step to step
    work: int  # needed during a step only
    vectors: int

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def resting(self) -> int:
        return self.total - self.work

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {readable(size)}" for name, size in zip(self._fields, self, strict=True))
        return f"{readable(self.total)} ({parts})"


def memory_estimate(
    n: int,
    preconditioner: str | Preconditioner | None = None,
    *,
    momentum: str | None = None,
    meta_optimizer: str | MetaOptimizer | None = None,
    save_activations: bool | None = None,
    recipe: str = "paper",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    device: torch.device | str = "cpu",
) -> MemoryEstimate:
    """The memory LODO needs for ``n`` parameters, beside the parameters and their gradients.

    Args:
        n: the number of parameters in the group.
        preconditioner: as for `LODO`, as are ``momentum``, ``meta_optimizer``, ``save_activations``, ``recipe`` and
            ``backend``.
        dtype: theta's dtype: float64 for float64 parameters, float32 for all others.
        device: where the parameters are.

    Example:
        >>> memory_estimate(94_696).theta // 94_696  # 128 float32 numbers a parameter
        512
        >>> memory_estimate(1000, "diagonal").theta
        4000
        >>> memory_estimate(94_696, recipe="robust").moments // 94_696  # in bfloat16
        512
    """
    if isinstance(n, torch.nn.Module):
        raise TypeError(
            "n must be the number of weights, got a module; KronLODO(...).memory_estimate() is for KronLODO"
        )
    check_int("n", n, low=0)
    check_choice("backend", backend, BACKENDS)
    chosen = from_recipe(
        recipe,
        preconditioner=preconditioner,
        momentum=momentum,
        meta_optimizer=meta_optimizer,
        save_activations=save_activations,
    )
    family = as_family(chosen["preconditioner"])
    layout = Layout.flat(n, dtype, device)
    return estimate(
        family,
        layout,
        as_meta_optimizer(chosen["meta_optimizer"]),
        gated=chosen["momentum"] == "learned",
        save_activations=chosen["save_activations"],
        backend=backend,
    )


def estimate(
    family: Preconditioner,
    layout: Layout,
    meta: MetaOptimizer,
    *,
    gated: bool,
    save_activations: bool,
    backend: str,
) -> MemoryEstimate:
    """As `memory_estimate`, from options that have been checked."""
    if layout.n == 0:
        return MemoryEstimate(0, 0, 0, 0, 0, 0)
    needs = engine_for(family, layout.device, backend).footprint(family, layout, meta, save_activations)
    item = layout.dtype.itemsize
    return MemoryEstimate(
        theta=needs.weights * item,
        moments=needs.weights * (meta.stored_dtype or layout.dtype).itemsize * len(meta.moments),
        indices=4 * needs.indices,
        activations=item * needs.activations,
        work=item * needs.work,
        vectors=(5 if gated else 3) * item * layout.n,
    )


def as_family(given: str | Preconditioner) -> Preconditioner:
    """The family that ``given`` is or spells.

    >>> as_family("mixing(depth=8)").depth
    8
    """
    return configured("preconditioner", given, Preconditioner, FAMILIES)  # type: ignore[type-abstract]


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``, or None if that cannot be told."""
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    bounds = [_meminfo(), _cgroup()]
    return min((bound for bound in bounds if bound is not None), default=None)


def check_fits(needed: MemoryEstimate, earlier: int, device: torch.device, what: str) -> None:
    """Raise MemoryError if ``needed`` and what ``earlier`` groups will take cannot fit."""
    free = available(device)
    if free is not None and needed.total + earlier > free:
        others = f", and {readable(earlier)} for the groups before it" if earlier else ""
        raise MemoryError(
            f"{what} needs {needed}{others}; {readable(free)} is available on {str(device)!r}. "
            "KronLODO, which is made for networks, takes tens of bytes a parameter; recipe='compact' takes half a "
            "kilobyte, and a smaller network, such as Mixing(block_size=8, depth=2), preconditioner='diagonal' or "
            "meta_optimizer='sgd' take less. Or train fewer parameters with LODO"
        )


def readable(size: int) -> str:
    """A number of bytes for people.

    >>> readable(203_000_000)
    '203.0 MB'
    """
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.1f} GB"


def _meminfo() -> int | None:
    """What the system says is available: Linux's estimate, else all physical memory."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _cgroup(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the container's limit leaves, if there is one; cached files can be dropped and do not count."""
    try:
        limit = int((root / "memory.max").read_text())  # "max" is not a number: no limit
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["active_file"]) + int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None
