"""When communication runs, relative to compute: parameters gathered ahead, and any graph ordered and bucketed."""

from meshweave.overlap.decide import OverlapOptions
from meshweave.overlap.entry import overlap, overlap_graph
from meshweave.overlap.figures import Figures
from meshweave.overlap.prefetch import prefetch
from meshweave.overlap.report import CandidateRow, CollectiveRow, Merge, OverlapReport
from meshweave.overlap.settle import settle

__all__ = [
    "CandidateRow",
    "CollectiveRow",
    "Figures",
    "Merge",
    "OverlapOptions",
    "OverlapReport",
    "overlap",
    "overlap_graph",
    "prefetch",
    "settle",
]
