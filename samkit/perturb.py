"""The mathematics of one SAM step, as pure functions on lists of tensors.

The weights are a list of tensors, one for each parameter, and so are a gradient and a perturbation; a norm
runs over the whole list. Nothing here knows about optimizers: ``samkit.optim`` adapts these functions to
``torch.optim``, and chapters 3 and 10 derive them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from samkit._arguments import integer, number

NORMS = ("l2", "linf")
ADAPTIVE = (False, "weights", "all")

# Up to this many entries a tensor, the CPU norms one concatenation faster than many tensors.
_SMALL = 4096


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    r"""The Euclidean norm of a list of tensors, taken as one long vector.

    .. math:: \|v\|_2 = \Bigl(\sum_j v_j^2\Bigr)^{1/2}

    The sum runs over every entry of every tensor. Half-precision tensors are summed in float32, where the
    squares do not overflow. Squares can still vanish: in float32 a norm below about 1e-19 is not to be
    trusted.

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
    tensors = list(tensors)
    if not tensors:
        return torch.zeros(())
    dtypes = {t.dtype for t in tensors}
    wide = torch.float32 if dtypes & {torch.bfloat16, torch.float16} else None
    first = tensors[0].device
    if first.type == "cpu" and len(dtypes) == 1 and sum(map(Tensor.numel, tensors)) < _SMALL * len(tensors):
        return torch.linalg.vector_norm(torch._utils._flatten_dense_tensors(tensors), dtype=wide)
    norms = torch._foreach_norm(tensors, 2, dtype=wide)
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
        Lets weights near zero move too. With 0 the geometry is exactly invariant under rescaling; the ASAM
        paper uses 0.01.

    Returns
    -------
    list of Tensor or None
        One tensor for each parameter, of the same shape.

    Raises
    ------
    ValueError
        If ``adaptive`` is something else.

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
    if adaptive not in (True, *ADAPTIVE):
        raise ValueError(f"adaptive must be False, True, 'weights' or 'all', got {adaptive!r}")
    if not adaptive:
        return None
    return [p.abs() + eta if adaptive in (True, "all") or p.dim() > 1 else torch.ones_like(p) for p in params]


