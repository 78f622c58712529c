"""The command line: ``lodo run``, ``compare``, ``tune``, ``theory``, ``report`` and a few more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

from lodo._checks import check_choice
from lodo.lab.comparison import Comparison
from lodo.lab.data import DIGITS_DIGEST, using
from lodo.lab.executor import RunError
from lodo.lab.experiments import CATALOG, load
from lodo.lab.experiments.paper.mnist import draw_images, grid
from lodo.lab.optimizers import BASELINES
from lodo.lab.optimizers.l2l import EPISODES, train
from lodo.lab.optimizers.l2l_weights import save_weights
from lodo.lab.pipeline import conduct
from lodo.lab.run import read_weights, threads
from lodo.lab.show.draw import save_picture
from lodo.lab.tasks import TASKS
from lodo.lab.theory.parts import PARTS, part
from lodo.lab.tuning import CONFIRM, SAMPLERS
from lodo.spelling import parse_options

app = typer.Typer(
    help="LODO's laboratory: the paper's experiments, each in one command.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


Workers = Annotated[int | None, typer.Option(help="Processes; 0 works in this one, without Dask. Default: one a core.")]
Scheduler = Annotated[
    str | None, typer.Option(help="Address of a Dask scheduler, such as tcp://host:8786, to use its workers.")
]
Data = Annotated[str | None, typer.Option(help="Folder with data sets, or 'digits', as for `lodo run`.")]


@app.callback()
def _lodo() -> None:
    """LODO's laboratory: the paper's experiments, each in one command."""


@contextmanager
def _errors_in_words(console: Console, kept: str) -> Iterator[None]:
    """Say what went wrong, or what an interruption left, instead of a traceback."""
    try:
        yield
    except (ValueError, OSError, FloatingPointError, RunError) as error:
        console.print("[red]error:[/red]", escape(str(error)), highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print(f"\ninterrupted; {kept}")
        raise typer.Exit(130) from None


@app.command(no_args_is_help=True)
def run(
    name: Annotated[str | None, typer.Argument(help="The experiment; `lodo run --list` shows them all.")] = None,
    list_them: Annotated[bool, typer.Option("--list", help="Show the experiments and the optimizers' names.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A small variant, done in about a minute.")] = False,
    steps: Annotated[
        int | None, typer.Option(help="Evaluations of the loss and its gradient per run. Default: the experiment's.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="End every run after so much training time, instead of --steps.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs per optimizer. Default: the experiment's.")] = None,
    optimizers: Annotated[
        str | None,
        typer.Option(
            help="Which ones, with options if you like: 'lodo, lodo(beta=0.5), torch.AdamW(lr=0.1)'. Any optimizer of "
            "torch.optim, pytorch_optimizer, heavyball or schedulefree can be named. Default: the experiment's."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="Options of the task that differ from the paper's, such as 'n=200, condition=1e4'."),
    ] = None,
    hyperparameters: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with hyperparameters to use instead of the paper's: a table for each task, in it one for "
            "each optimizer, such as [mnist] adam = { lr = 0.002 }."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Images a step, for mnist and cifar10. Default: the paper's 256 and 2048.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="For cifar10: resnet18 (the paper's), resnet20 or resnet8 (for small machines)."),
    ] = None,
    train_size: Annotated[int | None, typer.Option(help="For cifar10: train on the first so many images.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder with data sets, such as mnist/; what is missing is downloaded into it. 'digits' stands for "
            "the small digits of scikit-learn. Default: the folder in the variable LODO_DATA, else ~/.cache/lodo/data."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for curves, tables and figures.")] = Path("results"),
    workers: Workers = None,
    scheduler: Scheduler = None,
    checkpoint_every: Annotated[
        float,
        typer.Option(
            help="Seconds between a run's checkpoints, the most that a kill can cost; more if they are slow to write.",
            min=0,
        ),
    ] = 10.0,
) -> None:
    """Run one of the paper's experiments: its table beside the paper's, its figures, and every curve.

    What is finished is never done again: the same command continues where the last one was interrupted.
    """
    console = Console()
    if list_them or name is None:
        _print_list(console)
        return
    if name not in CATALOG:
        raise typer.BadParameter(f"NAME must be one of {', '.join(CATALOG)}, got {name!r}")
    experiment = load(name)
    kept = "finished runs and checkpoints are kept: the same command continues from here"
    given = {"batch": batch, "model": model, "train_size": train_size}
    given = {name: value for name, value in given.items() if value is not None}
    with _errors_in_words(console, kept), using(data):
        request = experiment.request(
            quick=quick,
            evaluations=steps,
            seconds=seconds,
            seeds=seeds,
            choices=None if optimizers is None else experiment.parse(optimizers),
            task_options={**_options(task), **given},
            hyperparameters=hyperparameters,
        )
        conduct(
            experiment,
            request,
            out,
            workers=workers,
            scheduler=scheduler,
            checkpoint_every=checkpoint_every,
            console=console,
        )


@app.command(no_args_is_help=True)
def tune(
    task_name: Annotated[str, typer.Argument(metavar="TASK", help=f"One of {', '.join(TASKS)}.")],
    optimizer: Annotated[
        str,
        typer.Option(
            help="Which one; options given with it stay fixed: lodo, 'lodo(momentum=\"learned\")', torch.AdamW."
        ),
    ],
    schedule: Annotated[
        str, typer.Option(help="paper: as in the paper; quick: a few short generations, to see it work.")
    ] = "paper",
    sampler: Annotated[
        str,
        typer.Option(
            help=f"paper: the evolutionary algorithm of the paper; or one of Optuna's, {', '.join(SAMPLERS)}, on as "
            "many full-length trials as take as long."
        ),
    ] = "paper",
    space: Annotated[
        str | None,
        typer.Option(
            help="What to tune and where to start: 'rate(lr=0.001), decay(beta=0.9)'. Rates are varied in ln x, "
            "decays in ln(1 - x); (start, low, high) sets bounds; an integer start stands for integers. Default: "
            "what the paper tunes of its optimizers."
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(help="How many, for Optuna's samplers.")] = None,
    confirm: Annotated[
        int,
        typer.Option(
            help="Seeds on which the result of the sampler and the best trials are run again, to choose among them; 0 "
            "takes the sampler's result as it is, as the paper does.",
            min=0,
        ),
    ] = CONFIRM,
    seed: Annotated[int, typer.Option(help="Draws the trials and their runs.", min=0)] = 0,
    task: Annotated[
        str | None,
        typer.Option(help="Options of the task that differ from the paper's, such as 'n=200, condition=1e4'."),
    ] = None,
    data: Data = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Database of the study: sqlite:///FILE, postgresql://... Processes that are given the same one share "
            "the work. Default: tuning.db in --out."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for runs, tuned values and figures.")] = Path("results"),
    workers: Workers = None,
    scheduler: Scheduler = None,
) -> None:
    """Tune an optimizer on a task: as the paper does before it compares, or by one of Optuna's samplers.

    Ends with the tuned values beside the paper's and a file for `lodo run --hyperparameters`. The study is in Optuna's
    storage: the same command continues it, and Optuna's own tools read it.
    """
    from lodo.lab.tuning.outcome import conduct as conduct_search  # which take a second to import
    from lodo.lab.tuning.report import write_outcome
    from lodo.lab.tuning.search import plan
    from lodo.lab.tuning.study import without_password

    console = Console()
    kept = "finished trials and checkpoints are kept: the same command continues from here"
    with _errors_in_words(console, kept), using(data):
        check_choice("TASK", task_name, tuple(TASKS))
        search = plan(
            task_name,
            optimizer,
            schedule=schedule,
            sampler=sampler,
            space=space,
            trials=trials,
            seed=seed,
            task_options=_options(task),
        )
        address = storage or f"sqlite:///{out / 'tuning.db'}"
        console.print(
            f"study {search.name} in {without_password(address)}", markup=False, highlight=False, soft_wrap=True
        )
        with Progress(*Progress.get_default_columns(), "{task.fields[state]}", console=console) as progress:
            bar = progress.add_task("trials", total=search.number, state="")
            outcome = conduct_search(
                search,
                address,
                out,
                confirm=confirm,
                show=lambda done, of, state: progress.update(bar, completed=done, total=of, state=state),
                workers=workers,
                scheduler=scheduler,
            )
        written = write_outcome(outcome, address, out / "tune" / search.name, console)
        experiment = next((e.name for e in CATALOG.values() if e.task == search.task), search.task)
        console.print(
            f"use them: lodo run {experiment} --hyperparameters {written}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


@app.command(no_args_is_help=True)
def theory(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(PARTS)}, or all.")],
    quick: Annotated[bool, typer.Option("--quick", help="Smaller cases: all of it in about a minute.")] = False,
    seed: Annotated[int, typer.Option(help="Draws matrices, noise and permutations.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for numbers, words and figures.")] = Path("results"),
) -> None:
    """Check the paper's theory by computation: what holds, under which conditions, and where it stops holding."""
    from lodo.lab.theory.report import write_finding

    console = Console()
    with _errors_in_words(console, "what was finished is kept"):
        check_choice("NAME", name, (*PARTS, "all"))
        held, parts = True, list(PARTS) if name == "all" else [name]
        columns = SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn()
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=len(parts))
            for each in parts:
                bar.update(task, description=f"computing {each}")
                finding = part(each)(quick=quick, seed=seed)
                write_finding(finding, out / "theory" / each, {"quick": quick, "seed": seed}, bar.console)
                bar.advance(task)
                held = held and all(claim.holds for claim in finding.claims)
        if not held:
            raise ValueError("a claim does not hold; see above")


