"""The fused kernels beyond their agreement with the oracle: threads, cache, messages, absence.

Compiling a kernel takes up to a minute, and there is one for each mixing, dtype of theta and dtype of the moments, for
one thread and for many. By default the tests share two of them: random permutations with moments in theta's dtype, and
shuffles with moments in bfloat16. The other pairs have no code of their own; they are tested too, and marked slow.
"""

from __future__ import annotations

import ast
import errno
import importlib
import logging
import mmap
import os
import re
import subprocess
import sys
import textwrap
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import CodeType, FunctionType, SimpleNamespace

import numba
import pytest
import torch
from numba.core import caching
from numba.core.dispatcher import Dispatcher

from helpers import difference, natural, network, same
from lodo import LODO, KronLODO, Mixing, _notice, elementwise, kron_formulas
from lodo.engines import engine_for
from lodo.engines.numba import compiling, feeding, formulas, kron, mixing, pages, permuted, scaling, shuffled, tiles
from lodo.engines.numba.compiling import Kernel, version_of
from lodo.meta import Adam

KERNELS = [*mixing._ADVANCE.values(), *mixing._APPLY.values()]
BFLOAT16 = {"meta_optimizer": Adam(moment_dtype="bfloat16")}


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip


@contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------- threads


def train(number, n=9000, depth=4, mixing="random", backend="numba", dtype=torch.float32, **options):
    """x, a product with G, the norm of the last hypergradient, and the state in natural order, after five steps."""
    with threads(number):
        x = torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype))
        opt = LODO([x], lr=0.3, preconditioner=Mixing(depth, mixing=mixing), backend=backend, **options)
        for step in range(5):
            x.grad = torch.linspace(0.1, 1, n, dtype=dtype) * x.detach()
            network(opt).engine.watched = step == 4
            opt.step()
        product = opt.precondition(torch.linspace(-1, 1, n, dtype=dtype))
        weights = ("theta", "exp_avg", "exp_avg_sq", "z")
        state = {k: natural(opt, v) if k in weights else v for k, v in opt._state(0).items() if k != "last_step"}
        return x.detach(), product, network(opt).engine.hypergradient_norm, state


LARGE = {
    "paper": {},
    "gate": {"momentum": "learned"},
    "schedule-free": {"meta_optimizer": "schedule-free"},
    "forgetful": {"save_activations": False},
    "gate, forgetful schedule-free": {
        "momentum": "learned", "meta_optimizer": "schedule-free", "save_activations": False,
    },
}  # fmt: skip
OTHER_PAIRS = {
    "robust": {"recipe": "robust", "mixing": "shuffle"},
    "shuffle, bfloat16": {"mixing": "shuffle", **BFLOAT16},
    "shuffle": {"mixing": "shuffle"},
    "forgetful shuffle": {"save_activations": False, "mixing": "shuffle"},
    "gate, schedule-free, shuffle": {"momentum": "learned", "meta_optimizer": "schedule-free", "mixing": "shuffle"},
    "bfloat16": BFLOAT16,
    "robust, random": {"recipe": "robust"},
}


def named(names):
    """Settings by name; those that need kernels of their own are slow."""
    every = {**LARGE, **OTHER_PAIRS}
    slow = pytest.mark.slow
    return [pytest.param(every[name], id=name, marks=[slow] if name in OTHER_PAIRS else []) for name in names]


@pytest.mark.parametrize("settings", named([*LARGE, *OTHER_PAIRS]))
def test_the_number_of_threads_changes_nothing(settings):
    """Nor do threads and the kernels for them change what is computed: the reference backend agrees.

    The norm of the hypergradient is a sum over whole layers in double precision: it shows the order of addition.
    """
    one, many = (train(number, **settings) for number in (1, 2))
    assert same(one, many)
    x, product, norm, state = train(2, backend="reference", **settings)
    assert difference(many[0], x) < 1e-5
    assert difference(many[1], product) < 1e-5
    assert many[2] == pytest.approx(norm, rel=1e-5)
    assert many[3].keys() == state.keys()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert difference(many[3][key], value) < (1e-3 if value.dtype == torch.bfloat16 else 1e-5)
    if "gate" in state:
        assert tuple(many[3]["gate"]) == pytest.approx(tuple(state["gate"]), rel=1e-4)