def ascent_direction(
    grads: Sequence[Tensor], norm: str = "l2", scales: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], Tensor]:
    r"""The direction :math:`d` and its length :math:`\ell`: SAM perturbs by :math:`\rho\,d/\ell`.

    ==========  ================================  ==================
    norm        direction :math:`d`               length :math:`\ell`
    ==========  ================================  ==================
    ``"l2"``    :math:`T^2 g`                     :math:`\|T g\|_2`
    ``"linf"``  :math:`T\,\mathrm{sign}(T g)`     1
    ==========  ================================  ==================

    Without ``scales``, :math:`T = 1`.

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
        :math:`\ell`, a scalar tensor; 0 for a zero gradient in l_2.

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

    Notes ----- Source: Foret et al. 2021 (arXiv 2010.01412), equation 2; Kwon et al. 2021 (arXiv 2102.11600)
    for the adaptive forms. Derived in chapter 3.
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(map(repr, NORMS))}, got {norm!r}")
    grads = list(grads)
    scaled = grads if scales is None else torch._foreach_mul(grads, scales)
    if norm == "linf":
        signs = torch._foreach_sign(scaled)
        directions = signs if scales is None else torch._foreach_mul(signs, scales)
        return directions, torch.ones((), device=grads[0].device if grads else None)
    directions = grads if scales is None else torch._foreach_mul(scaled, scales)
    return directions, global_norm(scaled)


def on_host_if_free(scalar: Tensor) -> Tensor | float:
    """A scalar tensor of the CPU as a float, which Python handles faster; reading others would wait."""
    return scalar.item() if scalar.device.type == "cpu" else scalar


def over_length(rho: float, length: Tensor) -> Tensor | float:
    r"""The factor :math:`\rho/\ell` in front of a direction; 0 when the length is 0, for then there is none.

    Parameters
    ----------
    rho : float
        The radius.
    length : Tensor
        A scalar tensor, at least 0.

    Returns
    -------
    float or Tensor
        A float if the length is on the CPU, otherwise a scalar tensor on its device.

    Examples
    --------
    >>> import torch
    >>> from samkit.perturb import over_length
    >>> over_length(1.0, torch.tensor(4.0)), over_length(1.0, torch.tensor(0.0))
    (0.25, 0.0)
    """
    length = on_host_if_free(length)
    if isinstance(length, float):
        return rho / length if length != 0 else 0.0
    return torch.where(length == 0, 0.0, rho / length)


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

    .. math:: \varepsilon
        = \operatorname*{arg\,max}_{\|T^{-1}\varepsilon\| \le \rho} \langle g, \varepsilon\rangle
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
        If the norm or ``adaptive`` is unknown, or rho or eta is negative or not finite.
    TypeError
        If rho or eta is not a number.

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
    rho, eta = number("rho", rho), number("eta", eta)
    directions, length = ascent_direction(grads, norm, scaling(params, adaptive, eta))
    return times(directions, over_length(rho, length))


def add_scaled_(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    scale: Tensor | float,
    blocked: Tensor | bool | None = None,
) -> None:
    """Add ``scale * directions`` to the parameters in place, in as few calls as the device allows.

    Parameters
    ----------
    params, directions : sequence of Tensor
        Shaped alike, with dtypes alike.
    scale : Tensor or float
        A scalar tensor is not read on the host.
    blocked : Tensor or bool, optional
        Where it is true, the parameters stay as they are, whatever the directions hold.

    Examples
    --------
    >>> import torch
    >>> from samkit.perturb import add_scaled_
    >>> theta = [torch.tensor([1.0, 2.0])]
    >>> add_scaled_(theta, [torch.tensor([1.0, -1.0])], torch.tensor(0.5))
    >>> theta
    [tensor([1.5000, 1.5000])]
    """
    if blocked is True:
        return
    buckets = Optimizer._group_tensors_by_device_and_dtype([list(params), list(directions)])
    for (device, dtype), ((own_params, own_directions), _) in buckets.items():
        if _has_fused_sgd(device, dtype):
            # One step of gradient ascent whose learning rate may stay on the device: one kernel, no
            # temporaries.
            torch._fused_sgd_(
                own_params,
                own_directions,
                [],
                weight_decay=0.0,
                momentum=0.0,
                lr=scale if isinstance(scale, float) else scale.to(device, torch.float32),
                dampening=0.0,
                nesterov=False,
                maximize=True,
                is_first_step=False,
                found_inf=blocked.to(device, torch.float32) if isinstance(blocked, Tensor) else None,
            )
        else:
            steps = times(own_directions, scale)
            if isinstance(blocked, Tensor):
                steps = [step.masked_fill_(blocked.to(device), 0.0) for step in steps]
            torch._foreach_add_(own_params, steps)


def _has_fused_sgd(device: torch.device, dtype: torch.dtype) -> bool:
    # CUDA's kernel reads the learning rate as float32, too coarse for float64 weights.
    return device.type == "cpu" or (device.type == "cuda" and dtype != torch.float64)


def times(tensors: Sequence[Tensor], factor: Tensor | float) -> list[Tensor]:
    """The tensors times a scalar, wherever they live."""
    if isinstance(factor, float) or len({t.device for t in tensors}) == 1:
        return list(torch._foreach_mul(list(tensors), _on(tensors[0], factor)))
    return [t * _on(t, factor) for t in tensors]


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
    ValueError, TypeError
        As for :func:`~samkit.perturb.perturbation`, and for ``ascent_steps``.

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
    for _ in range(integer("ascent_steps", ascent_steps, 1)):
        step = perturbation(
            params, gradient(point), rho / ascent_steps, norm=norm, adaptive=adaptive, eta=eta
        )
        point = [p + e for p, e in zip(point, step, strict=True)]
    return gradient(point)


def angle(v0: Sequence[Tensor], v1: Sequence[Tensor]) -> Tensor:
    r"""The angle between two vectors, accurate at every angle.

    .. math:: \psi = 2\,\mathrm{atan2}\bigl(\|u_0 - u_1\|,\ \|u_0 + u_1\|\bigr), \qquad u_i = v_i/\|v_i\|

    The arccosine of the inner product loses half the digits near parallel and opposite vectors, and rounding
    can push its argument out of [-1, 1].

    Parameters
    ----------
    v0, v1 : sequence of Tensor
        Two vectors, as lists of tensors shaped alike.

    Returns
    -------
    Tensor
        A scalar tensor between 0 and pi, float32 or float64; 0 if one of the vectors is zero.

    Examples
    --------
    >>> import torch
    >>> from samkit.perturb import angle
    >>> angle([torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 5.0])])
    tensor(1.5708)

    Notes ----- Source: Kahan 2006, "How futile are mindless assessments of roundoff in floating-point
    computation?", section 12. Derived in chapter 10.
    """
    return Plane.through(v0, v1).angle


def slerp(v0: Sequence[Tensor], v1: Sequence[Tensor], alpha: float) -> list[Tensor]:
    r"""The unit vector at position alpha on the great circle from v0 (alpha = 0) to v1 (alpha = 1) and
    beyond.

    .. math:: v(\alpha) = \frac{\sin((1-\alpha)\psi)\,u_0 + \sin(\alpha\psi)\,u_1}{\sin\psi}, \qquad
        u_i = v_i/\|v_i\|

    Where :math:`\sin\psi` vanishes the formula does not say where to go: for parallel and for opposite
    vectors, and when one of them is zero, the result is :math:`u_1`.

    Parameters
    ----------
    v0, v1 : sequence of Tensor
        Two vectors, as lists of tensors shaped alike.
    alpha : float
        The position; below 0 and above 1 are allowed.

    Returns
    -------
    list of Tensor
        :math:`v(\alpha)`, shaped like the vectors, of length 1.

    Examples
    --------
    >>> import torch
    >>> from samkit.perturb import slerp
    >>> slerp([torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 5.0])], 0.5)
    [tensor([0.7071, 0.7071])]

    Notes
    -----
    Source: Chen and Zhou 2026 (arXiv 2603.10048); the formula is Shoemake's, 1985. Derived in chapter 10.
    """
    return Plane.through(v0, v1).direction(alpha)


@dataclass(frozen=True)
class Plane:
    r"""The plane of two vectors, and the unit circle in it: what XSAM searches.

    Parameters
    ----------
    unit0, unit1 : list of Tensor
        The two vectors at length 1 (or 0, if they were zero), in float32 at least. Tensors that are alike are
        strung together into one: a few long vectors are faster than many short ones.
    shapes : list of Tensor
        Tensors of the shapes to return.
    length1 : Tensor
        The length that the second vector had, a scalar tensor.
    angle : Tensor
        The angle between them in radians, see :func:`~samkit.perturb.angle`.

    Examples
    --------
    >>> import torch
    >>> from samkit.perturb import Plane
    >>> plane = Plane.through([torch.tensor([2.0, 0.0])], [torch.tensor([0.0, 5.0])])
    >>> plane.angle, plane.direction(0.0)
    (tensor(1.5708), [tensor([1., 0.])])

    Notes
    -----
    Source: Chen and Zhou 2026 (arXiv 2603.10048). Derived in chapter 10.
    """

    unit0: list[Tensor]
    unit1: list[Tensor]
    shapes: list[Tensor]
    length1: Tensor
    angle: Tensor

    @classmethod
    def through(cls, v0: Sequence[Tensor], v1: Sequence[Tensor]) -> Plane:
        """The plane of two vectors, given as lists of tensors shaped alike."""
        shapes, unit0, unit1 = list(v1), _strung(v0), _strung(v1)
        length0, length1 = _normalise_(unit0), _normalise_(unit1)
        between = [a - b for a, b in zip(unit0, unit1, strict=True)]
        apart = global_norm(between)
        for a, b, out in zip(unit0, unit1, between, strict=True):
            torch.add(a, b, out=out)
        psi = 2 * torch.atan2(apart, global_norm(between))
        return cls(unit0, unit1, shapes, length1, torch.where((length0 == 0) | (length1 == 0), 0.0, psi))

    def direction(self, alpha: float) -> list[Tensor]:
        """The unit vector at position alpha, see :func:`~samkit.perturb.slerp`."""
        return self._at(alpha, 1.0)

    def gradient(self, alpha: float) -> list[Tensor]:
        """XSAM's gradient at position alpha, see :func:`~samkit.perturb.xsam_gradient`."""
        return self._at(alpha, self.length1)

    def _at(self, alpha: float, length: Tensor | float) -> list[Tensor]:
        sine = torch.sin(self.angle)
        # Within rounding of parallel or opposite, the two vectors no longer span a plane.
        flat = sine.abs() <= 8 * torch.finfo(sine.dtype).eps
        weight0 = torch.where(flat, 0.0, torch.sin((1 - alpha) * self.angle) / sine)
        weight1 = torch.where(flat, 1.0, torch.sin(alpha * self.angle) / sine)
        weight0, weight1 = on_host_if_free(weight0 * length), on_host_if_free(weight1 * length)
        vector = [a * _on(a, weight0) for a in self.unit0]
        for part, b in zip(vector, self.unit1, strict=True):
            if isinstance(weight1, float):
                part.add_(b, alpha=weight1)
            else:
                part.addcmul_(b, _on(b, weight1))
        return self._shaped(vector)

    def _shaped(self, vector: Sequence[Tensor]) -> list[Tensor]:
        if len(vector) == len(self.shapes):
            return [part.view_as(shape) for part, shape in zip(vector, self.shapes, strict=True)]
        return list(torch._utils._unflatten_dense_tensors(vector[0], self.shapes))


