"""samkit.optim.SAM: the step, what it must leave alone, and how it lives with the rest of PyTorch."""

import contextlib
import copy
import functools
import gc
import io
import math
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules import module as nn_module
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from samkit import perturb
from samkit.optim import SAM, sam

F64 = torch.float64


def make_model(*extra, seed=0, dtype=F64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), *extra, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(size=16, seed=1, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=generator, dtype=dtype), torch.arange(size) % 3


def make_closure(model, optimizer, data=None):
    inputs, targets = data or batch(dtype=next(model.parameters()).dtype)

    def closure():
        closure.calls += 1
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        if loss.requires_grad:
            loss.backward()
        return loss

    closure.calls = 0
    return closure


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def everything(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first, second):
    """Bit for bit."""
    assert len(first) == len(second)
    pairs = (
        ((first[k], second[k]) for k in first) if isinstance(first, dict) else zip(first, second, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def assert_no_hooks_left(model):
    assert not nn_module._global_forward_pre_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# The step


def test_one_step_on_a_quadratic_is_the_closed_form():
    h = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=F64)
    start = torch.tensor([1.0, -2.0], dtype=F64)
    theta = nn.Parameter(start.clone())
    optimizer = SAM([theta], SGD, rho=0.3, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = theta @ h @ theta / 2
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    g = h @ start
    assert loss.item() == (start @ h @ start / 2).item()
    torch.testing.assert_close(
        theta.detach(), start - 0.1 * h @ (start + 0.3 * g / g.norm()), rtol=1e-14, atol=0
    )


def slow_sam(model, data, steps, *, rho, k, norm, adaptive, eta, lr, momentum):
    """SAM with momentum written out on one flat vector, with autograd alone."""
    shapes = [p.shape for p in model.parameters()]
    is_weight = torch.cat([torch.full((p.numel(),), p.dim() > 1) for p in model.parameters()])
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    velocity = None

    def gradient(vector):
        leaf = vector.clone().requires_grad_()
        parts = leaf.split([math.prod(s) for s in shapes])
        named = {n: v.view(s) for (n, _), v, s in zip(model.named_parameters(), parts, shapes, strict=True)}
        loss = cross_entropy(torch.func.functional_call(model, named, data[0]), data[1])
        return torch.autograd.grad(loss, leaf)[0]

    for _ in range(steps):
        t = torch.ones_like(theta)
        if adaptive:
            t = torch.where(is_weight | (adaptive == "all"), theta.abs() + eta, t)
        point = theta
        for _ in range(k):
            g = gradient(point)
            eps = t**2 * g / (t * g).norm() if norm == "l2" else t * g.sign()
            point = point + rho / k * eps
        g = gradient(point)
        velocity = g if velocity is None else momentum * velocity + g
        theta = theta - lr * velocity
    return theta


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("adaptive", [False, "weights", "all"])
def test_the_trajectory_is_that_of_an_independent_slow_implementation(k, norm, adaptive):
    model, data = make_model(), batch()
    options = {"rho": 0.1, "norm": norm, "adaptive": adaptive, "eta": 0.01, "lr": 0.2, "momentum": 0.9}
    expected = slow_sam(model, data, 10, k=k, **options)
    optimizer = SAM(model.parameters(), SGD, ascent_steps=k, **options)
    closure = make_closure(model, optimizer, data)
    for _ in range(10):
        optimizer.step(closure)
    got = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3])
def test_by_hand_and_with_a_closure_are_the_same_step(k):
    models = [make_model(nn.BatchNorm1d(8)) for _ in range(2)]
    first, second = (SAM(m.parameters(), Adam, rho=0.1, ascent_steps=k, lr=0.01) for m in models)
    closures = [make_closure(m, o) for m, o in zip(models, (first, second), strict=True)]
    for _ in range(3):
        first.step(closures[0])
        closures[1]()
        for _ in range(k):
            second.ascend()
            closures[1]()
        second.descend()
    assert_same(everything(models[0]), everything(models[1]))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_closure_runs_k_plus_one_times_and_the_first_loss_is_returned(k):
    model = make_model()
    optimizer = SAM(model.parameters(), rho=0.5, ascent_steps=k, lr=0.1)
    closure = make_closure(model, optimizer)
    at_start = cross_entropy(model(batch()[0]), batch()[1]).item()
    assert optimizer.step(closure).item() == at_start
    assert closure.calls == k + 1


