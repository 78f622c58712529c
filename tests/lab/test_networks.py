"""The networks: how settings are chosen, what is measured, and the three tracks at a toy size."""

from __future__ import annotations

import importlib
import json
import math
import shlex
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from lodo.lab import experiments, plugins
from lodo.lab.cli import app
from lodo.lab.experiments.base import Cell
from lodo.lab.experiments.beyond.networks.base import (
    TUNING_SEED,
    Entrant,
    entrants,
    reported,
    tried,
    tuning_cell,
    workloads,
)
from lodo.lab.experiments.beyond.networks.entries import own_entries, read_entries
from lodo.lab.experiments.beyond.networks.metrics import (
    best_validation,
    final_loss,
    mean_ratio,
    paired_difference,
    ranks,
    seconds_to,
    steps_to,
    trailing_means,
)
from lodo.lab.experiments.beyond.networks.rows import OverallRow, read_row
from lodo.lab.experiments.beyond.networks.standings import (
    SECONDS,
    STEPS,
    TRAINING,
    VALIDATION,
    against_metric,
    overall_metric,
    rows,
)
from lodo.lab.experiments.beyond.networks.tracks import about_processors
from lodo.lab.experiments.beyond.networks.trials import (
    MORE,
    Trial,
    best,
    edge,
    grid,
    next_power,
    powers,
    rate,
    width_in_decades,
)
from lodo.lab.optimizers import Choice
from lodo.lab.page.commands import run_command
from lodo.lab.page.results import read_results
from lodo.lab.run import Curve, Run, read_metadata
from lodo.lab.tasks import find_task

EVERYBODY = ("AdamW", "A", "B")
STEPS_OF_A_TOY = 12
TOY = ("--tasks", "mlp", "--task", "hidden=(4,), batch=8", "--steps", STEPS_OF_A_TOY, "--data", "digits")


def invoke(*args, code=0):
    result = CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "80"})
    assert result.exit_code == code, result.output
    return result.output


def curve(losses, *, seed=1, diverged=False, validation=None, optimizer="adam", state_bytes=8.0):
    steps = np.arange(1, len(losses) + 1)
    columns = {
        "step": steps,
        "evaluations": steps,
        "seconds": 5.0 + 0.01 * steps,
        "loss": np.asarray(losses, float),
        "repeat_loss": np.full(len(losses), np.nan),
    }
    if validation is not None:
        columns["validation_loss"] = np.asarray(validation, float)
    return Curve(Run("bowl", optimizer, seed, len(losses)), diverged, columns, state_bytes=state_bytes)


# ---------------------------------------------------------------- trials


def test_the_grid_has_five_rates_and_two_schedules():
    trials = grid(5)
    assert len(trials) == len(set(trials)) == 10
    rates = [rate(1e-3, power) for power in powers(5)]
    assert rates == [0.0001, 0.000316, 0.001, 0.00316, 0.01]


def test_the_grid_is_extended_at_an_edge_and_no_further_than_allowed():
    losses = {trial: float(-trial.power) for trial in grid(5)}  # the higher the better
    added = []
    while (power := next_power(losses, 5)) is not None:
        added.append(power)
        losses |= {Trial(power, schedule): float(-power) for schedule in ("constant", "warmup_cosine")}
    assert added == [3, 4, 5]
    assert len(added) == MORE
    assert edge(losses) == 1


def test_the_grid_is_not_extended_when_the_best_is_between_others():
    losses = {trial: abs(trial.power - 1.0) for trial in grid(5)}
    assert best(losses).power == 1
    assert next_power(losses, 5) is None
    losses |= {trial: abs(trial.power + 3.0) for trial in grid(5)}
    assert next_power(losses, 5) == -3
    losses |= {Trial(-3, "constant"): 0.5, Trial(-3, "warmup_cosine"): 2.0}
    assert next_power(losses, 5) == -4
    losses |= {Trial(-4, "constant"): 0.6, Trial(-4, "warmup_cosine"): 2.0}
    assert next_power(losses, 5) is None
    assert best(losses) == Trial(-3, "constant")


