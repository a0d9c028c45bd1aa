"""How sharp is the loss at these weights: the Hessian's spectrum, and the worst case and average over a ball.

Every measurement takes ``loss``, a function without arguments that returns the loss on a fixed batch as a
scalar tensor and does *not* call ``backward``, and ``params``, the weights to move. Weights, gradients,
random number generators, train/eval flags and buffers (the statistics of BatchNorm) are left bit for bit as
they were found, also when something raises. Frozen weights (``requires_grad=False``) count as constants. A
compiled model is run uncompiled for the time of the measurement: compiled code cannot be differentiated
twice.

With ``adaptive`` the displacement :math:`\\delta` of the weights is measured in the coordinates
:math:`u = T^{-1}\\delta`, where :math:`T` is :func:`samkit.perturb.scaling`. The sharpness is then blind to a
rescaling of the weights that leaves the network's function as it is: exactly so for ``eta=0``.

Sources: Foret et al. 2021 (arXiv 2010.01412), Kwon et al. 2021 (arXiv 2102.11600), and those named below.
Chapter 2 derives the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from samkit._arguments import integer, number
from samkit.perturb import NORMS
from samkit.surface import Hessian, Surface

__all__ = [
    "Average",
    "Eigenvalues",
    "SpectralDensity",
    "Trace",
    "WorstCase",
    "average",
    "hvp",
    "spectral_density",
    "top_eigenvalues",
    "trace",
    "worst_case",
]


@dataclass(frozen=True)
class Eigenvalues:
    """What :func:`~samkit.sharpness.top_eigenvalues` found.

    Attributes
    ----------
    value : numpy.ndarray
        The eigenvalues, shape (k,), descending.
    error : numpy.ndarray
        The residual norms, shape (k,): within that distance of each value lies an eigenvalue.
    converged : bool
        Whether every error is at most ``tol`` times the largest eigenvalue in absolute value.
    vectors : list of list of Tensor
        For each eigenvalue a unit vector, as one tensor per parameter.
    products : int
        The Hessian-vector products spent.
    """

    value: np.ndarray
    error: np.ndarray
    converged: bool
    vectors: list[list[Tensor]] = field(repr=False)
    products: int


@dataclass(frozen=True)
class Trace:
    """What :func:`~samkit.sharpness.trace` found.

    Attributes
    ----------
    value : float
        The trace.
    error : float
        Its standard error; 0 when it was summed exactly.
    converged : bool
        Whether the error is at most ``tol`` times the trace.
    products : int
        The Hessian-vector products spent.
    """

    value: float
    error: float
    converged: bool
    products: int


@dataclass(frozen=True)
class SpectralDensity:
    """What :func:`~samkit.sharpness.spectral_density` found.

    Attributes
    ----------
    value : numpy.ndarray
        The density on ``grid``; its integral is 1.
    error : numpy.ndarray
        Its standard error over the random vectors, on ``grid``.
    converged : bool
        Whether the standard error, and what the last quarter of the Lanczos steps changed, both integrate to
        at most ``tol``.
    grid : numpy.ndarray
        Eigenvalues at which the density is given.
    width : float
        Standard deviation of the Gaussian that smooths each eigenvalue.
    nodes : numpy.ndarray
        Where the quadrature behind the density evaluates.
    weights : numpy.ndarray
        Its weights; they sum to 1, and ``(weights * f(nodes)).sum()`` estimates the mean of f(eigenvalue).
    products : int
        The Hessian-vector products spent.
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
    """What :func:`~samkit.sharpness.worst_case` found.

    Attributes
    ----------
    value : float
        The largest rise of the loss.
    error : float
        How far the median restart stayed below it; infinite for a single start, and when a loss in the ball
        was not finite.
    converged : bool
        Whether the error is at most ``tol`` times the value (or below the resolution of the loss's
        arithmetic).
    loss : float
        The loss at the worst point.
    one_step : float
        The rise at SAM's point: one step of length rho along the gradient.
    restarts : numpy.ndarray
        The rise that each start reached, the one from SAM's point first.
    perturbation : list of Tensor
        The displacement that leads to the worst point, one tensor per parameter.
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
    """What :func:`~samkit.sharpness.average` found.

    Attributes
    ----------
    value : float
        The mean rise of the loss.
    error : float
        Its standard error; infinite when a loss was not finite.
    converged : bool
        Whether the error is at most ``tol`` times the value (or below the resolution of the loss's
        arithmetic).
    loss : float
        The mean loss.
    """

    value: float
    error: float
    converged: bool
    loss: float


def hvp(loss: Callable[[], Tensor], params: Iterable[Tensor], vectors: Iterable[Tensor]) -> list[Tensor]:
    r"""The Hessian times a vector, by differentiating twice.

    .. math:: H v = \nabla_\theta \langle \nabla L(\theta), v \rangle

    Parameters
    ----------
    loss : callable
        Returns the loss, a scalar tensor.
    params : iterable of Tensor
        The weights.
    vectors : iterable of Tensor
        The vector, one tensor for each parameter and of its shape.

    Returns
    -------
    list of Tensor
        The product, in the shapes, dtypes and places of the parameters; zero where frozen.

    Raises
    ------
    TypeError
        If the arguments, or what ``loss()`` returns, are not of these types.
    ValueError
        If the shapes differ, the loss is no scalar, not finite or not a function of ``params``, or the
        product is not finite.

    Examples
    --------
    >>> import torch
    >>> from samkit.sharpness import hvp
    >>> theta = torch.tensor([1.0, 3.0], requires_grad=True)
    >>> hvp(lambda: theta[0] ** 2 * theta[1], [theta], [torch.tensor([1.0, 0.0])])
    [tensor([6., 2.])]

    Notes
    -----
    Source: Pearlmutter 1994, *Fast exact multiplication by the Hessian*. Chapter 2.
    """
    with Surface(loss, params) as surface:
        vector = surface.flatten("vectors", vectors)
        return surface.unflatten(surface.hessian()(vector))


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
    r"""The k largest eigenvalues of the Hessian, with their eigenvectors, by the Lanczos method.

    .. math:: H v_i = \lambda_i v_i, \qquad \lambda_1 \ge \lambda_2 \ge \dots, \qquad
        \text{error}_i = \|H v_i - \lambda_i v_i\|_2

    Largest means algebraically: for the most negative ones negate the loss. Up to twenty weights the Hessian
    is written out and the answer exact.

    Parameters
    ----------
    loss, params
        As in :func:`~samkit.sharpness.hvp`.
    k : int
        How many eigenvalues, at most the number of weights.
    tol : float
        The relative error to stop at.
    max_products : int
        About how many Hessian-vector products to spend before giving up; the values are then what one Krylov
        space holds.
    seed : int
        Seed of the start vector.
    adaptive, eta
        Take the eigenvalues of :math:`T H T`; the eigenvectors are then in the coordinates u.

    Returns
    -------
    Eigenvalues
        The values, their errors, whether they converged, the eigenvectors.

    Raises
    ------
    TypeError, ValueError
        As :func:`~samkit.sharpness.hvp`, and for settings out of range.

    Examples
    --------
    >>> import torch
    >>> from samkit.sharpness import top_eigenvalues
    >>> theta = torch.zeros(3, requires_grad=True)
    >>> curvature = torch.tensor([1.0, 5.0, 3.0])
    >>> top_eigenvalues(lambda: (curvature * theta**2).sum() / 2, [theta], k=2).value
    array([5., 3.])

    Notes
    -----
    Source: Lehoucq, Sorensen & Yang 1998, *ARPACK Users' Guide* (the implicitly restarted Lanczos method).
    Chapter 2.
    """
    k = integer("k", k, 1)
    tol = number("tol", tol)
    max_products = integer("max_products", max_products, 1)
    rng = np.random.default_rng(integer("seed", seed, 0))
    with Surface(loss, params, adaptive=adaptive, eta=eta) as surface:
        if k > surface.size:
            raise ValueError(f"k must be at most the number of trainable weights, {surface.size}, got {k}")
        hessian = surface.hessian()
        vectors, images = _top_eigenvectors(hessian, k, tol, max_products, rng)
        values = (vectors * images).sum(axis=0)
        order = np.argsort(-values)
        errors = np.linalg.norm(images - vectors * values, axis=0)
        return Eigenvalues(
            value=values[order],
            error=errors[order],
            converged=bool(errors.max() <= tol * hessian.stretch),
            vectors=[surface.unflatten(vectors[:, i]) for i in order],
            products=hessian.products,
        )


def _top_eigenvectors(
    hessian: Hessian, k: int, tol: float, max_products: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The eigenvectors of the k largest eigenvalues and the Hessian's products with them, both (n, k)."""
    n, krylov = hessian.size, max(2 * k + 1, 20)
    if n <= krylov:
        matrix = hessian.dense()
        vectors = np.linalg.eigh((matrix + matrix.T) / 2)[1][:, n - k :]
        return vectors, matrix @ vectors
    start = rng.standard_normal(n)
    # A random vector has a part along every eigenvector; ARPACK stops with an error on a matrix of zeros.
    if not hessian(start).any():
        return np.eye(n, k), np.zeros((n, k))

    # Loading the sparse solvers takes longer than the rest of samkit.
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    operator = LinearOperator((n, n), matvec=hessian, dtype=np.float64)
    restarts = max(1, max_products // (krylov - k))
    try:
        _, vectors = eigsh(operator, k, which="LA", v0=start, ncv=krylov, maxiter=restarts, tol=tol)
    except ArpackNoConvergence:
        # Any tolerance is met by what the first Krylov space holds; the residuals tell how good it is.
        _, vectors = eigsh(operator, k, which="LA", v0=start, ncv=krylov, tol=math.inf)
    return vectors, np.stack([hessian(v) for v in vectors.T], axis=1)


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
    r"""The trace of the Hessian, estimated from random vectors by Hutch++.

    .. math:: \operatorname{tr} H = \operatorname{tr} Q^\top H Q + \mathbb{E}\, z^\top P H P z, \qquad
        P = I - Q Q^\top

    Q is an orthonormal basis of H times ``sketch`` random sign vectors, which holds most of the large
    eigenvalues; the mean over ``samples`` further sign vectors z estimates the rest. ``sketch=0`` is
    Hutchinson's estimator. The cost is ``samples + 2 * sketch`` products; with no more weights than that the
    trace is summed exactly.

    Parameters
    ----------
    loss, params
        As in :func:`~samkit.sharpness.hvp`.
    samples : int
        Random vectors in the mean, at least 2.
    sketch : int
        Dimensions of Q.
    tol : float
        The relative standard error to call converged.
    seed : int
        Seed of the random vectors.
    adaptive, eta
        Take the trace of :math:`T H T`.

    Returns
    -------
    Trace
        The trace, its standard error, whether it converged.

    Raises
    ------
    TypeError, ValueError
        As :func:`~samkit.sharpness.hvp`, and for settings out of range.

    Examples
    --------
    >>> import torch
    >>> from samkit.sharpness import trace
    >>> theta = torch.zeros(3, requires_grad=True)
    >>> curvature = torch.tensor([1.0, 5.0, 3.0])
    >>> trace(lambda: (curvature * theta**2).sum() / 2, [theta]).value
    9.0

    Notes
    -----
    Sources: Hutchinson 1989; Meyer, Musco, Musco & Woodruff 2021 (arXiv 2010.09649), algorithm 1. Chapter 2.
    """
    samples = integer("samples", samples, 2)
    sketch = integer("sketch", sketch, 0)
    tol = number("tol", tol)
    rng = np.random.default_rng(integer("seed", seed, 0))
    with Surface(loss, params, adaptive=adaptive, eta=eta) as surface:
        hessian = surface.hessian()
        n = surface.size
        if n <= samples + 2 * sketch:
            value, error = float(np.trace(hessian.dense())), 0.0
        else:
            images = np.array([hessian(rng.choice([-1.0, 1.0], n)) for _ in range(sketch)]).reshape(sketch, n)
            basis = np.linalg.qr(images.T)[0]
            rest = np.empty(samples)
            for i in range(samples):
                probe = rng.choice([-1.0, 1.0], n)
                probe -= basis @ (basis.T @ probe)
                rest[i] = probe @ hessian(probe)
            value = float(sum(q @ hessian(q) for q in basis.T) + rest.mean())
            error = float(rest.std(ddof=1)) / math.sqrt(samples)
        return Trace(value, error, error <= tol * abs(value), hessian.products)


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
) -> SpectralDensity:
    r"""The density of the Hessian's eigenvalues, by stochastic Lanczos quadrature.

    .. math:: \phi(x) = \frac1n \sum_{i=1}^n N(x; \lambda_i, \text{width}^2)
        \approx \frac1{\text{probes}} \sum_{p} \sum_{j=1}^{\text{steps}} \tau_{pj}\, N(x; \theta_{pj},
        \text{width}^2)

    For each random start vector, :math:`\theta_{pj}` are the eigenvalues of the Lanczos matrix and
    :math:`\tau_{pj}` the squared first entries of its eigenvectors. The Lanczos vectors are kept orthogonal
    throughout, at the price of ``8 * steps`` bytes for each weight. With at most ``steps * probes`` weights
    the density is exact.

    Parameters
    ----------
    loss, params
        As in :func:`~samkit.sharpness.hvp`.
    steps : int
        Lanczos steps for each random vector.
    probes : int
        Random vectors, at least 2.
    width : float, optional
        Standard deviation of the smoothing; by default 1 % of the range of the eigenvalues found.
    points : int
        Length of the grid.
    tol : float
        The integrated error to call converged; the density integrates to 1.
    seed : int
        Seed of the random vectors.
    adaptive, eta
        Take the eigenvalues of :math:`T H T`.

    Returns
    -------
    SpectralDensity
        The density on a grid, its standard error, whether it converged, and the quadrature behind it.

    Raises
    ------
    TypeError, ValueError
        As :func:`~samkit.sharpness.hvp`, and for settings out of range.

    Examples
    --------
    >>> import torch
    >>> from samkit.sharpness import spectral_density
    >>> theta = torch.zeros(4, requires_grad=True)
    >>> curvature = torch.tensor([1.0, 1.0, 1.0, 5.0])
    >>> density = spectral_density(lambda: (curvature * theta**2).sum() / 2, [theta])
    >>> float(density.weights[density.nodes < 3].sum())
    0.75

    Notes
    -----
    Sources: Lin, Saad & Yang 2016 (arXiv 1308.5467), section 3.2; Ghorbani, Krishnan & Xiao 2019 (arXiv
    1901.10159), algorithms 1 and 2. Chapter 2.
    """
    steps = integer("steps", steps, 2)
    probes = integer("probes", probes, 2)
    points = integer("points", points, 2)
    width = None if width is None else number("width", width, positive=True)
    tol = number("tol", tol)
    rng = np.random.default_rng(integer("seed", seed, 0))
    with Surface(loss, params, adaptive=adaptive, eta=eta) as surface:
        hessian = surface.hessian()
        n = surface.size
        if n <= steps * probes:
            matrix = hessian.dense()
            rules = coarse = [(np.linalg.eigvalsh((matrix + matrix.T) / 2), np.full(n, 1 / n))]
        else:
            lanczos = [_lanczos(hessian, rng.standard_normal(n), steps) for _ in range(probes)]
            rules = [_gauss_rule(a, b) for a, b in lanczos]
            fewer = 3 * steps // 4
            coarse = [_gauss_rule(a[:fewer], b[: fewer - 1]) for a, b in lanczos]
    nodes, weights = (np.concatenate(parts) for parts in zip(*rules, strict=True))
    low, high = nodes.min(), nodes.max()
    if width is None:
        width = float(0.01 * ((high - low) or abs(high) or 1.0))
    grid = np.linspace(low - 5 * width, high + 5 * width, points)
    densities = np.array([_smooth(grid, *rule, width) for rule in rules])
    value = densities.mean(axis=0)
    error = densities.std(axis=0) / math.sqrt(max(len(rules) - 1, 1))
    change = np.abs(value - np.mean([_smooth(grid, *rule, width) for rule in coarse], axis=0))
    return SpectralDensity(
        value=value,
        error=error,
        converged=bool(max(np.trapezoid(error, grid), np.trapezoid(change, grid)) <= tol),
        grid=grid,
        width=width,
        nodes=nodes,
        weights=weights / len(rules),
        products=hessian.products,
    )


