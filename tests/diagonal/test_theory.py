"""samkit.diagonal.theory: thresholds and limits against reference numbers, bounds and simulation."""

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from samkit.diagonal import critical_scale, flow, growth_rates, linf_limit, regime

# mu, the critical scale, and where the third regime begins.
TABLE = (
    ([1.0, 2.0], 0.521321, 0.948683),
    ([1.0, 3.0], 0.541603, 0.894427),
    ([1.0, 2.0, 3.0], 0.436426, 0.944911),
    ([1.0, 2.0, 3.0, 4.0, 5.0], 0.347269, 0.858116),
    ([0.5, 1.5, 4.0], 0.471894, 0.904194),
)
MU3 = [1.0, 2.0, 3.0]


def random_features(count=12):
    rng = np.random.default_rng(1)
    return [np.sort(rng.uniform(0.3, 4, 2 + i % 4)) for i in range(count)]


def falls_to_zero(mu, ratio):
    """An independent answer: the logarithms of the weights, one by one, by a solver for stiff equations."""
    mu = np.asarray(mu)

    def velocity(_, state):
        return growth_rates(mu, np.exp(state), 1.0)

    def small(_, state):
        return np.log(np.linalg.norm(mu * np.exp(state))) + 10

    def large(_, state):
        return np.linalg.norm(mu * np.exp(state)) - 3 * mu[-1]

    small.terminal = large.terminal = True
    found = solve_ivp(
        velocity,
        (0, 1e3),
        np.full(len(mu), math.log(ratio)),
        "LSODA",
        events=(small, large),
        rtol=1e-11,
        atol=1e-12,
    )
    return len(found.t_events[0]) > 0


class TestCriticalScale:
    @pytest.mark.parametrize(("mu", "c", "third"), TABLE)
    def test_has_the_reference_value(self, mu, c, third):
        assert critical_scale(mu) == pytest.approx(c, abs=5e-7)

    @pytest.mark.parametrize(("mu", "c", "third"), TABLE)
    def test_separates_collapse_from_growth_in_an_independent_solver(self, mu, c, third):
        c = critical_scale(mu)
        assert falls_to_zero(mu, c - 1e-5)
        assert not falls_to_zero(mu, c + 1e-5)

    def test_is_one_over_sqrt_2_for_one_feature_and_for_its_copies_together(self):
        assert critical_scale([3.0]) == pytest.approx(math.sqrt(0.5), abs=1e-9)
        assert critical_scale([2.0] * 5) == pytest.approx(math.sqrt(0.1), abs=1e-9)

    @pytest.mark.parametrize("mu", random_features())
    def test_lies_between_its_bounds(self, mu):
        c, norm = critical_scale(mu), np.linalg.norm(mu)
        rising = (mu**4).sum() / (mu**3).sum() / (math.sqrt(2) * norm)
        assert 1 / math.sqrt(2 * len(mu)) <= c <= min(math.sqrt(0.5), rising)
        assert c < mu[-2:].sum() / (math.sqrt(2) * norm)

    @pytest.mark.parametrize("m", [1.001, 1.2, 2.0, 5.0, 30.0])
    def test_of_two_features_is_below_the_guess_and_near_it_for_similar_features(self, m):
        guess = math.sqrt(1 + m**2) / (math.sqrt(2) * (1 + m))
        c = critical_scale([1.0, m])
        assert c <= guess + 1e-9
        if m < 1.01:
            assert c == pytest.approx(guess, abs=1e-4)

    def test_of_three_features_can_lie_above_the_same_guess(self):
        def guess(mu):
            return np.linalg.norm(mu) / (math.sqrt(2) * np.sum(mu))

        assert any(critical_scale(mu) > guess(mu) for mu in random_features(40) if len(mu) > 2)

    def test_does_not_depend_on_the_unit_of_the_features(self):
        assert critical_scale([10.0, 20.0, 30.0]) == pytest.approx(critical_scale(MU3), rel=1e-8)

    def test_counts_ties_as_one_feature_with_a_longer_start(self):
        tied = critical_scale([1.0, 2.0, 2.0, 2.0])
        assert tied == pytest.approx(critical_scale([1.0, 2.0], [1.0, math.sqrt(3)]), rel=1e-8)

    @pytest.mark.parametrize("seed", range(6))
    def test_of_any_shape_and_of_unbalanced_layers_separates_the_fates(self, seed):
        rng = np.random.default_rng(seed)
        mu, shape = np.sort(rng.uniform(0.3, 4, 3)), rng.uniform(0, 1, (2, 3))
        for form in (shape[0], tuple(shape), (shape[0], -0.5 * shape[1])):
            c = critical_scale(mu, form)
            for factor, outcome in ((1 - 1e-6, "collapses"), (1 + 1e-6, "diverges")):
                scaled = tuple(factor * c * w for w in form) if isinstance(form, tuple) else factor * c * form
                assert flow(mu, scaled, 1.0).outcome == outcome

    def test_scales_inversely_with_the_shape(self):
        assert critical_scale(MU3, 1e-3) == pytest.approx(1e3 * critical_scale(MU3), rel=1e-8)
        assert critical_scale(MU3, (2.0, 2.0)) == pytest.approx(critical_scale(MU3) / 2, rel=1e-8)

    def test_falls_when_one_coordinate_starts_higher(self):
        assert critical_scale(MU3, [1.0, 1.5, 1.0]) < critical_scale(MU3)

    def test_is_infinite_for_layers_that_cancel(self):
        assert critical_scale([1.0, 2.0], ([1.0, 2.0], [-1.0, -2.0])) == math.inf

    @pytest.mark.parametrize("mu1", [1.0, 0.5, 0.25])
    def test_is_where_the_plateau_lasts_for_ever(self, mu1):
        # Near the saddle n/rho - mu_1 doubles every log(2)/mu_1; twice that in real time, where |l'| = 1/2.
        mu, s = mu1 * np.array(MU3), np.linspace(0, 30 / mu1, 30_001)
        gaps = np.array([1e-3, 1e-4, 1e-5, 1e-6])
        norm = flow(mu, critical_scale(mu) + gaps[:, None], 1.0, s=s).gradient_norm
        leaves = s[(np.diff(norm > 1.3 * mu1, axis=1) & (norm[:, 1:] > norm[:, :-1])).argmax(axis=1)]
        slope = np.polyfit(np.log(1 / gaps), leaves, 1)[0]
        assert slope == pytest.approx(1 / mu1, rel=0.01)