def test_a_loss_that_is_a_python_number_is_returned_as_it_is():
    model = make_model()
    optimizer = SAM(model.parameters(), rho=0.5, lr=0.1)
    inner = make_closure(model, optimizer)
    loss = optimizer.step(lambda: inner().item())
    assert isinstance(loss, float)
    assert optimizer.step([lambda: inner().item()] * 2).item() < loss


@pytest.mark.parametrize("base", [functools.partial(SGD, momentum=0.9, nesterov=True), Adam, AdamW, Adagrad])
@pytest.mark.parametrize("k", [1, 2])
def test_rho_zero_is_the_base_optimizer_bit_for_bit(base, k):
    results = []
    for wrapped in (True, False):
        model = make_model(nn.BatchNorm1d(8), nn.Dropout(0.5), dtype=torch.float32)
        optimizer = (
            SAM(model.parameters(), base, rho=0.0, ascent_steps=k, lr=0.01, weight_decay=0.1)
            if wrapped
            else base(model.parameters(), lr=0.01, weight_decay=0.1)
        )
        torch.manual_seed(3)
        for _ in range(5):
            optimizer.step(make_closure(model, optimizer))
        results.append({**everything(model), "rng": torch.get_rng_state()})
    assert_same(*results)


def test_the_l2_norm_runs_over_all_groups_and_each_has_its_own_rho():
    model, data = make_model(), batch()
    start = weights(model)
    optimizer = SAM(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "rho": 0.7}], rho=0.2, lr=0.1
    )
    make_closure(model, optimizer, data)()
    grads = [p.grad.clone() for p in model.parameters()]
    length = torch.cat([g.flatten() for g in grads]).norm()
    optimizer.ascend()
    for p, before, g, rho in zip(model.parameters(), start, grads, (0.2, 0.2, 0.7, 0.7), strict=True):
        torch.testing.assert_close(p.detach(), before + rho * g / length, rtol=1e-14, atol=1e-16)
        assert torch.equal(p.grad, g)
    optimizer.restore()
    assert_same(weights(model), start)


def test_a_group_with_rho_zero_stays_and_the_others_climb():
    model = make_model()
    optimizer = SAM(
        [{"params": model[0].parameters(), "rho": 0.0}, {"params": model[2].parameters()}], lr=0.1
    )
    start = weights(model)
    make_closure(model, optimizer)()
    optimizer.ascend()
    moved = [not torch.equal(a, b) for a, b in zip(weights(model), start, strict=True)]
    assert moved == [False, False, True, True]
    optimizer.descend()


def test_rho_can_be_scheduled_in_the_groups():
    model = make_model()
    optimizer = SAM(model.parameters(), rho=0.1, lr=0.0)
    closure = make_closure(model, optimizer)
    for rho in (0.1, 0.4):
        optimizer.param_groups[0]["rho"] = rho
        start = torch.cat([w.flatten() for w in weights(model)])
        closure()
        optimizer.ascend()
        assert (torch.cat([w.flatten() for w in weights(model)]) - start).norm().item() == pytest.approx(rho)
        optimizer.descend()