def test_if_everything_diverges_lower_rates_are_tried():
    assert next_power(dict.fromkeys(grid(3), math.inf), 3) == -2


def test_trials_belong_together_only_if_the_grid_is_whole():
    entrant = Entrant("A", Choice("adam", settings={"lr": 0.1}))
    results = {tuning_cell(entrant, "mlp", trial): [curve([abs(trial.power - 1.0) + 1] * 20)] for trial in grid(3)}
    losses = tried(results, "mlp", entrant, 3)
    assert losses.keys() == set(grid(3))  # the best is at the edge, but no further rate has been tried
    assert next_power(losses, 3) == 2
    for trial in (Trial(2, "constant"), Trial(2, "warmup_cosine")):
        results[tuning_cell(entrant, "mlp", trial)] = [curve([9.0] * 20)]
    assert len(tried(results, "mlp", entrant, 3)) == 8
    assert next_power(tried(results, "mlp", entrant, 3), 3) is None
    del results[tuning_cell(entrant, "mlp", Trial(0, "warmup_cosine"))]
    assert tried(results, "mlp", entrant, 3) == {}


def test_the_range_of_good_rates():
    flat = dict.fromkeys(range(-4, 5), 1.0)
    assert width_in_decades(flat) == 4.0
    assert width_in_decades({**flat, 4: math.inf, 3: math.inf}) == 3.0
    assert width_in_decades({**flat, 2: 1.06}) == pytest.approx((6 - 1 + 5 / 6) / 2)  # what lies beyond does not count
    assert width_in_decades(dict.fromkeys(range(3), math.inf)) == 0.0
    with pytest.raises(ValueError, match="losses must have every power"):
        width_in_decades({0: 1.0, 2: 1.0})


# ---------------------------------------------------------------- metrics


def test_what_diverged_is_infinite():
    assert final_loss(curve(np.arange(1, 101))) == np.arange(91, 101).mean()
    assert final_loss(curve([1.0], diverged=True)) == math.inf
    assert best_validation(curve([1.0], diverged=True)) == math.inf
    assert best_validation(curve([1.0, 1.0])) is None
    assert best_validation(curve([1.0] * 4, validation=[math.nan, 3.0, 2.0, 2.5])) == 2.0


def test_the_way_to_a_loss():
    falling = curve(np.arange(100, 0, -1))
    assert steps_to(falling, final_loss(falling)) == 100  # the trailing mean ends with the final loss
    assert steps_to(falling, 50.5) == 55  # steps 46 to 55 have the losses 55 to 46
    assert seconds_to(falling, 50.5) == pytest.approx(0.54)  # without the first step
    assert steps_to(falling, 5.4) is None
    assert steps_to(curve(np.arange(100, 0, -1), diverged=True), 50.5) is None
    assert steps_to(falling, math.inf) is None


def test_ranks_ratios_and_paired_differences():
    assert ranks({"a": 1.0, "b": 1.0, "c": math.inf}) == {"a": 1.5, "b": 1.5, "c": 3.0}
    assert mean_ratio([0.5, 0.5, 4.0]) == pytest.approx(1.0)
    assert paired_difference({1: 1.0}, {2: 1.0}) is None
    assert paired_difference({1: math.inf, 2: 1.0}, {1: 1.0, 2: 1.0}) is None


@pytest.fixture
def reports():
    """Two tasks; B has half of AdamW's loss on the first, and diverges once on the second."""

    def curves(level, diverged=()):
        return [
            curve(
                np.full(20, level * seed),
                seed=seed,
                diverged=seed in diverged,
                validation=np.full(20, 2 * level * seed),
                state_bytes=8 * level,
            )
            for seed in (1, 2)
        ]

    return {
        "one": {"AdamW": curves(1.0), "A": curves(2.0), "B": curves(0.5)},
        "two": {"AdamW": curves(1.0), "A": curves(0.5), "B": curves(0.5, diverged=(2,))},
    }


