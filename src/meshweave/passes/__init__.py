"""Passes over programs: each is a frozen dataclass of its options, all in a single list (`passes=` of compile, of the
backend and of the command line)."""

from meshweave.passes.base import CapturedProgram, MeshProgram, Pass, PassProgram
from meshweave.passes.graph_program import GraphProgram
from meshweave.passes.optimize import Optimized, PassList, prove
from meshweave.passes.options import parse_passes, pass_list_of
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
    "PassList",
    "PassProgram",
    "Prefetch",
    "Recompute",
    "RingAttention",
    "Split",
    "parse_passes",
    "pass_list_of",
    "prove",
]
