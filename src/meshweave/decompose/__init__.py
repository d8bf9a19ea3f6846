"""Collectives taken apart into messages between the chunks of matmuls."""

from meshweave.decompose.algorithms import ALGORITHMS, Algorithm, Index, Step, algorithm, prove
from meshweave.decompose.anyones import decompose_graph
from meshweave.decompose.decompose import decompose
from meshweave.decompose.options import DecomposeOptions
from meshweave.decompose.proof import prove_rings
from meshweave.decompose.report import DecomposeReport, RingRow
from meshweave.decompose.split import SplitReport, split_batch
from meshweave.decompose.split_role import SplitOptions, split_role

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "DecomposeOptions",
    "DecomposeReport",
    "Index",
    "RingRow",
    "SplitOptions",
    "SplitReport",
    "Step",
    "algorithm",
    "decompose",
    "decompose_graph",
    "prove",
    "prove_rings",
    "split_batch",
    "split_role",
]
