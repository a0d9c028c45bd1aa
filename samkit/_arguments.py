"""Checks of arguments, shared so that the same mistake reads the same everywhere."""

from __future__ import annotations

import math
import numbers


def integer(name: str, value: object, low: int) -> int:
    """The value as an int; a float or a bool is a TypeError, less than ``low`` a ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")
    return int(value)


def number(name: str, value: object, *, positive: bool = False) -> float:
    """The value as a float; NaN, infinite and negative values (with ``positive``, 0 too) are a ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be finite and {'> 0' if positive else '>= 0'}, got {value}")
    return float(value)


def fraction(name: str, value: object) -> float:
    """The value as a float; outside 0 to 1 it is a ValueError."""
    if number(name, value) > 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")
    return float(value)


def seed(value: object) -> int:
    """The seed as an int; NumPy's legacy generator takes 0 to 2**32 - 1, and no generator a float."""
    if integer("seed", value, 0) >= 2**32:
        raise ValueError(f"seed must be between 0 and 2**32 - 1, got {value}")
    return int(value)
