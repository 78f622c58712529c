"""The engine of torch.compile: against the oracle, how often it compiles, what it keeps, where it is used.

Compiling takes seconds a function. So all settings are tested with the functions as they are written
("interpreted"), a few of them compiled, and the rest of them compiled in the slow tests.
"""

from __future__ import annotations

import copy
import logging
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from helpers import assert_agree, difference, natural, network, oracle_for, parameter, quadratic, same
from lodo import LODO, Mixing, Residual, memory_estimate
from lodo.engines import ReferenceEngine, check_backend, engine_for
from lodo.engines.compiled import engine as compiled_engine
from lodo.engines.compiled import graphs
from lodo.engines.compiled.engine import CompiledMixing, CompiledResidual

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # when Inductor is imported

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
FAMILIES = {
    "random": Mixing(3),
    "shuffle": Mixing(3, mixing="shuffle"),
    "blocks of 8": Mixing(2, 8, mixing="shuffle"),  # sums over blocks of more than 4 are written in another way
    "residual": Residual(3),
}
ROUNDED = "adam(moment_dtype='bfloat16')"
OPTIONS = {
    "paper": {},
    "sgd": {"meta_optimizer": "sgd", "meta_lr": 1e-2},
    "schedule-free": {"meta_optimizer": "schedule-free(window=7)"},
    "bfloat16": {"meta_optimizer": ROUNDED},
    "gate": {"momentum": "learned"},
    "guard": {"guard": True},
    "forgetful": {"save_activations": False},
    "forgetful schedule-free": {"save_activations": False, "meta_optimizer": "schedule-free", "momentum": "learned"},
    "robust": {"recipe": "robust"},
}
COMPILED = [("residual", "paper")]  # the others take minutes: they are slow tests
REST = [(family, name) for family in FAMILIES for name in OPTIONS if (family, name) not in COMPILED]


@pytest.fixture
def interpreted():
    with torch.compiler.set_stance("force_eager"):
        yield
    graphs.graph.cache_clear()  # what has only been interpreted has to be compiled at its next call


def optimizer(family, name, n=41, dtype=torch.float64):
    torch.manual_seed(5)
    x = parameter(n, dtype=dtype)
    rate = 0.02 if family == "residual" else 0.3
    options = {"lr": rate, "beta": 0.7, "preconditioner": FAMILIES[family], "backend": "compiled", **OPTIONS[name]}
    return x, LODO([x], **options)


def follow_the_oracle(family, name, steps=50, n=41, dtype=torch.float64):
    f, _ = quadratic(n, dtype=dtype)
    x, opt = optimizer(family, name, n, dtype)
    oracle = oracle_for(opt, x)
    before = opt._state(0)["theta"].clone()
    for _ in range(steps):
        opt.zero_grad()
        f(x).backward()
        opt.step()
        oracle.step(f)
    assert isinstance(network(opt).engine, CompiledResidual if family == "residual" else CompiledMixing)
    assert difference(before, opt._state(0)["theta"]) > 1e-3  # it did learn
    assert_agree(opt, x, oracle, TOLERANCE[dtype])
    return opt


def play(opt, x, steps, seed=0):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x.grad = torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x.dtype)
        opt.step()


# ---------------------------------------------------------------- against the oracle


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_interpreted(family, name):
    follow_the_oracle(family, name)


@pytest.mark.parametrize(("family", "name"), COMPILED)
def test_fifty_steps_compiled(family, name):
    follow_the_oracle(family, name)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), REST)
def test_the_other_settings_compiled(family, name):
    follow_the_oracle(family, name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["random", "shuffle", "residual"])
@pytest.mark.parametrize("name", ["paper", "schedule-free", "robust"])
def test_float32_compiled(family, name):
    follow_the_oracle(family, name, dtype=torch.float32)


@settings(max_examples=30)
@given(
    n=st.integers(1, 200),
    depth=st.integers(1, 5),
    block_size=st.integers(1, 17),
    width=st.sampled_from([1.0, 1.5, 2.0]),
    mixing=st.sampled_from(["random", "shuffle"]),
    save=st.booleans(),
)
def test_any_size_interpreted(n, depth, block_size, width, mixing, save):
    f, _ = quadratic(n)
    x = parameter(n)
    family = Mixing(depth, block_size, width, mixing)
    opt = LODO([x], lr=0.3, beta=0.5, preconditioner=family, backend="compiled", save_activations=save)
    oracle = oracle_for(opt, x)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(6):
            opt.zero_grad()
            f(x).backward()
            opt.step()
            oracle.step(f)
    assert_agree(opt, x, oracle, 1e-10)


# ---------------------------------------------------------------- compiling


def graphs_so_far():
    return counters["stats"]["unique_graphs"]


