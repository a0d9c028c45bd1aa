"""samkit.sharpness, from closed forms up to degenerate input."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import nn
from torch.nn.functional import cross_entropy

from samkit import landscapes, perturb, sharpness
from samkit.surface import Surface


def leaf(values):
    return torch.as_tensor(values, dtype=torch.float64).clone().requires_grad_()


def quadratic(curvature, slope=None):
    """A separable quadratic around 0: loss and params, with the Hessian diag(curvature)."""
    theta = leaf(torch.zeros(len(curvature)))
    curvature = torch.as_tensor(curvature, dtype=torch.float64)
    slope = torch.zeros_like(curvature) if slope is None else torch.as_tensor(slope, dtype=torch.float64)
    return lambda: (slope * theta + curvature * theta**2 / 2).sum(), [theta]


def network(*hidden, seed=0, dtype=torch.float64):
    """A small classifier at random weights, on a fixed batch: its loss, its parameters, and itself."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), *(hidden or (nn.Tanh(),)), nn.Linear(8, 3)).to(dtype)
    inputs, targets = batch(dtype)
    return lambda: cross_entropy(model(inputs), targets), list(model.parameters()), model


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(20, 5, generator=generator).to(dtype)
    return inputs, torch.randint(3, (20,), generator=generator)


def rescaled_twins(factor=7.0):
    """Two ReLU networks with the same function: the layers of the second are scaled by c and 1/c."""
    loss, params, _ = network(nn.ReLU())
    twin_loss, twin, _ = network(nn.ReLU())
    with torch.no_grad():
        twin[0].mul_(factor)
        twin[1].mul_(factor)
        twin[2].div_(factor)
    return (loss, params), (twin_loss, twin)


def dense_hessian(loss, params):
    """Slow and independent: central differences of the gradient, one weight at a time."""
    step, columns = 1e-5, []
    for p in params:
        for i in range(p.numel()):
            ends = []
            for sign in (1, -1):
                p.data.view(-1)[i] += sign * step
                ends.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(), params)]))
                p.data.view(-1)[i] -= sign * step
            columns.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(columns).numpy()


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors]).detach().double().numpy()


def spread_spectrum(n):
    """n eigenvalues as in a trained network: a bulk around 0 and a few far out."""
    bulk = np.random.default_rng(0).standard_normal(n - 4) ** 3 * 0.01
    return np.sort(np.append(bulk, [1.0, 2.0, 4.0, 9.0]))


class TestHessianVectorProduct:
    def test_equals_the_closed_form(self):
        theta = leaf([2.0, 3.0])
        product = sharpness.hvp(lambda: theta[0] ** 2 * theta[1], [theta], [torch.tensor([1.0, 10.0])])
        assert product[0].tolist() == [2 * 3 + 2 * 2 * 10, 2 * 2]

    @pytest.mark.parametrize("layer", [nn.Tanh(), nn.GELU(), nn.Sequential(nn.LayerNorm(8), nn.Tanh())])
    def test_equals_finite_differences_of_the_gradient(self, layer):
        loss, params, _ = network(layer)
        vectors = [torch.randn_like(p) for p in params]
        slow = dense_hessian(loss, params) @ flat(vectors)
        np.testing.assert_allclose(flat(sharpness.hvp(loss, params, vectors)), slow, atol=1e-8)

    def test_leaves_frozen_weights_out_and_returns_zeros_for_them(self):
        loss, params, model = network()
        vectors = [torch.ones_like(p) for p in params]
        vectors[0].zero_()
        expected = sharpness.hvp(loss, params, vectors)
        model[0].weight.requires_grad_(False)
        vectors[0].fill_(5.0)
        product = sharpness.hvp(loss, params, vectors)
        assert not product[0].any()
        for got, want in zip(product[1:], expected[1:], strict=True):
            torch.testing.assert_close(got, want)

    def test_is_zero_for_weights_the_loss_does_not_use(self):
        used, unused = leaf([1.0]), leaf([1.0])
        product = sharpness.hvp(lambda: (used**3).sum(), [used, unused], [torch.ones(1), torch.ones(1)])
        assert [p.item() for p in product] == [6.0, 0.0]

    def test_is_zero_for_a_linear_loss(self):
        theta = leaf([1.0, 2.0])
        assert not sharpness.hvp(lambda: theta.sum(), [theta], [torch.ones(2)])[0].any()

    def test_goes_through_attention(self):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
        inputs, params = torch.randn(3, 4, 8, dtype=torch.float64), list(model.parameters())
        u, v = ([torch.randn_like(p) for p in params] for _ in range(2))

        def loss():
            return (model(inputs) ** 3).mean()

        uhv = flat(u) @ flat(sharpness.hvp(loss, params, v))
        assert uhv == pytest.approx(flat(v) @ flat(sharpness.hvp(loss, params, u)), rel=1e-10)

    def test_refuses_vectors_of_other_shapes(self):
        loss, params, _ = network()
        with pytest.raises(ValueError, match="vectors must have the shapes of params"):
            sharpness.hvp(loss, params, [torch.ones(3)])

    def test_refuses_a_hessian_that_is_not_finite(self):
        theta = leaf([0.0, 1.0])
        with pytest.raises(ValueError, match="Hessian is not finite"):
            sharpness.hvp(lambda: theta.abs().pow(1.5).sum(), [theta], [torch.ones(2)])


