"""Data files: read right, missing or damaged ones named, the same data recognised anywhere."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from digits import REAL, idx, imitation, write_mnist
from lodo.lab.data import MNIST_DIGEST, MNIST_FILES, VARIABLE, check_digest, mnist, read_idx, using


def digest_of(folder):
    with using(folder):
        return mnist().digest


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 2, 5)])
def test_an_idx_file_is_read(shape, tmp_path):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(array)))
    found = read_idx(tmp_path / "a.gz", len(shape))
    assert found.dtype == torch.uint8
    np.testing.assert_array_equal(found.numpy(), array)


WHOLE = idx(np.arange(24).reshape(2, 3, 4))
PACKED = gzip.compress(WHOLE)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "must be an idx file"),
        (WHOLE, "not gzipped"),
        (PACKED[:-1], "cut short"),
        (PACKED[: len(PACKED) // 2], "cut short"),
        (PACKED[:-8] + bytes(8), "damaged"),  # another checksum
        (PACKED[:12] + bytes([255]) + PACKED[13:], "damaged"),
        (PACKED + b"more", "damaged"),
        (gzip.compress(b"abc"), "must be an idx file that begins with 00000803, got 616263"),
        (gzip.compress(idx(np.arange(3))), "begins with 00000803, got 00000801"),
        (gzip.compress(WHOLE[:2] + bytes([13]) + WHOLE[3:]), "got 00000d03"),  # floating-point numbers
        (gzip.compress(WHOLE[:10]), "must have 40 bytes|must have 16 bytes"),
        (gzip.compress(WHOLE[:-1]), "must have 40 bytes unpacked, got 39"),
        (gzip.compress(WHOLE + b"\0"), "must have 40 bytes unpacked, got 41"),
        (gzip.compress(idx(np.zeros((0, 28, 28)))), "must not be empty"),
        (gzip.compress(WHOLE[:4] + b"\xff" * 12), "bytes unpacked, got 16"),  # sizes that no memory holds
    ],
)
def test_a_damaged_file_is_named(content, said, tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        read_idx(path, 3)
    assert str(error.value).startswith(str(path))


def test_a_set_is_read_whole_and_once(tmp_path):
    arrays = imitation(train=30, test=20)
    with using(write_mnist(tmp_path, arrays)):
        found = mnist()
        assert mnist() is found
    for tensor, array in zip(
        (found.train.images, found.train.labels, found.test.images, found.test.labels), arrays, strict=True
    ):
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_without_a_folder_the_error_says_how_to_give_one(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match=r"^data must be a folder with mnist/ in it, got none") as error:
        mnist()
    for hint in ("--data DIR", "LODO_DATA", *MNIST_FILES):
        assert hint in str(error.value)


def test_missing_files_are_named_and_no_others(tmp_path):
    folder = write_mnist(tmp_path)
    (folder / "mnist" / MNIST_FILES[2]).unlink()
    with using(folder), pytest.raises(ValueError, match=f"{MNIST_FILES[2]} is missing in") as error:
        mnist()
    assert repr(str(folder / "mnist")) in str(error.value)
    assert MNIST_FILES[0] not in str(error.value)
    with using(tmp_path / "nowhere"), pytest.raises(ValueError, match="are missing") as error:
        mnist()
    for name in MNIST_FILES:
        assert name in str(error.value)


@pytest.mark.parametrize(
    ("at", "change", "said"),
    [
        (1, lambda labels: labels[:-1], "must have a label for each of 300 images, got 299"),
        (3, lambda labels: np.append(labels, 0), "must have a label for each of 100 images, got 101"),
        (1, lambda labels: labels + 10, "must have labels from 0 to 9"),
        (2, lambda images: images[:, 1:], "must have images of 28 x 28 pixels, got 27 x 28"),
    ],
)
def test_a_set_that_does_not_fit_together_is_refused(at, change, said, tmp_path):
    arrays = imitation()
    arrays[at] = change(arrays[at])
    with using(write_mnist(tmp_path, arrays)), pytest.raises(ValueError, match=said) as error:
        mnist()
    assert MNIST_FILES[at] in str(error.value)


def test_the_digest_is_of_the_content_alone(tmp_path):
    arrays = imitation()
    first = digest_of(write_mnist(tmp_path / "a", arrays))
    assert digest_of(write_mnist(tmp_path / "b", arrays, level=1)) == first
    assert digest_of(write_mnist(tmp_path / "c", arrays[2:] + arrays[:2])) != first
    arrays[2][5, 6, 7] ^= 1
    assert digest_of(write_mnist(tmp_path / "d", arrays)) != first


def test_other_data_than_planned_is_refused(tmp_path):
    with using(write_mnist(tmp_path)):
        found = mnist()
        check_digest(found, None)
        check_digest(found, found.digest)
        with pytest.raises(ValueError, match=f"digest must be .*{found.digest}.* got 'abc'"):
            check_digest(found, "abc")


def test_a_folder_is_used_for_a_while(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    with using(Path("a")):
        assert os.environ[VARIABLE] == str(tmp_path / "a")  # a worker may stand elsewhere
        with using(None):
            assert os.environ[VARIABLE] == str(tmp_path / "a")
        with using(Path("b")):
            assert os.environ[VARIABLE] == str(tmp_path / "b")
        assert os.environ[VARIABLE] == str(tmp_path / "a")
    assert VARIABLE not in os.environ
    with using(None):
        assert VARIABLE not in os.environ


@pytest.mark.skipif(not REAL, reason=f"{VARIABLE} has no MNIST")
def test_the_real_digits():
    found = mnist()
    assert found.digest == MNIST_DIGEST
    assert found.train.images.shape == (60_000, 28, 28)
    assert found.test.images.shape == (10_000, 28, 28)
    assert found.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert found.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert 100 * (found.train.images.double().mean() / 255) == pytest.approx(13.07, abs=0.005)  # as everyone finds
