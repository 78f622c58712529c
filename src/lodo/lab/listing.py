"""``lodo run --list``: all experiments on one screen of 24 lines and 80 columns, with the time that each takes."""

from __future__ import annotations

import shutil
import textwrap

import typer

from lodo.lab.experiments.catalog import CATALOG, Entry, duration
from lodo.lab.optimizers import OPTIMIZERS
from lodo.lab.settings import read_settings
from lodo.lab.tasks import TASKS

_NAMES = 1 + max(map(len, CATALOG))


def print_list(name: str | None) -> None:
    """All experiments, then the names of tasks and optimizers; or all about one experiment."""
    machine = f"times on {read_settings('durations')['machine']}"
    typer.echo(f"{machine:{_NAMES + 40}}{'--quick':>9}{'full size':>11}")
    if name in CATALOG:
        _print_one(CATALOG[str(name)])
    else:
        _print_all()


def _print_all() -> None:
    for entry in CATALOG.values():
        _print_times(entry)
    _print_wrapped("tasks:", ", ".join(TASKS))
    others = "and those of torch.optim, pytorch_optimizer, heavyball, schedulefree"
    _print_wrapped("optimizers:", f"{', '.join(OPTIMIZERS)}, {others}")
    typer.echo("Your own are named as module:Name. More about one: lodo run NAME --list")


def _print_one(entry: Entry) -> None:
    _print_times(entry)
    _print_wrapped("shows:", entry.shows)
    _print_wrapped("full size:", str(entry.full))
    _print_wrapped("--quick:", str(entry.quick))


def _print_times(entry: Entry) -> None:
    taken = read_settings("durations").get(entry.name)  # none if nobody has measured it yet
    quick, full = (duration(taken[size]) if taken else "-" for size in ("quick", "full"))
    typer.echo(f"{entry.name:{_NAMES}}{entry.brief:40}{quick:>9}{full:>11}")


def _print_wrapped(name: str, text: str) -> None:
    """A name, and beside it a text that is wrapped."""
    width = min(shutil.get_terminal_size().columns, 120)
    for number, line in enumerate(textwrap.wrap(text, width - 12, break_on_hyphens=False)):
        typer.echo(f"{'' if number else name:12}{line}")
