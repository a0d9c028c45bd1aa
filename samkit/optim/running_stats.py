"""Undoing what a forward pass does to a model's buffers.

BatchNorm moves its running statistics in every training forward pass. SAM makes several passes a step, most
of them at perturbed weights, and only the one at theta_0 may count. An optimizer knows parameters, not
modules, so the modules have to be met when they are called (chapter 3).
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


class BufferGuard:
    """Remembers the buffers of every module called while it watches, and puts them back.

    It works on values, for any module and any buffer: running means and variances, counters, the vectors of
    spectral normalisation. It listens through PyTorch's global forward hook, which it takes off while a
    called module runs: the outermost module of each call shows its whole tree, and the modules inside run at
    full speed.

    Modules compiled in place with ``model.compile()`` do not reach such hooks. For them, give the model:
    then all its buffers are remembered when the watch begins.

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
        self._owners: dict[nn.Module, dict[str, Tensor | None]] = {}
        self._values: list[tuple[list[Tensor], list[Tensor]]] = []
        self._thread: int | None = None
        self._hooks: list = []

    def watch(self) -> None:
        """Begin to watch: what is called from now on can be put back."""
        if self._model is not None:
            self._remember(self._model)
            return
        self._thread = threading.get_ident()
        self._listen()

    def put_back(self) -> None:
        """Give every buffer the value it had before its first call, and stop watching."""
        with torch.no_grad():
            for buffers, values in reversed(self._values):  # the first value seen wins
                torch._foreach_copy_(buffers, values)
        for module, buffers in self._owners.items():
            module._buffers.update(buffers)  # a module may have bound a new tensor to the name
        self.forget()

    def forget(self) -> None:
        """Stop watching and keep the buffers as they are now."""
        for hook in self._hooks:
            hook()
        self._hooks, self._owners, self._values, self._thread = [], {}, [], None

    def _listen(self) -> None:
        # A guard that nobody holds any more (an interrupted loop) must not go on listening for ever.
        guard = weakref.ref(self)
        handle = register_module_forward_pre_hook(lambda module, _: guard() and guard()._meet(module))
        self._hooks = [weakref.finalize(self, handle.remove)]

    def _meet(self, module: nn.Module) -> None:
        if threading.get_ident() != self._thread:
            return
        self._remember(module)
        for hook in self._hooks:
            hook()
        handle = module.register_forward_hook(lambda *_: self._left(), always_call=True)
        self._hooks = [handle.remove]

    def _left(self) -> None:
        for hook in self._hooks:
            hook()
        self._listen()

    def _remember(self, root: nn.Module) -> None:
        buffers, stack = [], [root]
        while stack:
            module = stack.pop()
            if module._buffers and module not in self._owners:
                self._owners[module] = dict(module._buffers)
                buffers += [b for b in module._buffers.values() if b is not None]
            stack.extend(child for child in module._modules.values() if child is not None)
        if buffers:
            with torch.no_grad():
                self._values.append((buffers, [b.clone() for b in buffers]))
