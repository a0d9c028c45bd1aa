"""Chapter 7: where l_2-SAM ends up, what its normalisation does, and what more examples and layers change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from scipy.special import expit

from samkit.diagonal import banded, critical_scale, flow, max_margin
from samkit.experiments import Experiment
from samkit.experiments.amplification import major_first_scale

__all__ = [
    "banded_networks",
    "diagonal_gradient",
    "first_leader",
    "first_reaching",
    "limit_direction",
    "linear_networks",
    "margins_along",
    "outputs_gradient",
    "sam_steps",
    "scalar_gradient",
    "shares_at_equal_loss",
    "without_normalisation",
]

Gradient = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def sam_steps(
    theta: ArrayLike,
    gradient: Gradient,
    rho: ArrayLike,
    *,
    learning_rate: float = 0.01,
    normalised: bool = True,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    r"""SAM written out in NumPy, for many runs at once and with no end.

    .. math:: \varepsilon = \rho\, \frac{g(\theta)}{\|g(\theta)\|_2} \quad \text{or} \quad
        \varepsilon = \rho\, g(\theta), \qquad \theta \leftarrow \theta - \eta\, g(\theta + \varepsilon)

    Parameters
    ----------
    theta : array_like
        Initial weights, ``(runs, ...)``.
    gradient : callable
        From weights to losses ``(runs,)`` and gradients, shaped as the weights.
    rho : array_like
        The radius, a number or one for each run; 0 is gradient descent.
    learning_rate : float
        The step eta.
    normalised : bool
        Whether the perturbation has length rho, or rho times that of the gradient.

    Yields
    ------
    loss : numpy.ndarray
        ``(runs,)``, before the first update and after each.
    theta : numpy.ndarray
        The weights there.

    Examples
    --------
    On theta^2/2 with rho = 1, one step from 2 goes along the gradient at 3.

    >>> import itertools
    >>> import numpy as np
    >>> from samkit.experiments.many_examples import sam_steps
    >>> run = sam_steps(np.array([[2.0]]), lambda t: (t[:, 0] ** 2 / 2, t), 1.0, learning_rate=0.1)
    >>> next(itertools.islice(run, 1, None))[1].round(12).tolist()
    [[1.7]]
    """
    theta = np.array(theta, dtype=np.float64)
    wide = (-1,) + (1,) * (theta.ndim - 1)
    rho = np.broadcast_to(np.asarray(rho, dtype=np.float64), len(theta)).reshape(wide)
    while True:
        loss, g = gradient(theta)
        yield loss, theta
        if normalised:
            length = np.sqrt((g.reshape(len(g), -1) ** 2).sum(axis=1)).reshape(wide)
            g = g / np.where(length > 0, length, 1)
        theta = theta - learning_rate * gradient(theta + rho * g)[1]


def first_reaching(
    loss: float, run: Iterator[tuple[np.ndarray, np.ndarray]], *, limit: int = 20_000
) -> np.ndarray:
    """The weights of each run when its loss is first reached.

    Parameters
    ----------
    loss : float
        The loss to reach.
    run : iterator
        As from :func:`sam_steps`.
    limit : int
        The largest number of updates.

    Returns
    -------
    numpy.ndarray
        ``(runs, ...)``; NaN for a run that does not get there.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.many_examples import first_reaching, sam_steps
    >>> run = sam_steps(np.array([[2.0]]), lambda t: (t[:, 0] ** 2 / 2, t), 0.0, learning_rate=0.5)
    >>> first_reaching(0.2, run).tolist()
    [[0.5]]
    """
    found = None
    for _, (losses, theta) in zip(range(limit + 1), run, strict=False):
        if found is None:
            found, waiting = np.full(theta.shape, np.nan), np.ones(len(theta), bool)
        new = waiting & (losses <= loss)
        found[new] = theta[new]
        waiting &= ~new
        if not waiting.any():
            break
    return found


def diagonal_gradient(rows: ArrayLike) -> Gradient:
    r"""The mean logistic loss of two-layer diagonal networks, and its gradient.

    Parameters
    ----------
    rows : array_like
        The examples times their labels, ``(n, d)``, or ``(runs, n, d)`` for each run its own.

    Returns
    -------
    callable
        From weights ``(runs, 2, d)`` to losses and gradients.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.many_examples import diagonal_gradient
    >>> loss, g = diagonal_gradient([[2.0]])(np.array([[[0.0], [1.0]]]))
    >>> loss.round(6).tolist(), g.tolist()
    ([0.693147], [[[-1.0], [-0.0]]])
    """
    rows = np.asarray(rows, dtype=np.float64)
    across = np.swapaxes(rows, -1, -2)

    def gradient(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        margin = (rows @ theta.prod(axis=1)[..., None])[..., 0]
        pull = (across @ expit(-margin)[..., None])[..., 0] / margin.shape[1]
        return np.logaddexp(0, -margin).mean(axis=1), -pull[:, None] * theta[:, ::-1]

    return gradient


def scalar_gradient(rows: ArrayLike) -> Gradient:
    r"""The mean logistic loss of ordinary two-layer networks with one output, and its gradient.

    .. math:: f(x) = \langle a, W x \rangle, \qquad \beta = W^\top a

    Parameters
    ----------
    rows : array_like
        The examples times their labels, ``(n, d)`` or ``(runs, n, d)``.

    Returns
    -------
    callable
        From weights ``(runs, hidden, d + 1)``, W with a as its last column, to losses and gradients.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.many_examples import scalar_gradient
    >>> loss, g = scalar_gradient([[2.0]])(np.array([[[0.0, 1.0]]]))
    >>> loss.round(6).tolist(), g.tolist()
    ([0.693147], [[[-1.0, -0.0]]])
    """
    rows = np.asarray(rows, dtype=np.float64)
    across = np.swapaxes(rows, -1, -2)

    def gradient(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        W, a = theta[..., :-1], theta[..., -1:]
        margin = (rows @ (np.swapaxes(W, 1, 2) @ a))[..., 0]
        pull = across @ expit(-margin)[..., None] / margin.shape[1]  # (runs, d, 1)
        g = -np.concatenate([a * np.swapaxes(pull, 1, 2), W @ pull], axis=2)
        return np.logaddexp(0, -margin).mean(axis=1), g

    return gradient


def outputs_gradient(mu: ArrayLike, *, one_loss: bool) -> Gradient:
    r"""The logistic loss of ordinary two-layer networks with an output for each feature, and its gradient.

    .. math:: z_k = \mu_k \langle W_2[k], W_1[:, k] \rangle, \qquad
        L = \ell\Bigl(\sum_k z_k\Bigr) \quad \text{or} \quad L = \frac1K \sum_k \ell(z_k)

    Parameters
    ----------
    mu : array_like
        The strengths of the features, ``(K,)``.
    one_loss : bool
        Whether the logits are summed into one loss, or each output has its own.

    Returns
    -------
    callable
        From weights ``(runs, 2, K, hidden)``, the rows of W2 and the columns of W1, to losses and gradients.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.many_examples import outputs_gradient
    >>> loss, g = outputs_gradient([2.0], one_loss=True)(np.array([[[[0.0]], [[1.0]]]]))
    >>> loss.round(6).tolist(), g.tolist()
    ([0.693147], [[[[-1.0]], [[-0.0]]]])
    """
    mu = np.asarray(mu, dtype=np.float64)

    def gradient(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = mu * theta.prod(axis=1).sum(axis=-1)
        if one_loss:
            z = z.sum(axis=1, keepdims=True)
        slope = np.broadcast_to(expit(-z) / z.shape[1], (len(z), len(mu)))
        return np.logaddexp(0, -z).mean(axis=1), -(slope * mu)[:, None, :, None] * theta[:, ::-1]

    return gradient


def margins_along(rows: ArrayLike, init_scale: float, rho: float, norms: Sequence[float]) -> list[float]:
    r"""The margin of l_2-SAM's flow on many examples, over the largest margin with beta >= 0.

    .. math:: \frac{d \log w_j}{ds} = u_j \hat G_j, \qquad
        u_j = 1 - \frac{\rho\, G_j}{\sqrt2\, \|G \odot w\|_2}, \qquad
        G = \frac{\sum_i |l'_i|\, a_i}{\sum_i |l'_i|}

    for balanced positive layers, with G at the weights w and :math:`\hat G` at the perturbed ones, u w.
    Neither weights nor losses underflow in these variables; the equations are stiff, because far out examples
    hold each other in check, and so an implicit method takes the exact Jacobian.

    Parameters
    ----------
    rows : array_like
        The examples times their labels, :math:`a_i`, ``(n, d)``.
    init_scale : float
        The initial weights alpha.
    rho : float
        The radius; 0 is gradient descent.
    norms : sequence of float
        The l_1 norms of beta at which the margin is taken, increasing.

    Returns
    -------
    list of float
        For each norm, 1 for the max margin itself; 0 if the flow does not get to that norm.

    Raises
    ------
    ValueError
        If the norms do not increase.

    Examples
    --------
    Two examples that need both features equally.

    >>> from samkit.experiments.many_examples import margins_along
    >>> [round(m, 3) for m in margins_along([[2.0, 0.0], [0.0, 2.0]], 0.5, 0.1, [1e3])]
    [1.0]
    """
    rows = np.asarray(rows, dtype=np.float64)
    if (np.diff(norms) <= 0).any():
        raise ValueError(f"norms must increase from one to the next; got {norms!r}")

    def pull(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """G at w, and its derivative by w^2."""
        log_slope = -np.logaddexp(0, rows @ w**2)
        share = np.exp(log_slope - log_slope.max())
        share /= share.sum()
        change = (np.diag(share) - np.outer(share, share)) * np.expm1(log_slope)
        return share @ rows, rows.T @ change @ rows

    def velocity(_: float, log_w: np.ndarray) -> np.ndarray:
        w = np.exp(log_w)
        G, _ = pull(w)
        up = 1 - rho * G / (np.sqrt(2) * np.linalg.norm(G * w))
        return up * pull(up * w)[0]

    def jacobian(_: float, log_w: np.ndarray) -> np.ndarray:
        w = np.exp(log_w)
        G, change = pull(w)
        dG = change * (2 * w**2)
        n = np.sqrt(2) * np.linalg.norm(G * w)
        dn = 2 / n * ((G * w**2) @ dG + (G * w) ** 2)
        up, d_up = 1 - rho * G / n, -rho * (dG / n - np.outer(G, dn) / n**2)
        above, change = pull(up * w)
        d_above = change @ (2 * (up * w**2)[:, None] * (d_up + np.diag(up)))
        return above[:, None] * d_up + up[:, None] * d_above

    def reaches(norm: float) -> Callable[[float, np.ndarray], float]:
        return lambda _, log_w: np.log(norm) - np.logaddexp.reduce(2 * log_w)

    def collapsed(_: float, log_w: np.ndarray) -> float:
        return log_w.max() - np.log(1e-3 * init_scale)

    events = [*map(reaches, norms), collapsed]
    events[-1].terminal = events[-2].terminal = True
    start = np.full(rows.shape[1], np.log(init_scale))
    found = solve_ivp(velocity, (0, 300), start, "Radau", jac=jacobian, events=events, rtol=1e-6, atol=1e-6)
    best = max_margin(rows, np.ones(len(rows)), "l1", nonnegative=True).sum()
    margins = []
    for states in found.y_events[:-1]:
        beta = np.exp(2 * states[-1]) if len(states) else None
        margins.append(0.0 if beta is None else float((rows @ beta).min() / beta.sum() * best))
    return margins


def _rows(seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Banded rows y x, their mean, and the critical scale it predicts."""
    X, y = banded(seed=seed)
    rows = y[:, None] * X
    return rows, rows.mean(axis=0), critical_scale(np.sort(rows.mean(axis=0)))


