"""Chapter 1's experiments: equal loss, honest distances, and the arithmetic of the two arguments."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import distributions, nn
from torch.nn.functional import cross_entropy

from samkit import models, results, sharpness
from samkit.claims import Estimate, claim
from samkit.experiments import flat_minima
from samkit.experiments.flat_minima import PLAIN, divergence, train_to
from samkit.training import dataset, evaluate, run

MOONS = replace(PLAIN, dataset="two_moons", model_options={"width": 4})


@pytest.fixture
def barely_trained(monkeypatch):
    """The experiments on a tenth of MNIST-1D, each run stopped as soon as it has learnt anything."""
    for name in ("PLAIN", "POISON"):
        monkeypatch.setattr(flat_minima, name, replace(getattr(flat_minima, name), train_size=400))
    monkeypatch.setattr(flat_minima, "train_to", functools.partial(train_to, target=2.0))


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_training_ends_at_the_first_look_below_the_target():
    result = train_to(MOONS, 0, target=0.4, check_every=10)
    steps = result.gradient_evaluations
    assert steps % 10 == 0
    assert result.final("train_loss") < 0.4
    problem, seen = dataset(MOONS), []

    def look(step, model):
        if step % 10 == 0:
            seen.append(evaluate(model, problem.x, problem.y)[0])
        return step == steps

    run(MOONS, 0, callback=look)
    assert min(seen[1:-1]) >= 0.4 > seen[-1]


def test_a_target_out_of_reach_ends_with_the_remedy():
    with pytest.raises(RuntimeError, match=r"after 30 steps, not yet below 1e-09: raise max_steps"):
        train_to(MOONS, 0, target=1e-9, max_steps=30)


def test_a_run_that_diverges_ends_too():
    with pytest.raises(RuntimeError, match=r"after 50 steps, .* lower the learning rate"):
        train_to(replace(MOONS, learning_rate=1e30), 0)


def test_a_poisoned_start_knows_the_random_labels_and_not_the_true_ones(monkeypatch):
    monkeypatch.setattr(flat_minima, "POISON", replace(flat_minima.POISON, train_size=200))
    config = replace(flat_minima.POISON, data_seed=3)
    problem = dataset(config)
    model = flat_minima.poisoned_start(3, target=0.2)
    assert evaluate(model, problem.x, problem.y)[0] < 0.2
    assert evaluate(model, problem.x, problem.y_clean)[1] < 0.3


def test_ninety_percent_of_wrong_labels_are_random_labels():
    problem = dataset(flat_minima.POISON)
    assert float((problem.y == problem.y_clean).double().mean()) == pytest.approx(0.1, abs=1e-3)


def test_the_loss_to_measure_is_the_loss_that_was_trained():
    result = train_to(MOONS, 1, target=0.5)
    loss, params = flat_minima.training_loss(result)
    assert loss().item() == pytest.approx(result.final("train_loss"), rel=1e-5)
    assert [p.shape for p in params] == [p.shape for p in result.model.parameters()]


def test_the_sharpness_reported_is_the_top_eigenvalue_of_the_whole_hessian():
    result = train_to(MOONS, 0, target=0.4)
    problem, model = dataset(MOONS), result.model.double()
    names, theta = zip(*model.named_parameters(), strict=True)

    def loss(*weights):
        weights = dict(zip(names, weights, strict=True))
        return cross_entropy(torch.func.functional_call(model, weights, problem.x.double()), problem.y)

    blocks = torch.autograd.functional.hessian(loss, theta)
    rows = [
        torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for p, row in zip(theta, blocks, strict=True)
    ]
    expected = torch.linalg.eigvalsh(torch.cat(rows))[-1].item()
    model.float()
    assert flat_minima.measure(result)["sharpness"] == pytest.approx(expected, rel=1e-3)


def test_after_one_step_the_distance_is_the_step():
    config = replace(MOONS, batch_size=None)
    torch.manual_seed(5)
    fresh, problem = models.build("mlp", (2,), 2, width=4), dataset(config)
    cross_entropy(fresh(problem.x), problem.y).backward()
    gradient = torch.cat([p.grad.flatten() for p in fresh.parameters()])
    result = run(config, 5, callback=lambda step, model: step == 1)
    assert flat_minima.distance(result) == pytest.approx(0.1 * gradient.norm().item(), rel=1e-4)


def test_the_distance_is_from_the_fresh_network_wherever_the_run_began():
    elsewhere = models.build("mlp", (2,), 2, width=4)
    result = run(MOONS, 5, model=elsewhere, callback=lambda step, model: step == 1)
    torch.manual_seed(5)
    fresh = models.build("mlp", (2,), 2, width=4)
    assert flat_minima.distance(result) == pytest.approx(
        (flat(result.model) - flat(fresh)).norm().item(), rel=1e-5
    )


def test_measuring_the_distance_leaves_the_random_state_as_found():
    result = run(MOONS, 5, callback=lambda step, model: step == 1)
    before = torch.get_rng_state()
    flat_minima.distance(result)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("distance", "size", "sigma"), [(3.0, 9, 1.0), (25.6, 400, 0.08), (1.0, 7, 2.0)])
def test_the_divergence_is_the_smallest_over_the_width_of_the_prior(distance, size, sigma):
    def kl(prior_sigma):
        centre = torch.zeros(size, dtype=torch.float64)
        moved = torch.full((size,), distance / math.sqrt(size), dtype=torch.float64)
        return distributions.kl_divergence(
            distributions.Normal(moved, sigma), distributions.Normal(centre, prior_sigma)
        ).sum()

    widths = torch.linspace(sigma, 4 * sigma + distance, 4001, dtype=torch.float64).tolist()
    smallest = min(kl(width).item() for width in widths)
    assert divergence(distance, size, sigma) == pytest.approx(smallest, rel=1e-4)
    best = math.sqrt(sigma**2 + distance**2 / size)
    assert divergence(distance, size, sigma) == pytest.approx(kl(best).item(), rel=1e-12)


def test_a_coarser_weight_and_a_shorter_way_cost_less():
    assert divergence(2.0, 10, 0.2) < divergence(2.0, 10, 0.1) < divergence(3.0, 10, 0.1)
    assert divergence(0.0, 10, 0.1) == 0


def test_every_batch_size_is_trained_from_one_start_to_one_loss(barely_trained):
    row = flat_minima.batch_size(0, batch_sizes=[50, 200], learning_rates=[0.1, 0.2])
    assert set(row) == {"training_loss", "training_accuracy", "test_accuracy", "steps", "sharpness"}
    assert all(len(values) == 2 for values in row.values())
    assert max(row["training_loss"]) < 2.0
    assert 20 < min(row["test_accuracy"]) < max(row["test_accuracy"]) < 100


def test_a_batch_size_without_a_learning_rate_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        flat_minima.batch_size(0, batch_sizes=[100, 1000], learning_rates=[0.1])


def test_three_solutions_are_measured_alike_and_coded_as_the_formula_says(barely_trained):
    row = flat_minima.three_solutions(0, code_sigmas=[0.1], samples=2)
    assert all(len(values) == 3 for values in row.values())
    assert row["distance"][2] > max(row["distance"][:2]), "the poisoned network came the longer way"
    small = train_to(replace(PLAIN, data_seed=0, train_size=400), 0, target=2.0)
    loss, params = flat_minima.training_loss(small)
    shaken = sharpness.average(loss, params, 0.1, samples=2).loss
    nats = 15210 / 2 * math.log(1 + row["distance"][0] ** 2 / (15210 * 0.01)) + 400 * shaken
    assert row["bits"][0] == pytest.approx(nats / math.log(2), rel=1e-4)


def test_the_stored_solutions_fit_all_their_training_data_equally_well():
    for name in ("batch_size", "three_solutions"):
        stored = results.load(name)
        loss = stored.column("training_loss")
        assert stored.seeds == list(range(12))
        assert 0.009 < loss.min() < loss.max() < 0.01
        assert stored.column("training_accuracy").min() > 99.9


def test_both_stored_experiments_trained_the_same_pair():
    pair, three = results.load("batch_size"), results.load("three_solutions")
    assert pair.config["batch_sizes"][:2] == [25, 400]
    assert pair.config["learning_rates"][:2] == [PLAIN.learning_rate] * 2
    for key in ("test_accuracy", "sharpness"):
        np.testing.assert_allclose(pair.column(key)[:, :2], three.column(key)[:, :2], rtol=1e-3)


def test_the_controls_share_three_ratios_of_learning_rate_and_batch_size():
    config = results.load("batch_size").config
    ratios = np.divide(config["learning_rates"], config["batch_sizes"])
    values, counts = np.unique(ratios.round(6), return_counts=True)
    assert values.tolist() == [0.00025, 0.001, 0.004]
    assert counts.min() >= 2


def test_the_stored_rows_settle_g1_as_the_ledger_says():
    stored = results.load("batch_size")
    top, accuracy = stored.column("sharpness"), stored.column("test_accuracy")
    verdict = claim(
        "G1",
        training_loss=stored.column("training_loss")[:, :2].max(),
        sharpness_ratio=Estimate.from_samples(top[:, 1] / top[:, 0]),
        accuracy_gain=Estimate.paired_difference(accuracy[:, 0], accuracy[:, 1]),
    )
    assert verdict.status == "reproduced"
