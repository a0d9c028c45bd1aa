r"""The one scalar equation behind l_2-SAM on two layers, solved for thousands of starts at once.

With :math:`p = (w_1 + w_2)/\sqrt2` and :math:`q = (w_1 - w_2)/\sqrt2` the rescaled flow is

.. math:: p_j(s) = p_j(0)\, e^{\mu_j s - \mu_j^2 Q}, \quad q_j(s) = q_j(0)\, e^{-\mu_j s - \mu_j^2 Q}, \quad
    \frac{dQ}{ds} = \frac1r, \quad r^2 = \frac1{\rho^2} \sum_j \mu_j^2 (p_j^2 + q_j^2)

so that everything follows from Q(s) (derived here; chapter 7). Two facts, proved there, end an integration:
where r < min mu every weight shrinks, and the start collapses; where r grows it grows for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.integrate import DOP853

__all__ = ["Amplification", "amplify"]

# Absolute local error of the exponents mu s and mu^2 Q. A start at distance x from the critical scale
# multiplies it by about 1/x.
_TOLERANCE = 1e-11
# Where r is this large, Q no longer moves; where it is this small, s no longer does.
_LARGE, _SMALL = 1e14, 1e-15
_LONG = 300.0  # logarithm of the largest weight that is waited for, so that products stay in range
_PATIENCE = 10_000  # steps; strengths within a factor of 1000 need some hundreds
_HOVERING = 1e4  # in units of 1/min mu: only a start exactly on the critical scale is undecided so late


@dataclass(frozen=True)
class Amplification:
    """Q at the times asked for, and the fate of each start.

    Attributes
    ----------
    Q : numpy.ndarray
        ``(n, T)``; infinite after the collapse.
    collapses, diverges : numpy.ndarray
        ``(n,)``; both False for a start exactly on the critical scale.
    s_end : numpy.ndarray
        ``(n,)``, when it collapses; infinite for the others.
    s_settled : numpy.ndarray
        ``(n,)``, for a diverging start a time by which the last leader leads and r exceeds the sum of the two
        largest mu, or the weights leave the range of float64 (only if asked for).
    """

    Q: np.ndarray
    collapses: np.ndarray
    diverges: np.ndarray
    s_end: np.ndarray
    s_settled: np.ndarray


class _Exponents:
    """The squares :math:`(\\mu_j p_j/\rho)^2` and :math:`(\\mu_j q_j/\rho)^2` of a batch, from s and Q."""

    def __init__(self, mu: np.ndarray, log_p: np.ndarray, log_q: np.ndarray | None):
        self.rates = 2 * np.stack([mu, -(mu**2)], axis=1)
        self.p = 2 * (log_p + np.log(mu)).T
        self.q = None if log_q is None else 2 * (log_q + np.log(mu)).T

    def __getitem__(self, which: np.ndarray) -> _Exponents:
        part = object.__new__(_Exponents)
        part.rates = self.rates
        part.p = self.p[:, which]
        part.q = None if self.q is None else self.q[:, which]
        return part

    def squares(self, s: np.ndarray, Q: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        p = self.rates @ np.stack([s, Q])
        p += self.p
        np.exp(p, out=p)
        if self.q is None:
            return p, None
        q = self.rates @ np.stack([-s, Q])
        q += self.q
        return p, np.exp(q, out=q)

    def r(self, s: np.ndarray, Q: np.ndarray) -> np.ndarray:
        p, q = self.squares(s, Q)
        return np.sqrt(p.sum(0) if q is None else p.sum(0) + q.sum(0))


def amplify(
    mu: np.ndarray,
    log_p: np.ndarray,
    log_q: np.ndarray | None,
    s: np.ndarray,
    until: str = "end",
) -> Amplification:
    """Solve for Q at the times ``s`` and find each start's fate.

    Each start has its own steps (Dormand and Prince's method of order 8 with its interpolant). It walks in s
    while r is large, and in Q, with ds/dQ = r, once it must collapse: neither variable ever stalls.

    Parameters
    ----------
    mu : numpy.ndarray
        ``(d,)``, positive.
    log_p, log_q : numpy.ndarray
        Logarithms of \\|p(0)\\|/rho and \\|q(0)\\|/rho, ``(n, d)``; -inf for zero. ``log_q`` may be None: all
        zero.
    s : numpy.ndarray
        Times ``(T,)``, not decreasing, from 0 on.
    until : "fate", "end" or "settled"
        How far to go: until it is known whether the start collapses; on to the last time and, if it
        collapses, the collapse; or further, until the last leader leads.

    Returns
    -------
    Amplification
        See there.

    Raises
    ------
    ValueError
        If the strengths are so far apart that it would take too many steps.
    """
    n, steps = len(log_p), 0
    present = np.isfinite(log_p) if log_q is None else np.isfinite(log_p) | np.isfinite(log_q)
    alive = present.any(1)
    slowest = np.where(present, mu, np.inf).min(1)
    last = np.where(np.isfinite(log_p), mu, 0).max(1)  # the largest mu that can grow
    settled_r = mu[-2:].sum()
    s_max = s[-1] if len(s) else 0.0

    Q, Q_last = np.zeros((n, len(s))), np.full(n, np.inf)
    filled = np.where(alive, np.searchsorted(s, 0, side="right"), 0)  # how many times are done
    collapses, diverges = ~alive, np.zeros(n, bool)
    s_end, s_settled = np.where(alive, np.inf, 0.0), np.full(n, np.nan)

    live = np.flatnonzero(alive)
    part = _Exponents(mu, log_p, log_q)[live]
    # x is the variable that a start walks in and y the other one: (s, Q), or (Q, s) when swapped.
    x, y = np.zeros((2, len(live)))
    swapped = np.zeros(len(live), bool)
    h = np.full(len(live), 0.1 / mu[-1])
    with np.errstate(all="ignore"):  # a step that is too long overflows, and is refused
        slope = 1 / part.r(x, y)
        while len(live):
            steps += 1
            if steps > _PATIENCE:
                raise ValueError(
                    f"mu = {mu.tolist()} spans a factor too large to follow: the steps that the major "
                    "feature needs are too short for the minor one; choose strengths nearer to each other"
                )
            s_now, Q_now = np.where(swapped, y, x), np.where(swapped, x, y)
            p, q = part.squares(s_now, Q_now)
            both, difference = (p, p) if q is None else (p + q, p - q)
            r = np.sqrt(both.sum(0))
            doomed, frozen = r < slowest[live], r > _LARGE
            rising = ~doomed & (r * (mu @ difference) > mu**2 @ both) | frozen
            collapses[live] |= doomed
            diverges[live] |= rising
            end = doomed | rising | (s_now * slowest[live] > _HOVERING)
            if until != "fate":
                gone = r < _SMALL * slowest[live]
                s_end[live[gone]] = s_now[gone] + r[gone] / slowest[live[gone]] ** 2
                end &= gone | ~doomed & ((s_now >= s_max) | frozen)
                Q_last[live] = np.where(gone, np.inf, Q_now)
            if until == "settled":
                leader = mu[(difference / mu[:, None] ** 2).argmax(0)]
                leads = (
                    rising & (r > settled_r) & (leader == last[live]) & (difference.max(0) > 0) & (s_now > 0)
                )
                s_settled[live] = np.where(leads, np.fmin(s_settled[live], s_now), s_settled[live])
                end &= ~rising | leads | frozen
            if end.any():
                keep = ~end
                live, part = live[keep], part[keep]
                x, y, h, slope = x[keep], y[keep], h[keep], slope[keep]
                swapped, doomed, r = swapped[keep], doomed[keep], r[keep]
                if not len(live):
                    break

            turn = doomed & ~swapped
            x, y = np.where(turn, y, x), np.where(turn, x, y)
            h, slope = np.where(turn, h * slope, h), np.where(turn, r, slope)
            swapped = swapped | turn

            stages, x_new, y_new, error = _step(part, x, y, slope, h, swapped, mu[-1])
            accepted = error < 1
            _fill(Q, s, filled, live, part, stages, (x, y, h, swapped), (x_new, y_new), accepted)
            h = h * np.clip(0.9 * np.maximum(error, 1e-9) ** (-1 / 8), 0.2, 8)
            x, y = np.where(accepted, x_new, x), np.where(accepted, y_new, y)
            slope = np.where(accepted, stages[DOP853.n_stages], slope)

        if until == "settled":
            # Where Q no longer moves, the logarithms of the weights are straight lines in s.
            late = np.flatnonzero(diverges & np.isnan(s_settled))
            major = (np.where(mu == last[late, None], log_p[late], -np.inf)).argmax(1)
            ahead = mu[major][:, None] - mu
            behind = Q_last[late, None] * (mu[major][:, None] ** 2 - mu**2) + log_p[late]
            behind -= np.take_along_axis(log_p[late], major[:, None], 1)
            overflow = ((_LONG - log_p[late] + mu**2 * Q_last[late, None]) / mu).min(1)
            s_settled[late] = np.minimum(np.where(ahead > 0, behind / ahead, 0).max(1), overflow)
    Q = np.where(np.arange(len(s)) < filled[:, None], Q, Q_last[:, None])
    Q[s >= s_end[:, None]] = np.inf
    return Amplification(Q, collapses, diverges, s_end, s_settled)


def _slope(part: _Exponents, x: np.ndarray, y: np.ndarray, swapped: np.ndarray | None) -> np.ndarray:
    if swapped is None:
        return 1 / part.r(x, y)
    r = part.r(np.where(swapped, y, x), np.where(swapped, x, y))
    return np.where(swapped, r, 1 / r)


def _step(part, x, y, slope, h, swapped, mu_max):
    """One step of every start: the stages, the end point, and the error in units of the tolerance."""
    swapped = swapped if swapped.any() else None
    stages = np.empty((DOP853.n_stages + 4, len(x)))
    stages[0] = slope
    for i in range(1, DOP853.n_stages):
        stages[i] = _slope(part, x + DOP853.C[i] * h, y + h * (DOP853.A[i, :i] @ stages[:i]), swapped)
    x_new, y_new = x + h, y + h * (DOP853.B @ stages[: DOP853.n_stages])
    stages[DOP853.n_stages] = _slope(part, x_new, y_new, swapped)
    fifth, third = DOP853.E5 @ stages[:13], DOP853.E3 @ stages[:13]
    size = np.hypot(fifth, 0.1 * third)
    estimate = np.abs(h) * fifth**2 / np.where(size > 0, size, 1)
    error = estimate / _TOLERANCE * (mu_max**2 if swapped is None else np.where(swapped, mu_max, mu_max**2))
    return stages, x_new, y_new, np.where(np.isfinite(error) & np.isfinite(y_new), error, np.inf)


def _fill(Q, s, filled, live, part, stages, old, new, accepted):
    """Q at the times that the accepted steps have passed, from the method's interpolant of order 7."""
    x, y, h, swapped = old
    x_new, y_new = new
    passed = np.searchsorted(s, np.where(swapped, y_new, x_new), side="right")
    count = np.where(accepted, passed - filled[live], 0)
    inside = np.flatnonzero(count)
    if not len(inside):
        return
    x, y, h, swapped = x[inside], y[inside], h[inside], swapped[inside]
    K, part, count = stages[:, inside], part[inside], count[inside]
    for i, (a, c) in enumerate(zip(DOP853.A_EXTRA, DOP853.C_EXTRA, strict=True), start=13):
        K[i] = _slope(part, x + c * h, y + h * (a[:i] @ K[:i]), swapped if swapped.any() else None)
    rise = y_new[inside] - y
    F = np.empty((len(inside), 7))
    F[:, 0], F[:, 1], F[:, 2] = rise, h * K[0] - rise, 2 * rise - h * (K[12] + K[0])
    F[:, 3:] = (h * (DOP853.D @ K)).T

    row = np.repeat(np.arange(len(inside)), count)
    column = filled[live[inside]][row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    time, Q_row = s[column], np.empty(len(row))
    for walks_in_Q in (False, True):
        at = np.flatnonzero(swapped[row] == walks_in_Q)
        if not len(at):
            continue
        i = row[at]
        if walks_in_Q:
            # Newton's method on s(Q) = time: s is concave in Q here, so that it climbs without overshooting.
            theta = np.zeros(len(at))
            for _ in range(12):
                slope = h[i] * part[i].r(time[at], x[i] + theta * h[i])
                theta = np.clip(theta + (time[at] - y[i] - _interpolate(F[i], theta)) / slope, 0, 1)
            Q_row[at] = x[i] + theta * h[i]
        else:
            Q_row[at] = y[i] + _interpolate(F[i], (time[at] - x[i]) / h[i])
    Q[live[inside][row], column] = Q_row
    filled[live[inside]] += count


def _interpolate(F: np.ndarray, theta: np.ndarray) -> np.ndarray:
    rest, value = 1 - theta, np.zeros_like(theta)
    for i, factor in enumerate((theta, rest, theta, rest, theta, rest, theta)):
        value += F[:, 6 - i]
        value *= factor
    return value
