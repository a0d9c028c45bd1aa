"""Landscapes to look at: a 2-D loss with a sharp and a flat minimum, and slices through any loss.

Slices take ``loss`` and ``params`` as :mod:`samkit.sharpness` does, and leave everything as found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from samkit.surface import Surface

__all__ = [
    "FLAT_MINIMUM",
    "SADDLE",
    "SHARP_MINIMUM",
    "Line",
    "Plane",
    "filter_normalized_direction",
    "line",
    "path",
    "plane",
    "two_basins",
]

SHARP_MINIMUM = (-16.804745, 12.802544)
FLAT_MINIMUM = (19.810064, 29.936621)
SADDLE = (0.310336, 22.499038)

# (m_i, s_i), weight in the mixture, temperature.
_BASINS = ((20.0, 30.0, 0.7, 1.8), (-20.0, 10.0, 0.3, 1.2))


def two_basins(theta: Tensor | Sequence[float], outside: str = "raise") -> Tensor:
    """A loss on (m, s), s > 0, with a sharp, low minimum and a flat, slightly higher one."""
    if outside not in ("raise", "nan"):
        raise ValueError(f"outside must be 'raise' or 'nan', got {outside!r}")
    if not isinstance(theta, Tensor):
        theta = torch.as_tensor(theta, dtype=torch.float64)
    if theta.dim() == 0 or theta.shape[-1] != 2:
        raise ValueError(f"theta must have shape (..., 2) for (m, s), got {tuple(theta.shape)}")
    inside = theta[..., 1] > 0
    if outside == "raise" and not inside.all():
        worst = theta.detach()[..., 1].min().item()
        raise ValueError(
            f"s must be > 0, got {worst}: the step left the domain; take a smaller one, or outside='nan'"
        )
    m, s = torch.where(inside[..., None], theta, math.nan).unbind(-1)
    terms = [
        math.log(weight)
        - (torch.log(center_s / s) + (s**2 + (m - center_m) ** 2) / (2 * center_s**2) - 0.5) / temperature**2
        for center_m, center_s, weight, temperature in _BASINS
    ]
    return -torch.logaddexp(*terms)


@dataclass(frozen=True)
class Line:
    """The loss along a line: ``loss`` (n,) at theta + ``t`` direction, ``t`` (n,)."""

    t: np.ndarray = field(repr=False)
    loss: np.ndarray = field(repr=False)


@dataclass(frozen=True)
class Plane:
    """The loss on a plane: ``loss`` (len(y), len(x)) at theta + ``x`` d1 + ``y`` d2."""

    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    loss: np.ndarray = field(repr=False)


def line(
    loss: Callable[[], Tensor],
    params: Iterable[Tensor],
    direction: Sequence[Tensor],
    *,
    t: Sequence[float] | None = None,
) -> Line:
    """The loss along a line through the weights."""
    t = np.linspace(-1, 1, 51) if t is None else np.asarray(t, dtype=np.float64)
    with Surface(loss, params) as surface:
        d = surface.flatten("direction", direction)
        return Line(t, np.array([surface.loss(step * d) for step in t]))


def plane(
    loss: Callable[[], Tensor],
    params: Iterable[Tensor],
    d1: Sequence[Tensor],
    d2: Sequence[Tensor],
    *,
    x: Sequence[float] | None = None,
    y: Sequence[float] | None = None,
) -> Plane:
    """The loss on a plane through the weights."""
    x = np.linspace(-1, 1, 25) if x is None else np.asarray(x, dtype=np.float64)
    y = np.linspace(-1, 1, 25) if y is None else np.asarray(y, dtype=np.float64)
    with Surface(loss, params) as surface:
        first, second = surface.flatten("d1", d1), surface.flatten("d2", d2)
        values = [[surface.loss(a * first + b * second) for a in x] for b in y]
        return Plane(x, y, np.array(values))


def path(
    loss: Callable[[], Tensor],
    params: Iterable[Tensor],
    end: Sequence[Tensor],
    *,
    t: Sequence[float] | None = None,
) -> Line:
    """The loss on the straight line from the weights (t = 0) to other weights ``end`` (t = 1)."""
    params = list(params)
    t = np.linspace(-0.5, 1.5, 81) if t is None else t
    return line(loss, params, [(e - p).detach() for e, p in zip(end, params, strict=True)], t=t)


def filter_normalized_direction(params: Iterable[Tensor], seed: int) -> list[Tensor]:
    """A random direction in which every filter has the norm of the same filter of the weights."""
    generator = torch.Generator().manual_seed(_integer("seed", seed, 0))
    direction = []
    for p in params:
        d = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        if p.dim() < 2 or not p.requires_grad:
            d.zero_()
        else:
            dims = tuple(range(1, p.dim()))
            d *= p.detach().norm(dim=dims, keepdim=True) / d.norm(dim=dims, keepdim=True)
        direction.append(d)
    return direction
