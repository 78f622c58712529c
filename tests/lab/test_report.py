"""The page: what is read from a folder, what is said of what is missing, and the page in a real browser."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shlex
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plotly.graph_objects as go
import pytest
from rich.console import Console
from typer.testing import CliRunner

from browser import PATIENCE, chromium, names, opened, plot, traces
from lodo.lab import cli, experiments
from lodo.lab.data import using
from lodo.lab.experiments.base import Cell
from lodo.lab.experiments.catalog import duration
from lodo.lab.optimizers import OPTIMIZERS, Choice
from lodo.lab.page.commands import run_command, tune_command
from lodo.lab.page.render import Section, html_of, render_page
from lodo.lab.page.report import section_readers
from lodo.lab.page.results import StoredResults, read_request, read_results
from lodo.lab.page.sections import experiment_section
from lodo.lab.pipeline import run_experiment
from lodo.lab.run import Curve, Run
from lodo.lab.settings import read_settings
from lodo.lab.show import curves, styles
from lodo.lab.show.draw import draw
from lodo.lab.show.interactive import as_json
from lodo.lab.show.plots import Axis, Contours, Figure, HeatMap, Line, Plot, Shade
from lodo.lab.tuning.search import plan_search

ROSENBROCK, BOWL = experiments.load("rosenbrock"), experiments.load("bowl")


def invoke(*args, code=0):
    result = CliRunner().invoke(cli.app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def made(run, losses, *, twice=False, diverged=False, **tracked):
    """A curve as if it had been run."""
    steps = np.arange(1, len(losses) + 1)
    columns = {
        "step": steps,
        "evaluations": steps * (2 if twice else 1),
        "seconds": 0.001 * steps,
        "loss": np.asarray(losses, float),
        "repeat_loss": np.full(len(losses), np.nan),
        **tracked,
    }
    return Curve(run, diverged, columns, {"torch": "2.0", "machine": "Linux"})


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """A folder with two small experiments, a piece of theory and a search."""
    folder = tmp_path_factory.mktemp("results")
    bowl = BOWL.request(evaluations=600, seeds=2, choices=BOWL.parse("adam, lodo, olbfgs, newton"))
    valley = ROSENBROCK.request(seeds=2, choices=ROSENBROCK.parse("adam, lodo"))
    for experiment, request in ((BOWL, bowl), (ROSENBROCK, valley)):
        run_experiment(experiment, request, folder, workers=0, console=Console(quiet=True))
    theory = folder / "theory" / "saddle"
    theory.mkdir(parents=True)
    (theory / "summary.json").write_text(json.dumps({"theory": "saddle", "settings": {"quick": True, "seed": 3}}))
    (theory / "text.md").write_text("# Saddle points repel\n\n**It holds.** <i>\n\n![saddle](saddle.png)\n")
    shutil.copy(folder / "bowl" / "bowl.png", theory / "saddle.png")
    tune = folder / "tune" / "bowl-adam-paper-0"
    tune.mkdir(parents=True)
    search = {"task": "bowl", "choice": {"optimizer": "adam", "options": {"beta1": 0.5}}, "sampler": "tpe", "seed": 2}
    (tune / "summary.json").write_text(json.dumps({"search": search}))
    (tune / "table.md").write_text("# Tuning of Adam\n\n| a | b |\n|---|---|\n| lr | 1 |\n")
    return folder


@pytest.fixture(scope="session")
def page(results, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert "4 of 21 parts found" in invoke("report", results, "-o", path)
    return path


def data_of(text, name="plots"):
    packed = re.search(rf'id="{name}">([^<]*)<', text).group(1)
    return gzip.decompress(base64.b64decode(packed)).decode()


def test_the_page_has_tables_plots_commands_and_versions(page, results):
    text = page.read_text()
    for row in json.loads((results / "bowl" / "summary.json").read_text())["rows"]:
        assert row["optimizer"] in text
    assert "15.28 ± 0.07" in text  # the paper's
    drawn = json.loads(data_of(text))
    assert drawn.keys() == {"bowl-curves", "bowl-sigma", "rosenbrock-curves", "rosenbrock-paths"}
    assert [line["label"] for line in drawn["bowl-sigma"]["lines"]] == ["LODO", "LODO, exact"]
    assert "lodo run rosenbrock --seeds 2 --optimizers &#39;adam, lodo&#39;" not in text  # quoted for a shell, escaped
    assert "lodo run rosenbrock --quick --optimizers" in text
    assert "lodo theory saddle --quick --seed 3" in text
    assert "adam(beta1=0.5)" in text
    assert "pytorch_optimizer" in text  # among the versions
    assert "<i>" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # the page's own script may have it
    assert text.count("data:image/png;base64") == 1  # the picture of the theory
    assert "http" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_what_is_missing_is_one_short_list(page, results):
    text = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert re.findall(r'<section id="([\w-]+)"', text) == [
        "bowl", "rosenbrock", "theory-saddle", "tune-bowl-adam-paper-0", "not-run-yet"
    ]  # fmt: skip
    assert ">Not run yet (17)</a>" in text
    listed = text[text.index('<section id="not-run-yet"') :]
    for name in experiments.CATALOG.keys() - {"bowl", "rosenbrock"}:
        command = " ".join(experiments.load(name).command)
        taken = read_settings("durations").get(name)
        times = f" ({duration(taken['quick'])}, without --quick {duration(taken['full'])})" if taken else ""
        assert f"<code>{command} --quick --out {results}</code>{times}" in listed
    assert f"<code>lodo theory dynamics --out {results}</code>" in listed
    assert text.count("not-run-yet") == 4
    assert "The figure of its trials is missing" in text


def test_curves_that_are_gone_leave_the_table(results, tmp_path):
    shutil.copytree(results / "bowl", tmp_path / "bowl")
    found = read_results(BOWL, tmp_path)
    shown = experiment_section(found, tmp_path)
    assert [row.optimizer for row in shown.rows][:4] == ["Adam", "LODO", "O-LBFGS", "Newton"]
    assert not shown.figures
    assert "curves are not in this folder" in shown.gaps[0].text
    assert shown.made_with[0]["torch"]


def test_runs_without_a_summary_are_found_by_what_they_are(results, tmp_path):
    shutil.copytree(results / "runs", tmp_path / "runs")
    found = read_results(ROSENBROCK, tmp_path)
    assert found.request == ROSENBROCK.request()  # eight seeds of six optimizers; two seeds of two are there
    assert {cell.label: len(curves) for cell, curves in found.results.items()} == {"Adam": 2, "LODO": 2}
    assert {row.seeds for row in found.rows} == {2}
    (gap,) = experiment_section(found, tmp_path).gaps
    assert gap.text.startswith("44 of 48 runs are missing (adam, rmsprop, momentum, yogi, lodo)")


def test_a_seed_after_a_gap_does_not_count(results, tmp_path):
    shutil.copytree(results, tmp_path / "r")
    request = read_request(json.loads((results / "rosenbrock" / "summary.json").read_text())["settings"])
    first = ROSENBROCK.plan(request)[Cell("Adam")][0]
    first.path(tmp_path / "r" / "runs").unlink()
    found = read_results(ROSENBROCK, tmp_path / "r")
    assert [cell.label for cell in found.results] == ["LODO"]
    assert [run.name for run in found.missing] == [first.name]


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"settings": {"choices": [{"optimiser": "lodo"}]}}', "\x00\xff"])
def test_a_damaged_summary_is_as_good_as_none(tmp_path, text):
    folder = tmp_path / "bowl"
    folder.mkdir()
    (folder / "summary.json").write_bytes(text.encode("latin-1"))
    assert read_results(BOWL, tmp_path) == StoredResults(BOWL)


def test_rows_of_another_version_are_left_out(results, tmp_path, caplog):
    shutil.copytree(results / "bowl", tmp_path / "bowl")
    summary = json.loads((tmp_path / "bowl" / "summary.json").read_text())
    summary["rows"][0]["median"] = 1.0
    (tmp_path / "bowl" / "summary.json").write_text(json.dumps(summary))
    assert not read_results(BOWL, tmp_path).rows
    assert "another version" in caplog.text


def test_experiments_with_data_are_found_without_the_data(tmp_path, monkeypatch):
    experiment = experiments.load("mlp")
    request = experiment.request(evaluations=10, seeds=1, choices=experiment.parse("adam"))
    with using("digits"):
        run_experiment(experiment, request, tmp_path, workers=0, console=Console(quiet=True))
    monkeypatch.setenv("LODO_DATA", str(tmp_path / "nowhere"))
    found = read_results(experiment, tmp_path)
    shown = experiment_section(found, tmp_path)
    assert [cell.label for cell in found.results] == ["Adam"]
    assert shown.command.endswith(f"--data digits --out {tmp_path}")
    assert [figure["name"] for figure in shown.figures] == ["mlp", "mlp-accuracy"]
    assert not shown.gaps


def test_whole_results_are_not_replaced_by_others_with_other_data(tmp_path, monkeypatch):
    """A task may have been run on several data sets; what was run for the experiment is shown."""
    experiment = experiments.load("mlp")
    request = experiment.request(evaluations=10, seeds=1, choices=experiment.parse("adam"))
    with using("digits"):
        run_experiment(experiment, request, tmp_path, workers=0, console=Console(quiet=True))
    stored = experiment.stored_requests

    def with_others(self, *given):
        yield from stored(*given)
        yield replace(request, task_options={"digest": "other"})  # of which nothing is there

    monkeypatch.setattr(type(experiment), "stored_requests", with_others)
    found = read_results(experiment, tmp_path)
    assert [cell.label for cell in found.results] == ["Adam"]
    assert not found.missing


def test_a_picture_that_is_missing_is_named(tmp_path):
    experiment = experiments.load("mnist")
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "mnist-inputs.png").write_bytes(b"")
    stored = StoredResults(experiment, experiment.request())
    shown = experiment_section(stored, tmp_path)
    assert [picture.path.name for picture in shown.pictures] == ["mnist-inputs.png"]
    assert [gap.text for gap in shown.gaps if "is missing" in gap.text] == [
        "The picture mnist-samples.png is missing. This command makes it:"
    ]


REQUESTS = {
    "bowl": [{}, {"quick": True}, {"evaluations": 500, "seeds": 3}, {"seconds": 20.0}, {"task_options": {"n": 20}}],
    "bowl-rivals": [
        {"choices": experiments.load("bowl-rivals").parse("psgd_lra_10, psgd_lra_10(rank=5), adam(lr=0.1)")}
    ],
    "rosenbrock": [{"quick": True}, {"choices": ROSENBROCK.parse("torch.AdamW(lr=0.1, betas=(0.9, 0.99))")}],
    "mlp": [{"quick": True, "task_options": {"hidden": (8, 8)}}],
    "mnist": [{"quick": True}, {"quick": True, "task_options": {"batch": 8}}],
    "cifar10": [{"quick": True}, {"task_options": {"model": "resnet8", "batch": 64}}],
}


@pytest.mark.parametrize(("name", "asked"), [(name, asked) for name, many in REQUESTS.items() for asked in many])
def test_the_command_asks_for_the_same(name, asked, monkeypatch):
    """Typed into a shell, it leads to the request that it was made from, also after a way through JSON."""
    experiment, heard = experiments.load(name), []
    request = experiment.request(**asked)
    monkeypatch.setattr(
        "lodo.lab.pipeline.run_experiment", lambda experiment, request, out, **options: heard.append((request, out))
    )
    plain = json.loads(json.dumps({
        **vars(request),
        "choices": [vars(choice) for choice in request.choices],
        "task_options": dict(request.task_options),
    }))  # fmt: skip
    words = shlex.split(run_command(experiment, read_request(plain), Path("a b"), {}))
    assert words[0] == "lodo"
    invoke(*words[1:])
    ((again, out),) = heard
    assert out == Path("a b")
    assert experiment.name not in ("bowl", "rosenbrock") or experiment.plan(again) == experiment.plan(request)
    assert json.dumps(vars(again), default=vars, sort_keys=True) == json.dumps(
        vars(request), default=vars, sort_keys=True
    )


def test_the_command_names_the_file_of_hyperparameters(tmp_path, monkeypatch):
    file = tmp_path / "tuned.toml"
    file.write_text("[bowl]\nadam = { lr = 0.5 }\n")
    request = BOWL.request(hyperparameters=file)
    assert run_command(BOWL, request, Path("results"), {}) == f"lodo run bowl --hyperparameters {file}"


@pytest.mark.parametrize(
    ("task", "optimizer", "asked"),
    [
        ("bowl", "lodo", {}),
        ("bowl", "lodo(beta=0.5)", {"schedule": "quick", "seed": 3}),
        ("bowl", "adam", {"sampler": "tpe", "trials": 7, "task_options": {"n": 20}}),
        ("bowl", "torch.AdamW", {"space": "rate(lr=0.1, weight_decay=(0.0001, 1e-08, 0.1)), decay(beta=0.9)"}),
        ("mlp", "adam", {"schedule": "quick"}),
    ],
)
def test_the_command_of_a_search_asks_for_the_same(task, optimizer, asked, monkeypatch):
    heard = []

    def search_nothing(search, *_, **options):
        heard.append(search)
        return SimpleNamespace(worse="")

    monkeypatch.setattr("lodo.lab.tuning.outcome.run_search", search_nothing)
    monkeypatch.setattr("lodo.lab.tuning.report.write_outcome", lambda *_: Path())
    with using("digits"):
        search = plan_search(task, optimizer, **asked)
    words = shlex.split(tune_command(json.loads(json.dumps(search.settings)), Path("a b")))
    invoke(*words[1:])
    assert heard == [search]


def test_the_command_of_a_search_that_is_not_known():
    assert tune_command(None, Path("out")) == "lodo tune TASK --optimizer NAME --out out"
    assert tune_command(None, Path("out"), 0) == "lodo tune TASK --optimizer NAME --confirm 0 --out out"


def test_the_folder_of_curves_may_be_named_itself(results, tmp_path):
    page = tmp_path / "page.html"
    assert "4 of 21 parts found" in invoke("report", results / "runs", "-o", page)


def test_report_names_a_folder_that_is_not_there(tmp_path):
    said = invoke("report", tmp_path / "nothing", code=1)
    assert "RUNS must be a folder of results, got" in said


def full_size(experiment):
    """The experiment at the paper's size, as if it had been run: curves of random numbers."""
    request = replace(experiment.request(), seeds=2)
    rng = np.random.default_rng(0)
    results = {}
    for cell, runs in experiment.plan(request).items():
        noise = 8 + rng.random(runs[0].evaluations)
        tracked = (
            {"x": noise, "y": noise} if experiment is ROSENBROCK else {"sigma": np.where(noise > 8.999, 1, np.nan)}
        )
        results[cell] = [made(run, noise + i, twice="lbfgs" in run.optimizer, **tracked) for i, run in enumerate(runs)]
    return experiment_section(StoredResults(experiment, request, results, experiment.rows(request, results)), Path())