class TestRegime:
    @pytest.mark.parametrize(("mu", "c", "third"), TABLE)
    def test_changes_at_the_reference_values(self, mu, c, third):
        found = [regime(mu, 0.2 * ratio, 0.2) for ratio in (c - 1e-6, c + 1e-6, third - 1e-6, third + 1e-6)]
        assert found == ["collapse", "minor-first", "minor-first", "major-first"]

    @pytest.mark.parametrize("mu", random_features())
    def test_agrees_with_simulation(self, mu):
        for ratio in (0.3, 0.4, 0.55, 0.7, 0.85, 1.0):
            result = flow(mu, ratio, 1.0)
            sequence = result.sequence()
            expected = (
                "collapse" if not sequence else "major-first" if sequence[0] == len(mu) - 1 else "minor-first"
            )
            assert regime(mu, ratio, 1.0) == expected

    def test_of_one_feature_has_nothing_between_and_counts_equality_as_collapse(self):
        assert [regime([2.0], a, math.sqrt(2)) for a in (0.9, 1.0, 1.1)] == [
            "collapse",
            "collapse",
            "major-first",
        ]
        assert [regime([2.0, 2.0], a, 2.0) for a in (1.0, 1.01)] == ["collapse", "major-first"]

    def test_of_gradient_descent_is_major_first(self):
        assert regime(MU3, 1e-9, 0.0) == "major-first"

    def test_of_ties_looks_at_different_strengths(self):
        third = 3 / (math.sqrt(2) * 3)
        assert regime([1.0, 2.0, 2.0], third - 1e-6, 1.0) == "minor-first"
        assert regime([1.0, 2.0, 2.0], third + 1e-6, 1.0) == "major-first"


class TestLinfLimit:
    @pytest.mark.parametrize(
        ("mu", "init", "depth", "winner"),
        [
            (MU3, [1.2, 1.5, 0.9], 2, 1),
            (MU3, [1.5, 1.0, 0.9], 2, 0),
            (MU3, [0.9, 1.0, 0.5], 2, None),
            (MU3, [1.5, 1.2, 1.1], 3, 0),
            ([1.0, 2.0], [1.8, 1.5], 4, 0),
            ([1.0, 2.0], [1.8, 1.6], 4, 1),
            ([1.0, 2.0], [0.5, 1.0], 3, None),
            (MU3, ([1.9, 1.5, 1.0], [0.3, 0.3, 0.5]), 2, 0),
        ],
    )
    def test_is_the_reference_winner(self, mu, init, depth, winner):
        assert linf_limit(mu, init, 1.0, depth) == winner

    @pytest.mark.parametrize(("init", "depth"), [(1e-40, 12), (1e40, 12), (0.5, 5000)])
    def test_does_not_depend_on_the_unit_of_the_weights_however_deep(self, init, depth):
        assert linf_limit([1.0, 2.0, 3.0], init, 0.0, depth) == 2

    @pytest.mark.parametrize("depth", [2, 3, 4, 5])
    def test_leads_in_simulation(self, depth):
        rng = np.random.default_rng(depth)
        for _ in range(10):
            mu, alpha = np.sort(rng.uniform(0.5, 3, 4)), rng.uniform(0.5, 1.6, 4)
            winner = linf_limit(mu, alpha, 1.0, depth)
            result = flow(mu, alpha, 1.0, method="linf-sam", depth=depth)
            assert (winner is None) == (result.outcome != "diverges")
            if winner is not None:
                assert result.leader[-1] == winner

    def test_of_gradient_descent_on_three_layers_depends_on_the_start_too(self):
        assert linf_limit([1.0, 2.0], [1.0, 0.4], 0.0, 3) == 0
        assert linf_limit([1.0, 2.0], [1.0, 0.6], 0.0, 3) == 1
        assert linf_limit([1.0, 2.0], [1.0, 0.01], 0.0, 2) == 1


