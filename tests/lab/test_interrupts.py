"""Ctrl-C and SIGTERM end a command within two seconds at any moment, without a traceback and without leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from lodo.lab import files
from lodo.lab.files import save_state

READY = "import os\nopen(os.environ['READY'], 'w').close()\n"
NEVER_ENDING = """
import time
while True:
    try:
        time.sleep(60)
    except BaseException:  # as a careless library does
        pass
"""
LONG_COMPUTATION = "import hashlib\nhashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"  # no Python code for minutes
MAIN = "import sys\nsys.argv = ['lodo', *{args}]\nfrom lodo.__main__ import main\nmain()\n"
GUARDED = "from lodo.lab.interrupts import end_on_signals, cleaning_up, say_what_is_kept\nend_on_signals()\n"


def interrupt(program, tmp_path, number=signal.SIGINT, **env):
    """Start a program, send it a signal once it is ready, and return its exit code and what it said."""
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the tests themselves may ignore it
        env={**os.environ, "READY": str(ready), **env},
    )
    deadline = time.monotonic() + 60
    while not ready.exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    sent = time.monotonic()
    said, _ = process.communicate(timeout=30)
    assert time.monotonic() - sent < 2
    assert "Traceback" not in said
    return process.returncode, said


def test_while_importing(tmp_path):
    (tmp_path / "typer.py").write_text(READY + NEVER_ENDING)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    code, said = interrupt(MAIN.format(args=["--help"]), tmp_path, PYTHONPATH=path)
    assert (code, said) == (130, "\nInterrupted.\n")


def test_in_report(tmp_path):
    (tmp_path / "runs").mkdir()
    slow = f"from lodo.lab.page import report\ndef readers(runs):\n{textwrap.indent(READY + NEVER_ENDING, '    ')}\n"
    program = f"{slow}report.section_readers = readers\n{MAIN.format(args=['report', str(tmp_path / 'runs')])}"
    code, said = interrupt(program, tmp_path)
    assert (code, said) == (130, "\nInterrupted. Nothing was written.\n")


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Interrupted."), (signal.SIGTERM, "Terminated.")])
def test_in_a_long_computation_after_cleaning_up(number, word, tmp_path):
    program = f"""
say_what_is_kept("All is kept.")
with cleaning_up(lambda: print("never")):
    pass
with cleaning_up(lambda: print("second")), cleaning_up(lambda: 1 / 0), cleaning_up(lambda: print("first")):
{textwrap.indent(READY + LONG_COMPUTATION, "    ")}
"""
    code, said = interrupt(GUARDED + program, tmp_path, number)
    assert (code, said) == (128 + number, f"first\nsecond\n\n{word} All is kept.\n")


def test_cleaning_up_may_not_hang(tmp_path):
    program = f"import time\nwith cleaning_up(lambda: time.sleep(60)):\n{textwrap.indent(READY + NEVER_ENDING, '    ')}"
    code, said = interrupt(GUARDED + program, tmp_path)
    assert (code, said) == (-signal.SIGALRM, "")


def test_a_signal_that_the_command_was_started_to_ignore_stays_ignored(tmp_path):
    program = "import signal, os\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + GUARDED
    program += "os.kill(os.getpid(), signal.SIGINT)\n" + READY + NEVER_ENDING
    assert interrupt(program, tmp_path, signal.SIGTERM)[0] == 143


def test_saving_a_state_never_swallows_an_interrupt(tmp_path, monkeypatch, request):
    """`torch.save` writes from C++ and reports whatever goes wrong there as an error of its own."""
    left = 0  # writes until the interrupt

    class Interrupted(files._Hashing):
        def write(self, data):
            nonlocal left
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
            return super().write(data)

    monkeypatch.setattr(files, "_Hashing", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    state = {"x": torch.ones(10_000), "y": [torch.zeros(3), 4]}
    save_state(tmp_path / "whole", state)
    last = -left
    for number in range(1, last + 1):
        left = number
        with pytest.raises(KeyboardInterrupt):
            save_state(tmp_path / "state", state)
    assert last > 10
    assert [file.name for file in tmp_path.iterdir()] == ["whole"]


def test_a_full_disk_is_named_as_such(tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files._Hashing, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        save_state(tmp_path / "state", {"x": torch.ones(10)})
    assert list(tmp_path.iterdir()) == []
