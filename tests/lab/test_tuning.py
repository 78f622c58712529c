"""Tuning: the paper's algorithm by number, studies that are killed and shared, and the command."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
import zlib

import matplotlib.image
import numpy as np
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.exceptions import OptunaError
from optuna.trial import TrialState, create_trial
from rich.console import Console
from typer.testing import CliRunner

from lodo.lab.cli import app
from lodo.lab.experiments.base import tail
from lodo.lab.optimizers import OPTIMIZERS, Choice, paper_hyperparameters
from lodo.lab.run import load_curve
from lodo.lab.tasks import TASKS
from lodo.lab.tuning import SAMPLERS
from lodo.lab.tuning.evolution import EvolutionSampler
from lodo.lab.tuning.finals import Finalist, Finals, finalists, reference
from lodo.lab.tuning.outcome import Outcome, run_search
from lodo.lab.tuning.report import write_outcome
from lodo.lab.tuning.search import Search, plan_search
from lodo.lab.tuning.space import Schedule, Space, find_schedule, find_spaces, parse_spaces
from lodo.lab.tuning.study import _abandoned, _Claims, finished_trials, open_study, run_study, without_password

optuna.logging.set_verbosity(optuna.logging.ERROR)
LR, BETA = Space("lr", "rate", 2.0), Space("beta", "decay", 0.9)


def add(study, loss, **params):
    """A finished trial; one without a loss has diverged."""
    names = {"lr": LR, "beta": BETA}
    study.add_trial(
        create_trial(
            state=TrialState.COMPLETE if loss is not None else TrialState.PRUNED,
            value=loss,
            params={names[name].parameter: p for name, p in params.items()},
            distributions={names[name].parameter: names[name].distribution(bounded=False) for name in params},
        )
    )


class TestEvolution:
    def test_one_generation_by_hand(self):
        sampler = EvolutionSampler([LR, BETA], Schedule(4, (3.0, 0.5), (10, 10)), seed=0)
        study = optuna.create_study(sampler=sampler)
        assert sampler.mean(study, 0) == {"lr": math.log(2.0), "1 - beta": pytest.approx(math.log(0.1))}
        add(study, 3.0, lr=1.0, beta=0.5)
        add(study, 1.0, lr=10.0, beta=0.01)
        add(study, None, lr=1e6, beta=0.9)
        add(study, 2.0, lr=1000.0, beta=0.04)
        # the better half are lr = 10 and 1000, 1 - beta = 0.01 and 0.04: geometric means 100 and 0.02
        mean = sampler.mean(study, 1)
        assert mean == {"lr": pytest.approx(math.log(100)), "1 - beta": pytest.approx(math.log(0.02))}
        trial = study.ask()
        lr = trial.suggest_float("lr", 1e-30, 1e30, log=True)
        beta = trial.suggest_float("1 - beta", 1e-30, 1, log=True)
        # standard normal numbers of the generators with the keys (seed, number, checksum of the name)
        assert (zlib.crc32(b"lr"), zlib.crc32(b"1 - beta")) == (916072004, 937318277)
        z = -0.3635898193938348, 0.2704231014675401
        assert lr == pytest.approx(100 * math.exp(0.5 * z[0]), rel=1e-9)
        assert beta == pytest.approx(0.02 * math.exp(0.5 * z[1]), rel=1e-9)

    def test_fewer_than_half_may_remain(self):
        sampler = EvolutionSampler([LR], Schedule(4, (1.0, 1.0, 1.0), (10, 10, 10)), seed=0)
        study = optuna.create_study(sampler=sampler)
        for loss, lr in ((None, 1.0), (None, 2.0), (5.0, 8.0), (None, 4.0)):
            add(study, loss, lr=lr)
        assert sampler.mean(study, 1) == {"lr": math.log(8.0)}
        for _ in range(4):
            add(study, None, lr=1e9)
        assert sampler.mean(study, 2) == {"lr": math.log(8.0)}, "with nobody left the mean stays"

    def test_waits_for_its_parents(self):
        sampler = EvolutionSampler([LR], Schedule(2, (1.0, 1.0), (10, 10)), seed=0)
        study = optuna.create_study(sampler=sampler)
        trials = [study.ask() for _ in range(3)]
        study.tell(trials[0], 1.0)
        with pytest.raises(RuntimeError, match="generation 0 must have finished"):
            trials[2].suggest_float("lr", 1e-30, 1e30, log=True)
        with pytest.raises(ValueError, match="among lr, got 'rate'"):
            trials[1].suggest_float("rate", 0.1, 1)

    def test_trials_depend_on_their_numbers_not_on_the_order(self):
        def values(order):
            sampler = EvolutionSampler([LR, BETA], Schedule(4, (1.0, 0.5), (10, 10)), seed=3)
            study = optuna.create_study(sampler=sampler)
            found = {}
            for generation in (0, 4):
                trials = [study.ask() for _ in range(4)]
                for i in order:
                    p = trials[i].suggest_float("1 - beta", 1e-30, 1, log=True)
                    found[generation + i] = lr = trials[i].suggest_float("lr", 1e-30, 1e30, log=True)
                    study.tell(trials[i], abs(math.log(lr * p)))
            return found

        assert values([0, 1, 2, 3]) == values([3, 1, 0, 2])

    @pytest.mark.parametrize("seed", range(3))
    def test_recovers_the_optimum_of_a_known_surface(self, seed):
        """A valley in all three coordinates with noise, and a cliff beyond which runs diverge."""
        best = {"lr": 0.3, "meta_lr": 2e-3, "1 - beta": 0.4}
        search = plan_search("bowl", "lodo", seed=seed)
        study = optuna.create_study(sampler=search.optuna_sampler)
        rng = np.random.default_rng(seed)
        for _ in range(search.number):
            trial = study.ask()
            params = search.suggest(trial)
            away = [math.log(params[name] / p) for name, p in best.items()]
            loss = away[0] ** 2 + 0.5 * away[0] * away[1] + away[1] ** 2 + 0.5 * away[2] ** 2
            if params["lr"] > 3:
                study.tell(trial, state=TrialState.PRUNED)
            else:
                study.tell(trial, 9 + loss * math.exp(0.1 * rng.normal()))
        tuned = search.tuned(search.mean(study))
        for name, value in (("lr", 0.3), ("meta_lr", 2e-3), ("beta", 0.6)):
            off = math.log(tuned[name] / value) if name != "beta" else math.log((1 - tuned[name]) / (1 - value))
            assert abs(off) < 0.35, (name, tuned)

    def test_bounds_are_kept(self):
        bounded = [
            Space("lr", "rate", 1.0, 0.5, 2.0),
            Space("beta", "decay", 0.5, 0.4, 0.8),
            Space("k", "rate", 3, 2, 5),
        ]
        search = Search("bowl", Choice("lodo"), tuple(bounded), Schedule(16, (5.0,), (10,)))
        study = optuna.create_study(sampler=search.optuna_sampler)
        values = [search.make_run(i, search.suggest(study.ask())).options for i in range(16)]
        assert {min(v["lr"] for v in values), max(v["lr"] for v in values)} == {0.5, 2.0}
        assert all(0.4 - 1e-12 <= v["beta"] <= 0.8 + 1e-12 for v in values)
        assert {v["k"] for v in values} <= {2, 3, 4, 5}
        assert all(type(v["k"]) is int for v in values)


class TestSpaces:
    @given(st.floats(1e-9, 1e9), st.floats(0, 1, exclude_max=True))
    def test_start_is_where_the_coordinates_say(self, rate, decay):
        assert Space("x", "rate", rate).value(math.exp(Space("x", "rate", rate).place)) == pytest.approx(rate)
        if decay < 1 - 1e-12:
            x = Space("x", "decay", decay)
            assert x.value(math.exp(x.place)) == pytest.approx(decay, abs=1e-12)

    def test_a_decay_that_would_be_negative_is_zero(self):
        search = Search("bowl", Choice("adam"), (Space("beta1", "decay", 0.0),), Schedule(16, (1.0,), (10,)))
        study = optuna.create_study(sampler=search.optuna_sampler)
        values = [search.make_run(i, search.suggest(study.ask())).options["beta1"] for i in range(16)]
        assert min(values) == 0.0
        assert max(values) > 0.0

    @pytest.mark.parametrize("task", ["bowl", "rosenbrock", "mnist", "cifar10"])
    def test_schedules_of_the_paper(self, task):
        found = find_schedule("paper", task)
        assert len(found.noise) == 10
        assert found.population == (16 if task == "cifar10" else 32)
        assert found.rate_factor == (0.5 if task == "mnist" else 1.0)
        total = {"bowl": 25_000, "rosenbrock": 2_000, "mnist": 25_000, "cifar10": 1_400}
        assert sum(found.steps) == total[task]
        assert sum(found.noise) == pytest.approx(17.55 if task == "rosenbrock" else 19.8)

    def test_every_task_has_schedules(self):
        for task in TASKS:
            assert find_schedule("quick", task).trials < find_schedule("paper", task).trials

    def test_every_optimizer_of_the_paper_has_its_space(self):
        for task in ("bowl", "rosenbrock", "mnist", "cifar10"):
            for optimizer in OPTIMIZERS:
                paper = paper_hyperparameters(task, optimizer).keys() - {"preconditioner"}
                if paper:
                    assert {space.name for space in find_spaces(optimizer)} == paper, optimizer

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("lr=0.1", "rate\\(lr=0.001"),
            ("speed(lr=1)", "space must be one of 'rate', 'decay'|space must be one of rate, decay"),
            ("rate(lr=0)", "start of lr must be"),
            ("rate(lr=-1.0)", "start of lr must be"),
            ("decay(beta=1.0)", "start of beta must be"),
            ("rate(lr=(1.0, 2.0, 3.0))", "from low = 2.0 to high = 3.0, got 1.0"),
            ("rate(lr=(1.0, 1.0, 1.0))", "less than high"),
            ("rate(lr='fast')", "start of lr must be"),
            ("rate(lr=1.0), decay(lr=0.5)", "lr must be given once"),
            ("rate()", "no hyperparameter"),
            ("rate(depth=(4, 1, 2.5))", "high of depth must be an int"),
        ],
    )
    def test_bad_spaces(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse_spaces(text)

    def test_fixed_options_are_not_tuned(self):
        assert [space.name for space in plan_search("bowl", "adam(beta1=0.5)").spaces] == ["lr", "beta2"]
        with pytest.raises(ValueError, match="leave open, got lr"):
            plan_search("bowl", "adam(lr=1)", space="rate(lr=0.1)")
        with pytest.raises(ValueError, match=r"space must be given for torch\.AdamW"):
            plan_search("bowl", "torch.AdamW")
        with pytest.raises(ValueError, match="optimizer must be one, got 'adam, yogi'"):
            plan_search("bowl", "adam, yogi")
        with pytest.raises(ValueError, match="trials must be left"):
            plan_search("bowl", "adam", trials=3)
        with pytest.raises(ValueError, match="sampler must be one of"):
            plan_search("bowl", "adam", sampler="grid")
        with pytest.raises(ValueError, match="schedule must be one of"):
            plan_search("bowl", "adam", schedule="long")

    def test_what_the_paper_sets_besides_stays(self):
        run = plan_search("rosenbrock", "lodo").make_run(0, {"lr": 1.0, "meta_lr": 0.1, "1 - beta": 0.5})
        assert run.options == {"preconditioner": "mixing(width=4.0)", "lr": 1.0, "meta_lr": 0.1, "beta": 0.5}

    def test_individuals_have_seeds_of_their_own(self):
        search = plan_search("bowl", "adam")
        params = {"lr": 1.0, "1 - beta1": 0.5, "1 - beta2": 0.1}
        seeds = {search.make_run(number, params).seed for number in range(search.number)}
        assert len(seeds) == search.number
        assert min(seeds) > 100, "experiments take the first seeds"
        assert [search.make_run(number, params).evaluations for number in (0, 31, 128, 319)] == [1000, 1000, 1500, 8000]


SMALL = Schedule(4, (1.0, 0.5), (300, 600))


def small(seed=0):
    return Search("bowl", Choice("adam"), (Space("lr", "rate", 0.5),), SMALL, seed=seed)


class TestStudies:
    def test_losses_are_the_runs_and_finished_trials_stay(self, tmp_path):
        storage, search = f"sqlite:///{tmp_path / 'deep' / 'tuning.db'}", small()
        seen = []
        study = run_study(
            search, storage, tmp_path, workers=0, on_progress=lambda study: seen.append(len(study.trials))
        )
        trials = finished_trials(search, study)
        assert [trial.number for trial in trials] == list(range(8))
        for trial in trials:
            curve = load_curve(search.make_run(trial.number, trial.params), tmp_path / "runs")
            assert trial.value == tail(curve)
            assert len(curve["loss"]) == SMALL.steps[trial.number // 4]
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
        again = run_study(small(), storage, tmp_path, workers=0)
        assert [trial.value for trial in again.trials] == [trial.value for trial in trials]
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()} == before
        assert search.mean(study) == small().mean(again)
        assert seen[-1] == 8

    def test_runs_that_diverge_drop_out(self, tmp_path):
        search = Search("bowl", Choice("momentum"), (Space("lr", "rate", 3.0),), Schedule(4, (2.0, 0.1), (500, 500)))
        study = run_study(search, f"sqlite:///{tmp_path / 'tuning.db'}", tmp_path, workers=0)
        states = [trial.state for trial in study.trials]
        assert TrialState.PRUNED in states[:4]
        assert TrialState.COMPLETE in states[:4]
        assert all(trial.value is None for trial in study.trials if trial.state == TrialState.PRUNED)

    def test_an_error_of_a_run_ends_the_search_before_it_begins(self, tmp_path):
        search = Search("bowl", Choice("adam", {"speed": 3}), (LR,), SMALL)
        with pytest.raises(ValueError, match="speed"):
            run_study(search, f"sqlite:///{tmp_path / 'tuning.db'}", tmp_path, workers=0)
        assert not (tmp_path / "runs").exists()

    @pytest.mark.parametrize("storage", ["tuning.db", "nosuch://here", "sqlite:////proc/nowhere/tuning.db"])
    def test_bad_storage(self, storage, tmp_path):
        with pytest.raises((ValueError, OSError), match=r"storage must be|nowhere"):
            open_study(small(), storage)

    def test_trials_of_the_dead_are_taken_over_and_of_the_living_are_not(self, tmp_path, monkeypatch):
        search, storage = small(), f"sqlite:///{tmp_path / 'tuning.db'}"
        study = open_study(search, storage)
        other = _Claims(search, study)
        mine = other.next()
        search.suggest(mine)
        frozen = study.get_trials()[0]
        assert not _abandoned(frozen), "its owner is this very process"
        claims = _Claims(search, study)
        assert claims.next().number == 1
        owner = frozen.user_attrs["owner"]
        for change, gone in (
            ({"born": owner["born"] - 1}, True),  # another process has its number now
            ({"pid": 2**22 + 1}, True),
            ({"host": "elsewhere"}, False),
            ({"host": "elsewhere", "seen": time.time() - 1000}, True),
        ):
            study._storage.set_trial_user_attr(frozen._trial_id, "owner", {**owner, **change})
            assert _abandoned(study.get_trials()[0]) == gone, change
        taken = claims.next()
        assert taken.number == 0
        assert search.suggest(taken) == search.suggest(mine), "the same parameters, whoever asks"
        study.tell(1, 1.0)  # by another process
        claims.renew()
        assert time.time() - study.get_trials()[0].user_attrs["owner"]["seen"] < 60

    def test_two_that_ask_for_the_last_trial_at_once(self, tmp_path):
        search = Search("bowl", Choice("adam"), (LR,), Schedule(2, (1.0,), (10,)))
        study = open_study(search, f"sqlite:///{tmp_path / 'tuning.db'}")
        claims = _Claims(search, study)
        assert claims.next().number == 0
        every, asked = study.get_trials(deepcopy=False), study.ask()
        assert asked.number == 1
        study.get_trials = lambda deepcopy=False: every  # what was seen before the other one asked
        assert claims.next() is None
        del study.get_trials
        assert study.get_trials()[2].state == TrialState.FAIL
        assert len(study.get_trials()[: search.number]) == 2

    def test_asked_too_early_it_waits(self, tmp_path):
        search = Search("bowl", Choice("adam"), (LR,), Schedule(2, (1.0, 1.0), (10, 10)))
        study = open_study(search, f"sqlite:///{tmp_path / 'tuning.db'}")
        claims = _Claims(search, study)
        first, second = claims.next(), study.ask()
        assert claims.next() is None, "the next generation cannot begin"
        every = study.get_trials(deepcopy=False)[:1]
        study.get_trials = lambda deepcopy=False: every
        assert claims.next() is None
        del study.get_trials
        for trial in (first, second):
            search.suggest(trial)
            study.tell(trial, 1.0)
        assert claims.next().number == 2


class TestFinals:
    def test_finalists_are_the_mean_and_the_best_of_the_last_generation(self):
        search = Search("bowl", Choice("momentum"), (LR, BETA), Schedule(8, (1.0, 1.0), (10, 20)))
        study = optuna.create_study(sampler=search.optuna_sampler)
        for number in range(8):
            add(study, 0.001 * number, lr=100.0, beta=0.5)  # better, but of shorter runs
        for loss, lr in (
            (5.0, 1.0),
            (3.0, 2.0),
            (None, 50.0),
            (4.0, 4.0),
            (1.0, 8.0),
            (6.0, 1.0),
            (7.0, 1.0),
            (8.0, 1.0),
        ):
            add(study, loss, lr=lr, beta=0.25)
        found = finalists(search, study)
        assert [each.origin for each in found] == ["mean of the better half", "trial 12", "trial 9", "trial 11"]
        assert found[0].params == {"lr": pytest.approx((8 * 2 * 4 * 1) ** 0.25), "1 - beta": pytest.approx(0.25)}
        assert [each.params["lr"] for each in found[1:]] == [8.0, 2.0, 4.0]

    def test_a_mean_stays_within_bounds_and_whole(self):
        depth = Space("depth", "rate", 3, 2, 8)
        search = Search("bowl", Choice("lodo"), (depth,), Schedule(2, (1.0,), (10,)))
        study = tuned_by(search, lambda params: float(params["depth"]))
        assert type(search.mean(study)["depth"]) is int

    @pytest.mark.parametrize("workers", [0, 1])
    def test_finalists_may_be_equal(self, workers, tmp_path):
        """As happens with whole numbers: one run is the trial of both."""
        finals = Finals(small(), tuple(Finalist(origin, {"lr": 0.5}) for origin in ("trial 1", "trial 2")), 2)
        study = run_study(finals, f"sqlite:///{tmp_path / 'tuning.db'}", tmp_path, workers=workers)
        first, second = finals.losses(study)
        assert first == second
        assert len(set(first)) == len(list((tmp_path / "runs").glob("*.parquet"))) == 2

    @pytest.mark.slow
    def test_every_finalist_runs_on_the_same_fresh_seeds(self, tmp_path):
        search, storage = small(), f"sqlite:///{tmp_path / 'tuning.db'}"
        seen = []
        outcome = run_search(
            search, storage, tmp_path, confirm=2, on_progress=lambda *told: seen.append(told), workers=0
        )
        finals, folder = outcome.finals, tmp_path / "runs"
        assert isinstance(finals, Finals)
        trials = outcome.last.trials
        assert len(trials) == finals.number == 10, "four candidates and the paper's values"
        runs = [finals.make_run(trial.number, trial.params) for trial in trials]
        assert [run.seed for run in runs] == [1008] * 5 + [1009] * 5, "those of the search are 1000 to 1007"
        assert {run.evaluations for run in runs} == {SMALL.steps[-1]}
        assert [trial.value for trial in trials] == [tail(load_curve(run, folder)) for run in runs]
        means = {row[0].origin: sum(row[1]) / 2 for row in outcome.rows}
        assert outcome.rows[0][0].origin == min(means, key=means.__getitem__)
        by_hand = [trial.value for trial in trials if trial.params == outcome.params]
        assert outcome.rows[0][1] == by_hand
        assert seen[-1] == (18, 18, "finals: 5 candidates on 2 seeds")
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        more = run_search(small(), storage, tmp_path, confirm=3, workers=0)
        assert more.finals.number == 15, "more seeds add to what is there"
        assert {path: path.stat().st_mtime_ns for path in before} == before
        assert run_search(small(), storage, tmp_path, confirm=0, workers=0).params == search.mean(outcome.study)
        with pytest.raises(ValueError, match="confirm must be"):
            run_search(small(), storage, tmp_path, confirm=-1, workers=0)

    def test_one_that_diverges_loses(self, tmp_path):
        search = Search("bowl", Choice("momentum"), (Space("lr", "rate", 1.0),), Schedule(4, (0.5,), (300,)))
        study = tuned_by(search, lambda params: params["lr"])
        candidates = finalists(search, study)
        finals = Finals(search, candidates, 2)
        last = optuna.create_study(sampler=finals.optuna_sampler)
        for number in range(finals.number):
            trial = last.ask()
            params = finals.suggest(trial)
            assert params == candidates[number % 4].params
            if number == 0:
                last.tell(trial, state=TrialState.PRUNED)
            else:
                last.tell(trial, 10.0 - number)
        outcome = Outcome(search, study, finals, last)
        assert outcome.rows[0][0] == candidates[3]
        assert outcome.rows[-1] == (candidates[0], [math.inf, 6.0])

    @pytest.mark.parametrize(
        ("theirs", "said"), [(15.3, "WORSE than the paper's values: a loss of 110 against 15.3"), (120.0, "")]
    )
    def test_values_worse_than_the_papers_are_called_so(self, theirs, said, tmp_path):
        search = plan_search("bowl", "lodo", schedule="quick")
        study = tuned_by(search, lambda params: 110 + abs(math.log(params["lr"])))
        known = reference(search)
        assert search.tuned(known.params) == pytest.approx({"lr": 0.27, "meta_lr": 0.00096, "beta": 0.195})
        finals = Finals(search, (*finalists(search, study), known), seeds=2)
        last = tuned_by(finals, lambda params: theirs if params == known.params else 110.0)
        outcome = Outcome(search, study, finals, last)
        assert known not in [finalist for finalist, _ in outcome.rows]
        assert outcome.reference == (known, [theirs, theirs])
        assert said in outcome.worse
        assert bool(outcome.worse) == bool(said)
        printed = Console(record=True, quiet=False, width=200, file=io.StringIO())
        write_outcome(outcome, "sqlite://", tmp_path, printed)
        assert ("WORSE" in printed.export_text()) == bool(said)
        assert json.loads((tmp_path / "summary.json").read_text())["worse_than_reference"] == bool(said)
        assert "the paper's values" in (tmp_path / "table.md").read_text()

    def test_without_values_of_the_paper_the_start_is_to_beat(self):
        search = Search("bowl", Choice("torch.AdamW"), (LR,), Schedule(2, (1.0,), (10,)))
        assert (reference(search).origin, reference(search).params) == ("the values at the start", {"lr": 2.0})

    def test_nothing_but_divergence(self, tmp_path):
        search = Search("bowl", Choice("adam"), (LR,), Schedule(2, (1.0,), (10,)), sampler="random", trials=2)
        study = optuna.create_study(sampler=search.optuna_sampler)
        for _ in range(2):
            add(study, None, lr=1.0)
        with pytest.raises(ValueError, match="smaller rates"):
            _ = Outcome(search, study).params


def tuned_by(search, loss):
    """A study of a search, with losses by a formula."""
    study = optuna.create_study(sampler=search.optuna_sampler)
    for _ in range(search.number):
        trial = study.ask()
        study.tell(trial, loss(search.suggest(trial)))
    return study


def lodo(*args):
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "lodo", "tune", "bowl", "--optimizer", "adam", *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def summary(out):
    (path,) = (out / "tune").glob("*/summary.json")
    return json.loads(path.read_text())


SLOW_SAMPLERS = [pytest.param(x, marks=pytest.mark.slow) for x in (*SAMPLERS, "paper") if x != "tpe"]


class TestCommand:
    @pytest.mark.slow
    def test_killed_and_shared_it_ends_as_undisturbed(self, tmp_path):
        """kill -9 in the middle, then two processes on the same storage: every trial once, the same values."""
        task = ("--schedule", "quick", "--task", "n=20", "--workers", "0", "--confirm", "1")
        alone, shared = tmp_path / "alone", tmp_path / "shared"
        process = lodo(*task, "--out", shared)
        runs, deadline = shared / "runs", time.monotonic() + 120
        while len(list(runs.glob("*.parquet"))) < 15:  # in the second generation
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        before = {path: path.stat().st_mtime_ns for path in runs.glob("*.parquet")}
        pair = [lodo(*task, "--out", shared) for _ in range(2)]
        reference = CliRunner().invoke(app, ["tune", "bowl", "--optimizer", "adam", *task, "--out", str(alone)])
        assert reference.exit_code == 0, reference.output
        for each in pair:
            out, _ = each.communicate(timeout=180)
            assert each.returncode == 0, out
        assert summary(shared)["tuned"] == summary(alone)["tuned"]
        assert summary(shared)["generations"] == summary(alone)["generations"]
        assert {path: path.stat().st_mtime_ns for path in before} == before, "no finished run is done again"
        name = summary(alone)["study"]
        studies = [
            optuna.load_study(study_name=name, storage=f"sqlite:///{out / 'tuning.db'}") for out in (shared, alone)
        ]
        ours, theirs = [
            [(trial.number, trial.state, trial.value, trial.params) for trial in study.trials[:48]] for study in studies
        ]
        assert ours == theirs
        assert len(list(runs.glob("*.parquet"))) == 48 + 4 + 1
        assert summary(shared)["finalists"] == summary(alone)["finalists"]
        owners = {trial.user_attrs["owner"]["pid"] for trial in studies[0].trials[:48]}
        assert len(owners) >= 2

    @pytest.mark.parametrize("sampler", ["tpe", *SLOW_SAMPLERS])
    def test_every_sampler(self, sampler, tmp_path):
        trials = [] if sampler == "paper" else ["--trials", "6"]
        args = ["tune", "rosenbrock", "--optimizer", "momentum", "--schedule", "quick", "--sampler", sampler, *trials]
        args += ["--confirm", "2"]
        result = CliRunner().invoke(app, [*args, "--workers", "0", "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        found = summary(tmp_path)
        assert found["trials"] == (64 if sampler == "paper" else 6)
        assert found["paper"] == {"lr": 0.0987, "beta": 0.9359}
        assert found["confirm"] == 2
        (folder,) = (tmp_path / "tune").iterdir()
        assert {path.name for path in folder.iterdir()} == {
            "figures.json",
            "generations.pdf",
            "generations.png",
            "summary.json",
            "table.md",
            "tuned.toml",
        }
        assert matplotlib.image.imread(folder / "generations.png").std() > 0.05
        tuned = tomllib.loads((folder / "tuned.toml").read_text())["rosenbrock"]["momentum"]
        assert tuned == found["tuned"]
        if sampler != "paper":
            return
        run = ["run", "rosenbrock", "--steps", "50", "--seeds", "1", "--optimizers", "momentum", "--workers", "0"]
        used = CliRunner().invoke(app, [*run, "--out", str(tmp_path), "--hyperparameters", str(folder / "tuned.toml")])
        assert used.exit_code == 0, used.output
        rows = json.loads((tmp_path / "rosenbrock" / "summary.json").read_text())["settings"]["choices"]
        assert rows[0]["settings"] == tuned

    @pytest.mark.slow
    def test_any_option_of_any_optimizer(self, tmp_path):
        args = ["tune", "rosenbrock", "--optimizer", "torch.NAdam(eps=1e-6)", "--schedule", "quick"]
        args += ["--sampler", "random", "--trials", "6", "--confirm", "1"]
        space = ["--space", "rate(lr=(0.1, 0.001, 10.0), momentum_decay=0.004)", "--workers", "2"]
        result = CliRunner().invoke(app, [*args, *space, "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        (path,) = (tmp_path / "tune").glob("*/tuned.toml")
        tuned = tomllib.loads(path.read_text())["rosenbrock"]["torch.NAdam"]
        assert tuned.keys() == {"eps", "lr", "momentum_decay"}
        assert 0.001 <= tuned["lr"] <= 10

    @pytest.mark.slow
    def test_images_too(self, tmp_path):
        optimizer = "lodo(preconditioner='mixing(block_size=2)')"
        args = ["tune", "mlp", "--optimizer", optimizer, "--schedule", "quick", "--data", "digits", "--workers", "0"]
        args += ["--sampler", "random", "--trials", "2"]
        space = ["--space", "rate(lr=(0.3, 0.1, 1.0), preconditioner__depth=(4, 2, 6))", "--task", "hidden=(8,)"]
        result = CliRunner().invoke(app, [*args, *space, "--out", str(tmp_path)])
        assert result.exit_code == 0, result.output
        depth = summary(tmp_path)["tuned"]["preconditioner__depth"]
        assert type(depth) is int
        (file,) = tmp_path.glob("tune/*/tuned.toml")
        tuned = tomllib.loads(file.read_text())["mlp"]["lodo"]
        assert tuned["preconditioner"] == f"mixing(block_size=2, depth={depth})"
        assert "preconditioner__depth" not in tuned

    def test_an_option_of_a_configured_object_needs_the_object(self):
        search = plan_search("bowl", "lodo", space="rate(preconditioner__depth=4)")
        with pytest.raises(ValueError, match=r"space must have preconditioner__depth only if .* got None"):
            search.make_run(0, {"preconditioner__depth": 4})

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["bowl", "--optimizer", "nosuch"], "optimizers must be among"),
            (["bowl", "--optimizer", "torch.AdamW"], "space must be given for torch.AdamW"),
            (["bowl", "--optimizer", "adam", "--space", "rate(speed=1.0)"], "speed"),
            (["bowl", "--optimizer", "adam", "--storage", "here.db"], "storage must be a database"),
            (["bowl", "--optimizer", "adam", "--task", "n=0"], "n must be"),
        ],
    )
    def test_errors_in_words(self, args, message, tmp_path):
        result = CliRunner().invoke(app, ["tune", *args, "--workers", "0", "--out", str(tmp_path)])
        assert result.exit_code == 1
        assert message in " ".join(result.output.split())
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nosuch"], "TASK must be one of 'bowl'"),
        (["bowl", "--sampler", "grid"], "sampler must be one of 'paper', 'tpe'"),
        (["bowl", "--schedule", "qick"], "schedule must be one of 'paper', 'quick', got 'qick'"),
    ],
)
def test_names_are_checked_first(args, message, tmp_path):
    result = CliRunner().invoke(app, ["tune", *args, "--optimizer", "adam", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_passwords_are_not_written():
    assert without_password("postgresql://ada:secret@host:5432/x") == "postgresql://ada:***@host:5432/x"
    with pytest.raises(ValueError, match="storage must be") as error:
        open_study(small(), "postgresql://ada:secret@localhost:1/x")
    assert "secret" not in str(error.value)
    assert without_password("sqlite:///a:b.db") == "sqlite:///a:b.db"


@pytest.mark.parametrize(
    "storage",
    [
        "postgresql://host/x?user=ada&password=s3cret",
        "postgresql://ada:s3cret@host/x?sslpassword=s3cret",
        "mysql+pymysql://host/x?passwd=s3cret&passwd=s3cret",
        "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3Ds3cret",
        "postgresql//ada:s3cret@host/x?password=s3cret",
        "ada:s3cret@host",
        "postgresql://ada:s3cret@host:port/x?password=s3cret",
        "nosuch://host/x?password=s3cret",
        "postgresql://localhost:1/x?connect_timeout=s3cret",  # the driver's error repeats the value
    ],
)
def test_passwords_in_options_are_not_written(storage):
    assert "s3cret" not in without_password(storage)
    with pytest.raises(ValueError, match="storage must be") as error:
        open_study(small(), storage)
    assert "s3cret" not in str(error.value)


def test_a_failing_storage_does_not_show_its_password(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OptunaError("connection to ?password=s3c%2Fret with 's3c/ret' failed")

    monkeypatch.setattr("lodo.lab.tuning.outcome.run_study", fail)
    with pytest.raises(OSError, match="storage failed") as error:
        run_search(small(), "postgresql://host/x?password=s3c%2Fret", tmp_path, confirm=0)
    assert "ret" not in str(error.value)