@app.command(no_args_is_help=True)
def compare(
    task_name: Annotated[str, typer.Argument(metavar="TASK", help=f"One of {', '.join(TASKS)}.")],
    optimizers: Annotated[
        str, typer.Option(help="Which ones, with options: 'lodo(lr=0.1), torch.AdamW(lr=0.1)'; as for `lodo run`.")
    ] = Comparison.optimizers,
    page: Annotated[Path, typer.Option("--page", "-o", help="The HTML page to write.")] = Path("compare.html"),
    steps: Annotated[
        int | None, typer.Option(help="Evaluations of the loss and its gradient per run. Default: 1,000.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="End every run after so much training time, instead of --steps.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs per optimizer. Default: 3.")] = None,
    task: Annotated[str | None, typer.Option(help="Options of the task, such as 'n=200, condition=1e4'.")] = None,
    hyperparameters: Annotated[
        Path | None, typer.Option(help="TOML file with hyperparameters, as for `lodo run`.")
    ] = None,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder for curves, tables and figures.")] = Path("results"),
    workers: Workers = None,
    scheduler: Scheduler = None,
) -> None:
    """Compare optimizers of your choice on one task, and write one HTML page with tables and interactive curves.

    For a task of your own see lodo.lab.compare.
    """
    from lodo.lab.comparison import write_comparison
    from lodo.lab.page.results import read_results

    console = Console()
    kept = "finished runs and checkpoints are kept: the same command continues from here"
    with _errors_in_words(console, kept), using(data):
        check_choice("TASK", task_name, tuple(TASKS))
        experiment = Comparison(task_name)
        request = experiment.request(
            evaluations=steps,
            seconds=seconds,
            seeds=seeds,
            choices=experiment.parse(optimizers),
            task_options=_options(task),
            hyperparameters=hyperparameters,
        )
        conduct(experiment, request, out, workers=workers, scheduler=scheduler, console=console)
        write_comparison(read_results(experiment, out), page, out, console)


@app.command(no_args_is_help=True)
def report(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="The folder of results, as --out of `lodo run`.")],
    page: Annotated[Path, typer.Option("--page", "-o", help="The HTML page to write.")] = Path("report.html"),
) -> None:
    """One HTML page of everything in a folder of results: tables, interactive curves, pictures, theory, commands.

    The page needs no network and no other file. What is missing says which command makes it.
    """
    from lodo.lab.page.render import write_page
    from lodo.lab.page.report import section_readers

    console = Console()
    with _errors_in_words(console, "nothing was written"):
        if not runs.is_dir():
            raise ValueError(f"RUNS must be a folder of results, got {str(runs)!r}")
        runs = runs.parent if any(runs.glob("*.parquet")) else runs  # the curves themselves were named
        with Progress(console=console) as progress:
            waiting = section_readers(runs)
            bar = progress.add_task("reading", total=len(waiting))
            sections = []
            for name, read in waiting:
                progress.update(bar, description=f"reading {name}")
                sections.append(read())
                progress.advance(bar)
        there = [section for section in sections if section is not None]
        write_page(page, "LODO: the reproduction on one page", there, f"From the folder {runs}.")
        size = page.stat().st_size / 1e6
    shown = sum(not section.empty for section in there)
    words = f"{shown} of {len(there)} parts are there; page: {page} ({size:.1f} MB)"
    console.print(words, markup=False, highlight=False, soft_wrap=True)


