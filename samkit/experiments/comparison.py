"""Chapter 11: every method at its own radius, on MNIST-1D with right and wrong labels and on MNIST images.

:func:`tuning` tries each method's radii on validation data, :func:`choose` picks, and :func:`compare` trains
with the chosen radii on fresh data and fresh seeds, and looks at the test set. :func:`images` does the last
step for the images, and corrupts them. SGD's controls on MNIST-1D are those of chapter 3, on the same seeds.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from samkit import results, sharpness, training
from samkit.claims import Estimate
from samkit.experiments import Experiment
from samkit.training import Config

__all__ = [
    "CORRUPTIONS",
    "METHODS",
    "choose",
    "compare",
    "corrupt",
    "faster",
    "images",
    "sub_grids",
    "tuning",
]

METHODS = {
    "SAM": {"optimizer": "sam"},
    "linf-SAM": {"optimizer": "sam", "norm": "linf"},
    "ASAM": {"optimizer": "sam", "adaptive": True},
    "SAM, 3 steps": {"optimizer": "sam", "ascent_steps": 3},
    "averaged SAM, 3 steps": {"optimizer": "averaged-sam", "ascent_steps": 3},
    "Lookbehind-SAM, 3 steps": {"optimizer": "lookbehind-sam", "ascent_steps": 3},
    "XSAM": {"optimizer": "xsam"},
    "XSAM, 3 steps": {"optimizer": "xsam", "ascent_steps": 3},
}
"""Who competes, by what each changes in :class:`samkit.training.Config`. Lookbehind keeps half of the way,
and XSAM searches once an epoch at twice the radius, as published."""

NOISY = {
    "SAM": [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4],
    "linf-SAM": [1e-3, 2e-3, 3e-3, 4e-3, 6e-3],
    "ASAM": [1.0, 2.0, 3.0, 4.0, 6.0],
    "SAM, 3 steps": [0.1, 0.2, 0.3, 0.4, 0.5],
    "averaged SAM, 3 steps": [0.2, 0.3, 0.4, 0.5, 0.7],
    "Lookbehind-SAM, 3 steps": [0.2, 0.4, 0.6, 0.8, 1.0],
    "XSAM": [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4],
    "XSAM, 3 steps": [0.025, 0.05, 0.1, 0.15, 0.2],
}
CLEAN = {
    "SAM": [0.1, 0.15, 0.2, 0.3, 0.4],
    "linf-SAM": [5e-4, 1e-3, 2e-3, 3e-3, 4e-3],
    "ASAM": [0.5, 1.0, 2.0, 3.0, 4.0, 6.0],
    "SAM, 3 steps": [0.1, 0.2, 0.3, 0.4],
    "averaged SAM, 3 steps": [0.1, 0.2, 0.3, 0.4, 0.6],
    "Lookbehind-SAM, 3 steps": [0.1, 0.2, 0.4, 0.6, 0.8],
    "XSAM": [0.0125, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3],
    "XSAM, 3 steps": [0.0125, 0.025, 0.05, 0.1],
}
IMAGES = {
    "SAM": [0.0125, 0.025, 0.05, 0.1],
    "ASAM": [0.1, 0.25, 0.5, 1.0, 2.0],
    "XSAM": [0.00625, 0.0125, 0.025, 0.05, 0.1],
}
"""The radii that :func:`tuning` tries."""

IMAGE_CONFIG = {
    "dataset": "mnist_images",
    "model": "cnn",
    "train_size": 1000,
    "epochs": 10,
    "batch_size": 50,
    "learning_rate": 0.05,
}
"""A thousand images and a small convolutional network."""

CORRUPTIONS = {
    "noise": [0.1, 0.2, 0.3, 0.4],
    "blur": [0.5, 1.0, 1.5, 2.0],
    "contrast": [0.25, 0.5, 0.75, 0.9],
    "shift": [1.0, 2.0, 3.0, 4.0],
}
"""Strengths of :func:`corrupt`."""


def tuning(
    seed: int, *, radii: Mapping[str, Sequence[float]], settings: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Train every method at every radius, with a fifth of the training data held back for validation.

    The seed also draws the data, the wrong labels and the validation part.

    Parameters
    ----------
    seed : int
        Seed of the data and of training.
    radii : mapping of str to sequence of float
        For each of :data:`METHODS` the radii to try (R values).
    settings : mapping
        What else changes in :class:`samkit.training.Config`, such as ``{"label_noise": 0.3}``.

    Returns
    -------
    dict
        For each method the validation accuracies in percent at the end of training (R,).
    """
    common = Config(**{"validation": 0.2, "data_seed": seed, **settings})
    return {
        name: [
            100 * _train(replace(common, rho=rho, **METHODS[name]), seed).final("validation_accuracy")
            for rho in rhos
        ]
        for name, rhos in radii.items()
    }


