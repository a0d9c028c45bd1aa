"""Chapter 10's experiments against samkit's optimizers, slow versions and what was derived."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch

from samkit import landscapes, results
from samkit.experiments import xsam
from samkit.optim import SAM, XSAM

STARTS = np.array([[-25.0, 30.0], [-10.0, 25.0], [5.0, 21.0], [30.0, 35.0]])


def with_an_optimizer(start: np.ndarray, make, steps: int) -> np.ndarray:
    theta = torch.nn.Parameter(torch.tensor(start))
    optimizer = make([theta])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = landscapes.two_basins(theta, outside="nan")
        if loss.requires_grad:
            loss.backward()
        return loss

    way = [theta.detach().clone()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="XSAM's search ended at alpha_max")
        for _ in range(steps):
            optimizer.step(closure)
            way.append(theta.detach().clone())
    return torch.stack(way).numpy()


@pytest.mark.parametrize("rho", [4.0, 8.0])
def test_walks_of_many_starts_are_those_of_the_optimizers(rho):
    base = {"lr": 10.0, "momentum": 0.9, "rho": rho}
    makers = {
        "SAM": lambda params: SAM(params, torch.optim.SGD, **base),
        "XSAM": lambda params: XSAM(params, torch.optim.SGD, search_every=1, **base),
    }
    for method, make in makers.items():
        together = xsam.walk(method, STARTS, rho, learning_rate=10.0, steps=40)
        for i, start in enumerate(STARTS):
            np.testing.assert_allclose(together[:, i], with_an_optimizer(start, make, 40), atol=1e-7)


def test_a_range_of_xsam_that_ends_at_one_and_another_radius_of_the_probes_are_the_optimizer_s():
    def make(params):
        options = {"search_every": 1, "rho": 6.0, "rho_max": 9.0, "alpha_max": 1.0, "alpha_samples": 11}
        return XSAM(params, torch.optim.SGD, lr=10.0, momentum=0.9, **options)

    together = xsam.walk("XSAM", STARTS, 6.0, rho_max=9.0, alpha_max=1.0, learning_rate=10.0, steps=30)
    for i, start in enumerate(STARTS):
        np.testing.assert_allclose(together[:, i], with_an_optimizer(start, make, 30), atol=1e-7)


def test_the_worst_direction_of_the_circle_beats_a_thousand_others():
    theta = torch.tensor(STARTS)
    v = xsam.worst_on_circle(theta, 6.0)
    torch.testing.assert_close(v.norm(dim=-1), torch.ones(len(theta), dtype=torch.float64))
    angles = torch.linspace(0, 2 * torch.pi, 1000, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()], dim=-1)
    others = landscapes.two_basins(theta[:, None] + 6.0 * circle).amax(dim=-1)
    found = landscapes.two_basins(theta + 6.0 * v)
    assert (found > others - 1e-4).all()


def test_the_exact_method_descends_the_worst_loss_of_the_circle():
    path = torch.tensor(
        xsam.walk("exact worst case", STARTS, 6.0, learning_rate=5.0, momentum=0.0, steps=200)
    )
    worst = [landscapes.two_basins(p + 6.0 * xsam.worst_on_circle(p, 6.0)) for p in path[[0, 20, 60, 200]]]
    assert all((after < before + 1e-4).all() for before, after in itertools.pairwise(worst))


def test_a_walk_ends_where_a_point_it_needs_leaves_the_domain():
    for method in ("SAM", "XSAM", "exact worst case"):
        path = xsam.walk(method, [[0.0, 3.0], [20.0, 30.0]], 8.0, steps=20)
        assert np.isnan(path[-1, 0]).all()
        assert np.isfinite(path[:, 1]).all()
        assert xsam.PLACES[xsam.places(path)[0]] == "outside"


def test_ends_are_told_apart():
    ends = np.array([landscapes.SHARP_MINIMUM, landscapes.FLAT_MINIMUM, landscapes.SADDLE, (np.nan, np.nan)])
    path = np.repeat(ends[None], 60, axis=0)
    assert [xsam.PLACES[i] for i in xsam.places(path)] == ["sharp", "flat", "hovering", "outside"]
    jumping = path[:, :1] + 10 * np.array([1.0, -1.0] * 30)[:, None, None]
    assert xsam.PLACES[xsam.places(jumping)[0]] == "sharp"


def test_xsam_stands_still_at_rho_from_the_saddle_and_sam_at_the_saddle():
    start = [[2.0, 21.5]]
    settings = {"rho": 6.0, "learning_rate": 5.0, "steps": 1500}
    away = {
        method: float(np.linalg.norm(xsam.walk(method, start, **settings)[-1, 0] - landscapes.SADDLE)) / 6
        for method in ("SAM", "XSAM")
    }
    assert away["SAM"] < 0.02
    assert away["XSAM"] == pytest.approx(1, abs=0.03)
    elsewhere = xsam.walk("XSAM", start, length="probe", **settings)
    assert xsam.PLACES[xsam.places(elsewhere)[0]] in ("sharp", "flat")


def test_a_shifted_grid_is_shifted_by_less_than_a_cell():
    shift = (xsam.grid(10, seed=3) - xsam.grid(10)).reshape(-1, 2)
    assert np.ptp(shift, axis=0) == pytest.approx([0, 0], abs=1e-12)
    assert (np.abs(shift[0]) > 0).all()
    assert (np.abs(shift[0]) <= [4, 2]).all()


def test_shares_of_basins_add_up_and_the_rescued_are_counted_among_the_stuck():
    row = xsam.basins(0, learning_rates=[20.0], rhos=[6.0, 12.0], n=6, steps=100)
    for method in xsam.METHODS:
        assert np.sum(row[method], axis=-1) == pytest.approx(np.ones((1, 2)))
    stuck, saved = np.moveaxis(np.array(row["rescued"]), -1, 0)
    assert (saved <= stuck).all()
    assert row["SGD"][0][0] == row["SGD"][0][1]


@pytest.mark.parametrize(("name", "value"), [("method", "GD"), ("length", "g0")])
def test_an_unknown_method_or_length_is_refused(name, value):
    arguments = {"method": "XSAM", "starts": STARTS, "rho": 1.0} | {name: value}
    with pytest.raises(ValueError, match=f"{name} must be"):
        xsam.walk(**arguments)


def test_a_search_costs_twenty_one_forward_passes_of_six_a_step():
    counted = xsam.cost(0, model="mlp", batch_size=4, steps=30)["counted"]
    assert counted == pytest.approx(100 * 21 / (6 * 30))


def test_on_the_arc_the_position_found_is_the_highest_and_nothing_beats_the_reference():
    row = xsam.arc(0, rho=0.15, trainings=["sgd"], epochs=[1], batches=2)
    for distance in ("1 rho", "2 rho"):
        share = np.array(row[f"sgd, {distance}, share"])
        assert share.max() <= 1 + 1e-9
        assert row[f"sgd, {distance}, found"][0] >= share.max() - 1e-12
        assert row[f"sgd, {distance}, carried"] <= row[f"sgd, {distance}, found"]
        assert row[f"sgd, {distance}, gain"] >= 0
        assert (np.abs(row[f"sgd, {distance}, cosine"]) <= 1).all()


def test_the_claims_are_judged_by_as_many_seeds_as_their_rules_ask_for():
    asked = {
        "xsam_arc": 12,
        "xsam_search_frequency": 24,
        "xsam_cost_dense": 12,
        "xsam_cost_convolutional": 12,
    }
    for name, seeds in asked.items():
        assert len(results.load(name).seeds) >= seeds
    assert len(xsam.SCAN["learning_rates"]) * len(xsam.SCAN["rhos"]) == 24
