"""LODO that stops learning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import ParamsT

from lodo import LODO
from lodo._checks import check_int


class FrozenLODO(LODO):
    """LODO that stops learning and forgets its momentum after ``freeze_at`` steps."""

    def __init__(self, params: ParamsT, *, freeze_at: int, **options: Any) -> None:
        check_int("freeze_at", freeze_at, low=0)
        super().__init__(params, **options)
        for group in self.param_groups:
            group["remaining"] = freeze_at

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has overloads
        """Take one step."""
        for i, group in enumerate(self.param_groups):
            if group["remaining"] == 0:
                group["meta_lr"] = 0.0
                self._state(i)["momentum"].zero_()
            group["remaining"] -= 1
        return super().step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # LODO's own step calls the hooks
