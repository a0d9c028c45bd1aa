"""How sharp is the loss at these weights: the Hessian's spectrum, and the worst case and average over a ball.

Every measurement takes ``loss``, a function without arguments that returns the loss on a fixed batch as a
scalar tensor and does *not* call ``backward``, and ``params``, the weights to move. Weights, gradients,
random number generators, train/eval flags and buffers (the statistics of BatchNorm) are left bit for bit as
they were found, also when something raises. Frozen weights (``requires_grad=False``) count as constants.

With ``adaptive`` a measurement is taken in the coordinates :math:`u = T^{-1}\\delta`, :math:`T = |\\theta| +
\\eta`, which makes it blind to a rescaling of the weights that leaves the network's function as it is
(Kwon et al. 2021, *ASAM*, arXiv:2102.11600; chapter 2).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = [
    "Average",
    "Density",
    "Eigenvalues",
    "Surface",
    "Trace",
    "WorstCase",
    "average",
    "hvp",
    "spectral_density",
    "top_eigenvalues",
    "trace",
    "worst_case",
]


class Surface:
    """The loss as a function of a displacement of the weights, for as long as a ``with`` block lasts.

    Displacements are flat float64 vectors on the CPU, one entry per trainable weight, measured in the
    coordinates :math:`u = T^{-1}\\delta`. Each evaluation starts from the same random state and the same
    buffers, so that dropout and BatchNorm make the loss a function of the weights and of nothing else.
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
            raise TypeError(f"loss must be a function without arguments, got {loss!r}; pass `lambda: ...`")
        if isinstance(params, Tensor):
            raise TypeError("params must be an iterable of tensors, got one tensor; pass [tensor]")
        self._loss = loss
        self.all_params = list(params)
        _check_params(self.all_params)
        self.params = [p for p in self.all_params if p.requires_grad]
        self.size = sum(p.numel() for p in self.params)
        self.scale = _scale(self.params, adaptive, eta)
        self.value = math.nan

    def __enter__(self) -> Surface:
        self._weights = [p.detach().clone() for p in self.params]
        self._gradients = [p.grad for p in self.params]
        for p in self.params:
            p.grad = None
        self._random = _random_states({p.device for p in self.params})
        self._buffers: list[tuple[dict, str, Tensor, Tensor]] = []
        self._seen: set[torch.nn.Module] = set()
        self._hook = register_module_forward_pre_hook(self._remember_buffers)
        try:
            self.value = self.loss()
            if not math.isfinite(self.value):
                raise ValueError(
                    f"the loss is {self.value} at the weights as given: sharpness is not defined there; "
                    "check the batch and the weights for infinite and NaN entries"
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        self._restore_weights()
        self._restore_state()
        for p, gradient in zip(self.params, self._gradients, strict=True):
            p.grad = gradient

    def _remember_buffers(self, module: torch.nn.Module, inputs: object) -> None:
        # The outermost module is called first, so this sees the buffers of the whole model before they move.
        if module not in self._seen:
            for part in module.modules():
                if part not in self._seen:
                    self._seen.add(part)
                    self._buffers += [
                        (part._buffers, name, buffer, buffer.clone())
                        for name, buffer in part._buffers.items()
                        if buffer is not None
                    ]

    def _restore_state(self) -> None:
        for restore, state in self._random:
            restore(state)
        with torch.no_grad():
            for buffers, name, buffer, copy in self._buffers:
                buffer.copy_(copy)
                buffers[name] = buffer

    def _restore_weights(self) -> None:
        with torch.no_grad():
            for p, weight in zip(self.params, self._weights, strict=True):
                p.copy_(weight)

    def _move(self, u: np.ndarray | None) -> None:
        self._restore_weights()
        if u is not None:
            with torch.no_grad():
                for p, piece in zip(self.params, self.split(self.scale * u), strict=True):
                    p.add_(piece)

    def _evaluate(self) -> Tensor:
        self._restore_state()
        value = self._loss()
        if not isinstance(value, Tensor):
            raise TypeError(f"loss() must return a scalar tensor, got {value!r}; end it with `return loss`")
        if value.numel() != 1:
            raise ValueError(
                f"loss() must return a scalar tensor, got shape {tuple(value.shape)}; take its mean or sum"
            )
        if any(p.grad is not None for p in self.params):
            for p in self.params:
                p.grad = None
            raise ValueError("loss() must not call backward: return the loss and leave gradients to samkit")
        return value

    def _differentiable(self) -> Tensor:
        # Only the plain attention kernel can be differentiated twice.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            value = self._evaluate()
        if not value.requires_grad:
            raise ValueError(
                "loss() does not depend on params through autograd: compute it from the tensors in params, "
                "without detach(), item() or torch.no_grad()"
            )
        return value

    def loss(self, u: np.ndarray | None = None) -> float:
        """The loss at the displacement ``u`` (none: at the weights as given)."""
        self._move(u)
        with torch.no_grad():
            return float(self._evaluate())

    def loss_and_gradient(self, u: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """The loss at ``u`` and its gradient with respect to ``u``."""
        self._move(u)
        value = self._differentiable()
        gradients = torch.autograd.grad(value, self.params, materialize_grads=True)
        return float(value.detach()), self.scale * _flat(gradients)

    def hessian(self) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """The product with the Hessian at the weights as given, on lists of tensors (without ``adaptive``).

        The gradient's graph is built once and kept, so that a product costs one backward pass through it.
        """
        self._move(None)
        gradients = torch.autograd.grad(
            self._differentiable(), self.params, create_graph=True, materialize_grads=True
        )
        curved = [i for i, g in enumerate(gradients) if g.requires_grad]

        def product(vectors: Sequence[Tensor]) -> Sequence[Tensor]:
            if not curved:
                return [torch.zeros_like(p) for p in self.params]
            return torch.autograd.grad(
                [gradients[i] for i in curved],
                self.params,
                [vectors[i] for i in curved],
                retain_graph=True,
                materialize_grads=True,
            )

        return product

    def flat_hessian(self) -> _Operator:
        """The product with :math:`T H T` on flat vectors; it counts its calls."""
        product = self.hessian()
        return _Operator(lambda u: self.scale * _flat(product(self.split(self.scale * u))), self.size)

    def split(self, flat: np.ndarray) -> list[Tensor]:
        """A flat vector as tensors shaped like the trainable weights, on their devices."""
        pieces = torch.from_numpy(np.ascontiguousarray(flat)).split([p.numel() for p in self.params])
        return [
            piece.to(p.dtype).to(p.device).view(p.shape) for piece, p in zip(pieces, self.params, strict=True)
        ]

    def like_params(self, flat: np.ndarray) -> list[Tensor]:
        """A flat vector as one tensor for each of ``params``, zero where frozen."""
        pieces = iter(self.split(flat))
        return [next(pieces) if p.requires_grad else torch.zeros_like(p) for p in self.all_params]

    def flatten(self, name: str, tensors: Iterable[Tensor]) -> np.ndarray:
        """One tensor for each of ``params`` as a flat vector, without the frozen ones."""
        tensors = list(tensors)
        shapes = [tuple(p.shape) for p in self.all_params]
        if [tuple(t.shape) for t in tensors] != shapes:
            raise ValueError(
                f"{name} must have the shapes of params, {shapes}, got {[tuple(t.shape) for t in tensors]}"
            )
        return _flat(t for t, p in zip(tensors, self.all_params, strict=True) if p.requires_grad)


class _Operator:
    """A symmetric matrix known by its products, which are counted."""

    def __init__(self, product: Callable[[np.ndarray], np.ndarray], size: int) -> None:
        self._product = product
        self.size = size
        self.products = 0

    def __call__(self, u: np.ndarray) -> np.ndarray:
        self.products += 1
        return self._product(np.ravel(u))

    def dense(self) -> np.ndarray:
        return np.stack([self(e) for e in np.eye(self.size)], axis=1)


@dataclass(frozen=True)
class Eigenvalues:
    """The largest eigenvalues of the Hessian.

    ``value`` (k,) descending; ``error`` (k,) the residual norms, each a bound on the distance to an
    eigenvalue; ``converged``; ``vectors``, for each eigenvalue a unit vector as one tensor per parameter;
    ``products``, the number of Hessian-vector products it took.
    """

    value: np.ndarray
    error: np.ndarray
    converged: bool
    vectors: list[list[Tensor]] = field(repr=False)
    products: int


@dataclass(frozen=True)
class Trace:
    """The trace of the Hessian: ``value``, its standard ``error``, ``converged``, ``products``."""

    value: float
    error: float
    converged: bool
    products: int


@dataclass(frozen=True)
class Density:
    """The density of the Hessian's eigenvalues, smoothed by a Gaussian of standard deviation ``width``.

    ``value`` and its standard ``error`` on ``grid``; ``converged``; the quadrature behind it as ``nodes``
    and ``weights`` (which sum to one); ``products``.
    """

    value: np.ndarray = field(repr=False)
    error: np.ndarray = field(repr=False)
    converged: bool
    grid: np.ndarray = field(repr=False)
    width: float
    nodes: np.ndarray = field(repr=False)
    weights: np.ndarray = field(repr=False)
    products: int


@dataclass(frozen=True)
class WorstCase:
    """The largest rise of the loss over a ball.

    ``value`` is the rise and ``loss`` the loss at the worst point found; ``error`` is how far the median
    restart stays below the best; ``perturbation`` leads there, one tensor per parameter; ``restarts`` holds
    the rise that each restart reached, the one from SAM's point first; ``one_step`` the rise at SAM's point.
    """

    value: float
    error: float
    converged: bool
    loss: float
    one_step: float
    restarts: np.ndarray
    perturbation: list[Tensor] = field(repr=False)


@dataclass(frozen=True)
class Average:
    """The mean rise of the loss under Gaussian noise: ``value``, its standard ``error``, ``converged``."""

    value: float
    error: float
    converged: bool
    loss: float


def hvp(loss: Callable[[], Tensor], params: Iterable[Tensor], vectors: Iterable[Tensor]) -> list[Tensor]:
    """The Hessian times a vector, by differentiating twice.

    Examples
    --------
    >>> import torch
    >>> theta = torch.tensor([1.0, 1.0], requires_grad=True)
    >>> hvp(lambda: theta[0] ** 2 * theta[1], [theta], [torch.tensor([1.0, 0.0])])
    [tensor([2., 2.])]
    """
    with Surface(loss, params) as surface:
        return surface.like_params(surface.flat_hessian()(surface.flatten("vectors", vectors)))


def top_eigenvalues(
    loss: Callable[[], Tensor],
    params: Iterable[Tensor],
    *,
    k: int = 1,
    tol: float = 1e-3,
    max_products: int = 1000,
    seed: int = 0,
    adaptive: bool | str = False,
    eta: float = 0.0,
) -> Eigenvalues:
    """The k algebraically largest eigenvalues of the Hessian, by Lanczos' method.

    Examples
    --------
    >>> import torch
    >>> theta = torch.zeros(3, requires_grad=True)
    >>> half_a = torch.tensor([0.5, 2.5, 1.5])
    >>> top_eigenvalues(lambda: (half_a * theta**2).sum(), [theta], k=2).value
    array([5., 3.])
    """
    k = _integer("k", k, 1)
    tol = _number("tol", tol)
    max_products = _integer("max_products", max_products, 1)
    rng = np.random.default_rng(_integer("seed", seed, 0))
    with Surface(loss, params, adaptive=adaptive, eta=eta) as surface:
        if k > surface.size:
            raise ValueError(f"k must be at most the number of trainable weights, {surface.size}, got {k}")
        operator = surface.flat_hessian()
        values, vectors, images = _top(operator, k, tol, max_products, rng)
        errors = np.linalg.norm(images - vectors * values, axis=0)
        return Eigenvalues(
            value=values,
            error=errors,
            converged=bool(np.all(errors <= tol * np.abs(values).max())),
            vectors=[surface.like_params(v) for v in vectors.T],
            products=operator.products,
        )


def _top(
    operator: _Operator, k: int, tol: float, max_products: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values (k,) descending, vectors (n, k) and the operator's images of the vectors (n, k)."""
    # Loading scipy's sparse solvers takes longer than importing the rest of samkit.
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    n = operator.size
    krylov = max(2 * k + 1, 20)
    if n <= krylov:
        matrix = operator.dense()
        _, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
        vectors = vectors[:, ::-1][:, :k]
        images = matrix @ vectors
    else:
        start = rng.standard_normal(n)
        if not operator(start).any():  # a random vector has a part along every eigenvector
            return np.zeros(k), np.eye(n, k), np.zeros((n, k))
        linear = LinearOperator((n, n), matvec=operator, dtype=np.float64)
        restarts = max(1, max_products // (krylov - k))
        try:
            _, vectors = eigsh(linear, k, which="LA", v0=start, ncv=krylov, tol=tol, maxiter=restarts)
        except ArpackNoConvergence:
            # A loose tolerance takes what the first Krylov space holds; the residuals tell how good it is.
            _, vectors = eigsh(linear, k, which="LA", v0=start, ncv=krylov, tol=1e6)
        images = np.stack([operator(v) for v in vectors.T], axis=1)
    values = (vectors * images).sum(axis=0)
    order = np.argsort(-values)
    return values[order], vectors[:, order], images[:, order]


def trace(
    loss: Callable[[], Tensor],
    params: Iterable[Tensor],
    *,
    samples: int = 60,
    sketch: int = 20,
    tol: float = 0.05,
    seed: int = 0,
    adaptive: bool | str = False,
    eta: float = 0.0,
) -> Trace:
    """The trace of the Hessian, by Hutch++ (``sketch=0``: by Hutchinson's estimator).

    Examples
    --------
    >>> import torch
    >>> theta = torch.zeros(3, requires_grad=True)
    >>> half_a = torch.tensor([0.5, 2.5, 1.5])
    >>> trace(lambda: (half_a * theta**2).sum(), [theta]).value
    9.0
    """
    samples = _integer("samples", samples, 2)
    sketch = _integer("sketch", sketch, 0)
    tol = _number("tol", tol)
    rng = np.random.default_rng(_integer("seed", seed, 0))
    with Surface(loss, params, adaptive=adaptive, eta=eta) as surface:
        operator = surface.flat_hessian()
        n = surface.size
        if n <= samples + 2 * sketch:
            value, error = float(np.trace(operator.dense())), 0.0
        else:
            images = [operator(rng.choice([-1.0, 1.0], n)) for _ in range(sketch)]
            basis = np.linalg.qr(np.reshape(images, (sketch, n)).T)[0]
            exact = sum(float(q @ operator(q)) for q in basis.T)
            rest = np.empty(samples)
            for i in range(samples):
                probe = rng.choice([-1.0, 1.0], n)
                probe -= basis @ (basis.T @ probe)
                rest[i] = probe @ operator(probe)
            value = exact + float(rest.mean())
            error = float(rest.std(ddof=1)) / math.sqrt(samples)
        return Trace(value, error, error <= tol * abs(value), operator.products)


def spectral_density(
    loss: Callable[[], Tensor],
    params: Iterable[Tensor],
    *,
    steps: int = 80,
    probes: int = 8,
    width: float | None = None,
    points: int = 1001,
    tol: float = 0.1,
    seed: int = 0,
    adaptive: bool | str = False,
    eta: float = 0.0,
) -> Density:
    """The density of the Hessian's eigenvalues, by stochastic Lanczos quadrature."""
    steps = _integer("steps", steps, 2)
    probes = _integer("probes", probes, 2)
    points = _integer("points", points, 2)
    tol = _number("tol", tol)
    if width is not None:
        width = _number("width", width, strict=True)
    rng = np.random.default_rng(_integer("seed", seed, 0))
    with Surface(loss, params, adaptive=adaptive, eta=eta) as surface:
        operator = surface.flat_hessian()
        n = surface.size
        if n <= steps * probes:
            matrix = operator.dense()
            nodes = np.linalg.eigvalsh((matrix + matrix.T) / 2)
            rules = coarse = [(nodes, np.full(n, 1 / n))]
        else:
            tridiagonals = [_lanczos(operator, rng.standard_normal(n), steps) for _ in range(probes)]
            rules = [_gauss_rule(a, b) for a, b in tridiagonals]
            coarse = [_gauss_rule(a[: 3 * steps // 4], b[: 3 * steps // 4]) for a, b in tridiagonals]
        products = operator.products
    nodes = np.concatenate([x for x, _ in rules])
    weights = np.concatenate([w for _, w in rules]) / len(rules)
    low, high = nodes.min(), nodes.max()
    if width is None:
        width = float(0.01 * ((high - low) or abs(high) or 1.0))
    grid = np.linspace(low - 5 * width, high + 5 * width, points)
    each = np.stack([_smooth(grid, *rule, width) for rule in rules])
    value = each.mean(axis=0)
    error = each.std(axis=0, ddof=1) / math.sqrt(len(rules)) if len(rules) > 1 else np.zeros(points)
    shift = np.abs(np.mean([_smooth(grid, *rule, width) for rule in coarse], axis=0) - value)
    converged = bool(max(np.trapezoid(error, grid), np.trapezoid(shift, grid)) <= tol)
    return Density(value, error, converged, grid, width, nodes, weights, products)


def _lanczos(operator: _Operator, start: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Diagonal (m,) and off-diagonal (m - 1,) of the Lanczos matrix, m <= steps."""
    basis = np.empty((steps, start.size))
    diagonal, off = [], []
    vector = start / np.linalg.norm(start)
    for i in range(steps):
        basis[i] = vector
        image = operator(vector)
        diagonal.append(float(vector @ image))
        # Twice is enough (Parlett): without this, rounding lets converged eigenvalues come back as ghosts.
        for _ in range(2):
            image -= basis[: i + 1].T @ (basis[: i + 1] @ image)
        length = float(np.linalg.norm(image))
        if i + 1 == steps or length <= 1e-12 * max(map(abs, [*diagonal, *off])):
            break
        off.append(length)
        vector = image / length
    return np.array(diagonal), np.array(off)


def _gauss_rule(diagonal: np.ndarray, off: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    from scipy.linalg import eigh_tridiagonal

    nodes, vectors = eigh_tridiagonal(diagonal, off[: len(diagonal) - 1])
    return nodes, vectors[0] ** 2


def _smooth(grid: np.ndarray, nodes: np.ndarray, weights: np.ndarray, width: float) -> np.ndarray:
    bumps = np.exp(-0.5 * ((grid[:, None] - nodes) / width) ** 2)
    return bumps @ weights / (width * math.sqrt(2 * math.pi))


def worst_case(
    loss: Callable[[], Tensor],
    params: Iterable[Tensor],
    rho: float,
    norm: str = "l2",
    *,
    steps: int = 30,
    restarts: int = 6,
    tol: float = 0.01,
    seed: int = 0,
    adaptive: bool | str = False,
    eta: float = 0.0,
) -> WorstCase:
    """The largest rise of the loss within a ball around the weights, by projected ascent with restarts."""
    rho = _number("rho", rho)
    if norm not in ("l2", "linf"):
        raise ValueError(f"norm must be 'l2' or 'linf', got {norm!r}")
    steps = _integer("steps", steps, 0)
    restarts = _integer("restarts", restarts, 1)
    tol = _number("tol", tol)
    rng = np.random.default_rng(_integer("seed", seed, 0))
    with Surface(loss, params, adaptive=adaptive, eta=eta) as surface:
        _, gradient = surface.loss_and_gradient()
        starts = [rho * _steepest(gradient, norm)]
        starts += [rho * _steepest(rng.standard_normal(surface.size), norm) for _ in range(restarts - 1)]
        one_step = surface.loss(starts[0]) - surface.value
        ends = [_ascend(surface, start, rho, norm, steps) for start in starts]
        rises = np.array([value - surface.value for value, _, _ in ends])
        best = int(np.argmax(rises))
        clean = all(ok for _, _, ok in ends) and math.isfinite(one_step)
        value = float(rises[best])
        error = float(value - np.median(rises)) if clean and (restarts > 1 or rho == 0) else math.inf
        return WorstCase(
            value=value,
            error=error,
            converged=error <= tol * value,
            loss=value + surface.value,
            one_step=one_step,
            restarts=rises,
            perturbation=surface.like_params(surface.scale * ends[best][1]),
        )


def _steepest(gradient: np.ndarray, norm: str) -> np.ndarray:
    """The point of the unit ball furthest along the gradient (0 for a zero gradient)."""
    if norm == "linf":
        return np.sign(gradient)
    return gradient / (np.linalg.norm(gradient) or 1.0)


def _ascend(
    surface: Surface, start: np.ndarray, rho: float, norm: str, steps: int
) -> tuple[float, np.ndarray, bool]:
    """Loss and place of the highest point met from ``start``, and whether all losses met were finite."""
    u, clean = start, True
    value, gradient = surface.loss_and_gradient(u)
    if not math.isfinite(value):
        u, clean = np.zeros_like(start), False
        value, gradient = surface.loss_and_gradient(u)
    uphill = _feasible(u, gradient, rho, norm)
    length = rho / (np.linalg.norm(gradient) or 1.0)
    for _ in range(steps):
        trial = u + length * uphill
        trial = (
            np.clip(trial, -rho, rho)
            if norm == "linf"
            else trial * min(1.0, rho / (np.linalg.norm(trial) or 1))
        )
        if np.array_equal(trial, u):
            break
        trial_value, gradient = surface.loss_and_gradient(trial)
        if trial_value > value and math.isfinite(trial_value):
            trial_uphill = _feasible(trial, gradient, rho, norm)
            step, bend = trial - u, uphill - trial_uphill
            # Barzilai and Borwein's length where the loss bends down along the ball, a long one elsewhere.
            curvature = float(step @ bend)
            length = float(step @ step) / curvature if curvature > 0 else 4 * length
            u, value, uphill = trial, trial_value, trial_uphill
        else:
            clean = clean and math.isfinite(trial_value)
            length /= 4
    return value, u, clean


def _feasible(u: np.ndarray, gradient: np.ndarray, rho: float, norm: str) -> np.ndarray:
    """The gradient without its part that points out of the ball."""
    if norm == "linf":
        return np.where((np.abs(u) >= rho) & (u * gradient > 0), 0.0, gradient)
    outward = float(u @ gradient)
    if outward > 0 and np.linalg.norm(u) >= rho * (1 - 1e-12):
        return gradient - u * (outward / float(u @ u))
    return gradient


def average(
    loss: Callable[[], Tensor],
    params: Iterable[Tensor],
    sigma: float,
    *,
    samples: int = 100,
    tol: float = 0.05,
    seed: int = 0,
    adaptive: bool | str = False,
    eta: float = 0.0,
) -> Average:
    """The mean rise of the loss when Gaussian noise is added to the weights."""
    sigma = _number("sigma", sigma)
    samples = _integer("samples", samples, 2)
    tol = _number("tol", tol)
    rng = np.random.default_rng(_integer("seed", seed, 0))
    with Surface(loss, params, adaptive=adaptive, eta=eta) as surface:
        rises = []
        for _ in range(samples):
            u = sigma * rng.standard_normal(surface.size)
            # A pair of opposite displacements cancels the gradient, which has no part in the mean.
            rises.append((surface.loss(u) + surface.loss(-u)) / 2 - surface.value)
        value = sum(rises) / samples
        error = float(np.std(rises, ddof=1)) / math.sqrt(samples) if math.isfinite(value) else math.inf
        return Average(value, error, error <= tol * abs(value), value + surface.value)


def _check_params(params: list[Tensor]) -> None:
    for p in params:
        if not isinstance(p, Tensor):
            raise TypeError(f"params must hold tensors, got {p!r}; pass model.parameters()")
        if p.requires_grad and not p.is_leaf:
            raise ValueError(
                "params must hold leaf tensors, got the result of a computation; pass model.parameters()"
            )
    if len({id(p) for p in params}) < len(params):
        raise ValueError("params holds a tensor twice; model.parameters() lists tied weights once")
    if not any(p.requires_grad for p in params):
        raise ValueError("params holds no tensor with requires_grad=True: there is nothing to move")


def _scale(params: list[Tensor], adaptive: bool | str, eta: float) -> np.ndarray:
    if adaptive not in (False, True, "weights", "all"):
        raise ValueError(f"adaptive must be False, True, 'weights' or 'all', got {adaptive!r}")
    eta = _number("eta", eta)
    if adaptive is False:
        return np.ones(1)
    return _flat(
        [
            torch.ones_like(p) if adaptive == "weights" and p.dim() < 2 else p.detach().abs() + eta
            for p in params
        ]
    )


def _flat(tensors: Iterable[Tensor]) -> np.ndarray:
    # In this order, because MPS knows no float64.
    return torch.cat([t.detach().reshape(-1).cpu().double() for t in tensors]).numpy()


def _random_states(devices: Iterable[torch.device]) -> list[tuple[Callable, Tensor]]:
    states: list[tuple[Callable, Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    for device in devices:
        if device.type == "mps":
            states.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
        elif device.type != "cpu":
            module = torch.get_device_module(device)
            states.append(
                (lambda state, m=module, d=device: m.set_rng_state(state, d), module.get_rng_state(device))
            )
    return states


def _integer(name: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")
    return int(value)


def _number(name: str, value: object, *, strict: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0 or (strict and value == 0):
        raise ValueError(f"{name} must be finite and {'> 0' if strict else '>= 0'}, got {value}")
    return float(value)
