"""Case 17, davda54/sam#78: data-parallel training where each rank perturbs along its own gradient.

Two gloo processes train on half a batch each. One process that takes the halves as two closures is the truth:
a perturbation of one's own is m-sharpness over the ranks.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

SCRIPT = Path(__file__).with_name("two_ranks.py")
SPEC = importlib.util.spec_from_file_location("two_ranks", SCRIPT)
two_ranks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(two_ranks)
KINDS = list(two_ranks.KINDS)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_17_the_weights_of_both_ranks_are_equal_bit_for_bit(ranks, kind):
    assert torch.equal(ranks[0][kind]["weights"], ranks[1][kind]["weights"])
    assert ranks[0][kind]["alpha"] == ranks[1][kind]["alpha"]


@pytest.mark.parametrize("kind", KINDS)
def test_17_the_ranks_climb_along_their_own_gradients(ranks, kind):
    (home0, climbed0), (home1, climbed1) = (rank[kind]["seen"][:2] for rank in ranks)
    assert torch.equal(home0, home1)
    assert not torch.equal(climbed0, climbed1)
    steps = len(ranks[0][kind]["seen"]) // 3 - 1
    for climbed in (climbed0, climbed1):
        assert (climbed - home0).norm().item() == pytest.approx(0.3 / steps)


def test_17_the_first_pass_is_wholly_inside_no_sync(ranks):
    for rank in ranks:
        assert rank["SAM"]["synced"] == [False, True] * 3
        assert rank["XSAM"]["synced"] == [False, False] * 3  # mixed first, then averaged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:XSAM's search ended at alpha_max")
def test_17_two_ranks_are_m_sharpness_with_two_closures(ranks, kind):
    model, inputs, targets = two_ranks.problem()
    optimizer = two_ranks.KINDS[kind](model.parameters(), rho=0.3, lr=0.2, momentum=0.9)

    def closure(part):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[part]), targets[part])
        if loss.requires_grad:
            loss.backward()
        return loss

    for _ in range(3):
        optimizer.step([lambda: closure(slice(0, 4)), lambda: closure(slice(4, 8))])
    torch.testing.assert_close(ranks[0][kind]["weights"], two_ranks.flat(model), rtol=1e-12, atol=1e-13)
    assert ranks[0][kind]["alpha"] == getattr(optimizer, "alpha", None)


@pytest.mark.parametrize("kind", [f"bad {kind}" for kind in KINDS])
def test_17_a_bad_gradient_on_one_rank_skips_the_step_on_both(ranks, kind):
    start = two_ranks.flat(two_ranks.problem()[0])
    for rank in ranks:
        assert rank[kind]["skipped"] == 1
        assert torch.equal(rank[kind]["weights"], start)
