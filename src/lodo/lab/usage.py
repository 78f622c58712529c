"""Errors of the command line, all in one form: ``error: ...``, and where to read more if a word was wrong."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup

from lodo.lab.errors import RunError
from lodo.lab.interrupts import say_what_is_kept

_UsageError: Any = typer.BadParameter.__mro__[1]  # what the parser itself finds wrong with the words of a command


class Commands(TyperGroup):
    """Commands whose usage errors look like all others."""

    def main(self, *args: Any, **settings: Any) -> Any:
        if not settings.pop("standalone_mode", True):
            return super().main(*args, standalone_mode=False, **settings)  # type: ignore[misc]
        try:
            code = super().main(*args, standalone_mode=False, **settings)  # type: ignore[misc]
        except _UsageError as error:
            _print_usage_error(error)
            code = 2
        sys.exit(code)


@contextmanager
def errors_in_words(kept: str) -> Iterator[None]:
    """Print an error instead of a traceback, and what an interruption leaves behind."""
    say_what_is_kept(kept)
    try:
        yield
    except (ValueError, OSError, FloatingPointError, MemoryError, RunError) as error:
        _print_error(str(error))
        raise typer.Exit(1) from error


def _print_error(text: str) -> None:
    """Print an error, on a terminal wrapped between words."""
    typer.secho("error: ", fg="red", nl=False, err=True)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        wrap = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(map(wrap, f"error: {text}".splitlines())).removeprefix("error: ")
    typer.echo(text, err=True)


def _print_usage_error(error: Any) -> None:
    """Print what is wrong with the words of a command, and where to read about them."""
    if type(error).__name__ == "NoArgsIsHelpError":  # a command alone: its help
        error.show()
        return
    ours = type(error) is typer.BadParameter and " must be " in error.message
    text = error.message if ours else error.format_message().rstrip(".")
    _print_error(text if ours else text[:1].lower() + text[1:])
    typer.echo(f"see: {error.ctx.command_path if error.ctx else 'lodo'} --help", err=True)