def _strung(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy: one long vector if the tensors are alike, else tensor by tensor; float32 at least."""
    tensors = at_least_float32(tensors)
    if len(tensors) > 1 and len({(t.device, t.dtype) for t in tensors}) == 1:
        return [torch._utils._flatten_dense_tensors(tensors)]
    return [t.detach().clone() for t in tensors]


def _normalise_(vector: list[Tensor]) -> Tensor:
    length = global_norm(vector)
    for part in vector:
        part.mul_(_on(part, over_length(1.0, length)))
    return length


def _on(tensor: Tensor, factor: Tensor | float) -> Tensor | float:
    return factor if isinstance(factor, float) else factor.to(tensor.device)


def at_least_float32(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Half-precision tensors in float32, the others as they are."""
    return [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in tensors]


def xsam_gradient(displacement: Sequence[Tensor], gradient: Sequence[Tensor], alpha: float) -> list[Tensor]:
    r"""The gradient XSAM descends along: the ascent point's gradient, turned in its plane with the
    displacement.

    .. math:: \|g_k\|\; v(\alpha), \qquad v_0 = \frac{\theta_k - \theta_0}{\|\theta_k - \theta_0\|}, \quad
        v_1 = \frac{g_k}{\|g_k\|}

    ``alpha = 0`` is the direction of the ascent (for one step, of the plain gradient); ``alpha = 1`` is SAM.

    Parameters
    ----------
    displacement : sequence of Tensor
        :math:`\theta_k - \theta_0`, as it was added: in half precision a difference of weights is mostly
        rounding.
    gradient : sequence of Tensor
        :math:`g_k`, the gradient at :math:`\theta_k`, shaped like the displacement.
    alpha : float
        The position on the circle.

    Returns
    -------
    list of Tensor
        The gradient for the base optimizer, in float32 at least.

    Examples
    --------
    >>> import torch
    >>> from samkit.perturb import xsam_gradient
    >>> xsam_gradient([torch.tensor([0.1, 0.0])], [torch.tensor([0.0, 5.0])], alpha=0.0)
    [tensor([5., 0.])]

    Notes
    -----
    Source: Chen and Zhou 2026 (arXiv 2603.10048). Derived in chapter 10.
    """
    return Plane.through(displacement, gradient).gradient(alpha)
