"""The paper's Figure 1, drawn from a real network: permutations as wires, blocks as small pictures of their weights."""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lodo import LODO, Mixing
from lodo.lab.show.draw import canvas

_MAP = "RdBu_r"
_WIRE, _REACHED = "0.8", "#0072b2"
_WIDTH = 0.12  # of an entry of a block; a permutation is 1 wide
_LARGEST = 64  # hidden numbers that a drawing can hold


def draw_network(optimizer: LODO, group: int = 0) -> Figure:
    """Draw the mixing network of a group from its input to its output, with its current weights.

    Blue wires carry the first input: after a few layers it has reached everything.

    Args:
        optimizer: one with the paper's preconditioner that is small enough to be drawn.
        group: which of its parameter groups.

    Example:
        >>> x = torch.nn.Parameter(torch.zeros(4))
        >>> figure = draw_network(LODO([x], preconditioner=Mixing(depth=2, block_size=2)))
        >>> len(figure.axes[0].lines)  # 8 wires for each of 2 permutations, up and down, and the line in the middle
        33
    """
    chosen = optimizer._groups[group]
    family, layout, n = chosen.family, chosen.layout, chosen.n
    if not isinstance(family, Mixing) or family.hidden(n) > _LARGEST:
        raise ValueError(f"optimizer must have a mixing network of at most {_LARGEST} numbers a layer, got {family}")
    network = chosen.ready(optimizer.param_groups[group])
    blocks = network.engine.unpack(optimizer._state(group)["theta"]).detach().cpu().double().numpy()
    places = family.permutations(network.draw_permutations(family, layout), layout).numpy()
    figure, (axes,) = canvas(size=(3 + 2.2 * len(blocks), 1.6 + 0.28 * family.hidden(n)))
    scale = Normalize(-np.abs(blocks).max(), np.abs(blocks).max())
    up = [
        (place, block, f"$P_{i}$", f"$B_{i}$") for i, (place, block) in enumerate(zip(places, blocks, strict=True), 1)
    ]
    reached = np.arange(family.hidden(n)) == 0
    column = 0.0
    _label(axes, column, [f"$m_{{{i + 1}}}$" if i < n else "0" for i in range(family.hidden(n))], right=True)
    for place, block, *names in up:
        reached = _wires(axes, column, place, reached)
        reached = _blocks(axes, column + 1, block, reached, scale)
        width = _WIDTH * block.shape[-1]
        axes.text(column + 0.5, -1.1, names[0], ha="center")
        axes.text(column + 1 + width / 2, -1.1, names[1], ha="center")
        column += 1 + width
    axes.axvline(column + 0.1, color="0.5", lw=0.8, ls=":")
    column += 0.2
    for place, block, permutation, matrix in reversed(up):
        reached = _blocks(axes, column, block.transpose(0, 2, 1), reached, scale)
        width = _WIDTH * block.shape[-1]
        axes.text(column + width / 2, -1.1, f"{matrix[:-1]}^T$", ha="center")
        axes.text(column + width + 0.5, -1.1, f"{permutation[:-1]}^T$", ha="center")
        reached = _wires(axes, column + width, np.argsort(place), reached)
        column += width + 1
    _label(axes, column, [f"$(Gm)_{{{i + 1}}}$" if i < n else "" for i in range(family.hidden(n))], right=False)
    axes.set_xlim(-0.6, column + 0.5)
    axes.set_ylim(family.hidden(n) - 0.3, -1.8)
    axes.set_axis_off()
    figure.colorbar(ScalarMappable(scale, _MAP), ax=axes, label="weight", shrink=0.8, pad=0.01)
    return figure


def draw_matrices(matrices: dict[str, torch.Tensor]) -> Figure:
    """Matrices side by side, in the same colours.

    >>> len(draw_matrices({"G": torch.eye(2), "the inverse Hessian": torch.eye(2)}).axes)  # and the colours' scale
    3
    """
    figure, every = canvas(len(matrices), size=(2.6, 2.7))
    largest = max(float(matrix.abs().max()) for matrix in matrices.values())
    for axes, (title, matrix) in zip(every, matrices.items(), strict=True):
        shown = axes.imshow(matrix.numpy(), cmap=_MAP, vmin=-largest, vmax=largest)
        axes.set_title(title, fontsize="medium")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.grid(visible=False)
    figure.colorbar(shown, ax=every, shrink=0.8)
    return figure


def _wires(axes: Axes, x: float, place: np.ndarray, reached: np.ndarray) -> np.ndarray:
    """Number j on the right is number place[j] on the left."""
    for j, source in enumerate(place):
        color, width = (_REACHED, 1.4) if reached[source] else (_WIRE, 0.8)
        axes.plot([x, x + 0.2, x + 0.8, x + 1], [source, source, j, j], color=color, lw=width)
    return np.asarray(reached[place])


def _blocks(axes: Axes, x: float, blocks: np.ndarray, reached: np.ndarray, scale: Normalize) -> np.ndarray:
    """Each block as a small picture of its weights, over the numbers that it mixes."""
    k = blocks.shape[-1]
    mixed = reached.copy()
    for b, block in enumerate(blocks):
        extent = (x, x + _WIDTH * k, (b + 1) * k - 0.55, b * k - 0.45)
        axes.imshow(block, cmap=_MAP, norm=scale, extent=extent, aspect="auto", zorder=3)
        edge = Rectangle((x, b * k - 0.45), _WIDTH * k, k - 0.1, fill=False, color="0.3", lw=0.8, zorder=4)
        axes.add_patch(edge)
        mixed[b * k : (b + 1) * k] = reached[b * k : (b + 1) * k].any()
    return mixed


def _label(axes: Axes, x: float, texts: list[str], right: bool) -> None:
    for y, text in enumerate(texts):
        axes.text(
            x - 0.08 if right else x + 0.08, y, text, ha="right" if right else "left", va="center", fontsize="small"
        )
