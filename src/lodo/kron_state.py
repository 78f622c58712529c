"""What KronLODO keeps for a parameter: made, checked, loaded, measured; and the checks of its options."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import StateDict

from lodo._checks import check_betas, check_bool, check_choice, check_int, check_real
from lodo.distributed import local, whole
from lodo.estimate import readable
from lodo.group import Options, check_resolved, name_of
from lodo.layout import real
from lodo.meta import BETA1
from lodo.recipes import check_lr
from lodo.scalars import Scalar, logarithm, over, smallest
from lodo.stacks import State, matrix_shape, state_dtype

FIRST = 3e-3  # the largest lr e^c of a first step
MAX_DIM = 1024  # the default of `max_dim`
BASES = ("kronecker", "orthogonal", "none")
STRUCTURE = (
    "basis",
    "gains",
    "gate",
    "max_dim",
    "guard",
    "state_dtype",
)  # what a state consists of depends on these
LOPSIDED = 16  # how many times the other dimension a dimension may be and still have a basis
SHORT = {  # what may have 16 bits; bases, whose entries are at most 1, need precision rather than range
    "exp_avg": torch.bfloat16,
    "exp_avg_sq": torch.bfloat16,
    "direction": torch.bfloat16,
    "left_basis": torch.float16,
    "right_basis": torch.float16,
}

KINDS = {  # what the tensors of a state are, as fields of `KronMemory`
    "exp_avg": "averages",
    "exp_avg_sq": "averages",
    "scaled_grad": "directions",
    "direction": "directions",
    "left_basis": "bases",
    "right_basis": "bases",
    "left_covariance": "covariances",
    "right_covariance": "covariances",
}


def outline(p: Tensor) -> Tensor:
    """A whole tensor like a parameter, without contents; of a DTensor too.

    >>> outline(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    return torch.empty(p.shape, dtype=p.dtype, device="meta")


def fresh_state(p: Tensor, options: Options) -> State:
    """The state of a parameter before its first step."""
    shape = matrix_shape(p)
    is_orthogonal = options["basis"] == "orthogonal" and shape[0] > 1  # a vector takes Adam's direction
    numbers = ["step", "skipped", "mean_decay", "square_decay"] + (["norm_sq"] if options["guard"] else [])
    matrices = ["exp_avg"] if is_orthogonal else ["exp_avg", "exp_avg_sq"]
    if options["gains"]:
        numbers += ["gain", "gain_exp_avg", "gain_exp_avg_sq", "gain_highest", "length"]
    if _gated(options):
        numbers += ["gate", "gate_exp_avg", "gate_exp_avg_sq"] + ([] if options["gains"] else ["length"])
        matrices += ["scaled_grad"]
    if options["gains"] and is_orthogonal:
        matrices += ["direction"]

    def zeros(name: str, *size: int) -> Tensor:
        return torch.zeros(size, dtype=stored_dtype(name, p, options), device=p.device)

    state = {name: zeros(name) for name in numbers} | {name: zeros(name, *shape) for name in matrices}
    for name in {"mean_decay", "square_decay", "gate"} & state.keys():
        state[name].fill_(1)
    for name in {"gain", "gain_highest"} & state.keys():
        state[name].fill_(first_gain(options["lr"]))
    if options["basis"] == "kronecker":  # vectors keep the identity: their covariance would be as large as a matrix
        state.setdefault("norm_sq", zeros("norm_sq"))
        for side, d, other in zip(("left", "right"), shape, shape[::-1], strict=True):
            if has_basis(d, other, options["max_dim"]) and real(p).dim() > 1:
                state[f"{side}_covariance"] = zeros(f"{side}_covariance", d, d)
                state[f"{side}_basis"] = zeros(f"{side}_basis", d, d)
                state[f"{side}_basis"].fill_diagonal_(1)
    return state


def has_basis(d: int, other: int, max_dim: int) -> bool:
    """Whether a dimension has a basis: a very long one of a matrix would be far larger than the matrix itself.

    >>> has_basis(160, 10, max_dim=1024), has_basis(161, 10, max_dim=1024)
    (True, False)
    """
    return 1 < d <= min(max_dim, LOPSIDED * other)


def first_gain(lr: Scalar) -> Scalar:
    """Where c starts: at 0, or lower if lr is so large that the first steps could ruin the first weights.

    >>> first_gain(1e-3), round(first_gain(3e-2), 3)
    (0.0, -2.303)
    """
    return smallest(0.0, logarithm(over(FIRST, lr)))


def stored_dtype(name: str, p: Tensor, options: Options) -> torch.dtype:
    """The dtype in which a tensor of a parameter's state is stored.

    >>> [stored_dtype(name, torch.zeros(2, 3), {"state_dtype": "bfloat16"}) for name in ("exp_avg", "left_basis")]
    [torch.bfloat16, torch.float16]
    """
    exact, short = state_dtype(p), options["state_dtype"] is not None
    if name == "scaled_grad" and (short or exact == torch.float32):
        return torch.int8
    return SHORT.get(name, exact) if short else exact


def _gated(options: Options) -> bool:
    """Whether a gate is learned; an orthogonal direction is no simple function of it."""
    return bool(options["gate"]) and options["basis"] != "orthogonal"


def check_state(groups: Sequence[Options], loaded: StateDict) -> None:
    """Raise an error unless a loaded state belongs to these groups."""
    theirs = loaded["param_groups"]
    if any("basis" not in other or "gains" not in other for other in theirs):
        raise ValueError("the state must be one of KronLODO, got that of another optimizer")
    if len(theirs) != len(groups):
        raise ValueError(f"the state has {len(theirs)} parameter groups, this optimizer has {len(groups)}")
    for index, (ours, other) in enumerate(zip(groups, theirs, strict=True)):
        if len(other["params"]) != len(ours["params"]):
            raise ValueError(
                f"group {index} of the state has {len(other['params'])} parameters, ours has {len(ours['params'])}"
            )
        other = {"state_dtype": None, "guard": True, **other}  # which states saved before there were these lack
        for name in STRUCTURE:
            if name not in other or other[name] != ours[name]:
                raise ValueError(f"group {index} of the state has {name} = {other.get(name)!r}, ours is {ours[name]!r}")
        for j, (p, key) in enumerate(zip(ours["params"], other["params"], strict=True)):
            if key in loaded["state"]:
                _check_entry(name_of(ours, index, j), fresh_state(outline(p), ours), loaded["state"][key])


def _check_entry(name: str, expected: State, found: State) -> None:
    for what, like in expected.items():
        value = found.get(what)
        value = torch.tensor(value) if isinstance(value, (int, float)) else value
        if not isinstance(value, Tensor) or value.shape != like.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else None
            raise ValueError(f"the state of {name} has {what} of shape {shape}, but {tuple(like.shape)} is needed")
        if not bool(torch.isfinite(local(value)).all()):
            raise ValueError(f"the state of {name} has numbers in {what} that are not finite: it is damaged")


def restored(p: Parameter, options: Options, loaded: State) -> State:
    """A copy of a loaded state in the dtypes and on the device of the parameter's own."""
    unit = unit_of(options["betas"][1])
    found = {}
    for name, given in loaded.items():
        value, dtype = torch.as_tensor(whole(given)).to(p.device), stored_dtype(name, p, options)
        if name == "scaled_grad" and value.dtype != dtype:
            value = coded(decoded(value, state_dtype(p), unit), dtype, unit)
        found[name] = value.to(dtype, copy=True)
    return found


# ---------------------------------------------------------------- scaled gradients in 8 bits


def unit_of(beta2: float) -> float:
    """What the 1 of a scaled gradient U = X / R in 8 bits means.

    At first V contains (1 - beta2) X^2, so no entry of U is larger than 1 / sqrt(1 - beta2); later the guard sees to
    that (`lodo.kron_learning.limit_of`). That is the 127. U is kept only
    for its inner product with the next gradient, in which the errors of rounding nearly cancel.

    >>> unit_of(0.95) * 127
    4.4721359549995...
    """
    return 1 / (127 * math.sqrt(1 - beta2))


def coded(U: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
    """Scaled gradients as they are stored: exactly, or in 8 bits.

    >>> coded(torch.tensor([0.26, -9.0]), torch.int8, 0.1)
    tensor([  3, -90], dtype=torch.int8)
    """
    return (U / unit).round_().clamp_(-127, 127).to(dtype) if dtype == torch.int8 else U


def decoded(U: Tensor, dtype: torch.dtype, unit: float) -> Tensor:
    """What `coded` has stored.

    >>> decoded(torch.tensor([3], dtype=torch.int8), torch.float32, 0.1)
    tensor([0.3000])
    """
    return U.to(dtype) * unit if U.dtype == torch.int8 else U


class KronMemory(NamedTuple):
    """Bytes of state between steps, by what they are for."""

    averages: int  # M and V
    directions: int  # what is kept of the last step
    bases: int
    covariances: int
    numbers: int  # gains, gates and the like

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {readable(size)}" for name, size in zip(self._fields, self, strict=True))
        return f"{readable(self.total)} ({parts})"


def memory_of(p: Tensor, options: Options) -> KronMemory:
    """The memory of a parameter's state.

    >>> options = {"lr": 3e-3, "basis": "kronecker", "gains": True, "gate": True, "max_dim": 1024}
    >>> options |= {"guard": True, "state_dtype": None}
    >>> memory_of(torch.empty(768, 768), options).total // 768**2  # M, V, U, two bases, two covariances; U has 8 bits
    25
    >>> memory_of(torch.empty(768, 768), {**options, "state_dtype": "bfloat16"}).total // 768**2
    17
    """
    sizes = dict.fromkeys(KronMemory._fields, 0)
    for name, value in fresh_state(outline(p), options).items():
        sizes[KINDS.get(name, "numbers")] += value.numel() * value.element_size()
    return KronMemory(**sizes)


def diagnose(options: Options, state: State) -> dict[str, float]:
    """A parameter's numbers, as `KronLODO.diagnostics` explains them."""
    numbers = {}
    gain = float(state["gain"].exp()) if "gain" in state else 1.0
    if "gain" in state:
        t = float(state["step"]) - 1
        numbers["gain"] = gain
        numbers["alignment"] = -float(state["gain_exp_avg"]) / (1 - BETA1**t) if t > 0 else math.nan
    if "gate" in state:
        numbers["gate"] = float(state["gate"])
    if "length" in state:
        numbers["step_norm"] = float(options["lr"]) * gain * float(state["length"])
    for side in ("left", "right"):
        if f"{side}_basis" in state:
            A = state[f"{side}_covariance"]
            P = state[f"{side}_basis"].to(A.dtype)
            values = (P * (A @ P)).sum(-2).clamp(min=0)
            numbers[f"{side}_condition"] = float(values.max() / values.min())
    return numbers


# ---------------------------------------------------------------- options


def spelled_dtype(given: object) -> object:
    """One spelling of ``state_dtype``, which can be saved.

    >>> spelled_dtype(torch.bfloat16)
    'bfloat16'
    """
    return "bfloat16" if given == torch.bfloat16 else given


def with_plain_rate(options: Options) -> Options:
    """Options in which an ``lr`` in a tensor has no dimensions; it shares the memory of the one that was given.

    >>> with_plain_rate({"lr": torch.tensor([0.5])})
    {'lr': tensor(0.5000)}
    """
    return {**options, "lr": options["lr"].reshape(())} if isinstance(options.get("lr"), Tensor) else options


def check_options(options: Options) -> None:
    """Raise an error that names the option, its value and what is allowed."""
    check_lr(options["lr"])
    for name in ("meta_lr", "gate_lr", "weight_decay"):
        check_real(name, options[name], low=0.0)
    check_real("eps", options["eps"], low=0.0, open_low=True)
    check_betas(options["betas"])
    for name in ("maximize", "gains", "gate", "guard"):
        check_bool(name, options[name])
    check_choice("basis", options["basis"], BASES)
    if options["state_dtype"] not in (None, "bfloat16"):
        raise ValueError(
            "state_dtype must be 'bfloat16' or torch.bfloat16, or None for float32 (float64 for double precision), "
            f"got {options['state_dtype']!r}"
        )
    check_real("averaging", options["averaging"], low=0.0, high=1.0)
    anneal = options["anneal"]
    if isinstance(anneal, bool) or not isinstance(anneal, Real) or not float(anneal) >= 0:
        raise ValueError(f"anneal must be a number >= 0 or math.inf, got {anneal!r}")
    check_int("max_dim", options["max_dim"], low=0)
    check_int("refresh_every", options["refresh_every"], low=1)


def check_params(options: Options, index: int) -> None:
    """Raise an error that names the parameter unless all can be trained."""
    for j, p in enumerate(options["params"]):
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(
                f"KronLODO trains floating-point and complex tensors, but {name_of(options, index, j)} is {p.dtype}"
            )
        check_resolved(options, index, j)


def made(options: Options) -> list[Parameter]:
    """The parameters of a group but those of lazy modules that have no shape yet.

    >>> made({"params": [*torch.nn.LazyLinear(3).parameters(), *torch.nn.Linear(1, 1, bias=False).parameters()]})
    [Parameter containing:
    tensor([[...]], requires_grad=True)]
    """
    return [p for p in options["params"] if not is_lazy(p)]


def warn_of_width(options: Options, index: int) -> None:
    """Warn if the default of ``max_dim`` leaves most of a group without bases, which nobody would have chosen."""
    if options["basis"] != "kronecker" or options["max_dim"] != MAX_DIM:
        return
    matrices = [(matrix_shape(p), p.numel()) for p in made(options) if real(p).dim() > 1]
    wide = [(min(shape), size) for shape, size in matrices if min(shape) > MAX_DIM]
    if 2 * sum(size for _, size in wide) > sum(size for _, size in matrices):
        warnings.warn(
            f"{len(wide)} of {len(matrices)} matrices of group {index} have no bases: both dimensions are above "
            f"max_dim = {MAX_DIM}, so that steps are Adam's there. Pass max_dim={max(wide)[0]} to give them bases; "
            "lodo.plan says what that costs",
            stacklevel=5,
        )


def check_structure(options: Options, index: int, before: Options) -> None:
    """Raise an error if somebody has changed an option that decides what the state consists of.

    >>> check_structure({"gains": False}, 0, {"gains": True})
    Traceback (most recent call last):
    ...
    ValueError: gains of group 0 must stay True, which its state is made for, got False; make a new optimizer for that
    """
    for name, value in before.items():
        if options[name] != value:
            raise ValueError(
                f"{name} of group {index} must stay {value!r}, which its state is made for, got {options[name]!r}; "
                "make a new optimizer for that"
            )


def check_rate(options: Options, index: int) -> None:
    """Raise an error if somebody has set a rate that cannot be used; one on a device is not waited for."""
    lr = options["lr"]
    if not isinstance(lr, Tensor):
        check_real(f"lr of group {index}", lr, low=0.0)
    elif lr.device.type == "cpu":
        check_real(f"lr of group {index}", lr.item(), low=0.0)