@pytest.mark.parametrize("rho", np.linspace(0, 0.1, 2))
def test_a_rho_scheduled_with_numpy_is_saved_as_a_plain_number(rho):
    model = make_model()
    optimizer = SAM(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["rho"] = rho
    optimizer.step(make_closure(model, optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["param_groups"][0]["rho"] == rho


@pytest.mark.parametrize("bad", [-0.1, math.nan, "0.1"])
def test_a_rho_scheduled_to_nonsense_is_refused_with_the_weights_untouched(bad):
    model = make_model()
    optimizer = SAM(model.parameters(), lr=0.1)
    start = weights(model)
    optimizer.param_groups[0]["rho"] = bad
    with pytest.raises((ValueError, TypeError), match="rho must be"):
        optimizer.step(make_closure(model, optimizer))
    assert_same(weights(model), start)
    optimizer.param_groups[0]["rho"] = 0.1
    optimizer.step(make_closure(model, optimizer))


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("base", [SGD, Adam])
def test_maximising_minus_the_loss_is_minimising_the_loss(base, norm):
    results = []
    for sign in (1, -1):
        model = make_model()
        optimizer = SAM(model.parameters(), base, rho=0.2, norm=norm, lr=0.05, maximize=sign < 0)

        def closure(model=model, optimizer=optimizer, sign=sign):
            optimizer.zero_grad()
            loss = sign * cross_entropy(model(batch()[0]), batch()[1])
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        results.append(weights(model))
    assert_same(*results)


def test_a_closure_that_forgets_to_zero_does_not_mix_the_passes():
    results = []
    for forgets in (False, True):
        model = make_model()
        optimizer = SAM(model.parameters(), rho=0.2, ascent_steps=2, lr=0.1)

        def closure(model=model, optimizer=optimizer, forgets=forgets):
            if not forgets:
                optimizer.zero_grad()
            loss = cross_entropy(model(batch()[0]), batch()[1])
            loss.backward()
            return loss

        optimizer.step(closure)
        results.append(weights(model))
    assert_same(*results)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_same_seed_gives_the_same_weights_bit_for_bit(norm):
    results = []
    for _ in range(2):
        model = make_model(nn.Dropout(0.3), dtype=torch.float32)
        optimizer = SAM(model.parameters(), Adam, rho=0.1, norm=norm, lr=0.01)
        for step in range(5):
            optimizer.step(make_closure(model, optimizer, batch(seed=step, dtype=torch.float32)))
        results.append(weights(model))
    assert_same(*results)


# m-sharpness


def sam_gradient_of(model, data, rho):
    """What a fresh SAM leaves in .grad after its two passes."""
    twin = copy.deepcopy(model)
    optimizer = SAM(twin.parameters(), rho=rho, lr=0.0)
    closure = make_closure(twin, optimizer, data)
    closure()
    optimizer.ascend()
    closure()
    optimizer.restore()
    return [p.grad for p in twin.parameters()]


def test_several_closures_average_their_own_sam_gradients():
    model, parts = make_model(), [batch(6, seed=s) for s in range(3)]
    start = weights(model)
    grads = zip(*[sam_gradient_of(model, part, 0.3) for part in parts], strict=True)
    expected = [w - 0.1 * sum(own) / 3 for w, own in zip(start, grads, strict=True)]
    losses = [cross_entropy(model(x), y) for x, y in parts]
    optimizer = SAM(model.parameters(), rho=0.3, lr=0.1)
    loss = optimizer.step([make_closure(model, optimizer, part) for part in parts])
    assert loss.item() == pytest.approx(sum(losses).item() / 3, rel=1e-14)
    for got, wanted in zip(weights(model), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-15)


def test_closures_that_zero_in_place_do_not_wipe_out_each_other():
    results = []
    for set_to_none in (True, False):
        model = make_model()
        optimizer = SAM(model.parameters(), rho=0.3, lr=0.1)

        def closure(seed, model=model, optimizer=optimizer, set_to_none=set_to_none):
            optimizer.zero_grad(set_to_none=set_to_none)
            inputs, targets = batch(6, seed=seed)
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step([functools.partial(closure, s) for s in range(3)])
        results.append(weights(model))
    assert_same(*results)


def test_running_statistics_move_once_for_each_closure_at_theta_0():
    model, parts = make_model(nn.BatchNorm1d(8)), [batch(6, seed=s) for s in range(3)]
    twin = copy.deepcopy(model)
    for inputs, _ in parts:
        twin(inputs)
    optimizer = SAM(model.parameters(), rho=0.5, ascent_steps=2, lr=0.1)
    optimizer.step([make_closure(model, optimizer, part) for part in parts])
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_one_bad_sub_batch_skips_the_whole_step():
    model, parts = make_model(nn.BatchNorm1d(8)), [batch(6, seed=s) for s in range(3)]
    parts[1][0][0, 0] = math.nan
    optimizer = SAM(model.parameters(), Adam, rho=0.3, lr=0.1)
    before = everything(model)
    optimizer.step([make_closure(model, optimizer, part) for part in parts])
    assert_same(everything(model), before)
    assert optimizer.skipped_steps == 1
    assert not optimizer.state
    optimizer.step(make_closure(model, optimizer, parts[0]))
    assert optimizer.skipped_steps == 1


def test_a_parameter_used_by_one_closure_of_two_gets_half_its_gradient():
    a, b = (nn.Parameter(torch.tensor([1.0], dtype=F64)) for _ in range(2))
    optimizer = SAM([a, b], rho=0.5, lr=1.0)

    def closure(p):
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    optimizer.step([lambda: closure(a), lambda: closure(b)])
    assert a.item() == b.item() == 1 - 3 / 2


# What a step leaves alone


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(8),
        nn.BatchNorm1d(8, momentum=None),
        nn.BatchNorm1d(8, affine=False),
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    ],
    ids=["BatchNorm", "cumulative", "without weights", "InstanceNorm", "spectral norm"],
)
@pytest.mark.parametrize("k", [1, 3])
def test_buffers_move_as_in_one_forward_pass_at_theta_0(layer, k):
    model = make_model(copy.deepcopy(layer))
    twin = copy.deepcopy(model)
    optimizer = SAM(model.parameters(), rho=0.5, ascent_steps=k, lr=0.0)
    for seed in range(3):
        twin(batch(seed=seed)[0])
        optimizer.step(make_closure(model, optimizer, batch(seed=seed)))
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert_no_hooks_left(model)


class Rebinding(nn.Module):
    """Running statistics that are bound anew instead of changed in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=F64))
        self.register_buffer("switched_off", None)

    def forward(self, inputs):
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
        return inputs - self.mean


@pytest.mark.parametrize("guarded", [False, True])
def test_buffers_that_are_bound_anew_move_once_too(guarded):
    model = make_model(Rebinding())
    twin = copy.deepcopy(model)
    twin(batch()[0])
    optimizer = SAM(model.parameters(), rho=0.5, lr=0.0, model=model if guarded else None)
    optimizer.step(make_closure(model, optimizer))
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_modules_called_one_by_one_in_the_closure_are_guarded_as_well():
    model = make_model(nn.BatchNorm1d(8))
    twin = copy.deepcopy(model)
    twin(batch()[0])
    optimizer = SAM(model.parameters(), rho=0.5, lr=0.0)

    def closure():
        optimizer.zero_grad()
        hidden = batch()[0]
        for module in model:
            hidden = module(hidden)
        loss = cross_entropy(hidden, batch()[1])
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert_no_hooks_left(model)


def test_by_hand_buffers_are_guarded_from_the_ascent_on():
    model = make_model(nn.BatchNorm1d(8))
    twin = copy.deepcopy(model)
    twin(batch()[0])
    optimizer = SAM(model.parameters(), rho=0.5, lr=0.0)
    closure = make_closure(model, optimizer)
    closure()
    optimizer.ascend()
    closure()
    optimizer.restore()
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert_no_hooks_left(model)


def test_the_buffers_of_other_threads_are_none_of_its_business():
    model, other = make_model(), nn.BatchNorm1d(5).double()
    optimizer = SAM(model.parameters(), rho=0.5, lr=0.0)
    make_closure(model, optimizer)()
    optimizer.ascend()
    worker = threading.Thread(target=other, args=(batch()[0],))
    worker.start()
    worker.join()
    optimizer.restore()
    assert other.num_batches_tracked == 1


def test_an_optimizer_dropped_in_the_middle_of_a_step_leaves_no_hook_behind():
    model = make_model(nn.BatchNorm1d(8))
    optimizer = SAM(model.parameters(), rho=0.5, lr=0.1)
    model(batch()[0]).sum().backward()
    optimizer.ascend()
    del optimizer
    model(batch()[0])
    assert_no_hooks_left(model)


def test_a_discarded_optimizer_is_freed_at_once():
    model = make_model()
    optimizer = SAM(model.parameters(), Adam, lr=0.1)
    model(batch()[0]).sum().backward()
    optimizer.ascend()
    optimizer.descend()
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


class Recorder(nn.Module):
    """Keeps what passes through it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, inputs):
        self.seen.append(inputs.detach().clone())
        return inputs


