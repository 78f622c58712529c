"""Writes a part of the theory to files and to the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from lodo.lab.files import write_atomically
from lodo.lab.show.draw import write_figures
from lodo.lab.show.interactive import write_json
from lodo.lab.theory.base import Finding


def write_finding(finding: Finding, folder: Path, settings: dict[str, Any], console: Console) -> None:
    """Write ``summary.json``, ``text.md`` and the figures, and print the claims."""
    summary = {
        "theory": finding.name,
        "settings": settings,
        "claims": [
            {"text": claim.text, "holds": bool(claim.holds), "evidence": claim.evidence, "limits": claim.limits}
            for claim in finding.claims
        ],
        "numbers": dict(finding.numbers),
    }
    write_atomically(folder / "summary.json", (json.dumps(summary, indent=2, default=float) + "\n").encode())
    write_atomically(folder / "text.md", text(finding).encode())
    files = write_figures(finding.figures, folder)
    write_json(finding.figures, folder)
    _print_claims(finding, console)
    console.print(f"figures: {', '.join(map(str, files))}", markup=False, highlight=False, soft_wrap=True)


def _print_claims(finding: Finding, console: Console) -> None:
    """Print each claim, whether it holds, and below it the evidence and the limits.

    A progress bar may be shown below. It erases a line that has not ended, so every claim is printed in one piece.
    """
    console.print(f"\n[bold]{finding.title}[/bold]")
    for claim in finding.claims:
        mark = Text("holds", "green") if claim.holds else Text("does not hold", "red")
        console.print(Text.assemble(f"* {claim.text} ", mark))
        for line in (claim.evidence, claim.limits):
            if line:
                console.print(Padding(Text(line), (0, 0, 0, 4), expand=False))


def text(finding: Finding) -> str:
    """The claims in Markdown."""
    lines = [f"# {finding.title}", ""]
    for claim in finding.claims:
        lines += [f"**{claim.text}** {'Holds.' if claim.holds else 'Does not hold.'} {claim.evidence}"]
        lines += [f"*Limits.* {claim.limits}"] if claim.limits else []
        lines += [""]
    lines += [f"![{figure.name}]({figure.name}.png)" for figure in finding.figures]
    return "\n".join(lines) + "\n"
