"""What KronLODO does on several processes, over gloo on this machine: `python kron_ranks.py FOLDER WORLD...`.

The numbers of ranks are started one after the other, twice: in the first pass every check runs and checkpoints are
saved, in the second they are loaded, each on every other number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import gathered, rank, start, whole, world
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lodo
from lodo import KronLODO, planning

SMALL = {"refresh_every": 3, "weight_decay": 0.1}
BLOCK = [(192, 64), (192,), (64, 64), (64,), (256, 64), (256,), (64, 256), (64,), (64,), (64,)]
TRANSFORMER = [(84, 64), (64, 64), *BLOCK * 4, (64,), (64,), (84, 64), (84,)]  # the shapes of a character GPT


class Network(nn.Module):
    """Its tensors have 7, 6, 5, 8 and 1 rows: few ranks divide any of them, and some ranks hold nothing of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.kernel = nn.Conv1d(6, 5, 3)
        self.hidden = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.kernel(self.tokens(x).mT).tanh().mean(-1)
        return self.last(self.norm(self.hidden(x)))


def network(dtype: torch.dtype = torch.float64) -> Network:
    torch.manual_seed(3)
    return Network().to(dtype)


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range, own: bool = False) -> None:
    for t in steps:
        rng = torch.Generator().manual_seed(10 * t + (rank() if own else 0))
        x = torch.randint(7, (8, 6), generator=rng)
        opt.zero_grad()
        y = x.to(next(model.parameters()).dtype)
        (model(x) - y.sin().sum(1, keepdim=True)).square().mean().backward()
        opt.step()


def mesh() -> dist.DeviceMesh:
    return init_device_mesh("cpu", (world(),))


def sharded(over: dist.DeviceMesh | None = None, model: nn.Module | None = None, **options: object):
    model = network() if model is None else model
    fully_shard(model, mesh=over or mesh())
    return model, KronLODO(model.parameters(), **{**SMALL, **options})


def alone(steps: range, model: nn.Module | None = None, **options: object):
    """The same training in one process, which every rank does for itself."""
    model = network() if model is None else model
    opt = KronLODO(model.parameters(), **{**SMALL, **options})
    train(model, opt, steps)
    return model, opt


def same(one: nn.Module, other: nn.Module, rtol: float = 0.0) -> bool:
    pairs = zip(whole(one), whole(other), strict=True)
    return all(torch.equal(a, b) if rtol == 0 else torch.allclose(a, b, rtol=rtol, atol=rtol) for a, b in pairs)


def held(opt: KronLODO) -> int:
    """The bytes of state on this rank."""
    tensors = [x for state in opt.state.values() for x in state.values() if x.dim() and any(x.stride())]
    return sum(x.numel() * x.element_size() for x in tensors)


@contextlib.contextmanager
def counting():
    """Counts the messages that this rank sends, and their bytes."""
    found, original = {"messages": 0, "bytes": 0}, dist.all_to_all_single

    def counted(received, sent, coming, going, **rest):
        found["messages"] += world() - 1
        found["bytes"] += sum(going) - going[rank()]
        return original(received, sent, coming, going, **rest)

    dist.all_to_all_single = counted
    try:
        yield found
    finally:
        dist.all_to_all_single = original


@contextlib.contextmanager
def rounds_of(size: int):
    """Small rounds, so that there are several."""
    before, planning.ROUND = planning.ROUND, size
    try:
        yield
    finally:
        planning.ROUND = before


def tensors(shapes, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in shapes]


def random_steps(params, opt, steps: range) -> None:
    for t in steps:
        rng = torch.Generator().manual_seed(t)
        for p in params:
            p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)
        opt.step()


# ---------------------------------------------------------------- DDP


