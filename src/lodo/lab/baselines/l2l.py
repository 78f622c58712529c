r"""L2LBGDBGD, "Learning to learn by gradient descent by gradient descent" (Andrychowicz et al., 2016).

An LSTM, shared by all coordinates, reads a gradient and writes a step. It is trained before it is used, here on
random noisy quadratic bowls, the task on which the LODO paper compares it.

The paper of 2016 gives the network (two layers of 20, the preprocessing, the output times 0.1), Adam at 0.03 and the
unrolls of 20 steps in episodes of 100. What it leaves open is chosen by measurement: two bowls an episode, a rate
that falls linearly to zero, and the weights that track best in a run much longer than an episode. That last choice
matters: an unroll of 20 steps sees little of the bowl's slow directions, so the training loss does not tell the
networks that track well for 100,000 steps from those that do not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from lodo._checks import check_int, check_real

HIDDEN = 20
P = 10.0  # gradients below exp(-P) are read on a linear scale, others on a logarithmic one
SCALE = 0.1  # of the network's output

Memory = tuple[Tensor, Tensor, Tensor, Tensor]  # h and c of the first layer, h and c of the second


def preprocess(g: Tensor) -> Tensor:
    """The paper's two features of a gradient: ``(log|g| / P, sign g)``, or ``(-1, exp(P) g)`` if g is tiny.

    >>> preprocess(torch.tensor([1.0, -1.0, 0.0]))
    tensor([[ 0.,  1.],
            [ 0., -1.],
            [-1.,  0.]])
    """
    # at |g| = exp(-P) both cases agree, so two clamps say what the paper says with a branch
    return torch.stack((g.abs().log().div(P).clamp(min=-1), g.mul(math.exp(P)).clamp(-1, 1)), -1)


class Net(nn.Module):
    """Two LSTM layers and a linear head, applied to each coordinate of a vector alike.

    Args:
        rng: draws the weights, uniformly in the bounds of `torch.nn.LSTMCell`; zeros if None.

    Example:
        >>> net = Net(torch.Generator().manual_seed(0))
        >>> step, memory = net(torch.randn(7), net.blank(7))
        >>> step.shape
        torch.Size([7])
    """

    def __init__(self, rng: torch.Generator | None = None) -> None:
        super().__init__()
        # without their own initialisation, which draws from the global generator
        self.first = nn.utils.skip_init(nn.LSTMCell, 2, HIDDEN)
        self.second = nn.utils.skip_init(nn.LSTMCell, HIDDEN, HIDDEN)
        self.head = nn.utils.skip_init(nn.Linear, HIDDEN, 1)
        bound = HIDDEN**-0.5
        for w in self.parameters():
            nn.init.zeros_(w) if rng is None else nn.init.uniform_(w, -bound, bound, generator=rng)

    def forward(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The step that the gradients ``g`` (a vector) call for, and the new memory."""
        h1, c1, h2, c2 = memory
        h1, c1 = self.first(preprocess(g), (h1, c1))
        h2, c2 = self.second(h1, (h2, c2))
        return SCALE * self.head(h2).squeeze(-1), (h1, c1, h2, c2)

    def blank(self, n: int) -> Memory:
        """The memory of n coordinates before their first step."""
        h1, c1, h2, c2 = self.head.weight.new_zeros(4, n, HIDDEN)
        return h1, c1, h2, c2


