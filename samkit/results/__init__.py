"""Stored results: small JSON files, beside this module, of what takes too long for a notebook."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from samkit import _arguments

__all__ = ["Stored", "agrees", "load", "names", "read", "save"]


@dataclass(frozen=True)
class Stored:
    """The stored rows of one experiment, one row for each seed.

    Parameters
    ----------
    name : str
        The experiment.
    function : str
        Dotted name of the function that computed each row.
    config : dict
        Its keyword arguments.
    seeds : list of int
        The seeds, in the order of the rows.
    rows : list of dict
        What the function returned for each seed.
    provenance : dict
        ``seconds`` of each row, and ``environments``: date, versions and machine of the runs behind the rows.
    """

    name: str
    function: str
    config: dict[str, Any]
    seeds: list[int]
    rows: list[dict[str, Any]]
    provenance: dict[str, Any]

    def column(self, key: str) -> np.ndarray:
        """One quantity for every seed.

        Parameters
        ----------
        key : str
            A key of the rows.

        Returns
        -------
        numpy.ndarray
            Shape ``(seeds,)``, or ``(seeds, k)`` where each row holds a list of ``k`` numbers. What was not
            finite is NaN.

        Raises
        ------
        ValueError
            If the rows have no such key.
        """
        if key not in self.rows[0]:
            raise ValueError(f"{self.name!r} stores no {key!r}; it stores {', '.join(self.rows[0])}")
        return np.asarray([row[key] for row in self.rows], dtype=np.float64)


def names() -> list[str]:
    """The names of all stored experiments.

    Returns
    -------
    list of str
        In alphabetical order.
    """
    files = (file.name for file in resources.files(__name__).iterdir())
    return sorted(n.removesuffix(".json") for n in files if n.endswith(".json") and ".partial" not in n)


def load(name: str) -> Stored:
    """Load one stored experiment.

    Parameters
    ----------
    name : str
        The experiment's name.

    Returns
    -------
    Stored
        Config, seeds, rows and provenance.

    Raises
    ------
    ValueError
        If nothing is stored under that name.
    """
    file = resources.files(__name__).joinpath(f"{name}.json")
    if not file.is_file():
        raise ValueError(
            f"no stored experiment {name!r} (stored: {', '.join(names()) or 'none'}); compute it with "
            f"`python -m samkit.experiments --only {name}`"
        )
    return read(file)


def read(file: Traversable) -> Stored:
    """Read an experiment from a file that :func:`save` wrote.

    Parameters
    ----------
    file : pathlib.Path or importlib.resources.abc.Traversable
        The file.

    Returns
    -------
    Stored
        The experiment.
    """
    return Stored(**json.loads(file.read_text(encoding="utf-8")))


def save(stored: Stored, file: Path) -> None:
    """Write an experiment to a file in one step: a reader sees the old file or the new one, never half of
    one.

    Parameters
    ----------
    stored : Stored
        The experiment.
    file : pathlib.Path
        Where to write.
    """
    fields = {key: json.dumps(value, allow_nan=False) for key, value in asdict(stored).items()}
    fields["rows"] = "[\n  " + ",\n  ".join(json.dumps(row, allow_nan=False) for row in stored.rows) + "\n ]"
    text = "{\n " + ",\n ".join(f'"{key}": {value}' for key, value in fields.items()) + "\n}\n"
    draft = file.with_name(file.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, file)


def agrees(value: ArrayLike, column: ArrayLike, tolerance: float | None = None) -> bool:
    """Whether what was recomputed here fits the stored seeds.

    Trained runs are not bit-equal across versions and machines, so the test is statistical: the value must
    lie within four standard deviations of the stored mean, or within ``tolerance`` of it.

    Parameters
    ----------
    value : float or array
        The recomputed number, or ``(k,)`` of them.
    column : array
        The stored numbers, ``(seeds,)`` or ``(seeds, k)``, as :meth:`Stored.column` gives them.
    tolerance : float or None
        An absolute tolerance in place of the four standard deviations.

    Returns
    -------
    bool
        ``True`` if every number fits; NaN never does.

    Raises
    ------
    ValueError
        If the column has fewer than two seeds and no tolerance is given, the tolerance is negative, or the
        shapes do not fit.

    Examples
    --------
    >>> from samkit import results
    >>> results.agrees(1.3, [1.0, 1.1, 1.2]), results.agrees(2.0, [1.0, 1.1, 1.2])
    (True, False)
    """
    stored, recomputed = np.asarray(column, dtype=np.float64), np.asarray(value, dtype=np.float64)
    if recomputed.shape != stored.shape[1:]:
        raise ValueError(f"one seed has shape {stored.shape[1:]}, but the value has shape {recomputed.shape}")
    if tolerance is None:
        if len(stored) < 2:
            raise ValueError("four standard deviations need at least two stored seeds; state a tolerance")
        tolerance = 4 * stored.std(axis=0, ddof=1)
    else:
        tolerance = _arguments.number("tolerance", tolerance)
    return bool(np.all(np.abs(recomputed - stored.mean(axis=0)) <= tolerance))
