"""Sharpness-aware optimizers that behave like any other ``torch.optim.Optimizer``."""

from samkit.optim.sam import SAM

__all__ = ["SAM"]
