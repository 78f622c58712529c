"""Formulas on the site: the LaTeX in a code fence called ``math`` is converted to MathML, which browsers render."""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def fence(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    """Return the HTML of a displayed formula.

    >>> fence("x^2", "math", "math", {}, None)[:37]
    '<div class="math" tabindex="0"><math '
    """
    return f'<div class="{css_class}" tabindex="0">{convert(source, display="block")}</div>'


def on_config(config: Any) -> Any:
    """Register the fence with the Markdown extension of the site."""
    fences = [{"name": "math", "class": "math", "format": fence}]
    config["mdx_configs"].setdefault("pymdownx.superfences", {})["custom_fences"] = fences
    return config
