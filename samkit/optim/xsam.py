"""XSAM: search the plane of ascent and gradient for the highest direction (chapter 10)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from samkit._arguments import integer, number
from samkit.optim.randomness import RandomState
from samkit.optim.ranks import average_gradients_over_ranks, mean_over_ranks
from samkit.optim.sam import SAM, Closure, scalar
from samkit.perturb import Plane, at_least_float32, times


class XSAM(SAM):
    r"""SAM whose direction is searched for: along a circle, where is the loss highest?

    .. math:: v(\alpha) = \frac{\sin((1-\alpha)\psi)\,v_0 + \sin(\alpha\psi)\,v_1}{\sin\psi}, \qquad
        \alpha^* = \operatorname*{arg\,max}_{\alpha} L(\theta_0 + \rho_{\max} v(\alpha)), \qquad
        \theta \leftarrow \mathrm{base}\bigl(\theta_0, \|g_k\|\, v(\alpha^*)\bigr)

    Here :math:`v_0` is the direction of the ascent, :math:`v_1` that of the gradient :math:`g_k` at the
    ascent point and :math:`\psi` the angle between them. ``alpha = 1`` is SAM. The search costs
    ``alpha_samples`` forward passes; it runs at steps 0, n, 2n, ... with n = ``search_every``, and its
    result serves until the next.

    It steps as :class:`~samkit.optim.SAM` does, m-sharpness included: each sub-batch is mixed in its own
    plane, with one alpha from the mean of the probes. By hand, :meth:`mix` comes between ``restore()`` and
    the base step.

    Parameters
    ----------
    params, base_optimizer, rho, ascent_steps, nonfinite, replay_rng, model, **base_kwargs
        As for :class:`~samkit.optim.SAM`.
    search_every : int or None
        Steps from one search to the next, usually ``len(loader)``. None never searches and keeps ``alpha``.
    rho_max : float, optional
        The radius of the probes; by default twice the largest ``rho`` of the groups at the time of the
        search.
    alpha_max : float
        The end of the grid, which starts at 0.
    alpha_samples : int
        The number of points of the grid, at least 2.
    alpha : float
        The position until the first search.
    norm, adaptive
        Only ``"l2"`` and False: the circle is Euclidean.

    Attributes
    ----------
    alpha : float
        The position in use.
    steps : int
        The steps taken; a skipped step does not count.

    Raises
    ------
    ValueError
        If an argument has a value that makes no sense, or asks for another norm.
    TypeError
        If an argument is of the wrong type.

    Examples
    --------
    In one dimension there is nothing to turn: the ascent and the gradient are parallel, and XSAM is SAM.

    >>> import torch
    >>> from samkit.optim import XSAM
    >>> x = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = XSAM([x], torch.optim.SGD, rho=0.5, search_every=10, lr=0.1)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (x**2).sum()
    ...     if loss.requires_grad:
    ...         loss.backward()
    ...     return loss
    >>> optimizer.step(closure).item(), x.item(), optimizer.alpha
    (1.0, 0.699999988079071, 0.0)

    Notes
    -----
    Source: Chen and Zhou 2026 (arXiv 2603.10048). Derived in chapter 10.
    """

    _settings = (*SAM._settings, "search_every", "rho_max", "alpha_max", "alpha_samples", "_warned")
    _saved = (*SAM._saved, "alpha", "steps")
    # Each rank mixes in its own plane, so the gradients are averaged after the mixing.
    _last_pass_is_shared = False

    def __init__(
        self,
        params: Iterable,
        base_optimizer: Callable[..., Optimizer] = SGD,
        *,
        search_every: int | None,
        rho: float = 0.05,
        rho_max: float | None = None,
        alpha_max: float = 2.0,
        alpha_samples: int = 21,
        alpha: float = 1.0,
        norm: str = "l2",
        adaptive: bool = False,
        **kwargs: Any,
    ):
        if norm != "l2" or adaptive is not False:
            raise ValueError(
                f"XSAM searches a Euclidean circle: norm must be 'l2' and adaptive False, got norm={norm!r} "
                f"and adaptive={adaptive!r}; use SAM for other balls"
            )
        self.search_every = None if search_every is None else integer("search_every", search_every, 1)
        self.rho_max = None if rho_max is None else number("rho_max", rho_max)
        self.alpha_max = number("alpha_max", alpha_max, positive=True)
        self.alpha_samples = integer("alpha_samples", alpha_samples, 2)
        self.alpha = number("alpha", alpha)
        self.steps = 0
        self._warned = False
        super().__init__(params, base_optimizer, rho=rho, **kwargs)

    def step(
        self,
        closure: Closure | Sequence[Closure] | None = None,
        *,
        forward: Closure | Sequence[Closure] | None = None,
        ascent_context: Callable[[], AbstractContextManager] | None = None,
    ) -> Any:
        """One XSAM step; see :meth:`samkit.optim.SAM.step`.

        Parameters
        ----------
        closure : callable or sequence of callables
            As for SAM. In a search it is called under ``torch.no_grad()``, where ``backward`` cannot run:
            hence the ``if loss.requires_grad`` of the convention.
        forward : callable or sequence of callables, optional
            Evaluates the loss alone, for closures that always call ``backward``; one for each closure.
        ascent_context : callable, optional
            As for SAM, with ``ddp.no_sync``: here every pass is local, each rank mixes its own gradient, and
            the mixed gradients and the probes are averaged over the ranks.

        Returns
        -------
        Tensor or float
            The closure's loss at theta_0; for several closures, the mean of these.

        Raises
        ------
        RuntimeError
            If the closure calls ``backward`` during a search, and as for SAM.
        ValueError
            If ``forward`` has another length than the closures, and as for SAM.
        """
        closures = self._closures(closure)
        forwards = closures if forward is None else self._closures(forward)
        if len(forwards) != len(closures):
            raise ValueError(f"step() got {len(closures)} closures but {len(forwards)} forward functions")
        self._forwards = iter(forwards)
        self._over_ranks = ascent_context is not None
        try:
            return self._step(closures, ascent_context)
        finally:
            self._over_ranks = False
            self._displacement, self._turns = {}, []

    def ascend(self) -> None:
        """Climb one step, see :meth:`samkit.optim.SAM.ascend`, and remember where to."""
        if self._climbed == 0:
            self._displacement = {}
        super().ascend()

    def mix(self, forward: Closure | None = None) -> None:
        """By hand, after ``restore()``: turn the gradients in ``.grad`` into XSAM's, with a search when it
        is due.

        Loss scaling does no harm: the direction does not depend on it, and the length keeps it.

        Parameters
        ----------
        forward : callable, optional
            Evaluates the loss of the batch; needed at steps 0, n, 2n, ...

        Raises
        ------
        RuntimeError
            If the weights are not home, or there was no ascent.
        ValueError
            If a search is due and there is no ``forward``.
        """
        if self._climbed or not self._restored:
            raise RuntimeError("mix() comes after ascend(), the second pass and restore()")
        if self._due:
            if forward is None:
                raise ValueError(
                    f"a search is due at step {self.steps}: pass forward=, a function that returns the loss"
                )
            self._note_gradients()
            if not self._all_finite():  # leave the bad gradient for descend() or the GradScaler to refuse
                self._displacement = {}
                return
        turn = self._take_turn(forward, RandomState.of(self._parameters()))
        if self._due:
            self._search([turn])
        turn.write(self.alpha)

    def descend(self, forward: Closure | None = None) -> None:
        """``restore()`` if the weights are not home, :meth:`mix` if that was not done, and the base step.

        Parameters
        ----------
        forward : callable, optional
            As for :meth:`mix`.

        Raises
        ------
        RuntimeError
            If there was no ``ascend()`` before.
        ValueError
            If a search is due and there is no ``forward``.
        """
        if self._climbed:
            self.restore()
        if self._displacement:
            self.mix(forward)
        super().descend()

    def _before_base_step(self) -> None:
        if self._displacement and not self._climbed:
            raise RuntimeError(
                "the base optimizer was stepped with SAM's gradient: call mix() after restore()"
            )
        super()._before_base_step()

    def _after_base_step(self) -> None:
        super()._after_base_step()
        self.steps += 1

    @property
    def _due(self) -> bool:
        return self.search_every is not None and self.steps % self.search_every == 0

    def _make_workspace(self) -> None:
        super()._make_workspace()
        # theta_k - theta_0 as it was added, never by subtraction.
        self._displacement: dict[Tensor, Tensor] = {}
        self._turns: list[_Turn] = []
        self._forwards: Iterator[Closure] = iter(())
        self._over_ranks = False

    def _climb(
        self,
        params: list[Tensor],
        directions: list[Tensor],
        scale: Tensor | float,
        blocked: Tensor | bool | None,
    ) -> None:
        super()._climb(params, directions, scale, blocked)
        moves = times(at_least_float32(directions), scale)
        for p, move in zip(params, moves, strict=True):
            self._displacement[p] = self._displacement[p].add_(move) if p in self._displacement else move

    def _passes(self, closure: Closure, ascent_context: Callable[[], AbstractContextManager] | None) -> Any:
        rng = RandomState.of(self._parameters()) if self._due else None
        loss = super()._passes(closure, ascent_context)
        forward = next(self._forwards)
        if self._displacement:
            turn = self._take_turn(forward, rng)
            if self._due:
                self._turns.append(turn)
                self.zero_grad()
            else:
                turn.write(self.alpha)
        return loss

    def _add_to_mean(self, count: int) -> None:
        if not self._turns:  # else the gradient is not known before the search
            super()._add_to_mean(count)

    def _settle(self) -> None:
        if self._turns:
            self._search(self._turns)
            for turn in self._turns:
                turn.write(self.alpha)
                if len(self._turns) > 1:
                    super()._add_to_mean(len(self._turns))
        super()._settle()
        if self._over_ranks:
            average_gradients_over_ranks(self._parameters())

    def _take_turn(self, forward: Closure | None, rng: RandomState | None) -> _Turn:
        signs = {-1 if group.get("maximize") else 1 for group in self.param_groups}
        if len(signs) > 1:
            raise ValueError("XSAM cannot maximise some groups and minimise others: its probes look one way")
        sign = signs.pop()
        moved = self._displacement
        params = [p for p in self._parameters() if p in moved or p.grad is not None]
        v0 = [moved[p] if p in moved else torch.zeros_like(p) for p in params]
        v1 = [torch.zeros_like(p) if p.grad is None else -p.grad if sign < 0 else p.grad for p in params]
        turn = _Turn(params, Plane.through(v0, v1), sign, forward, rng)
        self._displacement = {}
        return turn

    def _search(self, turns: list[_Turn]) -> None:
        """Set alpha to the grid point where the mean loss of the probes is highest."""
        grid = torch.linspace(0, self.alpha_max, self.alpha_samples, dtype=torch.float64).tolist()
        curve = sum(self._probe(turn, grid) for turn in turns) / len(turns)
        if self._over_ranks:
            curve = mean_over_ranks(curve.to(self._parameters()[0].device)).cpu()
        heights = [
            turns[0].sign * height if math.isfinite(height) else -math.inf for height in curve.tolist()
        ]
        best = max(range(len(grid)), key=heights.__getitem__)  # of equal heights, the first
        if heights[best] == -math.inf:
            return  # no probe is finite: keep alpha
        self.alpha = grid[best]
        if best == len(grid) - 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"XSAM's search ended at alpha_max={self.alpha_max}, so the maximum may lie beyond it: the "
                "range or rho_max may not fit this problem (try a larger alpha_max or a smaller rho_max)",
                stacklevel=2,
            )

    @torch.no_grad()
    def _probe(self, turn: _Turn, grid: list[float]) -> Tensor:
        """The loss along the circle, without gradients, with the same random numbers at every point."""
        radius = self.rho_max
        if radius is None:
            radius = 2 * max(group["rho"] for group in self.param_groups)
        afterwards = RandomState.of(turn.params)
        self._away.watch()
        self._home.keep(turn.params)
        home = self._home.values_of(turn.params)
        losses = []
        try:
            for alpha in grid:
                torch._foreach_copy_(turn.params, home)
                torch._foreach_add_(turn.params, turn.plane.direction(alpha), alpha=radius)
                torch.clear_autocast_cache()
                turn.rng.replay()
                losses.append(self._height(turn.forward))
        finally:
            self._come_home()
            afterwards.replay()
            self.zero_grad()  # a closure that switches gradients on has left some
        return torch.stack([loss.cpu().double() for loss in losses])

    @staticmethod
    def _height(forward: Closure) -> Tensor:
        try:
            return scalar(forward())
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise RuntimeError(
                "XSAM's probes call the closure without gradients, and it called backward(). Write "
                "`if loss.requires_grad: loss.backward()` in it, or pass step(closure, forward=...) with a "
                "function that returns the loss alone"
            ) from error


@dataclass(frozen=True)
class _Turn:
    """One gradient to be turned: its plane, and how to probe the loss there."""

    params: list[Tensor]
    plane: Plane
    sign: int
    forward: Closure | None
    rng: RandomState | None

    @torch.no_grad()
    def write(self, alpha: float) -> None:
        for p in self.params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        turned = self.plane.gradient(alpha)
        if self.sign < 0:
            turned = torch._foreach_neg(turned)
        torch._foreach_copy_([p.grad for p in self.params], turned)