def test_nothing_is_compiled_again():
    """Not for another lr, beta, meta_lr or step, and not for another layer or a group of another size."""
    x, opt = optimizer("random", "paper")
    play(opt, x, 3)
    compiled = graphs_so_far()
    assert compiled > 0
    for step in range(12):
        group = opt.param_groups[0]
        group["lr"], group["beta"], group["meta_lr"] = 0.3 / (step + 1), 0.5 + 0.01 * step, 1e-3 / (step + 1)
        play(opt, x, 1)
    assert graphs_so_far() == compiled
    for n in (30, 100, 333):
        y = parameter(n)
        other = LODO([y], lr=0.1, preconditioner=Mixing(5), backend="compiled")
        play(other, y, 3)
    assert graphs_so_far() == compiled


@pytest.mark.parametrize("mixing", ["random", "shuffle"])
def test_each_function_is_compiled_once(mixing):
    """Whichever layer, size or place in memory it is called for first."""
    torch._dynamo.reset()
    graphs.graph.cache_clear()
    before = graphs_so_far()
    for n, depth in ((41, 2), (13, 3), (300, 1), (64, 3)):
        y = parameter(n)
        opt = LODO([y], lr=0.1, preconditioner=Mixing(depth, mixing=mixing), backend="compiled")
        play(opt, y, 3)
    assert graphs_so_far() - before == 3  # up, down and learning


def test_another_setting_is_another_graph():
    before = graphs.graph(compiled_engine.layers.rise, "cpu_float64_random_4")
    assert before is graphs.graph(compiled_engine.layers.rise, "cpu_float64_random_4")
    assert before is not graphs.graph(compiled_engine.layers.rise, "cpu_float64_random_8")


def test_options_for_a_device(monkeypatch):
    """None of GPUs' for CPUs, and none that this version of torch does not have."""
    from torch._inductor import config

    rows = "max_complex_pointwise_cat_inputs"
    assert graphs.options_for("rise", "cpu") == graphs.options_for("fall", "cpu")
    assert not graphs.options_for("rise", "cpu").keys() & {rows, *graphs._ON_DEVICES}
    assert rows not in graphs.options_for("fall", "cuda")
    monkeypatch.setattr(graphs, "_ROWS_ON_DEVICES", {"max_fusion_size": 7, "an_option_of_another_version": 0})
    assert graphs.options_for("rise", "cuda").items() >= {**graphs.OPTIONS, "max_fusion_size": 7}.items()
    assert all(hasattr(config, name) for name in graphs.options_for("rise", "cuda"))
    monkeypatch.setattr(graphs, "_ON_CPUS", {"cpp.simdlen": 256, "cpp.an_option_of_another_version": 0})
    monkeypatch.setattr(graphs, "trusted", lambda: False)
    assert graphs.options_for("rise", "cpu") == {**graphs.OPTIONS, "cpp.simdlen": 256}


@pytest.mark.parametrize(("capability", "asked", "expected"), [
    ("AVX512", None, True), ("AVX2", None, False), ("AVX512", False, False),
])  # fmt: skip
def test_no_trials_where_torch_uses_the_widest_vectors(capability, asked, expected, monkeypatch):
    """Unless somebody has said whether to use them."""
    from torch._inductor import config

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with config.patch({"cpp.vec_isa_ok": asked}):
        assert ("cpp.vec_isa_ok" in graphs.options_for("rise", "cpu")) == expected


def test_a_slow_first_call_says_that_it_compiles(monkeypatch, caplog):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def slow():
        time.sleep(2.2)

    first = graphs.Graph(slow, "test")
    with caplog.at_level(logging.WARNING, "lodo"):
        first()
    assert [r.getMessage() for r in caplog.records] == [
        "lodo: torch.compile compiles slow for this machine (once; the result is kept on disk) ..."
    ]
    first()
    assert len(caplog.records) == 1


def test_inside_a_compiled_function():
    """A user's compiled loop runs the step outside its graph; the step's own graphs are used there."""
    x, opt = optimizer("random", "paper")
    y, other = optimizer("random", "paper")

    @torch.compile(backend="eager")
    def twice(x):
        x.grad = x.detach().clone()
        opt.step()
        return 2 * x

    for _ in range(3):
        doubled = twice(x)
        y.grad = y.detach().clone()
        other.step()
    assert torch.equal(x, y)
    assert torch.equal(doubled, 2 * y)


# ---------------------------------------------------------------- what is kept


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", ["random", "shuffle", "residual"])
def test_resumed_bit_for_bit(family, name):
    x, opt = optimizer(family, name)
    play(opt, x, 5)
    y = torch.nn.Parameter(x.detach().clone())
    _, fresh = optimizer(family, name)
    resumed = LODO([y], **{k: getattr(fresh, k) for k in ("backend", "save_activations")},
                   **{k: v for k, v in fresh.param_groups[0].items() if k != "params"})  # fmt: skip
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    play(opt, x, 4, seed=1)
    play(resumed, y, 4, seed=1)
    assert torch.equal(x, y)
    assert same(opt.state_dict(), resumed.state_dict())


