"""samkit.landscapes: the landscape with two basins, and slices through any loss."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.nn.functional import cross_entropy

from samkit.landscapes import (
    FLAT_MINIMUM,
    SADDLE,
    SHARP_MINIMUM,
    filter_normalized_direction,
    line,
    path,
    plane,
    two_basins,
)

CRITICAL_POINTS = {
    "sharp": (SHARP_MINIMUM, 0.275230, (0.002377, 0.004869)),
    "flat": (FLAT_MINIMUM, 0.356447, (0.000326, 0.000681)),
    "saddle": (SADDLE, 0.397668, (-0.000832, 0.001060)),
}
each_critical_point = pytest.mark.parametrize(
    ("point", "loss", "eigenvalues"), CRITICAL_POINTS.values(), ids=CRITICAL_POINTS
)


def batch():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(20, 2, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (20,), generator=generator)


def network(seed=0):
    """A small convolutional classifier on a fixed batch: its loss, its parameters, and itself."""
    torch.manual_seed(seed)
    layers = (nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, eps=1e-14), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    model = nn.Sequential(*layers).double()
    inputs, targets = batch()
    return lambda: cross_entropy(model(inputs), targets), list(model.parameters()), model


class TestTwoBasins:
    def test_equals_the_formula_written_with_logarithms_of_gaussians(self):
        m, s = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        m, s = 10 * m, 15 * s.exp()
        terms = []
        for (m_i, s_i), weight, temperature in (((20, 30), 0.7, 1.8), ((-20, 10), 0.3, 1.2)):
            divergence = torch.distributions.kl_divergence(
                torch.distributions.Normal(m, s), torch.distributions.Normal(float(m_i), float(s_i))
            )
            terms.append(weight * torch.exp(-divergence / temperature**2))
        expected = -torch.log(terms[0] + terms[1])
        torch.testing.assert_close(two_basins(torch.stack([m, s], dim=-1)), expected)

    @each_critical_point
    def test_has_its_critical_points_where_newtons_method_ends(self, point, loss, eigenvalues):
        theta = torch.tensor(point, dtype=torch.float64)
        for _ in range(3):
            gradient = jacobian(two_basins, theta)
            theta = theta - torch.linalg.solve(hessian(two_basins, theta), gradient)
        # In float64 the gradient's rounding error, over the curvature, leaves about thirteen digits.
        np.testing.assert_allclose(theta, point, rtol=1e-12, atol=1e-11)
        assert two_basins(theta).item() == pytest.approx(loss, abs=5e-7)

    @each_critical_point
    def test_has_the_eigenvalues_of_two_minima_and_a_saddle(self, point, loss, eigenvalues):
        curvature = hessian(two_basins, torch.tensor(point, dtype=torch.float64))
        np.testing.assert_allclose(torch.linalg.eigvalsh(curvature), eigenvalues, atol=5e-7)

    def test_has_the_gradient_of_finite_differences(self):
        theta = torch.tensor([[5.0, 7.0], [-30.0, 40.0]], dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(two_basins, theta)
        torch.autograd.gradgradcheck(two_basins, theta)

    def test_keeps_the_shape_of_a_batch(self):
        theta = torch.rand(3, 1, 4, 2) + 1
        assert two_basins(theta).shape == (3, 1, 4)
        assert two_basins(theta)[2, 0, 3] == two_basins(theta[2, 0, 3])
        assert two_basins(torch.empty(0, 2)).shape == (0,)

    def test_stays_finite_far_away_in_float32(self):
        theta = torch.tensor([1e4, 20.0], requires_grad=True)
        loss = two_basins(theta)
        loss.backward()
        assert loss.isfinite()
        assert theta.grad.isfinite().all()

    @pytest.mark.parametrize("s", [0.0, -1.5, math.nan])
    def test_refuses_points_outside_and_names_the_value(self, s):
        theta = torch.tensor([[0.0, 1.0], [0.0, s]])
        with pytest.raises(ValueError, match=f"s must be > 0, got {s}"):
            two_basins(theta)

    def test_marks_points_outside_in_a_batch_when_asked(self):
        theta = torch.tensor([[0.0, 20.0], [0.0, -1.0], [3.0, math.nan]], requires_grad=True)
        loss = two_basins(theta, outside="nan")
        assert loss.isnan().tolist() == [False, True, True]
        loss[0].backward()
        (alone,) = torch.autograd.grad(two_basins(theta[:1]).sum(), theta)
        assert torch.equal(theta.grad, alone)

    def test_gives_points_outside_a_gradient_of_zero(self):
        theta = torch.tensor([[0.0, 20.0], [0.0, -1.0]], requires_grad=True)
        two_basins(theta, outside="nan").sum().backward()
        assert theta.grad[0].any()
        assert theta.grad[1].tolist() == [0, 0]

    @pytest.mark.parametrize("theta", [1.0, [1.0, 2.0, 3.0], torch.ones(2, 3), torch.ones(())])
    def test_refuses_other_shapes(self, theta):
        with pytest.raises(ValueError, match=r"shape \(\.\.\., 2\)"):
            two_basins(theta)

    def test_refuses_another_word_for_outside(self):
        with pytest.raises(ValueError, match="outside must be 'raise' or 'nan', got 'clip'"):
            two_basins([0.0, 1.0], outside="clip")


class TestLine:
    def test_of_a_parabola_is_a_parabola(self):
        theta = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
        t = np.linspace(-2, 2, 9)
        result = line(lambda: (theta**2).sum(), [theta], [torch.tensor([1.0, -1.0])], t=t)
        np.testing.assert_allclose(result.loss, (1 + t) ** 2 + (1 - t) ** 2)
        assert np.array_equal(result.t, t)

    def test_equals_moving_the_weights_by_hand(self):
        loss, params, _ = network()
        direction = filter_normalized_direction(params, seed=0)
        result = line(loss, params, direction, t=[-0.5, 0.25])
        for t, expected in zip(result.t, result.loss, strict=True):
            moved_loss, moved, _ = network()
            for p, d in zip(moved, direction, strict=True):
                p.data.add_(d, alpha=t)
            assert moved_loss().item() == pytest.approx(expected, rel=1e-12)

    def test_keeps_losses_that_are_not_finite(self):
        theta = torch.tensor([0.5], requires_grad=True)
        result = line(lambda: theta.log().sum(), [theta], [torch.ones(1)], t=[-1, -0.5, 0.5])
        assert np.isnan(result.loss[0])
        assert result.loss[1:].tolist() == [-math.inf, 0.0]

    def test_leaves_frozen_weights_where_they_are(self):
        moving, frozen = torch.ones(1, requires_grad=True), torch.ones(1)
        ones = [torch.ones(1), torch.ones(1)]
        assert line(lambda: (moving + 10 * frozen).sum(), [moving, frozen], ones, t=[1]).loss == [12.0]
        assert line(lambda a, b: (a + 10 * b)[:, 0], [moving, frozen], ones, t=[1], batched=True).loss == [12]

    @pytest.mark.parametrize("t", [1.0, [[0.0]], [math.nan]])
    def test_refuses_positions_that_are_no_list_of_numbers(self, t):
        theta = torch.ones(1, requires_grad=True)
        with pytest.raises(ValueError, match="t must be a 1-D array of finite positions"):
            line(lambda: theta.sum(), [theta], [torch.ones(1)], t=t)

    def test_refuses_a_direction_of_another_shape(self):
        theta = torch.ones(1, requires_grad=True)
        with pytest.raises(ValueError, match="direction must have the shapes of params"):
            line(lambda: theta.sum(), [theta], [torch.ones(2)])

    @pytest.mark.parametrize("direction", [[1.0], [np.ones(1)]])
    def test_refuses_a_direction_that_is_no_tensor(self, direction):
        theta = torch.ones(1, requires_grad=True)
        with pytest.raises(TypeError, match="direction must hold real tensors"):
            line(lambda: theta.sum(), [theta], direction)


class TestPlane:
    def test_has_a_row_for_each_y_and_a_column_for_each_x(self):
        theta = torch.zeros(2, requires_grad=True)
        d1, d2 = torch.eye(2)
        result = plane(lambda: theta[0] + 10 * theta[1], [theta], [d1], [d2], x=[1, 2, 3], y=[5, 6])
        assert result.loss.tolist() == [[51, 52, 53], [61, 62, 63]]

    def test_crosses_the_line_along_its_first_direction(self):
        loss, params, _ = network()
        d1, d2 = (filter_normalized_direction(params, seed) for seed in (0, 1))
        result = plane(loss, params, d1, d2, x=[-1, 0, 1], y=[-1, 0, 1])
        np.testing.assert_allclose(result.loss[1], line(loss, params, d1, t=[-1, 0, 1]).loss, rtol=1e-6)
        np.testing.assert_allclose(result.loss[:, 1], line(loss, params, d2, t=[-1, 0, 1]).loss, rtol=1e-6)


class TestBatchedSlices:
    def test_equal_slices_point_by_point(self):
        theta = torch.tensor(SADDLE, dtype=torch.float64, requires_grad=True)
        d1, d2 = 10 * torch.eye(2, dtype=torch.float64)
        slow = plane(lambda: two_basins(theta), [theta], [d1], [d2])
        fast = plane(two_basins, [theta], [d1], [d2], batched=True)
        np.testing.assert_allclose(fast.loss, slow.loss, rtol=1e-13)

    def test_take_a_network_through_vmap(self):
        loss, params, model = network()
        model.eval()
        names = [name for name, _ in model.named_parameters()]
        inputs, targets = batch()

        def loss_at(*weights):
            output = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (inputs,))
            return cross_entropy(output, targets)

        direction = filter_normalized_direction(params, seed=0)
        fast = line(torch.vmap(loss_at), params, direction, batched=True)
        np.testing.assert_allclose(fast.loss, line(loss, params, direction).loss, rtol=1e-5)

    @pytest.mark.parametrize("result", [torch.ones(()), torch.ones(51, 1), 1.0])
    def test_refuse_a_loss_that_does_not_return_one_value_a_position(self, result):
        theta = torch.ones(1, requires_grad=True)
        with pytest.raises(ValueError, match=r"one loss for each position, a tensor of shape \(51,\)"):
            line(lambda weights: result, [theta], [torch.ones(1)], batched=True)


class TestPath:
    def test_leads_from_one_set_of_weights_to_another(self):
        loss, params, _ = network(seed=0)
        other_loss, other, _ = network(seed=1)
        result = path(loss, params, other, t=[0, 1])
        assert result.loss == pytest.approx([loss().item(), other_loss().item()], rel=1e-6)

    def test_looks_a_little_beyond_both_ends(self):
        loss, params, _ = network()
        result = path(loss, params, network(seed=1)[1])
        assert (result.t[0], result.t[-1]) == (-0.25, 1.25)

    def test_refuses_weights_of_another_shape(self):
        theta = torch.ones(2, 2, requires_grad=True)
        with pytest.raises(ValueError, match="end must have the shapes of params"):
            path(lambda: theta.sum(), [theta], [torch.ones(2)])


class TestFilterNormalizedDirection:
    def test_has_the_norm_of_each_filter_of_the_weights(self):
        _, params, _ = network()
        direction = filter_normalized_direction(params, seed=0)
        for p, d in zip(params, direction, strict=True):
            if p.dim() > 1:
                torch.testing.assert_close(d.flatten(1).norm(dim=1), p.detach().flatten(1).norm(dim=1))
            else:
                assert not d.any()

    def test_depends_on_the_seed_and_on_nothing_else(self):
        _, params, _ = network()
        first = filter_normalized_direction(params, seed=0)
        torch.manual_seed(5)
        state = torch.get_rng_state()
        again, other = (filter_normalized_direction(params, seed=s) for s in (0, 1))
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], other[0])

    def test_makes_slices_blind_to_the_scale_of_a_layer_before_batchnorm(self):
        """Scaling the convolution leaves the function alone; a direction of fixed length would see it."""
        curves = []
        for factor in (1.0, 20.0):
            loss, params, _ = network()
            for p in params[:2]:
                p.data.mul_(factor)
            curves.append(line(loss, params, filter_normalized_direction(params, seed=0)).loss)
        np.testing.assert_allclose(*curves, rtol=1e-10)

    def test_is_zero_for_frozen_weights(self):
        frozen, moving = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
        direction = filter_normalized_direction([frozen, moving], seed=0)
        assert not direction[0].any()
        assert direction[1].all()

    def test_has_the_precision_of_the_weights(self):
        weights = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
        (direction,) = filter_normalized_direction([weights], seed=0)
        assert direction.dtype == torch.bfloat16
        np.testing.assert_allclose(direction.float().norm(dim=1), 2, rtol=0.01)

    def test_refuses_weights_without_filters(self):
        with pytest.raises(ValueError, match="no filters"):
            filter_normalized_direction([torch.ones(3, requires_grad=True)], seed=0)

    @pytest.mark.parametrize(("seed", "error"), [("0", TypeError), (0.5, TypeError), (-1, ValueError)])
    def test_refuses_other_seeds(self, seed, error):
        with pytest.raises(error, match="seed must be"):
            filter_normalized_direction([torch.ones(3, 3, requires_grad=True)], seed=seed)
