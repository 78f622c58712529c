"""The command line: ``lodo run``, ``compare``, ``tune``, ``theory``, ``report`` and a few more.

Importing this module imports nothing heavy: every command imports what it needs when it runs, after its arguments have
been checked as far as names and numbers go. Help, lists and typing errors are therefore answered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from lodo._checks import check_choice, check_int, check_real
from lodo.lab.experiments import CATALOG
from lodo.lab.experiments.catalog import COMPARED, TRACKS, track_of
from lodo.lab.listing import print_list
from lodo.lab.optimizers import OPTIMIZERS
from lodo.lab.plugins import is_plugin
from lodo.lab.settings import read_settings
from lodo.lab.tasks import TASKS
from lodo.lab.theory.parts import PARTS
from lodo.lab.tuning import CONFIRM, PAPER, SAMPLERS
from lodo.lab.usage import Commands, errors_in_words
from lodo.spelling import parse_options

app = typer.Typer(
    cls=Commands,
    help="LODO's laboratory: experiments of the paper and beyond it, each in one command.",
    no_args_is_help=True,
    suggest_commands=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # without bytecode, importing Rich takes longer than anything else that help needs
    pretty_exceptions_enable=False,
)

_RUNS_KEPT = "Finished runs and checkpoints are kept: the same command continues from here."
_TRIALS_KEPT = "Finished trials and checkpoints are kept: the same command continues from here."
_NOTHING_WRITTEN = "Nothing was written."


# ------------------------------------------------------------ arguments, which are checked and completed


def _checked(
    names: Iterable[str], *, plugins: bool = False, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> Callable[[typer.CallbackParam, Any], Any]:
    """A check that an argument is one of ``names``, or, with ``plugins``, of the form ``module:Name``.

    ``elsewhere`` says of names that belong to other commands what they are.
    """

    def check(name: str, value: str) -> None:
        if plugins and is_plugin(value):
            return
        if value in elsewhere:
            raise ValueError(f"{name} must be {elsewhere[value]}")
        check_choice(name, value, names)

    return _worded(check)


def _worded(check: Callable[[str, Any], None]) -> Callable[[typer.CallbackParam, Any], Any]:
    """A check of an argument if it is given, before anything heavy is imported; ``check`` takes its name and value."""

    def callback(param: typer.CallbackParam, value: Any) -> Any:
        if value is not None:
            try:
                check(param.metavar or str(param.name), value)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        return value

    return callback


def _at_least(low: int) -> Callable[[typer.CallbackParam, Any], Any]:
    """A check that an argument is an integer of at least ``low``."""
    return _worded(partial(check_int, low=low))


def _completed(names: Iterable[str]) -> Callable[[str], list[str]]:
    """A function that completes the beginning of one of ``names`` in the shell."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


_NETWORKS = read_settings("networks")["tasks"]
_TASKS_ALONE = {
    name: f"an experiment, got {name!r}, which is a task: lodo compare {name}"
    + (f", or lodo run networks --tasks {name}" if name in _NETWORKS else "")
    for name in TASKS
    if name not in CATALOG
}
_EXPERIMENTS_ALONE = {
    name: f"a task, got {name!r}, which is an experiment: lodo run {name}" for name in CATALOG if name not in TASKS
}
_SCHEDULES = tuple(read_settings("schedules"))
_SAMPLER_NAMES = (PAPER, *SAMPLERS)
_PART_NAMES = (*PARTS, "all")

