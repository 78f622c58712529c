"""Commands in a real pseudo-terminal: nothing that they say is lost under their progress bars."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("pty", reason="needs pseudo-terminals")
from terminal import run_in_terminal, show

CLAIMS = {
    "Short.": "Numbers.",
    "A claim that is longer than eighty columns, so that a terminal wraps it onto a second line.": "n = 8, 16, 32",
    "A claim of seventy-three letters, so that the word after it comes second": "0.1 " * 60,
    "A claim that is longer than one hundred and twenty columns, which is what a wide terminal has, and therefore "
    "needs two lines even there.": "a" * 200,
}
# The command as it is, but for a part of the theory that takes no time.
THEORY = f"""
import lodo.lab.theory.parts
from lodo.lab.cli import app
from lodo.lab.theory.base import Claim, Finding

def part(name):
    claims = tuple(Claim(text, True, evidence, "Limits.") for text, evidence in {CLAIMS!r}.items())
    return lambda quick, seed: Finding(name, "A part", claims)

lodo.lab.theory.parts.part = part
app(["theory", "all", "--quick"])
"""


def squeezed(lines):
    """A text without white space, which does not depend on where lines were wrapped."""
    return re.sub(r"\s", "", "".join(lines))


@pytest.mark.parametrize("columns", [80, 120])
def test_theory_keeps_its_claims(columns, tmp_path):
    lines = run_in_terminal([sys.executable, "-c", THEORY], columns, cwd=tmp_path)
    text = squeezed(lines)
    for claim, evidence in CLAIMS.items():
        assert text.count(squeezed(f"* {claim} holds {evidence} Limits.")) == 5, "\n".join(lines)
    assert sum("computing" in line for line in lines) == 1, "one bar remains"


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_theory_as_it_is(columns, tmp_path):
    lines = run_in_terminal([sys.executable, "-m", "lodo", "theory", "dynamics", "--quick"], columns, cwd=tmp_path)
    written = (tmp_path / "results" / "theory" / "dynamics" / "text.md").read_text()
    claims = re.findall(r"\*\*(.*?)\*\* Holds\.", written)
    assert len(claims) > 2
    for claim in claims:
        assert squeezed(f"* {claim} holds") in squeezed(lines)


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_compare_and_report_keep_their_tables(columns, tmp_path):
    words = [
        "compare",
        "rosenbrock",
        "--steps",
        "30",
        "--seeds",
        "2",
        "--workers",
        "0",
        "--optimizers",
        "adam, momentum",
    ]
    script = f"from lodo.lab.cli import app\napp({words}, standalone_mode=False)\napp(['report', 'results'])"
    lines = run_in_terminal([sys.executable, "-c", script], columns, cwd=tmp_path)
    text = squeezed(lines)
    table = Path(tmp_path, "results", "compare-rosenbrock", "table.md").read_text()
    for row in re.findall(r"^\| ((?:Adam|Momentum).*) \|$", table, flags=re.MULTILINE):
        assert squeezed(row.replace("|", "│")) in text, "\n".join(lines)
    for note in re.findall(r"^- (.*)$", table, flags=re.MULTILINE):
        assert squeezed(note) in text
    assert squeezed("page: compare.html") in text
    assert squeezed("parts are there; page: report.html") in text
    assert lines[-1].startswith("1 of ")


def test_the_terminal_of_the_tests():
    assert show("abcdef", columns=4) == ["abcd", "ef"]
    assert show("bar\r\x1b[2Kline\r\nbar\r\n", columns=9) == ["line", "bar"]
    assert show("1\r\n2\r\n3\x1b[2A\r\x1b[32mx\x1b[0m", columns=9, rows=2) == ["1", "x", "3"], (
        "the first has scrolled away"
    )
