"""Case 21, pytorch/functorch#534: Hessian-vector products through normalisation layers.

Forward-over-reverse differentiation loses a term in them: its products are some per cent off, and the Hessian
is not even symmetric. Differentiating backwards twice is right.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from samkit import sharpness

LAYERS = {
    "LayerNorm": lambda: nn.LayerNorm(12),
    "GroupNorm": lambda: nn.GroupNorm(3, 12),
    "BatchNorm in train mode": lambda: nn.BatchNorm1d(12),
    "BatchNorm in eval mode": lambda: nn.BatchNorm1d(12).eval(),
    "InstanceNorm": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 4)), nn.InstanceNorm1d(3, affine=True), nn.Flatten()
    ),
    "RMSNorm": lambda: nn.RMSNorm(12),
}


@pytest.fixture(params=LAYERS)
def problem(request):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), LAYERS[request.param](), nn.Tanh(), nn.Linear(12, 3)).double()
    inputs, targets = torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))
    params = list(model.parameters())
    u, v = ([torch.randn_like(p) for p in params] for _ in range(2))
    return lambda: cross_entropy(model(inputs), targets), params, u, v


def dot(u, v):
    return sum((a * b).sum() for a, b in zip(u, v, strict=True)).item()


def test_products_are_symmetric(problem):
    loss, params, u, v = problem
    uhv = dot(u, sharpness.hvp(loss, params, v))
    assert uhv == pytest.approx(dot(v, sharpness.hvp(loss, params, u)), rel=1e-10)


def test_products_equal_finite_differences_of_the_gradient(problem):
    loss, params, _, v = problem
    step, ends = 1e-5, []
    for sign in (1, -1):
        for p, direction in zip(params, v, strict=True):
            p.data.add_(direction, alpha=sign * step)
        ends.append(torch.autograd.grad(loss(), params))
        for p, direction in zip(params, v, strict=True):
            p.data.sub_(direction, alpha=sign * step)
    slow = [(a - b) / (2 * step) for a, b in zip(*ends, strict=True)]
    for product, difference in zip(sharpness.hvp(loss, params, v), slow, strict=True):
        torch.testing.assert_close(product, difference, rtol=1e-5, atol=1e-7)
