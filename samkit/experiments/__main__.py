"""``python -m samkit.experiments``: compute the stored results, and pick up where a stopped run left off."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from samkit import results
from samkit.experiments import collect, compute


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m samkit.experiments",
        description="Compute the experiments whose results are stored in samkit/results. "
        "Every seed is saved as soon as it is done; run the same command again after an interruption.",
    )
    parser.add_argument("--only", metavar="NAME", help="one experiment; all by default")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes (default 2)")
    parser.add_argument("--force", action="store_true", help="compute again what is stored already")
    parser.add_argument("--list", action="store_true", help="list the experiments and what is stored")
    options = parser.parse_args(arguments)
    experiments = collect()
    if options.only is not None:
        if options.only not in experiments:
            known = ", ".join(experiments) or "none"
            parser.error(f"unknown experiment {options.only!r}; choose one of: {known}")
        experiments = {options.only: experiments[options.only]}
    stored = results.names()
    if options.list:
        for name, experiment in experiments.items():
            state = "stored" if name in stored else "not computed"
            print(f"{name}: {experiment.function_name}, {len(experiment.seeds)} seeds, {state}")
        return 0
    try:
        for name, experiment in experiments.items():
            computed = compute(
                name, experiment, Path(results.__file__).parent, workers=options.workers, force=options.force
            )
            print(f"{name}: {computed} seeds computed, {len(experiment.seeds) - computed} were there already")
    except KeyboardInterrupt:
        print(
            "stopped; every finished seed is saved, and the same command goes on from there", file=sys.stderr
        )
        return 130
    except (RuntimeError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