def limit_direction(seed: int, *, norms: Sequence[float] = (1e2, 1e3, 1e4)) -> dict[str, float | list[float]]:
    """How near l_2-SAM's flow comes to the l_1 max margin (claim M6).

    Parameters
    ----------
    seed : int
        Seed of the features and of the examples.
    norms : sequence of float
        The l_1 norms of beta at which flows on many examples are looked at, increasing.

    Returns
    -------
    dict
        ``one_example``: the share of the major of three features when its coefficient is 1e200 rho^2,
        smallest of three starts. With banded examples the margin over the largest with beta >= 0 at each
        norm, smaller of two starts: ``banded`` for rho = 0.1, ``banded_large_radius`` for rho = 1, and
        ``gd_banded`` for gradient descent from all four starts. With ``_gap`` behind the name: what is
        missing to 1 at the last norm, over what was missing at the first, larger of the starts.
    """
    mu = np.cumsum(np.random.default_rng(seed).uniform(0.5, 1.0, 3))
    c, top = critical_scale(mu), major_first_scale(mu)
    shares = []
    for ratio in (1.05 * c, (c + top) / 2, 1.1 * top):
        late = flow(mu, ratio, 1.0).s_end + 250 / mu[-1]
        beta = flow(mu, ratio, 1.0, s=np.linspace(0, late, 4001)).beta
        end = beta[np.flatnonzero(beta[:, -1] >= 1e200)[0]]
        shares.append(end[-1] / end.sum())

    rows, _, c = _rows(seed)
    cases = [(rho, factor * c * rho) for rho in (0.1, 1.0) for factor in (1.1, 1.5)]
    sam = np.array([margins_along(rows, alpha, rho, norms) for rho, alpha in cases])
    gd = np.array([margins_along(rows, alpha, 0.0, norms) for _, alpha in cases])
    groups = {"banded": sam[:2], "banded_large_radius": sam[2:], "gd_banded": gd}
    margins = {name: found.min(axis=0).tolist() for name, found in groups.items()}
    gaps = {
        f"{name}_gap": float(((1 - found[:, -1]) / (1 - found[:, 0])).max()) for name, found in groups.items()
    }
    return {"one_example": float(min(shares))} | margins | gaps


