"""Data files: read correctly; missing ones downloaded, damaged ones named, the same data recognised everywhere."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import multiprocessing
import os
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from digits import (
    REAL,
    REAL_CIFAR10,
    cifar10_files,
    idx,
    imitation,
    mnist_files,
    read_mnist_elsewhere,
    take_offline,
    write_cifar10,
    write_mnist,
)
from lodo.lab.data import (
    CIFAR10_DIGEST,
    CIFAR10_FILES,
    DIGITS_DIGEST,
    MNIST_DIGEST,
    MNIST_FILES,
    VARIABLE,
    check_digest,
    cifar10,
    load,
    load_cifar10,
    load_digits,
    load_mnist,
    load_text,
    read_batch,
    read_idx,
    using,
)


@pytest.fixture(autouse=True)
def unreachable(tmp_path, monkeypatch):
    """An address without a server in place of every mirror: no test uses the real network or the user's cache."""
    return take_offline(monkeypatch, tmp_path / "cache")


def digest_of(folder):
    with using(folder):
        return load_mnist().digest


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 2, 5)])
def test_an_idx_file_is_read(shape, tmp_path):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(array)))
    found = read_idx(tmp_path / "a.gz", len(shape))
    assert found.dtype == torch.uint8
    np.testing.assert_array_equal(found.numpy(), array)


WHOLE = idx(np.arange(24).reshape(2, 3, 4))


def pack(content):
    """Compress without a time stamp: it would enter the test names, which must be the same in every worker."""
    return gzip.compress(content, mtime=0)


