"""Collectives taken apart into messages between the chunks of matmuls."""

from meshweave.decompose.algorithms import ALGORITHMS, Algorithm, Index, Step, algorithm, prove
from meshweave.decompose.decompose import DecomposeOptions, DecomposeReport, Row, decompose
from meshweave.decompose.proof import prove_rings

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "DecomposeOptions",
    "DecomposeReport",
    "Index",
    "Row",
    "Step",
    "algorithm",
    "decompose",
    "prove",
    "prove_rings",
]