def test_tables_say_who_is_how_much_lower(reports):
    found = {(row.metric, row.optimizer, getattr(row, "task", "")): row for row in rows(reports, "AdamW", EVERYBODY)}
    one = found[TRAINING, "B", "one"]
    assert (one.mean, one.difference, one.ratio, one.rank) == (0.75, -0.75, 0.5, 1.0)
    assert one.error == pytest.approx(0.25)
    assert one.difference_error == pytest.approx(0.25)
    overall = found[overall_metric(TRAINING), "A", ""]
    assert (overall.mean, overall.worst, overall.worst_task, overall.rank) == (pytest.approx(1.0), 2.0, "one", 2.0)
    assert found[overall_metric(VALIDATION), "A", ""].mean == pytest.approx(1.0)
    assert found["time and memory of a step", "A", ""].bytes_a_weight == 10


def test_diverged_is_shown_and_counts_as_the_worst(reports):
    found = {(row.metric, row.optimizer, getattr(row, "task", "")): row for row in rows(reports, "AdamW", EVERYBODY)}
    two = found[TRAINING, "B", "two"]
    assert (two.mean, two.diverged, two.ratio, two.rank) == (None, 1, None, 3.0)
    assert two.cells[1] == "1 of 2 diverged"
    overall = found[overall_metric(TRAINING), "B", ""]
    assert (overall.mean, overall.worst_task) == (None, "two")
    assert overall.cells[1:4] == ("diverged", "diverged two", "1/2")
    assert json.dumps([vars(row) for row in found.values()], allow_nan=False)


def test_who_never_gets_there_is_counted(reports):
    found = {(row.metric, row.optimizer, getattr(row, "task", "")): row for row in rows(reports, "AdamW", EVERYBODY)}
    never = found[STEPS, "A", "one"]
    assert (never.mean, never.reached, never.cells[1]) == (None, 0, "in 0 of 2 runs")
    assert found[SECONDS, "A", "two"].ratio == pytest.approx(1.0)
    overall = found[overall_metric(STEPS), "A", ""]
    assert (overall.tasks, overall.of) == (1, 2)


def test_the_error_of_a_geometric_mean_comes_from_those_of_its_tasks():
    """On one task the ratio of the seeds is 0.4 and 0.6, on the other 0.5 on both."""

    def curves(*levels):
        return [curve(np.full(20, level), seed=seed, validation=np.full(20, 1.0)) for seed, level in enumerate(levels)]

    found = {
        (row.metric, row.optimizer, getattr(row, "task", "")): row
        for row in rows(
            {
                "one": {"AdamW": curves(1.0, 1.0), "A": curves(0.4, 0.6)},
                "two": {"AdamW": curves(1.0, 2.0), "A": curves(0.5, 1.0)},
            },
            "AdamW",
            EVERYBODY,
        )
    }
    assert found[TRAINING, "A", "one"].ratio_error == pytest.approx(0.1)
    assert found[TRAINING, "A", "two"].ratio_error == pytest.approx(0.0)
    overall = found[overall_metric(TRAINING), "A", ""]
    assert overall.mean == pytest.approx(0.5)
    assert overall.error == pytest.approx(0.5 * (0.1 / 0.5) / 2)
    assert overall.cells[1] == "0.500 ± 0.050"
    assert found[overall_metric(TRAINING), "AdamW", ""].cells[1] == "1.000"


