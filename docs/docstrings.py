"""Translate docstrings into what the site's Markdown renders: doctests become code, formulas become MathML.

The parser of docstrings recognises doctests only under the heading ``Examples:``, so this extension adds that heading.
Docstrings spell formulas as Sphinx does, which editors and notebooks show well; `docs/hooks.py` renders the result.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe


def with_examples(text: str) -> str:
    """Return the docstring with all its doctests under the heading ``Examples:``.

    >>> with_examples("Square.\\n\\n>>> 2**2\\n4\\n\\nThat is all.").splitlines()
    ['Square.', '', 'Examples:', '    >>> 2**2', '    4', '', 'That is all.']
    """
    lines, inside = [], False
    for line in text.replace("\nExample:\n", "\nExamples:\n").split("\n"):
        if line.startswith(">>>") and not inside:
            lines.append("Examples:")
            inside = True
        inside = inside and bool(line.strip())
        lines.append(f"    {line}" if inside else line)
    return "\n".join(lines)


def with_formulas(text: str) -> str:
    r"""Return the docstring with its formulas in the spelling of the site's Markdown.

    >>> print(with_formulas("Of :math:`x`:\n\n.. math::\n    y &= x \\\\\n    z &= y\n\nEnd."))
    Of `:::math x`:
    <BLANKLINE>
    ```math
    \begin{split}
    y &= x \\
    z &= y
    \end{split}
    ```
    <BLANKLINE>
    End.
    """
    text = re.sub(r"^\.\. math::\n+((?:[ ]+.*(?:\n|\Z))+)", _fence, text, flags=re.MULTILINE)
    return re.sub(r":math:`([^`]+)`", r"`:::math \1`", text)


def _fence(formula: re.Match[str]) -> str:
    """The code fence of a displayed formula, which is aligned if it has places to align."""
    body = textwrap.dedent(formula[1]).strip()
    if "&" in body:
        body = f"\\begin{{split}}\n{body}\n\\end{{split}}"
    return f"```math\n{body}\n```\n"


class Docstrings(griffe.Extension):
    """The griffe extension that applies `with_examples` and `with_formulas` to every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that griffe has loaded."""
        if obj.docstring is not None:
            obj.docstring.value = with_formulas(with_examples(obj.docstring.value))
