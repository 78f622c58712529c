"""Telling people what takes long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def notice(message: str | Callable[[], str]) -> Iterator[None]:
    """Log ``message`` if what happens here takes over two seconds; a function is asked for it then.

    An empty message is not logged.
    """

    def tell() -> None:
        text = message if isinstance(message, str) else message()
        if text:
            logging.getLogger("lodo").warning(text)

    timer = threading.Timer(2.0, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