def shares_at_equal_loss(
    mu: ArrayLike, init_scale: float, rho: float, *, loss: float = 0.1
) -> dict[str, list[float]]:
    r"""Shares :math:`\mu_j \beta_j` of the prediction with and without the normalisation, at equal loss.

    The matched radius, :math:`\rho' = \rho / \|g(\theta_0)\|_2`, makes the first perturbation the same.

    Parameters
    ----------
    mu : array_like
        The one example, ``(d,)``.
    init_scale, rho : float
        The uniform start alpha and the radius.
    loss : float
        The loss at which all are looked at.

    Returns
    -------
    dict
        Shares ``(d,)``, under ``"GD"``, ``"normalised"``, ``"same radius"`` and ``"matched radius"``; and
        that radius under ``"radius"``.

    Examples
    --------
    >>> from samkit.experiments.many_examples import shares_at_equal_loss
    >>> found = shares_at_equal_loss([1.0, 2.0, 3.0], 0.05, 0.1)
    >>> round(found["radius"][0], 3), [round(share, 2) for share in found["matched radius"]]
    (0.762, [0.33, 0.66, 0.0])
    """
    mu = np.asarray(mu, dtype=np.float64)
    gradient = diagonal_gradient([mu])
    theta = np.full((1, 2, len(mu)), init_scale)
    matched = float(rho / np.linalg.norm(gradient(theta)[1]))
    cases = {
        "GD": (0.0, True),
        "normalised": (rho, True),
        "same radius": (rho, False),
        "matched radius": (matched, False),
    }
    found = {"radius": [matched]}
    for name, (radius, normalised) in cases.items():
        run = sam_steps(theta, gradient, radius, normalised=normalised)
        parts = mu * first_reaching(loss, run)[0].prod(axis=0)
        found[name] = (parts / parts.sum()).tolist()
    return found


