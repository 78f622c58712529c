"""The paper's image generator: a network that tells how bright the next pixel is, given those before it.

Pixels come row by row. The network sees the image with the queried pixel and all later ones blackened, and gives a
score to each of 256 brightnesses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import avg_pool2d, conv2d, pad

from lodo.lab.tasks.generator_kernels import MULTIPLIER, Block

BRIGHTNESSES = 256
INPUTS, CHANNELS, HIDDEN = 5, 20, 40
STAGES, BLOCKS = 5, 4  # and in each stage
_BLOCK = (
    (CHANNELS, (HIDDEN, CHANNELS)),
    (9, (MULTIPLIER * HIDDEN, 3, 3)),
    (MULTIPLIER * HIDDEN, (CHANNELS, MULTIPLIER * HIDDEN)),
)
# The paper's text has a first convolution of 3 x 3; only one of 1 x 1 gives its 94,696 weights.
LAYERS = ((INPUTS, (CHANNELS, INPUTS)), *STAGES * BLOCKS * _BLOCK, (CHANNELS, (BRIGHTNESSES, CHANNELS)))


def initial_weights(rng: torch.Generator) -> list[Parameter]:
    """Weights and biases of every layer, all of them N(0, 1 / (fan-in + 1)).

    >>> sum(p.numel() for p in initial_weights(torch.Generator()))
    94696
    """
    return [
        Parameter(torch.randn(shape, generator=rng) / (fan_in + 1) ** 0.5)
        for fan_in, weight in LAYERS
        for shape in (weight, weight[:1])
    ]


def inputs(images: Tensor, queries: Tensor) -> Tensor:
    """Images as the network sees them: channel x row x column x image.

    The channels are the image with what is not yet known blackened, whether a column is at or left of the queried
    pixel's, whether a pixel is known, the row and the column.

    Args:
        images: bytes, image x row x column.
        queries: for each image the queried pixel, counted row by row.

    Example:
        >>> x = inputs(torch.full((1, 2, 2), 128, dtype=torch.uint8), torch.tensor([1]))
        >>> x[:, :, :, 0].flatten(1).tolist()[:3]
        [[0.5, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [1.0, -1.0, -1.0, -1.0]]
    """
    number, rows, columns = images.shape
    row, column = torch.arange(rows)[:, None, None], torch.arange(columns)[None, :, None]
    known = row * columns + column < queries
    x = torch.empty(INPUTS, rows, columns, number)
    torch.mul(images.permute(1, 2, 0), known, out=x[0]).div_(BRIGHTNESSES)
    x[1] = _sign(column <= queries % columns)
    x[2] = _sign(known)
    x[3] = 2 * row / rows - 1
    x[4] = 2 * column / columns - 1
    return x


def _sign(truth: Tensor) -> Tensor:
    return 2.0 * truth - 1


def scores(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """A row of scores for each image, with torch's convolutions; any precision, differentiable again and again."""
    x = x.permute(3, 0, 1, 2)
    pairs = list(zip(weights[::2], weights[1::2], strict=True))
    (first, bias), *middle, (last, last_bias) = pairs
    x = conv2d(x, first[..., None, None], bias)
    for i in range(0, len(middle), 3):
        (w1, b1), (w2, b2), (w3, b3) = middle[i : i + 3]
        y = conv2d(x, w1[..., None, None], b1).atan()
        y = conv2d(y, w2[:, None], b2, padding=1, groups=HIDDEN).atan()
        x = x + conv2d(y, w3[..., None, None], b3)
        if (i // 3 + 1) % BLOCKS == 0:
            x = avg_pool2d(x, 2, ceil_mode=True)  # the padding of an odd size does not count in the average
    return x.mean((2, 3)) @ last.t() + last_bias


def fused_scores(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """As `scores`, several times as fast, in single precision, differentiable once."""
    (first, bias, *middle), last, last_bias = weights[:-2], weights[-2], weights[-1]
    x = (first @ x.flatten(1) + bias[:, None]).view(-1, *x.shape[1:])
    for i in range(0, len(middle), 6):
        x = Block.apply(x, *middle[i : i + 6])  # type: ignore[no-untyped-call]
        if (i // 6 + 1) % BLOCKS == 0:
            x = _halve(x)
    return x.mean((1, 2)).t() @ last.t() + last_bias


def _halve(x: Tensor) -> Tensor:
    """The mean of every 2 x 2 pixels; of fewer at the edge of an odd size."""
    channels, rows, columns, number = x.shape
    down, across = _counts(rows), _counts(columns)
    x = pad(x, (0, 0, 0, columns % 2, 0, rows % 2))
    sums = x.view(channels, len(down), 2, len(across), 2, number).sum((2, 4))
    return sums / torch.outer(down, across)[:, :, None]


def _counts(size: int) -> Tensor:
    counts = torch.full(((size + 1) // 2,), 2.0)
    counts[size // 2 :] = 1.0
    return counts


@torch.no_grad()
def sample(weights: Sequence[Tensor], number: int, side: int, rng: torch.Generator) -> Tensor:
    """Draw images pixel by pixel from what the network says."""
    images = torch.zeros(number, side, side, dtype=torch.uint8)
    for query in range(side * side):
        chances = fused_scores(weights, inputs(images, torch.full((number,), query))).softmax(1)
        images.view(number, -1)[:, query] = torch.multinomial(chances, 1, generator=rng)[:, 0]
    return images
