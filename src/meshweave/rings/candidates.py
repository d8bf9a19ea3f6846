"""Graphs in which some collectives are decomposed, written from a graph that is not changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from meshweave.hardware.profile import MachineProfile
from meshweave.ir.graph import copied_module, module_like
from meshweave.rings.lower import lower
from meshweave.rings.options import DecomposeOptions
from meshweave.rings.report import DecomposeReport
from meshweave.rings.rewriter import Pick, take_apart
from meshweave.rings.ring_graph import RingGraph, ring_graph

_ORDER_OF_SUMS = "sums in the order of messages, which differs between chunks"


@dataclass(frozen=True, slots=True)
class RingCandidate:
    """A candidate: the graph, the outcome of each collective, and the decisions that reproduce it."""

    module: fx.GraphModule
    report: DecomposeReport
    decisions: tuple[int, ...]


@dataclass(slots=True)
class CandidateWriter:
    """Writes candidates of a graph."""

    gm: fx.GraphModule
    groups: Mapping[str, Sequence[int]] | None
    rank: int
    options: DecomposeOptions
    profile: MachineProfile | None

    def rings(self) -> RingGraph:
        return ring_graph(self.gm.graph, self.groups, self.rank)

    def written(self, pick: Pick) -> RingCandidate:
        rings = self.rings()
        profile = self.profile if self.options.when == "gain" else None
        report, decisions = take_apart(rings.program, self.options, pick, profile, _ORDER_OF_SUMS)
        if not report.num_taken:
            return RingCandidate(copied_module(self.gm), report, decisions)
        lower(rings)
        return RingCandidate(module_like(self.gm, rings.program.graph), report, decisions)
