"""Grad-CAM: a closed form, captum's version, finite differences, and where a map lies."""

import pytest
import torch
from captum.attr import LayerGradCam

from samkit import models
from samkit.attribution import grad_cam, regions, share


@pytest.fixture
def a_network():
    torch.manual_seed(0)
    return models.cnn((1, 12, 12), 3, channels=2).double()


@pytest.fixture
def a_batch():
    return torch.randn(5, 1, 12, 12, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])


@pytest.mark.parametrize("index", [3, 4, 5])
def test_the_map_is_that_of_captum(a_network, a_batch, index):
    x, y = a_batch
    layer = a_network[index]
    other = LayerGradCam(a_network, layer).attribute(x, y, relu_attributions=True)[:, 0]
    got = grad_cam(a_network, layer, x, y)
    assert got.shape == other.shape
    assert got.max() > 0
    torch.testing.assert_close(got, other.detach())


def test_the_importance_of_a_channel_is_the_slope_of_the_score(a_network, a_batch):
    """Adding h to a whole channel raises the score by h |U| a_k: the map follows from these differences."""
    x, y = a_batch[0][:1], a_batch[1][:1]
    head, tail = a_network[:5], a_network[5:]
    activations = head(x).detach() + 0.01  # off the kinks of the ReLU, so that no maximum changes hands
    channels, places, h = activations.shape[1], activations[0, 0].numel(), 1e-6
    slopes = []
    for k in range(channels):
        moved = activations.clone()
        moved[:, k] += h
        slopes.append((tail(moved) - tail(activations))[0, y[0]] / (h * places))
    expected = (torch.stack(slopes)[:, None, None] * activations[0]).sum(dim=0).relu()
    torch.testing.assert_close(
        grad_cam(tail_with(tail), tail_with.first, activations, y)[0], expected.detach()
    )


def tail_with(tail):
    tail_with.first = torch.nn.Identity()
    return torch.nn.Sequential(tail_with.first, *tail)


def test_the_map_leaves_the_network_as_it_was(a_network, a_batch):
    grad_cam(a_network, a_network[4], *a_batch)
    assert all(p.grad is None for p in a_network.parameters())
    assert not a_network[4]._forward_hooks


def test_a_later_layer_that_writes_in_place_does_not_change_the_map(a_batch):
    maps = []
    for inplace in (False, True):
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(inplace), torch.nn.Flatten(), torch.nn.Linear(400, 3)
        ).double()
        maps.append(grad_cam(network, network[0], *a_batch))
    assert torch.equal(*maps)


def test_the_map_needs_no_gradients_switched_on(a_network, a_batch):
    expected = grad_cam(a_network, a_network[4], *a_batch)
    a_network.requires_grad_(False)
    with torch.no_grad():
        assert torch.equal(grad_cam(a_network, a_network[4], *a_batch), expected)


def test_a_layer_that_the_scores_do_not_pass_through_once_is_refused(a_network, a_batch):
    with pytest.raises(ValueError, match="ran it 0 times"):
        grad_cam(a_network, torch.nn.Conv2d(1, 1, 1), *a_batch)
    twice = torch.nn.Conv2d(1, 1, 3, padding=1)
    network = torch.nn.Sequential(twice, twice, torch.nn.Flatten(), torch.nn.Linear(144, 3)).double()
    with pytest.raises(ValueError, match="ran it 2 times"):
        grad_cam(network, twice, *a_batch)

    class Ignores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.head = torch.nn.Conv2d(1, 1, 1), torch.nn.Linear(144, 3)

        def forward(self, x):
            self.seen(x)
            return self.head(x.flatten(1))

    network = Ignores().double()
    with pytest.raises(ValueError, match="do not depend on the layer"):
        grad_cam(network, network.seen, *a_batch)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda net, x, y: grad_cam(net, net[4], x.long(), y), TypeError, "images must be a floating-point"),
        (lambda net, x, y: grad_cam(net, net[4], x, y.double()), TypeError, "labels must be an int64"),
        (lambda net, x, y: grad_cam(net, net[4], x, y.tolist()), TypeError, "labels must be an int64"),
        (lambda net, x, y: regions(x.long()), TypeError, "images must be a floating-point"),
        (lambda net, x, y: regions(x.numpy()), TypeError, "images must be a floating-point"),
        (lambda net, x, y: regions(x * torch.nan), ValueError, "images must be finite"),
        (lambda net, x, y: regions(x, reach=-1), ValueError, "reach must be >= 0"),
        (lambda net, x, y: regions(x, reach=1.5), TypeError, "reach must be an integer"),
        (lambda net, x, y: regions(x, threshold=torch.nan), ValueError, "threshold"),
        (lambda net, x, y: regions(x, faint=2.0), ValueError, "faint"),
        (lambda net, x, y: share(x[:, 0].long(), x[:, 0] > 0), TypeError, "maps must be a floating-point"),
        (lambda net, x, y: share(x[:, 0], 255 * (x[:, 0] > 0)), TypeError, "mask must be a bool"),
        (lambda net, x, y: share(x, x > 0), ValueError, "maps must have shape"),
    ],
)
def test_input_that_has_no_answer_is_refused_by_name(a_network, a_batch, call, error, message):
    with pytest.raises(error, match=message):
        call(a_network, *a_batch)


def test_maps_that_cannot_be_made_are_refused(a_network, a_batch):
    x, y = a_batch
    with pytest.raises(ValueError, match="one label for each of 5"):
        grad_cam(a_network, a_network[4], x, y[:3])
    with pytest.raises(ValueError, match=r"labels must lie between 0 and \d+"):
        grad_cam(a_network, a_network[4], x, y + 100)
    with pytest.raises(ValueError, match="height and width"):
        grad_cam(a_network, a_network[7], x, y)
    assert not a_network[7]._forward_hooks


def test_strokes_and_background_share_out_the_image_and_far_is_background():
    x = torch.rand(4, 3, 16, 16)
    x[:, :, :12, :] = 0.2
    found = regions(x)
    assert (found["strokes"] ^ found["background"]).all()
    assert not (found["far"] & found["strokes"]).any()
    assert found["far"].any()


def test_regions_do_not_depend_on_brightness_or_inversion():
    x = torch.zeros(1, 1, 16, 16)
    x[..., 3, 2:9], x[..., 4, 2:9] = 1.0, 0.3
    for other in (0.5 * x, 1 - x):
        for name, mask in regions(x).items():
            assert torch.equal(mask, regions(other)[name]), name


def test_an_empty_image_is_all_background():
    found = regions(torch.zeros(1, 1, 8, 8))
    assert found["background"].all()
    assert found["far"].all()


def test_an_even_map_has_the_share_of_the_area():
    mask = torch.rand(3, 28, 28) > 0.7
    expected = mask.float().mean(dim=(1, 2))
    torch.testing.assert_close(share(torch.full((3, 14, 14), 2.0), mask), expected)


def test_a_map_of_zeros_has_no_share():
    assert share(torch.zeros(1, 2, 2), torch.ones(1, 4, 4, dtype=torch.bool)).isnan().all()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one mask"):
        share(torch.zeros(2, 2, 2), torch.ones(1, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="images must have shape"):
        regions(torch.zeros(28, 28))
