"""The image generator against plain loops and double precision, and its kernels against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lodo.lab.run import threads
from lodo.lab.tasks import generator_kernels as fused
from lodo.lab.tasks.generator import _average_pool, fused_scores, initial_weights, inputs, sample, scores
from lodo.lab.tasks.generator_kernels import Block

FAN_INS = [5, *[20, 9, 120] * 20, 20]  # of the first layer, of twenty blocks of three layers, of the last layer


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with threads(1):
        yield


@pytest.fixture(scope="module")
def network():
    return initial_weights(torch.Generator().manual_seed(3))


def batch(number, rows, columns=None, seed=0):
    """Random images, and a random pixel of each."""
    rng = torch.Generator().manual_seed(seed)
    columns = rows if columns is None else columns
    images = torch.randint(256, (number, rows, columns), generator=rng, dtype=torch.uint8)
    return images, torch.randint(rows * columns, (number,), generator=rng)


def close(actual, expected, rtol=1e-5):
    """Equal up to ``rtol`` times the largest number, as rounding errors of sums are."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= rtol * expected.abs().max()


# ---------------------------------------------------------------- weights


def test_the_papers_number_of_weights(network):
    assert sum(p.numel() for p in network) == 94_696
    assert sum(p.numel() for p in network[2:-2]) == 20 * (20 * 40 + 40 + 120 * 9 + 120 + 120 * 20 + 20)
    assert all(p.dtype == torch.float32 and p.requires_grad and p.is_leaf for p in network)


def test_the_fan_in_of_a_layer_is_the_number_of_terms_in_its_sums(network):
    for weight, bias, fan_in in zip(network[::2], network[1::2], FAN_INS, strict=True):
        assert weight[0].numel() == fan_in
        assert bias.shape == (len(weight),)


@pytest.mark.parametrize("kind", [0, 1], ids=["weights", "biases"])
def test_initial_weights_and_biases_are_normal_with_the_papers_variance(network, kind):
    for fan_in in set(FAN_INS):
        parts = [p.detach().flatten() for p, f in zip(network[kind::2], FAN_INS, strict=True) if f == fan_in]
        values = torch.cat(parts).double() * (fan_in + 1) ** 0.5
        n = len(values)
        assert abs(values.mean()) < 4 / n**0.5
        assert abs(values.var() - 1) < 4 * (2 / n) ** 0.5
        assert abs((values**4).mean() - 3) < 4 * (96 / n) ** 0.5


def test_the_seed_draws_the_weights(network):
    def drawn(seed):
        return initial_weights(torch.Generator().manual_seed(seed))

    assert all(map(torch.equal, drawn(3), network))
    assert not any(map(torch.equal, drawn(4), network))


# ---------------------------------------------------------------- what the network sees


def five_channels(images, queries):
    """The five channels as the paper describes them, one number at a time."""
    number, rows, columns = images.shape
    x = np.empty((5, rows, columns, number))
    for i in range(number):
        query_row, query_column = divmod(int(queries[i]), columns)
        for row in range(rows):
            for column in range(columns):
                below = row > query_row
                right = row == query_row and column >= query_column  # or the queried pixel itself
                visible = not (below or right)
                x[:, row, column, i] = (
                    int(images[i, row, column]) / 256 if visible else 0.0,
                    1 if column <= query_column else -1,
                    1 if visible else -1,
                    -1 + 2 * row / rows,
                    -1 + 2 * column / columns,
                )
    return x


@pytest.mark.parametrize(("rows", "columns"), [(28, 28), (8, 8), (5, 3), (1, 4), (4, 1), (1, 1)])
def test_the_five_channels(rows, columns):
    images, queries = batch(4, rows, columns)
    queries[0], queries[-1] = 0, rows * columns - 1
    x = inputs(images, queries)
    assert x.dtype == torch.float32
    np.testing.assert_allclose(x, five_channels(images, queries), atol=1e-7)


sides = st.integers(1, 6)


@given(sides, sides, st.data())
def test_only_pixels_before_the_queried_one_are_seen(rows, columns, data):
    images, queries = batch(2, rows, columns, seed=data.draw(st.integers(0, 99)))
    query, changed = (data.draw(st.integers(0, rows * columns - 1)) for _ in range(2))
    queries[0] = query
    before = inputs(images, queries)
    images.view(2, -1)[0, changed] ^= data.draw(st.integers(1, 255))
    after = inputs(images, queries)
    assert torch.equal(before, after) == (changed >= query)
    assert torch.equal(before[..., 1], after[..., 1])  # the other image


