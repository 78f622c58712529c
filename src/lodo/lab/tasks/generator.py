"""The paper's image generator: a network that predicts the brightness of a pixel, given those before it.

Pixels come row by row. The network sees the image with the queried pixel and all later ones blackened, and returns a
logit ("score") for each of 256 brightnesses.
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
STAGES, BLOCKS = 5, 4  # the number of stages, and of blocks in each
_BLOCK = (  # fan-in and weight shape of each layer of a block
    (CHANNELS, (HIDDEN, CHANNELS)),
    (9, (MULTIPLIER * HIDDEN, 3, 3)),
    (MULTIPLIER * HIDDEN, (CHANNELS, MULTIPLIER * HIDDEN)),
)
_TENSORS = 2 * len(_BLOCK)  # a weight and a bias for each layer of a block
# The paper's text says that the first convolution is 3 x 3, but only 1 x 1 gives its 94,696 weights.
LAYERS = ((INPUTS, (CHANNELS, INPUTS)), *STAGES * BLOCKS * _BLOCK, (CHANNELS, (BRIGHTNESSES, CHANNELS)))


def initial_weights(rng: torch.Generator) -> list[Parameter]:
    """The initial weights and biases of all layers in turn, all drawn from N(0, 1 / (fan-in + 1)).

    >>> sum(p.numel() for p in initial_weights(torch.Generator()))
    94696
    """
    return [
        Parameter(torch.randn(shape, generator=rng) / (fan_in + 1) ** 0.5)
        for fan_in, weight_shape in LAYERS
        for shape in (weight_shape, weight_shape[:1])  # the bias has one number per output channel
    ]


def inputs(images: Tensor, queries: Tensor) -> Tensor:
    """Images as the network sees them: channel x row x column x image.

    The five channels are: the image, black where it is not known yet; whether a pixel's column is at or left of that of
    the queried pixel (1 or -1); whether a pixel is known (1 or -1); the row; the column (both from -1 to 1).

    Args:
        images: bytes, image x row x column.
        queries: the queried pixel of each image, counted row by row.

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
    x[1] = _plus_or_minus_one(column <= queries % columns)
    x[2] = _plus_or_minus_one(known)
    x[3] = 2 * row / rows - 1
    x[4] = 2 * column / columns - 1
    return x


def _plus_or_minus_one(truth: Tensor) -> Tensor:
    return 2.0 * truth - 1


def scores(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """A row of scores for each image, by torch's convolutions: in any precision, differentiable any number of times."""
    first, first_bias, *middle, last, last_bias = weights
    x = conv2d(x.permute(3, 0, 1, 2), first[..., None, None], first_bias)
    for block, start in enumerate(range(0, len(middle), _TENSORS)):
        w1, b1, w2, b2, w3, b3 = middle[start : start + _TENSORS]
        y = conv2d(x, w1[..., None, None], b1).atan()
        y = conv2d(y, w2[:, None], b2, padding=1, groups=HIDDEN).atan()
        x = x + conv2d(y, w3[..., None, None], b3)
        if _ends_stage(block):
            x = avg_pool2d(x, 2, ceil_mode=True)  # the padding of an odd size does not enter the average
    return x.mean((2, 3)) @ last.t() + last_bias


def fused_scores(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """As `scores`, but several times as fast: in single precision, differentiable once."""
    first, first_bias, *middle, last, last_bias = weights
    x = (first @ x.flatten(1) + first_bias[:, None]).view(-1, *x.shape[1:])
    for block, start in enumerate(range(0, len(middle), _TENSORS)):
        x = Block.apply(x, *middle[start : start + _TENSORS])  # type: ignore[no-untyped-call]
        if _ends_stage(block):
            x = _average_pool(x)
    return x.mean((1, 2)).t() @ last.t() + last_bias


def _ends_stage(block: int) -> bool:
    return (block + 1) % BLOCKS == 0


def _average_pool(x: Tensor) -> Tensor:
    """The means of squares of 2 x 2 pixels, which have fewer pixels at the edge of an odd size."""
    channels, rows, columns, number = x.shape
    heights, widths = _pool_sizes(rows), _pool_sizes(columns)
    x = pad(x, (0, 0, 0, columns % 2, 0, rows % 2))
    sums = x.view(channels, len(heights), 2, len(widths), 2, number).sum((2, 4))
    return sums / torch.outer(heights, widths)[:, :, None]


def _pool_sizes(size: int) -> Tensor:
    """How many pixels each pool has along one side: 2, and 1 at the edge of an odd size."""
    counts = torch.full(((size + 1) // 2,), 2.0)
    counts[size // 2 :] = 1.0
    return counts


@torch.no_grad()
def sample(weights: Sequence[Tensor], number: int, side: int, rng: torch.Generator) -> Tensor:
    """Draw square images pixel by pixel from the network's predictions."""
    images = torch.zeros(number, side, side, dtype=torch.uint8)
    for query in range(side * side):
        probabilities = fused_scores(weights, inputs(images, torch.full((number,), query))).softmax(1)
        images.view(number, -1)[:, query] = torch.multinomial(probabilities, 1, generator=rng)[:, 0]
    return images
