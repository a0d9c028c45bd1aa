"""Chapter 10: what XSAM's search finds, what it costs, and where it leads on a landscape with two minima.

The first half trains networks, the second walks on :func:`samkit.landscapes.two_basins` from many starts at
once.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samkit import landscapes, models, sharpness, training
from samkit.experiments import Experiment
from samkit.optim import SAM, XSAM, Recorder
from samkit.perturb import Plane
from samkit.training import Config

__all__ = [
    "ALPHAS",
    "METHODS",
    "PLACES",
    "STORED",
    "arc",
    "basins",
    "cost",
    "grid",
    "places",
    "search_frequency",
    "search_or_extrapolation",
    "walk",
    "worst_on_circle",
]

ALPHAS = np.linspace(0, 2, 21)
"""The positions that XSAM tries, as published."""

METHODS = ("SGD", "SAM", "XSAM", "exact worst case")
"""Who walks on the landscape; the last takes the gradient at the exact worst point of the circle."""

PLACES = ("sharp", "flat", "hovering", "outside")
"""Where a walk can end. Hovering is in neither minimum; outside, a point that the walk needs has left
the domain."""


def _run(config: Config, seed: int, **options) -> training.Result:
    with warnings.catch_warnings():
        # What it warns of, a search that ends at the end of its range, is counted here.
        warnings.filterwarnings("ignore", message="XSAM's search ended at alpha_max")
        return training.run(config, seed, progress=False, **options)


def arc(
    seed: int, *, rho: float, trainings: Sequence[str], epochs: Sequence[int], batches: int = 8
) -> dict[str, Any]:
    r"""The loss on XSAM's circle over training, beside the highest point that projected ascent finds.

    At each epoch the weights are held. For each of several batches the rise of its loss is taken at the
    distances rho and 2 rho in the directions :math:`v(\alpha)`.

    Parameters
    ----------
    seed : int
        Seed of the data, of training and of the batches.
    rho : float
        The radius.
    trainings : sequence of str
        How the network is trained: ``"sgd"``, ``"sam"``, ``"xsam"``.
    epochs : sequence of int
        When to look (E values).
    batches : int
        Batches of 125 to look with.

    Returns
    -------
    dict
        For each training and distance, under ``"xsam, 2 rho, ..."`` and so on: ``share`` (E, 21),
        the rise at each position over the highest rise found, summed over batches; ``found`` (E,) and
        ``carried`` (E,), that share at each batch's own :math:`\alpha^*` and at its neighbour's; ``alpha``
        (E,), the mean :math:`\alpha^*`; ``cosine`` (E, 2), with the highest point, of :math:`v(1)` and of
        :math:`v(\alpha^*)`; and over all epochs ``gain`` and ``carried gain``, the rise at :math:`\alpha^*`
        and at the neighbour's over the rise at 1, minus 1.
    """
    config = Config(data_seed=seed, rho=rho)
    problem = training.dataset(config)
    steps = {epoch * math.ceil(len(problem.y) / config.batch_size) for epoch in epochs}
    draw = torch.Generator().manual_seed(seed)
    sets = torch.randperm(len(problem.y), generator=draw).split(config.batch_size)[:batches]
    row: dict[str, Any] = {}
    for name in trainings:
        weights: list[dict[str, Tensor]] = []

        def keep(step: int, model: nn.Module, weights: list = weights) -> None:
            if step in steps:
                weights.append({k: p.detach().cpu().double() for k, p in model.named_parameters()})

        result = _run(replace(config, optimizer=name), seed, callback=keep)
        model = result.model.to("cpu", torch.float64)
        for ratio in (1, 2):
            looks = [
                _look(model, w, [(problem.x[s].double(), problem.y[s]) for s in sets], rho, ratio * rho)
                for w in weights
            ]
            rises, best, cosines = (np.array(part) for part in zip(*looks, strict=True))
            at = rises.argmax(axis=2)
            own = np.take_along_axis(rises, at[..., None], axis=2)[..., 0]
            carried = np.take_along_axis(rises, np.roll(at, 1, axis=1)[..., None], axis=2)[..., 0]
            sam, highest = rises[..., 10], best.sum(axis=1)
            row |= {
                f"{name}, {ratio} rho, {key}": value
                for key, value in {
                    "share": rises.sum(axis=1) / highest[:, None],
                    "found": own.sum(axis=1) / highest,
                    "carried": carried.sum(axis=1) / highest,
                    "alpha": ALPHAS[at].mean(axis=1),
                    "cosine": cosines.mean(axis=1),
                    "gain": own.sum() / sam.sum() - 1,
                    "carried gain": carried.sum() / sam.sum() - 1,
                }.items()
            }
    return row


def _look(
    model: nn.Module, weights: Mapping[str, Tensor], sets: Sequence, rho: float, radius: float
) -> tuple[list, list, list]:
    """For each batch the rises on the circle, the highest rise found, and two cosines with that point."""
    shapes = {name: p.shape for name, p in weights.items()}
    theta = torch.cat([p.flatten() for p in weights.values()])
    rises, highest, cosines = [], [], []
    for x, y in sets:

        def loss(theta: Tensor, x: Tensor = x, y: Tensor = y) -> Tensor:
            parts = theta.split([shape.numel() for shape in shapes.values()])
            named = {name: p.view(shapes[name]) for name, p in zip(shapes, parts, strict=True)}
            return nn.functional.cross_entropy(torch.func.functional_call(model, named, x), y)

        gradient = torch.func.grad(loss)
        g0 = gradient(theta)
        plane = Plane.through([g0], [gradient(theta + rho * g0 / g0.norm())])
        circle = torch.stack([plane.direction(a)[0] for a in ALPHAS])
        losses, losses_and_slopes = torch.func.vmap(loss), torch.func.vmap(torch.func.grad_and_value(loss))
        rise = losses(theta + radius * circle) - loss(theta)
        # Up the gradient, and back to the sphere: from SAM's direction and from the best of the circle.
        v = circle[[0, 10, int(rise.argmax())]]
        best, where = -math.inf, v[0]
        for _ in range(16):
            slopes, values = losses_and_slopes(theta + radius * v)
            if values.max() > best:
                best, where = values.max(), v[values.argmax()]
            v = torch.nn.functional.normalize(slopes, dim=-1)
        rises.append(rise.tolist())
        highest.append(float(best - loss(theta)))
        cosines.append([float(circle[10] @ where), float(circle[int(rise.argmax())] @ where)])
    return rises, highest, cosines


def search_frequency(seed: int, *, rho: float) -> dict[str, Any]:
    """XSAM with a search at every step and with one an epoch (claim X5).

    Parameters
    ----------
    seed : int
        Seed of the data and of training.
    rho : float
        The radius; the probes lie at twice that.

    Returns
    -------
    dict
        Test accuracy in percent and test loss of both, under ``"every step accuracy"``, ``"once an epoch
        loss"`` and so on. Of the searches at every step, for each epoch: ``mean`` and ``std`` of alpha*, the
        ``at end`` share at the end of the grid and the ``at sam`` share within 0.1 of 1; and ``drift``, the
        mean change of ``mean`` to the next epoch. ``single``: the alpha* that the other run used in each
        epoch.
    """
    config = Config(optimizer="xsam", data_seed=seed, rho=rho, evaluate_every=40)
    row: dict[str, Any] = {}
    used = {}
    for name, search_every in {"every step": 1, "once an epoch": None}.items():
        recorder = Recorder()
        result = _run(replace(config, search_every=search_every), seed, recorder=recorder)
        row |= {
            f"{name} accuracy": 100 * result.final("test_accuracy"),
            f"{name} loss": result.final("test_loss"),
        }
        used[name] = recorder.read()["alpha"].reshape(config.epochs, -1)
    alphas = used["every step"]
    mean = alphas.mean(axis=1)
    return row | {
        "mean": mean,
        "std": alphas.std(axis=1, ddof=1),
        "at end": (alphas == ALPHAS[-1]).mean(axis=1),
        "at sam": (np.abs(alphas - 1) < 0.15).mean(axis=1),
        "drift": np.abs(np.diff(mean)).mean(),
        "single": used["once an epoch"][:, 0],
    }


def search_or_extrapolation(
    seed: int,
    *,
    rhos: Sequence[float],
    alphas: Sequence[float],
    alpha_maxes: Sequence[float],
    sam_rhos: Sequence[float],
) -> dict[str, Any]:
    """XSAM's search beside fixed positions on its circle and beside SAM with other radii.

    Parameters
    ----------
    seed : int
        Seed of the data and of training.
    rhos : sequence of float
        Radii (R values).
    alphas : sequence of float
        Fixed positions; 1 is SAM.
    alpha_maxes : sequence of float
        Ends of the range of a search once an epoch.
    sam_rhos : sequence of float
        Further radii of SAM (S values).

    Returns
    -------
    dict
        For ``"a = ..."`` and ``"search to ..."`` (R,) and ``"SAM"`` (S,): test accuracy in percent, with
        ``" loss"`` behind it the test loss, with ``" eigenvalue"`` the top eigenvalue of the training loss's
        Hessian, and with ``" alpha"`` the mean position.
    """
    runs: dict[str, tuple[Sequence[float], dict]] = {f"a = {a:g}": (rhos, {"alpha": a}) for a in alphas}
    runs |= {f"search to {end:g}": (rhos, {"alpha_max": end}) for end in alpha_maxes}
    runs["SAM"] = (sam_rhos, {"alpha": 1.0})
    row: dict[str, Any] = {}
    for name, (radii, changes) in runs.items():
        found: dict[str, list[float]] = {"": [], " loss": [], " eigenvalue": [], " alpha": []}
        for rho in radii:
            config = Config(optimizer="xsam", data_seed=seed, rho=rho, **changes)
            result = _run(config, seed)
            found[""].append(100 * result.final("test_accuracy"))
            found[" loss"].append(result.final("test_loss"))
            found[" eigenvalue"].append(_top_eigenvalue(result))
            found[" alpha"].append(result.history["alpha"].mean())
        row |= {f"{name}{key}": values for key, values in found.items()}
    return row


def _top_eigenvalue(result: training.Result) -> float:
    problem, model = training.dataset(result.config), result.model.cpu()
    found = sharpness.top_eigenvalues(
        lambda: nn.functional.cross_entropy(model(problem.x), problem.y), model.parameters()
    )
    return float(found.value[0])


def cost(seed: int, *, model: str, batch_size: int, steps: int = 400) -> dict[str, float]:
    """What an epoch of XSAM costs over an epoch of SAM, counted and timed (claim X6).

    The two optimizers take turns on the same batches, each with its own network, so that whatever slows the
    machine down slows both. The time is the processor's, which other programs do not inflate.

    Parameters
    ----------
    seed : int
        Seed of the networks and of the batches.
    model : str
        A name of :func:`samkit.models.build`.
    batch_size : int
        Examples in a batch.
    steps : int
        Steps of the epoch; XSAM searches once.

    Returns
    -------
    dict
        ``counted`` and ``timed``, the extra over SAM in percent, and ``search``, the processor time of the
        step with the search in SAM's steps. Counted are passes of the network, a backward pass as two
        forward ones.
    """
    problem = training.dataset(Config())
    makers = {"SAM": SAM, "XSAM": lambda params, **kwargs: XSAM(params, search_every=steps, **kwargs)}
    nets, optimizers, passes = {}, {}, dict.fromkeys(makers, 0)
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for name, make in makers.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            nets[name] = models.build(model, problem.x.shape[1:], problem.classes)
        optimizers[name] = make(nets[name].parameters(), rho=0.15, lr=0.01, momentum=0.9, weight_decay=1e-3)

    def counted_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            passes[name] += 3 if logits.requires_grad else 1
            return nn.functional.cross_entropy(logits, labels)

        return loss

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="XSAM's search ended at alpha_max")
        warm_up, draw = 20, torch.Generator().manual_seed(seed)
        for step in range(warm_up + steps):
            batch = torch.randint(len(problem.y), (batch_size,), generator=draw)
            if step == warm_up:
                passes |= dict.fromkeys(passes, 0)
                optimizers["XSAM"].steps = 0
            for name in makers if step % 2 else reversed(makers):
                closure = _closure(
                    nets[name], optimizers[name], counted_loss(name), problem.x[batch], problem.y[batch]
                )
                began = time.process_time()
                optimizers[name].step(closure)
                seconds[name].append(time.process_time() - began)
    sam, xsam = (np.array(seconds[name][warm_up:]) for name in ("SAM", "XSAM"))
    return {
        "counted": 100 * (passes["XSAM"] / passes["SAM"] - 1),
        "timed": 100 * (xsam.sum() / sam.sum() - 1),
        "search": xsam[0] / sam.mean(),
    }


def _closure(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y)
        if value.requires_grad:
            value.backward()
        return value

    return closure


def walk(
    method: str,
    starts: np.ndarray,
    rho: float = 0.0,
    *,
    rho_max: float | None = None,
    alpha_max: float = 2.0,
    length: str = "ascent point",
    learning_rate: float = 20.0,
    momentum: float = 0.9,
    steps: int = 400,
) -> np.ndarray:
    r"""The paths of one method on ``two_basins`` from many starts at once; XSAM searches at every step.

    Parameters
    ----------
    method : str
        One of :data:`METHODS`.
    starts : numpy.ndarray
        Starts (m, s), shape (..., 2).
    rho : float
        The radius.
    rho_max : float, optional
        The distance of XSAM's probes; by default 2 rho.
    alpha_max : float
        The end of XSAM's grid, whose points are 0.1 apart.
    length : "ascent point", "weights" or "probe"
        Whose gradient XSAM's :math:`v(\alpha^*)` is as long as: that at the ascent point, as published; that
        at the weights; that at the highest probe.
    learning_rate, momentum : float
        Settings of the base optimizer SGD.
    steps : int
        Number of steps.

    Returns
    -------
    numpy.ndarray
        Every point on the way, shape (steps + 1, ..., 2). Where a point whose gradient is needed has left the
        domain s > 0, the path ends: NaN from there on. Probes outside are passed over.

    Raises
    ------
    ValueError
        If the method or the length is unknown.

    Examples
    --------
    >>> from samkit.experiments.xsam import walk
    >>> walk("SGD", [20.0, 25.0])[-1].round(2)  # the flat minimum
    array([19.81, 29.94])
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    if length not in ("ascent point", "weights", "probe"):
        raise ValueError(f"length must be 'ascent point', 'weights' or 'probe', got {length!r}")
    probes = 2 * rho if rho_max is None else rho_max

    def gradient(theta: Tensor) -> Tensor:
        if method == "SGD":
            return _gradient(theta)
        if method == "SAM":
            return _gradient(theta + rho * _unit(_gradient(theta)))
        if method == "XSAM":
            return _xsam_gradient(theta, rho, probes, alpha_max, length)
        return _gradient(theta + rho * worst_on_circle(theta, rho))

    theta = torch.tensor(starts, dtype=torch.float64)
    velocity, way = torch.zeros_like(theta), [theta]
    for _ in range(steps):
        velocity = momentum * velocity + gradient(theta)
        theta = theta - learning_rate * velocity
        way.append(theta)
    return torch.stack(way).numpy()


