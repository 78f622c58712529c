"""Perfect shuffles instead of random permutations: what they are, and what they do without."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import BACKENDS, difference, natural, network, parameter, permutations
from lodo import LODO, Mixing
from lodo.engines import ReferenceEngine
from lodo.layout import Layout

SIZES = {"n": st.integers(1, 700), "block_size": st.integers(1, 8), "width": st.sampled_from([1.0, 1.3, 2.0, 3.0])}


@given(**SIZES, depth=st.integers(1, 4))
def test_it_is_the_perfect_shuffle(n, block_size, width, depth):
    """k rows, read by columns: the cards of k packs, one from each in turn."""
    family, layout = Mixing(depth, block_size, width, "shuffle"), Layout.flat(n)
    hidden = family.hidden(n)
    packs = [list(range(c * hidden // block_size, (c + 1) * hidden // block_size)) for c in range(block_size)]
    dealt = [pack[i] for i in range(hidden // block_size) for pack in packs]
    P = family.fixed(layout, torch.Generator().manual_seed(0))
    assert family.permutations(P, layout).tolist() == [dealt] * depth
    assert torch.arange(hidden).reshape(block_size, -1).T.flatten().tolist() == dealt


@settings(max_examples=40)
@given(n=st.integers(2, 500), block_size=st.integers(2, 8))
def test_enough_layers_connect_everything(n, block_size):
    """Every number reaches every other, going up, after as many layers as it takes k to grow to the width."""
    family = Mixing(1, block_size, 2.0, "shuffle")
    hidden, depth = family.hidden(n), 1
    while block_size**depth < hidden:
        depth += 1
    shuffle = family.permutations(torch.empty(0, dtype=torch.int32), Layout.flat(n))[0]
    reached = torch.eye(hidden, dtype=torch.bool)
    for _ in range(depth):
        blocks = reached[shuffle].view(-1, block_size, hidden).any(1, keepdim=True)
        reached = blocks.expand(-1, block_size, -1).reshape(hidden, hidden)
    assert reached.all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_index_array_is_stored(backend):
    opts = {m: LODO([parameter(100)], preconditioner=Mixing(mixing=m), backend=backend) for m in ("random", "shuffle")}
    for opt in opts.values():
        x = opt.param_groups[0]["params"][0]
        x.grad = torch.randn(100, dtype=torch.float64)
        opt.step()
        assert all(v.is_floating_point() for v in opt._state(0).values() if isinstance(v, torch.Tensor))
    sizes = {m: indices(network(opt).engine) for m, opt in opts.items()}
    T, L = Mixing().tiles(Layout.flat(100))
    assert sizes == {"random": 16 * (200 if backend == "reference" else T * L * 4), "shuffle": 0}


def indices(engine):
    """How many indices an engine holds."""
    return engine.P.numel() if isinstance(engine, ReferenceEngine) else engine._work.P.size


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_product_is_that_of_the_written_out_network(backend):
    """Dense matrices for every layer, no trick."""
    n, k = 37, 3
    family = Mixing(4, k, 1.7, "shuffle")
    opt = LODO([parameter(n)], lr=1.0, preconditioner=family, backend=backend)
    theta = opt._state(0)["theta"]
    theta.add_(0.3 * torch.randn_like(theta))  # leave the identity; unused lanes must not matter
    whole = torch.eye(family.hidden(n), dtype=torch.float64)
    for blocks, p in zip(natural(opt, theta), permutations(opt), strict=True):
        whole = torch.block_diag(*blocks) @ whole[p]
    G = (whole.T @ whole)[:n, :n]
    assert difference(opt.preconditioner_matrix(), G) < 1e-13


def test_families_describe_themselves():
    assert repr(Mixing(2, mixing="shuffle")) == "mixing(depth=2, mixing='shuffle')"
    group = LODO([parameter(3)], preconditioner=Mixing(2, mixing="shuffle")).param_groups[0]
    assert group["preconditioner"] == repr(Mixing(2, mixing="shuffle"))
    with pytest.raises(ValueError, match=r"mixing must be one of 'random', 'shuffle', got 'riffle'"):
        Mixing(mixing="riffle")
    explicit = LODO([parameter(3)], preconditioner=Mixing(2), recipe="robust").param_groups[0]
    assert explicit["preconditioner"] == "mixing(depth=2)"  # a configured family is taken as it is