def check_ddp_takes_the_same_steps_and_sends_nothing() -> None:
    model = DistributedDataParallel(network(torch.float32))
    opt = KronLODO(model.parameters(), **SMALL)
    train(model, opt, range(1), own=True)
    step, opt.step = opt.step, lambda: None
    for t in range(1, 20):
        train(model, opt, range(t, t + 1), own=True)
        names = ("all_to_all_single", "all_reduce", "all_gather", "all_gather_object", "broadcast", "send", "barrier")
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(dist, name, None)
            step()
    states = [x for state in opt.state.values() for x in state.values()]
    for x in (*whole(model), *states):
        assert all(torch.equal(x, other) for other in gathered(x.contiguous()))


def check_ranks_that_drift_apart_are_named() -> None:
    model = DistributedDataParallel(network())
    opt = KronLODO(model.parameters(), lr=0.0, check_sync_every=2)
    train(model, opt, range(4), own=True)
    if rank() == world() - 1:
        opt.state[model.module.hidden.weight]["exp_avg"][0, 0] += 1e-9
    train(model, opt, range(4, 5), own=True)
    if world() > 1:
        with pytest.raises(RuntimeError, match=rf"apart .*: rank {world() - 1} in .*exp_avg of parameter 3 of group 0"):
            train(model, opt, range(5, 6), own=True)


def check_a_divided_step_equals_an_undivided_one() -> None:
    """Bit for bit, whatever the options."""
    for options, dtype, size in (
        ({"weight_decay": 0.1}, torch.float32, 2**22),
        ({"weight_decay": 0.1, "backend": "reference"}, torch.float32, 20_000),
        ({"weight_decay": 0.1, "backend": "reference"}, torch.bfloat16, 2**22),
        ({"state_dtype": "bfloat16", "max_dim": 64}, torch.bfloat16, 20_000),
        ({"basis": "orthogonal", "weight_decay": 0.1}, torch.float32, 2**22),
        ({"basis": "none", "gains": False, "maximize": True}, torch.float32, 2**22),
        ({}, torch.complex64, 2**22),
    ):
        shapes = [*TRANSFORMER, (384, 400)] if dtype == torch.float32 else TRANSFORMER  # the last is a large one
        ours, theirs = tensors(shapes, dtype), tensors(shapes, dtype)
        with rounds_of(size):
            a = KronLODO(ours, **options, distribute=True, check_sync_every=3)
            b = KronLODO(theirs, **options)
            random_steps(ours, a, range(5))
            random_steps(theirs, b, range(5))
        assert all(map(torch.equal, ours, theirs)), (options, dtype)
        assert held(a) < held(b) or world() == 1
        assert a.memory_estimate().total == pytest.approx(held(a), rel=0.05)


def check_ddp_divides_work() -> None:
    """With DDP's own gradients, and different data on every rank; a group is added, and others are frozen."""
    models = [DistributedDataParallel(network()) for _ in range(2)]
    opts = [KronLODO(m.module.tokens.parameters(), **SMALL, distribute=m is models[0]) for m in models]
    for t in range(12):
        for model, opt in zip(models, opts, strict=True):
            if t == 5:
                opt.add_param_group({"params": list(model.module.hidden.parameters()), "lr": 1e-2})
            train(model, opt, range(t, t + 1), own=True)
    assert same(*models)
    for opt in opts:
        opt.state_dict()
    twin = copy.deepcopy(opts[0])
    assert held(twin) == held(opts[0])


def check_state_is_divided_evenly() -> None:
    """Of a transformer, in bytes: bases, covariances, averages and the last step."""
    opts = [KronLODO(tensors(TRANSFORMER), distribute=distribute) for distribute in (True, False)]
    for opt in opts:
        random_steps(opt.param_groups[0]["params"], opt, range(1))
    assert held(opts[0]) / held(opts[1]) <= 1 / world() + 0.05


# ---------------------------------------------------------------- FSDP2 and tensor parallelism


