"""meshweave: a communication compiler and runtime for distributed PyTorch training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshweave.capture.step import LossScale, Precision
from meshweave.capture.updates import register_update
from meshweave.compile import compile
from meshweave.cost.hardware import AlphaBeta, MachineProfile, load_profile
from meshweave.cost.simulate.result import Simulation
from meshweave.engine.schedules import (
    Action,
    ActivationMemory,
    PipelineTimes,
    Schedule,
    ScheduleSearch,
    best_schedule,
    load_schedule,
    make_schedule,
    pipeline_times,
    place_stages,
    prove_schedule,
    save_schedule,
    stage_times,
)
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
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ops.registry import register_rule
from meshweave.optimize.overlap import OverlapOptions, OverlapReport, overlap
from meshweave.place.movement.plan import MovePlan, plan_move
from meshweave.place.operators import combine, move, on, reduction, repartition, replicate
from meshweave.place.plans import Plan
from meshweave.program import Program
from meshweave.runtime.rows import batch_shard
from meshweave.runtime.session import RunOptions
from meshweave.study import Study
from meshweave.torch_compile import backend, inductor_pass
from meshweave.train_step import TrainStep
from meshweave.whatif import simulate

if TYPE_CHECKING:
    from meshweave.torch_compile.fsdp import shard_in_graph

__version__ = "0.2.0"  # pyproject.toml reads it

__all__ = [
    "Action",
    "ActivationMemory",
    "AlphaBeta",
    "CaptureError",
    "CheckpointError",
    "Layout",
    "LayoutError",
    "LossScale",
    "MachineProfile",
    "Mesh",
    "MeshError",
    "MeshweaveError",
    "MovePlan",
    "OverlapOptions",
    "OverlapReport",
    "PipelineTimes",
    "Plan",
    "PlanError",
    "Precision",
    "Program",
    "RuleError",
    "RunOptions",
    "Schedule",
    "ScheduleSearch",
    "Simulation",
    "StepError",
    "Study",
    "TrainStep",
    "VerifyError",
    "backend",
    "batch_shard",
    "best_schedule",
    "combine",
    "compile",
    "inductor_pass",
    "load_profile",
    "load_schedule",
    "make_schedule",
    "move",
    "on",
    "overlap",
    "pipeline_times",
    "place_stages",
    "plan_move",
    "prove_schedule",
    "reduction",
    "register_rule",
    "register_update",
    "repartition",
    "replicate",
    "save_schedule",
    "shard_in_graph",
    "simulate",
    "stage_times",
]

# These names need DTensor, which takes a second to import.
_ON_DEMAND = {"shard_in_graph": "meshweave.torch_compile.fsdp"}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'meshweave' has no attribute '{name}'")
    return getattr(import_module(_ON_DEMAND[name]), name)
