"""Options as they are written on the command line: ``adam, lodo(beta=0.5)`` or ``n=200, v=10``."""

from __future__ import annotations

import ast
import json
from typing import Any


def parse_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names, or calls of them with literal options, separated by commas.

    >>> parse_calls("lodo, torch.AdamW(lr=0.1, betas=(0.9, 0.99))")
    [('lodo', {}), ('torch.AdamW', {'lr': 0.1, 'betas': (0.9, 0.99)})]
    """
    tree = ast.parse(f"[{text}]", mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise SyntaxError("not a list of names")
    return [_parse_call(node) for node in tree.elts]


def parse_options(text: str) -> dict[str, Any]:
    """Options alone.

    >>> parse_options("n=200, v=10")
    {'n': 200, 'v': 10}
    """
    ((_, options),) = parse_calls(f"task({text})")
    return options


def _parse_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    name = ast.unparse(call.func)
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"options must be given by name, such as {name}(lr=0.1), got {ast.unparse(node)!r}")
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg in options:
            raise ValueError(f"{keyword.arg} of {name} must be given once, got {ast.unparse(node)!r}")
        try:
            options[str(keyword.arg)] = value = ast.literal_eval(keyword.value)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{keyword.arg} of {name} must be a finite number, text, True, False, None or a tuple of those, "
                f"got {ast.unparse(keyword.value)!r}"
            ) from error
    return name, options
