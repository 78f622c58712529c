"""What the site needs beyond Markdown: formulas, and the interactive plots of the gallery.

LaTeX is converted to MathML, which browsers render. A displayed formula is a code fence called ``math``; a formula
within a line is code that begins with ``:::math``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from lodo.lab.page.render import Section, write_page


def fence(source: str, language: str, css_class: str, options: Any, md: Any, **_: Any) -> str:
    """Return the HTML of a displayed formula.

    >>> fence("x^2", "math", "math", {}, None)[:37]
    '<div class="math" tabindex="0"><math '
    """
    return f'<div class="{css_class}" tabindex="0">{convert(source, display="block")}</div>'


def inline(source: str, language: str, css_class: str, md: Any) -> str:
    """Return the HTML of a formula within a line.

    >>> inline("x", "math", "math", None)
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><mi>x</mi></mrow></math>'
    """
    return convert(source)


def on_config(config: Any) -> Any:
    """Register both kinds of formulas with the Markdown extensions of the site."""
    settings = config["mdx_configs"]
    fences = [{"name": "math", "class": "math", "format": fence}]
    settings.setdefault("pymdownx.superfences", {})["custom_fences"] = fences
    formulas = [{"name": "math", "class": "math", "format": inline}]
    settings.setdefault("pymdownx.inlinehilite", {})["custom_inline"] = formulas
    return config


def on_post_build(config: Any) -> None:
    """Write the gallery's plots, one page that needs no network, from the paths that docs/gallery.py has found."""
    gallery = Path(config["docs_dir"]) / "gallery" / "figures.json"
    figures = json.loads(gallery.read_text(encoding="utf-8"))["figures"]
    sections = [Section(figure["name"], figure["name"].capitalize(), figures=[figure]) for figure in figures]
    write_page(Path(config["site_dir"]) / "gallery" / "plots.html", "Paths", sections, "From docs/gallery.py.")
