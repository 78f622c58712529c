"""``lodo`` and ``python -m lodo``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say what must be installed for it."""
    try:
        from lodo.lab.cli import app

        app()
    except ModuleNotFoundError as error:
        sys.exit(f"lodo's command line needs {error.name}: pip install 'lodo[lab]'")
    except KeyboardInterrupt:  # during an import
        sys.exit(130)


if __name__ == "__main__":
    main()
