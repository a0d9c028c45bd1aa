"""``phase_diagram`` beside one ``solve_ivp`` call for each start: seconds, and how far apart the answers are.

Both are timed in one process, on one thread. The peer gets the easiest form of the problem: the logarithms
of the weights, which never underflow, an event that ends a collapse, and the times of the diagram. It solves
a sample of the starts, and its time is scaled up to all of them. Errors are relative, in beta, against a run
at the tightest tolerance; starts within 1e-3 of the critical scale are left out.
"""

import math
from functools import partial

import numpy as np
import torch
from scipy.integrate import solve_ivp

from benchmarks.timing import medians
from samkit.diagonal import critical_scale, phase_diagram

MU = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
STARTS, TIMES, SAMPLE, REPEATS = 10_000, 200, 20, 7
PEERS = {
    "solve_ivp, default tolerance": {},
    "solve_ivp, DOP853, rtol 1e-10": {"method": "DOP853", "rtol": 1e-10, "atol": 1e-10},
}
EXACT = {"method": "DOP853", "rtol": 1e-13, "atol": 1e-12}


def one_start(ratio: float, s: np.ndarray, **options) -> np.ndarray:
    """log beta at the times before the collapse."""

    def velocity(_, log_w):
        w = np.exp(log_w)
        return MU - MU**2 / (math.sqrt(2) * np.linalg.norm(MU * w))

    def collapses(_, log_w):
        return log_w.max() + 12

    collapses.terminal = True
    start = np.full(len(MU), math.log(ratio))
    with np.errstate(all="ignore"):  # steps that reach beyond the collapse overflow, and are refused
        return 2 * solve_ivp(velocity, (0, s[-1]), start, t_eval=s, events=collapses, **options).y.T


def main() -> None:
    ratios, s = np.linspace(0.1, 1.2, STARTS), np.linspace(0, 12, TIMES)
    sample = ratios[:: STARTS // SAMPLE]
    candidates = {"samkit": lambda: phase_diagram(MU, ratios, s)}
    for name, options in PEERS.items():
        solve = partial(one_start, s=s, **options)
        candidates[name] = lambda solve=solve: [solve(ratio) for ratio in sample]
    seconds = medians(candidates, REPEATS)

    clear = sample[np.abs(sample - critical_scale(MU)) > 1e-3]
    exact = [one_start(ratio, s, **EXACT) for ratio in clear]
    found = phase_diagram(MU, clear, s)
    with np.errstate(divide="ignore"):
        answers = {"samkit": np.log(found.beta)}
    for name, options in PEERS.items():
        answers[name] = [one_start(ratio, s, **options) for ratio in clear]
    # In the last hundredth before a collapse the answers differ by how well they know its time.
    rows = [int((s[: len(e)] < end - 0.01).sum()) for e, end in zip(exact, found.s_end, strict=True)]

    print(f"\nThe phase diagram of {STARTS} starts, {len(MU)} features, {TIMES} times")
    for name, answer in answers.items():
        whole = seconds[name] * (1 if name == "samkit" else STARTS / len(sample))
        error = max(
            np.abs(np.expm1(a[:r] - e[:r])).max() for a, e, r in zip(answer, exact, rows, strict=True)
        )
        print(f"{name:30}{whole:9.3f} s{whole / seconds['samkit']:6.0f}   error {error:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
