"""samkit.optim.Recorder: the right angles, one row a step, and nothing changed by looking."""

import copy
import functools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from samkit import perturb
from samkit.optim import SAM, XSAM, AveragedSAM, LookbehindSAM, Recorder

F64 = torch.float64
KINDS = {
    "SAM": SAM,
    "multi-step SAM": functools.partial(SAM, ascent_steps=3),
    "averaged SAM": functools.partial(AveragedSAM, ascent_steps=3),
    "Lookbehind-SAM": functools.partial(LookbehindSAM, ascent_steps=3),
    "XSAM": functools.partial(XSAM, ascent_steps=3, search_every=2),
}
ALL = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def _an_alpha_at_the_end_of_the_range_is_no_failure():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="XSAM's search ended at alpha_max")
        yield


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(F64)


def make_closure(model, optimizer, seed=1, poison=False):
    inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(seed), dtype=F64)
    targets = torch.arange(16) % 3

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        if loss.requires_grad:
            (loss * math.nan if poison else loss).backward()
        return loss

    return closure


def train(kind, steps=4, recorder=None, **options):
    model = make_model()
    optimizer = kind(
        model.parameters(), SGD, recorder=recorder, **{"rho": 0.3, "lr": 0.2, "momentum": 0.9, **options}
    )
    for step in range(steps):
        optimizer.step(make_closure(model, optimizer, seed=step))
    return model, optimizer


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).numpy()


@ALL
def test_looking_changes_nothing(kind):
    seen, unseen = train(kind, recorder=Recorder())[0], train(kind)[0]
    assert np.array_equal(flat(seen.parameters()), flat(unseen.parameters()))


def test_the_row_is_that_of_the_gradients_computed_apart():
    model = make_model()
    params = list(model.parameters())
    optimizer = XSAM(params, SGD, rho=0.3, ascent_steps=3, search_every=1, lr=0.2, recorder=Recorder())
    closure = make_closure(model, optimizer)
    start = [p.detach().clone() for p in params]

    def gradient(point):
        with torch.no_grad():
            for p, value in zip(params, point, strict=True):
                p.copy_(value)
        closure()
        return [p.grad.clone() for p in params]

    climb = [
        gradient(start),
        *(perturb.sam_gradient(gradient, start, 0.1 * k, ascent_steps=k) for k in (1, 2, 3)),
    ]
    moved = [torch.zeros_like(p) for p in start]
    for g in climb[:3]:
        moved = [m + e for m, e in zip(moved, perturb.perturbation(start, g, 0.1), strict=True)]
    gradient(start)
    optimizer.step(closure)
    step = flat(perturb.xsam_gradient(moved, climb[3], optimizer.alpha))
    vectors = {"g0": flat(climb[0]), "g1": flat(climb[1]), "gk": flat(climb[3]), "step": step}
    row = {key: value[0] for key, value in optimizer.recorder.read().items()}
    assert row.pop("alpha") == optimizer.alpha
    for name, vector in vectors.items():
        assert row.pop(f"norm_{name}") == pytest.approx(np.linalg.norm(vector), rel=1e-12)
    for key, value in row.items():
        a, b = (vectors[name] for name in key.split("_")[1:])
        expected = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert value == pytest.approx(expected, rel=1e-12), key
    assert len(row) == 6


@ALL
def test_every_step_leaves_one_row_whatever_the_way_to_step(kind):
    model = make_model()
    optimizer = kind(model.parameters(), SGD, rho=0.3, lr=0.2, recorder=Recorder())
    closure = make_closure(model, optimizer)
    optimizer.step(closure)
    optimizer.step([closure, make_closure(model, optimizer, seed=2)])
    closure()
    for _ in range(optimizer.ascent_steps):
        optimizer.ascend()
        closure()
    optimizer.descend(*([closure] if isinstance(optimizer, XSAM) else []))
    optimizer.param_groups[0]["rho"] = 0.0
    optimizer.step(closure)
    seen = optimizer.recorder.read()
    assert len(optimizer.recorder) == 4
    assert {len(column) for column in seen.values()} == {4}
    assert np.isfinite([column for key, column in seen.items() if key != "alpha"]).all()
    assert seen["cos_g0_step"][3] == pytest.approx(1.0)  # without a climb there is one gradient


def test_for_sam_the_step_is_the_gradient_at_the_ascent_point():
    seen = train(functools.partial(SAM, ascent_steps=3), recorder=Recorder())[1].recorder.read()
    assert seen["cos_gk_step"] == pytest.approx(1.0)
    assert seen["norm_gk"] == pytest.approx(seen["norm_step"])
    assert (seen["cos_g1_gk"] < 1 - 1e-6).all()
    assert np.isnan(seen["alpha"]).all()
    one = train(SAM, recorder=Recorder())[1].recorder.read()
    assert one["cos_g1_gk"] == pytest.approx(1.0)


