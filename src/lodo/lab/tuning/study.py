"""From a search to a finished study: Optuna gives trials, the executor does their runs, the study gets their losses.

The study's storage and the folder of runs are the only memory. A trial names the process that owns it. When that
process is gone, another takes the trial over, and the run continues from its checkpoint. The study accepts only the
first loss that it is told for a trial.
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
from urllib.parse import quote, quote_plus

import optuna
import psutil
import sqlalchemy.exc
from optuna.exceptions import OptunaError
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url

from lodo.lab.executor import load_finished, open_executor
from lodo.lab.experiments.base import tail
from lodo.lab.run import Curve, Run
from lodo.lab.tuning.finals import Finals
from lodo.lab.tuning.search import Search

_OWNER = "owner"  # the attribute of a trial that names the process that owns it
_HEARTBEAT = 15.0  # seconds between two signs of life of an owner
_SILENCE = 90.0  # seconds after which the trials of a silent owner on another machine are taken over
_PAUSE = 0.5  # seconds between looks at the progress of other processes


def open_study(search: Search | Finals, storage: str) -> optuna.Study:
    """The study of a search; a new one if there is none yet."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    prefix = "sqlite:///"
    if storage.startswith(prefix):
        Path(storage.removeprefix(prefix)).parent.mkdir(parents=True, exist_ok=True)
    try:
        study = optuna.create_study(
            storage=storage, sampler=search.optuna_sampler, study_name=search.name, load_if_exists=True
        )
    except (ImportError, OptunaError, sqlalchemy.exc.SQLAlchemyError, ValueError) as error:
        raise ValueError(
            f"storage must be a database that SQLAlchemy can open, such as sqlite:///tuning.db or "
            f"postgresql://user@host/name with its driver installed, got {without_password(storage)!r}: "
            f"{without_secrets(str(error), storage)}"
        ) from error
    study.set_user_attr("search", json.dumps(search.settings, sort_keys=True))
    return study


def without_password(storage: str) -> str:
    """The address of a database without its password, for display.

    Drivers take passwords by many names, so no option after the question mark is shown. Of an address that cannot be
    parsed, nothing before the @ is shown.

    >>> without_password("postgresql://ada:secret@host/studies")
    'postgresql://ada:***@host/studies'
    >>> without_password("postgresql://host/studies?user=ada&password=secret")
    'postgresql://host/studies?***'
    """
    shown, mark, _ = storage.partition("?")
    options = "?***" if mark else ""
    try:
        address = make_url(storage)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        before, at, host = shown.rpartition("@")
        return f"{'***' if before else ''}{at}{host}{options}"
    if address.password is None:
        return shown + options
    return address.set(query={}).render_as_string(hide_password=True) + options


def without_secrets(text: str, storage: str) -> str:
    """A text, such as a driver's error, without the address's password and options.

    >>> without_secrets("no user 'ada' with password 'secret'", "postgresql://ada:secret@host/studies")
    "no user 'ada' with password '***'"
    """
    try:
        address = make_url(storage)
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return text.replace(storage, without_password(storage))
    secrets = {storage.partition("?")[2]}.union(*address.normalized_query.values())
    if address.password is not None:
        secrets.add(str(address.password))
    for secret in sorted(secrets - {""}, key=len, reverse=True):
        for spelling in (secret, quote(secret), quote_plus(secret)):
            text = text.replace(spelling, "***")
    return text