PACKED = pack(WHOLE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be an idx file"),
        (WHOLE, "not gzipped"),
        (PACKED[:-1], "cut short"),
        (PACKED[: len(PACKED) // 2], "cut short"),
        (PACKED[:-8] + bytes(8), "damaged"),  # a wrong checksum
        (PACKED[:12] + bytes([255]) + PACKED[13:], "damaged"),
        (PACKED + b"more", "damaged"),
        (pack(b"abc"), "must be an idx file that begins with 00000803, got 616263"),
        (pack(idx(np.arange(3))), "begins with 00000803, got 00000801"),
        (pack(WHOLE[:2] + bytes([13]) + WHOLE[3:]), "got 00000d03"),  # floating-point numbers
        (pack(WHOLE[:10]), "must have 40 bytes|must have 16 bytes"),
        (pack(WHOLE[:-1]), "must have 40 bytes when unpacked, got 39"),
        (pack(WHOLE + b"\0"), "must have 40 bytes when unpacked, got 41"),
        (pack(idx(np.zeros((0, 28, 28)))), "must not be empty"),
        (pack(WHOLE[:4] + b"\xff" * 12), "bytes when unpacked, got 16"),  # sizes too large for any memory
    ],
)
def test_a_damaged_file_is_named(content, message, tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_idx(path, 3)
    assert str(error.value).startswith(str(path))


def test_mnist_is_read_whole_and_once(tmp_path):
    arrays = imitation(train=30, test=20)
    with using(write_mnist(tmp_path, arrays)):
        found = load_mnist()
        assert load_mnist() is found
    for tensor, array in zip(
        (found.train.images, found.train.labels, found.test.images, found.test.labels), arrays, strict=True
    ):
        np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (1, lambda labels: labels[:-1], "must have a label for each of 300 images, got 299"),
        (3, lambda labels: np.append(labels, 0), "must have a label for each of 100 images, got 101"),
        (1, lambda labels: labels + 10, "must have labels from 0 to 9"),
        (2, lambda images: images[:, 1:], "must have images of 28 x 28 pixels, got 27 x 28"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(at, change, message, tmp_path):
    arrays = imitation()
    arrays[at] = change(arrays[at])
    with using(write_mnist(tmp_path, arrays)), pytest.raises(ValueError, match=message) as error:
        load_mnist()
    assert MNIST_FILES[at] in str(error.value)


def test_the_digest_depends_on_the_content_alone(tmp_path):
    arrays = imitation()
    first = digest_of(write_mnist(tmp_path / "a", arrays))
    assert digest_of(write_mnist(tmp_path / "b", arrays, level=1)) == first
    assert digest_of(write_mnist(tmp_path / "c", arrays[2:] + arrays[:2])) != first
    arrays[2][5, 6, 7] ^= 1
    assert digest_of(write_mnist(tmp_path / "d", arrays)) != first


def test_data_other_than_planned_is_refused(tmp_path):
    with using(write_mnist(tmp_path)):
        found = load_mnist()
        check_digest(found, None)
        check_digest(found, found.digest)
        with pytest.raises(ValueError, match=f"digest must be .*{found.digest}.* got 'abc'"):
            check_digest(found, "abc")


def test_using_sets_the_folder_and_restores_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    with using(Path("a")):
        assert os.environ[VARIABLE] == str(tmp_path / "a")  # a worker may have another working directory
        with using(None):
            assert os.environ[VARIABLE] == str(tmp_path / "a")
        with using(Path("b")):
            assert os.environ[VARIABLE] == str(tmp_path / "b")
        assert os.environ[VARIABLE] == str(tmp_path / "a")
    assert VARIABLE not in os.environ
    with using(None):
        assert VARIABLE not in os.environ
    for word in ("digits", Path("digits")):
        with using(word):
            assert os.environ[VARIABLE] == "digits"
    for folder in ("./digits", tmp_path / "digits"):
        with using(folder):
            assert os.environ[VARIABLE] == str(tmp_path / "digits")


# ---------------------------------------------------------------- fuzzed files


ORIGINAL = np.random.default_rng(0).integers(0, 256, (3, 4, 5), dtype=np.uint8)
PACKINGS = [gzip.compress(idx(ORIGINAL), level, mtime=0) for level in (0, 9)]
RECORDS = cifar10_files(number=3)[CIFAR10_FILES[0]]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


def read_or_named(read, path, *args):
    """The content of the file, or None if reading fails with an error that names the file."""
    try:
        return read(path, *args)
    except ValueError as error:
        return None if str(error).startswith(str(path)) else pytest.fail(f"{error} does not name {path}")


def alterations(content):
    """The content cut short, or with one byte changed."""
    at = st.integers(0, len(content) - 1)
    cut = at.map(lambda end: content[:end])
    return cut | st.tuples(at, st.integers(1, 255)).map(lambda change: _altered(content, *change))


def _altered(content, at, difference):
    return content[:at] + bytes([content[at] ^ difference]) + content[at + 1 :]


@given(st.sampled_from(PACKINGS).flatmap(alterations))
@example(PACKINGS[0])
@example(PACKINGS[1])
def test_fuzzed_idx_files_are_read_correctly_or_named(scratch, content):
    path = scratch / "fuzzed.gz"
    path.write_bytes(content)
    found = read_or_named(read_idx, path, 3)
    assert found is not None or content not in PACKINGS
    if found is not None:
        np.testing.assert_array_equal(found.numpy(), ORIGINAL)


def test_every_cut_of_an_idx_file_is_refused(scratch):
    for packed in PACKINGS:
        for end in range(len(packed)):
            (scratch / "cut.gz").write_bytes(packed[:end])
            with pytest.raises(ValueError, match=r"cut\.gz"):
                read_idx(scratch / "cut.gz", 3)


@given(alterations(RECORDS))
@example(RECORDS)
@example(RECORDS[:3073])
@example(RECORDS + b"x")
@example(RECORDS + RECORDS[:3073])
def test_fuzzed_batches_are_read_correctly_or_named(scratch, content):
    """A file with as many images as the original must be the original; one with fewer is read as it is."""
    path = scratch / CIFAR10_FILES[0]
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cifar10, "RECORDS", 3)
        patch.setitem(cifar10.CIFAR10_MD5, path.name, md5(RECORDS))
        found = read_or_named(read_batch, path)
    assert found is not None or content != RECORDS
    if found is not None:
        assert found.numpy().tobytes() == content
        assert RECORDS.startswith(content)


# ---------------------------------------------------------------- CIFAR-10


def test_cifar10_is_read_whole_and_once(tmp_path):
    files = cifar10_files(number=4)
    with using(write_cifar10(tmp_path, files)):
        found = load_cifar10()
        assert load_cifar10() is found
        assert load("cifar10") is found
    assert found.train.images.shape == (20, 3, 32, 32)
    assert found.test.images.shape == (4, 3, 32, 32)
    assert found.train.images.dtype == found.train.labels.dtype == torch.uint8
    assert found.digest == hashlib.sha256(b"".join(files.values())).hexdigest()[:12]
    third = files["data_batch_3.bin"]  # images 8 to 11
    assert found.train.labels[9] == third[3073]
    for color, row, column in ((0, 0, 0), (1, 2, 3), (2, 31, 31)):
        assert found.train.images[9, color, row, column] == third[3073 + 1 + 1024 * color + 32 * row + column]
    assert found.test.images[1].numpy().tobytes() == files["test_batch.bin"][3074:6146]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: b"", "cut short .* got 0 bytes"),
        (lambda content: content[:-1], "cut short .* got 12,291 bytes"),
        (lambda content: content + b"x", "12,293 bytes"),
        (lambda content: b"\x0a" + content[1:], "must have labels from 0 to 9, got 10"),
        (lambda content: content * 2501, "must have 1 to 10,000 images"),
        (lambda content: content * 2500, "is damaged: its md5 must be ae636b3ba5c66a11e91e8cb52e771fcb, got"),
    ],
)
def test_a_damaged_batch_is_named(change, message, tmp_path):
    files = cifar10_files(number=4)
    files["data_batch_4.bin"] = change(files["data_batch_4.bin"])
    folder = write_cifar10(tmp_path, files)
    with using(folder), pytest.raises(ValueError, match=message) as error:
        load_cifar10()
    assert str(error.value).startswith(str(folder / "cifar-10-batches-bin" / "data_batch_4.bin"))