def test_ours_is_compared_with_each_of_the_others():
    def curves(level):
        return [curve(np.full(20, level * seed), seed=seed, validation=np.full(20, level)) for seed in (1, 2)]

    reports = {
        "one": {"AdamW": curves(1.0), "A": curves(4.0), "KronLODO": curves(2.0), "KronLODO untouched": curves(8.0)},
        "two": {"AdamW": curves(1.0), "KronLODO": curves(0.5)},
    }
    found = {
        (row.metric, row.optimizer): row
        for row in rows(reports, "AdamW", (*EVERYBODY, "KronLODO"))
        if isinstance(row, OverallRow)
    }
    ours = {name: found[against_metric(TRAINING, "KronLODO"), name] for name in ("AdamW", "A", "KronLODO untouched")}
    assert [(row.mean, row.tasks) for row in ours.values()] == [(pytest.approx(1.0), 2), (0.5, 1), (0.25, 1)]
    assert (ours["AdamW"].worst, ours["AdamW"].worst_task) == (2.0, "one")
    assert found[against_metric(VALIDATION, "KronLODO untouched"), "A"].mean == 2.0
    assert found[overall_metric(TRAINING), "KronLODO"].rank == 1.5, "what is untouched is not ranked"
    assert found[overall_metric(TRAINING), "KronLODO untouched"].rank is None


def test_losses_that_are_not_positive_have_no_ratio():
    def curves(level):
        return [curve(np.full(20, level), seed=seed, validation=np.full(20, level)) for seed in (1, 2)]

    for ours, theirs in ((-0.5, 1.0), (0.5, -1.0), (0.0, 1.0), (0.5, 0.0)):
        reports = {"one": {"AdamW": curves(theirs), "A": curves(ours)}}
        found = {(row.metric, row.optimizer): row for row in rows(reports, "AdamW", EVERYBODY)}
        row = found[TRAINING, "A"]
        assert (row.mean, row.difference, row.ratio) == (ours, ours - theirs, None)
        overall = found[overall_metric(TRAINING), "A"]
        assert (overall.mean, overall.tasks, overall.of, overall.diverged) == (None, 0, 1, 0)
    falling = curve(-np.arange(1.0, 101.0))
    assert steps_to(falling, final_loss(falling)) == 100, "a negative loss is reached as well"


def test_every_row_can_be_read_again(reports):
    for row in rows(reports, "AdamW", EVERYBODY):
        assert read_row(json.loads(json.dumps(vars(row)))) == row
    with pytest.raises(TypeError, match="no kind of row has the fields optimizer"):
        read_row({"optimizer": "A"})


def test_times_of_different_machines_are_not_compared_in_silence():
    one, other = (replace(curve([1.0]), environment={"processor": name}) for name in ("Fast", "Slow"))
    assert about_processors({"mlp": {"AdamW": [one], "SOAP": [one]}}) == []
    (note,) = about_processors({"mlp": {"AdamW": [one]}, "cnn": {"SOAP": [other, one]}})
    assert "Fast and Slow" in note
    assert "do not compare" in note


# ---------------------------------------------------------------- entries


def test_the_tasks_and_the_optimizers_are_those_of_the_benchmark():
    entries = own_entries()
    assert len(entries.usual_rivals) == 10
    assert len(entries.tasks.keys() - entries.extra) == 8
    request = experiments.load("networks").request()
    assert list(workloads(request)) == [name for name in entries.tasks if name != "gpt_long"]
    assert len(request.choices) == 10
    for load in entries.tasks.values():
        assert find_task(load.task)


def test_some_optimizers_are_run_only_if_they_are_named(tmp_path):
    experiment = experiments.load("networks-untouched")
    assert "KronLODO averaged" not in [choice.label for choice in experiment.request().choices]
    named = experiment.request(choices=experiment.parse("kron_lodo_averaged"))
    assert [choice.label for choice in named.choices] == ["KronLODO averaged"]
    path = tmp_path / "mine.toml"
    path.write_text("[rivals]\nkron_lodo_averaged = { lr = 0.01 }\nlion = { lr = 1e-4, extra = true }")
    experiment.add_rivals(path)
    labels = [choice.label for choice in experiment.request().choices]
    assert "KronLODO, averaged" in labels, "a line of one's own replaces it"
    assert "Lion" not in labels