def _train(config: Config, seed: int) -> training.Result:
    with warnings.catch_warnings():
        # An alpha at the end of its range is common here; it is stored, and the chapter speaks about it.
        warnings.filterwarnings("ignore", message="XSAM's search ended at alpha_max")
        return training.run(replace(config, evaluate_every=config.epochs // 10), seed, progress=False)


def choose(tuned: results.Stored) -> dict[str, float]:
    """The radius with the best validation accuracy, averaged over the seeds of :func:`tuning`.

    Parameters
    ----------
    tuned : samkit.results.Stored
        Stored results of :func:`tuning`.

    Returns
    -------
    dict of str to float
        The radius of each method.
    """
    grid = tuned.config["radii"]
    return {name: rhos[int(tuned.column(name).mean(axis=0).argmax())] for name, rhos in grid.items()}


def compare(
    seed: int, *, tuned: str, settings: Mapping[str, Any], sweep: Sequence[float] = ()
) -> dict[str, Any]:
    """Train every method at its chosen radius, on all the training data, and test it (claims X8, X12, X14).

    The contestants share the seed's data, wrong labels, initial weights and batch order.

    Parameters
    ----------
    seed : int
        Seed of the data, the wrong labels and of training.
    tuned : str
        Name of the stored results of :func:`tuning` that choose the radii.
    settings : mapping
        What else changes in :class:`samkit.training.Config`.
    sweep : sequence of float
        Radii at which SAM and XSAM are tested as well (R values). With it come more ascent steps too.

    Returns
    -------
    dict
        Test accuracies in percent under the names of SGD and of the tuned methods, and with ``" gradients"``
        the gradient evaluations. For SGD, SAM and XSAM the five largest eigenvalues of the Hessian of the
        training loss on 2,000 examples, ``" eigenvalues"`` (5,). For XSAM the mean alpha of ten epochs,
        ``" alpha"``. With a sweep, ``"SAM sweep"`` (R,) and ``"SAM sweep eigenvalue"`` (R,), and the same
        for XSAM with its ``"XSAM sweep alpha"`` (R,); and at the radius chosen for one step, steps of rho/k
        as ``"SAM, k = 3, rho/k"``, and of rho each as ``"SAM, k = 3, rho each"``.
    """
    common = Config(**{"data_seed": seed, **settings})
    rho = choose(results.load(tuned))
    row: dict[str, Any] = {}

    def test(method: Mapping[str, Any], radius: float) -> training.Result:
        return _train(replace(common, rho=radius, **method), seed)

    for name, method in {"SGD": {"optimizer": "sgd"}, **{name: METHODS[name] for name in rho}}.items():
        run = test(method, rho.get(name, 0.0))
        row[name] = _percent(run)
        row[f"{name} gradients"] = run.gradient_evaluations
        if name in ("SGD", "SAM", "XSAM"):
            row[f"{name} eigenvalues"] = _top_eigenvalues(run, 5)
        if "alpha" in run.history:
            row[f"{name} alpha"] = run.history["alpha"].mean()
    if sweep:
        row |= _more_steps(test, rho) | _sweep(test, sweep)
    return row


def _more_steps(test: Callable[..., training.Result], rho: Mapping[str, float]) -> dict[str, float]:
    one, row = rho["SAM"], {}
    for k in (2, 3):
        steps = {"optimizer": "sam", "ascent_steps": k}
        row[f"SAM, k = {k}, rho/k"] = _percent(test(steps, one))
        row[f"SAM, k = {k}, rho each"] = _percent(test(steps, k * one))
    row["averaged SAM, k = 3, rho/k"] = _percent(test(METHODS["averaged SAM, 3 steps"], one))
    row["XSAM, k = 3, rho/k"] = _percent(test(METHODS["XSAM, 3 steps"], rho["XSAM"]))
    return row


def _sweep(test: Callable[..., training.Result], radii: Sequence[float]) -> dict[str, list[float]]:
    row = {}
    for name in ("SAM", "XSAM"):
        runs = [test(METHODS[name], rho) for rho in radii]
        row[f"{name} sweep"] = [_percent(run) for run in runs]
        row[f"{name} sweep eigenvalue"] = [_top_eigenvalues(run, 1)[0] for run in runs]
        if name == "XSAM":
            row["XSAM sweep alpha"] = [run.history["alpha"].mean() for run in runs]
    return row


def _percent(run: training.Result, part: str = "test") -> float:
    return 100 * run.final(f"{part}_accuracy")


def _top_eigenvalues(run: training.Result, k: int) -> np.ndarray:
    problem = training.dataset(run.config)
    x, y = problem.x[:2000], problem.y[:2000]
    model, loss = run.model.to("cpu"), training.loss_function(run.config)
    return sharpness.top_eigenvalues(lambda: loss(model(x), y), model.parameters(), k=k).value


def sub_grids(tuned: results.Stored, tested: results.Stored, size: int) -> dict[tuple[float, ...], Estimate]:
    """XSAM minus SAM, in points of test accuracy, had both been tuned on a coarser grid.

    Parameters
    ----------
    tuned : samkit.results.Stored
        Stored results of :func:`tuning`.
    tested : samkit.results.Stored
        Stored results of :func:`compare` with a sweep.
    size : int
        The number of radii in a grid.

    Returns
    -------
    dict of tuple to samkit.claims.Estimate
        For every choice of ``size`` radii out of the sweep: both methods take the one of them with the best
        validation accuracy, and are compared on the test set, paired by seed.
    """
    sweep = tested.config["sweep"]
    found = {}
    for grid in itertools.combinations(range(len(sweep)), size):
        chosen = {}
        for name in ("SAM", "XSAM"):
            places = [tuned.config["radii"][name].index(sweep[i]) for i in grid]
            validation = tuned.column(name).mean(axis=0)[places]
            chosen[name] = tested.column(f"{name} sweep")[:, grid[int(validation.argmax())]]
        found[tuple(sweep[i] for i in grid)] = Estimate.paired_difference(chosen["XSAM"], chosen["SAM"])
    return found


def faster(seed: int, *, tuned: str, settings: Mapping[str, Any], factor: float) -> dict[str, float]:
    """The control for Lookbehind-SAM: averaged SAM at the same radius, and SAM, with a larger learning rate.

    Parameters
    ----------
    seed : int
        Seed of the data, the wrong labels and of training, as in :func:`compare`.
    tuned : str
        Name of the stored results of :func:`tuning` that choose the radii.
    settings : mapping
        What else changes in :class:`samkit.training.Config`.
    factor : float
        How many times as large the learning rate is.

    Returns
    -------
    dict
        Test accuracies in percent.
    """
    common = Config(**{"data_seed": seed, **settings})
    common = replace(common, learning_rate=factor * common.learning_rate)
    rho = choose(results.load(tuned))
    at = {"averaged SAM, 3 steps": rho["Lookbehind-SAM, 3 steps"], "SAM": rho["SAM"]}
    return {
        name: _percent(_train(replace(common, rho=radius, **METHODS[name]), seed))
        for name, radius in at.items()
    }


def images(seed: int, *, tuned: str, settings: Mapping[str, Any], methods: Sequence[str]) -> dict[str, Any]:
    """Train on the images at the chosen radii and test on clean and on corrupted images (claims X8, X13).

    Parameters
    ----------
    seed : int
        Seed of the split, of training and of the corruptions.
    tuned : str
        Name of the stored results of :func:`tuning` that choose the radii.
    settings : mapping
        What changes in :class:`samkit.training.Config`.
    methods : sequence of str
        Which of the tuned methods to train.

    Returns
    -------
    dict
        For SGD, for SGD with twice the epochs, and for each method: the test accuracy in percent under
        its name, the gradient evaluations with ``" gradients"``, and with each kind of corruption, as in
        ``"SAM blur"``, the accuracies at the strengths of :data:`CORRUPTIONS` (4,).
    """
    common = Config(**{"data_seed": seed, **settings})
    rho = choose(results.load(tuned))
    problem = training.dataset(common)
    contestants = {
        "SGD": {},
        "SGD, twice the epochs": {"epochs": 2 * common.epochs},
        **{name: {"rho": rho[name], **METHODS[name]} for name in methods},
    }
    row: dict[str, Any] = {}
    for name, changes in contestants.items():
        run = _train(replace(common, **changes), seed)
        row[name] = _percent(run)
        row[f"{name} gradients"] = run.gradient_evaluations
        model = run.model.to("cpu")
        for kind, strengths in CORRUPTIONS.items():
            row[f"{name} {kind}"] = [
                100 * training.evaluate(model, corrupt(problem.x_test, kind, s, seed), problem.y_test)[1]
                for s in strengths
            ]
    return row


def corrupt(pictures: Tensor, kind: str, strength: float, seed: int = 0) -> Tensor:
    """Images with values between 0 and 1, made worse.

    Parameters
    ----------
    pictures : torch.Tensor
        Images (n, 1, height, width).
    kind : str
        ``"noise"``: Gaussian noise with this standard deviation is added, and the result cut to [0, 1].
        ``"blur"``: a Gaussian of this standard deviation in pixels. ``"contrast"``: this share of the
        distance to mid-grey is taken away. ``"shift"``: each image moves this many pixels up, down, left or
        right, and background moves in.
    strength : float
        How much, at least 0; a contrast at most 1, a shift a whole number.
    seed : int
        Seed of the noise and of the directions.

    Returns
    -------
    torch.Tensor
        The images, shaped alike.

    Raises
    ------
    ValueError
        If the kind is unknown or the strength negative.

    Examples
    --------
    >>> import torch
    >>> from samkit.experiments.comparison import corrupt
    >>> corrupt(torch.ones(1, 1, 2, 2), "contrast", 0.5).unique()
    tensor([0.7500])
    """
    if kind not in CORRUPTIONS:
        raise ValueError(f"unknown corruption {kind!r}; choose one of {', '.join(map(repr, CORRUPTIONS))}")
    if not strength >= 0:
        raise ValueError(f"strength must be >= 0, got {strength}")
    draw = torch.Generator().manual_seed(seed)
    if kind == "noise":
        return (pictures + strength * torch.randn(pictures.shape, generator=draw)).clamp(0, 1)
    if kind == "blur":
        return _blur(pictures, strength) if strength else pictures.clone()
    if kind == "contrast":
        return 0.5 + (1 - strength) * (pictures - 0.5)
    pixels = int(strength)
    edge = functional.pad(pictures, [pixels] * 4)
    height, width = pictures.shape[-2:]
    corners = torch.tensor([[0, 1], [2, 1], [1, 0], [1, 2]])[
        torch.randint(4, (len(pictures),), generator=draw)
    ]
    return torch.stack(
        [
            picture[:, top : top + height, left : left + width]
            for picture, (top, left) in zip(edge, (pixels * corners).tolist(), strict=True)
        ]
    )


def _blur(pictures: Tensor, sigma: float) -> Tensor:
    reach = int(4 * sigma + 1)
    weights = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    weights = weights / weights.sum()
    rows = functional.conv2d(pictures, weights.view(1, 1, -1, 1), padding=(reach, 0))
    return functional.conv2d(rows, weights.view(1, 1, 1, -1), padding=(0, reach))


TUNING_SEEDS = range(100, 105)
TEST_SEEDS = range(12)

STORED = {
    "comparison_tuning_noisy": Experiment(
        tuning, {"radii": NOISY, "settings": {"label_noise": 0.3}}, TUNING_SEEDS
    ),
    "comparison_noisy": Experiment(
        compare,
        {"tuned": "comparison_tuning_noisy", "settings": {"label_noise": 0.3}, "sweep": NOISY["SAM"]},
        TEST_SEEDS,
    ),
    "comparison_faster": Experiment(
        faster,
        {"tuned": "comparison_tuning_noisy", "settings": {"label_noise": 0.3}, "factor": 1.5},
        TEST_SEEDS,
    ),
    "comparison_tuning_images": Experiment(tuning, {"radii": IMAGES, "settings": IMAGE_CONFIG}, TUNING_SEEDS),
    "comparison_images": Experiment(
        images,
        {
            "tuned": "comparison_tuning_images",
            "settings": IMAGE_CONFIG,
            "methods": ["SAM", "ASAM", "XSAM"],
        },
        TEST_SEEDS,
    ),
    "comparison_tuning_clean": Experiment(tuning, {"radii": CLEAN, "settings": {}}, TUNING_SEEDS),
    "comparison_clean": Experiment(compare, {"tuned": "comparison_tuning_clean", "settings": {}}, TEST_SEEDS),
    "comparison_faster_clean": Experiment(
        faster, {"tuned": "comparison_tuning_clean", "settings": {}, "factor": 1.5}, TEST_SEEDS
    ),
}
