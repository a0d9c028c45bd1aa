"""Chapter 7's experiments: steps written out against the real optimizer, borders and paths against theory."""

import itertools

import numpy as np
import pytest

from samkit.diagonal import critical_scale, flow, regime
from samkit.experiments import amplification, many_examples

MU3 = [1.0, 2.0, 3.0]


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_steps_written_out_are_those_of_the_real_optimizer(rho):
    real = amplification.train(MU3, 0.5, rho, steps=100)
    for step, (z, w) in enumerate(itertools.islice(amplification.steps(MU3, [0.5], rho), 101)):
        assert np.logaddexp(0, -z[0]) == pytest.approx(real["loss"][step], rel=1e-12)
        np.testing.assert_allclose(w[0] ** 2, real["beta"][step], rtol=1e-12)


def test_steps_of_one_example_are_those_of_any_gradient():
    theta = np.array([[[0.5] * 3] * 2, [[0.2] * 3] * 2])
    general = many_examples.sam_steps(theta, many_examples.diagonal_gradient([MU3]), [0.3, 0.1])
    special = amplification.steps(MU3, [0.5, 0.2], [0.3, 0.1])
    for (loss, theta), (z, w) in itertools.islice(zip(general, special, strict=True), 101):
        np.testing.assert_allclose(theta[:, 0], w, rtol=1e-10)
        np.testing.assert_allclose(loss, np.logaddexp(0, -z), rtol=1e-10)


def test_a_feature_of_strength_zero_is_absent():
    with_it = amplification.steps([[0.0, 1.0, 2.0]], [0.5], 0.3)
    without = amplification.steps([1.0, 2.0], [0.5], 0.3)
    for (z, w), (z_alone, w_alone) in itertools.islice(zip(with_it, without, strict=True), 30):
        assert w[0, 0] == 0
        np.testing.assert_allclose(w[0, 1:], w_alone[0])
        np.testing.assert_allclose(z, z_alone)


@pytest.mark.parametrize("seed", range(8))
def test_features_are_apart_and_between_their_bounds(seed):
    mu = amplification.features(seed)
    assert np.diff(mu).min() >= 0.2
    assert mu[0] >= 0.5
    assert mu[-1] <= 4


def test_the_third_regime_begins_where_the_formula_says():
    mu = amplification.features(2)
    border = amplification.major_first_scale(mu)
    assert [regime(mu, border + x, 1.0) for x in (-1e-6, 1e-6)] == ["minor-first", "major-first"]


def test_the_order_of_amplification_is_that_of_single_flows():
    row = amplification.order_of_amplification(1, starts=5)
    mu = amplification.features(1)
    low, high = critical_scale(mu), amplification.major_first_scale(mu)
    led = [flow(mu, low + (high - low) * (k + 0.5) / 5, 1.0).sequence() for k in range(5)]
    assert row["minor_first"] == np.mean([0 in one for one in led])
    assert row["major_last"] == 1


def test_a_sweep_of_scales_never_steps_back():
    row = amplification.sweep_of_scales(0, starts=60, times=10)
    assert row["never_back"] == 1
    assert row["whole"] == 1


def test_handovers_name_the_leader_the_update_and_the_loss():
    run = amplification.train(MU3, 0.055, 0.1, steps=500)
    assert [change[:2] for change in amplification.handovers(run)] == [(1, 1), (2, 55), (3, 380)]


def test_first_below_counts_updates_and_leaves_what_is_never_reached_open():
    count, beta = amplification.first_below([0.6, 0.1], MU3, [0.098, 0.05], 0.2, limit=2000)
    assert count[0].tolist() == [316, 578]
    assert np.isinf(count[1]).all()
    assert np.isnan(beta[1]).all()
    assert np.logaddexp(0, -beta[0, 1] @ MU3) == pytest.approx(0.1, rel=0.01)


def test_losses_out_of_order_are_refused():
    with pytest.raises(ValueError, match="losses must fall"):
        amplification.first_below([0.1, 0.6], MU3, [0.098], 0.2)


def test_real_steps_meet_the_thresholds():
    found = amplification.thresholds([0, 1])
    for name in ("collapse", "major_first"):
        np.testing.assert_allclose(found[name], 1, atol=0.01)
    assert (found["collapsed_loss"] > 0.6).all()


def test_the_plateau_grows_like_the_logarithm_of_the_distance():
    (lengths,) = amplification.plateau([1.0], [1e-4, 1e-6])
    assert np.diff(lengths)[0] == pytest.approx(2 * np.log(100), rel=0.01)


@pytest.mark.parametrize("method", ["gd", "l2-sam"])
def test_the_predictor_at_a_loss_has_that_loss_and_lies_on_the_path(method):
    beta = amplification.at_loss(MU3, 0.5, 1.0, 1e-3, method=method)
    assert np.logaddexp(0, -beta @ MU3) == pytest.approx(1e-3, rel=1e-6)
    path = flow(MU3, 0.5, 1.0, method=method, s=np.linspace(0, 8, 20_001)).beta
    assert np.abs(path - beta).max(axis=1).min() < 1e-2


def test_a_flow_that_collapses_has_no_predictor_at_a_small_loss():
    with pytest.raises(ValueError, match="collapses"):
        amplification.at_loss(MU3, 0.4, 1.0, 1e-3)


def test_at_a_small_loss_steps_and_flow_lean_on_the_minor_feature():
    shares = amplification.leaning()
    np.testing.assert_allclose(shares["steps"], shares["flow"], atol=2e-3)
    assert shares["steps"][0] > 0.9 > 0.1 > shares["gd"][0]


def test_gradient_descents_closed_form_is_where_its_own_steps_are():
    _, beta = amplification.first_below([1e-5], MU3, [0.45], 0.0)
    np.testing.assert_allclose(
        beta[0, 0], amplification.at_loss(MU3, 0.45, 0.0, 1e-5, method="gd"), rtol=1e-3
    )