def test_an_original_batch_cut_between_images_is_named(tmp_path, monkeypatch):
    files = cifar10_files(number=4)
    monkeypatch.setattr(cifar10, "RECORDS", 4)
    monkeypatch.setattr(cifar10, "CIFAR10_MD5", {name: md5(content) for name, content in files.items()})
    files["data_batch_2.bin"] = files["data_batch_2.bin"][:-3073]
    with using(write_cifar10(tmp_path, files)), pytest.raises(ValueError, match=r"data_batch_2.bin is cut short: it"):
        load_cifar10()


# ---------------------------------------------------------------- the digits of scikit-learn


def test_the_digits_need_no_file():
    with using(Path("digits")):
        found = load_digits()
        assert load("mnist") is load("cifar10") is found
        with pytest.raises(ValueError, match="data must be a folder for this data set, got 'digits'"):
            load_mnist()
    assert found.digest == DIGITS_DIGEST
    assert found.train.images.shape == (1500, 8, 8)
    assert found.test.images.shape == (297, 8, 8)
    assert found.train.images.dtype == found.train.labels.dtype == torch.uint8
    assert found.train.labels[:10].tolist() == list(range(10))
    assert found.train.images[0, 0].tolist() == [0, 0, 79, 207, 143, 15, 0, 0]  # 0, 0, 5, 13, 9, 1, 0, 0
    assert found.train.images.unique().tolist() == [shade * 255 // 16 for shade in range(17)]


def test_a_folder_called_digits_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_mnist(tmp_path / "digits", imitation(train=20, test=10))
    with using("./digits"):
        assert load("mnist").train.images.shape == (20, 28, 28)
    monkeypatch.setenv(VARIABLE, "./digits")
    assert load("mnist").train.images.shape == (20, 28, 28)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"which is not installed: pip install '\.\[lab\]' in the folder"):
        load_digits.__wrapped__()


