"""Case 3, davda54/sam#79 and #97: SAM and XSAM with the stock GradScaler in float16.

The route: each pass is scaled. The gradients of the first are unscaled under the wrapper, those of the second
under the base optimizer, since the scaler keeps one record for each optimizer and unscales once. An overflow
in either pass then skips the step and lowers the scale.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from samkit.optim import SAM, XSAM

# Small random networks often end there; the warning has its own test.
pytestmark = pytest.mark.filterwarnings("ignore:XSAM's search ended at alpha_max")


def problem(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.randn(32, 6), torch.randint(3, (32,))


def make(kind, model, base=SGD, **options):
    if kind == "SAM":
        return SAM(model.parameters(), base, rho=0.2, lr=0.1, **options)
    return XSAM(model.parameters(), base, rho=0.2, search_every=2, lr=0.1, **options)


def scaled_step(model, inputs, targets, optimizer, scaler, max_norm=None, spoil=None):
    """One step by the documented route; ``spoil`` is the pass whose gradient overflows."""

    def forward():
        with torch.autocast("cpu", torch.float16):
            return cross_entropy(model(inputs), targets)

    for number in (1, 2):
        optimizer.zero_grad()
        loss = forward()
        scaler.scale(loss).backward()
        if spoil == number:
            model[0].weight.grad[0, 0] = math.inf
        if number == 1:
            first = loss.item()
            scaler.unscale_(optimizer)
            optimizer.ascend()
    optimizer.restore()
    if isinstance(optimizer, XSAM):
        optimizer.mix(forward)
    if max_norm is not None:
        scaler.unscale_(optimizer.base_optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer.base_optimizer)
    scaler.update()
    return first


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@pytest.mark.parametrize("kind", ["SAM", "XSAM"])
def test_03_the_scaled_route_is_the_unscaled_step(kind):
    runs = []
    for scaled in (False, True):
        model, inputs, targets = problem()
        optimizer = make(kind, model)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
        losses = [scaled_step(model, inputs, targets, optimizer, scaler) for _ in range(6)]
        runs.append((losses, weights(model), model[1].num_batches_tracked.item()))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=2e-3)
    torch.testing.assert_close(runs[0][1], runs[1][1], rtol=0, atol=2e-3)
    assert runs[0][2] == runs[1][2] == 6
    assert runs[1][0][-1] < runs[1][0][0] - 0.05


def test_03_the_scaled_route_climbs_as_far_as_rho():
    model, inputs, targets = problem()
    optimizer, start = make("SAM", model), weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    with torch.autocast("cpu", torch.float16):
        loss = cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    optimizer.ascend()
    assert (weights(model) - start).norm().item() == pytest.approx(0.2, rel=1e-5)
    optimizer.restore()
    assert torch.equal(weights(model), start)


@pytest.mark.parametrize("kind", ["SAM", "XSAM"])
def test_03_gradients_can_be_clipped_after_unscaling(kind):
    model, inputs, targets = problem()
    optimizer, start = make(kind, model), weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled_step(model, inputs, targets, optimizer, scaler, max_norm=0.01)
    assert (weights(model) - start).norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


@pytest.mark.parametrize("kind", ["SAM", "XSAM"])
@pytest.mark.parametrize("spoil", [1, 2])
def test_03_an_overflow_in_either_pass_skips_the_step_and_lowers_the_scale(kind, spoil):
    model, inputs, targets = problem()
    optimizer, before = make(kind, model, Adam), weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled_step(model, inputs, targets, optimizer, scaler, spoil=spoil)
    assert torch.equal(weights(model), before)
    assert not optimizer.state
    assert scaler.get_scale() == 512
    scaled_step(model, inputs, targets, optimizer, scaler)
    assert not torch.equal(weights(model), before)
    assert scaler.get_scale() == 512


def test_03_a_scale_that_really_overflows_float16_is_found_by_itself():
    model, inputs, targets = problem()
    optimizer, before = make("SAM", model), weights(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    skipped = 0
    while torch.equal(weights(model), before):
        scaled_step(model, inputs, targets, optimizer, scaler)
        skipped += 1
        assert skipped < 30
    assert skipped > 1
    assert weights(model).isfinite().all()
    assert model[1].running_mean.isfinite().all()


def test_03_stepping_the_wrapper_by_the_scaler_says_what_to_do():
    model, inputs, targets = problem()
    optimizer = make("SAM", model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(cross_entropy(model(inputs), targets)).backward()
    with pytest.raises(TypeError, match=r"scaler\.step\(optimizer\.base_optimizer\)"):
        scaler.step(optimizer)


def test_03_forgetting_restore_is_an_error_and_not_a_wrong_step():
    model, inputs, targets = problem()
    optimizer = make("SAM", model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(cross_entropy(model(inputs), targets)).backward()
    scaler.unscale_(optimizer)
    optimizer.ascend()
    with pytest.raises(RuntimeError, match=r"restore\(\) first"):
        scaler.step(optimizer.base_optimizer)
    optimizer.restore()
