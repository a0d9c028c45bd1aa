"""What a step costs beyond its passes: its time over that of two passes and one step of the base optimizer.

XSAM is timed between searches; the cost of a search is given in forward passes. The peers are
pytorch_optimizer's SAM and, for orientation, our own short version of the loop that most public code follows:
one tensor at a time. Neither looks for bad gradients, guards running statistics or replays random numbers.
"""

import statistics
import warnings
from collections.abc import Callable

import torch
from pytorch_optimizer import SAM as PytorchOptimizerSAM
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.optim import SGD

from benchmarks.timing import in_turns, medians
from samkit.optim import SAM, XSAM

ROUNDS, SEARCHES = 100, 9
BASE = {"lr": 1e-3, "momentum": 0.9}
NEVER = 10**9


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride == 2:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + self.shortcut(x))


def resnet(widths: list[int], *, stem_bias: bool = False) -> nn.Sequential:
    stem = nn.Sequential(
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=stem_bias), nn.BatchNorm2d(widths[0]), nn.ReLU()
    )
    blocks = [Block(i, o) for i, o in zip([widths[0], *widths], widths, strict=False)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


MODELS = {
    "small ResNet, 64 x 3 x 32 x 32": (lambda: resnet([16, 32, 64]), (64, 3, 32, 32)),
    "deep ResNet, 32 x 3 x 16 x 16": (lambda: resnet([8] * 66, stem_bias=True), (32, 3, 16, 16)),
}


class PlainSAM:
    """The usual loop: norms, copies, perturbations and restorations one tensor at a time."""

    def __init__(self, params: list[Tensor], rho: float = 0.05):
        self.params, self.rho = params, rho
        self.base = SGD(params, **BASE)

    def step(self, closure: Callable[[], Tensor]) -> None:
        closure()
        with torch.no_grad():
            length = torch.stack([p.grad.norm() for p in self.params]).norm() + 1e-12
            home = [p.clone() for p in self.params]
            for p in self.params:
                p.add_(p.grad * (self.rho / length))
        closure()
        with torch.no_grad():
            for p, value in zip(self.params, home, strict=True):
                p.copy_(value)
        self.base.step()


def candidates(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[dict, dict]:
    """All on one model and one batch: where memory happens to lie can be worth some per cent."""
    torch.manual_seed(0)
    model, inputs, targets = build(), torch.randn(shape), torch.arange(shape[0]) % 10
    params = list(model.parameters())

    def closure() -> Tensor:
        for p in params:
            p.grad = None
        loss = cross_entropy(model(inputs), targets)
        if loss.requires_grad:
            loss.backward()
        return loss

    base = SGD(params, **BASE)
    peer = PytorchOptimizerSAM(params, SGD, **BASE)
    plain = PlainSAM(params)
    sam = SAM(params, SGD, **BASE)
    xsam = XSAM(params, SGD, search_every=NEVER, **BASE)
    searching = XSAM(params, SGD, search_every=1, **BASE)
    steps = {
        "two passes and a base step": lambda: (closure(), closure(), base.step()),
        "samkit SAM": lambda: sam.step(closure),
        "samkit XSAM, between searches": lambda: xsam.step(closure),
        "pytorch_optimizer SAM": lambda: (closure(), peer.step(closure)),
        "one tensor at a time": lambda: plain.step(closure),
    }
    search = {
        "between": lambda: xsam.step(closure),
        "searching": lambda: searching.step(closure),
        "forward": torch.no_grad()(closure),
    }
    return steps, search


def main() -> None:
    warnings.filterwarnings("ignore", message="XSAM's search ended at alpha_max")
    print(__doc__)
    for name, (build, shape) in MODELS.items():
        count = len(list(build().parameters()))
        steps, search = candidates(build, shape)
        seconds = in_turns(steps, ROUNDS)
        reference, *others = seconds
        print(f"{name}, {count} tensors; medians of {ROUNDS} rounds, {torch.get_num_threads()} thread(s)")
        print(f"  {reference:32s}{1e3 * statistics.median(seconds[reference]):9.1f} ms")
        for step in others:
            pairs = list(zip(seconds[step], seconds[reference], strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            extra = 1e3 * statistics.median(a - b for a, b in pairs)
            print(f"  {step:32s}{ratio:9.3f}{extra:+9.2f} ms")
        cost = medians(search, SEARCHES)
        probes = (cost["searching"] - cost["between"]) / cost["forward"]
        print(f"  {'one search (21 probes)':32s}{probes:9.1f} forward passes\n")
