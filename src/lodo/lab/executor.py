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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import dask
import distributed
from dask.system import CPU_COUNT

from lodo._checks import check_int
from lodo.lab.run import Curve, Run, execute, load

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
    with crew(
        folder,
        workers=workers,
        scheduler=scheduler,
        report=report,
        checkpoint_every=checkpoint_every,
        at_most=len(todo),
    ) as hired:
        hired.take(todo)
        while hired.busy:
            hired.wait()


def loaded(run: Run, folder: Path) -> Curve:
    """The curve of a run that has been finished."""
    curve = load(run, folder)
    if curve is None:
        raise RunError(f"{run.path(folder)} was there and is gone or damaged; the same command makes it again")
    return curve


class Crew(ABC):
    """Those who do runs: give them some with `take`, and `wait` for the next that is finished."""

    hands: int  # how many runs are done at once

    def __init__(self, folder: Path, report: Report, checkpoint_every: float) -> None:
        self.folder, self.report, self.checkpoint_every = folder, report, checkpoint_every

    @property
    @abstractmethod
    def busy(self) -> int:
        """How many runs have been taken and not finished."""

    @abstractmethod
    def take(self, runs: Iterable[Run]) -> None:
        """Begin with these runs; finished ones cost nothing."""

    @abstractmethod
    def wait(self) -> Run:
        """The next run that is finished. A run's own error is a `RunError`."""


@contextmanager
def crew(
    folder: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    report: Report = lambda run, fraction: None,
    checkpoint_every: float = 10.0,
    at_most: int | None = None,
) -> Iterator[Crew]:
    """Those who do runs, with the options of `sweep`; no more local processes than ``at_most``."""
    if workers is not None:
        check_int("workers", workers, low=0)
    folder = folder.absolute()
    number = min(CPU_COUNT if workers is None else workers, CPU_COUNT if at_most is None else at_most)
    if scheduler is None and number == 0:
        yield _Alone(folder, report, checkpoint_every)
        return
    with dask.config.set(_DASK), _client(scheduler, number) as client:
        hired = _Many(client, folder, report, checkpoint_every)
        try:
            yield hired
        finally:
            hired.dismiss()


class _Alone(Crew):
    """This process, one run after the other."""

    hands = 1

    def __init__(self, folder: Path, report: Report, checkpoint_every: float) -> None:
        super().__init__(folder, report, checkpoint_every)
        self.runs: deque[Run] = deque()

    @property
    def busy(self) -> int:
        return len(self.runs)

    def take(self, runs: Iterable[Run]) -> None:
        self.runs.extend(runs)

    def wait(self) -> Run:
        run = self.runs.popleft()
        progress = partial(self.report, run)
        try:
            execute(run, self.folder, checkpoint_every=self.checkpoint_every, progress=progress)
        except Exception as error:
            raise RunError(f"{run.name} failed: {error}") from error
        return run


class _Many(Crew):
    """Dask's workers."""

    def __init__(self, client: Any, folder: Path, report: Report, checkpoint_every: float) -> None:
        super().__init__(folder, report, checkpoint_every)
        self.client = client
        self.own = f"lodo-{uuid.uuid4().hex}"  # others may sweep on the same scheduler
        self.by_name: dict[str, Run] = {}
        self.futures: dict[Any, Run] = {}
        self.completed = distributed.as_completed(loop=client.loop)
        client.subscribe_topic(self.own, lambda event: report(self.by_name[event[1]["run"]], event[1]["done"]))

    @property
    def hands(self) -> int:  # type: ignore[override]  # workers come and go
        return max(1, len(self.client.nthreads()))

    @property
    def busy(self) -> int:
        return len(self.futures)

    def take(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.by_name[run.name] = run
            key = f"{self.own}-{run.name}"
            future = self.client.submit(_work, run, self.folder, self.checkpoint_every, self.own, key=key)
            self.futures[future] = run
            self.completed.add(future)

    def wait(self) -> Run:
        future = next(self.completed)
        run = self.futures.pop(future)
        if future.cancelled():
            raise RunError(f"{run.name} was cancelled on the scheduler; the same command continues from here")
        error = future.exception()
        if error is not None:
            raise RunError(f"{run.name} failed: {error}") from error
        if load(run, self.folder) is None:
            raise RunError(
                f"{run.name} was done by a worker, but there is no file of it in {self.folder}: "
                "the folder of --out must be one that this machine and the cluster's workers share"
            )
        self.report(run, 1.0)
        return run

    def dismiss(self) -> None:
        """Have unfinished runs stopped."""
        self.client.cancel(list(self.futures), force=True)


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