class TestTopEigenvalues:
    @pytest.mark.parametrize("n", [5, 200])
    def test_are_the_largest_and_come_in_descending_order(self, n):
        curvature = np.random.default_rng(0).permutation(np.linspace(-30, 20, n))
        result = sharpness.top_eigenvalues(*quadratic(curvature), k=3, tol=1e-8)
        np.testing.assert_allclose(result.value, np.sort(curvature)[::-1][:3], rtol=1e-8)
        assert result.converged

    def test_equal_those_of_the_whole_hessian_of_a_network(self):
        loss, params, _ = network()
        whole = np.linalg.eigvalsh(dense_hessian(loss, params))[::-1]
        result = sharpness.top_eigenvalues(loss, params, k=4, tol=1e-6)
        np.testing.assert_allclose(result.value, whole[:4], rtol=1e-6)
        assert 4 < result.products < 200

    def test_of_the_negated_loss_are_the_most_negative_ones(self):
        loss, params, _ = network()
        whole = np.linalg.eigvalsh(dense_hessian(loss, params))
        result = sharpness.top_eigenvalues(lambda: -loss(), params, k=2, tol=1e-4)
        np.testing.assert_allclose(-result.value, whole[:2], rtol=1e-4)

    def test_come_with_unit_eigenvectors_shaped_like_the_weights(self):
        loss, params, _ = network()
        result = sharpness.top_eigenvalues(loss, params, k=2, tol=1e-8)
        for value, error, vector in zip(result.value, result.error, result.vectors, strict=True):
            assert [v.shape for v in vector] == [p.shape for p in params]
            assert np.linalg.norm(flat(vector)) == pytest.approx(1)
            residual = flat(sharpness.hvp(loss, params, vector)) - value * flat(vector)
            assert np.linalg.norm(residual) == pytest.approx(error, abs=1e-12)
            assert error < 1e-8 * value

    @pytest.mark.parametrize("max_products", [25, 60, 200])
    def test_lie_within_the_error_of_a_true_eigenvalue_even_when_stopped_early(self, max_products):
        curvature = np.linspace(0, 1, 3000)
        result = sharpness.top_eigenvalues(*quadratic(curvature), k=2, max_products=max_products, tol=1e-9)
        assert not result.converged
        assert (result.error > 1e-9).all()
        for value, error in zip(result.value, result.error, strict=True):
            assert np.abs(curvature - value).min() <= error
        assert result.value[0] == pytest.approx(1, abs=0.01)
        assert result.products <= 2 * max_products + 25

    def test_find_repeated_eigenvalues(self):
        curvature = np.append(np.linspace(0, 1, 100), [5.0, 5.0, 5.0])
        result = sharpness.top_eigenvalues(*quadratic(curvature), k=4, tol=1e-8)
        np.testing.assert_allclose(result.value, [5, 5, 5, 1], rtol=1e-8)

    @pytest.mark.parametrize("n", [3, 100])
    def test_of_a_flat_loss_are_zero_exactly(self, n):
        result = sharpness.top_eigenvalues(*quadratic(np.zeros(n)), k=2)
        assert result.value.tolist() == [0, 0]
        assert result.error.tolist() == [0, 0]
        assert result.converged

    def test_next_to_zero_converge_relative_to_the_rest_of_the_spectrum(self):
        theta, slopes = leaf([1.0, 2.0, 3.0]), torch.tensor([[3.0, 1.0, -2.0], [1.0, 7.0, 4.0]])
        result = sharpness.top_eigenvalues(lambda: -((slopes.double() @ theta) ** 2).sum(), [theta])
        assert result.value[0] == pytest.approx(0, abs=1e-12)
        assert result.error[0] > 0
        assert result.converged

    def test_may_be_as_many_as_there_are_weights_and_no_more(self):
        loss, params = quadratic(np.arange(30.0))
        result = sharpness.top_eigenvalues(loss, params, k=30)
        np.testing.assert_allclose(result.value, np.arange(30.0)[::-1], atol=1e-12)
        with pytest.raises(ValueError, match="k must be at most the number of trainable weights, 30, got 31"):
            sharpness.top_eigenvalues(loss, params, k=31)

    def test_do_not_depend_on_the_seed_of_the_start_vector(self):
        loss, params, _ = network()
        first, second = (sharpness.top_eigenvalues(loss, params, seed=s, tol=1e-7).value for s in (0, 1))
        np.testing.assert_allclose(first, second, rtol=1e-7)

    def test_in_float32_agree_with_float64(self):
        exact, single = (
            sharpness.top_eigenvalues(*network(nn.Tanh(), dtype=dtype)[:2], k=2)
            for dtype in (torch.float64, torch.float32)
        )
        np.testing.assert_allclose(single.value, exact.value, rtol=1e-4)
        assert single.converged

    def test_take_parameters_of_different_precision(self):
        coarse, fine = torch.ones(2, dtype=torch.bfloat16, requires_grad=True), leaf([1.0, 1.0])
        result = sharpness.top_eigenvalues(lambda: (coarse.double() * fine).sum(), [coarse, fine], k=4)
        np.testing.assert_allclose(result.value, [1, 1, -1, -1], rtol=1e-12)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")  # curvlinops still uses it
    def test_agree_with_curvlinops_on_a_plain_network(self):
        curvlinops = pytest.importorskip("curvlinops")
        loss, params, model = network()
        operator = curvlinops.HessianLinearOperator(
            model, nn.CrossEntropyLoss(), params, [batch(torch.float64)]
        )
        matrix = (operator @ torch.eye(sum(p.numel() for p in params), dtype=torch.float64)).detach().numpy()
        np.testing.assert_allclose(matrix, dense_hessian(loss, params), atol=1e-8)
        result = sharpness.top_eigenvalues(loss, params, k=3, tol=1e-8)
        np.testing.assert_allclose(result.value, np.linalg.eigvalsh(matrix)[::-1][:3], rtol=1e-8)


