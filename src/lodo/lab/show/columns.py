"""Tables of text for a terminal: no line is wider than it, whatever the names and however many the columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

_GAP = 2  # spaces between columns
_LEAST = 9  # characters that names have beside them even if the columns would fill the line

Cells = Sequence[str]  # a name and what stands beside it
Styled = tuple[str, str]  # a line and its style


def lay_out(
    title: str, columns: Cells, sections: Sequence[tuple[str, Sequence[Cells]]], width: int, strong: str = ""
) -> Text:
    """A table as lines: names on the left, numbers on the right.

    A name that is too long for its column stands on a line of its own, above its numbers. Columns that do not fit
    follow below, with the names again.

    Args:
        title: the heading.
        columns: the headings of the columns, that of the names first.
        sections: rows below their own headings, which may be empty.
        width: columns of characters that the terminal has.
        strong: the name whose rows are bold.

    >>> print(lay_out("Loss", ("name", "mean"), [("", [("Adam", "15.3"), ("a long name", "8.93")])], width=12))
    Loss
    name  mean
    ──────────
    Adam  15.3
    a long name
          8.93
    <BLANKLINE>
    """
    rows = [cells for _, members in sections for cells in members]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    if sum(_GAP + each for each in widths) - _GAP > width:  # headings may have several lines
        widths = [max(_longest_word(head), *map(len, column)) for head, *column in zip(columns, *rows, strict=True)]
    lines: list[Styled] = [(line, "bold") for line in textwrap.wrap(title, width)]
    for number, places in enumerate(_blocks(widths, width)):
        lines += [("", "")] if number else []
        lines += _block(columns, sections, widths, places, width, strong)
    return Text("\n").join([*(Text(line.rstrip(), style) for line, style in lines), Text()])


def _blocks(widths: Sequence[int], width: int) -> Iterator[list[int]]:
    """The columns beside the names, in groups that fit beside them."""
    room = width - min(widths[0], _LEAST)
    block: list[int] = []
    for place, each in enumerate(widths[1:], start=1):
        if block and sum(_GAP + widths[other] for other in block) + _GAP + each > room:
            yield block
            block = []
        block.append(place)
    yield block


def _block(
    columns: Cells,
    sections: Sequence[tuple[str, Sequence[Cells]]],
    widths: Sequence[int],
    places: Sequence[int],
    width: int,
    strong: str,
) -> Iterator[Styled]:
    taken = sum(_GAP + widths[place] for place in places)
    names = [columns[0], *(cells[0] for _, members in sections for cells in members)]
    for_names = max((len(name) for name in names if len(name) <= width - taken), default=0)

    def line(name: str, cells: Cells) -> str:
        return name.ljust(for_names) + "".join(" " * _GAP + cells[place].rjust(widths[place]) for place in places)

    heads = [textwrap.wrap(head, max(size, 1)) for head, size in zip(columns, [for_names, *widths[1:]], strict=True)]
    height = max(len(heads[place]) for place in (0, *places))
    for head in zip(*([""] * (height - len(each)) + each for each in heads), strict=False):
        yield line(head[0], head), ""
    yield "─" * (for_names + taken), "dim"
    for number, (section, members) in enumerate(sections):
        if number and not section:
            yield "", ""
        yield from ((each, "italic") for each in textwrap.wrap(section, width))
        for cells in members:
            style = "bold" if strong and cells[0] == strong else ""
            name = cells[0]
            if len(name) > for_names:
                yield from ((each, style) for each in textwrap.wrap(name, width, break_on_hyphens=False))
                name = ""
            yield line(name, cells), style


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)
