"""From a search to a finished study: trials from Optuna, runs by the crew, losses back into the study.

The study's storage and the folder of runs are the only memory. A trial belongs to the process that it names as its
owner; when that is gone, the next process takes it over, and its run goes on from its checkpoint. A loss is told once,
whoever tells it.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
import psutil
import sqlalchemy.exc
from optuna.exceptions import OptunaError
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url

from lodo.lab.executor import crew, loaded
from lodo.lab.experiments.base import tail
from lodo.lab.run import Curve, Run
from lodo.lab.tuning.finals import Finals
from lodo.lab.tuning.search import Search

_OWNER = "owner"  # the attribute of a trial that says whose it is
_SIGN_OF_LIFE = 15.0  # seconds between an owner's
_SILENCE = 90.0  # seconds after which the trials of an owner on another machine are taken over
_PAUSE = 0.5  # seconds between looks at what other processes have done


def open_study(search: Search | Finals, storage: str) -> optuna.Study:
    """The study of a search, a new one if there is none."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    prefix = "sqlite:///"
    if storage.startswith(prefix):
        Path(storage.removeprefix(prefix)).parent.mkdir(parents=True, exist_ok=True)
    try:
        study = optuna.create_study(
            storage=storage, sampler=search.made_sampler, study_name=search.name, load_if_exists=True
        )
    except (ImportError, OptunaError, sqlalchemy.exc.SQLAlchemyError, ValueError) as error:
        raise ValueError(
            f"storage must be a database that SQLAlchemy can open, such as sqlite:///tuning.db or "
            f"postgresql://user@host/name with its driver installed, got {without_password(storage)!r}: {error}"
        ) from error
    study.set_user_attr("search", json.dumps(search.settings, sort_keys=True))
    return study


def without_password(storage: str) -> str:
    """The address of a database as it may be shown.

    >>> without_password("postgresql://ada:secret@host/studies")
    'postgresql://ada:***@host/studies'
    """
    try:
        address = make_url(storage)
    except sqlalchemy.exc.ArgumentError:
        return storage
    return storage if address.password is None else address.render_as_string(hide_password=True)


def tune(
    search: Search | Finals,
    storage: str,
    out: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    report: Callable[[optuna.Study], None] = lambda study: None,
    checkpoint_every: float = 10.0,
) -> optuna.Study:
    """Go on with a search until it is finished.

    Args:
        search: what to do.
        storage: address of the study's database; several processes may work on the same.
        out: its subfolder ``runs`` has the runs, as those of experiments; machines that share a study may have folders
            of their own.
        workers: local processes, as many as cores if None; 0 works in this process.
        scheduler: the address of a running Dask scheduler, used instead of local processes.
        report: is shown the study whenever a trial has finished.
        checkpoint_every: seconds between a run's checkpoints.
    """
    study = open_study(search, storage)
    folder = out / "runs"
    search.start.check()
    report(study)
    if _left(search, study) == 0:
        return study
    with (
        crew(folder, workers=workers, scheduler=scheduler, checkpoint_every=checkpoint_every) as hired,
        _claims(search, study) as claims,
    ):
        mine: dict[Run, int] = {}
        while True:
            while hired.busy < hired.hands + 1 and (trial := claims.next()) is not None:
                run = search.run(trial.number, search.suggest(trial))
                mine[run] = trial.number
                hired.take([run])
            if hired.busy:
                run = hired.wait()
                number = mine.pop(run)
                claims.release(number)
                _tell(study, number, loaded(run, folder))
            elif _left(search, study) == 0:
                return study
            else:
                time.sleep(_PAUSE)  # the rest is done by other processes
            report(study)


def _left(search: Search | Finals, study: optuna.Study) -> int:
    """Trials that have not ended."""
    return search.number - len(finished_trials(search, study))


def finished_trials(search: Search | Finals, study: optuna.Study) -> list[FrozenTrial]:
    """The trials of a search that have ended, by number."""
    every = study.get_trials(deepcopy=False)[: search.number]
    return [trial for trial in every if trial.state.is_finished()]


def _tell(study: optuna.Study, number: int, curve: Curve) -> None:
    """A run's loss over its last tenth; one that is not finite drops out."""
    loss = math.nan if curve.diverged else tail(curve)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a trial that another process has told about meanwhile
        if math.isfinite(loss):
            study.tell(number, loss, skip_if_finished=True)
        else:
            study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)


class _Claims:
    """Trials for this process: abandoned ones first, then new ones, as far as they can begin."""

    def __init__(self, search: Search | Finals, study: optuna.Study) -> None:
        self.search, self.study = search, study
        self.me = {"host": socket.gethostname(), "pid": os.getpid(), "born": psutil.Process().create_time()}
        self.held: dict[int, Trial] = {}
        self.early: list[Trial] = []  # asked for before they could begin
        self.lock = threading.Lock()

    def next(self) -> Trial | None:
        """The next trial to do, or None if there is none now."""
        for trial in self.early:
            if self.search.may_begin(trial.number, self.study):
                self.early.remove(trial)
                return trial
        every = self.study.get_trials(deepcopy=False)
        for frozen in every[: self.search.number]:
            left = frozen.state == TrialState.RUNNING and frozen.number not in self.held and _abandoned(frozen)
            if left and self.search.may_begin(frozen.number, self.study):
                return self._claim(Trial(self.study, frozen._trial_id))
        if len(every) < self.search.number and self.search.may_begin(len(every), self.study):
            trial = self._claim(self.study.ask())
            if trial.number >= self.search.number:  # another process asked for the last one at the same time
                self.study.tell(trial, state=TrialState.FAIL)
                self.release(trial.number)
            elif self.search.may_begin(trial.number, self.study):
                return trial
            else:
                self.early.append(trial)
        return None

    def _claim(self, trial: Trial) -> Trial:
        with self.lock:
            self.held[trial.number] = trial
            trial.set_user_attr(_OWNER, {**self.me, "seen": time.time()})
        return trial

    def release(self, number: int) -> None:
        """A trial has ended."""
        with self.lock:
            self.held.pop(number, None)

    def show_life(self) -> None:
        """Tell other machines that this process is alive; one sign may get lost."""
        with self.lock:
            for trial in self.held.values():
                with suppress(OptunaError):  # another process has finished it, or the database is busy
                    trial.set_user_attr(_OWNER, {**self.me, "seen": time.time()})


@contextmanager
def _claims(search: Search | Finals, study: optuna.Study) -> Iterator[_Claims]:
    """Claims with a thread that shows that they are alive."""
    claims, over = _Claims(search, study), threading.Event()

    def live() -> None:
        while not over.wait(_SIGN_OF_LIFE):
            claims.show_life()

    thread = threading.Thread(target=live, daemon=True, name="lodo-signs-of-life")
    thread.start()
    try:
        yield claims
    finally:
        over.set()
        thread.join()


def _abandoned(trial: FrozenTrial) -> bool:
    """Whether a running trial's owner is gone: dead on this machine, or silent on another."""
    owner: dict[str, Any] | None = trial.user_attrs.get(_OWNER)
    if owner is None:  # its owner died, or is about to say who it is
        started = trial.datetime_start
        return started is None or time.time() - started.timestamp() > _SIGN_OF_LIFE
    if owner["host"] != socket.gethostname():
        return time.time() - float(owner["seen"]) > _SILENCE
    try:
        return bool(psutil.Process(owner["pid"]).create_time() != owner["born"])
    except psutil.Error:
        return True
