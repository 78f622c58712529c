"""L2LBGDBGD, "Learning to learn by gradient descent by gradient descent" (Andrychowicz et al., 2016).

An LSTM that all coordinates share reads a gradient and returns a step. It is trained before it is used, here on random
noisy quadratic bowls, the task on which the LODO paper compares it.

Its authors give the network (two layers of 20 units, the preprocessing, the output times 0.1) and the training (Adam,
unrolls of 20 steps in episodes of 100). The rest was chosen by measurement: two bowls in each episode, a learning rate
that falls linearly to zero, and, as the result, the weights that tracked held-out bowls best in runs longer than an
episode. The last matters: late in training, when the loss of an episode hardly changes, the tracking error of a long
run still varies between 15 and 16 from one check to the next.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim.optimizer import ParamsT

from lodo._checks import check_int, check_real
from lodo.lab.optimizers.base import ElementwiseOptimizer

HIDDEN = 20
P = 10.0  # gradients are read on a logarithmic scale down to exp(-P), and on a linear one below
SCALE = 0.1  # factor of the network's output
EPISODES = 1000  # number of episodes of 100 steps, on two bowls each: about three minutes

Memory = tuple[Tensor, Tensor, Tensor, Tensor]  # h and c of the first layer, h and c of the second


def preprocess(g: Tensor) -> Tensor:
    """The network's two inputs for a gradient: ``log|g| / P`` and ``sign g``, or -1 and ``exp(P) g`` if it is tiny.

    >>> preprocess(torch.tensor([1.0, -1.0, 0.0]))
    tensor([[ 0.,  0., -1.],
            [ 1., -1.,  0.]])
    """
    # both cases agree at |g| = exp(-P), so that two clamps replace the paper's branch
    return torch.stack((g.abs().log().div(P).clamp(min=-1), g.mul(math.exp(P)).clamp(-1, 1)))


def lstm(W: Tensor, b: Tensor, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One LSTM layer, on columns: the new h and c."""
    i, f, o, g = torch.addmm(b, W, torch.cat((x, h))).chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


