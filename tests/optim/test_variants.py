"""Averaged multi-step SAM and Lookbehind-SAM: what they do with the gradients of the climb."""

import copy
import functools
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from samkit.optim import SAM, AveragedSAM, LookbehindSAM

F64 = torch.float64
BOTH = pytest.mark.parametrize("kind", [AveragedSAM, LookbehindSAM])


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
        loss.backward()
        return loss

    closure.calls = 0
    return closure


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def quadratic(optimizer, theta, h):
    def closure():
        optimizer.zero_grad()
        loss = theta @ h @ theta / 2
        loss.backward()
        return loss

    return closure


@BOTH
def test_two_steps_on_a_quadratic_are_the_closed_form(kind):
    h = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=F64)
    start = torch.tensor([1.0, -2.0], dtype=F64)
    theta = nn.Parameter(start.clone())
    optimizer = kind([theta], SGD, rho=0.3, ascent_steps=2, lr=0.1)
    optimizer.step(quadratic(optimizer, theta, h))
    g0 = h @ start
    g1 = h @ (start + 0.15 * g0 / g0.norm())
    g2 = h @ (start + 0.15 * g0 / g0.norm() + 0.15 * g1 / g1.norm())
    torch.testing.assert_close(theta.detach(), start - 0.1 * (g1 + g2) / 2, rtol=1e-14, atol=0)


def slow(kind, model, parts, steps, *, rho, k, norm, lr, momentum, weight_decay, slow_step):
    """Both algorithms written out on one flat vector, with autograd alone."""
    shapes = [p.shape for p in model.parameters()]
    theta = flat(model)
    velocity = torch.zeros_like(theta)

    def gradient(vector, data):
        leaf = vector.clone().requires_grad_()
        pieces = leaf.split([math.prod(s) for s in shapes])
        named = {n: v.view(s) for (n, _), v, s in zip(model.named_parameters(), pieces, shapes, strict=True)}
        loss = cross_entropy(torch.func.functional_call(model, named, data[0]), data[1])
        return torch.autograd.grad(loss, leaf)[0]

    for _ in range(steps):
        ways = []
        for data in parts:
            point, way = theta, []
            for _ in range(k):
                g = gradient(point, data)
                point = point + rho / k * (g / g.norm() if norm == "l2" else g.sign())
                way.append(gradient(point, data))
            ways.append(torch.stack(way))
        met = torch.stack(ways).mean(dim=0)
        fast = theta
        for g in met if kind is LookbehindSAM else [met.mean(dim=0)]:
            velocity = momentum * velocity + g + weight_decay * fast
            fast = fast - lr * velocity
        theta = theta + slow_step * (fast - theta) if kind is LookbehindSAM else fast
    return theta


