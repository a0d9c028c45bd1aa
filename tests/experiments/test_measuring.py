"""Chapter 2's experiments: one vector of weights, what rescaling must and must not change, and the edge."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from samkit import results, sharpness
from samkit.claims import Estimate, claim
from samkit.experiments import measuring
from samkit.experiments.measuring import EDGE, STORED, TINY, TINY_RELU, FlatNetwork
from samkit.training import dataset, evaluate, loss_function, run

SMALL = {"width": 4, "depth": 1, "activation": "tanh"}
SHORT = replace(EDGE, train_size=40, model_options=SMALL, epochs=10, learning_rate=0.1)


@pytest.fixture(scope="module")
def trained():
    return run(TINY, 0)


@pytest.fixture(scope="module")
def net(trained):
    return FlatNetwork(trained)


@pytest.fixture(scope="module")
def rows():
    return measuring.rescaling(0, scales=[0.5, 1, 4])


class TestFlatNetwork:
    def test_is_the_network_it_was_made_of(self, trained, net):
        problem = dataset(trained.config)
        expected, _ = evaluate(trained.model, problem.x.double(), problem.y)
        assert float(net.loss(net.theta).detach()) == pytest.approx(expected, rel=1e-12)
        assert net.outputs(net.theta).shape == (500, 10)
        assert sum(net.sizes) == net.theta.numel() == 418

    def test_takes_the_loss_of_its_run(self):
        result = run(SHORT, 0)
        net = FlatNetwork(result)
        assert float(net.loss(net.theta).detach()) == pytest.approx(result.final("train_loss"), rel=1e-5)

    def test_has_the_gradient_that_finite_differences_give(self, net):
        v = torch.randn(418, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        h = 1e-5
        slope = (net.loss(net.theta + h * v) - net.loss(net.theta - h * v)) / (2 * h)
        assert float(net.gradient(net.theta) @ v) == pytest.approx(float(slope.detach()), rel=1e-6)

    def test_has_a_symmetric_hessian_with_the_products_of_samkit(self, net):
        H = net.hessian(net.theta)
        torch.testing.assert_close(H, H.T)
        v = torch.ones(418, dtype=torch.float64)
        (product,) = sharpness.hvp(lambda: net.loss(net.theta), [net.theta], [v])
        torch.testing.assert_close(H @ v, product)


class TestOutliers:
    def test_are_counted_up_to_the_widest_gap(self):
        row = measuring.outliers(0, 3, k=6)
        values = row["eigenvalues"]
        assert (np.diff(values) < 0).all()
        np.testing.assert_allclose(row["gaps"], values[:-1] / values[1:])
        assert row["gaps"][row["count"] - 1] == row["gaps"].max()
        assert row["accuracy"] > 95

    def test_of_ten_classes_are_nine(self):
        assert measuring.outliers(0, 10)["count"] == 9

    def test_leave_the_callers_random_state_alone(self):
        state = torch.get_rng_state()
        measuring.outliers(0, 2, k=2)
        assert torch.equal(torch.get_rng_state(), state)


class TestBall:
    def test_predictions_hold_in_small_balls_of_a_smooth_network(self):
        row = measuring.ball(0, rhos=[1e-5, 1e-2], sigmas=[1e-3])
        assert row["slope"][0] == pytest.approx(1, abs=1e-3)
        assert row["quadratic"] == pytest.approx([1, 1], abs=1e-2)
        assert row["half_trace"] == pytest.approx([1], abs=0.1)  # five standard errors of the average

    def test_the_bound_is_above_the_quadratic_model_which_is_above_the_slope(self):
        row = {
            key: np.array(values) for key, values in measuring.ball(1, rhos=[0.03, 0.3], sigmas=[]).items()
        }
        assert (row["bound"] >= row["quadratic"]).all()
        assert (row["quadratic"] > row["slope"]).all()

    def test_training_puts_a_relu_network_into_kinks_that_its_trace_does_not_see(self):
        early = measuring.ball(0, rhos=[], sigmas=[1e-5], activation="relu", epochs=20)["half_trace"][0]
        late = measuring.ball(0, rhos=[], sigmas=[1e-5], activation="relu", epochs=100)["half_trace"][0]
        assert late < 0.3 < 0.7 < early < 1.3


class TestRescaling:
    def test_by_one_changes_nothing(self, rows):
        assert rows["function_change"][1] == 0

    def test_leaves_the_function_and_the_adaptive_measures_alone(self, rows):
        assert max(rows["function_change"]) < 1e-14
        for key, values in rows.items():
            if key.startswith("adaptive_"):
                np.testing.assert_allclose(values, values[1], rtol=1e-8, err_msg=key)

    def test_changes_the_hessian_as_the_chain_rule_says(self, rows):
        net = FlatNetwork(run(TINY_RELU, 0))
        H = net.hessian(net.theta)
        for k, c in enumerate((0.5, 1, 4)):
            scale = torch.cat([torch.full((328,), c), torch.full((80,), 1 / c), torch.ones(10)]).double()
            expected = H / (scale[:, None] * scale)
            assert rows["trace"][k] == pytest.approx(float(expected.trace()), rel=1e-8)
            top = float(torch.linalg.eigvalsh(expected)[-1])
            assert rows["top_eigenvalue"][k] == pytest.approx(top, rel=1e-6)


class TestEdge:
    def test_runs_with_different_steps_last_equally_long(self):
        for eta in (0.05, 0.1, 0.15):
            config = measuring.edge_config(eta, seed=3, time=30)
            assert config.epochs * eta == pytest.approx(30, abs=eta)
            assert (config.data_seed, config.momentum, config.weight_decay) == (3, 0, 0)
            assert config.batch_size is None

    def test_the_path_starts_at_the_top_eigenvalue_of_the_fresh_network(self):
        fresh = {}

        def keep(step, model):
            if step == 0:
                fresh["model"] = [p.detach().clone().requires_grad_() for p in model.parameters()]

        result = run(SHORT, 0, callback=keep)
        path = measuring.gradient_descent(SHORT, 0, every=5)
        problem, criterion = dataset(SHORT), loss_function(SHORT)
        names = [name for name, _ in result.model.named_parameters()]

        def loss():
            weights = dict(zip(names, fresh["model"], strict=True))
            return criterion(torch.func.functional_call(result.model, weights, problem.x), problem.y)

        top = sharpness.top_eigenvalues(loss, fresh["model"]).value[0]
        assert path["top_eigenvalue"][0] == pytest.approx(top, rel=1e-2)
        assert path["loss"][0] == pytest.approx(float(loss().detach()), rel=1e-5)
        assert path["loss"][-1] == pytest.approx(result.final("train_loss"), rel=1e-4)
        np.testing.assert_allclose(path["time"], [0, 0.5, 1])
        assert float(path["edge"]) == 20

    def test_watching_does_not_change_the_run(self):
        often = measuring.gradient_descent(SHORT, 0, every=1)
        seldom = measuring.gradient_descent(SHORT, 0, every=5)
        np.testing.assert_allclose(often["loss"][::5], seldom["loss"], rtol=1e-6)

    def test_both_methods_start_from_the_same_place_and_the_unit_is_two_over_eta(self):
        row = measuring.edge_of_stability(0, learning_rates=[0.05, 0.1], time=5)
        assert row["start"][1] == pytest.approx(2 * row["start"][0], rel=1e-2)
        assert {key: len(values) for key, values in row.items()} == dict.fromkeys(row, 2)

    def test_the_stored_runs_are_those_of_the_rule_and_give_the_verdict_of_the_ledger(self):
        experiment, stored = STORED["edge_of_stability"], results.load("edge_of_stability")
        assert stored.config == experiment.config == {"learning_rates": [0.05, 0.1, 0.15]}
        assert stored.seeds == list(range(8))
        gd, sam = stored.column("gd"), stored.column("sam")
        ends, gaps = (measuring.hull([Estimate.from_samples(c) for c in x.T]) for x in (gd, gd - sam))
        claim("G3", start=stored.column("start").max(), gradient_descent=ends, sam_below=gaps)
