"""Landscapes to look at: a 2-D loss with a sharp and a flat minimum, and slices through any loss.

Slices take ``loss`` and ``params`` as :mod:`samkit.sharpness` does, and leave everything as they found it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from samkit._arguments import integer
from samkit.surface import Surface, check_shapes, checked

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

SHARP_MINIMUM = (-16.804743956699102, 12.80254353111201)
"""(m, s) of the sharp minimum of :func:`~samkit.landscapes.two_basins`: loss 0.275230, the lower one."""
FLAT_MINIMUM = (19.810063940435864, 29.936621031918705)
"""(m, s) of the flat minimum of :func:`~samkit.landscapes.two_basins`: loss 0.356447."""
SADDLE = (0.3103362324785204, 22.499038304993626)
"""(m, s) of the saddle between the minima of :func:`~samkit.landscapes.two_basins`: loss 0.397668."""

# For each basin: m_i, s_i, weight in the mixture, temperature.
_BASINS = ((20.0, 30.0, 0.7, 1.8), (-20.0, 10.0, 0.3, 1.2))


def two_basins(theta: Tensor | Sequence[float], outside: str = "raise") -> Tensor:
    r"""A loss on two weights with a sharp minimum and a flat one, the sharp one lower.

    .. math::
        L(m, s) = -\log\bigl(0.7\, e^{-K_1 / 1.8^2} + 0.3\, e^{-K_2 / 1.2^2}\bigr), \qquad
        K_i = \log\frac{s_i}{s} + \frac{s^2 + (m - m_i)^2}{2 s_i^2} - \frac12

    :math:`K_i` is the Kullback-Leibler divergence of the Gaussian with mean m and standard deviation s from
    the one with :math:`(m_1, s_1) = (20, 30)` or :math:`(m_2, s_2) = (-20, 10)`. Differentiable any number of
    times.

    Parameters
    ----------
    theta : Tensor or sequence of float
        (m, s) along the last dimension, shape (..., 2), s > 0. What is not a tensor is read in float64.
    outside : "raise" or "nan"
        What happens where s <= 0: an error; or a loss of NaN with a gradient of zero, so that the other
        points of a batch go on, and plain gradient descent leaves this one where it went out.

    Returns
    -------
    Tensor
        The losses, shape (...).

    Raises
    ------
    ValueError
        If a point lies outside, the shape is wrong, or ``outside`` is neither word.

    Examples
    --------
    >>> from samkit.landscapes import FLAT_MINIMUM, SHARP_MINIMUM, two_basins
    >>> two_basins([SHARP_MINIMUM, FLAT_MINIMUM])
    tensor([0.2752, 0.3564], dtype=torch.float64)

    Notes
    -----
    Source: the test function of Chen & Zhou 2026 (arXiv 2603.10048). Chapter 4 walks on it.
    """
    if outside not in ("raise", "nan"):
        raise ValueError(f"outside must be 'raise' or 'nan', got {outside!r}")
    if not isinstance(theta, Tensor):
        theta = torch.as_tensor(theta, dtype=torch.float64)
    if theta.dim() == 0 or theta.shape[-1] != 2:
        raise ValueError(f"theta must hold (m, s), shape (..., 2), got shape {tuple(theta.shape)}")
    inside = theta[..., 1] > 0
    if outside == "raise" and not inside.all():
        s = theta[..., 1][~inside].flatten()[0].item()
        raise ValueError(
            f"s must be > 0, got {s}: the step went out of the domain; shorten it, or pass outside='nan'"
        )
    m, s = torch.where(inside[..., None], theta, math.nan).unbind(-1)
    log_terms = [
        math.log(weight)
        - (torch.log(s_i / s) + (s**2 + (m - m_i) ** 2) / (2 * s_i**2) - 0.5) / temperature**2
        for m_i, s_i, weight, temperature in _BASINS
    ]
    return -torch.logaddexp(*log_terms)


@dataclass(frozen=True)
class Line:
    """The loss along a line.

    Attributes
    ----------
    t : numpy.ndarray
        Where, in units of the direction, shape (n,).
    loss : numpy.ndarray
        The losses, shape (n,).
    """

    t: np.ndarray = field(repr=False)
    loss: np.ndarray = field(repr=False)


@dataclass(frozen=True)
class Plane:
    """The loss on a plane.

    Attributes
    ----------
    x : numpy.ndarray
        Where, in units of the first direction, shape (n,).
    y : numpy.ndarray
        Where, in units of the second direction, shape (m,).
    loss : numpy.ndarray
        The losses, shape (m, n): a row for each y, as contour plots want it.
    """

    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    loss: np.ndarray = field(repr=False)


def line(
    loss: Callable[..., Tensor],
    params: Iterable[Tensor],
    direction: Iterable[Tensor],
    *,
    t: ArrayLike | None = None,
    batched: bool = False,
) -> Line:
    r"""The loss along a line through the weights.

    .. math:: t \mapsto L(\theta + t\, d)

    Parameters
    ----------
    loss : callable
        Returns the loss, a scalar tensor.
    params : iterable of Tensor
        The weights :math:`\theta`.
    direction : iterable of Tensor
        :math:`d`, one tensor for each parameter; for nets see
        :func:`~samkit.landscapes.filter_normalized_direction`.
    t : array_like, optional
        Positions, shape (n,); by default 51 from -1 to 1.
    batched : bool
        Evaluate all positions in one call: ``loss`` is then a function of the weights, each with the position
        in front of its own dimensions, and returns one loss for each position. For a formula such as
        :func:`~samkit.landscapes.two_basins` that is about two hundred times faster. For a network on the CPU
        it is not: there, each evaluation fills the processor by itself.

    Returns
    -------
    Line
        Positions and losses. A loss that is not finite is kept as it is.

    Raises
    ------
    TypeError, ValueError
        As :func:`samkit.sharpness.hvp`.

    Examples
    --------
    >>> import torch
    >>> from samkit.landscapes import line
    >>> theta = torch.tensor([1.0, 0.0], requires_grad=True)
    >>> line(lambda: (theta**2).sum(), [theta], [torch.tensor([1.0, 0.0])], t=[-1, 0, 1]).loss
    array([0., 1., 4.])

    Notes
    -----
    Source: Goodfellow, Vinyals & Saxe 2015 (arXiv 1412.6544). Chapter 1.
    """
    t = _positions("t", np.linspace(-1, 1, 51) if t is None else t)
    return Line(t, _slice(loss, params, {"direction": direction}, [t], batched))


def plane(
    loss: Callable[..., Tensor],
    params: Iterable[Tensor],
    d1: Iterable[Tensor],
    d2: Iterable[Tensor],
    *,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    batched: bool = False,
) -> Plane:
    r"""The loss on a plane through the weights.

    .. math:: (x, y) \mapsto L(\theta + x\, d_1 + y\, d_2)

    Parameters
    ----------
    loss, params
        As in :func:`~samkit.landscapes.line`.
    d1, d2 : iterable of Tensor
        The directions that span the plane, one tensor for each parameter.
    x, y : array_like, optional
        Positions, shapes (n,) and (m,); by default 25 from -1 to 1 each.
    batched : bool
        As in :func:`~samkit.landscapes.line`; two dimensions, (m, n), then stand in front.

    Returns
    -------
    Plane
        Positions and losses. A loss that is not finite is kept as it is.

    Raises
    ------
    TypeError, ValueError
        As :func:`samkit.sharpness.hvp`.

    Examples
    --------
    >>> import torch
    >>> from samkit.landscapes import plane
    >>> theta = torch.zeros(2, requires_grad=True)
    >>> d1, d2 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    >>> plane(lambda: theta[0] + 10 * theta[1], [theta], [d1], [d2], x=[0, 1], y=[0, 1]).loss
    array([[ 0.,  1.],
           [10., 11.]])

    Notes
    -----
    Source: Li et al. 2018 (arXiv 1712.09913), section 4. Chapter 1.
    """
    x = _positions("x", np.linspace(-1, 1, 25) if x is None else x)
    y = _positions("y", np.linspace(-1, 1, 25) if y is None else y)
    return Plane(x, y, _slice(loss, params, {"d2": d2, "d1": d1}, [y, x], batched))


def path(
    loss: Callable[[], Tensor],
    params: Iterable[Tensor],
    end: Iterable[Tensor],
    *,
    t: ArrayLike | None = None,
) -> Line:
    r"""The loss on the straight line from the weights to other weights, and a little beyond both.

    .. math:: t \mapsto L\bigl((1 - t)\, \theta + t\, \theta_{\text{end}}\bigr)

    The statistics of BatchNorm stay those of the start: for a fair picture evaluate in train mode.

    Parameters
    ----------
    loss, params
        As in :func:`~samkit.landscapes.line`.
    end : iterable of Tensor
        The other weights, one tensor for each parameter.
    t : array_like, optional
        Positions, shape (n,): 0 is here and 1 is there; by default 61 from -0.25 to 1.25.

    Returns
    -------
    Line
        Positions and losses.

    Raises
    ------
    TypeError, ValueError
        As :func:`samkit.sharpness.hvp`.

    Examples
    --------
    >>> import torch
    >>> from samkit.landscapes import path
    >>> theta = torch.tensor([1.0], requires_grad=True)
    >>> path(lambda: (theta**2).sum(), [theta], [torch.tensor([3.0])], t=[0, 0.5, 1]).loss
    array([1., 4., 9.])

    Notes
    -----
    Source: Goodfellow, Vinyals & Saxe 2015 (arXiv 1412.6544). Chapter 1.
    """
    params, end = checked(params), list(end)
    check_shapes("end", end, params)
    direction = [e.detach().to(p) - p.detach() for e, p in zip(end, params, strict=True)]
    return line(loss, params, direction, t=np.linspace(-0.25, 1.25, 61) if t is None else t)


def filter_normalized_direction(params: Iterable[Tensor], seed: int) -> list[Tensor]:
    r"""A random direction in which every filter is as long as that filter of the weights.

    .. math:: d_{j} \leftarrow \frac{d_{j}}{\|d_{j}\|_2}\, \|\theta_{j}\|_2

    A filter j is a slice along the first dimension: the weights into one unit or channel. Slices along such
    directions can be compared between nets whose layers are scaled differently. Tensors with fewer than two
    dimensions (biases, normalisation gains) and frozen ones get zeros.

    Parameters
    ----------
    params : iterable of Tensor
        The weights.
    seed : int
        The same seed gives the same random numbers on every device.

    Returns
    -------
    list of Tensor
        The direction, in the shapes, dtypes and places of the parameters.

    Raises
    ------
    TypeError
        If the seed is not an integer, or ``params`` does not hold tensors.
    ValueError
        If the seed is negative, or no tensor has filters.

    Examples
    --------
    >>> import torch
    >>> from samkit.landscapes import filter_normalized_direction
    >>> weights = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    >>> filter_normalized_direction([weights], seed=0)[0].norm(dim=1)
    tensor([5., 0.])

    Notes
    -----
    Source: Li et al. 2018 (arXiv 1712.09913), section 4. Chapter 1.
    """
    generator = torch.Generator().manual_seed(integer("seed", seed, 0))
    direction = []
    for p in checked(params):
        d = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if p.requires_grad and p.dim() > 1:
            inputs = tuple(range(1, p.dim()))
            d *= p.detach().cpu().double().norm(dim=inputs, keepdim=True) / d.norm(dim=inputs, keepdim=True)
        else:
            d.zero_()
        direction.append(d.to(p.dtype).to(p.device))
    if not any(d.any() for d in direction):
        raise ValueError(
            "params has no trainable tensor of two or more dimensions that is not zero, so no filters to "
            "measure by; draw a direction with torch.randn_like"
        )
    return direction


def _slice(
    loss: Callable[..., Tensor],
    params: Iterable[Tensor],
    directions: Mapping[str, Iterable[Tensor]],
    axes: Sequence[np.ndarray],
    batched: bool,
) -> np.ndarray:
    """The losses on the grid spanned by ``axes``, one axis for each direction."""
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    directions = {name: list(direction) for name, direction in directions.items()}
    with Surface(loss, params) as surface:
        flat = np.stack([surface.flatten(name, direction) for name, direction in directions.items()])
        if not batched:
            losses = [surface.loss(position @ flat) for position in grid.reshape(-1, len(axes))]
            return np.reshape(losses, grid.shape[:-1])
        return surface.losses(grid @ flat)


def _positions(name: str, values: ArrayLike) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"{name} must be a 1-D array of finite positions, got {values}")
    return values
