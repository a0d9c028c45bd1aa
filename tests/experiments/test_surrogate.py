"""Chapter 4's experiments against closed forms, slow versions and their own stored rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize

from samkit import landscapes, perturb, results, sharpness
from samkit.experiments import surrogate


def rise(delta: np.ndarray, g: np.ndarray, H: np.ndarray) -> float:
    return float(g @ delta + 0.5 * delta @ H @ delta)


@pytest.mark.parametrize("signature", ["convex", "indefinite", "concave"])
def test_the_exact_worst_point_meets_its_optimality_conditions(signature):
    rng = np.random.default_rng(3)
    A = rng.standard_normal((6, 6))
    H = {"convex": A @ A.T, "indefinite": A + A.T, "concave": -A @ A.T - np.eye(6)}[signature]
    g = rng.standard_normal(6)
    for rho in (0.1, 1.0, 10.0):
        delta, value = surrogate.highest_in_ball(g, H, rho)
        assert np.linalg.norm(delta) <= rho * (1 + 1e-9)
        assert value == pytest.approx(rise(delta, g, H))
        multiplier = delta @ (g + H @ delta) / (delta @ delta)
        np.testing.assert_allclose(g + H @ delta, multiplier * delta, atol=1e-6 * np.linalg.norm(g))
        assert multiplier >= max(0.0, np.linalg.eigvalsh(H)[-1]) - 1e-6


def test_no_random_point_of_the_ball_is_higher_than_the_exact_worst_point():
    rng = np.random.default_rng(0)
    for _ in range(20):
        A = rng.standard_normal((3, 3))
        H, g, rho = A + A.T, rng.standard_normal(3), rng.uniform(0.1, 5)
        best = surrogate.highest_in_ball(g, H, rho)[1]
        points = rng.standard_normal((2000, 3))
        points *= rho * rng.uniform(size=(2000, 1)) ** (1 / 3) / np.linalg.norm(points, axis=1, keepdims=True)
        values = points @ g + 0.5 * np.einsum("ni,ij,nj->n", points, H, points)
        assert values.max() <= best + 1e-9


def test_the_hard_case_fills_the_ball_along_the_top_eigenvector():
    delta, value = surrogate.highest_in_ball(np.array([1.0, 0.0]), np.diag([1.0, 3.0]), rho=2.0)
    np.testing.assert_allclose(np.abs(delta), [0.5, np.sqrt(4 - 0.25)])
    assert value == pytest.approx(0.5 + 0.5 * (0.25 + 3 * 3.75))


def test_an_interior_maximum_of_a_concave_quadratic_is_found():
    delta, value = surrogate.highest_in_ball(np.array([1.0]), np.array([[-2.0]]), rho=5.0)
    assert delta == pytest.approx([0.5])
    assert value == pytest.approx(0.25)


def test_the_exact_worst_case_agrees_with_projected_ascent():
    g, H = np.array([1.0, 0.2, -0.3]), np.diag([1.0, 2.0, 0.5])
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)

    def loss() -> torch.Tensor:
        return torch.from_numpy(g) @ theta + 0.5 * theta @ torch.from_numpy(H) @ theta

    found = sharpness.worst_case(loss, [theta], 1.5, steps=200).value
    assert found == pytest.approx(surrogate.highest_in_ball(g, H, 1.5)[1], rel=1e-6)


def test_shares_of_the_worst_case_lie_between_0_and_1_and_begin_at_1():
    for full_steps in (False, True):
        rows = surrogate.on_a_quadratic(
            1, ratios=[0.01, 1.0, 20.0], ascent_steps=[1, 3], full_steps=full_steps
        )
        shares = np.array(list(rows.values()))
        assert shares.max() <= 1 + 1e-12
        assert shares.min() > 0
        assert shares[:, 0].min() > 0.999


def test_one_ascent_step_on_the_quadratic_is_sam_s():
    row = surrogate.on_a_quadratic(5, ratios=[2.0], ascent_steps=[1], full_steps=False)
    eigenvalues = 1 / np.arange(1, 51)
    g = np.random.default_rng(5).standard_normal(50)
    g /= np.linalg.norm(g)
    (delta,) = perturb.perturbation([torch.zeros(50)], [torch.from_numpy(g)], 2.0)
    best = surrogate.highest_in_ball(g, np.diag(eigenvalues), 2.0)[1]
    assert row["k = 1"][0] == pytest.approx(rise(delta.numpy(), g, np.diag(eigenvalues)) / best)


def test_the_edge_solves_its_equation_and_tends_to_gradient_descent_s():
    for norm, eta, rho in ((0.01, 0.1, 0.5), (1.0, 0.3, 0.05), (50.0, 0.01, 1e-6)):
        root = optimize.brentq(lambda x: eta * x * (1 + rho * x / norm) - 2, 0, 2 / eta)  # noqa: B023
        assert surrogate.edge(norm, eta, rho) == pytest.approx(root, rel=1e-9)
    assert surrogate.edge(1.0, 0.1, 1e-9) == pytest.approx(surrogate.edge(1.0, 0.1, 0.0), rel=1e-6)


def test_sam_on_a_quadratic_shrinks_below_its_edge_and_grows_above():
    eta, rho, x = 0.1, 0.3, 0.5
    for factor in (0.99, 1.01):
        # The edge depends on the eigenvalue through the gradient's norm: find the one that is its own edge.
        curvature = factor * optimize.brentq(lambda c: surrogate.edge(c * x, eta, rho) - c, 1e-6, 2 / eta)
        after = x - eta * curvature * (x + rho)
        assert (abs(after) > x) == (factor > 1)


def test_the_valley_s_drift_is_predicted_and_ends_where_the_eigenvalue_is_lowest():
    path = surrogate.drift(3.0, learning_rate=0.02, rho=0.2, steps=6000)
    assert np.abs(path["sam"][:, 0] - path["predicted"]).max() < 0.05
    assert path["sam"][-1] == pytest.approx([1, 1], abs=0.02)


def test_the_drift_starts_and_the_prediction_starts_at_the_given_place():
    path = surrogate.drift(2.5, learning_rate=0.01, rho=0.1, steps=3)
    assert path["sam"].shape == (4, 2)
    assert path["sam"][0, 0] == path["predicted"][0] == 2.5


def test_downhill_points_lie_on_the_line_on_which_the_saddle_s_loss_falls():
    here = torch.tensor(np.stack([surrogate.downhill(d) for d in (-2.0, 0.0, 2.0)]))
    loss = landscapes.two_basins(here)
    assert loss[0] < loss[1] > loss[2]
    np.testing.assert_allclose(here[1], landscapes.SADDLE)
    assert here[2, 0] > here[1, 0]


def test_sam_is_pulled_into_the_saddle_from_within_rho_and_gradient_descent_never():
    distances = [-5.0, -3.0, 3.0, 5.0]
    np.testing.assert_array_equal(surrogate.catchment(4.0, distances, steps=1500), [False, True, True, False])
    assert not surrogate.catchment(0.0, distances, steps=1500).any()


def test_the_gradient_of_all_examples_has_the_norm_of_the_full_gradient():
    norms = surrogate.gradient_norms(0, sub_batches=[10, 500], draws=50)
    assert norms["measured"][1] == pytest.approx(norms["predicted"][1])
    assert norms["measured"][0] == pytest.approx(norms["predicted"][0], rel=0.2)


def test_stored_seeds_that_tune_do_not_compare():
    stored = results.load("m_sharpness")
    comparing = [seed for seed in stored.seeds if seed < surrogate.TUNING_SEEDS]
    assert len(comparing) >= 12
    assert len(stored.seeds) - len(comparing) >= 5
    assert all(len(accuracy) == len(comparing) for _, accuracy in surrogate.at_tuned_radius(stored).values())


def test_a_best_radius_at_the_end_of_the_grid_is_refused():
    rows = [{"seed": seed, "m = 5 validation": [1.0, 2.0], "m = 5 test": [1.0, 2.0]} for seed in (0, 100)]
    stored = results.Stored("x", "f", {"rhos": [0.1, 0.2], "sub_batches": [5]}, [0, 100], rows, {})
    with pytest.raises(ValueError, match=r"0\.2, lies at an end of the grid"):
        surrogate.at_tuned_radius(stored)
