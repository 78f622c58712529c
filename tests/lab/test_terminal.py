"""Commands in a real pseudo-terminal: nothing that they say is lost under their progress bars."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("pty", reason="needs pseudo-terminals")
from lodo.lab.experiments import CATALOG
from lodo.lab.experiments.catalog import duration
from lodo.lab.optimizers import OPTIMIZERS
from lodo.lab.settings import read_settings
from lodo.lab.tasks import TASKS
from lodo.lab.theory.parts import PARTS
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
        assert text.count(squeezed(f"* {claim} holds {evidence} Limits.")) == len(PARTS), "\n".join(lines)
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
        assert any(squeezed(row.replace("|", "")) == squeezed([line]) for line in lines), "\n".join(lines)
    for note in re.findall(r"^- (.*)$", table, flags=re.MULTILINE):
        assert squeezed(note) in text
    folder = Path("results", "compare-rosenbrock")
    files = [folder / "summary.json", folder / "table.md", *sorted((tmp_path / folder).glob("*.png"))]
    assert len(files) > 2
    for file in files:  # one a line
        assert f"wrote {folder / file.name}" in lines
    assert squeezed("page: compare.html") in text
    assert squeezed("parts found; page: report.html") in text
    assert lines[-1].startswith("1 of ")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_is_one_screen(columns, tmp_path):
    """All names and all times, with a line left for the prompt."""
    lines = run_in_terminal([sys.executable, "-m", "lodo", "run", "--list"], columns, rows=24, cwd=tmp_path)
    assert len(lines) <= 23, "\n".join(lines)
    text = " ".join(lines)
    for name in (*TASKS, *OPTIMIZERS):
        assert re.search(rf"\b{name}\b", text)
    times = read_settings("durations")
    for name, entry in CATALOG.items():
        (line,) = (line for line in lines if line.split()[0] == name)
        taken = times.get(name)
        assert line.startswith(f"{name} ")
        assert entry.brief in line
        assert line.endswith(duration(taken["full"]) if taken else " -"), line
        assert taken is None or 0 < taken["quick"] <= taken["full"]
    assert re.search(r"\d+ s +\d+ min$", lines[1]), lines[1]
    assert times["machine"] in text


@pytest.mark.parametrize("columns", [80, 120])
def test_an_error_is_wrapped_between_words(columns, tmp_path):
    lines = run_in_terminal([sys.executable, "-m", "lodo", "run", "bwol"], columns, code=2, cwd=tmp_path)
    assert lines[0].startswith("error: NAME must be one of 'bowl', 'bowl-noise'")
    assert lines[-1] == "see: python -m lodo run --help"
    assert set(re.findall(r"'[\w-]+'", " ".join(lines))) == {repr(name) for name in (*CATALOG, "bwol")}


WIDE = """
from rich.console import Console
from lodo.lab.show.columns import lay_out
names = ["LODO", "LODO (recipe='robust', lr=0.08459, meta_lr=7.946e-05, preconditioner='mixing(depth=8, width=2)')"]
columns = ["optimizer", "ours", "rank", "from the best", "paper, full size", "paper's rank", "seeds"]
values = ["0.1234 ± 0.0012", "1", "+0.01 ± 0.004", "0.1210 ± 0.0010", "12", "8"]
many = [f"option_{i}" for i in range(12)]
console = Console()
sections = [("", [(name, *values) for name in names])]
console.print(lay_out("A metric", columns, sections, console.width, strong="LODO"), soft_wrap=True)
rows = [(name, *(f"{i}.234e-05" for i in range(12))) for name in names]
console.print(lay_out("Many", ["finalist", *many], [("A", rows[:1]), ("B", rows[1:])], console.width), soft_wrap=True)
"""


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_never_wrap(columns, tmp_path):
    """Every row's numbers stand on one line, whatever the name and however many the columns."""
    lines = run_in_terminal([sys.executable, "-c", WIDE], columns, cwd=tmp_path)
    assert max(map(len, lines)) <= columns
    first, second = lines[: lines.index("Many")], lines[lines.index("Many") :]
    numbers = "0.1234 ± 0.0012 1 +0.01 ± 0.004 0.1210 ± 0.0010 12 8"
    assert sum(" ".join(line.split()).endswith(numbers) for line in first) == 2, "\n".join(lines)
    assert sum(line.startswith("LODO (recipe=") for line in first) == 1
    for i in range(12):
        head = next(number for number, line in enumerate(second) if f"option_{i}" in line.split())
        assert sum(f"{i}.234e-05" in line.split() for line in second[head:]) == 2
        (row,) = (line for line in second[head:] if line.startswith("LODO  ") and f"{i}.234e-05" in line.split())
        ends = [
            re.search(rf"{word}( |$)", line).end(0)
            for word, line in ((f"option_{i}", second[head]), (f" {i}.234e-05", row))
        ]
        assert ends[0] == ends[1], "right-aligned below its heading"


LABELS = """
from rich.console import Console
from lodo.lab.experiments.base import Cell
from lodo.lab.pipeline import _progress_bars
from lodo.lab.run import Run
long = Cell("LODO (recipe='robust', lr=0.08459, meta_lr=7.946e-05, preconditioner='mixing(depth=8, block_size=8)')")
run = Run("bowl", "lodo", 0, 10)
with _progress_bars({long: [run], Cell("Adam"): [Run("bowl", "adam", 0, 10)]}, Console()) as on_progress:
    on_progress(run, 1.0)
"""


@pytest.mark.parametrize("columns", [80, 120])
def test_progress_bars_take_a_line_each(columns, tmp_path):
    lines = run_in_terminal([sys.executable, "-c", LABELS], columns, cwd=tmp_path)
    assert len(lines) == 3, "\n".join(lines)
    assert "100%" in lines[1]
    assert "1/1 runs" in lines[1]


def test_the_terminal_of_the_tests():
    assert show("abcdef", columns=4) == ["abcd", "ef"]
    assert show("bar\r\x1b[2Kline\r\nbar\r\n", columns=9) == ["line", "bar"]
    assert show("1\r\n2\r\n3\x1b[2A\r\x1b[32mx\x1b[0m", columns=9, rows=2) == ["1", "x", "3"], (
        "the first has scrolled away"
    )
