"""The training loop: equal to one written out by hand, fixed by its seed, the same in other processes."""

import dataclasses
import math
import os
import subprocess
import sys

import nbformat
import numpy as np
import pytest
import torch
from nbclient import NotebookClient
from torch.nn import functional

from samkit import data, models, parallel
from samkit.optim import Recorder
from samkit.training import Config, Result, dataset, evaluate, loss_function, run, run_many

QUICK = Config(dataset="two_moons", model_options={"width": 10}, epochs=3, batch_size=50)
ALPHA_AT_THE_END = pytest.mark.filterwarnings("ignore:XSAM's search ended at alpha_max")


def weights(result):
    return torch.nn.utils.parameters_to_vector(result.model.parameters()).detach()


def by_hand(config, seed, gradient):
    """The loop without any of our machinery: momentum, decay and cosine as formulas, two loops."""
    problem = data.load(config.dataset, seed=0)
    torch.manual_seed(seed)
    net = models.build(config.model, problem.x.shape[1:], problem.classes, **config.model_options)
    theta = list(net.parameters())
    momentum = [torch.zeros_like(p) for p in theta]
    order = torch.Generator().manual_seed(seed)
    n, size = len(problem.y), config.batch_size
    total, step = config.epochs * math.ceil(n / size), 0
    for _ in range(config.epochs):
        shuffled = torch.randperm(n, generator=order)
        for start in range(0, n, size):
            batch = shuffled[start : start + size]
            eta = config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / total))
            g = gradient(net, problem.x[batch], problem.y[batch])
            with torch.no_grad():
                for p, b, d in zip(theta, momentum, g, strict=True):
                    b.mul_(config.momentum).add_(d + config.weight_decay * p)
                    p.sub_(eta * b)
            step += 1
    return torch.nn.utils.parameters_to_vector(theta).detach()


def plain_gradient(net, x, y):
    return torch.autograd.grad(functional.cross_entropy(net(x), y), list(net.parameters()))


def sam_gradient(net, x, y, rho=0.1):
    theta = list(net.parameters())
    g = plain_gradient(net, x, y)
    length = math.sqrt(sum(float(d.square().sum()) for d in g))
    with torch.no_grad():
        for p, d in zip(theta, g, strict=True):
            p.add_(rho * d / length)
    g1 = plain_gradient(net, x, y)
    with torch.no_grad():
        for p, d in zip(theta, g, strict=True):
            p.sub_(rho * d / length)
    return g1


def m_sam_gradient(net, x, y, m=25):
    parts = [sam_gradient(net, *part) for part in zip(x.split(m), y.split(m), strict=True)]
    return [torch.stack(gs).mean(dim=0) for gs in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("options", "gradient"),
    [
        ({}, plain_gradient),
        ({"optimizer": "sam", "rho": 0.1}, sam_gradient),
        ({"optimizer": "sam", "rho": 0.1, "sub_batch": 25}, m_sam_gradient),
    ],
    ids=["sgd", "sam", "m-sam"],
)
def test_a_run_equals_the_loop_written_out_by_hand(options, gradient):
    config = dataclasses.replace(QUICK, **options)
    expected = by_hand(config, 4, gradient)
    assert torch.allclose(weights(run(config, 4)), expected, atol=2e-5)


def test_the_hand_written_loops_differ_from_each_other_by_far_more():
    ends = [by_hand(QUICK, 4, gradient) for gradient in (plain_gradient, sam_gradient, m_sam_gradient)]
    for i, j in ((0, 1), (1, 2)):
        assert (ends[i] - ends[j]).abs().max() > 2e-4


