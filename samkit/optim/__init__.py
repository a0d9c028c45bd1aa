"""Sharpness-aware optimizers that behave like any other ``torch.optim.Optimizer`` (chapters 3, 10 and 11)."""

from samkit.optim.recorder import Recorder
from samkit.optim.sam import SAM
from samkit.optim.variants import AveragedSAM, LookbehindSAM
from samkit.optim.xsam import XSAM

__all__ = ["SAM", "XSAM", "AveragedSAM", "LookbehindSAM", "Recorder"]
