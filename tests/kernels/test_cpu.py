"""The fused kernels beyond their agreement with the oracle: threads, cache, messages, absence."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import time

import numba
import pytest
import torch

from lodo import LODO, Mixing, kernels
from lodo.kernels import cpu


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip


def train(threads, n=9000, depth=4):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(1)))
        opt = LODO([x], lr=0.3, depth=depth, backend="numba")
        for _ in range(5):
            x.grad = torch.linspace(0.1, 1, n) * x.detach()
            opt.step()
        return x.detach(), opt._state(0)["theta"]
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_changes_nothing():
    one, many = train(1), train(2)
    assert torch.equal(one[0], many[0])
    assert torch.equal(one[1], many[1])


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
        cpu._ADVANCE.first(lambda: time.sleep(0.01))()
        assert caplog.text == ""
        cpu._ADVANCE.first(lambda: time.sleep(2.2))()
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
        x = torch.nn.Parameter(torch.ones(5)); x.grad = torch.ones(5)
        LODO([x], backend="numba").step()
        print(cpu._TILE["cache"])
        """
    )
    assert out.stdout.strip() == "False"
    assert "NUMBA_CACHE_DIR" in out.stderr


@pytest.mark.parametrize("change", ["share", "data", "replace"])
@pytest.mark.parametrize("name", ["theta", "momentum", "exp_avg", "exp_avg_sq"])
def test_state_tensors_that_move_are_followed(name, change):
    """The kernels see the tensors of the state as they are now, not as they were at the first step."""
    results = []
    for backend in ("numba", "reference"):
        torch.manual_seed(0)
        x = torch.nn.Parameter(torch.randn(12, dtype=torch.float64))
        opt = LODO([x], lr=0.1, backend=backend)
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


def test_replaced_tensors_are_not_kept_forever():
    x = torch.nn.Parameter(torch.randn(12))
    opt = LODO([x], lr=0.1, backend="numba")
    for _ in range(30):
        x.grad = torch.randn(12)
        opt.step()
        opt.state[x]["exp_avg"] = opt.state[x]["exp_avg"].clone()
    assert len(opt._network(0).engine._work._known) <= 3


def test_compiled_kernels_are_cached_on_disk(tmp_path):
    code = """
        import torch
        from lodo import LODO
        from lodo.kernels import cpu
        x = torch.nn.Parameter(torch.ones(10)); x.grad = torch.ones(10)
        opt = LODO([x], backend="numba", meta_optimizer="sgd"); opt.step()
        kernel = cpu._ADVANCE.serial
        print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
    """
    environment = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert run(code, **environment).stdout.split() == ["0", "1"]
    assert run(code, **environment).stdout.split() == ["1", "0"]


def test_serial_and_parallel_kernels_do_not_share_a_cache_entry():
    names = {cpu._ADVANCE.serial.py_func.__qualname__, cpu._ADVANCE._parallel.py_func.__qualname__}
    assert len(names) == 2


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
    assert all(torch.equal(alone[1], theta) for _, theta in together)
