"""One way to time things, for all benchmarks."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping


def medians(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median seconds of each candidate; they take turns, so that a slow moment hits them all."""
    return {name: statistics.median(times) for name, times in in_turns(candidates, repeats).items()}


def in_turns(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """The seconds of every run of each candidate, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()  # the first call allocates and loads
    gc.disable()
    try:
        for turn in range(repeats):
            # Another one begins each round: whoever follows the collection, or a heavy one, starts cold.
            names = list(candidates)[turn % len(candidates) :] + list(candidates)[: turn % len(candidates)]
            for name in names:
                start = time.perf_counter()
                candidates[name]()
                seconds[name].append(time.perf_counter() - start)
            gc.collect()
    finally:
        gc.enable()
    return seconds