@BOTH
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_trajectory_is_that_of_an_independent_slow_implementation(kind, k, norm, parts):
    model, data = make_model(), [batch(8, seed=i) for i in range(parts)]
    options = {"rho": 0.2, "norm": norm, "lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}
    expected = slow(kind, model, data, 10, k=k, slow_step=0.3, **options)
    own = {"slow_step": 0.3} if kind is LookbehindSAM else {}
    optimizer = kind(model.parameters(), SGD, ascent_steps=k, **own, **options)
    closures = [make_closure(model, optimizer, part) for part in data]
    for _ in range(10):
        optimizer.step(closures if parts > 1 else closures[0])
    torch.testing.assert_close(flat(model), expected, rtol=0, atol=1e-11)


def train(kind, steps=6, model=None, base=SGD, **options):
    model = model or make_model()
    settings = {"rho": 0.2, "ascent_steps": 3, "lr": 0.2, **options}
    optimizer = kind(model.parameters(), base, **settings)
    closure = make_closure(model, optimizer)
    for _ in range(steps):
        optimizer.step(closure)
    return flat(model)


@pytest.mark.parametrize("kind", [AveragedSAM, functools.partial(LookbehindSAM, slow_step=1.0)])
def test_with_one_ascent_step_both_are_sam_bit_for_bit(kind):
    options = {"ascent_steps": 1, "momentum": 0.9}
    assert torch.equal(train(kind, **options), train(SAM, **options))


def test_with_plain_sgd_a_slow_step_of_one_over_k_is_the_average():
    lookbehind = train(functools.partial(LookbehindSAM, slow_step=1 / 3))
    torch.testing.assert_close(lookbehind, train(AveragedSAM), rtol=1e-12, atol=1e-13)
    with_momentum = functools.partial(train, momentum=0.9)
    apart = with_momentum(functools.partial(LookbehindSAM, slow_step=1 / 3)) - with_momentum(AveragedSAM)
    assert apart.abs().max() > 1e-3, "momentum moves on at each inner step, so the two part"


def test_the_average_is_not_the_last_gradient():
    assert (train(AveragedSAM) - train(SAM)).abs().max() > 1e-3


@BOTH
@pytest.mark.parametrize("base", [functools.partial(SGD, momentum=0.9), Adam])
def test_rho_zero_is_the_base_optimizer_bit_for_bit(kind, base):
    model = make_model()
    optimizer = base(model.parameters(), lr=0.1)
    closure = make_closure(model, optimizer)
    for _ in range(5):
        optimizer.step(closure)
    assert torch.equal(train(kind, steps=5, base=base, rho=0.0, lr=0.1), flat(model))


@BOTH
@pytest.mark.parametrize("k", [1, 3])
def test_by_hand_and_with_a_closure_are_the_same_step(kind, k):
    by_hand, closed = make_model(), make_model()
    options = {"rho": 0.2, "ascent_steps": k, "lr": 0.2, "momentum": 0.9}
    hand, auto = kind(by_hand.parameters(), SGD, **options), kind(closed.parameters(), SGD, **options)
    for step in range(4):
        auto.step(make_closure(closed, auto))
        make_closure(by_hand, hand)()
        for _ in range(k):
            hand.ascend()
            make_closure(by_hand, hand)()
        if step % 2:
            hand.restore()
        hand.descend()
        assert torch.equal(flat(by_hand), flat(closed))


@BOTH
def test_by_hand_a_step_given_up_leaves_nothing_for_the_next(kind):
    model, untouched = make_model(), make_model()
    optimizer = kind(model.parameters(), SGD, rho=0.2, ascent_steps=2, lr=0.2)
    closure = make_closure(model, optimizer, batch(seed=9))
    closure()
    optimizer.ascend()
    closure()
    optimizer.ascend()
    closure()
    optimizer.restore()
    other = kind(untouched.parameters(), SGD, rho=0.2, ascent_steps=2, lr=0.2)
    optimizer.step(make_closure(model, optimizer))
    other.step(make_closure(untouched, other))
    assert torch.equal(flat(model), flat(untouched))


@BOTH
@pytest.mark.parametrize("k", [1, 4])
def test_a_step_costs_one_gradient_more_than_there_are_ascent_steps(kind, k):
    model = make_model()
    optimizer = kind(model.parameters(), SGD, rho=0.2, ascent_steps=k, lr=0.2)
    closure = make_closure(model, optimizer)
    optimizer.step(closure)
    assert closure.calls == k + 1


@BOTH
def test_running_statistics_and_random_numbers_move_as_in_one_pass(kind):
    model = make_model(nn.BatchNorm1d(8), nn.Dropout(0.5))
    once = copy.deepcopy(model)
    torch.manual_seed(3)
    once(batch()[0])
    expected = torch.rand(3)
    torch.manual_seed(3)
    optimizer = kind(model.parameters(), SGD, rho=0.2, ascent_steps=3, lr=0.2)
    optimizer.step(make_closure(model, optimizer))
    assert torch.equal(torch.rand(3), expected)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(model[1], name), getattr(once[1], name))


