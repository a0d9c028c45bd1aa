"""The public bug reports about SAM implementations, one test for each; the number is the case's.

Where a case is one instance of a kind, the kind is tested in tests/optim. Cases 3, 17 and 21 need a stage of
their own and have their own files.
"""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from samkit.optim import SAM, XSAM
from samkit.perturb import angle, slerp

F64 = torch.float64


def make_model(*extra, seed=0, dtype=F64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), *extra, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(size=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=generator, dtype=F64), torch.arange(size) % 3


def make_closure(model, optimizer, data=None):
    inputs, targets = data or batch()

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs.to(next(model.parameters()).dtype)), targets)
        if loss.requires_grad:
            loss.backward()
        return loss

    return closure


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_01_running_statistics_move_as_in_one_forward_pass(momentum):
    # davda54/sam#17
    model = make_model(nn.BatchNorm1d(8, momentum=momentum))
    twin = copy.deepcopy(model)
    twin(batch()[0])
    optimizer = SAM(model.parameters(), rho=1.0, lr=0.1)
    optimizer.step(make_closure(model, optimizer))
    assert same(model.buffers(), twin.buffers())
    assert model[1].num_batches_tracked == 1


def test_02_freezing_statistics_twice_in_a_row_does_not_lose_the_momentum():
    # davda54/sam#30
    model = make_model(nn.BatchNorm1d(8, momentum=0.3))
    twin = copy.deepcopy(model)
    optimizer = SAM(model.parameters(), ascent_steps=2, lr=0.0)
    closure = make_closure(model, optimizer)
    optimizer.step(closure)
    with pytest.raises(RuntimeError):  # an interrupted step freezes as well
        optimizer.step(lambda: (_ for _ in ()).throw(RuntimeError))
    optimizer.step(closure)
    assert model[1].momentum == 0.3
    for _ in range(2):
        twin(batch()[0])
    assert same(model.buffers(), twin.buffers())


@pytest.mark.parametrize("bad_pass", [1, 2])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_04_a_bad_gradient_in_either_pass_changes_nothing(bad_pass, value, policy):
    # juntang-zhuang/GSAM#2, davda54/sam#57
    model = make_model()
    optimizer = SAM(model.parameters(), Adam, nonfinite=policy, lr=0.1)
    inner, calls = make_closure(model, optimizer), []

    def closure():
        loss = inner()
        calls.append(loss)
        if len(calls) == bad_pass:
            model[0].weight.grad[0, 0] = value
        return loss

    before = weights(model)
    if policy == "raise":
        with pytest.raises(FloatingPointError):
            optimizer.step(closure)
    else:
        assert torch.equal(optimizer.step(closure), calls[0])
        assert optimizer.skipped_steps == 1
    assert same(weights(model), before)
    assert not optimizer.base_optimizer.state


