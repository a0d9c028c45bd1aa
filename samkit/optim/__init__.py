"""Sharpness-aware optimizers that behave like any other ``torch.optim.Optimizer`` (chapters 3 and 10)."""

from samkit.optim.sam import SAM
from samkit.optim.xsam import XSAM

__all__ = ["SAM", "XSAM"]
