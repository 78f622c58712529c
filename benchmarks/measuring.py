"""What the benchmarks share: timing a call, comparing a figure with its target, writing the results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path


def seconds_per_call(call: Callable[[], object], times: int = 1) -> float:
    """The mean time of ``times`` calls in a row."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def with_target(text: str, value: float, target: float | None, *, at_least: bool) -> str:
    """The text in green if the value meets its target and in red if it does not, followed by the target."""
    if target is None:
        return text
    good = value >= target if at_least else value <= target
    color = "green" if good else "red"
    sign = ">=" if at_least else "<="
    return f"[{color}]{text}[/] ({sign} {target:g})"


def write(path: Path, result: object) -> None:
    """Write a result as JSON, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")
