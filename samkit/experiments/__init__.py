"""The experiments of the chapters: plain functions of a seed, and the machinery that stores their results.

Each module here belongs to one chapter. What takes too long for a notebook is listed in the module's
``STORED``, a dict of :class:`Experiment` by name; ``python -m samkit.experiments`` computes it.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import pkgutil
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import samkit
from samkit import parallel, results

__all__ = ["Experiment", "collect", "compute"]


@dataclass(frozen=True)
class Experiment:
    """An experiment whose results are stored: a function, its configuration, its seeds.

    Parameters
    ----------
    function : callable
        A top-level function ``f(seed, **config)`` that returns a dict of numbers and lists of numbers.
    config : dict
        Its keyword arguments: numbers, strings, and lists of them.
    seeds : sequence of int
        The seeds; each gives one row.
    """

    function: Callable[..., dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = range(12)

    @property
    def function_name(self) -> str:
        """Dotted name of the function."""
        return f"{self.function.__module__}.{self.function.__qualname__}"


def collect() -> dict[str, Experiment]:
    """All experiments with stored results, from every module's ``STORED``.

    Returns
    -------
    dict of str to Experiment
        By name, in the order of the modules.

    Raises
    ------
    ValueError
        If two modules use the same name.
    """
    found: dict[str, Experiment] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name == "__main__":
            continue
        stored = getattr(importlib.import_module(f"{__name__}.{module.name}"), "STORED", {})
        twice = found.keys() & stored.keys()
        if twice:
            raise ValueError(f"two experiments are called {', '.join(sorted(twice))}; give each its own name")
        found |= stored
    return found


def compute(
    name: str,
    experiment: Experiment,
    folder: Path,
    *,
    workers: int = 2,
    force: bool = False,
    progress: bool = True,
) -> int:
    """Compute the seeds that are still missing and store each as soon as it is done.

    Unfinished work lives in ``NAME.partial.json`` and replaces ``NAME.json`` in one step when the last seed
    is there, so a killed run loses at most the seeds it was working on, and never what was stored before.
    Rows computed by another function or with another configuration are not used again.

    Parameters
    ----------
    name : str
        Name of the stored file.
    experiment : Experiment
        What to compute.
    folder : pathlib.Path
        Where the file lives.
    workers : int
        Number of processes.
    force : bool
        Start again from nothing.
    progress : bool
        Whether to show a bar.

    Returns
    -------
    int
        How many seeds were computed.

    Raises
    ------
    RuntimeError
        If the function fails; the message names the seed.
    TypeError, ValueError
        If the function or configuration cannot be stored as JSON.
    """
    # Compared as JSON, because a tuple comes back from the file as a list.
    config = json.loads(json.dumps(experiment.config))
    seeds = list(experiment.seeds)
    final, partial = folder / f"{name}.json", folder / f"{name}.partial.json"
    nothing = {"environments": [], "seconds": []}
    stored = results.Stored(name, experiment.function_name, config, [], [], nothing)
    for file in () if force else (final, partial):
        if file.is_file():
            earlier = results.read(file)
            if (earlier.function, earlier.config) == (stored.function, config):
                stored = earlier
    missing = [seed for seed in seeds if seed not in stored.seeds]
    if not missing and stored.seeds == seeds and final.is_file() and not partial.is_file():
        return 0
    results.save(stored, partial)
    tasks = [(experiment.function, seed, experiment.config) for seed in missing]
    for index, (row, seconds) in parallel.run_all(
        _row, tasks, workers=workers, progress=progress, description=name
    ):
        stored = _with_row(stored, missing[index], row, seconds)
        results.save(stored, partial)
    results.save(_in_order(stored, seeds), final)
    partial.unlink()
    return len(missing)


def _row(function: Callable, seed: int, config: dict[str, Any]) -> tuple[dict[str, Any], float]:
    started = time.perf_counter()
    row = function(seed, **config)
    if not isinstance(row, dict):
        raise TypeError(f"an experiment returns a dict of numbers, got {type(row).__name__}")
    return {key: _plain(value) for key, value in row.items()}, time.perf_counter() - started


def _plain(value: Any) -> Any:
    """Numbers with seven digits, arrays as lists, and what is not finite as None: small, strict JSON."""
    values = np.asarray(value, dtype=np.float64)
    if values.ndim:
        return [_plain(entry) for entry in values]
    return float(f"{values:.7g}") if np.isfinite(values) else None


def _with_row(stored: results.Stored, seed: int, row: dict[str, Any], seconds: float) -> results.Stored:
    environments = stored.provenance["environments"]
    here = _environment()
    return replace(
        stored,
        seeds=[*stored.seeds, seed],
        rows=[*stored.rows, row],
        provenance={
            "environments": environments if here in environments else [*environments, here],
            "seconds": [*stored.provenance["seconds"], round(seconds, 1)],
        },
    )


def _in_order(stored: results.Stored, seeds: list[int]) -> results.Stored:
    order = [stored.seeds.index(seed) for seed in seeds]
    seconds = [stored.provenance["seconds"][i] for i in order]
    return replace(
        stored,
        seeds=seeds,
        rows=[stored.rows[i] for i in order],
        provenance=stored.provenance | {"seconds": seconds},
    )


def _environment() -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("torch", "numpy", "scipy", "mnist1d", "mlxtend")}
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "samkit": samkit.__version__} | versions,
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "cores": os.cpu_count(),
            "device": str(samkit.device()),
        },
    }
