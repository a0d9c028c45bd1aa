"""Chapter 5: which of many solutions gradient descent picks, and how far along the way one can see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from samkit.diagonal import DiagonalNetwork, flow, max_margin, separable, starts
from samkit.optim import SAM

__all__ = [
    "angle",
    "depth_and_sparsity",
    "distance_from_the_l1_margin",
    "rescaled_flow",
    "same_path",
]


def angle(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    r"""The angle between vectors, in degrees, exact where it is tiny.

    .. math:: 2 \operatorname{atan2}(\|\hat a - \hat b\|_2, \|\hat a + \hat b\|_2)

    Parameters
    ----------
    a, b : numpy.ndarray
        Vectors ``(..., d)``, not zero; the other dimensions broadcast.

    Returns
    -------
    numpy.ndarray
        Angles ``(...)`` in degrees.

    Raises
    ------
    ValueError
        If a vector is zero or not finite: it has no direction.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.implicit_bias import angle
    >>> round(float(angle(np.array([3.0, 0.0]), np.array([1.0, 1.0]))), 9)
    45.0
    """
    lengths = [np.linalg.norm(v, axis=-1, keepdims=True) for v in (a, b)]
    if not all((np.isfinite(length) & (length > 0)).all() for length in lengths):
        raise ValueError("angle needs finite vectors that are not zero: the others have no direction")
    a, b = a / lengths[0], b / lengths[1]
    return np.degrees(2 * np.arctan2(np.linalg.norm(a - b, axis=-1), np.linalg.norm(a + b, axis=-1)))


def rescaled_flow(
    rows: ArrayLike,
    init_scale: ArrayLike | tuple,
    s: ArrayLike,
    *,
    depth: int = 1,
    norm: float = np.inf,
    loss: float = 0.0,
) -> dict[str, np.ndarray]:
    r"""Gradient descent's flow on many examples and one or two layers, as far as float64 can count.

    .. math::
        \frac{dc_i}{ds} = \frac{|l'_i|}{\sum_k |l'_k|}, \quad R = \sum_i c_i a_i, \quad
        \beta = \beta_0 + R \ \ (L = 1), \quad
        \beta_j = \tfrac12 \bigl(p_j^2\, e^{2R_j} - q_j^2\, e^{-2R_j}\bigr) \ \ (L = 2)

    with :math:`p = (w^1 + w^2)/\sqrt2` and :math:`q = (w^1 - w^2)/\sqrt2` at the start. The state is how much
    of the time each example has had, so that its size is the number of examples, and an implicit method
    takes long steps where two examples hold each other in check.

    Parameters
    ----------
    rows : array_like
        The examples times their labels, :math:`a_i = y_i x_i`, ``(N, d)``.
    init_scale : number, array_like or tuple
        The initial weights, as in :func:`~samkit.diagonal.flow`; one start.
    s : array_like
        Rescaled times ``(T,)``, increasing from 0 or later.
    depth : int
        1 or 2 layers.
    norm, loss : float
        Where to stop earlier: when the l_1 norm of beta has grown to ``norm``, or the mean logistic loss has
        fallen to ``loss``.

    Returns
    -------
    dict
        ``s``, the times that were reached, with that of the stop as the last; and at these times ``beta``
        ``(T, d)``, the ``velocity`` d beta/ds ``(T, d)``, the smallest ``margin`` ``(T,)``, the natural
        logarithm of the mean loss, ``log_loss``, and of the real time t, ``log_time`` ``(T,)``.

    Raises
    ------
    ValueError
        If the depth is neither 1 nor 2, a shape does not fit, a row is not finite, the start is a batch, the
        times do not increase, or the start is already beyond ``norm`` or ``loss``.

    Examples
    --------
    One example, one layer: a straight line, and with z = 5 s the time t = s + (exp(z) - 1)/5.

    >>> import numpy as np
    >>> from samkit.experiments.implicit_bias import rescaled_flow
    >>> found = rescaled_flow([[1.0, 2.0]], 0.0, np.linspace(0, 2, 201))
    >>> found["beta"][-1].round(6).tolist(), round(float(found["log_time"][-1]), 2)
    ([2.0, 4.0], 8.39)

    Notes
    -----
    Derived in chapter 5.
    """
    rows, s = np.array(rows, dtype=np.float64), np.array(s, dtype=np.float64)
    if depth not in (1, 2):
        raise ValueError(f"rescaled_flow knows depth 1 and 2, got {depth}")
    if rows.ndim != 2 or not rows.size:
        raise ValueError(f"rows must have shape (N, d), got {rows.shape}")
    if not np.isfinite(rows).all():
        raise ValueError("rows must be finite, got NaN or infinity: drop those rows")
    if s.ndim != 1 or not len(s) or not np.isfinite(s).all() or s[0] < 0 or (np.diff(s) <= 0).any():
        raise ValueError(f"s must be finite times that increase from 0 or later, got {s.tolist()}")
    if not norm > 0 or not 0 <= loss < np.inf:
        raise ValueError(f"norm must be > 0 and loss finite and >= 0, got norm={norm}, loss={loss}")
    start = starts.start(init_scale, rows.shape[1], depth)
    if start.batched:
        raise ValueError("init_scale must be one start, got a batch: call rescaled_flow once for each")
    layers = [layer[0] for layer in start.layers]

    if depth == 1:

        def predictor(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            R = counts @ rows
            return layers[0] + R, np.ones_like(R)

    else:
        p2, q2 = (layers[0] + layers[1]) ** 2 / 2, (layers[0] - layers[1]) ** 2 / 2

        def predictor(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            R = counts @ rows
            grown, decayed = p2 * np.exp(2 * R), q2 * np.exp(-2 * R)
            return (grown - decayed) / 2, grown + decayed

    def log_slopes(counts: np.ndarray) -> np.ndarray:
        return -np.logaddexp(0, predictor(counts)[0] @ rows.T)

    def shares(log_slope: np.ndarray) -> np.ndarray:
        slope = np.exp(log_slope - log_slope.max(-1, keepdims=True))
        return slope / slope.sum(-1, keepdims=True)

    def velocity(_: float, counts: np.ndarray) -> np.ndarray:
        return shares(log_slopes(counts))

    def jacobian(_: float, counts: np.ndarray) -> np.ndarray:
        log_slope = log_slopes(counts)
        share = shares(log_slope)
        change = (np.diag(share) - np.outer(share, share)) * np.expm1(log_slope)
        return change @ (rows * predictor(counts)[1]) @ rows.T

    def stop(_: float, counts: np.ndarray) -> float:
        beta = predictor(counts)[0]
        gap = _log_mean_loss((rows @ beta)[None])[0] - np.log(loss) if loss else np.inf
        return min(np.log(norm) - np.log(np.abs(beta).sum() + 1e-300), gap)

    if stop(0.0, np.zeros(len(rows))) <= 0:
        raise ValueError(f"the start is already beyond norm={norm} or loss={loss}: choose a later stop")
    stop.terminal = True
    with np.errstate(over="ignore", invalid="ignore"):  # a trial step that is too long is taken back
        found = solve_ivp(
            velocity,
            (0, s[-1]),
            np.zeros(len(rows)),
            "BDF",
            jac=jacobian,
            events=stop if np.isfinite(norm) or loss else None,
            dense_output=True,
            rtol=1e-8,
            atol=1e-10,
        )
    end = found.t[-1]
    s = s[s <= end] if found.status == 0 else np.append(s[s < end], end)
    counts = found.sol(s).T
    beta, stretch = predictor(counts)
    margins = beta @ rows.T
    return {
        "s": s,
        "beta": beta,
        "velocity": stretch * (shares(log_slopes(counts)) @ rows),
        "margin": margins.min(1),
        "log_loss": _log_mean_loss(margins),
        "log_time": _log_time(s, found.t, lambda times: log_slopes(found.sol(times).T)),
    }


def _log_mean_loss(margins: np.ndarray) -> np.ndarray:
    """log of the mean of log(1 + exp(-m)), which underflows if it is taken as it stands."""
    far = margins > 30  # there log(1 + x) = x to all digits
    log_losses = np.where(far, -margins, np.log(np.logaddexp(0, -np.minimum(margins, 30))))
    return np.logaddexp.reduce(log_losses, axis=1) - np.log(margins.shape[1])


def _log_time(s: np.ndarray, walked: np.ndarray, log_slopes: Callable) -> np.ndarray:
    """log t at the times s, from dt/ds = 1 / mean |l'|, whose logarithm is straight over one short step."""
    nodes = np.unique(np.concatenate([[0.0], s, walked, (walked[:-1] + walked[1:]) / 2]))
    slopes = log_slopes(nodes)
    rate = np.log(slopes.shape[1]) - np.logaddexp.reduce(slopes, axis=1)
    rise = np.maximum(np.abs(np.diff(rate)), 1e-12)
    pieces = np.log(np.diff(nodes)) + np.maximum(rate[:-1], rate[1:]) + np.log(-np.expm1(-rise) / rise)
    total = np.concatenate([[-np.inf], np.logaddexp.accumulate(pieces)])
    return total[np.searchsorted(nodes, s)]