class TestTrace:
    def test_of_a_small_loss_is_exact(self):
        result = sharpness.trace(*quadratic([1.0, -5.0, 30.0]))
        assert (result.value, result.error, result.converged) == (26.0, 0.0, True)
        assert result.products == 3

    @pytest.mark.parametrize("sketch", [0, 10])
    def test_lies_within_four_standard_errors(self, sketch):
        loss, params, _ = network()
        exact = np.trace(dense_hessian(loss, params))
        for seed in range(5):
            result = sharpness.trace(loss, params, samples=20, sketch=sketch, seed=seed)
            assert abs(result.value - exact) < 4 * result.error
            assert result.products == 20 + 2 * sketch

    @pytest.mark.parametrize("sketch", [0, 10])
    def test_states_the_error_that_repetition_shows(self, sketch):
        loss, params, _ = network()
        exact = np.trace(dense_hessian(loss, params))
        results = [sharpness.trace(loss, params, samples=20, sketch=sketch, seed=seed) for seed in range(100)]
        measured = np.std([r.value for r in results])
        assert np.mean([r.error for r in results]) == pytest.approx(measured, rel=0.2)
        assert np.mean([r.value for r in results]) == pytest.approx(exact, abs=4 * measured / 10)

    def test_gains_from_the_sketch_when_few_eigenvalues_dominate(self):
        theta = leaf(torch.zeros(300))
        basis = torch.linalg.qr(torch.randn(300, 300, dtype=torch.float64)).Q
        curvature = torch.as_tensor(spread_spectrum(300))

        def loss():
            return (curvature * (basis @ theta) ** 2).sum() / 2

        plain = sharpness.trace(loss, [theta], samples=60, sketch=0)
        sketched = sharpness.trace(loss, [theta], samples=20, sketch=20)
        assert plain.products == sketched.products
        assert sketched.error < plain.error / 5
        assert sketched.converged
        assert not plain.converged

    def test_of_a_flat_loss_is_zero_exactly(self):
        result = sharpness.trace(*quadratic(np.zeros(200)))
        assert (result.value, result.error, result.converged) == (0.0, 0.0, True)


class TestSpectralDensity:
    def test_of_a_small_loss_is_exact(self):
        result = sharpness.spectral_density(*quadratic([1.0, 1.0, 4.0]), width=0.1)
        near_one = np.trapezoid(np.where(result.grid < 2.5, result.value, 0), result.grid)
        assert near_one == pytest.approx(2 / 3, rel=1e-3)
        assert result.value.max() == pytest.approx(2 / 3 / (0.1 * math.sqrt(2 * math.pi)), rel=1e-3)
        assert not result.error.any()
        assert result.converged

    @pytest.mark.parametrize("curvature", [np.linspace(-1, 1, 1500), spread_spectrum(1500)])
    def test_equals_the_smoothed_spectrum(self, curvature):
        result = sharpness.spectral_density(*quadratic(curvature))
        bumps = np.exp(-0.5 * ((result.grid[:, None] - curvature) / result.width) ** 2)
        exact = bumps.mean(axis=1) / (result.width * math.sqrt(2 * math.pi))
        assert np.trapezoid(np.abs(result.value - exact), result.grid) < 0.1
        assert np.trapezoid(result.value, result.grid) == pytest.approx(1, abs=1e-4)
        assert result.converged

    def test_says_when_there_are_too_few_steps_for_the_width(self):
        loss, params = quadratic(np.linspace(-1, 1, 1500))
        few, narrow = {"steps": 20, "probes": 50}, {"width": 0.002}
        assert not sharpness.spectral_density(loss, params, **few).converged
        assert not sharpness.spectral_density(loss, params, **narrow).converged

    def test_counts_each_outlier_once(self):
        """Without reorthogonalisation, 80 steps find the eigenvalue 9 several times over."""
        curvature = spread_spectrum(1500)
        result = sharpness.spectral_density(*quadratic(curvature), probes=2)
        for outlier in (2.0, 4.0, 9.0):
            assert np.sum(np.abs(result.nodes - outlier) < 0.5) == 2
            assert np.abs(result.nodes - outlier).min() < 1e-10

    def test_integrates_polynomials_exactly_for_each_random_vector(self):
        """Gauss' rule with m nodes is exact up to degree 2m - 1."""
        curvature = np.linspace(-1, 2, 400)
        result = sharpness.spectral_density(*quadratic(curvature), steps=5, probes=2, seed=3)
        starts = np.random.default_rng(3).standard_normal((2, 400))
        weights = np.mean(starts**2 / (starts**2).sum(axis=1, keepdims=True), axis=0)
        for degree in range(10):
            moment = (result.weights * result.nodes**degree).sum()
            assert moment == pytest.approx(weights @ curvature**degree, rel=1e-10)

    @pytest.mark.parametrize("curvature", [np.zeros(200), np.eye(200)[0], np.ones(200)])
    def test_of_a_hessian_with_one_or_two_eigenvalues_ends_the_lanczos_steps_early(self, curvature):
        result = sharpness.spectral_density(*quadratic(curvature), steps=10, probes=4)
        assert result.products <= 4 * 3
        assert result.weights.sum() == pytest.approx(1)
        assert np.isin(result.nodes.round(10), curvature).all()
        assert np.isfinite(result.value).all()