class TestGrowthRates:
    def test_is_a_parabola_with_its_top_at_half_of_n_over_rho(self):
        mu, w, rho = np.linspace(0.1, 3, 59), np.full(59, 0.1), 0.5
        n = math.sqrt(2) * np.linalg.norm(mu * w)
        rates = growth_rates(mu, w, rho)
        assert mu[rates.argmax()] == pytest.approx(n / (2 * rho), abs=0.026)
        assert rates.max() <= n / (4 * rho)

    def test_orders_two_features_by_the_sum_of_their_strengths(self):
        for scale in (0.3, 0.5, 0.8):
            w = scale * np.array([1.0, 0.7, 0.4])
            r = math.sqrt(2) * np.linalg.norm(np.array(MU3) * w)
            rates = growth_rates(MU3, w, 1.0)
            for i, j in itertools.combinations(range(3), 2):
                assert (rates[j] > rates[i]) == (r > MU3[i] + MU3[j])

    def test_takes_many_points_at_once_and_is_mu_for_gradient_descent(self):
        w = np.random.default_rng(0).uniform(0.1, 1, (4, 5, 3))
        rates = growth_rates(MU3, w, 0.2)
        assert rates.shape == w.shape
        np.testing.assert_allclose(rates[2, 3], growth_rates(MU3, w[2, 3], 0.2))
        np.testing.assert_array_equal(growth_rates(MU3, w, 0.0), np.broadcast_to(MU3, w.shape))


class TestBadInput:
    mistakes = (
        (lambda: critical_scale([2.0, 1.0]), "[2.0, 1.0]", "sort"),
        (lambda: critical_scale(MU3, np.ones((2, 3))), "batch", "once for each"),
        (lambda: critical_scale(MU3, 0.0), "all zero", "factor"),
        (lambda: critical_scale(MU3, [1.0, 1.0]), "(2,)", "3 coordinates"),
        (lambda: critical_scale(MU3, (1.0,)), "got 1", "2 layers"),
        (lambda: regime(MU3, 0.0, 1.0), "0.0", "> 0"),
        (lambda: regime(MU3, 1.0, -1.0), "-1.0", ">= 0"),
        (lambda: linf_limit(MU3, 1.0, 0.5, 1), "1", ">= 2"),
        (lambda: linf_limit([1.0, 1.0], 2.0, 1.0), "[0, 1]", "change"),
        (lambda: linf_limit([1.0, 2.0], [2.0, 1.5], 1.0, 3), "[0, 1]", "change"),
        (lambda: linf_limit(MU3, [[1.0]], 0.5), "batch", "once for each"),
        (lambda: linf_limit(MU3, (1.0, 2.0, 1.0), 0.5, 3), "depth=3", "one value"),
        (lambda: linf_limit(MU3, 1.0, -0.5), "-0.5", ">= 0"),
        (lambda: growth_rates(MU3, [1.0, 2.0], 0.1), "(2,)", "3 coordinates"),
        (lambda: growth_rates(MU3, 0.5, 0.1), "()", "3 coordinates"),
        (lambda: growth_rates(MU3, np.full(3, 1e-200), 0.1), "1e-200", "another unit"),
        (lambda: critical_scale([1e-200, 3e-200]), "1e-200", "another unit"),
        (lambda: critical_scale([1e-8, 2e-8, 1.0]), "1e-08", "nearer"),
        (lambda: growth_rates(MU3, np.zeros(3), 0.1), "[0.0, 0.0, 0.0]", "not all zero"),
    )

    @pytest.mark.parametrize(("call", "value", "remedy"), mistakes, ids=map(str, itertools.count()))
    def test_names_the_value_and_the_remedy(self, call, value, remedy):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is read below)
            call()
        assert value in str(caught.value)
        assert remedy in str(caught.value)

    def test_refuses_wrong_types(self):
        with pytest.raises(TypeError, match="init_scale must be a number"):
            regime(MU3, [0.5, 0.5, 0.5], 1.0)
        with pytest.raises(TypeError, match="depth must be an integer"):
            linf_limit(MU3, 1.0, 0.5, 2.0)
