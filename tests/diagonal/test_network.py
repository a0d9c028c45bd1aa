"""Networks trained by the real samkit.optim.SAM, against the flows and against steps written out by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from samkit.diagonal import (
    DiagonalNetwork,
    LinearNetwork,
    banded,
    critical_scale,
    flow,
    max_margin,
)
from samkit.optim import SAM

MU3 = [1.0, 2.0, 3.0]


def train(network, X, y, steps, *, rho, norm="l2", learning_rate=0.01):
    """Real SAM steps on the mean logistic loss; yields the loss before each."""
    X, y = (torch.as_tensor(value, dtype=torch.float64) for value in (X, y))
    optimizer = SAM(network.parameters(), torch.optim.SGD, rho=rho, norm=norm, lr=learning_rate)

    def closure():
        optimizer.zero_grad()
        loss = softplus(-y * network(X)).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        yield optimizer.step(closure).item()


def diagonal(init, depth=2, d=3):
    return DiagonalNetwork(d, depth, init, dtype=torch.float64)


def by_hand(mu, alpha, rho, steps, learning_rate=0.01, normalised=True):
    """l_2-SAM on one example and two equal layers, in plain floats: yields loss and weights after k steps."""
    w = [alpha] * len(mu)
    for _ in range(steps + 1):
        z = sum(m * x * x for m, x in zip(mu, w, strict=True))
        yield (math.log1p(math.exp(-z)) if z < 700 else 0.0), w
        slope = 1 / (1 + math.exp(min(z, 700)))
        scale = slope
        if normalised:
            scale = 1 / math.sqrt(2 * sum((m * x) ** 2 for m, x in zip(mu, w, strict=True)))
        up = [x - rho * scale * m * x for m, x in zip(mu, w, strict=True)]
        slope = 1 / (1 + math.exp(sum(m * x * x for m, x in zip(mu, up, strict=True))))
        w = [x + learning_rate * slope * m * x_up for m, x, x_up in zip(mu, w, up, strict=True)]


def last(run):
    *_, end = run
    return end


def first_below(run, loss):
    return next((step, w) for step, (value, w) in enumerate(run) if value <= loss)


def shares(mu, w):
    share = np.array(mu) * np.square(w)
    return share / share.sum()


class TestDiagonalNetwork:
    def test_multiplies_its_layers(self):
        network = diagonal(([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [-1.0, 0.5, 0.0]), depth=3)
        assert network.beta.tolist() == [-4.0, 5.0, 0.0]
        assert network(torch.ones(2, 3, dtype=torch.float64)).tolist() == [1.0, 1.0]
        assert len(list(network.parameters())) == 3

    def test_starts_from_the_float64_numbers_it_was_given(self):
        assert diagonal(0.45).layers[0].tolist() == [0.45] * 3
        assert DiagonalNetwork(3, 2, 0.45).layers[0].dtype == torch.get_default_dtype()

    @pytest.mark.parametrize("rho", [0.0, 0.3])
    def test_sam_takes_the_steps_written_out_by_hand(self, rho):
        network = diagonal(0.5)
        losses = list(train(network, [MU3], [1.0], 200, rho=rho))
        expected = list(by_hand(MU3, 0.5, rho, 200))
        np.testing.assert_allclose(losses, [loss for loss, _ in expected[:-1]], rtol=1e-12)
        for layer in network.layers:
            np.testing.assert_allclose(layer.detach(), expected[-1][1], rtol=1e-12)


class TestRealStepsFollowTheFlow:
    @pytest.mark.parametrize(
        ("init", "rho", "norm", "depth", "steps"),
        [
            (0.05 * 0.5, 0.05, "l2", 2, 8000),
            (([0.3, 0.1, 0.2], [0.2, 0.3, 0.1]), 0.2, "l2", 2, 4000),
            (0.3, 0.2, "l2", 3, 4000),
            ([0.3, 0.15, 0.25], 0.2, "linf", 2, 2000),
            ([0.45, 0.35, 0.4], 0.2, "linf", 3, 2000),
            (0.3, 0.0, "l2", 2, 2000),
        ],
    )
    def test_within_one_per_cent_of_the_path(self, init, rho, norm, depth, steps):
        network = diagonal(init, depth)
        path = [network.beta.detach().numpy().copy()]
        for step, loss in enumerate(
            train(network, [MU3], [1.0], steps, rho=rho, norm=norm, learning_rate=2e-3)
        ):
            if step % 20 == 19:
                path.append(network.beta.detach().numpy().copy())
            if loss < 0.05:
                break
        method = f"{norm}-sam"
        end = flow(MU3, init, rho, method=method, depth=depth)
        reach = end.s_end * (1 - 1e-6) if np.isinf(end.beta).any() else 3 * end.s_end
        curve = flow(MU3, init, rho, method=method, depth=depth, s=np.linspace(0, reach, 40_001)).beta
        away = [np.linalg.norm(curve - point, axis=1).min() / np.linalg.norm(point) for point in path]
        assert max(away) < 0.01
        assert np.linalg.norm(path[-1]) > 3 * np.linalg.norm(path[0])

    def test_a_start_below_the_critical_scale_does_not_train(self):
        c = critical_scale(MU3)
        for ratio, trains in ((0.97 * c, False), (1.03 * c, True)):
            network = diagonal(0.05 * ratio)
            loss = list(train(network, [MU3], [1.0], 3000, rho=0.05))[-1]
            assert (loss < 0.1) == trains

    @pytest.mark.parametrize("learning_rate", [0.02, 0.005])
    def test_large_steps_lower_the_critical_scale_a_little(self, learning_rate):
        low, high = 0.40, 0.45
        while high - low > 1e-6:
            middle = (low + high) / 2
            for loss, w in by_hand(MU3, middle, 1.0, 200_000, learning_rate):
                n = math.sqrt(2 * sum((m * x) ** 2 for m, x in zip(MU3, w, strict=True)))
                if n < 0.9 or loss < 0.1:
                    break
            low, high = (low, middle) if loss < 0.1 else (middle, high)
        assert (critical_scale(MU3) - high) / learning_rate == pytest.approx(0.028, abs=0.002)


class TestReferenceNumbersOfRealSteps:
    @pytest.mark.parametrize(
        ("alpha", "rho", "beta", "loss"),
        [
            (0.45, 1.0, (15.2835, 0.2073, 0.0), 1.5e-7),
            (0.5, 1.0, (3.7481, 5.9678, 1.0079), 7.5e-9),
            (0.8, 1.0, (1.7673, 3.2508, 3.9850), 1.6e-9),
            (0.45, 0.0, (0.493, 1.199, 2.916), None),
        ],
    )
    def test_after_200_000_steps_minor_features_still_carry_the_prediction(self, alpha, rho, beta, loss):
        value, w = last(by_hand(MU3, alpha, rho, 200_000))
        np.testing.assert_allclose(np.square(w), beta, atol=6e-5 if rho else 6e-4)
        if loss is not None:
            assert value == pytest.approx(loss, rel=0.05)

    @pytest.mark.parametrize(
        ("rho", "ratio", "handovers"),
        [(0.05, 0.5, ((1, 293, 0.686), (2, 1408, 0.0049))), (0.1, 0.55, ((1, 55, 0.682), (2, 380, 0.281)))],
    )
    def test_minor_then_middle_then_major_feature_within_reach(self, rho, ratio, handovers):
        changes, leader = [], 0
        for step, (loss, w) in enumerate(by_hand(MU3, ratio * rho, rho, 2000)):
            if step and w.index(max(w)) != leader:
                leader = w.index(max(w))
                changes.append((leader, step, loss))
        assert [change[:2] for change in changes] == [handover[:2] for handover in handovers]
        np.testing.assert_allclose([c[2] for c in changes], [h[2] for h in handovers], rtol=0.02)

    @pytest.mark.parametrize(
        ("ratio", "sam", "gd"),
        [(0.45, (717, 1163), (60, 227)), (0.49, (316, 578), (54, 222)), (0.8, (26, 226), (12, 187))],
    )
    def test_a_middle_sized_start_waits_on_a_plateau(self, ratio, sam, gd):
        for rho, expected in ((0.2, sam), (0.0, gd)):
            steps = tuple(first_below(by_hand(MU3, 0.2 * ratio, rho, 2000), loss)[0] for loss in (0.6, 0.1))
            assert steps == expected

    @pytest.mark.parametrize("mu_1", [1.0, 0.5, 0.25])
    def test_the_plateau_grows_by_two_over_mu_1_for_each_factor_e_nearer_to_the_critical_scale(self, mu_1):
        mu, rho, learning_rate = [mu_1 * m for m in MU3], 0.2 / math.sqrt(mu_1), 0.01 / mu_1

        def time_to_leave(ratio):
            for step, (loss, w) in enumerate(by_hand(mu, ratio * rho, rho, 100_000, learning_rate)):
                if loss < 0.474:  # z = 0.5
                    return step * learning_rate
                if math.sqrt(2) * math.hypot(*(m * x for m, x in zip(mu, w, strict=True))) < 0.5 * rho * mu_1:
                    break
            return math.inf  # collapsed

        low, high = 0.42, 0.44  # real steps have their own critical scale, a little below the flow's
        while high - low > 1e-11:
            middle = (low + high) / 2
            low, high = (middle, high) if time_to_leave(middle) == math.inf else (low, middle)
        away = 10.0 ** -np.arange(4, 8)
        times = [time_to_leave(high + distance) for distance in away]
        slope = np.polyfit(np.log(1 / away), times, 1)[0]
        assert slope == pytest.approx(2 / mu_1, rel=5e-3)

    def test_the_loss_rises_at_first_below_a_known_ratio(self):
        threshold = sum(m**3 for m in MU3) / (math.sqrt(2) * sum(m**2 for m in MU3) ** 1.5)
        assert threshold == pytest.approx(0.485954, abs=5e-7)
        for ratio in (threshold - 1e-3, threshold + 1e-3):
            (before, _), (after, _) = by_hand(MU3, 1e-3 * ratio, 1e-3, 1, learning_rate=1e-5)
            assert (after < before) == (ratio > threshold)

    def test_without_normalisation_the_radius_alone_decides(self):
        for radius, leaders in ((0.39, [2]), (0.41, [1, 2])):
            for alpha in (1e-3, 1e-2):
                order = [w.index(max(w)) for _, w in by_hand(MU3, alpha, radius, 30_000, normalised=False)][
                    1:
                ]
                assert [key for key, _ in itertools.groupby(order)] == leaders
        # Small starts collapse exactly if the radius exceeds 2/mu_1.
        for radius, grows in ((1.9, True), (2.1, False)):
            _, w = last(by_hand(MU3, 1e-3, radius, 3000, normalised=False))
            assert (max(w) > 1e-3) == grows

    @pytest.mark.parametrize(
        ("rho", "normalised", "expected"),
        [
            (0.1, True, (0.060, 0.577, 0.363)),
            (0.1, False, (0.008, 0.109, 0.882)),
            (0.762, False, (0.333, 0.664, 0.003)),
            (0.0, True, (0.007, 0.093, 0.900)),
        ],
    )
    def test_with_a_matched_radius_the_unnormalised_effect_is_stronger(self, rho, normalised, expected):
        _, w = first_below(by_hand(MU3, 0.05, rho, 5000, normalised=normalised), 0.1)
        np.testing.assert_allclose(shares(MU3, w), expected, atol=1.5e-3)

    def test_the_matched_radius_gives_the_same_first_perturbation(self):
        z = sum(m * 0.05**2 for m in MU3)
        norm = math.sqrt(2 * sum((m * 0.05) ** 2 for m in MU3)) / (1 + math.exp(z))
        assert 0.1 / norm == pytest.approx(0.762, abs=5e-4)


class TestManyExamples:
    def test_linf_sam_can_kill_a_feature_that_is_needed(self):
        X, y = [[3.0, -1.0]] * 4 + [[-0.1, 1.0]], [1.0] * 5
        losses = {}
        for rho in (0.1, 0.0):
            network = diagonal(0.2, d=2)
            losses[rho] = list(train(network, X, y, 6000, rho=rho, norm="linf"))[-1]
            if rho:
                assert network.beta[1].item() < 1e-4
        assert losses[0.1] == pytest.approx(0.161, abs=2e-3)
        assert losses[0.0] < 0.01

    def test_gradient_descent_keeps_the_feature_and_goes_on_down(self):
        # The same five rows; the four equal ones count as one of weight 0.8.
        a = b = 0.2
        for step in range(200_001):
            margins = 3 * a * a - b * b, b * b - 0.1 * a * a
            if step in (60_000, 200_000):
                loss = sum(
                    share * math.log1p(math.exp(-m)) for share, m in zip((0.8, 0.2), margins, strict=True)
                )
                assert loss == pytest.approx(2.46e-4 if step == 60_000 else 5.76e-5, rel=0.01)
            many, one = (share / (1 + math.exp(m)) for share, m in zip((0.8, 0.2), margins, strict=True))
            a, b = a + 0.01 * (3 * many - 0.1 * one) * a, b + 0.01 * (one - many) * b

    @pytest.mark.parametrize("alpha", [0.05, 0.13, 0.17])
    def test_a_dead_weight_chatters_within_one_step_of_zero(self, alpha):
        network = diagonal([alpha, 0.5], d=2)
        rho, learning_rate, mu = 0.2, 0.01, (2.0, 0.1)
        visited = []
        for _ in train(network, [mu], [1.0], 1200, rho=rho, norm="linf", learning_rate=learning_rate):
            visited.append(network.layers[0][0].item())
        reach = np.abs(visited[-200:]).max()
        assert min(visited[-200:]) < 0 < max(visited[-200:])
        assert reach == pytest.approx(learning_rate * mu[0] * rho / 2, rel=0.1)

    @pytest.mark.parametrize("seed", range(3))
    def test_column_means_predict_whether_banded_data_train(self, seed):
        X, y = banded(seed=seed)
        c = critical_scale(np.sort((y[:, None] * X).mean(axis=0)))
        assert c == pytest.approx(0.218, abs=0.004)
        for factor, trains in ((0.96, False), (1.04, True)):
            network = diagonal(0.1 * factor * c, d=12)
            losses = train(network, X, y, 3000, rho=0.1)
            assert (min(losses) < 0.3) == trains

    def test_the_bands_of_the_prediction_follow_the_initial_scale(self):
        X, y = banded(seed=0)
        c = critical_scale(np.sort((y[:, None] * X).mean(axis=0)))
        found = {}
        for name, rho, alpha in (("1.05 c", 0.1, 1.05 * c), ("1.2 c", 0.1, 1.2 * c), ("gd", 0.0, 1.05 * c)):
            network = diagonal(0.1 * alpha, d=12)
            next(step for step, loss in enumerate(train(network, X, y, 5000, rho=rho)) if loss <= 0.3)
            contribution = (y[:, None] * X).mean(axis=0) * network.beta.detach().numpy()
            found[name] = contribution.reshape(3, 4).sum(axis=1) / contribution.sum()
        np.testing.assert_allclose(found["1.05 c"], (0.563, 0.435, 0.002), atol=0.05)
        np.testing.assert_allclose(found["1.2 c"], (0.058, 0.445, 0.497), atol=0.05)
        np.testing.assert_allclose(found["gd"], (0.011, 0.131, 0.858), atol=0.02)

    def test_balanced_positive_layers_stay_so_and_approach_the_l1_max_margin(self):
        X, y = banded([1.0, 2.0], width=2, n=10, seed=0)
        best = max_margin(X, y, nonnegative=True).sum()
        network = diagonal(0.1, d=4)
        for _ in train(network, X, y, 3000, rho=0.05, learning_rate=0.1):
            assert (network.beta >= 0).all()
        beta = network.beta.detach().numpy()
        assert (y * (X @ beta)).min() * best / beta.sum() > 0.85


class TestLinearNetwork:
    def test_one_output_has_no_dimension_and_several_have_one(self):
        one, several = (LinearNetwork(3, 4, k, init_scale=0.1) for k in (1, 2))
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        assert one(x).shape == (5,)
        torch.testing.assert_close(several(x), x @ several.first.T @ several.second.T)
        assert one.beta.shape == (3,)

    def test_a_seed_fixes_weights_of_the_asked_for_size(self):
        draw = [LinearNetwork(50, 60, 2, init_scale=0.3, seed=s).first for s in (0, 0, 1)]
        assert torch.equal(draw[0], draw[1])
        assert not torch.equal(draw[0], draw[2])
        assert draw[0].std().item() == pytest.approx(0.3, rel=0.05)

    def steps(self, rho, seed, loss_of, stop):
        """Real steps of a network with an output for each feature, from ||theta_0|| = 0.16."""
        network = LinearNetwork(3, 20, 3, init_scale=1.0, seed=seed, dtype=torch.float64)
        with torch.no_grad():
            norm = torch.cat([p.ravel() for p in network.parameters()]).norm()
            for p in network.parameters():
                p.mul_(0.16 / norm)
        rows = torch.diag(torch.tensor(MU3, dtype=torch.float64))
        optimizer = SAM(network.parameters(), torch.optim.SGD, rho=rho, lr=0.01)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(network(rows).diagonal())
            loss.backward()
            return loss

        start = [p.detach().numpy().copy() for p in network.parameters()]
        path, loss = [], math.inf
        while loss > stop:
            path.append(network.beta.diagonal().detach().numpy().copy())
            loss = optimizer.step(closure).item()
        return *start, np.array(path)

    def test_with_one_output_for_each_feature_its_modes_obey_the_closed_form(self):
        first, second, path = self.steps(0.1, 1, lambda z: softplus(-z.sum()), stop=0.2)
        p, q = (np.linalg.norm(first + sign * second.T, axis=0) / 2 for sign in (1, -1))
        curve = flow(MU3, (p + q, p - q), 0.1, s=np.linspace(0, 8, 40_001)).beta
        away = [np.linalg.norm(curve - point, axis=1).min() for point in path[::10]]
        assert max(away) < 0.01 * np.linalg.norm(path, axis=1).max()

    def test_several_outputs_lean_on_minor_features_under_sam_and_on_the_major_one_without(self):
        ends = {
            rho: np.mean(
                [self.steps(rho, seed, lambda z: softplus(-z).mean(), 0.6)[2][-1] for seed in range(4)],
                axis=0,
            )
            for rho in (0.1, 0.0)
        }
        assert ends[0.1].argmax() < 2
        assert ends[0.0].argmax() == 2
        assert ends[0.1][0] > 3 * ends[0.0][0]

    @pytest.mark.parametrize("rho", [0.0, 0.1])
    def test_a_single_output_leans_on_the_major_feature_either_way(self, rho):
        network = LinearNetwork(3, 20, init_scale=0.04, seed=0, dtype=torch.float64)
        losses = train(network, [MU3], [1.0], 20_000, rho=rho)
        next(loss for loss in losses if loss < 0.3)
        beta = network.beta.detach().numpy()
        assert beta.argmax() == 2


class TestBadInput:
    mistakes = (
        (lambda: DiagonalNetwork(0, 2, 1.0), ValueError, "0", ">= 1"),
        (lambda: DiagonalNetwork(3, 0, 1.0), ValueError, "0", ">= 1"),
        (lambda: DiagonalNetwork(3, 2, [1.0, 2.0]), ValueError, "(2,)", "3 coordinates"),
        (lambda: DiagonalNetwork(3, 2, [[1.0]]), ValueError, "batch", "one network"),
        (lambda: DiagonalNetwork(3, 2, (1.0,)), ValueError, "got 1", "2 layers"),
        (lambda: DiagonalNetwork(3.0, 2, 1.0), TypeError, "3.0", "integer"),
        (lambda: LinearNetwork(3, 0, init_scale=0.1), ValueError, "0", ">= 1"),
        (lambda: LinearNetwork(3, 4, init_scale=-0.1), ValueError, "-0.1", ">= 0"),
        (lambda: LinearNetwork(3, 4, init_scale=0.1, seed=0.5), TypeError, "0.5", "integer"),
    )

    @pytest.mark.parametrize(("call", "error", "value", "remedy"), mistakes, ids=map(str, itertools.count()))
    def test_names_the_value_and_the_remedy(self, call, error, value, remedy):
        with pytest.raises(error) as caught:
            call()
        assert value in str(caught.value)
        assert remedy in str(caught.value)