@pytest.mark.parametrize("replay", [True, False])
def test_the_passes_share_their_dropout_mask_unless_told_otherwise(replay):
    recorder = Recorder()
    model = make_model(nn.Dropout(0.5), recorder)
    optimizer = SAM(model.parameters(), rho=0.01, ascent_steps=2, lr=0.1, replay_rng=replay)
    torch.manual_seed(0)
    for _ in range(2):
        optimizer.step(make_closure(model, optimizer))
    masks = [seen == 0 for seen in recorder.seen]
    same = [torch.equal(masks[0], masks[i]) for i in range(1, 6)]
    assert same == ([True, True, False, False, False] if replay else [False] * 5)


def test_after_a_step_the_random_numbers_go_on_as_after_one_pass():
    model = make_model(nn.Dropout(0.5))
    optimizer = SAM(model.parameters(), ascent_steps=3, lr=0.1)
    torch.manual_seed(0)
    model(batch()[0])
    expected = torch.rand(3)
    torch.manual_seed(0)
    optimizer.step(make_closure(model, optimizer))
    assert torch.equal(torch.rand(3), expected)


def test_parameters_keep_their_storage():
    model = make_model()
    pointers = [p.data_ptr() for p in model.parameters()]
    optimizer = SAM(model.parameters(), Adam, ascent_steps=2, lr=0.1)
    for _ in range(3):
        optimizer.step(make_closure(model, optimizer))
    assert [p.data_ptr() for p in model.parameters()] == pointers