# ---------------------------------------------------------------- the network


@pytest.mark.parametrize("number", [1, 3, 16])
@pytest.mark.parametrize("side", [28, 8, 7, 5, 1])
def test_the_fused_network_agrees_with_double_precision(network, side, number):
    x = inputs(*batch(number, side))
    rng = torch.Generator().manual_seed(1)
    direction = torch.randn(number, 256, generator=rng)
    doubles = [p.detach().double().requires_grad_() for p in network]
    expected, found = scores(doubles, x.double()), fused_scores(network, x)
    close(found, expected)
    assert found.shape == (number, 256)
    gradients = torch.autograd.grad((found * direction).sum(), network)
    references = torch.autograd.grad((expected * direction.double()).sum(), doubles)
    for gradient, reference in zip(gradients, references, strict=True):
        close(gradient, reference)


def test_images_need_not_be_square(network):
    x = inputs(*batch(2, 3, 6))
    close(fused_scores(network, x), scores(network, x))


def test_images_do_not_touch_each_other(network):
    x = inputs(*batch(5, 8))
    together = fused_scores(network, x)
    for i in range(5):
        close(fused_scores(network, x[..., i : i + 1].contiguous())[0], together[i])


def test_the_gradient_with_respect_to_the_image(network):
    x = inputs(*batch(2, 5))
    found, expected = x.clone().requires_grad_(), x.double().requires_grad_()
    fused_scores(network, found).square().sum().backward()
    scores([p.detach().double() for p in network], expected).square().sum().backward()
    close(found.grad, expected.grad)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2), (3, 3), (5, 4), (7, 1), (6, 7)])
