"""samkit.diagonal: what must hold for every feature strength and every start, tried on drawn ones.

The draws are the same in every run, so that a failure repeats itself.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from samkit.diagonal import (
    DiagonalNetwork,
    critical_scale,
    flow,
    growth_rates,
    linf_limit,
    max_margin,
    regime,
)
from samkit.optim import SAM

every_start = settings(max_examples=60, derandomize=True, deadline=None, database=None)
few_starts = settings(every_start, max_examples=15)


@st.composite
def features(draw, smallest=2, largest=5):
    """Strengths of which each is at least 5 % above the one before: nearer ones are told apart only late."""
    d = draw(st.integers(smallest, largest))
    steps = draw(st.lists(st.floats(0.05, 1.5), min_size=d - 1, max_size=d - 1))
    return draw(st.floats(0.1, 10.0)) * np.exp(np.cumsum([0.0, *steps]))


@st.composite
def starts(draw, signed=False, layers=2):
    """Features, and weights for each layer that are of order one."""
    mu = draw(features())
    weights = st.floats(-1.5 if signed else 0.05, 1.5)
    w = draw(st.lists(weights, min_size=layers * len(mu), max_size=layers * len(mu)))
    assume(np.linalg.norm(w) > 1e-3)
    return mu, tuple(np.reshape(w, (layers, len(mu))))


def turns(values):
    """The changes of direction of a sequence, downward to upward first, as -1 and 1."""
    steps = np.sign(np.diff(values))
    steps = steps[steps != 0]
    return steps[np.insert(steps[1:] != steps[:-1], 0, True)].tolist() if len(steps) else []


def slow_fate(mu, w1, w2):
    """Whether the flow at rho = 1 dies, from both layers solved as they stand."""
    d = len(mu)

    def gradient(theta):
        return np.concatenate([mu * theta[d:], mu * theta[:d]])

    def velocity(_, theta):
        g = gradient(theta)
        return gradient(theta - g / np.linalg.norm(g))

    def small(_, theta):
        return np.linalg.norm(gradient(theta)) - 0.05 * mu[0]

    def large(_, theta):
        return np.linalg.norm(gradient(theta)) - 3 * mu[-1]

    small.terminal = large.terminal = True
    found = solve_ivp(
        velocity,
        (0, 1e3 / mu[0]),
        np.concatenate([w1, w2]),
        "LSODA",
        (),
        events=(small, large),
        rtol=1e-9,
        atol=1e-10,
    )
    assert found.status == 1, "neither small nor large: the test decides nothing"
    return len(found.t_events[0]) > 0


class TestL2SAM:
    @every_start
    @given(starts(signed=True), st.floats(0.1, 3.0), st.floats(1e-3, 1e3))
    def test_only_alpha_over_rho_matters_for_the_path(self, start, rho, unit):
        mu, w = start
        one = flow(mu, w, rho)
        other = flow(mu, tuple(unit * layer for layer in w), unit * rho, s=one.s)
        assert other.outcome == one.outcome
        before = one.s < 0.99 * one.s_end  # at the very end of a collapse only its time is well conditioned
        largest = np.abs(one.beta[before]).max()
        np.testing.assert_allclose(
            other.beta[before] / unit**2, one.beta[before], rtol=1e-6, atol=1e-9 * largest
        )

    @every_start
    @given(features(), st.floats(0.05, 1.5), st.data())
    def test_equal_features_can_be_permuted(self, mu, weight, data):
        tied = np.sort(np.append(mu, mu))
        w = weight * np.linspace(1, 2, len(tied))
        places = np.arange(len(tied))
        for pair in data.draw(st.sets(st.integers(0, len(mu) - 1))):
            places[[2 * pair, 2 * pair + 1]] = places[[2 * pair + 1, 2 * pair]]
        one = flow(tied, w, 1.0)
        other = flow(tied, w[places], 1.0, s=one.s)
        np.testing.assert_allclose(other.beta, one.beta[:, places], rtol=1e-7, atol=1e-12)

    @every_start
    @given(starts(signed=True), st.floats(0.1, 3.0))
    def test_the_gradient_norm_falls_at_most_once_from_any_start(self, start, rho):
        mu, w = start
        result = flow(mu, w, rho)
        norm = result.gradient_norm[result.s < result.s_end]
        assert turns(np.log(norm).round(9)) in ([], [-1], [1], [-1, 1])

    @every_start
    @given(features(), st.floats(0.2, 1.2))
    @example(np.array([1.0, 2.0, 3.0, 4.0, 5.0]), 0.35)
    def test_the_leader_turns_at_most_once_from_a_uniform_start(self, mu, ratio):
        leader = flow(mu, ratio, 1.0).leader
        assert turns(leader[leader >= 0]) in ([], [-1], [1], [-1, 1])

    @every_start
    @given(features(), st.floats(0.2, 1.2))
    def test_a_collapsed_run_has_no_sequence_and_every_other_ends_with_the_major_feature(self, mu, ratio):
        result = flow(mu, ratio, 1.0)
        if result.outcome == "collapses":
            assert result.sequence() == ()
        else:
            assert result.sequence()[-1] == len(mu) - 1

    @every_start
    @given(starts(signed=True), st.floats(1.0, 20.0))
    def test_a_start_inside_the_ball_of_radius_rho_collapses(self, start, excess):
        mu, w = start
        radius = np.linalg.norm(np.concatenate(w))
        result = flow(mu, w, excess * radius)
        assert result.outcome == "collapses"
        if excess > 1:
            assert result.s_end <= math.log(excess / (excess - 1)) / mu[0] * (1 + 1e-6)

    @every_start
    @given(features(1), st.floats(0.05, 1.5), st.floats(1e-2, 1e2))
    def test_the_regime_is_what_the_simulated_leader_does(self, mu, ratio, rho):
        borders = [critical_scale(mu)]
        if len(mu) > 1:
            borders.append(mu[-2:].sum() / (math.sqrt(2) * np.linalg.norm(mu)))
        assume(min(abs(ratio / border - 1) for border in borders) > 1e-3)
        result = flow(mu, ratio * rho, rho)
        expected = {"collapse": (), "major-first": (len(mu) - 1,)}
        name = regime(mu, ratio * rho, rho)
        if name == "minor-first":
            assert result.outcome == "diverges"
            assert len(result.sequence()) > 1
        else:
            assert result.sequence() == expected[name]
            assert (result.outcome == "collapses") == (name == "collapse")

    @few_starts
    @given(starts(), st.sampled_from([0.99, 1.01]))
    def test_the_critical_scale_separates_the_fates_of_unbalanced_starts_in_a_slow_solver(
        self, start, factor
    ):
        mu, w = start
        c = critical_scale(mu, w)
        assert slow_fate(mu, *(factor * c * layer for layer in w)) == (factor < 1)

    @few_starts
    @given(starts(layers=1), st.sampled_from([0.99, 1.01]))
    def test_the_critical_scale_separates_the_fates_of_non_uniform_starts_in_a_slow_solver(
        self, start, factor
    ):
        mu, (shape,) = start
        w = factor * critical_scale(mu, shape) * shape
        assert slow_fate(mu, w, w) == (factor < 1)

    @every_start
    @given(starts(layers=1), st.floats(0.01, 10.0))
    def test_a_feature_outgrows_a_weaker_one_exactly_if_n_over_rho_exceeds_their_sum(self, start, rho):
        mu, (w,) = start
        n = math.sqrt(2) * np.linalg.norm(mu * w)
        rates = growth_rates(mu, w, rho)
        for i in range(len(mu)):
            for j in range(i + 1, len(mu)):
                assume(abs(n / rho / (mu[i] + mu[j]) - 1) > 1e-9)
                assert (rates[j] > rates[i]) == (n / rho > mu[i] + mu[j])


class TestLinfSAM:
    @every_start
    @given(starts(layers=1), st.floats(0.05, 1.0), st.integers(2, 4), st.floats(1e-2, 1e2))
    def test_only_alpha_over_rho_matters_for_the_limit(self, start, rho, depth, unit):
        mu, (alpha,) = start
        assume(np.abs(alpha / rho - 1).min() > 1e-6)
        assert linf_limit(mu, unit * alpha, unit * rho, depth) == linf_limit(mu, alpha, rho, depth)

    @every_start
    @given(starts(layers=1), st.floats(0.05, 1.0), st.integers(2, 4))
    def test_the_predicted_winner_leads_at_the_end_of_the_flow(self, start, rho, depth):
        mu, (alpha,) = start
        assume(np.abs(alpha / rho - 1).min() > 1e-3)
        strength = np.where(alpha > rho, mu * np.maximum(alpha - rho, 0) ** (depth - 2), 0.0)
        first, second = np.sort(strength)[::-1][:2]
        assume(first == 0 or second < 0.99 * first)
        winner = linf_limit(mu, alpha, rho, depth)
        result = flow(mu, alpha, rho, method="linf-sam", depth=depth)
        if winner is None:
            assert result.outcome != "diverges"
        else:
            assert result.outcome == "diverges"
            assert winner == np.argmax(strength)
            if depth > 2:
                assert np.isinf(result.beta[-1]).nonzero()[0].tolist() == [winner]
            else:
                far = flow(mu, alpha, rho, method="linf-sam", s=[0.0, 200 / (mu[1:] - mu[:-1]).min()]).beta[
                    -1
                ]
                assert np.argmax(np.nan_to_num(np.log(np.maximum(far, 1e-300)), posinf=1e4)) == winner or (
                    np.isinf(far).sum() > 1
                )


class TestPermutations:
    @few_starts
    @given(starts(layers=1), st.sampled_from(["l2", "linf"]), st.randoms(use_true_random=False))
    def test_real_sam_does_not_see_the_order_of_the_coordinates(self, start, norm, random):
        mu, (alpha,) = start
        places = np.array(random.sample(range(len(mu)), len(mu)))

        def train(mu, alpha):
            network = DiagonalNetwork(len(mu), 2, torch.from_numpy(alpha)).double()
            x = torch.from_numpy(np.ascontiguousarray(mu / mu.max()))[None]
            optimizer = SAM(network.parameters(), torch.optim.SGD, rho=0.1, norm=norm, lr=0.05)

            def closure():
                optimizer.zero_grad()
                loss = torch.nn.functional.softplus(-network(x)).mean()
                loss.backward()
                return loss

            for _ in range(50):
                optimizer.step(closure)
            return network.beta.detach().numpy()

        np.testing.assert_allclose(train(mu[places], alpha[places]), train(mu, alpha)[places], rtol=1e-9)

    @few_starts
    @pytest.mark.parametrize("norm", ["l1", "l2"])
    @given(st.integers(0, 10**6), st.randoms(use_true_random=False))
    def test_the_largest_margin_does_not_depend_on_the_order_of_coordinates_or_examples(
        self, norm, seed, random
    ):
        rng = np.random.default_rng(seed)
        X, y = rng.normal(size=(4, 6)), rng.choice([-1.0, 1.0], 4)
        columns, rows = random.sample(range(6), 6), random.sample(range(4), 4)
        one = max_margin(X, y, norm)
        other = max_margin(X[rows][:, columns], y[rows], norm)
        np.testing.assert_allclose(other, one[columns], rtol=1e-5, atol=1e-6)