def first_leader(mu: ArrayLike, init_scales: Sequence[float], radius: float) -> list[int]:
    r"""The feature that leads when the loss first reaches 0.6, without the normalisation.

    From small starts it is the one with the largest :math:`\mu_j - \tfrac12 \rho' \mu_j^2`, whatever the
    scale: the major one if :math:`\rho' < 2/(\mu_{d-1} + \mu_d)`, and none grows if
    :math:`\rho' > 2/\mu_1`.

    Parameters
    ----------
    mu : array_like
        The one example, ``(d,)``.
    init_scales : sequence of float
        Uniform starts alpha.
    radius : float
        rho' in eps = rho' g.

    Returns
    -------
    list of int
        For each start the leader, counted from 1; 0 if the loss does not get there.

    Examples
    --------
    >>> from samkit.experiments.many_examples import first_leader
    >>> [first_leader([1.0, 2.0, 3.0], [0.01], radius)[0] for radius in (0.35, 0.45, 2.1)]
    [3, 2, 0]
    """
    mu = np.asarray(mu, dtype=np.float64)
    theta = np.broadcast_to(np.reshape(init_scales, (-1, 1, 1)), (len(init_scales), 2, len(mu)))
    run = sam_steps(theta, diagonal_gradient([mu]), radius, normalised=False)
    beta = first_reaching(0.6, run, limit=10_000).prod(axis=1)
    return [0 if np.isnan(row[0]) else int(row.argmax()) + 1 for row in beta]


