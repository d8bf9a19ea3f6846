"""Machine profiles: the costs of communication and compute."""

from typing import TypeAlias

from meshweave.cost.hardware.alpha_beta import AlphaBeta
from meshweave.cost.hardware.load import load_profile, profile_names, profile_of_device
from meshweave.cost.hardware.profile import MachineProfile
from meshweave.ir.work import Attention, Matmul, MemoryWork, Work

# The costs for planner and simulator: immutable and hashable; equal costs give equal answers. `seconds` is 0 for local
# ops and in groups of one device, and never falls as bytes grow. Every collective takes at least the start-up time
# `alpha_s`, and none moves more than `bandwidth_of` along an axis: both give lower bounds of plans. `usable_bytes` is
# the part of a device's memory available to tensors, None if unknown.
Costs: TypeAlias = AlphaBeta | MachineProfile

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
