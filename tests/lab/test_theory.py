"""Every claim of the theory, in a form that fails if the claim does; the tools behind them, against brute force."""

from __future__ import annotations

import itertools
import json
import math

import matplotlib.image
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from lodo import Mixing
from lodo.lab.cli import app
from lodo.lab.page.sections import theory_section
from lodo.lab.theory.base import symmetric
from lodo.lab.theory.dynamics import (
    Bound,
    accumulated,
    flow,
    frozen_recursion,
    halving_time,
    in_ball,
    mean_trajectory,
    optimizer,
    recursion,
    scaled_error,
    velocity,
)
from lodo.lab.theory.expressiveness import fit, mix, preconditioner, random_layers, sparse_matrix
from lodo.lab.theory.gains import (
    Noisy,
    best_rates,
    expected_loss,
    greedy_gain,
    greedy_pair,
    greedy_rates,
    learned_pair,
    standing,
)
from lodo.lab.theory.minima import deep_linear, descend, mixing, orthogonal_start
from lodo.lab.theory.pairings import Group, entropy, exact_epsilon, pairings, sampled_epsilon
from lodo.lab.theory.parts import PARTS
from lodo.lab.theory.regret import lodo_run, osgm, regret
from lodo.lab.theory.represent import product, represent, route
from lodo.lab.theory.saddle import growth, negative_eigenvalue, random_mixing_matrix
from lodo.layout import Layout

seeds = st.integers(0, 2**32 - 1)


def bowl(seed, n=4, low=0.3, high=1.2):
    rng = np.random.default_rng(seed)
    H = symmetric(np.linspace(low, high, n), rng)
    return H, np.eye(n) - H, rng


class TestDynamics:
    @given(seeds, st.integers(1, 6), st.floats(1e-4, 0.03))
    @settings(max_examples=15)
    def test_the_optimizer_follows_the_equations(self, seed, n, alpha):
        H, A, rng = bowl(seed, n)
        b, s = rng.standard_normal(n), rng.standard_normal((40, n))
        ours, theirs = optimizer(H, alpha, b, s), recursion(H, alpha, A, b, s)
        np.testing.assert_allclose(ours.A, theirs.A, rtol=0, atol=1e-11 * np.abs(theirs.A).max())
        np.testing.assert_allclose(ours.b, theirs.b, rtol=0, atol=1e-11 * np.abs(theirs.b).max())

    @given(seeds)
    @settings(max_examples=15)
    def test_the_sum_over_the_past(self, seed):
        rng = np.random.default_rng(seed)
        A = rng.standard_normal((3, 3))
        A *= 0.8 / np.linalg.norm(A, 2)
        root = rng.standard_normal((3, 3))
        sigma = root @ root.T
        wanted = sum(np.linalg.matrix_power(A, i) @ sigma @ np.linalg.matrix_power(A, i).T for i in range(200))
        np.testing.assert_allclose(accumulated(A, sigma), wanted, rtol=1e-9, atol=1e-12)

    @given(seeds)
    @settings(max_examples=15, deadline=None)
    def test_the_scaled_error_never_grows(self, seed):
        H, _, rng = bowl(seed)
        A = rng.standard_normal((4, 4))
        A *= rng.uniform(0.1, 0.95) / np.linalg.norm(A, 2)
        root = rng.standard_normal((4, 4))
        errors = scaled_error(H, flow(H, A, root @ root.T, np.linspace(0, 10, 30)))
        assert (np.diff(errors) <= 1e-8 * errors[:-1]).all()

    def test_the_flow_is_the_paper_s_formula(self):
        H, A, _ = bowl(0)
        D, U = np.linalg.eigh(H)
        rate = velocity(H, A, np.eye(4))
        step = 1e-6
        change = (scaled_error(H, A + step * rate) ** 2 - scaled_error(H, A) ** 2) / step
        B = U.T @ A @ U
        wanted = -2 * np.trace(B.T @ np.diag(D) @ B @ accumulated(B, np.eye(4)))
        assert change == pytest.approx(wanted, rel=1e-4)

    def test_averages_come_to_the_flow_as_alpha_shrinks(self):
        H, A, rng = bowl(1)
        times = np.linspace(0, 8, 5)
        path = flow(H, A, np.eye(4), times)
        off = [
            np.abs(mean_trajectory(H, alpha, A, 1.0, times, 300, rng)[0] - path).max() / np.abs(A).max()
            for alpha in (0.04, 0.01)
        ]
        assert off[1] < 0.6 * off[0]
        assert off[1] < 0.05

    def test_rates_go_with_the_cube_of_the_curvature_and_the_square_of_the_noise(self):
        H, A, _ = bowl(2)
        once = halving_time(H, A, np.eye(4))
        assert halving_time(2 * H, A, np.eye(4)) == pytest.approx(once / 8, rel=1e-4)
        assert halving_time(H, A, 9 * np.eye(4)) == pytest.approx(once / 9, rel=1e-4)

    @given(seeds)
    @settings(max_examples=10, deadline=None)
    def test_deviation_stays_under_the_proof_s_bound(self, seed):
        H, A, rng = bowl(seed)
        alpha = 0.01 * Bound(H, A, 1.0, 0.0).R
        bound = Bound(H, A, 1.0, alpha)
        s = in_ball(1.0, (int(bound.R / alpha), 4), rng)
        assert np.linalg.norm(s, axis=1).max() <= 1
        true, frozen = (f(H, alpha, A, np.zeros(4), s) for f in (recursion, frozen_recursion))
        gap = np.linalg.norm(true.A - frozen.A, 2, axis=(1, 2))[1:]
        r = alpha * np.arange(1, len(gap) + 1)
        assert (gap <= bound(r)).all()
        assert np.linalg.norm(frozen.b, axis=1).max() <= bound.b_max


