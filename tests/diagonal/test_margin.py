"""samkit.diagonal.max_margin: optimality conditions, and the limit of one layer."""

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.optimize import linprog, minimize

from samkit.diagonal import banded, max_margin, separable

ROWS = np.array([[1.0, 0.2], [0.3, 1.5], [2.0, 0.1]])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [(4, 3), (30, 5), (5, 12)])
class TestOptimality:
    def test_l2_is_a_non_negative_combination_of_its_support_vectors(self, seed, shape):
        X, y = separable(*shape, seed=seed)
        beta = max_margin(X, y, "l2")
        margins = y * (X @ beta)
        assert margins.min() == pytest.approx(1, abs=1e-12)
        support = (y[:, None] * X)[margins < 1 + 1e-7]
        # The dual: beta = sum of lambda_i y_i x_i with lambda >= 0, as a feasibility problem.
        dual = linprog(np.zeros(len(support)), A_eq=support.T, b_eq=beta, method="highs")
        assert dual.status == 0

    def test_l2_is_the_answer_of_another_solver(self, seed, shape):
        X, y = separable(*shape, seed=seed)
        rows = y[:, None] * X
        found = minimize(
            lambda b: b @ b / 2,
            max_margin(X, y, "l1"),
            jac=lambda b: b,
            method="SLSQP",
            constraints={"type": "ineq", "fun": lambda b: rows @ b - 1, "jac": lambda b: rows},
            options={"ftol": 1e-14, "maxiter": 500},
        )
        np.testing.assert_allclose(max_margin(X, y, "l2"), found.x, atol=1e-6)

    def test_l1_meets_its_dual(self, seed, shape):
        X, y = separable(*shape, seed=seed)
        rows = y[:, None] * X
        beta = max_margin(X, y, "l1")
        dual = linprog(-np.ones(len(rows)), A_ub=np.vstack([rows.T, -rows.T]), b_ub=np.ones(2 * shape[1]))
        assert np.abs(beta).sum() == pytest.approx(-dual.fun, rel=1e-9)
        assert (rows @ beta).min() == pytest.approx(1, abs=1e-12)

    def test_scales_inversely_with_the_data(self, seed, shape):
        X, y = separable(*shape, seed=seed)
        for norm in ("l1", "l2"):
            beta = max_margin(X, y, norm)
            for factor in (1e-9, 1e9):
                np.testing.assert_allclose(
                    max_margin(factor * X, y, norm), beta / factor, rtol=1e-5, atol=1e-8 / factor
                )


class TestClosedForms:
    def test_one_example(self):
        np.testing.assert_allclose(max_margin([[3.0, -4.0]], [-1], "l1"), [0, 0.25])
        np.testing.assert_allclose(max_margin([[3.0, -4.0]], [-1], "l2"), [-3 / 25, 4 / 25])

    def test_non_negative_coefficients_leave_out_what_would_need_a_negative_one(self):
        np.testing.assert_allclose(max_margin([[3.0, -4.0]], [1], "l1", nonnegative=True), [1 / 3, 0])
        np.testing.assert_allclose(
            max_margin([[3.0, -4.0]], [1], "l2", nonnegative=True), [1 / 3, 0], atol=1e-12
        )

    def test_one_feature(self):
        np.testing.assert_allclose(max_margin([[0.5], [-2.0]], [1, -1], "l2"), [2.0])

    def test_the_middle_band_wins_under_much_noise(self):
        # With noise as large as the features even the exact answer does not prefer the strongest band.
        X, y = banded(noise=1.0, seed=0)
        share = max_margin(X, y, nonnegative=True).reshape(3, 4).sum(axis=1)
        quiet = max_margin(*banded(noise=0.3, seed=0), nonnegative=True).reshape(3, 4).sum(axis=1)
        assert share.argmax() == 1
        assert quiet.argmax() == 2