def distance_from_the_l1_margin(seed: int, *, n: int = 20, d: int = 6, norm: float = 1e6) -> dict[str, float]:
    """How far gradient descent's flow on two layers is from the exact l_1 max margin (claim M2).

    Parameters
    ----------
    seed : int
        Seed of features, examples and initial weights.
    n, d : int
        Number of examples and of features of the data with many examples.
    norm : float
        The l_1 norm of beta at which the flow on many examples is judged.

    Returns
    -------
    dict
        ``one_example``: the angle to the major of five features when its coefficient is 1e200, in degrees.
        ``balanced_margin`` and ``balanced_angle``: with many examples, from balanced positive layers, the
        margin over the largest with beta >= 0, and the angle to that solution. ``signed_margin`` and
        ``signed_angle``: the same without the condition, from layers of which the second is zero.
    """
    draw = np.random.default_rng(seed)
    mu = np.cumsum(draw.uniform(0.5, 1.0, 5))
    alpha = draw.uniform(0.05, 1.0, 5)
    s = np.log(1e200 / alpha[-1] ** 2) / (2 * mu[-1])
    end = flow(mu, alpha, 0.0, method="gd", s=[s]).beta[-1]
    row = {"one_example": float(angle(end / end.max(), max_margin([mu], [1], "l1")))}

    X, y = separable(n, d, seed=seed)
    signed = y[:, None] * X
    positive = signed * np.sign(max_margin(X, y, "l2"))
    alpha = draw.uniform(0.05, 1.0, d)
    for name, rows, start in (("balanced", positive, alpha), ("signed", signed, (alpha, 0.0))):
        best = max_margin(rows, np.ones(n), "l1", nonnegative=name == "balanced")
        found = rescaled_flow(rows, start, [1e3], depth=2, norm=norm)
        beta = found["beta"][-1]
        row[f"{name}_margin"] = float(found["margin"][-1] / np.abs(beta).sum() * np.abs(best).sum())
        row[f"{name}_angle"] = float(angle(beta, best))
    return row