class TestSaddle:
    @given(seeds, st.integers(2, 10))
    def test_the_lemma(self, seed, n):
        rng = np.random.default_rng(seed)
        G = symmetric(np.exp(2 * rng.standard_normal(n)), rng)
        spectrum = np.exp(rng.standard_normal(n))
        spectrum[: rng.integers(1, n + 1)] *= -1
        H = symmetric(spectrum, rng)
        found = negative_eigenvalue(G, H)
        assert found.value < 0
        assert found.curvature < 0
        y = found.direction
        np.testing.assert_allclose(G @ H @ y, found.value * y, atol=1e-8 * np.linalg.norm(G @ H, 2))
        assert found.value == pytest.approx(np.linalg.eigvals(G @ H).real.min(), rel=1e-6)

    def test_growth_is_as_predicted(self):
        rng = np.random.default_rng(0)
        spectrum = np.geomspace(0.1, 2.0, 12)
        spectrum[0] = -0.3
        H = symmetric(spectrum, rng)
        opt, x = random_mixing_matrix(12, 0.1, rng)
        G = opt.preconditioner_matrix().numpy()
        assert np.abs(G - 0.1 * np.eye(12)).max() > 0.01, "not the plain start"
        predicted = math.log1p(-negative_eigenvalue((G + G.T) / 2, H).value)
        norms, losses = growth(opt, x, H, 1e-6 * rng.standard_normal(12), 300)
        assert math.log(norms[-1] / norms[-2]) == pytest.approx(predicted, rel=1e-4)
        assert losses[-1] < 0


class TestPairings:
    @pytest.mark.parametrize("nt", [2, 4, 6])
    def test_all_pairings(self, nt):
        every = pairings(nt)
        assert len(set(every)) == math.prod(range(1, nt, 2))
        assert all(sorted(itertools.chain(*pairing)) == list(range(nt)) for pairing in every)

    @given(st.lists(st.integers(0, 14), min_size=1, max_size=3))
    @settings(max_examples=20, deadline=None)
    def test_distribution_is_that_of_all_swap_patterns(self, chosen):
        group, every = Group(6), pairings(6)
        sequence = [every[i] for i in chosen]
        counts = {}
        for swaps in itertools.product((False, True), repeat=3 * len(sequence)):
            order = list(range(6))
            for (a, b), swap in zip(itertools.chain(*sequence), swaps, strict=True):
                if swap:
                    order[a], order[b] = order[b], order[a]
            counts[tuple(order)] = counts.get(tuple(order), 0) + 1
        p = group.distribution(sequence)
        for row, chance in zip(group.rows, p, strict=True):
            assert chance == pytest.approx(counts.get(tuple(row.tolist()), 0) / 8 ** len(sequence))
        assert group.support(sequence) == len(counts)

    def test_two_elements_by_hand(self):
        epsilon, reached = exact_epsilon(2, 3)
        assert epsilon == pytest.approx([0, 0, 0], abs=1e-12)
        assert reached == [1, 1, 1]

    def test_estimates_agree_with_the_exact_values(self):
        exact, _ = exact_epsilon(4, 4)
        gaps, _ = sampled_epsilon(4, 4, 3000, np.random.default_rng(0))
        errors = gaps.std(0, ddof=1) / math.sqrt(3000) + 1e-12
        assert (np.abs(gaps.mean(0) - exact) < 4 * errors).all()

    def test_entropy(self):
        assert entropy(np.array([0.5, 0.25, 0.25, 0])) == pytest.approx(1.5 * math.log(2))

    def test_epsilon_falls_exponentially_and_the_reach_is_above_the_bound(self):
        mixed = mix(4, 8, 500, np.random.default_rng(0), exact=7)
        assert (mixed.reached >= mixed.bound - 1e-9).all()
        c1, c2 = fit(mixed)
        N = np.arange(2, 8)
        np.testing.assert_allclose(mixed.epsilon[1:7], 4 * c1 * np.exp(-2 * c2 * N), rtol=0.3)


