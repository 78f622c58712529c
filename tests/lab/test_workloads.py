"""The networks of the benchmark as tasks: their formulas, their randomness, their validation, and the text for them."""

from __future__ import annotations

import copy
import hashlib
import io
import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import cross_entropy

from digits import REAL, REAL_CIFAR10, REAL_TEXT, take_offline
from interruptions import interrupted, same_but_for_time
from lodo.lab import compare, data
from lodo.lab.data import SHAKESPEARE_DIGEST, VARIABLE, load_library, load_text, read_text, using
from lodo.lab.data.text import MODULES
from lodo.lab.optimizers import evaluating
from lodo.lab.run import Run, execute, load_curve
from lodo.lab.tasks import make_task
from lodo.lab.tasks.autoencoder import Autoencoder
from lodo.lab.tasks.cnn import Cnn
from lodo.lab.tasks.denoise import Denoise, noisy
from lodo.lab.tasks.gpt import CharacterTransformer, Gpt
from lodo.lab.tasks.gru import Gru, Recurrent
from lodo.lab.tasks.mlp import shrink
from lodo.lab.tasks.network import Network, enlarge
from lodo.lab.tasks.transformer import Block
from lodo.lab.tasks.vit import VisionTransformer

TEXTS = ("gru", "gpt")
IMAGES = ("autoencoder", "cnn", "vit", "denoise")
WORKLOADS = ("mlp", *IMAGES, "resnet8", *TEXTS)
BATCH = 4  # small, so that the tests are fast


@pytest.fixture(autouse=True)
def nobody(tmp_path, monkeypatch):
    """No test goes to the real network or into the user's cache, and none needs files."""
    take_offline(monkeypatch, tmp_path / "cache")


@pytest.fixture
def bundled():
    with using("digits"):
        yield


def make(name, seed=0, batch=BATCH):
    return make_task(name, {"batch": batch}, seed)


def train(task, optimizer, steps):
    losses = []
    for _ in range(steps):
        task.draw()
        losses.append(task.evaluate())
        optimizer.step()
    return losses


def adam(task):
    return torch.optim.AdamW(task.params, lr=3e-3)


def values(task):
    return [p.detach().clone() for p in task.params]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


# ---------------------------------------------------------------- what all have in common


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_seed_decides_and_the_optimizer_has_no_part_in_it(bundled, name):
    def seen(seed, optimizer):
        task = make(name, seed)
        first, made, batches = values(task), optimizer(task.params, lr=1e-3), []
        for _ in range(3):
            task.draw()
            batches += [buffer.clone() for key, buffer in task.buffers().items() if "running" not in key]
            task.evaluate()
            made.step()
        return first, batches

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, batches = seen(3, torch.optim.AdamW)
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator is left alone"
    torch.manual_seed(2)
    again, others = seen(3, torch.optim.SGD)
    assert same(first, again)
    assert same(batches, others)
    third, more = seen(4, torch.optim.AdamW)
    assert not same(first, third)
    assert not same(batches, more)
    count = len(batches) // 3
    assert not same(batches[:count], batches[count : 2 * count]), "every step has a batch of its own"


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_state_brings_everything_back(bundled, name):
    task, other = make(name, 1), make(name, 2)
    optimizer, resumed = adam(task), adam(other)
    train(task, optimizer, 2)
    state = copy.deepcopy([task.state_dict(), optimizer.state_dict()])
    losses = train(task, optimizer, 2)
    other.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    assert train(other, resumed, 2) == losses
    assert same(values(task), values(other))
    assert task.tracked(optimizer, 4) == other.tracked(resumed, 4)


@pytest.mark.parametrize("name", ["resnet8", "denoise", "gpt"])
def test_an_interrupted_run_resumes_bit_for_bit(bundled, name, tmp_path, monkeypatch):
    run = Run(name, "torch.AdamW", 0, 5, task_options={"batch": BATCH}, options={"lr": 1e-3}, track_every=2)
    execute(run, tmp_path / "straight")
    straight = load_curve(run, tmp_path / "straight")
    interrupted(run, tmp_path / "resumed", monkeypatch, after=3)
    with using("digits"):
        execute(run, tmp_path / "resumed")
    same_but_for_time(straight, load_curve(run, tmp_path / "resumed"))
    assert np.isfinite(straight["validation_loss"]).sum() > 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_validation_is_the_same_again_and_changes_nothing(bundled, name):
    task = make(name)
    optimizer = adam(task)
    train(task, optimizer, 1)
    before = copy.deepcopy(task.state_dict())
    state, loss = torch.get_rng_state(), task.evaluate()
    found = task.tracked(optimizer, 1)
    assert math.isfinite(found["validation_loss"])
    assert found.keys() - {"test_accuracy"} == {"validation_loss"}
    assert ("test_accuracy" in found) == (name in {"mlp", "cnn", "vit", "resnet8"})
    assert task.tracked(optimizer, 2) == found
    after = task.state_dict()
    assert torch.equal(before["rng"], after["rng"])
    assert same(before["params"], after["params"])
    assert same(list(before["buffers"].values()), list(after["buffers"].values()))
    assert torch.equal(state, torch.get_rng_state())
    assert task.evaluate() == loss


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_validation_set_does_not_depend_on_the_seed(bundled, name):
    task, other = make(name, 1), make(name, 2)
    with torch.no_grad():
        for p, q in zip(task.params, other.params, strict=True):
            q.copy_(p)
    assert task.tracked(None, 0) == other.tracked(None, 0)


