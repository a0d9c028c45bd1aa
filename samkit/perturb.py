"""The mathematics of one SAM step, as pure functions on lists of tensors.

The weights are a list of tensors, one for each parameter, and so are a gradient and a perturbation; a norm runs
over the whole list. Nothing here knows about optimizers: ``samkit.optim`` adapts these functions to
``torch.optim``, and chapters 3 and 10 derive them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NORMS = ("l2", "linf")
ADAPTIVE = (False, "weights", "all")


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    r"""The Euclidean norm of a list of tensors, taken as one long vector.

    .. math:: \|v\|_2 = \Bigl(\sum_j v_j^2\Bigr)^{1/2}

    The sum runs over every entry of every tensor. Half-precision tensors are summed in float32, where the squares
    neither overflow nor vanish.

    Parameters
    ----------
    tensors : sequence of Tensor
        Any shapes; the devices and dtypes may differ.

    Returns
    -------
    Tensor
        A scalar tensor on the first tensor's device, float32 or float64. An empty list has norm 0.

    Examples
    --------
    >>> import torch
    >>> from samkit.perturb import global_norm
    >>> global_norm([torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])])
    tensor(5.)
    """
    if not tensors:
        return torch.zeros(())
    halves = any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32 if halves else None)
    first = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]))


def scaling(params: Sequence[Tensor], adaptive: str | bool, eta: float = 0.0) -> list[Tensor] | None:
    r"""The elementwise scaling :math:`T` of adaptive SAM, or None when the geometry is not adaptive.

    .. math:: T_j = |\theta_j| + \eta

    Parameters
    ----------
    params : sequence of Tensor
        The weights :math:`\theta`.
    adaptive : False, "weights" or "all"
        ``"all"`` scales every parameter. ``"weights"`` scales tensors with two or more dimensions and leaves
        biases and normalisation gains, which have one, at :math:`T = 1`. True means ``"all"``.
    eta : float
        Lets weights near zero move too. With 0 the geometry is exactly invariant under rescaling; the ASAM paper
        uses 0.01.

    Returns
    -------
    list of Tensor or None
        One tensor for each parameter, of the same shape.

    Examples
    --------
    >>> import torch
    >>> from samkit.perturb import scaling
    >>> scaling([torch.tensor([[-2.0]]), torch.tensor([3.0])], "weights", eta=0.5)
    [tensor([[2.5000]]), tensor([1.])]

    Notes
    -----
    Source: Kwon et al. 2021 (ASAM, arXiv 2102.11600), section 4. Derived in chapter 2.
    """
    if adaptive is False:
        return None
    return [p.abs() + eta if adaptive in (True, "all") or p.dim() > 1 else torch.ones_like(p) for p in params]


def ascent_direction(
    grads: Sequence[Tensor], norm: str = "l2", scales: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], Tensor]:
    r"""The direction :math:`d` and length :math:`\ell` of the perturbation :math:`\rho\,d/\ell`.

    =========  ==============================  ==================
    norm       :math:`d`                       :math:`\ell`
    =========  ==============================  ==================
    ``"l2"``   :math:`T^2 g`                   :math:`\|T g\|_2`
    ``"linf"`` :math:`T\,\mathrm{sign}(T g)`   1
    =========  ==============================  ==================

    Without ``scales``, :math:`T = 1`. For a zero gradient the length is reported as infinite, so that the
    perturbation is zero.

    Parameters
    ----------
    grads : sequence of Tensor
        The gradient :math:`g`.
    norm : "l2" or "linf"
        The norm of the ball.
    scales : sequence of Tensor, optional
        :math:`T`, from :func:`~samkit.perturb.scaling`.

    Returns
    -------
    directions : list of Tensor
        :math:`d`, shaped like the gradient. For the plain l_2 ball these are the gradient tensors themselves.
    length : Tensor
        :math:`\ell`, a scalar tensor.

    Raises
    ------
    ValueError
        If the norm is unknown.

    Examples
    --------
    >>> import torch
    >>> from samkit.perturb import ascent_direction
    >>> ascent_direction([torch.tensor([3.0, -4.0])])
    ([tensor([ 3., -4.])], tensor(5.))

    Notes
    -----
    Source: Foret et al. 2021 (arXiv 2010.01412), equation 2; Kwon et al. 2021 (arXiv 2102.11600), equation 6 and
    the l_inf form of section 4. Derived in chapter 3.
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")
    grads = list(grads)
    scaled = grads if scales is None else torch._foreach_mul(grads, scales)
    if norm == "linf":
        signs = torch._foreach_sign(scaled)
        directions = signs if scales is None else torch._foreach_mul(signs, scales)
        return directions, torch.ones(())
    length = global_norm(scaled)
    directions = grads if scales is None else torch._foreach_mul(scaled, scales)
    return directions, torch.where(length == 0, math.inf, length)