def test_a_batch_that_does_not_divide_the_data_leaves_a_smaller_last_one():
    config = dataclasses.replace(QUICK, batch_size=60)
    assert torch.allclose(weights(run(config, 0)), by_hand(config, 0, plain_gradient), atol=2e-5)
    assert run(config, 0).gradient_evaluations == 3 * 4


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    first, again, other = (weights(run(QUICK, seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_run_leaves_the_random_state_as_found():
    before = torch.get_rng_state()
    run(QUICK, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_sam_with_radius_0_is_sgd_bit_for_bit():
    sam = dataclasses.replace(QUICK, optimizer="sam", rho=0.0)
    assert torch.equal(weights(run(sam, 0)), weights(run(QUICK, 0)))


def test_one_sub_batch_as_large_as_the_batch_is_ordinary_sam():
    sam = dataclasses.replace(QUICK, optimizer="sam", rho=0.1)
    whole = dataclasses.replace(sam, sub_batch=50)
    assert torch.equal(weights(run(whole, 0)), weights(run(sam, 0)))


def test_the_options_of_sam_reach_the_optimizer():
    sam = dataclasses.replace(QUICK, optimizer="sam", rho=0.1)
    variants = [
        {},
        {"norm": "linf"},
        {"ascent_steps": 3},
        {"adaptive": True},
        {"adaptive": "weights"},
        {"rho": 0.2},
    ]
    ends = [weights(run(dataclasses.replace(sam, **options), 0)) for options in variants]
    for i in range(len(ends)):
        for j in range(i):
            assert not torch.allclose(ends[i], ends[j], atol=1e-4), (variants[i], variants[j])


@pytest.mark.parametrize("base", ["adam", "adamw"])
def test_another_base_optimizer_trains_too(base):
    config = Config(dataset="two_moons", base=base, learning_rate=0.01, epochs=20, batch_size=20)
    assert run(config, 0).final("train_accuracy") > 0.9


def test_the_full_batch_takes_one_step_an_epoch_on_every_example_in_order():
    config = dataclasses.replace(QUICK, batch_size=None, momentum=0.0, weight_decay=0.0, epochs=1)
    problem = dataset(config)
    torch.manual_seed(2)
    net = models.build("mlp", (2,), 2, width=10)
    g = plain_gradient(net, problem.x, problem.y)
    expected = torch.cat([(p - 0.1 * d).flatten() for p, d in zip(net.parameters(), g, strict=True)]).detach()
    result = run(config, 2)
    assert torch.allclose(weights(result), expected, atol=1e-7)
    assert result.gradient_evaluations == 1


def averaged_gradient(net, x, y, rho=0.2, k=2):
    theta = list(net.parameters())
    start = [p.detach().clone() for p in theta]
    met = []
    for _ in range(k):
        g = plain_gradient(net, x, y)
        length = math.sqrt(sum(float(d.square().sum()) for d in g))
        with torch.no_grad():
            for p, d in zip(theta, g, strict=True):
                p.add_(rho / k * d / length)
        met.append(plain_gradient(net, x, y))
    with torch.no_grad():
        for p, home in zip(theta, start, strict=True):
            p.copy_(home)
    return [sum(ds) / k for ds in zip(*met, strict=True)]


def test_averaged_and_lookbehind_runs_equal_the_loop_written_out_by_hand():
    config = dataclasses.replace(QUICK, momentum=0.0, weight_decay=0.0, rho=0.2, ascent_steps=2)
    expected = by_hand(config, 4, averaged_gradient)
    for optimizer in ("averaged-sam", "lookbehind-sam"):  # equal without momentum, with a slow step of 1/2
        got = weights(run(dataclasses.replace(config, optimizer=optimizer), 4))
        assert torch.allclose(got, expected, atol=2e-5)
    momentum = [
        weights(run(dataclasses.replace(config, optimizer=optimizer, momentum=0.9), 4))
        for optimizer in ("averaged-sam", "lookbehind-sam")
    ]
    assert not torch.allclose(*momentum, atol=1e-3)


@ALPHA_AT_THE_END
def test_the_options_of_xsam_and_lookbehind_reach_the_optimizer():
    xsam = dataclasses.replace(QUICK, optimizer="xsam", rho=0.3)
    options = [{}, {"search_every": 1}, {"rho_max": 2.0}, {"alpha_max": 0.5}, {"alpha": 1.5}]
    configs = [dataclasses.replace(xsam, **changes) for changes in options]
    back = dataclasses.replace(QUICK, optimizer="lookbehind-sam", rho=0.3, ascent_steps=2)
    configs += [back, dataclasses.replace(back, slow_step=0.9)]
    ends = [weights(run(config, 0)) for config in configs]
    for i in range(len(ends)):
        for j in range(i):
            assert not torch.allclose(ends[i], ends[j], atol=1e-4), (configs[i], configs[j])


def test_xsam_that_stays_at_one_is_sam():
    sam = dataclasses.replace(QUICK, optimizer="sam", rho=0.3)
    staying = dataclasses.replace(sam, optimizer="xsam", alpha=1.0)
    assert torch.allclose(weights(run(staying, 0)), weights(run(sam, 0)), atol=1e-5)


@ALPHA_AT_THE_END
def test_the_history_of_xsam_has_its_alpha_of_each_epoch():
    result = run(dataclasses.replace(QUICK, optimizer="xsam", rho=0.3), 0)
    assert len(result.history["alpha"]) == 3
    assert all(0 <= alpha <= 2 for alpha in result.history["alpha"])
    assert "alpha" not in run(QUICK, 0).history


@ALPHA_AT_THE_END
@pytest.mark.parametrize(("search_every", "searches"), [(None, 3), (5, 3), (12, 1), (1, 12)])
def test_a_search_of_xsam_counts_as_seven_gradients(search_every, searches):
    forwards = []
    config = dataclasses.replace(QUICK, optimizer="xsam", rho=0.3, search_every=search_every)

    def count(step, net):
        if step == 0:
            net.register_forward_hook(lambda *_: forwards.append((torch.is_grad_enabled(), net.training)))

    result = run(config, 0, callback=count)
    gradients, probes = forwards.count((True, True)), forwards.count((False, True))
    assert (gradients, probes) == (3 * 4 * 2, 21 * searches)
    assert result.gradient_evaluations == gradients + probes / 3


def test_without_searches_xsam_costs_what_sam_costs():
    config = dataclasses.replace(QUICK, optimizer="xsam", rho=0.3, alpha=1.2)
    assert run(config, 0).gradient_evaluations == 3 * 4 * 2


def test_a_recorder_sees_every_step_of_a_run():
    recorder = Recorder()
    sam = dataclasses.replace(QUICK, optimizer="sam", rho=0.3)
    watched = run(sam, 0, recorder=recorder)
    assert len(recorder) == 3 * 4
    assert torch.equal(weights(watched), weights(run(sam, 0)))
    with pytest.raises(ValueError, match="SGD has no climb"):
        run(QUICK, 0, recorder=recorder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "xsam", "norm": "linf"}, "'linf'"),
        ({"optimizer": "xsam", "adaptive": True}, "adaptive"),
        ({"slow_step": 1.5}, "slow_step"),
        ({"slow_step": 0.0}, "slow_step"),
        ({"alpha_max": 0.0}, "alpha_max"),
        ({"alpha": -1.0}, "alpha"),
        ({"rho_max": -1.0}, "rho_max"),
        ({"search_every": 0}, "search_every"),
        ({"optimizer": "lion"}, "'lion'"),
    ],
)
def test_settings_of_the_other_methods_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)