class Shrinks(torch.optim.SGD):
    """Is to be evaluated at half its weights."""

    def eval(self):
        self._scale(0.5)

    def train(self):
        self._scale(2.0)

    @torch.no_grad()
    def _scale(self, factor):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(factor)


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_optimizer_is_evaluated_where_it_wants_to_be(bundled, name):
    task, half = make(name), make(name)
    with torch.no_grad():
        for p in half.params:
            p.mul_(0.5)
    before = values(task)
    with evaluating(Shrinks(task.params, lr=0.1), task.params):
        found = task.tracked(None, 0)
    assert found == half.tracked(None, 0)
    assert found != task.tracked(None, 0)
    assert same(before, values(task))


def test_an_optimizer_returns_to_training_after_an_error(bundled, monkeypatch):
    task = make("cnn")
    before = values(task)
    monkeypatch.setattr(task, "logits", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), evaluating(Shrinks(task.params, lr=0.1), task.params):
        task.tracked(None, 0)
    assert same(before, values(task))


@pytest.mark.parametrize(
    ("name", "steps", "share"),
    [
        ("mlp", 40, 0.6),
        ("autoencoder", 20, 0.6),
        ("cnn", 25, 0.5),
        ("vit", 30, 0.9),
        ("denoise", 25, 0.6),
        ("resnet8", 40, 0.9),
        ("gru", 25, 0.75),
        ("gpt", 20, 0.85),
    ],
)
def test_it_is_learned(bundled, name, steps, share):
    task = make(name, batch=16 if name != "gpt" else 8)
    before = task.tracked(None, 0)["validation_loss"]
    train(task, adam(task), steps)
    assert task.tracked(None, steps)["validation_loss"] < share * before


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "^batch must be an integer >= [12], got 0"),
        ({"digest": "abc"}, "^digest must be that of the data in 'digits'"),
        ({"depth": 3}, "has no option 'depth'. Its options: .*batch"),
    ],
)
def test_bad_options_are_named(bundled, name, options, said):
    with pytest.raises(ValueError, match=said):
        make_task(name, options, 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_digest_of_the_data_is_accepted(bundled, name):
    digest = load_library().digest if name in TEXTS else data.DIGITS_DIGEST
    assert make_task(name, {"digest": digest}, 0).threads == 1


def test_a_workload_of_ones_own_is_short():
    class Line(Network):
        def __init__(self, seed):
            super().__init__(seed)
            self.begin(lambda: nn.Linear(1, 1))

        def sample(self):
            return {"x": torch.randn(5, 1, generator=self.rng)}

        def loss(self):
            return (self.module(self.batch["x"]) - 3 * self.batch["x"]).square().mean()

        def validate(self):
            return {"validation_loss": float((self.module.weight - 3).square() + self.module.bias.square())}

    task = Line(0)
    train(task, torch.optim.SGD(task.params, lr=0.1), 100)
    assert task.tracked(None, 100)["validation_loss"] < 1e-3


# ---------------------------------------------------------------- images


def test_small_digits_are_enlarged_to_what_shrinks_to_them_again():
    images = data.load_digits().test.images
    large = enlarge(images)
    assert large.shape == (297, 28, 28)
    assert torch.equal(shrink(large), 9 * images.flatten(1).int())
    assert enlarge(large) is large


@pytest.mark.parametrize("name", IMAGES)
def test_images_come_from_the_whole_training_set(bundled, name):
    task = make(name, batch=500)
    picks = []
    for _ in range(15):
        task.draw()
        picks.append(task.batch["picks"])
    found = torch.cat(picks).unique()
    assert len(found) > 1450
    assert (found[0] >= 0) & (found[-1] < 1500)
    assert len(picks[0].unique()) < 500, "with replacement"


def test_the_classifiers_loss_and_validation(bundled):
    task, digits = Cnn(0, batch=6), data.load_digits()
    pixels = enlarge(digits.train.images).double()
    picks = task.batch["picks"]
    shown = ((pixels - pixels.mean()) / pixels.std(correction=0)).float()[picks, None]
    wanted = cross_entropy(task.module(shown), digits.train.labels[picks].long())
    assert task.evaluate() == pytest.approx(wanted.item(), rel=1e-5)
    tested = ((enlarge(digits.test.images).double() - pixels.mean()) / pixels.std(correction=0)).float()[:, None]
    logits, labels = task.module(tested), digits.test.labels.long()
    found = task.tracked(None, 0)
    assert found["validation_loss"] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)
    assert found["test_accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())


def test_the_autoencoders_loss(bundled):
    task, digits = Autoencoder(0, batch=3), data.load_digits()
    pixels = enlarge(digits.train.images)[task.batch["picks"]].flatten(1).double() / 255
    shares = task.module(pixels.float()).double().sigmoid()
    nats = -(pixels * shares.log() + (1 - pixels) * (1 - shares).log())
    assert task.evaluate() == pytest.approx(nats.sum(1).mean().item(), rel=1e-5)
    assert [tuple(p.shape) for p in task.params[::2]] == [
        (256, 784),
        (64, 256),
        (16, 64),
        (64, 16),
        (256, 64),
        (784, 256),
    ]


def test_noise_keeps_the_variance_and_the_loss_is_its_mean_square_error(bundled):
    task = Denoise(0, batch=3)
    images, levels, noise = task.images[task.batch["picks"]], task.batch["levels"], task.batch["noise"]
    assert ((levels >= 0) & (levels < 1)).all()
    assert noise.shape == (3, 1, 32, 32)
    assert noise.std() == pytest.approx(1, abs=0.1)
    shown = noisy(images, levels, noise)
    for k in range(3):
        clean = -torch.ones(32, 32)
        clean[2:30, 2:30] = images[k].float() / 127.5 - 1
        angle = math.pi / 2 * levels[k].item()
        torch.testing.assert_close(shown[k, 0], math.cos(angle) * clean + math.sin(angle) * noise[k, 0])
    error = task.module(shown, levels) - noise
    assert task.evaluate() == pytest.approx(error.square().mean().item(), rel=1e-5)
    moved = task.module(shown, levels + 0.3)
    assert not torch.allclose(moved, task.module(shown, levels), atol=1e-3), "the level matters"


def test_patches_are_those_of_a_convolution():
    network, images, seen = VisionTransformer(), torch.randn(2, 1, 28, 28), []
    network.blocks.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    network(images)
    kernel = network.patches.weight.view(64, 1, 4, 4)
    wanted = torch.conv2d(images, kernel, network.patches.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(seen[0], wanted + network.positions)


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_is_torchs_encoder_layer(causal):
    block = Block(64, 4, causal=causal)
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
    for own, theirs in (
        (block.attention_norm, layer.norm1),
        (block.attention_out, layer.self_attn.out_proj),
        (block.norm, layer.norm2),
        (block.hidden, layer.linear1),
        (block.out, layer.linear2),
    ):
        theirs.load_state_dict(own.state_dict())
    layer.self_attn.in_proj_weight.data.copy_(block.attention_in.weight)
    layer.self_attn.in_proj_bias.data.copy_(block.attention_in.bias)
    x = torch.randn(2, 7, 64)
    mask = nn.Transformer.generate_square_subsequent_mask(7) if causal else None
    torch.testing.assert_close(block(x), layer(x, src_mask=mask), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("make_network", [CharacterTransformer, Recurrent])
def test_a_prediction_depends_on_what_came_before_and_on_nothing_else(make_network):
    network, indices = make_network(9), torch.randint(9, (1, 64))
    logits = network(indices)
    for at in (1, 30, 63):
        changed = indices.clone()
        changed[0, at] = (changed[0, at] + 1) % 9
        other = network(changed)
        torch.testing.assert_close(other[:, :at], logits[:, :at], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(other[:, at:], logits[:, at:], atol=1e-4)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def numbered(length):
    """A text whose characters are all different, so that each tells its place."""
    return "".join(map(chr, range(0x4E00, 0x4E00 + length)))


@pytest.mark.parametrize("kind", [Gru, Gpt])
def test_training_never_sees_the_validation_text(kind, tmp_path):
    text = numbered(1000)
    with using(write(tmp_path / "own.txt", text)):
        task = kind(0, batch=300)
    places, targets = set(), set()
    for _ in range(30):
        starts = task.batch["starts"]
        windows = task.text.train[starts[:, None] + torch.arange(task.context + 1)]
        places.update(starts.tolist())
        targets.update(windows.flatten().tolist())
        task.draw()
    assert places == set(range(900 - task.context))
    assert targets == set(range(900)), "all of the first nine tenths"
    fixed = task.text.validation[task.fixed[:, None] + torch.arange(task.context + 1)]
    assert fixed.min() == 900
    assert fixed.max() == 999
    assert len(task.fixed) == 64


def test_the_loss_of_text_is_that_of_the_next_characters(tmp_path):
    text = numbered(800)
    with using(write(tmp_path / "own.txt", text)):
        task = Gru(0, batch=2)
    total = 0.0
    for start in task.batch["starts"].tolist():
        logits = task.module(torch.arange(start, start + 32)[None])[0].double().log_softmax(1)
        total -= sum(logits[i, start + i + 1].item() for i in range(32))
    assert task.evaluate() == pytest.approx(total / 64, rel=1e-5)


def test_text_is_split_and_numbered(tmp_path):
    content = "naïve \U0001f600 café\r\n" * 10
    found = read_text(write(tmp_path / "text.txt", content))
    assert found.characters == "".join(sorted(set(content)))
    both = torch.cat((found.train, found.validation)).tolist()
    assert "".join(found.characters[i] for i in both) == content
    assert len(found.train) == len(content) * 9 // 10
    assert found.digest == hashlib.sha256(content.encode()).hexdigest()[:12]
    many = numbered(3000)
    assert read_text(write(tmp_path / "many.txt", many)).validation.tolist() == list(range(2700, 3000))


def test_a_file_of_ones_own_and_the_file_in_the_folder(tmp_path):
    (tmp_path / "text").mkdir()
    write(tmp_path / "text" / "shakespeare.txt", "in the folder")
    own = write(tmp_path / "own", "one's own")
    with using(tmp_path):
        assert load_text().characters == "".join(sorted(set("in the folder")))
    with using(own):
        assert data.load("text").characters == "".join(sorted(set("one's own")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"caf\xe9", r"own.txt must be a text in UTF-8: .*0xe9 in position 3"),
        ("café".encode()[:-1], r"own.txt must be a text in UTF-8: .*unexpected end of data"),
        (b"", r"own.txt must be a text, got an empty file"),
        (b"to be " * 100, r"^data must be a text of at least 641 characters for windows of 64, .*, got 600"),
    ],
)
def test_a_text_that_is_none_is_refused(content, said, tmp_path):
    with using(write(tmp_path / "own.txt", content)), pytest.raises(ValueError, match=said):
        Gpt(0)


def test_the_least_text_is_enough(tmp_path):
    with using(write(tmp_path / "least.txt", "ab" * 320 + "a")):
        assert math.isfinite(Gpt(0, batch=2).tracked(None, 0)["validation_loss"])


def test_other_text_than_planned_is_refused(tmp_path):
    with (
        using(write(tmp_path / "own.txt", "ab" * 400)),
        pytest.raises(ValueError, match=r"digest must be that of the data in '.*own.txt'.*planned with other data"),
    ):
        Gru(0, digest=SHAKESPEARE_DIGEST)


def test_the_source_of_the_standard_library(tmp_path, monkeypatch):
    found = load_library()
    folder = Path(sysconfig.get_path("stdlib"))
    content = b"".join((folder / f"{name}.py").read_bytes() for name in sorted(MODULES))
    assert found.digest == hashlib.sha256(content).hexdigest()[:12]
    assert len(found.train) > 500_000
    with using("digits"):
        assert data.load("text") is found
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match=r"incomplete: .*argparse.py.*; name a text file with --data"):
        load_library()


def test_a_comparison_on_ones_own_text(tmp_path):
    own = write(tmp_path / "own.txt", "the quick brown fox jumps over the lazy dog\n" * 50)
    quiet = Console(file=io.StringIO())
    with using(own):
        found = compare("gru", "torch.AdamW(lr=0.01)", steps=20, seeds=1, page=None, console=quiet)
    (curve,) = found.curves["torch.AdamW (lr=0.01)"]
    assert curve["validation_loss"][-1] < 0.8 * curve["validation_loss"][0]
    (row,) = [row for row in found.rows if row.metric == "validation_loss at the end"]
    assert row.mean == curve["validation_loss"][-1]


# ---------------------------------------------------------------- the real data


@pytest.mark.skipif(not REAL_TEXT, reason=f"{VARIABLE} has no text")
def test_the_real_text():
    found = load_text()
    assert found.digest == SHAKESPEARE_DIGEST
    assert len(found.characters) == 84
    assert sum(p.numel() for p in Gpt(0).params) == 165_012


@pytest.mark.skipif(not (REAL and REAL_CIFAR10), reason=f"{VARIABLE} has not both MNIST and CIFAR-10")
@pytest.mark.parametrize("name", [*IMAGES, "resnet8"])
def test_the_real_images(name):
    task = make(name)
    before = task.tracked(None, 0)["validation_loss"]
    train(task, adam(task), 20)
    assert task.tracked(None, 20)["validation_loss"] < before