# Steps that go wrong


def spoil(model, optimizer, which, what):
    """A closure that spoils the loss or a gradient of pass number ``which``."""
    inner = make_closure(model, optimizer)

    def closure():
        loss = inner()
        if inner.calls == which + 1:
            if what == "loss":
                return loss.detach() * math.nan
            list(model.parameters())[2].grad[0] = math.inf if what == "inf" else math.nan
        return loss

    return closure


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("what", ["inf", "nan", "loss"])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_step_that_is_not_finite_leaves_no_trace(which, what, norm, policy):
    model = make_model(nn.BatchNorm1d(8))
    optimizer = SAM(model.parameters(), Adam, norm=norm, ascent_steps=2, nonfinite=policy, lr=0.1)
    optimizer.step(make_closure(model, optimizer))
    before = everything(model)
    state = copy.deepcopy(optimizer.base_optimizer.state_dict()["state"])
    if policy == "raise":
        with pytest.raises(FloatingPointError, match="the weights are unchanged"):
            optimizer.step(spoil(model, optimizer, which, what))
    else:
        optimizer.step(spoil(model, optimizer, which, what))
    assert optimizer.skipped_steps == (policy == "skip")
    assert_same(everything(model), before)
    for p, own in optimizer.base_optimizer.state_dict()["state"].items():
        assert_same(own, state[p])
    assert_no_hooks_left(model)
    optimizer.step(make_closure(model, optimizer))
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_closure_never_sees_weights_that_are_not_finite():
    model = make_model()
    optimizer = SAM(model.parameters(), ascent_steps=2, lr=0.1)
    spoiled, finite = spoil(model, optimizer, 0, "nan"), []

    def closure():
        finite.append(all(p.isfinite().all() for p in model.parameters()))
        return spoiled()

    optimizer.step(closure)
    assert finite == [True] * 3


def test_with_the_policy_off_nobody_looks():
    model = make_model()
    optimizer = SAM(model.parameters(), nonfinite=None, lr=0.1)
    optimizer.step(spoil(model, optimizer, 1, "nan"))
    assert optimizer.skipped_steps == 0
    assert not all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("which", [0, 1])
def test_by_hand_a_gradient_that_is_not_finite_skips_the_descent(which):
    model = make_model()
    optimizer = SAM(model.parameters(), Adam, lr=0.1)
    closure = spoil(model, optimizer, which, "inf")
    before = weights(model)
    closure()
    optimizer.ascend()
    closure()
    optimizer.descend()
    assert_same(weights(model), before)
    assert optimizer.skipped_steps == 1
    assert not optimizer.state


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_exception_in_a_pass_brings_the_weights_home_and_goes_on(error, call):
    model = make_model(nn.BatchNorm1d(8))
    optimizer = SAM(model.parameters(), ascent_steps=2, lr=0.1)
    inner = make_closure(model, optimizer)
    before = weights(model)

    def closure():
        loss = inner()
        if inner.calls == call:
            raise error("from the closure")
        return loss

    with pytest.raises(error, match="from the closure"):
        optimizer.step(closure)
    assert_same(weights(model), before)
    assert model[1].num_batches_tracked == 1
    assert_no_hooks_left(model)
    optimizer.step(inner)
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (["restore"], "call ascend\\(\\) first"),
        (["descend"], "before ascend"),
        (["ascend", "ascend"], "ascent_steps=1"),
        (["ascend", "restore", "restore"], "call ascend\\(\\) first"),
        (["ascend", "restore", "descend", "descend"], "before ascend"),
        (["ascend", "step"], "after ascend"),
        (["ascend", "base"], "restore\\(\\) first"),
        (["ascend", "pickle"], "restore\\(\\) before copying"),
    ],
)
def test_calls_in_the_wrong_order_say_what_to_do(calls, message):
    model = make_model()
    optimizer = SAM(model.parameters(), lr=0.1)
    closure = make_closure(model, optimizer)
    closure()
    actions = {
        "step": lambda: optimizer.step(closure),
        "base": optimizer.base_optimizer.step,
        "pickle": lambda: pickle.dumps(optimizer),
    }
    *before, last = [actions.get(name) or getattr(optimizer, name) for name in calls]
    for action in before:
        action()
    with pytest.raises(RuntimeError, match=message):
        last()
    with contextlib.suppress(RuntimeError):
        optimizer.restore()
    assert_no_hooks_left(model)


