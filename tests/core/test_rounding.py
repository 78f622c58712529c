"""Moments in bfloat16: right on average, the same bits everywhere, and nothing is lost for good."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from helpers import BACKENDS, difference, natural, network, parameter
from lodo import LODO, Mixing, rounding
from lodo.meta import Adam, Layers

ROUNDED = Adam(moment_dtype="bfloat16")


def rounded(values, bits):
    stored = torch.empty(values.shape, dtype=torch.bfloat16)
    rounding.round_to(stored, values, bits)
    return stored


# ---------------------------------------------------------------- one number


@settings(max_examples=30)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100))
def test_over_all_random_bits_the_mean_is_the_number_itself(value):
    """Each of the 65,536 cases once: neighbours of the number, in just the right proportion."""
    if abs(value) < 2.0**-100:
        value = 0.0
    results = rounded(torch.full((65536,), value), torch.arange(65536))
    neighbours = results.double().unique()
    assert len(neighbours) <= 2
    assert float(neighbours.min()) <= value <= float(neighbours.max())
    assert float(results.double().mean()) == pytest.approx(value, rel=1e-12)


def test_a_mean_of_many_roundings_approximates_the_number():
    """With the generator's own bits, within five standard errors; rounding to nearest would be many of them off."""
    values = torch.tensor([1.001, -3.14159, 1e-20, 0.0077, -12345.678])
    count = 100_000
    bits = rounding.random_bits(rounding.update_key(7, 1), 3, torch.arange(count * len(values))).view(count, -1)
    for half in (bits & 0xFFFF, bits >> 16):
        results = rounded(values.expand(count, -1).contiguous(), half).double()
        low, high = results.min(0).values, results.max(0).values
        error = (results.mean(0) - values.double()).abs()
        assert torch.all(high > low)
        assert torch.all(error < 5 * (high - low) / 2 / count**0.5)
        nearest = (values.bfloat16().double() - values.double()).abs()
        assert float((nearest / (high - low)).max()) > 0.1


@given(st.integers(-(2**15), 2**15 - 1), st.integers(0, 0xFFFF))
def test_what_bfloat16_can_hold_is_left_as_it_is(pattern, bits):
    exact = torch.tensor([pattern], dtype=torch.int16).view(torch.bfloat16)
    if not torch.isfinite(exact).all():
        return
    assert torch.equal(rounded(exact.float(), torch.tensor([bits])).view(torch.int16), exact.view(torch.int16))


def test_rounding_goes_through_float32_in_double_precision():
    values = torch.randn(1000, dtype=torch.float64)
    bits = rounding.random_bits(1, 2, torch.arange(1000)) & 0xFFFF
    assert torch.equal(rounded(values, bits), rounded(values.float(), bits))


# ---------------------------------------------------------------- random bits


def test_the_hash_is_one_to_one():
    assert [rounding.mix(x) for x in range(50)] == [oracle.scramble(x) for x in range(50)]
    many = rounding.mix(torch.arange(1 << 20))
    assert len(many.unique()) == len(many)
    assert 0 <= int(many.min()) <= int(many.max()) < 2**32


def test_the_bits_are_those_of_the_definition():
    places = torch.arange(500)
    for seed, t, layer in ((0, 1, 0), (2**32 - 1, 1, 4), (123, 2**31, 15)):
        key = oracle.scramble((seed + t) % 2**32)
        expected = oracle.scramble((places.numpy() + oracle.scramble((key + layer) % 2**32)) % 2**32)
        got = rounding.random_bits(rounding.update_key(seed, t), layer, places)
        assert np.array_equal(got.numpy(), expected)


def test_bits_are_evenly_spread():
    bits = rounding.random_bits(rounding.update_key(3, 5), 2, torch.arange(1 << 16))
    for half in (bits & 0xFFFF, bits >> 16):
        counts = torch.bincount(half >> 8, minlength=256).double()
        chi_square = float(((counts - 256) ** 2 / 256).sum())
        assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5
        assert float(torch.bincount(half & 0xFF, minlength=256).max()) < 256 + 6 * 16
    both = torch.stack([bits & 0xFFFF, bits >> 16]).double()
    assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / 2**8