def same_path(
    method: str,
    depth: int,
    *,
    mu: Sequence[float] = (1.0, 2.0, 3.0),
    init_scale: ArrayLike | tuple = (0.30, 0.25, 0.20),
    rho: float = 0.1,
    learning_rate: float = 2e-3,
) -> dict[str, float]:
    r"""Flow, rescaled flow and real optimizer steps on one example: one path (claim M16).

    The flow :math:`\dot\theta = -\nabla L(\theta + \varepsilon)` of the logistic loss is integrated as it
    stands, together with its own clock :math:`\dot s = |l'|`, until the loss is 1e-3; real steps are made
    until it is 0.05.

    Parameters
    ----------
    method : str
        ``"gd"``, ``"l2-sam"`` or ``"linf-sam"``.
    depth : int
        Number of layers, 1 to 3.
    mu : sequence of float
        The features.
    init_scale : sequence of float
        The initial weights of each layer, one for each coordinate.
    rho : float
        SAM's radius.
    learning_rate : float
        Of the real steps.

    Returns
    -------
    dict
        ``flow_distance``: the largest distance between beta on the flow at time t and on the rescaled flow at
        s(t), relative to its norm; ``speed_change``: the largest ds/dt over the smallest; ``step_distance``:
        the largest distance of the real steps from the path, relative as well.

    Raises
    ------
    ValueError
        If there are less than one or more than three layers, or :func:`~samkit.diagonal.flow` refuses the
        case.
    """
    if depth not in (1, 2, 3):
        raise ValueError(f"same_path knows depth 1, 2 and 3, got {depth}")
    mu, init = np.array(mu), np.array(init_scale)
    start = np.tile(init, (depth, 1))

    def others(w: np.ndarray) -> np.ndarray:
        return np.stack([np.prod(np.delete(w, i, axis=0), axis=0) for i in range(depth)])

    def gradient(w: np.ndarray) -> tuple[np.ndarray, float]:
        slope = 1 / (1 + np.exp(mu @ w.prod(axis=0)))  # |l'|
        return -slope * mu * others(w), slope

    def velocity(_: float, state: np.ndarray) -> np.ndarray:
        w = state[:-1].reshape(start.shape)
        g, slope = gradient(w)
        if method == "l2-sam":
            g, slope = gradient(w + rho * g / np.linalg.norm(g))
        elif method == "linf-sam":
            g, slope = gradient(w + rho * np.sign(g))
        return np.append(-g.ravel(), slope)

    def trained(_: float, state: np.ndarray) -> float:
        return np.logaddexp(0, -mu @ state[:-1].reshape(start.shape).prod(axis=0)) - 1e-3

    trained.terminal = True
    found = solve_ivp(
        velocity, (0, 1e5), np.append(start.ravel(), 0.0), "DOP853", events=trained, rtol=1e-11, atol=1e-13
    )
    s = found.y[-1]
    beta = found.y[:-1].T.reshape(-1, *start.shape).prod(axis=1)
    path = flow(mu, init, rho, method=method, depth=depth, s=s).beta
    apart = np.linalg.norm(beta - path, axis=1) / np.linalg.norm(path, axis=1)
    speed = [velocity(0, state)[-1] for state in found.y.T]

    curve = flow(mu, init, rho, method=method, depth=depth, s=np.linspace(0, s[-1], 4001)).beta
    steps = _steps(mu, init, rho, method, depth, learning_rate)
    away = [np.linalg.norm(curve - point, axis=1).min() / np.linalg.norm(point) for point in steps]
    return {
        "flow_distance": float(apart.max()),
        "speed_change": float(max(speed) / min(speed)),
        "step_distance": float(max(away)),
    }


