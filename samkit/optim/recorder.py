"""What a sharpness-aware step saw: lengths and angles of its gradients, one row a step (chapters 9 to 11)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from samkit.perturb import at_least_float32

_NAMES = ("g0", "g1", "gk", "step")


class Recorder:
    r"""Writes down the gradients' lengths and angles at every step, without waiting for the device.

    .. math:: G_{ij} = \langle u_i, u_j \rangle, \qquad u = (g_0,\ g_1,\ g_k,\ \text{step})

    Here :math:`g_0` is the gradient at the weights, :math:`g_1` the one after the first ascent step,
    :math:`g_k` the one at the ascent point, and ``step`` what the base optimizer descends along: for XSAM
    :math:`\|g_k\|\,v(\alpha^*)`. A step stores the 4 x 4 products on the device; :meth:`read` fetches them
    all at once. While a step is under way, four copies of the gradient are held.

    For several closures the gradients are means over the closures. A skipped step leaves no row.

    Examples
    --------
    On the loss x^2 at x = 1 with rho = 0.5 the gradients are 2 and, at 1.5, 3.

    >>> import torch
    >>> from samkit.optim import SAM, Recorder
    >>> x = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = SAM([x], torch.optim.SGD, rho=0.5, lr=0.1, recorder=Recorder())
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (x**2).sum()
    ...     loss.backward()
    ...     return loss
    >>> loss = optimizer.step(closure)
    >>> seen = optimizer.recorder.read()
    >>> seen["norm_g0"], seen["norm_step"], seen["cos_g0_step"]
    (array([2.]), array([3.]), array([1.]))
    """

    def __init__(self) -> None:
        self._now: dict[str, tuple[Tensor, int]] = {}
        self._rows: list[Tensor] = []
        self._alphas: list[float] = []

    def __len__(self) -> int:
        """The number of steps recorded."""
        return len(self._rows)

    def read(self) -> dict[str, np.ndarray]:
        """All steps so far; this is where the host waits for the device.

        Returns
        -------
        dict of str to numpy.ndarray
            Arrays of shape (steps,): ``norm_g0``, ``norm_g1``, ``norm_gk``, ``norm_step``; the cosines
            ``cos_g0_g1``, ``cos_g0_gk``, ``cos_g0_step``, ``cos_g1_gk``, ``cos_g1_step``, ``cos_gk_step``,
            NaN where a gradient is zero; and ``alpha``, XSAM's position, NaN for other optimizers.
        """
        size = len(_NAMES)
        rows = torch.stack(self._rows).cpu().double().numpy() if self._rows else np.empty((0, size, size))
        norms = np.sqrt(np.diagonal(rows, axis1=1, axis2=2))
        seen = {f"norm_{name}": norms[:, i] for i, name in enumerate(_NAMES)}
        for i, first in enumerate(_NAMES):
            for j in range(i + 1, size):
                lengths = norms[:, i] * norms[:, j]
                cosine = np.full(len(rows), math.nan)
                np.divide(rows[:, i, j], lengths, out=cosine, where=lengths > 0)
                seen[f"cos_{first}_{_NAMES[j]}"] = cosine.clip(-1, 1)
        return seen | {"alpha": np.asarray(self._alphas)}

    def clear(self) -> None:
        """Forget all steps."""
        self.forget()
        self._rows, self._alphas = [], []

    # What the optimizer calls.

    @torch.no_grad()
    def note(self, name: str, params: Sequence[Tensor]) -> None:
        """Keep the gradients in ``.grad`` as the vector ``name`` of the step under way."""
        total, count = self._now.get(name, (0, 0))
        self._now[name] = total + _gradient(params), count + 1

    @torch.no_grad()
    def close(self, params: Sequence[Tensor], alpha: float) -> None:
        """End the row, with the gradients in ``.grad`` as the step's. Without a row nothing happens."""
        if "g0" not in self._now:
            return
        self.note("step", params)
        vectors = {name: total / count for name, (total, count) in self._now.items()}
        gk = vectors.get("gk", vectors["g0"])  # without a climb there is one gradient only
        matrix = torch.stack([vectors["g0"], vectors.get("g1", gk), gk, vectors["step"]])
        # A matrix product would be rounded to half precision under autocast, and to TF32 on request.
        self._rows.append(torch.stack([(matrix * row).sum(dim=1) for row in matrix]))
        self._alphas.append(alpha)
        self.forget()

    def forget(self) -> None:
        """Drop the step under way."""
        self._now = {}


def _gradient(params: Sequence[Tensor]) -> Tensor:
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    return torch.cat([g.flatten().to(params[0].device) for g in at_least_float32(grads)])
