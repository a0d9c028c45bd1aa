"""Case 17, one rank: ``python two_ranks.py RANK FOLDER``. The test beside it starts two and compares."""

import functools
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from samkit.optim import SAM, XSAM, AveragedSAM, LookbehindSAM

F64 = torch.float64
KINDS = {
    "SAM": SAM,
    "XSAM": functools.partial(XSAM, search_every=2),
    "AveragedSAM": functools.partial(AveragedSAM, ascent_steps=3),
    "LookbehindSAM": functools.partial(LookbehindSAM, ascent_steps=3),
}


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.randn(8, 5, dtype=F64), torch.arange(8) % 3


def train(rank: int, kind: str, steps: int = 3, bad_rank: int | None = None) -> dict:
    """A few steps on this rank's half of the batch; what its weights were at the ascent points, and after."""
    model, inputs, targets = problem()
    ddp = DistributedDataParallel(model)
    mine = slice(4 * rank, 4 * rank + 4)
    optimizer = KINDS[kind](ddp.parameters(), rho=0.3, lr=0.2, momentum=0.9)
    seen, synced = [], []

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(ddp(inputs[mine]), targets[mine])
        if torch.is_grad_enabled():
            seen.append(flat(model))
            synced.append(ddp.require_backward_grad_sync)
        if loss.requires_grad:
            loss.backward()
            if rank == bad_rank and len(seen) == 1:
                model[0].weight.grad[0, 0] = torch.nan  # on this rank alone, and in the first pass alone
        return loss

    for _ in range(steps):
        optimizer.step(closure, ascent_context=ddp.no_sync)
    return {
        "weights": flat(model),
        "seen": seen,
        "synced": synced,
        "alpha": getattr(optimizer, "alpha", None),
        "skipped": optimizer.skipped_steps,
    }


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


if __name__ == "__main__":
    warnings.simplefilter("error")
    # A small random network may well search at the end of its range.
    warnings.filterwarnings("ignore", message="XSAM's search ended at alpha_max")
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    results = {kind: train(rank, kind) for kind in KINDS}
    results |= {f"bad {kind}": train(rank, kind, steps=1, bad_rank=1) for kind in KINDS}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()
