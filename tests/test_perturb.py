"""samkit.perturb: the mathematics of a step, from closed forms to degenerate input."""

import math

import numpy as np
import pytest
import torch

from samkit import perturb
from samkit.perturb import (
    Plane,
    add_scaled_,
    angle,
    ascent_direction,
    global_norm,
    over_length,
    perturbation,
    sam_gradient,
    scaling,
    slerp,
    times,
    xsam_gradient,
)

F64 = torch.float64


def vectors(*shapes, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]


def flat(tensors):
    return torch.cat([t.flatten().double() for t in tensors])


# The norm


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("size", [5, 10_000])
def test_the_norm_runs_over_all_tensors_however_many_and_however_long(count, size):
    if count * size > 1_000_000:
        size = 3000
    tensors = vectors(*[(size,)] * count)
    expected = np.linalg.norm(flat(tensors).numpy())
    assert global_norm(tensors).item() == pytest.approx(expected, rel=1e-13)


def test_the_norm_of_mixed_precisions_is_exact():
    assert global_norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=F64)]).item() == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 1000])
def test_the_norm_of_half_precision_tensors_is_taken_in_float32(dtype, count):
    # 300 squared overflows float16, and 10,000 of them in bfloat16 stop growing at 256 equal terms.
    tensors = [torch.full((10_000 // count,), 300.0, dtype=dtype)] * count
    norm = global_norm(tensors)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(300 * math.sqrt(10_000), rel=3e-3)


def test_the_norm_of_nothing_is_zero():
    assert global_norm([]).item() == 0


# The perturbation


def test_the_l2_perturbation_has_length_rho_and_the_gradient_s_direction():
    params, grads = vectors((3, 2), (4,)), vectors((3, 2), (4,), seed=1)
    moved = flat(perturbation(params, grads, 0.3))
    assert moved.norm().item() == pytest.approx(0.3, rel=1e-14)
    torch.testing.assert_close(moved / 0.3, flat(grads) / flat(grads).norm(), rtol=1e-13, atol=0)


def test_the_linf_perturbation_is_rho_times_the_signs():
    grads = [torch.tensor([2.0, -1e-30, 0.0])]
    (moved,) = perturbation(grads, grads, 0.5, norm="linf")
    assert moved.tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("adaptive", [False, "weights", "all"])
def test_no_point_of_the_ball_is_higher_on_the_linearised_loss(norm, adaptive):
    params, grads, rho = vectors((3, 2), (4,)), vectors((3, 2), (4,), seed=1), 0.7
    moved = flat(perturbation(params, grads, rho, norm=norm, adaptive=adaptive, eta=0.1))
    scales = scaling(params, adaptive, 0.1)
    t = torch.ones(10, dtype=F64) if scales is None else flat(scales)
    order = 2 if norm == "l2" else math.inf
    assert torch.linalg.vector_norm(moved / t, order).item() == pytest.approx(rho, rel=1e-13)
    others = torch.randn(2000, 10, dtype=F64, generator=torch.Generator().manual_seed(2))
    others = rho * t * others / torch.linalg.vector_norm(others, order, dim=1, keepdim=True)
    best = moved @ flat(grads)
    assert (others @ flat(grads) < best).all()
    # and it is the maximum itself: rho times the dual norm of T g
    dual = torch.linalg.vector_norm(t * flat(grads), 2 if norm == "l2" else 1)
    assert best.item() == pytest.approx(rho * dual.item(), rel=1e-13)


def test_adaptive_perturbations_follow_their_formulas():
    params, grads = [torch.tensor([-2.0, 0.5], dtype=F64)], [torch.tensor([1.0, -3.0], dtype=F64)]
    t = np.array([2.1, 0.6])
    g = np.array([1.0, -3.0])
    (l2,) = perturbation(params, grads, 0.2, adaptive="all", eta=0.1)
    (linf,) = perturbation(params, grads, 0.2, norm="linf", adaptive="all", eta=0.1)
    np.testing.assert_allclose(l2.numpy(), 0.2 * t**2 * g / np.linalg.norm(t * g), rtol=1e-14)
    np.testing.assert_allclose(linf.numpy(), 0.2 * t * np.sign(t * g), rtol=1e-14)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_rescaling_two_layers_leaves_the_adaptively_perturbed_function_alone(norm):
    a, b = (v.requires_grad_() for v in vectors((3, 3), (3, 3)))
    x = vectors((3,), seed=5)[0]

    def perturbed_output(c):
        layers = [(a * c).detach().requires_grad_(), (b / c).detach().requires_grad_()]
        grads = torch.autograd.grad((layers[1] @ torch.relu(layers[0] @ x)).square().sum(), layers)
        moved = perturbation(layers, grads, 0.3, norm=norm, adaptive="all")
        first, second = (w + e for w, e in zip(layers, moved, strict=True))
        return second @ torch.relu(first @ x)

    torch.testing.assert_close(perturbed_output(1.0), perturbed_output(7.0), rtol=1e-12, atol=1e-14)


def test_the_adaptive_conventions_differ_on_biases_alone():
    params = [torch.tensor([[3.0]]), torch.tensor([3.0])]
    assert [t.item() for t in scaling(params, "weights")] == [3.0, 1.0]
    assert [t.item() for t in scaling(params, "all")] == [3.0, 3.0]
    assert [t.item() for t in scaling(params, True)] == [3.0, 3.0]
    assert scaling(params, False) is None


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("adaptive", [False, "all"])
def test_a_zero_gradient_gives_a_zero_perturbation(norm, adaptive):
    params, zero = [torch.tensor([1.0, 0.0])], [torch.zeros(2)]
    (moved,) = perturbation(params, zero, 0.5, norm=norm, adaptive=adaptive)
    assert moved.tolist() == [0, 0]


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_weights_at_zero_do_not_move_adaptively_without_eta_and_do_with_it(norm):
    params, grads = [torch.zeros(2)], [torch.ones(2)]
    assert perturbation(params, grads, 0.5, norm=norm, adaptive="all")[0].tolist() == [0, 0]
    assert (perturbation(params, grads, 0.5, norm=norm, adaptive="all", eta=0.01)[0] > 0).all()


@pytest.mark.parametrize(("said", "meant"), [(0, False), (np.False_, False), (np.True_, True)])
def test_a_truth_value_of_numpy_switches_the_adaptive_geometry_as_python_s_does(said, meant):
    params, grads = [torch.tensor([[2.0, 5.0]])], [torch.tensor([[3.0, 4.0]])]
    moved, expected = (perturbation(params, grads, 0.5, adaptive=value)[0] for value in (said, meant))
    assert torch.equal(moved, expected)


def test_rho_zero_gives_a_zero_perturbation_and_the_plain_gradient():
    params, grads = vectors((3,)), vectors((3,), seed=1)
    assert not perturbation(params, grads, 0.0)[0].any()
    (at_theta,) = sam_gradient(lambda theta: [theta[0] ** 3], params, 0.0)
    torch.testing.assert_close(at_theta, params[0] ** 3, rtol=0, atol=0)


def test_an_unknown_norm_is_refused_by_name():
    with pytest.raises(ValueError, match="norm must be one of 'l2', 'linf', got 'l1'"):
        ascent_direction([torch.ones(1)], "l1")


# SAM's gradient


def quadratic(dimension=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(dimension, dimension, generator=generator, dtype=F64)
    return square @ square.T / dimension


def test_on_a_quadratic_the_sam_gradient_is_h_times_the_ascent_point():
    h, theta = quadratic(), vectors((6,), seed=3)[0]
    g = h @ theta
    expected = h @ (theta + 0.4 * g / g.norm())
    (got,) = sam_gradient(lambda point: [h @ point[0]], [theta], 0.4)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)


def test_k_ascent_steps_have_length_rho_over_k_each():
    h, theta = quadratic(), vectors((6,), seed=3)[0]
    point = theta
    for _ in range(3):
        g = h @ point
        point = point + 0.4 / 3 * g / g.norm()
    (got,) = sam_gradient(lambda at: [h @ at[0]], [theta], 0.4, ascent_steps=3)
    torch.testing.assert_close(got, h @ point, rtol=1e-14, atol=0)


def test_the_sam_gradient_is_to_first_order_the_gradient_of_the_loss_plus_rho_times_the_slope():
    # L + rho |grad L| has the gradient g + rho H g/|g|; SAM's differs from it by rho squared.
    theta = vectors((5,), seed=4)[0]

    def slope(point):
        return [torch.cos(point) * point + torch.sin(point)]

    def penalised(point, rho):
        loss = (torch.sin(point) * point).sum()
        return loss + rho * slope(point)[0].norm()

    gaps = []
    for rho in (4e-3, 2e-3):
        finite = torch.stack(
            [
                (penalised(theta + e, rho) - penalised(theta - e, rho)) / 2e-5
                for e in 1e-5 * torch.eye(5, dtype=F64)
            ]
        )
        (got,) = sam_gradient(lambda at: slope(at[0]), [theta], rho)
        gaps.append((got - finite).norm().item())
    assert gaps[0] < 1e-4
    assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.05)


# Moving weights in place


@pytest.fixture(params=["one fused kernel", "without it"])
def _kernels(request, monkeypatch):
    if request.param == "without it":  # MPS, and float64 on CUDA
        monkeypatch.setattr(perturb, "_has_fused_sgd", lambda *_: False)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.1, torch.tensor(0.1, dtype=F64)])
