"""Chapter 2: what each measure of sharpness says, when to believe it, and what it cannot say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import samkit
from samkit import data, models, sharpness
from samkit.claims import Estimate
from samkit.experiments import Experiment
from samkit.perturb import global_norm
from samkit.training import Config, Result, dataset, loss_function, run

__all__ = [
    "EDGE",
    "IMAGES",
    "STORED",
    "TINY",
    "TINY_RELU",
    "FlatNetwork",
    "ball",
    "edge_config",
    "edge_of_stability",
    "gradient_descent",
    "hull",
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
"""A smooth network of 418 weights, small enough to write down its whole Hessian."""

TINY_RELU = replace(TINY, model_options=TINY.model_options | {"activation": "relu"})
"""The same with ReLU, which can be rescaled, and whose loss has kinks."""

IMAGES = Config(
    "mnist_images", model_options={"width": 20, "depth": 1}, train_size=1000, batch_size=50, epochs=20
)
"""A network of 15,910 weights that fits its thousand images, too large for the whole Hessian."""

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

    def gradient(self, theta: Tensor) -> Tensor:
        """The gradient of the training loss.

        Parameters
        ----------
        theta : torch.Tensor
            Weights (n,).

        Returns
        -------
        torch.Tensor
            The gradient (n,), detached.
        """
        return torch.func.grad(self.loss)(theta).detach()

    def hessian(self, theta: Tensor) -> Tensor:
        """The whole Hessian of the training loss.

        Parameters
        ----------
        theta : torch.Tensor
            Weights (n,).

        Returns
        -------
        torch.Tensor
            The Hessian (n, n), detached.
        """
        return torch.func.jacrev(torch.func.grad(self.loss))(theta).detach()


def outliers(seed: int, classes: int, *, k: int = 20) -> dict[str, Any]:
    """Train a small network on the first few digits of MNIST and look at the top of its Hessian's spectrum.

    Parameters
    ----------
    seed : int
        Seed of the choice of images, the weights and the batches.
    classes : int
        Number of digits, 2 to 10: 0, 1, ... One hundred images of each.
    k : int
        How many eigenvalues.

    Returns
    -------
    dict
        ``eigenvalues`` (k,) of the training loss's Hessian, descending; ``count``, how many lie above the
        widest gap; ``gaps`` (k - 1,), the ratios of each eigenvalue to the next; ``accuracy`` on the training
        images in per cent.

    Notes
    -----
    Source: Sagun et al. 2018 (arXiv 1706.04454). Chapter 2.
    """
    images = data.load("mnist_images")
    order = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(images.y), generator=order)
    kept = torch.cat([shuffled[images.y[shuffled] == digit][:100] for digit in range(classes)])
    device = samkit.device()
    x, y = images.x[kept].to(device), images.y[kept].to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.build("mlp", x.shape[1:], classes, width=20, depth=1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
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
        "gaps": gaps,
        "accuracy": 100 * float((model(x).argmax(dim=1) == y).double().mean()),
    }


def ball(
    seed: int,
    *,
    rhos: Sequence[float],
    sigmas: Sequence[float],
    activation: str = "tanh",
    epochs: int = TINY.epochs,
) -> dict[str, list[float]]:
    r"""What gradient and Hessian predict for the loss in a ball, relative to what is measured there.

    Parameters
    ----------
    seed : int
        Seed of the network and of the data.
    rhos : sequence of float
        Radii :math:`\rho` of l_2 balls.
    sigmas : sequence of float
        Standard deviations :math:`\sigma` of the noise.
    activation : str
        Of the network, as in :func:`samkit.models.mlp`.
    epochs : int
        How long to train it.

    Returns
    -------
    dict of str to list of float
        Prediction over measurement. For each radius, over the worst rise found in the ball: ``slope``,
        :math:`\rho \|g\|`; ``quadratic``, the worst case of the quadratic model; ``bound``,
        :math:`\rho \|g\| + \rho^2 \lambda_1 / 2`. For each sigma, over the mean rise: ``half_trace``,
        :math:`\sigma^2 \operatorname{tr}(H) / 2`.

    Notes
    -----
    Derived in chapter 2.
    """
    options = TINY.model_options | {"activation": activation}
    config = replace(TINY, model_options=options, epochs=epochs, data_seed=seed)
    net = FlatNetwork(run(config, seed, progress=False))
    g, H = net.gradient(net.theta), net.hessian(net.theta)
    delta = torch.zeros_like(g, requires_grad=True)
    slope, top = float(g.norm()), float(torch.linalg.eigvalsh(H)[-1])
    row: dict[str, list[float]] = {"slope": [], "quadratic": [], "bound": [], "half_trace": []}
    for rho in rhos:
        worst = sharpness.worst_case(lambda: net.loss(net.theta), [net.theta], rho).value
        model = sharpness.worst_case(lambda: g @ delta + delta @ H @ delta / 2, [delta], rho).value
        row["slope"].append(rho * slope / worst)
        row["quadratic"].append(model / worst)
        row["bound"].append((rho * slope + rho**2 * top / 2) / worst)
    for sigma in sigmas:
        mean = sharpness.average(lambda: net.loss(net.theta), [net.theta], sigma).value
        row["half_trace"].append(sigma**2 * float(H.trace()) / 2 / mean)
    return row


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


def edge_config(
    learning_rate: float,
    seed: int,
    *,
    optimizer: str = "sgd",
    activation: str = "tanh",
    time: float = 200.0,
    rho: float = 0.05,
) -> Config:
    r"""A run at a given step and for a given time, on data of its own.

    Parameters
    ----------
    learning_rate : float
        The step :math:`\eta`.
    seed : int
        Seed of the data.
    optimizer : str
        ``"sgd"``, which is gradient descent here, or ``"sam"``.
    activation : str
        Of the network, as in :func:`samkit.models.mlp`.
    time : float
        :math:`\eta` times the number of steps.
    rho : float
        SAM's radius.

    Returns
    -------
    samkit.training.Config
        The settings.

    Examples
    --------
    >>> from samkit.experiments.measuring import edge_config
    >>> edge_config(0.1, seed=0).epochs
    2000
    """
    return replace(
        EDGE,
        model_options=EDGE.model_options | {"activation": activation},
        optimizer=optimizer,
        learning_rate=learning_rate,
        rho=rho,
        data_seed=seed,
        epochs=round(time / learning_rate),
    )


def gradient_descent(config: Config, seed: int, *, every: int = 25) -> dict[str, np.ndarray]:
    r"""Train with a full batch and watch the top eigenvalue of the training loss's Hessian.

    Parameters
    ----------
    config : samkit.training.Config
        The settings.
    seed : int
        Seed of the run.
    every : int
        Steps between two measurements. An odd number, because at the edge of stability the weights jump from
        side to side with period 2.

    Returns
    -------
    dict of str to numpy.ndarray
        ``step``, ``time`` (:math:`\eta` times steps), ``loss``, ``top_eigenvalue`` and ``gradient_norm``, one
        entry for each measurement; ``edge``, the number :math:`2 / \eta`.
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
    path = dict(zip(("step", "loss", "top_eigenvalue", "gradient_norm"), np.array(rows).T, strict=True))
    eta = config.learning_rate
    return path | {"time": eta * path["step"], "edge": np.array(2 / eta)}


