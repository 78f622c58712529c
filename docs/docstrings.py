"""Doctests of the reference, shown as code: the parser knows them under the heading ``Examples:`` alone."""

from __future__ import annotations

from typing import Any

import griffe


def with_examples(text: str) -> str:
    """A docstring whose doctests are all under that heading.

    >>> print(with_examples("Square.\\n\\n>>> 2**2\\n4\\n\\nThat is all."))
    Square.
    <BLANKLINE>
    Examples:
        >>> 2**2
        4
    <BLANKLINE>
    That is all.
    """
    lines, inside = [], False
    for line in text.replace("\nExample:\n", "\nExamples:\n").split("\n"):
        if line.startswith(">>>") and not inside:
            lines.append("Examples:")
            inside = True
        inside = inside and bool(line.strip())
        lines.append(f"    {line}" if inside else line)
    return "\n".join(lines)


class Doctests(griffe.Extension):
    """Applies it to everything that is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object."""
        if obj.docstring is not None:
            obj.docstring.value = with_examples(obj.docstring.value)