class Net(Module):
    """Two LSTM layers and a linear head, applied to every coordinate of a vector.

    Args:
        rng: generator of the initial weights, which are uniform in the same range as those of torch's LSTM.

    Example:
        >>> net = Net(torch.Generator().manual_seed(0))
        >>> step, memory = net(torch.ones(7), net.blank(7))
        >>> step.shape
        torch.Size([7])
    """

    def __init__(self, rng: torch.Generator) -> None:
        super().__init__()

        def draw(*shape: int) -> Parameter:
            return Parameter((2 * torch.rand(shape, generator=rng) - 1) * HIDDEN**-0.5)

        self.W1, self.b1 = draw(4 * HIDDEN, 2 + HIDDEN), draw(4 * HIDDEN, 1)
        self.W2, self.b2 = draw(4 * HIDDEN, HIDDEN + HIDDEN), draw(4 * HIDDEN, 1)
        self.w, self.b = draw(1, HIDDEN), draw(1, 1)

    def forward(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The step for the gradient ``g`` (a vector), and the new memory."""
        h1, c1, h2, c2 = memory
        h1, c1 = lstm(self.W1, self.b1, preprocess(g), h1, c1)
        h2, c2 = lstm(self.W2, self.b2, h1, h2, c2)
        return SCALE * torch.addmm(self.b, self.w, h2).squeeze(0), (h1, c1, h2, c2)

    def blank(self, n: int) -> Memory:
        """The memory of n coordinates before their first step."""
        h1, c1, h2, c2 = (self.w.new_zeros(HIDDEN, n) for _ in range(4))
        return h1, c1, h2, c2


def restore(state: Mapping[str, Tensor]) -> Net:
    """The network with the weights ``state``, from `train`."""
    net = Net(torch.Generator())
    needed = {name: tuple(w.shape) for name, w in net.state_dict().items()}
    given: object = state
    if isinstance(state, Mapping):
        given = {name: tuple(w.shape) if isinstance(w, Tensor) else w for name, w in state.items()}
    if given != needed:
        raise ValueError(f"net_state must hold tensors of the shapes {needed}, got {given!r}")
    net.load_state_dict(state)
    return net


class L2L(ElementwiseOptimizer):
    r"""A trained network :math:`m` as an optimizer; every coordinate has its own memory :math:`s`.

    .. math::
        (u_t, s_{t+1}) &= m(\nabla \ell(x_t), s_t) \\
        x_{t+1} &= x_t + 0.1\, u_t

    Args:
        params: parameters or parameter groups.
        net_state: the weights of the network, from `train`. They are copied, and are not part of ``state_dict()``.

    Example:
        >>> x = Parameter(torch.ones(3))
        >>> opt = L2L([x], train(episodes=1, batch=1, n=3, check_steps=10))
        >>> x.square().sum().backward()
        >>> opt.step()
    """

    def __init__(self, params: ParamsT, net_state: Mapping[str, Tensor]) -> None:
        self._net = restore(net_state).requires_grad_(False)
        self._casts: dict[tuple[torch.device, torch.dtype], Net] = {}
        super().__init__(params, {})

    def move_one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        net, state = self._cast(p), self.state[p]
        memory = (state["h1"], state["c1"], state["h2"], state["c2"]) if state else net.blank(p.numel())
        step, memory = net(g.reshape(-1), memory)
        state["h1"], state["c1"], state["h2"], state["c2"] = memory
        p.add_(step.view(p.shape))

    def _cast(self, p: Tensor) -> Net:
        """The network in the dtype of the parameter, to which torch also casts a loaded state."""
        key = p.device, p.dtype
        if key not in self._casts:
            self._casts[key] = copy.deepcopy(self._net).to(*key)
        return self._casts[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_net": self._net, "_casts": {}}


# ------------------------------------------------------------ training


@torch.enable_grad()
def train(
    *,
    seed: int = 0,
    episodes: int = EPISODES,
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

    The result depends on the arguments alone; the global random generator is neither read nor moved.

    Args:
        seed: seed of the weights, the bowls and the noise.
        episodes: number of episodes; each starts afresh on ``batch`` new bowls.
        lr: Adam's initial learning rate, which falls linearly to zero.
        unroll: number of steps between two updates of the weights; gradients flow back as far.
        length: number of steps in an episode, a multiple of ``unroll``.
        n: dimension of the bowls.
        v: variance of the noise that moves their minima.
        batch: number of bowls in an episode.
        check_every: number of episodes between two checks of the weights on held-out bowls.
        check_steps: number of steps in a check.
        on_progress: called after every episode with the number of episodes done.
    """
    check_int("seed", seed, low=0)
    check_int("episodes", episodes, low=1)
    check_real("lr", lr, low=0.0, open_low=True)
    check_int("unroll", unroll, low=1)
    check_int("length", length, low=1)
    check_int("n", n, low=1)
    check_real("v", v, low=0.0)
    check_int("batch", batch, low=1)
    check_int("check_every", check_every, low=1)
    check_int("check_steps", check_steps, low=1)
    if length % unroll:
        raise ValueError(f"length must be a multiple of unroll, {unroll}, got {length}")

    rng = torch.Generator().manual_seed(seed)
    net, held_out, noise = Net(rng), bowls(4, n, rng), rng.clone_state()
    adam = torch.optim.Adam(net.parameters(), lr=lr)
    best, kept = math.inf, copy.deepcopy(net.state_dict())
    for episode in range(episodes):
        adam.param_groups[0]["lr"] = lr * (1 - episode / episodes)
        for loss in losses(net, bowls(batch, n, rng), v, unroll, length, rng):
            adam.zero_grad()
            torch.autograd.backward(loss)
            adam.step()
        if (episode + 1) % check_every == 0 or episode + 1 == episodes:
            error = tracking_error(net, held_out, v, check_steps, noise.clone_state())
            if error < best:
                best, kept = error, copy.deepcopy(net.state_dict())
        if on_progress is not None:
            on_progress(episode + 1)
    if not math.isfinite(best):
        raise FloatingPointError(f"the network diverged in every check, with lr = {lr} and v = {v}")
    return kept


def bowls(count: int, n: int, rng: torch.Generator) -> Tensor:
    """Hessians ``U D U^T`` with random rotations U and the paper's curvatures D, from 0.001 to 1."""
    D = torch.logspace(-3, 0, n, dtype=torch.float64)
    U: Tensor = torch.linalg.qr(torch.randn(count, n, n, generator=rng, dtype=torch.float64))[0]
    return ((U * D) @ U.mT).float()


def losses(net: Net, H: Tensor, v: float, unroll: int, length: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Track one moving minimum for each Hessian, and yield the mean loss of every unroll.

    Gradients flow back to the start of the unroll, through the steps and the memory, but not through what the
    network reads: like its authors, we drop the second derivatives.
    """
    x = torch.zeros(H.shape[:2])
    memory = net.blank(x.numel())
    centre = v**0.5 * torch.randn(x.shape, generator=rng)
    g = _times(H, x - centre)
    for _ in range(length // unroll):
        away = []
        for _ in range(unroll):
            step, memory = net(g.flatten(), memory)
            x = x + step.view_as(x)
            centre = centre + v**0.5 * torch.randn(x.shape, generator=rng)
            away.append(x - centre)
            g = _times(H, away[-1].detach())
        A = torch.stack(away, -1)
        yield 0.5 * (A * (H @ A)).sum() / (unroll * len(H))
        x = x.detach()
        memory = memory[0].detach(), memory[1].detach(), memory[2].detach(), memory[3].detach()


def _times(H: Tensor, x: Tensor) -> Tensor:
    return (H @ x.unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def tracking_error(net: Net, H: Tensor, v: float, steps: int, rng: torch.Generator) -> float:
    """The mean loss over the second half of a run of that many steps.

    >>> still = Net(torch.Generator()).requires_grad_(False)
    >>> _ = [w.zero_() for w in still.parameters()]
    >>> rng = torch.Generator().manual_seed(0)
    >>> tracking_error(still, bowls(1, 5, rng), v=0.0, steps=10, rng=rng)
    0.0
    """
    curve = [float(loss) for loss in losses(net, H, v, 1, steps, rng)]
    return sum(curve[steps // 2 :]) / (steps - steps // 2)
