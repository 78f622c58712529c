"""Argument checks whose errors name the argument, the value and what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real


def check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    """Check that ``value`` is an integer of at least ``low`` and at most ``high``.

    >>> check_int("depth", 0, low=1)
    Traceback (most recent call last):
    ...
    ValueError: depth must be an integer >= 1, got 0
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or int(value) < low or (high is not None and int(value) > high):  # type: ignore[call-overload]
        raise ValueError(
            f"{name} must be an integer >= {low}{'' if high is None else f' and <= {high}'}, got {value!r}"
        )


def check_real(name: str, value: object, *, low: float, high: float = math.inf, open_low: bool = False) -> None:
    """Check that ``value`` is a finite number in [low, high), or in (low, high) with ``open_low``.

    >>> check_real("beta", 1.0, low=0.0, high=1.0)
    Traceback (most recent call last):
    ...
    ValueError: beta must be a finite number in [0.0, 1.0), got 1.0
    """
    ok = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not (low < value if open_low else low <= value) or not value < high:  # type: ignore[operator]
        bounds = f"{'(' if open_low else '['}{low}, {high})"
        raise ValueError(f"{name} must be a finite number in {bounds}, got {value!r}")


def check_betas(betas: object) -> None:
    """Check the decays of two averages.

    >>> check_betas((0.9, 1.0))
    Traceback (most recent call last):
    ...
    ValueError: betas[1] must be a finite number in [0.0, 1.0), got 1.0
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers in [0.0, 1.0), got {betas!r}")
    for i, beta in enumerate(betas):
        check_real(f"betas[{i}]", beta, low=0.0, high=1.0)


def check_choice(name: str, value: object, allowed: Iterable[str]) -> None:
    """Check that ``value`` is one of ``allowed``; an error suggests the closest one.

    >>> check_choice("nonfinite", "skpi", ["raise", "skip"])
    Traceback (most recent call last):
    ...
    ValueError: nonfinite must be one of 'raise', 'skip', got 'skpi'; did you mean 'skip'?
    """
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint(value, allowed)}")


def hint(value: object, allowed: Iterable[str]) -> str:
    """The end of an error message that suggests the closest allowed text, or nothing if none is close.

    >>> hint("bwol", ["bowl", "mnist"]), hint(3, ["bowl"])
    ("; did you mean 'bowl'?", '')
    """
    close = difflib.get_close_matches(value.lower(), allowed, n=1) if isinstance(value, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


def check_group(group: object, owner: str, options: Iterable[str], elsewhere: Iterable[str]) -> None:
    """Check that a parameter group is a dict, without options of the whole optimizer and without misspelled ones.

    Names of your own, such as "name", are let through.

    >>> check_group({"weigth_decay": 0.1}, "KronLODO", ["lr", "weight_decay"], ["backend"])
    Traceback (most recent call last):
    ...
    ValueError: weigth_decay is not an option of a group (got 0.1); did you mean 'weight_decay'?
    """
    if not isinstance(group, dict):
        raise TypeError(f"param_group must be a dict, got {type(group).__name__}")
    options, elsewhere = set(options), set(elsewhere)
    for name, value in group.items():
        if name in elsewhere:
            raise ValueError(f"{name} is not an option of a group (got {value!r}); pass it to {owner}")
        if name not in options and (close := difflib.get_close_matches(name, options, n=1, cutoff=0.85)):
            raise ValueError(f"{name} is not an option of a group (got {value!r}); did you mean {close[0]!r}?")


def check_bool(name: str, value: object) -> None:
    """Check that ``value`` is True or False.

    >>> check_bool("guard", "yes")
    Traceback (most recent call last):
    ...
    ValueError: guard must be True or False, got 'yes'
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