def test_the_full_bowl_set_is_under_6_megabytes():
    names = [name for name in experiments.CATALOG if name.startswith("bowl")]
    assert len(names) == 5
    shown = [full_size(experiments.load(name)) for name in [*names, "rosenbrock"]]
    assert sum(len(figure["panels"]) for each in shown for figure in each.figures) > 15
    text = render_page("full", shown, "")
    assert len(text.encode()) < 6e6
    assert len(text.encode()) < 3.5e6  # what pictures and theory may add is left
    lines = [line for plot in json.loads(data_of(text)).values() for line in plot["lines"]]
    assert len(lines) > 100
    assert max(len(line["y"]) for line in lines) <= max(201, curves.POINTS + 1)


def test_every_line_of_every_plot_is_what_plotly_takes(results):
    """Plotly's own schema knows the names of dashes and the form of styles."""
    for shown in (experiment_section(read_results(experiment, results), results) for experiment in (BOWL, ROSENBROCK)):
        for panel in (panel for figure in shown.figures for panel in figure["panels"]):
            for line in panel["lines"]:
                for look in ("light", "dark"):
                    go.Scatter(line={"color": line[look], "dash": line["dash"]})


def lines_of(groups):
    """The lines of learning curves, as the page has them."""
    plot = curves.learning_curves("a", "b", groups, y=Axis("loss"))
    return as_json(Figure("f", [plot]))["panels"][0]["lines"]