def test_weights_move_in_place_within_rounding(dtype, scale):
    params, directions = vectors((3, 2), (50,), dtype=dtype), vectors((3, 2), (50,), seed=1, dtype=dtype)
    exact = flat(params) + 0.1 * flat(directions)
    storage = [p.data_ptr() for p in params]
    add_scaled_(params, directions, scale)
    assert [p.data_ptr() for p in params] == storage
    eps = torch.finfo(dtype).eps if isinstance(scale, float) else max(torch.finfo(dtype).eps, 1e-7)
    assert ((flat(params) - exact).abs() <= eps * (exact.abs() + 1)).all()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("blocked", [True, torch.tensor(True)])
def test_blocked_weights_stay_whatever_the_direction_holds(blocked):
    params = vectors((4,))
    before = params[0].clone()
    add_scaled_(params, [torch.tensor([math.nan, math.inf, 1.0, 0.0], dtype=F64)], torch.tensor(1.0), blocked)
    assert torch.equal(params[0], before)


def test_a_length_of_zero_has_no_direction():
    assert over_length(0.3, torch.tensor(0.0)) == 0
    assert over_length(0.3, torch.tensor(2.0, dtype=F64)) == 0.15


def test_times_keeps_the_dtype_of_each_tensor():
    tensors = [torch.ones(1), torch.ones(1, dtype=F64)]
    for factor in (3.0, torch.tensor(3.0, dtype=F64)):
        got = times(tensors, factor)
        assert [t.dtype for t in got] == [torch.float32, F64]
        assert [t.item() for t in got] == [3, 3]


