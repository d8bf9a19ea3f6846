"""Collectives taken apart into messages between the chunks of matmuls."""

from meshweave.decompose.algorithms import ALGORITHMS, Algorithm, Index, Step, algorithm, prove
from meshweave.decompose.decompose import DecomposeOptions, decompose
from meshweave.decompose.proof import prove_rings
from meshweave.decompose.report import DecomposeReport, Row
from meshweave.decompose.split import SplitReport, split_batch

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "DecomposeOptions",
    "DecomposeReport",
    "Index",
    "Row",
    "SplitReport",
    "Step",
    "algorithm",
    "decompose",
    "prove",
    "prove_rings",
    "split_batch",
]
