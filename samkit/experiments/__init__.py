"""The experiments of the chapters, as plain functions of a seed, and what is needed to store their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Experiment"]


@dataclass(frozen=True)
class Experiment:
    """An experiment whose results are stored: a function, its configuration, its seeds.

    Parameters
    ----------
    function : callable
        A top-level function ``f(seed, **config)`` that returns a dict of numbers and lists of numbers.
    config : dict
        Its keyword arguments; numbers, strings and lists of them.
    seeds : sequence of int
        The seeds; each gives one row.
    """

    function: Callable[..., dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = range(12)
