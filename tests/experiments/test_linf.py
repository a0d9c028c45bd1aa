"""Chapter 6's experiments against closed forms, the real optimizer, and slow versions of themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from samkit.diagonal import DiagonalNetwork, flow, linf_limit, max_margin
from samkit.experiments import linf
from samkit.experiments.implicit_bias import angle
from samkit.optim import SAM

ROWS = np.array([[1.0, 0.2], [0.3, 1.5], [2.0, 0.1]])


def test_one_layer_has_the_reference_angles_to_the_exact_margin():
    best = max_margin(ROWS, np.ones(3), "l2")
    assert best / np.linalg.norm(best) == pytest.approx([0.88047, 0.47410], abs=1e-5)
    found = angle(linf.one_layer(ROWS, 1.0, [10, 100])["beta"], best)
    np.testing.assert_allclose(found, [[4.97, 0.544], [6.92, 0.780], [4.99, 0.543]], atol=5e-3)


def test_a_batch_of_data_is_as_good_as_one_after_the_other():
    other = ROWS[::-1] * [1.0, 2.0]
    both = linf.one_layer(np.stack([ROWS, other]), 0.5, [1.0, 2.0])
    for name, values in both.items():
        np.testing.assert_allclose(values[1], linf.one_layer(other, 0.5, [1.0, 2.0])[name], rtol=1e-12)


@pytest.mark.parametrize(("row", "norm", "rho"), [(0, "l2", 0.0), (1, "linf", 0.5), (2, "l2", 0.5)])
def test_a_step_of_one_layer_is_a_step_of_the_real_optimizer(row, norm, rho):
    network = DiagonalNetwork(2, 1, 0.0, dtype=torch.float64)
    optimizer = SAM(network.parameters(), torch.optim.SGD, rho=rho, norm=norm, lr=0.01)
    x = torch.tensor(ROWS.tolist(), dtype=torch.float64)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.softplus(-network(x)).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    ours = linf.one_layer(ROWS, 0.5, [0.05])
    # the same direction; and real time is how long the real step would have to be
    real = network.beta.detach().numpy() * np.exp(ours["log_time"][row, 0]) / 0.01
    np.testing.assert_allclose(real, ours["beta"][row, 0], rtol=1e-10)


@pytest.mark.parametrize("depth", [2, 3])
def test_real_training_follows_the_flow_at_its_own_rescaled_time(depth):
    mu, alpha = [1.0, 2.0], [1.5, 0.5]
    path = linf.train([mu], alpha, 1.0, depth=depth, learning_rate=0.01, steps=300)
    foretold = flow(mu, alpha, 1.0, method="linf-sam", depth=depth, s=path["s"]).beta
    np.testing.assert_allclose(path["beta"], foretold, rtol=0.01, atol=0.01)


def test_rescaled_time_and_losses_are_those_of_the_steps_that_were_taken():
    path = linf.train([[1.0, 2.0], [2.0, 1.0]], 0.3, 0.1, steps=3)
    assert [len(path[name]) for name in ("s", "loss", "layers", "beta")] == [4] * 4
    ascent = (path["layers"][0] - 0.1).prod(axis=0)
    slopes = 1 / (1 + np.exp(np.array([[1.0, 2.0], [2.0, 1.0]]) @ ascent))
    assert path["s"][1] == pytest.approx(0.01 * slopes.mean())
    assert path["loss"][0] == pytest.approx(np.log1p(np.exp(-3 * 0.09)))
    assert path["loss"][-1] < path["loss"][0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: linf.train([[1.0]], 1.0, 0.1, loss="hinge"), "'logistic' or 'linear'"),
        (lambda: linf.train([1.0, 1.0], 1.0, 0.1), r"shape \(N, d\), got shape \(2,\)"),
        (lambda: linf.train([[np.nan, 1.0]], 1.0, 0.1), "finite"),
        (lambda: linf.train([[1.0]], 1.0, 0.1, steps=-1), "steps must be >= 0, got -1"),
        (lambda: linf.one_layer([1.0, 2.0], 0.1, [1.0]), r"\(B, N, d\), got shape \(2,\)"),
        (lambda: linf.one_layer([[np.nan, 2.0]], 0.1, [1.0]), "finite"),
        (lambda: linf.one_layer(ROWS, -0.1, [1.0]), "rho must be finite and >= 0"),
        (lambda: linf.one_layer(ROWS, 0.1, [2.0, 1.0]), "increase from 0 or later"),
        (lambda: linf.one_layer(ROWS, 0.1, [1.0], step=0), "step must be finite and > 0"),
        (lambda: linf.winners([1.0, 2.0], [-1.0, 2.0], 1.0, 2), "balanced positive layers"),
        (lambda: linf.winners([1.0, 2.0], [0.5, 2.0], 1.0, 1), "depth must be >= 2, got 1"),
        (lambda: linf.blow_ups(2, starts=1), "depth must be >= 3, got 2"),
    ],
    ids=map(str, itertools.count()),
)
def test_what_has_no_answer_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_start_decides_between_falling_staying_and_growing():
    found = linf.thresholds(3, each=3)
    assert found["at"].max() == 0
    assert found["below"].max() < 0.01
    assert 0.98 < found["landing"].min() <= found["landing"].max() < 1.02
    assert 0.98 < found["growth"].min() <= found["growth"].max() < 1.02


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_stepping_finds_the_winner_that_the_formula_foretells(depth, rho):
    mu = [1.0, 1.7, 2.6]
    starts = np.random.default_rng(depth).uniform(0.3, 2.5, (40, 3))
    starts[abs(starts - 1) < 0.1] = 0.5  # nearer to the radius, two layers take longer than the steps last
    foretold = [linf_limit(mu, start, rho, depth) for start in starts]
    found = linf.winners(mu, starts, rho, depth)
    assert [-1 if winner is None else winner for winner in foretold] == found.tolist()


def test_blow_ups_know_the_reference_cases():
    s, w = linf._until_blow_up(np.array([1.0, 2.0]), np.array([1.5, 0.5]), 1.0, 3)
    assert s == pytest.approx(2.0, rel=1e-6)
    assert w[1] == pytest.approx(5 / 6, rel=1e-6)
    for alpha, winner in (((1.8, 1.5), 0), ((1.8, 1.6), 1)):
        assert linf._until_blow_up(np.array([1.0, 2.0]), np.array(alpha), 1.0, 4)[1].argmax() == winner


def test_where_nobody_starts_above_the_radius_nothing_blows_up():
    for depth, end in ((3, 1.0), (4, 0.0)):
        s, w = linf._until_blow_up(np.array([1.0, 2.0]), np.array([0.9, 0.4]), 1.0, depth)
        assert s == np.inf
        np.testing.assert_allclose(w, end, atol=2e-6)


def test_a_needed_feature_is_lost_for_good():
    rows = [[3, -1]] * 4 + [[-0.1, 1]]
    gd, sam = (linf.train(rows, 0.2, rho, learning_rate=0.2, steps=600) for rho in (0.0, 0.1))
    assert sam["loss"][-1] == pytest.approx(0.161, abs=0.001)
    assert abs(sam["beta"][-1, 1]) < 1e-3
    assert gd["loss"][-1] < 0.01


def test_survivors_are_judged_by_what_is_left_to_them():
    lost, found = linf.margin_of_the_survivors(0), linf.margin_of_the_survivors(6)
    assert np.isnan(lost["of_survivors"])
    assert lost["of_all"] < 0
    assert found["of_all"] <= found["of_survivors"] * (1 + 1e-9) <= 1 + 1e-6
    assert found["of_survivors"] > 0.9