@pytest.mark.parametrize("other", [(8, 1, 0), (7, 2, 0), (7, 1, 1)], ids=["seed", "update", "layer"])
def test_other_seeds_updates_and_layers_have_other_bits(other):
    n = 1 << 14
    a, b = (rounding.random_bits(rounding.update_key(seed, t), i, torch.arange(n)) for seed, t, i in ((7, 1, 0), other))
    assert float((a == b).double().mean()) < 1e-3
    for shift in (0, 16):
        halves = torch.stack([(x >> shift) & 0xFFFF for x in (a, b)]).double()
        assert abs(float(torch.corrcoef(halves)[0, 1])) < 5 / n**0.5


def test_the_seed_of_the_rounding_follows_the_seed_and_the_group():
    def seeds(seed):
        opt = LODO([{"params": [parameter(3)]}, {"params": [parameter(3)]}], seed=seed)
        return [network(opt, i).rounding_seed for i in range(2)]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4
    assert all(0 <= seed < 2**32 for seed in seeds(1))


# ---------------------------------------------------------------- in Adam


def update(adam, theta, h, moments, t, lr, layers, seed=None):
    """One update of theta and the moments in place; a seed rounds the moments."""
    places = torch.arange(layers.weights)
    bits = None if seed is None else rounding.Bits(rounding.update_key(seed, t), places)
    adam.update(theta, h, moments, adam.coefficients(t, lr), layers, bits)


def test_moments_that_change_by_little_still_change():
    """0.001 of the difference is less than bfloat16 can tell: rounding to nearest would stop a fifth of the way."""
    n = 500
    theta, h = torch.zeros(n), torch.full((n,), 3.0)
    moments = [torch.zeros(n, dtype=torch.bfloat16) for _ in range(2)]
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for t in range(1, 3001):
        update(ROUNDED, theta, h, moments, t, 0.0, Layers(1, n), seed=5)
        nearest = (0.999 * nearest.float() + 0.001 * 9).bfloat16()
    expected = 9 * (1 - 0.999**3000)
    assert float(nearest) < 0.4 * expected
    v = moments[1].double()
    # each step adds a variance of at most (2^-7 v)^2 / 4, of which a step later 0.998 are left
    error = 2**-7 * 9 / 2 / (1 - 0.999**2) ** 0.5 / n**0.5
    assert float(v.mean()) == pytest.approx(expected, abs=5 * error)
    assert float(moments[0].double().mean()) == pytest.approx(3, rel=1e-3)


def test_the_step_is_taken_with_the_moments_before_they_are_rounded():
    theta, exact = torch.zeros(50), torch.zeros(50)
    h = torch.randn(50)
    moments = [torch.zeros(50, dtype=torch.bfloat16) for _ in range(2)]
    update(ROUNDED, theta, h, moments, 1, 0.1, Layers(1, 50), seed=5)
    update(Adam(), exact, h, [torch.zeros(50), torch.zeros(50)], 1, 0.1, Layers(1, 50))
    assert torch.equal(theta, exact)