def test_resumed_bit_for_bit_compiled():
    x, opt = optimizer("random", "paper")
    play(opt, x, 5)
    y, resumed = optimizer("random", "paper")
    y.data.copy_(x.detach())
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    play(opt, x, 4, seed=1)
    play(resumed, y, 4, seed=1)
    assert torch.equal(x, y)
    assert same(opt.state_dict(), resumed.state_dict())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["theta", "momentum"])
def test_a_write_to_the_state_is_noticed(name):
    """Kept activations do not belong to a theta or a momentum that somebody has changed."""
    runs = []
    for save in (True, False):
        torch.manual_seed(2)
        x = parameter(30)
        opt = LODO([x], lr=0.3, preconditioner=Mixing(3), backend="compiled", save_activations=save)
        play(opt, x, 3)
        opt._state(0)[name].mul_(1.01)
        play(opt, x, 2, seed=1)
        runs.append(x)
    assert difference(*runs) < 1e-12


@pytest.mark.usefixtures("interpreted")
def test_activations_are_kept_and_used(monkeypatch):
    x, opt = optimizer("shuffle", "paper")
    play(opt, x, 2)
    engine = network(opt).engine
    assert engine._kept is not None
    calls = []  # only what is fed anew goes down in a step: not the last one again

    def counted(theta, y):
        calls.append(y)
        return CompiledMixing._down(engine, theta, y)

    monkeypatch.setattr(engine, "_down", counted)
    play(opt, x, 1)
    assert len(calls) == 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["random", "shuffle", "residual"])
@pytest.mark.parametrize("save", [True, False])
def test_the_estimate_is_what_is_taken(family, save):
    x = parameter(150, dtype=torch.float32)
    options = {"preconditioner": FAMILIES[family], "backend": "compiled", "save_activations": save}
    opt = LODO([x], lr=1e-3, **options)
    play(opt, x, 2)
    needed, state, kept = memory_estimate(150, **options), opt._state(0), network(opt).engine._kept
    assert needed.theta == state["theta"].nbytes
    assert needed.moments == state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
    assert needed.indices == sum(p.nbytes for p in network(opt).engine._P if p is not None)
    vectors = [] if kept is None else [*kept.a, *kept.c]
    assert needed.activations >= sum(v.nbytes for v in vectors) >= 0.8 * needed.activations
    assert (needed.activations > 0) == save


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("first", ["reference", "numba", "compiled"])
@pytest.mark.parametrize("second", ["reference", "numba", "compiled"])
def test_a_state_goes_from_engine_to_engine(first, second):
    runs = []
    for backends in (("reference", "reference"), (first, second)):
        torch.manual_seed(2)
        x = parameter(30)
        before, after = (LODO([x], lr=0.3, preconditioner=Mixing(3), backend=backend) for backend in backends)
        play(before, x, 4)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        play(after, x, 4, seed=1)
        runs.append((x, natural(after, after._state(0)["theta"])))
    assert all(difference(a, b) < 1e-12 for a, b in zip(*runs, strict=True))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["random", "shuffle", "residual"])
def test_the_norm_of_the_hypergradient(family):
    norms = []
    for backend in ("reference", "compiled"):
        x, _ = optimizer(family, "paper")
        opt = LODO([x], lr=0.02, preconditioner=FAMILIES[family], backend=backend)
        play(opt, x, 2)
        network(opt).engine.watched = True
        play(opt, x, 1)
        norms.append(network(opt).engine.hypergradient_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-10)


# ---------------------------------------------------------------- where it is used


def test_auto_is_compiled_on_cuda(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr("lodo.engines.missing_for", lambda device: "")
    assert engine_for(Mixing(), cuda) is CompiledMixing
    assert engine_for(Residual(), cuda) is CompiledResidual
    monkeypatch.setattr("lodo.engines.missing_for", lambda device: "Triton")
    assert engine_for(Mixing(), cuda) is ReferenceEngine


def test_compiled_is_chosen_on_the_cpu_only_by_name():
    cpu = torch.device("cpu")
    assert engine_for(Mixing(), cpu, "compiled") is CompiledMixing
    assert engine_for(Mixing(), cpu) is not CompiledMixing
    assert engine_for(Residual(), cpu) is ReferenceEngine


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(graphs, "has_triton_package", lambda: False)
    with pytest.raises(ValueError, match=r"backend='compiled' needs Triton.*'cuda'.*backend='auto' works without it"):
        check_backend("compiled", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"needs a CPU, or a device for which Inductor.*'meta'"):
        check_backend("compiled", torch.device("meta"))
    monkeypatch.setattr(graphs, "_has_cpp_compiler", lambda: False)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler.*CXX.*'cpu'"):
        LODO([parameter(3)], backend="compiled")
    monkeypatch.setattr(graphs, "has_triton_package", lambda: True)
    check_backend("compiled", torch.device("cuda"))