def test_xsam_s_step_has_the_length_of_the_last_gradient_and_its_own_alpha():
    _, optimizer = train(KINDS["XSAM"], recorder=Recorder())
    seen = optimizer.recorder.read()
    assert seen["norm_step"] == pytest.approx(seen["norm_gk"], rel=1e-12)
    assert seen["alpha"][-1] == optimizer.alpha


def test_lookbehind_s_step_is_the_mean_of_its_gradients():
    same = [
        train(kind, steps=1, recorder=Recorder())[1].recorder.read()
        for kind in (KINDS["averaged SAM"], KINDS["Lookbehind-SAM"])
    ]
    for key in same[0]:
        np.testing.assert_allclose(same[0][key], same[1][key], rtol=1e-12)


@ALL
def test_a_skipped_step_leaves_no_row_and_nothing_for_the_next(kind):
    model, clean = make_model(), make_model()
    optimizer = kind(model.parameters(), SGD, rho=0.3, lr=0.2, recorder=Recorder())
    optimizer.step(make_closure(model, optimizer, poison=True))
    assert optimizer.skipped_steps == 1
    assert len(optimizer.recorder) == 0
    optimizer.step(make_closure(model, optimizer))
    other = kind(clean.parameters(), SGD, rho=0.3, lr=0.2, recorder=Recorder())
    other.step(make_closure(clean, other))
    for key, column in optimizer.recorder.read().items():
        np.testing.assert_array_equal(column, other.recorder.read()[key])


def test_several_closures_are_recorded_as_their_mean():
    model = make_model()
    optimizer = SAM(model.parameters(), SGD, rho=0.3, lr=0.0, recorder=Recorder())
    closures = [make_closure(model, optimizer, seed=s) for s in (1, 2)]
    g0 = []
    for closure in closures:
        closure()
        g0.append(flat([p.grad for p in model.parameters()]))
    optimizer.step(closures)
    assert optimizer.recorder.read()["norm_g0"][0] == pytest.approx(np.linalg.norm(np.mean(g0, axis=0)))


class _Reads(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@ALL
def test_recording_reads_nothing_on_the_host(kind):
    reads = []
    for recorder in (None, Recorder()):
        model = make_model()
        optimizer = kind(model.parameters(), SGD, rho=0.3, lr=0.2, recorder=recorder)
        with _Reads() as mode:
            optimizer.step(make_closure(model, optimizer))
        reads.append(mode.count)
    assert reads[0] == reads[1]


def test_autocast_around_the_step_does_not_round_what_is_recorded():
    seen = []
    for enabled in (False, True):
        theta = nn.Parameter(torch.linspace(-1, 1, 1000))
        optimizer = SAM([theta], SGD, rho=0.3, lr=0.1, recorder=Recorder())

        def closure(theta=theta, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (theta**4).sum()
            loss.backward()
            return loss

        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            optimizer.step(closure)
        seen.append(optimizer.recorder.read())
    for key, column in seen[0].items():
        np.testing.assert_array_equal(column, seen[1][key])


@ALL
def test_a_step_that_broke_off_leaves_nothing_for_one_by_hand(kind):
    model, clean = make_model(), make_model()
    optimizer = kind(model.parameters(), SGD, rho=0.3, lr=0.2, recorder=Recorder())
    poisoned, calls = make_closure(model, optimizer, seed=2, poison=True), []

    def breaks():
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("the data ran out")
        return poisoned()

    with pytest.raises(KeyError):
        optimizer.step(breaks)
    other = kind(clean.parameters(), SGD, rho=0.3, lr=0.2, recorder=Recorder())
    for net, one in ((model, optimizer), (clean, other)):
        closure = make_closure(net, one)
        closure()
        for _ in range(one.ascent_steps):
            one.ascend()
            closure()
        one.descend(*([closure] if isinstance(one, XSAM) else []))
    assert optimizer.skipped_steps == 0
    assert np.array_equal(flat(model.parameters()), flat(clean.parameters()))
    for key, column in optimizer.recorder.read().items():
        np.testing.assert_array_equal(column, other.recorder.read()[key])


def test_a_zero_gradient_has_no_direction():
    theta = nn.Parameter(torch.zeros(2, dtype=F64))
    optimizer = SAM([theta], SGD, rho=0.3, lr=0.1, recorder=Recorder())

    def closure():
        optimizer.zero_grad()
        loss = (theta**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    seen = optimizer.recorder.read()
    assert seen["norm_g0"][0] == 0
    assert np.isnan(seen["cos_g0_step"][0])


def test_a_recorder_can_be_emptied_read_when_empty_and_copied_with_its_optimizer():
    recorder = Recorder()
    assert all(column.shape == (0,) for column in recorder.read().values())
    model, optimizer = train(SAM, recorder=recorder)
    _, copied = copy.deepcopy((model, optimizer))
    assert len(copied.recorder) == 4
    recorder.clear()
    assert len(recorder) == 0
    assert len(copied.recorder) == 4


def test_something_that_is_no_recorder_is_refused():
    with pytest.raises(TypeError, match="Recorder"):
        SAM(make_model().parameters(), SGD, lr=0.1, recorder=True)
