"""Machine profiles: the costs of communication and compute."""

from meshweave.cost.hardware.alpha_beta import AlphaBeta
from meshweave.cost.hardware.costs import Costs
from meshweave.cost.hardware.load import load_profile, profile_names, profile_of_device
from meshweave.cost.hardware.profile import MachineProfile
from meshweave.cost.hardware.work import Attention, Matmul, MemoryWork, Work

__all__ = [
    "AlphaBeta",
    "Attention",
    "Costs",
    "MachineProfile",
    "Matmul",
    "MemoryWork",
    "Work",
    "load_profile",
    "profile_names",
    "profile_of_device",
]
