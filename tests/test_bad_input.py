"""Bad input, over the whole public interface: the right exception, the value, the remedy, nothing moved.

A row of a table is one mistake: what is called, the exception, and two pieces of its message. The first is
the value as the reader wrote it, the second belongs to the remedy: what would have been right.
"""

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD

import samkit
from samkit import claims, data, landscapes, models, perturb, results, sharpness, training
from samkit.optim import SAM, XSAM, AveragedSAM, LookbehindSAM


@pytest.fixture
def bench():
    """A small network with buffers and gradients, and everything the mistakes are made with."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))
    inputs, targets = torch.randn(8, 4), torch.randint(2, (8,))
    nn.functional.cross_entropy(net.eval()(inputs), targets).backward()
    net.train()

    def loss():
        return nn.functional.cross_entropy(net(inputs), targets)

    def closure():
        net.zero_grad()
        value = loss()
        if value.requires_grad:
            value.backward()
        return value

    return SimpleNamespace(net=net, params=list(net.parameters()), loss=loss, closure=closure)


def sam(bench, params=None, base=SGD, **options):
    return SAM(bench.params if params is None else params, base, **{"lr": 0.1, **options})


def xsam(bench, **options):
    return XSAM(bench.params, SGD, **{"lr": 0.1, "search_every": 2, **options})


def averaged(bench, **options):
    return AveragedSAM(bench.params, SGD, **{"lr": 0.1, "ascent_steps": 2, **options})


def lookbehind(bench, **options):
    return LookbehindSAM(bench.params, SGD, **{"lr": 0.1, **options})


EVERY_KIND = pytest.mark.parametrize(
    "make", [sam, xsam, averaged, lookbehind], ids=["SAM", "XSAM", "AveragedSAM", "LookbehindSAM"]
)


def run(**options):
    return training.run(
        training.Config(**{"dataset": "two_moons", "epochs": 1, **options}), seed=0, progress=False
    )


def table(rows):
    """One test for each row; its name says what was done."""
    return pytest.mark.parametrize(
        ("call", "error", "value", "remedy"),
        [pytest.param(*row, id=name) for name, row in rows.items()],
    )


def refused(call, error, value, remedy):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert value in message, f"the message does not name the value {value!r}: {message}"
    assert remedy in message, f"the message does not name the remedy {remedy!r}: {message}"


def radii(make):
    """The ways to get a radius wrong, the same wherever there is one."""
    return {
        "negative": (lambda b: make(b, -0.1), ValueError, "-0.1", ">= 0"),
        "NaN": (lambda b: make(b, math.nan), ValueError, "nan", ">= 0"),
        "infinite": (lambda b: make(b, math.inf), ValueError, "inf", "finite"),
        "a string": (lambda b: make(b, "0.05"), TypeError, "'0.05'", "number"),
        "None": (lambda b: make(b, None), TypeError, "None", "number"),
    }


def named(what, rows):
    return {f"{what} {how}": row for how, row in rows.items()}


OPTIMIZER = {
    **named("rho is", radii(lambda b, rho: sam(b, rho=rho))),
    **named("rho of a group is", radii(lambda b, rho: sam(b, [{"params": b.params, "rho": rho}]))),
    **named("rho of XSAM is", radii(lambda b, rho: xsam(b, rho=rho))),
    "rho_max is negative": (lambda b: xsam(b, rho_max=-1.0), ValueError, "-1.0", "rho_max"),
    "alpha_max is negative": (lambda b: xsam(b, alpha_max=-1.0), ValueError, "-1.0", "alpha_max"),
    "alpha_samples is 0": (lambda b: xsam(b, alpha_samples=0), ValueError, "0", "alpha_samples"),
    "search_every is 0": (lambda b: xsam(b, search_every=0), ValueError, "0", "search_every"),
    "search_every is a float": (lambda b: xsam(b, search_every=1.5), TypeError, "1.5", "integer"),
    "search_every is missing": (
        lambda b: XSAM(b.params, SGD, lr=0.1),
        TypeError,
        "search_every",
        "keyword",
    ),
    "XSAM in another norm": (lambda b: xsam(b, norm="linf"), ValueError, "'linf'", "l2"),
    "XSAM, adaptive": (lambda b: xsam(b, adaptive=True), ValueError, "adaptive", "SAM"),
    "alpha is negative": (lambda b: xsam(b, alpha=-1.0), ValueError, "-1.0", "alpha"),
    "a slow step beyond 1": (lambda b: lookbehind(b, slow_step=1.5), ValueError, "1.5", "between 0 and 1"),
    "a slow step of 0": (lambda b: lookbehind(b, slow_step=0.0), ValueError, "0.0", "slow_step"),
    "a recorder by name": (lambda b: sam(b, recorder="yes"), TypeError, "'yes'", "Recorder"),
    "no parameters": (lambda b: sam(b, []), ValueError, "empty", "param"),
    "a used-up generator": (lambda b: sam(b, (p for p in [])), ValueError, "empty", "param"),
    "one tensor as parameters": (lambda b: sam(b, b.params[0]), TypeError, "Parameter", "iterable"),
    "an optimizer made already": (
        lambda b: sam(b, base=SGD(b.params, lr=0.1)),
        TypeError,
        "SGD",
        "class",
    ),
    "an optimizer by name": (lambda b: sam(b, base="sgd"), TypeError, "'sgd'", "class"),
    "unknown norm": (lambda b: sam(b, norm="l1"), ValueError, "'l1'", "'linf'"),
    "no ascent steps": (lambda b: sam(b, ascent_steps=0), ValueError, "0", "ascent_steps"),
    "one and a half ascent steps": (lambda b: sam(b, ascent_steps=1.5), TypeError, "1.5", "integer"),
    "unknown adaptive": (lambda b: sam(b, adaptive="biases"), ValueError, "'biases'", "'weights'"),
    "eta is negative": (lambda b: sam(b, adaptive=True, eta=-0.1), ValueError, "-0.1", ">= 0"),
    "unknown nonfinite": (lambda b: sam(b, nonfinite="ignore"), ValueError, "'ignore'", "'skip'"),
    "a model that is none": (lambda b: sam(b, model="net"), TypeError, "'net'", "Module"),
    "a truth value by name": (lambda b: sam(b, replay_rng="no"), TypeError, "'no'", "True or False"),
    "None as parameters": (lambda b: SAM(None, SGD, lr=0.1), TypeError, "NoneType", "model.parameters()"),
    "a group without parameters": (lambda b: sam(b, [{"lr": 0.1}]), ValueError, "'lr'", "'params'"),
    "a group with None for parameters": (lambda b: sam(b, [{"params": None}]), TypeError, "None", "params"),
    "only empty groups": (lambda b: sam(b, [{"params": []}]), ValueError, "empty", "model.parameters()"),
    "a base that makes no optimizer": (
        lambda b: sam(b, base=lambda params, lr: "SGD"),
        TypeError,
        "'SGD'",
        "torch.optim.Optimizer",
    ),
    "SAM around SAM": (lambda b: sam(b, base=SAM), ValueError, "SAM", "use SGD"),
}

STEP = {
    "no closure": (lambda o, b: o.step(), TypeError, "closure", "ascend"),
    "a closure that is none": (lambda o, b: o.step("closure"), TypeError, "'closure'", "closure"),
    "no closures": (lambda o, b: o.step([]), ValueError, "[]", "closure"),
    "a list with a non-closure": (lambda o, b: o.step([b.closure, 3]), TypeError, "3", "closure"),
    "a closure returns None": (lambda o, b: o.step(lambda: None), TypeError, "None", "return"),
    "a closure returns a vector": (
        lambda o, b: o.step(lambda: b.net(torch.ones(2, 4))[:, 0]),
        ValueError,
        "(2,)",
        "scalar",
    ),
    "a closure returns text": (lambda o, b: o.step(lambda: "0.3"), TypeError, "'0.3'", "return"),
    "a closure returns a complex loss": (
        lambda o, b: o.step(lambda: torch.tensor(1j)),
        TypeError,
        "1.j",
        "real",
    ),
    "a context that was entered already": (
        lambda o, b: o.step(b.closure, ascent_context=contextlib.nullcontext()),
        TypeError,
        "nullcontext",
        "without parentheses",
    ),
}


def set_rho_and_step(optimizer, bench, rho):
    optimizer.param_groups[0]["rho"] = rho
    try:
        optimizer.step(bench.closure)
    finally:
        optimizer.param_groups[0]["rho"] = 0.05


def add_group(optimizer, **group):
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **group})


LATER = {
    **named("a scheduled rho is", radii(lambda ob, rho: set_rho_and_step(*ob, rho))),
    **named("rho of an added group is", radii(lambda ob, rho: add_group(ob[0], rho=rho))),
    "an added group without parameters": (
        lambda ob: ob[0].add_param_group({"lr": 0.1}),
        ValueError,
        "'lr'",
        "'params'",
    ),
    "an added group without a dict": (
        lambda ob: ob[0].add_param_group([nn.Parameter(torch.ones(1))]),
        TypeError,
        "list",
        "dict",
    ),
    "a parameter added twice": (
        lambda ob: ob[0].add_param_group({"params": ob[1].params[:1]}),
        ValueError,
        "some parameters appear in more than one parameter group",
        "more than one",
    ),
}


@table(OPTIMIZER)
def test_a_sharpness_aware_optimizer_refuses(bench, call, error, value, remedy):
    before = snapshot(bench.net)
    refused(lambda: call(bench), error, value, remedy)
    assert_untouched(bench.net, before)


@EVERY_KIND
@table(STEP)
def test_a_step_refuses_and_leaves_the_weights(bench, make, call, error, value, remedy):
    optimizer = make(bench)
    before = snapshot(bench.net)
    refused(lambda: call(optimizer, bench), error, value, remedy)
    assert_weights_untouched(bench.net, before)
    assert not optimizer.state
    optimizer.step(bench.closure)  # and goes on as if nothing had happened


@EVERY_KIND
@table(LATER)
def test_an_optimizer_in_use_refuses_and_leaves_the_weights(bench, make, call, error, value, remedy):
    optimizer = make(bench)
    before = snapshot(bench.net)
    refused(lambda: call((optimizer, bench)), error, value, remedy)
    assert_weights_untouched(bench.net, before)
    assert not optimizer.state
    optimizer.step(bench.closure)


@EVERY_KIND
def test_a_later_closure_of_a_list_is_checked_as_well(bench, make):
    optimizer = make(bench)
    before = snapshot(bench.net)
    refused(lambda: optimizer.step([bench.closure, lambda: None]), TypeError, "None", "return")
    assert_weights_untouched(bench.net, before)
    assert not optimizer.state


def zeros(params):
    return [torch.zeros_like(p) for p in params or () if isinstance(p, torch.Tensor)]


NEED_GRADIENTS = {
    "hvp": lambda loss, params: sharpness.hvp(loss, params, zeros(params)),
    "top_eigenvalues": sharpness.top_eigenvalues,
    "trace": sharpness.trace,
    "spectral_density": sharpness.spectral_density,
    "worst_case": lambda loss, params: sharpness.worst_case(loss, params, 0.1),
}
MEASUREMENTS = {
    **NEED_GRADIENTS,
    "average": lambda loss, params: sharpness.average(loss, params, 0.1),
    "line": lambda loss, params: landscapes.line(loss, params, zeros(params)),
}

LOSS = {
    "a loss that is a number": (lambda f, b: f(0.5, b.params), TypeError, "0.5", "function"),
    "a loss that returns None": (lambda f, b: f(lambda: None, b.params), TypeError, "None", "return"),
    "a loss that returns a vector": (
        lambda f, b: f(lambda: b.net(torch.ones(2, 4))[:, 0], b.params),
        ValueError,
        "(2,)",
        "scalar",
    ),
    "no parameters": (lambda f, b: f(b.loss, []), ValueError, "params", "requires_grad"),
    "parameters by name": (lambda f, b: f(b.loss, ["weight"]), TypeError, "'weight'", "parameters()"),
    "None as parameters": (lambda f, b: f(b.loss, None), TypeError, "NoneType", "[tensor]"),
    "a complex loss": (lambda f, b: f(lambda: b.loss() * 1j, b.params), TypeError, "j", "real"),
}

SHARPNESS = {
    **named("rho is", radii(lambda b, rho: sharpness.worst_case(b.loss, b.params, rho))),
    **named("sigma is", radii(lambda b, sigma: sharpness.average(b.loss, b.params, sigma))),
    "unknown norm": (
        lambda b: sharpness.worst_case(b.loss, b.params, 0.1, "l1"),
        ValueError,
        "'l1'",
        "'linf'",
    ),
    "unknown adaptive": (
        lambda b: sharpness.trace(b.loss, b.params, adaptive="biases"),
        ValueError,
        "'biases'",
        "'weights'",
    ),
    "no eigenvalues": (lambda b: sharpness.top_eigenvalues(b.loss, b.params, k=0), ValueError, "0", ">= 1"),
    "half an eigenvalue": (
        lambda b: sharpness.top_eigenvalues(b.loss, b.params, k=0.5),
        TypeError,
        "0.5",
        "integer",
    ),
    "more eigenvalues than weights": (
        lambda b: sharpness.top_eigenvalues(b.loss, b.params, k=1000),
        ValueError,
        "1000",
        "at most",
    ),
    "a seed that is no integer": (
        lambda b: sharpness.trace(b.loss, b.params, seed=0.5),
        TypeError,
        "0.5",
        "integer",
    ),
    "a vector of another shape": (
        lambda b: sharpness.hvp(b.loss, b.params, [torch.ones(2)]),
        ValueError,
        "vectors",
        "shape",
    ),
    "a direction of another shape": (
        lambda b: landscapes.line(b.loss, b.params, [torch.ones(2)]),
        ValueError,
        "direction",
        "shape",
    ),
    "a complex vector": (
        lambda b: sharpness.hvp(b.loss, b.params, [p * 1j for p in b.params]),
        TypeError,
        "j",
        "real",
    ),
    "a random direction for names": (
        lambda b: landscapes.filter_normalized_direction(["weight"], seed=0),
        TypeError,
        "'weight'",
        "parameters()",
    ),
    "a path from names": (lambda b: landscapes.path(b.loss, ["w"], zeros(b.params)), TypeError, "'w'", "()"),
    **named(
        "rho of the formula is", radii(lambda b, rho: perturb.perturbation(b.params, zeros(b.params), rho))
    ),
    "unknown adaptive in the formula": (
        lambda b: perturb.perturbation(b.params, zeros(b.params), 0.1, adaptive="biases"),
        ValueError,
        "'biases'",
        "'weights'",
    ),
    "no ascent steps in the formula": (
        lambda b: perturb.sam_gradient(lambda theta: theta, b.params, 0.1, ascent_steps=0),
        ValueError,
        "0",
        "ascent_steps",
    ),
    "a random direction without a seed": (
        lambda b: landscapes.filter_normalized_direction(b.params, seed="0"),
        TypeError,
        "'0'",
        "integer",
    ),
}


@pytest.mark.parametrize("measure", MEASUREMENTS.values(), ids=MEASUREMENTS)
@table(LOSS)
def test_a_measurement_refuses_and_leaves_the_network(bench, measure, call, error, value, remedy):
    before = snapshot(bench.net)
    refused(lambda: call(measure, bench), error, value, remedy)
    assert_untouched(bench.net, before)


@pytest.mark.parametrize("measure", NEED_GRADIENTS.values(), ids=NEED_GRADIENTS)
def test_a_closure_for_an_optimizer_is_no_loss_to_differentiate(bench, measure):
    before = snapshot(bench.net)
    refused(lambda: measure(bench.closure, bench.params), ValueError, "backward", "return")
    assert_untouched(bench.net, before)


@table(SHARPNESS)
def test_a_setting_of_a_measurement_is_refused(bench, call, error, value, remedy):
    before = snapshot(bench.net)
    refused(lambda: call(bench), error, value, remedy)
    assert_untouched(bench.net, before)


SEEDS = {
    "a float": (1.5, TypeError, "1.5", "integer"),
    "a string": ("0", TypeError, "'0'", "integer"),
    "None": (None, TypeError, "None", "integer"),
    "a truth value": (True, TypeError, "True", "integer"),
    "negative": (-1, ValueError, "-1", "0"),
    "too large": (2**32, ValueError, str(2**32), "2**32 - 1"),
}

SEEDED = {
    "seed_everything": samkit.seed_everything,
    "data.load": lambda seed: data.load("two_moons", seed=seed),
    "label noise": lambda seed: data.load("two_moons").with_label_noise(0.1, seed=seed),
    "validation": lambda seed: data.load("two_moons").with_validation(0.1, seed=seed),
    "subset": lambda seed: data.load("two_moons").subset(5, seed=seed),
    "training.run": lambda seed: training.run(training.Config(dataset="two_moons"), seed, progress=False),
}


@pytest.mark.parametrize("use", SEEDED.values(), ids=SEEDED)
@pytest.mark.parametrize(("seed", "error", "value", "remedy"), SEEDS.values(), ids=SEEDS)
def test_a_seed_must_be_an_integer_in_range(use, seed, error, value, remedy):
    state = torch.get_rng_state()
    refused(lambda: use(seed), error, value, remedy)
    assert torch.equal(torch.get_rng_state(), state)


NAMES = {
    "a data set": (lambda: data.load("mnist"), ValueError, "'mnist'", "'mnist1d'"),
    "a data set of a run": (lambda: run(dataset="mnist"), ValueError, "'mnist'", "'mnist1d'"),
    "a model": (lambda: models.build("vgg"), ValueError, "'vgg'", "'mlp'"),
    "a model of a run": (lambda: run(model="vgg"), ValueError, "'vgg'", "'mlp'"),
    "an activation": (lambda: models.build("mlp", activation="sin"), ValueError, "'sin'", "'relu'"),
    "images for a model of signals": (
        lambda: models.build("cnn1d", (1, 28, 28)),
        ValueError,
        "(1, 28, 28)",
        "(length,)",
    ),
    "signals for a model of images": (lambda: models.build("cnn", (40,)), ValueError, "(40,)", "images"),
    "an optimizer": (lambda: run(optimizer="adam"), ValueError, "'adam'", "'sam'"),
    "a base optimizer": (lambda: run(base="lion"), ValueError, "'lion'", "'sgd'"),
    "a schedule": (lambda: run(schedule="step"), ValueError, "'step'", "'cosine'"),
    "a norm": (lambda: run(optimizer="sam", norm="l1"), ValueError, "'l1'", "'linf'"),
    "a claim": (lambda: claims.claim("Z9"), ValueError, "'Z9'", "G1"),
    "a stored result": (lambda: results.load("nothing"), ValueError, "'nothing'", "samkit.experiments"),
    "what to do outside": (
        lambda: landscapes.two_basins([0.0, 1.0], outside="clip"),
        ValueError,
        "'clip'",
        "'nan'",
    ),
}

VALUES = {
    **named("rho of a run is", radii(lambda b, rho: run(optimizer="sam", rho=rho))),
    "no epochs": (lambda b: run(epochs=0), ValueError, "0", ">= 1"),
    "many epochs": (lambda b: run(epochs="many"), TypeError, "'many'", "integer"),
    "a negative learning rate": (lambda b: run(learning_rate=-1.0), ValueError, "-1.0", ">= 0"),
    "more noise than labels": (lambda b: run(label_noise=1.5), ValueError, "1.5", "between 0 and 1"),
    "more validation than data": (lambda b: run(validation=1.5), ValueError, "1.5", "between 0 and 1"),
    "a share of noise, found out at once": (
        lambda b: training.Config(label_noise=1.5),
        ValueError,
        "1.5",
        "label_noise",
    ),
    "model options without names": (lambda b: run(model_options=50), TypeError, "50", "dict"),
    "a network of no width": (lambda b: run(model_options={"width": 0}), ValueError, "0", "width"),
    "a network of broken width": (lambda b: run(model_options={"width": 2.5}), TypeError, "2.5", "width"),
    "a network of negative depth": (lambda b: models.build("mlp", depth=-1), ValueError, "-1", "depth"),
    "a network without channels": (
        lambda b: models.build("cnn", (1, 8, 8), channels=0),
        ValueError,
        "0",
        "channels",
    ),
    "a network without blocks": (
        lambda b: models.build("resnet", (1, 8, 8), blocks=0),
        ValueError,
        "0",
        "blocks",
    ),
    "a network without classes": (lambda b: models.build("mlp", classes=0), ValueError, "0", "classes"),
    "an input shape that is a number": (lambda b: models.build("mlp", 40), TypeError, "40", "(40,)"),
    "an input shape of nothing": (lambda b: models.build("mlp", (0,)), ValueError, "0", "input_shape"),
    "a run without a Config": (
        lambda b: training.run({"epochs": 1}, seed=0),
        TypeError,
        "{'epochs': 1}",
        "training.Config",
    ),
    "a start that is no network": (
        lambda b: training.run(training.Config(), seed=0, model="mlp"),
        TypeError,
        "'mlp'",
        "network",
    ),
    "a callback that is no function": (
        lambda b: training.run(training.Config(), seed=0, callback=3),
        TypeError,
        "3",
        "function",
    ),
    "one seed for many runs": (lambda b: training.run_many(training.Config(), 3), TypeError, "3", "seeds"),
    "many runs with half a seed": (
        lambda b: training.run_many(training.Config(), [0, 0.5]),
        TypeError,
        "0.5",
        "integer",
    ),
    "many runs without a Config": (lambda b: training.run_many([3], [0]), TypeError, "3", "training.Config"),
    "a last batch of unequal parts": (
        lambda b: run(optimizer="sam", batch_size=60, sub_batch=30),
        ValueError,
        "30",
        "train_size",
    ),
    "a column that no run has": (
        lambda b: run().final("accuracy"),
        ValueError,
        "'accuracy'",
        "test_accuracy",
    ),
    "a negative tolerance": (lambda b: results.agrees(1.0, [1.0], -0.1), ValueError, "-0.1", "tolerance"),
    "an estimate by name": (lambda b: claims.Estimate("1", "1", "1"), TypeError, "'1'", "numbers"),
    "an estimate from no samples": (lambda b: claims.Estimate(1.0, 1.0, 1.0, n=0), ValueError, "0", "n must"),
    "half a measurement": (
        lambda b: claims.evidence("G1", **{claims.ledger()["G1"].parts[0].name: (1.0, 2.0)}),
        ValueError,
        "(1.0, 2.0)",
        "high",
    ),
    "sub-batches without SAM": (lambda b: run(sub_batch=5), ValueError, "5", "optimizer='sam'"),
    "an empty subset": (lambda b: data.load("two_moons").subset(0), ValueError, "0", "between 1"),
    "s is negative": (lambda b: landscapes.two_basins([0.0, -1.0]), ValueError, "-1.0", "> 0"),
    "s is zero": (lambda b: landscapes.two_basins([0.0, 0.0]), ValueError, "0.0", "> 0"),
    "a point of three numbers": (
        lambda b: landscapes.two_basins([0.0, 1.0, 2.0]),
        ValueError,
        "(3,)",
        "(..., 2)",
    ),
}


@table(NAMES)
def test_an_unknown_name_is_answered_with_the_known_ones(call, error, value, remedy):
    refused(call, error, value, remedy)


@table(VALUES)
def test_a_value_out_of_range_is_refused(bench, call, error, value, remedy):
    refused(lambda: call(bench), error, value, remedy)


DEVICES = {
    "unknown": ("gpu", "'gpu'", "'cuda'"),
    "known to torch, not to the course": ("meta", "'meta'", "'cpu'"),
    "not in this machine": ("cuda:99", "'cuda:99'", "cpu"),
}


@pytest.mark.parametrize(("name", "value", "remedy"), DEVICES.values(), ids=DEVICES)
def test_a_device_that_does_not_exist_is_refused(name, value, remedy):
    refused(lambda: samkit.device(name), ValueError, value, remedy)


@pytest.mark.parametrize(("name", "value", "remedy"), DEVICES.values(), ids=DEVICES)
def test_a_device_in_the_environment_that_does_not_exist_is_refused(monkeypatch, name, value, remedy):
    monkeypatch.setenv("SAMKIT_DEVICE", name)
    refused(samkit.device, ValueError, value, remedy)


@pytest.mark.parametrize(("name", "value", "remedy"), DEVICES.values(), ids=DEVICES)
def test_a_device_of_a_run_that_does_not_exist_is_refused(name, value, remedy):
    config = training.Config(dataset="two_moons", epochs=1)
    refused(lambda: training.run(config, 0, device=name, progress=False), ValueError, value, remedy)


def snapshot(net):
    return copy.deepcopy(net.state_dict()), [p.grad.clone() for p in net.parameters()], net.training


def assert_weights_untouched(net, before):
    state, _, _ = before
    now = net.state_dict()
    moved = [name for name, _ in net.named_parameters() if not torch.equal(now[name], state[name])]
    assert moved == []


def assert_untouched(net, before):
    state, grads, mode = before
    now = net.state_dict()
    assert [name for name in state if not torch.equal(now[name], state[name])] == []
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), grads, strict=True))
    assert net.training is mode