def run_study(
    search: Search | Finals,
    storage: str,
    out: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    on_progress: Callable[[optuna.Study], None] = lambda study: None,
    checkpoint_every: float = 10.0,
) -> optuna.Study:
    """Start or continue the study of a search or of its finals, and return when all trials have finished.

    Args:
        search: the search, or its finals.
        storage: address of the study's database. Several processes may work on the same study.
        out: a folder; runs are stored in its subfolder ``runs``, like those of experiments. Machines that share a study
            may each have their own folder.
        workers: number of local processes, one for each core if None; 0 works in this process.
        scheduler: the address of a running Dask scheduler, to use its workers instead of local processes.
        on_progress: called with the study whenever a trial has finished.
        checkpoint_every: seconds between a run's checkpoints.
    """
    study = open_study(search, storage)
    folder = out / "runs"
    search.start.check()
    on_progress(study)
    if _trials_left(search, study) == 0:
        return study
    with (
        open_executor(folder, workers=workers, scheduler=scheduler, checkpoint_every=checkpoint_every) as executor,
        _claims(search, study) as claims,
    ):
        trials: dict[Run, list[int]] = {}  # several may come to the same run
        while True:
            while executor.pending <= executor.slots and (trial := claims.next()) is not None:
                run = search.make_run(trial.number, search.suggest(trial))
                if run not in trials:
                    executor.submit([run])
                trials.setdefault(run, []).append(trial.number)
            if executor.pending:
                run = executor.wait()
                for number in trials.pop(run):
                    claims.release(number)
                    _tell(study, number, load_finished(run, folder))
            elif _trials_left(search, study) == 0:
                return study
            else:
                time.sleep(_PAUSE)  # other processes are doing the remaining trials
            on_progress(study)


def _trials_left(search: Search | Finals, study: optuna.Study) -> int:
    """Number of trials that have not ended."""
    return search.number - len(finished_trials(search, study))


def finished_trials(search: Search | Finals, study: optuna.Study) -> list[FrozenTrial]:
    """The trials of a search that have ended, by number."""
    every = study.get_trials(deepcopy=False)[: search.number]
    return [trial for trial in every if trial.state.is_finished()]


def _tell(study: optuna.Study, number: int, curve: Curve) -> None:
    """Tell the study the loss over the last tenth of a run; a trial without a finite loss is pruned."""
    loss = math.nan if curve.diverged else tail(curve)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns if another process has told the trial's loss in the meantime
        if math.isfinite(loss):
            study.tell(number, loss, skip_if_finished=True)
        else:
            study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)


class _Claims:
    """The trials of this process: abandoned ones first, then new ones, once they can begin."""

    def __init__(self, search: Search | Finals, study: optuna.Study) -> None:
        self.search, self.study = search, study
        self.me = {"host": socket.gethostname(), "pid": os.getpid(), "born": psutil.Process().create_time()}
        self.held: dict[int, Trial] = {}
        self.early: list[Trial] = []  # asked for before they could begin
        self.lock = threading.Lock()

    def next(self) -> Trial | None:
        """The next trial to do, or None if there is none at the moment."""
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
        """Give up the claim on a trial that has ended."""
        with self.lock:
            self.held.pop(number, None)

    def renew(self) -> None:
        """Tell other machines that this process is alive; a lost message does no harm."""
        with self.lock:
            for trial in self.held.values():
                with suppress(OptunaError):  # another process has finished it, or the database is busy
                    trial.set_user_attr(_OWNER, {**self.me, "seen": time.time()})


@contextmanager
def _claims(search: Search | Finals, study: optuna.Study) -> Iterator[_Claims]:
    """Claims, with a thread that renews them."""
    claims, over = _Claims(search, study), threading.Event()

    def renew_until_over() -> None:
        while not over.wait(_HEARTBEAT):
            claims.renew()

    thread = threading.Thread(target=renew_until_over, daemon=True, name="lodo-heartbeat")
    thread.start()
    try:
        yield claims
    finally:
        over.set()
        thread.join()


def _abandoned(trial: FrozenTrial) -> bool:
    """Whether the owner of a running trial is gone: dead on this machine, or silent on another."""
    owner: dict[str, Any] | None = trial.user_attrs.get(_OWNER)
    if owner is None:  # its owner died, or has not written its name yet
        started = trial.datetime_start
        return started is None or time.time() - started.timestamp() > _HEARTBEAT
    if owner["host"] != socket.gethostname():
        return time.time() - float(owner["seen"]) > _SILENCE
    try:
        return bool(psutil.Process(owner["pid"]).create_time() != owner["born"])
    except psutil.Error:
        return True
