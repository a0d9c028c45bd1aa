"""Sharpness-Aware Minimization: the optimizers, measurements and experiments of the course.

``import samkit`` is light: submodules such as ``samkit.optim`` or ``samkit.plot`` load when first used.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
from types import ModuleType

import numpy as np
import torch

from samkit import _arguments

__version__ = "0.1.0"
__all__ = ["__version__", "device", "seed_everything"]

_SUBMODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))
_DEVICE_TYPES = ("cuda", "mps", "cpu")


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})


def device(name: str | torch.device | None = None) -> torch.device:
    """The device the course computes on: CUDA if there is one, then MPS, then the CPU.

    The environment variable ``SAMKIT_DEVICE`` overrides the choice, for example ``SAMKIT_DEVICE=cpu`` or
    ``SAMKIT_DEVICE=cuda:1``, and ``name`` overrides both.

    Parameters
    ----------
    name : str or torch.device, optional
        A device to use, if this machine has it.

    Returns
    -------
    torch.device
        The device to create models and data on.

    Raises
    ------
    ValueError
        If ``name`` or ``SAMKIT_DEVICE`` names something other than ``cuda``, ``mps`` or ``cpu``, or a device
        that this machine does not have.

    Examples
    --------
    >>> import samkit
    >>> samkit.device().type in ("cuda", "mps", "cpu")
    True
    >>> samkit.device("cpu")
    device(type='cpu')
    """
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    wanted = (os.environ.get("SAMKIT_DEVICE", "") if name is None else str(name)).strip().lower()
    if name is None and not wanted:
        return torch.device(next(kind for kind in _DEVICE_TYPES if available[kind]))
    said = f"{'SAMKIT_DEVICE' if name is None else 'device'}={wanted!r}"
    try:
        chosen = torch.device(wanted)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in _DEVICE_TYPES:
        way_out = "unset the variable" if name is None else "leave it out"
        raise ValueError(
            f"{said} is not a device: use 'cuda', 'cuda:1', 'mps' or 'cpu', or {way_out} to let samkit choose"
        )
    count = {"cuda": torch.cuda.device_count(), "mps": int(available["mps"]), "cpu": 1}[chosen.type]
    if not available[chosen.type] or (chosen.index or 0) >= count:
        here = ", ".join(kind for kind in _DEVICE_TYPES if available[kind])
        raise ValueError(f"{said} is not available on this machine (it has: {here})")
    return chosen


def seed_everything(seed: int) -> int:
    """Seed Python, NumPy and every torch generator, and return the seed.

    Parameters
    ----------
    seed : int
        A whole number from 0 to 2**32 - 1 (NumPy's legacy generator takes no more).

    Returns
    -------
    int
        The seed, as a plain ``int``, so that it can be stored beside a result.

    Raises
    ------
    TypeError
        If ``seed`` is not an integer (a bool counts as a mistake).
    ValueError
        If it is outside the range.

    Examples
    --------
    >>> import samkit, torch
    >>> samkit.seed_everything(0)
    0
    >>> first = torch.rand(1)
    >>> _ = samkit.seed_everything(0)
    >>> bool(torch.rand(1) == first)
    True
    """
    seed = _arguments.seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (libraries use the legacy generator)
    torch.manual_seed(seed)
    return seed
