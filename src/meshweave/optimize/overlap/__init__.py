"""Scheduling of compute and communication: of any graph, and of whole steps."""

from meshweave.optimize.overlap.decide import OverlapOptions
from meshweave.optimize.overlap.driver import overlap
from meshweave.optimize.overlap.report import CandidateRow, CollectiveRow, Merge, OverlapReport

__all__ = [
    "CandidateRow",
    "CollectiveRow",
    "Merge",
    "OverlapOptions",
    "OverlapReport",
    "overlap",
]
