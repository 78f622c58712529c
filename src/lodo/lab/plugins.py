"""Objects named by text: ``module:Name``, from the laboratory, an installed package or the current folder.

A run stores a digest of the file of every such module outside the laboratory, so that a curve is never mistaken for
that of edited code.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lodo._checks import check_choice, hint

_DIGEST = "digest"  # an option that the laboratory itself adds, for the data or the weights
_digests: dict[str, str] = {}  # of each module's file, as it was when the module was imported


def is_plugin(name: str) -> bool:
    """Whether a name is of the form ``module:Name``.

    >>> is_plugin("mymodule:MyTask"), is_plugin("bowl")
    (True, False)
    """
    return ":" in name


def import_object(name: str) -> Any:
    """The class or function called ``module:Name``.

    >>> import_object("collections:Counter")
    <class 'collections.Counter'>
    """
    module_name, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"a plug-in must be named as module:Name, got {name!r}")
    module = _import_module(module_name)
    if not hasattr(module, attribute):
        check_choice(f"the name after {module_name}:", attribute, _defined_in(module))
    return getattr(module, attribute)


class OptionError(TypeError):
    """An option that does not exist; the text is a sentence that lacks only its beginning."""


def option_names(make: Callable[..., Any], *others: str) -> list[str]:
    """The options of a function or class: its arguments by name, without ``others``.

    Those that a class passes on to its base are among them.

    >>> option_names(import_object("lodo.lab.tasks.rosenbrock:Rosenbrock"), "seed")
    ['jitter']
    """
    found = inspect.signature(make).parameters
    names = [name for name, each in found.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    if len(names) < len(found) and isinstance(make, type):
        names += option_names(make.__mro__[1], *names)
    return [name for name in names if name not in (*others, _DIGEST)]


def check_options(given: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise an error for the first option that is not allowed.

    >>> check_options(["lrr"], ["lr", "betas"])
    Traceback (most recent call last):
    ...
    lodo.lab.plugins.OptionError: has no option 'lrr'; did you mean 'lr'? Its options: lr, betas
    """
    for name in given:
        if name not in allowed and name != _DIGEST:
            options = ", ".join(allowed) or "none"
            raise OptionError(f"has no option {name!r}{hint(name, allowed) or '.'} Its options: {options}")


def words_of(options: Mapping[str, Any]) -> str:
    """Options as an error names them, without what the laboratory has added.

    >>> words_of({"n": 3, "digest": "b2d8f5bf3917"})
    "{'n': 3}"
    """
    return str({name: value for name, value in options.items() if name != _DIGEST})


def source_digests(*names: str) -> dict[str, str]:
    """The modules of those names that are plug-ins, each with a digest of its file.

    >>> source_digests("bowl", "adam")
    {}
    """
    modules = [name.partition(":")[0] for name in names if is_plugin(name)]
    return {module: _source_digest(module) for module in modules}


def require_sources(digests: Mapping[str, str]) -> None:
    """Make sure that this process has the very modules that a run was planned with.

    A worker may have imported an older version of a file; it then imports the file again.
    """
    for module, digest in digests.items():
        if _source_digest(module) != digest:
            _forget(module)
        if _source_digest(module) != digest:
            raise ValueError(
                f"{module} must be the module that the run was planned with, got another version of it in "
                f"{_import_module(module).__file__!r}"
            )


def search_in(folder: str) -> None:
    """Let modules be imported from a folder, if they are found nowhere else."""
    if folder not in sys.path:
        sys.path.append(folder)


def _import_module(name: str) -> ModuleType:
    folder = os.getcwd()
    search_in(folder)
    importlib.invalidate_caches()  # the file may be younger than Python's list of the folder
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever the module raises
        raise ValueError(
            f"{name} must be a module that can be imported, such as a file {name.partition('.')[0]}.py in {folder}, "
            f"got {type(error).__name__}: {error}"
        ) from error


def _source_digest(name: str) -> str:
    if name not in _digests:
        file = _import_module(name).__file__
        if file is None:
            raise ValueError(f"a plug-in must be in a file, got the module {name!r}, which has none")
        _digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return _digests[name]


def _forget(module: str) -> None:
    sys.modules.pop(module, None)
    _digests.pop(module, None)


def _defined_in(module: ModuleType) -> list[str]:
    """The classes and functions that a module defines itself."""
    return [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