def test_pooling_averages_real_pixels_only(rows, columns):
    x = torch.randn(2, rows, columns, 3)
    found = _average_pool(x)
    assert found.shape == (2, (rows + 1) // 2, (columns + 1) // 2, 3)
    for i in range(found.shape[1]):
        for j in range(found.shape[2]):
            torch.testing.assert_close(found[:, i, j], x[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((1, 2)))
    torch.testing.assert_close(_average_pool(torch.ones(1, rows, columns, 1)), torch.ones(1, *found.shape[1:3], 1))


# ---------------------------------------------------------------- the kernels


def block(x, w1, b1, w2, b2, w3, b3):
    """The same as `Block`, with the convolution as a sum of shifted images."""
    y = (torch.einsum("hc,crsl->hrsl", w1, x) + b1[:, None, None, None]).atan()
    y = torch.nn.functional.pad(y, (0, 0, 1, 1, 1, 1)).repeat_interleave(3, 0)
    rows, columns = x.shape[1:3]
    z = b2[:, None, None, None].expand(-1, rows, columns, x.shape[3])
    for i in range(3):
        for j in range(3):
            z = z + w2[:, i, j, None, None, None] * y[:, i : i + rows, j : j + columns]
    return x + torch.einsum("co,orsl->crsl", w3, z.atan()) + b3[:, None, None, None]


def arguments(channels, hidden, rows, columns, number, size=1.0):
    shapes = (
        (channels, rows, columns, number),
        (hidden, channels),
        (hidden,),
        (3 * hidden, 3, 3),
        (3 * hidden,),
        (channels, 3 * hidden),
        (channels,),
    )
    return [(size * torch.randn(shape)).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("size", [0.3, 1.0])
@pytest.mark.parametrize(
    "shape", [(3, 4, 5, 6, 2), (1, 1, 1, 1, 1), (2, 3, 1, 7, 3), (2, 3, 7, 1, 17), (20, 40, 4, 4, 16), (3, 2, 2, 2, 5)]
)
def test_a_fused_block_agrees_with_double_precision(shape, size):
    args = arguments(*shape, size=size)
    doubles = [p.detach().double().requires_grad_() for p in args]
    found, expected = Block.apply(*args), block(*doubles)
    close(found, expected, 1e-6)
    direction = torch.randn_like(found)
    gradients = torch.autograd.grad(found, args, direction)
    references = torch.autograd.grad(expected, doubles, direction.double())
    for gradient, reference in zip(gradients, references, strict=True):
        close(gradient, reference, 3e-6)


def test_the_reference_block_has_a_correct_gradient():
    doubles = [p.detach().double().requires_grad_() for p in arguments(2, 2, 3, 2, 2, size=0.5)]
    assert torch.autograd.gradcheck(block, doubles)


def test_backward_can_be_called_again():
    args = arguments(3, 4, 5, 4, 2)
    kept = [p.detach().clone() for p in args]
    out = Block.apply(*args)
    direction = torch.randn_like(out)
    first = torch.autograd.grad(out, args, direction, retain_graph=True)
    second = torch.autograd.grad(out, args, direction, retain_graph=True)
    third = torch.autograd.grad(out, args, 2 * direction)
    assert all(map(torch.equal, first, second))
    for a, b in zip(first, third, strict=True):
        torch.testing.assert_close(2 * a, b)
    assert all(map(torch.equal, kept, args))


def test_a_gradient_of_any_memory_layout_is_accepted():
    args = arguments(3, 4, 2, 5, 6)
    out = Block.apply(*args)
    direction = torch.randn(out.shape[::-1]).permute(3, 2, 1, 0)
    plain = torch.autograd.grad(out, args, direction.contiguous(), retain_graph=True)
    assert all(map(torch.equal, plain, torch.autograd.grad(out, args, direction)))


def test_a_second_derivative_is_refused():
    args = arguments(2, 2, 2, 2, 2)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(Block.apply(*args).sum(), args, create_graph=True)


def arctangents(x):
    """By the compiled polynomial, written after a margin of three numbers."""
    x = np.asarray(x, np.float32)
    out = np.full(x.size + 3, -7, np.float32)
    fused._atan_row(x, 3, out)
    assert (out[:3] == -7).all()
    return out[3:]


def test_the_arctangent_is_within_2e7_of_numpys():
    sizes = np.concatenate([np.linspace(0, 2, 20_001), np.geomspace(1e-30, 1e6, 20_001), [1, 1e6, 1e38]])
    x = np.concatenate([sizes, -sizes]).astype(np.float32)
    found = arctangents(x)
    assert np.abs(found - np.arctan(x.astype(np.float64))).max() < 2e-7
    small = np.abs(x) < 1
    np.testing.assert_allclose(found[small], np.arctan(x[small].astype(np.float64)), rtol=2.5e-7)
    np.testing.assert_array_equal(found[: len(sizes)], -found[len(sizes) :])


def test_the_arctangent_of_special_numbers():
    x = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38]
    found = arctangents(x)
    np.testing.assert_allclose(found, np.arctan(x), atol=2e-7)
    assert np.isnan(found).tolist() == [False] * 6 + [True] + [False] * 2


@settings(max_examples=200)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_the_arctangent_of_anything(x):
    np.testing.assert_allclose(arctangents(x), np.arctan(np.asarray(x)), atol=2e-7)


def test_nan_propagates(network):
    x = inputs(*batch(2, 5))
    x[0, 0, 0, 1] = float("nan")
    found = fused_scores(network, x).isnan().all(1)
    assert found.tolist() == [False, True]


# ---------------------------------------------------------------- drawn images


def test_drawn_images_are_bytes_and_come_from_the_generator(network):
    def drawn(seed):
        return sample(network, 6, 3, torch.Generator().manual_seed(seed))

    images = drawn(0)
    assert images.shape == (6, 3, 3)
    assert images.dtype == torch.uint8
    assert len(images.unique()) > 10
    assert torch.equal(images, drawn(0))
    assert not torch.equal(images, drawn(1))


def test_drawing_leaves_other_random_numbers_alone(network):
    before = torch.get_rng_state()
    sample(network, 2, 2, torch.Generator())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("side", [1, 2])
def test_the_first_pixel_follows_the_softmax(network, side):
    number = 4000
    drawn = sample(network, number, side, torch.Generator().manual_seed(0))[:, 0, 0]
    black, first = torch.zeros(1, side, side, dtype=torch.uint8), torch.tensor([0])
    chances = scores([p.detach().double() for p in network], inputs(black, first).double())[0].softmax(0)
    expected, found = number * chances, drawn.long().bincount(minlength=256).double()
    often = expected > 4
    rare = float(expected[~often].sum())
    assert often.sum() > 20
    distance = ((found - expected)[often] ** 2 / expected[often]).sum() + (found[~often].sum() - rare) ** 2 / rare
    free = int(often.sum())
    assert abs(distance - free) < 4 * (2 * free) ** 0.5


def test_every_pixel_is_drawn_given_those_before_it(network):
    """The network's logits are so large that nothing is left to chance."""
    sure = [p.detach() for p in network[:-2]] + [1e5 * p.detach() for p in network[-2:]]
    images = sample(sure, 2, 4, torch.Generator())
    assert len(images.unique()) > 1
    for query in range(16):
        best = scores(sure, inputs(images, torch.full((2,), query))).argmax(1)
        assert torch.equal(images.view(2, -1)[:, query].long(), best)
