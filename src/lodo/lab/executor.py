"""Many runs at once: in this process, in local processes or on a cluster, through Dask.

Files are the only memory: a finished run is not repeated, and a run that a killed worker or a killed sweep left behind
continues from its checkpoint on whichever worker gets it next.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import dask
import distributed
import psutil
from dask.system import CPU_COUNT
from distributed.comm.addressing import get_address_host_port

from lodo._checks import check_int
from lodo.lab import plugins
from lodo.lab.errors import RunError
from lodo.lab.files import check_folder
from lodo.lab.interrupts import cleaning_up
from lodo.lab.run import Curve, Run, execute, load_curve

_CONNECT = 10.0  # seconds in which a scheduler must answer
_REPORT_EVERY = 0.5  # seconds between a worker's messages about one run
_DASK = {
    "distributed.scheduler.allowed-failures": 20,  # workers that may die during a run before it is given up
    "distributed.worker.daemon": True,
    "distributed.logging.distributed": "error",
    "distributed.comm.retry.count": 3,
    # Dask makes its workers return freed memory at once. A network asks for the same memory at every step, and would
    # then take twice as long.
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 2**30,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 2**25,
}

OnProgress = Callable[[Run, float], None]  # is called with a run and the fraction of it that is done


def sweep(
    runs: Sequence[Run],
    folder: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    on_progress: OnProgress = lambda run, fraction: None,
    checkpoint_every: float = 10.0,
) -> None:
    """Finish every run; afterwards `lodo.lab.run.load_curve` reads any of them.

    Args:
        runs: the runs. Duplicates and finished ones cost nothing.
        folder: where runs are stored. The workers of a cluster must see the same folder. They should have one thread
            each, since a process does one run at a time.
        workers: number of local processes, one for each core if None; 0 works in this process, without Dask.
        scheduler: the address of a running Dask scheduler, to use its workers instead of local processes.
        on_progress: called with every run's progress.
        checkpoint_every: seconds between a run's checkpoints.

    Example:
        >>> run = Run("rosenbrock", "adam", seed=0, evaluations=20)
        >>> folder = Path(tempfile.mkdtemp())
        >>> sweep([run], folder, workers=0)
        >>> len(load_curve(run, folder)["loss"])
        20
    """
    todo = []
    for run in dict.fromkeys(runs):
        if load_curve(run, folder) is None:
            todo.append(run)
        else:
            on_progress(run, 1.0)
    for run in _one_of_each(todo):
        run.check()
    if not todo:
        return
    check_folder("out", folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open_executor(
        folder,
        workers=workers,
        scheduler=scheduler,
        on_progress=on_progress,
        checkpoint_every=checkpoint_every,
        at_most=len(todo),
    ) as executor:
        executor.submit(todo)
        while executor.pending:
            executor.wait()


def check_scheduler(address: str) -> None:
    """Check that something answers at the address of a Dask scheduler.

    >>> check_scheduler("foo")
    Traceback (most recent call last):
    ...
    ValueError: scheduler must be the address of a running Dask scheduler, such as tcp://host:8786, got 'foo': missing \
