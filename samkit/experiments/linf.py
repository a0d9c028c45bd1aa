"""Chapter 6: l_inf-SAM on linear networks, where the start decides which feature wins."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from samkit import _arguments
from samkit.diagonal import DiagonalNetwork, flow, linf_limit, max_margin, separable
from samkit.experiments.implicit_bias import angle
from samkit.optim import SAM

__all__ = [
    "STORED",
    "angles_to_the_l2_margin",
    "blow_ups",
    "margin_of_the_survivors",
    "minor_winner",
    "one_layer",
    "thresholds",
    "train",
    "winners",
]

STORED: dict = {}
"""Everything in chapter 6 runs in the notebook."""

METHODS = ("GD", "linf-SAM", "l2-SAM")
"""The methods that ``one_layer`` runs side by side."""


def one_layer(
    rows: ArrayLike, rho: float, times: Sequence[float], *, step: float = 0.05
) -> dict[str, np.ndarray]:
    r"""A linear classifier under gradient descent, l_inf-SAM and l_2-SAM, in steps of equal rescaled time.

    .. math::
        \beta \leftarrow \beta + \Delta s \sum_i q_i a_i, \qquad
        q_i \propto |l'(\langle a_i, \beta + \varepsilon\rangle)|, \quad \sum_i q_i = 1

    with the logistic loss, a start at 0, and the perturbation of each method. Only logarithms of slopes are
    used, so that a loss of exp(-1000) is no obstacle.

    Parameters
    ----------
    rows : array_like
        The examples times their labels, :math:`a_i = y_i x_i`, ``(N, d)``, or a batch ``(B, N, d)``.
    rho : float
        Radius of both SAMs.
    times : sequence of float
        Rescaled times at which to look, increasing.
    step : float
        :math:`\Delta s`; stable as long as it is small against one over the squared length of an example.

    Returns
    -------
    dict
        ``beta`` ``(..., 3, T, d)`` and ``log_time``, the natural logarithm of the real time
        :math:`t = \int ds / \overline{|l'|}`, ``(..., 3, T)``; methods in the order gradient descent,
        l_inf-SAM, l_2-SAM.

    Raises
    ------
    ValueError
        If the rows have another shape or are not finite, the radius is negative, the times do not increase
        from 0 or later, or the step is not positive.

    Examples
    --------
    One example: the direction is right from the start.

    >>> from samkit.experiments.linf import one_layer
    >>> one_layer([[3.0, 4.0]], 0.1, [1.0])["beta"].round(6).tolist()
    [[[3.0, 4.0]], [[3.0, 4.0]], [[3.0, 4.0]]]

    Notes
    -----
    Claim M1, chapter 6.
    """
    rows, times = np.asarray(rows, dtype=np.float64), np.asarray(times, dtype=np.float64)
    if rows.ndim not in (2, 3) or not rows.size or not np.isfinite(rows).all():
        raise ValueError(f"rows must be finite and have shape (N, d) or (B, N, d), got shape {rows.shape}")
    if times.ndim != 1 or not np.isfinite(times).all() or (np.diff(times, prepend=0.0) < 0).any():
        raise ValueError(f"times must be finite and increase from 0 or later, got {times.tolist()}")
    rho, step = _arguments.number("rho", rho), _arguments.number("step", step, positive=True)
    columns = rows.swapaxes(-1, -2)
    beta = np.zeros((*rows.shape[:-2], len(METHODS), rows.shape[-1]))
    log_time = np.full(beta.shape[:-1], -np.inf)

    def shares(beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        log_slope = -np.logaddexp(0, beta @ columns)
        largest = log_slope.max(-1, keepdims=True)
        slope = np.exp(log_slope - largest)
        total = slope.sum(-1, keepdims=True)
        return slope / total, (largest + np.log(total))[..., 0]

    seen: dict[str, list[np.ndarray]] = {"beta": [], "log_time": []}
    done = 0
    for count in np.rint(times / step).astype(int):
        for _ in range(count - done):
            ascent = shares(beta)[0] @ rows  # minus the gradient, up to a factor
            ascent[..., 0, :] = 0
            ascent[..., 1, :] = np.sign(ascent[..., 1, :])
            ascent[..., 2, :] /= np.linalg.norm(ascent[..., 2, :], axis=-1, keepdims=True)
            q, log_total = shares(beta - rho * ascent)
            beta = beta + step * q @ rows
            log_time = np.logaddexp(log_time, np.log(step * rows.shape[-2]) - log_total)
        done = count
        seen["beta"].append(beta)
        seen["log_time"].append(log_time)
    return {name: np.stack(values, axis=beta.ndim - 1) for name, values in seen.items()}


def angles_to_the_l2_margin(
    seeds: Sequence[int],
    *,
    n: int = 20,
    d: int = 5,
    rho: float = 0.5,
    times: Sequence[float] = (100.0, 1000.0),
) -> np.ndarray:
    """How far three methods on one layer are from the exact l_2 max margin (claim M1).

    Parameters
    ----------
    seeds : sequence of int
        Seeds of the data; all are run at once.
    n, d : int
        Number of examples and of features.
    rho : float
        Radius of both SAMs.
    times : sequence of float
        Rescaled times at which to look.

    Returns
    -------
    numpy.ndarray
        Angles in degrees ``(seeds, 3, T)``; methods in the order gradient descent, l_inf-SAM, l_2-SAM.
    """
    drawn = [separable(n, d, seed=seed) for seed in seeds]
    rows = np.stack([y[:, None] * X for X, y in drawn])
    best = np.stack([max_margin(X, y, "l2") for X, y in drawn])
    return angle(one_layer(rows, rho, times)["beta"], best[:, None, None])


def train(
    rows: ArrayLike,
    init_scale: ArrayLike | tuple,
    rho: float,
    *,
    depth: int = 2,
    loss: str = "logistic",
    learning_rate: float = 0.01,
    steps: int = 1000,
) -> dict[str, np.ndarray]:
    r"""Train a diagonal network by the real ``samkit.optim.SAM(norm="linf")``.

    Parameters
    ----------
    rows : array_like
        The examples times their labels, ``(N, d)``.
    init_scale : number, array_like or tuple
        Initial weights, as for :class:`~samkit.diagonal.DiagonalNetwork`.
    rho : float
        The radius; 0 is gradient descent.
    depth : int
        Number of layers.
    loss : "logistic" or "linear"
        The mean of log(1 + exp(-z)), or of -z, whose slope is 1 everywhere: then real time is rescaled time,
        and the coordinates do not see each other, so that many experiments fit in one network.
    learning_rate : float
        The step.
    steps : int
        Number of steps.

    Returns
    -------
    dict
        After 0, 1, ..., ``steps`` steps: the rescaled time ``s`` ``(T,)``, the sum of learning rate times
        mean \|l'\| at the ascent point; ``loss`` ``(T,)``; ``layers`` ``(T, L, d)`` and ``beta`` ``(T, d)``.

    Raises
    ------
    ValueError
        If the loss is neither word, the rows have another shape or are not finite, or ``steps`` is negative.

    Examples
    --------
    A weight below the radius falls, one at the radius stays.

    >>> from samkit.experiments.linf import train
    >>> path = train([[1.0, 1.0]], [0.5, 1.0], rho=1.0, learning_rate=0.1, steps=1, loss="linear")
    >>> path["layers"][-1].round(12).tolist()
    [[0.45, 1.0], [0.45, 1.0]]
    """
    if loss not in ("logistic", "linear"):
        raise ValueError(f"loss must be 'logistic' or 'linear', got {loss!r}")
    rows, steps = np.asarray(rows, dtype=np.float64), _arguments.integer("steps", steps, 0)
    if rows.ndim != 2 or not rows.size or not np.isfinite(rows).all():
        raise ValueError(f"rows must be finite and have shape (N, d), got shape {rows.shape}")
    x = torch.tensor(rows.tolist(), dtype=torch.float64)
    network = DiagonalNetwork(x.shape[1], depth, init_scale, dtype=torch.float64)
    optimizer = SAM(network.parameters(), torch.optim.SGD, rho=rho, norm="linf", lr=learning_rate)
    slope = 1.0

    def value() -> torch.Tensor:
        nonlocal slope
        z = network(x)
        if loss == "linear":
            return -z.mean()
        slope = float(torch.sigmoid(-z.detach()).mean())
        return torch.nn.functional.softplus(-z).mean()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        found = value()
        found.backward()
        return found

    def weights() -> np.ndarray:
        return torch.stack(list(network.layers)).detach().numpy().copy()

    s, losses, layers = [0.0], [], [weights()]
    for _ in range(steps):
        losses.append(optimizer.step(closure).item())
        s.append(s[-1] + learning_rate * slope)  # the closure ran last at the ascent point
        layers.append(weights())
    with torch.no_grad():
        losses.append(value().item())
    layers = np.stack(layers)
    return {"s": np.array(s), "loss": np.array(losses), "layers": layers, "beta": layers.prod(axis=1)}


def thresholds(
    seed: int = 0, *, each: int = 16, until: float = 6.0, learning_rate: float = 0.001
) -> dict[str, np.ndarray]:
    """Weights that start below, at and above the radius, under the real optimizer (claim M3).

    Parameters
    ----------
    seed : int
        Seed of strengths and starts.
    each : int
        Number of weights of each kind.
    until : float
        Rescaled time.
    learning_rate : float
        The step.

    Returns
    -------
    dict
        One entry a weight, in units of the radius: ``below``, size at the end of those that started below;
        ``landing``, the moment they first reach zero over the predicted one; ``at``, the distance from the
        radius at the end of those that started there; ``growth``, the growth rate of w - rho over mu of those
        that started above.
    """
    draw = np.random.default_rng(seed)
    mu = draw.uniform(0.5, 3.0, 3 * each)
    alpha = np.concatenate([draw.uniform(0.1, 0.9, each), np.ones(each), draw.uniform(1.1, 2.0, each)])
    steps = round(until / learning_rate)
    path = train([mu], alpha, 1.0, loss="linear", learning_rate=learning_rate, steps=steps)
    w, (low, at, high) = path["layers"].min(axis=1), np.split(np.arange(3 * each), 3)
    landed = path["s"][(w[:, low] <= 0).argmax(axis=0)]
    return {
        "below": np.abs(path["layers"][-1][:, low]).max(axis=0),
        "landing": landed / (-np.log(1 - alpha[low]) / mu[low]),
        "at": np.abs(path["layers"][-1][:, at] - 1).max(axis=0),
        "growth": np.log((w[-1, high] - 1) / (alpha[high] - 1)) / (mu[high] * path["s"][-1]),
    }


def minor_winner(seeds: Sequence[int], *, learning_rate: float = 0.01) -> dict[str, np.ndarray]:
    """Only the minor feature starts above the radius: who wins, under the real optimizer (claim M4)?

    Parameters
    ----------
    seeds : sequence of int
        Seeds of strengths and starts; all are trained at once, in one network, because on the loss -z
        coordinates do not see each other.
    learning_rate : float
        The step.

    Returns
    -------
    dict
        One angle in degrees for each seed: ``linf``, between the coefficients under l_inf-SAM and the minor
        feature when one of them is 1e12; ``gd``, between those under gradient descent and the major feature
        when one of them is 1e100.
    """
    mu, alpha = [], []
    for seed in seeds:
        draw = np.random.default_rng(seed)
        mu.append(draw.uniform(0.4, 0.8) + np.append(0, np.cumsum(draw.uniform(0.4, 0.8, 3))))
        alpha.append(np.append(draw.uniform(1.2, 2.0), draw.uniform(0.2, 0.9, 3)))
    mu, alpha = np.array(mu), np.array(alpha)
    found = {}
    for name, rho, size, winner in (("linf", 1.0, 1e12, 0), ("gd", 0.0, 1e100, -1)):
        s = np.log(np.sqrt(size) / (alpha - rho)[:, winner]) / mu[:, winner]
        steps = int(1.02 * s.max() / learning_rate)
        path = train(
            [mu.ravel()], alpha.ravel(), rho, loss="linear", learning_rate=learning_rate, steps=steps
        )
        beta = path["beta"].reshape(-1, *mu.shape)
        there = (beta[..., winner] >= size).argmax(axis=0)
        end = beta[there, np.arange(len(seeds))]
        found[name] = angle(end / end.max(axis=1, keepdims=True), np.eye(mu.shape[1])[winner])
    return found


def winners(
    mu: ArrayLike, alpha: ArrayLike, rho: float, depth: int, *, step: float = 0.02, steps: int = 3000
) -> np.ndarray:
    r"""Which coordinate wins from each of many balanced starts, by stepping and looking.

    .. math:: w \leftarrow w + \Delta s\, \mu\, (w - \rho \operatorname{sign} w^{L-1})^{L-1}

    with a :math:`\Delta s` for each start by which no \|w - rho\| changes by more than the fraction ``step``.

    Parameters
    ----------
    mu : array_like
        Strengths ``(d,)``.
    alpha : array_like
        Positive starts ``(..., d)``.
    rho : float
        The radius; 0 is gradient descent.
    depth : int
        Number of layers L.
    step : float
        The fraction.
    steps : int
        The most steps that any start gets.

    Returns
    -------
    numpy.ndarray
        The first coordinate to reach 1e4 times the radius (or, for gradient descent, 1e4), ``(...)``, and -1
        where none does.

    Raises
    ------
    ValueError
        If a strength or a start is not finite and positive, or the depth is below 2.

    Examples
    --------
    >>> from samkit.experiments.linf import winners
    >>> winners([1.0, 2.0], [[1.5, 0.5], [1.5, 1.2], [0.5, 0.5]], rho=1.0, depth=2)
    array([ 0,  1, -1])
    """
    mu, w = np.asarray(mu, dtype=np.float64), np.array(alpha, dtype=np.float64)
    if not all((np.isfinite(values) & (values > 0)).all() for values in (mu, w)):
        raise ValueError("mu and alpha must be finite and > 0: winners steps from balanced positive layers")
    depth = _arguments.integer("depth", depth, 2)
    limit = 1e4 * (rho or 1.0)
    for _ in range(steps):
        running = (w.max(-1) < limit) & (w.max(-1) > 0)
        if not running.any():
            break
        u = w - rho * np.sign(w ** (depth - 1))
        pace = (mu * np.abs(u) ** (depth - 2)).max(-1)
        ds = np.where(running & (pace > 0), step / np.where(pace > 0, pace, 1), 0)[..., None]
        moved = w + ds * mu * u ** (depth - 1)
        w = np.where((moved < 0) & (w > 0), 0, moved)  # slides at zero
        w = np.where(w < 0, 0, w)
    return np.where(w.max(-1) >= limit, w.argmax(-1), -1)


def blow_ups(
    depth: int, *, mu: Sequence[float] = (1.0, 2.0, 3.0), rho: float = 1.0, starts: int = 100, seed: int = 0
) -> dict[str, np.ndarray]:
    """Three and more layers: winner, blow-up time and frozen weights, foretold and found (claim M5).

    The flow of all layers is integrated from SAM's definition by a general solver, until the largest weight,
    at its present speed, would double within 1e-8 of the time elapsed. Where that has not come by s = 1e6,
    nothing blows up. Weights that reach zero stay there, because their gradient is zero.

    Parameters
    ----------
    depth : int
        Number of layers, 3 or more.
    mu : sequence of float
        Strengths of the features.
    rho : float
        The radius.
    starts : int
        Number of balanced starts, with weights drawn from 0.5 to 2.5 times the radius.
    seed : int
        Seed of the starts.

    Returns
    -------
    dict
        One entry a start: ``foretold`` and ``found``, the winners, -1 for none; ``time``, the relative error
        of the foretold blow-up time, and ``frozen``, the largest relative error of another weight's foretold
        value there, both 0 where nothing blows up.

    Raises
    ------
    ValueError
        If the depth is below 3: two layers grow for ever.
    """
    depth = _arguments.integer("depth", depth, 3)
    mu, rows = np.array(mu), []
    alphas = rho * np.random.default_rng(seed).uniform(0.5, 2.5, (starts, len(mu)))
    for alpha in alphas:
        foretold = linf_limit(mu, alpha, rho, depth)
        s, w = _until_blow_up(mu, alpha, rho, depth)
        row = {"foretold": -1 if foretold is None else foretold, "found": -1, "time": 0.0, "frozen": 0.0}
        if np.isfinite(s):
            winner = int(w.argmax())
            end = flow(mu, alpha, rho, method="linf-sam", depth=depth, s=[0.0])
            frozen = flow(mu, alpha, rho, method="linf-sam", depth=depth, s=[end.s_end]).layers[0][-1]
            others = np.arange(len(mu)) != winner
            row |= {
                "found": winner,
                "time": abs(s / end.s_end - 1),
                "frozen": np.abs((w - frozen)[others] / np.maximum(frozen[others], 1e-12 * rho)).max(),
            }
        rows.append(row)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _until_blow_up(mu: np.ndarray, alpha: np.ndarray, rho: float, depth: int) -> tuple[float, np.ndarray]:
    """The time of the blow-up (infinite without one) and the weights of the first layer just before."""
    alive = np.ones(len(mu))
    others = np.array([np.delete(np.arange(depth), layer) for layer in range(depth)])

    def slope(W: np.ndarray) -> np.ndarray:
        return mu * W[others].prod(axis=1)

    def velocity(_: float, state: np.ndarray) -> np.ndarray:
        W = state.reshape(depth, -1) * alive
        return (alive * slope(W - rho * np.sign(slope(W)))).ravel()

    def blows_up(s: float, state: np.ndarray) -> float:
        leader = state.argmax()
        doubling = state[leader] / max(velocity(s, state)[leader], 1e-300)
        return doubling - 1e-8 * max(s, 1e-12)

    def lands(_: float, state: np.ndarray) -> float:
        return np.where(alive == 1, state.reshape(depth, -1).min(axis=0), 1.0).min()

    blows_up.terminal = lands.terminal = True
    lands.direction = -1
    s, state = 0.0, np.tile(alpha, depth)
    while alive.any():
        with np.errstate(over="ignore", invalid="ignore"):  # in steps that the solver tries and rejects
            found = solve_ivp(
                velocity, (s, 1e6), state, "DOP853", events=(blows_up, lands), rtol=1e-8, atol=1e-12
            )
        s, state = found.t[-1], found.y[:, -1]
        if len(found.t_events[0]):
            return s, state[: len(mu)]
        if found.status != 1:
            break
        alive = alive * (state.reshape(depth, -1).min(axis=0) > 1e-9)
        state = (state.reshape(depth, -1) * alive).ravel()
    return np.inf, state[: len(mu)]


def margin_of_the_survivors(
    seed: int, *, n: int = 20, d: int = 6, rho: float = 0.1, norm: float = 1e12, step: float = 0.01
) -> dict[str, float]:
    """Many examples, two layers: the margin that l_inf-SAM reaches, against the best of what is left to it.

    Separable examples, brought to a separator with positive coefficients; balanced starts from 0.2 to 3 times
    the radius; at most 10,000 steps of equal rescaled time, up to an l_1 norm of ``norm``.

    Parameters
    ----------
    seed : int
        Seed of data and start.
    n, d : int
        Number of examples and of features.
    rho : float
        The radius.
    norm : float
        Where to stop.
    step : float
        The step in rescaled time.

    Returns
    -------
    dict
        ``survivors``, the number of coordinates that end above the radius; ``of_survivors``, the margin over
        the largest that beta >= 0 on these coordinates allows; ``of_all``, over the largest on all
        coordinates. Ratios are NaN where the survivors do not separate the examples.
    """
    X, y = separable(n, d, seed=seed)
    rows = y[:, None] * X * np.sign(max_margin(X, y, "l2"))
    w = rho * np.random.default_rng(seed).uniform(0.2, 3.0, d)

    def pull(w: np.ndarray) -> np.ndarray:
        log_slope = -np.logaddexp(0, rows @ w**2)
        slope = np.exp(log_slope - log_slope.max())
        return slope @ rows / slope.sum()

    for _ in range(10_000):
        u = w - rho * np.sign(pull(w) * w)
        log_slope = -np.logaddexp(0, rows @ u**2)
        slope = np.exp(log_slope - log_slope.max())
        w = w + step * u * (slope @ rows) / slope.sum()
        if (w**2).sum() > norm:
            break
    left = w > rho
    beta = w**2
    margin = (rows @ beta).min() / beta.sum()
    try:
        best = max_margin(rows[:, left], np.ones(n), "l1", nonnegative=True).sum()
    except ValueError:
        best = np.nan
    every = max_margin(rows, np.ones(n), "l1", nonnegative=True).sum()
    return {"survivors": int(left.sum()), "of_survivors": margin * best, "of_all": margin * every}
