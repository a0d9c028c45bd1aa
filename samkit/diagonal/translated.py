r"""l_inf-SAM, and gradient descent as its case rho = 0: coordinates that do not see each other (chapter 6).

On balanced layers l_inf-SAM is gradient descent translated by rho, dw/ds = mu (w - rho)^(L-1), until w
reaches 0. On two unbalanced layers it is linear in each quadrant, and a weight that reaches 0 stays there.
"""

from __future__ import annotations

import numpy as np

__all__ = ["Deep", "TwoLayers"]


class TwoLayers:
    r"""Two layers of any signs: at most three pieces, each in closed form.

    Swapping layers and changing both signs bring every coordinate to w1 >= \|w2\|. With a = (w1 + w2)/2 and
    b = (w1 - w2)/2,

    - while w2 < 0: a = a0 exp(mu s) and b + rho = (b0 + rho) exp(-mu s), until a = b;
    - while w2 > 0: a - rho = (a1 - rho) exp(mu s) and b = b1 exp(-mu s), until a = b, which is never unless
      a1 < rho;
    - then w2 stays 0 and w1 falls at the rate mu rho, until it is 0 as well.

    Parameters
    ----------
    mu, w1, w2 : numpy.ndarray
        Strengths and initial layers, ``(n, d)`` or what broadcasts to it.
    rho : float
        The radius; 0 for gradient descent.
    """

    def __init__(self, mu: np.ndarray, w1: np.ndarray, w2: np.ndarray, rho: float):
        self.mu, self.rho = mu, rho
        self.swapped = np.abs(w2) > np.abs(w1)
        large, small = np.where(self.swapped, w2, w1), np.where(self.swapped, w1, w2)
        self.sign = np.where(large < 0, -1.0, 1.0)
        self.a0, self.b0 = self.sign * (large + small) / 2, self.sign * (large - small) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            # The pieces end where a quadratic in exp(mu s) is zero.
            size = self.b0 + rho
            crossed = 2 * size / (rho + np.sqrt(rho**2 + 4 * self.a0 * size))
            apart = self.sign * small < 0
            self.s1 = np.where(apart, np.log(crossed) / mu, 0)
            self.a1 = np.where(apart, np.where(self.a0 > 0, self.a0 * crossed, 0), self.a0)
            self.b1 = np.where(apart, self.a1, self.b0)
            below = rho - self.a1
            factor = (rho + np.sqrt(np.maximum(rho**2 - 4 * below * self.b1, 0))) / (2 * below)
            self.s2 = np.where(below > 0, self.s1 + np.log(factor) / mu, np.inf)
            self.a2 = np.where(below > 0, self.b1 / factor, 0)
            self.s3 = np.where(below > 0, self.s2 + 2 * self.a2 / (mu * rho), np.inf)

    @property
    def grows(self) -> np.ndarray:
        """Which coordinates grow for ever."""
        return self.a1 > self.rho

    @property
    def dies(self) -> np.ndarray:
        """Which coordinates reach 0 in finite time, at ``s3``, and those that never left it."""
        return np.isfinite(self.s3) | ((self.a0 == 0) & (self.b0 == 0))

    def __call__(self, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two layers ``(n, T, d)`` at the times ``(T,)``."""
        s = s[:, None]
        part = {name: value[:, None] for name, value in vars(self).items() if np.ndim(value) == 2}
        with np.errstate(all="ignore"):
            x = np.exp(self.mu * s)
            a, b = part["a0"] * x, (part["b0"] + self.rho) / x - self.rho
            y = np.exp(self.mu * (s - part["s1"]))
            rise = part["a1"] - self.rho
            together = s >= part["s1"]
            a = np.where(
                together, self.rho + np.where(rise == 0, 0, rise * y), np.where(part["a0"] == 0, 0, a)
            )
            b = np.where(together, part["b1"] / y, b)
            sliding = s >= part["s2"]
            half = np.maximum(part["a2"] - self.mu * self.rho * (s - part["s2"]) / 2, 0)
            a, b = np.where(sliding, half, a), np.where(sliding, half, b)
            large, small = part["sign"] * (a + b), part["sign"] * (a - b)
        return np.where(part["swapped"], small, large), np.where(part["swapped"], large, small)


class Deep:
    r"""Balanced positive layers, three or more: a power law, with the first blow-up ending time.

    With u = w - rho and m = L - 2, :math:`|u|^{-m}` is linear in s, with slope m mu up or down.

    Parameters
    ----------
    mu, w : numpy.ndarray
        Strengths and initial weights, ``(n, d)`` or what broadcasts to it.
    rho : float
        The radius; 0 for gradient descent.
    depth : int
        Number of layers L.
    """

    def __init__(self, mu: np.ndarray, w: np.ndarray, rho: float, depth: int):
        self.mu, self.rho, self.m, self.u0 = mu, rho, depth - 2, w - rho
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inverse = np.abs(self.u0) ** -float(self.m)
            self.s_blow = np.where(self.u0 > 0, inverse / (self.m * mu), np.inf)
            # With an even number of layers u keeps falling below rho, down to w = 0.
            falls = (self.u0 < 0) & (depth % 2 == 0)
            self.s_zero = (
                np.where(falls, (inverse - rho ** -float(self.m)) / (self.m * mu), np.inf)
                if rho
                else (np.full(self.u0.shape, np.inf))
            )
        self.s_end = self.s_blow.min(1)

    def __call__(self, s: np.ndarray) -> np.ndarray:
        """The common layer ``(n, T, d)`` at the times ``(T,)``."""
        now = np.minimum(s, self.s_end[:, None])[..., None]
        u0 = self.u0[:, None]
        with np.errstate(all="ignore"):
            size = np.abs(u0)
            outwards = (u0 > 0) | (self.m % 2 == 0)
            shrink = np.maximum(1 - np.where(outwards, 1, -1) * self.m * self.mu * size**self.m * now, 0)
            u = np.where(u0 == 0, 0, u0 * shrink ** (-1 / self.m))
            w = np.where(now >= self.s_zero[:, None], 0, self.rho + u)
            return np.where((now >= self.s_blow[:, None]) & (u0 > 0), np.inf, w)
