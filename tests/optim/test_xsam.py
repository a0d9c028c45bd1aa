"""samkit.optim.XSAM: the search, the mixing, and what both must leave alone."""

import copy
import functools
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules import module as nn_module
from torch.optim import SGD, Adam

from samkit.optim import SAM, XSAM

F64 = torch.float64


@pytest.fixture(autouse=True)
def _an_alpha_at_the_end_of_the_range_is_no_failure():
    # Small random networks often end there; the warning has its own test.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="XSAM's search ended at alpha_max")
        yield


def make_model(*extra, seed=0, dtype=F64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), *extra, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(size=16, seed=1, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=generator, dtype=dtype), torch.arange(size) % 3


def make_closure(model, optimizer, data=None, offset=0.0):
    inputs, targets = data or batch(dtype=next(model.parameters()).dtype)

    def closure():
        closure.passes += torch.is_grad_enabled()
        closure.probes += not torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets) + offset
        if loss.requires_grad:
            loss.backward()
        return loss

    closure.passes = closure.probes = 0
    return closure


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def everything(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class SlowXSAM:
    """The paper's algorithm on one flat NumPy vector, momentum included; the angle by arccosine."""

    def __init__(self, model, *, rho, rho_max, k, search_every, lr, momentum, grid):
        self.shapes = [(name, p.shape) for name, p in model.named_parameters()]
        self.model, self.theta = model, flat(model).numpy()
        self.rho, self.rho_max, self.k, self.search_every = rho, rho_max, k, search_every
        self.lr, self.momentum, self.grid = lr, momentum, grid
        self.velocity, self.alpha, self.alphas = None, None, []

    def loss(self, vector, data, gradient=False):
        leaf = torch.tensor(vector, requires_grad=gradient)
        parts = leaf.split([math.prod(shape) for _, shape in self.shapes])
        named = {name: v.view(shape) for (name, shape), v in zip(self.shapes, parts, strict=True)}
        loss = cross_entropy(torch.func.functional_call(self.model, named, data[0]), data[1])
        if not gradient:
            return loss.item()
        return torch.autograd.grad(loss, leaf)[0].numpy()

    def circle(self, data):
        point = self.theta
        for _ in range(self.k):
            g = self.loss(point, data, gradient=True)
            point = point + self.rho / self.k * g / np.linalg.norm(g)
        g = self.loss(point, data, gradient=True)
        v0 = (point - self.theta) / np.linalg.norm(point - self.theta)
        v1 = g / np.linalg.norm(g)
        psi = math.acos(v0 @ v1)

        def v(alpha):
            return (math.sin((1 - alpha) * psi) * v0 + math.sin(alpha * psi) * v1) / math.sin(psi)

        return v, np.linalg.norm(g)

    def step(self, t, parts):
        circles = [self.circle(data) for data in parts]
        if t % self.search_every == 0:
            heights = [
                np.mean(
                    [
                        self.loss(self.theta + self.rho_max * v(alpha), data)
                        for (v, _), data in zip(circles, parts, strict=True)
                    ]
                )
                for alpha in self.grid
            ]
            self.alpha = self.grid[int(np.argmax(heights))]
        self.alphas.append(self.alpha)
        g = np.mean([length * v(self.alpha) for v, length in circles], axis=0)
        self.velocity = g if self.velocity is None else self.momentum * self.velocity + g
        self.theta = self.theta - self.lr * self.velocity


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("search_every", [1, 7])
def test_the_trajectory_is_that_of_an_independent_slow_implementation(k, search_every, parts):
    model = make_model()
    slow = SlowXSAM(
        copy.deepcopy(model),
        rho=0.3,
        rho_max=0.6,
        k=k,
        search_every=search_every,
        lr=0.3,
        momentum=0.9,
        grid=np.linspace(0, 2, 21),
    )
    optimizer = XSAM(
        model.parameters(), SGD, rho=0.3, ascent_steps=k, search_every=search_every, lr=0.3, momentum=0.9
    )
    alphas = []
    for t in range(16):
        data = [batch(8, seed=100 * t + i) for i in range(parts)]
        slow.step(t, data)
        closures = [make_closure(model, optimizer, part) for part in data]
        optimizer.step(closures if parts > 1 else closures[0])
        alphas.append(optimizer.alpha)
    assert alphas == pytest.approx(slow.alphas, abs=1e-12)
    assert len(set(alphas)) > 1, "the test must meet more than one alpha"
    assert np.abs(flat(model).numpy() - slow.theta).max() < 1e-9


def test_the_search_finds_the_highest_grid_point_of_the_circle():
    # The loss is highest in a known direction of the plane that ascent and gradient span.
    h = torch.diag(torch.tensor([8.0, 1.0], dtype=F64))
    start = torch.tensor([0.3, 1.0], dtype=F64)
    theta = nn.Parameter(start.clone())
    optimizer = XSAM([theta], rho=0.5, rho_max=0.8, alpha_samples=41, search_every=1, lr=0.0)

    def closure():
        optimizer.zero_grad()
        loss = theta @ h @ theta / 2
        if loss.requires_grad:
            loss.backward()
        return loss

    optimizer.step(closure)
    g0 = h @ start
    g1 = h @ (start + 0.5 * g0 / g0.norm())
    angle0, angle1 = (math.atan2(g[1], g[0]) for g in (g0, g1))
    grid = np.linspace(0, 2, 41)
    heights = []
    for alpha in grid:
        direction = angle0 + alpha * (angle1 - angle0)
        point = start + 0.8 * torch.tensor([math.cos(direction), math.sin(direction)], dtype=F64)
        heights.append((point @ h @ point / 2).item())
    assert optimizer.alpha == pytest.approx(grid[int(np.argmax(heights))], abs=1e-12)
    assert 0 < optimizer.alpha < 2


# The cost


@pytest.mark.parametrize("k", [1, 3])
def test_a_search_costs_one_forward_pass_a_grid_point_and_other_steps_none(k):
    model = make_model()
    optimizer = XSAM(model.parameters(), ascent_steps=k, search_every=3, alpha_samples=11, lr=0.1)
    closure, probes = make_closure(model, optimizer), []
    for _ in range(7):
        optimizer.step(closure)
        probes.append(closure.probes)
    assert np.diff([0, *probes]).tolist() == [11, 0, 0, 11, 0, 0, 11]
    assert closure.passes == 7 * (k + 1)


def test_the_default_grid_has_21_points_and_the_default_radius_is_twice_rho():
    model = make_model()
    optimizer = XSAM(model.parameters(), rho=0.1, search_every=1, lr=0.0)
    optimizer.param_groups[0]["rho"] = 0.3  # scheduled after the start
    start, inner, radii = flat(model), make_closure(model, optimizer), []

    def closure():
        if not torch.is_grad_enabled():
            radii.append((flat(model) - start).norm().item())
        return inner()

    optimizer.step(closure)
    assert radii == pytest.approx([0.6] * 21)


def test_rho_max_fixes_the_radius_of_the_probes():
    model = make_model()
    optimizer = XSAM(model.parameters(), rho=0.1, rho_max=0.25, search_every=1, lr=0.0)
    start, inner, radii = flat(model), make_closure(model, optimizer), []

    def closure():
        if not torch.is_grad_enabled():
            radii.append((flat(model) - start).norm().item())
        return inner()

    optimizer.step(closure)
    assert radii == pytest.approx([0.25] * 21)


# The closure's side of the search


def test_a_closure_that_always_calls_backward_gets_an_error_that_names_the_remedy():
    model = make_model(nn.BatchNorm1d(8))
    optimizer = XSAM(model.parameters(), search_every=1, lr=0.1)
    inputs, targets = batch()

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    before = flat(model)
    with pytest.raises(RuntimeError, match=r"if loss\.requires_grad.*forward="):
        optimizer.step(closure)
    assert torch.equal(flat(model), before)
    assert model[1].num_batches_tracked == 1
    assert not nn_module._global_forward_pre_hooks
    optimizer.step(closure, forward=lambda: cross_entropy(model(inputs), targets))
    assert optimizer.steps == 1


def test_another_error_of_the_closure_passes_on_and_the_weights_are_home():
    model = make_model()
    optimizer = XSAM(model.parameters(), search_every=1, lr=0.1)
    inner, before = make_closure(model, optimizer), flat(model)

    def closure():
        if inner.probes == 5:
            raise RuntimeError("the fifth probe failed")
        return inner()

    with pytest.raises(RuntimeError, match="the fifth probe failed"):
        optimizer.step(closure)
    assert torch.equal(flat(model), before)
    optimizer.step(inner)


def variants(model, optimizer):
    """Closures that do the same thing in the ways that public training loops do it."""
    inputs, targets = batch()

    def convention(zero=True):
        optimizer.zero_grad(set_to_none=zero)
        loss = cross_entropy(model(inputs), targets)
        if loss.requires_grad:
            loss.backward()
        return loss

    @torch.enable_grad()
    def lightning():
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        return loss.detach().clone()

    return {
        "convention": convention,
        "zeroing in place": functools.partial(convention, zero=False),
        "gradients switched on inside": lightning,
    }


@pytest.mark.parametrize("way", ["zeroing in place", "gradients switched on inside"])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradient_is_safe_from_what_a_closure_does_in_the_probes(way, parts):
    results = []
    for chosen in ("convention", way):
        model = make_model()
        optimizer = XSAM(model.parameters(), rho=0.3, search_every=2, lr=0.1)
        closure = variants(model, optimizer)[chosen]
        for _ in range(4):
            optimizer.step([closure] * parts if parts > 1 else closure)
        results.append(everything(model))
    assert_same(*results)


@pytest.mark.parametrize("parts", [1, 2])
def test_buffers_and_random_numbers_move_as_in_one_pass_for_each_closure(parts):
    model = make_model(nn.BatchNorm1d(8), nn.Dropout(0.3))
    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    for _ in range(parts):
        twin(batch()[0])
    expected = torch.rand(3)
    optimizer = XSAM(model.parameters(), rho=0.3, search_every=1, lr=0.1)
    torch.manual_seed(5)
    optimizer.step([make_closure(model, optimizer)] * parts)
    assert torch.equal(torch.rand(3), expected)
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert not nn_module._global_forward_pre_hooks


@pytest.mark.parametrize("replay", [True, False])
def test_all_probes_of_a_search_replay_one_random_state(replay):
    seen = []

    class Recorder(nn.Module):
        def forward(self, inputs):
            if not torch.is_grad_enabled():
                seen.append(inputs == 0)
            return inputs

    model = make_model(nn.Dropout(0.5), Recorder())
    optimizer = XSAM(model.parameters(), search_every=1, replay_rng=replay, lr=0.1)
    optimizer.step(make_closure(model, optimizer))
    assert len(seen) == 21
    assert all(torch.equal(seen[0], mask) for mask in seen)


def test_clipping_and_accumulation_in_the_closure_work():
    model = make_model()
    optimizer = XSAM(model.parameters(), rho=0.2, search_every=1, lr=1.0)
    inputs, targets = batch()
    start = flat(model)

    def closure():
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            loss = cross_entropy(model(x), y) / 4
            if loss.requires_grad:
                loss.backward()
            total = total + loss.detach()
        if torch.is_grad_enabled():
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return total

    optimizer.step(closure)
    assert (flat(model) - start).norm().item() == pytest.approx(1e-3, rel=1e-4)


# Alpha


@pytest.mark.parametrize("offset", [0.0, -100.0])
def test_negative_losses_give_the_same_alpha(offset):
    model = make_model()
    optimizer = XSAM(model.parameters(), rho=0.3, search_every=1, lr=0.1)
    optimizer.step(make_closure(model, optimizer, offset=offset))
    reference = make_model()
    expected = XSAM(reference.parameters(), rho=0.3, search_every=1, lr=0.1)
    expected.step(make_closure(reference, expected))
    assert optimizer.alpha == expected.alpha != 0


def test_of_equal_heights_the_smallest_alpha_wins():
    model = make_model()
    optimizer = XSAM(model.parameters(), search_every=1, lr=0.1)
    inner = make_closure(model, optimizer)
    heights = iter([1.0, 3.0, 2.0, 3.0, 0.0] * 5)

    def forward():
        return torch.tensor(next(heights))

    optimizer.step(inner, forward=forward)
    assert optimizer.alpha == 0.1


def test_probes_that_are_not_finite_do_not_count():
    model = make_model()
    optimizer = XSAM(model.parameters(), search_every=1, alpha_samples=5, lr=0.1)
    inner = make_closure(model, optimizer)
    for heights, expected in (([math.nan, 1.0, math.inf, 2.0, -math.inf], 1.5), ([math.nan] * 5, 1.5)):
        values = iter(heights)
        optimizer.step(inner, forward=lambda values=values: torch.tensor(next(values)))
        assert optimizer.alpha == expected
    assert flat(model).isfinite().all()


def test_alpha_is_a_python_float_and_one_before_the_first_search():
    model = make_model()
    optimizer = XSAM(model.parameters(), search_every=5, lr=0.1)
    assert optimizer.alpha == 1.0
    optimizer.step(make_closure(model, optimizer))
    assert type(optimizer.alpha) is float


def test_a_search_that_ends_at_the_end_of_its_range_warns_once():
    model = make_model()
    optimizer = XSAM(model.parameters(), search_every=1, alpha_samples=3, lr=0.1)
    inner = make_closure(model, optimizer)

    def step():
        heights = iter([0.0, 1.0, 2.0])
        optimizer.step(inner, forward=lambda: torch.tensor(next(heights)))

    with pytest.warns(UserWarning, match="alpha_max=2.0.*rho_max"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    assert optimizer.alpha == 2.0


def test_maximising_minus_the_loss_is_minimising_the_loss():
    results = []
    for sign in (1, -1):
        model = make_model()
        optimizer = XSAM(model.parameters(), rho=0.3, search_every=2, lr=0.1, maximize=sign < 0)

        def closure(model=model, optimizer=optimizer, sign=sign):
            optimizer.zero_grad()
            loss = sign * cross_entropy(model(batch()[0]), batch()[1])
            if loss.requires_grad:
                loss.backward()
            return loss

        alphas = []
        for _ in range(4):
            optimizer.step(closure)
            alphas.append(optimizer.alpha)
        results.append({**everything(model), "alphas": torch.tensor(alphas)})
    assert_same(*results)
    assert results[0]["alphas"].max() > 0


def test_groups_that_look_opposite_ways_are_refused():
    model = make_model()
    optimizer = XSAM(
        [{"params": model[0].parameters(), "maximize": True}, {"params": model[2].parameters()}],
        search_every=1,
        lr=0.1,
    )
    before = flat(model)
    with pytest.raises(ValueError, match="maximise some groups"):
        optimizer.step(make_closure(model, optimizer))
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("base", [functools.partial(SGD, momentum=0.9), Adam])
def test_rho_zero_is_the_base_optimizer_bit_for_bit(base):
    results = []
    for wrapped in (True, False):
        model = make_model(nn.BatchNorm1d(8), nn.Dropout(0.5), dtype=torch.float32)
        optimizer = (
            XSAM(model.parameters(), base, rho=0.0, search_every=1, lr=0.01)
            if wrapped
            else base(model.parameters(), lr=0.01)
        )
        torch.manual_seed(3)
        for _ in range(4):
            optimizer.step(make_closure(model, optimizer))
        results.append(everything(model))
    assert_same(*results)


def test_alpha_one_is_sam():
    results = []
    for searches in (False, True):
        model = make_model()
        if searches:
            optimizer = XSAM(
                model.parameters(), rho=0.3, search_every=1, alpha_samples=2, alpha_max=1.0, lr=0.1
            )
        else:
            optimizer = SAM(model.parameters(), rho=0.3, lr=0.1)
        closure = make_closure(model, optimizer)
        for _ in range(3):
            if searches:
                heights = iter([0.0, 1.0])
                optimizer.step(closure, forward=lambda heights=heights: torch.tensor(next(heights)))
            else:
                optimizer.step(closure)
        results.append(flat(model))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-13)


# Half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_with_half_precision_weights_the_ascent_is_kept_and_not_recovered(dtype):
    # A perturbation far below the weights' rounding: subtracting would give zero or noise.
    torch.manual_seed(0)
    theta = nn.Parameter(1 + torch.rand(400).to(dtype))
    g0, g1 = torch.randn(400).to(dtype), torch.randn(400).to(dtype)
    optimizer = XSAM([theta], rho=1e-3, search_every=2, lr=0.0)
    optimizer.steps = 1
    optimizer.alpha = 0.5
    theta.grad = g0.clone()
    optimizer.ascend()
    theta.grad = g1.clone()
    optimizer.restore()
    optimizer.mix()
    a, b = (g.double() / g.double().norm() for g in (g0, g1))
    expected = (a + b) / (a + b).norm() * g1.double().norm()
    error = (theta.grad.double() - expected).norm() / expected.norm()
    assert error < torch.finfo(dtype).eps


def test_a_model_in_bfloat16_trains_without_nan():
    model = make_model(dtype=torch.bfloat16)
    optimizer = XSAM(model.parameters(), rho=0.3, ascent_steps=2, search_every=1, lr=0.5)
    closure = make_closure(model, optimizer)
    first = optimizer.step(closure).item()
    for _ in range(20):
        last = optimizer.step(closure).item()
    assert flat(model).isfinite().all()
    assert last < first - 0.1
    assert optimizer.skipped_steps == 0


# Bad steps and the counter


@pytest.mark.parametrize("parts", [1, 2])
def test_a_skipped_step_neither_searches_nor_counts(parts):
    model = make_model(nn.BatchNorm1d(8))
    optimizer = XSAM(model.parameters(), rho=0.3, search_every=2, lr=0.1)
    bad = batch()
    bad[0][0, 0] = math.nan
    spoiled, sound = make_closure(model, optimizer, bad), make_closure(model, optimizer)
    before = everything(model)
    optimizer.step([sound] * (parts - 1) + [spoiled])
    assert_same(everything(model), before)
    assert (optimizer.steps, optimizer.skipped_steps, optimizer.alpha) == (0, 1, 1.0)
    assert spoiled.probes == sound.probes == 0
    optimizer.step(sound)
    assert sound.probes == 21
    assert optimizer.steps == 1


def test_a_parameter_with_a_gradient_in_the_second_pass_only_is_updated():
    a, b = (nn.Parameter(torch.tensor([1.0], dtype=F64)) for _ in range(2))
    optimizer = XSAM([a, b], rho=0.5, search_every=1, lr=0.1)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(torch.is_grad_enabled())
        loss = (a**2).sum() if sum(calls) == 1 else (a**2 + b**2).sum()
        if loss.requires_grad:
            loss.backward()
        return loss

    optimizer.step(closure)
    assert b.item() != 1
    assert math.isfinite(a.item() + b.item())


# By hand


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("explicit", [True, False])
def test_by_hand_and_with_a_closure_are_the_same_step(k, explicit):
    models = [make_model(nn.BatchNorm1d(8)) for _ in range(2)]
    first, second = (
        XSAM(m.parameters(), Adam, rho=0.3, ascent_steps=k, search_every=2, lr=0.01) for m in models
    )
    closures = [make_closure(m, o) for m, o in zip(models, (first, second), strict=True)]

    def forward():
        return cross_entropy(models[1](batch()[0]), batch()[1])

    for _ in range(4):
        first.step(closures[0])
        closures[1]()
        for _ in range(k):
            second.ascend()
            closures[1]()
        if explicit:
            second.restore()
            second.mix(forward)
            second.base_optimizer.step()
        else:
            second.descend(forward)
    assert_same(everything(models[0]), everything(models[1]))
    assert (first.alpha, first.steps) == (second.alpha, second.steps)


def test_by_hand_a_due_search_without_a_forward_function_says_so():
    model = make_model()
    optimizer = XSAM(model.parameters(), search_every=3, lr=0.1)
    closure = make_closure(model, optimizer)
    closure()
    optimizer.ascend()
    closure()
    with pytest.raises(ValueError, match=r"search is due at step 0.*forward="):
        optimizer.descend()
    optimizer.mix(closure)
    optimizer.descend()
    assert optimizer.steps == 1


def test_by_hand_stepping_the_base_without_mixing_says_so():
    model = make_model()
    optimizer = XSAM(model.parameters(), search_every=3, lr=0.1)
    closure = make_closure(model, optimizer)
    with pytest.raises(RuntimeError, match="mix\\(\\) comes after"):
        optimizer.mix(closure)
    closure()
    optimizer.ascend()
    closure()
    optimizer.restore()
    with pytest.raises(RuntimeError, match="call mix\\(\\)"):
        optimizer.base_optimizer.step()


def test_by_hand_a_step_given_up_leaves_nothing_for_the_next():
    results = []
    for gives_up in (False, True):
        model = make_model()
        optimizer = XSAM(model.parameters(), rho=0.3, search_every=1, lr=0.1)
        closure = make_closure(model, optimizer)
        if gives_up:
            make_closure(model, optimizer, batch(seed=9))()
            optimizer.ascend()
            optimizer.restore()
        closure()
        optimizer.ascend()
        closure()
        optimizer.descend(closure)
        results.append(everything(model))
    assert_same(*results)


# State and copies


def test_alpha_and_the_counter_are_saved_and_a_loaded_run_goes_on_bit_for_bit():
    model = make_model()
    optimizer = XSAM(
        model.parameters(), functools.partial(SGD, momentum=0.9), rho=0.3, search_every=3, lr=0.1
    )
    for _ in range(4):
        optimizer.step(make_closure(model, optimizer))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh_model = make_model(seed=7)
    fresh = XSAM(
        fresh_model.parameters(), functools.partial(SGD, momentum=0.9), rho=0.9, search_every=3, lr=9.0
    )
    fresh_model.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    assert (fresh.alpha, fresh.steps) == (optimizer.alpha, 4)
    closure = make_closure(fresh_model, fresh)
    for _ in range(4):
        optimizer.step(make_closure(model, optimizer))
        fresh.step(closure)
    assert closure.probes == 21
    assert_same(everything(model), everything(fresh_model))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_and_pickles_go_on_bit_for_bit(copier):
    model = make_model()
    optimizer = XSAM(model.parameters(), Adam, rho=0.3, rho_max=0.5, alpha_max=1.5, search_every=2, lr=0.01)
    optimizer.step(make_closure(model, optimizer))
    twin, copied = copier((model, optimizer))
    for _ in range(3):
        optimizer.step(make_closure(model, optimizer))
        copied.step(make_closure(twin, copied))
    assert_same(everything(model), everything(twin))
    assert (optimizer.alpha, optimizer.steps) == (copied.alpha, copied.steps)


def test_the_same_seed_gives_the_same_weights_bit_for_bit():
    results = []
    for _ in range(2):
        model = make_model(nn.Dropout(0.3), dtype=torch.float32)
        optimizer = XSAM(model.parameters(), Adam, rho=0.1, search_every=2, lr=0.01)
        for step in range(5):
            optimizer.step(make_closure(model, optimizer, batch(seed=step, dtype=torch.float32)))
        results.append(everything(model))
    assert_same(*results)


@pytest.mark.parametrize("options", [{"norm": "linf"}, {"adaptive": True}, {"adaptive": "weights"}])
def test_other_balls_are_refused(options):
    with pytest.raises(ValueError, match="use SAM for other balls"):
        XSAM(make_model().parameters(), search_every=1, **options)


def test_forward_functions_come_one_for_each_closure():
    model = make_model()
    optimizer = XSAM(model.parameters(), search_every=1, lr=0.1)
    closure = make_closure(model, optimizer)
    with pytest.raises(ValueError, match="2 closures but 1 forward"):
        optimizer.step([closure, closure], forward=closure)
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(closure, forward=[3])


def test_hooks_on_the_wrapper_are_called_once_a_step():
    model = make_model()
    SAM(model.parameters(), lr=0.1)  # making one patches its class's step, which XSAM must not pass through
    optimizer = XSAM(model.parameters(), search_every=1, lr=0.1)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.step(make_closure(model, optimizer))
    assert called == ["before", "after"]


@pytest.mark.parametrize(("value", "error"), [(None, TypeError), (torch.ones(2), ValueError)])
def test_a_forward_function_that_returns_no_loss_is_refused_with_the_weights_home(value, error):
    model = make_model()
    optimizer = XSAM(model.parameters(), search_every=1, lr=0.1)
    before = flat(model)
    with pytest.raises(error, match="must return"):
        optimizer.step(make_closure(model, optimizer), forward=lambda: value)
    assert torch.equal(flat(model), before)


def test_without_searches_alpha_stays_where_it_was_put():
    model, data = make_model(), batch()
    slow = SlowXSAM(
        copy.deepcopy(model), rho=0.3, rho_max=0.6, k=1, search_every=1, lr=0.3, momentum=0.9, grid=[1.4]
    )
    optimizer = XSAM(model.parameters(), SGD, rho=0.3, search_every=None, alpha=1.4, lr=0.3, momentum=0.9)
    closure = make_closure(model, optimizer, data)
    for t in range(5):
        slow.step(t, [data])
        optimizer.step(closure)
    assert closure.probes == 0
    assert optimizer.alpha == 1.4
    assert np.abs(flat(model).numpy() - slow.theta).max() < 1e-9
