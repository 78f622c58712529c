"""``lodo`` and ``python -m lodo``."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line, or say what must be installed for it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback if the next lines are interrupted
    from lodo.lab.interrupts import end_on_signals

    end_on_signals()
    try:
        from lodo.lab.cli import app

        app()
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the command line needs {error.name}, which is not installed: pip install '.[lab]' in the folder "
            "of the repository"
        )


if __name__ == "__main__":
    main()
