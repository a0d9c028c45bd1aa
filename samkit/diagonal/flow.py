"""Rescaled flows of gradient descent and SAM on one example, and the phase diagram (chapters 5 to 7).

The example has features mu and label +1, and z = <beta, mu>. Every loss that falls in z gives the same path:
its slope is a factor common to all weights, and dividing it out only changes the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from samkit import _arguments
from samkit.diagonal import starts
from samkit.diagonal.amplification import amplify
from samkit.diagonal.translated import Deep, TwoLayers

__all__ = ["METHODS", "Flow", "PhaseDiagram", "flow", "phase_diagram"]

METHODS = ("gd", "l2-sam", "linf-sam")
"""The methods that :func:`~samkit.diagonal.flow` knows."""

_ROWS = 801
_FATES = np.array(["stays finite", "collapses", "diverges"])
_FINITE, _COLLAPSES, _DIVERGES = range(3)


@dataclass(frozen=True)
class Flow:
    """Trajectories of one start, or of a batch of n.

    Attributes
    ----------
    s : numpy.ndarray
        Rescaled times ``(T,)``.
    beta : numpy.ndarray
        The predictor, ``(T, d)``, or ``(n, T, d)`` for a batch.
    layers : tuple of numpy.ndarray
        The weights of each layer, in the shape of ``beta``.
    gradient_norm : numpy.ndarray
        The l_2 norm n of the gradient of z with respect to all weights, ``(T,)`` or ``(n, T)``.
    outcome : str, or numpy.ndarray of str ``(n,)``
        ``"diverges"``, ``"collapses"`` or ``"stays finite"``: what happens as s grows, whatever ``s`` covers.
        Under l_2-SAM on three layers, weights that still creep after very long count as finite.
    s_end : float, or numpy.ndarray ``(n,)``
        When all weights have collapsed or the first has blown up; the last time when there is neither.
    mu : numpy.ndarray
        The strengths of the features, ``(d,)``.
    """

    s: np.ndarray = field(repr=False)
    beta: np.ndarray = field(repr=False)
    layers: tuple[np.ndarray, ...] = field(repr=False)
    gradient_norm: np.ndarray = field(repr=False)
    outcome: str | np.ndarray
    s_end: float | np.ndarray
    mu: np.ndarray = field(repr=False)

    @property
    def leader(self) -> np.ndarray:
        """The coordinate with the largest beta, ``(T,)`` or ``(n, T)``; -1 where there is none.

        There is none when beta is zero, or when coordinates of different strength share the largest value, as
        they do at a uniform start. Of equally strong ones, the first counts.
        """
        top = self.beta.max(-1, keepdims=True)
        at_top = self.beta == top
        strength = np.where(at_top, self.mu, -np.inf).max(-1)
        contested = (at_top & (self.mu < strength[..., None])).any(-1)
        return np.where(contested | (top[..., 0] <= 0), -1, at_top.argmax(-1))

    def sequence(self) -> tuple[int, ...]:
        """The coordinates that lead one after the other, for one start.

        A start that collapses trains nothing, so it has no sequence: the answer is empty. (Discrete steps of
        such a run chatter about 0 with the major coordinate on top: reading that as a sequence is a trap.)

        Returns
        -------
        tuple of int
            Coordinates, counted from 0, each different from the one before.

        Raises
        ------
        ValueError
            For a batch; take the starts one by one.
        """
        if self.beta.ndim == 3:
            raise ValueError(f"sequence() reads one start, got {len(self.beta)}: use leader for a batch")
        leader = self.leader[self.leader >= 0]
        if self.outcome == "collapses" or not len(leader):
            return ()
        changes = np.flatnonzero(np.diff(leader)) + 1
        return tuple(int(leader[i]) for i in (0, *changes))


def flow(
    mu: ArrayLike,
    init_scale: ArrayLike | tuple,
    rho: float,
    *,
    method: str = "l2-sam",
    depth: int = 2,
    s: ArrayLike | None = None,
) -> Flow:
    r"""The rescaled flow of a linear diagonal network on one example.

    .. math::
        \frac{d\theta}{ds} = \nabla z(\theta - \varepsilon), \quad
        z = \langle w^1 \odot \cdots \odot w^L, \mu \rangle, \quad
        \varepsilon = 0 \ \text{ or } \ \rho\, \frac{\nabla z}{\|\nabla z\|_2}
        \ \text{ or } \ \rho \operatorname{sign} \nabla z

    for gradient descent, l_2-SAM and l_inf-SAM: the loss falls in z, so SAM looks where z is smaller. The
    rescaled time s counts ds = \|l'\| dt. Depths 1 and 2, gradient descent and l_inf-SAM have closed forms
    (for l_2-SAM on two layers with one scalar differential equation in it, solved in logarithms); l_2-SAM on
    three layers is solved numerically.

    Parameters
    ----------
    mu : array_like
        Strengths of the features, ``(d,)``, positive and not decreasing.
    init_scale : number, array_like or tuple
        The initial weights alpha. A number; coordinates ``(d,)`` (a 1-D value always means coordinates); a
        batch ``(n, d)``, or ``(n, 1)`` for uniform starts, solved at once. A tuple holds one such value for
        each layer (unbalanced layers); anything else is the value of every layer. With two layers, weights
        may be zero or negative; with three or more they must be positive.
    rho : float
        SAM's radius. Gradient descent does not perturb; there rho only serves to choose the times.
    method : "l2-sam", "linf-sam" or "gd"
        The method. rho = 0 makes either SAM gradient descent.
    depth : int
        Number of layers L. Three layers are the most for l_2-SAM.
    s : array_like, optional
        Times ``(T,)``, increasing from 0 or later. By default 801 up to the latest ``s_end``, or, for a start
        that grows for ever, until the final leader leads and n/rho exceeds the two largest mu together (or,
        between features that are nearly equal, until the weights are as large as float64 can square).

    Returns
    -------
    Flow
        Times, predictor, weights, gradient norm and fate. Rows at and after ``s_end`` repeat the state there:
        zero after a collapse; after a blow-up infinity for the winner, and the others frozen.

    Raises
    ------
    ValueError
        If ``mu`` is not positive, decreases or spans too large a factor, a shape does not fit, rho < 0,
        depth < 1, the times are not increasing, or the combination has no solution here (unbalanced layers at
        depth >= 3 for gradient descent and l_inf-SAM, l_2-SAM at depth >= 4).
    TypeError
        If rho is not a number or depth not an integer.

    Examples
    --------
    Gradient descent on two layers grows each coordinate like exp(2 mu s).

    >>> from samkit.diagonal import flow
    >>> flow([1.0, 2.0], 1.0, 0.0, method="gd", s=[0.0, 0.5]).beta.round(4)
    array([[1.    , 1.    ],
           [2.7183, 7.3891]])

    l_2-SAM from a middle-sized start amplifies the minor feature first and the major one last.

    >>> flow([1.0, 2.0, 3.0], 0.5, rho=1.0).sequence()
    (0, 1, 2)

    Under l_inf-SAM what starts below rho dies, so that a minor feature can win.

    >>> result = flow([1.0, 2.0], [1.5, 0.5], rho=1.0, method="linf-sam")
    >>> result.outcome, result.beta[-1, 1].item()
    ('diverges', 0.0)

    Notes
    -----
    Source: the setting of Moon, Si & Yun 2026 (arXiv 2603.08290); the closed forms for l_2-SAM and for
    unbalanced layers are derived in chapters 6 and 7.
    """
    mu = starts.features(mu)
    rho = starts.radius(rho)
    depth = _arguments.integer("depth", depth, 1)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    start = starts.start(init_scale, len(mu), depth)
    times = None if s is None else _times(s)
    radius = 0.0 if method == "gd" else rho

    if depth == 1:
        s, layers, fate, s_end = _straight(mu, start.layers[0], times)
    elif depth == 2 and method == "l2-sam" and rho > 0:
        s, layers, fate, s_end = _amplified(mu, start, rho, times)
    elif depth == 2:
        s, layers, fate, s_end = _translated(mu, start, radius, rho, times)
    elif method == "l2-sam" and rho > 0:
        if depth > 3:
            raise ValueError(f"l2-sam is solved for depth 1, 2 and 3, got depth={depth}")
        starts.positive(start, depth)
        s, layers, fate, s_end = _three_layers(mu, start, rho, times)
    else:
        w = starts.balanced_positive(start, depth)
        s, layers, fate, s_end = _blowing_up(mu, w, radius, depth, times)

    with np.errstate(all="ignore"):
        beta, norm = _predictor(layers, depth), _gradient_norm(mu, layers, depth)
    s_end = np.where(np.isfinite(s_end), s_end, s[-1])
    layers = layers * depth if len(layers) == 1 else layers
    outcome = _FATES[fate]
    if start.batched:
        return Flow(s, beta, tuple(layers), norm, outcome, s_end, mu)
    return Flow(s, beta[0], tuple(w[0] for w in layers), norm[0], str(outcome[0]), float(s_end[0]), mu)


@dataclass(frozen=True)
class PhaseDiagram:
    """Who leads, over initial scale and time.

    Attributes
    ----------
    ratios : numpy.ndarray
        alpha/rho of the starts, ``(n,)``.
    s : numpy.ndarray
        Rescaled times, ``(T,)``.
    leader : numpy.ndarray
        The coordinate with the largest beta, ``(n, T)``; -1 where there is none: at s = 0, where all are
        equal, and after a collapse. Of equally strong features, the first counts.
    beta : numpy.ndarray
        beta/rho^2, ``(n, T, d)``.
    outcome : numpy.ndarray of str
        ``(n,)``, see :class:`~samkit.diagonal.Flow`.
    s_end : numpy.ndarray
        ``(n,)``, when a start collapses; the last time for the others.
    """

    ratios: np.ndarray = field(repr=False)
    s: np.ndarray = field(repr=False)
    leader: np.ndarray = field(repr=False)
    beta: np.ndarray = field(repr=False)
    outcome: np.ndarray = field(repr=False)
    s_end: np.ndarray = field(repr=False)


def phase_diagram(mu: ArrayLike, ratios: ArrayLike, s: ArrayLike) -> PhaseDiagram:
    r"""Which coordinate leads under l_2-SAM on two layers, over alpha/rho and time.

    .. math:: \text{leader} = \arg\min_j \left| \mu_j - \frac{s}{2 Q(s)} \right|

    From a uniform start, log w is a parabola in mu: the leader is the feature nearest to its top.

    Parameters
    ----------
    mu : array_like
        Strengths of the features, ``(d,)``, positive and not decreasing.
    ratios : array_like
        Initial scales alpha/rho, ``(n,)``, positive. Nothing else matters.
    s : array_like
        Rescaled times ``(T,)``, increasing from 0 or later.

    Returns
    -------
    PhaseDiagram
        Leaders, predictors and fates.

    Raises
    ------
    ValueError
        If ``mu`` or ``s`` is as in :func:`~samkit.diagonal.flow`, or a ratio is not finite and positive.

    Examples
    --------
    Sweeping alpha/rho at one time finds collapse, then minor, middle and major feature.

    >>> from samkit.diagonal import phase_diagram
    >>> phase_diagram([1.0, 2.0, 3.0], [0.4, 0.45, 0.5, 0.8], [0.0, 3.0]).leader[:, 1]
    array([-1,  0,  1,  2])

    Notes
    -----
    Source: the sequence is found by Moon, Si & Yun 2026 (arXiv 2603.08290); the formula is derived in
    chapter 7.
    """
    mu, s = starts.features(mu), _times(s)
    ratios = np.asarray(ratios, dtype=np.float64).copy()
    if ratios.ndim != 1 or not len(ratios) or not (np.isfinite(ratios) & (ratios > 0)).all():
        raise ValueError(f"ratios must be a 1-D array of finite numbers alpha/rho > 0, got {ratios.tolist()}")
    log_p = np.log(np.sqrt(2) * ratios)[:, None] + np.zeros(len(mu))
    found = amplify(mu, log_p, None, s)
    values, first = np.unique(mu, return_index=True)
    passed = np.zeros(found.Q.shape, dtype=np.intp)
    for two in values[:-1] + values[1:]:
        passed += s > two * found.Q
    leader = np.where((found.Q > 0) & np.isfinite(found.Q), first[passed], -1)
    with np.errstate(all="ignore"):
        beta = _grown(mu, np.sqrt(0.5) * np.exp(log_p), s, found.Q) ** 2
    fate = np.where(found.collapses, _COLLAPSES, np.where(found.diverges, _DIVERGES, _FINITE))
    s_end = np.where(found.collapses, found.s_end, s[-1])
    return PhaseDiagram(ratios, s, leader, beta, _FATES[fate], s_end)


# The solutions. Each returns the times, the layers (a single array for balanced ones), fates and end times.

_Solution = tuple[np.ndarray, list[np.ndarray], np.ndarray, np.ndarray]


def _straight(mu: np.ndarray, w: np.ndarray, s: np.ndarray | None) -> _Solution:
    """Depth 1: the gradient of z is mu everywhere, whatever the perturbation."""
    if s is None:
        final = mu == mu[-1]
        ahead = np.where(final, 1, mu[-1] - mu)
        leads = (np.where(final, 0, (w - w[:, final].max(1, keepdims=True)) / ahead)).max()
        s = np.linspace(0, max(1.25 * leads, 1 / mu[-1]), _ROWS)
    fate = np.full(len(w), _DIVERGES)
    return s, [w[:, None] + s[:, None] * mu], fate, np.full(len(w), np.inf)


def _amplified(mu: np.ndarray, start: starts.Start, rho: float, s: np.ndarray | None) -> _Solution:
    """Depth 2, l_2-SAM: one scalar equation, for Q."""
    w1, w2 = start.layers[0], start.layers[-1]
    p, q = (w1 + w2) / 2, (w1 - w2) / 2  # over sqrt 2
    with np.errstate(divide="ignore"):
        log_p = np.log(np.abs(p) * (np.sqrt(2) / rho))
        log_q = None if start.balanced else np.log(np.abs(q) * (np.sqrt(2) / rho))
    if s is None:
        reach = amplify(mu, log_p, log_q, np.empty(0), "settled")
        undecided = ~(reach.collapses | reach.diverges)
        last = np.where(reach.collapses, reach.s_end, np.where(undecided, 3 / mu[0], 1.001 * reach.s_settled))
        s = _default_times(last.max(), mu)
    found = amplify(mu, log_p, log_q, s)
    with np.errstate(all="ignore"):
        grown = _grown(mu, p, s, found.Q)
        if log_q is None:
            layers = [grown]
        else:
            decayed = _grown(mu, q, -s, found.Q)
            layers = [grown + decayed, grown - decayed]
    fate = np.where(found.collapses, _COLLAPSES, np.where(found.diverges, _DIVERGES, _FINITE))
    return s, layers, fate, found.s_end


def _grown(mu: np.ndarray, w: np.ndarray, s: np.ndarray, Q: np.ndarray) -> np.ndarray:
    """w exp(mu s - mu^2 Q), ``(n, T, d)``, with zero staying zero."""
    grown = Q[:, :, None] * -(mu**2)
    grown += np.log(np.abs(w))[:, None]
    grown += s[:, None] * mu
    np.exp(grown, out=grown)
    return grown if (w >= 0).all() else grown * np.where(w < 0, -1.0, 1.0)[:, None]


def _translated(
    mu: np.ndarray, start: starts.Start, radius: float, rho: float, s: np.ndarray | None
) -> _Solution:
    """Depth 2, gradient descent and l_inf-SAM: exponentials."""
    solution = TwoLayers(mu, start.layers[0], start.layers[-1], radius)
    dead = solution.dies if radius > 0 else np.zeros(solution.grows.shape, bool)
    diverges, collapses = solution.grows.any(1), dead.all(1)
    ends = np.where(dead, np.where(np.isfinite(solution.s3), solution.s3, 0), 0).max(1)
    if s is None:
        last = np.where(collapses, ends, np.maximum(ends, 3 / mu[0]))
        final = np.where(solution.grows, mu, 0).max(1)
        late = np.flatnonzero(diverges)
        last[late] = 0.0
        reach = 1 / mu[-1]
        while len(late) and mu[-1] * reach < 300:
            w1, w2 = (w[late, 0] for w in solution(np.array([reach])))
            norm = np.sqrt((mu**2 * (w1**2 + w2**2)).sum(1))
            product = w1 * w2
            ahead = np.where(mu == final[late, None], product, -np.inf).max(1)
            led = ahead > np.where(mu == final[late, None], 0, product).max(1)
            led &= norm > rho * mu[-2:].sum()
            last[late] = reach
            late = late[~led]
            reach *= 1.25
        last = np.maximum(last, np.minimum(ends, 300 / mu[-1]))  # see the others die as well
        s = _default_times(last.max(), mu)
    fate = np.where(diverges, _DIVERGES, np.where(collapses, _COLLAPSES, _FINITE))
    w1, w2 = solution(s)
    return s, [w1] if start.balanced else [w1, w2], fate, np.where(collapses, ends, np.inf)


def _blowing_up(mu: np.ndarray, w: np.ndarray, radius: float, depth: int, s: np.ndarray | None) -> _Solution:
    """Depth >= 3, gradient descent and l_inf-SAM: power laws."""
    solution = Deep(mu, w, radius, depth)
    collapses = np.isfinite(solution.s_zero).all(1)
    s_end = np.where(collapses, solution.s_zero.max(1), solution.s_end)
    if s is None:
        # Below rho an odd number of layers crawls back to it: wait until a hundredth of the gap is left.
        with np.errstate(divide="ignore"):
            crawl = 99.0 / (solution.m * mu * np.abs(solution.u0) ** solution.m)
        crawl = np.where(np.isfinite(solution.s_zero), solution.s_zero, crawl)
        patience = np.where(np.isfinite(crawl), crawl, 3 / mu[0]).max(1)
        s = _default_times(np.where(np.isfinite(s_end), s_end, patience).max(), mu)
    blows = np.isfinite(solution.s_end)
    fate = np.where(blows, _DIVERGES, np.where(collapses, _COLLAPSES, _FINITE))
    return s, [solution(s)], fate, s_end


def _three_layers(mu: np.ndarray, start: starts.Start, rho: float, s: np.ndarray | None) -> _Solution:
    """Depth 3, l_2-SAM: numerically, one start after the other."""
    layers = start.layers[:1] if start.balanced else start.layers
    runs = [_ThreeLayers(mu, w, rho) for w in np.stack(layers, axis=1)]
    if s is None:
        s = _default_times(max(run.last for run in runs), mu)
    w = np.stack([run(s) for run in runs])  # (n, T, layers, d)
    layers = list(np.moveaxis(w, 2, 0))
    return s, layers, np.array([run.fate for run in runs]), np.array([run.s_end for run in runs])


class _ThreeLayers:
    """One start of l_2-SAM on three layers, ``(3, d)``, or ``(1, d)`` where all three are equal.

    Equal layers stay equal, but not when rounded: SAM tears the difference apart, so they are solved as one.
    It walks in a time tau in which neither blow-up nor collapse ever arrives: there, weights that blow up
    grow exponentially, and a gradient that vanishes decays exponentially.
    """

    _blown_up, _gone, _patience = 1e12, 1e-13, 1e6

    def __init__(self, mu: np.ndarray, w0: np.ndarray, rho: float):
        self._mu, self._rho, self._shape = mu, rho, w0.shape
        self._next = np.arange(1, len(w0) + 1) % len(w0)
        large = self._blown_up * max(rho, np.abs(w0).max())
        small = self._gone * np.linalg.norm(self._gradient(w0))

        def blows_up(_: float, state: np.ndarray) -> float:
            return np.abs(state[:-1]).max() - large

        def collapses(_: float, state: np.ndarray) -> float:
            return np.linalg.norm(self._gradient(state[:-1].reshape(self._shape))) - small

        blows_up.terminal = collapses.terminal = True
        found = solve_ivp(
            self._velocity,
            (0, self._patience),
            np.append(w0.ravel(), 0.0),
            method="DOP853",
            rtol=1e-10,
            atol=1e-14 * max(rho, np.abs(w0).max()),
            events=(blows_up, collapses),
            dense_output=True,
        )
        self._path, self._tau = found.sol, found.t
        self._final, s = found.y[:-1, -1].reshape(self._shape), float(found.y[-1, -1])
        self.fate, self.s_end, self.last = _FINITE, np.inf, s
        if len(found.t_events[0]):
            speed = (mu * self._final).min(0)  # the winner sees only itself now: dw/ds = mu w^2
            self._final = np.where(speed == speed.max(), np.inf, self._final)
            self.fate, self.s_end = _DIVERGES, s + 1 / float(speed.max())
            self.last = self.s_end
        elif len(found.t_events[1]):
            np.put_along_axis(self._final, np.abs(self._final).argsort(0)[:2], 0, 0)
            self.fate, self.s_end = _COLLAPSES, s
        else:
            gap = np.abs(found.y[:-1] - found.y[:-1, -1:]).max(0)
            self.last = float(found.y[-1, (gap <= 0.01 * gap[0]).argmax()]) or s

    def _gradient(self, w: np.ndarray) -> np.ndarray:
        others = w[self._next]
        return self._mu * others * others[self._next]

    def _velocity(self, _: float, state: np.ndarray) -> np.ndarray:
        w = state[:-1].reshape(self._shape)
        gradient = self._gradient(w)
        copies = 3 / len(w)
        norm, size2 = np.sqrt(copies) * np.linalg.norm(gradient), copies * (w**2).sum()
        speed = norm / (norm + self._mu[-1] * size2) / (self._mu[-1] * np.sqrt(self._rho**2 + size2))
        return speed * np.append(self._gradient(w - self._rho * gradient / norm).ravel(), 1.0)

    def __call__(self, s: np.ndarray) -> np.ndarray:
        """The layers ``(T, 3, d)``."""
        inside = s[s < min(self.s_end, self._path(self._tau[-1])[-1])]
        if not len(inside):
            return np.broadcast_to(self._final, (len(s), *self._shape))
        tau = np.linspace(self._tau[:-1], self._tau[1:], 20, axis=1).ravel()
        tau = np.interp(inside, self._path(tau)[-1], tau)
        for _ in range(4):
            # Newton's method on s(tau) = s.
            state = self._path(tau)
            speed = np.array([self._velocity(0, column)[-1] for column in state.T])
            tau = np.clip(tau + (inside - state[-1]) / speed, 0, self._tau[-1])
        w = self._path(tau)[:-1].T.reshape(-1, *self._shape)
        return np.concatenate([w, np.broadcast_to(self._final, (len(s) - len(inside), *self._shape))])


# Reading and reporting


def _times(s: ArrayLike) -> np.ndarray:
    s = np.asarray(s, dtype=np.float64).copy()
    if s.ndim != 1 or not len(s) or not np.isfinite(s).all() or s[0] < 0 or (np.diff(s) <= 0).any():
        raise ValueError(
            f"s must be a 1-D array of finite times, increasing from 0 or later, got {s.tolist()}"
        )
    return s


def _default_times(last: float, mu: np.ndarray) -> np.ndarray:
    return np.linspace(0, last if last > 0 else 1 / mu[-1], _ROWS)


def _predictor(layers: list[np.ndarray], depth: int) -> np.ndarray:
    return layers[0] ** depth if len(layers) == 1 else np.prod(layers, axis=0)


def _gradient_norm(mu: np.ndarray, layers: list[np.ndarray], depth: int) -> np.ndarray:
    if len(layers) == 1:
        return np.sqrt(depth * ((mu * layers[0] ** (depth - 1)) ** 2).sum(-1))
    others = [np.prod(layers[:i] + layers[i + 1 :], axis=0) for i in range(depth)]
    return np.sqrt(sum(((mu * other) ** 2).sum(-1) for other in others))