def test_settings_of_a_long_task_are_chosen_by_shorter_trials():
    experiment = experiments.load("networks")

    def requested(task):
        found = experiment.request(tasks=task, choices=experiment.parse("soap"))
        return replace(found, options={**found.options, "digests": {task: "0123"}})

    request, short = requested("gpt_long"), requested("gpt")
    soap = entrants(request)[1]
    trial = experiment.make_trial(request, "gpt_long", soap, Trial(0, "constant"), TUNING_SEED)
    assert trial == experiment.make_trial(short, "gpt", soap, Trial(0, "constant"), TUNING_SEED)
    assert experiment.make_trial(request, "gpt_long", soap, Trial(0, "constant"), 1).evaluations == 20_000
    assert "the trials had 3,000" in " ".join(experiment.notes(request, {}))
    assert "the trials had" not in " ".join(experiment.notes(short, {}))
    every = experiment.request(tasks="gpt_long", evaluations=50)
    assert workloads(every)["gpt_long"].tuning_steps is None, "--steps is one length for all"
    rates = experiments.load("networks-rates")
    assert workloads(rates.request(tasks="gpt_long"))["gpt_long"].tuning_steps is None, "there trials are what is shown"


def test_a_rival_and_a_task_by_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    rival = '[rivals]\nradam = { optimizer = "RAdam", label = "RAdam", lr = 0.002 }\n'
    path.write_text(rival + '[tasks]\ntiny = { task = "mlp", steps = 20 }')
    experiment = experiments.load("networks")
    experiment.add_rivals(path)
    request = experiment.request(tasks="tiny", choices=experiment.parse("radam"))
    assert [choice.label for choice in request.choices] == ["AdamW", "RAdam"], "with the reference"
    assert entrants(request)[1].choice.optimizer == "torch.RAdam"
    assert workloads(request)["tiny"].steps == 20
    assert "radam" not in own_entries().rivals


