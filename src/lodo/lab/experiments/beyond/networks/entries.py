"""What settings/networks.toml says, and files written like it: the optimizers, the tasks and the small size."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lodo._checks import check_bool, check_choice, check_int, check_real
from lodo.lab.optimizers import Choice, resolve
from lodo.lab.settings import read_settings
from lodo.lab.tasks import check_task

_RIVAL = ("optimizer", "label", "lr", "options", "extra")
_TASK = ("task", "steps", "options", "extra", "tuning_steps", "quick", "quick_options")

REFERENCE, OURS = "AdamW", "KronLODO"  # what everything is compared with, and what is also shown untouched
TUNED, UNTOUCHED = f"{REFERENCE} tuned", f"{OURS} untouched"
_FIXED = ("adamw", "kron_lodo")  # their names in networks.toml


@dataclass(frozen=True)
class Workload:
    """A task, its options, the length of a run on it, and that of the trials by which settings are chosen."""

    task: str
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    tuning_steps: int | None = None  # None: as long as the runs

    def __post_init__(self) -> None:
        check_task(self.task)
        check_int("steps", self.steps, low=10)
        if self.tuning_steps is not None:
            check_int("tuning_steps", self.tuning_steps, low=10)


@dataclass(frozen=True)
class Entries:
    """The optimizers and the tasks by name.

    Args:
        rivals: the optimizers; their settings have at least ``lr``, the library's default rate.
        tasks: the tasks at full size.
        small_tasks: those of the small size.
        small_rivals: the names of the optimizers of the small size.
        extra: the names of the tasks that are run only if they are named.
        extra_rivals: the names of such optimizers.
    """

    rivals: Mapping[str, Choice]
    tasks: Mapping[str, Workload]
    small_tasks: Mapping[str, Workload]
    small_rivals: tuple[str, ...]
    extra: frozenset[str]
    extra_rivals: frozenset[str]

    @property
    def usual_rivals(self) -> tuple[str, ...]:
        """The names of the optimizers that are run if none is named."""
        return tuple(name for name in self.rivals if name not in self.extra_rivals)

    def __or__(self, other: Entries) -> Entries:
        """These and others; a name that is in both stands for the other's."""
        return Entries(
            {**self.rivals, **other.rivals},
            {**self.tasks, **other.tasks},
            {**self.small_tasks, **other.small_tasks},
            tuple(dict.fromkeys((*self.small_rivals, *other.small_rivals))),
            (self.extra - other.tasks.keys()) | other.extra,
            (self.extra_rivals - other.rivals.keys()) | other.extra_rivals,
        )


@functools.cache
def own_entries() -> Entries:
    """Those of networks.toml.

    >>> own_entries().rivals["adamw"].settings, own_entries().tasks["gpt"].steps
    ({'lr': 0.001}, 3000)
    """
    return make_entries(read_settings("networks"))


def read_entries(path: Path) -> Entries:
    """Those of a file; all its optimizers are part of the small size too."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        json.dumps(found, allow_nan=False)
        entries = make_entries({"quick": {"rivals": list(found.get("rivals", {}))}, **found})
        for name in entries.small_rivals:
            check_choice("a rival of quick", name, {**own_entries().rivals, **entries.rivals})
        rivals = {name: replace(choice, optimizer=resolve(choice.optimizer)) for name, choice in entries.rivals.items()}
        _check_labels(rivals)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"rivals must be a TOML file written like networks.toml, got {str(path)!r}: {error}"
        ) from error
    if not entries.rivals and not entries.tasks:
        raise ValueError(f"rivals must be a file with optimizers or tasks, got {str(path)!r}, which has none")
    return replace(entries, rivals=rivals)


def _check_labels(rivals: Mapping[str, Choice]) -> None:
    """Refuse optimizers of a file that would stand where another one is expected: results are found by their labels."""
    taken = {TUNED: "tuned AdamW", UNTOUCHED: "KronLODO at its defaults"}
    taken |= {choice.label: name for name, choice in own_entries().rivals.items() if name not in rivals}
    for name, choice in rivals.items():
        if name in _FIXED:
            raise ValueError(f"a rival must have a name other than {' and '.join(_FIXED)}, got {name!r}")
        if choice.label in taken:
            raise ValueError(
                f"label of {name} must be one that no other optimizer has, got {choice.label!r}, "
                f"which is that of {taken[choice.label]}"
            )
        taken[choice.label] = name


def make_entries(found: Mapping[str, Any]) -> Entries:
    """The entries of a parsed file.

    >>> make_entries({"rivals": {"lodo": {"lr": 1.0}}}).rivals["lodo"].label
    'LODO'
    """
    for section in found:
        check_choice("a section", section, ("rivals", "tasks", "quick"))
    rivals, tasks = found.get("rivals", {}), found.get("tasks", {})
    for lines, known, example in ((rivals, _RIVAL, "lr = 0.001"), (tasks, _TASK, "steps = 1000")):
        for name, fields in lines.items():
            _check_line(name, fields, known, example)
    return Entries(
        {name.lower(): _rival(name, fields) for name, fields in rivals.items()},
        {name: _workload(name, fields, "steps") for name, fields in tasks.items()},
        {name: _workload(name, fields, "quick") for name, fields in tasks.items() if "quick" in fields},
        tuple(name.lower() for name in found.get("quick", {}).get("rivals", ())),
        frozenset(name for name, fields in tasks.items() if fields.get("extra")),
        frozenset(name.lower() for name, fields in rivals.items() if fields.get("extra")),
    )


def _check_line(name: str, fields: Any, known: Sequence[str], example: str) -> None:
    if not isinstance(fields, dict):
        raise ValueError(f"{name} must be a table, such as {name} = {{ {example} }}, got {fields!r}")
    for each in fields:
        check_choice(f"a field of {name}", each, known)
    check_bool(f"extra of {name}", fields.get("extra", False))


def _rival(name: str, fields: Mapping[str, Any]) -> Choice:
    check_real(f"lr of {name}", fields.get("lr"), low=0.0, open_low=True)
    if "lr" in fields.get("options", {}):
        raise ValueError(f"options of {name} must not have lr, which is a field of its own, got {fields['options']}")
    optimizer = fields.get("optimizer", name)
    return Choice(optimizer, title=fields.get("label"), settings={"lr": fields["lr"], **fields.get("options", {})})


def _workload(name: str, fields: Mapping[str, Any], key: str) -> Workload:
    """A task; ``key`` is the field with the length of its runs, which says whether this is the small size."""
    small = key == "quick"
    options = {**fields.get("options", {}), **(fields.get("quick_options", {}) if small else {})}
    check_int(f"{key} of {name}", fields.get(key), low=10)
    return Workload(fields.get("task", name), fields[key], options, None if small else fields.get("tuning_steps"))