def _gradient(theta: Tensor) -> Tensor:
    theta = theta.detach().requires_grad_()
    (g,) = torch.autograd.grad(landscapes.two_basins(theta, outside="nan").sum(), theta)
    return g.masked_fill(~(theta.detach()[..., 1:] > 0), math.nan)


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(vector.dtype).tiny)


def _xsam_gradient(theta: Tensor, rho: float, rho_max: float, alpha_max: float, length: str) -> Tensor:
    g0 = _gradient(theta)
    v0 = _unit(g0)
    g1 = _gradient(theta + rho * v0)
    v1 = _unit(g1)
    psi = 2 * torch.atan2((v0 - v1).norm(dim=-1), (v0 + v1).norm(dim=-1))[..., None]
    alpha = torch.linspace(0, alpha_max, round(10 * alpha_max) + 1, dtype=torch.float64)
    flat = psi.sin().abs() < 1e-14  # parallel or opposite
    weight0 = torch.where(flat, 0.0, ((1 - alpha) * psi).sin() / psi.sin())
    weight1 = torch.where(flat, 1.0, (alpha * psi).sin() / psi.sin())
    circle = weight0[..., None] * v0[..., None, :] + weight1[..., None] * v1[..., None, :]
    heights = landscapes.two_basins(theta[..., None, :] + rho_max * circle, outside="nan")
    best = heights.nan_to_num(nan=-math.inf).argmax(dim=-1)
    v = torch.take_along_dim(circle, best[..., None, None], dim=-2)[..., 0, :]
    model = g1 if length == "ascent point" else g0 if length == "weights" else _gradient(theta + rho_max * v)
    return model.norm(dim=-1, keepdim=True) * v