def test_a_rival_with_a_capital_letter_is_part_of_the_small_size(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[rivals]\nMyAdam = { optimizer = "torch.RAdam", lr = 0.002 }\n')
    experiment = experiments.load("networks")
    experiment.add_rivals(path)
    assert "torch.RAdam" in [choice.optimizer for choice in experiment.request(quick=True).choices]


def test_the_sentence_says_if_the_reference_is_lowest():
    experiment = experiments.load("networks")

    def sentence(mean):
        means = {"AdamW": 1.0, "KronLODO": mean}
        return experiment.sentence([OverallRow(x, overall_metric(TRAINING), y, None, 1, 0) for x, y in means.items()])

    assert "in training AdamW itself is lowest; of the others, KronLODO is lowest with 16.300" in sentence(16.3)
    assert "in training KronLODO is lowest with 0.900" in sentence(0.9)


def test_a_spike_does_not_spoil_the_means_after_it():
    values = np.array([1e17, 2.0, 2.0, 2.0, 2.0])
    assert trailing_means(values, 2)[1:].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[rivals]\nlion = { label = 'Lion' }", "lr of lion must be a finite number"),
        ("[rivals]\nlion = { lr = 1.0, rate = 2.0 }", "a field of lion must be one of"),
        ("[rivals]\nleon = { lr = 1.0 }", "optimizers must be among"),
        ("[tasks]\nmlp = { }", "steps of mlp must be an integer >= 10"),
        ("[rivals]\nlion = { lr = 1.0, options = { lr = 2.0 } }", "options of lion must not have lr"),
        ("[rivals]\nlion = 'torch.RAdam'", r"lion must be a table, such as lion = { lr = 0.001 }, got 'torch.RAdam'"),
        ("[tasks]\nmlp = 20", r"mlp must be a table, such as mlp = { steps = 1000 }, got 20"),
        ("[rivals]\nlion = { lr = 1.0, extra = 'no' }", "extra of lion must be True or False, got 'no'"),
        ("[rivals]\nadamw = { lr = 1e-6 }", "a rival must have a name other than adamw and kron_lodo, got 'adamw'"),
        ("[rivals]\nlion = { lr = 1.0, label = 'AdamW' }", "label of lion must be .* got 'AdamW', .* that of adamw"),
        ("[rivals]\nlion = { lr = 1.0, label = 'AdamW tuned' }", "got 'AdamW tuned', which is that of tuned AdamW"),
        ("[rivals]\nlion = { lr = 1.0, label = 'KronLODO untouched' }", "that of KronLODO at its defaults"),
        ("[rivals]\nmine = { optimizer = 'kron_lodo', lr = 1.0 }", "label of mine must be .* got 'KronLODO'"),
        ("[rivals]\na = { optimizer = 'adam', lr = 1.0 }\nb = { optimizer = 'adam', lr = 2.0 }", "that of a"),
        ("[tasks]\npit = { steps = 20 }", "task must be one of"),
        ("[opponents]\n", "a section must be one of"),
        ("[quick]\nrivals = ['adamv']\n[rivals]\nlion = { lr = 1.0 }", "a rival of quick must be one of .*'adamw'"),
        ("", "a file with optimizers or tasks"),
        ("=", "written like networks.toml"),
    ],
)
def test_a_bad_file_is_explained(text, said, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        read_entries(path)
    assert str(error.value).startswith("rivals must be")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bowl", "--track", "tuned"], "track must be left out"),
        (["bowl", "--tasks", "mlp"], "tasks must be left out"),
        (["bowl", "--rivals", "x.toml"], "rivals must be left out"),
        (["networks", "--tasks", "mpl"], "did you mean 'mlp'?"),
        (["networks", "--tasks", "bowl"], "steps must be given for bowl, which has no line in networks.toml"),
        (["networks", "--tasks", "mlp, mlp"], "tasks must be named once each"),
        (
            ["networks", "--optimizers", "sopa"],
            "unknown optimizer 'sopa'; did you mean 'soap'?",
        ),
        (["networks", "--seconds", "3"], "seconds must be left out"),
        (["networks", "--hyperparameters", "x.toml"], "hyperparameters must be left out"),
        (["networks", "--optimizers", "torch.RAdam"], "lr of torch.RAdam must be given, as in 'torch.RAdam(lr=0.001)'"),
        (["networks", "--optimizers", "torch.RAdam(lr=-1.0)"], "must be a finite number in (0.0, inf), got -1.0"),
        (["networks", "--track", "rates", "--seeds", "3"], "seeds must be left out"),
    ],
)
def test_bad_requests_are_explained(words, said):
    assert said in " ".join(invoke("run", *words, code=1).split())


# ---------------------------------------------------------------- the tracks