@pytest.mark.slow
def test_the_number_of_threads_changes_nothing_in_double_precision():
    one, many = (train(number, dtype=torch.float64, meta_optimizer="schedule-free") for number in (1, 2))
    assert same(one, many)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"preconditioner": "mixing(mixing='shuffle')", **BFLOAT16}])
@pytest.mark.slow
def test_what_is_fed_is_rounded_as_written(settings, number):
    """Without fused multiply-adds, whichever function was compiled first."""
    with threads(number):
        x = torch.nn.Parameter(torch.randn(9000, generator=torch.Generator().manual_seed(1)))
        opt = LODO([x], lr=0.3, backend="numba", momentum="learned", **settings)
        for _ in range(3):
            x.grad = torch.linspace(0.1, 1, 9000) * x.detach()
            opt.step()
        state = opt._state(0)
        w, rest = (torch.tensor(value, dtype=torch.float32) for value in (state["gate"][0], 1 - state["gate"][0]))
        fed = torch.from_numpy(network(opt).engine._work._u)
        assert w != 1
        assert torch.equal(fed, rest * state["last_gradient"] + w * state["momentum"])


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("settings", named(["forgetful", "robust", "forgetful shuffle", "robust, random"]))
def test_threads_with_an_odd_number_of_layers(settings, depth):
    """Arrays that take turns are the right ones at the end."""
    one, many, plain = (
        train(1, depth=depth, **settings),
        train(2, depth=depth, **settings),
        train(1, depth=depth, backend="reference", **settings),
    )
    assert same(one, many)
    assert difference(many[0], plain[0]) < 1e-5
    assert difference(many[3]["theta"], plain[3]["theta"]) < 1e-5


def test_numbas_own_thread_count_is_left_alone():
    numba.set_num_threads(1)
    try:
        train(2)
        assert numba.get_num_threads() == 1
    finally:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


def test_threads_follow_torch(monkeypatch):
    used = []
    monkeypatch.setattr(compiling.numba, "set_num_threads", used.append)
    train(2)
    assert 2 in used or compiling.MAX_THREADS < 2
    used.clear()
    train(1)
    assert used == []
    used.clear()
    train(2, n=100)  # small problems stay on one thread
    assert used == []


def test_steps_from_several_python_threads():
    alone = train(2)
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda _: train(2), range(3)))
    assert all(torch.equal(alone[3]["theta"], one[3]["theta"]) for one in together)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("change", ["share", "data", "replace"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("theta", {}),
        ("momentum", {}),
        ("exp_avg", {}),
        ("exp_avg_sq", {}),
        ("theta", {"recipe": "robust"}),
        ("exp_avg", {"recipe": "robust"}),
        ("momentum", {"momentum": "learned", "save_activations": False}),
        ("last_gradient", {"momentum": "learned"}),
        ("z", {"meta_optimizer": "schedule-free"}),
    ],
)
def test_state_tensors_that_move_are_followed(name, options, change):
    """The kernels see the tensors of the state as they are now, not as they were at the first step."""
    results = []
    for backend in ("numba", "reference"):
        torch.manual_seed(0)
        x = torch.nn.Parameter(torch.randn(12, dtype=torch.float64))
        opt = LODO([x], lr=0.1, backend=backend, **options)
        for step in range(6):
            x.grad = torch.randn(12, dtype=torch.float64)
            opt.step()
            if step == 2:
                state = opt.state[x]
                if change == "share":
                    state[name].share_memory_()
                elif change == "data":
                    state[name].data = 0.5 * state[name]
                else:
                    state[name] = 0.5 * state[name]
        results.append(x.detach())
    assert torch.allclose(*results, rtol=1e-12, atol=0)