def worst_on_circle(theta: Tensor, rho: float, directions: int = 32) -> Tensor:
    """The direction in which ``two_basins`` is highest on the circle around a point.

    Evenly spaced directions are tried, and a parabola is laid through the best and its neighbours.

    Parameters
    ----------
    theta : Tensor
        Points (m, s), shape (..., 2), float64.
    rho : float
        The radius, > 0.
    directions : int
        Directions tried.

    Returns
    -------
    Tensor
        Unit vectors, shape (..., 2); NaN where the circle leaves the domain.

    Examples
    --------
    >>> import torch
    >>> from samkit.experiments.xsam import worst_on_circle
    >>> worst_on_circle(torch.tensor([20.0, 36.0], dtype=torch.float64), rho=1.0).round(decimals=2)
    tensor([0., 1.], dtype=torch.float64)
    """
    turn = 2 * math.pi / directions
    angles = turn * torch.arange(directions, dtype=torch.float64)
    circle = torch.stack([angles.cos(), angles.sin()], dim=-1)
    heights = landscapes.two_basins(theta[..., None, :] + rho * circle, outside="nan")
    best = heights.argmax(dim=-1, keepdim=True)
    left, top, right = (
        torch.take_along_dim(heights, (best + i) % directions, dim=-1)[..., 0] for i in (-1, 0, 1)
    )
    refined = turn * (best[..., 0] + 0.5 * (left - right) / (left - 2 * top + right))
    v = torch.stack([refined.cos(), refined.sin()], dim=-1)
    return v.masked_fill(heights.isnan().any(dim=-1, keepdim=True), math.nan)