@pytest.mark.parametrize(
    ("options", "per_step"),
    [
        ({}, 1),
        ({"optimizer": "sam", "ascent_steps": 2}, 3),
        ({"optimizer": "averaged-sam", "ascent_steps": 2}, 3),
        ({"optimizer": "lookbehind-sam", "ascent_steps": 2}, 3),
        ({"optimizer": "sam", "ascent_steps": 2, "rho": 0.0}, 1),
        ({"optimizer": "averaged-sam", "ascent_steps": 2, "rho": 0.0}, 1),
        ({"optimizer": "lookbehind-sam", "ascent_steps": 2, "rho": 0.0}, 1),
        ({"optimizer": "xsam", "ascent_steps": 2, "rho": 0.0}, 1),
        ({"optimizer": "xsam", "ascent_steps": 2, "rho": 0.3, "alpha": 1.2}, 3),
    ],
)
def test_gradient_evaluations_are_the_passes_in_training_mode(options, per_step):
    passes = []
    config = dataclasses.replace(QUICK, **options)

    def count(step, net):
        if step == 0:
            net.register_forward_hook(lambda module, *_: passes.append(module.training))

    result = run(config, 0, callback=count)
    assert result.gradient_evaluations == passes.count(True) == 3 * 4 * per_step


def test_with_sub_batches_a_pass_over_all_parts_counts_as_one_gradient_of_the_batch():
    config = dataclasses.replace(QUICK, optimizer="sam", sub_batch=10)
    assert run(config, 0).gradient_evaluations == 3 * 4 * 2


