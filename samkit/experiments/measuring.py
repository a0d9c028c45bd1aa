"""Chapter 2: what each measure of sharpness says, when to believe it, and what it cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import samkit
from samkit import data, models, sharpness
from samkit.experiments import Experiment
from samkit.perturb import global_norm
from samkit.training import Config, Result, dataset, loss_function, run

__all__ = [
    "EDGE",
    "STORED",
    "TINY",
    "TINY_RELU",
    "FlatNetwork",
    "ball",
    "edge_of_stability",
    "gradient_descent",
    "outliers",
    "rescaling",
    "settled",
]

TINY = Config(
    model_options={"width": 8, "depth": 1, "activation": "tanh"},
    train_size=500,
    epochs=100,
    evaluate_every=100,
)
"""A smooth network of 418 weights: small enough to write down its whole Hessian."""

TINY_RELU = replace(TINY, model_options=TINY.model_options | {"activation": "relu"})
"""The same with ReLU, which can be rescaled, and whose loss has kinks."""

EDGE = Config(
    model_options={"width": 50, "activation": "tanh"},
    loss="mse",
    train_size=500,
    batch_size=None,
    momentum=0.0,
    weight_decay=0.0,
    schedule="constant",
)
"""Gradient descent and nothing else, on the kind of network of the first figure of Cohen et al. 2021."""


class FlatNetwork:
    """A trained network and its training loss as functions of one vector of weights.

    Everything is in float64 on the CPU, so that a test of a formula tests the formula and not the rounding.

    Parameters
    ----------
    result : samkit.training.Result
        The run that trained it.

    Attributes
    ----------
    theta : torch.Tensor
        The trained weights (n,), layer after layer, each layer's matrix before its bias.
    sizes : list of int
        Number of entries of each parameter tensor; they add up to n.

    Examples
    --------
    >>> import torch
    >>> from samkit.experiments.measuring import TINY, FlatNetwork
    >>> from samkit.training import run
    >>> net = FlatNetwork(run(TINY, seed=0))
    >>> net.sizes, net.theta.shape, net.loss(net.theta).shape
    ([320, 8, 80, 10], torch.Size([418]), torch.Size([]))
    """

    def __init__(self, result: Result) -> None:
        self._model = result.model.to("cpu", torch.float64)
        problem = dataset(result.config)
        self._x, self._y = problem.x.double(), problem.y
        self._loss = loss_function(result.config)
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}
        self.sizes = [shape.numel() for shape in self._shapes.values()]
        flat = torch.cat([p.detach().reshape(-1) for p in self._model.parameters()])
        self.theta = flat.requires_grad_()

    def outputs(self, theta: Tensor) -> Tensor:
        """The logits of all training examples.

        Parameters
        ----------
        theta : torch.Tensor
            Weights (n,).

        Returns
        -------
        torch.Tensor
            Logits (examples, classes).
        """
        pieces = theta.split(self.sizes)
        weights = {n: w.view(s) for (n, s), w in zip(self._shapes.items(), pieces, strict=True)}
        return functional_call(self._model, weights, (self._x,))

    def loss(self, theta: Tensor) -> Tensor:
        """The training loss.

        Parameters
        ----------
        theta : torch.Tensor
            Weights (n,).

        Returns
        -------
        torch.Tensor
            The mean over all training examples, a scalar.
        """
        return self._loss(self.outputs(theta), self._y)


def outliers(seed: int, classes: int, *, k: int = 20) -> dict[str, Any]:
    """Train a small network on the first few digits of MNIST and look at the top of its Hessian's spectrum.

    Parameters
    ----------
    seed : int
        Seed of the split, the weights and the batches.
    classes : int
        Number of digits, 2 to 10: 0, 1, ... One hundred images of each.
    k : int
        How many eigenvalues.

    Returns
    -------
    dict
        ``eigenvalues`` (k,) of the training loss's Hessian, descending; ``count``, how many lie above the
        widest gap, that is the i with the largest ratio of the i-th to the next eigenvalue; ``gap``, that
        ratio; ``accuracy`` on the training images in per cent.

    Notes
    -----
    Source: Sagun et al. 2018 (arXiv 1706.04454). Chapter 2.
    """
    images = data.load("mnist_images", seed=seed)
    kept = torch.cat([(images.y == digit).nonzero()[:100, 0] for digit in range(classes)])
    device = samkit.device()
    x, y = images.x[kept].to(device), images.y[kept].to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.build("mlp", x.shape[1:], classes, width=20, depth=1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    order = torch.Generator().manual_seed(seed)
    for _ in range(20):
        for batch in torch.randperm(len(y), generator=order).to(device).split(50):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    top = sharpness.top_eigenvalues(
        lambda: functional.cross_entropy(model(x), y), model.parameters(), k=k, tol=1e-2
    )
    gaps = top.value[:-1] / top.value[1:]
    return {
        "eigenvalues": top.value,
        "count": int(gaps.argmax()) + 1,
        "gap": gaps.max(),
        "accuracy": 100 * float((model(x).argmax(dim=1) == y).double().mean()),
    }


def ball(
    seed: int, *, rhos: Sequence[float], sigmas: Sequence[float], activation: str = "tanh"
) -> dict[str, list[float]]:
    r"""The worst case and the average over balls, and what gradient and Hessian predict for them.

    Parameters
    ----------
    seed : int
        Seed of the network and of the data.
    rhos : sequence of float
        Radii of the l_2 balls.
    sigmas : sequence of float
        Standard deviations of the noise.
    activation : str
        Of the network, as in :func:`samkit.models.mlp`.

    Returns
    -------
    dict of str to list of float
        For each radius ``worst_case``, its ``worst_case_error``, ``one_step`` at SAM's point, the predictions
        ``first_order`` :math:`\rho \|g\|`, ``second_order`` (the worst case of the quadratic model) and
        ``bound`` :math:`\rho \|g\| + \rho^2 \lambda_1 / 2`; for each sigma ``average``, its
        ``average_error``, and ``half_trace``, the prediction :math:`\sigma^2 \operatorname{tr}(H) / 2`.

    Notes
    -----
    Derived in chapter 2.
    """
    options = TINY.model_options | {"activation": activation}
    net = FlatNetwork(run(replace(TINY, model_options=options, data_seed=seed), seed, progress=False))
    g = torch.func.grad(net.loss)(net.theta).detach()
    H = torch.func.hessian(net.loss)(net.theta).detach()
    delta = torch.zeros_like(g, requires_grad=True)
    slope, top = float(g.norm()), float(torch.linalg.eigvalsh(H)[-1])
    worst = [sharpness.worst_case(lambda: net.loss(net.theta), [net.theta], rho) for rho in rhos]
    model = [sharpness.worst_case(lambda: g @ delta + delta @ H @ delta / 2, [delta], rho) for rho in rhos]
    noisy = [sharpness.average(lambda: net.loss(net.theta), [net.theta], sigma) for sigma in sigmas]
    return {
        "worst_case": [w.value for w in worst],
        "worst_case_error": [w.error for w in worst],
        "one_step": [w.one_step for w in worst],
        "first_order": [rho * slope for rho in rhos],
        "second_order": [m.value for m in model],
        "bound": [rho * slope + rho**2 * top / 2 for rho in rhos],
        "average": [a.value for a in noisy],
        "average_error": [a.error for a in noisy],
        "half_trace": [sigma**2 * float(H.trace()) / 2 for sigma in sigmas],
    }


def rescaling(seed: int, *, scales: Sequence[float], rho: float = 0.05) -> dict[str, list[float]]:
    """Multiply the first layer of a trained ReLU network by c, divide the second by c, measure everything.

    Parameters
    ----------
    seed : int
        Seed of the network.
    scales : sequence of float
        The factors c, > 0.
    rho : float
        Radius of the balls; the noise of the average has the same expected length.

    Returns
    -------
    dict of str to list of float
        For each factor ``function_change``, the largest change of an output relative to the largest output;
        ``top_eigenvalue``, ``trace``, ``average``, ``worst_case`` and ``worst_case_linf``; the same five with
        ``adaptive_`` before their names.

    Notes
    -----
    Source: Dinh et al. 2017 (arXiv 1703.04933), Kwon et al. 2021 (arXiv 2102.11600). Chapter 2.
    """
    net = FlatNetwork(run(TINY_RELU, seed, progress=False))
    rows = []
    for c in scales:
        factors = torch.tensor([c, c, 1 / c, 1], dtype=torch.float64)  # matrix, bias, matrix, bias
        stretch = factors.repeat_interleave(torch.tensor(net.sizes))
        theta = (stretch * net.theta).detach().requires_grad_()
        before, after = net.outputs(net.theta).detach(), net.outputs(theta).detach()
        row = {"function_change": float((after - before).abs().max() / before.abs().max())}
        for prefix, adaptive in (("", False), ("adaptive_", True)):
            row |= {prefix + name: v for name, v in _measures(net, theta, rho, adaptive).items()}
        rows.append(row)
    return {key: [row[key] for row in rows] for key in rows[0]}


def _measures(net: FlatNetwork, theta: Tensor, rho: float, adaptive: bool) -> dict[str, float]:
    n = theta.numel()

    def loss() -> Tensor:
        return net.loss(theta)

    def worst(radius: float, norm: str) -> float:
        return sharpness.worst_case(loss, [theta], radius, norm, adaptive=adaptive).value

    top = sharpness.top_eigenvalues(loss, [theta], tol=1e-8, adaptive=adaptive)
    return {
        "top_eigenvalue": float(top.value[0]),
        "trace": sharpness.trace(loss, [theta], samples=n, adaptive=adaptive).value,
        "average": sharpness.average(loss, [theta], rho / n**0.5, adaptive=adaptive).value,
        "worst_case": worst(rho, "l2"),
        "worst_case_linf": worst(rho / n**0.5, "linf"),
    }


def gradient_descent(config: Config, seed: int, *, every: int = 25) -> dict[str, np.ndarray]:
    """Train with a full batch and watch the top eigenvalue of the training loss's Hessian.

    Parameters
    ----------
    config : samkit.training.Config
        The settings.
    seed : int
        Seed of the run.
    every : int
        Steps between two measurements; an odd number, because at the edge of stability the weights jump
        from side to side with period 2.

    Returns
    -------
    dict of str to numpy.ndarray
        ``step``, ``loss``, ``top_eigenvalue`` and ``gradient_norm``, one entry for each measurement.
    """
    problem = dataset(config).to(samkit.device())
    criterion = loss_function(config)
    rows: list[tuple[float, ...]] = []

    def watch(step: int, model: nn.Module) -> None:
        if step % every == 0:

            def loss() -> Tensor:
                return criterion(model(problem.x), problem.y)

            top = sharpness.top_eigenvalues(loss, model.parameters(), tol=1e-2)
            value = loss()
            slope = global_norm(torch.autograd.grad(value, list(model.parameters())))
            rows.append((step, float(value.detach()), top.value[0], float(slope)))

    run(replace(config, evaluate_every=config.epochs), seed, callback=watch, progress=False)
    return dict(zip(("step", "loss", "top_eigenvalue", "gradient_norm"), np.array(rows).T, strict=True))


def settled(path: dict[str, np.ndarray], learning_rate: float) -> float:
    r"""The top eigenvalue over the last fifth of a run, in units of :math:`2/\eta`.

    Parameters
    ----------
    path : dict
        From :func:`~samkit.experiments.measuring.gradient_descent`.
    learning_rate : float
        The step :math:`\eta`.

    Returns
    -------
    float
        The mean of :math:`\lambda_1 \eta / 2`.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.measuring import settled
    >>> settled({"step": np.arange(11), "top_eigenvalue": np.full(11, 30.0)}, learning_rate=0.1)
    1.5
    """
    last = path["step"] >= 0.8 * path["step"][-1]
    return float(path["top_eigenvalue"][last].mean()) * learning_rate / 2


def edge_of_stability(
    seed: int,
    *,
    learning_rates: Sequence[float],
    activation: str = "tanh",
    time: float = 200.0,
    rho: float = 0.05,
) -> dict[str, Any]:
    r"""Where the top eigenvalue :math:`\lambda_1` settles under gradient descent and under SAM.

    Parameters
    ----------
    seed : int
        Seed of the start and of the data.
    learning_rates : sequence of float
        The steps :math:`\eta`.
    activation : str
        Of the network, as in :func:`samkit.models.mlp`.
    time : float
        :math:`\eta` times the number of steps, the same for every :math:`\eta`.
    rho : float
        SAM's radius.

    Returns
    -------
    dict
        For each step :math:`\eta`, in units of :math:`2/\eta`: ``start``, the top eigenvalue of the fresh
        network; ``gd`` and ``sam``, its mean over the last fifth of training. And ``gd_loss`` and
        ``sam_loss``, the training loss at the end.

    Notes
    -----
    Source: Cohen et al. 2021 (arXiv 2103.00065), section 3. Chapter 2.
    """
    row: dict[str, Any] = {"start": [], "gd": [], "sam": [], "gd_loss": [], "sam_loss": []}
    for eta in learning_rates:
        config = replace(
            EDGE,
            model_options=EDGE.model_options | {"activation": activation},
            learning_rate=eta,
            rho=rho,
            data_seed=seed,
            epochs=round(time / eta),
        )
        for method, optimizer in (("gd", "sgd"), ("sam", "sam")):
            path = gradient_descent(replace(config, optimizer=optimizer), seed)
            row[method].append(settled(path, eta))
            row[f"{method}_loss"].append(path["loss"][-1])
        row["start"].append(path["top_eigenvalue"][0] * eta / 2)
    return row


STORED = {
    "edge_of_stability": Experiment(edge_of_stability, {"learning_rates": [0.05, 0.1, 0.15]}, seeds=range(8)),
    "edge_of_stability_relu": Experiment(
        edge_of_stability, {"learning_rates": [0.05, 0.1, 0.15], "activation": "relu"}, seeds=range(8)
    ),
}
"""The claim's network first, then the same with ReLU, where the Hessian does not see the kinks."""
