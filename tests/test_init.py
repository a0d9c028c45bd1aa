"""``samkit.device`` and ``samkit.seed_everything``; what they refuse is in ``test_bad_input.py``."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

import samkit


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine with the given accelerators, and no override in the environment."""
    monkeypatch.delenv("SAMKIT_DEVICE", raising=False)

    def pretend(cuda: int = 0, mps: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(2, True, "cuda"), (0, True, "mps"), (0, False, "cpu")]
)
def test_cuda_comes_before_mps_and_mps_before_the_cpu(machine, cuda: int, mps: bool, expected: str) -> None:
    machine(cuda, mps)
    assert samkit.device() == torch.device(expected)


def test_the_environment_overrides_the_choice(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(cuda=2)
    for wanted, expected in ((" CPU ", "cpu"), ("cuda:1", "cuda:1"), ("", "cuda")):
        monkeypatch.setenv("SAMKIT_DEVICE", wanted)
        assert samkit.device() == torch.device(expected)


def test_a_name_overrides_the_environment(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(cuda=1)
    monkeypatch.setenv("SAMKIT_DEVICE", "cuda")
    assert samkit.device("cpu") == torch.device("cpu")


def test_a_second_gpu_is_refused_where_there_is_one(machine) -> None:
    machine(cuda=1)
    with pytest.raises(ValueError, match=r"cuda:1.*it has: cuda, cpu"):
        samkit.device("cuda:1")


def test_one_seed_repeats_python_numpy_and_torch() -> None:
    draws = []
    for _ in range(2):
        assert samkit.seed_everything(np.int64(7)) == 7
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))  # noqa: NPY002
    assert draws[0] == draws[1]
    samkit.seed_everything(8)
    assert torch.rand(()).item() != draws[0][2]


def test_the_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", samkit.__version__)


def test_submodules_load_when_first_named_and_others_are_an_error() -> None:
    assert samkit.perturb.__name__ == "samkit.perturb"
    assert "landscapes" in dir(samkit)
    with pytest.raises(AttributeError, match="no attribute 'no_such_room'"):
        samkit.no_such_room  # noqa: B018
