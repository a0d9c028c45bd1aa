"""Chapter 3: what SAM gains over SGD on clean and on wrong labels, once SGD is tuned as carefully as SAM.

The comparison has two halves. :func:`tuning` searches settings on validation data that carry the same share
of wrong labels as the training data, and :func:`choose` picks from its results. :func:`label_noise` then
trains with the chosen settings, on fresh data and fresh seeds, and looks at the test set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from samkit import landscapes, results, sharpness, training
from samkit.experiments import Experiment
from samkit.training import Config

__all__ = ["by_radius", "choose", "label_noise", "paths", "shares", "tuning", "worst_case_map"]

STOPS = 10
"""Early stopping may end a run after each tenth of its epochs."""

GRID = {
    "epochs": [20, 40, 80],
    "rhos": [0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6],
    "linf_rhos": [2.5e-4, 5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 4e-3],
}
NOISY_GRID = GRID | {
    "weight_decays": [1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
    "sam_weight_decays": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
}
CLEAN_GRID = GRID | {
    "weight_decays": [0.0, 1e-5, 1e-4, 3e-4, 1e-3, 2e-3, 4e-3],
    "sam_weight_decays": [0.0, 1e-4, 3e-4, 1e-3, 2e-3],
}
"""What :func:`tuning` tries. SGD may run for twice the 40 epochs of SAM: the same number of gradients. A best
weight decay of 0 is no end of a grid, since there is nothing below it."""

NOISY_SETTINGS = {
    "SGD": {},
    "SGD, stopped early": {"stop": 0.4},
    "SGD, twice the epochs": {"epochs": 80},
    "SGD, weight decay tuned": {"weight_decay": 4e-3},
    "SGD, all controls": {"epochs": 80, "weight_decay": 8e-3, "stop": 0.9},
    "SAM": {"rho": 0.3},
    "SAM, stopped early": {"rho": 0.3, "stop": 0.9},
    "SAM, all controls": {"rho": 0.1, "weight_decay": 4e-3, "stop": 1.0},
    "linf-SAM": {"rho": 3e-3, "norm": "linf"},
}
CLEAN_SETTINGS = {
    "SGD": {},
    "SGD, stopped early": {"stop": 0.9},
    "SGD, twice the epochs": {"epochs": 80},
    "SGD, weight decay tuned": {"weight_decay": 1e-4},
    "SGD, all controls": {"epochs": 80, "weight_decay": 1e-5, "stop": 0.4},
    "SAM": {"rho": 0.2},
    "SAM, stopped early": {"rho": 0.2, "stop": 0.9},
    "SAM, all controls": {"rho": 0.3, "weight_decay": 0.0, "stop": 1.0},
    "linf-SAM": {"rho": 2e-3, "norm": "linf"},
}
"""What :func:`choose` finds in the stored results of :func:`tuning`, which a test compares."""


def tuning(
    seed: int,
    *,
    fraction: float,
    epochs: Sequence[int],
    weight_decays: Sequence[float],
    rhos: Sequence[float],
    sam_weight_decays: Sequence[float],
    linf_rhos: Sequence[float],
    model: str = "mlp",
) -> dict[str, Any]:
    """Train every setting of the grid once, with a fifth of the training data held back for validation.

    What is not named here is as in :class:`samkit.training.Config`. The seed also draws the data, the wrong
    labels and the validation part.

    Parameters
    ----------
    seed : int
        Seed of the data and of training.
    fraction : float
        Share of wrong labels, in the training and the validation part.
    epochs, weight_decays : sequence of float
        SGD's grid (E values and W values).
    rhos, sam_weight_decays : sequence of float
        The grid of l_2-SAM (R values and V values).
    linf_rhos : sequence of float
        The radii of l_inf-SAM (Q values), which keeps the default weight decay.
    model : str
        The network, a name of :func:`samkit.models.build`.

    Returns
    -------
    dict
        Accuracies in percent after each tenth of the run: ``sgd_validation`` (E, W, 10), ``sam_validation``
        (V, R, 10), ``linf_validation`` (Q, 10), and the same for ``_test``; and the top eigenvalues of the
        training loss's Hessian at the default weight decay, ``sgd_eigenvalue`` and ``sam_eigenvalue`` (R,).
    """
    common = Config(model=model, label_noise=fraction, validation=0.2, data_seed=seed)

    def train(**changes) -> training.Result:
        config = replace(common, **changes)
        return training.run(replace(config, evaluate_every=config.epochs // STOPS), seed, progress=False)

    def sam(rho: float, weight_decay: float = common.weight_decay, norm: str = "l2") -> training.Result:
        return train(optimizer="sam", rho=rho, weight_decay=weight_decay, norm=norm)

    sgd_runs = [[train(epochs=e, weight_decay=w) for w in weight_decays] for e in epochs]
    sam_runs = [[sam(rho, w) for rho in rhos] for w in sam_weight_decays]
    linf_runs = [sam(rho, norm="linf") for rho in linf_rhos]
    row: dict[str, Any] = {}
    for part in ("validation", "test"):
        row[f"sgd_{part}"] = [[_percent(run, part) for run in runs] for runs in sgd_runs]
        row[f"sam_{part}"] = [[_percent(run, part) for run in runs] for runs in sam_runs]
        row[f"linf_{part}"] = [_percent(run, part) for run in linf_runs]
    plain = sgd_runs[epochs.index(common.epochs)][weight_decays.index(common.weight_decay)]
    row["sgd_eigenvalue"] = _top_eigenvalue(plain)
    row["sam_eigenvalue"] = [
        _top_eigenvalue(run) for run in sam_runs[sam_weight_decays.index(common.weight_decay)]
    ]
    return row


def _percent(run: training.Result, part: str) -> np.ndarray:
    return 100 * run.history[f"{part}_accuracy"]


def _top_eigenvalue(run: training.Result) -> float:
    problem = training.dataset(run.config)
    model, loss = run.model.to("cpu"), training.loss_function(run.config)
    found = sharpness.top_eigenvalues(lambda: loss(model(problem.x), problem.y), model.parameters())
    return float(found.value[0])


def choose(tuned: results.Stored) -> dict[str, dict[str, float]]:
    """The settings with the best validation accuracy, averaged over the seeds of :func:`tuning`.

    Parameters
    ----------
    tuned : samkit.results.Stored
        Stored results of :func:`tuning`.

    Returns
    -------
    dict of str to dict
        For each contestant what it changes in the default :class:`samkit.training.Config`, and ``stop``, the
        share of the run after which it stops: SGD as it comes, with each control alone, and with all of them;
        SAM with its radius alone, with its stop too, and with its weight decay as well; l_inf-SAM with its
        radius.
    """
    grid = tuned.config
    sgd, sam, linf = (tuned.column(f"{name}_validation").mean(axis=0) for name in ("sgd", "sam", "linf"))
    default = Config()
    e, w = grid["epochs"].index(default.epochs), grid["weight_decays"].index(default.weight_decay)
    v = grid["sam_weight_decays"].index(default.weight_decay)
    best_e, best_w, best_stop = np.unravel_index(sgd.argmax(), sgd.shape)
    rho, stop = np.unravel_index(sam[v].argmax(), sam[v].shape)
    sam_w, sam_rho, sam_stop = np.unravel_index(sam.argmax(), sam.shape)
    return {
        "SGD": {},
        "SGD, stopped early": {"stop": _share(sgd[e, w].argmax())},
        "SGD, twice the epochs": {"epochs": 2 * default.epochs},
        "SGD, weight decay tuned": {"weight_decay": grid["weight_decays"][sgd[e, :, -1].argmax()]},
        "SGD, all controls": {
            "epochs": grid["epochs"][best_e],
            "weight_decay": grid["weight_decays"][best_w],
            "stop": _share(best_stop),
        },
        "SAM": {"rho": grid["rhos"][sam[v, :, -1].argmax()]},
        "SAM, stopped early": {"rho": grid["rhos"][rho], "stop": _share(stop)},
        "SAM, all controls": {
            "rho": grid["rhos"][sam_rho],
            "weight_decay": grid["sam_weight_decays"][sam_w],
            "stop": _share(sam_stop),
        },
        "linf-SAM": {"rho": grid["linf_rhos"][linf[:, -1].argmax()], "norm": "linf"},
    }


def by_radius(tuned: results.Stored) -> tuple[np.ndarray, np.ndarray]:
    """Test accuracy of SAM at each radius and of SGD, at the end of a run with the default settings.

    Parameters
    ----------
    tuned : samkit.results.Stored
        Stored results of :func:`tuning`.

    Returns
    -------
    tuple of numpy.ndarray
        SAM's accuracies in percent (seeds, R), and SGD's (seeds,).
    """
    grid, default = tuned.config, Config()
    v = grid["sam_weight_decays"].index(default.weight_decay)
    e, w = grid["epochs"].index(default.epochs), grid["weight_decays"].index(default.weight_decay)
    return tuned.column("sam_test")[:, v, :, -1], tuned.column("sgd_test")[:, e, w, -1]


def _share(tenth: int) -> float:
    return (int(tenth) + 1) / STOPS


def label_noise(
    seed: int,
    *,
    fraction: float,
    settings: Mapping[str, Mapping[str, float]],
    model: str = "mlp",
) -> dict[str, Any]:
    """Train each contestant on all the training data and test it (claim G4, chapter 3).

    The contestants share the seed's data, wrong labels, initial weights and batch order, so they can be
    compared in pairs.

    Parameters
    ----------
    seed : int
        Seed of the data, the wrong labels and of training.
    fraction : float
        Share of wrong training labels. Test labels are true.
    settings : mapping
        Contestants and their settings, as :func:`choose` returns them.
    model : str
        The network, a name of :func:`samkit.models.build`.

    Returns
    -------
    dict
        For each contestant the test accuracy in percent where it stops. For ``"SGD"`` and ``"SAM"``, where
        they take part, also ``"SGD by epoch"`` and so on, the test accuracy after each epoch, and
        ``"SGD fitted"``, the training accuracy after each epoch, counted against the labels given.
    """
    row: dict[str, Any] = {}
    for name, changes in settings.items():
        changes = dict(changes)
        stop = changes.pop("stop", 1.0)
        config = Config(
            model=model,
            label_noise=fraction,
            data_seed=seed,
            optimizer="sam" if "rho" in changes else "sgd",
            **changes,
        )
        run = training.run(config, seed, progress=False)
        by_epoch = _percent(run, "test")
        row[name] = by_epoch[round(stop * config.epochs) - 1]
        if name in ("SGD", "SAM"):
            row[f"{name} by epoch"] = by_epoch
            row[f"{name} fitted"] = _percent(run, "train")
    return row


def worst_case_map(rho: float, *, directions: int = 64) -> landscapes.Plane:
    r"""The worst loss of ``two_basins`` within a distance rho of each point of a grid.

    .. math:: \max_{\|\varepsilon\|_2 \le \rho} L(\theta + \varepsilon)

    Evenly spaced points on the circle are tried, and its centre.

    Parameters
    ----------
    rho : float
        The radius, below the grid's smallest s, which is 9.
    directions : int
        Number of points on the circle.

    Returns
    -------
    samkit.landscapes.Plane
        The worst losses.

    Examples
    --------
    >>> from samkit.experiments.sam import worst_case_map
    >>> bool((worst_case_map(0.0).loss < worst_case_map(5.0).loss).all())
    True
    """
    m, s = np.linspace(-36, 36, 73), np.linspace(9, 40, 63)
    theta = torch.from_numpy(np.stack(np.meshgrid(m, s), axis=-1))
    angle = torch.arange(directions, dtype=torch.float64) * (2 * torch.pi / directions)
    circle = rho * torch.stack([angle.cos(), angle.sin()], dim=-1)
    ball = torch.cat([torch.zeros(1, 2, dtype=torch.float64), circle])
    worst = landscapes.two_basins(theta[..., None, :] + ball).amax(dim=-1)
    return landscapes.Plane(m, s, worst.numpy())


def paths(
    starts: np.ndarray,
    rho: float | Sequence[float],
    *,
    learning_rate: float = 20.0,
    momentum: float = 0.9,
    steps: int = 400,
) -> np.ndarray:
    """The paths of SAM on ``two_basins`` from many starts at once; rho = 0 is gradient descent.

    Parameters
    ----------
    starts : numpy.ndarray
        Starts (m, s), shape (..., 2).
    rho : float or sequence of float
        SAM's radius, or one radius for each step.
    learning_rate, momentum : float
        Settings of SAM's base optimizer SGD.
    steps : int
        Number of steps.

    Returns
    -------
    numpy.ndarray
        Every point on the way, shape (steps + 1, ..., 2). A path stops where its ascent point leaves the
        domain s > 0.

    Examples
    --------
    >>> from samkit.experiments.sam import paths
    >>> paths([20.0, 25.0], rho=0.0)[-1].round(2)  # the flat minimum
    array([19.81, 29.94])
    """
    theta = torch.tensor(starts, dtype=torch.float64)
    velocity, way = torch.zeros_like(theta), [theta]
    for radius in np.broadcast_to(rho, steps):
        velocity = momentum * velocity + _gradient(_ascent_point(theta, radius))
        theta = theta - learning_rate * velocity
        way.append(theta)
    return torch.stack(way).numpy()


def _ascent_point(theta: torch.Tensor, rho: float) -> torch.Tensor:
    g = _gradient(theta)
    length = g.norm(dim=-1, keepdim=True)
    return theta + rho * g / length.where(length > 0, torch.ones(()))


def _gradient(theta: torch.Tensor) -> torch.Tensor:
    theta = theta.detach().requires_grad_()
    return torch.autograd.grad(landscapes.two_basins(theta, outside="nan").sum(), theta)[0]


def shares(rho: float | Sequence[float], n: int = 24, **settings) -> dict[str, float]:
    """Where SAM ends on ``two_basins``, as shares of a grid of starts.

    Parameters
    ----------
    rho : float or sequence of float
        SAM's radius, or one radius for each step.
    n : int
        The grid has n x n starts, m from -40 to 40 and s from 4 to 44.
    **settings
        Passed to :func:`paths`.

    Returns
    -------
    dict of str to float
        The shares that end within 3 of the ``"sharp"`` minimum, the ``"flat"`` one and the ``"saddle"``;
        of the others those stopped with the ascent point ``"outside"`` the domain, and the rest
        ``"elsewhere"``.

    Examples
    --------
    >>> from samkit.experiments.sam import shares
    >>> shares(0.0, n=8)["saddle"]
    0.0
    """
    starts = np.stack(np.meshgrid(np.linspace(-40, 40, n), np.linspace(4, 44, n)), axis=-1)
    ends = paths(starts, rho, **settings)[-1]
    places = {
        "sharp": landscapes.SHARP_MINIMUM,
        "flat": landscapes.FLAT_MINIMUM,
        "saddle": landscapes.SADDLE,
    }
    near = {name: np.linalg.norm(ends - place, axis=-1) < 3 for name, place in places.items()}
    ascent = _ascent_point(torch.from_numpy(ends), float(np.max(rho))).numpy()
    near["outside"] = (ascent[..., 1] <= 0) & ~np.any(list(near.values()), axis=0)
    near["elsewhere"] = ~np.any(list(near.values()), axis=0)
    return {name: float(there.mean()) for name, there in near.items()}


STORED = {
    "sam_tuning_noisy": Experiment(tuning, {"fraction": 0.3, **NOISY_GRID}, range(100, 108)),
    "sam_tuning_clean": Experiment(tuning, {"fraction": 0.0, **CLEAN_GRID}, range(100, 108)),
    "sam_noisy": Experiment(label_noise, {"fraction": 0.3, "settings": NOISY_SETTINGS}, range(24)),
    "sam_clean": Experiment(label_noise, {"fraction": 0.0, "settings": CLEAN_SETTINGS}, range(24)),
}