def stepped(n=9000, mixing="shuffle", save=False):
    """An optimizer after three steps with products between them, and its parameters."""
    x = torch.nn.Parameter(seeded(n))
    family = Mixing(depth=4, mixing=mixing)
    opt = LODO([x], lr=0.1, backend="numba", preconditioner=family, save_activations=save, **BFLOAT16)
    for i in range(3):
        x.grad = seeded(n, i + 1)
        opt.step()
        opt.precondition(seeded(n, i + 1))
    return opt, x.detach()


def seeded(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def lent_bytes():
    """What the system may take from this process."""
    rollup = Path("/proc/self/smaps_rollup")
    found = re.search(r"LazyFree: +(\d+)", rollup.read_text()) if rollup.exists() else None
    if found is None:
        pytest.skip("needs Linux")
    return 1024 * int(found.group(1))


def test_the_system_may_take_large_work_arrays_between_steps():
    opts = []
    for n, save in ((90_000, False), (90_000, True), (100, False)):
        before = lent_bytes()
        opts.append(stepped(n, save=save)[0])  # and so none is freed
        activations = 2 * 3 * 2 * n * 4  # two arrays, three layers, width 2, single precision
        lent = lent_bytes() - before
        assert lent > 0.9 * activations if n == 90_000 and not save else lent <= 0


@pytest.mark.parametrize("mixing", ["random", "shuffle"])
def test_work_arrays_that_the_system_takes_are_not_missed(monkeypatch, mixing):
    _, kept = stepped(mixing=mixing)
    monkeypatch.setattr(mmap, "MADV_FREE", mmap.MADV_DONTNEED)  # takes them at once
    assert torch.equal(stepped(mixing=mixing)[1], kept)


class OldMemory(mmap.mmap):
    """Of a system that cannot take pages when it needs them."""

    def madvise(self, option):
        if option == mmap.MADV_FREE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().madvise(option)


def test_large_work_arrays_are_gone_where_the_system_cannot_take_them(monkeypatch):
    monkeypatch.setattr(pages, "Memory", OldMemory)
    made = []
    make = mixing._ShuffledWork._make

    def watched(self):
        arrays = make(self)
        made.extend(weakref.ref(a) for a in arrays[:4])  # activations
        return arrays

    monkeypatch.setattr(mixing._ShuffledWork, "_make", watched)
    for n, save in ((9000, False), (9000, True), (100, False)):
        made.clear()
        opt, _ = stepped(n, save=save)
        freed = n == 9000 and not save
        assert (network(opt).engine._work._scratch is None) == freed
        assert len(made) == (24 if freed else 4)
        assert all((a() is None) == freed for a in made)


def test_replaced_tensors_are_not_kept_forever():
    x = torch.nn.Parameter(torch.randn(12))
    opt = LODO([x], lr=0.1, backend="numba")
    for _ in range(30):
        x.grad = torch.randn(12)
        opt.step()
        opt.state[x]["exp_avg"] = opt.state[x]["exp_avg"].clone()
    assert len(network(opt).engine._work._known) <= 3


# ---------------------------------------------------------------- messages


@pytest.fixture
def two_seconds_pass(monkeypatch):
    """A function that lets whatever waits for two seconds happen."""
    running = []

    class Timer:
        def __init__(self, seconds, function):
            assert seconds == 2.0
            self.act = function

        def start(self):
            running.append(self)

        def cancel(self):
            running.remove(self)

    monkeypatch.setattr(_notice, "threading", SimpleNamespace(Timer=Timer))
    return lambda: [timer.act() for timer in running]


def test_a_long_compilation_says_so(caplog, two_seconds_pass):
    kernel = mixing._ADVANCE["shuffle"]
    with caplog.at_level(logging.WARNING, logger="lodo"):
        kernel.first(lambda: None)()
        two_seconds_pass()
        assert caplog.text == ""
        kernel.first(two_seconds_pass)()
        assert caplog.text == ""  # it is slow, but compiles nothing

        def compiling():
            kernel.serial.stats.cache_misses["some types"] += 1  # as Numba notes before it compiles
            two_seconds_pass()

        try:
            kernel.first(compiling)()
        finally:
            del kernel.serial.stats.cache_misses["some types"]
    assert "compiling advance for this machine" in caplog.text


def test_drawing_a_large_network_says_so(caplog, monkeypatch, two_seconds_pass):
    monkeypatch.setattr(Mixing, "init", lambda *_: two_seconds_pass())
    with caplog.at_level(logging.WARNING, logger="lodo"):
        LODO([torch.nn.Parameter(torch.ones(5))])._state(0)
    assert "drawing a network of" in caplog.text


def test_the_first_call_of_a_kernel_is_the_one_that_announces(monkeypatch):
    announced = []
    monkeypatch.setattr(Kernel, "first", lambda self, call: announced.append(self.name) or call)
    x = torch.nn.Parameter(torch.ones(5))
    x.grad = torch.ones(5)
    opt = LODO([x], backend="numba")
    opt.step()
    opt.step()
    assert announced == ["advance"]


def test_parameters_that_take_turns_announce_nothing(monkeypatch):
    params = [torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2)]
    opt = KronLODO(params, backend="numba")

    def step(number):
        opt.zero_grad()
        params[number].grad = torch.randn(5, 3)
        opt.step()

    for number in (0, 1):
        step(number)
    announced = []
    monkeypatch.setattr(Kernel, "first", lambda self, call: announced.append(self.name) or call)
    for number in (0, 1):
        step(number)
    assert not announced