@BOTH
@pytest.mark.parametrize("bad_pass", [0, 1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_is_not_finite_leaves_no_trace(kind, bad_pass, parts):
    def run(poisoned):
        model = make_model(nn.BatchNorm1d(8))
        optimizer = kind(model.parameters(), SGD, rho=0.2, ascent_steps=3, lr=0.2, momentum=0.9)
        good = make_closure(model, optimizer)

        def bad():
            loss = good()
            if bad.calls == bad_pass:
                model[0].weight.grad[0, 0] = math.nan
            bad.calls += 1
            return loss

        optimizer.step([good] * parts)
        if poisoned:
            bad.calls = 0
            optimizer.step([good] * (parts - 1) + [bad])
        optimizer.step([good] * parts)
        return model.state_dict(), optimizer.skipped_steps

    clean, none = run(poisoned=False)
    after, one = run(poisoned=True)
    assert (none, one) == (0, 1)
    assert all(torch.equal(after[name], clean[name]) for name in clean)


@BOTH
def test_where_the_gradient_is_zero_nothing_moves(kind):
    theta = nn.Parameter(torch.zeros(2, dtype=F64))
    optimizer = kind([theta], SGD, rho=0.3, ascent_steps=3, lr=0.1)
    optimizer.step(quadratic(optimizer, theta, torch.eye(2, dtype=F64)))
    assert torch.equal(theta.detach(), torch.zeros(2, dtype=F64))
    assert optimizer.skipped_steps == 0


@BOTH
def test_an_exception_in_a_pass_brings_the_weights_home_and_the_next_step_is_sound(kind):
    model, untouched = make_model(), make_model()
    optimizer = kind(model.parameters(), SGD, rho=0.2, ascent_steps=3, lr=0.2)
    closure = make_closure(model, optimizer, batch(seed=9))

    def breaks():
        if closure.calls == 2:
            raise KeyError("the data ran out")
        return closure()

    with pytest.raises(KeyError):
        optimizer.step(breaks)
    assert torch.equal(flat(model), flat(untouched))
    other = kind(untouched.parameters(), SGD, rho=0.2, ascent_steps=3, lr=0.2)
    optimizer.step(make_closure(model, optimizer))
    other.step(make_closure(untouched, other))
    assert torch.equal(flat(model), flat(untouched))


@BOTH
def test_a_parameter_that_only_some_passes_use_counts_as_zero_in_the_others(kind):
    a, b = nn.Parameter(torch.ones(1, dtype=F64)), nn.Parameter(torch.ones(1, dtype=F64))
    optimizer = kind([a, b], SGD, rho=0.2, ascent_steps=2, lr=0.1)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(1)
        loss = (a**2).sum() + ((3 * b).sum() if len(calls) == 2 else 0.0)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert b.item() == pytest.approx(1 - 0.1 * 3 / 2)


@BOTH
def test_maximising_minus_the_loss_is_minimising_the_loss(kind):
    h = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=F64)
    ends = []
    for sign in (1, -1):
        theta = nn.Parameter(torch.tensor([1.0, -2.0], dtype=F64))
        optimizer = kind([theta], SGD, rho=0.3, ascent_steps=3, lr=0.1, maximize=sign < 0)
        for _ in range(4):
            optimizer.step(quadratic(optimizer, theta, sign * h))
        ends.append(theta.detach())
    torch.testing.assert_close(*ends, rtol=1e-13, atol=0)


@BOTH
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_a_saved_or_copied_run_goes_on_bit_for_bit(kind, way):
    model = make_model()
    optimizer = kind(model.parameters(), SGD, rho=0.2, ascent_steps=3, lr=0.2, momentum=0.9)
    for _ in range(3):
        optimizer.step(make_closure(model, optimizer))
    if way == "state_dict":
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        twin = make_model(seed=5)
        other = kind(twin.parameters(), SGD, rho=0.1, ascent_steps=3, lr=0.1, momentum=0.1)
        for thing, state in zip((twin, other), torch.load(file, weights_only=True), strict=True):
            thing.load_state_dict(state)
    elif way == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    else:
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    for net, one in ((model, optimizer), (twin, other)):
        for _ in range(3):
            one.step(make_closure(net, one))
    assert torch.equal(flat(model), flat(twin))


def test_lookbehind_keeps_its_slow_step_in_a_copy():
    optimizer = LookbehindSAM(make_model().parameters(), SGD, slow_step=0.7, lr=0.1)
    assert copy.deepcopy(optimizer).slow_step == 0.7


def test_stepping_lookbehind_s_base_by_hand_is_refused_and_says_what_to_do():
    model = make_model()
    optimizer = LookbehindSAM(model.parameters(), SGD, rho=0.2, lr=0.1)
    before = flat(model)
    make_closure(model, optimizer)()
    optimizer.ascend()
    make_closure(model, optimizer)()
    optimizer.restore()
    with pytest.raises(RuntimeError, match=r"descend\(\)"):
        optimizer.base_optimizer.step()
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("bad", [0.0, -0.5, 1.5, math.nan])
def test_a_slow_step_outside_zero_and_one_is_refused(bad):
    with pytest.raises(ValueError, match="slow_step"):
        LookbehindSAM(make_model().parameters(), SGD, slow_step=bad, lr=0.1)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_without_a_gradient_stay_bit_for_bit(kind, dtype):
    model = make_model(dtype=dtype)
    idle = nn.Parameter(torch.tensor([-0.0, 1.1], dtype=dtype))
    before = idle.detach().clone()
    optimizer = kind([*model.parameters(), idle], SGD, rho=0.2, ascent_steps=2, lr=0.1)
    optimizer.step(make_closure(model, optimizer))
    assert torch.equal(idle.detach(), before)
    assert torch.equal(idle.detach().signbit(), before.signbit())
    assert flat(model).isfinite().all()


def test_the_mean_of_large_half_precision_gradients_does_not_overflow():
    theta = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = AveragedSAM([theta], SGD, rho=0.0625, ascent_steps=3, lr=2.0**-15)

    def closure():
        theta.grad = torch.full_like(theta, 32768.0)  # three of them are beyond the largest float16, 65504
        return torch.tensor(1.0)

    optimizer.step(closure)
    assert theta.item() == 0.0


@BOTH
def test_the_mean_over_closures_holds_where_no_closure_uses_the_last_gradient(kind):
    theta = nn.Parameter(torch.ones(1, dtype=F64))
    optimizer = kind([theta], SGD, rho=0.2, ascent_steps=2, lr=0.1)

    def closure_of(slope):
        calls = []

        def closure():
            optimizer.zero_grad()
            calls.append(1)
            if len(calls) < 3:
                (slope * theta).sum().backward()
            return torch.tensor(1.0)

        return closure

    optimizer.step([closure_of(2.0), closure_of(6.0)])
    assert theta.item() == pytest.approx(1 - 0.1 * (4 + 0) / 2)


def test_lookbehind_refuses_gradients_that_were_changed_after_restore():
    model = make_model()
    optimizer = LookbehindSAM(model.parameters(), SGD, rho=0.2, ascent_steps=2, lr=0.1)
    before, closure = flat(model), make_closure(model, optimizer)
    closure()
    for _ in range(2):
        optimizer.ascend()
        closure()
    optimizer.restore()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="clip after each backward"):
        optimizer.descend()
    assert torch.equal(flat(model), before)


def test_clipping_after_restore_clips_the_average():
    theta = nn.Parameter(torch.ones(1, dtype=F64))
    optimizer = AveragedSAM([theta], SGD, rho=1.0, ascent_steps=2, lr=0.1)
    closure = quadratic(optimizer, theta, torch.eye(1, dtype=F64))
    closure()
    for _ in range(2):
        optimizer.ascend()
        closure()
    optimizer.restore()
    nn.utils.clip_grad_norm_([theta], 0.5)
    optimizer.descend()
    assert theta.item() == pytest.approx(1 - 0.1 * 0.5, rel=1e-5)


def test_when_the_base_optimizer_breaks_off_lookbehind_s_weights_are_home():
    class Breaks(SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            if self.steps == 2:
                raise MemoryError
            return super().step(closure)

    model = make_model()
    before = flat(model)
    optimizer = LookbehindSAM(model.parameters(), Breaks, rho=0.2, ascent_steps=3, lr=0.1)
    with pytest.raises(MemoryError):
        optimizer.step(make_closure(model, optimizer))
    assert torch.equal(flat(model), before)
