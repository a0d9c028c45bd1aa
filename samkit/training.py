"""The one training loop of the course: ``run(config, seed)`` and many of them at once."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import samkit
from samkit import _arguments, data, models, parallel
from samkit.optim import SAM, XSAM, AveragedSAM, LookbehindSAM, Recorder

__all__ = ["Config", "Result", "dataset", "evaluate", "loss_function", "run", "run_many"]

_BASES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
_WRAPPERS = {"sam": SAM, "averaged-sam": AveragedSAM, "lookbehind-sam": LookbehindSAM, "xsam": XSAM}
_SCHEDULES = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "constant": lambda progress: 1.0,
}
_CHOICES = {
    "dataset": data.NAMES,
    "model": models.NAMES,
    "optimizer": ("sgd", *_WRAPPERS),
    "base": tuple(_BASES),
    "schedule": tuple(_SCHEDULES),
    "loss": ("cross_entropy", "mse"),
    "norm": ("l2", "linf"),
    "adaptive": (False, True, "weights", "all"),
}


@dataclass(frozen=True)
class Config:
    """Everything that defines a training run, apart from its seed.

    Parameters
    ----------
    dataset : str
        A name of :func:`samkit.data.load`.
    model : str
        A name of :func:`samkit.models.build`.
    model_options : dict
        Its further arguments, such as ``{"width": 50}``.
    optimizer : str
        ``"sgd"`` steps with the base optimizer alone; ``"sam"``, ``"averaged-sam"``, ``"lookbehind-sam"`` and
        ``"xsam"`` wrap it, see :mod:`samkit.optim`.
    base : str
        The base optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``.
    epochs : int
        Passes over the training examples.
    batch_size : int or None
        Examples per step; ``None`` takes all of them (full batch: one step an epoch).
    learning_rate, momentum, weight_decay : float
        Settings of the base optimizer. Momentum is ignored by the Adam bases.
    schedule : str
        ``"cosine"`` lets the learning rate fall to 0 over the run, step by step; ``"constant"`` keeps it.
    loss : str
        ``"cross_entropy"``, or ``"mse"`` against one-hot targets, averaged over examples and summed over
        classes.
    rho, norm, ascent_steps, adaptive
        SAM's radius and variants, as in :class:`~samkit.optim.SAM`. XSAM has the l_2 norm only.
    slow_step : float
        Lookbehind's share of the way to keep, as in :class:`~samkit.optim.LookbehindSAM`.
    search_every : int or None
        Steps between two searches of XSAM; ``None`` searches once an epoch.
    rho_max, alpha_max
        XSAM's radius of the probes and the end of its range, as in :class:`~samkit.optim.XSAM`.
    alpha : float or None
        A position at which XSAM stays, without searches; ``None`` searches.
    sub_batch : int or None
        m of m-sharpness: each batch is cut into parts of this size, each perturbed by its own gradient.
    label_noise : float
        Share of wrong labels in the training data, validation part included.
    validation : float
        Share of the training examples carved off as validation data.
    train_size : int or None
        Keep only this many training examples (before noise and validation).
    data_seed : int
        Seed of the data: of the draw or the split, of the subset, the noise and the validation part.
    evaluate_every : int
        Epochs between two entries in the history; the end of training always gets one.

    Raises
    ------
    ValueError
        If a value is out of range or a name unknown.
    TypeError
        If a value has the wrong type.

    Examples
    --------
    >>> from samkit.training import Config
    >>> Config(optimizer="sam", rho=0.2).rho
    0.2
    """

    dataset: str = "mnist1d"
    model: str = "mlp"
    model_options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    base: str = "sgd"
    epochs: int = 40
    batch_size: int | None = 125
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-3
    schedule: str = "cosine"
    loss: str = "cross_entropy"
    rho: float = 0.05
    norm: str = "l2"
    ascent_steps: int = 1
    adaptive: bool | str = False
    slow_step: float = 0.5
    search_every: int | None = None
    rho_max: float | None = None
    alpha_max: float = 2.0
    alpha: float | None = None
    sub_batch: int | None = None
    label_noise: float = 0.0
    validation: float = 0.0
    train_size: int | None = None
    data_seed: int = 0
    evaluate_every: int = 1

    def __post_init__(self):
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                choices = ", ".join(map(repr, known))
                raise ValueError(f"{name} must be one of {choices}; got {getattr(self, name)!r}")
        for name in ("epochs", "ascent_steps", "evaluate_every"):
            _arguments.integer(name, getattr(self, name), 1)
        for name in ("batch_size", "sub_batch", "train_size", "search_every"):
            if getattr(self, name) is not None:
                _arguments.integer(name, getattr(self, name), 1)
        for name in ("learning_rate", "momentum", "weight_decay", "rho"):
            _arguments.number(name, getattr(self, name))
        for name in ("rho_max", "alpha"):
            if getattr(self, name) is not None:
                _arguments.number(name, getattr(self, name))
        for name in ("slow_step", "alpha_max"):
            _arguments.number(name, getattr(self, name), positive=True)
        _arguments.fraction("slow_step", self.slow_step)
        for name in ("label_noise", "validation"):
            _arguments.fraction(name, getattr(self, name))
        if not isinstance(self.model_options, Mapping):
            raise TypeError(
                f'model_options must be a dict such as {{"width": 50}}, got {self.model_options!r}'
            )
        _arguments.seed(self.data_seed)
        if self.sub_batch is not None and self.optimizer == "sgd":
            raise ValueError(
                f"sub_batch={self.sub_batch} belongs to SAM; set optimizer='sam' or sub_batch=None"
            )
        if self.optimizer == "xsam" and (self.norm != "l2" or self.adaptive is not False):
            raise ValueError(
                f"XSAM searches a Euclidean circle: norm must be 'l2' and adaptive False, got "
                f"norm={self.norm!r} and adaptive={self.adaptive!r}; set optimizer='sam' for other balls"
            )
        if self.sub_batch is not None and self.batch_size is not None and self.batch_size % self.sub_batch:
            raise ValueError(
                f"sub_batch={self.sub_batch} must divide batch_size={self.batch_size}: "
                "the parts of a batch have equal weight, so they must have equal size"
            )


@dataclass(eq=False)
class Result:
    """What a training run leaves behind.

    Parameters
    ----------
    config : Config
        The settings.
    seed : int
        The seed.
    history : dict of str to numpy.ndarray
        One entry for each evaluated epoch: ``epoch``, ``train_loss``, ``train_accuracy``, ``test_loss``,
        ``test_accuracy`` and, with validation data, ``validation_loss`` and ``validation_accuracy``. Losses
        are means over examples, accuracies shares between 0 and 1, all in evaluation mode at the end of the
        epoch. Training figures count the labels that training sees, noise included. With XSAM also
        ``alpha``, the position in use.
    model : torch.nn.Module
        The trained network, in evaluation mode.
    seconds : float
        Wall-clock time of the run, evaluation included.
    gradient_evaluations : int
        Gradients of a whole batch computed: one a step for SGD and wherever ``rho`` is 0,
        ``1 + ascent_steps`` for the others, and for XSAM 7 more a search: 21 forward passes, where a
        gradient counts as three (forward, and twice as much backward).
    """

    config: Config
    seed: int
    history: dict[str, np.ndarray]
    model: nn.Module
    seconds: float
    gradient_evaluations: int

    def final(self, key: str) -> float:
        """The last entry of one column of the history.

        Parameters
        ----------
        key : str
            A column, such as ``"test_accuracy"``.

        Returns
        -------
        float
            Its value at the end of training.

        Raises
        ------
        ValueError
            If the history has no such column.
        """
        return float(self._column(key)[-1])

    def at_best_validation(self, key: str) -> float:
        """One column of the history at the epoch with the best validation accuracy (early stopping).

        Parameters
        ----------
        key : str
            A column, such as ``"test_accuracy"``.

        Returns
        -------
        float
            Its value at the first epoch that reaches the best validation accuracy.

        Raises
        ------
        ValueError
            If the run had no validation data, or the history has no such column.
        """
        if "validation_accuracy" not in self.history:
            raise ValueError(
                "this run had no validation data; set validation=0.2, for example, in its Config"
            )
        return float(self._column(key)[np.argmax(self.history["validation_accuracy"])])

    def _column(self, key: str) -> np.ndarray:
        if key not in self.history:
            raise ValueError(f"the history has no {key!r}; it has {', '.join(self.history)}")
        return self.history[key]


def _check_config(config: Config) -> None:
    if not isinstance(config, Config):
        raise TypeError(f"config must be a samkit.training.Config, got {config!r}")


def dataset(config: Config) -> data.Dataset:
    """The data exactly as a run with this configuration sees it.

    Parameters
    ----------
    config : Config
        The settings; ``dataset``, ``train_size``, ``label_noise``, ``validation`` and ``data_seed`` matter.

    Returns
    -------
    samkit.data.Dataset
        The data, with noise and validation part, on the CPU.
    """
    loaded = data.load(config.dataset, seed=config.data_seed)
    if config.train_size is not None:
        loaded = loaded.subset(config.train_size, seed=config.data_seed)
    noisy = loaded.with_label_noise(config.label_noise, seed=config.data_seed)
    return noisy.with_validation(config.validation, seed=config.data_seed)


def loss_function(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """The training loss ``(logits, labels) -> scalar``, a mean over examples.

    Parameters
    ----------
    config : Config
        The settings; only ``loss`` matters.

    Returns
    -------
    callable
        The loss.
    """
    return functional.cross_entropy if config.loss == "cross_entropy" else _one_hot_error


def _one_hot_error(logits: Tensor, labels: Tensor) -> Tensor:
    targets = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return (logits - targets).square().sum(dim=1).mean()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
) -> tuple[float, float]:
    """Mean loss and accuracy in evaluation mode; the model's mode is left as found.

    Parameters
    ----------
    model : torch.nn.Module
        The network.
    x, y : torch.Tensor
        Inputs ``(n, ...)`` and labels ``(n,)`` on the model's device.
    loss : callable
        ``(logits, labels) -> scalar``, a mean over examples.

    Returns
    -------
    tuple of float
        Loss, and the share of right answers between 0 and 1.
    """
    was_training = model.training
    model.eval()
    total = right = 0.0
    for inputs, labels in zip(x.split(5000), y.split(5000), strict=True):
        logits = model(inputs)
        total += float(loss(logits, labels)) * len(labels)
        right += float((logits.argmax(dim=1) == labels).sum())
    model.train(was_training)
    return total / len(y), right / len(y)


def run(
    config: Config,
    seed: int,
    *,
    progress: bool = True,
    device: torch.device | str | None = None,
    callback: Callable[[int, nn.Module], bool | None] | None = None,
    model: nn.Module | None = None,
    recorder: Recorder | None = None,
) -> Result:
    """Train one network.

    The seed fixes the initial weights and the order of the batches, so runs with the same seed and different
    optimizers start from the same point and see the same batches. The caller's random state is left as found.

    Parameters
    ----------
    config : Config
        The settings.
    seed : int
        Seed of the weights, the batch order and any dropout.
    progress : bool
        Whether to show a bar (it is silent where output is stored, see :func:`samkit.parallel.progress_bar`).
    device : torch.device or str or None
        Where to train; ``None`` means :func:`samkit.device`.
    callback : callable or None
        Called as ``callback(step, model)`` with the number of steps made so far: once before the first step
        (0) and after each one. It must not change the model. Training ends where it returns ``True`` after
        a step.
    model : torch.nn.Module or None
        A network to start from, such as another run's; it is copied and stays as it is. ``None`` builds a
        fresh one from the seed.
    recorder : samkit.optim.Recorder or None
        Writes down what each step saw; SGD has nothing to record.

    Returns
    -------
    Result
        History, trained model, time and cost.

    Raises
    ------
    TypeError
        If an argument is of the wrong type, such as a seed that is not an integer.
    ValueError
        If the seed is out of range, the device unknown, ``sub_batch`` does not divide the training set, or
        there is a recorder for SGD.

    Examples
    --------
    >>> from samkit.training import Config, run
    >>> result = run(Config(dataset="two_moons", epochs=50, batch_size=20), seed=0)
    >>> result.final("train_accuracy") > 0.9, result.gradient_evaluations
    (True, 500)
    """
    _check_config(config)
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"model must be a network to start from, or None, got {model!r}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be a function of step and model, or None, got {callback!r}")
    if recorder is not None and config.optimizer == "sgd":
        raise ValueError(f"recorder={recorder!r} records the steps of SAM and its variants; SGD has no climb")
    started = time.perf_counter()
    device = samkit.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_arguments.seed(seed))
        problem = dataset(config)
        # Built on the CPU whatever the device, so that a seed names the same start everywhere.
        fresh = models.build(config.model, problem.x.shape[1:], problem.classes, **config.model_options)
        model = (fresh if model is None else copy.deepcopy(model)).to(device)
        history, gradients = _train(model, problem.to(device), config, seed, progress, callback, recorder)
    return Result(config, seed, history, model.eval(), time.perf_counter() - started, gradients)


def _train(
    model: nn.Module,
    problem: data.Dataset,
    config: Config,
    seed: int,
    progress: bool,
    callback: Callable | None,
    recorder: Recorder | None,
) -> tuple[dict[str, np.ndarray], int]:
    if config.sub_batch is not None and len(problem.y) % config.sub_batch:
        raise ValueError(
            f"sub_batch={config.sub_batch} must divide the {len(problem.y)} training examples: the parts of "
            "the last batch have equal weight too; choose another sub_batch, or train_size"
        )
    loss = loss_function(config)
    size = config.batch_size or len(problem.y)
    steps_per_epoch = math.ceil(len(problem.y) / size)
    optimizer = _optimizer(model, config, steps_per_epoch, recorder)
    parts = {"train": (problem.x, problem.y), "test": (problem.x_test, problem.y_test)}
    if problem.y_validation is not None:
        parts["validation"] = (problem.x_validation, problem.y_validation)
    history: dict[str, list[float]] = {"epoch": []}
    total_steps = config.epochs * steps_per_epoch
    decay = _SCHEDULES[config.schedule]
    step, ended = 0, False
    model.train()
    if callback is not None:
        callback(0, model)
    with parallel.progress_bar(config.epochs, f"seed {seed}", progress) as bar:
        for epoch, batches in enumerate(_epochs(problem.x, problem.y, size, config.epochs, seed), start=1):
            for x, y in batches:
                for group in optimizer.param_groups:
                    group["lr"] = config.learning_rate * decay(step / total_steps)
                optimizer.step(_closures(model, optimizer, loss, x, y, config.sub_batch))
                step += 1
                ended = callback is not None and _says_stop(callback(step, model))
                if ended:
                    break
            if epoch % config.evaluate_every == 0 or epoch == config.epochs or ended:
                history["epoch"].append(epoch)
                for part, (inputs, labels) in parts.items():
                    value, accuracy = evaluate(model, inputs, labels, loss)
                    history.setdefault(f"{part}_loss", []).append(value)
                    history.setdefault(f"{part}_accuracy", []).append(accuracy)
                if config.optimizer == "xsam":
                    history.setdefault("alpha", []).append(optimizer.alpha)
            bar.update()
            if ended:
                break
    return {key: np.asarray(values) for key, values in history.items()}, _gradients(optimizer, step)


def _gradients(optimizer: torch.optim.Optimizer, steps: int) -> int:
    if not isinstance(optimizer, SAM) or optimizer.param_groups[0]["rho"] == 0:
        return steps
    gradients = steps * (1 + optimizer.ascent_steps)
    if isinstance(optimizer, XSAM) and optimizer.search_every is not None:
        searches = math.ceil(optimizer.steps / optimizer.search_every)
        gradients += searches * optimizer.alpha_samples // 3  # a gradient costs three forward passes
    return gradients


def _says_stop(answer: Any) -> bool:
    # A callback that happens to return a measured number does not mean to stop; NumPy's True does.
    return isinstance(answer, bool | np.bool_) and bool(answer)


def _optimizer(
    model: nn.Module, config: Config, steps_per_epoch: int, recorder: Recorder | None
) -> torch.optim.Optimizer:
    base = _BASES[config.base]
    settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    if config.base == "sgd":
        settings["momentum"] = config.momentum
    if config.optimizer == "sgd":
        return base(model.parameters(), **settings)
    if config.optimizer == "xsam":
        settings |= {"rho_max": config.rho_max, "alpha_max": config.alpha_max}
        if config.alpha is None:
            settings["search_every"] = config.search_every or steps_per_epoch
        else:
            settings |= {"search_every": None, "alpha": config.alpha}
    if config.optimizer == "lookbehind-sam":
        settings["slow_step"] = config.slow_step
    return _WRAPPERS[config.optimizer](
        model.parameters(),
        base,
        rho=config.rho,
        norm=config.norm,
        ascent_steps=config.ascent_steps,
        adaptive=config.adaptive,
        model=model,
        recorder=recorder,
        **settings,
    )


def _epochs(
    x: Tensor, y: Tensor, size: int, epochs: int, seed: int
) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        if size >= len(y):
            yield iter([(x, y)])
        else:
            order = torch.randperm(len(y), generator=generator).to(y.device)
            yield ((x[batch], y[batch]) for batch in order.split(size))


def _closures(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    sub_batch: int | None,
) -> Callable[[], Tensor] | list[Callable[[], Tensor]]:
    def closure_of(inputs: Tensor, labels: Tensor) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(model(inputs), labels)
            if value.requires_grad:
                value.backward()
            return value

        return closure

    if sub_batch is None:
        return closure_of(x, y)
    return [closure_of(*part) for part in zip(x.split(sub_batch), y.split(sub_batch), strict=True)]


def run_many(
    configs: Config | Sequence[Config], seeds: Sequence[int], *, workers: int = 2, progress: bool = True
) -> list:
    """Train every configuration with every seed, several runs at a time.

    Runs go to ``workers`` processes of one thread each, which works the same on Linux, macOS and Windows.
    In a script, call it under ``if __name__ == "__main__":``.

    Parameters
    ----------
    configs : Config or sequence of Config
        One configuration, or several.
    seeds : sequence of int
        The seeds.
    workers : int
        Number of processes; 1 trains in this process.
    progress : bool
        Whether to show a bar.

    Returns
    -------
    list
        For one configuration: its :class:`Result` for each seed, in order. For several: a list of such lists.

    Raises
    ------
    TypeError, ValueError
        If a configuration or a seed is not one, before anything is trained.
    RuntimeError
        If a run fails in a worker; the message says which.

    Examples
    --------
    >>> from samkit.training import Config, run_many
    >>> config = Config(dataset="two_moons", epochs=1, batch_size=20)
    >>> [result.seed for result in run_many(config, [3, 4], workers=1)]
    [3, 4]
    """
    if not (isinstance(seeds, Iterable) and isinstance(configs, Config | Iterable)):
        raise TypeError(
            f"run_many takes a Config or several, and a list of seeds; got {configs!r}, {seeds!r}"
        )
    several = [configs] if isinstance(configs, Config) else list(configs)
    seeds = [_arguments.seed(seed) for seed in seeds]
    for config in several:
        _check_config(config)
    tasks = [(config, seed) for config in several for seed in seeds]
    results: list[Any] = [None] * len(tasks)
    for index, result in parallel.run_all(_run_quietly, tasks, workers=workers, progress=progress):
        results[index] = result
    rows = [results[i * len(seeds) : (i + 1) * len(seeds)] for i in range(len(several))]
    return rows[0] if isinstance(configs, Config) else rows


def _run_quietly(config: Config, seed: int) -> Result:
    result = run(config, seed, progress=False)
    result.model.to("cpu")  # a process cannot hand over memory of a device
    return result
