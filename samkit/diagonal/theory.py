"""What can be said before anything is run: rates, critical scales, regimes, limits (chapters 6 and 7)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from samkit import _arguments
from samkit.diagonal import starts
from samkit.diagonal.amplification import amplify
from samkit.diagonal.translated import Deep, TwoLayers

__all__ = ["critical_scale", "growth_rates", "linf_limit", "regime"]


def growth_rates(mu: ArrayLike, w: ArrayLike, rho: float) -> np.ndarray:
    r"""How fast each coordinate of a balanced two-layer network grows under l_2-SAM.

    .. math:: \frac{d \log w_j}{ds} = \mu_j - \frac{\rho}{n}\, \mu_j^2, \qquad n = \sqrt2\, \|\mu \odot w\|_2

    A parabola in mu with its top at n/(2 rho): j outgrows i < j exactly when n/rho > mu_i + mu_j.

    Parameters
    ----------
    mu : array_like
        Strengths of the features, ``(d,)``, positive and not decreasing.
    w : array_like
        The common weights of the two layers, ``(..., d)``, not all zero.
    rho : float
        SAM's radius; 0 gives gradient descent's rates, which are mu.

    Returns
    -------
    numpy.ndarray
        The rates, ``(..., d)``, per unit of rescaled time.

    Raises
    ------
    ValueError
        If a shape does not fit, ``w`` is not finite or all zero, rho < 0, or mu is not positive or decreases.

    Examples
    --------
    With n/rho = 2 the parabola has its top at mu = 1 and is zero at mu = 2.

    >>> from samkit.diagonal import growth_rates
    >>> growth_rates([1.0, 2.0], [2**0.5, 0.0], rho=1.0).round(12)
    array([0.5, 0. ])

    Notes
    -----
    Derived in chapter 7, which calls it the growth law.
    """
    mu, rho = starts.features(mu), starts.radius(rho)
    w = np.asarray(w, dtype=np.float64)
    if w.ndim == 0 or w.shape[-1] != len(mu):
        raise ValueError(f"w must have the {len(mu)} coordinates of mu in its last dimension, got {w.shape}")
    if np.isfinite(w).all():
        starts.in_range("w", w)
    n = math.sqrt(2) * np.linalg.norm(mu * w, axis=-1, keepdims=True)
    if not np.isfinite(n).all() or (n == 0).any():
        raise ValueError(
            f"w must be finite and not all zero (a zero gradient has no direction), got {w.tolist()}"
        )
    return mu - rho / n * mu**2


def critical_scale(mu: ArrayLike, shape: ArrayLike | tuple | None = None) -> float:
    r"""The initial scale below which l_2-SAM on two layers collapses.

    .. math:: \theta_0 = c\, \rho \cdot \text{shape}

    Smaller factors collapse and larger ones grow for ever. There is one such factor: ds/dQ = n/rho, which at
    every (s, Q) grows with the scale of the start, so that s(Q) does too, and a start collapses exactly if
    s(Q) stays finite for all Q. For d = 1 it is 1/sqrt 2; no closed form is known for more features.

    Parameters
    ----------
    mu : array_like
        Strengths of the features, ``(d,)``, positive and not decreasing.
    shape : number, array_like or tuple, optional
        The form of the start: a number, coordinates ``(d,)``, or a tuple with one of these for each of the
        two layers. By default ones.

    Returns
    -------
    float
        c, to about nine digits; infinite if no factor avoids the collapse, because the layers cancel:
        w1 + w2 = 0 in every coordinate.

    Raises
    ------
    ValueError
        If mu is not positive or decreases, or ``shape`` does not fit, is a batch, or is all zero.

    Examples
    --------
    >>> from samkit.diagonal import critical_scale
    >>> round(critical_scale([1.0]), 6), round(critical_scale([1.0, 2.0, 3.0]), 6)
    (0.707107, 0.436426)

    Notes
    -----
    Moon, Si & Yun 2026 (arXiv 2603.08290) find the three regimes; the threshold is computed here, and
    discussed in chapter 7.
    """
    mu = starts.features(mu)
    start = starts.start(1.0 if shape is None else shape, len(mu), 2)
    if start.batched:
        raise ValueError("shape must be one start, got a batch: call critical_scale once for each")
    w1, w2 = (layer[0] for layer in start.layers)
    p, q = (w1 + w2) / math.sqrt(2), (w1 - w2) / math.sqrt(2)
    norm = math.hypot(*p, *q)
    if norm == 0:
        raise ValueError("shape must not be all zero: no factor makes it grow")
    if not p.any():
        return math.inf
    with np.errstate(divide="ignore"):
        log_p = np.log(np.abs(p))
        log_q = None if start.balanced else np.log(np.abs(q))

    def diverges(scales: np.ndarray) -> np.ndarray:
        shift = np.log(scales)[:, None]
        return amplify(
            mu, log_p + shift, None if log_q is None else log_q + shift, np.empty(0), "fate"
        ).diverges

    # Inside the ball of radius rho everything collapses.
    low, high = 1 / norm, 2 / norm
    while not diverges(np.array([high]))[0]:
        low, high = high, 2 * high
    while high - low > 1e-10 * low:
        scales = np.linspace(low, high, 34)
        first = np.append(diverges(scales[1:-1]), True).argmax()
        low, high = scales[first], scales[first + 1]
    return float(high + low) / 2


def regime(mu: ArrayLike, init_scale: float, rho: float) -> str:
    r"""What l_2-SAM on two layers does from a uniform start.

    .. math:: \frac{\alpha}{\rho} \le c(\mu): \text{ collapse}, \qquad
        \frac{\alpha}{\rho} \ge \frac{\mu_{d-1} + \mu_d}{\sqrt2\, \|\mu\|_2}: \text{ major first}

    and between the two, minor first. Equally strong features count as one in the second condition.

    Parameters
    ----------
    mu : array_like
        Strengths of the features, ``(d,)``, positive and not decreasing.
    init_scale : float
        The weight alpha > 0 that every coordinate of both layers starts from.
    rho : float
        SAM's radius; with 0 it is gradient descent, which is always ``"major-first"``.

    Returns
    -------
    str
        ``"collapse"``, ``"minor-first"`` or ``"major-first"``. With one feature, nothing lies between.

    Raises
    ------
    TypeError, ValueError
        If ``init_scale`` is not a number > 0, rho < 0, or mu is not positive or decreases.

    Examples
    --------
    >>> from samkit.diagonal import regime
    >>> [regime([1.0, 2.0, 3.0], alpha, rho=1.0) for alpha in (0.4, 0.5, 1.0)]
    ['collapse', 'minor-first', 'major-first']

    Notes
    -----
    The regimes are those of Moon, Si & Yun 2026 (arXiv 2603.08290), the thresholds are derived in chapter 7.
    """
    mu, rho = starts.features(mu), starts.radius(rho)
    alpha = _arguments.number("init_scale", init_scale, positive=True)
    values = np.unique(mu)
    if len(values) == 1:
        return "collapse" if alpha * math.sqrt(2 * len(mu)) <= rho else "major-first"
    if math.sqrt(2) * np.linalg.norm(mu) * alpha >= values[-2:].sum() * rho:
        return "major-first"
    return "collapse" if alpha <= critical_scale(mu) * rho else "minor-first"


def linf_limit(mu: ArrayLike, init_scale: ArrayLike | tuple, rho: float, depth: int = 2) -> int | None:
    r"""The coordinate that l_inf-SAM converges to in direction.

    .. math:: \arg\max_j \{\mu_j : \alpha_j > \rho\} \quad (L = 2), \qquad
        \arg\max_j \{\mu_j (\alpha_j - \rho)^{L-2} : \alpha_j > \rho\} \quad (L \ge 3)

    On two unbalanced layers that are positive, alpha is their mean.

    Parameters
    ----------
    mu : array_like
        Strengths of the features, ``(d,)``, positive and not decreasing.
    init_scale : number, array_like or tuple
        One start, as in :func:`~samkit.diagonal.flow`.
    rho : float
        SAM's radius; 0 is gradient descent.
    depth : int
        Number of layers L >= 2.

    Returns
    -------
    int or None
        The winner, counted from 0; None if no coordinate grows.

    Raises
    ------
    ValueError
        If two coordinates tie exactly, depth < 2, or the start is one that
        :func:`~samkit.diagonal.flow` refuses.

    Examples
    --------
    Gradient descent prefers the major feature; l_inf-SAM leaves it behind when it starts below rho.

    >>> from samkit.diagonal import linf_limit
    >>> [linf_limit([1.0, 2.0, 3.0], [1.5, 1.0, 0.9], rho) for rho in (0.0, 1.0)]
    [2, 0]

    Notes
    -----
    Source: Moon, Si & Yun 2026 (arXiv 2603.08290). Derived in chapter 6.
    """
    mu, rho = starts.features(mu), starts.radius(rho)
    depth = _arguments.integer("depth", depth, 2)
    start = starts.start(init_scale, len(mu), depth)
    if start.batched:
        raise ValueError("init_scale must be one start, got a batch: call linf_limit once for each")
    if depth == 2:
        grows = TwoLayers(mu, start.layers[0], start.layers[1], rho).grows[0]
        score = np.where(grows, mu, 0)
    else:
        w = starts.balanced_positive(start, depth)
        solution = Deep(mu, w, rho, depth)
        ahead = np.where(w[0] > rho, np.maximum(solution.u0[0], 0), 0)
        top = ahead.max()
        # In units of the largest, whose power cannot leave the range of float64.
        score = mu * (ahead / top) ** solution.m if top > 0 else ahead
    winners = np.flatnonzero(score == score.max())
    if score.max() == 0:
        return None
    if len(winners) > 1:
        raise ValueError(f"coordinates {winners.tolist()} tie: they share the limit; change a start")
    return int(winners[0])
