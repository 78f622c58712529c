"""What `lodo.plan` says about many devices; what real ranks count is compared in tests/training/kron_ranks.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lodo
from lodo import KronLODO
from lodo.planning import Entry, Piece, assigned, products_of, rows_of, traffic

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()


def test_owners_are_balanced_in_time_and_memory():
    works = [(float(i % 7 + 1), float((3 * i) % 5 + 1)) for i in range(40)]
    loads = [[0.0, 0.0] for _ in range(4)]
    owners = assigned(works, loads)
    for k in (0, 1):
        held = [sum(work[k] for work, owner in zip(works, owners, strict=True) if owner == rank) for rank in range(4)]
        assert held == [load[k] for load in loads]
        assert max(held) <= 1.1 * sum(held) / 4


def test_what_has_an_owner_counts():
    assert assigned([(1.0, 1.0)], [[5.0, 5.0], [0.0, 0.0]]) == [1]


def test_rows_as_torch_splits_them():
    for rows in range(1, 9):
        for parts in range(1, 6):
            found = [
                rows_of((rows, 2), parts, part).of(torch.arange(2 * rows).reshape(rows, 2)) for part in range(parts)
            ]
            chunks = torch.arange(2 * rows).reshape(rows, 2).chunk(parts)
            assert all(map(torch.equal, found, chunks))
            assert all(x.numel() == 0 for x in found[len(chunks) :])


def test_gradients_come_from_the_owner_s_own_replica():
    halves = (Piece((0, 0), (1, 2)), Piece((1, 0), (1, 2)))
    for owner, source in ((0, 1), (1, 0), (2, 3), (3, 2)):
        assert list(Entry((2, 2), 4, 4, halves * 2, owner).sources()) == [source]
    sent = traffic([Entry((2, 2), 4, 4, halves * 2, 3)], 4)
    assert [x.bytes for x in sent] == [24, 24, 24 + 8, 24 + 3 * 8]
    assert {x.messages for x in sent} == {6}


def product(_, G, H, **rest):
    """The FLOPs of G H, given their shapes, which torch does not count if A is added in place."""
    b, m, k = G
    return 2 * b * m * k * H[-1]


@pytest.mark.parametrize(("shape", "options"), [
    ((12, 20), {}),
    ((12, 20), {"max_dim": 16}),
    ((12, 20), {"basis": "orthogonal"}),
    ((12,), {}),
    ((5, 2, 3), {"refresh_every": 4}),
])  # fmt: skip
def test_flops_of_products_are_those_of_a_step(shape, options):
    p = nn.Parameter(torch.randn(shape))
    opt = KronLODO([p], backend="reference", **options)
    every = opt.param_groups[0]["refresh_every"]
    p.grad = torch.randn(shape)
    opt.step()  # the first one refreshes bases, and is not like others
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: product}) as counter:
        for _ in range(every):
            p.grad = torch.randn(shape)
            opt.step()
    assert counter.get_total_flops() == pytest.approx(every * products_of(p, opt.param_groups[0]))


def test_a_model_and_its_shapes_have_the_same_plan():
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)).to("meta")
    model[1].bias.requires_grad_(False)
    shapes = [(9, 6), (9,), (2, 9)]
    assert lodo.plan(model, world=3) == lodo.plan(shapes, world=3)
    whole = lodo.plan(shapes, world=1)
    assert whole.messages == whole.bytes == 0
    assert whole.most_state == whole.state
    assert whole.speedup == whole.state_share == 1


@pytest.mark.parametrize(("arguments", "message"), [
    ({"world": 0}, "world must be an integer >= 1, got 0"),
    ({"world": 2, "sharded": "no"}, "sharded must be"),
    ({"world": 2, "max_dim": -1}, "max_dim must be an integer >= 0, got -1"),
])  # fmt: skip
def test_errors(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        lodo.plan([(2, 3)], **arguments)
    with pytest.raises(ValueError, match="model must have tensors to train"):
        lodo.plan([], world=2)


@pytest.mark.slow
def test_the_table_in_the_docs():
    names: dict[str, object] = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, flags=re.DOTALL).group(1), names)
    rows = re.findall(r"^\| (GPT-2 small|1\.3B|7B) \|(.*)\|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 9
    for name, rest in rows:
        shapes, max_dim = names["MODELS"][name]
        cells = [cell.strip() for cell in rest.split("|")]
        p = lodo.plan(shapes, world=int(cells[1]), max_dim=max_dim)
        assert cells[2:] == [
            f"{p.most_state / 1e9:.2f} GB", f"{p.state_share * p.world:.1f}", f"{p.most_flops / 1e12:.2f}",
            f"{p.speedup:.0f}", str(p.messages), f"{p.most_bytes / 1e9:.2f} GB", f"{p.bytes / p.gradient_bytes:.3f}",
        ]  # fmt: skip
