"""What experiments there are: names, what each shows, sizes. Importing this imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "seed"), counted(8, "seed")
    ('1 seed', '8 seeds')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Size:
    """How much of an experiment is run.

    Args:
        evaluations: evaluations of the loss and its gradient in each run.
        seeds: number of runs of each optimizer.
        words: the size in words, where one number of evaluations does not say it.
    """

    evaluations: int
    seeds: int
    words: str = ""

    def __str__(self) -> str:
        return self.words or f"{self.evaluations:,} steps, {counted(self.seeds, 'seed')}"


@dataclass(frozen=True)
class Entry:
    """What is known about an experiment without importing it.

    Args:
        name: its name on the command line and the folder of its results.
        title: the heading of its tables.
        shows: which tables and figures of the paper it reproduces, or what else it shows.
        task: the task that its optimizers are run on.
        full: its full size, which is the paper's where the paper has the experiment.
        quick: its size with ``--quick``.
        brief: what it shows, in at most 40 characters.
        path: where its class is, as ``"module:class"`` below `lodo.lab.experiments`.
    """

    name: str
    title: str
    shows: str
    task: str
    full: Size
    quick: Size
    brief: str = ""
    path: str = ""


_NETWORKS = Size(evaluations=3_000, seeds=5, words="1,000 to 3,000 steps, tuning on 1 seed, results on 5")
_FEW_NETWORKS = Size(
    evaluations=150, seeds=2, words="60 to 150 steps of two networks, four optimizers, results on 2 seeds"
)

_ENTRIES = (
    Entry(
        "bowl",
        "Noisy quadratic bowl",
        "Table 1, Figure 2: every optimizer on the noisy quadratic bowl, and how close G comes to the inverse Hessian",
        task="bowl",
        full=Size(evaluations=100_000, seeds=8),
        quick=Size(evaluations=15_000, seeds=2),
        brief="Table 1, Figure 2: the noisy bowl",
        path="paper.bowl:BowlExperiment",
    ),
    Entry(
        "bowl-noise",
        "Noisy quadratic bowl over noise variances",
        "the appendix's table and log-log plots over noise variances v = 0.01 ... 100",
        task="bowl",
        full=Size(evaluations=100_000, seeds=8),
        quick=Size(evaluations=10_000, seeds=1),
        brief="appendix: noise variances 0.01 to 100",
        path="paper.noise:NoiseExperiment",
    ),
    Entry(
        "bowl-frozen",
        "A frozen preconditioner on a new bowl",
        "Section 5.1, 'Pretrained and Frozen Preconditioner': learn, freeze, move to a new bowl",
        task="bowl",
        full=Size(evaluations=100_000, seeds=8),
        quick=Size(evaluations=20_000, seeds=2),
        brief="Section 5.1: learn, freeze, a new bowl",
        path="paper.frozen:FrozenExperiment",
    ),
    Entry(
        "bowl-options",
        "LODO's options beyond the paper",
        "beyond the paper: each option alone and combined, also where it loses, and the guard on a sudden change",
        task="bowl",
        full=Size(evaluations=100_000, seeds=8),
        quick=Size(evaluations=5_000, seeds=1),
        brief="LODO's options beyond the paper",
        path="beyond.options:OptionsExperiment",
    ),
    Entry(
        "bowl-rivals",
        "Rivals on the noisy quadratic bowl",
        "beyond the paper: today's optimizers at tuned settings on its bowl, by what a step costs and takes",
        task="bowl",
        full=Size(evaluations=30_000, seeds=4),
        quick=Size(evaluations=4_000, seeds=2),
        brief="today's optimizers, tuned, on the bowl",
        path="beyond.rivals:RivalsExperiment",
    ),
    Entry(
        "rosenbrock",
        "Rosenbrock function",
        "Section 5.2 and its appendix: the table, the learning curves, the trajectories over the contours",
        task="rosenbrock",
        full=Size(evaluations=200, seeds=8),
        quick=Size(evaluations=200, seeds=2),
        brief="Section 5.2: table, curves, paths",
        path="paper.rosenbrock:RosenbrockExperiment",
    ),
    Entry(
        "mlp",
        "Small network on 8 x 8 digits",
        "beyond the paper: a small network on MNIST (or --data digits), each method at the best of six settings",
        task="mlp",
        full=Size(evaluations=3_000, seeds=4),
        quick=Size(evaluations=250, seeds=2),
        brief="a small network on MNIST's digits",
        path="beyond.mlp:MlpExperiment",
    ),
    Entry(
        "mnist",
        "Image generation on MNIST",
        "Section 5.3: image generation, 94,696 weights; learning curves, test loss, drawn digits",
        task="mnist",
        full=Size(evaluations=300_000, seeds=8),
        quick=Size(evaluations=60, seeds=1),
        brief="Section 5.3: image generation",
        path="paper.mnist:MnistExperiment",
    ),
    Entry(
        "mnist-ablations",
        "Image generation on MNIST, LODO and its ablations",
        "Section 5.3: LODO-Diagonal, -Global, -Residuals, -No-Momentum and -SGD on image generation",
        task="mnist",
        full=Size(evaluations=300_000, seeds=8),
        quick=Size(evaluations=60, seeds=1),
        brief="Section 5.3: LODO without its parts",
        path="paper.mnist:AblationsExperiment",
    ),
    Entry(
        "mnist-momentum",
        "Image generation on MNIST, LODO's momentum",
        "Section 5.3, its last figure: the training loss against beta, eight values on a logarithmic grid",
        task="mnist",
        full=Size(evaluations=300_000, seeds=1),
        quick=Size(evaluations=20, seeds=1),
        brief="Section 5.3: the loss against beta",
        path="paper.mnist:MomentumExperiment",
    ),
    Entry(
        "cifar10",
        "Image classification on CIFAR-10",
        "Section 5.4: ResNet-18 on CIFAR-10, 11 million weights; learning curves and test accuracy",
        task="cifar10",
        full=Size(evaluations=3_000, seeds=8),
        quick=Size(evaluations=15, seeds=1),
        brief="Section 5.4: ResNet-18 on CIFAR-10",
        path="paper.cifar10:Cifar10Experiment",
    ),
    Entry(
        "networks",
        "Networks, every optimizer tuned",
        "beyond the paper: eight real networks, ten optimizers at the best of ten settings each (--track tuned)",
        task="mlp",
        full=_NETWORKS,
        quick=_FEW_NETWORKS,
        brief="eight networks, ten optimizers, tuned",
        path="beyond.networks.tracks:TunedTrack",
    ),
    Entry(
        "networks-untouched",
        "Networks, every optimizer as it comes",
        "the same networks, each library's own defaults against tuned AdamW (networks --track untouched)",
        task="mlp",
        full=_NETWORKS,
        quick=_FEW_NETWORKS,
        brief="the same with each library's defaults",
        path="beyond.networks.tracks:UntouchedTrack",
    ),
    Entry(
        "networks-rates",
        "Networks over four decades of learning rates",
        "the same networks, the final loss against the learning rate (networks --track rates)",
        task="mlp",
        full=Size(evaluations=3_000, seeds=1, words="1,000 to 3,000 steps, 9 rates on 1 seed"),
        quick=Size(evaluations=150, seeds=1, words="150 steps of fewer networks and optimizers, 5 rates on 1 seed"),
        brief="the same over four decades of rates",
        path="beyond.networks.rates:RatesTrack",
    ),
)
COMPARED = Size(evaluations=1_000, seeds=3)  # of `lodo compare`
COMPARED_QUICKLY = Size(evaluations=100, seeds=1)  # of `lodo run module:Name --quick`
TRACKS = ("tuned", "untouched", "rates")  # of networks; the first is the entry without a suffix
CATALOG: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def track_of(name: str, track: str) -> str:
    """The entry of one of an experiment's tracks.

    >>> track_of("networks", "tuned"), track_of("networks", "rates")
    ('networks', 'networks-rates')
    """
    if name != "networks":
        raise ValueError(f"track must be left out, since only networks has tracks, got {track!r} for {name}")
    return name if track == TRACKS[0] else f"{name}-{track}"


def duration(seconds: float) -> str:
    """A time in the largest unit that it has two of.

    >>> [duration(seconds) for seconds in (40, 110, 130, 5400, 9000, 4e5, 2e7)]
    ['40 s', '110 s', '2 min', '90 min', '2 h', '5 days', '231 days']
    """
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