# ---------------------------------------------------------------- the cache


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A kernel that compiles in no time, in two modules as the real ones are."""
    (tmp_path / "small_tiles.py").write_text("from numba import njit\n@njit\ndef times(x):\n    return 2 * x\n")
    (tmp_path / "small_kernel.py").write_text("from small_tiles import times\ndef double(x):\n    return times(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    modules = [importlib.import_module(name) for name in ("small_tiles", "small_kernel")]
    yield modules
    for module in modules:
        del sys.modules[module.__name__]


def called(kernel, x=3.0):
    return kernel.first(kernel.serial)(x)


def hits_and_misses(kernel):
    stats = kernel.serial.stats
    return sum(stats.cache_hits.values()), sum(stats.cache_misses.values())


def test_compiled_kernels_are_cached_on_disk(small):
    for expected in ((0, 1), (1, 0)):
        kernel = Kernel(small[1].double, version_of(small))
        assert called(kernel) == 6
        assert hits_and_misses(kernel) == expected


def test_one_compiles_and_others_wait_for_it(small):
    """As long as they need it for the same types."""
    one, other = (Kernel(small[1].double, version_of(small)) for _ in range(2))
    begun, go_on, done = Event(), Event(), []

    def compiling(x):
        begun.set()
        go_on.wait(60)
        done.append("one")

    with ThreadPoolExecutor() as pool:
        first = pool.submit(one.first(compiling), 3.0)
        begun.wait(60)
        second = pool.submit(other.first(lambda x: done.append("other")), 3.0)
        other.first(lambda x: done.append("other types"))(3)
        meanwhile = list(done)
        go_on.set()
        first.result()
        second.result()
    assert meanwhile == ["other types"]
    assert done == ["other types", "one", "other"]


@pytest.mark.slow
def test_two_processes_that_start_together_compile_once(tmp_path):
    code = """
        import torch
        from lodo import LODO
        from lodo.engines.numba import mixing
        LODO([torch.nn.Parameter(torch.ones(10))], backend="numba").precondition(torch.ones(10))
        stats = mixing._APPLY["random"].serial.stats
        print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
    """
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(run, code, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert sorted(each.result().stdout.split() for each in both) == [["0", "1"], ["1", "0"]]


def test_a_changed_source_is_compiled_again(small):
    """Also where it is not the kernel's own file that changed, which Numba does not notice."""
    before = version_of(small)
    assert called(Kernel(small[1].double, before)) == 6
    Path(small[0].__file__).write_text("from numba import njit\n@njit\ndef times(x):\n    return 2 * x + 100\n")
    small = [importlib.reload(module) for module in small]
    assert called(Kernel(small[1].double, before)) == 6
    assert called(Kernel(small[1].double, version_of(small))) == 106