class L2L(Optimizer):
    r"""A trained network as an optimizer: each coordinate's step is what the LSTM makes of its gradients so far.

    .. math::
        x_{t+1} = x_t + 0.1\, m(\nabla \ell(x_t), s_t)

    Args:
        params: parameters or parameter groups.
        net: a trained `Net`, or the state that `train` returns. It is copied, and is no part of ``state_dict()``.

    Example:
        >>> x = torch.nn.Parameter(torch.ones(3))
        >>> opt = L2L([x], train(episodes=1, batch=1, n=3))
        >>> x.square().sum().backward()
        >>> opt.step()
    """

    def __init__(self, params: ParamsT, net: Net | Mapping[str, Tensor]) -> None:
        net = copy.deepcopy(net) if isinstance(net, Net) else _from_state(net)
        self._net = net.requires_grad_(False)
        self._casts: dict[tuple[torch.device, torch.dtype], Net] = {}
        super().__init__(params, {})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss; called once if given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad)
        return loss

    def _move(self, p: Tensor, g: Tensor) -> None:
        net, state = self._cast(p), self.state[p]
        if not state:
            state["h1"], state["c1"], state["h2"], state["c2"] = net.blank(p.numel())
        memory = state["h1"], state["c1"], state["h2"], state["c2"]
        step, memory = net(g.reshape(-1), memory)
        state["h1"], state["c1"], state["h2"], state["c2"] = memory
        p.add_(step.view(p.shape))

    def _cast(self, p: Tensor) -> Net:
        """The network in the parameter's own dtype, in which torch also loads a saved state."""
        key = p.device, p.dtype
        if key not in self._casts:
            self._casts[key] = copy.deepcopy(self._net).to(*key)
        return self._casts[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_net": self._net, "_casts": {}}


def _from_state(state: Mapping[str, Tensor]) -> Net:
    """The network with these weights, or an error that says what is wrong with them."""
    net = Net()
    allowed = {name: tuple(w.shape) for name, w in net.state_dict().items()}
    given = {name: tuple(w.shape) for name, w in state.items()} if isinstance(state, Mapping) else state
    if given != allowed:
        raise ValueError(f"net must be a Net or a state with the shapes {allowed}, got {given!r}")
    net.load_state_dict(state)
    return net


# ------------------------------------------------------------ training


def train(
    *,
    seed: int = 0,
    episodes: int = 500,
    lr: float = 0.03,
    unroll: int = 20,
    length: int = 100,
    n: int = 100,
    v: float = 1.0,
    batch: int = 2,
    check_every: int = 10,
    check_steps: int = 1000,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Train a network on random noisy bowls, and return the weights that tracked held-out bowls best.

    The result is a function of the arguments alone; the global random generator is neither read nor moved.

    Args:
        seed: draws the weights, the bowls and the noise.
        episodes: each starts anew on ``batch`` new bowls.
        lr: Adam's first rate; it falls linearly to zero.
        unroll: steps between two updates of the weights, through which gradients flow back.
        length: steps an episode, a multiple of ``unroll``.
        n: the dimension of the bowls.
        v: the variance by which their centres move at every step.
        batch: bowls an episode.
        check_every: episodes between two trials of the weights on held-out bowls.
        check_steps: steps of such a trial; its mean loss over the second half is the score.
        on_progress: called after every episode with the number done so far.
    """
    check_int("seed", seed, low=0)
    for name, value in {
        "episodes": episodes, "unroll": unroll, "length": length, "n": n, "batch": batch,
        "check_every": check_every, "check_steps": check_steps,
    }.items():  # fmt: skip
        check_int(name, value, low=1)
    check_real("lr", lr, low=0.0, open_low=True)
    check_real("v", v, low=0.0)
    if length % unroll:
        raise ValueError(f"length must be a multiple of unroll = {unroll}, got {length}")

    rng = torch.Generator().manual_seed(seed)
    held_out = bowls(4, n, rng), rng.get_state()
    net = Net(rng)
    adam = torch.optim.Adam(net.parameters(), lr=lr)
    best, kept = math.inf, copy.deepcopy(net.state_dict())
    for episode in range(1, episodes + 1):
        adam.param_groups[0]["lr"] = lr * (1 - (episode - 1) / episodes)
        for loss in losses(net, bowls(batch, n, rng), v, unroll, length, rng):
            adam.zero_grad()
            loss.backward()
            adam.step()
        if episode % check_every == 0 or episode == episodes:
            score = trial(net, *held_out, v, check_steps)
            if score < best:
                best, kept = score, copy.deepcopy(net.state_dict())
        if on_progress is not None:
            on_progress(episode)
    return kept


def bowls(count: int, n: int, rng: torch.Generator) -> Tensor:
    """Hessians ``U D U^T`` with random rotations and the curvatures of the paper's bowl, 0.001 to 1."""
    D = torch.logspace(-3, 0, n, dtype=torch.float64)
    U = torch.linalg.qr(torch.randn(count, n, n, generator=rng, dtype=torch.float64))[0]
    return ((U * D) @ U.mT).float()


def losses(net: Net, H: Tensor, v: float, unroll: int, length: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Track a moving minimum under each Hessian, and yield the mean loss of every unroll.

    Gradients flow back to the start of the unroll, through the steps and the memory, but not through what the
    network reads: the paper drops the second derivatives.
    """
    x = centre = torch.zeros(H.shape[:2])
    memory = net.blank(x.numel())

    def shift() -> Tensor:
        return centre + v**0.5 * torch.randn(x.shape, generator=rng)

    centre = shift()
    g = _times(H, x - centre)
    for _ in range(length // unroll):
        total = torch.zeros(())
        for _ in range(unroll):
            step, memory = net(g.detach().flatten(), memory)
            x, centre = x + step.view_as(x), shift()
            g = _times(H, x - centre)
            total = total + 0.5 * ((x - centre) * g).sum()
        yield total / (unroll * len(H))
        x, memory = x.detach(), forget(memory)


def _times(H: Tensor, x: Tensor) -> Tensor:
    return (H @ x.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def tracking_error(net: Net, H: Tensor, v: float, steps: int, rng: torch.Generator) -> float:
    """The mean loss over the second half of a run."""
    curve = [float(loss) for loss in losses(net, H, v, 1, steps, rng)]
    return sum(curve[steps // 2 :]) / (steps - steps // 2)
