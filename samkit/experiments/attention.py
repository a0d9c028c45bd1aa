"""Chapter 8: where a small convolutional network looks, after gradient descent and after SAM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samkit import data, models
from samkit.attribution import grad_cam, regions, share
from samkit.experiments import Experiment
from samkit.optim import SAM

__all__ = ["attention", "on_a_dataset", "scale_weights", "train_to"]


@torch.no_grad()
def scale_weights(model: nn.Module, factor: float) -> nn.Module:
    r"""Multiply every parameter by a factor, in place: :math:`\theta \leftarrow \alpha \theta`.

    Parameters
    ----------
    model : torch.nn.Module
        The network.
    factor : float
        The factor :math:`\alpha`, above 0.

    Returns
    -------
    torch.nn.Module
        The same network.

    Raises
    ------
    ValueError
        If the factor is not above 0.

    Examples
    --------
    >>> import torch
    >>> from samkit.experiments.attention import scale_weights
    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> scale_weights(layer, 0.5).weight.item()
    0.5
    """
    if not factor > 0:
        raise ValueError(f"the factor of the initial weights must be above 0, got {factor}")
    for p in model.parameters():
        p.mul_(factor)
    return model


def train_to(
    levels: Sequence[float],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    rho: float,
    learning_rate: float,
    batch_size: int,
    steps: int,
    seed: int,
    look_every: int = 1,
) -> Iterator[tuple[float, int]]:
    """Train, and stop for a look each time the training loss first falls below a level.

    Gradient descent for ``rho=0``, SAM (l_2) otherwise, with a constant learning rate and no momentum. With
    ``batch_size`` equal to the number of examples each step sees all of them, and the loss costs nothing
    extra; with less, the loss of all examples is computed every ``look_every`` steps.

    Parameters
    ----------
    levels : sequence of float
        Training losses, decreasing.
    model : torch.nn.Module
        The network; it is trained in place.
    x, y : torch.Tensor
        The training examples ``(n, ...)`` and labels ``(n,)``.
    rho : float
        Radius of the perturbation.
    learning_rate : float
        Step size.
    batch_size : int
        Examples in a step.
    steps : int
        The most steps to take.
    seed : int
        Seed of the batches.
    look_every : int
        Steps between two looks at the training loss, for batches smaller than the training set.

    Yields
    ------
    tuple of float and int
        A level and the number of steps after which the training loss is first seen below it, while the
        model is there. Levels that are not reached do not come.
    """
    loss_of = nn.functional.cross_entropy
    base = {"lr": learning_rate}
    optimizer = (
        SAM(model.parameters(), torch.optim.SGD, rho=rho, **base)
        if rho
        else torch.optim.SGD(model.parameters(), **base)
    )
    draw = torch.Generator().manual_seed(seed)
    waiting = list(levels)
    whole = batch_size == len(x)
    for step in range(steps + 1):
        picked = slice(None) if whole else torch.randint(len(x), (batch_size,), generator=draw).to(x.device)
        inputs, labels = x[picked], y[picked]

        def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            return loss

        loss = closure()
        if whole or step % look_every == 0:
            if not whole:
                with torch.no_grad():
                    loss = loss_of(model(x), y)
            while waiting and loss.item() < waiting[0]:
                yield waiting.pop(0), step
        if not waiting:
            return
        if rho:
            optimizer.ascend()
            closure()
            optimizer.descend()
        else:
            optimizer.step()


def attention(seed: int, *, dataset: str, train_size: int, **design: Any) -> dict:
    """What :func:`on_a_dataset` finds on a subset of a set of images by name.

    Parameters
    ----------
    seed : int
        Seed of the subset, the initial weights and the batches; the test images are always the same.
    dataset : str
        Name of a set of images, for :func:`~samkit.data.load`.
    train_size : int
        Training examples to keep.
    **design
        Passed on to :func:`on_a_dataset`.

    Returns
    -------
    dict
        As from :func:`on_a_dataset`.
    """
    return on_a_dataset(data.load(dataset).subset(train_size, seed), seed, **design)


def on_a_dataset(
    images: data.Dataset,
    seed: int,
    *,
    batch_size: int,
    scale: float,
    rho: float,
    learning_rate: float,
    levels: Sequence[float],
    steps: int,
    channels: int = 8,
    look_every: int = 1,
) -> dict:
    """Share of Grad-CAM on strokes and background, for gradient descent and SAM from the same start.

    The map is that of the true class at the last convolution (after its ReLU), on 500 test images; the
    shares are means over the images whose map is not zero everywhere.

    Parameters
    ----------
    images : samkit.data.Dataset
        The images, such as a set of your own; all of the training part is used.
    seed : int
        Seed of the initial weights and the batches.
    batch_size : int
        Training examples that a step sees; all of them for full-batch training.
    scale : float
        Factor of the initial weights.
    rho, learning_rate : float
        SAM's radius, and the step of both methods.
    levels : sequence of float
        Training losses, decreasing, at which to look.
    steps : int
        The most steps to take.
    channels : int
        Channels of the first convolution.
    look_every : int
        See :func:`train_to`.

    Returns
    -------
    dict
        ``area_strokes``, ``area_background``, ``area_far``: the share of the pixels; for ``gd`` and ``sam``,
        one entry for each level: ``gd_strokes``, ``gd_background``, ``gd_far``, ``gd_accuracy`` (test),
        ``gd_blank`` (share of maps that are zero everywhere) and ``gd_steps``, NaN where a level is not
        reached; ``start_strokes`` and so on, before training.
    """
    x_test, y_test = images.x_test[:500], images.y_test[:500]
    masks = regions(x_test)
    row = {f"area_{name}": float(mask.float().mean()) for name, mask in masks.items()}

    def look(model: nn.Sequential) -> dict[str, float]:
        last = max(i for i, part in enumerate(model) if isinstance(part, nn.Conv2d))
        maps = grad_cam(model, model[last + 1], x_test, y_test)
        seen = {name: float(share(maps, mask).nanmean()) for name, mask in masks.items()}
        with torch.no_grad():
            right = (model(x_test).argmax(dim=1) == y_test).float().mean()
        blank = (maps.amax(dim=(1, 2)) == 0).float().mean()
        return seen | {"accuracy": float(right), "blank": float(blank)}

    for method, radius in (("gd", 0.0), ("sam", rho)):
        torch.manual_seed(seed)
        model = models.cnn(tuple(images.x.shape[1:]), images.classes, channels=channels)
        scale_weights(model, scale)
        start = look(model)
        row |= {f"start_{name}": value for name, value in start.items()}
        found = [dict.fromkeys([*start, "steps"], float("nan")) for _ in levels]
        looks = train_to(
            levels,
            model,
            images.x,
            images.y,
            rho=radius,
            learning_rate=learning_rate,
            batch_size=batch_size,
            steps=steps,
            seed=seed,
            look_every=look_every,
        )
        for level, step in looks:
            found[list(levels).index(level)] = look(model) | {"steps": step}
        row |= {f"{method}_{name}": [at[name] for at in found] for name in found[0]}
    return row


_DESIGN = {
    "dataset": "mnist_images",
    "train_size": 500,
    "batch_size": 500,
    "rho": 0.2,
    "learning_rate": 0.1,
    "levels": [1.0, 0.3],
    "steps": 1000,
}

STORED = {
    "attention_middle": Experiment(attention, _DESIGN | {"scale": 1.0}, range(8)),
    "attention_large": Experiment(attention, _DESIGN | {"scale": 2.0}, range(8)),
    "attention_small": Experiment(attention, _DESIGN | {"scale": 0.5}, range(4)),
    "attention_batches": Experiment(
        attention, _DESIGN | {"scale": 1.0, "batch_size": 50, "look_every": 10}, range(8)
    ),
}