@app.command(no_args_is_help=True)
def sample(
    weights: Annotated[Path, typer.Argument(help="A .weights or .checkpoint file of an mnist run, in <out>/runs.")],
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("samples.png"),
    number: Annotated[int, typer.Option(help="Images to draw.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Draws the pixels.", min=0)] = 0,
) -> None:
    """Draw digits, pixel by pixel, with the image generator of a run or of its checkpoint."""
    console = Console()
    with _errors_in_words(console, "nothing was written"):
        settings, network = read_weights(weights)
        if settings["task"] != "mnist":
            raise ValueError(f"weights must be of an mnist run, got one of {settings['task']} in {str(weights)!r}")
        side = 8 if settings["task_options"].get("digest") == DIGITS_DIGEST else 28
        with console.status("drawing"):
            save_picture(grid(draw_images(network, number, side, seed)), out)
    console.print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)


@app.command("train-l2l")
def train_l2l(
    out: Annotated[Path, typer.Argument(help="The file to write.")] = Path("l2l.weights"),
    seed: Annotated[int, typer.Option(help="Draws the weights, the bowls and the noise.")] = 0,
    episodes: Annotated[int, typer.Option(help="Episodes of 100 steps.")] = EPISODES,
) -> None:
    """Meta-train the LSTM of L2LBGDBGD on random noisy bowls.

    Trained weights are part of the package; this is how they were made. Use others with
    --optimizers "l2l(weights='FILE')".
    """
    console = Console()
    with _errors_in_words(console, "nothing was written"):
        with Progress(console=console) as progress:
            bar = progress.add_task("meta-training", total=episodes)
            with threads(1):  # the networks are small, and the result shall not depend on the machine's cores
                state = train(
                    seed=seed, episodes=episodes, on_progress=lambda done: progress.update(bar, completed=done)
                )
        save_weights(out, state, {"seed": seed, "episodes": episodes})
    console.print(f"wrote {out}; use it with --optimizers \"l2l(weights='{out}')\"", markup=False, highlight=False)


def _options(text: str | None) -> dict[str, Any]:
    try:
        return {} if text is None else parse_options(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"task must be options such as 'n=200, condition=1e4', got {text!r}: {error}") from error


def _print_list(console: Console) -> None:
    table = Table("name", "what it shows", "full size", "--quick")
    for experiment in CATALOG.values():
        sizes = [f"{size.evaluations:,} steps, {size.seeds} seeds" for size in (experiment.full, experiment.quick)]
        table.add_row(experiment.name, experiment.shows, *sizes)
    console.print(table)
    libraries = "torch.optim, pytorch_optimizer and, with the extra rivals, heavyball and schedulefree"
    console.print(f"optimizers: {', '.join(BASELINES)}, and any of {libraries}", highlight=False)
