"""Where results go is checked before the work begins, and a full disk costs no result."""

from __future__ import annotations

import errno
import os

import pytest
from typer.testing import CliRunner

from lodo.lab import run as module
from lodo.lab.cli import app
from lodo.lab.comparison import compare
from lodo.lab.files import check_folder, write_atomically
from lodo.lab.run import Run, execute, load_curve


@pytest.fixture
def idle(monkeypatch):
    """Whoever begins to work fails."""

    def work(*args, **kwargs):
        raise AssertionError("the work has begun")

    monkeypatch.setattr("lodo.lab.run.Training.advance", work)
    monkeypatch.setattr("lodo.lab.theory.parts.part", lambda name: work)
    monkeypatch.setattr("lodo.lab.page.report.section_readers", work)
    monkeypatch.setattr("lodo.lab.optimizers.l2l.train", work)


COMMANDS = {
    "run": ["run", "bowl", "--quick", "--workers", "0", "--out", "FOLDER"],
    "compare": ["compare", "bowl", "--workers", "0", "--out", "FOLDER"],
    "tune": ["tune", "bowl", "--optimizer", "adam", "--workers", "0", "--out", "FOLDER"],
    "theory": ["theory", "saddle", "--quick", "--out", "FOLDER"],
    "compare page": ["compare", "bowl", "--workers", "0", "--page", "FOLDER/page.html"],
    "report page": ["report", ".", "--page", "FOLDER/page.html"],
    "train-l2l": ["train-l2l", "FOLDER/l2l.weights"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["a file", "within a file", "a broken link"])
def test_an_unusable_output_is_refused_before_the_first_step(command, place, tmp_path, monkeypatch, idle):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("nowhere")
    folder = {"a file": "file", "within a file": "file/results", "a broken link": "link"}[place]
    result = CliRunner().invoke(app, [arg.replace("FOLDER", folder) for arg in COMMANDS[command]])
    assert result.exit_code == 1, result.output
    assert "must be a folder that can be written to, got" in result.output
    assert folder in result.output
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_result_in_the_way_is_found_before_the_first_step(tmp_path, idle):
    """The folder can be used, but not the experiment's part of it."""
    (tmp_path / "bowl").write_text("text")
    result = CliRunner().invoke(app, ["run", "bowl", "--quick", "--workers", "0", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "out must be a folder that can be written to" in result.output


@pytest.mark.parametrize("page", ["folder", "folder/.."])
def test_a_page_cannot_be_a_folder(page, tmp_path, idle):
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--page", str(tmp_path / page)])
    assert result.exit_code == 1
    assert "page must be a file that can be written, got the folder" in result.output
    with pytest.raises(ValueError, match="page must be a file"):
        compare("bowl", "adam", page=tmp_path / page)


def test_checking_leaves_nothing(tmp_path):
    check_folder("out", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="Permission denied"):
        check_folder("out", tmp_path / "results")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_result_waits_for_room_on_the_disk_and_says_so(number, tmp_path, monkeypatch, caplog):
    attempts = []

    def write(path, data):
        attempts.append(path)
        if len(attempts) < 3:
            raise OSError(number, os.strerror(number), str(path))
        write_atomically(path, data)

    monkeypatch.setattr(module, "write_atomically", write)
    monkeypatch.setattr(module, "_RETRY_AFTER", 0.0)
    run = Run("rosenbrock", "adam", 0, 20)
    execute(run, tmp_path)
    assert len(attempts) == 3
    assert caplog.text.count("the disk is full") == 2
    assert str(run.path(tmp_path)) in caplog.text
    assert len(load_curve(run, tmp_path)["loss"]) == 20


def test_other_errors_end_the_run(tmp_path, monkeypatch):
    def write(path, data):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(module, "write_atomically", write)
    with pytest.raises(PermissionError):
        execute(Run("rosenbrock", "adam", 0, 20), tmp_path)
