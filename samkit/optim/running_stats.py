"""Undoing what a forward pass does to a model's buffers.

BatchNorm moves its running statistics in every training forward pass. SAM makes several passes a step, most
of them at perturbed weights, and only the one at theta_0 may count. An optimizer knows parameters, not
modules, so the modules have to be met when they are called (chapter 3).
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


class BufferGuard:
    """Remembers the buffers of every module called while it watches, and puts them back.

    It works on values, for any module and any buffer: running means and variances, counters, the vectors of
    spectral normalisation. It listens through PyTorch's global forward hook, which it takes off while a
    called module runs: the outermost module of each call shows its whole tree, and the modules inside run at
    full speed.

    Compiled modules are better given as the model: all its buffers are then remembered when the watch begins,
    without a hook that the compiler would trip over.

    Parameters
    ----------
    model : torch.nn.Module, optional
        Guard this model instead of the modules that are called.

    Examples
    --------
    >>> import torch
    >>> from samkit.optim.running_stats import BufferGuard
    >>> norm, guard = torch.nn.BatchNorm1d(1), BufferGuard()
    >>> guard.watch()
    >>> out = norm(torch.tensor([[1.0], [3.0]]))
    >>> norm.running_mean
    tensor([0.2000])
    >>> guard.put_back()
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0.]), tensor(0))
    """

    def __init__(self, model: nn.Module | None = None):
        self._model = model
        self._roots: set[nn.Module] = set()
        self._kept: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        self._buffers: list[Tensor] = []
        self._values: list[Tensor] = []
        # The values of the last watch: the same memory serves the next, since allocating is slow.
        self._spare: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._thread: int | None = None
        self._hook: Any = None

    def watch(self) -> None:
        """Watch: what is called from now on can be put back to what it was before its first call."""
        if self._model is not None:
            self._remember(self._model)
        elif self._hook is None:
            self._thread = threading.get_ident()
            self._listen()

    def rest(self) -> None:
        """Stop watching, but remember what was met."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def put_back(self) -> None:
        """Give every buffer the value it had before its first call, and stop watching."""
        if self._buffers:
            with torch.no_grad():
                # Backwards, so that of several values for one buffer the first seen wins. Through .data, so
                # that a graph built before may still be differentiated: what it saved has its value again.
                torch._foreach_copy_([b.data for b in reversed(self._buffers)], self._values[::-1])
            for buffers, original in self._kept:
                buffers.update(original)  # a module may have bound a new tensor to a name
        self.forget()

    def forget(self) -> None:
        """Stop watching, and keep the buffers as they are now."""
        self.rest()
        self._roots, self._kept, self._buffers, self._values = set(), [], [], []

    def _listen(self) -> None:
        # A guard that nobody holds any more (an interrupted loop) must not go on listening for ever.
        guard = weakref.ref(self)

        def hook(module: nn.Module, _: Any) -> None:
            own = guard()
            if own is None:
                handle.remove()
            elif threading.get_ident() == own._thread:
                own._meet(module)

        self._hook = handle = register_module_forward_pre_hook(hook)

    def _meet(self, module: nn.Module) -> None:
        self._remember(module)
        self._hook.remove()
        self._hook = module.register_forward_hook(self._left, always_call=True)

    def _left(self, *_: Any) -> None:
        self._hook.remove()
        self._listen()

    def _remember(self, root: nn.Module) -> None:
        if root in self._roots:
            return
        self._roots.add(root)
        found, stack = [], [root]
        while stack:
            module = stack.pop()
            if module._buffers:
                self._kept.append((module._buffers, module._buffers.copy()))
                found += [buffer for buffer in module._buffers.values() if buffer is not None]
            stack += [child for child in module._modules.values() if child is not None]
        if not found:
            return
        with torch.no_grad():
            previous, values = self._spare.get(root, ([], []))
            if list(map(id, previous)) == list(map(id, found)):
                torch._foreach_copy_(values, found)
            else:
                values = [buffer.clone() for buffer in found]
                self._spare[root] = found, values
        self._buffers += found
        self._values += values
