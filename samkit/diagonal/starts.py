"""What a flow starts from: strengths of features and initial weights, checked and brought to one shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from samkit import _arguments

__all__ = ["Start", "balanced_positive", "features", "in_range", "positive", "radius", "start"]

_SMALLEST, _LARGEST = 1e-50, 1e50  # fourth powers stay far inside the range of float64


@dataclass(frozen=True)
class Start:
    """Initial weights of a batch of starts.

    Attributes
    ----------
    layers : tuple of numpy.ndarray
        One array ``(n, d)`` for each layer.
    batched : bool
        Whether a batch was asked for; otherwise n = 1.
    balanced : bool
        Whether all layers are equal.
    """

    layers: tuple[np.ndarray, ...]
    batched: bool
    balanced: bool


def features(mu: ArrayLike) -> np.ndarray:
    """The strengths ``(d,)`` of the features, from minor to major, in float64.

    Raises
    ------
    ValueError
        If ``mu`` is empty, not one-dimensional, not finite, not positive, out of range, or decreases
        somewhere.
    """
    mu = np.asarray(mu, dtype=np.float64).copy()
    if mu.ndim != 1 or mu.size == 0:
        raise ValueError(f"mu must be a non-empty 1-D array of feature strengths, got shape {mu.shape}")
    if not np.isfinite(mu).all() or mu.min() <= 0:
        raise ValueError(
            f"mu must be finite and > 0, got {mu.tolist()}; absorb a feature's sign in the weights"
        )
    if (np.diff(mu) < 0).any():
        raise ValueError(f"mu must not decrease, got {mu.tolist()}: sort it, minor feature first")
    for end in (mu[:1], mu[-1:]):
        in_range("mu", end)
    return mu


def radius(rho: float) -> float:
    """SAM's radius as a float.

    Raises
    ------
    TypeError, ValueError
        If it is not a number >= 0, or out of range.
    """
    rho = _arguments.number("rho", rho)
    in_range("rho", np.asarray(rho))
    return rho


def in_range(name: str, values: np.ndarray, low: float = _SMALLEST) -> None:
    """Refuse a largest value whose powers float64 cannot hold; all zero is welcome."""
    size = np.abs(values).max(initial=0)
    if size and not low <= size <= _LARGEST:
        raise ValueError(
            f"{name} must be between {low:g} and {_LARGEST:g} in size, got {values.tolist()}: choose "
            "another unit"
        )


def start(init_scale: ArrayLike | tuple, d: int, depth: int) -> Start:
    """Read ``init_scale`` as :func:`~samkit.diagonal.flow` explains it.

    Raises
    ------
    ValueError
        If shapes or the number of layers do not fit, or a value is not finite or out of range.
    """
    if not isinstance(init_scale, tuple):
        layer, batched = _layer(init_scale, d)
        return Start((layer,) * depth, batched, True)
    if len(init_scale) != depth:
        raise ValueError(
            f"a tuple init_scale holds one value for each of the {depth} layers, got {len(init_scale)}; for "
            "coordinates pass a list or an array"
        )
    read = [_layer(value, d) for value in init_scale]
    sizes = {len(layer) for layer, batched in read if batched}
    if len(sizes) > 1:
        raise ValueError(f"the layers of init_scale must agree in the number of starts, got {sorted(sizes)}")
    n = max(sizes, default=1)
    layers = tuple(np.broadcast_to(layer, (n, d)) for layer, _ in read)
    return Start(layers, bool(sizes), all(np.array_equal(layer, layers[0]) for layer in layers[1:]))


def balanced_positive(start: Start, depth: int) -> np.ndarray:
    """The common layer ``(n, d)`` of a start on three or more layers.

    Raises
    ------
    ValueError
        If a weight is not positive or the layers are not equal: neither has a closed form there.
    """
    positive(start, depth)
    if not start.balanced:
        raise ValueError(
            f"unbalanced layers need depth 2, got depth={depth}: pass one value for all layers, not a tuple"
        )
    return start.layers[0]


def positive(start: Start, depth: int) -> None:
    """Refuse weights that are not positive, which three or more layers do not take."""
    lowest = min(layer.min() for layer in start.layers)
    if lowest <= 0:
        raise ValueError(
            f"init_scale must be > 0 at depth {depth}, got {lowest}: zero and negative weights need depth 2"
        )


def _layer(value: ArrayLike, d: int) -> tuple[np.ndarray, bool]:
    values = np.asarray(value, dtype=np.float64).copy()
    fits = (values.ndim == 0, values.shape == (d,), values.ndim == 2 and values.shape[1] in (1, d))
    if not any(fits) or values.size == 0:
        raise ValueError(
            f"init_scale must be a number, {d} coordinates, or a batch of shape (n, {d}) or (n, 1); got "
            f"shape {values.shape}"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"init_scale must be finite, got {values.tolist()}")
    in_range("init_scale", values, low=0)  # the small ones are solved in logarithms
    return np.broadcast_to(values, (len(values) if values.ndim == 2 else 1, d)), values.ndim == 2
