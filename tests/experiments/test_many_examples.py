"""Chapter 7's experiments with many examples and networks, against real SAM, differences and closed forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from samkit.diagonal import DiagonalNetwork, LinearNetwork, banded, critical_scale, flow
from samkit.experiments import many_examples
from samkit.optim import SAM

MU = np.array([1.0, 2.0, 3.0])
DRAW = np.random.default_rng(0)
ROWS = DRAW.standard_normal((2, 5, 3))
GRADIENTS = [
    (many_examples.diagonal_gradient(ROWS), (2, 2, 3)),
    (many_examples.scalar_gradient(ROWS), (2, 4, 4)),
    (many_examples.outputs_gradient(MU, one_loss=True), (2, 2, 3, 4)),
    (many_examples.outputs_gradient(MU, one_loss=False), (2, 2, 3, 4)),
]


@pytest.mark.parametrize(("gradient", "shape"), GRADIENTS)
def test_gradients_are_the_slopes_of_their_losses(gradient, shape):
    theta = np.random.default_rng(1).standard_normal(shape)
    _, g = gradient(theta)
    for index in np.ndindex(shape[1:]):
        up, down = theta.copy(), theta.copy()
        up[(slice(None), *index)] += 1e-5
        down[(slice(None), *index)] -= 1e-5
        slope = (gradient(up)[0] - gradient(down)[0]) / 2e-5
        np.testing.assert_allclose(g[(slice(None), *index)], slope, rtol=1e-6, atol=1e-9)


def real_steps(network, loss_of, rho, steps):
    optimizer = SAM(network.parameters(), torch.optim.SGD, rho=rho, lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(network)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return network.beta.detach().numpy()


def after(run, steps):
    return next(itertools.islice(run, steps, None))[1]


class TestStepsWrittenOut:
    def test_are_those_of_the_real_optimizer_on_a_diagonal_network(self):
        rows = ROWS[0]
        network = DiagonalNetwork(3, 2, ([0.5, 0.4, 0.3], [0.2, 0.6, 0.1]), dtype=torch.float64)
        theta = np.array([[[0.5, 0.4, 0.3], [0.2, 0.6, 0.1]]])
        beta = real_steps(network, lambda f: softplus(-f(torch.tensor(rows))).mean(), 0.2, 50)
        run = many_examples.sam_steps(theta, many_examples.diagonal_gradient(rows), 0.2)
        np.testing.assert_allclose(after(run, 50)[0].prod(axis=0), beta, rtol=1e-10)

    def test_are_those_of_the_real_optimizer_on_an_ordinary_network(self):
        rows = ROWS[1]
        network = LinearNetwork(3, 4, init_scale=0.3, seed=1, dtype=torch.float64)
        theta = np.hstack([network.first.detach().numpy(), network.second.detach().numpy().T])[None]
        beta = real_steps(network, lambda f: softplus(-f(torch.tensor(rows))).mean(), 0.2, 50)
        end = after(many_examples.sam_steps(theta, many_examples.scalar_gradient(rows), 0.2), 50)[0]
        np.testing.assert_allclose(end[:, :-1].T @ end[:, -1], beta, rtol=1e-10)

    @pytest.mark.parametrize("one_loss", [True, False])
    def test_are_those_of_the_real_optimizer_with_several_outputs(self, one_loss):
        network = LinearNetwork(3, 4, 3, init_scale=0.3, seed=1, dtype=torch.float64)
        theta = np.array([[network.second.detach().numpy(), network.first.detach().numpy().T]])
        inputs = torch.diag(torch.tensor(MU))

        def loss_of(f):
            z = f(inputs).diagonal()
            return softplus(-z.sum()) if one_loss else softplus(-z).mean()

        beta = real_steps(network, loss_of, 0.2, 50).diagonal()
        gradient = many_examples.outputs_gradient(MU, one_loss=one_loss)
        end = after(many_examples.sam_steps(theta, gradient, 0.2), 50)[0]
        np.testing.assert_allclose(end.prod(axis=0).sum(axis=-1), beta, rtol=1e-10)

    def test_stop_at_the_first_weights_that_reach_a_loss_and_say_nan_where_none_do(self):
        run = many_examples.sam_steps(
            np.array([[2.0], [8.0]]), lambda t: (t[:, 0] ** 2 / 2, t), 0.0, learning_rate=0.5
        )
        found = many_examples.first_reaching(0.2, run, limit=2)
        assert found[0, 0] == 0.5
        assert np.isnan(found[1, 0])


class TestModes:
    def test_with_one_output_only_one_mode_moves(self):
        theta = 0.3 * np.random.default_rng(2).standard_normal((1, 5, 4))
        end = after(many_examples.sam_steps(theta, many_examples.scalar_gradient([MU]), 0.2), 200)
        unit = MU / np.linalg.norm(MU)
        (W, a), (W_end, a_end) = ((x[0, :, :-1], x[0, :, -1]) for x in (theta, end))
        across = np.eye(3) - np.outer(unit, unit)
        np.testing.assert_allclose(W_end @ across, W @ across, atol=1e-14)
        for sign in (1, -1):  # p and q are each multiplied by one number
            growth = (a_end + sign * W_end @ unit) / (a + sign * W @ unit)
            np.testing.assert_allclose(growth, growth[0], rtol=1e-8)
            assert abs(growth[0] - 1) > 0.1

    def test_with_an_output_for_each_feature_and_one_loss_it_is_a_diagonal_network(self):
        theta = 0.2 * np.random.default_rng(3).standard_normal((1, 2, 3, 4))
        p, q = (np.linalg.norm(theta[:, 0] + sign * theta[:, 1], axis=-1) / 2 for sign in (1, -1))
        diagonal = np.stack([p + q, p - q], axis=1)
        ours = many_examples.sam_steps(theta, many_examples.outputs_gradient(MU, one_loss=True), 0.2)
        theirs = many_examples.sam_steps(diagonal, many_examples.diagonal_gradient([MU]), 0.2)
        beta = after(ours, 200).prod(axis=1).sum(axis=-1)
        np.testing.assert_allclose(beta, after(theirs, 200).prod(axis=1), rtol=1e-9)


class TestLimit:
    def test_follows_the_flow_on_one_example(self):
        path = flow(MU, 0.06, 0.1, s=np.linspace(0, 6, 4001)).beta
        norm = path.sum(axis=1)[-1]
        assert norm > 1
        [margin] = many_examples.margins_along([MU], 0.06, 0.1, [norm])
        assert margin == pytest.approx(path[-1] @ MU / norm / MU[-1], rel=1e-4)

    def test_is_zero_where_the_flow_collapses(self):
        c = critical_scale(MU)
        assert many_examples.margins_along([MU], 0.95 * c * 0.1, 0.1, [1.0]) == [0.0]

    def test_refuses_norms_out_of_order(self):
        with pytest.raises(ValueError, match="norms must increase"):
            many_examples.margins_along([MU], 0.06, 0.1, [1e2, 1e1])

    @pytest.mark.parametrize("rho", [0.0, 0.1])
    def test_margins_rise_towards_the_largest_and_never_exceed_it(self, rho):
        X, y = banded([1.0, 2.0], width=2, n=10, seed=0)
        margins = many_examples.margins_along(y[:, None] * X, 0.1, rho, [1.0, 1e2, 1e4])
        assert margins[0] < margins[1] < margins[2] <= 1 + 1e-9


class TestWithoutNormalisation:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("normalised", (0.060, 0.577, 0.363)),
            ("same radius", (0.008, 0.109, 0.882)),
            ("matched radius", (0.333, 0.664, 0.003)),
            ("GD", (0.007, 0.093, 0.900)),
        ],
    )
    def test_shares_at_equal_loss_are_the_reference_numbers(self, name, expected):
        found = many_examples.shares_at_equal_loss(MU, 0.05, 0.1)
        np.testing.assert_allclose(found[name], expected, atol=1.5e-3)

    def test_the_radius_alone_decides_at_the_two_borders(self):
        starts = [1e-3, 1e-2]
        assert many_examples.first_leader(MU, starts, 0.35) == [3, 3]
        assert many_examples.first_leader(MU, starts, 0.45) == [2, 2]
        assert many_examples.first_leader(MU, [1e-3], 2.1) == [0]

    def test_the_effect_is_near_gradient_descents_only_at_the_same_radius(self):
        found = many_examples.without_normalisation(0)
        assert found["same_radius"] < 0.05 < found["with_normalisation"] < found["matched_radius"]
        assert found["any_scale"] == 1


class TestNetworks:
    def test_bands_of_a_diagonal_network_are_the_reference_numbers(self):
        found = many_examples.banded_networks([0])
        np.testing.assert_allclose(found["sam"][0, 0], (0.563, 0.435, 0.002), atol=0.05)
        np.testing.assert_allclose(found["sam"][1, 0], (0.058, 0.445, 0.497), atol=0.05)
        np.testing.assert_allclose(found["gd"][0, 0], (0.011, 0.131, 0.858), atol=0.02)
        assert found["border"][0] == pytest.approx(1, abs=0.03)

    def test_one_output_leans_like_gradient_descent_and_several_do_not(self):
        found = many_examples.linear_networks([0, 1, 2])
        np.testing.assert_allclose(found["one_output"][0], found["one_output"][1], atol=0.01)
        for name in ("one_loss", "own_losses"):
            sam, gd = found[name]
            assert (sam[:, 0] > gd[:, 0] + 0.02).all()
            np.testing.assert_allclose(sam.sum(axis=1), 1)


def test_the_limit_is_near_on_one_example_and_nearer_with_every_norm_on_many():
    found = many_examples.limit_direction(0, norms=[1e2, 1e3])
    assert found["one_example"] > 0.99
    for name in ("banded", "banded_large_radius", "gd_banded"):
        assert found[name][0] < found[name][1] < 1
        assert 0 < found[f"{name}_gap"] < 1