def highest_on_a_ball(curvature, slope, rho):
    """The exact maximum of a quadratic over an l_2 ball, from its secular equation."""

    def excess(multiplier):
        return np.linalg.norm(slope / (multiplier - curvature)) - rho

    low = max(0.0, curvature.max())
    if low == 0 and excess(0.0) <= 0:
        u = -slope / curvature
    else:
        low += 1e-12 * max(low, 1.0)
        multiplier = brentq(excess, low, low + np.linalg.norm(slope) / rho + 1, xtol=1e-14)
        u = slope / (multiplier - curvature)
    return slope @ u + curvature @ u**2 / 2


class TestWorstCase:
    @pytest.mark.parametrize(
        "curvature",
        [1 / np.arange(1, 51), np.linspace(-1, 1, 50), -1 / np.arange(1, 51)],
        ids=["convex", "indefinite", "concave"],
    )
    @pytest.mark.parametrize("ratio", [0.3, 3, 30])
    def test_of_a_quadratic_is_the_exact_maximum_over_the_ball(self, curvature, ratio):
        slope = np.random.default_rng(0).standard_normal(50)
        rho = ratio * np.linalg.norm(slope)
        result = sharpness.worst_case(*quadratic(curvature, slope), rho, steps=60)
        assert result.value == pytest.approx(highest_on_a_ball(curvature, slope, rho), rel=1e-3)
        assert result.converged
        assert np.linalg.norm(flat(result.perturbation)) <= rho * (1 + 1e-12)

    def test_over_a_cube_is_the_exact_maximum_of_a_separable_quadratic(self):
        rng = np.random.default_rng(0)
        curvature, slope, rho = rng.standard_normal(30), rng.standard_normal(30), 0.4
        inside = np.where(curvature < 0, np.clip(-slope / curvature, -rho, rho), 0)
        ends = np.stack([np.full(30, -rho), np.full(30, rho), inside])
        best = (slope * ends + curvature * ends**2 / 2).max(axis=0).sum()
        result = sharpness.worst_case(*quadratic(curvature, slope), rho, "linf", restarts=10, steps=60)
        assert result.value == pytest.approx(best, rel=1e-6)
        assert np.abs(flat(result.perturbation)).max() <= rho

    @pytest.mark.parametrize(("norm", "length"), [("l2", math.hypot(3 * 2, 4 * 5)), ("linf", 3 * 2 + 4 * 5)])
    def test_of_a_linear_loss_in_the_adaptive_geometry(self, norm, length):
        theta, slope = leaf([-2.0, 5.0]), torch.tensor([3.0, 4.0])
        result = sharpness.worst_case(
            lambda: (slope * theta).sum(), [theta], 0.1, norm, adaptive=True, steps=60
        )
        assert result.value == pytest.approx(0.1 * length, rel=1e-6)

    @pytest.mark.parametrize("norm", ["l2", "linf"])
    @pytest.mark.parametrize("adaptive", [False, "weights", "all"])
    @pytest.mark.parametrize("steps", [0, 1, 30])
    def test_is_never_below_the_rise_at_sams_point(self, norm, adaptive, steps):
        loss, params, model = network()
        rho = 3.0 if norm == "l2" else 0.3
        base = loss()
        grads = torch.autograd.grad(base, params)
        step = perturb.perturbation(params, grads, rho, norm=norm, adaptive=adaptive, eta=0.01)
        result = sharpness.worst_case(loss, params, rho, norm, adaptive=adaptive, eta=0.01, steps=steps)
        for p, e in zip(model.parameters(), step, strict=True):
            p.data.add_(e)
        assert result.one_step == pytest.approx((loss() - base).item(), rel=1e-12)
        assert result.value >= result.one_step
        assert result.value == result.restarts.max()

    @pytest.mark.parametrize("adaptive", [False, "all"])
    def test_is_reached_at_the_perturbation_it_returns(self, adaptive):
        loss, params, _ = network()
        base = loss().item()
        result = sharpness.worst_case(loss, params, 0.5, adaptive=adaptive)
        scales = perturb.scaling(params, adaptive) or [torch.ones_like(p) for p in params]
        u = [e / t for e, t in zip(result.perturbation, scales, strict=True)]
        assert np.linalg.norm(flat(u)) == pytest.approx(0.5)
        for p, e in zip(params, result.perturbation, strict=True):
            p.data.add_(e)
        assert loss().item() == pytest.approx(result.loss, abs=1e-12)
        assert result.loss - base == pytest.approx(result.value, abs=1e-12)

    @pytest.mark.parametrize("minimum", [landscapes.SHARP_MINIMUM, landscapes.FLAT_MINIMUM])
    @pytest.mark.parametrize("rho", [1.0, 5.340420, 10.0])
    def test_on_the_two_basins_equals_a_search_round_the_circle(self, minimum, rho):
        theta = leaf(minimum)
        angle = torch.linspace(0, 2 * math.pi, 100_001, dtype=torch.float64)
        circle = theta.detach() + rho * torch.stack([angle.cos(), angle.sin()], dim=-1)
        highest = landscapes.two_basins(circle).max().item()
        result = sharpness.worst_case(lambda: landscapes.two_basins(theta), [theta], rho)
        assert result.loss == pytest.approx(highest, abs=1e-8)

    def test_makes_the_flat_basin_win_from_a_radius_of_5_34(self):
        def loss_at(minimum, rho):
            theta = leaf(minimum)
            return sharpness.worst_case(lambda: landscapes.two_basins(theta), [theta], rho).loss

        for rho, flat_wins in [(5.3404, False), (5.3405, True)]:
            sharp, flat_ = (loss_at(m, rho) for m in (landscapes.SHARP_MINIMUM, landscapes.FLAT_MINIMUM))
            assert (flat_ < sharp) is flat_wins

    def test_at_a_minimum_needs_the_random_starts(self):
        """There the gradient vanishes, and SAM's point is the minimum itself."""
        result = sharpness.worst_case(*quadratic([1.0, 3.0]), rho=0.1)
        assert result.one_step == 0
        assert result.value == pytest.approx(3 * 0.1**2 / 2, rel=1e-6)

    def test_at_a_maximum_is_zero(self):
        result = sharpness.worst_case(*quadratic([-1.0, -3.0]), rho=0.1)
        assert result.value == 0
        assert not flat(result.perturbation).any()

    def test_on_a_plateau_is_zero(self):
        theta = leaf([0.0, 0.0])
        result = sharpness.worst_case(lambda: (theta - 5).relu().sum(), [theta], 1.0)
        assert (result.value, result.error, result.converged) == (0, 0, True)

    def test_takes_no_step_that_falls(self):
        """From SAM's point at 1, where the loss is 0.4, the next step would lead back to 0."""
        result = sharpness.worst_case(*quadratic([-1.2], [1.0]), 1.0, steps=1)
        assert result.value == result.one_step == pytest.approx(0.4)

    @pytest.mark.parametrize(
        ("curvature", "steps"), [(1 / np.arange(1, 51), 11), (np.linspace(-1, 1, 50), 30)]
    )
    def test_closes_in_on_the_maximum_faster_than_repeated_sam_steps(self, curvature, steps):
        """Those alone are a power method, and still at 1e-7 and 1e-6 by then."""
        slope = np.random.default_rng(0).standard_normal(50)
        rho = 3 * np.linalg.norm(slope)
        best = highest_on_a_ball(curvature, slope, rho)
        result = sharpness.worst_case(*quadratic(curvature, slope), rho, steps=steps)
        assert result.value == pytest.approx(best, rel=1e-8)

    def test_over_a_cube_leads_to_a_corner_where_the_loss_is_convex(self):
        torch.manual_seed(0)
        theta, matrix = leaf(torch.zeros(2000)), torch.randn(50, 2000, dtype=torch.float64)
        result = sharpness.worst_case(lambda: ((matrix @ theta) ** 2).sum(), [theta], 0.1, "linf", steps=15)
        assert (np.abs(flat(result.perturbation)) == 0.1).all()

    def test_over_a_cube_lets_the_restarts_differ_where_there_are_many_tops(self):
        """A sum of cosines has a top at both ends of every edge, of different heights."""
        theta, phase = leaf(torch.zeros(40)), torch.linspace(0, 3, 40, dtype=torch.float64)
        result = sharpness.worst_case(
            lambda: (theta + phase).cos().sum() * (theta - phase).sin().sum(), [theta], 3.0, "linf"
        )
        assert np.ptp(result.restarts) > 0.01 * result.value
        assert not result.converged

    def test_with_radius_zero_is_zero(self):
        loss, params, _ = network()
        result = sharpness.worst_case(loss, params, 0)
        assert (result.value, result.error, result.converged) == (0, 0, True)

    def test_says_that_one_start_proves_nothing(self):
        loss, params, _ = network()
        result = sharpness.worst_case(loss, params, 0.1, restarts=1)
        assert result.error == math.inf
        assert not result.converged

    def test_says_when_the_restarts_disagree(self):
        """The circle around the sharp minimum has two tops of very different height."""
        theta = leaf(landscapes.SHARP_MINIMUM)
        result = sharpness.worst_case(lambda: landscapes.two_basins(theta), [theta], 5.0, restarts=8)
        assert np.ptp(result.restarts) > 0.1 * result.value
        assert not result.converged

    def test_keeps_the_best_finite_loss_when_the_ball_leaves_the_domain_and_says_so(self):
        theta = leaf([1.0])
        result = sharpness.worst_case(lambda: torch.log(theta).sum() ** 2, [theta], 2.0)
        assert math.isfinite(result.value)
        assert result.value >= math.log(3) ** 2 - 1e-9
        assert result.error == math.inf
        assert not result.converged

    def test_says_so_too_when_the_gap_is_met_on_the_way(self):
        theta = leaf([0.0])

        def gap():  # 0.2 at SAM's point 1; the first steps back from it lead to 0 and to 0.75
            value = (theta - 0.8 * theta**2).sum()
            return value * math.nan if 0.7 < theta.item() < 0.8 else value

        result = sharpness.worst_case(gap, [theta], 1.0)
        assert result.one_step == pytest.approx(0.2)
        assert result.value == pytest.approx(0.3125, rel=0.05)
        assert result.error == math.inf

    def test_refuses_a_point_without_a_slope(self):
        theta = leaf([0.0])
        with pytest.raises(ValueError, match="gradient is not finite"):
            sharpness.worst_case(lambda: theta.sqrt().sum(), [theta], 0.1)

    def test_sees_the_moved_weights_inside_an_autocast_block(self):
        """Autocast keeps half-precision copies of the weights: stale ones would make every rise zero."""
        loss, params, _ = network(dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss()
            result = sharpness.worst_case(loss, params, 1.0)
        assert result.value == pytest.approx(sharpness.worst_case(loss, params, 1.0).value, rel=0.05)


class TestAverage:
    def test_of_a_quadratic_is_half_the_trace_times_the_variance(self):
        curvature = np.linspace(-1, 3, 50)
        for seed in range(5):
            result = sharpness.average(*quadratic(curvature, np.ones(50)), sigma=0.2, seed=seed)
            assert abs(result.value - 0.2**2 * curvature.sum() / 2) < 4 * result.error

    def test_equals_gaussian_quadrature_on_the_two_basins(self):
        theta, sigma = leaf(landscapes.SHARP_MINIMUM), 1.5
        nodes, weights = np.polynomial.hermite_e.hermegauss(15)
        grid = np.stack(np.meshgrid(nodes, nodes), axis=-1)
        losses = landscapes.two_basins(theta.detach() + sigma * torch.as_tensor(grid)).numpy()
        exact = (np.outer(weights, weights) * losses).sum() / weights.sum() ** 2
        result = sharpness.average(lambda: landscapes.two_basins(theta), [theta], sigma, samples=1000)
        assert abs(result.loss - exact) < 4 * result.error
        assert result.converged

    def test_states_the_error_that_repetition_shows(self):
        loss, params, _ = network()
        results = [sharpness.average(loss, params, 0.1, samples=20, seed=seed) for seed in range(100)]
        measured = np.std([r.value for r in results])
        assert np.mean([r.error for r in results]) == pytest.approx(measured, rel=0.2)

    def test_of_a_linear_loss_is_zero(self):
        result = sharpness.average(*quadratic(np.zeros(50), np.ones(50)), sigma=1.0)
        assert result.value == pytest.approx(0, abs=1e-12)

    def test_with_no_noise_is_zero(self):
        loss, params, _ = network()
        result = sharpness.average(loss, params, 0.0)
        assert (result.value, result.error, result.converged) == (0, 0, True)

    def test_scales_the_noise_with_the_weights_when_adaptive(self):
        theta = leaf([-2.0, 5.0])
        result = sharpness.average(
            lambda: (theta**2).sum(), [theta], 0.1, adaptive=True, eta=1.0, samples=2000
        )
        assert abs(result.value - 0.1**2 * (3.0**2 + 6.0**2)) < 4 * result.error

    def test_is_not_a_number_when_a_loss_is_not(self):
        theta = leaf([1.0])
        result = sharpness.average(lambda: theta.log().sum(), [theta], 1.0)
        assert math.isnan(result.value)
        assert result.error == math.inf
        assert not result.converged


MEASURES = {
    "top_eigenvalues": lambda *args, **kw: sharpness.top_eigenvalues(*args, **{"tol": 1e-10, **kw}).value,
    "trace": lambda *args, **kw: sharpness.trace(*args, **kw).value,
    "spectral_density": lambda *args, **kw: sharpness.spectral_density(*args, **kw).nodes,
    "worst_case": lambda *args, **kw: sharpness.worst_case(*args, 0.1, **kw).value,
    "worst_case_linf": lambda *args, **kw: sharpness.worst_case(*args, 0.01, "linf", **kw).value,
    "average": lambda *args, **kw: sharpness.average(*args, 0.1, **kw).value,
}
each_measure = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)


