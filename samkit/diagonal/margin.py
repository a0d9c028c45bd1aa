"""Exact max-margin classifiers, to compare the limits of training with (chapters 5 to 7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linprog, nnls

__all__ = ["max_margin"]


def max_margin(X: ArrayLike, y: ArrayLike, norm: str = "l1", nonnegative: bool = False) -> np.ndarray:
    r"""The separator through the origin with the largest margin in a norm.

    .. math::
        \min_\beta \|\beta\| \quad \text{subject to} \quad y_i \langle \beta, x_i \rangle \ge 1
        \text{ for every } i

    For l_1 it is a linear program. For l_2 it is the least-distance problem of Lawson and Hanson, solved by
    non-negative least squares, an active-set method that ends after finitely many steps.

    Parameters
    ----------
    X : array_like
        The examples, ``(n, d)``.
    y : array_like
        Their labels -1 or +1, ``(n,)``.
    norm : "l1" or "l2"
        The norm of beta. The l_1 solution need not be unique; then one of them is returned.
    nonnegative : bool
        Ask for beta >= 0 as well, which is all that two-layer diagonal networks with balanced positive layers
        can represent.

    Returns
    -------
    numpy.ndarray
        beta ``(d,)``, with smallest margin 1; the margin at \|beta\| = 1 is one over its norm.

    Raises
    ------
    ValueError
        If a shape does not fit, a value is not finite, a label is neither -1 nor +1, ``norm`` is neither
        word, or no separator exists.

    Examples
    --------
    >>> from samkit.diagonal import max_margin
    >>> max_margin([[1.0, 2.0]], [1], norm="l1")
    array([0. , 0.5])
    >>> max_margin([[1.0, 2.0]], [1], norm="l2")
    array([0.2, 0.4])

    Notes
    -----
    Source: C. L. Lawson and R. J. Hanson, *Solving Least Squares Problems*, chapter 23. Used in chapter 5.
    """
    X, y = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if X.ndim != 2 or y.shape != X.shape[:1] or not X.size:
        raise ValueError(f"X must have shape (n, d) and y (n,), got {X.shape} and {y.shape}")
    if not np.isfinite(X).all():
        raise ValueError("X must be finite, got NaN or infinity: drop those rows")
    if not np.isin(y, (-1, 1)).all():
        strange = y[~np.isin(y, (-1, 1))][0]
        raise ValueError(f"labels must be -1 or +1, got {strange}: map classes 0 and 1 by 2 * y - 1")
    if norm not in ("l1", "l2"):
        raise ValueError(f"norm must be 'l1' or 'l2', got {norm!r}")
    rows = y[:, None] * X
    size = np.abs(rows).max() or 1.0  # solvers have absolute tolerances
    rows = rows / size

    signed = rows if nonnegative else np.hstack([rows, -rows])
    found = linprog(np.ones(signed.shape[1]), A_ub=-signed, b_ub=-np.ones(len(rows)), method="highs")
    if found.status != 0:
        where = "with beta >= 0" if nonnegative else "through the origin"
        raise ValueError(
            f"no separator {where} exists for these {len(rows)} examples: max_margin needs separable data; "
            "append a column of ones to X for an intercept"
        )
    if norm == "l1":
        beta = found.x if nonnegative else found.x[: X.shape[1]] - found.x[X.shape[1] :]
    else:
        constraints = np.vstack([rows, np.eye(X.shape[1])]) if nonnegative else rows
        right = np.concatenate([np.ones(len(rows)), np.zeros(len(constraints) - len(rows))])
        system = np.vstack([constraints.T, right])
        target = np.append(np.zeros(X.shape[1]), 1.0)
        residual = system @ nnls(system, target, maxiter=100 * len(constraints))[0] - target
        beta = -residual[:-1] / residual[-1]
        beta = np.maximum(beta, 0) if nonnegative else beta
    return beta / (rows @ beta).min() / size
