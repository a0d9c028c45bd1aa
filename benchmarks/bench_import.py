"""What ``import samkit`` adds to ``import torch``, in fresh processes: medians."""

import statistics
import subprocess
import sys

REPEATS = 11
IMPORTS = ("torch", "samkit", "samkit.optim", "samkit.sharpness", "samkit.landscapes")
TIMED = "start = perf_counter(); import {}; print(perf_counter() - start)"
CODE = "\n".join(["from time import perf_counter", *map(TIMED.format, IMPORTS)])


def main() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(REPEATS)
    ]
    print("\nImports of a fresh process, one after the other")
    for name, *seconds in zip(IMPORTS, *runs, strict=True):
        print(f"import {name:20}{statistics.median(map(float, seconds)):8.3f} s")


if __name__ == "__main__":
    main()