def test_both_backends_round_a_tile_to_the_same_bits():
    """In single precision, with numbers on which no rounding of the arithmetic itself can differ."""
    from lodo.engines.numba import tiles
    from lodo.meta import ADAM

    T, k, L, layer = 3, 4, 8, 5
    rng = torch.Generator().manual_seed(0)
    d = torch.randn(T, k, L, generator=rng)
    Pa = torch.tensor([1.0, 2.0, 0.5, 4.0])[:, None].expand(T, k, L).contiguous()
    nothing = torch.zeros(k, L).numpy()
    h = d[:, :, None] * Pa[:, None]
    adam = Adam((0.5, 0.75))
    moments = [torch.zeros(T, k, k, L, dtype=torch.bfloat16) for _ in range(2)]
    theta = torch.zeros(T, k, k, L)
    padding = torch.zeros(layer, T, k, k, L)  # so that these weights are those of layer 5
    whole = [torch.cat([padding.to(x.dtype), x[None]]) for x in (theta, *moments)]
    update(adam, whole[0], torch.cat([padding, h[None]]), whole[1:], 1, 0.125, Layers(layer + 1, k * k * T * L), seed=9)
    key = tiles.layer_key(rounding.update_key(9, 1), layer)
    for t in range(T):
        M, V = (x[t].view(torch.uint16).numpy() for x in moments)
        tiles.update(
            ADAM, theta[t].numpy(), M, V, d[t].numpy(), Pa[t].numpy(), nothing, nothing, 1.0,
            adam.coefficients(1, 0.125), 0.0, key, t * k * k * L,
        )  # fmt: skip
    assert torch.equal(moments[0], whole[1][layer])
    assert torch.equal(moments[1], whole[2][layer])
    assert not torch.equal(moments[0].float(), 0.5 * h)  # there was something to round
    assert difference(theta, whole[0][layer]) < 1e-6


@pytest.mark.parametrize("mixing", ["random", "shuffle"])
def test_both_backends_round_a_run_to_the_same_bits(mixing):
    """In double precision what they compute is the same but for the last digits, which float32 does not see."""
    states = []
    for backend in BACKENDS:
        torch.manual_seed(0)
        x = parameter(150)
        family = Mixing(3, mixing=mixing)
        opt = LODO([x], lr=0.01, meta_optimizer=ROUNDED, preconditioner=family, backend=backend, seed=2)
        for _ in range(20):
            x.grad = torch.randn(150, dtype=torch.float64)
            opt.step()
        states.append({name: natural(opt, opt._state(0)[name]) for name in ("exp_avg", "exp_avg_sq")})
    for name in ("exp_avg", "exp_avg_sq"):
        assert states[0][name].dtype == torch.bfloat16
        assert torch.equal(states[0][name], states[1][name])


def test_unused_lanes_stay_zero():
    """Weights that do not exist are not brought to life by a rounding."""
    x = parameter(150, dtype=torch.float32)  # 75 blocks in two tiles of 40
    opt = LODO([x], lr=0.01, meta_optimizer=ROUNDED, preconditioner=Mixing(3), backend="numba")
    for _ in range(10):
        x.grad = torch.randn(150)
        opt.step()
    for name in ("theta", "exp_avg", "exp_avg_sq"):
        assert opt._state(0)[name].shape == (3, 2, 4, 4, 40)
        assert not opt._state(0)[name][:, -1, :, :, 35:].any()
        assert opt._state(0)[name][:, -1, :, :, :35].any()


def test_moments_take_half_the_memory_and_theta_does_not():
    x = parameter(40, dtype=torch.float32)
    opt = LODO([x], meta_optimizer=ROUNDED)
    state = opt._state(0)
    assert state["theta"].dtype == torch.float32
    assert 2 * state["exp_avg"].nbytes == 2 * state["exp_avg_sq"].nbytes == state["theta"].nbytes


def test_learning_is_as_good_as_with_whole_moments():
    errors = []
    for meta in (Adam(), ROUNDED):
        torch.manual_seed(1)
        D, centre = torch.logspace(-2, 0, 20), torch.zeros(20)
        x = torch.nn.Parameter(torch.zeros(20))
        opt = LODO([x], lr=1.0, beta=0.3, meta_lr=2e-3, preconditioner=Mixing(6), meta_optimizer=meta)
        losses = []
        for _ in range(3000):
            centre += 0.1 * torch.randn(20)
            x.grad = D * (x.detach() - centre)
            losses.append(float((0.5 * D * (x.detach() - centre) ** 2).sum()))
            opt.step()
        errors.append(sum(losses[-1000:]) / 1000)
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