def perturbation(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    rho: float,
    *,
    norm: str = "l2",
    adaptive: str | bool = False,
    eta: float = 0.0,
) -> list[Tensor]:
    r"""SAM's perturbation: the highest point of the linearised loss in a ball of radius rho.

    .. math:: \varepsilon = \operatorname*{arg\,max}_{\|T^{-1}\varepsilon\| \le \rho} \langle g, \varepsilon\rangle
        = \rho\,\frac{T^2 g}{\|T g\|_2} \ (\ell_2), \qquad \rho\,T\,\mathrm{sign}(T g) \ (\ell_\infty)

    Parameters
    ----------
    params, grads : sequence of Tensor
        The weights and the gradient there, shaped alike. The weights matter to the adaptive geometry only.
    rho : float
        The radius, at least 0.
    norm : "l2" or "linf"
        The norm of the ball; l_2 runs over all tensors together.
    adaptive, eta
        See :func:`~samkit.perturb.scaling`.

    Returns
    -------
    list of Tensor
        The perturbation, shaped like the weights; zero where the gradient is zero.

    Raises
    ------
    ValueError
        If the norm is unknown.

    Examples
    --------
    >>> import torch
    >>> from samkit.perturb import perturbation
    >>> theta, g = [torch.zeros(2)], [torch.tensor([3.0, -4.0])]
    >>> perturbation(theta, g, rho=0.5)
    [tensor([ 0.3000, -0.4000])]
    >>> perturbation(theta, g, rho=0.5, norm="linf")
    [tensor([ 0.5000, -0.5000])]

    Notes
    -----
    Source: Foret et al. 2021 (arXiv 2010.01412), equation 2; adaptive: Kwon et al. 2021 (arXiv 2102.11600).
    Derived in chapter 3.
    """
    directions, length = ascent_direction(grads, norm, scaling(params, adaptive, eta))
    return [d * (rho / length).to(d.device, d.dtype) for d in directions]


def add_scaled_(params: Sequence[Tensor], directions: Sequence[Tensor], scale: Tensor) -> None:
    """Add ``scale * directions`` to the parameters in place, in as few calls as the device allows."""
    for device_params, device_directions in _by_device_and_dtype(params, directions):
        first = device_params[0]
        local = scale.to(first.device)
        if _has_fused_sgd(first):
            # A step of gradient ascent with a learning rate that stays on the device: one kernel, no temporaries.
            torch._fused_sgd_(
                device_params,
                device_directions,
                [],
                weight_decay=0.0,
                momentum=0.0,
                lr=local,
                dampening=0.0,
                nesterov=False,
                maximize=True,
                is_first_step=False,
            )
        else:
            torch._foreach_add_(device_params, torch._foreach_mul(device_directions, local))


def _has_fused_sgd(param: Tensor) -> bool:
    # CUDA's kernel reads the learning rate as float32, too coarse for float64 weights.
    return param.device.type == "cpu" or (param.device.type == "cuda" and param.dtype != torch.float64)


def _by_device_and_dtype(params: Sequence[Tensor], others: Sequence[Tensor]) -> list[tuple[list, list]]:
    buckets: dict[tuple, tuple[list, list]] = {}
    for p, other in zip(params, others, strict=True):
        bucket = buckets.setdefault((p.device, p.dtype, other.dtype), ([], []))
        bucket[0].append(p)
        bucket[1].append(other)
    return list(buckets.values())


def sam_gradient(
    gradient: Callable[[list[Tensor]], list[Tensor]],
    params: Sequence[Tensor],
    rho: float,
    *,
    norm: str = "l2",
    ascent_steps: int = 1,
    adaptive: str | bool = False,
    eta: float = 0.0,
) -> list[Tensor]:
    r"""The gradient SAM descends along: the gradient at the ascent point.

    .. math:: g_k = \nabla L(\theta_k), \qquad
        \theta_{i+1} = \theta_i + \tfrac{1}{k}\,\varepsilon_{\rho}\bigl(\nabla L(\theta_i)\bigr)

    Parameters
    ----------
    gradient : callable
        Maps a list of weights to the gradient there, a list shaped alike.
    params : sequence of Tensor
        The weights :math:`\theta_0`; they are not changed.
    rho : float
        The radius, at least 0: each of the k steps has length rho/k.
    ascent_steps : int
        k, the number of ascent steps.
    norm, adaptive, eta
        See :func:`~samkit.perturb.perturbation`. The adaptive scaling is taken at :math:`\theta_0`.

    Returns
    -------
    list of Tensor
        :math:`g_k`, shaped like the weights.

    Raises
    ------
    ValueError
        If the norm is unknown.

    Examples
    --------
    On the loss x^2 the gradient is 2x: SAM looks rho further up the slope.

    >>> import torch
    >>> from samkit.perturb import sam_gradient
    >>> sam_gradient(lambda theta: [2 * theta[0]], [torch.tensor([1.0])], rho=0.5)
    [tensor([3.])]

    Notes
    -----
    Source: Foret et al. 2021 (arXiv 2010.01412), equation 3 and algorithm 1. Derived in chapter 3.
    """
    point = list(params)
    for _ in range(ascent_steps):
        step = perturbation(
            params, gradient(point), rho / ascent_steps, norm=norm, adaptive=adaptive, eta=eta
        )
        point = [p + e for p, e in zip(point, step, strict=True)]
    return gradient(point)