def test_thinning_keeps_means_and_both_ends():
    run = Run("bowl", "adam", 0, 1000)
    values = curves.thinned([made(run, np.arange(1.0, 1001.0))], points=20)
    edges = curves.part_edges(1000, 20)
    sizes = np.diff(edges)
    assert edges[0] == 0
    assert edges[-1] == 1000
    assert (values["value"][0] * sizes).sum() == pytest.approx(np.arange(1, 1001).sum())
    np.testing.assert_allclose(values["step"][0], values["value"][0])
    assert values["step"][0][0] == 1


def test_bands_are_one_standard_deviation_and_stay_above_zero():
    run = Run("bowl", "adam", 0, 3)
    both = [made(run, [1.0, 10.0, 0.01]), made(run, [3.0, 12.0, 5.0])]
    (line,) = lines_of({"Adam": both})
    assert line["y"] == [2, 11, 2.505]
    assert line["high"] == pytest.approx([2 + 2**0.5, 11 + 2**0.5, 2.505 + 4.99 / 2**0.5], rel=1e-4)
    assert line["low"] == pytest.approx([2 - 2**0.5, 11 - 2**0.5, 0.01], rel=1e-4)


def test_diverged_runs_are_counted_and_not_drawn():
    run = Run("bowl", "adam", 0, 3)
    groups = {
        "Adam": [made(run, [1.0, 1.0]), made(run, [9.0], diverged=True)],
        "BFGS": [made(run, [1e30], diverged=True)],
    }
    adam, bfgs = lines_of(groups)
    assert (adam["y"], adam["note"]) == ([1, 1], "1 of 2 diverged")
    assert (bfgs["y"], bfgs["note"]) == ([], "1 of 1 diverged")


