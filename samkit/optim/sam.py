"""SAM as a ``torch.optim.Optimizer``: one class around any base optimizer (chapter 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from samkit.perturb import add_scaled_, ascent_direction, scaling


class SAM(Optimizer):
    """Sharpness-Aware Minimization around any base optimizer (first version: hardening follows)."""

    def __init__(
        self,
        params,
        base_optimizer=SGD,
        *,
        rho: float = 0.05,
        norm: str = "l2",
        ascent_steps: int = 1,
        adaptive: bool | str = False,
        eta: float = 0.0,
        nonfinite: str | None = "skip",
        model: torch.nn.Module | None = None,
        **base_kwargs: Any,
    ):
        self.norm, self.ascent_steps, self.adaptive, self.eta = norm, ascent_steps, adaptive, eta
        self.nonfinite, self.model, self.skipped_steps = nonfinite, model, 0
        super().__init__(params, {"rho": rho})
        self.base_optimizer = base_optimizer(self.param_groups, **base_kwargs)
        self.param_groups, self.state = self.base_optimizer.param_groups, self.base_optimizer.state
        self.defaults.update(self.base_optimizer.defaults)
        self._home: dict[Tensor, Tensor] = {}
        self._ascents = 0

    @torch.no_grad()
    def ascend(self) -> None:
        if self._ascents == self.ascent_steps:
            raise RuntimeError(f"already took {self._ascents} ascent steps: call restore() or descend()")
        self._ascents += 1
        pairs = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        if not pairs:
            return
        params = [p for _, p in pairs]
        for p in params:
            if p not in self._home:
                self._home[p] = p.detach().clone()
        scales = scaling([self._home[p] for p in params], self.adaptive, self.eta)
        directions, length = ascent_direction([p.grad for p in params], self.norm, scales)
        for group in self.param_groups:
            own = [i for i, (g, _) in enumerate(pairs) if g is group]
            sign = -1.0 if group.get("maximize") else 1.0
            if own:
                add_scaled_(
                    [params[i] for i in own],
                    [directions[i] for i in own],
                    sign * group["rho"] / self.ascent_steps / length,
                )

    @torch.no_grad()
    def restore(self) -> None:
        if self._home:
            torch._foreach_copy_(list(self._home), list(self._home.values()))
        self._home, self._ascents = {}, 0

    def descend(self) -> None:
        self.restore()
        self.base_optimizer.step()

    def step(self, closure=None, *, ascent_context=None):
        if closure is None:
            raise RuntimeError("SAM needs step(closure), or ascend() and descend() by hand")
        closures = list(closure) if isinstance(closure, (list, tuple)) else [closure]
        losses, total = [], {}
        for one in closures:
            with torch.enable_grad():
                losses.append(one())
                try:
                    for _ in range(self.ascent_steps):
                        self.ascend()
                        one()
                finally:
                    self.restore()
            if len(closures) > 1:
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            total[p] = total.get(p, 0) + p.grad / len(closures)
                            p.grad = None
        for p, grad in total.items():
            p.grad = grad
        self.base_optimizer.step()
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()
