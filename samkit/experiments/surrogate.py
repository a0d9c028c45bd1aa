"""Chapter 4: what SAM computes, compared with what it is said to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import Tensor

from samkit import landscapes, perturb, results, sharpness, training
from samkit.experiments import Experiment
from samkit.experiments.measuring import FlatNetwork, edge_config, gradient_descent, settled
from samkit.experiments.sam import paths
from samkit.training import Config

__all__ = [
    "M_SHARPNESS",
    "SMALL",
    "STORED",
    "along_the_way",
    "at_tuned_radius",
    "captured",
    "catchment",
    "downhill",
    "drift",
    "edge",
    "gradient_norms",
    "highest_in_ball",
    "m_sharpness",
    "on_a_quadratic",
    "own_edge",
]

SMALL = Config(
    model_options={"width": 20, "depth": 2, "activation": "tanh"},
    train_size=500,
    epochs=30,
    batch_size=50,
    evaluate_every=30,
)
"""A smooth network of 1,450 weights and 500 examples, on which a worst case takes a second."""

TUNING_SEEDS = 100
"""Seeds from here on choose the radii of ``m_sharpness``; those below compare."""

M_SHARPNESS = Config(
    optimizer="sam", batch_size=200, learning_rate=0.2, label_noise=0.3, validation=0.2, evaluate_every=40
)
"""Labels are 30 % wrong, because there SAM has something to do (chapter 3)."""


def highest_in_ball(g: np.ndarray, H: np.ndarray, rho: float) -> tuple[np.ndarray, float]:
    r"""The highest point of a quadratic in a ball, exactly.

    .. math:: \max_{\|\delta\|_2 \le \rho} \langle g, \delta\rangle + \tfrac12 \delta^\top H \delta
        \quad\Longleftrightarrow\quad (\nu I - H)\,\delta = g,\ \nu \ge \max(0, \lambda_1),\
        \nu (\rho - \|\delta\|) = 0

    Parameters
    ----------
    g : numpy.ndarray
        Gradient (d,).
    H : numpy.ndarray
        Hessian (d, d), symmetric.
    rho : float
        The radius, > 0.

    Returns
    -------
    tuple
        The point :math:`\delta` (d,) and its rise. In the hard case (g has no part along the top
        eigenvector) one of the two solutions.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.surrogate import highest_in_ball
    >>> highest_in_ball(np.array([3.0, 0.0]), np.diag([2.0, 1.0]), rho=1.0)
    (array([1., 0.]), 4.0)

    Notes
    -----
    Source: Moré & Sorensen 1983, *Computing a trust region step*. Chapter 4.
    """
    eigenvalues, vectors = np.linalg.eigh(H)
    g_hat, top = vectors.T @ g, eigenvalues[-1]

    def length(shift: float) -> float:
        return float(np.linalg.norm(g_hat / (low + shift - eigenvalues)))

    low = max(top, 0.0)
    scale = np.abs(eigenvalues).max() + np.linalg.norm(g) / rho
    tiny = 1e-13 * scale
    if length(tiny) <= rho:
        # Nothing is left over on the sphere (concave H), or only the top eigenvector can fill what is left.
        delta_hat = np.divide(
            g_hat, low - eigenvalues, out=np.zeros_like(g_hat), where=low - eigenvalues > 1e-9 * scale
        )
        if top >= 0:
            delta_hat[-1] = np.copysign(
                np.sqrt(max(rho**2 - delta_hat[:-1] @ delta_hat[:-1], 0.0)), g_hat[-1]
            )
    else:
        shift = optimize.brentq(
            lambda x: 1 / length(x) - 1 / rho, tiny, 2 * scale, xtol=1e-15 * scale, rtol=1e-14
        )
        delta_hat = g_hat / (low + shift - eigenvalues)
        delta_hat *= rho / np.linalg.norm(delta_hat)
    return vectors @ delta_hat, float(g_hat @ delta_hat + 0.5 * eigenvalues @ delta_hat**2)


def on_a_quadratic(
    seed: int, *, ratios: Sequence[float], ascent_steps: Sequence[int], full_steps: bool
) -> dict:
    r"""How much of the exact worst case k ascent steps capture on a random convex quadratic.

    The Hessian has eigenvalues 1, 1/2, ..., 1/50, the gradient is Gaussian. The ratio
    :math:`\rho \lambda_1 / \|g\|` says how far the ball reaches beyond the linear part of the loss.

    Parameters
    ----------
    seed : int
        Seed of the gradient.
    ratios : sequence of float
        Values of the ratio.
    ascent_steps : sequence of int
        Values of k.
    full_steps : bool
        Whether each step has length rho (and the end is pulled back to the sphere) instead of rho/k.

    Returns
    -------
    dict
        For each k under ``"k = ..."`` the share of the exact rise (one entry a ratio).
    """
    eigenvalues = 1 / np.arange(1, 51)
    g = np.random.default_rng(seed).standard_normal(50)
    g /= np.linalg.norm(g)
    rows: dict[str, list[float]] = {f"k = {k}": [] for k in ascent_steps}
    for rho in ratios:
        best = highest_in_ball(g, np.diag(eigenvalues), rho)[1]
        for k in ascent_steps:
            delta = np.zeros(50)
            for _ in range(k):
                slope = g + eigenvalues * delta
                delta = delta + rho * (1 if full_steps else 1 / k) * slope / np.linalg.norm(slope)
            delta *= rho / np.linalg.norm(delta)
            rows[f"k = {k}"].append(float(g @ delta + 0.5 * eigenvalues @ delta**2) / best)
    return rows


def captured(
    seed: int, *, rhos: Sequence[float], ascent_steps: Sequence[int], train_rho: float = 0.0
) -> dict:
    r"""How much of the worst case SAM's ascent captures on a trained network.

    Parameters
    ----------
    seed : int
        Seed of the network and of its data.
    rhos : sequence of float
        Radii.
    ascent_steps : sequence of int
        Values of k, each step of length rho/k.
    train_rho : float
        Radius of the SAM that trained the network; 0 is SGD.

    Returns
    -------
    dict
        ``worst`` (the rise found by projected ascent with restarts, one entry a radius), ``error`` (how far
        the restarts disagree on it), ``first_order`` (:math:`\rho\|g\|`), and for each k under ``"k = ..."``
        the rise at the end of SAM's ascent, as a share of ``worst``.
    """
    method = {"optimizer": "sam", "rho": train_rho} if train_rho else {}
    net = FlatNetwork(training.run(replace(SMALL, data_seed=seed, **method), seed, progress=False))

    def loss() -> Tensor:
        return net.loss(net.theta)

    base = float(loss().detach())
    g = torch.func.grad(net.loss)(net.theta).detach()
    row: dict[str, list[float]] = {"worst": [], "error": [], "first_order": []}
    row |= {f"k = {k}": [] for k in ascent_steps}
    for rho in rhos:
        worst = sharpness.worst_case(loss, [net.theta], rho)
        row["worst"].append(worst.value)
        row["error"].append(worst.error)
        row["first_order"].append(rho * float(g.norm()))
        for k in ascent_steps:
            point = net.theta.detach()
            for _ in range(k):
                slope = torch.func.grad(net.loss)(point)
                point = point + perturb.perturbation([point], [slope], rho / k)[0]
            row[f"k = {k}"].append((float(net.loss(point)) - base) / worst.value)
    return row


def drift(start: float, *, learning_rate: float, rho: float, steps: int) -> dict[str, np.ndarray]:
    r"""SAM at the bottom of the valley of :math:`L = (uv - 1)^2 / 2`, beside the predicted drift.

    SAM jumps from wall to wall, and the mean of the two gradients pushes it along the valley:

    .. math:: \Delta u = -\eta\,\frac{r^2}{2} \langle \nabla \lambda_1, \tau \rangle\, \tau_u, \qquad
        r = \frac{2\rho}{2 - \eta\lambda_1}, \quad \lambda_1 = u^2 + v^2, \quad \tau \propto (u, -v)

    Parameters
    ----------
    start : float
        The first u; the start is a hair off the floor of the valley, where the gradient is not zero.
    learning_rate : float
        :math:`\eta`, below :math:`2 / \lambda_1` at the start.
    rho : float
        The radius.
    steps : int
        Number of steps.

    Returns
    -------
    dict of str to numpy.ndarray
        ``sam``, the path (steps + 1, 2) of (u, v), and ``predicted``, the predicted u (steps + 1,).

    Notes
    -----
    Derived in chapter 4, after Bartlett, Long & Bousquet 2023 (arXiv 2210.01513).
    """

    def gradient(w: np.ndarray) -> np.ndarray:
        return (w[0] * w[1] - 1) * w[::-1]

    w, path = np.array([start, 1 / start + 1e-3]), []
    u, predicted = start, []
    for _ in range(steps + 1):
        path.append(w)
        predicted.append(u)
        g = gradient(w)
        w = w - learning_rate * gradient(w + rho * g / np.linalg.norm(g))
        top = u**2 + u**-2
        reach = 2 * rho / (2 - learning_rate * top)
        u = u - learning_rate * reach**2 * u * (u**2 - u**-2) / top
    return {"sam": np.array(path), "predicted": np.array(predicted)}


def gradient_norms(seed: int, *, sub_batches: Sequence[int], draws: int = 400) -> dict[str, np.ndarray]:
    r"""How long the gradient of m examples is on a trained network, measured and predicted.

    .. math:: \mathbb E \|g_m\|^2 = \|g\|^2 + \frac1m\,\frac{N - m}{N - 1}\,\operatorname{tr} \Sigma

    Parameters
    ----------
    seed : int
        Seed of the network, its data and the draws.
    sub_batches : sequence of int
        Values of m, at most the 500 training examples.
    draws : int
        Sub-batches drawn for each m, without replacement.

    Returns
    -------
    dict of str to numpy.ndarray
        ``measured`` and ``predicted`` root mean square norms, one entry for each m.

    Notes
    -----
    Derived in chapter 4.
    """
    config = replace(SMALL, data_seed=seed)
    net = training.run(config, seed, progress=False).model.to("cpu", torch.float64)
    problem = training.dataset(config)
    criterion = training.loss_function(config)
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def example_loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return criterion(torch.func.functional_call(net, weights, x[None]), y[None])

    gradients = torch.func.vmap(torch.func.grad(example_loss), in_dims=(None, 0, 0))
    columns = gradients(weights, problem.x.double(), problem.y).values()
    G = torch.cat([column.flatten(1) for column in columns], dim=1)
    n, mean = len(G), G.mean(dim=0)
    spread = (G - mean).square().sum(dim=1).mean()
    draw = torch.Generator().manual_seed(seed)
    measured, predicted = [], []
    for m in sub_batches:
        batches = torch.stack([G[torch.randperm(n, generator=draw)[:m]].mean(dim=0) for _ in range(draws)])
        measured.append(float(batches.square().sum(dim=1).mean().sqrt()))
        predicted.append(float((mean.square().sum() + spread / m * (n - m) / (n - 1)).sqrt()))
    return {"measured": np.array(measured), "predicted": np.array(predicted)}


def m_sharpness(seed: int, *, rhos: Sequence[float], sub_batches: Sequence[int]) -> dict[str, list[float]]:
    """SAM with a perturbation for each sub-batch of m examples; the batch itself is the same for every m.

    Parameters
    ----------
    seed : int
        Seed of the data, of its wrong labels and validation part, and of the training.
    rhos : sequence of float
        Radii.
    sub_batches : sequence of int
        Values of m, each a divisor of the batch of 200.

    Returns
    -------
    dict
        For each m under ``"m = ... validation"`` and ``"m = ... test"`` the accuracy in percent at the end of
        training, and under ``"m = ... trace"`` the trace of the training loss's Hessian; one entry a radius.

    Notes
    -----
    Source: Foret et al. 2021 (arXiv 2010.01412), section 4.1. Claim G5, chapter 4.
    """
    row: dict[str, list[float]] = {}
    for m in sub_batches:
        columns: dict[str, list[float]] = {"validation": [], "test": [], "trace": []}
        for rho in rhos:
            config = replace(M_SHARPNESS, sub_batch=m, rho=rho, data_seed=seed)
            result = training.run(config, seed, progress=False)
            columns["validation"].append(100 * result.final("validation_accuracy"))
            columns["test"].append(100 * result.final("test_accuracy"))
            columns["trace"].append(_trace(result))
        row |= {f"m = {m} {name}": values for name, values in columns.items()}
    return row


def _trace(result: training.Result) -> float:
    problem = training.dataset(result.config).to(next(result.model.parameters()).device)
    criterion = training.loss_function(result.config)
    return sharpness.trace(
        lambda: criterion(result.model(problem.x), problem.y), result.model.parameters(), samples=40
    ).value


def at_tuned_radius(stored: results.Stored) -> dict[str, tuple[float, np.ndarray]]:
    """Test accuracy of each m at its own radius, chosen by validation accuracy on other seeds.

    Parameters
    ----------
    stored : samkit.results.Stored
        Of :func:`~samkit.experiments.surrogate.m_sharpness`; seeds from 100 on choose the radii.

    Returns
    -------
    dict of str to tuple
        For each ``"m = ..."`` the radius, and the test accuracy in percent of the other seeds (n,).

    Raises
    ------
    ValueError
        If a best radius lies at an end of the grid, which then has to be extended.
    """
    rhos, choosing = stored.config["rhos"], np.array(stored.seeds) >= TUNING_SEEDS
    found = {}
    for m in stored.config["sub_batches"]:
        best = int(stored.column(f"m = {m} validation")[choosing].mean(axis=0).argmax())
        if best in (0, len(rhos) - 1):
            raise ValueError(f"the best radius of m = {m}, {rhos[best]}, lies at an end of the grid {rhos}")
        found[f"m = {m}"] = (rhos[best], stored.column(f"m = {m} test")[~choosing, best])
    return found


def downhill(distances: Sequence[float] | float) -> np.ndarray:
    """Points on the line through the saddle of ``two_basins`` along which the loss falls fastest.

    Parameters
    ----------
    distances : sequence of float
        Distances from the saddle, positive towards the flat minimum, shape (...).

    Returns
    -------
    numpy.ndarray
        The points (m, s), shape (..., 2).
    """
    saddle = torch.tensor(landscapes.SADDLE, dtype=torch.float64)
    H = torch.autograd.functional.hessian(landscapes.two_basins, saddle)
    unstable = torch.linalg.eigh(H).eigenvectors[:, 0].numpy()
    unstable = unstable * np.sign(unstable[0])
    return saddle.numpy() + np.asarray(distances, dtype=float)[..., None] * unstable


def catchment(
    rho: float, distances: Sequence[float], *, learning_rate: float = 5.0, steps: int = 4000
) -> np.ndarray:
    """Which starts on the downhill line through the saddle of ``two_basins`` SAM pulls into the saddle.

    Small steps without momentum stand for the flow. The last steps jump about the saddle, within a distance
    that shrinks with the learning rate.

    Parameters
    ----------
    rho : float
        SAM's radius.
    distances : sequence of float
        Distances from the saddle, positive towards the flat minimum, shape (...).
    learning_rate : float
        The step.
    steps : int
        Number of steps.

    Returns
    -------
    numpy.ndarray of bool
        Whether SAM ends within 1 of the saddle, shape (...).
    """
    ends = paths(downhill(distances), rho, learning_rate=learning_rate, momentum=0.0, steps=steps)[-1]
    return np.linalg.norm(ends - landscapes.SADDLE, axis=-1) < 1


def edge(gradient_norm: float | np.ndarray, learning_rate: float, rho: float) -> float | np.ndarray:
    r"""The top eigenvalue up to which SAM is stable, with steps of size eta along an eigenvector.

    .. math:: \eta \lambda \Bigl(1 + \frac{\rho \lambda}{\|g\|}\Bigr) = 2 \quad\Longleftrightarrow\quad
        \lambda = \frac{\|g\|}{2\rho}\Bigl(\sqrt{1 + \frac{8\rho}{\eta \|g\|}} - 1\Bigr)

    Parameters
    ----------
    gradient_norm : float or numpy.ndarray
        :math:`\|g\|`, > 0.
    learning_rate : float
        :math:`\eta`.
    rho : float
        The radius; 0 gives gradient descent's :math:`2/\eta`.

    Returns
    -------
    float or numpy.ndarray
        The edge.

    Examples
    --------
    >>> from samkit.experiments.surrogate import edge
    >>> edge(1.0, learning_rate=0.1, rho=0.0), float(edge(1.0, learning_rate=0.1, rho=0.1))
    (20.0, 10.0)

    Notes
    -----
    Source: Long & Bartlett 2024 (arXiv 2309.12488), theorem 1. Derived in chapter 4.
    """
    if rho == 0:
        return 2 / learning_rate + 0 * gradient_norm
    # The same root without the difference of two nearly equal numbers.
    return 4 / learning_rate / (1 + np.sqrt(1 + 8 * rho / (learning_rate * gradient_norm)))


def along_the_way(
    seed: int, *, learning_rate: float, rho: float, time: float = 200.0
) -> dict[str, np.ndarray]:
    r"""The top eigenvalue under full-batch SAM beside SAM's own edge of stability.

    Parameters
    ----------
    seed : int
        Seed of the start and of the data.
    learning_rate : float
        :math:`\eta`.
    rho : float
        The radius; 0 is gradient descent.
    time : float
        :math:`\eta` times the number of steps.

    Returns
    -------
    dict
        As :func:`~samkit.experiments.measuring.gradient_descent`, and ``own_edge``, one entry a measurement.
    """
    config = edge_config(learning_rate, seed, optimizer="sam", time=time, rho=rho)
    path = gradient_descent(config, seed)
    return path | {"own_edge": edge(path["gradient_norm"], learning_rate, rho)}


def own_edge(
    seed: int, *, learning_rate: float, rhos: Sequence[float], time: float = 200.0
) -> dict[str, Any]:
    """Where the top eigenvalue settles, in units of SAM's own edge and of gradient descent's.

    Parameters
    ----------
    seed : int
        Seed of the start and of the data.
    learning_rate : float
        The step.
    rhos : sequence of float
        Radii.
    time : float
        Learning rate times the number of steps.

    Returns
    -------
    dict
        For each radius, averaged over the last fifth of training: ``own``, the top eigenvalue over SAM's
        edge, and ``gd``, the top eigenvalue times eta over 2.
    """
    row: dict[str, Any] = {"own": [], "gd": []}
    for rho in rhos:
        path = along_the_way(seed, learning_rate=learning_rate, rho=rho, time=time)
        last = path["time"] >= 0.8 * path["time"][-1]
        row["own"].append(float(np.mean(path["top_eigenvalue"][last] / path["own_edge"][last])))
        row["gd"].append(settled(path))
    return row


STORED = {
    "m_sharpness": Experiment(
        m_sharpness,
        {"rhos": [0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6], "sub_batches": [200, 50, 25]},
        seeds=[*range(12), *range(TUNING_SEEDS, TUNING_SEEDS + 6)],
    ),
    "captured": Experiment(
        captured, {"rhos": [0.01, 0.03, 0.1, 0.3, 1.0], "ascent_steps": [1, 2, 5]}, seeds=range(8)
    ),
    "captured_after_sam": Experiment(
        captured,
        {"rhos": [0.01, 0.03, 0.1, 0.3, 1.0], "ascent_steps": [1, 2, 5], "train_rho": 0.1},
        seeds=range(8),
    ),
    "own_edge": Experiment(own_edge, {"learning_rate": 0.1, "rhos": [0.0, 0.02, 0.05, 0.1]}, seeds=range(6)),
}
"""The shares of the worst case after SGD and after SAM, m-sharpness (claim G5), and SAM's edge."""
