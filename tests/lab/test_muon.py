"""Muon with AdamW: against torch's two optimizers, and which parameters each of them gets."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from lodo.lab.optimizers import build
from lodo.lab.optimizers.muon import MuonAndAdamW, hidden_matrices
from lodo.lab.tasks import Task, make_task


class Words(Task):
    """A network with every kind of parameter."""

    def __init__(self, seed):
        super().__init__(seed)
        self.net = Net()
        self.params = list(self.net.parameters())

    def loss(self):
        return self.net(torch.arange(4)).square().sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = Parameter(torch.ones(4, 6))
        self.words = nn.Embedding(5, 6)
        self.mix = nn.Conv1d(6, 8, 3, padding=1)
        self.hidden = nn.Linear(8, 7)
        self.last = nn.Linear(7, 2)

    def forward(self, x):
        return self.last(self.hidden(self.mix((self.words(x) + self.places).mT).mT))


def test_vectors_embeddings_and_the_last_layer_are_adamws():
    task = Words(0)
    assert [id(p) for p in hidden_matrices(task)] == [id(task.net.mix.weight), id(task.net.hidden.weight)]


def test_without_modules_every_matrix_but_the_last_is_muons():
    task = Words(0)
    del task.net
    assert [p.shape for p in hidden_matrices(task)] == [p.shape for p in task.params if p.ndim > 1][:-1]
    assert hidden_matrices(make_task("bowl", {"n": 4}, 0)) == []


def test_it_does_what_torchs_muon_and_adamw_do():
    """torch's Muon computes in bfloat16, with three digits."""
    torch.manual_seed(0)
    W, kernel, b = torch.randn(5, 3), torch.randn(4, 2, 3), torch.randn(3)
    ours = [Parameter(x.clone()) for x in (W, kernel, b)]
    theirs = [Parameter(W.clone()), Parameter(kernel.flatten(1).clone()), Parameter(b.clone())]
    both = MuonAndAdamW(ours[:2], ours[2:], lr=0.01)
    muon = torch.optim.Muon(theirs[:2], lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(theirs[2:], lr=0.01)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.view_as(q).clone()
        both.step()
        muon.step()
        adamw.step()
    for p, q, start in zip(ours, theirs, (W, kernel, b), strict=True):
        moved = float((p.detach() - start).abs().max())
        torch.testing.assert_close(p.view_as(q), q, rtol=0, atol=0.02 * moved)
    assert torch.equal(ours[2], theirs[2])


def trained(optimizer, params, steps, seed):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        for p in params:
            p.grad = torch.randn(p.shape, generator=rng)
        optimizer.step()


def both():
    rng = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=rng)) for shape in ((4, 3), (3, 3), (3,))]
    return params, MuonAndAdamW(params[:2], params[2:], lr=0.1)


def test_it_resumes_bit_for_bit():
    whole, one = both()
    halves, two = both()
    trained(one, whole, 3, seed=1)
    trained(two, halves, 3, seed=1)
    three = MuonAndAdamW(halves[:2], halves[2:], lr=7.0)
    three.load_state_dict(copy.deepcopy(two.state_dict()))
    trained(one, whole, 3, seed=2)
    trained(three, halves, 3, seed=2)
    assert all(map(torch.equal, whole, halves))
    assert set(three.state) == set(halves)


def test_it_is_an_optimizer_like_any_other():
    params, optimizer = both()
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    trained(optimizer, params, 1, seed=1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    other = copy.deepcopy(optimizer)
    before = [p.detach().clone() for p in params]
    trained(optimizer, params, 1, seed=2)  # at a rate of 0
    assert all(map(torch.equal, params, before))
    twins = [p for group in other.param_groups for p in group["params"]]
    for group in other.param_groups:
        group["lr"] = 0.1
    trained(other, twins, 1, seed=2)
    assert not any(map(torch.equal, params, twins))
    assert called == [1, 1]


def test_one_rate_for_both():
    optimizer = build("muon_adamw", Words(0), 0, {"lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    with pytest.raises(ValueError, match="muon_adamw has no option 'rate'"):
        build("muon_adamw", Words(0), 0, {"rate": 0.5})
