"""Many runs, on Dask: local processes or a cluster, the same code.

Files are the only memory: a run that is finished is not done again, and one that a dead worker or a dead sweep
left behind goes on from its checkpoint, on whichever worker takes it next.
"""

from __future__ import annotations

import logging
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import dask
import distributed
from dask.system import CPU_COUNT

from lodo._checks import check_int
from lodo.lab.run import Run, execute, load

_REPORT_EVERY = 0.5  # seconds between a worker's messages about one run
_DASK = {
    "distributed.scheduler.allowed-failures": 20,  # workers that may die under one run before it is given up
    "distributed.worker.daemon": True,
    "distributed.logging.distributed": "error",
    "distributed.comm.retry.count": 3,
    # Dask makes workers return memory at once, so that a network, which asks for it again at every step, takes twice as
    # long.
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 2**30,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 2**25,
}

Report = Callable[[Run, float], None]  # a run, and the fraction of it that is done


class RunError(RuntimeError):
    """A run ended with an error of its own; the others' results and checkpoints are kept."""


def sweep(
    runs: Sequence[Run],
    folder: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    report: Report = lambda run, fraction: None,
    checkpoint_every: float = 10.0,
) -> None:
    """Finish every run; afterwards `lodo.lab.run.load` has them all.

    Args:
        runs: what to do; duplicates and finished runs cost nothing.
        folder: where runs are kept. A cluster's workers must see the same folder; one thread each is best, as a
            process does one run at a time.
        workers: local processes, as many as cores if None; 0 works in this process, without Dask.
        scheduler: the address of a running Dask scheduler, used instead of local processes.
        report: is told of every run's progress.
        checkpoint_every: seconds between a run's checkpoints.

    Example:
        >>> run = Run("rosenbrock", "adam", seed=0, evaluations=20)
        >>> folder = Path(tempfile.mkdtemp())
        >>> sweep([run], folder, workers=0)
        >>> len(load(run, folder)["loss"])
        20
    """
    if workers is not None:
        check_int("workers", workers, low=0)
    todo = []
    for run in dict.fromkeys(runs):
        if load(run, folder) is None:
            todo.append(run)
        else:
            report(run, 1.0)
    for run in _one_of_each(todo):
        run.check()
    if not todo:
        return
    folder = folder.absolute()
    if workers == 0 and scheduler is None:
        for run in todo:
            try:
                execute(run, folder, checkpoint_every=checkpoint_every, progress=partial(report, run))
            except Exception as error:
                raise RunError(f"{run.name} failed: {error}") from error
        return
    with dask.config.set(_DASK), _client(scheduler, min(workers or CPU_COUNT, len(todo))) as client:
        _on(client, todo, folder, report, checkpoint_every)


@contextmanager
def _client(scheduler: str | None, workers: int) -> Iterator[Any]:
    """A client of a running scheduler, or of a cluster of local processes that ends with it."""
    if scheduler is not None:
        with distributed.Client(scheduler, set_as_default=False) as client:
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="lodo-dask-") as scratch:
        with _interrupts_held_back():
            cluster = distributed.LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                memory_limit=0,  # Dask shall not kill a run for its memory
                dashboard_address="127.0.0.1:0",
                local_directory=scratch,
                silence_logs=logging.CRITICAL,
            )
        with cluster, distributed.Client(cluster, set_as_default=False) as client:
            yield client


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Threads and processes started here, and theirs, never see Ctrl-C: the main thread alone shall act on it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it later would let interrupts in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _one_of_each(runs: Sequence[Run]) -> list[Run]:
    """One run for every combination of task, optimizer and options, whatever the seed."""
    return list({(run.task, run.optimizer, str(run.task_options), str(run.options)): run for run in runs}.values())


def _on(client: Any, runs: Sequence[Run], folder: Path, report: Report, checkpoint_every: float) -> None:
    by_name = {run.name: run for run in runs}
    own = f"lodo-{uuid.uuid4().hex}"  # others may sweep on the same scheduler
    client.subscribe_topic(own, lambda event: report(by_name[event[1]["run"]], event[1]["done"]))
    futures = {client.submit(_work, run, folder, checkpoint_every, own, key=f"{own}-{run.name}"): run for run in runs}
    try:
        for future in distributed.as_completed(list(futures), loop=client.loop):
            run = futures[future]
            if future.cancelled():
                raise RunError(f"{run.name} was cancelled on the scheduler; the same command continues from here")
            error = future.exception()
            if error is not None:
                raise RunError(f"{run.name} failed: {error}") from error
            if load(run, folder) is None:
                raise RunError(
                    f"{run.name} was done by a worker, but there is no file of it in {folder}: "
                    "the folder of --out must be one that this machine and the cluster's workers share"
                )
            report(run, 1.0)
    finally:
        client.cancel(list(futures), force=True)


def _work(run: Run, folder: Path, checkpoint_every: float, topic: str) -> None:
    """What a worker does."""
    worker = distributed.get_worker()
    last = 0.0

    def progress(done: float) -> None:
        nonlocal last
        if time.monotonic() - last > _REPORT_EVERY:
            worker.log_event(topic, {"run": run.name, "done": done})
            last = time.monotonic()

    execute(run, folder, checkpoint_every=checkpoint_every, progress=progress)
