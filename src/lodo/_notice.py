"""Telling people what takes long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def notice(message: str, *arguments: object) -> Iterator[None]:
    """Log ``message`` if what happens here takes over two seconds."""
    timer = threading.Timer(2.0, logging.getLogger("lodo").warning, (message, *arguments))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
