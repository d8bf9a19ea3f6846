"""meshweave: a communication compiler and runtime for distributed PyTorch training."""

from meshweave.compile import Program, TrainStep, compile
from meshweave.errors import (
    CaptureError,
    CheckpointError,
    LayoutError,
    MeshError,
    MeshweaveError,
    PlanError,
    RuleError,
    StepError,
    VerifyError,
)
from meshweave.hardware import AlphaBeta, MachineProfile, load_profile
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import Box
from meshweave.movement.plan import MovePlan, plan_move
from meshweave.overlap import OverlapOptions, OverlapReport, overlap
from meshweave.sharding.operators import combine, move, on, reduction, repartition, replicate
from meshweave.sharding.plans import Plan
from meshweave.sharding.registry import register_rule
from meshweave.simulate.result import Simulation
from meshweave.torch_compile import backend, inductor_pass, shard_in_graph
from meshweave.whatif import simulate

__version__ = "0.1.0"

__all__ = [
    "AlphaBeta",
    "Box",
    "CaptureError",
    "CheckpointError",
    "DimSharding",
    "Layout",
    "LayoutError",
    "MachineProfile",
    "Mesh",
    "MeshError",
    "MeshweaveError",
    "MovePlan",
    "OverlapOptions",
    "OverlapReport",
    "Plan",
    "PlanError",
    "Program",
    "RuleError",
    "Simulation",
    "StepError",
    "TrainStep",
    "VerifyError",
    "backend",
    "combine",
    "compile",
    "inductor_pass",
    "load_profile",
    "move",
    "on",
    "overlap",
    "plan_move",
    "reduction",
    "register_rule",
    "repartition",
    "replicate",
    "shard_in_graph",
    "simulate",
]
