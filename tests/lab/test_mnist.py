"""Image generation: the task against formulas, its runs, the experiments' plans and tables, and the commands."""

from __future__ import annotations

import json
import math
import os
from contextlib import contextmanager
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from digits import REAL, take_offline
from interruptions import interrupted, same_but_for_time
from lodo.lab import data, experiments
from lodo.lab.cli import app
from lodo.lab.data import DIGITS_DIGEST, MNIST_DIGEST, VARIABLE, using
from lodo.lab.data.base import data_folder
from lodo.lab.experiments.base import Cell
from lodo.lab.experiments.paper.images import SPEED, RankedRow, last_tracked, ranked, speed
from lodo.lab.experiments.paper.mnist import (
    AT_50K_SECONDS,
    AT_300K,
    BETAS,
    PAPER_SPEED,
    TEST,
    TRAINING,
    MnistExperiment,
    draw_images,
    draw_inputs,
    grid,
)
from lodo.lab.files import save_state
from lodo.lab.optimizers import Choice, build, hyperparameters, parse
from lodo.lab.run import Curve, Run, execute, load_curve, read_weights, threads
from lodo.lab.show.draw import draw, look, save_picture
from lodo.lab.show.tables import Row
from lodo.lab.tasks import make_task
from lodo.lab.tasks.base import Task
from lodo.lab.tasks.generator import inputs, sample, scores
from lodo.lab.tasks.mnist import Mnist

NAMES = ("mnist", "mnist-ablations", "mnist-momentum")


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """No test goes to the real network or into the user's cache."""
    return take_offline(monkeypatch, tmp_path / "cache")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with threads(1):
        yield


@pytest.fixture
def digits():
    """Images of 8 x 8 pixels for a test: 1,500 to train on and 297 to test on."""
    with using("digits"):
        yield data.load("mnist")


# ---------------------------------------------------------------- the task