def test_by_evaluation_an_optimizer_that_evaluates_twice_is_as_long_as_others():
    run = Run("bowl", "olbfgs", 0, 8)
    (line,) = lines_of({"O-LBFGS": [made(run, [1.0] * 4, twice=True)]})
    assert line["x"]["step"] == [1, 2, 3, 4]
    assert line["x"]["evaluations"] == [2, 4, 6, 8]


def test_colours_stand_out_from_both_backgrounds():
    every = styles.styles([known.label for known in OPTIMIZERS.values()] + [f"other {i}" for i in range(6)])
    plot = Plot("a", "", Axis(), Axis(), [Line(label, np.ones(1), np.ones(1)) for label in every])
    for look in as_json(Figure("f", [plot]))["panels"][0]["lines"]:
        label = look["label"]
        assert styles.contrast(look["light"], styles.LIGHT) >= styles.CONTRAST, label
        assert styles.contrast(look["dark"], styles.DARK) >= styles.CONTRAST, label


def test_markdown_shows_no_html_and_no_picture_from_elsewhere(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    inner = tmp_path / "inner"
    inner.mkdir()
    found = html_of("<script>alert(1)</script>\n\n![x](../secret.png)", inner)
    assert "<script>" not in found
    assert 'src=""' in found


def test_what_runs_are_called_cannot_break_the_page():
    run = Run("bowl", "adam", 0, 3)
    bad = "</script><script>alert(1)</script>"
    plot = curves.learning_curves("a", bad, {bad: [made(run, [1.0, 2.0])]}, y=Axis(bad))
    text = render_page("t", [Section("s", bad, figures=[as_json(Figure("f", [plot]))], notes=[bad])], "")
    assert "alert(1)</script>" not in text.replace("&lt;/script&gt;", "")
    assert json.loads(data_of(text))["s-a"]["lines"][0]["label"] == bad


def test_parts_are_in_the_order_of_the_paper(results):
    names = [name for name, _ in section_readers(results)]
    assert names[: len(experiments.CATALOG)] == list(experiments.CATALOG)
    assert names[-1] == "bowl-adam-paper-0"
    assert Choice("adam")  # by name, as summaries have it


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def one_page(browser, page):
    with opened(browser, page) as shown:
        yield shown


@pytest.fixture
def shown(one_page):
    """The page, the same for all tests: each leaves it as it was."""
    yield one_page
    assert not one_page.trouble


def test_every_plot_is_drawn_without_an_error(shown):
    every = shown.locator("[data-plot]").evaluate_all("figures => figures.map(figure => figure.dataset.plot)")
    assert len(every) == 4
    for name in every:
        assert traces(plot(shown, name))
    assert shown.locator(".words img").evaluate("image => image.naturalWidth") > 100


def test_optimizers_can_be_hidden_and_shown(shown):
    figure = plot(shown, "bowl-curves")
    assert names(figure) == ["Adam", "LODO", "O-LBFGS"]  # Newton's is a level
    figure.get_by_label("Adam").uncheck()
    assert names(figure) == ["LODO", "O-LBFGS"]
    figure.get_by_role("button", name="none").click()
    assert names(figure) == []
    figure.get_by_role("button", name="all").click()
    assert names(figure) == ["Adam", "LODO", "O-LBFGS"]
    bands = len(traces(figure))
    figure.get_by_label("spread").uncheck()
    assert len(traces(figure)) == 3 < bands
    figure.get_by_label("spread").check()


def test_axes_can_be_chosen(shown):
    figure = plot(shown, "bowl-curves")
    axes = "canvas => [canvas.layout.xaxis.type, canvas.layout.xaxis.title.text, canvas.layout.yaxis.type]"
    canvas = figure.locator(".canvas")
    assert canvas.evaluate(axes) == ["linear", "step: an evaluation of the loss and its gradient", "log"]

    def ends():
        return {trace["name"]: trace["x"][-1] for trace in traces(figure) if trace["name"]}

    assert 590 < ends()["O-LBFGS"] < 601
    figure.get_by_label("update", exact=True).check()
    assert ends()["O-LBFGS"] < 301 < 590 < ends()["Adam"]
    figure.get_by_label("second", exact=True).check()
    assert 0 < ends()["Adam"] < 100
    figure.get_by_label("log x").check()
    figure.get_by_label("log y").uncheck()
    assert canvas.evaluate(axes) == ["log", "seconds of training", "linear"]
    low, high = canvas.evaluate("canvas => canvas._fullLayout.yaxis.range")
    assert low == pytest.approx(0.85 * 7.412, rel=1e-3)
    figure.get_by_label("close up").uncheck()
    assert canvas.evaluate("canvas => canvas._fullLayout.yaxis.range[1]") != pytest.approx(high)
    for label, on in (("step", True), ("log x", False), ("log y", True), ("close up", True)):
        figure.get_by_label(label, exact=True).set_checked(on)


def test_hovering_tells_values(shown):
    figure = plot(shown, "bowl-curves")
    box = figure.locator(".canvas").bounding_box()
    shown.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    told = figure.locator(".hoverlayer")
    told.get_by_text("LODO").first.wait_for()
    assert re.search(r"LODO : \d+\.\d+ ± \d", told.text_content())


def test_everything_works_from_the_keyboard(shown):
    assert shown.evaluate("document.querySelector('a, button, input').textContent") == "Skip to the content"
    figure = plot(shown, "bowl-curves")
    figure.get_by_label("update", exact=True).press("Space")
    figure.get_by_label("Adam").focus()
    shown.keyboard.press("Space")
    assert names(figure) == ["LODO", "O-LBFGS"]
    figure.locator(".canvas").focus()
    status = figure.get_by_role("status")
    shown.keyboard.press("ArrowRight")
    assert re.fullmatch(r"at 1: LODO [\d.]+, O-LBFGS [\d.]+", status.text_content())
    shown.keyboard.press("End")  # where O-LBFGS, with two evaluations an update, has ended
    told = status.text_content()
    assert re.fullmatch(r"at 59\d.*: LODO [\d.]+", told)
    shown.keyboard.press("ArrowLeft")
    assert status.text_content() != told
    figure.get_by_label("Adam").press("Space")
    assert names(figure) == ["Adam", "LODO", "O-LBFGS"]
    figure.get_by_label("step", exact=True).press("Space")
    reachable = "() => [...document.querySelectorAll('.scroll')].every(region => region.tabIndex === 0)"
    assert shown.evaluate(reachable)


def test_trajectories_follow_the_slider(shown):
    figure = plot(shown, "rosenbrock-paths")

    def lengths():
        return {len(trace["x"]) for trace in traces(figure) if trace["name"] in ("Adam", "LODO")}

    assert lengths() == {101}
    slider = figure.get_by_label("Steps shown")
    slider.fill("5")
    assert lengths() == {6}
    slider.press("ArrowRight")
    assert lengths() == {7}
    figure.get_by_role("button", name="play").click()
    shown.wait_for_function("document.querySelector('[data-plot=rosenbrock-paths] output').textContent > 8")
    figure.get_by_role("button", name="stop").click()
    assert min(lengths()) > 9
    slider.fill("100")


def vocabulary():
    """A figure with every kind of panel, mark and symbol."""
    x, y = np.array([1.0, 2.0, 4.0]), np.array([3.0, 2.0, 1.0])
    marks = [
        Line(mark, x, y + i, y + i - 0.1, y + i + 0.1, mark=mark)
        for i, mark in enumerate(("line", "points", "both", "area"))
    ]
    symbols = [
        Line(symbol, x, y + i, mark="points", symbol=symbol, names=["a", "b", "c"], style=styles.Style("#0072b2", "--"))
        for i, symbol in enumerate(("circle", "ring", "bar", "cross", "star", "dash"))
    ]
    grid = np.linspace(-1.0, 1.0, 11)
    return Figure(
        "vocabulary",
        [
            Plot("marks", "Marks", Axis({"x": "x"}, log=True, ticks={1.0: "one"}), Axis("y", range=(0.5, 7)), marks,
                 levels={"a level": 2.0}),
            Plot("symbols", "Symbols", Axis("x", reversed=True), Axis(ticks={1: "low", 8: "high"}, reversed=True),
                 symbols, shades=[Shade(0.5, 1.5, styles.Style("#d55e00"))], write_names=True),
            Plot("whole", "Integers", Axis("x", whole=True), Axis("y", log=True), marks[:1]),
            Contours("paths", "Paths", {"LODO": (x / 4, y / 4, y)}, grid, grid, np.add.outer(grid**2, grid**2),
                     (0.1, 1.0, 0.1), {"start": (0.0, 0.0), "end": (1.0, 1.0)}, first=1),
            HeatMap("heat", "Heat", np.outer(grid, grid)),
            HeatMap("heat-log", "Heat, logarithmic", 100 * np.outer(grid, grid), "columns", linear=0.1),
        ],
        columns=2,
        size=(4.0, 3.0),
    )  # fmt: skip


def test_both_draw_the_whole_vocabulary(browser, tmp_path):
    """What Matplotlib and what the browser draw has the same panels with the same values."""
    figure = vocabulary()
    panels = [axes for axes in draw(figure, "A caption").axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == [
        "Marks", "Symbols", "Integers", "Paths, 1 steps", "Heat", "Heat, logarithmic"
    ]  # fmt: skip
    path = tmp_path / "page.html"
    path.write_text(render_page("Vocabulary", [Section("s", "S", figures=[as_json(figure)])], ""))
    for dark in (False, True):
        with opened(browser, path, dark=dark) as shown:
            for panel, axes in zip(figure.panels, panels, strict=True):
                drawn = plot(shown, f"s-{panel.name}").locator(".canvas")
                if isinstance(panel, Plot):
                    x, y = axes.get_xaxis(), axes.get_yaxis()
                    kinds = drawn.evaluate("canvas => [canvas._fullLayout.xaxis.type, canvas._fullLayout.yaxis.type]")
                    assert kinds == [x.get_scale(), y.get_scale()]
                    for which, axis in (("xaxis", x), ("yaxis", y)):
                        start, end = drawn.evaluate(f"canvas => canvas._fullLayout.{which}.range")
                        assert (start > end) == axis.get_inverted()
                    values = drawn.evaluate("canvas => canvas.data.filter(t => t.name).map(t => [...t.y])")
                    assert values == [list(line.high if line.mark == "area" else line.y) for line in panel.lines]
                else:
                    assert drawn.evaluate("canvas => canvas.data[0].type") == (
                        "contour" if isinstance(panel, Contours) else "heatmap"
                    )


@pytest.mark.parametrize("decades", [1.5, 3, 7, 14])
def test_labels_of_logarithmic_axes_do_not_overlap(browser, decades, tmp_path):
    values = np.logspace(-decades, 0.3, 50)
    panel = Plot("far", "Far", Axis("x", log=True), Axis("y", log=True), [Line("a", values, values)])
    path = tmp_path / "page.html"
    path.write_text(render_page("Far", [Section("s", "S", figures=[as_json(Figure("f", [panel]))])], ""))
    with opened(browser, path, width=1280) as shown:
        figure = plot(shown, "s-far")
        for axis, start, end in (("x", "left", "right"), ("y", "top", "bottom")):
            found = figure.locator(f".{axis}tick text").evaluate_all(
                f"every => every.map(e => e.getBoundingClientRect()).map(box => [box.{start}, box.{end}])"
            )
            assert len(found) > 1
            for (_, before), (after, _) in pairwise(sorted(found)):
                assert after > before - 1, "labels overlap"


def test_light_and_dark(shown):
    paper, ink = "getComputedStyle(document.body).backgroundColor", "canvas => canvas.layout.font.color"
    canvas = plot(shown, "bowl-curves").locator(".canvas")
    light = shown.evaluate(paper), canvas.evaluate(ink)
    shown.get_by_role("button", name="Dark").click()
    dark = shown.evaluate(paper), canvas.evaluate(ink)
    assert light == ("rgb(255, 255, 255)", "#1b1f24")
    assert dark == ("rgb(20, 23, 28)", "#e6e8eb")
    shown.get_by_role("button", name="Dark").click()


def test_a_phone_that_is_dark(browser, page):
    """As the reader's system wishes, and without scrolling sideways."""
    with opened(browser, page, width=360, dark=True) as shown:
        assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
        plot(shown, "rosenbrock-paths")
        assert shown.evaluate("document.documentElement.scrollWidth") <= 360


def test_wide_tables_say_that_they_scroll(browser, page):
    """On a phone, and only where there is something to scroll."""
    hint = "region => getComputedStyle(region, '::before').content"
    for width, wide in ((360, True), (1100, False)):
        with opened(browser, page, width=width) as shown:
            shown.wait_for_timeout(100)
            regions = shown.locator(".scroll").all()
            assert len(regions) > 3
            said = ["scroll sideways" in region.evaluate(hint) for region in regions]
            needed = [region.evaluate("region => region.scrollWidth > region.clientWidth + 1") for region in regions]
            assert said == needed
            assert any(said) == wide
            assert shown.locator(".words .scroll table").count() == 1


def test_a_link_shows_a_plot_as_it_was(browser, page):
    view = "canvas => [canvas.layout.xaxis.type, canvas.layout.xaxis.title.text, canvas._fullLayout.xaxis.range]"
    context = browser.new_context(
        permissions=["clipboard-read", "clipboard-write"], viewport={"width": 1100, "height": 900}
    )
    context.set_default_timeout(PATIENCE)
    first, second = context.new_page(), context.new_page()
    first.goto(page.as_uri())
    figure = plot(first, "bowl-curves")
    figure.get_by_label("second", exact=True).check()
    figure.get_by_label("log x").check()
    figure.get_by_label("spread").uncheck()
    figure.get_by_label("Adam").uncheck()
    figure.locator(".canvas").evaluate("canvas => Plotly.relayout(canvas, {'xaxis.range': [-1, 0.5]})")
    figure.get_by_role("button", name="link").click()
    figure.get_by_role("status").get_by_text("link to this view").wait_for()
    assert "#plot=bowl-curves&" in first.url
    second.goto(first.url)
    again = plot(second, "bowl-curves")
    assert second.evaluate("scrollY") > 100, "it is in sight"
    assert names(again) == names(figure) == ["LODO", "O-LBFGS"]
    assert len(traces(again)) == len(traces(figure)) == 2
    assert again.locator(".canvas").evaluate(view) == figure.locator(".canvas").evaluate(view)
    assert again.locator(".canvas").evaluate(view) == ["log", "seconds of training", [-1, 0.5]]
    assert not again.get_by_label("Adam").is_checked()
    again.get_by_label("log x").uncheck()
    again.get_by_role("button", name="link").click()
    assert "logX" not in second.url
    assert "zoomX" not in second.url
    context.close()


def test_a_link_with_nonsense_shows_the_plot(browser, page):
    """What a link says is only taken over where it makes sense."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    shown = context.new_page()
    shown.goto(f"{page.as_uri()}#plot=bowl-curves&x=nothing&logX=maybe&zoomY=[1]&hide=Nobody&zoomX=<script>")
    figure = plot(shown, "bowl-curves")
    assert names(figure) == ["Adam", "LODO", "O-LBFGS"]
    assert figure.locator(".canvas").evaluate("canvas => canvas.layout.xaxis.type") == "linear"
    shown.goto(f"{page.as_uri()}#plot=rosenbrock-paths&step=7&hide=Adam")
    shown.wait_for_function("document.documentElement.dataset.ready")
    paths = plot(shown, "rosenbrock-paths")
    assert paths.locator("output").text_content() == "7"
    assert {len(trace["x"]) for trace in traces(paths) if trace["name"]} == {8}
    context.close()


def test_formulas_are_set_as_formulas(browser, tmp_path):
    """The same label in both: Matplotlib reads it as it is, and the page has its indices."""
    line = Line(r"$\|A - A_0\|_2$", np.arange(1.0, 4.0), np.arange(1.0, 4.0))
    shown = Plot("f", "Of $A$", Axis(r"$\alpha t$"), Axis(r"$\|B D^{-1}\|_F$"), [line])
    figure = Figure("f", [shown])
    (axes,) = draw(figure).axes
    assert axes.get_ylabel() == r"$\|B D^{-1}\|_F$"
    draw(figure).savefig(tmp_path / "f.png")  # which fails for a formula that Matplotlib cannot read
    path = tmp_path / "page.html"
    path.write_text(render_page("Formulas", [Section("s", "S", figures=[as_json(figure)])], ""))
    with opened(browser, path) as opened_page:
        drawn = plot(opened_page, "s-f")
        written = drawn.locator(".ytitle").text_content().replace("\u200b", "")
        assert written == "\u2016B D\u22121\u2016F"  # the exponent and the index are smaller letters
        assert drawn.locator(".ytitle tspan").count() > 3
        assert drawn.locator("figcaption").text_content() == "Of A"
        assert names(drawn) == ["\u2016A \u2212 A\u2080\u2016\u2082"]


def test_a_browser_that_is_too_old_says_so(browser, page):
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    context.add_init_script("delete window.DecompressionStream")
    shown = context.new_page()
    shown.goto(page.as_uri())
    shown.get_by_role("alert").get_by_text("too old for the plots").wait_for()
    context.close()