@pytest.mark.parametrize(
    ("kernels", "modules"),  # and modules whose constants are compiled
    [(mixing, (feeding, permuted, shuffled, tiles)), (kron, (scaling, tiles, elementwise, kron_formulas))],
    ids=["LODO", "KronLODO"],
)
def test_the_version_covers_every_source_that_a_kernel_is_compiled_from(kernels, modules):
    sources = {module.__name__ for module in kernels._SOURCES}
    assert version_of(kernels._SOURCES) == kernels._VERSION
    compiled = [x for x in vars(kernels).values() for x in (x.values() if isinstance(x, dict) else [x])]
    functions = [x.serial.py_func for x in compiled if isinstance(x, Kernel)]
    reached = {f.__module__ for function in functions for f in functions_in(function)}
    assert {modules[0].__name__, "lodo.meta"} <= reached <= sources
    for module in modules:
        statements = ast.walk(ast.parse(Path(module.__file__).read_text()))
        imported = {statement.module for statement in statements if isinstance(statement, ast.ImportFrom)}
        assert {name for name in imported if name.startswith("lodo")} <= sources


def functions_in(function):
    """The function and all compiled functions that it calls, directly or not."""
    codes, found = [function.__code__], [function]
    for code in codes:
        codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, Dispatcher):
                found.extend(functions_in(value.py_func))
            elif isinstance(value, FunctionType) and value in formulas.FORMULAS:
                found.extend(functions_in(value))
    return found


def test_serial_and_parallel_kernels_do_not_share_a_cache_entry():
    """Nor do kernels for permutations and for shuffles, nor those of different versions."""
    functions = [f.py_func for kernel in KERNELS for f in (kernel.serial, kernel._parallel)]
    assert len({(f.__code__.co_filename, f.__qualname__) for f in functions}) == 8
    assert all(f.__qualname__.endswith(mixing._VERSION) for f in functions)


def test_without_a_place_for_the_cache_it_still_works(small, monkeypatch, caplog):
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with caplog.at_level(logging.WARNING, logger="lodo"):
        assert not compiling._can_cache()
    assert "NUMBA_CACHE_DIR" in caplog.text
    monkeypatch.setattr(compiling, "CACHE", False)
    for _ in range(2):
        kernel = Kernel(small[1].double, version_of(small))
        assert called(kernel) == 6
        assert hits_and_misses(kernel) == (0, 1)  # nothing was kept


# ---------------------------------------------------------------- absence


def test_importing_lodo_does_not_load_numba_and_it_works_without():
    loaded, engine, error = run(
        """
        import sys
        import torch
        from lodo import LODO
        print("numba" in sys.modules)
        sys.modules["numba"] = None
        x = torch.nn.Parameter(torch.ones(10)); x.grad = torch.ones(10)
        opt = LODO([x], lr=0.1)
        opt.step(); opt.step()
        print(type(opt._groups[0].network.engine).__name__)
        try:
            LODO([x], backend="numba")
        except ValueError as error:
            print(error)
        """
    ).stdout.splitlines()
    assert loaded == "False"
    assert engine == "ReferenceEngine"
    assert "not installed" in error
    assert "pip install numba" in error


def test_auto_is_numba_on_the_cpu():
    opt = LODO([torch.nn.Parameter(torch.ones(3))])
    assert isinstance(network(opt).engine, mixing.NumbaMixing)
    with pytest.raises(ValueError, match=r"CPU tensors only.*'cuda'"):
        engine_for(Mixing(), torch.device("cuda"), "numba")
