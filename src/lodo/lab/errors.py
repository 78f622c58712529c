"""The laboratory's own errors, in a module that imports nothing."""

from __future__ import annotations


class RunError(RuntimeError):
    """One run failed. The results and checkpoints of all others are kept."""
