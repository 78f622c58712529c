"""Show doctests in the reference as code.

The parser of docstrings recognises doctests only under the heading ``Examples:``, so this extension adds that heading.
"""

from __future__ import annotations

from typing import Any

import griffe


def with_examples(text: str) -> str:
    """Return the docstring with all its doctests under the heading ``Examples:``.

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
    """The griffe extension that applies `with_examples` to every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that griffe has loaded."""
        if obj.docstring is not None:
            obj.docstring.value = with_examples(obj.docstring.value)
