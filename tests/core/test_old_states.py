"""States that lodo 0.1.0 saved: today's optimizer continues the run, or says why it cannot."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from helpers import same, snapshot
from lodo import LODO, Mixing, Residual
from lodo.meta import SGD, Adam, ScheduleFree

# Four steps of 0.1.0 with the `gradients` below: parameters and state, and the parameters after four more steps.
SAVED = torch.load(Path(__file__).parent / "data" / "states-0.1.0.pt", weights_only=True)

OPTIONS = {
    "paper": {"preconditioner": Mixing(depth=3)},
    "robust": {"preconditioner": Mixing(depth=3, mixing="shuffle"), "recipe": "robust"},
    "schedule-free": {
        "preconditioner": Mixing(depth=2, block_size=8, width=1.5),
        "momentum": "learned",
        "meta_optimizer": ScheduleFree(b=0.9, window=50),
    },
    "double": {
        "preconditioner": Mixing(depth=2, mixing="shuffle"),
        "meta_optimizer": SGD(),
        "meta_lr": 1e-4,
        "guard": True,
    },
}
OF_THE_SECOND_GROUP = {
    "double": {"preconditioner": Residual(depth=3), "meta_optimizer": Adam(betas=(0.8, 0.99), eps=1e-6)}
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def gradients(params, step):
    rng = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p.dtype)


def optimizer(name, backend):
    """The parameters as 0.1.0 left them, and an optimizer that has yet to learn anything."""
    params = [torch.nn.Parameter(p.clone()) for p in SAVED[name]["params"]]
    groups = params
    if name in OF_THE_SECOND_GROUP:
        groups = [{"params": params[:1]}, {"params": params[1:], **OF_THE_SECOND_GROUP[name]}]
    return params, LODO(groups, lr=0.1, backend=backend, **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_the_run_continues(name, backend):
    params, opt = optimizer(name, backend)
    opt.load_state_dict(copy.deepcopy(SAVED[name]["state"]))
    for step in range(4, 8):
        gradients(params, step)
        opt.step()
    for p, expected in zip(params, SAVED[name]["after"], strict=True):
        tolerance = TOLERANCE[p.dtype]
        torch.testing.assert_close(p.detach(), expected, rtol=tolerance, atol=0.01 * tolerance)  # entries are about 1


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_saved_next_is_todays(name, backend):
    """A converted state is saved in natural order, and loads again without a conversion."""
    params, opt = optimizer(name, backend)
    opt.load_state_dict(SAVED[name]["state"])
    saved = opt.state_dict()
    _, again = optimizer(name, backend)
    again.load_state_dict(saved)
    assert same(again.state_dict(), saved)
    for group in saved["param_groups"]:
        assert not {"meta_betas", "meta_eps", "meta_window", "moment_dtype"} & set(group)
    gradients(params, 4)
    opt.step()


def test_a_state_of_other_permutations_is_refused(backend):
    state = copy.deepcopy(SAVED["paper"]["state"])
    state["state"][0]["fingerprint"] ^= 1
    with pytest.raises(ValueError, match="other permutations"):
        optimizer("paper", backend)[1].load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preconditioner": Mixing(depth=4)}, r"preconditioner = 'mixing\(depth=3\)', ours is 'mixing\(depth=4\)'"),
        ({"preconditioner": "diagonal"}, r"preconditioner = 'mixing\(depth=3\)', ours is 'diagonal'"),
        ({"meta_optimizer": "sgd"}, "meta_optimizer = 'adam', ours is 'sgd'"),
        ({"momentum": "learned"}, "momentum = 'fixed', ours is 'learned'"),
    ],
)
def test_a_state_of_another_network_is_refused(options, message):
    params = [torch.nn.Parameter(p.clone()) for p in SAVED["paper"]["params"]]
    opt = LODO(params, lr=0.1, **{**OPTIONS["paper"], **options})
    before = snapshot(opt)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(SAVED["paper"]["state"])
    assert same(snapshot(opt), before)


@pytest.mark.parametrize("options", [{}, {"preconditioner": "diagonal"}], ids=["mixing", "diagonal"])
def test_permuted_shuffles_are_refused_with_a_reason(options, backend):
    params = [torch.nn.Parameter(p.clone()) for p in SAVED["permuted-shuffle"]["params"]]
    opt = LODO(params, lr=0.1, backend=backend, **{"preconditioner": Mixing(depth=2), **options})
    before = snapshot(opt)
    reason = r"group 0 .* saved by lodo 0\.1\.0 with mixing='permuted-shuffle', which no longer exists"
    with pytest.raises(ValueError, match=reason):
        opt.load_state_dict(SAVED["permuted-shuffle"]["state"])
    assert same(snapshot(opt), before)
