"""What ``import samkit`` adds to ``import torch``: medians over fresh processes that take turns."""

import subprocess
import sys

from benchmarks.timing import medians

REPEATS = 11


def python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def main() -> None:
    modules = ("torch", "torch, samkit", "torch, samkit.optim, samkit.sharpness, samkit.landscapes")
    seconds = medians({m: lambda m=m: python(f"import {m}") for m in modules}, REPEATS)
    print("\nImport times of a fresh process")
    for module in modules:
        extra = seconds[module] - seconds["torch"]
        print(f"{'import ' + module:72}{seconds[module]:6.2f} s{extra:+8.3f} s")


if __name__ == "__main__":
    main()
