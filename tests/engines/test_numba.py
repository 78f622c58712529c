"""The fused kernels beyond their agreement with the oracle: threads, cache, messages, absence."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import pytest
import torch

import lodo
from helpers import difference, same
from lodo import LODO, Mixing, kernels
from lodo.kernels import cpu


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip


def train(threads, n=9000, depth=4, backend="numba", dtype=torch.float32, **options):
    """x and the state after five steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(1)).to(dtype))
        opt = LODO([x], lr=0.3, depth=depth, backend=backend, **options)
        for _ in range(5):
            x.grad = torch.linspace(0.1, 1, n) * x.detach()
            opt.step()
        state = opt._state(0)
        product = opt.precondition(torch.linspace(-1, 1, n))
        return x.detach(), state["theta"], product, {k: v for k, v in state.items() if k not in ("theta", "last_step")}
    finally:
        torch.set_num_threads(before)


LARGE = {
    "paper": {},
    "shuffle": {"mixing": "shuffle"},
    "permuted shuffle": {"mixing": "permuted-shuffle"},
    "gate": {"momentum": "learned"},
    "schedule-free": {"meta_optimizer": "schedule-free"},
    "bfloat16": {"moment_dtype": torch.bfloat16},
    "forgetful": {"save_activations": False},
    "forgetful shuffle": {"save_activations": False, "mixing": "shuffle"},
    "gate, schedule-free, shuffle": {"momentum": "learned", "meta_optimizer": "schedule-free", "mixing": "shuffle"},
    "gate, forgetful schedule-free": {
        "momentum": "learned", "meta_optimizer": "schedule-free", "save_activations": False,
    },
    "robust": {"recipe": "robust"},
    "robust, random": {"recipe": "robust", "mixing": "random"},
    "robust, permuted": {"recipe": "robust", "mixing": "permuted-shuffle"},
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_the_number_of_threads_changes_nothing(name):
    """Nor do threads and the kernels for them change what is computed: the reference backend agrees."""
    one, many = (train(threads, **LARGE[name]) for threads in (1, 2))
    assert same(one, many)
    x, theta, product, state = train(2, backend="reference", **LARGE[name])
    assert difference(many[0], x) < 1e-5
    assert difference(many[1], theta) < 1e-5
    assert difference(many[2], product) < 1e-5
    assert many[3].keys() == state.keys()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert difference(many[3][key], value) < (1e-3 if value.dtype == torch.bfloat16 else 1e-5)
    if "gate" in state:
        assert many[3]["gate"] == pytest.approx(state["gate"], rel=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mixing", ["random", "shuffle"])
def test_what_is_fed_is_rounded_as_written(mixing, threads):
    """Without fused multiply-adds, whichever function was compiled first."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.nn.Parameter(torch.randn(9000, generator=torch.Generator().manual_seed(1)))
        opt = LODO([x], lr=0.3, depth=2, backend="numba", momentum="learned", mixing=mixing)
        for _ in range(3):
            x.grad = torch.linspace(0.1, 1, 9000) * x.detach()
            opt.step()
        state = opt._state(0)
        w, rest = (torch.tensor(value, dtype=torch.float32) for value in (state["gate"][0], 1 - state["gate"][0]))
        fed = torch.from_numpy(opt._network(0).engine._work._u)
        assert w != 1
        assert torch.equal(fed, rest * state["last_gradient"] + w * state["momentum"])
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_changes_nothing_in_double_precision():
    """The root mean square of a layer is a sum over all of it, whose order single precision would hide."""
    one, many = (train(threads, dtype=torch.float64, meta_optimizer="schedule-free") for threads in (1, 2))
    assert same(one, many)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", ["forgetful", "forgetful shuffle", "robust", "robust, random"])
def test_threads_with_an_odd_number_of_layers(name, depth):
    """Arrays that take turns are the right ones at the end."""
    one, many, plain = (
        train(1, depth=depth, **LARGE[name]),
        train(2, depth=depth, **LARGE[name]),
        train(1, depth=depth, backend="reference", **LARGE[name]),
    )
    assert same(one, many)
    assert difference(many[0], plain[0]) < 1e-5
    assert difference(many[1], plain[1]) < 1e-5


def test_numbas_own_thread_count_is_left_alone():
    numba.set_num_threads(1)
    try:
        train(2)
        assert numba.get_num_threads() == 1
    finally:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


def test_threads_follow_torch(monkeypatch):
    used = []
    monkeypatch.setattr(cpu.numba, "set_num_threads", used.append)
    train(2)
    assert 2 in used or cpu._MAX_THREADS < 2
    used.clear()
    train(1)
    assert used == []
    used.clear()
    train(2, n=100)  # small problems stay on one thread
    assert used == []


def test_a_long_compilation_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="lodo"):
        kernel = cpu._ADVANCE["shuffle"]
        kernel.first(lambda: time.sleep(0.01))()
        assert caplog.text == ""
        kernel.first(lambda: time.sleep(2.2))()
    assert "compiling advance" in caplog.text


def test_drawing_a_large_network_says_so(caplog, monkeypatch):
    monkeypatch.setattr(Mixing, "init", lambda *_: time.sleep(2.2))
    with caplog.at_level(logging.WARNING, logger="lodo"):
        LODO([torch.nn.Parameter(torch.ones(5))])._state(0)
    assert "drawing a network of" in caplog.text


def test_the_first_call_of_a_kernel_is_the_one_that_announces(monkeypatch):
    announced = []
    monkeypatch.setattr(cpu._Kernel, "first", lambda self, call: announced.append(self._name) or call)
    x = torch.nn.Parameter(torch.ones(5))
    x.grad = torch.ones(5)
    opt = LODO([x], backend="numba")
    opt.step()
    opt.step()
    assert announced == ["advance"]


def test_without_a_place_for_the_cache_it_still_works(tmp_path):
    out = run(
        """
        import numba.core.caching as caching
        caching.CacheImpl._locator_classes = []
        import torch
        from lodo import LODO
        from lodo.kernels import cpu
        LODO([torch.nn.Parameter(torch.ones(5))], backend="numba").precondition(torch.ones(5))
        print(cpu.CACHE)
        """
    )
    assert out.stdout.strip() == "False"
    assert "NUMBA_CACHE_DIR" in out.stderr


@pytest.mark.parametrize("change", ["share", "data", "replace"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("theta", {}),
        ("momentum", {}),
        ("exp_avg", {}),
        ("exp_avg_sq", {}),
        ("theta", {"momentum": "learned", "mixing": "shuffle"}),
        ("momentum", {"momentum": "learned", "save_activations": False}),
        ("last_gradient", {"momentum": "learned"}),
        ("z", {"meta_optimizer": "schedule-free"}),
        ("exp_avg", {"moment_dtype": torch.bfloat16}),
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


def test_large_work_arrays_are_gone_between_steps(monkeypatch):
    made = []
    make = cpu._Shuffled._make

    def watched(self):
        arrays = make(self)
        made.extend(weakref.ref(a) for a in arrays[:4])  # activations
        return arrays

    monkeypatch.setattr(cpu._Shuffled, "_make", watched)
    for n, depth, save in ((9000, 4, False), (9000, 4, True), (100, 4, False)):
        made.clear()
        x = torch.nn.Parameter(torch.randn(n))
        opt = LODO([x], lr=0.1, depth=depth, backend="numba", mixing="shuffle", save_activations=save)
        for _ in range(3):
            x.grad = torch.randn(n)
            opt.step()
        opt.precondition(torch.randn(n))
        freed = n == 9000 and not save
        assert (opt._network(0).engine._work._scratch is None) == freed
        assert len(made) == (16 if freed else 4)
        assert all((a() is None) == freed for a in made)


def test_replaced_tensors_are_not_kept_forever():
    x = torch.nn.Parameter(torch.randn(12))
    opt = LODO([x], lr=0.1, backend="numba")
    for _ in range(30):
        x.grad = torch.randn(12)
        opt.step()
        opt.state[x]["exp_avg"] = opt.state[x]["exp_avg"].clone()
    assert len(opt._network(0).engine._work._known) <= 3


def test_compiled_kernels_are_cached_on_disk(tmp_path):
    """Of two processes that start together one compiles, and the other waits for it."""
    code = """
        import torch
        from lodo import LODO
        from lodo.kernels import cpu
        LODO([torch.nn.Parameter(torch.ones(10))], backend="numba").precondition(torch.ones(10))
        kernel = cpu._APPLY["random"].serial
        print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
    """
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(run, code, **environment) for _ in range(2)]
    assert sorted(each.result().stdout.split() for each in both) == [["0", "1"], ["1", "0"]]


def test_a_changed_source_is_compiled_again(tmp_path):
    """Also where it is not the kernel's own file that changed, which Numba would not notice."""
    compiled = shutil.ignore_patterns("__pycache__")
    package = shutil.copytree(Path(lodo.__file__).parent, tmp_path / "lodo", ignore=compiled)
    code = """
        import torch
        from lodo import LODO
        x = torch.nn.Parameter(torch.ones(10))
        print(LODO([x], backend="numba").precondition(torch.ones(10)).mean().item())
    """
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    assert float(run(code, **environment).stdout) == pytest.approx(1)
    tiles = package / "kernels" / "tiles.py"
    tiles.write_text(tiles.read_text().replace("+ B[3, r, l] * x[3, l]", "+ B[3, r, l] * 0"))
    assert float(run(code, **environment).stdout) < 0.9


def test_serial_and_parallel_kernels_do_not_share_a_cache_entry():
    """Nor do kernels for permutations and for shuffles."""
    kernels = [*cpu._ADVANCE.values(), *cpu._APPLY.values()]
    functions = [f.py_func for kernel in kernels for f in (kernel.serial, kernel._parallel)]
    assert len({(f.__code__.co_filename, f.__qualname__) for f in functions}) == 8


def test_lodo_works_without_numba():
    out = run(
        """
        import sys
        sys.modules["numba"] = None
        import torch
        from lodo import LODO
        x = torch.nn.Parameter(torch.ones(10)); x.grad = torch.ones(10)
        opt = LODO([x], lr=0.1)
        opt.step(); opt.step()
        print(type(opt._network(0).engine).__name__)
        try:
            LODO([x], backend="numba")
        except ValueError as error:
            print(error)
        """
    ).stdout.splitlines()
    assert out[0] == "Engine"
    assert "not installed" in out[1]
    assert "pip install numba" in out[1]


def test_auto_is_numba_on_the_cpu():
    opt = LODO([torch.nn.Parameter(torch.ones(3))])
    assert isinstance(opt._network(0).engine, cpu.FusedMixing)
    assert kernels.resolve("auto", torch.device("cuda")) == "reference"
    with pytest.raises(ValueError, match=r"CPU tensors only.*'cuda'"):
        kernels.resolve("numba", torch.device("cuda"))


def test_importing_lodo_does_not_load_numba():
    assert run("import lodo, sys; print('numba' in sys.modules)").stdout.strip() == "False"


def test_steps_from_several_python_threads():
    from concurrent.futures import ThreadPoolExecutor

    alone = train(2)
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda _: train(2), range(3)))
    assert all(torch.equal(alone[1], one[1]) for one in together)
