"""How much memory, and what happens when there is too little."""

import os
import re
from pathlib import Path

import pytest
import torch

from helpers import BACKENDS, FAMILIES, parameter
from lodo import LODO, memory, memory_estimate


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("meta", ["adam", "sgd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimate_is_what_the_state_takes(family, meta, backend):
    x = parameter(150, dtype=torch.float32)
    opt = LODO([x], preconditioner=family, meta_optimizer=meta, backend=backend, lr=1e-3)
    x.grad = torch.ones(150)
    opt.step()
    opt.step()
    estimate = memory_estimate(150, family, meta_optimizer=meta, backend=backend)
    state = opt._state(0)
    assert estimate.theta == state["theta"].nbytes
    assert estimate.moments == sum(state[name].nbytes for name in ("exp_avg", "exp_avg_sq") if name in state)
    assert estimate.indices == opt._network(0).engine.P.nbytes
    assert estimate.vectors == 3 * x.nbytes
    if family == "mixing" and backend == "numba":
        x, y, _, _, *activations = opt._network(0).engine._work.scratch
        assert estimate.work == sum(a.nbytes for a in (x, y, *activations))
    assert estimate.total == sum(estimate)


def test_the_papers_count_of_weights():
    """128 n weights at the paper's setting, three times with Adam's moments, float32."""
    n = 94_696
    estimate = memory_estimate(n, backend="numba")
    assert estimate.theta == pytest.approx(128 * n * 4, rel=1e-3)
    assert estimate.moments == 2 * estimate.theta
    assert estimate.total / n < 2150
    assert "MB" in str(estimate)


def test_a_state_that_cannot_fit_fails_at_once_with_the_numbers(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 10_000_000)
    with pytest.raises(
        MemoryError, match=r"(?s)group 0 \(94,696 parameters, Mixing.*theta 48.5 MB.*10.0 MB.*depth"
    ) as e:
        LODO([parameter(94_696, dtype=torch.float32)])
    assert "preconditioner='diagonal'" in str(e.value)
    LODO([parameter(94_696, dtype=torch.float32)], preconditioner="diagonal")


def test_groups_are_counted_together(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 3_000_000)
    one = parameter(1000, dtype=torch.float32)
    LODO([one])
    with pytest.raises(MemoryError, match="for the groups before it"):
        LODO([{"params": [one]}, {"params": [parameter(1000, dtype=torch.float32)]}])


def test_a_real_machine_refuses_the_impossible():
    with pytest.raises(MemoryError, match="GB"):
        LODO([torch.nn.Parameter(torch.zeros(3_000_000))], preconditioner="dense")


def test_available_reads_the_container_limit(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 100\nactive_file 50\ninactive_file 200\n")
    assert memory._cgroup(tmp_path) == 850  # cached files can be dropped
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup(tmp_path) is None
    assert memory._cgroup(tmp_path / "nowhere") is None
    assert memory.available(torch.device("cpu")) > 0
    assert memory.available(torch.device("meta")) is None


@pytest.mark.parametrize("value", [-1, 2.5, "many"])
def test_bad_n(value):
    with pytest.raises(ValueError, match="n must be an integer >= 0"):
        memory_estimate(value)


def test_large_arrays_are_on_huge_pages_and_private():
    smaps = Path("/proc/self/smaps")
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not smaps.exists() or not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("needs Linux with transparent huge pages")
    a = memory.huge_zeros((64 << 20,), torch.uint8).fill_(1)
    start = a.data_ptr()
    mapping = next(
        block
        for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", smaps.read_text())
        if block and int(block.split("-")[0], 16) <= start < int(block.split("-")[1].split()[0], 16)
    )
    assert " rw-p " in mapping.splitlines()[0]
    assert int(re.search(r"AnonHugePages: +(\d+)", mapping).group(1)) > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_write_into_its_parents_state():
    a = memory.huge_zeros((8 << 20,), torch.uint8)
    pid = os.fork()
    if pid == 0:
        a.numpy()[:] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(a[0]) == 0


@pytest.mark.parametrize("shape", [(3,), (2000, 1000), (5, 1024, 300)])
def test_huge_zeros_is_an_ordinary_tensor(shape):
    a = memory.huge_zeros(shape, torch.float64)
    assert a.shape == shape
    assert not a.any()
    a.fill_(1)
    assert a.sum() == a.numel()
    assert torch.equal(a.clone(), a)
