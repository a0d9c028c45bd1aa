"""Chapter 7: l_2-SAM on two layers amplifies features one after the other, and the initial scale decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import expit
from torch.nn.functional import softplus

from samkit.diagonal import DiagonalNetwork, critical_scale, flow, phase_diagram
from samkit.optim import SAM

__all__ = [
    "STORED",
    "at_loss",
    "features",
    "first_below",
    "handovers",
    "leaning",
    "major_first_scale",
    "order_of_amplification",
    "plateau",
    "steps",
    "sweep_of_scales",
    "thresholds",
    "train",
]

STORED: dict = {}
"""Everything in this part of chapter 7 runs in the notebook."""


def features(seed: int) -> np.ndarray:
    """Two to five features between 0.5 and 4, at least 0.2 apart.

    Parameters
    ----------
    seed : int
        Seed of the draw.

    Returns
    -------
    numpy.ndarray
        The strengths mu, ``(d,)``, increasing.

    Examples
    --------
    >>> from samkit.experiments.amplification import features
    >>> [len(features(seed)) for seed in range(4)]
    [2, 3, 4, 5]
    """
    draw = np.random.default_rng(seed)
    d = 2 + seed % 4
    while True:
        mu = np.sort(draw.uniform(0.5, 4, d))
        if np.diff(mu).min() >= 0.2:
            return mu


def major_first_scale(mu: ArrayLike) -> float:
    r"""The initial scale from which on the major feature leads from the start.

    .. math:: \frac{\alpha}{\rho} = \frac{\mu_{d-1} + \mu_d}{\sqrt2\, \|\mu\|_2}

    Parameters
    ----------
    mu : array_like
        The features, ``(d,)``, increasing, at least two.

    Returns
    -------
    float
        The border of the third regime, in units of rho.

    Examples
    --------
    >>> from samkit.experiments.amplification import major_first_scale
    >>> round(major_first_scale([1.0, 2.0, 3.0]), 6)
    0.944911

    Notes
    -----
    Proved in chapter 7.
    """
    mu = np.asarray(mu, dtype=np.float64)
    return float(mu[-2:].sum() / (np.sqrt(2) * np.linalg.norm(mu)))


def order_of_amplification(seed: int, *, starts: int = 60) -> dict[str, float]:
    """Which features lead in the flow, over the whole middle regime (claim M7).

    Parameters
    ----------
    seed : int
        Seed of the features.
    starts : int
        Number of uniform starts, spread evenly over the regime.

    Returns
    -------
    dict
        ``major_last``: the share of starts from which, once the weakest leader of the run has led, every
        stronger feature leads in turn, up to the major one; ``minor_first``: the share from which the minor
        feature leads at some time; ``down``: the share that begin with a walk down to a weaker feature.
    """
    mu = features(seed)
    low, high = critical_scale(mu), major_first_scale(mu)
    ratios = low + (high - low) * (np.arange(starts) + 0.5) / starts
    last = flow(mu, ratios[:, None], 1.0).s[-1]
    leader = flow(mu, ratios[:, None], 1.0, s=np.linspace(0, last, 4001)).leader
    led = [_changes(row[row >= 0]) for row in leader]
    in_turn = [row[row.index(min(row)) :] == list(range(min(row), len(mu))) for row in led]
    return {
        "major_last": float(np.mean(in_turn)),
        "minor_first": float(np.mean([min(row) == 0 for row in led])),
        "down": float(np.mean([row[0] > min(row) for row in led])),
    }


def _changes(leader: np.ndarray) -> list[int]:
    return [int(leader[i]) for i in np.flatnonzero(np.diff(leader, prepend=-1))]


def sweep_of_scales(seed: int, *, starts: int = 400, times: int = 50) -> dict[str, float]:
    """Which features lead at one time, from small to large initial scale (claim M8).

    Parameters
    ----------
    seed : int
        Seed of the features.
    starts : int
        Number of uniform starts in the middle regime, dense towards the critical scale.
    times : int
        Number of times up to 10/mu_1.

    Returns
    -------
    dict
        ``never_back``: the share of times at which the leader never steps down as the scale grows;
        ``whole``: the share of features that lead for some start at the last time.
    """
    mu = features(seed)
    low, high = critical_scale(mu), major_first_scale(mu)
    s = np.linspace(0, 10 / mu[0], times + 1)[1:]
    leader = phase_diagram(mu, low + (high - low) * np.geomspace(1e-8, 1, starts), s).leader
    return {
        "never_back": float(np.mean((np.diff(leader, axis=0) >= 0).all(axis=0))),
        "whole": len(set(leader[:, -1]) - {-1}) / len(mu),
    }


def train(
    mu: Sequence[float], init_scale: float, rho: float, *, learning_rate: float = 0.01, steps: int = 2000
) -> dict[str, np.ndarray]:
    """Real steps of :class:`samkit.optim.SAM` on a two-layer diagonal network and the logistic loss.

    Parameters
    ----------
    mu : sequence of float
        The one example, with label +1.
    init_scale : float
        The initial weights alpha.
    rho : float
        SAM's radius; 0 is gradient descent.
    learning_rate : float
        Of the base optimizer, SGD.
    steps : int
        Number of updates.

    Returns
    -------
    dict
        ``loss`` ``(steps + 1,)`` and ``beta`` ``(steps + 1, d)``, before the first update and after each.
    """
    network = DiagonalNetwork(len(mu), 2, init_scale, dtype=torch.float64)
    optimizer = SAM(network.parameters(), torch.optim.SGD, rho=rho, lr=learning_rate)
    x = torch.tensor(mu, dtype=torch.float64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = softplus(-network(x))
        loss.backward()
        return loss

    losses, betas = [], [network.beta.detach().numpy().copy()]
    for _ in range(steps):
        losses.append(optimizer.step(closure).item())
        betas.append(network.beta.detach().numpy().copy())
    losses.append(softplus(-network(x)).item())
    return {"loss": np.array(losses), "beta": np.array(betas)}


def handovers(run: dict[str, np.ndarray]) -> list[tuple[int, int, float]]:
    """When the lead changes hands.

    Parameters
    ----------
    run : dict
        ``loss`` ``(T,)`` and ``beta`` ``(T, d)``, as from :func:`train`.

    Returns
    -------
    list of tuple
        For each leader its number, counted from 1, the update after which it leads, and the loss then. The
        first leads after the first update, because before it all are equal.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.amplification import handovers
    >>> beta = np.array([[1, 1], [3, 2], [4, 4.5]])
    >>> handovers({"loss": np.array([0.6, 0.5, 0.4]), "beta": beta})
    [(1, 1, 0.5), (2, 2, 0.4)]
    """
    leader = run["beta"].argmax(axis=1)
    at = [1, *(i for i in range(2, len(leader)) if leader[i] != leader[i - 1])]
    return [(int(leader[i]) + 1, i, float(run["loss"][i])) for i in at]


def steps(
    mu: ArrayLike, init_scale: ArrayLike, rho: ArrayLike, *, learning_rate: float = 0.01
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    r"""The same steps written out in NumPy, for many runs at once and with no end.

    One example and balanced layers need one vector and one slope a run: several times as quick as
    ``many_examples.sam_steps``, which takes any gradient, and quick enough for 200,000 updates.

    .. math:: \hat w = w - \frac{\rho}{n}\, \mu w, \qquad
        w \leftarrow w + \eta\, |l'(\langle \hat w^2, \mu \rangle)|\, \mu\, \hat w

    for both layers alike, elementwise.

    Parameters
    ----------
    mu : array_like
        The example of each run, ``(d,)`` or ``(runs, d)``; a feature of strength 0 is absent.
    init_scale : array_like
        alpha of each run, ``(runs,)``.
    rho : array_like
        SAM's radius, a number or one for each run; 0 is gradient descent.
    learning_rate : float
        The step eta.

    Yields
    ------
    z : numpy.ndarray
        The prediction ``(runs,)``, whose loss is log(1 + exp(-z)).
    w : numpy.ndarray
        The weights of each layer, ``(runs, d)``.

    Examples
    --------
    >>> import itertools
    >>> from samkit.experiments.amplification import steps, train
    >>> z, w = next(itertools.islice(steps([1.0, 2.0], [0.5], 0.3), 40, None))
    >>> bool(abs(w[0] ** 2 - train([1.0, 2.0], 0.5, 0.3, steps=40)["beta"][-1]).max() < 1e-14)
    True
    """
    alpha = np.asarray(init_scale, dtype=np.float64)
    mu = np.broadcast_to(np.asarray(mu, dtype=np.float64), (len(alpha), np.shape(mu)[-1]))
    w = alpha[:, None] * (mu > 0)
    rho = np.broadcast_to(np.asarray(rho, dtype=np.float64), alpha.shape)
    while True:
        g = mu * w
        z = np.einsum("ij,ij->i", g, w)
        yield z, w
        w_up = w - (rho / np.sqrt(2 * np.einsum("ij,ij->i", g, g)))[:, None] * g
        g_up = mu * w_up
        slope = expit(-np.einsum("ij,ij->i", g_up, w_up))
        w = w + (learning_rate * slope)[:, None] * g_up


def first_below(
    losses: Sequence[float],
    mu: ArrayLike,
    init_scale: ArrayLike,
    rho: ArrayLike,
    *,
    learning_rate: float = 0.01,
    limit: int = 200_000,
) -> tuple[np.ndarray, np.ndarray]:
    """How many updates a loss takes, and the predictor there.

    Parameters
    ----------
    losses : sequence of float
        The losses to reach, from high to low.
    mu, init_scale, rho, learning_rate
        As for :func:`steps`.
    limit : int
        The largest number of updates.

    Returns
    -------
    count : numpy.ndarray
        ``(runs, losses)``, the updates after which each loss is first reached; infinite if it never is.
    beta : numpy.ndarray
        ``(runs, losses, d)``, the predictor there; NaN if it is never reached.

    Raises
    ------
    ValueError
        If the losses do not fall from one to the next.
    """
    if (np.diff(losses) >= 0).any():
        raise ValueError(f"losses must fall from one to the next; got {losses!r}")
    targets = -np.log(np.expm1(losses))  # z at these losses
    count = np.full((len(init_scale), len(losses)), np.inf)
    beta = np.full((*count.shape, np.shape(mu)[-1]), np.nan)
    reached = np.zeros(len(count), int)
    goal = np.full(len(count), targets[0])
    run = steps(mu, init_scale, rho, learning_rate=learning_rate)
    for step, (z, w) in zip(range(limit + 1), run, strict=False):
        while (z >= goal).any():
            for i in np.flatnonzero(z >= goal):
                count[i, reached[i]], beta[i, reached[i]] = step, w[i] ** 2
                reached[i] += 1
                goal[i] = targets[reached[i]] if reached[i] < len(losses) else np.inf
        if (reached == len(losses)).all():
            break
    return count, beta


def thresholds(
    seeds: Sequence[int], *, rho: float = 0.2, learning_rate: float = 0.01, limit: int = 20_000
) -> dict[str, np.ndarray]:
    """Where real steps change from collapse to training, and where the major feature leads at once (M9).

    Parameters
    ----------
    seeds : sequence of int
        Seeds of the features.
    rho, learning_rate : float
        Of the real steps.
    limit : int
        Updates after which a run that has not trained counts as collapsed.

    Returns
    -------
    dict
        One value for each seed: ``collapse`` and ``major_first``, the border seen over the one predicted;
        ``collapsed_loss``, the lowest loss of the runs that do not train.
    """
    factors = np.linspace(0.97, 1.03, 13)
    drawn = [features(seed) for seed in seeds]
    d = max(map(len, drawn))
    rows, alphas = [], []
    for mu in drawn:
        for border in (critical_scale(mu), major_first_scale(mu)):
            rows += [np.pad(mu, (d - len(mu), 0))] * len(factors)
            alphas += list(rho * border * factors)
    shape = (len(drawn), 2, len(factors))
    trained, led, highest = np.zeros((3, len(rows)))
    led[:] = 1
    run = steps(rows, np.array(alphas), rho, learning_rate=learning_rate)
    for step, (z, w) in zip(range(limit + 1), run, strict=False):
        highest = np.maximum(highest, z)
        if step:
            led = np.where((w[:, -1] < w.max(axis=1)) & (trained == 0), 0, led)
        trained = np.maximum(trained, z >= -np.log(np.expm1(0.1)))
    trained, led, highest = (values.reshape(shape) for values in (trained, led, highest))
    middles = factors - (factors[1] - factors[0]) / 2
    lowest = np.logaddexp(0, -np.where(trained[:, 0] > 0, -np.inf, highest[:, 0]).max(axis=1))
    return {
        "collapse": middles[trained[:, 0].argmax(axis=1)],
        "major_first": middles[led[:, 1].argmax(axis=1)],
        "collapsed_loss": lowest,
    }


def plateau(
    mu_1: Sequence[float],
    distances: Sequence[float],
    *,
    rho: float = 0.2,
    learning_rate: float = 0.01,
    loss: float = 0.6,
) -> np.ndarray:
    r"""How long real steps stay on the plateau, close to the border of collapse (claim M11).

    Parameters
    ----------
    mu_1 : sequence of float
        The minor feature; the others are 2 and 3.
    distances : sequence of float
        How far alpha/rho lies above the border, which real steps have a little below the flow's.
    rho, learning_rate : float
        Of the real steps.
    loss : float
        The loss that ends the plateau.

    Returns
    -------
    numpy.ndarray
        Real time, steps times learning rate, above that loss: ``(len(mu_1), len(distances))``.
    """
    mu = np.array([[m, 2.0, 3.0] for m in mu_1])
    c = np.array([critical_scale(row) for row in mu])

    def trains(ratios: np.ndarray) -> np.ndarray:
        rows = np.repeat(mu, ratios.shape[1], axis=0)
        target = -np.log(np.expm1(loss))
        for z, w in steps(rows, rho * ratios.ravel(), rho, learning_rate=learning_rate):
            n = np.sqrt(2) * np.linalg.norm(rows * w, axis=1)
            done, dead = z >= target, n < 0.9 * rho * rows[:, 0]
            if (done | dead).all():
                break
        return done.reshape(ratios.shape)

    low, high = 0.99 * c, 1.01 * c
    while (high - low).max() > 1e-11:
        ratios = np.linspace(low, high, 40, axis=1)[:, 1:-1]
        first = np.concatenate([trains(ratios), np.ones((len(mu), 1), bool)], axis=1).argmax(axis=1)
        edges = np.column_stack([low, ratios, high])
        low, high = edges[np.arange(len(mu)), first], edges[np.arange(len(mu)), first + 1]
    ratios = high[:, None] + np.asarray(distances)
    count, _ = first_below(
        [loss],
        np.repeat(mu, len(distances), axis=0),
        rho * ratios.ravel(),
        rho,
        learning_rate=learning_rate,
    )
    return learning_rate * count.reshape(ratios.shape)


def at_loss(
    mu: ArrayLike, init_scale: float, rho: float, loss: float, *, method: str = "l2-sam"
) -> np.ndarray:
    """The predictor on the flow's path where the loss of the one example first has a given value.

    Parameters
    ----------
    mu : array_like
        The example, ``(d,)``.
    init_scale : float
        The initial weights alpha.
    rho : float
        SAM's radius.
    loss : float
        The loss, below that of the start.
    method : str
        As for :func:`~samkit.diagonal.flow`.

    Returns
    -------
    numpy.ndarray
        beta, ``(d,)``.

    Raises
    ------
    ValueError
        If the flow collapses before it gets there.

    Examples
    --------
    Gradient descent multiplies two coefficients by powers of one number, x and x squared.

    >>> import numpy as np
    >>> from samkit.experiments.amplification import at_loss
    >>> beta = at_loss([1.0, 2.0], 0.1, 0.0, 1e-6, method="gd")
    >>> np.round(np.log(beta / 0.01) / np.log(beta[0] / 0.01), 6).tolist()
    [1.0, 2.0]
    """
    mu = np.asarray(mu, dtype=np.float64)
    target = -np.log(np.expm1(loss))
    s = np.linspace(0, 1 / mu[0], 1001)
    while True:
        found = flow(mu, init_scale, rho, method=method, s=s)
        reached = found.beta @ mu >= target
        if reached.any():
            break
        if found.outcome != "diverges":
            raise ValueError(f"from init_scale={init_scale} the flow {found.outcome}, above a loss of {loss}")
        s = 2 * s
    after = int(reached.argmax())
    low, high = s[max(after - 1, 0)], s[after]
    for _ in range(4):
        inner = np.linspace(low, high, 101)
        beta = flow(mu, init_scale, rho, method=method, s=inner).beta
        after = max(int((beta @ mu >= target).argmax()), 1)
        low, high = inner[after - 1], inner[after]
    return beta[after]


def leaning(
    *, ratio: float = 0.45, rho: float = 1.0, loss: float = 1e-6, learning_rate: float = 0.01
) -> dict[str, np.ndarray]:
    """Which of the features 1, 2, 3 carry the prediction at a small loss (claim M17).

    Parameters
    ----------
    ratio : float
        alpha/rho of the start.
    rho : float
        SAM's radius.
    loss : float
        The loss at which both methods are looked at.
    learning_rate : float
        Of the real steps.

    Returns
    -------
    dict
        Shares mu_j beta_j of the prediction, ``(3,)``: ``steps``, after real steps of SAM; ``flow``, on the
        path of SAM's flow; ``gd``, on the path of gradient descent's flow from the same start, whose own
        steps would need millions.
    """
    mu = np.array([1.0, 2.0, 3.0])
    _, beta = first_below([loss], mu, [ratio * rho], rho, learning_rate=learning_rate)
    found = {
        "steps": beta[0, 0],
        "flow": at_loss(mu, ratio * rho, rho, loss),
        "gd": at_loss(mu, ratio * rho, rho, loss, method="gd"),
    }
    return {name: mu * beta / (mu @ beta) for name, beta in found.items()}
