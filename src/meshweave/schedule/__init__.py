"""Scheduling of compute and communication: of any graph, and of whole steps."""

from meshweave.schedule.decide import OverlapOptions
from meshweave.schedule.graphs import overlap
from meshweave.schedule.report import CandidateRow, CollectiveRow, Merge, OverlapReport

__all__ = [
    "CandidateRow",
    "CollectiveRow",
    "Merge",
    "OverlapOptions",
    "OverlapReport",
    "overlap",
]