def test_a_restored_step_may_be_given_up():
    model = make_model()
    optimizer = SAM(model.parameters(), lr=0.1)
    closure = spoil(model, optimizer, 0, "nan")
    closure()
    optimizer.ascend()
    closure()
    optimizer.restore()  # and no descend
    before = weights(model)
    closure()
    optimizer.ascend()
    closure()
    optimizer.descend()
    assert optimizer.skipped_steps == 0
    assert not torch.equal(weights(model)[0], before[0])


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_sparse_and_complex_gradients_are_refused_by_name(kind):
    if kind == "sparse":
        module = nn.Embedding(4, 2, sparse=True)
        params, loss = list(module.parameters()), lambda: module(torch.tensor([1])).sum()
    else:
        params = [nn.Parameter(torch.ones(2, dtype=torch.complex64))]
        loss = lambda: params[0].abs().sum()  # noqa: E731
    optimizer = SAM(params, lr=0.1)

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    before = params[0].detach().clone()
    with pytest.raises(TypeError, match="dense real gradients"):
        optimizer.step(closure)
    assert torch.equal(params[0], before)


def test_lbfgs_cannot_be_the_base():
    with pytest.raises(ValueError, match="LBFGS"):
        SAM(make_model().parameters(), torch.optim.LBFGS)


# Groups, state, copies


def test_groups_and_state_are_those_of_the_base():
    model = make_model()
    optimizer = SAM(model.parameters(), Adam, lr=0.1)
    optimizer.step(make_closure(model, optimizer))
    base = optimizer.base_optimizer
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    base.load_state_dict(base.state_dict())
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state


def test_the_callers_group_dicts_are_not_modified():
    model = make_model()
    groups = [{"params": list(model[0].parameters())}]
    extra = {"params": list(model[2].parameters()), "lr": 0.5}
    optimizer = SAM(groups, lr=0.1)
    optimizer.add_param_group(extra)
    assert groups == [{"params": list(model[0].parameters())}]
    assert extra == {"params": list(model[2].parameters()), "lr": 0.5}
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert optimizer.param_groups[1]["rho"] == 0.05


def test_a_group_added_to_the_base_gets_a_rho_as_well():
    model = make_model()
    optimizer = SAM(model[0].parameters(), rho=0.3, lr=0.1)
    optimizer.base_optimizer.add_param_group({"params": model[2].parameters()})
    assert optimizer.param_groups[1]["rho"] == 0.3
    optimizer.step(make_closure(model, optimizer))


def test_named_parameters_keep_their_names():
    model = make_model()
    optimizer = SAM(model.named_parameters(), lr=0.1)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    optimizer.step(make_closure(model, optimizer))


def test_a_base_that_fills_its_state_when_it_is_made_keeps_it():
    model = make_model()
    optimizer = SAM(model.parameters(), functools.partial(Adagrad, initial_accumulator_value=0.5), lr=0.1)
    assert all(optimizer.state[p]["sum"].eq(0.5).all() for p in model.parameters())
    optimizer.step(make_closure(model, optimizer))


def test_a_plain_base_optimizer_s_checkpoint_can_be_continued_with_sam():
    model = make_model()
    plain = Adam(model.parameters(), lr=0.01)
    plain.step(make_closure(model, plain))
    optimizer = SAM(model.parameters(), Adam, rho=0.3)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["rho"] == 0.3
    assert optimizer.param_groups[0]["lr"] == 0.01
    optimizer.step(make_closure(model, optimizer))
    assert optimizer.state[model[0].weight]["step"] == 2


