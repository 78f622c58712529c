"""Modules import each other in one direction: no circles, and the library never imports the laboratory."""

from __future__ import annotations

import ast
from pathlib import Path

import lodo

ROOT = Path(lodo.__file__).parent


def module_name(path):
    """``src/lodo/families/__init__.py`` is ``lodo.families``."""
    parts = ("lodo", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(tree, module, is_package, modules):
    """The modules that a module imports, wherever in it: in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                parents = package[: len(package) - node.level + 1]
                origin = ".".join([*parents, *filter(None, [origin])])
            submodules = [f"{origin}.{alias.name}" for alias in node.names]
            found.update(name if name in modules else origin for name in submodules)
    return (found & set(modules)) - {module}


def graph():
    return {
        module: imported(ast.parse(path.read_text()), module, path.name == "__init__.py", SOURCES)
        for module, path in SOURCES.items()
    }


def circle(edges):
    """The modules of some circle, the first one again at the end; an empty list if there is none."""
    finished: set[str] = set()
    path: list[str] = []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        path.append(module)
        for other in sorted(edges[module]):
            found = visit(other)
            if found:
                return found
        finished.add(path.pop())
        return []

    for module in sorted(edges):
        found = visit(module)
        if found:
            return found
    return []


def in_lab(module):
    return module == "lodo.lab" or module.startswith("lodo.lab.")


def test_no_circle():
    found = circle(graph())
    assert not found, " -> ".join(found)


def test_the_library_never_imports_the_laboratory():
    wrong = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in sorted(others)
        if in_lab(other) and not in_lab(module) and module != "lodo.__main__"
    ]
    assert not wrong, "; ".join(wrong)


def test_the_walk_sees_every_kind_of_import():
    source = """
import os, lodo.a
from lodo import b, LODO
from . import c
from .d import thing
if TYPE_CHECKING:
    from lodo.e import Thing
def late():
    from lodo.f import g
    import lodo.h as h
"""
    modules = ["lodo", *(f"lodo.{letter}" for letter in "abcdefh")]
    found = imported(ast.parse(source), "lodo.x", False, modules)
    assert found == set(modules)
    assert imported(ast.parse("from ..lodo import LODO"), "lodo.x.y", False, ["lodo.lodo"]) == {"lodo.lodo"}
    assert imported(ast.parse("from .y import z"), "lodo.x", True, ["lodo.x.y"]) == {"lodo.x.y"}


def test_a_circle_is_found_and_shown():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_the_graph_is_that_of_this_package():
    edges = graph()
    assert "lodo.algorithm" in edges["lodo.optimizer"]
    assert "lodo.lab.cli" in edges["lodo.__main__"]
    assert any(map(in_lab, edges))