# Angles and the circle


@pytest.mark.parametrize("psi", [0.0, 1e-12, 1e-6, 0.5, math.pi / 2, 3.0, math.pi - 1e-6, math.pi])
def test_the_angle_is_accurate_near_parallel_and_near_opposite(psi):
    v0 = [torch.tensor([2.0, 0.0], dtype=F64)]
    v1 = [3 * torch.tensor([math.cos(psi), math.sin(psi)], dtype=F64)]
    assert angle(v0, v1).item() == pytest.approx(psi, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("psi", [1e-3, 0.1, 1.5, math.pi - 1e-3])
def test_the_angle_holds_in_float32_with_a_million_weights(psi):
    a, b = vectors((1_000_000,), (1_000_000,))
    a = a / a.norm()
    b = b - (a @ b) * a
    b = b / b.norm()
    v0, v1 = [a.float()], [(math.cos(psi) * a + math.sin(psi) * b).float()]
    assert angle(v0, v1).item() == pytest.approx(psi, rel=1e-3)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 1.7, 2.0])
@pytest.mark.parametrize("psi", [0.01, 1.0, 3.0])
def test_slerp_turns_by_alpha_times_the_angle(psi, alpha):
    v0 = [torch.tensor([5.0, 0.0], dtype=F64)]
    v1 = [torch.tensor([math.cos(psi), math.sin(psi)], dtype=F64)]
    (got,) = slerp(v0, v1, alpha)
    expected = torch.tensor([math.cos(alpha * psi), math.sin(alpha * psi)], dtype=F64)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_slerp_keeps_shapes_and_unit_length_over_lists():
    v0, v1 = vectors((3, 2), (4,), ()), vectors((3, 2), (4,), (), seed=1)
    got = slerp(v0, v1, 1.3)
    assert [t.shape for t in got] == [t.shape for t in v0]
    assert flat(got).norm().item() == pytest.approx(1, rel=1e-13)
    # in the plane of the two vectors
    basis, _ = torch.linalg.qr(torch.stack([flat(v0), flat(v1)], dim=1))
    torch.testing.assert_close(basis @ (basis.T @ flat(got)), flat(got), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, -1.0, 1e-3, -1e3])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_parallel_and_opposite_vectors_give_the_second_one(dtype, factor, alpha):
    v0 = vectors((1000,), dtype=dtype)
    v1 = [(factor * v0[0].double()).to(dtype)] if abs(factor) == 1 else [factor * v0[0].float()]
    (got,) = slerp([v0[0].to(v1[0].dtype)], v1, alpha)
    (unit,) = slerp(v1, v1, 1.0)
    torch.testing.assert_close(got, unit, rtol=0, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize(("v0", "v1"), [(0.0, 3.0), (0.0, 0.0), (3.0, 0.0)])
def test_zero_vectors_give_the_second_one_at_length_one_or_zero(v0, v1, alpha):
    (got,) = slerp([torch.tensor([v0, v0])], [torch.tensor([v1, v1])], alpha)
    assert got.tolist() == pytest.approx([1 / math.sqrt(2)] * 2 if v1 else [0.0, 0.0])


def test_the_xsam_gradient_has_the_length_of_the_gradient_everywhere_on_the_circle():
    moved, g = vectors((3, 2), (4,)), vectors((3, 2), (4,), seed=1)
    for alpha in (0.0, 0.4, 1.0, 2.0):
        got = flat(xsam_gradient(moved, g, alpha))
        assert got.norm().item() == pytest.approx(flat(g).norm().item(), rel=1e-13)


def test_the_xsam_gradient_is_sam_s_at_alpha_one_and_points_along_the_ascent_at_alpha_zero():
    moved, g = vectors((3, 2), (4,)), vectors((3, 2), (4,), seed=1)
    torch.testing.assert_close(flat(xsam_gradient(moved, g, 1.0)), flat(g), rtol=1e-13, atol=1e-13)
    along = flat(moved) / flat(moved).norm() * flat(g).norm()
    torch.testing.assert_close(flat(xsam_gradient(moved, g, 0.0)), along, rtol=1e-13, atol=1e-13)


def test_the_plane_works_in_float32_for_half_precision_gradients():
    moved = vectors((100,), dtype=torch.float32)
    g = vectors((100,), seed=1, dtype=torch.bfloat16)
    plane = Plane.through(moved, g)
    assert plane.gradient(0.5)[0].dtype == torch.float32
    exact = angle([moved[0].double()], [g[0].double()]).item()
    assert plane.angle.item() == pytest.approx(exact, rel=1e-5)
