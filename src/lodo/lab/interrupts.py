"""Commands end promptly when they are interrupted or terminated, whatever they are doing at that moment.

Every file is written completely or not at all, and runs continue from their checkpoints, so a command may end anywhere.
It therefore does not wait for the main thread, which may be in the middle of an import, a long computation or a library
that swallows `KeyboardInterrupt`: a thread that does nothing else waits for the signal, cleans up and ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_WORDS = {"SIGINT": "Interrupted.", "SIGTERM": "Terminated.", "SIGHUP": "Terminated."}
_PATIENCE = 1.5  # seconds that cleaning up may take
_SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it

_cleanups: list[Callable[[], None]] = []
_changing = threading.Lock()  # held while the list changes, and from the signal to the end of the process
_kept = ""


def end_on_signals() -> None:
    """From now on, Ctrl-C, SIGTERM and SIGHUP end this process; signals that it was started to ignore stay ignored."""
    signals = [getattr(signal, name) for name in _WORDS if hasattr(signal, name)]
    heard = [each for each in signals if signal.getsignal(each) != signal.SIG_IGN]
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)
    signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
    for each in heard:
        signal.signal(each, _leave_to_the_thread)

    def wait() -> None:
        with outbox:  # keeps it open
            while (number := inbox.recv(1)[0]) not in heard:
                pass  # a signal that somebody else handles
            _end(signal.Signals(number))

    threading.Thread(target=wait, daemon=True, name="lodo-signals").start()


def _leave_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Let the main thread go on until the process ends."""


def say_what_is_kept(text: str) -> None:
    """Set what an interrupted command says about the work it has done so far."""
    global _kept
    _kept = text


@contextmanager
def cleaning_up(clean: Callable[[], None]) -> Iterator[None]:
    """If the process is interrupted within this context, ``clean`` is called, from another thread.

    >>> with cleaning_up(lambda: print("interrupted")):
    ...     pass
    """
    with _changing:
        _cleanups.append(clean)
    try:
        yield
    finally:
        with _changing:
            _cleanups.remove(clean)


def _end(received: signal.Signals) -> None:
    """Clean up, the latest first, say so, and end the process."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE)  # ends the process if cleaning up or writing hangs
    with _changing:
        for clean in reversed(_cleanups):
            with suppress(Exception):
                clean()
        with suppress(Exception):
            sys.stdout.flush()
        with suppress(OSError):
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
            os.write(2, f"\n{_WORDS[received.name]} {_kept}".rstrip().encode() + b"\n")
        os._exit(128 + received)