def check_fsdp_equals_one_process() -> None:
    for options in ({}, {"basis": "orthogonal"}, {"max_dim": 6, "gate": False}):
        for size in (2**22, 30):
            with rounds_of(size):
                model, opt = sharded(**options)
                train(model, opt, range(12))
                single, _ = alone(range(12), **options)
                assert same(model, single, 1e-9)
                assert not same(model, network())
                if options == {} and world() == 2:
                    assert same(model, single)  # the mean of two equal gradients is exact


def check_fsdp_is_exact_for_its_gradients() -> None:
    """Bit for bit as one process that is given the gradients that FSDP2 has reduced, also in short precision."""
    for dtype in (torch.float32, torch.bfloat16):
        model, opt = sharded(model=network(dtype))
        twin = network(dtype)
        other = KronLODO(twin.parameters(), **SMALL)

        def follow(*_, ours=model, theirs=twin, other=other) -> None:
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                q.grad = p.grad.full_tensor().clone()
            other.step()

        opt.register_step_pre_hook(follow)
        train(model, opt, range(10), own=True)
        assert same(model, twin)
        assert not same(model, network(dtype))


def check_hsdp() -> None:
    """Meshes of replicas and shards: a tensor has one owner among all ranks."""
    single, other = alone(range(8))
    shapes = [(2, world() // 2)] if world() % 2 == 0 else []
    for shape in [(world(), 1), (1, world()), *shapes]:
        model, opt = sharded(init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")))
        train(model, opt, range(8))
        assert same(model, single, 1e-9)
        total = torch.tensor(held(opt))
        dist.all_reduce(total)
        assert int(total) == held(other) * (1 if shape[1] > 1 else world())
        full = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
        assert torch.allclose(full["state"]["last.weight"]["exp_avg"], other.state[single.last.weight]["exp_avg"])


def check_offloading_and_clipping() -> None:
    model, opt = sharded()
    twin = network()
    fully_shard(twin, mesh=mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    both = ((model, opt), (twin, KronLODO(twin.parameters(), **SMALL)))
    for t in range(5):
        for one, each in both:
            each.register_step_pre_hook(lambda *_, m=one: nn.utils.clip_grad_norm_(m.parameters(), 0.5) and None)
            train(one, each, range(t, t + 1))
    assert same(model, twin)


def check_tensor_parallelism() -> None:
    """Columns of one layer, rows of the next; what is not parallel is on every rank."""

    def layers():
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 1)).double()

    for distribute in (False, True):
        model = parallelize_module(layers(), mesh(), {"2": ColwiseParallel(), "4": RowwiseParallel()})
        opt = KronLODO(model.parameters(), **SMALL, distribute=distribute)
        train(model, opt, range(10))
        single, _ = alone(range(10), layers())
        assert same(model, single, 1e-9)
        assert world() == 1 or any(isinstance(p, DTensor) and p.placements[0].is_shard(1) for p in model.parameters())


def check_tensor_parallelism_with_fsdp() -> None:
    if world() != 4:
        return
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    single, _ = alone(range(8), copy.deepcopy(layers))
    over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    parallelize_module(layers, over["model"], {"2": ColwiseParallel(), "4": RowwiseParallel()})
    fully_shard(layers, mesh=over["data"])
    opt = KronLODO(layers.parameters(), **SMALL)
    train(layers, opt, range(8))
    assert same(layers, single, 1e-9)
    get_optimizer_state_dict(layers, opt)


def check_gradients_are_laid_out_as_their_parameters() -> None:
    """A replicated parameter, whose gradient is a sum over ranks that was not taken yet."""
    x = nn.Parameter(distribute_tensor(torch.ones(4, 3, dtype=torch.float64), mesh(), [Replicate()]))
    y = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    a, b = KronLODO([x]), KronLODO([y])
    for _ in range(3):
        x.grad = DTensor.from_local(torch.full((4, 3), float(rank() + 1)).double(), mesh(), [Partial()])
        y.grad = torch.full((4, 3), float(sum(range(1, world() + 1)))).double()
        a.step()
        b.step()
    assert torch.equal(x.to_local(), y)


def check_different_parameters_are_refused() -> None:
    if world() > 1:
        opt = KronLODO(tensors([(2, 3), (4 + (rank() == 1), 2)]), distribute=True)
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match=r"all ranks need the same parameters .* rank \d has parameter 1"):
            opt.step()


# ---------------------------------------------------------------- gradients that cannot be used


def check_a_gradient_that_is_not_finite_stops_every_rank() -> None:
    for way in ("skip", "raise"):
        model, opt = sharded(nonfinite=way)
        train(model, opt, range(3))
        learned = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
        before = [x.clone() for x in whole(model)]
        opt.register_step_pre_hook(lambda *_, m=model: _spoil(m) if rank() == 0 else None)
        with counting() as found:
            if way == "skip":
                train(model, opt, range(3, 4))
                assert opt.skipped_steps == 1
            else:
                named = rank() == 0 or world() == 1
                message = (
                    r"the gradient of parameter 0 .* is not finite" if named else "gradient on rank 0 is not finite"
                )
                with pytest.raises(FloatingPointError, match=message):
                    train(model, opt, range(3, 4))
        assert found["messages"] == (world() - 1)  # those with the first gradients, and no others
        assert all(map(torch.equal, whole(model), before))
        after = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True))
        for name, state in learned["state"].items():
            assert all(torch.equal(x, after["state"][name][what]) for what, x in state.items() if what != "skipped")
        opt._optimizer_step_pre_hooks.clear()
        train(model, opt, range(4, 6))
        assert not all(map(torch.equal, whole(model), before))