class TestRepresent:
    @given(seeds, st.sampled_from([4, 6, 8]))
    @settings(max_examples=25, deadline=None)
    def test_routes_are_right(self, seed, nt):
        rng = np.random.default_rng(seed)
        P, target = np.stack([rng.permutation(nt) for _ in range(9)]), rng.permutation(nt)
        swaps = route(target, P, rng)
        if swaps is None:
            return
        x = np.arange(nt)
        for p, told in zip(P, swaps, strict=True):
            x = x[p].reshape(-1, 2)
            x[told] = x[told][:, ::-1]
            x = x.ravel()
        np.testing.assert_array_equal(x, target)

    def test_routes_are_found_where_there_are_any(self):
        """Against all swap patterns of a few layers."""
        rng = np.random.default_rng(0)
        for _ in range(20):
            P, target = np.stack([rng.permutation(4) for _ in range(3)]), rng.permutation(4)
            reachable = set()
            for pattern in itertools.product((False, True), repeat=6):
                x = np.arange(4)
                for p, told in zip(P, np.array(pattern).reshape(3, 2), strict=True):
                    x = x[p].reshape(-1, 2)
                    x[told] = x[told][:, ::-1]
                    x = x.ravel()
                reachable.add(tuple(x))
            assert (route(target, P, rng) is not None) == (tuple(target) in reachable)

    @given(seeds, st.sampled_from([1, 2, 4]), st.integers(1, 2))
    @settings(max_examples=15, deadline=None)
    def test_networks_are_what_was_asked_for(self, seed, k, d):
        rng = np.random.default_rng(seed)
        F = [sparse_matrix(8, k, rng) for _ in range(d)]
        P = random_layers(8, 2 * d * (math.ceil(math.log2(k)) + 1) * 8, rng)
        found = represent(F, P)
        if found is not None:
            wanted = np.linalg.multi_dot([*F[::-1], np.eye(8)])
            np.testing.assert_allclose(found.matrix(P).numpy(), wanted, atol=1e-10)

    def test_uneven_fans(self):
        """Three connections of one input, a single one of others, an empty row: as in the paper's figure."""
        F = np.zeros((8, 8))
        F[[0, 1, 2], 3] = 1.0, 2.0, 3.0
        F[2, 5], F[2, 0], F[6, 6] = 4.0, 5.0, 6.0
        P = random_layers(8, 6 * 9, np.random.default_rng(1))
        found = represent([F], P)
        np.testing.assert_allclose(found.matrix(P).numpy(), F, atol=1e-12)

    def test_it_is_lodo_s_own_network(self):
        """theta goes into `Mixing`, whose own product with G is the wanted one."""
        family, n = Mixing(depth=16, block_size=2, width=2.0), 4
        layout = Layout.flat(n)
        P = family.fixed(layout, torch.Generator().manual_seed(3))
        d = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
        natural = family.permutations(P, layout)
        found = represent([d.sqrt().diag()], natural)
        assert found.blocks.shape == family.shape(layout)
        v = torch.randn(n, dtype=torch.float64)
        torch.testing.assert_close(family.apply(found.blocks, P, v), d * v)
        torch.testing.assert_close(preconditioner(found.blocks, natural, n), d.diag())

    def test_bad_input(self):
        P = random_layers(8, 4, np.random.default_rng(0))
        with pytest.raises(ValueError, match="at most 8 rows and columns, got one of shape \\(9, 9\\)"):
            represent([np.eye(9)], P)
        with pytest.raises(ValueError, match="at most 8 nonzero entries a matrix, got 64"):
            represent([np.ones((8, 8))], P)
        with pytest.raises(ValueError, match="even number of elements, got 5"):
            represent([np.eye(5)], random_layers(5, 4, np.random.default_rng(0)))
        with pytest.raises(ValueError, match="at least 5 for this network, got 4"):
            represent([sparse_matrix(8, 4, np.random.default_rng(0))], P)

    def test_product_is_the_product(self):
        rng = torch.Generator().manual_seed(0)
        blocks, P = (
            torch.randn(3, 2, 2, 2, generator=rng, dtype=torch.float64),
            random_layers(4, 3, np.random.default_rng(0)),
        )
        wanted = torch.eye(4, dtype=torch.float64)
        for B, p in zip(blocks, P, strict=True):
            wanted = torch.block_diag(*B) @ torch.eye(4, dtype=torch.float64)[p] @ wanted
        torch.testing.assert_close(product(blocks, P), wanted)


