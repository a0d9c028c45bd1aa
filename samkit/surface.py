"""The loss around the weights: evaluated elsewhere, with everything put back afterwards.

:class:`~samkit.surface.Surface` is what the measurements of :mod:`samkit.sharpness` and the slices of
:mod:`samkit.landscapes` stand on.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from samkit._arguments import number
from samkit.optim.randomness import RandomState
from samkit.optim.running_stats import BufferGuard
from samkit.perturb import scaling

__all__ = ["Hessian", "Surface", "check_shapes", "checked"]


class Surface:
    r"""The loss as a function of a displacement of the weights, for as long as a ``with`` block lasts.

    .. math:: u \mapsto L(\theta + T u)

    Displacements are flat float64 vectors on the CPU, one entry per trainable weight, whatever the weights
    are. Every evaluation starts from the same random state and the same buffers, so that dropout and
    BatchNorm leave the loss a function of the weights alone. When the block ends, by an exception too,
    everything is as it was found.

    Parameters
    ----------
    loss, params
        As in :func:`~samkit.sharpness.hvp`.
    adaptive, eta
        See :func:`samkit.perturb.scaling`.

    Raises
    ------
    TypeError, ValueError
        As :func:`~samkit.sharpness.hvp`.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from samkit.surface import Surface
    >>> theta = torch.tensor([3.0], requires_grad=True)
    >>> with Surface(lambda: (theta**2).sum(), [theta]) as surface:
    ...     surface.loss_and_gradient(np.array([-1.0]))
    (4.0, array([4.]))
    >>> theta
    tensor([3.], requires_grad=True)
    """

    def __init__(
        self,
        loss: Callable[[], Tensor],
        params: Iterable[Tensor],
        *,
        adaptive: bool | str = False,
        eta: float = 0.0,
    ) -> None:
        if not callable(loss):
            raise TypeError(f"loss must be a function without arguments, got {loss!r}; pass lambda: ...")
        self._loss = loss
        self._all_params = checked(params)
        self._params = [p for p in self._all_params if p.requires_grad]
        self.size = sum(p.numel() for p in self._params)
        scales = scaling([p.detach() for p in self._params], adaptive, number("eta", eta))
        self.scale = np.ones(self.size) if scales is None else _flat(scales)

    def __enter__(self) -> Surface:
        self._weights = [p.detach().clone() for p in self._params]
        self._moved = False
        self._random = RandomState.of(self._params)
        self._buffers = BufferGuard()
        with contextlib.ExitStack() as scope:
            scope.callback(self._restore, [p.grad for p in self._params])
            for p in self._params:
                p.grad = None
            if "torch._dynamo" in sys.modules:
                scope.enter_context(torch.compiler.set_stance("force_eager"))
                scope.enter_context(warnings.catch_warnings())
                # Torch warns that the guard's hook fires twice for a compiled model: it does not mind.
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
            self._scope = scope.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._scope.close()

    def _restore(self, gradients: list[Tensor | None]) -> None:
        self._move_to(None)
        self._rewind()
        for p, gradient in zip(self._params, gradients, strict=True):
            p.grad = gradient

    def _rewind(self) -> None:
        self._random.replay()
        self._buffers.put_back()

    def _move_to(self, u: np.ndarray | None) -> None:
        # Through .data: what is put back bit for bit must not invalidate a graph that was built before.
        if self._moved:
            for p, weight in zip(self._params, self._weights, strict=True):
                p.data.copy_(weight)
        if u is not None:
            for p, piece in zip(self._params, self._split(self.scale * u), strict=True):
                p.data.add_(piece)
        # Inside an autocast block, torch would go on using the half-precision copies of the old weights.
        torch.clear_autocast_cache()
        self._moved = u is not None

    def _evaluate(self) -> Tensor:
        self._rewind()
        self._buffers.watch()
        value = self._loss()
        if not isinstance(value, Tensor):
            raise TypeError(f"loss() must return a scalar tensor, got {value!r}; end it with `return loss`")
        if value.is_complex():
            raise TypeError(f"loss() must return a real loss, got {value!r}; take its real part")
        if value.numel() != 1:
            raise ValueError(
                f"loss() must return a scalar tensor, got shape {tuple(value.shape)}; take its mean or sum"
            )
        if any(p.grad is not None for p in self._params):
            raise ValueError("loss() must not call backward: let it compute and return the loss only")
        if not (self._moved or value.isfinite()):
            raise ValueError(
                f"the loss is {value.item()} at the weights as given, so nothing can be measured around "
                "them: check weights and batch for entries that are not finite"
            )
        return value

    def _differentiable(self) -> Tensor:
        with torch.enable_grad():
            value = self._evaluate()
        if not value.requires_grad:
            raise ValueError(
                "loss() does not depend on params as far as autograd can see: compute it from these tensors, "
                "without detach(), item() or no_grad()"
            )
        return value

    def resolution(self, loss: float) -> float:
        """What rounding may change such a loss by: its size times the machine epsilon of the weights."""
        return max(torch.finfo(p.dtype).eps for p in self._params) * abs(loss)

    def loss(self, u: np.ndarray | None = None) -> float:
        """The loss at the displacement ``u``; without one, at the weights as given."""
        self._move_to(u)
        with torch.no_grad():
            return self._evaluate().item()

    @torch.no_grad()
    def losses(self, u: np.ndarray) -> np.ndarray:
        """The losses at an array of displacements (..., size), from a ``loss`` that takes the weights."""
        batch = u.shape[:-1]
        shifts = iter(torch.from_numpy(self.scale * u).split([p.numel() for p in self._params], dim=-1))
        weights = [
            p + next(shifts).to(p.dtype).to(p.device).view(*batch, *p.shape) if p.requires_grad else p
            for p in self._all_params
        ]
        values = self._loss(*weights)
        if not isinstance(values, Tensor) or values.shape != batch:
            raise ValueError(
                f"a batched loss must return one loss for each position, a tensor of shape {batch}, got "
                f"{tuple(values.shape) if isinstance(values, Tensor) else values!r}"
            )
        return values.cpu().double().numpy()

    def loss_and_gradient(self, u: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """The loss at the displacement ``u`` and its gradient with respect to ``u``."""
        self._move_to(u)
        value = self._differentiable()
        gradient = torch.autograd.grad(value, self._params, materialize_grads=True)
        return value.item(), self.scale * _flat(gradient)

    def hessian(self) -> Hessian:
        """The Hessian with respect to ``u`` at the weights as given, as a function of flat vectors."""
        self._move_to(None)
        # Only the plain attention kernel can be differentiated twice.
        with sdpa_kernel(SDPBackend.MATH):
            value = self._differentiable()
        # The graph of the gradient is built once and kept: each product is then one pass back through it.
        gradient = torch.autograd.grad(value, self._params, create_graph=True, materialize_grads=True)
        curved = [i for i, g in enumerate(gradient) if g.requires_grad]

        def product(u: np.ndarray) -> np.ndarray:
            if not curved:
                return np.zeros(self.size)
            vectors = self._split(self.scale * u)
            products = torch.autograd.grad(
                [gradient[i] for i in curved],
                self._params,
                [vectors[i] for i in curved],
                retain_graph=True,
                materialize_grads=True,
            )
            return self.scale * _flat(products)

        return Hessian(product, self.size)

    def flatten(self, name: str, tensors: Iterable[Tensor]) -> np.ndarray:
        """One tensor for each of ``params`` as a flat vector; ``name`` is for the error message."""
        tensors = list(tensors)
        check_shapes(name, tensors, self._all_params)
        return _flat([t for t, p in zip(tensors, self._all_params, strict=True) if p.requires_grad])

    def unflatten(self, flat: np.ndarray) -> list[Tensor]:
        """A flat vector as one tensor for each of ``params``, zero where frozen."""
        pieces = iter(self._split(flat))
        return [next(pieces) if p.requires_grad else torch.zeros_like(p) for p in self._all_params]

    def _split(self, flat: np.ndarray) -> list[Tensor]:
        whole = torch.from_numpy(np.ascontiguousarray(flat))
        if len({(p.device, p.dtype) for p in self._params}) == 1:
            whole = whole.to(self._params[0].dtype).to(self._params[0].device)
        pieces = whole.split([p.numel() for p in self._params])
        return [
            piece.view(p.shape).to(p.dtype).to(p.device)
            for piece, p in zip(pieces, self._params, strict=True)
        ]


class Hessian:
    """A symmetric matrix known by its products with flat vectors, from :meth:`Surface.hessian`.

    Attributes
    ----------
    size : int
        n, the number of rows.
    products : int
        How many products were taken.
    stretch : float
        The largest factor by which a product lengthened its vector: in the end, about the largest absolute
        eigenvalue.
    """

    def __init__(self, product: Callable[[np.ndarray], np.ndarray], size: int) -> None:
        self._product = product
        self.size = size
        self.products = 0
        self.stretch = 0.0

    def __call__(self, u: np.ndarray) -> np.ndarray:
        u = np.ravel(u)
        image = self._product(u)
        if not np.isfinite(image).all():
            raise ValueError("the Hessian is not finite at these weights: the loss has no curvature there")
        self.products += 1
        length = float(np.linalg.norm(u))
        if length:
            self.stretch = max(self.stretch, float(np.linalg.norm(image)) / length)
        return image

    def dense(self) -> np.ndarray:
        """The matrix itself, from n products."""
        return np.stack([self(e) for e in np.eye(self.size)], axis=1)


def check_shapes(name: str, tensors: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Raise an error that names ``tensors`` unless they are tensors of the shapes of ``params``."""
    for t in tensors:
        if not isinstance(t, Tensor) or t.is_complex():
            raise TypeError(f"{name} must hold real tensors, one for each of params, got {t!r}")
    wanted, got = ([tuple(t.shape) for t in ts] for ts in (params, tensors))
    if got != wanted:
        raise ValueError(f"{name} must have the shapes of params, {wanted}, got {got}")


def checked(params: Iterable[Tensor]) -> list[Tensor]:
    """The weights as a list, or an error that names what cannot be moved."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(f"params must be an iterable of tensors, got {type(params).__name__}; pass [tensor]")
    params = list(params)
    for p in params:
        if not isinstance(p, Tensor) or p.is_complex():
            raise TypeError(f"params must hold real tensors, got {p!r}; pass model.parameters()")
        if not p.is_leaf:
            raise ValueError(
                "params holds the result of a computation; pass the tensors it was computed from"
            )
    if len({id(p) for p in params}) < len(params):
        raise ValueError("params holds a tensor twice; model.parameters() lists tied weights once")
    if not any(p.requires_grad for p in params):
        raise ValueError("params holds no tensor with requires_grad=True, so there is nothing to move")
    return params


def _flat(tensors: Sequence[Tensor]) -> np.ndarray:
    pieces = [t.detach().reshape(-1) for t in tensors]
    if len({t.device for t in pieces}) > 1:
        pieces = [t.cpu() for t in pieces]
    # To the CPU before float64, which MPS does not have.
    return torch.cat(pieces).cpu().double().numpy()
