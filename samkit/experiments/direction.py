"""Chapter 9: where the gradient at the ascent point aims, beside the highest point of the ball."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from samkit import perturb, sharpness, training
from samkit.experiments import Experiment
from samkit.experiments.surrogate import highest_in_ball
from samkit.surface import Surface
from samkit.training import Config

__all__ = [
    "NETWORK",
    "SPECTRA",
    "STORED",
    "WAYS",
    "aim",
    "along_training",
    "batches",
    "change_over_training",
    "circles",
    "climb",
    "counterexamples",
    "degrees",
    "highest_point",
    "in_plane",
    "moments",
    "on_circle",
    "on_quadratics",
]

NETWORK = Config(evaluate_every=40)
"""MNIST-1D and the 40-100-100-10 network, in batches of 125; with SAM, at the radius that is measured."""

WAYS = ("short", "full", "power")
"""How k steps climb, see :func:`~samkit.experiments.direction.climb`."""

SPECTRA: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "convex": lambda rng: 1 / np.arange(1, 51),
    "both signs": lambda rng: np.sort(rng.uniform(-1, 1, 50))[::-1],
    "mostly negative": lambda rng: np.sort(rng.uniform(-4, 1, 50))[::-1],
}
"""Eigenvalues (50,) of the random quadratics, largest first. They are 1, 1/2, ..., 1/50, or drawn evenly from
-1 to 1 or from -4 to 1."""


def climb(
    gradient: Callable[[np.ndarray], np.ndarray], size: int, rho: float, steps: int, way: str = "short"
) -> tuple[np.ndarray, np.ndarray]:
    r"""Climb k steps from the weights, and take the gradient there.

    =========== ==================================================================================
    way         the next point, with :math:`\hat g_i` the normalised gradient at :math:`\theta_i`
    =========== ==================================================================================
    ``"short"`` :math:`\theta_{i+1} = \theta_i + (\rho/k)\,\hat g_i`, as in published code
    ``"full"``  :math:`\theta_{i+1} = \theta_i + \rho\,\hat g_i`
    ``"power"`` :math:`\theta_{i+1} = \theta_0 + \rho\,\hat g_i`, the generalised power method
    =========== ==================================================================================

    Parameters
    ----------
    gradient : callable
        Maps a displacement (size,) from :math:`\theta_0` to the gradient (size,) there.
    size : int
        Number of weights.
    rho : float
        The radius.
    steps : int
        k; 0 gives the gradient at the weights.
    way : str
        One of :data:`WAYS`.

    Returns
    -------
    tuple of numpy.ndarray
        The displacement :math:`\theta_k - \theta_0` and the gradient :math:`g_k`, (size,) both.

    Raises
    ------
    ValueError
        If the way is unknown.

    Examples
    --------
    On the loss x^2 at x = 1, two steps of 1/2 and two of 1:

    >>> import numpy as np
    >>> from samkit.experiments.direction import climb
    >>> climb(lambda u: 2 * (1 + u), 1, rho=1.0, steps=2)
    (array([1.]), array([4.]))
    >>> climb(lambda u: 2 * (1 + u), 1, rho=1.0, steps=2, way="full")
    (array([2.]), array([6.]))

    Notes
    -----
    Source: Chen & Zhou 2026 (arXiv 2603.10048); the power method: Journée, Nesterov, Richtárik & Sepulchre
    2010 (arXiv 0811.4724). Derived in chapter 9.
    """
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(map(repr, WAYS))}, got {way!r}")
    u, g = np.zeros(size), gradient(np.zeros(size))
    for _ in range(steps):
        length = np.linalg.norm(g)
        step = g * ((rho / steps if way == "short" else rho) / length if length else 0.0)
        u = step if way == "power" else u + step
        g = gradient(u)
    return u, g


def degrees(u: np.ndarray, v: np.ndarray) -> float:
    """The angle between two vectors in degrees.

    Parameters
    ----------
    u, v : numpy.ndarray
        The vectors, shaped alike.

    Returns
    -------
    float
        Between 0 and 180.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.direction import degrees
    >>> round(degrees(np.array([1.0, 0.0]), np.array([3.0, 3.0])), 9)
    45.0
    """
    return math.degrees(perturb.angle([torch.from_numpy(u)], [torch.from_numpy(v)]))


def on_quadratics(
    seed: int, *, spectrum: str, ratios: Sequence[float], ascent_steps: Sequence[int]
) -> dict[str, list[float]]:
    r"""How close the directions come to the highest point of a ball, exactly, on a random quadratic.

    The gradient is Gaussian, scaled to length 1. The ratio :math:`\rho \lambda_1 / \|g\|` says how far the
    ball reaches beyond the linear part of the loss.

    Parameters
    ----------
    seed : int
        Seed of the quadratic.
    spectrum : str
        A key of :data:`SPECTRA`.
    ratios : sequence of float
        Values of the ratio.
    ascent_steps : sequence of int
        Values of k.

    Returns
    -------
    dict
        For ``"g0"`` and each ``"g1"``, ``"g2 short"``, ..., the angle to the highest point in degrees, and
        under the same name with ``share`` the rise at distance rho as a share of the highest; one entry a
        ratio. One step is the same in every way.

    Raises
    ------
    ValueError
        If the spectrum is unknown.
    """
    if spectrum not in SPECTRA:
        raise ValueError(f"spectrum must be one of {', '.join(map(repr, SPECTRA))}, got {spectrum!r}")
    rng = np.random.default_rng(seed)
    eigenvalues = SPECTRA[spectrum](rng)
    g = rng.standard_normal(50)
    g /= np.linalg.norm(g)
    row: dict[str, list[float]] = {}
    for ratio in ratios:
        rho = ratio / eigenvalues[0]
        top, rise = highest_in_ball(g, np.diag(eigenvalues), rho)
        for name, (_, aimed) in _climbs(lambda u: g + eigenvalues * u, 50, rho, ascent_steps).items():
            delta = rho * aimed / np.linalg.norm(aimed)
            row.setdefault(name, []).append(degrees(aimed, top))
            row.setdefault(f"{name} share", []).append(float(g @ delta + 0.5 * eigenvalues @ delta**2) / rise)
    return row


def _climbs(
    gradient: Callable[[np.ndarray], np.ndarray], size: int, rho: float, ascent_steps: Sequence[int]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = {"g0": climb(gradient, size, rho, 0), "g1": climb(gradient, size, rho, 1)}
    for k in ascent_steps:
        if k > 1:
            found |= {f"g{k} {way}": climb(gradient, size, rho, k, way) for way in WAYS}
    return found


def counterexamples(seed: int, *, ratios: Sequence[float], draws: int = 1000, size: int = 50) -> np.ndarray:
    r"""How often the gradient at the ascent point is the worse direction when the curvature has both signs.

    Eigenvalues are drawn evenly from -1 to 1, gradients are Gaussian.

    Parameters
    ----------
    seed : int
        Seed of the draws.
    ratios : sequence of float
        Values of :math:`\rho \lambda_1 / \|g\|`.
    draws : int
        Number of quadratics.
    size : int
        Number of weights.

    Returns
    -------
    numpy.ndarray
        For each ratio the share of quadratics on which the loss at distance rho along g1 is lower than along
        g0.
    """
    rng = np.random.default_rng(seed)
    eigenvalues = rng.uniform(-1, 1, (draws, size))
    g = rng.standard_normal((draws, size))

    def rise(direction: np.ndarray, rho: np.ndarray) -> np.ndarray:
        delta = rho * direction / np.linalg.norm(direction, axis=1, keepdims=True)
        return np.sum(g * delta + 0.5 * eigenvalues * delta**2, axis=1)

    length = np.linalg.norm(g, axis=1, keepdims=True)
    shares = []
    for ratio in ratios:
        rho = ratio * length / eigenvalues.max(axis=1, keepdims=True)
        g1 = g + eigenvalues * rho * g / length
        shares.append(np.mean(rise(g1, rho) < rise(g, rho)))
    return np.array(shares)


def moments(seed: int, *, train_rho: float, epochs: Sequence[int]) -> dict[int, nn.Module]:
    """The network at several moments of its training, in float64.

    Parameters
    ----------
    seed : int
        Seed of the network and of its data.
    train_rho : float
        Radius of the SAM that trains it; 0 is SGD.
    epochs : sequence of int
        The epochs after which to keep a copy; 0 is the start.

    Returns
    -------
    dict of int to torch.nn.Module
        The copies, by epoch.
    """
    method = {"optimizer": "sam", "rho": train_rho} if train_rho else {}
    config = replace(NETWORK, data_seed=seed, **method)
    steps = math.ceil(len(training.dataset(config).y) / config.batch_size)
    wanted = {epoch * steps: epoch for epoch in epochs}
    kept: dict[int, nn.Module] = {}

    def keep(step: int, model: nn.Module) -> None:
        if step in wanted:
            kept[wanted[step]] = copy.deepcopy(model).to("cpu", torch.float64)

    training.run(config, seed, progress=False, callback=keep)
    return kept


def batches(model: nn.Module, seed: int, epoch: int, count: int) -> Iterator[Callable[[], Tensor]]:
    """Losses of a network on random training batches, as functions without arguments.

    Parameters
    ----------
    model : torch.nn.Module
        The network, in float64.
    seed : int
        Seed of the network's data; with ``epoch``, of the draws.
    epoch : int
        The epoch.
    count : int
        How many batches.

    Yields
    ------
    callable
        The loss of one batch.
    """
    config = replace(NETWORK, data_seed=seed)
    problem, criterion = training.dataset(config), training.loss_function(config)
    rng = np.random.default_rng([seed, epoch])
    for _ in range(count):
        rows = torch.from_numpy(rng.choice(len(problem.y), config.batch_size, replace=False))
        x, y = problem.x[rows].double(), problem.y[rows]
        yield lambda x=x, y=y: criterion(model(x), y)


def highest_point(
    loss: Callable[[], Tensor], params: Sequence[Tensor], radius: float
) -> tuple[np.ndarray, float, float]:
    """The highest point in a ball that two independent searches find.

    Projected ascent with five starts, and 30 steps of the power method, which always jump the whole radius.

    Parameters
    ----------
    loss : callable
        The loss, a function without arguments.
    params : sequence of Tensor
        The weights.
    radius : float
        The radius of the ball.

    Returns
    -------
    tuple
        The displacement (n,) to the higher of the two ends, its rise, and the angle between the two ends in
        degrees: how far the answer can be trusted.
    """
    search = sharpness.worst_case(loss, params, radius, restarts=5)
    with Surface(loss, params) as surface:
        ends = [
            surface.flatten("perturbation", search.perturbation),
            climb(lambda u: surface.loss_and_gradient(u)[1], surface.size, radius, 30, "power")[0],
        ]
        losses = [surface.loss(end) for end in ends]
        rise = max(losses) - surface.loss()
    return ends[int(np.argmax(losses))], rise, degrees(*ends)


def on_circle(
    surface: Surface, g0: np.ndarray, g1: np.ndarray, radius: float, *, points: int = 72
) -> dict[str, np.ndarray | float]:
    """The loss on the circle around the weights in the plane of two gradients.

    Parameters
    ----------
    surface : samkit.surface.Surface
        The loss.
    g0, g1 : numpy.ndarray
        The gradients (n,) at the weights and at the ascent point.
    radius : float
        The radius of the circle.
    points : int
        Number of points, evenly spread.

    Returns
    -------
    dict
        ``angles`` (points + 1,) in degrees from g0 towards g1, from -180 to 180, and ``losses`` there;
        ``best``, the angle of the highest, and ``direction`` (n,), the unit vector to it.
    """
    plane = perturb.Plane.through([torch.from_numpy(g0)], [torch.from_numpy(g1)])
    psi = math.degrees(plane.angle)
    angles = np.linspace(-180, 180, points + 1)
    directions = (plane.direction(angle / psi)[0].numpy() for angle in angles)
    losses = np.array([surface.loss(radius * direction) for direction in directions])
    best = float(angles[losses.argmax()])
    direction = plane.direction(best / psi)[0].numpy()
    return {"angles": angles, "losses": losses, "best": best, "direction": direction}


def in_plane(vector: np.ndarray, g0: np.ndarray, g1: np.ndarray) -> tuple[float, float]:
    """Where a vector falls on the plane of two gradients.

    Parameters
    ----------
    vector, g0, g1 : numpy.ndarray
        The vector and the gradients (n,).

    Returns
    -------
    tuple of float
        The angle of its shadow from g0 towards g1 in degrees, and the share of its squared length that lies
        in the plane.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.direction import in_plane
    >>> e = np.eye(3)
    >>> in_plane(e[0] + e[1] + e[2] * 2**0.5, e[0], e[0] + 3 * e[1])
    (45.0, 0.5)
    """
    across = g1 - g0 * (g0 @ g1) / (g0 @ g0)
    x, y = vector @ g0 / np.linalg.norm(g0), vector @ across / np.linalg.norm(across)
    return math.degrees(math.atan2(y, x)), float((x**2 + y**2) / (vector @ vector))


def aim(
    loss: Callable[[], Tensor],
    params: Sequence[Tensor],
    rho: float,
    *,
    ascent_steps: Sequence[int] = (1,),
    radii: Sequence[float] = (1.0, 2.0),
) -> dict[str, float]:
    r"""Where the directions of SAM aim on one batch, beside the highest point that projected ascent finds.

    Parameters
    ----------
    loss : callable
        The loss of the batch, a function without arguments.
    params : sequence of Tensor
        The weights.
    rho : float
        SAM's radius: where g1 is taken.
    ascent_steps : sequence of int
        Values of k.
    radii : sequence of float
        Radii of the balls, in units of rho.

    Returns
    -------
    dict
        ``ratio``, :math:`\rho\lambda_1/\|g_0\|`; ``lowest``, the lowest eigenvalue over the highest;
        ``psi``, the angle between g0 and g1. For each ball, the name followed by its radius: ``worst`` and
        ``doubt``, the rise and the doubt of :func:`~samkit.experiments.direction.highest_point`; for each
        direction (``g0``, ``g1``, ``g2 short``, ..., and ``circle``, the highest of the circle in the plane
        of g0 and g1) the angle to the highest point, and with ``share`` the rise as a share of the highest;
        ``circle at``, the angle from g0 at which it lies; ``inside``, the share of the highest point's
        squared length in the plane; ``lower``, whether the loss along g1 is lower than along g0. Angles in
        degrees.
    """
    params = list(params)
    top = sharpness.top_eigenvalues(loss, params, tol=0.01)
    bottom = sharpness.top_eigenvalues(lambda: -loss(), params, tol=0.01)
    row = {"lowest": -float(bottom.value[0]) / float(top.value[0])}
    tops = {size: highest_point(loss, params, size * rho) for size in radii}
    with Surface(loss, params) as surface:
        base = surface.loss()
        found = _climbs(lambda u: surface.loss_and_gradient(u)[1], surface.size, rho, ascent_steps)
        g0, g1 = found["g0"][1], found["g1"][1]
        row |= {"ratio": rho * float(top.value[0]) / float(np.linalg.norm(g0)), "psi": degrees(g0, g1)}
        for size, (highest, worst, doubt) in tops.items():
            radius, ball = size * rho, f"{size:g}ρ"
            circle = on_circle(surface, g0, g1, radius)
            aimed = {name: g for name, (_, g) in found.items()} | {"circle": circle["direction"]}
            for name, g in aimed.items():
                rise = surface.loss(radius * g / np.linalg.norm(g)) - base
                row |= {f"{name} {ball}": degrees(g, highest), f"{name} share {ball}": rise / worst}
            row |= {
                f"worst {ball}": worst,
                f"doubt {ball}": doubt,
                f"circle at {ball}": circle["best"],
                f"inside {ball}": in_plane(highest, g0, g1)[1],
                f"lower {ball}": float(row[f"g1 share {ball}"] < row[f"g0 share {ball}"]),
            }
    return row


def circles(
    seed: int, *, train_rho: float, rho: float, epochs: Sequence[int], radii: Sequence[float] = (1.0, 2.0)
) -> dict[int, dict[str, dict[str, np.ndarray | float]]]:
    """The loss on circles in the plane of g0 and g1, at several moments of one training.

    Parameters
    ----------
    seed, train_rho, rho, epochs
        As for :func:`~samkit.experiments.direction.along_training`; one batch is looked at.
    radii : sequence of float
        Radii of the circles, in units of rho.

    Returns
    -------
    dict
        For each epoch and each radius (``"ρ"``, ``"2ρ"``): ``angles`` from g0 in degrees and ``share``, the
        rise there over the highest in the ball; ``marks``, the angles of g0, of g1, of the highest point of
        the circle and of the shadow of the ball's highest point; ``inside``, the share of its squared length
        in the plane.
    """
    found: dict[int, dict] = {}
    for epoch, model in moments(seed, train_rho=train_rho, epochs=epochs).items():
        params, loss = list(model.parameters()), next(batches(model, seed, epoch, 1))
        found[epoch] = {}
        for size in radii:
            highest, worst, _ = highest_point(loss, params, size * rho)
            with Surface(loss, params) as surface:
                found_here = _climbs(lambda u: surface.loss_and_gradient(u)[1], surface.size, rho, (1,))
                g0, g1 = found_here["g0"][1], found_here["g1"][1]
                circle = on_circle(surface, g0, g1, size * rho, points=360)
                base = surface.loss()
            shadow, inside = in_plane(highest, g0, g1)
            found[epoch]["ρ" if size == 1 else f"{size:g}ρ"] = {
                "angles": circle["angles"],
                "share": (circle["losses"] - base) / worst,
                "marks": {
                    "g₀": 0.0,
                    "g₁": degrees(g0, g1),
                    "plane's top": circle["best"],
                    "ball's top": shadow,
                },
                "inside": inside,
            }
    return found


def along_training(
    seed: int,
    *,
    train_rho: float,
    rho: float,
    epochs: Sequence[int],
    ascent_steps: Sequence[int],
    count: int = 3,
) -> dict[str, list[float]]:
    """Where the directions of SAM aim through training.

    Parameters
    ----------
    seed : int
        Seed of the network, its data and the batches.
    train_rho : float
        Radius of the SAM that trains the network; 0 is SGD.
    rho : float
        The radius of the measurement.
    epochs : sequence of int
        The epochs after which to measure; 0 is the start.
    ascent_steps : sequence of int
        Values of k.
    count : int
        Batches to measure at each of them.

    Returns
    -------
    dict
        What :func:`~samkit.experiments.direction.aim` returns, as means over the batches, one entry an epoch.

    Notes
    -----
    Source: Chen & Zhou 2026 (arXiv 2603.10048). Claims X1, X2 and X3, chapter 9.
    """
    rows: dict[str, list[float]] = {}
    for epoch, model in moments(seed, train_rho=train_rho, epochs=epochs).items():
        measured = [
            aim(loss, list(model.parameters()), rho, ascent_steps=ascent_steps)
            for loss in batches(model, seed, epoch, count)
        ]
        for name in measured[0]:
            rows.setdefault(name, []).append(float(np.mean([row[name] for row in measured])))
    return rows


def change_over_training(values: np.ndarray) -> np.ndarray:
    """How far a quantity's highest and lowest epoch lie apart, without the bias of picking them.

    The first half of the seeds picks the two epochs, the second half measures their difference, and the other
    way round. Picked and measured on the same seeds, noise alone would make a difference.

    Parameters
    ----------
    values : numpy.ndarray
        The quantity (seeds, epochs).

    Returns
    -------
    numpy.ndarray
        The difference, (seeds,).

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.direction import change_over_training
    >>> change_over_training(np.array([[1.0, 4.0, 2.0], [1.0, 5.0, 2.0]]))
    array([3., 4.])
    """
    half = len(values) // 2
    changes = []
    for own, other in ((values[:half], values[half:]), (values[half:], values[:half])):
        mean = other.mean(axis=0)
        changes.append(own[:, mean.argmax()] - own[:, mean.argmin()])
    return np.concatenate(changes)


_SETTINGS = {"rho": 0.15, "epochs": [0, 1, 2, 5, 10, 20, 30, 40], "ascent_steps": [1, 2, 3, 5]}
STORED = {
    "direction_sgd": Experiment(along_training, {"train_rho": 0.0, **_SETTINGS}, seeds=range(12)),
    "direction_sam": Experiment(along_training, {"train_rho": 0.15, **_SETTINGS}, seeds=range(12)),
}
"""The directions through training, after SGD and after SAM (claims X1, X2, X3)."""
