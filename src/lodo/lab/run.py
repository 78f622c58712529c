"""One run: task x optimizer x hyperparameters x seed -> a curve on disk, resumable.

A run is stored as one Parquet file. Its name comes from the settings, which also stand in the file's metadata with the
outcome. The file is written when the run ends, so that a complete file is a finished run; until then there is a
checkpoint.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import logging
import math
import os
import platform
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not declared so

from lodo._checks import check_choice, check_int, check_real
from lodo.lab import plugins
from lodo.lab.files import load_state, remove_leftovers, save_state, write_atomically
from lodo.lab.optimizers import build, evaluating, needs_graph, state_bytes
from lodo.lab.optimizers.libraries import library_versions
from lodo.lab.schedules import SCHEDULES, schedule_of
from lodo.lab.tasks import find_task, make_task

log = logging.getLogger(__name__)

FORMAT = 2  # part of every run's address: raise it when a curve changes by more than rounding, as between machines
_LOOK_EVERY = 0.25  # seconds of training between checks for progress, checkpoints and time limits
_TRAINING_OVER_SAVING = 10  # the least ratio of time spent training to time spent writing checkpoints
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_RETRY_AFTER = 10.0  # seconds after which a result is written again if the disk was full
COLUMNS = ("evaluations", "seconds", "loss", "repeat_loss")


@dataclass(frozen=True)
class Run:
    """What determines a run.

    Args:
        task: its name, as `lodo.lab.tasks.find_task` takes it.
        optimizer: its full name, as `lodo.lab.optimizers.resolve` gives it.
        seed: the seed of everything random.
        evaluations: the run ends after this many evaluations of a loss and its gradient (the paper's "steps").
        seconds: the run ends after this much training time, if that comes first.
        task_options: options of the task that differ from its defaults.
        options: the optimizer's hyperparameters.
        track_every: number of steps between measurements of tracked quantities; 0 for none.
        sources: digests of the files of your own modules, by the modules' names; None computes them.
        schedule: how the rate falls over the run, one of `lodo.lab.schedules.SCHEDULES`; None for the optimizer's own
            way, which is a constant rate for all but LARS.

    Example:
        >>> run = Run("rosenbrock", "torch.SGD", seed=0, evaluations=100, options={"lr": 0.1})
        >>> run.name
        'rosenbrock-torch.SGD-0-c2ac2a45c620'
    """

    task: str
    optimizer: str
    seed: int
    evaluations: int | None
    seconds: float | None = None
    task_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    track_every: int = 0
    sources: Mapping[str, str] | None = None
    schedule: str | None = None

    def __post_init__(self) -> None:
        check_int("seed", self.seed, low=0)
        if self.schedule is not None:
            check_choice("schedule", self.schedule, SCHEDULES)
        check_int("track_every", self.track_every, low=0)
        if self.evaluations is not None:
            check_int("evaluations", self.evaluations, low=1)
        if self.seconds is not None:
            check_real("seconds", self.seconds, low=0.0, open_low=True)
        if self.evaluations is None and self.seconds is None:
            raise ValueError("evaluations or seconds must be given, got None for both: the run would never end")
        if self.sources is None:
            object.__setattr__(self, "sources", plugins.source_digests(self.task, self.optimizer))

    def __hash__(self) -> int:
        return hash(self.settings)

    @cached_property
    def settings(self) -> str:
        """The settings as canonical JSON."""
        settings = {"format": FORMAT, **asdict(self)}
        for name in ("sources", "schedule"):
            if not settings[name]:
                del settings[name]  # so that runs without them keep their addresses
        return json.dumps(settings, sort_keys=True)

    @cached_property
    def name(self) -> str:
        """The address of the run: readable, and different for different settings."""
        digest = hashlib.sha256(self.settings.encode()).hexdigest()[:12]
        return f"{file_name(self.task)}-{file_name(self.optimizer)}-{self.seed}-{digest}"

    def path(self, folder: Path) -> Path:
        """The file of its curve, once it is finished."""
        return folder / f"{self.name}.parquet"

    def checkpoint_path(self, folder: Path) -> Path:
        """The file of its checkpoint, until then."""
        return folder / f"{self.name}.checkpoint"

    def weights_path(self, folder: Path) -> Path:
        """The file of its final weights, if its task keeps them."""
        return folder / f"{self.name}.weights"

    def check(self) -> None:
        """Make the task and the optimizer, to find an error before the run starts."""
        with threads(1), _own_random_numbers():
            build(self.optimizer, make_task(self.task, self.task_options, self.seed), self.seed, self.options)


def file_name(name: str) -> str:
    """The name of a task or an optimizer as part of a file's name.

    >>> file_name("mymodule:MyTask")
    'mymodule.MyTask'
    """
    return name.replace(":", ".")


@dataclass(frozen=True)
class Curve:
    """A finished run, read from its file.

    ``columns`` has one entry for each step: ``step``, ``evaluations`` (so far), ``seconds`` (of training so far, by
    `training_clock`), ``loss`` (on the fresh batch), ``repeat_loss`` (mean of further evaluations of that batch, else
    NaN), and tracked quantities after the step (NaN where not measured).
    """

    run: Run
    diverged: bool
    columns: Mapping[str, np.ndarray]
    environment: Mapping[str, str] = field(default_factory=dict)
    final: Mapping[str, float] = field(default_factory=dict)  # numbers measured once, at the end
    weights: Path | None = None  # the file of the final weights, if there is one
    state_bytes: float | None = None  # of the optimizer at the end, for each weight; None in files that lack it

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column]

    def tracked(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Evaluations and values where a tracked quantity was measured."""
        values = self.columns.get(column, np.full(len(self["step"]), np.nan))
        there = ~np.isnan(values)
        return self["evaluations"][there], values[there]


Progress = Callable[[float], None]  # is called with the fraction done


def execute(
    run: Run, folder: Path, *, checkpoint_every: float = 10.0, progress: Progress = lambda fraction: None
) -> Path:
    """Do the run unless it is already done, continuing from its checkpoint if there is one.

    Args:
        run: the run.
        folder: where runs are stored.
        checkpoint_every: seconds between checkpoints, the most that a kill can cost. The interval becomes longer if
            writing a checkpoint takes more than a tenth of it. With 0 there is a checkpoint at every opportunity.
        progress: called several times a second with the fraction that is done.
    """
    path, checkpoint = run.path(folder), run.checkpoint_path(folder)
    if load_curve(run, folder) is None:
        plugins.require_sources(run.sources or {})
        with _one_at_a_time, _own_random_numbers(), threads(find_task(run.task).threads):
            training = Training.resumed(run, checkpoint)
            saved, interval = time.monotonic(), checkpoint_every
            while not training.over:
                training.advance()
                progress(training.fraction)
                now = time.monotonic()
                if now - saved > interval and not training.over:
                    training.save(checkpoint)
                    saved = time.monotonic()
                    if checkpoint_every > 0:
                        interval = max(checkpoint_every, _TRAINING_OVER_SAVING * (saved - now))
            if training.task.keeps_weights and not training.diverged:
                _keep_trying(training.save_weights, run.weights_path(folder))
            _keep_trying(write_atomically, path, training.parquet())
    for file in (path, checkpoint, run.weights_path(folder)):
        remove_leftovers(file)
    checkpoint.unlink(missing_ok=True)
    progress(1.0)
    return path


def _keep_trying(write: Callable[..., None], path: Path, *data: bytes) -> None:
    """Write the result of a run. While the disk is full, say so and wait: the training need not be lost."""
    while True:
        try:
            write(path, *data)
            return
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            log.warning(
                "the disk is full: %s is kept in memory and will be written when there is room (%s); trying again in "
                "%g seconds",
                path,
                error.strerror,
                _RETRY_AFTER,
            )
        time.sleep(_RETRY_AFTER)


def load_curve(run: Run, folder: Path) -> Curve | None:
    """The curve of a finished run, or None if there is no file of it that can be trusted."""
    path = run.path(folder)
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        about = read_metadata(table.schema)
        columns = {name: table[name].to_numpy() for name in table.column_names}
        _check_columns(columns)
    except FileNotFoundError:
        return None
    except (OSError, pa.ArrowException, ValueError) as error:
        log.warning("%s is damaged and will be made again (%s)", path, error)
        return None
    if json.dumps(about["settings"], sort_keys=True) != run.settings or table.num_rows != about["steps"]:
        log.warning("%s does not hold the run that its name says and will be made again", path)
        return None
    weights = run.weights_path(folder)
    kept = weights if weights.is_file() else None
    state = about.get("state_bytes")
    known = float(state) if isinstance(state, (int, float)) else None
    return Curve(run, about["diverged"], columns, about["environment"], about["final"], kept, known)


_METADATA = {"settings": dict, "steps": int, "diverged": bool, "final": dict, "environment": dict}


def read_metadata(schema: pa.Schema) -> dict[str, Any]:
    """The settings and the outcome of a run, from the metadata of its file; an error if they are of another shape."""
    text = (schema.metadata or {}).get(b"lodo")
    if text is None:
        raise ValueError("the metadata of a run are missing")
    about = json.loads(text)
    if not isinstance(about, dict):
        raise ValueError(f"the metadata must be a table, got {about!r}")
    for name, kind in _METADATA.items():
        if not isinstance(about.get(name), kind):
            raise ValueError(f"{name} in the metadata must be of type {kind.__name__}, got {about.get(name)!r}")
    return about


def _check_columns(columns: Mapping[str, np.ndarray]) -> None:
    """Check that every column of a curve is there and has numbers."""
    for name in ("step", *COLUMNS, *columns):
        if name not in columns or not np.issubdtype(columns[name].dtype, np.number):
            raise ValueError(f"the file must have a column {name} of numbers")


def read_weights(path: Path) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The settings and the weights of a run, from its file of final weights or from its checkpoint."""
    state = load_state(path)
    if state is None:
        raise ValueError(f"{path} must be a whole file of weights or a checkpoint, got one that is missing or damaged")
    return json.loads(state["settings"]), state["params"] if "params" in state else state["task"]["params"]


class Training:
    """A run in progress."""

    def __init__(self, run: Run) -> None:
        self.run = run
        _seed(run.seed)
        self.task = make_task(run.task, run.task_options, run.seed)
        self.optimizer = build(run.optimizer, self.task, run.seed, run.options)
        self.schedule = schedule_of(run.optimizer, run.schedule)
        self.rates = [group["lr"] for group in self.optimizer.param_groups] if self.schedule else []
        self.columns = {name: array("d") for name in COLUMNS}
        self.tracked: dict[str, array[float]] = {}
        self.tracked_at = array("d")
        self.evaluations, self.seconds, self.diverged = 0, 0.0, False

    @property
    def steps(self) -> int:
        return len(self.columns["loss"])

    @property
    def fraction(self) -> float:
        """The fraction of the run that is done."""
        run = self.run
        return max(
            self.evaluations / run.evaluations if run.evaluations else 0.0,
            self.seconds / run.seconds if run.seconds else 0.0,
        )

    @property
    def over(self) -> bool:
        return self.diverged or self.fraction >= 1

    def advance(self, until: float = 1.0) -> None:
        """Train for a moment, or until this fraction of the run is done, and measure on the way."""
        task, optimizer = self.task, self.optimizer
        graph = needs_graph(optimizer)
        every = self.run.track_every
        most = until * (self.run.evaluations or math.inf)
        left = until * (self.run.seconds or math.inf) - self.seconds
        evaluations, seconds, loss, repeat_loss = (self.columns[name] for name in COLUMNS)
        losses: list[float] = []
        clock = training_clock()

        def closure() -> float:
            losses.append(task.evaluate(graph))
            return losses[-1]

        limit = time.perf_counter() + min(_LOOK_EVERY, left)
        while True:
            begin = clock()
            if self.schedule is not None:
                factor = self.schedule(self.fraction)
                for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
                    group["lr"] = rate * factor
            task.draw()
            try:
                optimizer.step(closure)
            except (ArithmeticError, LinAlgError):  # such as LODO's error for an infinite gradient
                self.diverged = True
            self.seconds += clock() - begin
            self.evaluations += len(losses)
            evaluations.append(self.evaluations)
            seconds.append(self.seconds)
            loss.append(losses[0])
            repeat_loss.append(sum(losses[1:]) / (len(losses) - 1) if len(losses) > 1 else math.nan)
            self.diverged = self.diverged or not all(map(math.isfinite, losses))
            losses.clear()
            if every and len(loss) % every == 0 and not self.diverged:
                self._measure()
            if self.diverged or self.evaluations >= most or time.perf_counter() >= limit:
                break

    def _measure(self) -> None:
        self.tracked_at.append(self.steps)
        with evaluating(self.optimizer, self.task.params):
            measured = self.task.tracked(self.optimizer, self.steps)
        for name in dict.fromkeys([*self.tracked, *measured]):  # what is measured may change on the way
            before = array("d", [math.nan] * (len(self.tracked_at) - 1))
            self.tracked.setdefault(name, before).append(measured.get(name, math.nan))

    def _final(self) -> dict[str, float]:
        with evaluating(self.optimizer, self.task.params):
            return self.task.final()

    def save_weights(self, path: Path) -> None:
        """Write the weights alone, those at which the run was measured."""
        with evaluating(self.optimizer, self.task.params):
            save_state(path, {"settings": self.run.settings, "params": [p.detach() for p in self.task.params]})

    def save(self, path: Path) -> None:
        """Write a checkpoint; if that fails, log it and continue."""
        state = {
            "settings": self.run.settings,
            "task": self.task.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": _random_state(),
            "columns": {name: _tensor(column) for name, column in self.columns.items()},
            "tracked": {name: _tensor(column) for name, column in self.tracked.items()},
            "tracked_at": _tensor(self.tracked_at),
            "evaluations": self.evaluations,
            "seconds": self.seconds,
        }
        try:
            save_state(path, state)
        except Exception as error:
            log.warning("no checkpoint of %s could be written: %s", self.run.name, error)

    @classmethod
    def resumed(cls, run: Run, path: Path) -> Training:
        """The run at its checkpoint, or at its start if there is no checkpoint that can be trusted."""
        if path.exists():
            try:
                state = load_state(path)
                if state is None:
                    raise ValueError("it is damaged")
                training = cls(run)
                training._restore(state)
                return training
            except Exception as error:
                reason = str(error).partition("\n")[0]
                log.warning("%s is not used and the run starts again: %s", path, reason)
        return cls(run)

    def _restore(self, state: dict[str, Any]) -> None:
        if state["settings"] != self.run.settings:
            raise ValueError("it belongs to another run")
        self.task.load_state_dict(state["task"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.columns = {name: _array(column) for name, column in state["columns"].items()}
        self.tracked = {name: _array(column) for name, column in state["tracked"].items()}
        self.tracked_at = _array(state["tracked_at"])
        self.evaluations, self.seconds = state["evaluations"], state["seconds"]
        _set_random_state(state["random"])

    def parquet(self) -> bytes:
        """The curve as a Parquet file."""
        steps = self.steps
        final = {} if self.diverged else self._final()
        columns = {name: np.asarray(column) for name, column in self.columns.items()}
        for name, column in self.tracked.items():
            columns[name] = np.full(steps, np.nan)
            columns[name][np.asarray(self.tracked_at, dtype=np.int64) - 1] = column
        counts = {
            "step": np.arange(1, steps + 1, dtype=np.int64),
            "evaluations": columns.pop("evaluations").astype(np.int64),
        }
        columns["seconds"] = columns["seconds"].astype(np.float32)
        numbers = {name: pa.array(_narrow(column), from_pandas=True) for name, column in columns.items()}
        about = {
            "settings": json.loads(self.run.settings),
            "steps": steps,
            "diverged": self.diverged,
            "final": final,
            "state_bytes": state_bytes(self.optimizer) / sum(p.numel() for p in self.task.params),
            "environment": environment(),
        }
        table = pa.table({**counts, **numbers}).replace_schema_metadata({"lodo": json.dumps(about)})
        encodings = {**dict.fromkeys(counts, "DELTA_BINARY_PACKED"), **dict.fromkeys(numbers, "BYTE_STREAM_SPLIT")}
        sink = io.BytesIO()
        pq.write_table(
            table,
            sink,
            compression="zstd",
            use_dictionary=False,
            column_encoding=encodings,
            write_page_checksum=True,
        )
        return sink.getvalue()


def environment() -> dict[str, str]:
    """The machine and the versions of the packages that produce the numbers."""
    packages = {name: version(name) for name in ("lodo", "torch", "numpy", "numba")} | library_versions()
    return {
        **packages,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": str(os.cpu_count()),
    }


@functools.cache
def processor() -> str:
    """The name of the machine's processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "not known"


def training_clock() -> Callable[[], float]:
    """What training time is measured with: processor time, so that other work on the machine does not count.

    Where torch may use several threads, it is the time that passes.

    >>> with threads(1):
    ...     training_clock().__name__
    'thread_time'
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _narrow(values: np.ndarray) -> np.ndarray:
    """The values in single precision if that loses nothing, as with the losses of a single-precision task."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    return single if np.array_equal(single, values, equal_nan=True) else values


def _tensor(values: array[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _array(values: torch.Tensor) -> array[float]:
    return array("d", values.numpy().tobytes())


# Library optimizers draw from the global generators of torch, NumPy and Python. A process has one of each, so it does
# one run at a time and restores the caller's generators afterwards.
_one_at_a_time = threading.Lock()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy_state = (name, torch.tensor(keys.tolist()), *rest)  # type: ignore[union-attr]  # an array
    return {"torch": torch.get_rng_state(), "numpy": numpy_state, "python": random.getstate()}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    before = _random_state()
    try:
        yield
    finally:
        _set_random_state(before)


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Let torch use this number of threads for a while; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