def test_the_history_is_what_evaluating_the_model_gives():
    config = dataclasses.replace(QUICK, validation=0.2, label_noise=0.1)
    result = run(config, 0)
    problem = dataset(config)
    for part, x, y in (
        ("train", problem.x, problem.y),
        ("test", problem.x_test, problem.y_test),
        ("validation", problem.x_validation, problem.y_validation),
    ):
        with torch.no_grad():
            logits = result.model(x)
        assert result.final(f"{part}_loss") == pytest.approx(
            float(functional.cross_entropy(logits, y)), rel=1e-6
        )
        assert result.final(f"{part}_accuracy") == pytest.approx(
            float((logits.argmax(1) == y).double().mean())
        )


def test_the_history_has_the_epochs_asked_for_and_the_last_one():
    result = run(dataclasses.replace(QUICK, epochs=7, evaluate_every=3), 0)
    assert result.history["epoch"].tolist() == [3, 6, 7]
    assert {len(column) for column in result.history.values()} == {3}
    assert "validation_loss" not in result.history


def test_how_often_is_evaluated_does_not_change_the_run():
    rare = dataclasses.replace(QUICK, evaluate_every=3)
    assert torch.equal(weights(run(rare, 0)), weights(run(QUICK, 0)))


def test_evaluation_is_the_mean_over_examples_however_it_is_cut():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5))
    x, y = torch.randn(5003, 3), torch.randint(4, (5003,))
    net.train()
    loss, accuracy = evaluate(net, x, y)
    assert net.training
    logits = net.eval()(x).detach()
    assert loss == pytest.approx(float(functional.cross_entropy(logits, y)), rel=1e-5)
    assert accuracy == pytest.approx(float((logits.argmax(1) == y).double().mean()))


def test_squared_error_sums_over_classes_and_averages_over_examples():
    logits = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 1.0]])
    got = loss_function(Config(loss="mse"))(logits, torch.tensor([0, 2]))
    assert float(got) == (0 + 4) / 2


def test_early_stopping_reads_the_first_best_validation_epoch():
    history = {
        "validation_accuracy": np.array([0.1, 0.5, 0.5, 0.2]),
        "test_accuracy": np.array([0.2, 0.4, 0.9, 0.3]),
    }
    result = Result(QUICK, 0, history, torch.nn.Identity(), 0.0, 0)
    assert result.at_best_validation("test_accuracy") == 0.4
    assert result.final("test_accuracy") == 0.3


def test_early_stopping_without_validation_data_is_refused():
    with pytest.raises(ValueError, match=r"validation=0\.2"):
        run(QUICK, 0).at_best_validation("test_accuracy")


def test_noise_validation_and_subset_are_drawn_from_the_data_seed():
    config = Config(dataset="two_moons", label_noise=0.2, validation=0.25, train_size=100, data_seed=3)
    got = dataset(config)
    assert (len(got.y), len(got.y_validation)) == (75, 25)
    again = dataset(config)
    assert torch.equal(got.x, again.x)
    assert torch.equal(got.y, again.y)
    assert not torch.equal(dataset(dataclasses.replace(config, data_seed=4)).x, got.x)


def test_the_callback_sees_every_step_from_the_start():
    steps, starts = [], []

    def watch(step, net):
        steps.append(step)
        starts.append(torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone())

    result = run(QUICK, 0, callback=watch)
    assert steps == list(range(13))
    torch.manual_seed(0)
    fresh = models.build("mlp", (2,), 2, width=10)
    assert torch.equal(starts[0], torch.nn.utils.parameters_to_vector(fresh.parameters()))
    assert torch.equal(starts[-1], weights(result))