def without_normalisation(seed: int) -> dict[str, float]:
    """What is left of minor first when the perturbation is not normalised (claim M10).

    Parameters
    ----------
    seed : int
        Seed of the three features.

    Returns
    -------
    dict
        The share of the prediction that the two weaker features carry at a loss of 0.1, minus gradient
        descent's, under ``with_normalisation``, ``same_radius`` and ``matched_radius``; ``any_scale``: 1 if
        starts of 0.001, 0.003 and 0.01 have the same first leader at the matched radius, else 0.
    """
    mu = np.cumsum(np.random.default_rng(seed).uniform(0.5, 1.5, 3))
    c, top = critical_scale(mu), major_first_scale(mu)
    found = shares_at_equal_loss(mu, 0.1 * (c + (top - c) / 8), 0.1)
    more = {name: found["GD"][-1] - shares[-1] for name, shares in found.items() if name != "radius"}
    return {
        "with_normalisation": more["normalised"],
        "same_radius": more["same radius"],
        "matched_radius": more["matched radius"],
        "any_scale": float(len(set(first_leader(mu, [0.001, 0.003, 0.01], found["radius"][0]))) == 1),
    }


def _band_shares(mean: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Shares of the mean prediction, ``(runs, 3)``, from means and predictors ``(runs, 12)``."""
    bands = (mean * beta).reshape(len(beta), 3, -1).sum(axis=2)
    return bands / bands.sum(axis=1, keepdims=True)


def banded_networks(
    seeds: Sequence[int], *, rho: float = 0.1, loss: float = 0.3, factors: Sequence[float] = (1.05, 1.2, 2.0)
) -> dict[str, np.ndarray]:
    """Diagonal networks on banded data: shares of the bands, and the border of collapse (claim M12).

    Parameters
    ----------
    seeds : sequence of int
        Seeds of the data.
    rho : float
        The radius.
    loss : float
        The loss at which the shares are taken.
    factors : sequence of float
        Initial scales, in units of the critical scale that the column means predict.

    Returns
    -------
    dict
        ``sam`` and ``gd``: shares of the weak, middle and strong band ``(factors, seeds, 3)``; ``border``:
        where training starts to succeed, over the prediction, ``(seeds,)``.
    """
    rows, mean, c = (np.array(values) for values in zip(*map(_rows, seeds), strict=True))
    d = rows.shape[2]

    def end(radius: float, factor: float, limit: int = 20_000) -> np.ndarray:
        theta = np.broadcast_to((rho * factor * c)[:, None, None], (len(c), 2, d))
        run = sam_steps(theta, diagonal_gradient(rows), radius)
        return first_reaching(loss, run, limit=limit).prod(axis=1)

    grid = np.linspace(0.95, 1.05, 11)
    trains = np.array([~np.isnan(end(rho, factor, 3000)[:, 0]) for factor in grid])
    return {
        "sam": np.array([_band_shares(mean, end(rho, factor)) for factor in factors]),
        "gd": np.array([_band_shares(mean, end(0.0, factor)) for factor in factors]),
        "border": (grid - (grid[1] - grid[0]) / 2)[trains.argmax(axis=0)],
    }


def linear_networks(
    seeds: Sequence[int], *, hidden: int = 20, rho: float = 0.1, scales: tuple[float, float] = (2.0, 1.6)
) -> dict[str, np.ndarray]:
    """Ordinary two-layer linear networks, with one output and with three (claim M12).

    Parameters
    ----------
    seeds : sequence of int
        Seeds of the data and of the weights.
    hidden : int
        Number of hidden units.
    rho : float
        The radius.
    scales : tuple of float
        Norms of the start, in units of rho: with one output that of the two layers seen along the mean
        example, with three outputs that of all weights.

    Returns
    -------
    dict
        Shares of the prediction ``(2, seeds, 3)``, first SAM's and then gradient descent's, NaN where the
        loss is not reached: ``one_output`` (bands, at a loss of 0.3), ``one_loss`` (features, logits summed
        into one loss, at 0.3) and ``own_losses`` (features, a loss for each output, at 0.6).
    """
    rows, mean, _ = (np.array(values) for values in zip(*map(_rows, seeds), strict=True))
    runs, d = mean.shape
    draws = [np.random.default_rng(seed) for seed in seeds]
    theta = np.array([draw.standard_normal((hidden, d + 1)) for draw in draws])
    unit = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    seen = np.einsum("rhd,rd->rh", theta[..., :-1], unit)
    size = np.sqrt((seen**2 + theta[..., -1] ** 2).sum(axis=1))
    theta *= (scales[0] * rho / size)[:, None, None]
    found = {"one_output": []}
    for radius in (rho, 0.0):
        end = first_reaching(0.3, sam_steps(theta, scalar_gradient(rows), radius))
        beta = np.einsum("rhd,rh->rd", end[..., :-1], end[..., -1])
        found["one_output"].append(_band_shares(mean, beta))

    mu = np.array([1.0, 2.0, 3.0])
    theta = np.array([draw.standard_normal((2, len(mu), hidden)) for draw in draws])
    theta *= (scales[1] * rho / np.linalg.norm(theta.reshape(runs, -1), axis=1))[:, None, None, None]
    for name, one_loss, loss in (("one_loss", True, 0.3), ("own_losses", False, 0.6)):
        gradient = outputs_gradient(mu, one_loss=one_loss)
        ends = [first_reaching(loss, sam_steps(theta, gradient, radius)) for radius in (rho, 0.0)]
        parts = mu * np.array(ends).prod(axis=2).sum(axis=-1)
        found[name] = parts / parts.sum(axis=2, keepdims=True)
    return {name: np.array(shares) for name, shares in found.items()}


STORED = {"limit_direction": Experiment(limit_direction, {"norms": [1e2, 1e3, 1e4]}, range(12, 24))}
