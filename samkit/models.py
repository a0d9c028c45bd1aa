"""The small networks of the course, built by name for a given input shape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from samkit._arguments import integer

__all__ = ["NAMES", "ResNet", "build", "cnn", "cnn1d", "mlp", "resnet"]

_ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


def build(name: str, input_shape: Sequence[int] = (40,), classes: int = 10, **options) -> nn.Module:
    """Build a network by name, initialised by torch's global generator.

    Parameters
    ----------
    name : str
        ``"mlp"``, ``"cnn1d"``, ``"cnn"`` or ``"resnet"``.
    input_shape : sequence of int
        Shape of one example: ``(40,)`` for MNIST-1D, ``(1, 28, 28)`` for the MNIST images.
    classes : int
        Number of outputs.
    **options
        Passed to the function of that name: :func:`mlp`, :func:`cnn1d`, :func:`cnn`, :func:`resnet`.

    Returns
    -------
    torch.nn.Module
        A network that maps ``(batch, *input_shape)`` to logits ``(batch, classes)``.

    Raises
    ------
    ValueError
        If the name is unknown, a size is out of range or the input shape does not suit the network.
    TypeError
        If a size is not an integer.

    Examples
    --------
    >>> from samkit import models
    >>> sum(p.numel() for p in models.build("mlp").parameters())
    15210
    >>> sum(p.numel() for p in models.build("cnn1d").parameters())
    5210
    """
    if name not in NAMES:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(map(repr, NAMES))}")
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str) or not input_shape:
        raise TypeError(f"input_shape must be the shape of one example, such as (40,), got {input_shape!r}")
    for size in input_shape:
        integer("input_shape's sizes", size, 1)
    integer("classes", classes, 1)
    return _BUILDERS[name](tuple(input_shape), classes, **options)


def mlp(
    input_shape: Sequence[int], classes: int, *, width: int = 100, depth: int = 2, activation: str = "relu"
) -> nn.Sequential:
    """A fully connected network with ``depth`` hidden layers of ``width`` units.

    Parameters
    ----------
    input_shape : sequence of int
        Shape of one example; it is flattened.
    classes : int
        Number of outputs.
    width, depth : int
        Units of each hidden layer, and their number.
    activation : str
        ``"relu"``, ``"tanh"`` or ``"gelu"``.

    Returns
    -------
    torch.nn.Sequential
        Linear layers with the activation between them. 40-100-100-10 has 15,210 weights.

    Raises
    ------
    ValueError
        If the activation is unknown.
    """
    if activation not in tuple(_ACTIVATIONS):
        known = ", ".join(map(repr, _ACTIVATIONS))
        raise ValueError(f"unknown activation {activation!r}; choose one of {known}")
    integer("width", width, 1)
    integer("depth", depth, 0)
    sizes = [math.prod(input_shape), *[width] * depth]
    layers: list[nn.Module] = [nn.Flatten()] if len(input_shape) > 1 else []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), _ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], classes))


def cnn1d(input_shape: Sequence[int], classes: int, *, channels: int = 25) -> nn.Sequential:
    """Three convolutions over a signal, then one linear layer (the network of Greydanus and Kobak 2024).

    Parameters
    ----------
    input_shape : sequence of int
        ``(length,)``.
    classes : int
        Number of outputs.
    channels : int
        Channels of each convolution; 25 give 5,210 weights on signals of length 40.

    Returns
    -------
    torch.nn.Sequential
        The network.

    Raises
    ------
    ValueError
        If an example is not a signal.
    """
    if len(input_shape) != 1:
        raise ValueError(f"'cnn1d' takes signals of shape (length,), got input_shape={tuple(input_shape)}")
    integer("channels", channels, 1)
    convolutions = [
        nn.Conv1d(1, channels, 5, stride=2, padding=1),
        nn.Conv1d(channels, channels, 3, stride=2, padding=1),
        nn.Conv1d(channels, channels, 3, stride=2, padding=1),
    ]
    length = (input_shape[0] - 3) // 2 + 1
    for _ in range(2):
        length = (length - 1) // 2 + 1
    body = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
    return nn.Sequential(
        nn.Unflatten(1, (1, input_shape[0])), *body, nn.Flatten(), nn.Linear(channels * length, classes)
    )


def cnn(input_shape: Sequence[int], classes: int, *, channels: int = 8) -> nn.Sequential:
    """Two convolutions with max-pooling, then one linear layer, for images.

    Parameters
    ----------
    input_shape : sequence of int
        ``(channels, height, width)``.
    classes : int
        Number of outputs.
    channels : int
        Channels of the first convolution; the second has twice as many.

    Returns
    -------
    torch.nn.Sequential
        The network.

    Raises
    ------
    ValueError
        If an example is not an image.
    """
    colours, height, width = _image("cnn", input_shape)
    integer("channels", channels, 1)
    return nn.Sequential(
        nn.Conv2d(colours, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * (height // 4) * (width // 4), classes),
    )


def resnet(input_shape: Sequence[int], classes: int, *, width: int = 8, blocks: int = 3) -> ResNet:
    """A small residual network with BatchNorm; see :class:`ResNet`.

    Parameters
    ----------
    input_shape : sequence of int
        ``(channels, height, width)``.
    classes : int
        Number of outputs.
    width : int
        Channels of the first block.
    blocks : int
        Number of residual blocks; three give 29 parameter tensors.

    Returns
    -------
    ResNet
        The network.

    Raises
    ------
    ValueError
        If an example is not an image.
    """
    colours, _, _ = _image("resnet", input_shape)
    integer("width", width, 1)
    integer("blocks", blocks, 1)
    return ResNet(colours, classes, width, blocks)


class ResNet(nn.Module):
    """A stem, ``blocks`` residual blocks (each after the first halves the image and doubles the channels),
    a head.

    Every convolution is followed by BatchNorm, so the network has running statistics: the smallest one on
    which SAM can go wrong the way it does on a full ResNet (He et al. 2016, arXiv 1512.03385).

    Parameters
    ----------
    colours, classes : int
        Channels of the images and number of outputs.
    width : int
        Channels of the first block.
    blocks : int
        Number of residual blocks.
    """

    def __init__(self, colours: int, classes: int, width: int, blocks: int):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(colours, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        widths = [width * 2**i for i in range(blocks)]
        inputs = [width, *widths[:-1]]
        self.blocks = nn.Sequential(*(_Block(i, o) for i, o in zip(inputs, widths, strict=True)))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` for images ``(batch, colours, height, width)``."""
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.shortcut(x)).relu()


def _image(name: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    if len(input_shape) != 3:
        raise ValueError(
            f"{name!r} takes images (channels, height, width), got input_shape={tuple(input_shape)}"
        )
    return tuple(input_shape)


_BUILDERS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn1d": cnn1d, "cnn": cnn, "resnet": resnet}

NAMES = tuple(_BUILDERS)
"""The names that :func:`build` knows."""
