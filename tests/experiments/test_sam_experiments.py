import numpy as np
import pytest
import torch

from samkit import data, landscapes, results, training
from samkit.experiments import sam
from samkit.optim import SAM
from samkit.training import Config

TINY = {
    "fraction": 0.3,
    "epochs": [20, 40],
    "weight_decays": [1e-3, 1e-2],
    "rhos": [0.1],
    "sam_weight_decays": [1e-3],
    "linf_rhos": [1e-3],
}


@pytest.fixture(scope="module")
def tuned():
    return sam.tuning(3, **TINY)


def test_validation_and_training_data_carry_the_same_share_of_wrong_labels():
    noisy = data.load("mnist1d", 3).with_label_noise(0.3, 3)
    split = noisy.with_validation(0.2, 3)
    truth = {tuple(x): y for x, y in zip(noisy.x.tolist(), noisy.y_clean.tolist(), strict=True)}
    for x, y in ((split.x, split.y), (split.x_validation, split.y_validation)):
        wrong = [truth[tuple(a)] != b for a, b in zip(x.tolist(), y.tolist(), strict=True)]
        assert np.mean(wrong) == pytest.approx(0.3, abs=0.05)


def test_the_wrong_labels_do_not_come_first_in_training():
    noisy = training.dataset(Config(label_noise=0.3, data_seed=4))
    order = torch.randperm(
        len(noisy.y), generator=torch.Generator().manual_seed(4)
    )  # as run(seed=4) draws it
    first = order[: len(order) // 4]
    assert float((noisy.y != noisy.y_clean)[first].double().mean()) == pytest.approx(0.3, abs=0.06)


def test_tuning_covers_the_grid_and_reports_percent(tuned):
    assert np.shape(tuned["sgd_validation"]) == (2, 2, sam.STOPS)
    assert np.shape(tuned["sam_test"]) == (1, 1, sam.STOPS)
    assert np.shape(tuned["linf_validation"]) == (1, sam.STOPS)
    assert np.shape(tuned["sam_eigenvalue"]) == (1,)
    everything = np.concatenate(
        [np.ravel(tuned[key]) for key in tuned if key.endswith(("test", "validation"))]
    )
    assert everything.min() >= 0
    assert 20 < everything.max() < 100


def test_sam_ends_at_a_smaller_top_eigenvalue_than_sgd(tuned):
    assert tuned["sam_eigenvalue"][0] < tuned["sgd_eigenvalue"]


def test_validation_accuracy_stays_below_what_wrong_labels_allow(tuned):
    assert np.max(tuned["sgd_validation"]) < 75


def test_choosing_takes_the_best_mean_validation_accuracy():
    sgd = np.zeros((2, 2, sam.STOPS))
    sgd[0, 1, 3] = 50  # epochs 20, weight decay 0.01, stopped after four tenths
    sgd[1, 0, 6] = 40  # the default settings peak after seven tenths
    sgd[:, :, -1] = [[10, 5], [20, 30]]
    row = {
        "sgd_validation": sgd.tolist(),
        "sam_validation": [[[0] * 9 + [1], [0] * 9 + [2], [3] + [0] * 9]],
        "linf_validation": [[0] * 9 + [2], [9] * 9 + [1]],
    }
    grid = {**TINY, "rhos": [0.1, 0.2, 0.3], "linf_rhos": [1e-3, 2e-3]}
    chosen = sam.choose(results.Stored("made up", "", grid, [0], [row], {}))
    assert chosen["SGD"] == {}
    assert chosen["SGD, stopped early"] == {"stop": 0.7}
    assert chosen["SGD, twice the epochs"] == {"epochs": 80}
    assert chosen["SGD, weight decay tuned"] == {"weight_decay": 1e-2}
    assert chosen["SGD, all controls"] == {"epochs": 20, "weight_decay": 1e-2, "stop": 0.4}
    assert chosen["SAM"] == {"rho": 0.2}
    assert chosen["SAM, all controls"] == {"rho": 0.3, "weight_decay": 1e-3, "stop": 0.1}
    assert chosen["linf-SAM"] == {"rho": 1e-3, "norm": "linf"}


def test_contestants_are_tested_where_they_stop():
    settings = {
        "SGD": {"epochs": 10},
        "stopped": {"epochs": 10, "stop": 0.3},
        "SAM": {"epochs": 10, "rho": 0.0},
    }
    row = sam.label_noise(3, fraction=0.3, settings=settings)
    assert len(row["SGD by epoch"]) == 10
    assert row["SGD"] == row["SGD by epoch"][-1]
    assert row["stopped"] == row["SGD by epoch"][2]
    assert row["SAM"] == row["SGD"]  # a radius of zero is SGD, bit for bit
    assert settings["stopped"] == {"epochs": 10, "stop": 0.3}


def test_without_contestants_there_is_nothing_to_report():
    assert sam.label_noise(3, fraction=0.3, settings={}) == {}


def test_the_stored_settings_are_the_ones_that_validation_chose():
    for labels in ("noisy", "clean"):
        chosen = sam.choose(results.load(f"sam_tuning_{labels}"))
        assert sam.STORED[f"sam_{labels}"].config["settings"] == chosen


def test_tuning_and_test_seeds_differ():
    for labels in ("noisy", "clean"):
        used, fresh = (set(sam.STORED[f"{name}_{labels}"].seeds) for name in ("sam_tuning", "sam"))
        assert len(used) >= 5
        assert len(fresh) >= 12
        assert not used & fresh


@pytest.mark.parametrize("labels", ["noisy", "clean"])
@pytest.mark.parametrize(
    ("name", "key", "grid"),
    [
        ("SAM", "rho", "rhos"),
        ("SAM, stopped early", "rho", "rhos"),
        ("SAM, all controls", "rho", "rhos"),
        ("SAM, all controls", "weight_decay", "sam_weight_decays"),
        ("linf-SAM", "rho", "linf_rhos"),
        ("SGD, weight decay tuned", "weight_decay", "weight_decays"),
        ("SGD, all controls", "weight_decay", "weight_decays"),
    ],
)
def test_no_chosen_value_lies_at_an_end_of_its_grid(labels, name, key, grid):
    tried = sam.STORED[f"sam_tuning_{labels}"].config[grid]
    chosen = sam.STORED[f"sam_{labels}"].config["settings"][name][key]
    assert chosen < max(tried)
    assert chosen > min(tried) or chosen == 0  # nothing lies below no weight decay


def test_paths_take_the_steps_of_the_optimizer():
    theta = torch.nn.Parameter(torch.tensor([-25.0, 30.0], dtype=torch.float64))
    optimizer = SAM([theta], rho=4.0, lr=20.0, momentum=0.9)

    def closure():
        optimizer.zero_grad()
        loss = landscapes.two_basins(theta)
        loss.backward()
        return loss

    way = sam.paths([-25.0, 30.0], 4.0, steps=10)
    for point in way[1:]:
        optimizer.step(closure)
        np.testing.assert_allclose(theta.detach().numpy(), point, rtol=1e-9)


def test_many_starts_at_once_are_the_same_paths():
    starts = np.array([[-25.0, 30.0], [10.0, 20.0]])
    together = sam.paths(starts, 4.0, steps=20)
    for i, start in enumerate(starts):
        np.testing.assert_allclose(together[:, i], sam.paths(start, 4.0, steps=20))


def test_a_path_that_starts_at_a_minimum_stays_there():
    way = sam.paths(landscapes.FLAT_MINIMUM, 0.0, steps=50)
    np.testing.assert_allclose(way[-1], landscapes.FLAT_MINIMUM, atol=1e-5)


def test_the_shares_add_up_and_gradient_descent_ends_in_minima_only():
    found = sam.shares(0.0, n=6)
    assert sum(found.values()) == pytest.approx(1)
    assert found["sharp"] > 0
    assert found["flat"] > 0
    assert found["saddle"] == found["elsewhere"] == 0


def test_the_worst_case_grows_with_the_radius_and_is_the_loss_at_radius_zero():
    plain, near, far = (sam.worst_case_map(rho) for rho in (0.0, 2.0, 6.0))
    points = torch.from_numpy(np.stack(np.meshgrid(plain.x, plain.y), axis=-1))
    np.testing.assert_allclose(plain.loss, landscapes.two_basins(points).numpy())
    assert (near.loss > plain.loss).all()
    assert (far.loss > near.loss).all()
