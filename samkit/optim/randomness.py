"""Drawing the same random numbers again, so that two passes see the same dropout mask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """The states of the random number generators that a model's passes draw from.

    Examples
    --------
    >>> import torch
    >>> from samkit.optim.randomness import RandomState
    >>> state = RandomState.of([torch.zeros(1)])
    >>> first = torch.rand(3)
    >>> state.replay()
    >>> bool((torch.rand(3) == first).all())
    True
    """

    cpu: Tensor
    others: dict[torch.device, Tensor]

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> RandomState:
        """Take down the state of the CPU's generator and of every device the tensors live on."""
        devices = {t.device for t in tensors}
        return cls(torch.get_rng_state(), {d: _get(d) for d in devices if d.type != "cpu"})

    def replay(self) -> None:
        """Set the generators back, so that they give the same numbers again."""
        torch.set_rng_state(self.cpu)
        for device, state in self.others.items():
            _set(device, state)


def _get(device: torch.device) -> Tensor:
    if device.type == "mps":  # one device, so its functions take no argument
        return torch.mps.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set(device: torch.device, state: Tensor) -> None:
    if device.type == "mps":
        torch.mps.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
