"""Machine profiles: the costs of communication and compute."""

from meshweave.hardware.alpha_beta import AlphaBeta
from meshweave.hardware.costs import Costs
from meshweave.hardware.load import load_profile, profile_names, profile_of_device
from meshweave.hardware.profile import MachineProfile
from meshweave.hardware.work import Attention, Matmul, MemoryWork, Work

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