TaskName = Annotated[
    str,
    typer.Argument(
        metavar="TASK",
        help=f"One of {', '.join(TASKS)}, or your own as module:Name.",
        callback=_checked(TASKS, plugins=True, elsewhere=_EXPERIMENTS_ALONE),
        autocompletion=_completed(TASKS),
    ),
]
TaskOptions = Annotated[
    str | None,
    typer.Option(help="Options of the task that differ from its defaults, such as 'n=200, condition=1e4'."),
]
_STEPS = "Evaluations of the loss and its gradient in each run. Default:"
_SEEDS = "Number of runs of each optimizer. Default:"
Seconds = Annotated[
    float | None,
    typer.Option(
        help="End every run after this much training time, instead of after --steps.",
        callback=_worded(partial(check_real, low=0.0, open_low=True)),
    ),
]
Hyperparameters = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with hyperparameters to use instead of the paper's. It has a table for each task, and in "
        "it one for each optimizer, such as [mnist] adam = { lr = 0.002 }."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Number of processes; 0 works in this one, without Dask. Default: one for each core.",
        callback=_at_least(0),
    ),
]
Scheduler = Annotated[
    str | None, typer.Option(help="Address of a Dask scheduler, such as tcp://host:8786, to use its workers.")
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Folder with data sets, such as mnist/; missing ones are downloaded into it. For tasks with text also a "
        "text file. 'digits' needs no files: scikit-learn's small digits, or Python's source as text. "
        "Default: the folder in the variable LODO_DATA, else ~/.cache/lodo/data."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for curves, tables and figures.")]


# ------------------------------------------------------------ commands


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lodo {version('lodo')}")
        raise typer.Exit


@app.callback()
def _lodo(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """LODO's laboratory: experiments of the paper and beyond it, each in one command."""


@app.command(no_args_is_help=True)
def run(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="The experiment (`lodo run --list` shows them all), or your own experiment or task as module:Name.",
            callback=_checked(CATALOG, plugins=True, elsewhere=_TASKS_ALONE),
            autocompletion=_completed(CATALOG),
        ),
    ] = None,
    list_them: Annotated[
        bool, typer.Option("--list", help="Show the experiments and how long they take; with NAME, more about one.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A small variant that takes a minute or two.")] = False,
    track: Annotated[
        str | None,
        typer.Option(
            help="For networks: tuned (every optimizer at the best of ten settings), untouched (each library's own "
            "defaults) or rates (over four decades of learning rates). Default: tuned.",
            callback=_checked(TRACKS),
            autocompletion=_completed(TRACKS),
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="For networks: the tasks, such as 'mlp, cnn'. Default: all eight; gpt_long, of "
            "20,000 steps, is run only if it is named."
        ),
    ] = None,
    rivals: Annotated[
        Path | None,
        typer.Option(
            help="For networks: TOML file with further optimizers and tasks, written like networks.toml, such as "
            '[rivals] radam = { optimizer = "torch.RAdam", label = "RAdam", lr = 0.001 }.'
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help=f"{_STEPS} the experiment's number.", callback=_at_least(10))
    ] = None,
    seconds: Seconds = None,
    seeds: Annotated[int | None, typer.Option(help=f"{_SEEDS} the experiment's number.", callback=_at_least(1))] = None,
    optimizers: Annotated[
        str | None,
        typer.Option(
            help="The optimizers, with options if you like: 'lodo, lodo(beta=0.5), torch.AdamW(lr=0.1)'. Any optimizer "
            "of torch.optim, pytorch_optimizer, heavyball or schedulefree can be named, and your own as "
            "'mymodule:MyOptimizer(lr=0.1)'. Default: the experiment's."
        ),
    ] = None,
    task: TaskOptions = None,
    hyperparameters: Hyperparameters = None,
    data: Data = None,
    out: Out = Path("results"),
    workers: Workers = None,
    scheduler: Scheduler = None,
    checkpoint_every: Annotated[
        float,
        typer.Option(
            help="Seconds between a run's checkpoints, the most that a kill can cost; more if they are slow to write.",
            callback=_worded(partial(check_real, low=0.0)),
        ),
    ] = 10.0,
) -> None:
    """Run an experiment: one of the paper's, or one beyond it.

    Writes its table beside the paper's, its figures, and every curve. Finished runs are never repeated: the same
    command continues where the last one was interrupted.
    """
    if list_them or name is None:
        print_list(name)
        return
    with errors_in_words(_RUNS_KEPT):
        task_options = _parse_task_options(task)

        from lodo.lab.comparison import find_experiment
        from lodo.lab.data import using
        from lodo.lab.pipeline import run_experiment

        with using(data):
            experiment = find_experiment(name if track is None else track_of(name, track))
            if rivals is not None:
                experiment.add_rivals(rivals)
            request = experiment.request(
                quick=quick,
                evaluations=steps,
                seconds=seconds,
                seeds=seeds,
                choices=None if optimizers is None else experiment.parse(optimizers),
                task_options=task_options,
                hyperparameters=hyperparameters,
                tasks=tasks,
            )
            run_experiment(
                experiment, request, out, workers=workers, scheduler=scheduler, checkpoint_every=checkpoint_every
            )