class TestMinima:
    def test_dense_and_deep_end_at_the_global_minimum(self):
        rng = np.random.default_rng(0)
        H = symmetric(np.geomspace(0.5, 2.0, 3), rng)
        for widths in ((), (3,), (4, 3)):
            family, size = deep_linear(3, widths)
            for _ in range(4):
                assert descend(family, rng.standard_normal(size) / 2, H, 2000) < 1e-8

    def test_too_narrow_ends_at_the_best_of_its_rank(self):
        rng = np.random.default_rng(1)
        H = symmetric(np.geomspace(0.5, 2.0, 3), rng)
        family, size = deep_linear(3, (1,))
        assert descend(family, rng.standard_normal(size), H, 2000) == pytest.approx(2.0, abs=1e-6)

    def test_lodo_starts_as_the_identity_and_comes_close(self):
        rng = np.random.default_rng(2)
        H = symmetric(np.geomspace(0.5, 2.0, 3), rng)
        family, size = mixing(3, 6, rng)
        start = orthogonal_start(6, 3, rng)
        assert start.shape == (size,)
        np.testing.assert_allclose(family(torch.from_numpy(start)).numpy(), np.eye(3), atol=1e-12)
        assert descend(family, start, H, 2000) < 1e-6


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.slow
def test_command(name, tmp_path):
    result = CliRunner().invoke(app, ["theory", name, "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "theory" / name
    summary = json.loads((folder / "summary.json").read_text())
    assert all(claim["holds"] for claim in summary["claims"])
    assert all(claim["evidence"] for claim in summary["claims"])
    assert "does not hold" not in result.output
    pictures = list(folder.glob("*.png"))
    assert pictures
    assert all(matplotlib.image.imread(picture).std() > 0.02 for picture in pictures)
    assert all(picture.name in (folder / "text.md").read_text() for picture in pictures)
    shown = theory_section(name, tmp_path)
    assert {figure["name"] for figure in shown.figures} == {picture.stem for picture in pictures}
    assert "<img" not in shown.words  # all of them are interactive


def test_unknown_part(tmp_path):
    result = CliRunner().invoke(app, ["theory", "nosuch", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "must be one of" in result.output


class TestGains:
    TASK = Noisy(np.array([0.1, 0.4, 1.0]), np.array([0.3, 0.2, 0.5]), 0.05)

    @pytest.mark.parametrize(("a", "w"), [(0.3, 0.0), (0.5, 0.6), (0.2, 1.0)])
    def test_the_long_run_is_that_of_simulations(self, a, w):
        """The Lyapunov equation against runs of the recursion itself."""
        rng, beta, task = np.random.default_rng(0), 0.9, self.TASK
        b, m, S, D = np.zeros((4, 400, 3))
        sums = np.zeros(3)
        for t in range(3000):
            g = task.q * b + np.sqrt(task.r) * rng.standard_normal(b.shape)
            if t >= 500:
                sums += [(task.q * b**2).sum(1).mean() / 2, (g * S).sum(1).mean(), (g * D).sum(1).mean()]
            m = beta * m + (1 - beta) * g
            S, D = (1 - w) * g + w * m, m - g
            b = b - a * S - np.sqrt(task.v) * rng.standard_normal(b.shape)
        found = standing(task, a, w, beta)
        computed = [found.loss, found.gain_slope, found.gate_slope]
        np.testing.assert_allclose(sums / 2500, computed, rtol=0.03, atol=0.003)

    def test_correlation_of_gradients_that_only_follow_noise(self):
        """SGD at rate a on one curvature q: exactly -a q / 2 of the variance, so greed wants a rate of zero."""
        q, a, r = 0.7, 0.9, 1.3
        found = standing(Noisy(np.array([q]), np.array([r])), a, 0.0)
        variance = 2 * r / (2 - a * q)
        assert found.gain_slope / variance == pytest.approx(-a * q / 2)

    @pytest.mark.parametrize("v", [1e-3, 0.05, 1.0])
    def test_greed_on_one_curvature_is_a_kalman_filter(self, v):
        q, r = 0.5, 2.0
        P = 0.0  # the variance of the error: Riccati's equation, iterated
        for _ in range(5000):
            P = P + v
            P = P - P**2 * q**2 / (q**2 * P + r)
        gain = (P + v) * q / (q**2 * (P + v) + r)
        assert greedy_gain(Noisy(np.array([q]), np.array([r]), v), 0.0) == pytest.approx(gain, rel=1e-6)

    def test_both_stand_still(self):
        a, w = greedy_pair(self.TASK)
        found = standing(self.TASK, a, w)
        assert 0 <= w <= 1
        assert abs(found.gain_slope) < 1e-9
        assert abs(found.gate_slope) < 1e-9 or (w == 0 and found.gate_slope <= 0) or (w == 1 and found.gate_slope >= 0)

    def test_a_learner_comes_to_rest_there(self):
        task = Noisy(np.array([0.5]), np.array([1.0]), 0.1)
        gains, _ = learned_pair(task, np.random.default_rng(0), steps=10_000, runs=32, beta=0.0)
        assert gains[-2000:].mean() == pytest.approx(
            greedy_gain(task, 0.0), rel=0.05
        )  # with beta 0 the gate does nothing

    def test_expected_losses_are_means_of_runs(self):
        rng, task = np.random.default_rng(0), Noisy(np.array([1.0, 0.2]), np.array([0.3, 0.1]))
        rates = np.array([0.9, 0.5, 0.1])
        b = rng.standard_normal((200_000, 2)) / np.sqrt(task.q)
        losses = [(task.q * b**2).sum(1).mean() / 2]
        for a in rates:
            b = b - a * (task.q * b + np.sqrt(task.r) * rng.standard_normal(b.shape))
            losses.append((task.q * b**2).sum(1).mean() / 2)
        np.testing.assert_allclose(expected_loss(task, rates), losses, rtol=0.01)

    def test_the_best_schedule_beats_greed_by_more_on_longer_runs(self):
        task = Noisy(np.geomspace(0.01, 1.0, 5), 0.1 * np.geomspace(0.01, 1.0, 5))
        greedy = greedy_rates(task, 100)
        first = np.linspace(0.01, 1.9, 400)
        assert greedy[0] == pytest.approx(min(first, key=lambda a: expected_loss(task, [a])[-1]), abs=0.01)
        ratios = [
            expected_loss(task, greedy[:T])[-1] / expected_loss(task, best_rates(task, T))[-1] for T in (1, 10, 100)
        ]
        assert ratios[0] == pytest.approx(1)
        assert 1.01 < ratios[1] < ratios[2]

    def test_with_one_curvature_greed_costs_nothing(self):
        task = Noisy(np.array([0.5]), np.array([0.2]))
        losses = [expected_loss(task, rates)[-1] for rates in (greedy_rates(task, 50), best_rates(task, 50))]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)

    @given(seeds, st.sampled_from([1, 4]), st.floats(0.05, 1.5))
    @settings(max_examples=15)
    def test_regret_stays_below_the_bound(self, seed, wide, share):
        """Against the best matrix in hindsight, found by brute force."""
        H, _, rng = bowl(seed)
        eta = share / 1.2
        gradients, thetas = osgm(H, rng.standard_normal((30, 4)), eta, wide)
        found = regret(H, gradients, thetas, eta)
        assert (found.regret <= found.bound + 1e-9).all()

        def h(theta, g):
            step = theta * g
            return (step @ H @ step / 2 - step @ g) / (g @ g)

        paid = sum(h(theta, g) for theta, g in zip(thetas, gradients, strict=True))
        for _ in range(50):
            other = thetas[-1] + 0.3 * rng.standard_normal(wide)
            assert found.regret[-1] >= paid - sum(h(other, g) for g in gradients) - 1e-9

    @pytest.mark.parametrize("family", ["scalar", "diagonal"])
    def test_lodo_takes_the_steps_that_are_counted(self, family):
        H, _, rng = bowl(0)
        moves = rng.standard_normal((20, 4))
        gradients, thetas = lodo_run(H, moves, family, 1e-2)
        b = moves[0]
        for g, theta, move in zip(gradients, thetas, moves[1:], strict=True):
            np.testing.assert_allclose(g, H @ b, rtol=1e-9, atol=1e-12)
            b = b - theta * g + move
