"""What experiments there are: names, what each shows, sizes. Importing this imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
        path: where its class is, as ``"module:class"`` below `lodo.lab.experiments`.
    """

    name: str
    title: str
    shows: str
    task: str
    full: Size
    quick: Size
    path: str = ""


_NETWORKS = Size(evaluations=3_000, seeds=5, words="1,000 to 3,000 steps, tuning on 1 seed, results on 5")
_FEW_NETWORKS = Size(evaluations=150, seeds=2, words="150 steps of fewer networks and optimizers, results on 2 seeds")

_ENTRIES = (
    Entry(
        "bowl",
        "Noisy quadratic bowl",
        "Table 1, Figure 2: every optimizer on the noisy quadratic bowl, and how close G comes to the inverse Hessian",
        task="bowl",
        full=Size(evaluations=100_000, seeds=8),
        quick=Size(evaluations=15_000, seeds=2),
        path="paper.bowl:BowlExperiment",
    ),
    Entry(
        "bowl-noise",
        "Noisy quadratic bowl over noise variances",
        "the appendix's table and log-log plots over noise variances v = 0.01 ... 100",
        task="bowl",
        full=Size(evaluations=100_000, seeds=8),
        quick=Size(evaluations=10_000, seeds=1),
        path="paper.noise:NoiseExperiment",
    ),
    Entry(
        "bowl-frozen",
        "A frozen preconditioner on a new bowl",
        "Section 5.1, 'Pretrained and Frozen Preconditioner': learn, freeze, move to a new bowl",
        task="bowl",
        full=Size(evaluations=100_000, seeds=8),
        quick=Size(evaluations=20_000, seeds=2),
        path="paper.frozen:FrozenExperiment",
    ),
    Entry(
        "bowl-options",
        "LODO's options beyond the paper",
        "beyond the paper: each option alone and combined, also where it loses, and the guard on a sudden change",
        task="bowl",
        full=Size(evaluations=100_000, seeds=8),
        quick=Size(evaluations=5_000, seeds=1),
        path="beyond.options:OptionsExperiment",
    ),
    Entry(
        "bowl-rivals",
        "Rivals on the noisy quadratic bowl",
        "beyond the paper: today's optimizers at tuned settings on its bowl, by what a step costs and takes",
        task="bowl",
        full=Size(evaluations=30_000, seeds=4),
        quick=Size(evaluations=4_000, seeds=2),
        path="beyond.rivals:RivalsExperiment",
    ),
    Entry(
        "rosenbrock",
        "Rosenbrock function",
        "Section 5.2 and its appendix: the table, the learning curves, the trajectories over the contours",
        task="rosenbrock",
        full=Size(evaluations=200, seeds=8),
        quick=Size(evaluations=200, seeds=2),
        path="paper.rosenbrock:RosenbrockExperiment",
    ),
    Entry(
        "mlp",
        "Small network on 8 x 8 digits",
        "beyond the paper: a small network on MNIST (or --data digits), each method at the best of six settings",
        task="mlp",
        full=Size(evaluations=3_000, seeds=4),
        quick=Size(evaluations=250, seeds=2),
        path="beyond.mlp:MlpExperiment",
    ),
    Entry(
        "mnist",
        "Image generation on MNIST",
        "Section 5.3: image generation, 94,696 weights; learning curves, test loss, drawn digits",
        task="mnist",
        full=Size(evaluations=300_000, seeds=8),
        quick=Size(evaluations=60, seeds=1),
        path="paper.mnist:MnistExperiment",
    ),
    Entry(
        "mnist-ablations",
        "Image generation on MNIST, LODO and its ablations",
        "Section 5.3: LODO-Diagonal, -Global, -Residuals, -No-Momentum and -SGD on image generation",
        task="mnist",
        full=Size(evaluations=300_000, seeds=8),
        quick=Size(evaluations=60, seeds=1),
        path="paper.mnist:AblationsExperiment",
    ),
    Entry(
        "mnist-momentum",
        "Image generation on MNIST, LODO's momentum",
        "Section 5.3, its last figure: the training loss against beta, eight values on a logarithmic grid",
        task="mnist",
        full=Size(evaluations=300_000, seeds=1),
        quick=Size(evaluations=60, seeds=1),
        path="paper.mnist:MomentumExperiment",
    ),
    Entry(
        "cifar10",
        "Image classification on CIFAR-10",
        "Section 5.4: ResNet-18 on CIFAR-10, 11 million weights; learning curves and test accuracy",
        task="cifar10",
        full=Size(evaluations=3_000, seeds=8),
        quick=Size(evaluations=30, seeds=1),
        path="paper.cifar10:Cifar10Experiment",
    ),
    Entry(
        "networks",
        "Eight networks, every optimizer tuned",
        "beyond the paper: eight real networks, ten optimizers at the best of ten settings each (--track tuned)",
        task="mlp",
        full=_NETWORKS,
        quick=_FEW_NETWORKS,
        path="beyond.networks.tracks:TunedTrack",
    ),
    Entry(
        "networks-untouched",
        "Eight networks, every optimizer as it comes",
        "the same networks, each library's own defaults against tuned AdamW (networks --track untouched)",
        task="mlp",
        full=_NETWORKS,
        quick=_FEW_NETWORKS,
        path="beyond.networks.tracks:UntouchedTrack",
    ),
    Entry(
        "networks-rates",
        "Eight networks over four decades of learning rates",
        "the same networks, the final loss against the learning rate (networks --track rates)",
        task="mlp",
        full=Size(evaluations=3_000, seeds=1, words="1,000 to 3,000 steps, 9 rates on 1 seed"),
        quick=Size(evaluations=150, seeds=1, words="150 steps of fewer networks and optimizers, 5 rates on 1 seed"),
        path="beyond.networks.rates:RatesTrack",
    ),
)
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
