"""Chapter 11's experiments: the corruptions, the choice of radii, and what a row of the comparison holds."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import ndimage

from samkit import data, results
from samkit.experiments import comparison
from samkit.experiments.comparison import CORRUPTIONS, METHODS, choose, corrupt, sub_grids, tuning
from samkit.training import Config, run

SMALL = {"train_size": 250, "epochs": 10, "label_noise": 0.3}


@pytest.fixture(scope="module")
def pictures():
    return data.load("mnist_images").x_test[:40]


def stored(rows, config, seeds=(0,)):
    return results.Stored("made up", "", config, list(seeds), rows, {})


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corruption_of_strength_zero_changes_nothing(pictures, kind):
    torch.testing.assert_close(corrupt(pictures, kind, 0.0), pictures)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_stronger_corruptions_change_more_and_the_seed_fixes_them(pictures, kind):
    moved = [float((corrupt(pictures, kind, s) - pictures).norm()) for s in CORRUPTIONS[kind]]
    assert moved == sorted(moved)
    assert moved[0] > 1
    strongest = CORRUPTIONS[kind][-1]
    assert torch.equal(corrupt(pictures, kind, strongest, 3), corrupt(pictures, kind, strongest, 3))


def test_the_blur_is_a_gaussian_filter(pictures):
    expected = ndimage.gaussian_filter(pictures.numpy(), sigma=(0, 0, 1.5, 1.5), mode="constant")
    np.testing.assert_allclose(corrupt(pictures, "blur", 1.5).numpy(), expected, atol=1e-3)


def test_a_shift_moves_each_image_one_way_and_uses_all_four(pictures):
    inner = torch.zeros(64, 1, 28, 28)
    inner[:, :, 10, 12] = 1.0
    shifted = corrupt(inner, "shift", 3.0)
    places = {tuple(place) for place in shifted.nonzero()[:, 2:].tolist()}
    assert places == {(7, 12), (13, 12), (10, 9), (10, 15)}
    assert float(shifted.sum()) == 64.0


def test_noise_has_the_standard_deviation_it_is_given_and_stays_between_0_and_1():
    grey = torch.full((200, 1, 28, 28), 0.5)
    noise = corrupt(grey, "noise", 0.1)
    assert float((noise - 0.5).std()) == pytest.approx(0.1, rel=0.02)
    strong = corrupt(grey, "noise", 2.0)
    assert 0 <= float(strong.min()) <= float(strong.max()) <= 1


def test_full_loss_of_contrast_is_grey(pictures):
    assert torch.equal(corrupt(pictures, "contrast", 1.0), torch.full_like(pictures, 0.5))


@pytest.mark.parametrize(("kind", "strength", "message"), [("fog", 1.0, "'fog'"), ("blur", -1.0, "-1.0")])
def test_an_unknown_corruption_and_a_negative_strength_are_refused(pictures, kind, strength, message):
    with pytest.raises(ValueError, match=message):
        corrupt(pictures, kind, strength)


def test_tuning_gives_one_validation_accuracy_for_each_radius():
    row = tuning(3, radii={"SAM": [0.0, 0.2], "XSAM": [0.2]}, settings=SMALL)
    assert {name: len(values) for name, values in row.items()} == {"SAM": 2, "XSAM": 1}
    tenth_of_a_point = [value * 50 / 100 for values in row.values() for value in values]
    assert all(share == pytest.approx(round(share)) for share in tenth_of_a_point), "50 validation examples"
    assert row == tuning(3, radii={"SAM": [0.0, 0.2], "XSAM": [0.2]}, settings=SMALL)


def test_choosing_takes_the_best_mean():
    rows = [{"SAM": [1.0, 5.0, 3.0]}, {"SAM": [9.0, 6.0, 3.0]}]
    assert choose(stored(rows, {"radii": {"SAM": [0.1, 0.2, 0.3]}}, (0, 1))) == {"SAM": 0.2}


@pytest.fixture(scope="module")
def row():
    grid = {"radii": {name: [0.1, 0.2] for name in METHODS}}
    best_first = {name: [2.0, 1.0] for name in METHODS} | {"XSAM": [1.0, 2.0]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "load", lambda name: stored([best_first], grid))
        return comparison.compare(5, tuned="made up", settings=SMALL, sweep=[0.1, 0.2])


def test_the_sweep_meets_the_chosen_radii(row):
    assert row["SAM sweep"][0] == row["SAM"]
    assert row["XSAM sweep"][1] == row["XSAM"]
    assert row["SAM sweep eigenvalue"][0] == pytest.approx(row["SAM eigenvalues"][0], rel=1e-2)
    assert row["SAM sweep"] != row["XSAM sweep"]
    assert row["XSAM sweep alpha"][1] == row["XSAM alpha"]


def test_both_conventions_for_more_steps_are_run(row):
    assert row["SAM, k = 3, rho/k"] == row["SAM, 3 steps"], "0.1 in all, as chosen"
    assert row["averaged SAM, k = 3, rho/k"] == row["averaged SAM, 3 steps"]
    assert row["SAM, k = 2, rho each"] != row["SAM, k = 2, rho/k"]


def test_the_cost_is_counted_for_each_method(row):
    sgd = row["SGD gradients"]
    assert sgd == 10 * 2
    for name, gradients in {"SAM": 2, "ASAM": 2, "SAM, 3 steps": 4, "Lookbehind-SAM, 3 steps": 4}.items():
        assert row[f"{name} gradients"] == gradients * sgd
    assert row["XSAM gradients"] == 2 * sgd + 7 * 10
    assert row["XSAM, 3 steps gradients"] == 4 * sgd + 7 * 10


def test_eigenvalues_come_in_order_and_alpha_within_its_range(row):
    for name in ("SGD", "SAM", "XSAM"):
        values = row[f"{name} eigenvalues"]
        assert len(values) == 5
        assert list(values) == sorted(values, reverse=True)
        assert values[-1] > 0
    assert 0 <= row["XSAM alpha"] <= 2


def test_the_control_for_lookbehind_has_its_radius_and_another_learning_rate(monkeypatch):
    grid = {"radii": {"SAM": [0.1], "Lookbehind-SAM, 3 steps": [0.3]}}
    monkeypatch.setattr(results, "load", lambda name: stored([{name: [1.0] for name in grid["radii"]}], grid))
    once, faster = (comparison.faster(5, tuned="", settings=SMALL, factor=f) for f in (1.0, 1.5))
    config = Config(data_seed=5, **SMALL)
    plain = run(dataclasses.replace(config, rho=0.1, optimizer="sam"), 5).final("test_accuracy")
    average = dataclasses.replace(config, rho=0.3, optimizer="averaged-sam", ascent_steps=3)
    assert once == {"SAM": 100 * plain, "averaged SAM, 3 steps": 100 * run(average, 5).final("test_accuracy")}
    assert faster != once


def test_a_coarser_grid_takes_the_radius_that_it_would_have_chosen():
    radii = [0.1, 0.2, 0.3]
    tuned = stored(
        [{"SAM": [1.0, 3.0, 2.0], "XSAM": [3.0, 2.0, 1.0]}], {"radii": {"SAM": radii, "XSAM": radii}}
    )
    tested = stored(
        [
            {"SAM sweep": [50.0, 60.0, 55.0], "XSAM sweep": [61.0, 52.0, 40.0]},
            {"SAM sweep": [51.0, 61.0, 56.0], "XSAM sweep": [64.0, 52.0, 40.0]},
        ],
        {"sweep": radii},
        (0, 1),
    )
    found = {grid: estimate.value for grid, estimate in sub_grids(tuned, tested, 2).items()}
    assert found == {
        (0.1, 0.2): (61 + 64) / 2 - 60.5,
        (0.1, 0.3): (61 + 64) / 2 - 55.5,
        (0.2, 0.3): 52 - 60.5,
    }
    assert list(sub_grids(tuned, tested, 3)) == [(0.1, 0.2, 0.3)]


def test_the_images_are_tested_clean_and_corrupted(monkeypatch):
    grid = {"radii": {"SAM": [0.05], "XSAM": [0.05]}}
    monkeypatch.setattr(results, "load", lambda name: stored([{"SAM": [1.0], "XSAM": [1.0]}], grid))
    settings = comparison.IMAGE_CONFIG | {"train_size": 200}
    row = comparison.images(0, tuned="made up", settings=settings, methods=["SAM", "XSAM"])
    assert row["SGD, twice the epochs gradients"] == row["SAM gradients"] == 2 * row["SGD gradients"]
    for name in ("SGD", "SGD, twice the epochs", "SAM", "XSAM"):
        assert row[name] > 20
        for kind in CORRUPTIONS:
            assert len(row[f"{name} {kind}"]) == 4
            assert row[f"{name} {kind}"][-1] <= row[name] + 2


@pytest.mark.parametrize("where", ["noisy", "clean", "images"])
def test_the_best_radii_lie_inside_their_grids(where):
    tuned = results.load(f"comparison_tuning_{where}")
    for name, rho in choose(tuned).items():
        grid = tuned.config["radii"][name]
        assert grid[0] < rho < grid[-1], name


def test_the_stored_sweep_holds_the_stored_choice():
    tested = results.load("comparison_noisy")
    chosen = choose(results.load(tested.config["tuned"]))
    for name in ("SAM", "XSAM"):
        place = tested.config["sweep"].index(chosen[name])
        np.testing.assert_array_equal(tested.column(f"{name} sweep")[:, place], tested.column(name))


def test_sgd_is_that_of_chapter_3_on_the_same_seeds():
    tested, earlier = results.load("comparison_noisy"), results.load("sam_noisy")
    assert tested.seeds == earlier.seeds[: len(tested.seeds)]
    np.testing.assert_array_equal(tested.column("SGD"), earlier.column("SGD")[: len(tested.seeds)])
