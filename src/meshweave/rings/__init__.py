"""Collectives decomposed into messages between the chunks of matmuls."""

from meshweave.rings.algorithms import ALGORITHMS, Algorithm, RingStep, algorithm, prove
from meshweave.rings.graphs import decompose_graph
from meshweave.rings.options import DecomposeOptions
from meshweave.rings.proof import prove_rings
from meshweave.rings.report import DecomposeReport, RingRow
from meshweave.rings.rewriter import decompose

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
    "prove",
    "prove_rings",
]