class TestRescaling:
    """Scaling one layer of a ReLU network by c and the next by 1/c leaves its function alone."""

    @each_measure
    def test_changes_the_plain_measure(self, measure):
        original, twin = rescaled_twins()
        assert original[0]().item() == pytest.approx(twin[0]().item(), rel=1e-12)
        assert not np.allclose(measure(*original), measure(*twin), rtol=0.1)

    @each_measure
    @pytest.mark.parametrize("eta", [0.0, 0.01])
    def test_leaves_the_adaptive_measure_alone_if_eta_is_zero(self, measure, eta):
        original, twin = rescaled_twins()
        values = [measure(*net, adaptive=True, eta=eta) for net in (original, twin)]
        assert np.allclose(*values, rtol=1e-8, atol=1e-10) is (eta == 0)

    @each_measure
    def test_means_true_and_all_the_same_and_weights_something_else(self, measure):
        loss, params, _ = network()
        everything, same, weights = (measure(loss, params, adaptive=a) for a in ("all", True, "weights"))
        assert np.array_equal(everything, same)
        assert not np.allclose(everything, weights)


class Restless(nn.Module):
    """Buffers that change in place, that are replaced, and that count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        self.calls += 1
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(dim=0)
        return x


def restless_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Dropout(0.3),
        Restless(),
        nn.BatchNorm1d(8, momentum=None),
        nn.Linear(8, 3),
    )


class TestEverythingIsLeftAsFound:
    @pytest.fixture(params=[True, False], ids=["train", "eval"])
    def model(self, request):
        model = restless_network()
        inputs, targets = batch()
        cross_entropy(model(inputs), targets).backward()
        model[0].bias.grad = None
        model[6].weight.grad.fill_(math.nan)
        model.train(request.param)
        model[1].eval()
        return model

    @staticmethod
    def snapshot(model):
        return {
            "weights": [p.detach().clone() for p in model.parameters()],
            "gradients": [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()],
            "buffers": [b.clone() for b in model.buffers()],
            "random": [torch.get_rng_state()],
        }, {
            "gradients": [id(p.grad) for p in model.parameters()],
            "buffers": [id(b) for b in model.buffers()],
            "storage": [t.data_ptr() for t in (*model.parameters(), *model.buffers())],
            "flags": [m.training for m in model.modules()],
            "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
        }

    def check(self, model, before):
        contents, identities = self.snapshot(model)
        assert identities == before[1]
        for name, tensors in contents.items():
            for now, then in zip(tensors, before[0][name], strict=True):
                if then is None:
                    assert now is None
                else:
                    torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)

    FUNCTIONS = MEASURES | {
        "hvp": lambda loss, params: sharpness.hvp(loss, params, [torch.ones_like(p) for p in params]),
        "line": lambda loss, params: landscapes.line(loss, params, [torch.ones_like(p) for p in params]),
        "plane": lambda loss, params: landscapes.plane(
            loss, params, *([torch.ones_like(p) for p in params] for _ in range(2)), x=[0, 1], y=[0, 1]
        ),
        "path": lambda loss, params: landscapes.path(loss, params, [torch.ones_like(p) for p in params]),
    }
    each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)

    @each_function
    def test_after_a_measurement(self, model, function):
        inputs, targets = batch()
        before = self.snapshot(model)
        function(lambda: cross_entropy(model(inputs), targets), list(model.parameters()))
        self.check(model, before)

    @each_function
    @pytest.mark.parametrize("good_calls", [0, 1, 2])
    def test_after_an_exception(self, model, function, good_calls):
        (inputs, targets), calls = batch(), []

        def loss():
            value = cross_entropy(model(inputs), targets)
            calls.append(value)
            if len(calls) > good_calls:
                raise KeyboardInterrupt
            return value

        before = self.snapshot(model)
        try:
            function(loss, list(model.parameters()))
        except KeyboardInterrupt:
            assert len(calls) == good_calls + 1
        self.check(model, before)

    @each_function
    def test_so_that_a_graph_built_before_can_still_be_differentiated(self, model, function):
        inputs, targets = batch()
        params = list(model.parameters())
        state = torch.get_rng_state()
        expected = torch.autograd.grad(cross_entropy(model(inputs), targets), params)
        torch.set_rng_state(state)
        value = cross_entropy(model(inputs), targets)
        function(lambda: cross_entropy(model(inputs), targets), params)
        for got, want in zip(torch.autograd.grad(value, params), expected, strict=True):
            torch.testing.assert_close(got, want)

    @each_function
    def test_and_a_loss_with_dropout_is_measured_with_one_mask(self, function):
        model = restless_network()
        inputs, targets = batch()
        values = []

        def loss():
            values.append(cross_entropy(model(inputs), targets))
            return values[-1]

        with Surface(loss, model.parameters()) as surface:
            assert surface.loss() == surface.loss() == surface.loss_and_gradient()[0]
        first = len(values)
        function(loss, list(model.parameters()))
        assert len(values) > first

    def test_when_two_models_share_a_layer(self):
        norm = nn.BatchNorm1d(5)
        models = [nn.Sequential(norm, nn.Linear(5, 3)) for _ in range(2)]
        inputs, targets = batch()
        before = [b.clone() for b in norm.buffers()]
        sharpness.average(
            lambda: sum(cross_entropy(model(inputs), targets) for model in models),
            models[0].parameters(),
            0.1,
        )
        assert all(torch.equal(now, then) for now, then in zip(norm.buffers(), before, strict=True))

    def test_under_no_grad_too(self):
        loss, params, _ = network()
        expected = sharpness.top_eigenvalues(loss, params).value
        with torch.no_grad():
            assert sharpness.top_eigenvalues(loss, params).value == pytest.approx(expected)
            assert sharpness.worst_case(loss, params, 0.1).value > 0

    def test_and_a_compiled_model_is_measured_like_the_plain_one(self):
        _, params, model = network(nn.BatchNorm1d(8), nn.Tanh())
        inputs, targets = batch(torch.float64)
        compiled = torch.compile(model, backend="aot_eager")
        statistics = [b.clone() for b in model.buffers()]
        for measure in (MEASURES["top_eigenvalues"], MEASURES["average"]):
            plain, fast = (
                measure(lambda net=net: cross_entropy(net(inputs), targets), params)
                for net in (model, compiled)
            )
            np.testing.assert_allclose(plain, fast, rtol=1e-12)
        for now, then in zip(model.buffers(), statistics, strict=True):
            assert torch.equal(now, then)


class TestMistakes:
    @each_measure
    @pytest.mark.parametrize(
        ("result", "error", "message"),
        [
            (None, TypeError, "must return a scalar tensor, got None"),
            (1.0, TypeError, "must return a scalar tensor, got 1.0"),
            (torch.ones(3), ValueError, r"must return a scalar tensor, got shape \(3,\)"),
            (torch.tensor(math.nan), ValueError, "the loss is nan"),
            (torch.tensor(math.inf), ValueError, "the loss is inf"),
        ],
        ids=["none", "float", "vector", "nan", "inf"],
    )
    def test_a_loss_that_returns_something_else(self, measure, result, error, message):
        theta = leaf([1.0])
        with pytest.raises(error, match=message):
            measure(lambda: result, [theta])

    @pytest.mark.parametrize("name", ["top_eigenvalues", "trace", "spectral_density", "worst_case"])
    def test_a_loss_without_a_graph(self, name):
        theta = leaf([1.0])
        with pytest.raises(ValueError, match="does not depend on params"):
            MEASURES[name](lambda: theta.detach().sum(), [theta])

    @pytest.mark.parametrize("name", ["top_eigenvalues", "trace", "spectral_density", "worst_case"])
    def test_a_closure_made_for_an_optimizer(self, name):
        theta = leaf([1.0])
        theta.grad = torch.tensor([5.0], dtype=torch.float64)
        gradient = theta.grad

        def closure():
            theta.grad = None
            value = (theta**2).sum()
            value.backward()
            return value

        with pytest.raises(ValueError, match="must not call backward"):
            MEASURES[name](closure, [theta])
        assert theta.grad is gradient
        assert gradient.item() == 5

    @each_measure
    @pytest.mark.parametrize(
        ("params", "error", "message"),
        [
            ([], ValueError, "no tensor with requires_grad=True"),
            ([torch.ones(2)], ValueError, "no tensor with requires_grad=True"),
            (torch.ones(2, requires_grad=True), TypeError, r"pass \[tensor\]"),
            ([torch.ones(2, requires_grad=True) * 2], ValueError, "the result of a computation"),
            ([2.0], TypeError, "must hold real tensors, got 2.0"),
            ([torch.ones(2, dtype=torch.complex64, requires_grad=True)], TypeError, "real tensors"),
            ([torch.ones(2, requires_grad=True)] * 2, ValueError, "a tensor twice"),
        ],
        ids=["empty", "frozen", "tensor", "computed", "number", "complex", "twice"],
    )
    def test_params_that_cannot_be_moved(self, measure, params, error, message):
        with pytest.raises(error, match=message):
            measure(lambda: torch.ones(()), params)

    @each_measure
    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
            ({"seed": -1}, ValueError, "seed must be >= 0, got -1"),
            ({"tol": math.nan}, ValueError, "tol must be finite and >= 0, got nan"),
            ({"tol": "1"}, TypeError, "tol must be a number, got '1'"),
            ({"adaptive": "biases"}, ValueError, "adaptive must be False, True, 'weights' or 'all'"),
            ({"eta": -0.1}, ValueError, "eta must be finite and >= 0, got -0.1"),
        ],
        ids=["seed type", "seed", "nan", "text", "adaptive", "eta"],
    )
    def test_settings_out_of_range(self, measure, settings, error, message):
        loss, params, _ = network()
        with pytest.raises(error, match=message):
            measure(loss, params, **settings)

    @pytest.mark.parametrize("radius", [-0.1, math.nan, math.inf])
    def test_a_radius_out_of_range(self, radius):
        loss, params, _ = network()
        with pytest.raises(ValueError, match="rho must be finite and >= 0"):
            sharpness.worst_case(loss, params, radius)
        with pytest.raises(ValueError, match="sigma must be finite and >= 0"):
            sharpness.average(loss, params, radius)

    def test_an_unknown_norm(self):
        loss, params, _ = network()
        with pytest.raises(ValueError, match="norm must be one of 'l2', 'linf', got 'l1'"):
            sharpness.worst_case(loss, params, 0.1, "l1")