def test_the_count_of_skipped_steps_is_saved():
    model = make_model()
    optimizer = SAM(model.parameters(), lr=0.1)
    optimizer.step(spoil(model, optimizer, 0, "nan"))
    fresh = SAM(model.parameters(), lr=0.1)
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.skipped_steps == 1


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_and_pickles_go_on_bit_for_bit_and_on_their_own(copier):
    model = make_model(nn.BatchNorm1d(8))
    optimizer = SAM(model.parameters(), Adam, rho=0.2, norm="linf", ascent_steps=2, adaptive=True, lr=0.01)
    optimizer.step(make_closure(model, optimizer))
    twin, copied = copier((model, optimizer))
    assert copied.param_groups is copied.base_optimizer.param_groups
    copied.step(make_closure(twin, copied))
    assert not torch.equal(model[0].weight, twin[0].weight)
    optimizer.step(make_closure(model, optimizer))
    assert_same(everything(model), everything(twin))
    make_closure(twin, copied)()
    copied.ascend()
    with pytest.raises(RuntimeError, match="restore"):
        copied.base_optimizer.step()
    copied.restore()


def test_hooks_on_the_wrapper_and_on_the_base_are_called():
    model = make_model()
    optimizer = SAM(model.parameters(), lr=0.1)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("wrapper"))
    optimizer.base_optimizer.register_step_post_hook(lambda *_: called.append("base"))
    optimizer.step(make_closure(model, optimizer))
    assert called == ["base", "wrapper"]


@pytest.mark.parametrize("target", ["wrapper", "base"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_schedulers_work_on_either_without_warnings(target, by_hand):
    model = make_model()
    optimizer = SAM(model.parameters(), lr=0.1)
    scheduler = CosineAnnealingLR(optimizer if target == "wrapper" else optimizer.base_optimizer, T_max=4)
    closure, rates = make_closure(model, optimizer), []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        if by_hand:
            closure()
            optimizer.ascend()
            closure()
            optimizer.descend()
        else:
            optimizer.step(closure)
        scheduler.step()
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * t / 4)) for t in range(4)])


# As on an accelerator: scalars stay tensors


@pytest.fixture
def _scalars_stay_on_the_device(monkeypatch):
    monkeypatch.setattr(perturb, "on_host_if_free", lambda scalar: scalar)
    monkeypatch.setattr(sam, "on_host_if_free", lambda scalar: scalar)


@pytest.mark.usefixtures("_scalars_stay_on_the_device")
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_with_scalars_on_the_device_the_trajectory_is_the_same(norm):
    model, data = make_model(), batch()
    options = {"rho": 0.1, "norm": norm, "adaptive": "all", "eta": 0.01, "lr": 0.2, "momentum": 0.9}
    expected = slow_sam(model, data, 5, k=2, **options)
    optimizer = SAM(model.parameters(), SGD, ascent_steps=2, **options)
    for _ in range(5):
        optimizer.step(make_closure(model, optimizer, data))
    got = torch.cat([p.detach().flatten() for p in model.parameters()])
    # The CPU's fused kernel takes a learning rate on the device in float32.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("_scalars_stay_on_the_device")
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("what", ["inf", "nan", "loss"])
def test_with_scalars_on_the_device_a_bad_step_leaves_no_trace_and_shows_no_bad_weights(which, what):
    model = make_model(nn.BatchNorm1d(8), dtype=torch.float32)
    optimizer = SAM(model.parameters(), Adam, ascent_steps=2, lr=0.1)
    spoiled, before, finite = spoil(model, optimizer, which, what), everything(model), []

    def closure():
        finite.append(all(p.isfinite().all() for p in model.parameters()))
        return spoiled()

    optimizer.step(closure)
    assert finite == [True] * 3
    assert_same(everything(model), before)
    assert optimizer.skipped_steps == 1


