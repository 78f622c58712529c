"""Image classification: the networks, the task against other formulas, and its runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d, cross_entropy, linear

from digits import REAL_CIFAR10
from interruptions import interrupted, same_but_for_time
from lodo.lab import data
from lodo.lab.data import Dataset, Labelled, using
from lodo.lab.optimizers import build, parse
from lodo.lab.run import Run, execute, load_curve, threads
from lodo.lab.tasks import TASKS, cifar10, make_task
from lodo.lab.tasks.cifar10 import MOMENTUM, Cifar10, augmented, micro_batch_momenta, moments
from lodo.lab.tasks.resnet import MODELS, ResNet, count_weights, resnet

SIDE, TRAIN, TEST = 16, 60, 24
SMALL = {"model": "resnet8", "batch": 12, "micro_batch": 12}


def imitation(seed=0, train=TRAIN, test=TEST):
    """Ten random patterns in three colours under noise."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 200, (10, 3, SIDE, SIDE))

    def some(number):
        labels = rng.permutation(number) % 10
        images = patterns[labels] + rng.integers(0, 56, (number, 3, SIDE, SIDE))
        return Labelled(torch.from_numpy(images).byte(), torch.from_numpy(labels).byte())

    return Dataset(some(train), some(test), f"imitation{seed}")


@pytest.fixture
def images(_known):
    return data.load("cifar10")


@pytest.fixture
def _known():
    """A small imitation of CIFAR-10, and the task by its name, on one thread."""
    found = imitation()
    with pytest.MonkeyPatch.context() as patch, threads(1):
        patch.setattr(data, "load", lambda name: {"cifar10": found}[name])
        patch.setitem(TASKS, "cifar10", Cifar10)
        patch.setattr(Cifar10, "threads", 1)
        yield


def small(seed=0, **options):
    return Cifar10(seed, **{**SMALL, **options})


def drawn(task, times=1):
    for _ in range(times):
        task.draw()
    return task


def losses_of(task, optimizer, steps):
    losses = []
    for _ in range(steps):
        task.draw()
        losses.append(optimizer.step(task.evaluate))
    return losses


def everything(task):
    """All that a checkpoint holds."""
    state = task.state_dict()
    return [state["rng"], *state["params"], *state["buffers"].values()]


def same(a, b):
    return all(map(torch.equal, a, b))


# ---------------------------------------------------------------- other formulas


def scores_of(params, x, stages, statistics=()):
    """The network written out; ``statistics`` has running means and variances, else those of x are used."""
    params, statistics = iter(params), iter(statistics)

    def convolution(x, side, stride):
        x = conv2d(x, next(params), stride=stride, padding=side // 2)
        mean = next(statistics, x.mean((0, 2, 3)))
        variance = next(statistics, x.var((0, 2, 3), correction=0))
        x = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt()
        return x * next(params)[:, None, None] + next(params)[:, None, None]

    x = convolution(x, 3, 1).relu()
    for i, (_, number) in enumerate(stages):
        for j in range(number):
            stride = 2 if i and not j else 1
            y = convolution(convolution(x, 3, stride).relu(), 3, 1)
            x = (y + (x if stride == 1 else convolution(x, 1, stride))).relu()
    return linear(x.mean((2, 3)), next(params), next(params))


def inputs_of(task, part=slice(None)):
    """What the network is shown, pixel by pixel."""
    images, labels = task.train
    mean, deviation = images.double().mean((0, 2, 3)), images.double().std((0, 2, 3), correction=0)
    side, pad = images.shape[-1], task.padding
    shown = []
    for index, (row, column), mirrored in zip(
        task.batch[part].tolist(), task.corner[part].tolist(), task.mirrored[part].tolist(), strict=True
    ):
        padded = torch.zeros(3, side + 2 * pad, side + 2 * pad, dtype=torch.float64)
        padded[:, pad : pad + side, pad : pad + side] = images[index]
        cropped = padded[:, row : row + side, column : column + side]
        shown.append(cropped.flip(2) if mirrored else cropped)
    return (torch.stack(shown) - mean[:, None, None]) / deviation[:, None, None], labels[task.batch[part]]


def expected(task, parts, stages, l2):
    """Loss and gradient, as the mean over parts of the batch, and the L2 term."""
    params = [p.detach().double().requires_grad_() for p in task.params]
    loss = sum(cross_entropy(scores_of(params, x, stages), y) for x, y in (inputs_of(task, part) for part in parts))
    loss = loss / len(parts) + l2 * sum(p.square().sum() for p in params if p.ndim > 1)
    return loss.item(), torch.autograd.grad(loss, params)


def assert_evaluates_to(task, wanted):
    loss, grads = wanted
    assert task.evaluate() == pytest.approx(loss, rel=1e-5)
    for p, g in zip(task.params, grads, strict=True):
        assert p.grad.is_contiguous()
        torch.testing.assert_close(p.grad.double(), g, rtol=1e-3, atol=1e-5 * max(1.0, g.abs().max().item()))


def shaken(task):
    """Weights of batch norm and biases that matter."""
    for p in task.params:
        if p.ndim == 1:
            p.data.add_(0.2 * torch.randn(p.shape))
    return task


# ---------------------------------------------------------------- networks


def test_numbers_of_weights():
    assert {model: count_weights(model) for model in MODELS} == {
        "resnet18": 11_173_962,
        "resnet20": 272_474,
        "resnet8": 78_042,
        "narrow8": 19_954,
    }
    for model in MODELS:
        assert sum(p.numel() for p in resnet(model, torch.Generator()).parameters()) == count_weights(model)
    with pytest.raises(ValueError, match=r"model must be one of 'resnet18', .*, got 'vgg'"):
        count_weights("vgg")


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        ("resnet18", [(64, 32), (64, 32), (128, 16), (128, 16), (256, 8), (256, 8), (512, 4), (512, 4)]),
        ("resnet8", [(16, 32), (32, 16), (64, 8)]),
    ],
)
def test_shapes(model, shapes):
    with torch.device("meta"):
        net = ResNet(MODELS[model])
        seen = []
        for block in net.blocks:
            block.register_forward_hook(lambda module, given, out: seen.append((out.shape[1], out.shape[2])))
        assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert seen == shapes


