"""Collectives decomposed into messages between the chunks of matmuls."""

from meshweave.optimize.decompose.algorithms import ALGORITHMS, Algorithm, DecomposeOptions, RingStep, algorithm
from meshweave.optimize.decompose.graphs import decompose_graph
from meshweave.optimize.decompose.proof import prove_rings
from meshweave.optimize.decompose.report import DecomposeReport, RingRow
from meshweave.optimize.decompose.rewriter import decompose

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "DecomposeOptions",
    "DecomposeReport",
    "RingRow",
    "RingStep",
    "algorithm",
    "decompose",
    "decompose_graph",
    "prove_rings",
]