def test_tuning_in_two_stages_stops_and_resumes(tmp_path):
    """The grid, further rates, the other seeds; an interruption costs nothing, and the page shows the same."""
    words = ("run", "networks", "--quick", *TOY, "--seeds", 2, "--optimizers", "kron_lodo", "--workers", 0)
    said = invoke(*words, "--out", tmp_path / "whole")
    runs = sorted(path.name for path in (tmp_path / "whole" / "runs").glob("*.parquet"))
    assert len(runs) >= 2 * (6 + 2)  # two optimizers: six trials and two seeds each
    part = tmp_path / "part"
    (part / "runs").mkdir(parents=True)
    for name in runs[::2]:  # as if it had been interrupted
        (part / "runs" / name).write_bytes((tmp_path / "whole" / "runs" / name).read_bytes())
    invoke(*words, "--out", part)
    assert sorted(path.name for path in (part / "runs").glob("*.parquet")) == runs
    tables = [
        {(row["metric"], row["optimizer"]): row["mean"] for row in json.loads(path.read_text())["rows"]}
        for path in (out / "networks" / "summary.json" for out in (tmp_path / "whole", part))
    ]
    for metric in (TRAINING, VALIDATION, overall_metric(TRAINING), "settings that were chosen on the tuning seed"):
        assert tables[0][metric, "KronLODO"] == tables[1][metric, "KronLODO"] is not None
    ours = [run for run in settings_of(part) if run["optimizer"] == "kron_lodo" and "schedule" not in run]
    untouched = {run["seed"] for run in ours if run["options"] == {"lr": 3e-3}}
    assert untouched == {0, 1, 2}, "a trial on seed 0, and what is untouched on those that report"
    assert max(len(line) for line in said.splitlines() if line.startswith("─")) <= 80  # the rules of tables
    stored = read_results(experiments.load("networks"), part)
    assert not stored.missing
    assert {row.optimizer for row in stored.rows} == {"AdamW", "KronLODO", "KronLODO untouched"}
    command = run_command(stored.experiment, stored.request, part, stored.results)
    assert command.startswith("lodo run networks --quick --tasks mlp --steps 12")
    assert "--data digits" in command


def test_the_command_on_the_page_repeats_what_was_run(tmp_path):
    """With a file of rivals and tasks, some of both, lengths of their own, and the text that needs no files."""
    path = tmp_path / "mine.toml"
    path.write_text(
        "[rivals]\nmine = { optimizer = 'torch.RAdam', label = 'Mine', lr = 0.002 }\n"
        "other = { optimizer = 'torch.NAdam', lr = 0.002 }\n"
        "[tasks]\nshort = { task = 'rosenbrock', steps = 20 }\n"
        "tiny = { task = 'gru', steps = 10, options = { batch = 2, windows = 2 } }\n"
        "long = { task = 'rosenbrock', steps = 30 }"
    )
    out = tmp_path / "results"
    words = ("run", "networks", "--quick", "--tasks", "short, tiny", "--seeds", 1, "--optimizers", "mine, sgd")
    words += ("--rivals", path, "--data", "digits")
    invoke(*words, "--workers", 0, "--out", out)
    runs = sorted(found.name for found in (out / "runs").glob("*.parquet"))
    stored = read_results(experiments.load("networks"), out)
    command = shlex.split(run_command(stored.experiment, stored.request, out, stored.results))
    assert command[-4:] == ["--data", "digits", "--out", str(out)]
    assert "--steps" not in command
    other = tmp_path / "again"
    invoke(*command[1:-1], other, "--workers", 0)
    assert sorted(found.name for found in (other / "runs").glob("*.parquet")) == runs


