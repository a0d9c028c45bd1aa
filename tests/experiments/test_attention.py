"""Chapter 8's experiments, on tiny images."""

import numpy as np
import pytest
import torch

from samkit import data, models
from samkit.data import Dataset
from samkit.experiments.attention import attention, on_a_dataset, scale_weights, train_to

TINY = {"batch_size": 20, "scale": 1.0, "learning_rate": 0.2, "steps": 40, "channels": 2}


def pictures(name="mnist_images", colours=1, size=28, n=20):
    draw = torch.Generator().manual_seed(0)
    x = 0.1 * torch.rand(n, colours, size, size, generator=draw)
    y = torch.arange(n) % 10
    for i, label in enumerate(y.tolist()):
        x[i, :, 2 * label + 2 : 2 * label + 4, 4:-4] = 1.0
    return Dataset(name, 10, x, y, x.clone(), y.clone(), y_clean=y)


def test_with_radius_zero_both_methods_are_the_same():
    row = on_a_dataset(pictures(), 0, rho=0.0, levels=[2.29, 2.2], **TINY)
    assert row["gd_steps"] == row["sam_steps"]
    assert row["gd_background"] == row["sam_background"]


def test_shares_add_up_and_a_level_out_of_reach_is_nan():
    row = on_a_dataset(pictures(), 0, rho=0.05, levels=[2.29, 1e-9], **TINY)
    for method in ("gd", "sam"):
        assert row[f"{method}_strokes"][0] + row[f"{method}_background"][0] == pytest.approx(1, abs=1e-5)
        assert row[f"{method}_far"][0] <= row[f"{method}_background"][0]
        assert np.isnan(row[f"{method}_far"][1])
        assert np.isnan(row[f"{method}_steps"][1])
    assert row["area_strokes"] + row["area_background"] == pytest.approx(1, abs=1e-6)


def test_the_loss_is_below_the_level_when_the_model_is_looked_at():
    images = pictures()
    for batch_size in (20, 5):
        torch.manual_seed(0)
        model = models.cnn((1, 28, 28), 10, channels=2)
        looks = train_to(
            [2.25, 2.0, 1.5], model, images.x, images.y, rho=0.05, learning_rate=0.2, seed=0, steps=400,
            batch_size=batch_size,
        )  # fmt: skip
        seen = []
        for level, step in looks:
            loss = torch.nn.functional.cross_entropy(model(images.x), images.y).item()
            assert loss < level
            seen.append(step)
        assert len(seen) == 3
        assert seen == sorted(seen)


def test_scaling_multiplies_every_parameter_and_refuses_nothing_and_less():
    model = models.cnn((1, 8, 8), 2, channels=1)
    before = [p.clone() for p in model.parameters()]
    scale_weights(model, 2.0)
    assert all(torch.equal(p, 2 * q) for p, q in zip(model.parameters(), before, strict=True))
    with pytest.raises(ValueError, match="above 0, got 0"):
        scale_weights(model, 0)


@pytest.mark.parametrize("name", ["svhn", "cifar10"])
def test_the_same_code_runs_on_colour_images_of_the_downloaded_sets(monkeypatch, name):
    """Tiny data of the same format stands in for the download: (3, 32, 32) in [0, 1], ten classes."""
    monkeypatch.setattr(data, "load", lambda got: pictures(got, colours=3, size=32))
    row = attention(0, dataset=name, train_size=20, rho=0.05, levels=[2.25], **TINY)
    for method in ("gd", "sam"):
        assert row[f"{method}_strokes"][0] + row[f"{method}_background"][0] == pytest.approx(1, abs=1e-5)