@pytest.mark.parametrize("make", [SAM, lambda *a, **k: XSAM(*a, search_every=1, **k)], ids=["SAM", "XSAM"])
def test_05_at_a_zero_gradient_the_perturbation_is_zero(make):
    # google-deepmind/optax#1743
    theta = nn.Parameter(torch.zeros(3))
    optimizer = make([theta], rho=0.5, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (theta**2).sum()
        if loss.requires_grad:
            loss.backward()
        return loss

    assert optimizer.step(closure).item() == 0
    assert theta.tolist() == [0, 0, 0]
    assert optimizer.skipped_steps == 0


def test_05_a_dead_relu_network_stays_finite():
    # google-deepmind/optax#1743
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        net[0].bias.fill_(-100)
        net[2].bias.zero_()
    optimizer = SAM(net.parameters(), rho=0.5, lr=0.1)
    before = weights(net)

    def closure():
        optimizer.zero_grad()
        loss = mse_loss(net(torch.ones(3, 2)), torch.zeros(3, 1))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert same(weights(net), before)


def test_06_four_micro_batches_in_the_closure_equal_one_batch():
    # davda54/sam#62, nblt/F-SAM#3
    inputs, targets = batch(32)
    results = []
    for pieces in (1, 4):
        model = make_model()
        optimizer = SAM(model.parameters(), rho=0.3, lr=0.1)

        def closure(model=model, optimizer=optimizer, pieces=pieces):
            optimizer.zero_grad()
            total = 0.0
            for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
                loss = cross_entropy(model(x), y) / pieces
                loss.backward()
                total += loss.detach()
            return total

        losses = [optimizer.step(closure) for _ in range(3)]
        results.append([*weights(model), torch.stack(losses).detach()])
    for whole, accumulated in zip(*results, strict=True):
        torch.testing.assert_close(whole, accumulated, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_07_clipping_before_the_ascent_leaves_the_perturbation(norm):
    # davda54/sam#32
    results = []
    for clips in (False, True):
        model = make_model()
        optimizer = SAM(model.parameters(), rho=0.3, norm=norm, lr=0.1)
        make_closure(model, optimizer)()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.ascend()
        results.append(weights(model))
        optimizer.restore()
    for plain, clipped in zip(*results, strict=True):
        torch.testing.assert_close(plain, clipped, rtol=1e-12, atol=1e-14)


def test_08_a_scheduler_on_the_wrapper_and_on_the_base_give_the_same_path():
    # davda54/sam#28
    paths = []
    for target in ("wrapper", "base"):
        model = make_model()
        optimizer = SAM(model.parameters(), lr=0.8)
        scheduler = StepLR(optimizer if target == "wrapper" else optimizer.base_optimizer, 1, gamma=0.5)
        path = []
        for _ in range(4):
            optimizer.step(make_closure(model, optimizer))
            scheduler.step()
            path.append((optimizer.param_groups[0]["lr"], optimizer.base_optimizer.param_groups[0]["lr"]))
        paths.append((path, weights(model)))
    assert paths[0][0] == paths[1][0]
    assert paths[0][0] == [(0.8 * 0.5**t, 0.8 * 0.5**t) for t in range(1, 5)]
    assert same(paths[0][1], paths[1][1])


@pytest.mark.parametrize(("base", "options"), [(SGD, {"momentum": 0.9}), (Adam, {})])
def test_09_a_saved_and_loaded_run_goes_on_bit_for_bit(base, options):
    # davda54/sam#73
    model = make_model()
    optimizer = SAM(model.parameters(), base, rho=0.2, lr=0.05, **options)
    for _ in range(3):
        optimizer.step(make_closure(model, optimizer))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh_model = make_model(seed=9)
    fresh = SAM(fresh_model.parameters(), base, rho=0.7, lr=0.5, **options)
    fresh_model.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimizer"])
    for _ in range(3):
        optimizer.step(make_closure(model, optimizer))
        fresh.step(make_closure(fresh_model, fresh))
    assert same(weights(model), weights(fresh_model))


def test_09_the_file_holds_no_copies_of_the_weights():
    # davda54/sam#73
    model = nn.Linear(1000, 100)
    optimizer = SAM(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 1000)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 20_000  # the weights are 400,000 bytes


def test_10_after_loading_a_learning_rate_of_zero_stops_everything():
    # davda54/sam#34
    model = make_model()
    optimizer = SAM(model.parameters(), lr=0.5, momentum=0.9)
    optimizer.step(make_closure(model, optimizer))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    before = weights(model)
    optimizer.step(make_closure(model, optimizer))
    assert same(weights(model), before)


def test_11_an_added_group_gets_the_missing_defaults():
    # davda54/sam#65
    model = make_model()
    optimizer = SAM(model[0].parameters(), rho=0.3, lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    first, second = optimizer.param_groups
    assert {**first, "params": None, "lr": None} == {**second, "params": None, "lr": None}
    assert second["lr"] == 0.01
    before = weights(model[2])
    optimizer.step(make_closure(model, optimizer))
    assert not same(weights(model[2]), before)


@pytest.mark.parametrize("base", [SGD, Adam])
def test_12_a_gradient_in_the_second_pass_only_is_a_plain_update(base):
    # davda54/sam#51
    a, b = (nn.Parameter(torch.tensor([1.0], dtype=F64)) for _ in range(2))
    optimizer = SAM([a, b], base, rho=0.5, lr=0.1)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(b.item())
        loss = (a**2).sum() if len(calls) == 1 else (a**2 + b**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert calls == [1.0, 1.0]
    assert b.item() == pytest.approx(0.8 if base is SGD else 0.9)


def test_13_without_any_gradient_a_step_does_nothing_and_returns_the_loss():
    # kozistr/pytorch_optimizer#65
    model = make_model()
    optimizer = SAM(model.parameters(), Adam, lr=0.1)
    before = weights(model)
    assert optimizer.step(lambda: torch.tensor(2.5)).item() == 2.5
    assert same(weights(model), before)
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("make", [SAM, lambda p, **k: XSAM(p, search_every=1, **k)], ids=["SAM", "XSAM"])
def test_14_a_step_without_a_closure_names_the_ways_to_step(make):
    # davda54/sam#66
    with pytest.raises(TypeError, match=r"step\(closure\).*step\(\[closure.*ascend\(\).*GradScaler"):
        make(make_model().parameters(), lr=0.1).step()


@pytest.mark.parametrize("k", [1, 2])
def test_15_step_with_a_closure_is_a_sam_update_and_returns_the_first_loss(k):
    # davda54/sam#91
    theta = nn.Parameter(torch.tensor([1.0], dtype=F64))
    optimizer = SAM([theta], rho=0.5, ascent_steps=k, lr=0.1)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = (theta**2).sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert losses == pytest.approx([(1 + 0.5 * i / k) ** 2 for i in range(k + 1)])
    assert theta.item() == pytest.approx(1 - 0.1 * 2 * 1.5)


def test_16_under_no_grad_the_closure_sees_gradients_enabled():
    # davda54/sam#90
    results = []
    for grad in (True, False):
        model = make_model()
        optimizer = SAM(model.parameters(), rho=0.3, lr=0.1)
        with torch.set_grad_enabled(grad):
            optimizer.step(make_closure(model, optimizer))
        results.append(weights(model))
    assert same(*results)
    assert not same(results[0], weights(make_model()))


def test_18_a_batch_of_8_in_parts_of_4_averages_two_sam_gradients():
    # davda54/sam#25
    inputs, targets = batch(8)
    model = make_model()
    gradients = []
    for part in (slice(0, 4), slice(4, 8)):
        twin = copy.deepcopy(model)
        optimizer = SAM(twin.parameters(), rho=0.5, lr=1.0)
        optimizer.step(make_closure(twin, optimizer, (inputs[part], targets[part])))
        gradients.append([a - b for a, b in zip(weights(model), weights(twin), strict=True)])
    expected = [w - (a + b) / 2 for w, a, b in zip(weights(model), *gradients, strict=True)]
    optimizer = SAM(model.parameters(), rho=0.5, lr=1.0)
    optimizer.step(
        [make_closure(model, optimizer, (inputs[p], targets[p])) for p in (slice(0, 4), slice(4, 8))]
    )
    for got, wanted in zip(weights(model), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_19_the_adaptive_perturbation_scales_with_the_layers(norm):
    # SamsungLabs/ASAM, davda54/sam#81
    moves = []
    for c in (1.0, 10.0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)).double()
        with torch.no_grad():
            net[0].weight.mul_(c)
            net[2].weight.div_(c)
        optimizer = SAM(net.parameters(), rho=0.5, norm=norm, adaptive=True, lr=0.1)
        make_closure(net, optimizer)()
        before = weights(net)
        optimizer.ascend()
        first, second = (a - b for a, b in zip(weights(net), before, strict=True))
        moves.append((first / c, second * c))
        optimizer.restore()
    for plain, scaled in zip(*moves, strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-10, atol=1e-13)


def test_19_both_conventions_for_biases_are_there():
    # SamsungLabs/ASAM leaves biases unscaled, davda54/sam scales every parameter.
    moved = {}
    for adaptive in ("weights", "all"):
        layer = nn.Linear(1, 1).double()
        with torch.no_grad():
            layer.weight.fill_(3.0)
            layer.bias.fill_(5.0)
        optimizer = SAM(layer.parameters(), rho=1.0, adaptive=adaptive, lr=0.1)
        layer.weight.grad, layer.bias.grad = torch.ones(1, 1, dtype=F64), torch.ones(1, dtype=F64)
        optimizer.ascend()
        moved[adaptive] = (layer.weight.item() - 3, layer.bias.item() - 5)
        optimizer.restore()
    assert moved["weights"] == pytest.approx((9 / math.sqrt(10), 1 / math.sqrt(10)))
    assert moved["all"] == pytest.approx((9 / math.sqrt(34), 25 / math.sqrt(34)))


def test_20_another_rho_gives_another_result():
    # sayakpaul/Sharpness-Aware-Minimization-TensorFlow#8
    results = []
    for rho in (0.05, 0.1):
        model = make_model()
        optimizer = SAM(model.parameters(), rho=rho, lr=0.1)
        for _ in range(3):
            optimizer.step(make_closure(model, optimizer))
        results.append(weights(model))
    assert all(not torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("make", [SAM, lambda p, **k: XSAM(p, search_every=1, **k)], ids=["SAM", "XSAM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_22_a_closure_that_raises_in_the_second_pass_leaves_the_weights(make, dtype):
    model = make_model(dtype=dtype)
    optimizer = make(model.parameters(), rho=0.5, lr=0.1)
    inner, calls = make_closure(model, optimizer), []
    before = weights(model)

    def closure():
        calls.append(not same(weights(model), before))
        if len(calls) == 2:
            raise KeyError("from the loader")
        return inner()

    with pytest.raises(KeyError, match="from the loader"):
        optimizer.step(closure)
    assert calls == [False, True], "the second pass must have been at the ascent point"
    assert same(weights(model), before)


def test_23_a_second_ascent_keeps_the_first_copy_of_the_weights():
    model = make_model()
    optimizer = SAM(model.parameters(), rho=0.5, ascent_steps=2, lr=0.1)
    before = weights(model)
    closure = make_closure(model, optimizer)
    closure()
    optimizer.ascend()
    closure()
    optimizer.ascend()
    with pytest.raises(RuntimeError, match="ascent_steps=2"):
        optimizer.ascend()
    optimizer.restore()
    assert same(weights(model), before)


@pytest.mark.parametrize("listed", ["once", "twice", "twice by name"])
def test_24_tied_weights_are_perturbed_once(listed):
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=F64))
    params = {"once": [weight], "twice": [weight, weight], "twice by name": [("a", weight), ("b", weight)]}
    optimizer = SAM(params[listed], rho=0.5, lr=0.1)
    start = weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = (weight * weight).sum()
        loss.backward()
        return loss

    closure()
    optimizer.ascend()
    torch.testing.assert_close(weight.detach(), start + 0.5 * start / start.norm())
    closure()
    optimizer.descend()
    expected = start - 0.1 * 2 * (start + 0.5 * start / start.norm())
    torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-4])
def test_25_parallel_and_opposite_directions_stay_finite_with_a_million_weights(sign, noise):
    generator = torch.Generator().manual_seed(0)
    v0 = torch.randn(1_000_000, generator=generator)
    v1 = sign * v0 + noise * torch.randn(1_000_000, generator=generator)
    psi = angle([v0], [v1]).item()
    assert psi == pytest.approx(0 if sign > 0 else math.pi, abs=2 * noise + 1e-6)
    for alpha in (0.0, 0.5, 1.0, 2.0):
        (v,) = slerp([v0], [v1], alpha)
        assert v.isfinite().all()
        if sign > 0:
            assert v.norm().item() == pytest.approx(1, rel=1e-4)


def test_25_the_search_is_right_when_every_loss_is_negative():
    alphas = []
    for offset in (0.0, -50.0):
        model = make_model()
        optimizer = XSAM(model.parameters(), rho=0.3, search_every=1, lr=0.1)
        inner = make_closure(model, optimizer)
        optimizer.step(inner, forward=lambda inner=inner, offset=offset: inner() + offset)
        alphas.append(optimizer.alpha)
    assert alphas[0] == alphas[1] > 0
