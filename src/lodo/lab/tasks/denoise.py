"""The loss of denoising diffusion (Ho et al. 2020) with a small U-Net on MNIST."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss, pad, pixel_shuffle, silu

from lodo.lab.tasks.network import ImageNetwork

BATCH = 16
SIDE = 32  # pixels
WIDTHS = (16, 32, 64)
FREQUENCIES = 8
GROUPS = 4


class Denoise(ImageNetwork):
    """Predicts the noise in noisy images at a random level; the loss is the mean square of its error.

    An image of 28 x 28 pixels, from -1 to 1, is padded with black to 32 x 32. With a level t, uniform from 0 to 1, and
    normal noise e, the network sees cos(pi t / 2) times the image plus sin(pi t / 2) times e, and t. The validation set
    has fixed levels and fixed noise.

    Args:
        seed: draws the weights, the batches, the levels and the noise.
        batch: the number of images per step.
        digest: the digest that the data must have (see `lodo.lab.data.Dataset`); None accepts any data.
    """

    validation_size: ClassVar[int] = 500

    def __init__(self, seed: int, *, batch: int = BATCH, digest: str | None = None) -> None:
        super().__init__(seed, batch=batch, digest=digest)
        fixed = torch.Generator().manual_seed(0)
        self.test_levels, self.test_noise = levels_and_noise(len(self.test_images), fixed)
        self.begin(UNet)

    def sample(self) -> dict[str, Tensor]:
        levels, noise = levels_and_noise(self.size, self.rng)
        return {**super().sample(), "levels": levels, "noise": noise}

    def loss(self) -> Tensor:
        return self._mean_loss(self.images[self.batch["picks"]], self.batch["levels"], self.batch["noise"])

    def validate(self) -> dict[str, float]:
        return {"validation_loss": float(self._mean_loss(self.test_images, self.test_levels, self.test_noise))}

    def _mean_loss(self, images: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
        predicted = self.module(noisy(images, levels, noise), levels)
        return mse_loss(predicted, noise)


def levels_and_noise(number: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """A level and the noise for each of a number of images."""
    return torch.rand(number, generator=rng), torch.randn(number, 1, SIDE, SIDE, generator=rng)


def noisy(images: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
    """Images of bytes, padded and scaled, with their noise.

    >>> white = torch.full((1, 28, 28), 255, dtype=torch.uint8)
    >>> noisy(white, torch.zeros(1), torch.ones(1, 1, 32, 32))[0, 0, 16, :4]
    tensor([-1., -1.,  1.,  1.])
    """
    margin = (SIDE - images.shape[-1]) // 2
    clean = pad(images[:, None], (margin,) * 4).float() / 127.5 - 1
    angles = (math.pi / 2 * levels)[:, None, None, None]
    return angles.cos() * clean + angles.sin() * noise


class UNet(nn.Module):
    """The network: maps noisy images (image x 1 x 32 x 32) and their levels to the noise.

    Three stages down, each halving the image, and two up, each with a shortcut from the stage of its size; the last
    doubling spreads four channels over squares of 2 x 2 pixels. The level goes into every stage.

    >>> UNet()(torch.zeros(2, 1, 32, 32), torch.zeros(2)).shape
    torch.Size([2, 1, 32, 32])
    """

    def __init__(self) -> None:
        super().__init__()
        first, second, third = WIDTHS
        self.down = nn.ModuleList([Stage(1, first, 2), Stage(first, second, 2), Stage(second, third, 2)])
        self.middle = Stage(third, third)
        self.up = nn.ModuleList([Stage(third + second, second), Stage(second + first, first)])
        self.last = nn.Conv2d(first, 4, 3, padding=1)

    def forward(self, x: Tensor, levels: Tensor) -> Tensor:
        features = level_features(levels)
        shortcuts = []
        for stage in self.down:
            x = stage(x, features)
            shortcuts.append(x)
        x = self.middle(shortcuts.pop(), features)
        for stage in self.up:
            x = stage(torch.cat((interpolate(x, scale_factor=2), shortcuts.pop()), 1), features)
        return pixel_shuffle(self.last(x), 2)


class Stage(nn.Module):
    """A convolution, group norm, a shift that depends on the level, and SiLU."""

    def __init__(self, fan_in: int, fan_out: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1)
        self.norm = nn.GroupNorm(GROUPS, fan_out)
        self.shift = nn.Linear(2 * FREQUENCIES, fan_out)

    def forward(self, x: Tensor, features: Tensor) -> Tensor:
        return silu(self.norm(self.convolution(x)) + self.shift(features)[:, :, None, None])


def level_features(levels: Tensor) -> Tensor:
    """Sines and cosines of the levels at several frequencies.

    >>> level_features(torch.zeros(1))[0]
    tensor([0., 0., 0., 0., 0., 0., 0., 0., 1., 1., 1., 1., 1., 1., 1., 1.])
    """
    angles = math.pi / 2 * levels[:, None] * torch.arange(1, FREQUENCIES + 1)
    return torch.cat((angles.sin(), angles.cos()), 1)