@pytest.mark.parametrize("stop", [True, np.bool_(True)])
def test_a_callback_that_returns_true_ends_training_and_the_end_is_evaluated(stop):
    result = run(QUICK, 0, callback=lambda step, net: stop if step == 5 else None)
    assert result.gradient_evaluations == 5
    assert result.history["epoch"].tolist() == [1, 2]


def test_a_callback_that_returns_a_number_does_not_end_training():
    assert run(QUICK, 0, callback=lambda step, net: 1.0).gradient_evaluations == 12


def test_a_run_can_start_from_another_network_and_leaves_it_alone():
    first = run(QUICK, 0)
    before = weights(first).clone()
    second = run(QUICK, 1, model=first.model)
    assert torch.equal(weights(first), before)
    assert not torch.equal(weights(second), before)
    assert second.history["train_loss"][0] < run(QUICK, 1).history["train_loss"][0]


def test_a_diverging_run_ends_with_numbers_that_say_so():
    result = run(dataclasses.replace(QUICK, learning_rate=1e6, momentum=0.0), 0)
    assert not result.final("train_loss") < 1


def test_a_sub_batch_must_divide_the_batch():
    with pytest.raises(ValueError, match=r"sub_batch=30.*batch_size=125"):
        Config(optimizer="sam", sub_batch=30)


def test_many_runs_on_two_processes_equal_the_same_runs_here():
    configs = [QUICK, dataclasses.replace(QUICK, optimizer="sam", rho=0.1)]
    many = run_many(configs, [0, 1, 2], workers=2)
    assert [[result.seed for result in row] for row in many] == [[0, 1, 2]] * 2
    for config, row in zip(configs, many, strict=True):
        for result in row:
            here = run(config, result.seed)
            assert result.config == config
            assert torch.allclose(weights(result), weights(here), atol=1e-5)
            assert not result.model.training


def test_one_configuration_gives_one_row():
    row = run_many(QUICK, [7, 8], workers=1)
    assert [result.seed for result in row] == [7, 8]


def test_a_run_that_fails_in_another_process_says_which_and_why():
    broken = dataclasses.replace(QUICK, model="cnn", model_options={})
    with pytest.raises(RuntimeError, match=r"two_moons.*ValueError: 'cnn' takes images"):
        run_many(broken, [0, 1], workers=2)


def test_no_workers_is_refused():
    with pytest.raises(ValueError, match="workers must be >= 1, got 0"):
        run_many(QUICK, [0, 1], workers=0)


def test_a_function_that_no_other_process_can_import_is_refused():
    with pytest.raises(TypeError, match="workers=1"):
        list(parallel.run_all(lambda x: x, [(1,), (2,)], workers=2))


def test_a_script_without_a_guard_learns_about_the_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import math\n"
        "from samkit import parallel\n"
        "print(list(parallel.run_all(math.gcd, [(2, 4), (3, 9)])))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: the worker processes died" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


def test_workers_use_one_thread_each():
    assert dict(parallel.run_all(torch.get_num_threads, [(), ()], workers=2)) == {0: 1, 1: 1}


@pytest.mark.parametrize(("setting", "shown"), [("1", True), ("0", False), ("", False)])
def test_the_progress_bar_is_silent_unless_somebody_watches(setting, shown, monkeypatch, capsys):
    monkeypatch.setenv("SAMKIT_PROGRESS", setting)
    run(QUICK, 0)
    assert ("seed 0" in capsys.readouterr().err) is shown


def test_a_stored_notebook_holds_no_progress_bar():
    code = (
        "import samkit.training as t\n"
        "c = t.Config(dataset='two_moons', epochs=5)\n"
        "t.run(c, 0); t.run_many(c, [0, 1], workers=2);"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    environment = {key: value for key, value in os.environ.items() if key != "SAMKIT_PROGRESS"}
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute(env=environment)
    assert notebook.cells[0].outputs == []
