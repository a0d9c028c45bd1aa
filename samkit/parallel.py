"""Run one function on many arguments, on several processes, with one progress bar."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch
from tqdm import tqdm

from samkit import _arguments

__all__ = ["progress_bar", "run_all"]


def progress_bar(total: int, description: str, wanted: bool = True) -> tqdm:
    """A tqdm bar that shows itself only where somebody is watching.

    It shows in a terminal and in a live notebook, and stays silent where output is stored: in scripts with
    redirected output, in tests and in the built book. ``SAMKIT_PROGRESS=1`` or ``0`` forces it on or off.

    Parameters
    ----------
    total : int
        Number of steps.
    description : str
        Words before the bar.
    wanted : bool
        ``False`` keeps it silent whatever the environment.

    Returns
    -------
    tqdm.tqdm
        The bar; a context manager.
    """
    setting = os.environ.get("SAMKIT_PROGRESS", "")
    visible = wanted and setting != "0" and (setting == "1" or _somebody_watches())
    return tqdm(total=total, desc=description, disable=not visible, leave=False, dynamic_ncols=True)


def _somebody_watches() -> bool:
    if sys.stderr is not None and sys.stderr.isatty():
        return True
    # Notebook front ends let a cell ask for input; nbclient, which fills stored notebooks, does not.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return bool(getattr(getattr(shell, "kernel", None), "_allow_stdin", False))


def run_all(
    function: Callable[..., Any],
    arguments: Sequence[tuple],
    *,
    workers: int = 2,
    progress: bool = True,
    description: str = "runs",
) -> Iterator[tuple[int, Any]]:
    """Call ``function(*a)`` for every tuple ``a`` and yield ``(index, result)`` as each one finishes.

    With more than one worker the calls run in fresh processes with one thread each ("spawn", the method that
    works on every system), so the function must be importable: defined in a module, not in a notebook cell.

    Parameters
    ----------
    function : callable
        A top-level function of a module.
    arguments : sequence of tuple
        Its positional arguments, one tuple for each call.
    workers : int
        Number of processes; 1 runs everything in this process.
    progress : bool
        Whether to show a bar.
    description : str
        Words before the bar.

    Yields
    ------
    tuple
        The position in ``arguments``, and what the function returned.

    Raises
    ------
    ValueError
        If ``workers`` is less than 1.
    TypeError
        If ``workers`` is not an integer, or the function cannot be imported by another process.
    RuntimeError
        If a call fails in a worker (the original error is its cause), or if the processes cannot start.

    Examples
    --------
    >>> import math
    >>> from samkit import parallel
    >>> sorted(parallel.run_all(math.gcd, [(4, 6), (9, 6)], workers=1))
    [(0, 2), (1, 3)]
    """
    _arguments.integer("workers", workers, 1)
    with progress_bar(len(arguments), description, progress) as bar:
        finished = _here if min(workers, len(arguments)) <= 1 else _elsewhere
        for index, result in finished(function, arguments, workers):
            bar.update()
            yield index, result


def _here(function: Callable, arguments: Sequence[tuple], workers: int) -> Iterator[tuple[int, Any]]:
    for index, values in enumerate(arguments):
        yield index, function(*values)


def _elsewhere(function: Callable, arguments: Sequence[tuple], workers: int) -> Iterator[tuple[int, Any]]:
    if "<" in function.__qualname__ or function.__module__ == "__main__":
        raise TypeError(
            f"{function.__qualname__} cannot be imported by another process: "
            "define it at the top of a module, or pass workers=1"
        )
    executor = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
    )
    try:
        futures = {executor.submit(_call, function, values): i for i, values in enumerate(arguments)}
        for future in as_completed(futures):
            index = futures[future]
            try:
                yield index, pickle.loads(future.result())
            except BrokenProcessPool as error:
                raise RuntimeError(
                    "the worker processes died. In a script, call this under `if __name__ == '__main__':`; "
                    "if memory is short, use fewer workers; workers=1 runs everything in this process"
                ) from error
            except Exception as error:
                raise RuntimeError(
                    f"{function.__qualname__}{arguments[index]!r} failed in a worker: "
                    f"{type(error).__name__}: {error}"
                ) from error
    except BaseException:
        # Also reached by Ctrl-C and by a caller that stops listening: do not wait for work nobody wants.
        for process in list(executor._processes.values()):
            with contextlib.suppress(OSError):
                process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)  # two processes on two cores must not fight over them


def _call(function: Callable, values: tuple) -> bytes:
    # Plain pickle: torch's own would pass tensors through shared memory that dies with the worker.
    return pickle.dumps(function(*values))