def test_the_weights_first_sizes():
    net = resnet("resnet18", torch.Generator().manual_seed(0))
    for module in net.modules():
        if isinstance(module, torch.nn.Conv2d):
            wanted = math.sqrt(2 / (module.out_channels * module.kernel_size[0] ** 2))
            assert module.weight.std().item() == pytest.approx(wanted, rel=5 / math.sqrt(2 * module.weight.numel()))
            assert abs(module.weight.mean().item()) < 5 * wanted / math.sqrt(module.weight.numel())
        elif isinstance(module, torch.nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert not module.bias.any()
            assert not module.running_mean.any()
            assert (module.running_var == 1).all()
            assert module.num_batches_tracked == 0
    for p in net.last.parameters():
        assert 0.5 < p.abs().max().item() * 512**0.5 <= 1


def test_only_the_seed_draws_weights():
    before = torch.get_rng_state()
    first, again = (resnet("resnet8", torch.Generator().manual_seed(5)) for _ in range(2))
    other = resnet("resnet8", torch.Generator().manual_seed(6))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(first.parameters(), again.parameters())
    assert not torch.equal(first.last.weight, other.last.weight)


# ---------------------------------------------------------------- images


def test_crops_and_mirrors_of_a_known_image():
    image = torch.arange(1, 19, dtype=torch.uint8).view(1, 2, 3, 3)
    corners = [(row, column) for row in range(5) for column in range(5)]
    for mirrored in (False, True):
        found = augmented(
            image.expand(25, -1, -1, -1), torch.tensor(corners), torch.tensor([mirrored]).expand(25), padding=2
        )
        assert found.dtype == torch.uint8
        for (row, column), crop in zip(corners, found, strict=True):
            padded = np.pad(image[0].numpy(), ((0, 0), (2, 2), (2, 2)))[:, row : row + 3, column : column + 3]
            np.testing.assert_array_equal(crop, padded[:, :, ::-1] if mirrored else padded)


def test_corners_and_mirrors_are_drawn_evenly(images):
    task = small(batch=60, micro_batch=60)
    corners, mirrored = [], []
    for _ in range(60):
        task.draw()
        corners.append(task.corner.clone())
        mirrored.append(task.mirrored.clone())
    assert task.padding == SIDE // 8
    for along in torch.cat(corners).T:
        assert along.bincount().double() / 3600 == pytest.approx([0.2] * 5, abs=0.03)
    assert 0.46 < torch.cat(mirrored).double().mean() < 0.54


def test_images_of_32_pixels_are_padded_by_4(monkeypatch):
    blank = Labelled(torch.randint(256, (4, 3, 32, 32)).byte(), torch.arange(4).byte())
    monkeypatch.setattr(data, "load", lambda name: Dataset(blank, blank, ""))
    task = Cifar10(0, model="resnet8", batch=4)
    assert task.padding == 4
    seen = torch.cat([drawn(task).corner.clone() for _ in range(50)])
    assert seen.unique().tolist() == list(range(9))


def test_moments():
    some = torch.randint(256, (7, 3, 5, 6)).byte()
    mean, deviation = moments(some)
    torch.testing.assert_close(mean, some.double().mean((0, 2, 3)).float())
    torch.testing.assert_close(deviation, some.double().std((0, 2, 3), correction=0).float())


def test_before_the_first_draw_there_are_the_first_images_as_they_are(images):
    x, y = inputs_of(small())
    raw = images.train.images.double()
    mean, deviation = raw.mean((0, 2, 3), keepdim=True), raw.std((0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(x, ((raw - mean) / deviation)[:12])
    assert torch.equal(y, images.train.labels[:12].long())


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("batch", [12, 7, 60, 25])
def test_an_epoch_visits_every_image_once(images, batch):
    task = small(batch=batch, micro_batch=batch)
    seen = torch.cat([drawn(task).batch.clone() for _ in range(-(-150 // batch))])
    epochs = seen[: len(seen) // TRAIN * TRAIN].view(-1, TRAIN)
    assert same(epochs.sort(1).values, torch.arange(TRAIN).expand(len(epochs), -1))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == len(epochs)
    assert not torch.equal(epochs[0], torch.arange(TRAIN))


def test_a_batch_larger_than_the_training_set(images):
    task = drawn(small(batch=25, micro_batch=25, train_size=10))
    assert sorted(task.batch.bincount().tolist()) == [2] * 5 + [3] * 5
    assert math.isfinite(task.evaluate())


def test_sizes_take_the_first_images(images):
    task = small(train_size=20, test_size=10)
    assert torch.equal(task.train[0], images.train.images[:20])
    assert torch.equal(task.test[1], images.test.labels[:10].long())
    assert max(int(drawn(task).batch.max()) for _ in range(10)) == 19


def test_test_images_have_no_part_in_training(images, monkeypatch):
    def trained():
        task = drawn(small())
        optimizer = build("adam", task, 0, {"lr": 0.01})
        return losses_of(task, optimizer, 4), [p.detach() for p in task.params], task.tracked(optimizer, 4)

    first = trained()
    other = Labelled(255 - images.test.images, images.test.labels)
    monkeypatch.setattr(data, "load", lambda name: Dataset(images.train, other, ""))
    second = trained()
    assert first[0] == second[0]
    assert same(first[1], second[1])
    assert first[2] != second[2]


def test_the_seed_decides_and_the_optimizer_has_no_part_in_it(images):
    def draws(seed, optimizer):
        task = small(seed)
        made = build(optimizer, task, seed, {})
        seen = []
        for _ in range(6):
            task.draw()
            made.step(task.evaluate)
            seen += [task.batch.clone(), task.corner.clone(), task.mirrored.clone()]
        return seen

    first = draws(3, "adam")
    assert same(first, draws(3, "lodo"))
    assert not same(first, draws(4, "adam"))


# ---------------------------------------------------------------- loss and gradient


@pytest.mark.parametrize("model", ["resnet8", "resnet20"])
@pytest.mark.parametrize("l2", [0.0, 0.01])
def test_loss_and_gradient_are_those_of_the_formulas(images, model, l2):
    task = shaken(drawn(small(model=model, l2=l2), 2))
    wanted = expected(task, [slice(None)], MODELS[model], l2)
    assert_evaluates_to(task, wanted)
    assert task.loss().item() == pytest.approx(wanted[0], rel=1e-5)


@pytest.mark.parametrize("micro", [4, 6])
def test_micro_batches_are_averaged(images, micro):
    task = shaken(drawn(small(micro_batch=micro)))
    parts = [slice(at, at + micro) for at in range(0, 12, micro)]
    wanted = expected(task, parts, MODELS["resnet8"], task.l2)
    assert_evaluates_to(task, wanted)
    assert abs(wanted[0] - expected(task, [slice(None)], MODELS["resnet8"], task.l2)[0]) > 1e-3


def test_one_micro_batch_is_plain_autograd(images):
    task = drawn(small())
    loss = task.loss()
    loss.backward()
    plain = [p.grad for p in task.params]
    assert task.evaluate() == pytest.approx(loss.item(), rel=1e-6)
    for p, g in zip(task.params, plain, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)


def test_the_gradient_of_the_l2_term(images):
    without, with_it = (drawn(small(l2=l2)) for l2 in (0.0, 0.5))
    losses = without.evaluate(), with_it.evaluate()
    squares = 0.0
    for p, q in zip(without.params, with_it.params, strict=True):
        decay = p.detach() if p.ndim in (2, 4) else torch.zeros_like(p)
        torch.testing.assert_close(q.grad, p.grad + decay)  # 2 * 0.5
        squares += decay.square().sum().item()
    assert losses[1] - losses[0] == pytest.approx(0.5 * squares, rel=1e-5)


def test_a_gradient_to_differentiate_again(images):
    task = drawn(small())
    value = task.evaluate()
    plain = [p.grad for p in task.params]
    again = drawn(small())
    assert again.evaluate(create_graph=True) == pytest.approx(value, rel=1e-6)
    for p, g in zip(again.params, plain, strict=True):
        torch.testing.assert_close(p.grad.detach(), g, rtol=1e-4, atol=1e-6)
    assert again.params[0].grad.requires_grad
    assert same(task.buffers().values(), again.buffers().values())
    optimizer = build("pytorch_optimizer.adahessian", again, 0, {"lr": 1e-3})
    assert math.isfinite(optimizer.step(lambda: again.evaluate(create_graph=True)))
    several = small(micro_batch=4)
    with pytest.raises(ValueError, match=r"create_graph must be False with 3 micro-batches, got True.*batch = 12"):
        several.evaluate(create_graph=True)


# ---------------------------------------------------------------- running statistics


@pytest.mark.parametrize("micro", [12, 4])
def test_running_statistics_move_once_a_batch(images, micro):
    task = drawn(small(micro_batch=micro))
    seen = []
    task.model.stem[0].register_forward_hook(lambda module, given, out: seen.append(out.detach().double()))
    task.evaluate()
    assert len(seen) == 12 // micro
    mean = torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0)
    variance = torch.stack([x.var((0, 2, 3)) for x in seen]).mean(0)
    norm = task.model.stem[1]
    torch.testing.assert_close(norm.running_mean.double(), MOMENTUM * mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norm.running_var.double(), 1 - MOMENTUM + MOMENTUM * variance, rtol=1e-4, atol=1e-6)
    moved = norm.running_mean.clone()
    task.evaluate()
    task.loss()
    assert torch.equal(norm.running_mean, moved)
    drawn(task).evaluate()
    assert not torch.equal(norm.running_mean, moved)


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_shares_count_micro_batches_alike(parts):
    left = [1.0]
    for share in micro_batch_momenta(parts):
        left = [weight * (1 - share) for weight in left] + [share]
    assert left == pytest.approx([1 - MOMENTUM] + [MOMENTUM / parts] * parts)


@pytest.mark.parametrize("micro", [12, 4])
def test_evaluating_twice_changes_nothing(images, micro):
    task = drawn(small(micro_batch=micro))
    loss = task.evaluate()
    grads = [p.grad.clone() for p in task.params]
    before = [x.clone() for x in everything(task)]
    assert task.evaluate() == loss
    assert same([p.grad for p in task.params], grads)
    assert same(everything(task), before)


# ---------------------------------------------------------------- measurements


def test_measurements_are_those_of_the_formulas(images, monkeypatch):
    task = shaken(small())
    for _ in range(3):
        drawn(task).evaluate()
    mean, deviation = (x.double()[:, None, None] for x in moments(images.train.images))
    statistics = [x.double() for x in task.model.buffers() if x.is_floating_point()]
    params = [p.detach().double() for p in task.params]
    x, y = (images.test.images.double() - mean) / deviation, images.test.labels.long()
    scores = scores_of(params, x, MODELS["resnet8"], statistics)
    found = task.tracked(None, 0)
    assert found["test_loss"] == pytest.approx(cross_entropy(scores, y).item(), rel=1e-5)
    assert found["test_accuracy"] == (scores.argmax(1) == y).sum().item() / TEST
    monkeypatch.setattr(cifar10, "_TESTED_AT_ONCE", 7)
    assert task.tracked(None, 0) == pytest.approx(found, rel=1e-5)


def test_measuring_changes_nothing(images):
    task, other = drawn(small()), drawn(small())
    task.tracked(None, 5)
    assert same(everything(task), everything(other))
    assert task.evaluate() == other.evaluate()
    task.tracked(None, 6)
    assert same(everything(task), everything(other))
    assert drawn(task).evaluate() == drawn(other).evaluate()


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_state_brings_everything_back(images, evaluated):
    task, other = drawn(small(), 7), drawn(small(1), 2)
    if evaluated:
        task.evaluate()
    other.evaluate()
    other.load_state_dict(task.state_dict())
    for _ in range(3):
        assert other.evaluate() == task.evaluate()
        assert same(everything(task), everything(other))
        drawn(task)
        drawn(other)


@pytest.mark.parametrize(
    "call", ["adam(lr=0.01)", "lodo", pytest.param("lodo(recipe='robust')", marks=pytest.mark.slow), "lbfgs"]
)
def test_an_interrupted_run_resumes_bit_for_bit(images, call, tmp_path, monkeypatch):
    (choice,) = parse(call)
    options = {**SMALL, "micro_batch": 4, "train_size": 50, "digest": images.digest}
    run = Run("cifar10", choice.optimizer, 0, 14, task_options=options, options=choice.options, track_every=3)
    execute(run, tmp_path / "whole")
    interrupted(run, tmp_path / "parts", monkeypatch, 5)
    execute(run, tmp_path / "parts")
    whole = load_curve(run, tmp_path / "whole")
    assert whole["evaluations"][-1] == 14
    assert np.isfinite(whole["test_accuracy"]).sum() == np.isfinite(whole["test_loss"]).sum() == len(whole["loss"]) // 3
    same_but_for_time(whole, load_curve(run, tmp_path / "parts"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "resnet9"}, "model must be one of 'resnet18', 'resnet20', 'resnet8', 'narrow8', got 'resnet9'"),
        ({"batch": 1}, "batch must be an integer >= 2, got 1"),
        ({"batch": 12.0}, "batch must be an integer >= 2, got 12.0"),
        ({"micro_batch": 0}, "micro_batch must be an integer >= 2, got 0"),
        ({"batch": 12, "micro_batch": 5}, "micro_batch must be at least batch or a divisor .* got 5 with batch = 12"),
        ({"train_size": 0}, "train_size must be an integer >= 1 and <= 60, got 0"),
        ({"train_size": 61}, "train_size must be an integer >= 1 and <= 60, got 61"),
        ({"test_size": 25}, "test_size must be an integer >= 1 and <= 24, got 25"),
        ({"l2": -1e-4}, r"l2 must be a finite number in \[0.0, inf\), got -0.0001"),
        ({"l2": math.nan}, "l2 must be a finite number"),
        ({"digest": "abc"}, "digest must be that of the data"),
        ({"layers": 3}, "cifar10 has no option 'layers'. Its options: model, "),
    ],
)
def test_bad_options_are_named(images, options, said):
    with pytest.raises(ValueError, match=said):
        make_task("cifar10", {**SMALL, **options}, 0)


def test_a_micro_batch_may_exceed_the_batch(images):
    task, other = (drawn(small(micro_batch=micro)) for micro in (12, 1000))
    assert task.evaluate() == other.evaluate()


# ---------------------------------------------------------------- learning


@pytest.mark.parametrize("call", ["adam(lr=0.01)", "lodo", "lodo(recipe='robust')"])
def test_images_are_learned(images, call):
    (choice,) = parse(call)
    task = small(batch=30, micro_batch=30)
    optimizer = build(choice.optimizer, task, 0, choice.options)
    losses = losses_of(task, optimizer, 30)
    assert np.mean(losses[-5:]) < 0.7 * losses[0]


def test_digits_take_the_place_of_the_images():
    pytest.importorskip("sklearn")
    with using("digits"), threads(1):
        task = Cifar10(0, model="resnet8", batch=100, micro_batch=50)
        assert task.train[0].shape == (1500, 3, 8, 8)
        assert torch.equal(task.train[0][:, 0], task.train[0][:, 2])
        assert task.padding == 1
        optimizer = build("lodo", task, 0, {})
        losses = losses_of(task, optimizer, 25)
        assert np.mean(losses[-5:]) < 0.8 * losses[0]
        assert task.tracked(optimizer, 25).keys() == {"test_accuracy", "test_loss"}


@pytest.mark.skipif(not REAL_CIFAR10, reason="LODO_DATA has no CIFAR-10")
def test_real_images():
    task = Cifar10(0, model="resnet8", batch=256, test_size=500)
    assert task.train[0].shape[1:] == (3, 32, 32)
    optimizer = build("adam", task, 0, {"lr": 0.01})
    losses = losses_of(task, optimizer, 20)
    assert losses[-1] < losses[0]
    assert task.tracked(optimizer, 20)["test_accuracy"] > 0.1