def places(path: np.ndarray) -> np.ndarray:
    """Where each path ends: an index into :data:`PLACES`.

    A path ends in a minimum if the mean of its last 50 points lies within 3 of it, because methods that jump
    from wall to wall never come to rest.

    Parameters
    ----------
    path : numpy.ndarray
        From :func:`walk`, shape (steps + 1, ..., 2).

    Returns
    -------
    numpy.ndarray of int
        Shape (...).
    """
    last = path[-50:].mean(axis=0)
    place = np.full(last.shape[:-1], PLACES.index("hovering"))
    place[np.linalg.norm(last - landscapes.SHARP_MINIMUM, axis=-1) < 3] = PLACES.index("sharp")
    place[np.linalg.norm(last - landscapes.FLAT_MINIMUM, axis=-1) < 3] = PLACES.index("flat")
    place[np.isnan(path[-1]).any(axis=-1)] = PLACES.index("outside")
    return place


def grid(n: int = 40, seed: int = 0) -> np.ndarray:
    """Starts (n, n, 2): m from -40 to 40 and s from 4 to 44; from seed 1 on shifted by parts of a cell."""
    shift = np.random.default_rng(seed).uniform(-0.5, 0.5, 2) if seed else np.zeros(2)
    m = np.linspace(-40, 40, n) + shift[0] * 80 / n
    s = np.linspace(4, 44, n) + shift[1] * 40 / n
    return np.stack(np.meshgrid(m, s), axis=-1)