def _lanczos(hessian: Hessian, start: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Diagonal (m,) and off-diagonal (m - 1,) of the Lanczos matrix; m < steps if the Krylov space ends."""
    basis = np.empty((steps, start.size))
    diagonal, off_diagonal = [], []
    vector = start / np.linalg.norm(start)
    for i in range(steps):
        basis[i] = vector
        image = hessian(vector)
        diagonal.append(float(vector @ image))
        # Without this, rounding lets converged eigenvalues come back as ghosts; twice is enough (Parlett).
        for _ in range(2):
            image -= basis[: i + 1].T @ (basis[: i + 1] @ image)
        length = float(np.linalg.norm(image))
        if i + 1 == steps or length <= 1e-12 * hessian.stretch:
            break
        off_diagonal.append(length)
        vector = image / length
    return np.array(diagonal), np.array(off_diagonal)


def _gauss_rule(diagonal: np.ndarray, off_diagonal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    from scipy.linalg import eigh_tridiagonal

    nodes, vectors = eigh_tridiagonal(diagonal, off_diagonal)
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
    r"""The largest rise of the loss within a ball around the weights.

    .. math:: \max_{\|T^{-1}\delta\| \le \rho} L(\theta + \delta) - L(\theta)

    Projected gradient ascent from SAM's point and from random points on the sphere (for l_inf, corners of the
    cube), with Barzilai and Borwein's step lengths, or SAM's step where the loss bends up. Only steps that
    climb are taken, so the value is never below the rise at SAM's point. It is a lower bound of the true
    maximum; the restarts tell how far to trust it.

    Parameters
    ----------
    loss, params
        As in :func:`~samkit.sharpness.hvp`.
    rho : float
        The radius, at least 0.
    norm : "l2" or "linf"
        The norm of the ball; it runs over all weights together.
    steps : int
        Gradients taken from each start.
    restarts : int
        Starts, SAM's point included.
    tol : float
        The relative disagreement between the best and the median restart to call converged.
    seed : int
        Seed of the random starts.
    adaptive, eta
        The ball of adaptive SAM; without them :math:`T = 1`.

    Returns
    -------
    WorstCase
        The rise, how well the restarts agree on it, and the displacement that leads there.

    Raises
    ------
    TypeError, ValueError
        As :func:`~samkit.sharpness.hvp`, and for settings out of range.

    Examples
    --------
    On a parabola with slope 2 and curvature 6, a step of 0.5 up the slope gains 2 * 0.5 + 6 * 0.5**2 / 2.

    >>> import torch
    >>> from samkit.sharpness import worst_case
    >>> theta = torch.zeros(1, requires_grad=True)
    >>> worst_case(lambda: (2 * theta + 3 * theta**2).sum(), [theta], rho=0.5).value
    1.75

    Notes
    -----
    Sources: Foret et al. 2021 (arXiv 2010.01412), equation 1; Kwon et al. 2021 (arXiv 2102.11600), equation
    3; step lengths: Birgin, Martinez & Raydan 2000, *Nonmonotone spectral projected gradient methods*.
    Chapters 2 and 4.
    """
    rho = number("rho", rho)
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")
    steps = integer("steps", steps, 0)
    restarts = integer("restarts", restarts, 1)
    tol = number("tol", tol)
    rng = np.random.default_rng(integer("seed", seed, 0))
    with Surface(loss, params, adaptive=adaptive, eta=eta) as surface:
        base, gradient = surface.loss_and_gradient()
        if not np.isfinite(gradient).all():
            raise ValueError(
                "the gradient is not finite at the weights as given: the loss has no slope there"
            )
        directions = [gradient, *rng.standard_normal((restarts - 1, surface.size))]
        ends = [_ascend(surface, rho * _steepest(d, norm), rho, norm, steps) for d in directions]
        rises = np.array([end.loss - base for end in ends])
        best = int(np.argmax(rises))
        known = all(end.finite for end in ends) and (restarts > 1 or rho == 0)
        error = float(rises[best] - np.median(rises)) if known else math.inf
        return WorstCase(
            value=float(rises[best]),
            error=error,
            converged=error <= tol * float(rises[best]) + surface.resolution(base),
            loss=ends[best].loss,
            one_step=ends[0].start - base,
            restarts=rises,
            perturbation=surface.unflatten(surface.scale * ends[best].u),
        )


@dataclass(frozen=True)
class _Ascent:
    u: np.ndarray
    loss: float
    start: float  # the loss at the start
    finite: bool  # whether all losses and gradients met were


def _ascend(surface: Surface, start: np.ndarray, rho: float, norm: str, steps: int) -> _Ascent:
    u, (loss, gradient) = start, surface.loss_and_gradient(start)
    first, finite = loss, _all_finite(loss, gradient)
    if not finite:
        u = np.zeros_like(start)
        loss, gradient = surface.loss_and_gradient(u)
    length = None
    for _ in range(steps):
        uphill = _feasible(u, gradient, rho, norm)
        if not uphill.any():
            break
        if length is None:
            trial = rho * _steepest(gradient, norm)
        else:
            trial = _project(u + length * uphill, rho, norm)
        step = trial - u
        if np.linalg.norm(step) <= 1e-8 * np.linalg.norm(u):
            break
        trial_loss, trial_gradient = surface.loss_and_gradient(trial)
        usable = _all_finite(trial_loss, trial_gradient)
        finite = finite and usable
        if usable and trial_loss > loss:
            # Barzilai and Borwein's length where the loss bends down along the ball. Elsewhere SAM's step:
            # on a convex stretch it always climbs, and on the cube it goes all the way to a corner.
            curvature = float(step @ (uphill - _feasible(trial, trial_gradient, rho, norm)))
            length = float(step @ step) / curvature if curvature > 0 else None
            u, loss, gradient = trial, trial_loss, trial_gradient
        else:
            length = rho / float(np.linalg.norm(gradient)) if length is None else length / 4
    return _Ascent(u, loss, first, finite)


def _all_finite(loss: float, gradient: np.ndarray) -> bool:
    return math.isfinite(loss) and bool(np.isfinite(gradient).all())


def _steepest(gradient: np.ndarray, norm: str) -> np.ndarray:
    """The point of the unit ball that lies furthest along the gradient; 0 for a zero gradient."""
    if norm == "linf":
        return np.sign(gradient)
    return gradient / (np.linalg.norm(gradient) or 1.0)


def _project(u: np.ndarray, rho: float, norm: str) -> np.ndarray:
    if norm == "linf":
        return np.clip(u, -rho, rho)
    length = np.linalg.norm(u)
    return u * (rho / length) if length > rho else u


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
    r"""The mean rise of the loss when Gaussian noise is added to the weights.

    .. math:: \mathbb{E}_{z \sim N(0, I)}\, L(\theta + \sigma T z) - L(\theta)
        = \tfrac12 \sigma^2 \operatorname{tr}(T H T) + O(\sigma^4)

    Each random vector z is used together with -z: the slope, which has no part in the mean, then cancels from
    the estimate too.

    Parameters
    ----------
    loss, params
        As in :func:`~samkit.sharpness.hvp`.
    sigma : float
        Standard deviation of the noise on each weight, at least 0.
    samples : int
        Pairs of random vectors, at least 2: twice as many losses.
    tol : float
        The relative standard error to call converged.
    seed : int
        Seed of the noise.
    adaptive, eta
        Scale the noise on each weight by :math:`T`; without them :math:`T = 1`.

    Returns
    -------
    Average
        The mean rise, its standard error, whether it converged.

    Raises
    ------
    TypeError, ValueError
        As :func:`~samkit.sharpness.hvp`, and for settings out of range.

    Examples
    --------
    >>> import torch
    >>> from samkit.sharpness import average
    >>> theta = torch.zeros(4000, requires_grad=True)
    >>> rise = average(lambda: (theta**2).sum() / 2, [theta], sigma=0.1)
    >>> abs(rise.value - 0.1**2 * 4000 / 2) < 4 * rise.error
    True

    Notes
    -----
    Source: Andriushchenko et al. 2023 (arXiv 2302.07011), section 2. Chapter 2.
    """
    sigma = number("sigma", sigma)
    samples = integer("samples", samples, 2)
    tol = number("tol", tol)
    rng = np.random.default_rng(integer("seed", seed, 0))
    with Surface(loss, params, adaptive=adaptive, eta=eta) as surface:
        base = surface.loss()
        rises = np.empty(samples)
        for i in range(samples):
            u = sigma * rng.standard_normal(surface.size)
            rises[i] = (surface.loss(u) + surface.loss(-u)) / 2 - base
        if not np.isfinite(rises).all():
            return Average(math.nan, math.inf, False, math.nan)
        value, error = float(rises.mean()), float(rises.std(ddof=1)) / math.sqrt(samples)
        converged = error <= tol * abs(value) + surface.resolution(base)
        return Average(value, error, converged, value + base)
