"""samkit.diagonal.flow: closed forms against formulas, and everything against a slow, independent solver."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from samkit.diagonal import critical_scale, flow, growth_rates, phase_diagram

MU3, MU5 = [1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]


def slow(mu, layers, rho, s, method="l2-sam"):
    """The definition, from the loss: one solve_ivp with an event on the gradient norm."""
    mu, start = np.asarray(mu), np.stack(layers)

    def ascent(w):
        return mu * np.stack([np.prod(np.delete(w, i, axis=0), axis=0) for i in range(len(w))])

    def velocity(_, state):
        w = state.reshape(start.shape)
        g = -ascent(w)  # the gradient of the loss, but for its scalar
        if method == "l2-sam":
            w = w + rho * g / np.linalg.norm(g)
        elif method == "linf-sam":
            w = w + rho * np.sign(g)
        return ascent(w).ravel()

    def vanishes(_, state):
        return np.linalg.norm(ascent(state.reshape(start.shape))) - 1e-7

    vanishes.terminal = True
    found = solve_ivp(
        velocity, (0, s[-1]), start.ravel(), "DOP853", s, events=vanishes, rtol=1e-12, atol=1e-20
    )
    end = found.t_events[0]
    return found.y.T.reshape(-1, *start.shape), (end[0] if len(end) else math.inf)


def start(value, d, depth=2):
    values = value if isinstance(value, tuple) else (value,) * depth
    return [np.broadcast_to(np.asarray(v, dtype=float), d) for v in values]


class TestL2SamOnTwoLayers:
    @pytest.mark.parametrize(
        ("mu", "init"),
        [
            (MU3, 0.5),
            (MU3, 0.44),
            (MU3, [0.9, 0.1, 0.4]),
            (MU3, [0.9, 0.0, 0.4]),
            ([1.0, 1.0, 2.5], 0.6),
            (MU3, ([0.9, 0.1, 0.8], [0.2, 0.3, 0.4])),
            (MU3, ([1.4, -0.1, 0.9], [0.6, 0.3, -0.2])),
            ([0.5, 3.0], ([0.9, -0.5], [0.8, -0.5])),
            ([2.0], 0.75),
        ],
    )
    def test_follows_the_slow_solver_layer_by_layer(self, mu, init):
        result = flow(mu, init, 1.0)
        w, _ = slow(mu, start(init, len(mu)), 1.0, result.s)
        assert result.outcome == "diverges"
        for layer, expected in zip(result.layers, w.swapaxes(0, 1), strict=True):
            np.testing.assert_allclose(layer, expected, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(result.beta, w.prod(axis=1), rtol=1e-7, atol=1e-9)

    @pytest.mark.parametrize(
        ("mu", "init"),
        [(MU3, 0.4), (MU5, 0.34), ([1.0], 0.7), (MU3, ([0.9, 0.1, -0.2], [-0.7, 0.3, 0.2])), (MU3, 1e-9)],
    )
    def test_collapses_when_the_slow_solvers_gradient_vanishes(self, mu, init):
        result = flow(mu, init, 1.0)
        assert result.outcome == "collapses"
        if np.max(init) > 1e-6:
            _, end = slow(mu, start(init, len(mu)), 1.0, np.linspace(0, 2 * result.s_end, 5))
            assert result.s_end == pytest.approx(end, abs=3e-7)
        assert result.s[-1] == result.s_end
        assert not result.beta[-1].any()
        assert result.beta[:-1].any(axis=1).all()

    def test_collapses_alone_at_the_time_of_the_formula(self):
        # With one feature dn/ds = mu n - mu^2 rho.
        mu, alpha = 3.0, 0.5
        expected = -math.log(1 - math.sqrt(2) * alpha) / mu
        assert flow([mu], alpha, 1.0).s_end == pytest.approx(expected, abs=1e-10)

    def test_never_underflows_on_its_way_from_a_tiny_ratio_of_features(self):
        result = flow([1.0, 30.0], 0.72, 1.0, s=np.linspace(0, 3, 50))
        w, _ = slow([1.0, 30.0], start(0.72, 2), 1.0, result.s)
        np.testing.assert_allclose(result.beta, w.prod(axis=1), rtol=1e-6, atol=1e-12)

    @pytest.mark.parametrize(
        ("mu", "alpha", "leaders"),
        [
            *((MU3, alpha, (1, 2, 3)) for alpha in (0.45, 0.5, 0.55)),
            *((MU3, alpha, (2, 3)) for alpha in (0.6, 0.7, 0.8, 0.9)),
            (MU3, 0.945, (3,)),
            (MU5, 0.35, (2, 1, 2, 3, 4, 5)),
            (MU5, 0.38, (2, 3, 4, 5)),
            (MU5, 0.5, (3, 4, 5)),
            (MU5, 0.7, (4, 5)),
            (MU5, 0.86, (5,)),
        ],
    )
    def test_leads_through_the_features_in_the_known_order(self, mu, alpha, leaders):
        assert flow(mu, alpha, 1.0).sequence() == tuple(leader - 1 for leader in leaders)

    def test_a_collapsed_run_has_no_sequence(self):
        result = flow(MU3, 0.43, 1.0)
        assert result.outcome == "collapses"
        assert (result.leader >= 0).any()
        assert result.sequence() == ()

    def test_the_third_feature_takes_over_at_a_loss_of_exp_minus_2023(self):
        result = flow(MU3, 0.5, 1.0, s=np.linspace(0, 12, 200_001))
        at = (result.leader == 2).argmax()
        assert result.beta[at] @ result.mu == pytest.approx(2023, abs=2)

    def test_the_rates_are_the_growth_law(self):
        result = flow(MU3, 0.5, 1.0, s=np.linspace(0, 3, 3001))
        w = result.layers[0]
        rates = np.gradient(np.log(w), result.s, axis=0)[1:-1]
        np.testing.assert_allclose(rates, growth_rates(MU3, w, 1.0)[1:-1], atol=1e-5)

    def test_imbalance_decays_where_gradient_descent_conserves_it(self):
        init = ([0.9, 0.8, 0.7], [0.6, 0.8, 0.9])
        sam, gd = (flow(MU3, init, 0.5, method=m, s=[0.0, 1.0]) for m in ("l2-sam", "gd"))
        gap = [np.abs(r.layers[0] ** 2 - r.layers[1] ** 2) for r in (sam, gd)]
        np.testing.assert_allclose(gap[1][1], gap[1][0], rtol=1e-12)
        factor = gap[0][1][[0, 2]] / gap[0][0][[0, 2]]
        np.testing.assert_allclose(np.log(factor) / np.array([1, 9]), np.log(factor[0]), rtol=1e-9)
        assert factor[0] < 0.95

    def test_a_long_time_gives_infinity_but_never_nan(self):
        result = flow(MU3, ([0.9, 0.0, 0.5], [0.8, 0.0, 0.4]), 0.3, s=[0.0, 1e3, 1e5])
        assert np.isposinf(result.beta[-1, 2])
        assert (result.beta[:, 1] == 0).all()
        assert not np.isnan(result.gradient_norm).any()


def random_starts():
    rng = np.random.default_rng(0)
    return [(np.sort(rng.uniform(0.3, 4, d)), rng.uniform(0.2, 1.2, (2, d))) for d in (2, 3, 3, 4, 5)]


class TestInvariants:
    cases = random_starts()

    @pytest.mark.parametrize(("mu", "init"), cases)
    def test_only_alpha_over_rho_matters(self, mu, init):
        one = flow(mu, tuple(init), 1.0)
        other = flow(mu, tuple(0.01 * init), 0.01, s=one.s)
        np.testing.assert_allclose(other.beta, 1e-4 * one.beta, rtol=1e-8, atol=1e-12)
        assert one.outcome == other.outcome

    @pytest.mark.parametrize(("mu", "init"), cases)
    def test_the_gradient_norm_falls_at_most_once(self, mu, init):
        rises = np.diff(flow(mu, tuple(init), 1.0).gradient_norm) > 0
        assert not (rises[:-1] & ~rises[1:]).any()

    @pytest.mark.parametrize("mu", [MU3, [1.0, 2.0, 3.0, 4.0, 5.0], [0.5, 1.5, 4.0]])
    def test_from_a_uniform_start_the_gradient_norm_never_falls_exactly_above_a_known_ratio(self, mu):
        mu = np.array(mu)
        border = (mu**4).sum() / (mu**3).sum() / (math.sqrt(2) * np.linalg.norm(mu))
        for ratio, falls in ((border - 1e-3, True), (border + 1e-3, False)):
            assert (np.diff(flow(mu, ratio, 1.0).gradient_norm) < 0).any() == falls

    @pytest.mark.parametrize("ratio", [0.3, 0.36, 0.45, 0.6, 0.8, 1.0])
    def test_from_a_uniform_start_the_leader_turns_at_most_once(self, ratio):
        for mu, _ in self.cases:
            result = flow(mu, ratio, 1.0)
            steps = np.diff([i for i in result.leader if i >= 0])
            ups = steps[steps != 0] > 0
            assert not (ups[:-1] & ~ups[1:]).any()

    def test_coordinates_of_one_strength_can_be_exchanged(self):
        mu, alpha = [1.0, 2.0, 2.0], np.array([0.5, 0.3, 0.6])
        one = flow(mu, alpha, 1.0)
        other = flow(mu, alpha[[0, 2, 1]], 1.0, s=one.s)
        np.testing.assert_allclose(other.beta[:, [0, 2, 1]], one.beta, rtol=1e-9)

    def test_ties_act_as_one_feature_with_a_longer_start(self):
        tied = flow([1.0, 2.0, 2.0, 2.0], 0.5, 1.0)
        single = flow([1.0, 2.0], [0.5, math.sqrt(3) * 0.5], 1.0, s=tied.s)
        np.testing.assert_allclose(tied.beta[:, 1:].sum(axis=1), single.beta[:, 1], rtol=1e-8)
        np.testing.assert_allclose(tied.beta[:, 0], single.beta[:, 0], rtol=1e-8)

    @pytest.mark.parametrize(("mu", "init"), cases)
    def test_a_start_inside_the_ball_of_radius_rho_collapses_in_time(self, mu, init):
        norm = np.linalg.norm(init)
        for inside in (0.2, 0.999):
            result = flow(mu, tuple(init), norm / inside)
            assert result.outcome == "collapses"
            assert result.s_end <= -math.log(1 - inside) / mu[0] + 1e-9

    def test_swapping_layers_and_changing_both_signs_change_nothing(self):
        one, two = np.array([0.9, -0.4]), np.array([0.7, 0.8])
        for method in ("l2-sam", "linf-sam", "gd"):
            first = flow([1.0, 2.0], (one, two), 0.4, method=method)
            for other in ((two, one), (-one, -two)):
                again = flow([1.0, 2.0], other, 0.4, method=method, s=first.s)
                np.testing.assert_allclose(again.beta, first.beta, rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("method", ["l2-sam", "linf-sam"])
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_sam_without_a_radius_is_gradient_descent(self, method, depth):
        sam = flow(MU3, [0.5, 0.7, 0.3], 0.0, method=method, depth=depth)
        gd = flow(MU3, [0.5, 0.7, 0.3], 0.0, method="gd", depth=depth)
        np.testing.assert_array_equal(sam.beta, gd.beta)


class TestLinfSamOnTwoLayers:
    def test_above_rho_grows_at_rho_stays_and_below_dies(self):
        s = np.array([0.0, 0.5, 1.0, 5.0])
        result = flow([1.0, 2.0, 3.0], [1.5, 1.0, 0.9], 1.0, method="linf-sam", s=s)
        w = result.layers[0]
        np.testing.assert_allclose(w[:, 0], 1 + 0.5 * np.exp(s), rtol=1e-14)
        assert (w[:, 1] == 1).all()
        np.testing.assert_allclose(w[:, 2], np.maximum(1 - 0.1 * np.exp(3 * s), 0), atol=1e-14)

    def test_wins_with_the_largest_mu_among_those_above_rho(self):
        result = flow(MU3, [1.2, 1.5, 0.9], 1.0, method="linf-sam")
        assert result.outcome == "diverges"
        assert result.leader[-1] == 1
        assert result.beta[-1, 2] == 0

    def test_unbalanced_layers_grow_exactly_if_their_mean_exceeds_rho(self):
        grow, die = (flow([1.0], (a, 0.3), 1.0, method="linf-sam") for a in (1.9, 1.5))
        assert (grow.outcome, die.outcome) == ("diverges", "collapses")

    def test_follows_many_small_steps_through_every_quadrant_and_along_every_slide(self):
        values = (-3.0, -1.5, -0.7, -0.3, 0.0, 0.2, 0.8, 1.7, 3.0)
        first, second = np.array([(a, b) for a in values for b in values if abs(abs(a + b) / 2 - 1) > 0.01]).T
        step, s = 1e-4, np.arange(0, 1.01, 0.1)
        closed = flow([1.5], (first[:, None], second[:, None]), 1.0, method="linf-sam", s=s)
        w = np.stack([first, second])
        for i in range(1, len(s)):
            for _ in range(1000):
                w = w + step * 1.5 * (w[::-1] - np.sign(w))
            # Where a weight slides along 0 the steps chatter around it.
            np.testing.assert_allclose(closed.layers[0][:, i, 0], w[0], rtol=1e-3, atol=2e-3)
            np.testing.assert_allclose(closed.layers[1][:, i, 0], w[1], rtol=1e-3, atol=2e-3)

    @pytest.mark.parametrize("w2", [-0.2, -0.5, -1.0])
    def test_mixed_signs_conserve_a_product_which_decides(self, w2):
        rho = 1.0
        for w1 in np.linspace(0.1, 4, 25):
            a, b = (w1 + w2) / 2, (w1 - w2) / 2
            result = flow([1.0], (w1, w2), rho, method="linf-sam", s=np.linspace(0, 4, 50))
            assert (result.outcome == "diverges") == (a * (b + rho) > 2 * rho**2)
            one, two = (layer[:, 0] for layer in result.layers)
            mixed = (one > 0) & (two < 0)
            product = ((one + two) / 2 * ((one - two) / 2 + rho))[mixed]
            np.testing.assert_allclose(product, a * (b + rho), rtol=1e-9)

    def test_nothing_jumps_where_the_pieces_meet(self):
        s = np.linspace(0, 3, 30_001)
        for init in ((2.0, -0.3), (1.5, -0.9), (0.9, -0.9), (1.5, 0.3), (-3.0, 2.0), (0.4, 0.0)):
            result = flow([1.0], init, 1.0, method="linf-sam", s=s)
            for layer in result.layers:
                assert np.abs(np.diff(layer[:, 0])).max() < 1e-4 * (4 + np.abs(layer).max())

    def test_a_dying_weight_slides_to_zero_at_the_rate_mu_rho(self):
        result = flow([2.0], (0.8, 0.0), 1.0, method="linf-sam", s=[0.0, 0.1, 0.3, 0.5])
        np.testing.assert_allclose(result.layers[0][:, 0], [0.8, 0.6, 0.2, 0.0], atol=1e-15)
        assert result.s_end == pytest.approx(0.4)


class TestThreeLayersAndMore:
    def test_the_first_blow_up_freezes_the_others(self):
        result = flow([1.0, 2.0], [1.5, 0.5], 1.0, method="linf-sam", depth=3)
        assert result.s_end == result.s[-1] == pytest.approx(2.0)
        assert np.isposinf(result.beta[-1, 0])
        assert result.layers[0][-1, 1] == pytest.approx(5 / 6)
        later = flow([1.0, 2.0], [1.5, 0.5], 1.0, method="linf-sam", depth=3, s=[0.0, 2.0, 3.0, 1e9])
        np.testing.assert_array_equal(later.beta[1:], np.broadcast_to(result.beta[-1], (3, 2)))

    def test_blow_up_times_are_those_of_the_formula(self):
        # Coordinate by coordinate: 2, 2.5 and 10/3.
        for mu, alpha, expected in ((1.0, 1.5, 2.0), (2.0, 1.2, 2.5), (3.0, 1.1, 10 / 3)):
            assert flow([mu], alpha, 1.0, method="linf-sam", depth=3).s_end == pytest.approx(expected)
        assert flow(MU3, [1.5, 1.2, 1.1], 1.0, method="linf-sam", depth=3).leader[-1] == 0

    @pytest.mark.parametrize("depth", [3, 4, 5])
    @pytest.mark.parametrize("method", ["gd", "linf-sam"])
    @pytest.mark.parametrize("init", [[1.3, 0.4], [0.8, 0.9], [0.3, 1.2]])
    def test_follows_the_slow_solver_until_the_first_event(self, method, depth, init):
        rho = 0.0 if method == "gd" else 1.0
        mu = [1.0, 1.7]
        whole = flow(mu, init, rho, method=method, depth=depth)
        dies = np.flatnonzero((whole.layers[0] <= 0).any(axis=1))
        end = 0.95 * (whole.s[dies[0]] if len(dies) else whole.s[-1])
        s = np.linspace(0, end, 40)
        w, _ = slow(mu, start(init, 2, depth), rho, s, method)
        result = flow(mu, init, rho, method=method, depth=depth, s=s)
        np.testing.assert_allclose(result.layers[0], w[:, 0], rtol=1e-6, atol=1e-9)

    def test_below_rho_odd_depths_return_to_rho_and_even_depths_die(self):
        odd, even = (flow([1.0, 2.0], 0.4, 1.0, method="linf-sam", depth=L, s=[0.0, 1e6]) for L in (3, 4))
        assert (odd.outcome, even.outcome) == ("stays finite", "collapses")
        np.testing.assert_allclose(odd.layers[0][-1], 1, atol=1e-5)
        assert not even.beta[-1].any()

    def test_l2_sam_alone_is_linf_sam_with_a_smaller_radius(self):
        # With one feature every layer has the same gradient, which divided by its norm is 1/sqrt 3.
        for alpha in (0.3, 0.9):
            l2 = flow([2.0], alpha, 1.0, depth=3)
            linf = flow([2.0], alpha, 1 / math.sqrt(3), method="linf-sam", depth=3, s=l2.s)
            assert l2.outcome == linf.outcome
            np.testing.assert_allclose(l2.beta[:-1], linf.beta[:-1], rtol=1e-6)
            assert l2.s_end == pytest.approx(linf.s_end, rel=1e-8)

    @pytest.mark.parametrize(
        "init", [0.5, [0.9, 0.2, 0.4], ([0.5, 0.6, 0.7], [0.9, 0.6, 0.5], [0.6, 0.7, 0.8])]
    )
    def test_l2_sam_follows_the_slow_solver(self, init):
        whole = flow(MU3, init, 1.0, depth=3)
        assert whole.outcome == "diverges"
        s = np.linspace(0, 0.98 * whole.s_end, 40)
        w, _ = slow(MU3, start(init, 3, 3), 1.0, s)
        result = flow(MU3, init, 1.0, depth=3, s=s)
        for layer, expected in zip(result.layers, w.swapaxes(0, 1), strict=True):
            np.testing.assert_allclose(layer, expected, rtol=1e-6, atol=1e-9)

    def test_balanced_l2_sam_never_shrinks_and_stalls_at_the_formula(self):
        mu = np.array(MU3)
        stall = 1 / (math.sqrt(3) * mu * np.sqrt((mu**-2.0).sum()))
        result = flow(mu, stall, 1.0, depth=3, s=[0.0, 0.5, 1.0])
        np.testing.assert_allclose(result.layers[0], np.broadcast_to(stall, (3, 3)), rtol=1e-9)
        free = flow(mu, [0.05, 0.3, 0.2], 1.0, depth=3)
        assert (np.diff(free.layers[0][:-1], axis=0) >= 0).all()

    @pytest.mark.parametrize("init", [0.8, (2.0, 0.1, 0.15)])
    def test_times_may_all_lie_behind_the_end(self, init):
        end = flow(MU3, init, 1.0, depth=3)
        result = flow(MU3, init, 1.0, depth=3, s=[end.s_end, 2 * end.s_end])
        np.testing.assert_array_equal(result.beta, np.stack([end.beta[-1]] * 2))

    @pytest.mark.parametrize(("mu", "alpha"), [([1.0, 100.0], 1e-4), (MU3, 1e-6), (MU3, 1e-12)])
    def test_rounding_does_not_tear_equal_layers_apart_from_a_tiny_start(self, mu, alpha):
        result = flow(mu, alpha, 1.0, depth=3)
        assert all(np.array_equal(layer, result.layers[0]) for layer in result.layers)
        assert (np.diff(result.layers[0], axis=0) > -1e-12).all()
        assert result.outcome == "stays finite"
        assert result.layers[0].max() < 1

    def test_l2_sam_can_collapse_from_unbalanced_layers(self):
        init = (2.0, 0.1, 0.15)
        result = flow([1.0], init, 1.0, depth=3)
        _, end = slow([1.0], start(init, 1, 3), 1.0, np.linspace(0, 10, 5))
        assert result.outcome == "collapses"
        assert result.s_end == pytest.approx(end, abs=1e-6)
        assert result.beta[-1, 0] == result.gradient_norm[-1] == 0


class TestOneLayer:
    def test_is_a_straight_line_for_every_method(self):
        for method in ("gd", "l2-sam", "linf-sam"):
            result = flow([1.0, 2.0], [0.5, -1.0], 0.7, method=method, depth=1)
            np.testing.assert_allclose(result.beta, [0.5, -1.0] + result.s[:, None] * [1.0, 2.0])
            assert (result.outcome, result.leader[-1]) == ("diverges", 1)


class TestShapes:
    methods = (
        ("l2-sam", 2),
        ("linf-sam", 2),
        ("gd", 2),
        ("gd", 3),
        ("linf-sam", 4),
        ("l2-sam", 3),
        ("gd", 1),
    )

    @pytest.mark.parametrize(("method", "depth"), methods)
    def test_a_batch_equals_its_starts_one_by_one(self, method, depth):
        batch = np.array([[0.4, 0.45], [0.9, 0.7], [1.2, 1.5]])
        s = np.linspace(0, 2, 9)
        both = flow([1.0, 2.0], batch, 1.0, method=method, depth=depth, s=s)
        assert both.beta.shape == (3, 9, 2)
        assert both.outcome.shape == both.s_end.shape == (3,)
        assert len(both.layers) == depth
        for i, alpha in enumerate(batch):
            one = flow([1.0, 2.0], alpha, 1.0, method=method, depth=depth, s=s)
            np.testing.assert_allclose(both.beta[i], one.beta, rtol=1e-9)
            np.testing.assert_allclose(both.gradient_norm[i], one.gradient_norm, rtol=1e-9)
            assert (both.outcome[i], both.s_end[i]) == (one.outcome, pytest.approx(one.s_end))

    def test_a_column_is_a_batch_of_uniform_starts(self):
        column = flow(MU3, [[0.4], [0.5]], 1.0, s=[0.0, 1.0])
        full = flow(MU3, [[0.4] * 3, [0.5] * 3], 1.0, s=[0.0, 1.0])
        np.testing.assert_array_equal(column.beta, full.beta)

    def test_one_value_for_each_layer_may_be_a_batch_too(self):
        result = flow(MU3, ([[0.4], [0.9]], 0.5), 1.0, s=[0.0, 1.0])
        assert result.beta.shape == (2, 2, 3)
        np.testing.assert_allclose(result.layers[1][:, 0], 0.5)

    @pytest.mark.parametrize(("method", "depth"), methods)
    def test_a_tuple_of_equal_layers_is_balanced(self, method, depth):
        alone = flow(MU3, 0.8, 0.5, method=method, depth=depth)
        layers = flow(MU3, (0.8,) * depth, 0.5, method=method, depth=depth)
        np.testing.assert_array_equal(alone.beta, layers.beta)

    @pytest.mark.parametrize(("method", "depth"), methods)
    def test_the_default_times_show_the_end(self, method, depth):
        result = flow(MU3, [1.6, 1.4, 1.3], 1.0, method=method, depth=depth)
        assert len(result.s) >= 400
        assert result.s[0] == 0
        if depth == 2:
            assert result.leader[-1] == 2
            assert result.gradient_norm[-1] > 5
        assert result.s_end == result.s[-1]

    @pytest.mark.parametrize("method", ["l2-sam", "gd"])
    def test_the_default_times_wait_until_a_coordinate_that_starts_negative_leads(self, method):
        result = flow([1.0, 4.0], ([0.23, -0.39], [-0.38, 0.5]), 0.05, method=method)
        assert result.beta[0].max() < 0
        assert result.leader[-1] == 1

    def test_the_gradient_norm_is_that_of_all_layers(self):
        result = flow([1.0, 2.0], ([0.5, 0.6], [0.7, 0.8]), 0.1, s=[0.0, 1.0])
        expected = math.sqrt(0.7**2 + 0.5**2 + 4 * (0.8**2 + 0.6**2))
        assert result.gradient_norm[0] == pytest.approx(expected)

    def test_tensors_serve_as_arrays_and_are_not_shared(self):
        mu, alpha, s = (torch.tensor(v, dtype=torch.float64) for v in (MU3, [0.5, 0.6, 0.7], [0.0, 1.0]))
        result = flow(mu, alpha, 1.0, s=s)
        before = result.s.copy(), result.beta.copy(), result.mu.copy()
        for tensor in (mu, alpha, s):
            tensor.zero_()
        np.testing.assert_array_equal(result.beta, flow(MU3, [0.5, 0.6, 0.7], 1.0, s=[0.0, 1.0]).beta)
        for value, earlier in zip((result.s, result.beta, result.mu), before, strict=True):
            np.testing.assert_array_equal(value, earlier)

    @pytest.mark.parametrize("method", ["gd", "l2-sam", "linf-sam"])
    def test_a_zero_start_stays_at_zero(self, method):
        result = flow(MU3, 0.0, 0.5, method=method)
        assert not result.beta.any()
        assert (result.leader == -1).all()
        assert result.outcome == ("stays finite" if method == "gd" else "collapses")

    def test_the_fate_does_not_depend_on_the_times_asked_for(self):
        short, long = (flow(MU3, 0.43, 1.0, s=[0.0, end]) for end in (0.1, 100.0))
        assert short.outcome == long.outcome == "collapses"
        assert short.s_end == pytest.approx(long.s_end, abs=1e-9)
        assert short.s_end > 0.1


class TestPhaseDiagram:
    ratios, s = np.linspace(0.2, 1.2, 41), np.linspace(0, 12, 60)

    def test_equals_one_slow_solution_for_each_start(self):
        c = critical_scale(MU5)
        ratios = np.array([0.3, c - 2e-3, c + 2e-3, 0.4, 0.6, 0.9])
        found = phase_diagram(MU5, ratios, self.s)
        for ratio, beta, end in zip(ratios, found.beta, found.s_end, strict=True):
            inside = self.s[self.s < end - 1e-3] if ratio < c else self.s

            def velocity(s, state):
                # As in the closed form, but in logarithms of every weight: no weight underflows.
                return growth_rates(MU5, np.exp(state), 1.0)

            slowly = solve_ivp(
                velocity,
                (0, self.s[-1] if ratio > c else inside[-1] + 1e-9),
                np.full(5, math.log(ratio)),
                "DOP853",
                inside,
                rtol=1e-13,
                atol=1e-12,
            )
            np.testing.assert_allclose(2 * slowly.y.T, np.log(beta[: len(inside)]), rtol=0, atol=1e-6)
            assert not beta[self.s >= end].any() or ratio > c

    def test_the_nearest_feature_to_the_bump_is_the_largest(self):
        found = phase_diagram(MU5, self.ratios, self.s)
        expected = flow(MU5, self.ratios[:, None], 1.0, s=self.s)
        np.testing.assert_array_equal(found.leader, expected.leader)
        np.testing.assert_array_equal(found.outcome, expected.outcome)
        np.testing.assert_allclose(found.beta, expected.beta, rtol=1e-12)

    def test_the_leader_rises_with_the_initial_scale_at_a_fixed_time(self):
        leader = phase_diagram(MU3, np.linspace(0.44, 1.2, 200), [4.0]).leader[:, 0]
        assert set(leader) == {0, 1, 2}
        assert (np.diff(leader) >= 0).all()

    def test_nobody_leads_at_the_start_and_after_a_collapse(self):
        leader = phase_diagram(MU3, [0.2, 0.5], [0.0, 50.0]).leader
        assert leader.tolist() == [[-1, -1], [-1, 2]]

    def test_of_tied_features_the_first_leads(self):
        found = phase_diagram([1.0, 2.0, 2.0], [0.3, 0.5, 0.8], np.linspace(0, 8, 30))
        assert set(found.leader.ravel()) == {-1, 0, 1}


class TestAnyStart:
    @pytest.mark.parametrize(
        ("method", "depth"),
        [("gd", 2), ("l2-sam", 2), ("linf-sam", 2), ("gd", 4), ("linf-sam", 3), ("l2-sam", 3)],
    )
    def test_never_gives_nan_and_ends_as_its_fate_says(self, method, depth):
        rng = np.random.default_rng(depth)
        for _ in range(60 if depth == 2 else 10):
            d = rng.integers(1, 6)
            mu, rho = (
                np.sort(np.exp(rng.normal(0, rng.choice([0.01, 1, 2]), d))),
                rng.choice([1e-3, 1.0, 50.0]),
            )
            init = rho * rng.uniform(0.1, 2, d)
            if depth == 2 and rng.random() < 0.6:
                init = tuple(rho * rng.normal(size=(2, d)) * (rng.random((2, d)) < 0.8))
            result = flow(mu, init, rho, method=method, depth=depth)
            for values in (result.beta, *result.layers, result.gradient_norm):
                assert not np.isnan(values).any()
            if result.outcome == "collapses":
                assert not result.beta[-1].any()
            elif result.outcome == "diverges":
                assert result.leader[-1] >= 0
                assert result.gradient_norm[-1] > rho * mu[-2:].sum()


class TestBadInput:
    mistakes = (
        (lambda: flow([], 1.0, 1.0), "shape (0,)", "non-empty"),
        (lambda: flow([0.0, 1.0], 1.0, 1.0), "0.0", "> 0"),
        (lambda: flow([1.0, math.nan], 1.0, 1.0), "nan", "finite"),
        (lambda: flow([2.0, 1.0], 1.0, 1.0), "[2.0, 1.0]", "sort"),
        (lambda: flow([[1.0]], 1.0, 1.0), "(1, 1)", "1-D"),
        (lambda: flow(MU3, [1.0, 2.0], 1.0), "(2,)", "3 coordinates"),
        (lambda: flow(MU3, np.ones((2, 2)), 1.0), "(2, 2)", "(n, 3)"),
        (lambda: flow(MU3, np.ones((0, 3)), 1.0), "(0, 3)", "(n, 3)"),
        (lambda: flow(MU3, math.inf, 1.0), "inf", "finite"),
        (lambda: flow(MU3, (1.0, 1.0, 1.0), 1.0), "got 3", "2 layers"),
        (lambda: flow(MU3, (np.ones((2, 1)), np.ones((3, 1))), 1.0), "[2, 3]", "agree"),
        (lambda: flow(MU3, 1.0, -0.1), "-0.1", ">= 0"),
        (lambda: flow(MU3, 1.0, 1.0, depth=0), "0", ">= 1"),
        (lambda: flow(MU3, 1.0, 1.0, method="sam"), "'sam'", "'l2-sam'"),
        (lambda: flow(MU3, 1.0, 1.0, s=[0.0, 0.0]), "[0.0, 0.0]", "increasing"),
        (lambda: flow(MU3, 1.0, 1.0, s=[-1.0]), "-1.0", "from 0"),
        (lambda: flow(MU3, 1.0, 1.0, depth=4), "depth=4", "1, 2 and 3"),
        (lambda: flow(MU3, (1.0, 1.0, 2.0), 1.0, method="gd", depth=3), "depth=3", "one value"),
        (lambda: flow(MU3, [1.0, 0.0, 1.0], 1.0, method="gd", depth=3), "0.0", "depth 2"),
        (lambda: flow(MU3, [[1.0]], 1.0).sequence(), "1", "leader"),
        (lambda: flow([1e-200, 3e-200], 1.0, 1.0), "1e-200", "another unit"),
        (lambda: flow(MU3, 1e150, 1.0), "1e+150", "another unit"),
        (lambda: flow(MU3, 1.0, 1e-300), "1e-300", "another unit"),
        (lambda: flow([1e-8, 2e-8, 1.0], 0.6, 1.0), "1e-08", "nearer"),
        (lambda: phase_diagram(MU3, [0.5, -0.5], [1.0]), "-0.5", "> 0"),
        (lambda: phase_diagram(MU3, 0.5, [1.0]), "0.5", "1-D"),
    )

    @pytest.mark.parametrize(("call", "value", "remedy"), mistakes, ids=map(str, itertools.count()))
    def test_names_the_value_and_the_remedy(self, call, value, remedy):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is read below)
            call()
        assert value in str(caught.value)
        assert remedy in str(caught.value)

    @pytest.mark.parametrize("arguments", [{"rho": "1"}, {"rho": True}, {"rho": 1.0, "depth": 2.0}])
    def test_refuses_wrong_types(self, arguments):
        with pytest.raises(TypeError, match=r"rho|depth"):
            flow(MU3, 1.0, **arguments)