def test_the_page_needs_no_module_for_what_is_stored(tmp_path, monkeypatch):
    """Without the module of a task of one's own, the page has the table, and everything else."""
    module = tmp_path / "valleys.py"
    module.write_text(
        "import torch\n"
        "def Valley():\n"
        "    x = torch.nn.Parameter(torch.ones(2))\n"
        "    return lambda: x.square().sum(), [x]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "results"
    words = ("run", "networks", "--quick", "--tasks", "valleys:Valley", "--steps", 10, "--seeds", 1)
    invoke(*words, "--optimizers", "adamw", "--workers", 0, "--out", out)
    module.unlink()
    plugins._forget("valleys")
    importlib.invalidate_caches()
    stored = read_results(experiments.load("networks"), out)
    assert not stored.results
    assert {row.optimizer for row in stored.rows} == {"AdamW"}
    invoke("report", out, "--page", tmp_path / "page.html")
    assert "settings that were chosen on the tuning seed" in (tmp_path / "page.html").read_text()


def settings_of(out):
    """The settings of all finished runs."""
    found = (pq.read_schema(path) for path in (out / "runs").glob("*.parquet"))
    return [read_metadata(schema)["settings"] for schema in found]


def test_the_page_shows_what_is_there_and_says_what_is_missing(tmp_path):
    words = ("run", "networks", "--quick", *TOY, "--seeds", 1, "--optimizers", "adamw", "--workers", 0)
    invoke(*words, "--out", tmp_path)
    experiment = experiments.load("networks")
    stored = read_results(experiment, tmp_path)
    gone = reported(entrants(stored.request)[0], "mlp")
    stored.results[gone][0].run.path(tmp_path / "runs").unlink()
    again = read_results(experiment, tmp_path)
    assert len(again.missing) == 1
    assert gone not in again.results
    assert [row.metric for row in again.rows] == ["settings that were chosen on the tuning seed"]
    page = tmp_path / "page.html"
    invoke("report", tmp_path, "--page", page)
    assert "Networks, every optimizer tuned" in page.read_text()
    assert "1 of " in page.read_text()


def test_untouched_is_compared_with_tuned_adamw(tmp_path):
    words = ("run", "networks", "--track", "untouched", "--quick", *TOY, "--seeds", 2, "--workers", 0)
    invoke(*words, "--optimizers", "adamw, sgd", "--out", tmp_path)
    summary = json.loads((tmp_path / "networks-untouched" / "summary.json").read_text())
    found = {row["optimizer"]: row for row in summary["rows"] if row["metric"] == TRAINING}
    assert found.keys() == {"AdamW tuned", "AdamW", "SGD momentum"}
    assert found["AdamW tuned"]["ratio"] == 1.0
    tuned = len(list((tmp_path / "runs").glob("*.parquet")))
    invoke("run", "networks", "--quick", *TOY, "--seeds", 2, "--workers", 0, "--optimizers", "adamw", "--out", tmp_path)
    assert len(list((tmp_path / "runs").glob("*.parquet"))) == tuned, "the same files"


def test_rates_share_their_files_with_tuning(tmp_path):
    words = (*TOY, "--optimizers", "adamw", "--workers", 0, "--out", tmp_path)
    invoke("run", "networks", "--track", "rates", "--quick", *words)
    rates = {path.name for path in (tmp_path / "runs").glob("*.parquet")}
    assert len(rates) == 5
    experiment = experiments.load("networks")
    choices = experiment.parse("adamw")
    options = {"hidden": (4,), "batch": 8}
    request = experiment.request(
        quick=True, choices=choices, tasks="mlp", evaluations=STEPS_OF_A_TOY, task_options=options
    )
    stored = json.loads((tmp_path / "networks-rates" / "summary.json").read_text())["settings"]["options"]["digests"]
    request.options["digests"] = stored
    planned = {run.path(tmp_path).name for runs in experiment.plan(request).values() for run in runs}
    assert len(planned & rates) == 3  # the constant ones
    assert Cell("AdamW", "mlp, lr=0.001, constant") in experiment.plan(request)
    rows = json.loads((tmp_path / "networks-rates" / "summary.json").read_text())["rows"]
    assert all(read_row(row).optimizer == "AdamW" for row in rows)
    assert (tmp_path / "networks-rates" / "networks-rates.png").is_file()


def test_compare_takes_a_schedule(tmp_path):
    words = ("--task", "hidden=(4,), batch=8", "--steps", 12, "--seeds", 1, "--data", "digits", "--workers", 0)
    optimizers = "torch.AdamW(lr=0.01), torch.AdamW(lr=0.01, schedule='cosine')"
    invoke("compare", "mlp", *words, "--optimizers", optimizers, "--out", tmp_path, "--page", tmp_path / "page.html")
    rows = json.loads((tmp_path / "compare-mlp" / "summary.json").read_text())["rows"]
    losses = {row["optimizer"]: row["mean"] for row in rows if row["metric"].startswith("loss")}
    assert len(set(losses.values())) == 2
