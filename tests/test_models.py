"""The small networks: sizes the text quotes, shapes, and what they refuse."""

import pytest
import torch

from samkit import data, models


def size(model):
    return sum(p.numel() for p in model.parameters())


def test_the_networks_have_the_sizes_that_the_text_quotes():
    assert size(models.build("mlp")) == 40 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10 == 15210
    assert size(models.build("cnn1d")) == 5210


def test_the_resnet_has_29_parameter_tensors_and_running_statistics():
    net = models.build("resnet", (3, 32, 32))
    assert len(list(net.parameters())) == 29
    assert sum("running_mean" in name for name, _ in net.named_buffers()) == 9


SUITED = {
    "mlp": ("mnist1d", "mnist_images", "two_moons", "spirals"),
    "cnn1d": ("mnist1d",),
    "cnn": ("mnist_images",),
    "resnet": ("mnist_images",),
}


@pytest.mark.parametrize(("name", "set_name"), [(m, s) for m, sets in SUITED.items() for s in sets])
def test_a_network_maps_a_batch_to_logits_and_uses_every_weight(name, set_name):
    problem = data.load(set_name)
    torch.manual_seed(0)
    net = models.build(name, problem.x.shape[1:], problem.classes)
    logits = net(problem.x[:8])
    assert logits.shape == (8, problem.classes)
    torch.nn.functional.cross_entropy(logits, problem.y[:8]).backward()
    assert all(p.grad.abs().sum() > 0 for p in net.parameters())


def test_every_name_is_covered_here():
    assert set(SUITED) == set(models.NAMES)


def test_the_seed_fixes_the_weights():
    def weights(seed):
        torch.manual_seed(seed)
        return torch.nn.utils.parameters_to_vector(models.build("mlp").parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("length", [12, 39, 40, 41, 63])
def test_cnn1d_fits_signals_of_any_length(length):
    assert models.build("cnn1d", (length,), 4)(torch.zeros(2, length)).shape == (2, 4)


def test_width_depth_and_activation_of_an_mlp_can_be_chosen():
    net = models.build("mlp", (4,), 3, width=5, depth=3, activation="tanh")
    assert size(net) == (4 * 5 + 5) + 2 * (5 * 5 + 5) + (5 * 3 + 3)
    assert sum(isinstance(layer, torch.nn.Tanh) for layer in net) == 3


def test_an_mlp_without_hidden_layers_is_linear():
    net = models.build("mlp", (4,), 3, depth=0)
    x = torch.randn(2, 4)
    assert torch.equal(net(x), torch.nn.functional.linear(x, net[0].weight, net[0].bias))


def test_in_training_mode_the_resnet_normalises_by_the_batch():
    torch.manual_seed(0)
    net = models.build("resnet", (1, 28, 28))
    x = torch.randn(16, 1, 28, 28)
    net.train()
    assert torch.allclose(net(x), net(3 * x), atol=1e-3), "the first BatchNorm should undo the rescaling"
    net.eval()
    assert not torch.allclose(net(x), net(3 * x), atol=1e-3)
