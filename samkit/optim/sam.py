"""SAM as a ``torch.optim.Optimizer``, around any base optimizer (chapter 3).

The step in one breath: evaluate the closure at theta_0, climb to the ascent point, evaluate there, come
home, and let the base optimizer descend with the gradient found up there. The mathematics is in
:mod:`samkit.perturb`; this module moves the weights, and makes sure that nothing else moves: the weights
come home bit for bit, running statistics see one forward pass, both passes draw the same dropout mask, and a
step that went wrong leaves no trace.
"""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from samkit._arguments import integer, number
from samkit.optim.randomness import RandomState
from samkit.optim.recorder import Recorder
from samkit.optim.running_stats import BufferGuard
from samkit.perturb import (
    ADAPTIVE,
    NORMS,
    add_scaled_,
    ascent_direction,
    global_norm,
    on_host_if_free,
    over_length,
    scaling,
)

Closure = Callable[[], Any]

_WAYS_TO_STEP = (
    "step(closure) with a closure that zeroes the gradients, computes the loss, calls backward and returns "
    "the loss; step([closure, ...]) for m-sharpness; or by hand backward(), ascend(), zero_grad(), "
    "backward(), descend()"
)


class SAM(Optimizer):
    r"""Sharpness-Aware Minimization: descend with the gradient from the highest point nearby.

    .. math:: \theta \leftarrow \mathrm{base}\bigl(\theta, \nabla L(\theta + \varepsilon)\bigr), \qquad
        \varepsilon = \rho\,\frac{\nabla L(\theta)}{\|\nabla L(\theta)\|_2}

    It is a ``torch.optim.Optimizer`` around a base optimizer, and the two share their parameter groups and
    state: schedulers, checkpoints and ``add_param_group`` work on either.

    There are three ways to step. ``step(closure)`` runs the closure ``ascent_steps + 1`` times on the same
    batch. ``step([closure, ...])`` is m-sharpness: each closure has its own perturbation, and the gradients
    are averaged. By hand, :meth:`ascend`, :meth:`restore` and :meth:`descend` go between your own passes.

    Parameters
    ----------
    params : iterable
        Parameters, named parameters or group dicts, as for any torch optimizer. A group may set its own
        ``rho``.
    base_optimizer : callable
        The class of the optimizer that descends, such as ``torch.optim.AdamW``.
    rho : float
        The radius, in the norm of the weights. It lives in ``param_groups`` and may be scheduled there; with
        0 the step is the base optimizer's own, bit for bit.
    norm : "l2" or "linf"
        The norm of the ball. The l_2 norm runs over all groups together: group i moves by
        :math:`\rho_i\, g_i / \|g\|_2`.
    ascent_steps : int
        How many steps, of length rho/ascent_steps each, lead to the ascent point.
    adaptive : False, True, "weights" or "all"
        Adaptive SAM, see :func:`~samkit.perturb.scaling`; True means ``"all"``.
    eta : float
        The constant in the adaptive scaling :math:`|\theta| + \eta`.
    nonfinite : "skip", "raise" or None
        What to do when a loss or a gradient of either pass is not finite. ``"skip"`` leaves weights, base
        state and running statistics as they were and counts in ``skipped_steps``; ``"raise"`` does the
        same and raises; None does not look, and saves one host synchronisation a step.
    replay_rng : bool
        Whether the passes of one step draw the same random numbers, so that dropout keeps its mask and the
        two losses differ by the perturbation alone. By hand, the passes are yours to seed.
    model : torch.nn.Module, optional
        Needed only for compiled models: its buffers are then guarded directly. Eager modules are met when
        called.
    recorder : samkit.optim.Recorder, optional
        Writes down lengths and angles of the gradients of every step.
    **base_kwargs
        Passed to the base optimizer, for example ``lr=0.1, momentum=0.9``. With ``maximize=True`` the
        perturbation turns round too: it looks for the lowest point nearby.

    Raises
    ------
    ValueError
        If an argument has a value that makes no sense, such as a negative rho or an empty parameter list.
    TypeError
        If an argument is of the wrong type.

    Examples
    --------
    On the loss x^2 at x = 1 with rho = 0.5, SAM uses the gradient at 1.5, which is 3.

    >>> import torch
    >>> from samkit.optim import SAM
    >>> x = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = SAM([x], torch.optim.SGD, rho=0.5, lr=0.1)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = (x**2).sum()
    ...     loss.backward()
    ...     return loss
    >>> optimizer.step(closure).item(), x.item()
    (1.0, 0.699999988079071)

    Notes
    -----
    Source: Foret et al. 2021 (arXiv 2010.01412), algorithm 1; m-sharpness is their section 4.1. Derived in
    chapter 3.
    """

    # What a copy takes along, what a state_dict holds, and whether data-parallel ranks share the last
    # gradient.
    _settings = ("norm", "ascent_steps", "adaptive", "eta", "nonfinite", "replay_rng", "model", "recorder")
    _saved = ("skipped_steps",)
    _last_pass_is_shared = True

    def __init__(
        self,
        params: Iterable,
        base_optimizer: Callable[..., Optimizer] = SGD,
        *,
        rho: float = 0.05,
        norm: str = "l2",
        ascent_steps: int = 1,
        adaptive: bool | str = False,
        eta: float = 0.0,
        nonfinite: str | None = "skip",
        replay_rng: bool = True,
        model: torch.nn.Module | None = None,
        recorder: Recorder | None = None,
        **base_kwargs: Any,
    ):
        self.norm = _one_of("norm", norm, NORMS)
        self.ascent_steps = integer("ascent_steps", ascent_steps, 1)
        self.adaptive = _one_of("adaptive", adaptive, (*ADAPTIVE, True))
        self.eta = number("eta", eta)
        self.nonfinite = _one_of("nonfinite", nonfinite, ("skip", "raise", None))
        if not isinstance(replay_rng, bool):
            raise TypeError(f"replay_rng must be True or False, got {replay_rng!r}")
        self.replay_rng = replay_rng
        if not isinstance(model, torch.nn.Module | None):
            raise TypeError(f"model must be a torch.nn.Module or None, got {model!r}")
        self.model = model
        if not isinstance(recorder, Recorder | None):
            raise TypeError(f"recorder must be a samkit.optim.Recorder or None, got {recorder!r}")
        self.recorder = recorder
        self.skipped_steps = 0
        self._make_workspace()
        self._make_base(params, base_optimizer, number("rho", rho), base_kwargs)

    def _make_base(self, params: Iterable, base_optimizer: Callable, rho: float, base_kwargs: dict) -> None:
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            raise TypeError(
                f"params must be an iterable of parameters, got one {type(params).__name__}; pass "
                "model.parameters() or [tensor]"
            )
        if isinstance(base_optimizer, Optimizer) or not callable(base_optimizer):
            raise TypeError(
                "base_optimizer must be an optimizer class such as torch.optim.SGD, with its arguments given "
                f"to SAM itself (lr=0.1, ...); got {base_optimizer!r}"
            )
        groups = list(params)
        if not groups:
            raise ValueError(
                "params is empty: pass model.parameters(); a generator that was read once is empty afterwards"
            )
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        groups = [self._with_radius(group, rho) for group in groups]
        if all(isinstance(group["params"], list) and not group["params"] for group in groups):
            raise ValueError("every group's params is empty: pass model.parameters()")
        base = base_optimizer(groups, **base_kwargs)
        if not isinstance(base, Optimizer):
            raise TypeError(f"base_optimizer must make a torch.optim.Optimizer, but it made {base!r}")
        if isinstance(base, LBFGS | SAM):
            raise ValueError(
                f"base_optimizer cannot be {type(base).__name__}, which evaluates the closure itself: "
                "use SGD or Adam"
            )
        base.defaults["rho"] = rho  # so that a group added to the base directly gets one too
        state = base.state
        self.base_optimizer = base
        # The hooks of an Optimizer are made here. It also empties the shared groups and adds them again, and
        # forgets the state, which some bases (Adagrad) fill when they are made.
        super().__init__(base.param_groups, base.defaults)
        self.state = state
        self._watch_base()

    # The base optimizer owns groups, state and defaults: two references could come apart, one cannot.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, those of the base optimizer."""
        return self.base_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base_optimizer.param_groups = groups

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state for each parameter, that of the base optimizer."""
        return self.base_optimizer.state

    @state.setter
    def state(self, state: dict[Tensor, Any]) -> None:
        self.base_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of a new group, those of the base optimizer and ``rho``."""
        return self.base_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base_optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; what it does not set is filled in from the defaults. The caller's dict is not changed.

        Parameters
        ----------
        param_group : dict
            ``"params"`` and any options, such as ``"lr"`` or ``"rho"``.

        Raises
        ------
        TypeError
            If it is not a dict.
        ValueError
            If a parameter is in a group already, or ``rho`` is not a radius.
        """
        self.base_optimizer.add_param_group(self._with_radius(param_group, self.defaults["rho"]))

    @staticmethod
    def _with_radius(group: dict[str, Any], rho: float) -> dict[str, Any]:
        if not isinstance(group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(group).__name__}")
        if "params" not in group:
            raise ValueError(f"a parameter group needs 'params', got only {', '.join(map(repr, group))}")
        own = group["params"]
        if not isinstance(own, Iterable):
            raise TypeError(f"a group's params must be parameters, got {own!r}")
        if not isinstance(own, Tensor | set):  # torch itself refuses a set, whose order is not fixed
            # Tied weights that were listed twice must move once.
            own = list({id(p[1] if isinstance(p, tuple) else p): p for p in own}.values())
        return {**group, "params": own, "rho": number("rho", group.get("rho", rho))}

    # By hand

    @torch.no_grad()
    def ascend(self) -> None:
        r"""Climb one step: from the gradients in ``.grad``, move the weights by a perturbation of length
        rho/k.

        The first call keeps a copy of the weights. The gradients are left as they are: zero them before the
        next backward. Parameters without a gradient stay where they are.

        Raises
        ------
        RuntimeError
            If the weights have climbed ``ascent_steps`` times already.
        ValueError
            If a group's rho was set to something that is not a radius.
        """
        if self._climbed == self.ascent_steps:
            raise RuntimeError(
                f"ascend() was called {self._climbed + 1} times with ascent_steps={self.ascent_steps}: call "
                "restore() or descend() first"
            )
        for group in self.param_groups:
            number("rho", group["rho"])
        parts = self._groups_with_gradients()
        if self._restored:  # the last step by hand ended without a base step
            self._restored = False
            self._start_afresh()
        if self._climbed == 0:
            self._away.watch()
        params = [p for _, own in parts for p in own]
        self._home.keep(params)
        if self._climbed < 2:
            self._record(f"g{self._climbed}")
        self._climbed += 1
        if not params:
            return
        grads = [p.grad for p in params]
        scales = scaling(self._home.values_of(params), self.adaptive, self.eta) if self.adaptive else None
        directions, length = ascent_direction(grads, self.norm, scales)
        blocked = None
        if self.nonfinite is not None:
            size = on_host_if_free(length if self.norm == "l2" else global_norm(grads))
            self._suspects.append(size)
            blocked = not math.isfinite(size) if isinstance(size, float) else ~torch.isfinite(size)
        start = 0
        for group, own in parts:
            radius = -group["rho"] if group.get("maximize") else group["rho"]
            scale = over_length(radius / self.ascent_steps, length)
            self._climb(own, directions[start : start + len(own)], scale, blocked)
            start += len(own)
        # Autocast keeps half-precision copies of the weights; they are out of date now.
        torch.clear_autocast_cache()

    def restore(self) -> None:
        """Bring the weights home, bit for bit, and keep the gradients.

        After it, clip or unscale the gradients as you like, then call :meth:`descend`, or step the base
        optimizer (``scaler.step(optimizer.base_optimizer)``). When the gradient of the ascent was not
        finite, and the policy is to look, the gradients are set to NaN: a ``GradScaler`` then skips the step
        as well.

        Raises
        ------
        RuntimeError
            If the weights are at home already.
        """
        if self._climbed == 0:
            raise RuntimeError("restore() was called but the weights are at home: call ascend() first")
        self._record("gk")
        self._come_home()
        self._restored = True
        if self.nonfinite is not None and not self._all_finite():
            for p in self._parameters():
                if p.grad is not None:
                    p.grad.fill_(math.nan)

    def descend(self) -> None:
        """Bring the weights home if they are not, then let the base optimizer step with the gradients.

        Raises
        ------
        RuntimeError
            If there was no :meth:`ascend` before.
        FloatingPointError
            If ``nonfinite="raise"`` and a gradient was not finite.
        """
        if self._climbed:
            self._record("gk")
            self._come_home()
        elif not self._restored:
            raise RuntimeError("descend() was called before ascend(): " + _WAYS_TO_STEP)
        self._restored = False
        self._note_gradients()
        finite = self._all_finite()
        self._suspects.clear()
        if finite:
            self._base_step()
        else:
            self._refuse()

    # With closures

    def step(
        self,
        closure: Closure | Sequence[Closure] | None = None,
        *,
        ascent_context: Callable[[], AbstractContextManager] | None = None,
    ) -> Any:
        """One SAM step: the closure at theta_0, at the ascent point, and the base optimizer's step.

        The closure follows PyTorch's convention. It zeroes the gradients, computes the loss of the same
        batch each time, calls ``backward`` if ``loss.requires_grad``, and returns the loss. Clip inside it,
        after ``backward``: the l_2 and l_inf perturbations do not depend on the gradient's scale.

        Parameters
        ----------
        closure : callable or sequence of callables
            One closure, or several for m-sharpness.
        ascent_context : callable, optional
            Makes a context manager for the passes before the last. Data-parallel training gives
            ``ddp.no_sync``: each rank climbs along its own gradient, and the gradients of the last pass are
            averaged. All ranks then agree on whether a step is skipped.

        Returns
        -------
        Tensor or float
            The closure's loss at theta_0; for several closures, the mean of these.

        Raises
        ------
        TypeError
            If there is no closure, or it returns something that is not a loss.
        ValueError
            If the list of closures is empty, or the loss is not a scalar.
        RuntimeError
            If the weights are at an ascent point, after :meth:`ascend` by hand.
        FloatingPointError
            If ``nonfinite="raise"`` and a loss or gradient was not finite.
        """
        return self._step(self._closures(closure), ascent_context)

    def _step(
        self, closures: list[Closure], ascent_context: Callable[[], AbstractContextManager] | None
    ) -> Any:
        if self._climbed:
            raise RuntimeError("step() was called after ascend(): call descend() or restore() first")
        if ascent_context is not None and not callable(ascent_context):
            raise TypeError(
                "ascent_context must be a function that makes a context manager, such as ddp.no_sync without "
                f"parentheses; got {ascent_context!r}"
            )
        self._restored = False
        self._start_afresh()
        try:
            losses = []
            for one in closures:
                losses.append(self._passes(one, ascent_context))
                if len(closures) > 1:
                    self._add_to_mean(len(closures))
            finite = self._all_finite(every_rank=ascent_context is not None)
            self._suspects.clear()
            if finite:
                self._settle()
        except BaseException:
            self._come_home()
            self._mean.clear()
            self._before_step.forget()
            self._start_afresh()  # the next step may be one by hand
            raise
        if not finite:
            self._mean.clear()
            self._before_step.put_back()
            self._refuse()
        else:
            self._before_step.forget()
            self._base_step()
        return losses[0] if len(losses) == 1 else sum(map(scalar, losses)) / len(losses)

    def _passes(self, closure: Closure, ascent_context: Callable[[], AbstractContextManager] | None) -> Any:
        """Run one closure at theta_0 and along the ascent; leave the weights home and g_k in ``.grad``."""
        climbs = any(group["rho"] != 0 for group in self.param_groups)
        local = ascent_context or nullcontext
        rng = RandomState.of(self._parameters()) if self.replay_rng and climbs else None
        if self.nonfinite is not None:
            self._before_step.watch()
        with local() if climbs else nullcontext():
            loss = self._evaluate(closure)
        self._before_step.rest()
        if not climbs:  # rho is 0, and the step is the base optimizer's own
            self._record("g0")
            self._note_gradients()
            return loss
        for k in range(1, self.ascent_steps + 1):
            self.ascend()
            for p in self._parameters():  # a closure that forgets to zero must not add to the last pass
                p.grad = None
            if rng is not None:
                rng.replay()
            with nullcontext() if k == self.ascent_steps and self._last_pass_is_shared else local():
                self._evaluate(closure)
        self._record("gk")
        self._note_gradients()
        self._come_home()
        return loss

    def _settle(self) -> None:
        """Last word on the gradient, once the step is known to be sound."""
        for p, grad in self._mean.items():
            p.grad = grad
        self._mean.clear()

    def _add_to_mean(self, count: int) -> None:
        for p in self._parameters():
            if p.grad is not None:
                share = p.grad / count  # a copy: the next backward may write into the same buffer
                self._mean[p] = self._mean[p].add_(share) if p in self._mean else share
                p.grad = None

    def _base_step(self) -> None:
        self.base_optimizer.step()

    def _evaluate(self, closure: Closure) -> Any:
        with torch.enable_grad():
            loss = closure()
        value = scalar(loss)
        if self.nonfinite is not None:
            self._suspects.append(on_host_if_free(value))
        return loss

    # Moving the weights

    def _make_workspace(self) -> None:
        self._home = _Home()
        self._climbed = 0
        self._restored = False
        self._mean: dict[Tensor, Tensor] = {}
        self._suspects: list[Tensor | float] = []  # what must be finite; on the device until the one look
        self._away = BufferGuard(self.model)
        self._before_step = BufferGuard(self.model)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _groups_with_gradients(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        parts = []
        for group in self.param_groups:
            own = [p for p in group["params"] if p.grad is not None]
            kinds = {p.grad.layout for p in own}, {p.dtype.is_complex for p in own}
            if own and kinds != ({torch.strided}, {False}):
                raise TypeError(
                    "SAM needs dense real gradients, got a sparse or complex one: make embeddings with "
                    "sparse=False, and hold complex weights as torch.view_as_real"
                )
            if own:
                parts.append((group, own))
        return parts

    def _climb(
        self,
        params: list[Tensor],
        directions: list[Tensor],
        scale: Tensor | float,
        blocked: Tensor | bool | None,
    ) -> None:
        add_scaled_(params, directions, scale, blocked)

    @torch.no_grad()
    def _come_home(self) -> None:
        self._home.bring_back()
        torch.clear_autocast_cache()
        self._away.put_back()
        self._climbed = 0

    def _record(self, name: str) -> None:
        if self.recorder is not None:
            self.recorder.note(name, self._parameters())

    # What went wrong

    @torch.no_grad()
    def _note_gradients(self) -> None:
        if self.nonfinite is not None:
            size = global_norm([p.grad for p in self._parameters() if p.grad is not None])
            self._suspects.append(on_host_if_free(size))

    def _all_finite(self, every_rank: bool = False) -> bool:
        """The one host synchronisation of a step."""
        if self.nonfinite is None:
            return True
        if not every_rank and all(isinstance(s, float) for s in self._suspects):
            return all(map(math.isfinite, self._suspects))
        device = self._parameters()[0].device
        finite = torch.stack([torch.as_tensor(s, device=device) for s in self._suspects]).isfinite().all()
        if every_rank and torch.distributed.is_available() and torch.distributed.is_initialized():
            agreed = finite.to(torch.int32)
            torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN)
            finite = agreed
        return bool(finite)

    def _start_afresh(self) -> None:
        """Forget what a step that came to nothing has left behind."""
        self._suspects.clear()
        if self.recorder is not None:
            self.recorder.forget()

    def _refuse(self) -> None:
        self._start_afresh()
        if self.nonfinite == "raise":
            raise FloatingPointError(
                "a loss or a gradient of this step was not finite; the weights are unchanged. Look for bad "
                'inputs, lower the learning rate or rho, or pass nonfinite="skip"'
            )
        self.skipped_steps += 1

    def _closures(self, closure: Any) -> list[Closure]:
        if closure is None:
            raise TypeError(
                f"step() needs a closure. Ways to step: {_WAYS_TO_STEP}; with a GradScaler, restore() and "
                "then scaler.step(optimizer.base_optimizer)"
            )
        closures = list(closure) if isinstance(closure, list | tuple) else [closure]
        if not closures:
            raise ValueError("step([]) has no closure to evaluate: pass one for each sub-batch")
        for one in closures:
            if not callable(one):
                raise TypeError(f"step() takes a closure (a function) or a list of closures, got {one!r}")
        return closures

    def _watch_base(self) -> None:
        # The wrapper is held weakly: a cycle would keep a discarded optimizer's memory until the next
        # collection.
        wrapper = weakref.ref(self)

        def before(*_: Any) -> None:
            if (sam := wrapper()) is not None:
                sam._before_base_step()

        def after(*_: Any) -> None:
            if (sam := wrapper()) is not None:
                sam._after_base_step()

        self.base_optimizer.register_step_pre_hook(before)
        self.base_optimizer.register_step_post_hook(after)

    def _before_base_step(self) -> None:
        if self._climbed:
            raise RuntimeError(
                "the base optimizer was stepped at the ascent point: call restore() first, or descend()"
            )
        if self.recorder is not None:
            self.recorder.close(self._parameters(), getattr(self, "alpha", math.nan))

    def _after_base_step(self) -> None:
        self._restored = False
        self._suspects.clear()
        self._opt_called = True  # a scheduler on the wrapper looks here, and by hand only the base steps

    # Saving and copying

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's state and groups, and under ``"sam"`` the wrapper's own counters.

        Returns
        -------
        dict
            What ``torch.load(..., weights_only=True)`` can read; it holds no copy of the weights.
        """
        state = super().state_dict()
        for group in state["param_groups"]:
            group["rho"] = number("rho", group["rho"])  # a NumPy scalar from a schedule would not load safely
        return {**state, "sam": {name: getattr(self, name) for name in self._saved}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; a plain base optimizer's state works too.

        Parameters
        ----------
        state_dict : dict
            The state. Groups without a ``rho`` get the default.

        Raises
        ------
        ValueError
            If the groups do not match.
        """
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.setdefault("rho", self.defaults["rho"])
        for name, value in state_dict.get("sam", {}).items():
            if name in self._saved:
                setattr(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        if self._climbed:
            raise RuntimeError(
                "the weights are at the ascent point: call restore() before copying the optimizer"
            )
        return {name: getattr(self, name) for name in ("base_optimizer", *self._settings, *self._saved)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "base_optimizer" not in state:  # from load_state_dict, which knows groups and state alone
            self.base_optimizer.__setstate__(state)
            return
        self.__dict__.update(state)
        self._make_workspace()
        super().__setstate__({})
        self._watch_base()


class _Home:
    """The weights at theta_0 while the parameters are away, kept in buffers that outlive the step."""

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._values: list[Tensor] = []
        self._buffers: list[Tensor] = []  # reused by the next step: allocating is slower than copying
        self._shapes: list[tuple] = []

    def keep(self, params: list[Tensor]) -> None:
        """Copy the weights of those that have not left yet."""
        if self._params:
            away = set(map(id, self._params))
            late = [p for p in params if id(p) not in away]
            self._params, self._values = self._params + late, self._values + [p.clone() for p in late]
            return
        shapes = list(map(attrgetter("shape", "dtype", "device"), params))
        if shapes != self._shapes:
            self._buffers, self._shapes = [torch.empty_like(p) for p in params], shapes
        if params:
            torch._foreach_copy_(self._buffers, params)
        self._params, self._values = params, self._buffers

    def values_of(self, params: list[Tensor]) -> list[Tensor]:
        values = dict(zip(map(id, self._params), self._values, strict=True))
        return [values[id(p)] for p in params]

    def bring_back(self) -> None:
        # By copy, never by subtracting the perturbation: that would round, and drift.
        if self._params:
            torch._foreach_copy_(self._params, self._values)
        self._params, self._values = [], []


def scalar(loss: Any) -> Tensor:
    """What a closure returned, as a scalar tensor without history."""
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise ValueError(
                f"the closure must return a scalar loss, got shape {tuple(loss.shape)}: average it, for "
                "example loss.mean()"
            )
        if loss.is_complex():
            raise TypeError(f"the closure must return a real loss, got {loss!r}: take its real part")
        return loss.detach().reshape(())
    if isinstance(loss, bool) or not isinstance(loss, numbers.Real):
        raise TypeError(f"the closure must return its loss, got {loss!r}: end it with `return loss`")
    return torch.tensor(float(loss))


def _one_of(name: str, value: Any, choices: tuple) -> Any:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value
