"""Linear networks as torch modules, to be trained by real optimizers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from samkit import _arguments
from samkit.diagonal import starts

__all__ = ["DiagonalNetwork", "LinearNetwork"]


class DiagonalNetwork(nn.Module):
    r"""A linear predictor whose coefficients are products of weights, one from each layer.

    .. math:: f(x) = \langle \beta, x \rangle, \qquad \beta = w^1 \odot \cdots \odot w^L

    Parameters
    ----------
    d : int
        Number of features.
    depth : int
        Number of layers L.
    init_scale : number, array_like or tuple
        The initial weights alpha: a number, coordinates ``(d,)``, or a tuple with one of these for each
        layer. Nothing is random.
    dtype : torch.dtype, optional
        By default torch's; float64 follows a flow longest.

    Attributes
    ----------
    layers : torch.nn.ParameterList
        The weights of each layer, ``(d,)``.

    Raises
    ------
    TypeError, ValueError
        If d or depth is not an integer >= 1, or ``init_scale`` does not fit, is a batch, or is not finite.

    Examples
    --------
    >>> import torch
    >>> from samkit.diagonal import DiagonalNetwork
    >>> network = DiagonalNetwork(2, depth=2, init_scale=[0.5, 2.0])
    >>> network.beta.tolist(), network(torch.tensor([[1.0, 1.0]])).item()
    ([0.25, 4.0], 4.25)

    Notes
    -----
    Chapter 5 builds it from scratch.
    """

    def __init__(
        self, d: int, depth: int, init_scale: ArrayLike | tuple, *, dtype: torch.dtype | None = None
    ):
        super().__init__()
        d, depth = _arguments.integer("d", d, 1), _arguments.integer("depth", depth, 1)
        start = starts.start(init_scale, d, depth)
        if start.batched:
            raise ValueError("init_scale must be one start, got a batch: build one network for each")
        dtype = dtype or torch.get_default_dtype()
        self.layers = nn.ParameterList(
            nn.Parameter(torch.tensor(layer[0].tolist(), dtype=dtype)) for layer in start.layers
        )

    @property
    def beta(self) -> Tensor:
        """The coefficients of the predictor, ``(d,)``."""
        return torch.stack(list(self.layers)).prod(dim=0)

    def forward(self, x: Tensor) -> Tensor:
        """The predictions ``(...)`` for inputs ``(..., d)``."""
        return x @ self.beta


class LinearNetwork(nn.Module):
    r"""An ordinary linear network of two layers.

    .. math:: f(x) = W_2 W_1 x

    Parameters
    ----------
    d : int
        Number of features.
    hidden : int
        Number of hidden units.
    outputs : int
        Number of outputs; with one, predictions have no dimension for it.
    init_scale : float
        Standard deviation of the initial weights, which are Gaussian.
    seed : int
        The same seed gives the same weights on every device.
    dtype : torch.dtype, optional
        By default torch's.

    Attributes
    ----------
    first : torch.nn.Parameter
        :math:`W_1`, ``(hidden, d)``.
    second : torch.nn.Parameter
        :math:`W_2`, ``(outputs, hidden)``.

    Raises
    ------
    TypeError, ValueError
        If a number of units or the seed is not an integer of the right size, or ``init_scale`` not a number
        >= 0.

    Examples
    --------
    >>> import torch
    >>> from samkit.diagonal import LinearNetwork
    >>> network = LinearNetwork(3, hidden=5, outputs=2, init_scale=0.1)
    >>> network(torch.ones(4, 3)).shape, network.beta.shape
    (torch.Size([4, 2]), torch.Size([2, 3]))

    Notes
    -----
    Chapter 7 compares it with the diagonal network.
    """

    def __init__(
        self,
        d: int,
        hidden: int,
        outputs: int = 1,
        *,
        init_scale: float,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        d, hidden = _arguments.integer("d", d, 1), _arguments.integer("hidden", hidden, 1)
        outputs = _arguments.integer("outputs", outputs, 1)
        init_scale = _arguments.number("init_scale", init_scale)
        draw = np.random.default_rng(_arguments.seed(seed))
        dtype = dtype or torch.get_default_dtype()
        self.first, self.second = (
            nn.Parameter(torch.tensor((init_scale * draw.standard_normal(shape)).tolist(), dtype=dtype))
            for shape in ((hidden, d), (outputs, hidden))
        )

    @property
    def beta(self) -> Tensor:
        """The coefficients, ``(d,)`` for one output and ``(outputs, d)`` for several."""
        product = self.second @ self.first
        return product[0] if len(product) == 1 else product

    def forward(self, x: Tensor) -> Tensor:
        """The predictions ``(...)``, or ``(..., outputs)``, for inputs ``(..., d)``."""
        return x @ self.beta.T if self.beta.dim() == 2 else x @ self.beta
