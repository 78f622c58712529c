"""Configured objects as short text: ``mixing(depth=8)``, ``adam``, ``lodo(lr=0.1), torch.AdamW(lr=0.01)``.

The same text is accepted as an argument and on the command line, is what ``repr`` shows, and stands in checkpoints.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, ClassVar, TypeVar

from lodo._checks import hint

T = TypeVar("T")


class Spelled:
    """For frozen dataclasses: ``repr`` is the short text, a name and the options that differ from the defaults.

    The dataclass has to be declared with ``repr=False``.

    Example:
        >>> from lodo import Mixing
        >>> Mixing(depth=8), Mixing()
        (mixing(depth=8), mixing)
    """

    spelled: ClassVar[str] = ""  # the name in the text; the class name in lower case if empty

    def __repr__(self) -> str:
        if not is_dataclass(self):
            return object.__repr__(self)
        differing = {}
        for option in fields(self):
            default = option.default_factory() if option.default_factory is not MISSING else option.default
            value = getattr(self, option.name)
            if option.init and (default is MISSING or value != default):
                differing[option.name] = value
        return spell(self.spelled or type(self).__name__.lower(), differing)


def spell(name: str, options: Mapping[str, Any]) -> str:
    """A name with its options as text.

    >>> spell("lodo", {"lr": 0.1, "seed": 3}), spell("adam", {})
    ('lodo(lr=0.1, seed=3)', 'adam')
    """
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"{name}({given})" if given else name


def configured(argument: str, value: object, base: type[T], kinds: Mapping[str, type[T]]) -> T:
    """The configured object that ``value`` is or spells.

    Args:
        argument: the name of the argument, for error messages.
        value: an instance of ``base``, or text such as ``"mixing(depth=8)"``. Upper and lower case are the same.
        base: what the object must be an instance of.
        kinds: the classes that text can name.

    Example:
        >>> from lodo.meta import META_OPTIMIZERS, MetaOptimizer
        >>> configured("meta_optimizer", "schedule-free(window=100)", MetaOptimizer, META_OPTIMIZERS)
        schedule-free(window=100)
        >>> configured("meta_optimizer", "adm", MetaOptimizer, META_OPTIMIZERS)
        Traceback (most recent call last):
        ...
        ValueError: meta_optimizer must be one of 'adam', 'sgd', 'schedule-free', got 'adm'; did you mean 'adam'?
    """
    if isinstance(value, base):
        return value
    allowed = ", ".join(map(repr, kinds))
    if not isinstance(value, str):
        raise ValueError(
            f"{argument} must be one of {allowed}, text such as {next(iter(kinds)) + '(...)'!r}, "
            f"or an instance of {base.__name__}, got {value!r}"
        )
    name, options = named_options(argument, value, _example(kinds))
    if name not in kinds:
        raise ValueError(f"{argument} must be one of {allowed}, got {value!r}{hint(name, kinds)}")
    known = [option.name for option in fields(kinds[name])]  # type: ignore[arg-type]  # all kinds are dataclasses
    for option in options:
        if option not in known:
            choices = f"the options {', '.join(known)}" if known else "no options"
            raise ValueError(f"{argument}: {name} has {choices}, got {option!r} in {value!r}{hint(option, known)}")
    return kinds[name](**options)


def _example(kinds: Mapping[str, type[Any]]) -> str:
    """The first kind's name with its first option, as error messages show it."""
    name, kind = next(iter(kinds.items()))
    return spell(name, {option.name: option.default for option in fields(kind)[:1]})


def named_options(argument: str, text: str, example: str) -> tuple[str, dict[str, Any]]:
    """Split ``"schedule-free(window=100)"`` into its name, in lower case, and its options."""
    problem = f"{argument} must be a name, or a call with named options such as {example!r}, got {text!r}"
    matched = re.fullmatch(r"\s*([A-Za-z][\w-]*)\s*(\(.*\))?\s*", text, re.DOTALL)
    if matched is None:
        raise ValueError(problem)
    name, call = matched[1].lower(), matched[2] or "()"
    try:
        node = ast.parse(f"_{call}", mode="eval").body  # names may have hyphens, which Python's do not
    except SyntaxError as error:
        raise ValueError(problem) from error
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not _named_only(node):
        raise ValueError(problem)
    try:
        return name, _literals(name, node.keywords, text)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error


def parse_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names, or calls of them with literal options, separated by commas.

    >>> parse_calls("lodo, torch.AdamW(lr=0.1, betas=(0.9, 0.99))")
    [('lodo', {}), ('torch.AdamW', {'lr': 0.1, 'betas': (0.9, 0.99)})]
    >>> parse_calls("mymodule:MyOptimizer(lr=0.1)")
    [('mymodule:MyOptimizer', {'lr': 0.1})]
    """
    # As an index, so that Python's grammar allows the colon of module:Name, which it reads as that of a slice.
    tree = ast.parse(f"_[{text}]", mode="eval").body
    if not isinstance(tree, ast.Subscript) or not isinstance(tree.value, ast.Name):
        raise SyntaxError("not a list of names")
    nodes = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
    if not nodes:
        raise SyntaxError("not a list of names")
    return [_parse_call(node) for node in nodes]


def parse_options(text: str) -> dict[str, Any]:
    """Options without a name.

    >>> parse_options("n=200, v=10")
    {'n': 200, 'v': 10}
    """
    ((_, options),) = parse_calls(f"task({text})")
    return options


def _parse_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    module, called = "", node
    if isinstance(node, ast.Slice):
        if node.lower is None or node.upper is None or node.step is not None:
            raise SyntaxError("not module:Name")
        module, called = f"{ast.unparse(node.lower)}:", node.upper
    call = called if isinstance(called, ast.Call) else ast.Call(func=called, args=[], keywords=[])
    name, text = module + ast.unparse(call.func), ast.unparse(node)
    if not _named_only(call):
        raise ValueError(f"options must be given by name, such as {name}(lr=0.1), got {text!r}")
    return name, _literals(name, call.keywords, text)


def _named_only(call: ast.Call) -> bool:
    return not call.args and all(keyword.arg is not None for keyword in call.keywords)


def _literals(name: str, keywords: list[ast.keyword], text: str) -> dict[str, Any]:
    """The values of a call's options; ``name`` and ``text`` are for error messages."""
    options: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg in options:
            raise ValueError(f"{keyword.arg} of {name} must be given once, got {text!r}")
        try:
            options[str(keyword.arg)] = value = ast.literal_eval(keyword.value)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{keyword.arg} of {name} must be a finite number, text, True, False, None or a tuple of those, "
                f"got {ast.unparse(keyword.value)!r}"
            ) from error
    return options


def spell_options(options: Mapping[str, Any]) -> str:
    """Options as they are written on the command line; JSON may have turned tuples into lists.

    >>> spell_options({"n": 200, "model": "resnet8", "hidden": [32, 32]})
    "n=200, model='resnet8', hidden=(32, 32)"
    """
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return ", ".join(f"{name}={value!r}" for name, value in plain.items())