@app.command(no_args_is_help=True)
def compare(
    task_name: TaskName,
    optimizers: Annotated[
        str | None,
        typer.Option(
            help="The optimizers, with options: 'lodo(lr=0.1), torch.AdamW(lr=0.1)', as for `lodo run`. Each may have "
            "a schedule, 'cosine' or 'warmup_cosine': \"torch.AdamW(lr=0.1, schedule='cosine')\". Default: "
            "kron_lodo and torch.AdamW; for the bowls and rosenbrock, which are no networks, lodo and adam."
        ),
    ] = None,
    page: Annotated[Path, typer.Option("--page", "-o", help="The HTML page to write.")] = Path("compare.html"),
    steps: Annotated[
        int | None, typer.Option(help=f"{_STEPS} {COMPARED.evaluations:,}.", callback=_at_least(10))
    ] = None,
    seconds: Seconds = None,
    seeds: Annotated[int | None, typer.Option(help=f"{_SEEDS} {COMPARED.seeds}.", callback=_at_least(1))] = None,
    task: TaskOptions = None,
    hyperparameters: Hyperparameters = None,
    data: Data = None,
    out: Out = Path("results"),
    workers: Workers = None,
    scheduler: Scheduler = None,
) -> None:
    """Compare optimizers of your choice on one task.

    Writes one HTML page with tables and interactive curves. The task may be your own. From Python, use
    lodo.lab.compare.
    """
    with errors_in_words(_RUNS_KEPT):
        task_options = _parse_task_options(task)

        from rich.console import Console

        from lodo.lab.comparison import Comparison, write_comparison
        from lodo.lab.data import using
        from lodo.lab.files import check_file
        from lodo.lab.page.results import read_results
        from lodo.lab.pipeline import run_experiment

        check_file("page", page)
        console = Console()
        with using(data):
            experiment = Comparison(task_name)
            request = experiment.request(
                evaluations=steps,
                seconds=seconds,
                seeds=seeds,
                choices=None if optimizers is None else experiment.parse(optimizers),
                task_options=task_options,
                hyperparameters=hyperparameters,
            )
            run_experiment(experiment, request, out, workers=workers, scheduler=scheduler, console=console)
            write_comparison(read_results(experiment, out), page, out, console)


