"""Chapter 5's experiments against closed forms, an independent solver and their own invariants."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from samkit.diagonal import flow, max_margin, separable
from samkit.experiments import implicit_bias
from samkit.experiments.implicit_bias import angle, rescaled_flow

ROWS = np.array([[1.0, 0.2], [0.3, 1.5], [2.0, 0.1]])


def test_angles_are_exact_where_the_arc_cosine_is_not():
    assert angle(np.array([1.0, 0.0]), np.array([1.0, 1e-12])) == pytest.approx(np.degrees(1e-12), rel=1e-9)
    assert angle(np.array([1.0, 0.0]), np.array([-2.0, 0.0])) == pytest.approx(180)


def test_angles_of_a_path_come_one_for_each_row():
    assert angle(np.array([[1.0, 1.0], [0.0, 3.0]]), np.array([0.0, 1.0])) == pytest.approx([45, 0])


class TestRescaledFlow:
    s = np.linspace(0, 3, 31)

    def test_of_one_example_and_one_layer_is_a_straight_line(self):
        found = rescaled_flow([[1.0, 2.0]], [0.3, -0.1], self.s)
        np.testing.assert_allclose(found["beta"], [0.3, -0.1] + self.s[:, None] * [1.0, 2.0], rtol=1e-9)
        np.testing.assert_allclose(found["velocity"], np.tile([1.0, 2.0], (31, 1)))

    @pytest.mark.parametrize("init", [[0.3, 0.5], ([0.3, 0.5], [0.0, -0.2])])
    def test_of_one_example_and_two_layers_is_that_of_the_closed_form(self, init):
        found = rescaled_flow([[1.0, 2.0]], init, self.s, depth=2)
        expected = flow([1.0, 2.0], init, 0.0, method="gd", s=self.s).beta
        np.testing.assert_allclose(found["beta"], expected, rtol=1e-6)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_passes_where_gradient_descent_from_its_definition_passes(self, depth):
        layers = np.array([[0.4, 0.3], [0.4, 0.3], [0.1, -0.2]])[[0, 2][:depth]]

        def velocity(_, state):
            w = state[:-2].reshape(depth, 2)
            slope = 1 / (1 + np.exp(ROWS @ w.prod(axis=0))) / 3
            others = w[::-1] if depth == 2 else np.ones_like(w)
            return np.concatenate([((slope @ ROWS) * others).ravel(), [slope.sum(), 0.0]])

        run = solve_ivp(
            velocity, (0, 50), np.append(layers.ravel(), [0.0, 0.0]), "DOP853", rtol=1e-11, atol=1e-12
        )
        s, t = run.y[-2, 1:], run.t[1:]
        found = rescaled_flow(ROWS, tuple(layers), s, depth=depth)
        beta = run.y[:-2, 1:].T.reshape(-1, depth, 2).prod(axis=1)
        np.testing.assert_allclose(found["beta"], beta, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(np.exp(found["log_time"]), t, rtol=0.01)
        np.testing.assert_allclose(
            np.exp(found["log_loss"]), np.logaddexp(0, -beta @ ROWS.T).mean(1), rtol=1e-5
        )
        np.testing.assert_allclose(found["margin"], (beta @ ROWS.T).min(1), rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_has_the_velocity_of_its_own_path(self, depth):
        found = rescaled_flow(ROWS, (0.5, 0.1)[:depth], self.s, depth=depth)
        middle = found["velocity"][1:-1]
        slopes = (found["beta"][2:] - found["beta"][:-2]) / 0.2
        np.testing.assert_allclose(slopes, middle, rtol=0.05, atol=0.02)

    def test_has_the_reference_angles_to_the_l2_max_margin(self):
        found = rescaled_flow(ROWS, 0.0, [10.0, 100.0, 1000.0])
        degrees = angle(found["beta"], max_margin(ROWS, [1, 1, 1], "l2"))
        np.testing.assert_allclose(degrees, [4.97, 0.544, 0.0547], rtol=2e-3)

    def test_keeps_the_margin_that_the_proof_promises(self):
        X, y = separable(20, 30, seed=3)
        rows = y[:, None] * X
        gamma = 1 / np.linalg.norm(max_margin(X, y, "l2"))
        found = rescaled_flow(rows, 0.0, np.geomspace(0.01, 1e3, 40))
        norm = np.linalg.norm(found["beta"], axis=1)
        assert (found["margin"] >= gamma * norm - 20 * np.log(2)).all()
        assert (found["margin"] <= gamma * norm * (1 + 1e-6)).all()

    def test_never_loses_smoothed_l1_margin_on_two_layers(self):
        # Phi / |beta|_1 with Phi = -log(exp(N L) - 1), from where Phi is positive.
        X, y = separable(15, 5, seed=1)
        rows = y[:, None] * X * np.sign(max_margin(X, y, "l2"))
        found = rescaled_flow(rows, 0.3, np.linspace(0.1, 50, 400), depth=2, norm=1e4)
        total = 15 * np.exp(found["log_loss"])
        seen = (total < np.log(2)) & (total > 1e-12)
        smoothed = -np.log(np.expm1(total[seen])) / found["beta"][seen].sum(1)
        assert seen.sum() > 5
        assert (np.diff(smoothed) > -1e-7).all()

    def test_stops_at_the_norm_or_at_the_loss_asked_for(self):
        times = np.linspace(0, 100, 11)
        found = rescaled_flow(ROWS, 0.3, times, depth=2, norm=1e3)
        assert np.abs(found["beta"][-1]).sum() == pytest.approx(1e3, rel=1e-5)
        found = rescaled_flow(ROWS, 0.0, times, loss=1e-4)
        assert np.exp(found["log_loss"][-1]) == pytest.approx(1e-4, rel=1e-5)
        assert found["s"][-1] not in times

    def test_knows_losses_far_below_the_smallest_float(self):
        found = rescaled_flow([[1.0]], 0.0, [1e4])
        assert found["log_loss"][-1] == pytest.approx(-1e4)
        assert found["log_time"][-1] == pytest.approx(1e4, rel=1e-3)

    @pytest.mark.parametrize(
        ("call", "words"),
        [
            (lambda: rescaled_flow(ROWS, 0.1, [1.0], depth=3), "depth 1 and 2, got 3"),
            (lambda: rescaled_flow(ROWS[0], 0.1, [1.0]), r"rows must have shape \(N, d\)"),
            (lambda: rescaled_flow(ROWS, 0.1, [1.0, 1.0]), "increase"),
            (lambda: rescaled_flow(ROWS, [[0.1, 0.2]], [1.0]), "a batch"),
            (lambda: rescaled_flow([[np.nan, 1.0]], 0.1, [1.0]), "NaN"),
            (lambda: rescaled_flow(ROWS, [0.1, 0.2, 0.3], [1.0]), "init_scale"),
            (lambda: rescaled_flow(np.zeros((0, 2)), 0.1, [1.0]), r"rows must have shape \(N, d\)"),
            (lambda: rescaled_flow(ROWS, 0.1, [np.inf]), "finite times"),
            (lambda: rescaled_flow(ROWS, 0.1, [1.0], norm=np.nan), "norm must be > 0"),
            (lambda: rescaled_flow(ROWS, 0.1, [1.0], loss=-1.0), "loss finite and >= 0"),
            (lambda: rescaled_flow(ROWS, 0.1, [1.0], norm=0.01), "already beyond norm=0.01"),
            (lambda: rescaled_flow(ROWS, 0.1, [1.0], loss=10.0), "already beyond .* loss=10"),
            (lambda: angle(np.zeros(2), np.ones(2)), "no direction"),
            (lambda: implicit_bias.same_path("gd", 4), "depth 1, 2 and 3, got 4"),
            (lambda: implicit_bias.same_path("sgd", 2), "method must be one of"),
            (lambda: implicit_bias.depth_and_sparsity(0, relevant=9, n=5, d=4), "between 1 and d=4, got 9"),
        ],
        ids=map(str, itertools.count()),
    )
    def test_refuses_what_it_cannot_solve(self, call, words):
        with pytest.raises(ValueError, match=words):
            call()


class TestTheL1Margin:
    def test_is_never_exceeded_and_nearly_reached(self):
        row = implicit_bias.distance_from_the_l1_margin(3)
        for kind in ("balanced", "signed"):
            assert 0.99 < row[f"{kind}_margin"] <= 1 + 1e-9
            assert row[f"{kind}_angle"] < 1
        assert row["one_example"] < 1e-6

    def test_comes_nearer_as_the_norm_grows(self):
        near, far = (implicit_bias.distance_from_the_l1_margin(1, norm=n) for n in (1e5, 1e2))
        for kind in ("balanced", "signed"):
            assert near[f"{kind}_margin"] > far[f"{kind}_margin"] + 0.01
            assert near[f"{kind}_angle"] < far[f"{kind}_angle"]


class TestSamePath:
    @pytest.mark.parametrize(("method", "depth"), [("gd", 1), ("gd", 2), ("l2-sam", 2), ("linf-sam", 2)])
    def test_flows_agree_closely_and_steps_roughly(self, method, depth):
        case = implicit_bias.same_path(method, depth)
        assert case["flow_distance"] < 1e-8
        assert 0 < case["step_distance"] < 0.005
        assert case["speed_change"] > 50

    def test_larger_steps_leave_the_path_further(self):
        small, large = (implicit_bias.same_path("gd", 2, learning_rate=eta) for eta in (0.005, 0.05))
        assert large["step_distance"] > 3 * small["step_distance"]

    def test_another_method_s_path_is_another(self):
        # The distance is one to the method's own path, so it must see a difference between methods.
        s = np.linspace(0, 1, 101)
        gd, sam = (flow([1, 2, 3], [0.3, 0.25, 0.2], 0.1, method=m, s=s).beta for m in ("gd", "l2-sam"))
        gaps = np.linalg.norm(gd[:, None] - sam[-1], axis=-1) / np.linalg.norm(sam[-1])
        assert gaps.min() > 0.01


class TestDepthAndSparsity:
    def test_two_layers_find_one_feature_that_one_layer_does_not(self):
        rows = [implicit_bias.depth_and_sparsity(seed, relevant=1) for seed in range(3)]
        assert all(row["L = 2"] > row["L = 1"] + 10 for row in rows)

    def test_many_examples_are_learnt_by_both(self):
        row = implicit_bias.depth_and_sparsity(0, relevant=2, n=150, d=4)
        assert min(row.values()) > 95

    def test_a_seed_fixes_the_result(self):
        first, again = (implicit_bias.depth_and_sparsity(4, relevant=3, n=10, d=12) for _ in range(2))
        assert first == again
