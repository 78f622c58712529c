"""The small network on digits: the task against other formulas, its runs, and how settings are chosen."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from digits import REAL, imitation, take_offline, write_mnist
from interruptions import interrupted, same_but_for_time
from lodo.lab import data, experiments
from lodo.lab.cli import app
from lodo.lab.data import DIGITS_DIGEST, MNIST_DIGEST, VARIABLE, load_mnist, using
from lodo.lab.experiments.base import Cell, tail
from lodo.lab.experiments.beyond.mlp import (
    ACCURACY,
    BY_BETA,
    EVERY,
    GRID,
    HELD_OUT,
    PAPER,
    ROBUST,
    TUNING,
    SettingRow,
    cell_of,
    chosen,
    paired_difference,
)
from lodo.lab.optimizers import Choice, build, parse
from lodo.lab.run import Curve, Run, execute, load_curve
from lodo.lab.show.draw import draw
from lodo.lab.tasks import make_task
from lodo.lab.tasks.mlp import Mlp, shrink


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """No test goes to the real network or into the user's cache."""
    return take_offline(monkeypatch, tmp_path / "cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mnist(tmp_path_factory.mktemp("data"))


@pytest.fixture
def digits(folder):
    """A small imitation of MNIST, for a test."""
    with using(folder):
        yield load_mnist()


# ---------------------------------------------------------------- the task


def test_images_are_averaged_without_their_margin():
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    found = shrink(torch.from_numpy(images)).reshape(3, 8, 8)
    for row in range(8):
        for column in range(8):
            block = images[:, 2 + 3 * row : 5 + 3 * row, 2 + 3 * column : 5 + 3 * column]
            np.testing.assert_array_equal(found[:, row, column], block.astype(int).sum((1, 2)))


def test_images_are_normalised_by_the_training_set(digits):
    task = Mlp(0)
    train, test = shrink(digits.train.images).double(), shrink(digits.test.images).double()
    torch.testing.assert_close(task.train[0], ((train - train.mean()) / train.std()).float())
    torch.testing.assert_close(task.test[0], ((test - train.mean()) / train.std()).float())
    assert torch.equal(task.train[1], digits.train.labels.long())
    assert torch.equal(task.test[1], digits.test.labels.long())


def test_images_of_8_by_8_pixels_are_used_as_they_are():
    small = data.load_digits()
    rows = small.train.images.reshape(1500, 64)
    assert torch.equal(shrink(small.train.images), rows)
    with using("digits"):
        task = Mlp(0, digest=DIGITS_DIGEST)
    expected = (rows.double() - rows.double().mean()) / rows.double().std()
    torch.testing.assert_close(task.train[0], expected.float())
    assert task.test[0].shape == (297, 64)
    assert task.batch.max() < 1500


@pytest.mark.parametrize("hidden", [(), (5,), (6, 7, 3)])
def test_loss_gradient_and_accuracy_are_those_of_torchs_layers(digits, hidden):
    task = Mlp(0, hidden=hidden, batch=13)
    widths = (64, *hidden, 10)
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    net = nn.Sequential(*layers[:-1])
    for p in task.params:  # biases that matter
        p.data.add_(0.1 * torch.randn(p.shape))
    net.load_state_dict(dict(zip(net.state_dict(), (p.detach() for p in task.params), strict=True)))
    images, labels = task.train
    loss = nn.CrossEntropyLoss()(net(images[task.batch]), labels[task.batch])
    loss.backward()
    assert task.evaluate() == pytest.approx(loss.item(), rel=1e-6)
    for p, q in zip(task.params, net.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    logits = net(task.test[0])
    right = (logits.argmax(1) == task.test[1]).sum().item()
    tracked = task.tracked(None, 0)
    assert tracked.keys() == {"test_accuracy", "validation_loss"}
    assert tracked["test_accuracy"] == right / 100
    assert tracked["test_accuracy"] not in (0, 1)
    assert tracked["validation_loss"] == pytest.approx(nn.CrossEntropyLoss()(logits, task.test[1]).item(), rel=1e-6)


def test_the_weights_first_sizes(digits):
    task = Mlp(0)
    weights, biases = task.params[::2], task.params[1::2]
    assert [tuple(w.shape) for w in weights] == [(64, 64), (32, 64), (10, 32)]
    assert not any(b.any() for b in biases)
    for w in weights:
        deviation = w.std().item() * w.shape[1] ** 0.5
        assert deviation == pytest.approx(1, abs=4 / math.sqrt(2 * w.numel()))


def test_batches_come_from_everywhere_and_repeat_images(digits):
    task = Mlp(0, batch=50)
    seen = []
    for _ in range(60):
        task.draw()
        seen.append(task.batch.clone())
    counts = torch.cat(seen).bincount(minlength=300)
    assert len(counts) == 300
    assert counts.min() > 0
    assert abs(counts.double().var() / counts.double().mean() - 1) < 0.4  # as of independent draws
    assert any(len(batch.unique()) < 50 for batch in seen)


def test_the_seed_decides_and_the_optimizer_has_no_part_in_it(digits):
    def batches(seed, optimizer):
        task = Mlp(seed, hidden=(4,))
        first = [p.detach().clone() for p in task.params]
        made = build(optimizer, task, seed, {})
        seen = []
        for _ in range(5):
            task.draw()
            seen.append(task.batch.clone())
            made.step(task.evaluate)
        return first, torch.stack(seen)

    (first, a), (same, b), (other, c) = batches(3, "adam"), batches(3, "lodo"), batches(4, "adam")
    assert torch.equal(a, b)
    assert all(map(torch.equal, first, same))
    assert not torch.equal(a, c)
    assert not torch.equal(first[0], other[0])
    assert len({tuple(row.tolist()) for row in a}) == 5


def test_a_state_brings_back_the_batch(digits):
    task, other = Mlp(0), Mlp(1)
    task.draw()
    other.load_state_dict(task.state_dict())
    assert other.evaluate() == task.evaluate()
    for each in (task, other):
        each.draw()
    assert torch.equal(task.batch, other.batch)


def test_measuring_changes_nothing(digits):
    task = Mlp(0)
    before = task.rng.get_state(), task.evaluate()
    task.tracked(None, 5)
    assert torch.equal(task.rng.get_state(), before[0])
    assert task.evaluate() == before[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hidden": 32}, "hidden must be the widths"),
        ({"hidden": "32"}, "hidden must be the widths"),
        ({"hidden": (8, 0)}, r"hidden\[1\] must be an integer >= 1, got 0"),
        ({"batch": 0}, "batch must be an integer >= 1, got 0"),
        ({"digest": "abc"}, "digest must be that of the data"),
        ({"layers": 3}, "^mlp has no option 'layers'. Its options: hidden, batch$"),
        ({"n": 3, "digest": "abc"}, "^mlp has no option 'n'. Its options: hidden, batch$"),
        ({"hiden": 3}, r"^mlp has no option 'hiden'; did you mean 'hidden'\? Its options: hidden, batch$"),
    ],
)
def test_bad_options_are_named(digits, options, said):
    with pytest.raises(ValueError, match=said):
        make_task("mlp", options, 0)


@pytest.mark.parametrize("call", ["adam(lr=0.01)", "momentum(lr=0.05)", "lodo(lr=0.5)", "lodo(recipe='robust')"])
def test_digits_are_learned(digits, call):
    (choice,) = parse(call)
    task = Mlp(0, hidden=(16,))
    optimizer = build(choice.optimizer, task, 0, choice.options)
    losses = []
    for _ in range(60):
        task.draw()
        losses.append(optimizer.step(task.evaluate))
    assert np.mean(losses[:3]) > 1.5
    assert np.mean(losses[-10:]) < 0.5
    assert task.tracked(optimizer, 60)["test_accuracy"] > 0.95


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("call", ["adam(lr=0.01)", "lodo(lr=0.5)", "lodo(recipe='robust')"])
def test_an_interrupted_run_resumes_bit_for_bit(digits, call, tmp_path, monkeypatch):
    (choice,) = parse(call)
    options = {"hidden": (6,), "digest": digits.digest}
    run = Run("mlp", choice.optimizer, 0, 30, task_options=options, options=choice.options, track_every=7)
    execute(run, tmp_path / "whole")
    interrupted(run, tmp_path / "parts", monkeypatch, 12)
    execute(run, tmp_path / "parts")
    whole = load_curve(run, tmp_path / "whole")
    assert len(whole["loss"]) == 30
    assert np.isfinite(whole["test_accuracy"]).sum() == 4
    same_but_for_time(whole, load_curve(run, tmp_path / "parts"))


def test_the_same_data_elsewhere_is_the_same_run(folder, tmp_path):
    experiment = experiments.load("mlp")
    other = imitation()
    other[0][0, 5, 5] ^= 1
    names = []
    for at in (folder, write_mnist(tmp_path / "copy"), write_mnist(tmp_path / "other", other)):
        with using(at):
            plan = experiment.plan(experiment.request(seeds=1))
            names.append([run.name for runs in plan.values() for run in runs])
    assert names[0] == names[1]
    assert set(names[0]).isdisjoint(names[2])


def test_a_worker_with_other_data_refuses(digits, tmp_path):
    run = Run("mlp", "adam", 0, 10, task_options={"digest": digits.digest})
    with using(write_mnist(tmp_path, imitation(seed=1))), pytest.raises(ValueError, match="planned with other data"):
        execute(run, tmp_path)


# ---------------------------------------------------------------- the experiment


def curves(*losses, diverged=(), digest=MNIST_DIGEST, **options):
    """Short runs with constant losses, one a seed."""
    made = []
    for seed, loss in enumerate(losses):
        steps = np.arange(1, 21)
        columns = {
            "step": steps,
            "evaluations": steps,
            "seconds": 0.1 * steps,
            "loss": np.full(20, loss),
            "repeat_loss": np.full(20, np.nan),
            "test_accuracy": np.where(steps % 10 == 0, steps / 20, np.nan),
        }
        run = Run("mlp", "adam", seed, 20, task_options={"digest": digest}, options=options)
        made.append(Curve(run, seed in diverged, columns))
    return made


RESULTS = {
    Cell("Adam", "lr=1"): curves(0.5, 0.3, 0.9, 0.7),  # best on the tuning seeds
    Cell("Adam", "lr=2"): curves(0.5, 0.5, 0.1, 0.1),  # best on the others
    Cell(PAPER, "beta=0.8"): curves(0.6, 0.6, 0.4, 0.4, beta=0.8),
    Cell(PAPER, "beta=0.9, lr=1"): curves(0.5, 0.5, 0.6, 0.5, beta=0.9),
    Cell(PAPER, "beta=0.9, lr=2"): curves(0.1, 0.1, 0.1, 0.1, beta=0.9, diverged={1}),
    Cell(ROBUST, "lr=1"): curves(0.2, 0.2, 0.2, 0.3, diverged={2}),
}


def rows(results=RESULTS):
    experiment = experiments.load("mlp")
    return experiment.rows(experiment.request(seeds=2), results)


def test_the_tuning_seeds_alone_choose():
    assert {method: cell.variant for method, cell in chosen(RESULTS).items()} == {
        "Adam": "lr=1",
        PAPER: "beta=0.9, lr=1",
        ROBUST: "lr=1",
    }


def test_the_held_out_seeds_alone_are_reported():
    spread = math.sqrt(0.02)
    held_out = [row for row in rows() if row.metric == HELD_OUT]
    assert held_out[0] == SettingRow(
        "Adam", HELD_OUT, pytest.approx(0.8), pytest.approx(spread), 2, 0, setting="lr=1", error=pytest.approx(0.1)
    )
    assert held_out[0].cells == ("Adam", "lr=1", "0.8000 ± 0.1414", "0.1", "2")
    assert [(row.mean, row.setting) for row in held_out[1:]] == [(pytest.approx(0.55), "beta=0.9, lr=1"), (0.3, "lr=1")]
    assert (held_out[2].diverged, held_out[2].error) == (1, None)


def test_accuracies_every_setting_and_every_beta():
    by_metric = {}
    for row in rows():
        by_metric.setdefault(row.metric, []).append((row.optimizer, row.setting, row.mean))
    assert by_metric[ACCURACY][0] == ("Adam", "lr=1", 100.0)
    assert [(name, setting) for name, setting, _ in by_metric[EVERY]] == list(RESULTS)
    assert by_metric[EVERY][1] == ("Adam", "lr=2", 0.5)
    assert by_metric[BY_BETA] == [(PAPER, "beta=0.8", 0.4), (PAPER, "beta=0.9, lr=1", pytest.approx(0.55))]


def test_a_method_that_always_diverges_is_shown_as_such():
    results = {cell: curves(0.1, 0.1, 0.1, diverged={0, 1, 2}) for cell in (Cell("Adam", "lr=1"), Cell("Adam", "lr=2"))}
    assert rows(results)[0].cells == ("Adam", "lr=1", "diverged", "", "1")
    experiment = experiments.load("mlp")
    (figure,) = experiment.figures(experiment.request(seeds=1), results)
    assert "1 of 1 diverged" in draw(figure).axes[0].get_legend().get_texts()[0].get_text()


def test_the_sentence():
    sentence = experiments.load("mlp").sentence
    assert sentence(rows()) == (
        f"{ROBUST} has a loss of 0.3000, 45.5% below the paper's algorithm at its best beta (0.5500) "
        "and 62.5% below the best rival, Adam (0.8000)."
    )
    worse = [replace(row, mean=2 * row.mean) if row.optimizer == ROBUST else row for row in rows()]
    assert "9.1% ABOVE the paper's algorithm" in sentence(worse)
    paper = [row for row in rows() if row.optimizer != ROBUST]
    assert sentence(paper) == "LODO has a loss of 0.5500, 31.2% below the best rival, Adam (0.8000)."
    assert "Nothing to compare" in sentence([row for row in rows() if row.optimizer == "Adam"])
    assert "Nothing to compare" in sentence([row for row in rows() if row.optimizer == ROBUST])


def test_seeds_are_compared_one_by_one():
    assert paired_difference(RESULTS) is None  # one pair alone
    results = {
        Cell(PAPER): curves(0.1, 0.1, 0.5, 0.9, 0.4),
        Cell(ROBUST): curves(0.9, 0.9, 0.4, 0.7, 0.9, diverged={4}),
    }
    assert paired_difference(results) == (pytest.approx(-0.15), pytest.approx(0.05))
    assert paired_difference({Cell(PAPER): curves(0.1, 0.1, 0.5, 0.9)}) is None
    experiment = experiments.load("mlp")
    assert "-0.1500 with a standard error of 0.0500" in " ".join(experiment.notes(experiment.request(), results))


@pytest.mark.parametrize(
    ("digest", "said"),
    [
        (MNIST_DIGEST, "The data is the original MNIST: the central 24 x 24 pixels"),
        (DIGITS_DIGEST, "The data is NOT MNIST but scikit-learn's digits, images of 8 x 8 pixels as they are."),
        ("0123456789ab", "The data is NOT the original MNIST but other files in the data folder"),
    ],
)
def test_the_notes_say_what_the_data_is(digest, said):
    experiment = experiments.load("mlp")
    notes = experiment.notes(experiment.request(), {Cell("Adam"): curves(0.1, 0.1, 0.1, digest=digest)})
    assert sum(note.startswith("The data is") for note in notes) == 1
    assert said in " ".join(notes)


def test_numbers_are_settings_and_words_are_methods():
    assert cell_of(Choice("lodo", {"recipe": "robust", "lr": 0.3, "meta_betas": (0.9, 0.99)})) == Cell(
        ROBUST, "lr=0.3, meta_betas=(0.9, 0.99)"
    )
    assert cell_of(Choice("lodo", {"guard": True})) == Cell("LODO (guard=True)", "")
    assert cell_of(Choice("adam", {"lr": 1})) == Cell("Adam", "lr=1")


def test_every_method_has_six_settings():
    methods = [cell_of(choice).label for choice in parse(GRID)]
    assert {method: methods.count(method) for method in methods} == dict.fromkeys(
        ("Adam", "Momentum", PAPER, ROBUST), 6
    )
    betas = [choice.options["beta"] for choice in parse(GRID) if cell_of(choice).label == PAPER]
    assert len(set(betas)) > 1


def test_the_last_300_of_3000_steps_count():
    steps = np.arange(1, 3001)
    curve = Curve(Run("mlp", "adam", 0, 3000), False, {"evaluations": steps, "loss": steps, "repeat_loss": 0 * steps})
    assert tail(curve) == np.arange(2701, 3001).mean()


# ---------------------------------------------------------------- the command


def invoke(*args, code=0):
    result = CliRunner().invoke(app, ["run", "mlp", *map(str, args)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.slow
def test_the_whole_experiment_at_a_toy_size(folder, tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    small = ("--task", "hidden=(4,), batch=8", "--steps", 20, "--seeds", 2)
    out = invoke("--data", folder, *small, "--workers", 0, "--out", tmp_path)
    assert "the paper's algorithm at its best beta" in out
    summary = json.loads((tmp_path / "mlp" / "summary.json").read_text())
    losses = [row for row in summary["rows"] if row["metric"] == HELD_OUT]
    assert [row["optimizer"] for row in losses] == ["Adam", "Momentum", PAPER, ROBUST]
    assert all(row["seeds"] == 2 and row["error"] > 0 and row["setting"] for row in losses)
    assert sum(row["metric"] == EVERY and row["seeds"] == TUNING for row in summary["rows"]) == 24
    table = (tmp_path / "mlp" / "table.md").read_text()
    assert "| optimizer | setting | mean ± s.d. | standard error | seeds |" in table
    assert "20 steps, 2 held-out seeds, hidden = (4,), batch = 8, settings chosen on 2 others" in table
    assert "64-4-10" in table
    assert "NOT the original MNIST" in table
    for file in ("mlp.png", "mlp.pdf"):
        assert (tmp_path / "mlp" / file).stat().st_size > 10_000


@pytest.mark.slow
def test_workers_find_the_data(folder, tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(folder.parent)
    args = ("--optimizers", "adam(lr=0.01)", "--steps", 10, "--seeds", 1, "--workers", 1, "--out", tmp_path)
    invoke("--data", folder.name, *args)
    assert len(list((tmp_path / "runs").iterdir())) == TUNING + 1
    monkeypatch.setenv(VARIABLE, str(folder))
    invoke(*args)  # the same runs: nothing is done


def test_the_digits_of_scikit_learn_need_no_files(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    args = ("--optimizers", "adam(lr=0.01)", "--steps", 60, "--seeds", 1, "--workers", 0, "--out", tmp_path / "out")
    out = invoke("--data", "digits", *args)
    assert "The data is NOT MNIST but scikit-learn's digits" in out
    table = (tmp_path / "out" / "mlp" / "table.md").read_text()
    assert "scikit-learn's digits" in table
    summary = json.loads((tmp_path / "out" / "mlp" / "summary.json").read_text())
    (accuracy,) = (row["mean"] for row in summary["rows"] if row["metric"] == ACCURACY)
    assert accuracy > 80
    assert not (tmp_path / "cache").exists()


def test_without_data_nothing_is_written(nobody, tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    for args, folder in (((), tmp_path / "cache" / "lodo" / "data"), (("--data", tmp_path), tmp_path)):
        said = invoke(*args, "--out", tmp_path / "out", code=1)
        assert "train-images-idx3-ubyte.gz" in said
        assert str(folder / "mnist") in said
        assert nobody in said
        assert "--data digits" in said
        assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not REAL, reason=f"{VARIABLE} has no MNIST")
def test_real_digits_are_learned():
    task = Mlp(0, hidden=(16,))
    optimizer = build("lodo", task, 0, {"lr": 1.0, "beta": 0.8})
    for _ in range(300):
        task.draw()
        optimizer.step(task.evaluate)
    assert task.tracked(optimizer, 300)["test_accuracy"] > 0.9
