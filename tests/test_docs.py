"""The documentation is correct: its code runs, the program accepts its commands, and the site has all its pages."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config
from typer.testing import CliRunner

from browser import PATIENCE, chromium
from lodo import LODO, __version__
from lodo.lab import cli
from lodo.lab.data import using
from lodo.lab.show.wiring import draw_matrices, draw_network
from lodo.lab.tasks import find_task
from lodo.lab.theory.base import Finding

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))),
    "docs/results/README.md",
]
RUNS = [page for page in PAGES if "```python" in (ROOT / page).read_text()]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def blocks(page, kind=None):
    """The code blocks of a page as pairs of language and text, or the texts of one language."""
    tokens = MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text(encoding="utf-8"))
    found = [
        (token.info.strip() or token.type, token.content) for token in tokens if token.type in ("fence", "code_block")
    ]
    return [text for info, text in found if info == kind] if kind else found


@pytest.mark.parametrize("page", RUNS)
def test_code_runs(page, tmp_path, monkeypatch):
    """Run the blocks of a page from top to bottom, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    with using("digits"):
        for number, block in enumerate(blocks(page, "python")):
            exec(compile(block, f"{page}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    """Every block names its language, and blocks called text contain no code that would escape the checks."""
    for kind, text in blocks(page):
        assert kind in ("python", "sh", "toml", "math", "text", "bibtex"), text
        if kind == "toml":
            assert tomllib.loads(text)
        if kind == "math":
            assert "<math" in convert(text)
        if kind == "text":
            assert not re.search(r"^(import|from|def|class|lodo|make|pip) ", text, flags=re.MULTILINE), text


def commands():
    """Every line of every shell block as a test parameter, labelled with its page."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield pytest.param(words, id=f"{page}: {line.partition('#')[0].strip()}")


@pytest.fixture
def no_work(tmp_path, monkeypatch):
    """Let the commands check their arguments and plan, but replace the work itself."""
    monkeypatch.chdir(tmp_path)
    tuned = tmp_path / "results" / "tune" / "NAME" / "tuned.toml"
    tuned.parent.mkdir(parents=True)
    tuned.write_text("[bowl]\nlodo = { lr = 0.1 }\n")
    (own,) = [block for block in blocks("docs/extending.md", "python") if "class Valley(Task)" in block]
    (tmp_path / "mymodule.py").write_text(own)

    (tmp_path / "mine.toml").write_text("".join(blocks("docs/networks.md", "toml")))

    def planned(experiment, request, out, **_):
        if find_task(experiment.task).dataset is None:
            assert experiment.plan(request)

    monkeypatch.setattr("lodo.lab.pipeline.run_experiment", planned)
    monkeypatch.setattr("lodo.lab.comparison.write_comparison", lambda found, page, out, console: None)
    monkeypatch.setattr("lodo.lab.tuning.outcome.run_search", lambda search, *rest, **options: SimpleNamespace(
        run=search.start, worse=""
    ))  # fmt: skip
    monkeypatch.setattr("lodo.lab.tuning.report.write_outcome", lambda outcome, address, folder, console: folder)
    monkeypatch.setattr("lodo.lab.theory.parts.part", lambda name: lambda quick, seed: Finding(name, name, ()))
    monkeypatch.setattr("lodo.lab.run.read_weights", lambda path: ({"task": "mnist", "task_options": {}}, []))
    monkeypatch.setattr(
        "lodo.lab.experiments.paper.mnist.draw_images",
        lambda network, number, side, seed: torch.zeros(number, side, side).numpy(),
    )


@pytest.mark.parametrize("words", list(commands()))
def test_commands_are_accepted(words, no_work):
    program, *rest = words
    if program == "lodo":
        with using("digits"):
            result = CliRunner().invoke(cli.app, rest)
        assert result.exit_code == 0, result.output
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    else:
        assert [program, rest[0]] == ["pip", "install"]
        extras = re.findall(r"\[(.*?)\]", rest[-1])
        assert set(extras) <= PROJECT["optional-dependencies"].keys()


def test_every_page_is_in_the_site():
    class Loader(yaml.SafeLoader):
        pass

    nav = str(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    for page in PAGES[1:]:
        assert page.removeprefix("docs/") in nav


def test_links_of_the_readme_lead_somewhere():
    """Those of the site are checked when it is built."""
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_files_named_in_the_text_exist(page):
    paths = re.findall(r"`((?:benchmarks|docs|examples|src|tests)/[\w./-]+)`", (ROOT / page).read_text())
    assert len(paths) > 3 or page != "README.md"
    for path in paths:
        assert (ROOT / path).exists(), path


def test_the_changelog_begins_with_this_version():
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert heading.group(1) == PROJECT["version"] == __version__


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_formulas_and_doctests_of_the_site():
    hooks, docstrings = load("hooks"), load("docstrings")
    for module in (hooks, docstrings):
        result = doctest.testmod(module)
        assert result.attempted
        assert not result.failed
    config = hooks.on_config({"mdx_configs": {}})
    (fence,) = config["mdx_configs"]["pymdownx.superfences"]["custom_fences"]
    assert "<mfrac>" in fence["format"](r"\frac{1}{2}", "math", "math", {}, None)
    (inline,) = config["mdx_configs"]["pymdownx.inlinehilite"]["custom_inline"]
    assert "<mfrac>" in inline["format"](r"\frac{1}{2}", "math", "math", None)
    assert docstrings.with_formulas("Of :math:`x`:\n\n.. math::\n    x^2") == "Of `:::math x`:\n\n```math\nx^2\n```\n"
    assert docstrings.with_examples("A.\n\nExample:\n    >>> 1\n    1") == "A.\n\nExamples:\n    >>> 1\n    1"
    assert docstrings.with_examples("A.\n\n>>> 1\n1\n\nB.") == "A.\n\nExamples:\n    >>> 1\n    1\n\nB."


class Prose(HTMLParser):
    """The text of a page that is neither code nor a formula, and the text of its formulas."""

    def __init__(self, page):
        super().__init__()
        self.inside, self.text, self.formulas = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag in ("code", "pre", "script", "style", "math"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if tag in self.inside:
            self.inside.remove(tag)

    def handle_data(self, data):
        if not self.inside:
            self.text.append(data)
        elif "math" in self.inside:
            self.formulas.append(data)


# Code, bold face, roles and directives of Sphinx, directives of mkdocstrings, LaTeX, doctests, links and headings.
UNRENDERED = r"`|\*\*|:[a-z]+:|\.\. [a-z]+::|:::|\\[a-zA-Z]+|>>>|\]\(|^#+ |^ *Args:"
WITHOUT_ARGUMENTS = {
    "lodo.MemoryEstimate",
    "lodo.Plan",
    "lodo.Preconditioner",
}  # nobody makes them: two results, a base


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config("mkdocs.yml", site_dir=str(folder), strict=True)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    return folder


def test_the_site_has_no_unrendered_markup(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for path in pages:
        page = Prose(path.read_text(encoding="utf-8"))
        text = "".join(page.text)
        found = re.search(UNRENDERED, text, flags=re.MULTILINE)
        assert found is None, (path.name, text[max(0, found.start() - 80) : found.end() + 80])
        assert not re.search(r"[&\\]", "".join(page.formulas)), path.name


def test_the_reference_has_a_signature_for_everything_that_is_called(site):
    page = (site / "api.html").read_text(encoding="utf-8")
    objects = re.findall(
        r'<div class="doc doc-object doc-(?:class|function)">(.*?)class="doc doc-contents', page, re.DOTALL
    )
    unsigned = {re.search(r'id="(.*?)"', each)[1] for each in objects if "doc-signature" not in each}
    assert len(objects) > 50
    assert unsigned == WITHOUT_ARGUMENTS
    assert page.count("<math") > 3


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@contextmanager
def visited(browser, path, width=1280):
    """A page of the site, from the file system; at the end nothing was asked of a network."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    context.set_default_timeout(PATIENCE)
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url) if request.url.startswith("http") else None)
    page.goto(path.as_uri())
    yield page
    assert not asked
    context.close()


def test_the_search_works_from_the_file_system(site, browser):
    with visited(browser, site / "index.html") as page:
        page.locator("input[name=query]").first.click()
        page.keyboard.type("Rosenbrock", delay=20)
        page.locator(".md-search-result__link[href*='reproduction']").first.wait_for()


def test_the_gallery_shows_its_plots(site, browser):
    with visited(browser, site / "gallery.html") as page:
        page.locator("article iframe").scroll_into_view_if_needed()
        figure = page.frame_locator("article iframe").locator("[data-plot=rosenbrock-rosenbrock]")
        figure.locator(".main-svg").first.wait_for()
        assert set(figure.locator(".legend label").all_text_contents()) == set(load("gallery").OPTIMIZERS)
        assert page.locator("article img").count() == 5


@pytest.mark.parametrize("width", [390, 1280])
def test_tables_of_the_reproduction_fit_or_scroll(site, browser, width):
    """No page is wider than its screen; at 1280 pixels no table of the paper's needs scrolling."""
    with visited(browser, site / "reproduction.html", width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        over = "boxes => boxes.map(box => box.scrollWidth - box.clientWidth)"
        wide = page.locator(".md-typeset__scrollwrap").evaluate_all(over)
        assert len(wide) > 6
        if width == 1280:
            assert max(wide) <= 1


def test_the_gallery_is_what_its_script_makes():
    gallery = load("gallery")
    result = doctest.testmod(gallery)
    assert result.attempted
    assert not result.failed
    figures = json.loads((ROOT / "docs" / "gallery" / "figures.json").read_text())["figures"]
    ends = json.loads((ROOT / "docs" / "gallery" / "ends.json").read_text())
    for surface, figure in zip(gallery.SURFACES, figures, strict=True):
        (panel,) = figure["panels"]
        lines = {line["label"]: line for line in panel["lines"]}
        assert lines.keys() == gallery.OPTIMIZERS.keys() == ends[surface.name].keys()
        optimizer, options = gallery.OPTIMIZERS["Adam"]
        path = gallery.follow(surface, optimizer, {**options, "lr": ends[surface.name]["Adam"]["lr"]}, steps=20)
        assert path[:2, 0].tolist() == list(surface.start)
        stored = [lines["Adam"][name][:21] for name in ("x", "y", "loss")]
        torch.testing.assert_close(
            torch.tensor(stored, dtype=torch.float64), torch.from_numpy(path), rtol=1e-4, atol=1e-4
        )
        assert surface.function(*torch.tensor(surface.minimum)).item() == pytest.approx(0, abs=1e-9)
    text = (ROOT / "docs" / "gallery.md").read_text()
    for found in ends.values():
        for end in found.values():
            assert f"{end['height']:.2g} ({end['lr']:g})" in text
    assert sum(path.stat().st_size for path in (ROOT / "docs" / "gallery").iterdir()) < 2.5e6


def test_g_approaches_the_inverse_hessian_in_the_gallery():
    *_, (step, G, inverse) = load("gallery").learning(2, 10.0, frames=5, steps=2000)
    assert step == 2000
    _, first, _ = next(load("gallery").learning(2, 10.0, frames=1, steps=1))

    def off(matrix):
        return abs(matrix - inverse).max()

    assert off(G) < 0.6 * off(first)


def test_the_picture_of_the_network_is_the_network():
    opt, matrices = load("pictures").learned(steps=(0, 50))
    assert list(matrices) == ["G at the start", "after 50 steps", "the inverse Hessian"]
    figure = draw_network(opt)
    axes = figure.axes[0]
    assert len([line for line in axes.lines if len(line.get_xdata()) == 4]) == 2 * 3 * 8  # wires
    group, theta = opt._groups[0], opt._state(0)["theta"]
    network = group.ready(opt.param_groups[0])
    first = network.engine.unpack(theta)[0, 0]
    torch.testing.assert_close(torch.as_tensor(axes.images[0].get_array().data).float(), first)
    places = network.draw_permutations(group.family, group.layout)
    wire = axes.lines[0].get_ydata()
    assert (wire[0], wire[-1]) == (places[0, 0], 0)
    assert len(draw_matrices(matrices).axes) == 4
    with pytest.raises(ValueError, match="optimizer must have a mixing network of at most 64 numbers"):
        draw_network(LODO([torch.nn.Parameter(torch.zeros(100))]))
