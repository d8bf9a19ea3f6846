"""Passes over programs: each is a frozen dataclass of its options, all in a single list (`passes=` of compile, of the
backend and of the command line)."""

from meshweave.passes.base import CapturedProgram, MeshProgram, Pass, PassProgram
from meshweave.passes.graph_program import GraphProgram
from meshweave.passes.options import pass_list, pipeline_of
from meshweave.passes.pipeline import Optimized, Pipeline, prove
from meshweave.passes.table import (
    PASSES,
    Decompose,
    Keep,
    Overlap,
    Prefetch,
    Recompute,
    RingAttention,
    Split,
)

__all__ = [
    "PASSES",
    "CapturedProgram",
    "Decompose",
    "GraphProgram",
    "Keep",
    "MeshProgram",
    "Optimized",
    "Overlap",
    "Pass",
    "PassProgram",
    "Pipeline",
    "Prefetch",
    "Recompute",
    "RingAttention",
    "Split",
    "pass_list",
    "pipeline_of",
    "prove",
]
