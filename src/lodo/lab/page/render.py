"""Writes one self-contained HTML page of tables, figures and commands. It needs no network and no other file."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from lodo import __version__
from lodo.lab.files import write_atomically
from lodo.lab.show.tables import Row, Table, tables_of


@dataclass(frozen=True)
class Picture:
    """A PNG file that is shown as it is."""

    title: str
    path: Path

    @property
    def address(self) -> str:
        """The file as a data address."""
        return f"data:image/png;base64,{base64.b64encode(self.path.read_bytes()).decode()}"


@dataclass(frozen=True)
class Gap:
    """Something that is missing, and the command that makes it."""

    text: str
    command: str


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        name: its address on the page.
        title: its heading.
        shows: what it shows, in a sentence.
        about: how much was run.
        says: the result, in a sentence.
        rows: the rows of its tables.
        words: further text, from Markdown.
        figures: interactive figures, as `lodo.lab.show.interactive.as_json` makes them.
        pictures: images that are shown as they are.
        notes: remarks below the tables.
        gaps: whatever is missing.
        command: the command that repeats it.
        made_with: the versions and machines of its runs.
    """

    name: str
    title: str
    shows: str = ""
    about: str = ""
    says: str = ""
    rows: Sequence[Row] = ()
    words: Markup = field(default_factory=Markup)
    figures: Sequence[Mapping[str, Any]] = ()
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()
    gaps: Sequence[Gap] = ()
    command: str = ""
    made_with: Sequence[Mapping[str, str]] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show yet."""
        return not (self.rows or self.figures or self.pictures or self.words)

    @property
    def tables(self) -> list[Table]:
        """Its rows."""
        return tables_of(self.rows)


def html_of(text: str, folder: Path) -> Markup:
    """Markdown as HTML, with the pictures of its folder inside; HTML within it is shown as text.

    >>> html_of("**Holds.** <b>", Path())
    Markup('<p><strong>Holds.</strong> &lt;b&gt;</p>\\n')
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    for inner in (child for token in tokens for child in token.children or ()):
        if inner.type == "image":
            path = folder / Path(str(inner.attrs["src"])).name
            inner.attrs["src"] = Picture("", path).address if path.is_file() else ""
    made = parser.renderer.render(tokens, parser.options, {})  # the parser has escaped what it was given
    made = made.replace("<table>", '<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>')
    return Markup(made.replace("</table>", "</table></div>"))


def write_page(path: Path, title: str, sections: Sequence[Section], source: str) -> None:
    """Write the page, whole or not at all.

    Args:
        path: the file.
        title: its heading.
        sections: its parts, in order.
        source: where its data came from, in a sentence.
    """
    write_atomically(path, render_page(title, sections, source).encode())


def render_page(title: str, sections: Sequence[Section], source: str) -> str:
    """The page as text."""
    loader = PackageLoader("lodo.lab.page", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    plots = {
        f"{section.name}-{panel['name']}": panel
        for section in sections
        for figure in section.figures
        for panel in figure["panels"]
    }
    return environment.get_template("page.html").render(
        title=title,
        sections=sections,
        absent=[section for section in sections if section.empty],
        source=source,
        version=__version__,
        style=_own("page.css"),
        script=_own("page.js"),
        plots=packed(json.dumps(plots, separators=(",", ":"), allow_nan=False)),
        plotly=packed(_plotly()) if plots else "",
    )


def packed(text: str) -> str:
    """Compressed text, in characters that need no escaping.

    >>> gzip.decompress(base64.b64decode(packed("</script>"))).decode()
    '</script>'
    """
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # takes a while

    text: str = get_plotlyjs()
    return text


def _own(name: str) -> Markup:
    """A file of this package, which goes into the page as it is."""
    return Markup(resources.files("lodo.lab.page").joinpath(name).read_text(encoding="utf-8"))
