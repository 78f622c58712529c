"""What does a step of KronLODO cost? Ratios measured side by side in one run, on one thread.

    python benchmarks/kron.py                  about five minutes
    python benchmarks/kron.py --quick          fewer repeats, no block of GPT-2

Every optimizer steps in turn, on the same gradients, in rounds of ten steps, in which SOAP refreshes its bases once.
KronLODO does so less and less often (`lodo.kron_step.intervals`): the small case is a run of 3,000 steps, as long as
that of the small transformer of `lodo run networks`, and its first 200 steps are shown beside it. A character GPT is
trained on random tokens, with its forward and backward passes. What is measured is processor time, so that other work
on the machine hardly counts. Targets are in brackets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median

import torch
from pytorch_optimizer import SOAP
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lodo import KronLODO
from lodo.kron_state import memory_of
from measuring import with_target, write

Shapes = list[tuple[int, ...]]
TARGETS = {
    "small/own_soap": 1.2,
    "small/soap": 0.5,
    "small/adam_fused": 15.0,
    "gpt2_block/soap": 0.7,
    "chars/adamw": 0.85,
    "bytes_a_weight": 12.0,
    "bytes_a_weight/bfloat16": 7.0,
}
AT_LEAST = {"chars/adamw"}
LABELS = {
    "small/own_soap": "116k weights in 25 tensors, 3,000 steps: over the same without gains and gate (own SOAP)",
    "small/soap": "... over pytorch_optimizer's SOAP",
    "small/adam_fused": "... over torch.optim.Adam(fused=True)",
    "small_at_first/soap": "the same in the first 200 steps: over pytorch_optimizer's SOAP",
    "small_at_first/adam_fused": "... over torch.optim.Adam(fused=True)",
    "gpt2_block/own_soap": "a block of GPT-2 small, 7.1 million weights: a step over own SOAP",
    "gpt2_block/soap": "... over pytorch_optimizer's SOAP",
    "gpt2_block/adam_fused": "... over torch.optim.Adam(fused=True)",
    "chars/adamw": "character GPT of 215k weights, batch 32 x 64: steps a second, over those with AdamW",
    "bytes_a_weight": "GPT-2 small: bytes of state a weight",
    "bytes_a_weight/bfloat16": "... with state_dtype='bfloat16'",
}


def block(d: int) -> Shapes:
    """A transformer's block of width d: norms, attention, and two layers of 4 d, with biases."""
    layers = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)]
    return [(d,)] * 4 + [shape for out, inputs in layers for shape in ((out, inputs), (out,))]


SMALL: Shapes = [(256, 64), *block(64), *block(64)]
GPT2: Shapes = [(50257, 768), (1024, 768), *block(768) * 12, (768,), (768,)]
RIVALS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "kron": KronLODO,
    "own_soap": lambda params: KronLODO(params, gains=False, gate=False, averaging=0),
    "soap": lambda params: SOAP(params, lr=3e-3, precondition_frequency=10, max_precondition_dim=1024),
    "adam_fused": lambda params: Adam(params, fused=True),
    "adamw": AdamW,
}


def measured(shapes: Shapes, rounds: int) -> dict[str, list[float]]:
    """The seconds of ten steps of every optimizer, in every round."""
    rng = torch.Generator().manual_seed(0)
    opts = {}
    for name, make in RIVALS.items():
        params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        opts[name] = (params, make(params))
    gradients = [[torch.randn(shape, generator=rng) for shape in shapes] for _ in range(2)]

    def ten_steps(name: str) -> None:
        params, opt = opts[name]
        for step in range(10):
            for p, g in zip(params, gradients[step % 2], strict=True):
                p.grad = g
            opt.step()

    return in_turn({name: partial(ten_steps, name) for name in opts}, rounds)


def ratios(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The time of KronLODO over that of each rival."""
    ours = sum(seconds["kron"])
    return {name: ours / sum(values) for name, values in seconds.items() if name != "kron"}


def in_turn(calls: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """The processor seconds of each call in every round; one more round, before them, warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if number:
                seconds[name].append(time.process_time() - start)
    return seconds


class CharacterGPT(nn.Module):
    """A transformer of 4 blocks of width 64 for 64 characters of 84 kinds: 215,000 weights."""

    def __init__(self, d: int = 64, blocks: int = 4, context: int = 64, kinds: int = 84) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(kinds, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, kinds)
        self.mask: torch.Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for layer in self.blocks:
            x = layer(x, src_mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def training_ratio(rounds: int) -> float:
    """Steps a second of training with KronLODO over those with AdamW."""
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(84, (32, 65), generator=rng)

    def ten_steps(model: nn.Module, opt: Optimizer) -> None:
        for _ in range(10):
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            opt.step()

    calls = {}
    for name in ("kron", "adamw"):
        model = CharacterGPT()
        calls[name] = partial(ten_steps, model, RIVALS[name](list(model.parameters())))
    seconds = in_turn(calls, rounds)
    return float(median(map(truediv, seconds["adamw"], seconds["kron"])))


def bytes_a_weight(shapes: Shapes, state_dtype: str | None = None) -> float:
    options = KronLODO([nn.Parameter(torch.zeros(1))], state_dtype=state_dtype).param_groups[0]
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    return sum(memory_of(x, options).total for x in tensors) / sum(x.numel() for x in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no block of GPT-2")
    parser.add_argument("--repeats", type=int, default=None, help="rounds of ten steps each")
    parser.add_argument("--out", type=Path, default=Path("results/kron.json"), help="where the JSON goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measured(SMALL, args.repeats or (5 if args.quick else 300))
    found = {f"small/{k}": v for k, v in ratios(seconds).items()}
    at_first = {name: values[:20] for name, values in seconds.items()}
    found |= {f"small_at_first/{k}": v for k, v in ratios(at_first).items()}
    if not args.quick:
        found |= {f"gpt2_block/{k}": v for k, v in ratios(measured(block(768), args.repeats or 3)).items()}
    found["chars/adamw"] = training_ratio(args.repeats or (2 if args.quick else 10))
    found["bytes_a_weight"] = bytes_a_weight(GPT2)
    found["bytes_a_weight/bfloat16"] = bytes_a_weight(GPT2, "bfloat16")
    table = Table(title="A step of KronLODO, ratios with targets in brackets")
    table.add_column("figure")
    table.add_column("ratio", justify="right")
    for name, label in LABELS.items():
        if name in found:
            value = found[name]
            table.add_row(label, with_target(f"{value:.2f}", value, TARGETS.get(name), at_least=name in AT_LEAST))
    Console().print(table)
    write(args.out, found)


if __name__ == "__main__":
    main()
