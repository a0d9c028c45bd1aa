"""Means over data-parallel processes, for optimizers that change gradients before the mean is taken."""

from __future__ import annotations

import torch
from torch import Tensor


def mean_over_ranks(vector: Tensor) -> Tensor:
    """The mean of a tensor over all processes; the tensor is overwritten."""
    torch.distributed.all_reduce(vector)
    return vector / torch.distributed.get_world_size()


@torch.no_grad()
def average_gradients_over_ranks(params: list[Tensor]) -> None:
    """Replace every gradient by its mean over all processes."""
    # Every rank must send the same shapes, so a missing gradient travels as zeros.
    params = [p for p in params if p.requires_grad]
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    mean = mean_over_ranks(torch.nn.utils.parameters_to_vector([p.grad for p in params]))
    torch._foreach_copy_(
        [p.grad for p in params],
        [part.view_as(p) for p, part in zip(params, mean.split([p.numel() for p in params]), strict=True)],
    )