@app.command(no_args_is_help=True)
def tune(
    task_name: TaskName,
    optimizer: Annotated[
        str,
        typer.Option(
            help="The optimizer. Options given with it stay fixed: lodo, 'lodo(momentum=\"learned\")', torch.AdamW.",
            autocompletion=_completed(OPTIMIZERS),
        ),
    ],
    schedule: Annotated[
        str,
        typer.Option(
            help="paper: as in the paper; quick: a few short generations, to see it work.",
            callback=_checked(_SCHEDULES),
            autocompletion=_completed(_SCHEDULES),
        ),
    ] = "paper",
    sampler: Annotated[
        str,
        typer.Option(
            help="paper: the paper's evolutionary algorithm; or one of Optuna's samplers, "
            f"{', '.join(SAMPLERS)}, with as many full-length trials as take the same number of steps.",
            callback=_checked(_SAMPLER_NAMES),
            autocompletion=_completed(_SAMPLER_NAMES),
        ),
    ] = PAPER,
    space: Annotated[
        str | None,
        typer.Option(
            help="What to tune and where to start: 'rate(lr=0.001), decay(beta=0.9)'. Rates are varied in ln x, "
            "decays in ln(1 - x); (start, low, high) sets bounds; an integer start keeps the value an integer; "
            "preconditioner__depth is the depth in 'lodo(preconditioner=\"mixing\")'. Default: what the paper tunes, "
            "for its optimizers."
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Number of trials, for Optuna's samplers.", callback=_at_least(1))
    ] = None,
    confirm: Annotated[
        int,
        typer.Option(
            help="Number of seeds on which the sampler's result and the best trials are run again, to choose among "
            "them; 0 takes the sampler's result as it is, as the paper does.",
            callback=_at_least(0),
        ),
    ] = CONFIRM,
    seed: Annotated[int, typer.Option(help="Seed of the trials and their runs.", callback=_at_least(0))] = 0,
    task: TaskOptions = None,
    data: Data = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Database of the study: sqlite:///FILE, postgresql://... Processes with the same database share the "
            "work. Default: tuning.db in --out."
        ),
    ] = None,
    out: Out = Path("results"),
    workers: Workers = None,
    scheduler: Scheduler = None,
) -> None:
    """Tune an optimizer on a task, as the paper does or with Optuna.

    Ends with the tuned values beside the paper's and a file for `lodo run --hyperparameters`. The study is stored by
    Optuna: the same command continues it, and Optuna's own tools read it.
    """
    with errors_in_words(_TRIALS_KEPT):
        task_options = _parse_task_options(task)

        from rich.console import Console
        from rich.progress import Progress

        from lodo.lab.data import using
        from lodo.lab.executor import check_scheduler
        from lodo.lab.tuning.outcome import run_search
        from lodo.lab.tuning.report import write_outcome
        from lodo.lab.tuning.search import plan_search
        from lodo.lab.tuning.study import without_password

        with using(data):
            search = plan_search(
                task_name,
                optimizer,
                schedule=schedule,
                sampler=sampler,
                space=space,
                trials=trials,
                seed=seed,
                task_options=task_options,
            )
            if scheduler is not None:
                check_scheduler(scheduler)
            address = storage or f"sqlite:///{out / 'tuning.db'}"
            typer.echo(f"study {search.name} in {without_password(address)}")
            console = Console()
            with Progress(*Progress.get_default_columns(), "{task.fields[state]}", console=console) as progress:
                bar = progress.add_task("trials", total=search.number, state="")

                def on_progress(done: int, total: int, state: str) -> None:
                    progress.update(bar, completed=done, total=total, state=state)

                outcome = run_search(
                    search,
                    address,
                    out,
                    confirm=confirm,
                    on_progress=on_progress,
                    workers=workers,
                    scheduler=scheduler,
                )
            written = write_outcome(outcome, address, out / "tune" / search.name, console)
            name = search.choice.optimizer
            optimizers = "" if name in OPTIMIZERS else f" --optimizers {name}"  # no experiment has it by default
            use = "use them nevertheless" if outcome.worse else "use them"
            typer.echo(f"{use}: lodo run {_experiment_of(search.task)}{optimizers} --hyperparameters {written}")


@app.command(no_args_is_help=True)
def theory(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help=f"One of {', '.join(PARTS)}, or all.",
            callback=_checked(_PART_NAMES),
            autocompletion=_completed(_PART_NAMES),
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller cases: all of it in about a minute.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of matrices, noise and permutations.", callback=_at_least(0))] = 0,
    out: Annotated[Path, typer.Option(help="Folder for numbers, texts and figures.")] = Path("results"),
) -> None:
    """Check the paper's theory by computation.

    Says what holds, under which conditions, and where it stops holding.
    """
    with errors_in_words("Finished parts are kept."):
        from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

        from lodo.lab.files import check_folder
        from lodo.lab.theory.parts import part
        from lodo.lab.theory.report import write_finding

        check_folder("out", out / "theory")
        names = list(PARTS) if name == "all" else [name]
        all_hold = True
        with Progress(SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn()) as progress:
            bar = progress.add_task("", total=len(names))
            for each in names:
                progress.update(bar, description=f"computing {each}")
                finding = part(each)(quick=quick, seed=seed)
                write_finding(finding, out / "theory" / each, {"quick": quick, "seed": seed}, progress.console)
                progress.advance(bar)
                all_hold = all_hold and all(claim.holds for claim in finding.claims)
        if not all_hold:
            raise ValueError("a claim does not hold; see above")