def basins(
    seed: int, *, learning_rates: Sequence[float], rhos: Sequence[float], n: int = 40, steps: int = 400
) -> dict[str, Any]:
    """Where each method ends on ``two_basins``, as shares of a grid of starts, over a scan (claim X7).

    Parameters
    ----------
    seed : int
        0 is the grid; other seeds shift it by parts of a cell.
    learning_rates, rhos : sequence of float
        The scan (E and R values).
    n : int
        The grid has n x n starts.
    steps : int
        Steps of each walk.

    Returns
    -------
    dict
        For each of :data:`METHODS` the shares (E, R, 4) of :data:`PLACES`, and with ``" distance"`` behind it
        the median distance of the hovering ends from the saddle, in rho (E, R); and ``rescued`` (E, R, 2),
        the number of starts from which both SGD and SAM end in the sharp minimum, and how many of these XSAM
        takes to the flat one.
    """
    starts = grid(n, seed)
    row: dict[str, Any] = {name: [] for name in METHODS}
    row |= {f"{name} distance": [] for name in METHODS} | {"rescued": []}
    for learning_rate in learning_rates:
        settings = {"learning_rate": learning_rate, "steps": steps}
        sgd = walk("SGD", starts, **settings)
        for values in row.values():
            values.append([])
        for rho in rhos:
            ends = {}
            for name in METHODS:
                path = sgd if name == "SGD" else walk(name, starts, rho, **settings)
                ends[name] = places(path)
                row[name][-1].append([float((ends[name] == i).mean()) for i in range(len(PLACES))])
                hovers = path[-50:].mean(axis=0)[ends[name] == PLACES.index("hovering")]
                away = np.linalg.norm(hovers - landscapes.SADDLE, axis=-1) / rho
                row[f"{name} distance"][-1].append(float(np.median(away)) if len(away) else math.nan)
            stuck = (ends["SGD"] == 0) & (ends["SAM"] == 0)
            row["rescued"][-1].append([int(stuck.sum()), int((stuck & (ends["XSAM"] == 1)).sum())])
    return row


