"""Residual networks for small images (He et al. 2016): a 3 x 3 stem without pooling, then stages of basic blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import relu_

from lodo._checks import check_choice

CLASSES = 10
MODELS = {  # for each stage, its width and its number of blocks
    "resnet18": ((64, 2), (128, 2), (256, 2), (512, 2)),
    "resnet20": ((16, 3), (32, 3), (64, 3)),
    "resnet8": ((16, 1), (32, 1), (64, 1)),
    "narrow8": ((8, 1), (16, 1), (32, 1)),
}


class ResNet(nn.Module):
    """Maps images (image x 3 x row x column) to logits; every stage but the first halves the height and width."""

    def __init__(self, stages: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        width = stages[0][0]
        self.stem = _convolution(3, width, 3, 1)
        blocks = []
        for stage, (stage_width, number) in enumerate(stages):
            for block in range(number):
                halves = stage > 0 and block == 0
                blocks.append(Block(width, stage_width, stride=2 if halves else 1))
                width = stage_width
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(relu_(self.stem(x))).mean((2, 3))
        logits: Tensor = self.last(features)
        return logits


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, which has a 1 x 1 convolution where the shape changes."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(fan_in, fan_out, 3, stride)
        self.second = _convolution(fan_out, fan_out, 3, 1)
        same = stride == 1 and fan_in == fan_out
        self.shortcut = nn.Identity() if same else _convolution(fan_in, fan_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return relu_(self.second(relu_(self.first(x))).add_(self.shortcut(x)))


def _convolution(fan_in: int, fan_out: int, side: int, stride: int) -> nn.Sequential:
    """A convolution followed by batch norm."""
    convolution = nn.Conv2d(fan_in, fan_out, side, stride, padding=side // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(fan_out))


def _batch_norms(model: nn.Module) -> Iterator[nn.BatchNorm2d]:
    return (module for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def resnet(model: str, rng: torch.Generator) -> ResNet:
    """The network of this name, with initial weights drawn from ``rng``.

    The weights of convolutions are N(0, 2 / fan-out), the last layer is uniform as is torch's default, and batch norm
    starts with scale 1 and shift 0. The running statistics change only within `moving_statistics`.

    >>> resnet("resnet8", torch.Generator().manual_seed(0))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    network = _without_memory(model).to_empty(device="cpu")
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=rng)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            for p in module.parameters():
                nn.init.uniform_(p, -bound, bound, generator=rng)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
            module.track_running_stats = False
    return network


def count_weights(model: str) -> int:
    """The number of weights of the network of this name; nothing is allocated.

    >>> count_weights("resnet18")
    11173962
    """
    return sum(p.numel() for p in _without_memory(model).parameters())


def _without_memory(model: str) -> ResNet:
    """A network whose tensors have shapes but no memory."""
    check_choice("model", model, MODELS)
    with torch.device("meta"):
        return ResNet(MODELS[model])


@contextmanager
def moving_statistics(model: ResNet, momentum: float) -> Iterator[None]:
    """Let the forward passes in this context update the running statistics with this momentum; 0 for no update."""
    for norm in _batch_norms(model):
        norm.track_running_stats = momentum > 0
        norm.momentum = momentum
    try:
        yield
    finally:
        for norm in _batch_norms(model):
            norm.track_running_stats = False