def test_other_names_are_refused():
    with pytest.raises(ValueError, match="name must be one of 'mnist', 'cifar10', 'text', got 'digits'"):
        load("digits")


# ---------------------------------------------------------------- downloads


def md5(content):
    return hashlib.md5(content).hexdigest()


class Mirror(ThreadingHTTPServer):
    """A server of ``files`` that can be told to stop in the middle of a response.

    Args:
        files: contents by path.
        ranges: whether it supports range requests.

    ``stops`` lists the numbers of bytes after which the next responses stop. A stopped response ends, or waits for
    `release` if the mirror is ``patient``.
    """

    def __init__(self, files, ranges=True):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files, self.ranges, self.patient = files, ranges, False
        self.stops, self.asked, self.sent = [], [], 0
        self.counting, self.released = threading.Lock(), threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"

    def release(self):
        self.released.set()


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        mirror, name, wanted = self.server, self.path[1:], self.headers["Range"]
        with mirror.counting:
            mirror.asked.append((name, wanted))
            stop = mirror.stops.pop(0) if mirror.stops else None
        if name not in mirror.files:
            self.send_error(404)
            return
        content, begin = mirror.files[name], 0
        if wanted and mirror.ranges:
            begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if begin >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            if stop is not None:
                self._send(content[begin : begin + stop])
                if not mirror.patient:
                    return
                mirror.released.wait(60)
                begin += stop
            self._send(content[begin:])

    def _send(self, content):
        for at in range(0, len(content), 4096):
            self.wfile.write(content[at : at + 4096])
            with self.server.counting:
                self.server.sent += len(content[at : at + 4096])

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """Start mirrors that are shut down after the test."""
    with contextlib.ExitStack() as stack:

        def start(files, **options):
            mirror = stack.enter_context(Mirror(files, **options))
            thread = threading.Thread(target=mirror.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            for end in (thread.join, mirror.shutdown, mirror.release):
                stack.callback(end)
            return mirror

        yield start


FILES = mnist_files()
SIZE = sum(map(len, FILES.values()))
FIRST = MNIST_FILES[0]
HALF = len(FILES[FIRST]) // 2


@pytest.fixture
def mirror(serve, monkeypatch):
    """A mirror with an imitation of MNIST whose checksums are taken for the original ones."""
    made = serve(FILES)
    monkeypatch.setattr("lodo.lab.data.mnist.MNIST_MIRRORS", (made.url,))
    monkeypatch.setattr("lodo.lab.data.mnist.MNIST_MD5", {name: md5(content) for name, content in FILES.items()})
    return made


def holds(folder, files):
    """Whether the folder has exactly these files, apart from the lock."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    return found == files


def test_missing_files_are_downloaded(mirror, tmp_path, capsys):
    with using(tmp_path / "new"):
        found = load_mnist()
        assert load_mnist() is found
    np.testing.assert_array_equal(found.train.images.numpy(), imitation()[0])
    assert holds(tmp_path / "new" / "mnist", FILES)
    assert mirror.sent == SIZE
    shown = capsys.readouterr()
    assert FIRST in shown.err
    assert not shown.out


def test_the_default_folder_is_in_the_users_cache(mirror, tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    load_mnist()
    assert holds(tmp_path / "cache" / "lodo" / "data" / "mnist", FILES)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_mnist()
    assert holds(tmp_path / "home" / ".cache" / "lodo" / "data" / "mnist", FILES)


def test_existing_files_are_neither_requested_nor_overwritten(mirror, tmp_path):
    others = imitation(seed=5)
    folder = write_mnist(tmp_path, others) / "mnist"
    (folder / MNIST_FILES[1]).unlink()
    own = {name: (folder / name).read_bytes() for name in MNIST_FILES if name != MNIST_FILES[1]}
    with using(tmp_path):
        load_mnist()
    assert mirror.asked == [(MNIST_FILES[1], None)]
    assert holds(folder, own | {MNIST_FILES[1]: FILES[MNIST_FILES[1]]})


def test_a_damaged_file_is_refused_not_overwritten(mirror, tmp_path):
    damaged = FILES[FIRST][:-3]
    folder = write_mnist(tmp_path) / "mnist"
    (folder / FIRST).write_bytes(damaged)
    with using(tmp_path), pytest.raises(ValueError, match=f"{FIRST} is cut short.*delete it to download it again"):
        load_mnist()
    assert (folder / FIRST).read_bytes() == damaged
    assert not mirror.asked


def test_a_broken_connection_is_resumed(mirror, tmp_path):
    mirror.stops = [HALF, 1000]
    with using(tmp_path):
        load_mnist()
    assert holds(tmp_path / "mnist", FILES)
    assert mirror.asked[:3] == [(FIRST, None), (FIRST, f"bytes={HALF}-"), (FIRST, f"bytes={HALF + 1000}-")]
    assert mirror.sent == SIZE


def test_a_stalled_connection_is_resumed(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr("lodo.lab.data.download.TIMEOUT", 0.3)
    mirror.stops, mirror.patient = [HALF], True
    with using(tmp_path):
        load_mnist()
    assert holds(tmp_path / "mnist", FILES)
    assert mirror.asked[1] == (FIRST, f"bytes={HALF}-")


def test_a_partial_file_is_resumed_by_the_next_command(mirror, tmp_path):
    mirror.stops = [HALF, 0]  # the second connection delivers nothing
    with using(tmp_path), pytest.raises(ValueError, match=f"the connection ended after {HALF:,} of"):
        load_mnist()
    assert holds(tmp_path / "mnist", {f"{FIRST}.part": FILES[FIRST][:HALF]})
    with using(tmp_path):
        load_mnist()
    assert holds(tmp_path / "mnist", FILES)
    assert mirror.sent == SIZE


@pytest.mark.parametrize(
    ("part", "asked"),
    [
        (FILES[FIRST], []),  # complete, but not yet renamed
        (b"", [None]),
        (FILES[FIRST][:HALF], [HALF]),
        (b"x" + FILES[FIRST][1:HALF], [HALF, None]),  # wrong, which shows only at the end
        (b"x" + FILES[FIRST][1:], [len(FILES[FIRST]), None]),
        (FILES[FIRST] + b"x", [len(FILES[FIRST]) + 1, None]),
    ],
)
def test_any_partial_file_leads_to_the_right_file(mirror, part, asked, tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{FIRST}.part").write_bytes(part)
    with using(tmp_path):
        load_mnist()
    assert holds(tmp_path / "mnist", FILES)
    wanted = [(FIRST, None if begin is None else f"bytes={begin}-") for begin in asked]
    assert [request for request in mirror.asked if request[0] == FIRST] == wanted


def test_a_server_without_ranges_sends_all_again(mirror, tmp_path):
    mirror.ranges, mirror.stops = False, [HALF]
    with using(tmp_path):
        load_mnist()
    assert holds(tmp_path / "mnist", FILES)
    assert mirror.sent == HALF + SIZE


def test_a_server_that_always_disconnects_is_given_up(mirror, tmp_path):
    mirror.ranges, mirror.stops = False, [HALF] * 10
    with using(tmp_path), pytest.raises(ValueError, match="the connection ended after"):
        load_mnist()
    assert len(mirror.asked) == 2


def test_a_file_with_another_md5_is_refused(mirror, tmp_path):
    mirror.files = FILES | {FIRST: FILES[FIRST] + b"x"}
    with using(tmp_path), pytest.raises(ValueError, match=f"the md5 of the file must be {md5(FILES[FIRST])}, got"):
        load_mnist()
    assert not (tmp_path / "mnist").exists()
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{FIRST}.part").write_bytes(FILES[FIRST][:HALF])
    with using(tmp_path), pytest.raises(ValueError, match="the md5 of the file must be"):
        load_mnist()  # started over once
    assert holds(tmp_path / "mnist", {})
    assert [wanted for _, wanted in mirror.asked] == [None, f"bytes={HALF}-", None]


def test_the_next_mirror_resumes_what_another_began(mirror, serve, unreachable, tmp_path, monkeypatch):
    first, wrong = serve(FILES), serve(dict.fromkeys(FILES, b"<html>log in first</html>"))
    first.stops = [HALF, 0]
    monkeypatch.setattr("lodo.lab.data.mnist.MNIST_MIRRORS", (unreachable, first.url, serve({}).url, mirror.url))
    with using(tmp_path / "a"):
        load_mnist()
    assert holds(tmp_path / "a" / "mnist", FILES)
    assert mirror.asked == [(FIRST, f"bytes={HALF}-")]
    monkeypatch.setattr("lodo.lab.data.mnist.MNIST_MIRRORS", (wrong.url, mirror.url))
    with using(tmp_path / "b"):
        load_mnist()
    assert holds(tmp_path / "b" / "mnist", FILES)


def test_without_a_network_the_error_says_what_to_put_where(unreachable, tmp_path):
    with using(tmp_path), pytest.raises(ValueError, match="are missing in") as error:
        load_mnist()
    folder = repr(str(tmp_path / "mnist"))
    for message in (
        *MNIST_FILES,
        folder,
        unreachable,
        "refused",
        "--data DIR",
        "LODO_DATA",
        "--data digits needs no download",
    ):
        assert message in str(error.value)
    write_mnist(tmp_path / "some")
    (tmp_path / "some" / "mnist" / MNIST_FILES[2]).unlink()
    with using(tmp_path / "some"), pytest.raises(ValueError, match=f"\n{MNIST_FILES[2]} is missing in") as error:
        load_mnist()
    assert FIRST not in str(error.value)
    with using(tmp_path), pytest.raises(ValueError, match=r"are missing in .*cifar-10-batches-bin") as error:
        load_cifar10()
    for message in (*CIFAR10_FILES, unreachable + "cifar-10-binary.tar.gz", "--data digits"):
        assert message in str(error.value)
    with using(tmp_path), pytest.raises(ValueError, match=r"\nshakespeare.txt is missing in .*text") as error:
        load_text()
    for message in (unreachable + "input.txt", "--data digits"):
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("./digit", "; did you mean 'digits'?"), ("./Digits", "; did you mean 'digits'?"), ("deep/er", "")],
)
def test_a_folder_is_made_only_for_what_is_downloaded(name, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for read in (load_mnist, load_cifar10, load_text):
        with using(name), pytest.raises(ValueError, match="cannot be downloaded") as error:
            read()
        first, second, _ = str(error.value).splitlines()
        assert first.startswith("data must be a folder with ")
        assert first.endswith(f"/ or the word 'digits', got {str(tmp_path / name)!r}{meant}")
        assert second == "--data digits needs no download."
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_a_file_is_kept_with_its_folder(mirror, tmp_path):
    mirror.stops = [HALF, 0]
    with using(tmp_path / "new"), pytest.raises(ValueError, match="cannot be downloaded"):
        load_mnist()
    assert (tmp_path / "new" / "mnist" / f"{FIRST}.part").stat().st_size == HALF


def test_a_folder_that_cannot_be_written_is_named(mirror, tmp_path):
    (tmp_path / "file").touch()
    with using(tmp_path / "file"), pytest.raises(ValueError, match=r"cannot be downloaded: .*file.*put them into"):
        load_mnist()
    assert not mirror.asked


@pytest.fixture
def start():
    """Start other processes that read MNIST in a folder; what they need is imported once for all of them."""
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    context.set_forkserver_preload(["lodo.lab.data"])
    with contextlib.ExitStack() as stack:

        def started(folder, mirror, log):
            receiver, sender = context.Pipe(duplex=False)
            md5s = {name: md5(content) for name, content in FILES.items()}
            process = context.Process(target=read_mnist_elsewhere, args=(folder, mirror.url, md5s, log, sender))
            process.start()
            sender.close()
            for end in (receiver.close, process.close, process.join, process.kill):
                stack.callback(end)
            return process, receiver

        yield started


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_killed_download_is_resumed(mirror, start, tmp_path):
    mirror.stops, mirror.patient = [HALF], True
    part = tmp_path / "mnist" / f"{FIRST}.part"
    process, _ = start(tmp_path, mirror, tmp_path / "log")
    wait_until(lambda: part.is_file() and part.stat().st_size == HALF)
    process.kill()
    process.join()
    assert holds(tmp_path / "mnist", {part.name: FILES[FIRST][:HALF]})
    with using(tmp_path):
        load_mnist()  # the lock of the killed process does not block
    assert holds(tmp_path / "mnist", FILES)
    assert mirror.asked[1] == (FIRST, f"bytes={HALF}-")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_two_processes_at_once_download_once(mirror, start, tmp_path):
    mirror.stops, mirror.patient = [HALF], True
    logs = [tmp_path / "first", tmp_path / "second"]
    _, first = start(tmp_path, mirror, logs[0])
    wait_until(lambda: mirror.asked)
    _, second = start(tmp_path, mirror, logs[1])
    wait_until(lambda: logs[1].is_file() and "waiting for another process that downloads into" in logs[1].read_text())
    mirror.release()
    assert first.poll(60)
    assert second.poll(60)
    with using(tmp_path):
        assert first.recv() == second.recv() == load_mnist().digest
    assert holds(tmp_path / "mnist", FILES)
    assert mirror.sent == SIZE


# ---------------------------------------------------------------- CIFAR-10's archive


def packed(members):
    """A gzipped tar file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return file.getvalue()


BATCHES = cifar10_files()
MEMBERS = {f"cifar-10-batches-bin/{name}": content for name, content in reversed(BATCHES.items())}


@pytest.fixture
def archive(serve, monkeypatch):
    """Serve an archive with these members; checksums are taken from it and from the files of an imitation."""

    def make(members):
        content = packed(members)
        made = serve({"cifar-10-binary.tar.gz": content})
        monkeypatch.setattr(cifar10, "CIFAR10_ARCHIVE", f"{made.url}cifar-10-binary.tar.gz")
        monkeypatch.setattr(cifar10, "CIFAR10_ARCHIVE_MD5", md5(content))
        monkeypatch.setattr(cifar10, "CIFAR10_MD5", {name: md5(batch) for name, batch in BATCHES.items()})
        return made

    return make


def test_an_archive_is_downloaded_and_its_batches_unpacked_alone(archive, tmp_path):
    mirror = archive(
        {"../outside.bin": b"x", "cifar-10-batches-bin/../../outside.bin": b"x", "cifar-10-batches-bin/readme": b"x"}
        | MEMBERS
    )
    mirror.stops = [5000]
    with using(tmp_path / "data"):
        found = load_cifar10()
    assert holds(tmp_path / "data" / "cifar-10-batches-bin", BATCHES)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert found.test.images.numpy().tobytes() == b"".join(
        BATCHES["test_batch.bin"][at + 1 : at + 3073] for at in range(0, 4 * 3073, 3073)
    )
    assert mirror.sent == len(mirror.files["cifar-10-binary.tar.gz"])


def test_existing_batches_are_kept(archive, tmp_path):
    archive(MEMBERS)
    own = cifar10_files(seed=1)
    del own["data_batch_5.bin"]
    with using(write_cifar10(tmp_path, own)):
        load_cifar10()
    found = own | {"data_batch_5.bin": BATCHES["data_batch_5.bin"]}
    assert holds(tmp_path / "cifar-10-batches-bin", found)


def test_unpacking_resumes_after_an_interruption(archive, tmp_path):
    mirror = archive(MEMBERS)
    files = {name: BATCHES[name] for name in CIFAR10_FILES[3:]}
    folder = write_cifar10(tmp_path, files) / "cifar-10-batches-bin"
    (folder / "cifar-10-binary.tar.gz.part").write_bytes(mirror.files["cifar-10-binary.tar.gz"])
    with using(tmp_path):
        load_cifar10()
    assert holds(folder, BATCHES)
    assert not mirror.asked


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (MEMBERS | {"cifar-10-batches-bin/data_batch_1.bin": b"x"}, "the md5 of data_batch_1.bin in .* must be"),
        (dict(list(MEMBERS.items())[:5]), "must contain cifar-10-batches-bin/data_batch_1.bin"),
    ],
)
def test_an_archive_without_the_right_batch_is_refused(archive, members, message, tmp_path):
    archive(members)
    with using(tmp_path), pytest.raises(ValueError, match=f"\ndata_batch_1.bin is missing in .*{message}"):
        load_cifar10()
    assert not (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").exists()


def test_a_broken_archive_is_refused(archive, monkeypatch, tmp_path):
    mirror = archive(MEMBERS)
    mirror.files = {"cifar-10-binary.tar.gz": mirror.files["cifar-10-binary.tar.gz"][:-5000]}
    monkeypatch.setattr(cifar10, "CIFAR10_ARCHIVE_MD5", md5(mirror.files["cifar-10-binary.tar.gz"]))
    with using(tmp_path), pytest.raises(ValueError, match="cannot be unpacked"):
        load_cifar10()


def test_a_missing_text_is_downloaded_and_checked(serve, monkeypatch, tmp_path):
    content = b"To be, or not to be, that is the question.\n" * 500
    mirror = serve({"input.txt": content})
    monkeypatch.setattr("lodo.lab.data.text.TEXT_MIRRORS", (mirror.url + "input.txt",))
    with using(tmp_path / "a"), pytest.raises(ValueError, match="the sha256 of the file must be 86c4e6aa9db7"):
        load_text()
    monkeypatch.setattr("lodo.lab.data.text.SMALL_SHAKESPEARE_SHA256", hashlib.sha256(content).hexdigest())
    with using(tmp_path / "b"):
        found = load_text()
        assert load_text() is found
    assert holds(tmp_path / "b" / "text", {"shakespeare.txt": content})
    assert found.digest == hashlib.sha256(content).hexdigest()[:12]


# ---------------------------------------------------------------- the real ones


@pytest.mark.skipif(not REAL, reason=f"{VARIABLE} has no MNIST")
def test_the_real_mnist():
    found = load_mnist()
    assert found.digest == MNIST_DIGEST
    assert found.train.images.shape == (60_000, 28, 28)
    assert found.test.images.shape == (10_000, 28, 28)
    assert found.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert found.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert 100 * (found.train.images.double().mean() / 255) == pytest.approx(
        13.07, abs=0.005
    )  # the value usually quoted


@pytest.mark.skipif(not REAL_CIFAR10, reason=f"{VARIABLE} has no CIFAR-10")
def test_the_real_cifar10():
    found = load_cifar10()
    assert found.digest == CIFAR10_DIGEST
    assert found.train.images.shape == (50_000, 3, 32, 32)
    assert found.test.images.shape == (10_000, 3, 32, 32)
    assert found.train.labels.bincount().tolist() == [5000] * 10
    assert found.test.labels.bincount().tolist() == [1000] * 10
    assert found.train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    means = found.train.images.double().mean((0, 2, 3)) / 255
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.00005)  # the value usually quoted
