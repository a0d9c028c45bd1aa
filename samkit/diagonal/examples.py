"""Data that a line through the origin separates, drawn at random."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from samkit import _arguments
from samkit.diagonal import starts

__all__ = ["banded", "separable"]


def separable(n: int, d: int, *, gap: float = 0.5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    r"""Gaussian points, pushed apart along a random direction u.

    .. math::
        x_i = \xi_i + \text{gap} \cdot y_i\, u, \quad
        y_i = \operatorname{sign} \langle \xi_i, u \rangle, \quad \|u\|_2 = 1

    Parameters
    ----------
    n, d : int
        Number of examples and of features.
    gap : float
        The least margin of u, > 0.
    seed : int
        Seed of the draw.

    Returns
    -------
    X, y : numpy.ndarray
        Examples ``(n, d)`` and labels -1 or +1 ``(n,)``, in float64.

    Raises
    ------
    TypeError, ValueError
        If n, d or the seed is not an integer of the right size, or the gap not a number > 0.

    Examples
    --------
    >>> from samkit.diagonal import max_margin, separable
    >>> X, y = separable(20, 3)
    >>> bool((y * (X @ max_margin(X, y))).min() > 0.999)
    True

    Notes
    -----
    Used in chapter 5.
    """
    n, d = _arguments.integer("n", n, 1), _arguments.integer("d", d, 1)
    gap = _arguments.number("gap", gap, positive=True)
    draw = np.random.default_rng(_arguments.seed(seed))
    u = draw.standard_normal(d)
    u /= np.linalg.norm(u)
    X = draw.standard_normal((n, d))
    y = np.where(X @ u < 0, -1.0, 1.0)
    return X + gap * y[:, None] * u, y


def banded(
    strengths: ArrayLike = (1.0, 2.0, 3.0),
    width: int = 4,
    n: int = 60,
    *,
    noise: float = 0.3,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    r"""Examples whose features come in bands of equal strength.

    .. math:: x_{ij} = y_i\, \mu_j\, (1 + \text{noise} \cdot \xi_{ij})

    with :math:`\xi` standard Gaussian, and labels that take turns.

    Parameters
    ----------
    strengths : array_like
        One strength mu for each band, positive and not decreasing.
    width : int
        Coordinates in a band.
    n : int
        Number of examples.
    noise : float
        Standard deviation relative to the strength.
    seed : int
        Seed of the draw.

    Returns
    -------
    X, y : numpy.ndarray
        Examples ``(n, bands * width)``, band after band, and labels -1 or +1 ``(n,)``, in float64.

    Raises
    ------
    TypeError, ValueError
        If a number is not of its kind or range.

    Examples
    --------
    >>> from samkit.diagonal import banded
    >>> X, y = banded([1.0, 3.0], width=2, n=2, noise=0.0)
    >>> X.tolist(), y.tolist()
    ([[1.0, 1.0, 3.0, 3.0], [-1.0, -1.0, -3.0, -3.0]], [1.0, -1.0])

    Notes
    -----
    Used in chapter 7.
    """
    strengths = starts.features(strengths)
    width, n = _arguments.integer("width", width, 1), _arguments.integer("n", n, 1)
    noise = _arguments.number("noise", noise)
    draw = np.random.default_rng(_arguments.seed(seed))
    mu = np.repeat(strengths, width)
    y = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)
    return y[:, None] * mu * (1 + noise * draw.standard_normal((n, len(mu)))), y
