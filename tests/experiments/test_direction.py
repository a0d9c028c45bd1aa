"""Chapter 9's experiments: exact aims on quadratics, the circle, the shadow, and the stored rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from samkit import results
from samkit.experiments import direction
from samkit.experiments.surrogate import highest_in_ball
from samkit.perturb import sam_gradient
from samkit.surface import Surface

EIGENVALUES = np.array([3.0, 1.0, 0.5, -0.5])
G = np.array([0.4, -1.0, 0.7, 0.2])


def gradient(u: np.ndarray) -> np.ndarray:
    return G + EIGENVALUES * u


@pytest.fixture
def quadratic():
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    g, curvature = torch.from_numpy(G), torch.from_numpy(EIGENVALUES)
    return (lambda: g @ theta + 0.5 * curvature @ theta**2), [theta]


@pytest.mark.parametrize("k", [1, 3])
def test_the_short_climb_ends_with_sam_s_gradient(k):
    (expected,) = sam_gradient(
        lambda w: [torch.from_numpy(gradient(w[0].numpy()))],
        [torch.zeros(4, dtype=torch.float64)],
        0.7,
        ascent_steps=k,
    )
    np.testing.assert_allclose(direction.climb(gradient, 4, 0.7, k)[1], expected, rtol=1e-12)


def test_one_step_is_the_same_in_every_way_and_none_is_the_plain_gradient():
    ends = [direction.climb(gradient, 4, 0.5, 1, way)[1] for way in direction.WAYS]
    np.testing.assert_allclose(ends, [ends[0]] * 3)
    np.testing.assert_allclose(direction.climb(gradient, 4, 0.5, 0)[1], G)


def test_the_ways_differ_in_how_far_they_go():
    reach = {way: np.linalg.norm(direction.climb(gradient, 4, 0.5, 4, way)[0]) for way in direction.WAYS}
    assert reach["short"] <= 0.5 + 1e-12
    assert reach["power"] == pytest.approx(0.5)
    assert reach["full"] > 1


def test_the_power_method_converges_to_the_exact_highest_point_of_a_convex_quadratic():
    curvature = np.abs(EIGENVALUES)
    exact = highest_in_ball(G, np.diag(curvature), 0.8)[0]
    end = direction.climb(lambda u: G + curvature * u, 4, 0.8, 400, "power")[0]
    np.testing.assert_allclose(end, exact, atol=1e-6)


def test_nowhere_to_climb_leaves_the_weights_where_they_are():
    u, g = direction.climb(lambda u: 0 * u, 3, 1.0, 2)
    assert not u.any()
    assert not g.any()


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match=r"'short', 'full', 'power'.*'long'"):
        direction.climb(gradient, 4, 1.0, 1, "long")


def test_an_unknown_spectrum_is_refused():
    with pytest.raises(ValueError, match=r"'convex', 'both signs', 'mostly negative'.*'flat'"):
        direction.on_quadratics(0, spectrum="flat", ratios=[1.0], ascent_steps=[1])


@pytest.mark.parametrize("ratio", [0.1, 1.0, 20.0])
def test_on_convex_quadratics_the_ascent_point_s_gradient_never_ends_lower(ratio):
    for seed in range(20):
        row = direction.on_quadratics(seed, spectrum="convex", ratios=[ratio], ascent_steps=[1, 4])
        assert row["g0 share"] < row["g1 share"] <= [1 + 1e-12]
        assert row["g1 share"] < row["g4 power share"]


def test_negative_curvature_and_a_long_step_make_the_ascent_point_s_gradient_worse():
    shares = direction.counterexamples(0, ratios=[0.5, 50.0], draws=400)
    assert shares[0] == 0
    assert 0.4 < shares[1] < 0.6


def test_the_counterexamples_count_what_a_loop_counts():
    share = direction.counterexamples(3, ratios=[4.0], draws=30, size=5)[0]
    rng, lower = np.random.default_rng(3), 0
    curvatures, gradients = rng.uniform(-1, 1, (30, 5)), rng.standard_normal((30, 5))
    for curvature, g in zip(curvatures, gradients, strict=True):
        rho = 4 * np.linalg.norm(g) / curvature.max()
        ends = []
        for k in (0, 1):
            aimed = direction.climb(lambda u, c=curvature, g=g: g + c * u, 5, rho, k)[1]
            delta = rho * aimed / np.linalg.norm(aimed)
            ends.append(g @ delta + 0.5 * curvature @ delta**2)
        lower += ends[1] < ends[0]
    assert share == lower / 30


def test_the_shadow_of_a_vector_in_the_plane_is_the_vector_and_of_one_across_it_nothing():
    e = np.eye(3)
    assert direction.in_plane(3 * e[1], e[0], e[0] + e[1]) == pytest.approx((90.0, 1.0))
    assert direction.in_plane(e[2], e[0], e[1])[1] == 0


def test_the_circle_begins_at_g0_and_passes_through_g1(quadratic):
    g1 = direction.climb(gradient, 4, 0.5, 1)[1]
    with Surface(*quadratic) as surface:
        rim = direction.on_circle(surface, G, g1, 0.5, points=720)
        at = {name: surface.loss(0.5 * g / np.linalg.norm(g)) for name, g in (("g0", G), ("g1", g1))}
        assert rim["losses"][360] == pytest.approx(at["g0"])
        there = np.interp(direction.degrees(G, g1), rim["angles"], rim["losses"])
        assert there == pytest.approx(at["g1"], abs=1e-4)
        assert surface.loss(0.5 * rim["direction"]) == pytest.approx(rim["losses"].max())
    assert rim["losses"][0] == pytest.approx(rim["losses"][-1])


def test_the_aim_on_a_quadratic_is_that_of_the_exact_highest_point(quadratic):
    row = direction.aim(*quadratic, 0.6, ascent_steps=[1, 2])
    assert row["ratio"] == pytest.approx(0.6 * 3 / np.linalg.norm(G), rel=1e-3)
    assert row["lowest"] == pytest.approx(-0.5 / 3, rel=1e-3)
    for size, ball in ((1, "1ρ"), (2, "2ρ")):
        exact, rise = highest_in_ball(G, np.diag(EIGENVALUES), 0.6 * size)
        assert row[f"worst {ball}"] == pytest.approx(rise, rel=1e-5)
        assert row[f"g0 {ball}"] == pytest.approx(direction.degrees(G, exact), abs=0.2)
        assert row[f"g1 share {ball}"] <= row[f"circle share {ball}"] + 0.01
        assert row[f"circle share {ball}"] <= 1 + 1e-9


def test_noise_alone_makes_no_change_over_training():
    noise = np.random.default_rng(0).standard_normal((4000, 6))
    change = direction.change_over_training(noise)
    assert abs(change.mean()) < 4 * change.std() / np.sqrt(len(change))
    assert (noise.max(axis=1) - noise.min(axis=1)).mean() > 2


def test_a_moment_of_training_does_not_depend_on_the_others_measured():
    settings = {"train_rho": 0.1, "rho": 0.1, "ascent_steps": [1], "count": 1}
    alone = direction.along_training(1, epochs=[1], **settings)
    both = direction.along_training(1, epochs=[0, 1], **settings)
    assert alone["g1 share 1ρ"] == pytest.approx(both["g1 share 1ρ"][1:])
    assert 0 < both["psi"][0] < 90


@pytest.mark.parametrize("name", direction.STORED)
def test_the_stored_rows_are_possible_and_begin_at_the_same_networks(name):
    stored = results.load(name)
    for direction_name in ("g0", "g1", "circle", "g5 full", "g5 power"):
        for ball in ("1ρ", "2ρ"):
            assert stored.column(f"{direction_name} share {ball}").max() <= 1 + 1e-6
    start = results.load("direction_sgd").column("g1 1ρ")[:, 0]
    np.testing.assert_allclose(stored.column("g1 1ρ")[:, 0], start, rtol=1e-3)