SCAN = {"learning_rates": [5.0, 10.0, 20.0, 40.0], "rhos": [6.0, 8.0, 10.0, 12.0, 14.0, 16.0]}

STORED = {
    "xsam_basins": Experiment(basins, SCAN, seeds=range(2)),
    "xsam_arc": Experiment(
        arc,
        {"rho": 0.15, "trainings": ["sgd", "xsam"], "epochs": [1, 2, 3, 5, 8, 12, 18, 25, 32, 40]},
        seeds=range(12),
    ),
    "xsam_search_frequency": Experiment(search_frequency, {"rho": 0.15}, seeds=range(24)),
    "xsam_extrapolation": Experiment(
        search_or_extrapolation,
        {
            "rhos": [0.05, 0.1, 0.2],
            "alphas": [0.0, 0.5, 1.0, 1.5, 2.0],
            "alpha_maxes": [1.0, 2.0, 4.0],
            "sam_rhos": [0.15, 0.3, 0.4],
        },
        seeds=range(8),
    ),
    "xsam_cost_dense": Experiment(cost, {"model": "mlp", "batch_size": 10}, seeds=range(12)),
    "xsam_cost_convolutional": Experiment(cost, {"model": "cnn1d", "batch_size": 10}, seeds=range(12)),
    "xsam_cost_large_batch": Experiment(cost, {"model": "cnn1d", "batch_size": 125}, seeds=range(6)),
}
"""What claims X4 to X7 are judged by, and the fixed positions beside the search."""