class CountReads(TorchDispatchMode):
    """Counts the times a tensor's value is asked for on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("_scalars_stay_on_the_device")
@pytest.mark.parametrize("adaptive", [False, "all"])
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_ascent_reads_nothing_on_the_host_and_a_whole_step_once(norm, adaptive):
    model = make_model(nn.BatchNorm1d(8), nn.Dropout(0.5), dtype=torch.float32)
    optimizer = SAM(model.parameters(), norm=norm, adaptive=adaptive, fused=True, lr=0.1)
    closure = make_closure(model, optimizer)
    optimizer.step(closure)
    closure()
    with CountReads() as reads:
        optimizer.ascend()
    assert reads.count == 0
    optimizer.restore()
    with CountReads() as reads:
        optimizer.step(closure)
    assert reads.count == 1


# With the rest of PyTorch


def test_a_lightning_style_closure_works():
    # Lightning hands over a partial that enables gradients, clips afterwards and returns a detached loss.
    results = []
    for wrapped in (False, True):
        model = make_model()
        optimizer = SAM(model.parameters(), rho=0.2, lr=0.1)
        inner = make_closure(model, optimizer)

        def wrap(module, closure):
            with torch.enable_grad():
                loss = closure()
            nn.utils.clip_grad_norm_(module.parameters(), 1e6)
            return loss.detach().clone()

        for _ in range(3):
            with torch.no_grad() if wrapped else torch.enable_grad():
                optimizer.step(functools.partial(wrap, model, inner) if wrapped else inner)
        results.append(weights(model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_clipping_in_the_closure_bounds_the_step_and_not_the_perturbation():
    model = make_model()
    optimizer = SAM(model.parameters(), rho=0.3, lr=1.0)
    inner, distances = make_closure(model, optimizer), []
    start = torch.cat([w.flatten() for w in weights(model)])

    def closure():
        distances.append((torch.cat([w.flatten() for w in weights(model)]) - start).norm().item())
        loss = inner()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    optimizer.step(closure)
    assert distances == pytest.approx([0, 0.3])
    assert (torch.cat([w.flatten() for w in weights(model)]) - start).norm().item() == pytest.approx(
        1e-3, rel=1e-4
    )


def test_autocast_around_the_step_does_not_hide_the_perturbation():
    # Autocast keeps its casts of the weights until its block ends; stale ones would repeat the first pass.
    model = make_model(dtype=torch.float32)
    optimizer = SAM(model.parameters(), rho=1.0, lr=0.0)
    inner, losses = make_closure(model, optimizer), []

    def closure():
        losses.append(inner())
        return losses[-1]

    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step(closure)
        after = inner()
    assert losses[1].item() > losses[0].item() + 0.1
    assert after.item() == losses[0].item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_come_home_bit_for_bit(dtype):
    model = make_model(dtype=dtype)
    optimizer = SAM(model.parameters(), rho=0.5, ascent_steps=2, lr=0.0)
    before = weights(model)
    for _ in range(20):
        optimizer.step(make_closure(model, optimizer))
    assert_same(weights(model), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_half_precision_weights_the_norm_is_taken_in_float32(dtype):
    theta = nn.Parameter(torch.zeros(10_000, dtype=dtype))
    optimizer = SAM([theta], rho=8.0, lr=0.1)
    theta.grad = torch.full_like(theta, 300.0)  # 300 squared is beyond float16
    optimizer.ascend()
    assert theta.double().norm().item() == pytest.approx(8.0, rel=0.01)
    optimizer.restore()


def test_a_model_that_changes_its_precision_between_steps_still_comes_home():
    model = make_model(dtype=torch.float32)
    optimizer = SAM(model.parameters(), rho=0.5, lr=0.0)
    optimizer.step(make_closure(model, optimizer))
    model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1e-12)
    before = weights(model)
    optimizer.step(make_closure(model, optimizer))
    assert_same(weights(model), before)


@pytest.mark.parametrize("how", ["torch.compile", "model.compile"])
def test_a_compiled_model_takes_the_same_steps_as_an_eager_one(how):
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = make_model(nn.BatchNorm1d(8), dtype=torch.float32)
        called = model
        if compiled and how == "torch.compile":
            called = torch.compile(model, backend="aot_eager")
        elif compiled:
            model.compile(backend="aot_eager")
        optimizer = SAM(model.parameters(), rho=0.3, lr=0.1, momentum=0.9, model=model if compiled else None)
        inputs, targets = batch(dtype=torch.float32)

        def closure(called=called, optimizer=optimizer, inputs=inputs, targets=targets):
            optimizer.zero_grad()
            loss = cross_entropy(called(inputs), targets)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        results.append(everything(model))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-6)
    assert results[1]["1.num_batches_tracked"] == 3


def test_step_lr_on_a_saved_and_loaded_optimizer_goes_on():
    model = make_model()
    optimizer = SAM(model.parameters(), lr=0.8)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step(make_closure(model, optimizer))
    scheduler.step()
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    fresh = SAM(model.parameters(), lr=0.8)
    again = StepLR(fresh, step_size=1, gamma=0.5)
    saved = torch.load(file, weights_only=True)
    fresh.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    fresh.step(make_closure(model, fresh))
    again.step()
    assert fresh.param_groups[0]["lr"] == pytest.approx(0.2)
