"""Residual networks for small images (He et al. 2016): a stem of 3 x 3 without pooling, then stages of basic blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import relu_

from lodo._checks import check_choice

CLASSES = 10
MODELS = {  # the width of each stage and its number of blocks
    "resnet18": ((64, 2), (128, 2), (256, 2), (512, 2)),
    "resnet20": ((16, 3), (32, 3), (64, 3)),
    "resnet8": ((16, 1), (32, 1), (64, 1)),
}


class ResNet(nn.Module):
    """Scores of images (number x 3 x height x width); every stage but the first halves the sides."""

    def __init__(self, stages: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        width = stages[0][0]
        self.stem = _convolution(3, width, 3, 1)
        blocks = []
        for i, (wider, number) in enumerate(stages):
            for j in range(number):
                blocks.append(Block(width, wider, stride=2 if i and not j else 1))
                width = wider
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.blocks(relu_(self.stem(x))).mean((2, 3)))
        return scores


class Block(nn.Module):
    """Two convolutions of 3 x 3, and a shortcut that is projected by one of 1 x 1 where the shape changes."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(fan_in, fan_out, 3, stride)
        self.second = _convolution(fan_out, fan_out, 3, 1)
        same = stride == 1 and fan_in == fan_out
        self.shortcut = nn.Identity() if same else _convolution(fan_in, fan_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return relu_(self.second(relu_(self.first(x))).add_(self.shortcut(x)))


def _convolution(fan_in: int, fan_out: int, side: int, stride: int) -> nn.Sequential:
    """A convolution and its batch norm."""
    convolution = nn.Conv2d(fan_in, fan_out, side, stride, padding=side // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(fan_out))


def _norms(model: nn.Module) -> Iterator[nn.BatchNorm2d]:
    return (module for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def resnet(model: str, rng: torch.Generator) -> ResNet:
    """A network by its name, with weights from ``rng`` alone.

    Convolutions are normal with variance 2 / fan-out, the last layer is uniform as torch has it, batch norm starts
    with 1 and 0. Running statistics stay as they are unless `moving_statistics` lets them move.

    >>> resnet("resnet8", torch.Generator().manual_seed(0))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    made = _empty(model).to_empty(device="cpu")
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=rng)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            for p in module.parameters():
                nn.init.uniform_(p, -bound, bound, generator=rng)
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
            module.track_running_stats = False
    return made


def weights(model: str) -> int:
    """How many weights a network has; nothing is allocated.

    >>> weights("resnet18")
    11173962
    """
    return sum(p.numel() for p in _empty(model).parameters())


def _empty(model: str) -> ResNet:
    """A network of shapes alone."""
    check_choice("model", model, MODELS)
    with torch.device("meta"):
        return ResNet(MODELS[model])


@contextmanager
def moving_statistics(model: ResNet, share: float) -> Iterator[None]:
    """Let running statistics move this share of the way to those of the images seen meanwhile; 0 for not at all."""
    for norm in _norms(model):
        norm.track_running_stats, norm.momentum = share > 0, share
    try:
        yield
    finally:
        for norm in _norms(model):
            norm.track_running_stats = False
