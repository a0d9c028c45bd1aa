"""Run every benchmark: ``python -m benchmarks``, or some: ``python -m benchmarks sharpness import``."""

import importlib
import sys
from pathlib import Path

import torch

names = sys.argv[1:] or sorted(
    path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py")
)
torch.set_num_threads(1)  # two threads on shared cores measure the neighbours
for name in names:
    importlib.import_module(f"benchmarks.bench_{name}").main()