def _steps(
    mu: np.ndarray, init: np.ndarray, rho: float, method: str, depth: int, learning_rate: float
) -> list[np.ndarray]:
    """beta after every tenth step of the real optimizer, until the loss is 0.05."""
    network = DiagonalNetwork(len(mu), depth, init, dtype=torch.float64)
    norm = "linf" if method == "linf-sam" else "l2"
    optimizer = SAM(
        network.parameters(), torch.optim.SGD, rho=0.0 if method == "gd" else rho, norm=norm, lr=learning_rate
    )
    x = torch.from_numpy(mu)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.softplus(-network(x))
        loss.backward()
        return loss

    points, loss = [], np.inf
    while loss > 0.05:
        points.append(network.beta.detach().numpy().copy())
        for _ in range(10):
            loss = optimizer.step(closure).item()
    return points


def depth_and_sparsity(
    seed: int, *, relevant: int, n: int = 40, d: int = 100, init_scale: float = 0.1, loss: float = 1e-3
) -> dict[str, float]:
    r"""Test accuracy of one and of two layers, at equal training loss, when few or many features matter.

    Gaussian examples, labelled by :math:`\operatorname{sign}\langle u, x\rangle` where u has ``relevant``
    entries +1 or -1 and is zero elsewhere. Both networks start with beta = 0.

    Parameters
    ----------
    seed : int
        Seed of the data.
    relevant : int
        How many of the features matter.
    n, d : int
        Number of training examples and of features.
    init_scale : float
        Weights of the first of two layers; the second starts at zero.
    loss : float
        Training loss at which both are stopped.

    Returns
    -------
    dict
        Accuracy on 4,000 fresh examples, in per cent, under ``"L = 1"`` and ``"L = 2"``.

    Raises
    ------
    ValueError
        If ``relevant`` is not between 1 and d.
    """
    if not 1 <= relevant <= d:
        raise ValueError(f"relevant must be between 1 and d={d}, got {relevant}")
    draw = np.random.default_rng(seed)
    u = np.zeros(d)
    u[:relevant] = draw.choice([-1.0, 1.0], relevant)
    X, fresh = draw.standard_normal((n, d)), draw.standard_normal((4000, d))
    rows = X * np.sign(X @ u)[:, None]
    row = {}
    for depth, start in ((1, 0.0), (2, (init_scale, 0.0))):
        beta = rescaled_flow(rows, start, [1e4], depth=depth, loss=loss)["beta"][-1]
        row[f"L = {depth}"] = 100 * float(np.mean(np.sign(fresh @ beta) == np.sign(fresh @ u)))
    return row
