"""How much memory, and what happens when there is too little."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import BACKENDS, network, parameter
from lodo import LODO, Mixing, estimate, memory_estimate
from lodo.engines.numba.mixing import NumbaMixing
from lodo.engines.numba.pages import huge_zeros, passing_zeros
from lodo.meta import Adam

ROUNDED = Adam(moment_dtype="bfloat16")
ROBUST = {"momentum": "learned", "meta_optimizer": ROUNDED, "save_activations": False}
OPTIONS = {
    "paper": {},
    "sgd": {"meta_optimizer": "sgd"},
    "schedule-free": {"meta_optimizer": "schedule-free"},
    "gate": {"momentum": "learned"},
    "bfloat16": {"meta_optimizer": ROUNDED},
    "robust": ROBUST,
    "robust schedule-free": {**ROBUST, "meta_optimizer": "schedule-free"},
}
FORGETFUL = {
    "forgetful": {"save_activations": False},
    "forgetful gate": {"save_activations": False, "momentum": "learned"},
}
SHUFFLE = Mixing(mixing="shuffle")


def taken(opt):
    """Bytes, counted: weights, moments, indices, activations, vectors."""
    net, state = network(opt), opt._state(0)
    vectors = [net.g.vector, net.s.vector, state["momentum"], state.get("last_gradient")]
    activations = []
    if isinstance(net.engine, NumbaMixing):
        work = net.engine._work
        indices = work.P
        vectors.append(work._u)
        E, Q, chunks = work._spare()[0].shape, work._spare()[1].shape, work._chunks.shape  # a few spare tiles
        arrays = {id(array): array for array in work._make()}  # one may stand for two
        activations = [array for array in arrays.values() if array.shape not in (E, Q, chunks)]
    else:
        indices = net.engine.P
    return {
        "theta": state["theta"].nbytes,
        "moments": sum(state[name].nbytes for name in ("exp_avg", "exp_avg_sq", "z") if name in state),
        "indices": indices.nbytes,
        "activations": sum(array.nbytes for array in activations),
        "vectors": sum(v.nbytes for v in vectors if v is not None),
    }


CASES = [
    *((family, "reference", name) for family in ("residual", "diagonal", "scalar", "dense") for name in OPTIONS),
    *(("mixing", backend, name) for backend in BACKENDS for name in {**OPTIONS, **FORGETFUL}),
    *((SHUFFLE, backend, name) for backend in BACKENDS for name in ("paper", "robust", "robust schedule-free")),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("family", "backend", "name"), CASES, ids=str)
def test_the_estimate_is_what_the_state_takes(family, backend, name, dtype):
    options = {**OPTIONS, **FORGETFUL}[name]
    x = parameter(150, dtype=dtype)
    opt = LODO([x], preconditioner=family, backend=backend, lr=1e-3, **options)
    x.grad = torch.ones(150, dtype=dtype)
    opt.step()
    opt.step()
    needed = memory_estimate(150, family, backend=backend, dtype=dtype, **options)
    counted = taken(opt)
    fused = isinstance(network(opt).engine, NumbaMixing)
    assert fused == (backend == "numba")
    for field in ("theta", "moments", "indices"):
        assert getattr(needed, field) == counted[field]
    passing = "gate" in opt._state(0) and not fused  # what is fed, made during a step
    assert needed.vectors == counted["vectors"] + passing * x.nbytes
    if fused:
        saved = options.get("save_activations", True)
        assert (needed.activations, needed.work) == (
            (counted["activations"], 0) if saved else (0, counted["activations"])
        )
    else:
        assert needed.activations == 0
        assert needed.work >= counted["theta"]  # the hypergradient at least
    assert needed.total == sum(needed)
    assert needed.resting == needed.total - needed.work
    assert needed == opt._groups[0].estimate(opt.param_groups[0])


@pytest.mark.parametrize(("mixing", "indices"), [("random", 16 * 2 * 4), ("shuffle", 0)])
def test_indices_by_mixing(mixing, indices, backend):
    n = 94_696
    assert memory_estimate(n, Mixing(mixing=mixing), backend=backend).indices == pytest.approx(indices * n, rel=1e-3)


@pytest.mark.parametrize("n", [94_696, 1_000_000])
def test_the_compact_recipe_halves_the_robust_one(n):
    small = memory_estimate(n, recipe="compact", backend="numba")
    assert small.resting <= 560 * n
    assert small.total <= 800 * n
    assert small.resting <= 0.52 * memory_estimate(n, recipe="robust", backend="numba").resting


def test_what_stays_between_steps_can_be_1100_bytes_a_parameter():
    n = 94_696
    small = memory_estimate(n, SHUFFLE, meta_optimizer=ROUNDED, save_activations=False, backend="numba")
    assert small.resting <= 1100 * n
    assert small.theta == small.moments == pytest.approx(512 * n, rel=1e-3)
    assert small.indices == small.activations == 0
    assert memory_estimate(n, SHUFFLE, **ROBUST, backend="numba").resting <= 1100 * n
    assert memory_estimate(n, backend="numba").resting > 2000 * n
    assert f"work {estimate.readable(small.work)}" in str(small)


def test_that_is_what_a_large_network_keeps():
    """Every array that is needed after a step, counted: state, vectors, work arrays."""
    n = 9000
    options = {"preconditioner": Mixing(4, mixing="shuffle"), "backend": "numba", **ROBUST}
    x = parameter(n, dtype=torch.float32)
    opt = LODO([x], lr=1e-3, guard=True, **options)
    for _ in range(3):
        x.grad = torch.randn(n)
        opt.step()
    needed = memory_estimate(n, **options)
    net, state = network(opt), opt._state(0)
    lent = sum(len(memory) for memory in net.engine._work._memories)  # to the system, which may take it
    assert lent >= needed.work or net.engine._work._scratch is None
    tensors = {
        v.data_ptr(): v.nbytes for v in (*state.values(), net.g.vector, net.s.vector) if isinstance(v, torch.Tensor)
    }
    arrays = [
        a for a in vars(net.engine._work).values() if isinstance(a, np.ndarray) and a is not net.engine._work._chunks
    ]
    assert sum(tensors.values()) + sum(a.nbytes for a in arrays) == needed.resting
    kept = LODO([x], lr=1e-3, **{**options, "save_activations": True})
    kept.step()
    assert sum(a.nbytes for a in network(kept).engine._work._scratch) >= needed.work


def test_the_papers_count_of_weights():
    """128 n weights at the paper's setting, three times with Adam's moments, float32."""
    n = 94_696
    needed = memory_estimate(n, backend="numba")
    assert needed.theta == pytest.approx(128 * n * 4, rel=1e-3)
    assert needed.moments == 2 * needed.theta
    assert needed.total / n < 2150
    assert "MB" in str(needed)


def test_a_state_that_cannot_fit_fails_at_once_with_the_numbers(monkeypatch):
    monkeypatch.setattr(estimate, "available", lambda device: 10_000_000)
    with pytest.raises(
        MemoryError, match=r"(?s)group 0 \(94,696 parameters, mixing\).*theta 48.5 MB.*10.0 MB.*depth"
    ) as e:
        LODO([parameter(94_696, dtype=torch.float32)])
    assert "preconditioner='diagonal'" in str(e.value)
    LODO([parameter(94_696, dtype=torch.float32)], preconditioner="diagonal")


def test_groups_are_counted_together(monkeypatch):
    monkeypatch.setattr(estimate, "available", lambda device: 3_000_000)
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
    assert estimate._cgroup(tmp_path) == 850  # cached files can be dropped
    (tmp_path / "memory.max").write_text("max\n")
    assert estimate._cgroup(tmp_path) is None
    assert estimate._cgroup(tmp_path / "nowhere") is None
    assert estimate.available(torch.device("cpu")) > 0
    assert estimate.available(torch.device("meta")) is None


@pytest.mark.parametrize("value", [-1, 2.5, "many"])
def test_bad_n(value):
    with pytest.raises(ValueError, match="n must be an integer >= 0"):
        memory_estimate(value)


def passing(shape, dtype):
    return passing_zeros(shape, dtype, least=1, huge=False)[0]


@pytest.mark.parametrize(("zeros", "huge"), [(huge_zeros, True), (passing, False)])
def test_large_arrays_are_on_huge_pages_unless_they_pass_and_private(zeros, huge):
    smaps = Path("/proc/self/smaps")
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not smaps.exists() or not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("needs Linux with transparent huge pages")
    a = zeros((64 << 20,), torch.uint8).fill_(1)
    start = a.data_ptr()
    mapping = next(
        block
        for block in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", smaps.read_text())
        if block and int(block.split("-")[0], 16) <= start < int(block.split("-")[1].split()[0], 16)
    )
    assert " rw-p " in mapping.splitlines()[0]
    assert (int(re.search(r"AnonHugePages: +(\d+)", mapping).group(1)) > 0) == huge


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_write_into_its_parents_state():
    a = huge_zeros((8 << 20,), torch.uint8)
    pid = os.fork()
    if pid == 0:
        a.numpy()[:] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    assert int(a[0]) == 0


@pytest.mark.parametrize("zeros", [huge_zeros, passing])
@pytest.mark.parametrize("shape", [(0,), (3,), (2000, 1000), (5, 1024, 300)])
def test_an_array_with_pages_of_its_own_is_an_ordinary_tensor(zeros, shape):
    a = zeros(shape, torch.float64)
    assert a.shape == shape
    assert not a.any()
    a.fill_(1)
    assert a.sum() == a.numel()
    assert torch.equal(a.clone(), a)


def test_a_module_is_no_number_of_weights():
    with pytest.raises(TypeError, match="n must be the number of weights, got a module"):
        memory_estimate(torch.nn.Linear(2, 1))
