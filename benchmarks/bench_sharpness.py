"""``top_eigenvalues`` beside curvlinops: seconds and error on the same net, same data, same tolerance.

Both hand their Hessian-vector products to scipy's ``eigsh``. The error is the largest relative error of the k
eigenvalues against a run in float64 to 1e-10.
"""

import warnings

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.timing import medians
from samkit import sharpness
from samkit.surface import Surface

K, TOLERANCE, REPEATS = 3, 1e-3, 7


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def cnn() -> nn.Sequential:
    convolutions = (
        nn.Sequential(nn.Conv1d(inputs, 25, 5 if inputs == 1 else 3, stride=2, padding=1), nn.ReLU())
        for inputs in (1, 25, 25)
    )
    return nn.Sequential(nn.Unflatten(1, (1, 40)), *convolutions, nn.Flatten(), nn.Linear(125, 10))


def layer_norm() -> nn.Sequential:
    hidden = (nn.Linear(40, 100), nn.LayerNorm(100), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(100, 10), nn.LayerNorm(10))


NETS = {
    "MLP": (mlp, 2000),
    "MLP, small batch": (mlp, 100),
    "CNN": (cnn, 1000),
    "LayerNorm": (layer_norm, 2000),
}


def trained(build, examples: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Ten classes around random centres, and a net some steps into learning them."""
    torch.manual_seed(0)
    targets = torch.arange(examples) % 10
    inputs = torch.randn(10, 40)[targets] + torch.randn(examples, 40)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, inputs, targets


def samkit_values(model, inputs, targets, tolerance: float = TOLERANCE) -> np.ndarray:
    params = list(model.parameters())
    return sharpness.top_eigenvalues(
        lambda: cross_entropy(model(inputs), targets), params, k=K, tol=tolerance
    ).value


def curvlinops_operator(model, inputs, targets):
    from curvlinops import HessianLinearOperator

    return HessianLinearOperator(
        model, nn.CrossEntropyLoss(), list(model.parameters()), [(inputs, targets)], check_deterministic=False
    ).to_scipy()


def curvlinops_values(model, inputs, targets) -> np.ndarray:
    operator = curvlinops_operator(model, inputs, targets)
    start = np.random.default_rng(0).standard_normal(operator.shape[0]).astype(operator.dtype)
    return eigsh(operator, K, which="LA", v0=start, tol=TOLERANCE, return_eigenvectors=False)[::-1]


def product_errors(model, inputs, targets) -> dict[str, tuple[float, float]]:
    """Of one product Hv in float64: the error relative to central differences, and |u'Hv - v'Hu| / |u'Hv|."""
    model, inputs = model.double(), inputs.double()
    params = list(model.parameters())

    def loss():
        return cross_entropy(model(inputs), targets)

    theirs = curvlinops_operator(model, inputs, targets)
    rng = np.random.default_rng(0)
    with Surface(loss, params) as surface:
        u, v = rng.standard_normal((2, surface.size))
        u, v = u / np.linalg.norm(u), v / np.linalg.norm(v)
        ends = [surface.loss_and_gradient(step * v)[1] for step in (1e-5, -1e-5)]
        slow = (ends[0] - ends[1]) / 2e-5
        products = {"samkit": surface.hessian(), "curvlinops": lambda w: theirs @ w}
        return {
            name: (
                np.linalg.norm(product(v) - slow) / np.linalg.norm(slow),
                abs(u @ product(v) - v @ product(u)) / abs(u @ product(v)),
            )
            for name, product in products.items()
        }


def main() -> None:
    warnings.filterwarnings("ignore", ".*torch.jit.script.*")  # curvlinops still uses it
    print(f"\nThe {K} largest Hessian eigenvalues, tolerance {TOLERANCE}")
    print(f"{'net':18}{'weights':>8}{'samkit':>10}{'curvlinops':>12}{'ratio':>7}   errors of both")
    for name, (build, examples) in NETS.items():
        problem = trained(build, examples)
        seconds = medians(
            {"ours": lambda p=problem: samkit_values(*p), "theirs": lambda p=problem: curvlinops_values(*p)},
            REPEATS,
        )
        found = {"ours": samkit_values(*problem), "theirs": curvlinops_values(*problem)}
        model, inputs, targets = problem
        exact = samkit_values(model.double(), inputs.double(), targets, tolerance=1e-10)
        errors = {key: np.abs(values / exact - 1).max() for key, values in found.items()}
        size = sum(p.numel() for p in model.parameters())
        print(
            f"{name:18}{size:8}{seconds['ours']:8.3f} s{seconds['theirs']:10.3f} s"
            f"{seconds['ours'] / seconds['theirs']:7.2f}{errors['ours']:10.1e}{errors['theirs']:10.1e}"
        )
    print("\nOne Hessian-vector product through LayerNorm, in float64")
    for name, (error, asymmetry) in product_errors(*trained(layer_norm, 2000)).items():
        print(f"{name:12} error against finite differences {error:.1e}, asymmetry {asymmetry:.1e}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
