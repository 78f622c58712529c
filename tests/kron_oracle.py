"""KronLODO as its equations say, one matrix at a time, with autograd for the hypergradients. Slow and plain."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class KronOracle:
    """Steps a list of real matrices and vectors, given their gradients.

    Each keeps its last step as a function of c and w, and asks autograd how the loss depends on them.
    """

    def __init__(
        self, params: list[Tensor], *, lr=3e-3, meta_lr=1e-2, betas=(0.95, 0.95), weight_decay=0.03, eps=1e-8,
        kronecker=True, gains=True, gate=True, gate_lr=1e-3, averaging=0.1, anneal=1500.0,
        max_dim=1024, refresh_every=10, guard=True, fastest=0.0,
    ):  # fmt: skip
        self.params = [p.clone() for p in params]
        self.lr, self.meta_lr, self.betas, self.weight_decay, self.eps = lr, meta_lr, betas, weight_decay, eps
        self.gains, self.gate, self.gate_lr = gains, gate, gate_lr
        self.averaging, self.anneal = averaging, anneal
        self.refresh_every, self.guard = refresh_every, guard
        self.noise = 1e-5 if kronecker else 0.0
        self.fastest = fastest  # the lr of another group
        self.t, self.peak, self.scheduled, self.changed, self.before = 0, 0.0, 0, 0, 0.0
        self.states = []
        first = min(0.0, math.log(3e-3 / lr))
        for p in self.params:
            G = p.reshape(p.shape[0], -1) if p.dim() > 1 else p.reshape(1, -1)
            m, n = G.shape
            self.states.append({
                "P": torch.eye(m, dtype=p.dtype), "Q": torch.eye(n, dtype=p.dtype),
                "A": torch.zeros(m, m, dtype=p.dtype), "B": torch.zeros(n, n, dtype=p.dtype),
                "left": kronecker and 1 < m <= max_dim and m <= 16 * n,
                "right": kronecker and 1 < n <= max_dim and n <= 16 * m and p.dim() > 1,
                "M": torch.zeros_like(G), "V": torch.zeros_like(G), "weights": [], "square_weights": [],
                "c": first, "highest": first, "w": 1.0, "c_adam": [0.0, 0.0], "w_adam": [0.0, 0.0], "last": None,
                "squares": 0.0,
            })  # fmt: skip

    def step(self, grads: list[Tensor]) -> None:
        self.rise = math.log(max(self.lr / self.peak, 1.0)) if self.peak else 0.0
        self.peak = max(self.peak, self.lr)
        if self.lr != self.before:
            self.changed, self.before = self.t, self.lr
        self.scheduled += self.lr < self.peak and self.t - self.changed <= self.t / 10
        self.full = max(self.peak, min(self.fastest, 3e-3))
        for i, grad in enumerate(grads):
            self._step(self.params[i], self.states[i], grad)
        self.t += 1

    def _step(self, p: Tensor, s: dict, grad: Tensor) -> None:
        b1, b2 = self.betas
        G = grad.reshape(s["M"].shape)
        if self.guard and s["squares"] > 0 and bool(G.any()):
            recent = math.sqrt(s["squares"] / (1 - b2**self.t))
            G = G * min(1.0, 5 * recent / float(G.norm()))
        if bool(G.any()):  # a gradient of zero says nothing about the size of others
            s["squares"] = b2 * s["squares"] + (1 - b2) * float(G.square().sum())
        if s["last"] is not None:
            self._learn(s, G, moved=s["moved"] > 0)
        window = max(1 / (1 - b2), self.averaging * (self.t + 1))
        doubled = math.floor(math.log2(window * (1 - b2) + 1e-6)) if window * (1 - b2) > 1 else 0
        pace = 2 ** ((doubled + 1) // 2)
        if self.t % pace == 0:
            s["A"] = (1 - pace / window) * s["A"] + pace / window * G @ G.T
            s["B"] = (1 - pace / window) * s["B"] + pace / window * G.T @ G
        if self.t % (self.refresh_every * 2**doubled) == 0:
            M = s["P"] @ s["M"] @ s["Q"].T
            if s["left"]:
                s["P"] = self._refreshed(s["A"], s["P"])
            if s["right"]:
                s["Q"] = self._refreshed(s["B"], s["Q"])
            s["M"] = s["P"].T @ M @ s["Q"]
        X = s["P"].T @ G @ s["Q"]
        newest = 1 / max(1 / (1 - b1), self.averaging * (self.t + 1))
        s["weights"] = [weight * (1 - newest) for weight in s["weights"]] + [newest]
        s["M"] = (1 - newest) * s["M"] + newest * X
        newest = 1 / max(1 / (1 - b2), self.averaging * (self.t + 1))
        s["square_weights"] = [weight * (1 - newest) for weight in s["square_weights"]] + [newest]
        s["V"] = (1 - newest) * s["V"] + newest * X**2
        M, V = s["M"] / sum(s["weights"]), s["V"] / sum(s["square_weights"])
        recent = math.sqrt(s["squares"] / (1 - b2 ** (self.t + 1)) / X.numel())
        P, Q, R, lr = s["P"], s["Q"], V.sqrt() + self.eps + self.noise * recent, self.lr
        N, U = M / R, X / R
        if self.guard:
            most = 1 / math.sqrt(1 - b2)
            N, U = N.clamp(-most, most), U.clamp(-most, most)

        def move(c: Tensor, w: Tensor) -> Tensor:
            return -lr * c.exp() * P @ ((1 - w) * U + w * N) @ Q.T

        s["last"] = move
        c, w = (torch.tensor(s[x], dtype=p.dtype) for x in "cw")
        s["moved"] = float(move(c, w).norm())
        annealed = lr
        if self.gains and self.anneal:
            annealed = min(lr, self.peak / (1 + max(self.t - self.scheduled, 0) / self.anneal))
        if self.gains:
            annealed *= min(1.0, 3e-3 / self.peak)
        p.mul_(1 - annealed * self.weight_decay).add_(move(c, w).reshape(p.shape))

    def _refreshed(self, A: Tensor, P: Tensor) -> Tensor:
        return torch.linalg.qr((A / A.diagonal().mean()) @ P + 1e-5 * P).Q

    def _learn(self, s: dict, G: Tensor, moved: bool) -> None:
        c, w = (torch.tensor(s[x], dtype=G.dtype, requires_grad=True) for x in "cw")
        with torch.enable_grad():
            slopes = torch.autograd.grad((G * s["last"](c, w)).sum(), (c, w))
        scale = float(G.norm()) * s["moved"]
        dc, dw = (float(slope) / scale if scale else 0.0 for slope in slopes)
        if self.gains:
            faster = 10 if s["highest"] < math.log(3e-3 / self.full) else 1
            if moved:
                s["c"] -= faster * self.meta_lr * self._adam(s["c_adam"], dc, 0.99)
            for each in ("c", "highest"):
                s[each] = max(min(s[each], 0.0), s[each] - self.rise)
            fall = math.inf
            if self.anneal:
                constant = max(self.t - self.scheduled, 0)
                below = math.log(self.peak / self.lr) if self.lr else math.inf
                fall = max(math.log(1 + constant / self.anneal) - below, 0.0)
            s["c"] = min(s["c"], math.log(max(0.03, self.full) / self.full) - (fall if self.anneal else 0.0))
            s["highest"] = max(s["highest"], s["c"])
            s["c"] = max(s["c"], s["highest"] - fall)
        if self.gate and moved:
            s["w"] = min(max(s["w"] - self.gate_lr * self._adam(s["w_adam"], dw, 0.999), 0.0), 1.0)

    def _adam(self, moments: list[float], slope: float, beta2: float) -> float:
        moments[0] = 0.9 * moments[0] + 0.1 * slope
        moments[1] = beta2 * moments[1] + (1 - beta2) * slope**2
        m, v = moments[0] / (1 - 0.9**self.t), moments[1] / (1 - beta2**self.t)
        return m / (math.sqrt(v) + 1e-7)
