"""Muon as its users have it: Muon for the hidden matrices, AdamW for everything else, one rate for both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from lodo.kron_step import orthogonal
from lodo.lab.optimizers.base import Closure, ElementwiseOptimizer, OwnOptimizer
from lodo.lab.tasks import Task


class Muon(ElementwiseOptimizer):
    """torch's Muon in the parameters' own precision: its bfloat16 takes many times as long on a CPU.

    ``m += (1 - momentum) (g - m); W -= lr (0.2 sqrt(max(rows, columns)) orthogonal(g + momentum (m - g)) + weight_decay
    W)``. The factor of the rate (``adjust_lr_fn="match_rms_adamw"`` in torch) makes steps as long as AdamW's in the
    root mean square. Kernels of convolutions are matrices, out x rest.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, weight_decay: float = 0.01, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def move_one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        """Move one matrix."""
        momentum = group["momentum"]
        if "m" not in self.state[p]:
            self.state[p]["m"] = torch.zeros_like(p)
        m = self.state[p]["m"]
        m.lerp_(g, 1 - momentum)
        direction = orthogonal(g.lerp(m, momentum).flatten(1)[None])[0]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(direction.view_as(p), alpha=group["lr"] * 0.2 * math.sqrt(max(direction.shape)))


class MuonAndAdamW(OwnOptimizer):
    """Muon for some parameters, AdamW for the others.

    Args:
        hidden: the parameters for Muon.
        others: the parameters for AdamW.
        lr: the rate of both.
        weight_decay: of both.
        momentum: Muon's.

    Example:
        >>> W, b = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2))
        >>> optimizer = MuonAndAdamW([W], [b], lr=0.1)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.1, 0.1]
    """

    def __init__(
        self,
        hidden: Sequence[Parameter],
        others: Sequence[Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
    ) -> None:
        parts: list[Optimizer] = []
        if hidden:
            parts.append(Muon(hidden, lr, weight_decay, momentum))
        if others:
            parts.append(AdamW(others, lr=lr, weight_decay=weight_decay))
        groups = [group for part in parts for group in part.param_groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._divide()

    def _divide(self) -> None:
        """Leave every group to its own optimizer, with the states that are here."""
        self._parts: list[Optimizer] = []
        for group in self.param_groups:
            part: Optimizer = Muon(group["params"]) if "momentum" in group else AdamW(group["params"])
            part.param_groups, part.state = [group], self.state
            self._parts.append(part)

    def move(self, closure: Closure | None) -> None:
        for part in self._parts:
            part.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._divide()


def make_muon(task: Task, /, **options: Any) -> Optimizer:
    """Muon for a task's hidden matrices, and AdamW for its other parameters."""
    hidden = hidden_matrices(task)
    ids = set(map(id, hidden))
    return MuonAndAdamW(hidden, [p for p in task.params if id(p) not in ids], **options)


def hidden_matrices(task: Task) -> list[Parameter]:
    """The matrices and kernels of a task, without embeddings and the last layer.

    Where the task has modules, these are weights of torch's own layers: what a module of one's own holds itself, such
    as a table of positions, counts as an embedding.
    """
    modules = [each for found in vars(task).values() if isinstance(found, nn.Module) for each in found.modules()]
    owners = {id(p): module for module in modules for p in module.parameters(recurse=False)}
    matrices = [p for p in task.params if p.ndim > 1 and _is_layer(owners.get(id(p)), bool(modules))]
    return matrices[:-1]


def _is_layer(owner: nn.Module | None, has_modules: bool) -> bool:
    if owner is None:
        return not has_modules
    return type(owner).__module__.startswith("torch.nn.") and not isinstance(owner, nn.Embedding)