def _spoil(model: nn.Module) -> None:
    grad = next(model.parameters()).grad
    (grad.to_local() if isinstance(grad, DTensor) else grad)[0] = float("nan")


def check_under_ddp_all_ranks_refuse_or_none() -> None:
    params = tensors(TRANSFORMER[:6])
    opt = KronLODO(params, distribute=True, nonfinite="skip")
    random_steps(params, opt, range(2))
    before = [p.detach().clone() for p in params]
    params[2].grad[0, 0] = float("inf")
    opt.step()
    assert opt.skipped_steps == 1
    assert all(map(torch.equal, params, before))
    random_steps(params, opt, range(3, 4))
    assert not torch.equal(params[0], before[0])
    if world() > 1:
        if rank() == world() - 1:
            params[2].grad[0, 0] = float("nan")
        with pytest.raises(RuntimeError, match=rf"on rank {world() - 1} is not finite .* need the same gradients"):
            opt.step()


# ---------------------------------------------------------------- what is planned is what happens


def check_a_plan_counts_what_is_sent_and_held() -> None:
    class Tensors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(tensors(TRANSFORMER))

        def forward(self) -> torch.Tensor:
            return sum((p * p).sum() for p in self.all)

    for is_sharded, size in product((True, False), (2**22, 40_000)):
        with rounds_of(size):
            model = Tensors()
            planned = lodo.plan(model, world=world(), sharded=is_sharded)
            if is_sharded:
                fully_shard(model, mesh=mesh())
            opt = KronLODO(model.parameters(), distribute=not is_sharded)
            for _ in range(2):
                opt.zero_grad()
                model().backward()
                with counting() as found:
                    opt.step()
        assert found["messages"] == planned.messages
        counted = torch.tensor([found["bytes"], held(opt)])
        everyone = gathered(counted)
        assert max(int(x[0]) for x in everyone) == planned.most_bytes
        assert sum(int(x[0]) for x in everyone) == planned.bytes
        numbers = sum(planned.owners.count(r) for r in range(world())) * 4 * 20
        assert planned.state - numbers <= sum(int(x[1]) for x in everyone) <= planned.state
        assert 0 <= planned.most_state - max(int(x[1]) for x in everyone) <= numbers
        assert planned.state_share <= 1 / world() + 0.05
        assert planned.bytes <= 2.1 * max(planned.gradient_bytes, 1)


# ---------------------------------------------------------------- checkpoints


