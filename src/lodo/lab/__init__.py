"""The laboratory: tasks, rivals, runs on disk, sweeps and the paper's experiments.

It needs the extra ``lodo[lab]``. The library below it never imports it.
"""
