"""Passes over programs: each is a frozen dataclass of its options, all in a single list (`passes=` of compile, of the
backend and of the command line)."""

from meshweave.passes.base import CapturedProgram, MeshProgram, Pass, PassProgram
from meshweave.passes.carry import Carry
from meshweave.passes.decompose import Decompose
from meshweave.passes.graph_program import GraphProgram
from meshweave.passes.keep import Keep
from meshweave.passes.options import PASSES, pass_list, pipeline_of
from meshweave.passes.overlap import Overlap
from meshweave.passes.pipeline import Optimized, Pipeline, prove
from meshweave.passes.prefetch import Prefetch
from meshweave.passes.recompute import Recompute
from meshweave.passes.ring import RingAttention
from meshweave.passes.split import Split

__all__ = [
    "PASSES",
    "CapturedProgram",
    "Carry",
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
