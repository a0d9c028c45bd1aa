"""Linear diagonal networks: flows of gradient descent and SAM, and their limits (chapters 5 to 7).

The flows are NumPy in float64; the networks are torch modules, trained by the real :class:`samkit.optim.SAM`.
"""

from samkit.diagonal.examples import banded, separable
from samkit.diagonal.flow import METHODS, Flow, PhaseDiagram, flow, phase_diagram
from samkit.diagonal.margin import max_margin
from samkit.diagonal.network import DiagonalNetwork, LinearNetwork
from samkit.diagonal.theory import critical_scale, growth_rates, linf_limit, regime

__all__ = [
    "METHODS",
    "DiagonalNetwork",
    "Flow",
    "LinearNetwork",
    "PhaseDiagram",
    "banded",
    "critical_scale",
    "flow",
    "growth_rates",
    "linf_limit",
    "max_margin",
    "phase_diagram",
    "regime",
    "separable",
]