def settled(path: Mapping[str, np.ndarray]) -> float:
    r"""The mean of the top eigenvalue over the last fifth of a run, in units of :math:`2/\eta`.

    Parameters
    ----------
    path : mapping
        From :func:`~samkit.experiments.measuring.gradient_descent`.

    Returns
    -------
    float
        The mean of :math:`\lambda_1 \eta / 2`.

    Examples
    --------
    >>> import numpy as np
    >>> from samkit.experiments.measuring import settled
    >>> settled({"time": np.arange(11), "top_eigenvalue": np.full(11, 30.0), "edge": np.array(20.0)})
    1.5
    """
    last = path["time"] >= 0.8 * path["time"][-1]
    return float(path["top_eigenvalue"][last].mean() / path["edge"])


def edge_of_stability(
    seed: int,
    *,
    learning_rates: Sequence[float],
    activation: str = "tanh",
    time: float = 200.0,
    rho: float = 0.05,
) -> dict[str, list[float]]:
    r"""Where the top eigenvalue :math:`\lambda_1` settles under gradient descent and under SAM.

    Parameters
    ----------
    seed : int
        Seed of the start and of the data.
    learning_rates : sequence of float
        The steps :math:`\eta`.
    activation, time, rho
        As in :func:`~samkit.experiments.measuring.edge_config`.

    Returns
    -------
    dict of str to list of float
        For each step :math:`\eta`, in units of :math:`2/\eta`: ``start``, the top eigenvalue of the fresh
        network; ``gd`` and ``sam``, its mean over the last fifth of training. And ``gd_loss`` and
        ``sam_loss``, the training loss at the end.

    Notes
    -----
    Source: Cohen et al. 2021 (arXiv 2103.00065), section 3. Chapter 2.
    """
    row: dict[str, list[float]] = {"start": [], "gd": [], "sam": [], "gd_loss": [], "sam_loss": []}
    for eta in learning_rates:
        for method, optimizer in (("gd", "sgd"), ("sam", "sam")):
            config = edge_config(eta, seed, optimizer=optimizer, activation=activation, time=time, rho=rho)
            path = gradient_descent(config, seed)
            row[method].append(settled(path))
            row[f"{method}_loss"].append(path["loss"][-1])
        row["start"].append(path["top_eigenvalue"][0] / path["edge"])
    return row


def hull(estimates: Sequence[Estimate]) -> tuple[float, float, float]:
    """Several estimates as one that is as wide as all of them together.

    Parameters
    ----------
    estimates : sequence of samkit.claims.Estimate
        The estimates.

    Returns
    -------
    tuple of float
        The mean of the values, the lowest end and the highest end.

    Examples
    --------
    >>> from samkit.claims import Estimate
    >>> from samkit.experiments.measuring import hull
    >>> hull([Estimate(1.0, 0.5, 1.5), Estimate(2.0, 1.0, 4.0)])
    (1.5, 0.5, 4.0)
    """
    value = sum(e.value for e in estimates) / len(estimates)
    return value, min(e.low for e in estimates), max(e.high for e in estimates)


STORED = {
    "edge_of_stability": Experiment(edge_of_stability, {"learning_rates": [0.05, 0.1, 0.15]}, seeds=range(8)),
    "edge_of_stability_relu": Experiment(
        edge_of_stability, {"learning_rates": [0.05, 0.1, 0.15], "activation": "relu"}, seeds=range(8)
    ),
}
"""The claim's network first, then the same with ReLU, where the Hessian does not see the kinks."""
