"""Formulas of the site: a fence called ``math`` holds LaTeX and becomes MathML, which browsers draw themselves."""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def fence(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    """A formula on lines of its own.

    >>> fence("x^2", "math", "math", {}, None)[:37]
    '<div class="math" tabindex="0"><math '
    """
    return f'<div class="{css_class}" tabindex="0">{convert(source, display="block")}</div>'


def on_config(config: Any) -> Any:
    """Tell the Markdown of the site about it."""
    fences = [{"name": "math", "class": "math", "format": fence}]
    config["mdx_configs"].setdefault("pymdownx.superfences", {})["custom_fences"] = fences
    return config
