"""Passes over programs: each a frozen dataclass of its options, all in one list (`passes=` of compile, of the backend
and of the command line)."""

from meshweave.passes.base import CapturedProgram, MeshProgram, Pass
from meshweave.passes.carry import Carry
from meshweave.passes.decompose import Decompose
from meshweave.passes.options import PASSES, pass_list, pipeline_of
from meshweave.passes.overlap import Overlap
from meshweave.passes.pipeline import Budget, Optimized, Pipeline, Variant, prove
from meshweave.passes.prefetch import Prefetch
from meshweave.passes.recompute import Recompute
from meshweave.passes.split import Split

__all__ = [
    "PASSES",
    "Budget",
    "CapturedProgram",
    "Carry",
    "Decompose",
    "MeshProgram",
    "Optimized",
    "Overlap",
    "Pass",
    "Pipeline",
    "Prefetch",
    "Recompute",
    "Split",
    "Variant",
    "pass_list",
    "pipeline_of",
    "prove",
]