@app.command(no_args_is_help=True)
def report(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="The folder of results, as --out of `lodo run`.")],
    page: Annotated[Path, typer.Option("--page", "-o", help="The HTML page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page of everything in a folder of results.

    It has tables, interactive curves, pictures, the theory and the commands, and needs no network and no other file.
    Where something is missing, it says which command makes it.
    """
    with errors_in_words(_NOTHING_WRITTEN):
        if not runs.is_dir():
            raise ValueError(f"RUNS must be a folder of results, got {str(runs)!r}")

        from rich.progress import Progress

        from lodo.lab.files import check_file
        from lodo.lab.page.render import write_page
        from lodo.lab.page.report import section_readers

        check_file("page", page)
        if any(runs.glob("*.parquet")):  # the folder of the curves, which is within that of the results
            runs = runs.parent
        with Progress() as progress:
            readers = section_readers(runs)
            bar = progress.add_task("reading", total=len(readers))
            sections = []
            for name, read in readers:
                progress.update(bar, description=f"reading {name}")
                section = read()
                if section is not None:
                    sections.append(section)
                progress.advance(bar)
        write_page(page, "LODO: the reproduction on one page", sections, f"From the folder {runs}.")
        size = page.stat().st_size / 1e6
        shown = sum(not section.empty for section in sections)
        typer.echo(f"{shown} of {len(sections)} parts found; page: {page} ({size:.1f} MB)")


@app.command(no_args_is_help=True)
def sample(
    weights: Annotated[Path, typer.Argument(help="A .weights or .checkpoint file of an mnist run, in <out>/runs.")],
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("samples.png"),
    number: Annotated[int, typer.Option(help="Number of images to draw.", callback=_at_least(1))] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the pixels.", callback=_at_least(0))] = 0,
) -> None:
    """Draw digits with the image generator of an mnist run.

    A checkpoint of a run that has not finished will do too.
    """
    with errors_in_words(_NOTHING_WRITTEN):
        from rich.console import Console

        from lodo.lab.data import DIGITS_DIGEST
        from lodo.lab.experiments.paper.mnist import draw_images, grid
        from lodo.lab.files import check_file
        from lodo.lab.run import read_weights
        from lodo.lab.show.draw import save_picture

        check_file("out", out)
        settings, network = read_weights(weights)
        if settings["task"] != "mnist":
            raise ValueError(f"weights must be of an mnist run, got one of {settings['task']} in {str(weights)!r}")
        side = 8 if settings["task_options"].get("digest") == DIGITS_DIGEST else 28
        with Console().status("drawing"):
            save_picture(grid(draw_images(network, number, side, seed)), out)
        typer.echo(f"wrote {out}")


@app.command("train-l2l")
def train_l2l(
    out: Annotated[Path, typer.Argument(help="The file to write.")] = Path("l2l.weights"),
    seed: Annotated[int, typer.Option(help="Seed of the weights, the bowls and the noise.", callback=_at_least(0))] = 0,
    episodes: Annotated[
        int | None,
        typer.Option(
            help="Number of episodes of 100 steps. Default: that of the weights in the package.", callback=_at_least(1)
        ),
    ] = None,
) -> None:
    """Meta-train the LSTM of L2LBGDBGD on random noisy bowls.

    The package contains trained weights, which this command made. Use others with
    --optimizers "l2l(weights='FILE')".
    """
    with errors_in_words(_NOTHING_WRITTEN):
        from rich.progress import Progress

        from lodo.lab.files import check_file
        from lodo.lab.optimizers.l2l import EPISODES, train
        from lodo.lab.optimizers.l2l_weights import save_weights
        from lodo.lab.run import threads

        check_file("out", out)
        number = EPISODES if episodes is None else episodes
        with Progress() as progress:
            bar = progress.add_task("meta-training", total=number)
            with threads(1):  # the networks are small, and the result must not depend on the number of cores
                state = train(seed=seed, episodes=number, on_progress=lambda done: progress.update(bar, completed=done))
        save_weights(out, state, {"seed": seed, "episodes": number})
        typer.echo(f"wrote {out}; use it with --optimizers \"l2l(weights='{out}')\"")


# ------------------------------------------------------------ what commands share


def _parse_task_options(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return parse_options(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"task must be options such as 'n=200, condition=1e4', got {text!r}: {error}") from error


def _experiment_of(task: str) -> str:
    """The first experiment on a task; your own task stands for a comparison on it."""
    for entry in CATALOG.values():
        if entry.task == task:
            return entry.name
    return task