port number in address 'foo'
    """
    if address.startswith(("inproc://", "ucx://")):  # no sockets
        return
    try:
        socket.create_connection(get_address_host_port(address), timeout=_CONNECT).close()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"scheduler must be the address of a running Dask scheduler, such as tcp://host:8786, got {address!r}: "
            f"{error}"
        ) from error


def load_finished(run: Run, folder: Path) -> Curve:
    """The curve of a run that has been finished; an error if its file has disappeared since."""
    curve = load_curve(run, folder)
    if curve is None:
        raise RunError(f"{run.path(folder)} has been removed or damaged; the same command makes it again")
    return curve


class RunExecutor(ABC):
    """Does runs: `submit` some, then `wait` for the next one that finishes."""

    slots: int  # how many runs are done at once

    def __init__(self, folder: Path, on_progress: OnProgress, checkpoint_every: float) -> None:
        self.folder, self.on_progress, self.checkpoint_every = folder, on_progress, checkpoint_every

    @property
    @abstractmethod
    def pending(self) -> int:
        """How many submitted runs have not finished."""

    @abstractmethod
    def submit(self, runs: Iterable[Run]) -> None:
        """Add runs; finished ones cost nothing."""

    @abstractmethod
    def wait(self) -> Run:
        """The next run that finishes. If it fails, a `RunError` is raised."""


@contextmanager
def open_executor(
    folder: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    on_progress: OnProgress = lambda run, fraction: None,
    checkpoint_every: float = 10.0,
    at_most: int | None = None,
) -> Iterator[RunExecutor]:
    """An executor with the options of `sweep`, and at most ``at_most`` local processes; it is shut down at the end."""
    if workers is not None:
        check_int("workers", workers, low=0)
    folder = folder.absolute()
    number = min(CPU_COUNT if workers is None else workers, CPU_COUNT if at_most is None else at_most)
    if scheduler is None and number == 0:
        yield _InProcess(folder, on_progress, checkpoint_every)
        return
    with dask.config.set(_DASK), _client(scheduler, number) as client:
        executor = _OnDask(client, folder, on_progress, checkpoint_every)
        try:
            yield executor
        finally:
            executor.shutdown()


class _InProcess(RunExecutor):
    """Does one run after the other in this process."""

    slots = 1

    def __init__(self, folder: Path, on_progress: OnProgress, checkpoint_every: float) -> None:
        super().__init__(folder, on_progress, checkpoint_every)
        self.queue: deque[Run] = deque()

    @property
    def pending(self) -> int:
        return len(self.queue)

    def submit(self, runs: Iterable[Run]) -> None:
        self.queue.extend(runs)

    def wait(self) -> Run:
        run = self.queue.popleft()
        progress = partial(self.on_progress, run)
        try:
            execute(run, self.folder, checkpoint_every=self.checkpoint_every, progress=progress)
        except Exception as error:
            raise RunError(f"{run.name} failed: {error}") from error
        return run


class _OnDask(RunExecutor):
    """Does runs on Dask's workers."""

    def __init__(self, client: Any, folder: Path, on_progress: OnProgress, checkpoint_every: float) -> None:
        super().__init__(folder, on_progress, checkpoint_every)
        self.client = client
        self.topic = f"lodo-{uuid.uuid4().hex}"  # unique, since other sweeps may use the same scheduler
        self.by_name: dict[str, Run] = {}
        self.futures: dict[Any, Run] = {}
        self.completed = distributed.as_completed(loop=client.loop)
        client.subscribe_topic(self.topic, self._pass_on)

    def _pass_on(self, event: tuple[Any, dict[str, Any]]) -> None:
        """Report the progress that a worker has sent."""
        _, message = event
        self.on_progress(self.by_name[message["run"]], message["done"])

    @property
    def slots(self) -> int:  # type: ignore[override]  # a property, since workers come and go
        return max(1, len(self.client.nthreads()))

    @property
    def pending(self) -> int:
        return len(self.futures)

    def submit(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.by_name[run.name] = run
            future = self.client.submit(
                _work,
                run,
                self.folder,
                self.checkpoint_every,
                self.topic,
                os.getcwd(),
                key=f"{self.topic}-{run.name}",
            )
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
        if load_curve(run, self.folder) is None:
            raise RunError(
                f"a worker has finished {run.name}, but {self.folder} has no file of it: "
                "--out must be a folder that this machine and the workers share"
            )
        self.on_progress(run, 1.0)
        return run

    def shutdown(self) -> None:
        """Stop the runs that have not finished."""
        self.client.cancel(list(self.futures), force=True)


@contextmanager
def _client(scheduler: str | None, workers: int) -> Iterator[Any]:
    """A client of a running scheduler, or of a cluster of local processes that lives as long as the client."""
    if scheduler is not None:
        with distributed.Client(scheduler, set_as_default=False) as client:
            yield client
        return
    with tempfile.TemporaryDirectory(prefix="lodo-dask-") as scratch, cleaning_up(partial(_kill_workers, scratch)):
        with dask.config.set({"temporary-directory": scratch}), _without_interrupts():
            cluster = distributed.LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                memory_limit=0,  # so that Dask never kills a run for its memory
                dashboard_address="127.0.0.1:0",
                local_directory=scratch,
                silence_logs=logging.CRITICAL,
            )
        with cluster, distributed.Client(cluster, set_as_default=False) as client:
            yield client


def _kill_workers(scratch: str) -> None:
    """Kill this process's workers, also those that Dask is just starting, and delete their files.

    Dask replaces workers that have died. One that starts while this process ends would say that it has lost its parent,
    and there is no public way to forbid it.
    """
    multiprocessing.context.SpawnProcess._Popen = staticmethod(_refuse_to_start)  # type: ignore[method-assign, assignment]
    while workers := [child for child in psutil.Process().children() if "spawn_main" in " ".join(_command(child))]:
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        psutil.wait_procs(workers)
    shutil.rmtree(scratch, ignore_errors=True)


def _refuse_to_start(process: object) -> NoReturn:
    raise RuntimeError(f"{process} cannot be started: the command is ending")


def _command(process: psutil.Process) -> list[str]:
    """The command line of a process; nothing of one that has ended."""
    try:
        words: list[str] = process.cmdline()
        return words if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.NoSuchProcess:
        return []


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Threads and processes started here, and their own, never see Ctrl-C: only the main thread acts on it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    _start_resource_tracker()  # starting it later would let interrupts in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_resource_tracker() -> None:
    """Start the process that deletes the semaphores of killed processes. It must not warn that it had to."""
    quiet = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(quiet)  # new processes inherit these
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(quiet)


def _one_of_each(runs: Sequence[Run]) -> list[Run]:
    """One run for every combination of task, optimizer and options, whatever the seed."""
    return list({(run.task, run.optimizer, str(run.task_options), str(run.options)): run for run in runs}.values())


def _work(run: Run, folder: Path, checkpoint_every: float, topic: str, current_folder: str) -> None:
    """Do a run on a worker; ``current_folder``, where the command was given, has the plug-ins."""
    plugins.search_in(current_folder)
    worker = distributed.get_worker()
    last = 0.0

    def progress(done: float) -> None:
        nonlocal last
        if time.monotonic() - last > _REPORT_EVERY:
            worker.log_event(topic, {"run": run.name, "done": done})
            last = time.monotonic()

    execute(run, folder, checkpoint_every=checkpoint_every, progress=progress)