def made(mode: str):
    if mode == "fsdp":
        return sharded()
    model = network()
    return model, KronLODO(model.parameters(), **SMALL, distribute=mode == "divided")


MODES = ("fsdp", "divided", "ddp")
SAVED = (("fsdp", "nested"), ("fsdp", "flat"), ("divided", "nested"), ("ddp", "flat"))
HOWS = {"nested": {}, "flat": {"flatten_optimizer_state_dict": True}}


def check_checkpoints_are_saved(folder: Path) -> None:
    for mode, how in SAVED:
        model, opt = made(mode)
        train(model, opt, range(5))
        state = get_optimizer_state_dict(model, opt, options=StateDictOptions(**HOWS[how]))
        dcp.save({"model": get_model_state_dict(model), "opt": state}, checkpoint_id=folder / f"{mode} {how}")
    model, opt = made("fsdp")
    train(model, opt, range(5))
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, opt, options=full), get_model_state_dict(model, options=full)
    if rank() == 0:
        torch.save(state, folder / "full.pt")


def load_checkpoints_go_on_anywhere(folder: Path) -> None:
    """As if nothing had happened, whoever saved them: in all modes what as many ranks saved, in one what others did."""
    single, after = alone(range(10))
    places = [path for path in sorted(folder.parent.glob("*/* *")) if path.is_dir()]
    for number, place in enumerate(places):
        options = StateDictOptions(**HOWS[place.name.split()[1]])
        for mode in MODES if place.parent == folder else [MODES[(number + world()) % 3]]:
            model, opt = made(mode)
            state = get_optimizer_state_dict(model, opt, options=options)
            read = {"model": get_model_state_dict(model), "opt": state}
            dcp.load(read, checkpoint_id=place)
            set_model_state_dict(model, read["model"])
            set_optimizer_state_dict(model, opt, read["opt"], options=options)
            train(model, opt, range(5, 10))
            assert same(model, single, 1e-9), (place, mode)
            assert opt.param_groups[0]["steps"] == after.param_groups[0]["steps"]


def load_full_states(folder: Path) -> None:
    single, _ = alone(range(10))
    for place in sorted(folder.parent.glob("*/full.pt")):
        state, weights = torch.load(place, weights_only=True)
        for mode in MODES:
            model, opt = made(mode)
            full = StateDictOptions(full_state_dict=True)
            set_model_state_dict(model, copy.deepcopy(weights), options=full)
            set_optimizer_state_dict(model, opt, copy.deepcopy(state), options=full)
            train(model, opt, range(5, 10))
            assert same(model, single, 1e-9), (place, mode)


def load_resumes_bit_for_bit(folder: Path) -> None:
    for mode in MODES:
        straight, resumed = made(mode), made(mode)
        train(*straight, range(5))
        state = get_optimizer_state_dict(*straight)
        set_model_state_dict(resumed[0], get_model_state_dict(straight[0]))
        set_optimizer_state_dict(*resumed, state)
        train(*straight, range(5, 10))
        train(*resumed, range(5, 10))
        assert same(straight[0], resumed[0])


def load_damaged_states_are_refused_on_every_rank(folder: Path) -> None:
    model, opt = made("fsdp")
    train(model, opt, range(2))
    state = copy.deepcopy(opt.state_dict())
    entry = state["state"][0]["exp_avg"]
    if rank() == 0:
        (entry.to_local() if isinstance(entry, DTensor) else entry)[0] = float("nan")
    before = held(opt)
    with pytest.raises(ValueError, match="not finite: it is damaged"):
        opt.load_state_dict(state)
    assert held(opt) == before
    train(model, opt, range(2, 4))


def named(prefix: str):
    return {name.removeprefix(prefix): value for name, value in globals().items() if name.startswith(prefix)}


PASSES = {"check": named("check_"), "load": named("load_")}

if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    target, *worlds = sys.argv[1:]
    for checks in PASSES.values():
        for number in map(int, worlds):
            start(number, Path(target) / str(number), checks)