class TestOneLayerConvergesToTheL2MaxMargin:
    def test_reference_direction(self):
        beta = max_margin(ROWS, [1, 1, 1], "l2")
        np.testing.assert_allclose(beta / np.linalg.norm(beta), [0.88047, 0.47410], atol=5e-6)

    @pytest.mark.parametrize(
        ("method", "degrees"),
        [
            ("gd", (4.97, 0.544, 0.0547)),
            ("linf-sam", (6.92, 0.780, 0.0785)),
            ("l2-sam", (4.99, 0.543, 0.0547)),
        ],
    )
    def test_at_the_reference_angles(self, method, degrees):
        target = max_margin(ROWS, [1, 1, 1], "l2")

        def weights(beta):
            log_slope = -np.logaddexp(0, ROWS @ beta)
            slope = np.exp(log_slope - log_slope.max())
            return slope / slope.sum()

        def velocity(_, beta):
            g = -weights(beta) @ ROWS
            if method == "linf-sam":
                beta = beta + np.sign(g)
            elif method == "l2-sam":
                beta = beta + g / np.linalg.norm(g)
            return weights(beta) @ ROWS

        found = solve_ivp(velocity, (0, 1000), np.zeros(2), "LSODA", [10, 100, 1000], rtol=1e-9, atol=1e-11)
        cosines = target @ found.y / np.linalg.norm(target) / np.linalg.norm(found.y, axis=0)
        np.testing.assert_allclose(np.degrees(np.arccos(cosines)), degrees, rtol=2e-3)


class TestBadInput:
    mistakes = (
        (lambda: max_margin([[1.0], [1.0]], [1, -1]), "2 examples", "intercept"),
        (lambda: max_margin([[1.0], [1.0]], [1, -1], "l2"), "2 examples", "intercept"),
        (lambda: max_margin([[-1.0]], [1], nonnegative=True), "beta >= 0", "separable"),
        (lambda: max_margin([[0.0]], [1]), "1 examples", "separable"),
        (lambda: max_margin([[1.0], [2.0]], [0, 1]), "0.0", "2 * y - 1"),
        (lambda: max_margin([[1.0], [2.0]], [1, math.nan]), "nan", "-1 or +1"),
        (lambda: max_margin([[math.inf]], [1]), "infinity", "drop"),
        (lambda: max_margin([1.0, 2.0], [1, 1]), "(2,)", "(n, d)"),
        (lambda: max_margin([[1.0]], [1, 1]), "(2,)", "(n,)"),
        (lambda: max_margin([[1.0]], [1], "linf"), "'linf'", "'l1' or 'l2'"),
        (lambda: separable(0, 3), "0", ">= 1"),
        (lambda: separable(5, 3, gap=0.0), "0.0", "> 0"),
        (lambda: banded(noise=-0.1), "-0.1", ">= 0"),
        (lambda: banded([3.0, 1.0]), "[3.0, 1.0]", "sort"),
    )

    @pytest.mark.parametrize(("call", "value", "remedy"), mistakes, ids=map(str, itertools.count()))
    def test_names_the_value_and_the_remedy(self, call, value, remedy):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (the message is read below)
            call()
        assert value in str(caught.value)
        assert remedy in str(caught.value)


class TestExamples:
    def test_separable_data_have_the_gap_they_were_asked_for(self):
        X, y = separable(200, 6, gap=0.7, seed=3)
        assert 1 / np.linalg.norm(max_margin(X, y, "l2")) >= 0.7 - 1e-9
        assert set(y) == {-1.0, 1.0}

    def test_bands_have_their_strengths_and_noise(self):
        X, y = banded(n=4000, noise=0.3, seed=1)
        signed = y[:, None] * X
        mu = np.repeat([1.0, 2.0, 3.0], 4)
        np.testing.assert_allclose(signed.mean(axis=0), mu, rtol=0.02)
        np.testing.assert_allclose(signed.std(axis=0) / mu, 0.3, rtol=0.05)
        assert y.sum() == 0

    def test_a_seed_fixes_the_draw(self):
        for make in (lambda seed: separable(5, 2, seed=seed), lambda seed: banded(seed=seed)):
            np.testing.assert_array_equal(make(1)[0], make(1)[0])
            assert (make(1)[0] != make(2)[0]).any()
