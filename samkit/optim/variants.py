"""What to do with the gradients met on a longer climb: average them, or step with each in turn (chapter 11).

SAM with k ascent steps meets the gradients g_1, ..., g_k and descends with the last. The two optimizers here
use them all. Their ascent is SAM's: the radius ``rho`` is the length of the whole climb, in steps of rho/k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from samkit._arguments import fraction, number
from samkit.optim.ranks import average_gradients_over_ranks
from samkit.optim.sam import SAM, Closure

Gradients = dict[Tensor, Tensor]


class _Gathering(SAM):
    """SAM that keeps g_1, ..., g_{k-1} as well; g_k is in ``.grad``, as ever."""

    _last_pass_is_shared = False  # each rank climbs on its own, and the gradients are averaged at the end

    def _make_workspace(self) -> None:
        super()._make_workspace()
        self._met: list[Gradients] = []
        self._over_ranks = False

    def _step(
        self, closures: list[Closure], ascent_context: Callable[[], AbstractContextManager] | None
    ) -> Any:
        self._over_ranks = ascent_context is not None
        return super()._step(closures, ascent_context)

    def ascend(self) -> None:
        """Climb one step, see :meth:`samkit.optim.SAM.ascend`, and keep the gradient of the place left."""
        first = self._climbed == 0
        super().ascend()
        if first:
            self._met = []
        else:
            self._met.append({p: grad.clone() for p, grad in self._gradients().items()})

    def _passes(self, closure: Closure, ascent_context: Callable[[], AbstractContextManager] | None) -> Any:
        self._met = []  # without a climb nobody else would forget those of an earlier step
        return super()._passes(closure, ascent_context)

    def _settle(self) -> None:
        super()._settle()
        if self._over_ranks:
            last = self._gradients()
            for gradients in (*self._met, last):
                self._put(gradients)
                average_gradients_over_ranks(self._parameters())
                gradients.update(self._gradients())
            self._put(last)

    def _gradients(self) -> Gradients:
        return {p: p.grad for p in self._parameters() if p.grad is not None}

    def _put(self, gradients: Gradients) -> None:
        for p in self._parameters():
            p.grad = gradients.get(p)

    @torch.no_grad()
    def _average(self) -> None:
        """Put the mean of g_1, ..., g_k into ``.grad``; a gradient that is missing counts as zero."""
        if not self._met:
            return
        ways = [*self._met, self._gradients()]
        for p in self._parameters():
            own = [gradients[p] for gradients in ways if p in gradients]
            if own:
                p.grad = torch.stack(own).div_(len(ways)).sum(dim=0)  # in this order float16 cannot overflow


class AveragedSAM(_Gathering):
    r"""Multi-step SAM that descends with the mean of the gradients along the climb.

    .. math:: \theta_i = \theta_{i-1} + \frac{\rho}{k}\,\frac{\nabla L(\theta_{i-1})}
        {\|\nabla L(\theta_{i-1})\|_2}, \qquad
        \theta \leftarrow \mathrm{base}\Bigl(\theta_0, \frac{1}{k}\sum_{i=1}^{k} \nabla L(\theta_i)\Bigr)

    The gradient at :math:`\theta_0` itself is left out, so k = 1 is SAM. It costs what multi-step SAM costs,
    k + 1 gradients, and memory for the k gradients.

    Parameters, attributes and ways to step are those of :class:`~samkit.optim.SAM`. By hand, ``restore()``
    puts the mean into ``.grad``.

    Examples
    --------
    On the loss x^2 at x = 1, two steps of 0.5 meet the gradients 3 and 4.

    >>> import torch
    >>> from samkit.optim import AveragedSAM
    >>> x = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    >>> optimizer = AveragedSAM([x], torch.optim.SGD, rho=1.0, ascent_steps=2, lr=0.1)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (x**2).sum()
    ...     loss.backward()
    ...     return loss
    >>> optimizer.step(closure).item(), round(x.item(), 6)
    (1.0, 0.65)

    Notes
    -----
    Source: the mean of the gradients that Lookbehind-SAM gathers (arXiv 2307.16704), without its inner
    steps; defined here. Chen and Zhou 2026 (arXiv 2603.10048) compare with two multi-step methods, MSAM and
    LSAM, which their published code does not contain; whether this is one of them we could not find out.
    Derived in chapter 11.
    """

    def restore(self) -> None:
        """Bring the weights home, and put the mean of the gradients into ``.grad``.

        Raises
        ------
        RuntimeError
            If the weights are at home already.
        """
        super().restore()
        self._average()
        self._met = []

    def descend(self) -> None:
        """:meth:`restore` if the weights are not home, and the base step.

        Raises
        ------
        RuntimeError
            If there was no ``ascend()`` before.
        FloatingPointError
            If ``nonfinite="raise"`` and a gradient was not finite.
        """
        if self._climbed:
            self.restore()
        super().descend()

    def _passes(self, closure: Closure, ascent_context: Callable[[], AbstractContextManager] | None) -> Any:
        loss = super()._passes(closure, ascent_context)
        self._average()
        self._met = []
        return loss


class LookbehindSAM(_Gathering):
    r"""Lookbehind-SAM: k descents with the gradients met on the climb, then part of the way back.

    .. math:: \varphi_0 = \theta, \qquad
        \varphi_i = \mathrm{base}\bigl(\varphi_{i-1}, \nabla L(\theta_i)\bigr), \qquad
        \theta \leftarrow \theta + s\,(\varphi_k - \theta)

    The :math:`\theta_i` are the points of the climb, as for :class:`~samkit.optim.AveragedSAM`. The climb
    does not depend on the descents, so one gradient at each point is enough: k + 1 in all, where the
    published code computes 2k. With plain SGD as the base, :math:`s = 1/k` is averaged multi-step SAM; with
    momentum the base's memory moves on k times a step.

    Ways to step and further parameters are those of :class:`~samkit.optim.SAM`. With rho = 0 there is no
    climb, and the step is one step of the base optimizer.

    Parameters
    ----------
    params, base_optimizer, **kwargs
        As for :class:`~samkit.optim.SAM`. The paper's radius is the length of one ascent step, while ``rho``
        is that of all: pass ``rho = k * radius``.
    ascent_steps : int
        k, the number of ascent steps and of descents.
    slow_step : float
        s, the share of the way to keep, above 0 and at most 1.

    Raises
    ------
    ValueError
        If an argument has a value that makes no sense.
    TypeError
        If an argument is of the wrong type.

    Examples
    --------
    On the loss x^2 at x = 1, two steps of 0.5 meet the gradients 3 and 4: the fast weights go to 0.7 and
    0.3, and half of that way is kept.

    >>> import torch
    >>> from samkit.optim import LookbehindSAM
    >>> x = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    >>> optimizer = LookbehindSAM([x], torch.optim.SGD, rho=1.0, ascent_steps=2, slow_step=0.5, lr=0.1)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (x**2).sum()
    ...     loss.backward()
    ...     return loss
    >>> optimizer.step(closure).item(), round(x.item(), 6)
    (1.0, 0.65)

    Notes
    -----
    Source: Mordido et al. 2024 (arXiv 2307.16704), algorithm 1; their second variant, which adapts the slow
    step tensor by tensor, is left out. Derived in chapter 11.
    """

    _settings = (*SAM._settings, "slow_step")

    def __init__(
        self,
        params: Iterable,
        base_optimizer: Callable[..., Optimizer] = SGD,
        *,
        ascent_steps: int = 2,
        slow_step: float = 0.5,
        **kwargs: Any,
    ):
        self.slow_step = fraction("slow_step", number("slow_step", slow_step, positive=True))
        super().__init__(params, base_optimizer, ascent_steps=ascent_steps, **kwargs)

    def _make_workspace(self) -> None:
        super()._make_workspace()
        self._mean_met: list[Gradients] = []
        self._left_in_grad: list[tuple[int, int]] = []

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._mean_met = []

    def _add_to_mean(self, count: int) -> None:
        super()._add_to_mean(count)
        self._mean_met += [{} for _ in range(len(self._met) - len(self._mean_met))]
        for mean, met in zip(self._mean_met, self._met, strict=False):
            for p, grad in met.items():
                mean[p] = mean[p].add_(grad / count) if p in mean else grad / count

    def _settle(self) -> None:
        if self._mean_met:
            self._met, self._mean_met = self._mean_met, []
        super()._settle()

    def restore(self) -> None:
        """Bring the weights home, bit for bit; ``.grad`` then holds the last gradient alone.

        To clip, do so after each backward: here it would be too late for the others.

        Raises
        ------
        RuntimeError
            If the weights are at home already.
        """
        super().restore()
        self._left_in_grad = self._versions()

    def descend(self) -> None:
        """:meth:`restore` if the weights are not home, the k base steps, and part of the way back.

        Raises
        ------
        RuntimeError
            If there was no ``ascend()`` before, or the gradients were changed after ``restore()``.
        FloatingPointError
            If ``nonfinite="raise"`` and a gradient was not finite.
        """
        if self._restored and self._versions() != self._left_in_grad:
            raise RuntimeError(
                "the gradients were changed after restore(), but Lookbehind-SAM descends with those of the "
                "whole climb: clip after each backward instead; for a GradScaler, use AveragedSAM"
            )
        super().descend()

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(p.grad), -1 if p.grad is None else p.grad._version) for p in self._parameters()]

    @torch.no_grad()
    def _base_step(self) -> None:
        if all(group["rho"] == 0 for group in self.param_groups):
            super()._base_step()
            return
        params, last = self._parameters(), self._gradients()
        slow = [p.clone() for p in params]
        if self.recorder is not None:
            self._average()
            self.recorder.close(params, math.nan)
        try:
            for gradients in (*self._met, last):
                self._put(gradients)
                super()._base_step()
        except BaseException:
            torch._foreach_copy_(params, slow)
            raise
        finally:
            self._met = []
        for p, start in zip(params, slow, strict=True):
            p.lerp_(start, 1 - self.slow_step)

    def _before_base_step(self) -> None:
        super()._before_base_step()
        if self._restored:
            raise RuntimeError(
                "Lookbehind-SAM steps its base optimizer k times: call descend() instead of stepping the "
                "base; for a GradScaler, which steps the base itself, use AveragedSAM"
            )