def written_out(task, images, queries):
    """The cross-entropy of every pixel in double precision, and the weights that it depends on."""
    weights = [p.detach().double().requires_grad_() for p in task.params]
    chances = scores(weights, inputs(images, queries).double()).softmax(1)
    side = images.shape[-1]
    losses = [-chances[i, int(images[i, q // side, q % side])].log() for i, q in enumerate(queries.tolist())]
    return torch.stack(losses), weights


def gradients_agree(task, loss, weights, rtol=2e-5):
    for p, g in zip(task.params, torch.autograd.grad(loss, weights), strict=True):
        assert (p.grad - g).abs().max() <= rtol * g.abs().max()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("batch", [1, 15, 16, 17, 40])
def test_the_loss_is_the_mean_cross_entropy_and_chunks_change_nothing(digits, batch, fused):
    task = Mnist(0, batch=batch, fused=fused)
    losses, weights = written_out(task, task.train[task.picks], task.queries)
    assert losses.shape == (batch,)
    for _ in range(2):  # gradients are replaced, not added up
        assert task.evaluate() == pytest.approx(losses.mean().item(), rel=1e-5)
    gradients_agree(task, losses.mean(), weights)
    assert task.loss().item() == pytest.approx(losses.mean().item(), rel=1e-5)


def test_chunks_are_as_good_as_the_whole(digits):
    task, whole = Mnist(0, batch=40), Mnist(0, batch=40)
    assert task.evaluate() == pytest.approx(Task.evaluate(whole), rel=1e-6)
    for p, q in zip(task.params, whole.params, strict=True):
        assert (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max()


def test_gradients_can_be_differentiated_again(digits):
    task = Mnist(0, batch=2)
    task.evaluate(create_graph=True)
    bias = task.params[-1]
    (again,) = torch.autograd.grad(bias.grad[7], bias)
    chances = scores(task.params, inputs(task.train[task.picks], task.queries)).softmax(1).detach()
    torch.testing.assert_close(again, (torch.eye(256)[7] * chances[:, 7:8] - chances[:, 7:8] * chances).mean(0))


def test_without_gradients_around_it_still_has_them(digits):
    task = Mnist(0, batch=3)
    with torch.no_grad():
        task.evaluate()
    assert task.params[0].grad.abs().max() > 0
    assert not task.params[0].grad.requires_grad


def test_the_last_64_training_images_are_for_validation_alone(digits):
    task = Mnist(0, batch=30_000)
    assert torch.equal(task.train, digits.train.images[:-64])
    assert torch.equal(task.validation, digits.train.images[-64:])
    assert torch.equal(task.test, digits.test.images)
    picks, queries = task.picks.bincount(minlength=1436), task.queries.bincount(minlength=64)
    assert len(picks) == 1436
    assert len(queries) == 64
    for counts in (picks, queries):  # every one, and as often as independent draws have it
        expected = 30_000 / len(counts)
        distance = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(distance - len(counts)) < 4 * math.sqrt(2 * len(counts))


def test_images_and_pixels_are_drawn_again_for_every_step(digits):
    task, seen = Mnist(0, batch=5), []
    for _ in range(4):
        seen += [tuple(task.picks.tolist()), tuple(task.queries.tolist())]
        task.draw()
    assert len(set(seen)) == 8


def test_validation_and_test_over_all_pixels_are_plain_means(digits):
    task = Mnist(0, batch=1)
    task.validation, task.test = task.validation[:2], task.test[:1]
    for images, found in (
        (task.validation, task.tracked(None, 0)["validation_loss"]),
        (task.test, task.final()["test_loss"]),
    ):
        every = torch.arange(64).repeat(len(images))
        losses, _ = written_out(task, images.repeat_interleave(64, 0), every)
        assert found == pytest.approx(losses.mean().item(), rel=1e-5)


def test_all_pixels_of_all_held_out_images_are_meant_by_default(digits, monkeypatch):
    asked = []

    def count(network, weights, images, queries):
        asked.append(len(queries))
        return torch.zeros(())

    monkeypatch.setattr("lodo.lab.tasks.mnist._total_loss", count)
    task = Mnist(0, batch=1)
    task.tracked(None, 0)
    assert sum(asked) == 64 * 64
    task.final()
    assert sum(asked) == 64 * 64 + 297 * 64


def test_a_subset_is_the_same_every_time_and_leaves_training_alone(digits):
    task, other = Mnist(0, batch=4, validation_size=21, test_size=5), Mnist(1, batch=7, validation_size=21, test_size=5)
    with torch.no_grad():
        for p, q in zip(task.params, other.params, strict=True):
            q.copy_(p)
    before = task.rng.get_state(), torch.get_rng_state(), task.evaluate(), [p.grad.clone() for p in task.params]
    first = task.tracked(None, 1), task.final()
    assert task.rng.get_state().equal(before[0])
    assert torch.get_rng_state().equal(before[1])
    assert all(map(torch.equal, (p.grad for p in task.params), before[3]))
    assert task.evaluate() == before[2]
    task.draw()
    assert (task.tracked(None, 2), task.final()) == (other.tracked(None, 1), other.final()) == first


@pytest.mark.parametrize("size", [1, 16, 17, 50])
def test_a_subset_of_any_size_is_averaged(digits, size):
    task, whole = Mnist(0, batch=1, validation_size=size), Mnist(0, batch=1)
    for each in (task, whole):
        each.validation = each.validation[:1, 3:4, 3:4]  # a single pixel, as often as it is drawn
    found, expected = (each.tracked(None, 0)["validation_loss"] for each in (task, whole))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_subset_is_of_random_pixels(digits):
    """Its mean is near that of all pixels, as near as its size allows."""
    task = Mnist(0, batch=1, validation_size=640)
    task.validation = task.validation[:1]
    losses, _ = written_out(task, task.validation.expand(64, 8, 8), torch.arange(64))
    error = losses.std().item() / math.sqrt(640)
    found = task.tracked(None, 0)["validation_loss"]
    assert 0 < abs(found - losses.mean().item()) < 4 * error


def test_the_seed_decides(digits):
    task, same, other = Mnist(3, batch=9), Mnist(3, batch=9), Mnist(4, batch=9)
    assert task.evaluate() == same.evaluate() != other.evaluate()
    for each in (task, same, other):
        each.draw()
    assert torch.equal(task.picks, same.picks)
    assert torch.equal(task.queries, same.queries)
    assert not torch.equal(task.picks, other.picks)


def test_a_state_brings_back_the_batch(digits):
    task, other = Mnist(0, batch=6), Mnist(1, batch=6)
    task.draw()
    other.load_state_dict(task.state_dict())
    assert other.evaluate() == task.evaluate()
    for each in (task, other):
        each.draw()
    assert torch.equal(task.queries, other.queries)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "batch must be an integer >= 1, got 0"),
        ({"batch": 2.0}, r"batch must be an integer >= 1, got 2\.0"),
        ({"fused": 1}, "fused must be True or False, got 1"),
        ({"validation_size": 0}, "validation_size must be an integer >= 1, got 0"),
        ({"test_size": -3}, "test_size must be an integer >= 1, got -3"),
        ({"test_size": "all"}, "test_size must be an integer >= 1, got 'all'"),
        ({"digest": "abc"}, "digest must be that of the data"),
        ({"chunk": 3}, "^mnist has no option 'chunk'. Its options: batch, validation_size, test_size, fused$"),
    ],
)
def test_bad_options_are_named(digits, options, said):
    with pytest.raises(ValueError, match=said):
        make_task("mnist", options, 0)


@pytest.mark.parametrize("call", ["adam(lr=0.003)", "lodo(lr=0.1, beta=0.8)", "lars(lr=0.01)"])
def test_digits_are_learned(digits, call):
    (choice,) = parse(call)
    task = Mnist(0, batch=16, validation_size=64)
    optimizer = build(choice.optimizer, task, 0, choice.options)
    before = task.tracked(optimizer, 0)["validation_loss"]
    for _ in range(30):
        task.draw()
        optimizer.step(task.evaluate)
    assert before > math.log(256) > 4 > task.tracked(optimizer, 30)["validation_loss"]


@pytest.mark.skipif(not REAL, reason=f"{VARIABLE} has no MNIST")
def test_real_digits_are_learned():
    task = Mnist(0, batch=16, validation_size=32, test_size=32, digest=MNIST_DIGEST)
    assert [tuple(images.shape) for images in (task.train, task.validation, task.test)] == [
        (59_936, 28, 28),
        (64, 28, 28),
        (10_000, 28, 28),
    ]
    losses, weights = written_out(task, task.train[task.picks[:8]], task.queries[:8])
    task.picks, task.queries = task.picks[:8], task.queries[:8]
    assert task.evaluate() == pytest.approx(losses.mean().item(), rel=1e-5)
    gradients_agree(task, losses.mean(), weights)
    optimizer = build("adam", task, 0, {"lr": 0.003})
    for _ in range(15):
        task.draw()
        optimizer.step(task.evaluate)
    assert task.final()["test_loss"] < 4


# ---------------------------------------------------------------- runs

SMALL = {"batch": 3, "validation_size": 4, "test_size": 5, "digest": DIGITS_DIGEST}


def mnist_run(call="adam", steps=6, seed=0, **task_options):
    """With the paper's hyperparameters for what the call leaves open."""
    (choice,) = parse(call)
    options = hyperparameters("mnist", choice)
    return Run("mnist", choice.optimizer, seed, steps, None, {**SMALL, **task_options}, options, track_every=3)


@pytest.mark.parametrize("call", ["adam(lr=0.01)", "lars(lr=0.1)", "lodo"])
def test_an_interrupted_run_resumes_bit_for_bit(digits, call, tmp_path, monkeypatch):
    run = mnist_run(call)
    execute(run, tmp_path / "whole")
    interrupted(run, tmp_path / "parts", monkeypatch, 2)
    assert not run.weights_path(tmp_path / "parts").exists()
    execute(run, tmp_path / "parts")
    whole, parts = load_curve(run, tmp_path / "whole"), load_curve(run, tmp_path / "parts")
    assert len(whole["loss"]) == 6
    assert np.isfinite(whole["validation_loss"]).sum() == 2
    assert whole.final.keys() == {"test_loss"}
    same_but_for_time(whole, parts)
    assert whole.final == parts.final
    assert all(map(torch.equal, read_weights(whole.weights)[1], read_weights(parts.weights)[1]))


def test_what_is_stored_is_what_was_measured(digits, tmp_path):
    run = mnist_run(steps=6)
    execute(run, tmp_path)
    curve = load_curve(run, tmp_path)
    settings, weights = read_weights(curve.weights)
    assert settings == json.loads(run.settings)
    task = Mnist(0, **SMALL)
    with torch.no_grad():
        for p, value in zip(task.params, weights, strict=True):
            p.copy_(value)
    assert task.final() == pytest.approx(curve.final)
    assert task.tracked(None, 6)["validation_loss"] == pytest.approx(curve["validation_loss"][-1])
    assert len(weights) == 124
    assert not any(w.requires_grad for w in weights)


def test_a_run_that_was_planned_with_other_data_is_refused(digits, tmp_path):
    with pytest.raises(ValueError, match="planned with other data"):
        execute(mnist_run(digest=MNIST_DIGEST), tmp_path)
    assert not list(tmp_path.glob("*.parquet"))


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_sizes(digits, name):
    experiment = experiments.load(name)
    request = experiment.request()
    assert (request.evaluations, request.seeds) == (300_000, 1 if name == "mnist-momentum" else 8)
    assert request.task_options == {}
    plan = experiment.plan(request)
    runs = [run for runs in plan.values() for run in runs]
    assert len({run.name for run in runs}) == request.seeds * len(plan)
    assert {(run.task, run.track_every) for run in runs} == {("mnist", 10_000)}
    assert all(run.task_options == {"digest": DIGITS_DIGEST} for run in runs)


@pytest.mark.parametrize("name", NAMES)
def test_the_quick_size_has_a_smaller_task(name):
    experiment = experiments.load(name)
    small = {"batch": 32, "validation_size": 500, "test_size": 1_000}
    assert experiment.request(quick=True).task_options == small
    assert experiment.request(quick=True, task_options={"batch": 7}).task_options == {**small, "batch": 7}
    assert experiment.request(task_options={"batch": 7}).task_options == {"batch": 7}
    assert experiment.request(quick=True).evaluations <= 100


def test_the_papers_optimizers_and_ours(digits):
    experiment = experiments.load("mnist")
    plan = experiment.plan(experiment.request())
    assert [cell.label for cell in plan] == [
        *("Adam", "Momentum", "RMSprop", "Yogi", "LARS", "LODO"),
        "LODO (recipe='robust')",
    ]
    assert plan[Cell("LARS")][0].options == {"lr": 0.0008552, "beta": 0.9343, "weight_decay": 4.839e-5}
    robust = plan[Cell("LODO (recipe='robust')")][0].options
    assert robust == {**plan[Cell("LODO")][0].options, "recipe": "robust"}


def test_the_ablations(digits):
    experiment = experiments.load("mnist-ablations")
    plan = experiment.plan(experiment.request())
    found = {cell.label: (runs[0].optimizer, dict(runs[0].options)) for cell, runs in plan.items()}
    assert found == {
        "LODO": ("lodo", {"meta_lr": 7.946e-6, "beta": 0.9343, "lr": 0.08459}),
        "LODO-Diagonal": ("lodo_diagonal", {"meta_lr": 0.0005196, "beta": 0.9860, "lr": 0.1325}),
        "LODO-Global": ("lodo_global", {"meta_lr": 7.951e-5, "beta": 0.9525, "lr": 0.05583}),
        "LODO-Residuals": ("lodo_residuals", {"meta_lr": 3.829e-5, "beta": 0.9301, "lr": 0.02134}),
        "LODO-No-Momentum": ("lodo_no_momentum", {"meta_lr": 7.946e-6, "lr": 0.08459}),
        "LODO-SGD": ("lodo_sgd", {"meta_lr": 0.0007196, "beta": 0.9499, "lr": 0.1035}),
    }


def test_lodo_of_the_table_and_of_the_ablations_is_one_run(digits):
    names = []
    for name in ("mnist", "mnist-ablations"):
        experiment = experiments.load(name)
        names.append([run.name for run in experiment.plan(experiment.request())[Cell("LODO")]])
    assert names[0] == names[1]


def test_eight_betas_whose_distances_from_one_are_geometric(digits):
    assert len(BETAS) == 8
    assert (BETAS[0], BETAS[-1]) == (0.0, 0.9343)
    ratios = np.diff(np.log1p(-np.array(BETAS)))
    np.testing.assert_allclose(ratios, np.log(1 - 0.9343) / 7, atol=2e-3)  # they are rounded
    experiment = experiments.load("mnist-momentum")
    plan = experiment.plan(experiment.request())
    runs = [run for runs in plan.values() for run in runs]
    assert [run.options for run in runs] == [{"meta_lr": 7.946e-6, "beta": beta, "lr": 0.08459} for beta in BETAS]
    assert {run.optimizer for run in runs} == {"lodo"}


@pytest.mark.parametrize(("steps", "every"), [(10, 1), (59, 1), (60, 2), (3_000, 100), (None, 1000)])
def test_a_run_is_measured_about_thirty_times(digits, steps, every):
    experiment = experiments.load("mnist")
    request = experiment.request(evaluations=steps, seconds=None if steps else 9.0, seeds=1, choices=[Choice("adam")])
    ((run,),) = experiment.plan(request).values()
    assert run.track_every == every
    assert (run.evaluations, run.seconds) == ((steps, None) if steps else (None, 9.0))


# ---------------------------------------------------------------- tables


def curves(*losses, diverged=(), digest=MNIST_DIGEST, seconds=0.1, test=0.0, optimizer="adam", **options):
    """Short runs with constant losses, one a seed."""
    made = []
    for seed, loss in enumerate(losses):
        steps = np.arange(1, 41)
        columns = {
            "step": steps,
            "evaluations": steps,
            "seconds": seconds * steps,
            "loss": np.full(40, loss),
            "repeat_loss": np.full(40, np.nan),
            "validation_loss": np.where(steps % 2 == 0, steps / 10, np.nan),
        }
        run = Run("mnist", optimizer, seed, 40, task_options={"digest": digest}, options=options)
        lost = seed in diverged
        made.append(Curve(run, lost, columns, final={} if lost else {"test_loss": loss + test}))
    return made


RESULTS = {
    Cell("Adam"): curves(0.9, 1.1, test=-0.5),
    Cell("Momentum"): curves(0.8, 0.6, seconds=0.05),
    Cell("torch.SGD"): curves(0.5, 0.5, seconds=0.2),
    Cell("Yogi"): curves(9.0, 9.0, diverged={0, 1}),
    Cell("LODO"): curves(0.4, 9.0, diverged={1}, seconds=0.4),
}


def rows(name="mnist", results=RESULTS, **settings):
    experiment = experiments.load(name)
    return experiment.rows(experiment.request(**settings), results)


def test_the_tables_of_training_test_and_speed():
    by_metric = {metric: [row for row in rows() if row.metric == metric] for metric in (TRAINING, TEST, SPEED)}
    assert [len(group) for group in by_metric.values()] == [5, 5, 5]
    assert [row.mean for row in by_metric[TRAINING]] == [1.0, pytest.approx(0.7), 0.5, None, 0.4]
    assert [row.rank for row in by_metric[TRAINING]] == [4, 3, 2, None, 1]
    assert [row.paper_rank for row in by_metric[TRAINING]] == [4, 3, None, 1, 2]
    assert [row.paper_mean for row in by_metric[TRAINING]] == [0.830, 0.708, None, 0.683, 0.696]
    assert [row.mean for row in by_metric[TEST]] == [0.5, pytest.approx(0.7), 0.5, None, 0.4]
    assert [row.paper_mean for row in by_metric[TEST]] == [0.809, 0.689, None, 0.686, 0.689]
    assert [row.mean for row in by_metric[SPEED]] == pytest.approx([10, 20, 5, None, 2.5])
    assert [row.rank for row in by_metric[SPEED]] == [2, 1, 3, None, 4]  # the fastest first
    assert [row.paper_rank for row in by_metric[SPEED]] == [3, 2, None, 1, 4]
    assert [row.diverged for row in by_metric[TEST]] == [0, 0, 0, 2, 1]


def test_a_ranked_row_as_text():
    row = rows()[0]
    assert isinstance(row, RankedRow)
    assert dict(zip(row.columns, row.cells, strict=True)) == {
        "optimizer": "Adam",
        "ours": "1.0000 ± 0.1414",
        "rank": "4",
        "from the best": "+0.5",
        "paper, full size": "0.8300 ± 0.0050",
        "paper's rank": "4",
        "seeds": "2",
    }
    assert rows()[2].cells == ("torch.SGD", "0.5000", "2", "+0.1", "", "", "2")
    assert rows()[3].cells == ("Yogi", "diverged", "", "", "0.6830 ± 0.0020", "1", "2")
    assert rows()[4].cells[-1] == "2 (1 diverged)"


def test_what_separates_from_the_best_is_measured_on_the_same_seed():
    results = {Cell("Adam"): curves(1.0, 2.0), Cell("LODO"): curves(1.25, 2.5), Cell("Yogi"): curves(3.0, 3.0)}
    best, second, third = rows(results=results)[:3]
    assert (best.behind, best.behind_std, best.cells[3]) == (0, 0, "")
    assert (second.behind, second.behind_std) == (pytest.approx(0.375), pytest.approx(0.25 / 2**0.5))
    assert second.cells[3] == "+0.38 ± 0.2"
    assert third.behind == pytest.approx(1.5)


def test_seconds_have_the_papers_other_table():
    assert [row.paper_mean for row in rows(seconds=3.0)[:2]] == [0.859, 0.698]
    assert rows(seconds=3.0)[5].paper_mean == 0.854


@pytest.mark.parametrize("largest_first", [False, True])
def test_ranks_do_not_depend_on_the_order_of_the_rows(largest_first):
    plain = [Row(name, "m", mean, None, 1, 0) for name, mean in (("a", 3.0), ("b", None), ("c", 1.0), ("d", 2.0))]
    for order in (plain, plain[::-1]):
        found = {row.optimizer: row.rank for row in ranked(order, [[]] * 4, largest_first)}
        assert found == {"a": 1 if largest_first else 3, "b": None, "c": 3 if largest_first else 1, "d": 2}
    assert all(row.paper_rank is None for row in ranked(plain, [[]] * 4))


def test_the_papers_figures_are_of_optimizers_that_are_run():
    labels = {choice.label for name in NAMES for choice in parse(experiments.load(name).optimizers)}
    for table in (*AT_300K.values(), *AT_50K_SECONDS.values(), PAPER_SPEED):
        assert table.keys() <= labels


def test_the_sentence():
    experiment = experiments.load("mnist")
    said = experiment.sentence(rows())
    assert said == f"Lowest {TRAINING} first: LODO 0.4, torch.SGD 0.5, Momentum 0.7, Adam 1."
    gone = {Cell("Yogi"): RESULTS[Cell("Yogi")]}
    assert experiment.sentence(rows(results=gone)) == "Every run diverged."


@pytest.mark.parametrize(
    ("digest", "said"),
    [
        (MNIST_DIGEST, "Data: the original mnist."),
        (DIGITS_DIGEST, "Data: scikit-learn's 8 x 8 digits."),
        ("0123456789ab", "Data: files that are NOT the original."),
    ],
)
def test_the_notes_say_what_the_data_is(digest, said):
    experiment = experiments.load("mnist")
    assert said in experiment.notes(experiment.request(), {Cell("Adam"): curves(0.1, digest=digest)})


def test_the_notes_say_the_batch_the_pixels_and_the_speed():
    experiment = experiments.load("mnist")
    notes = " ".join(experiment.notes(experiment.request(), RESULTS))
    assert "of each of 256 images" in notes
    assert "Validation: all pixels" in notes
    assert "Test: all pixels" in notes
    assert "LODO takes 0.25 times as many steps a second as Adam." in notes
    smaller = experiment.request(task_options={"batch": 32, "test_size": 1_000})
    notes = " ".join(experiment.notes(smaller, {Cell("Adam"): RESULTS[Cell("Adam")]}))
    assert "of each of 32 images" in notes
    assert "Test: 1,000 random pixels" in notes
    assert "times as many" not in notes


def test_the_ablations_say_what_is_known_of_the_papers():
    experiment = experiments.load("mnist-ablations")
    notes = " ".join(experiment.notes(experiment.request(), RESULTS))
    assert "LODO-Global is one learned rate" in notes
    assert "LODO-Diagonal as diverged" in notes


def test_the_last_tenth_of_the_measurements_counts():
    (curve,) = curves(0.1)
    assert last_tracked(curve, "validation_loss") == pytest.approx((3.8 + 4.0) / 2)
    assert last_tracked(curve, "accuracy") is None
    assert speed(curve) == pytest.approx(10)


# ---------------------------------------------------------------- figures


def test_the_learning_curves_have_every_optimizer_and_say_who_diverged(digits):
    experiment = experiments.load("mnist")
    (figure,) = experiment.figures(experiment.request(), RESULTS)
    pictures = experiment.draw_pictures(experiment.request(), RESULTS)
    assert [picture.name for picture in pictures] == ["mnist-inputs"]  # nothing to draw digits with
    drawing = draw(figure)
    left, middle, beside, right = drawing.axes
    (legend,) = drawing.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["Adam", "Momentum", "torch.SGD", "Yogi (2 of 2 diverged)", "LODO (1 of 2 diverged)"]
    (adam, *_) = right.get_lines()
    np.testing.assert_allclose(adam.get_xydata(), [(step, step / 10) for step in range(2, 41, 2)])
    assert middle.get_lines()[0].get_xdata().max() <= 4.0 < middle.get_lines()[-1].get_xdata().max()
    assert 0.5 < left.get_ylim()[1] < 2
    assert beside.get_title() == "Training, from torch.SGD on the same seed"  # the best of those that did not diverge
    ahead = {line.get_label(): line.get_ydata() for line in beside.get_lines()}
    assert ahead.keys() == {"Adam", "Momentum", "torch.SGD"}
    np.testing.assert_allclose(ahead["Adam"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(ahead["torch.SGD"], 0.0)


def test_figures_of_runs_that_all_diverged(digits):
    experiment = experiments.load("mnist")
    results = {Cell("Yogi"): curves(math.nan, 2.0, diverged={0, 1})}
    (figure,) = experiment.figures(experiment.request(), results)
    assert draw(figure).axes


def test_loss_against_momentum(digits):
    experiment = experiments.load("mnist-momentum")
    results = {Cell(f"LODO (beta={b})"): curves(1 + b, 1 + b, beta=b) for b in (0.0, 0.5, 0.9)}
    results[Cell("LODO (beta=0.95)")] = curves(1.0, diverged={0}, beta=0.95)
    by_beta, learning = experiment.figures(experiment.request(), results)
    assert (by_beta.name, learning.name) == ("mnist-momentum", "mnist-momentum-curves")
    assert not experiment.draw_pictures(experiment.request(), results)
    (axes,) = draw(by_beta).axes
    points = axes.get_lines()[0].get_xydata()
    np.testing.assert_allclose(points, [(1, 1), (0.5, 1.5), (0.1, 1.9)], rtol=1e-6)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "0.5", "0.9", "0.95"]
    diverged = by_beta.panels[0].lines[1]
    assert (diverged.label, diverged.symbol, *diverged.names) == ("diverged", "cross", "beta = 0.95: 1 of 1 runs")
    np.testing.assert_allclose(diverged.x, [0.05])
    assert axes.get_xscale() == "log"
    assert axes.xaxis_inverted()


def test_long_names_are_not_cut_off(digits):
    experiment = experiments.load("mnist-momentum")
    labels = [f"LODO (beta={b}, lr=0.1692, meta_lr=0.001271)" for b in (0.5, 0.789, 0.857, 0.9031, 0.9343)]
    results = {Cell(label): curves(1.0, 1.0, beta=0.1 * i) for i, label in enumerate(labels)}
    _, learning = experiment.figures(experiment.request(), results)
    with look():
        drawing = draw(learning)
        drawing.draw_without_rendering()
    whole = drawing.bbox
    for box in (drawing.legends[0].get_window_extent(), *(axes.title.get_window_extent() for axes in drawing.axes)):
        assert whole.x0 <= box.x0 <= box.x1 <= whole.x1


def test_every_value_of_beta_diverged():
    experiment = experiments.load("mnist-momentum")
    results = {Cell(f"LODO (beta={b})"): curves(1.0, diverged={0}, beta=b) for b in (0.0, 0.5)}
    by_beta, _ = experiment.figures(experiment.request(), results)
    assert [len(line.y) for line in by_beta.panels[0].lines] == [0, 2]
    assert draw(by_beta).axes


def test_the_picture_of_what_the_network_sees(digits):
    axes = draw(draw_inputs("inputs")).axes
    assert len(axes) == 25
    shown = np.stack([place.get_images()[0].get_array() for place in axes]).reshape(5, 5, 8, 8)
    known = shown[:, 2] > 0
    assert len(set(known.sum((1, 2)))) == 5
    images = digits.train.images[:5].numpy() / 256
    np.testing.assert_allclose(shown[:, 0], np.where(known, images, 0), atol=1e-7)


def test_images_side_by_side():
    images = np.arange(5 * 2 * 3).reshape(5, 2, 3).astype(np.uint8)
    whole = grid(images)
    assert whole.shape == (4, 9)
    assert whole.dtype == np.uint8
    for i in range(6):
        row, column = divmod(i, 3)
        part = whole[2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
        np.testing.assert_array_equal(part, images[i] if i < 5 else np.zeros((2, 3)))


def test_pictures_are_enlarged_and_keep_their_greys(tmp_path):
    pixels = np.array([[0, 100], [255, 7], [1, 2]], dtype=np.uint8)
    save_picture(pixels, tmp_path / "new" / "a.png", zoom=3)
    found = matplotlib.image.imread(tmp_path / "new" / "a.png")
    assert found.shape == (9, 6, 4)
    np.testing.assert_allclose(found[..., 0] * 255, pixels.repeat(3, 0).repeat(3, 1), atol=1.01)
    assert (found[..., 3] == 1).all()


# ---------------------------------------------------------------- the commands


def invoke(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    assert not result.exception or isinstance(result.exception, SystemExit)
    return " ".join(result.output.split())


@contextmanager
def without_variable():
    before = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before


QUICK = ("--quick", "--steps", 10, "--data", "digits", "--workers", 0)
TINY = ("--task", "batch=3, validation_size=6, test_size=9")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What `lodo run mnist` says and writes."""
    out = tmp_path_factory.mktemp("done")
    with without_variable():
        said = invoke("run", "mnist", *QUICK, *TINY, "--optimizers", "adam, lodo", "--out", out)
    return said, out


def test_the_command_writes_tables_figures_and_weights(done):
    said, out = done
    summary = json.loads((out / "mnist" / "summary.json").read_text())
    assert summary["settings"]["task_options"] == {"batch": 3, "validation_size": 6, "test_size": 9}
    assert summary["settings"]["hyperparameters"] is None
    assert [(row["optimizer"], row["metric"]) for row in summary["rows"]] == [
        (name, metric) for metric in (TRAINING, TEST, SPEED) for name in ("Adam", "LODO")
    ]
    for metric in (TRAINING, TEST, SPEED):
        group = [row for row in summary["rows"] if row["metric"] == metric]
        assert sorted(row["rank"] for row in group) == [1, 2]
        assert sorted(row["paper_rank"] for row in group) == [1, 2]
        better = max if metric == SPEED else min
        assert better(group, key=lambda row: row["mean"])["rank"] == 1
    for name in ("mnist", "mnist-inputs", "mnist-samples"):
        assert (out / "mnist" / f"{name}.png").stat().st_size > 5_000
        assert (out / "mnist" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert f"{name}.png" in said
    kinds = sorted(file.suffix for file in (out / "runs").iterdir())
    assert kinds == [".parquet", ".parquet", ".weights", ".weights"]


def test_the_command_says_size_data_and_batch(done):
    said, out = done
    table = (out / "mnist" / "table.md").read_text()
    for text in (said, table):
        assert "10 steps, 1 seed, batch = 3, validation_size = 6, test_size = 9: not the paper's task." in text
        assert "Data: scikit-learn's 8 x 8 digits." in text
        assert "of each of 3 images" in text
    assert "| optimizer | ours | rank | from the best | paper, full size | paper's rank | seeds |" in table
    assert "Lowest training loss" in said


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.slow
def test_the_other_two_experiments_at_a_toy_size(name, tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    chosen = "lodo_global, lodo_diagonal"
    if name == "mnist-momentum":
        chosen = ", ".join(f"lodo(beta={beta}, preconditioner='scalar')" for beta in (0.0, 0.9))
    out = invoke("run", name, *QUICK, *TINY, "--optimizers", chosen, "--out", tmp_path)
    rows = json.loads((tmp_path / name / "summary.json").read_text())["rows"]
    assert [row["optimizer"] for row in rows[:2]] == [choice.label for choice in parse(chosen)]
    assert all(row["mean"] is not None for row in rows)
    assert (tmp_path / name / f"{name}.png").exists()
    assert (tmp_path / name / f"{name}-samples.png").exists() == (name == "mnist-ablations")
    assert f"{name}.png" in out


def test_a_file_of_hyperparameters_is_used_and_named(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(MnistExperiment, "figures", lambda *_: [])
    monkeypatch.setattr(MnistExperiment, "draw_pictures", lambda *_: [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("[mnist]\nadam = { lr = 0.0123 }\n")
    args = ("--optimizers", "adam", "--hyperparameters", "mine.toml", "--out", tmp_path)
    out = invoke("run", "mnist", *QUICK, *TINY, *args)
    for text in (out, (tmp_path / "mnist" / "table.md").read_text()):
        assert "Hyperparameters from mine.toml." in text
    assert json.loads((tmp_path / "mnist" / "summary.json").read_text())["settings"]["hyperparameters"] == "mine.toml"
    (weights,) = (tmp_path / "runs").glob("*.weights")
    assert read_weights(weights)[0]["options"] == {"lr": 0.0123, "beta1": 0.9323, "beta2": 0.99505}


def test_drawn_digits_of_a_finished_run(done, tmp_path):
    _, out = done
    (weights,) = (out / "runs").glob("mnist-lodo-*.weights")
    picture = tmp_path / "my" / "digits.png"
    assert f"wrote {picture}" in invoke("sample", weights, "--out", picture, "--number", 5, "--seed", 2)
    found = matplotlib.image.imread(picture)
    assert found.shape == (2 * 8 * 4, 3 * 8 * 4, 4)
    images = sample(read_weights(weights)[1], 5, 8, torch.Generator().manual_seed(2)).numpy()
    np.testing.assert_array_equal(draw_images(read_weights(weights)[1], 5, 8, seed=2), images)
    np.testing.assert_allclose(found[::4, ::4, 0] * 255, grid(images), atol=1.01)


def test_drawn_digits_of_a_checkpoint(digits, tmp_path, monkeypatch):
    run = mnist_run("adam")
    interrupted(run, tmp_path, monkeypatch, 3)
    checkpoint = run.checkpoint_path(tmp_path)
    invoke("sample", checkpoint, "--out", tmp_path / "a.png")
    assert matplotlib.image.imread(tmp_path / "a.png").shape == (4 * 8 * 4, 4 * 8 * 4, 4)
    assert checkpoint.exists()


@pytest.mark.parametrize(("digest", "side"), [(DIGITS_DIGEST, 8), (MNIST_DIGEST, 28), ("0123456789ab", 28)])
def test_weights_know_the_size_of_their_digits(digest, side, tmp_path, monkeypatch):
    """Also without the data."""
    file, asked = tmp_path / "some.weights", []
    save_state(file, {"settings": mnist_run(digest=digest).settings, "params": [torch.ones(2)]})

    def draw(network, number, side, seed):
        asked.append((len(network), number, side, seed))
        return np.zeros((number, side, side), np.uint8)

    monkeypatch.setattr("lodo.lab.experiments.paper.mnist.draw_images", draw)
    invoke("sample", file, "--out", tmp_path / "a.png")
    assert asked == [(1, 16, side, 0)]
    assert matplotlib.image.imread(tmp_path / "a.png").shape == (4 * side * 4, 4 * side * 4, 4)


def test_what_cannot_be_drawn_with_is_refused_in_words(tmp_path, monkeypatch):
    bowl = Run("bowl", "adam", 0, 20, task_options={"n": 4})
    interrupted(bowl, tmp_path, monkeypatch, 3)
    (tmp_path / "text.weights").write_text("no weights")
    for file, expected in (
        (bowl.checkpoint_path(tmp_path), "weights must be of an mnist run, got one of bowl"),
        (tmp_path / "nothing.weights", "nothing.weights must be a whole file of weights"),
        (tmp_path / "text.weights", "missing or damaged"),
        (tmp_path, "directory"),
    ):
        said = invoke("sample", file, "--out", tmp_path / "a.png", code=1)
        assert "error:" in said
        assert expected in said
        assert "Traceback" not in said
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--task", "batch=0"), "batch must be an integer >= 1, got 0"),
        (("--task", "test_size=0"), "test_size must be an integer >= 1, got 0"),
        (("--optimizers", "lodo_no_momentum(beta=0.5)"), "lodo_no_momentum has no option 'beta'"),
        (("--hyperparameters", "nowhere.toml"), "hyperparameters must be a TOML file, got 'nowhere.toml'"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_written(args, said, tmp_path):
    found = invoke("run", "mnist", "--data", "digits", *args, "--out", tmp_path / "out", code=1)
    assert said in found
    assert not (tmp_path / "out").exists()


def test_another_batch_is_another_run(digits):
    experiment = experiments.load("mnist")
    names = set()
    for batch in (None, 64, 128):
        request = experiment.request(seeds=1, choices=[Choice("adam")], task_options={"batch": batch} if batch else {})
        ((run,),) = experiment.plan(request).values()
        names.add(run.name)
    assert len(names) == 3
    assert replace(run, seed=1).name not in names


def test_gradients_are_contiguous():
    """Optimizers may flatten them without a copy."""
    with using("digits"):
        task = Mnist(0, batch=3)
    task.evaluate()
    assert all(p.grad.is_contiguous() for p in task.params)


def test_digits_misspelled(tmp_path, monkeypatch):
    """Nothing is downloaded into a folder that nobody meant; one that is there is taken."""
    monkeypatch.chdir(tmp_path)
    message = r"data must be 'digits'.* got 'Digit'; did you mean 'digits'\?.* './Digit'"
    with pytest.raises(ValueError, match=message), using("Digit"):
        pass
    monkeypatch.setenv(VARIABLE, "Digit")
    with pytest.raises(ValueError, match=message.replace("data", VARIABLE)):
        data_folder()
    for folder in ("./Digit", tmp_path / "Digit"):
        with using(folder):
            assert data_folder() == tmp_path / "Digit"
    (tmp_path / "Digit").mkdir()
    with using("Digit"):
        assert data_folder() == tmp_path / "Digit"


def test_a_momentum_plot_needs_a_beta(tmp_path):
    experiment = experiments.load("mnist-momentum")
    with using("digits"), pytest.raises(ValueError, match=r"optimizers must have an option beta.* got Adam"):
        experiment.plan(experiment.request(quick=True, choices=parse("adam")))
