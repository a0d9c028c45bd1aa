"""Chapter 1: solutions of equal training loss, how sharp they are, and how well they generalise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

import samkit
from samkit import models, sharpness
from samkit.experiments import Experiment
from samkit.training import Config, Result, dataset, evaluate, run

__all__ = [
    "PLAIN",
    "POISON",
    "STORED",
    "batch_size",
    "distance",
    "divergence",
    "measure",
    "poisoned_start",
    "three_solutions",
    "train_to",
    "training_loss",
]

PLAIN = Config(
    batch_size=25,
    learning_rate=0.1,
    momentum=0.0,
    weight_decay=0.0,
    schedule="constant",
    epochs=100_000,
    evaluate_every=100_000,
)
"""SGD and nothing else; ``train_to`` ends it long before the last epoch."""

POISON = replace(PLAIN, batch_size=100, label_noise=0.9)
"""Training on random labels (with ten classes, replacing 90 % of them makes every label equally likely)."""


def train_to(
    config: Config,
    seed: int,
    *,
    target: float = 0.01,
    model: nn.Module | None = None,
    check_every: int = 50,
    max_steps: int = 200_000,
) -> Result:
    """Train until the loss on the whole training set falls below a target.

    Sharpness shrinks with the loss, so solutions are compared at equal loss, not after equal time.

    Parameters
    ----------
    config : samkit.training.Config
        The settings.
    seed : int
        The seed of the run; the seed of the data is ``config.data_seed``.
    target : float
        The training loss, a mean over examples, below which training ends.
    model : torch.nn.Module or None
        Where to start; ``None`` builds a fresh network from the seed.
    check_every : int
        Steps between two looks at the training loss.
    max_steps : int
        Steps after which it gives up.

    Returns
    -------
    samkit.training.Result
        The run; its history has one entry, for the end.

    Raises
    ------
    RuntimeError
        If the target is not reached within ``max_steps`` steps, or the loss overflows.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from samkit.experiments.flat_minima import PLAIN, train_to
    >>> moons = replace(PLAIN, dataset="two_moons")
    >>> train_to(moons, seed=0, target=0.3).final("train_loss") < 0.3
    True
    """
    problem = dataset(config).to(samkit.device())

    def arrived(step: int, network: nn.Module) -> bool:
        if step % check_every and step < max_steps:
            return False
        loss, _ = evaluate(network, problem.x, problem.y)
        if not loss < target and (step >= max_steps or not math.isfinite(loss)):
            raise RuntimeError(
                f"the training loss is {loss:.3g} after {step} steps, not yet below {target}: "
                "raise max_steps, or lower the learning rate if the loss does not fall"
            )
        return loss < target

    return run(config, seed, model=model, callback=arrived)


def poisoned_start(seed: int, *, target: float = 0.1) -> nn.Module:
    """A network that has learnt random labels by heart, as a place to start from.

    Parameters
    ----------
    seed : int
        The seed of the run and of the data.
    target : float
        The loss on the random labels at which to stop.

    Returns
    -------
    torch.nn.Module
        The network.

    Notes
    -----
    Source: Liu, Papailiopoulos & Achlioptas 2020 (arXiv 1906.02613), who also pad the data. Chapter 1.
    """
    return train_to(replace(POISON, data_seed=seed), seed, target=target).model


def measure(result: Result) -> dict[str, float]:
    """What the chapter asks of every solution.

    Parameters
    ----------
    result : samkit.training.Result
        The run that found it.

    Returns
    -------
    dict of str to float
        ``training_loss``; ``training_accuracy`` and ``test_accuracy`` in per cent; ``steps``; and
        ``sharpness``, the top eigenvalue of the Hessian of the training loss.
    """
    loss, params = training_loss(result)
    return {
        "training_loss": result.final("train_loss"),
        "training_accuracy": 100 * result.final("train_accuracy"),
        "test_accuracy": 100 * result.final("test_accuracy"),
        "steps": result.gradient_evaluations,
        "sharpness": float(sharpness.top_eigenvalues(loss, params).value[0]),
    }


def batch_size(
    seed: int, *, batch_sizes: Sequence[int] = (25, 400), learning_rates: Sequence[float] = (0.1, 0.1)
) -> dict[str, list[float]]:
    """Train from one start with several batch sizes and learning rates, each to the same training loss.

    Parameters
    ----------
    seed : int
        Seed of the start, of the batches and of the data.
    batch_sizes : sequence of int
        Examples per step, one for each run.
    learning_rates : sequence of float
        The learning rate of each run.

    Returns
    -------
    dict of str to list of float
        The entries of :func:`~samkit.experiments.flat_minima.measure`, one for each run.

    Raises
    ------
    ValueError
        If there are not as many learning rates as batch sizes.

    Notes
    -----
    Source: Keskar et al. 2017 (arXiv 1609.04836), section 2; the stopping rule is ours. Chapter 1.
    """
    pairs = list(zip(batch_sizes, learning_rates, strict=True))
    configs = [replace(PLAIN, batch_size=size, learning_rate=rate, data_seed=seed) for size, rate in pairs]
    return _columns([measure(train_to(config, seed)) for config in configs])


def three_solutions(
    seed: int,
    *,
    sigma: float = 0.03,
    relative_sigma: float = 0.1,
    code_sigmas: Sequence[float] = (0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16),
    samples: int = 20,
) -> dict[str, list[float]]:
    """Three solutions of one problem: small batches, large batches, small batches from a poisoned start.

    Parameters
    ----------
    seed : int
        Seed of the start, of the batches and of the data.
    sigma : float
        Standard deviation of the noise on every weight in ``average``.
    relative_sigma : float
        Standard deviation of the noise in ``adaptive_average``, as a share of each weight's size.
    code_sigmas : sequence of float
        The precisions tried for the shortest code.
    samples : int
        Pairs of opposite noise vectors in each average.

    Returns
    -------
    dict of str to list of float
        Three entries each, in the order above: those of :func:`~samkit.experiments.flat_minima.measure`;
        ``trace`` of the Hessian; ``average`` and ``adaptive_average``, mean rises of the training loss;
        ``distance`` from the fresh start; ``bits``, the length of the shortest code for weights and labels
        together.
    """
    small = replace(PLAIN, data_seed=seed)
    solutions = (
        train_to(small, seed),
        train_to(replace(small, batch_size=400), seed),
        train_to(small, seed, model=poisoned_start(seed)),
    )
    return _columns([_measure_more(s, sigma, relative_sigma, code_sigmas, samples) for s in solutions])


def _measure_more(
    result: Result, sigma: float, relative_sigma: float, code_sigmas: Sequence[float], samples: int
) -> dict[str, float]:
    loss, params = training_loss(result)
    moved, size = distance(result), sum(p.numel() for p in params)
    examples = len(dataset(result.config).y)

    def bits(precision: float) -> float:
        labels = examples * sharpness.average(loss, params, precision, samples=samples).loss
        return (divergence(moved, size, precision) + labels) / math.log(2)

    relative = sharpness.average(loss, params, relative_sigma, samples=samples, adaptive=True)
    return measure(result) | {
        "trace": sharpness.trace(loss, params).value,
        "average": sharpness.average(loss, params, sigma, samples=samples).value,
        "adaptive_average": relative.value,
        "distance": moved,
        "bits": min(map(bits, code_sigmas)),
    }


def distance(result: Result) -> float:
    """How far a run's weights lie from the fresh network of its seed, wherever the run itself began.

    Parameters
    ----------
    result : samkit.training.Result
        The run.

    Returns
    -------
    float
        The Euclidean distance over all weights.
    """
    config, problem = result.config, dataset(result.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(result.seed)
        fresh = models.build(config.model, problem.x.shape[1:], problem.classes, **config.model_options)
    pairs = zip(result.model.parameters(), fresh.parameters(), strict=True)
    return math.hypot(*(float(torch.dist(p.detach().cpu(), q.detach())) for p, q in pairs))


def divergence(distance: float, size: int, sigma: float) -> float:
    r"""The divergence of a Gaussian around the trained weights from the best-scaled one around the start.

    .. math:: \min_{\sigma_P} \mathrm{KL}\bigl(N(\theta, \sigma^2 I)\,\|\,N(\theta_0, \sigma_P^2 I)\bigr)
        = \frac n2 \ln\Bigl(1 + \frac{\|\theta - \theta_0\|_2^2}{n \sigma^2}\Bigr)

    Parameters
    ----------
    distance : float
        :math:`\|\theta - \theta_0\|_2`.
    size : int
        Number of weights, n.
    sigma : float
        Standard deviation of each weight, > 0.

    Returns
    -------
    float
        The divergence in nats.

    Examples
    --------
    >>> from math import log
    >>> from samkit.experiments.flat_minima import divergence
    >>> divergence(distance=3.0, size=9, sigma=1.0) / log(2)
    4.5

    Notes
    -----
    Derived in chapter 1.
    """
    return size / 2 * math.log1p((distance / sigma) ** 2 / size)


def training_loss(result: Result) -> tuple[Callable[[], Tensor], list[nn.Parameter]]:
    """The training loss of a run as :mod:`samkit.sharpness` wants it.

    Parameters
    ----------
    result : samkit.training.Result
        The run.

    Returns
    -------
    tuple
        A function without arguments that returns the mean loss over all training examples, and the weights.
    """
    params = list(result.model.parameters())
    problem = dataset(result.config).to(params[0].device)
    return lambda: functional.cross_entropy(result.model(problem.x), problem.y), params


def _columns(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    return {key: [row[key] for row in rows] for key in rows[0]}


STORED = {
    "batch_size": Experiment(
        batch_size,
        {
            "batch_sizes": [25, 400, 100, 100, 25, 400, 100],
            "learning_rates": [0.1, 0.1, 0.025, 0.1, 0.025, 0.4, 0.4],
        },
    ),
    "three_solutions": Experiment(three_solutions),
}
"""The claim's pair first, then controls with three values of the ratio of learning rate and batch size."""
