"""The pass on anyone's graph: what torch.compile hands its backends, from FSDP, DTensor or by hand.

What is worth it is judged by the whole graph, not collective by collective: a candidate is written, and put into its
best order by the overlap pass with the same costs. What other work hides anyway is so left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.hardware.profile import MachineProfile
from meshweave.problem.figures import Agree
from meshweave.problem.prices import Cost
from meshweave.rings.candidates import CandidateWriter, RingCandidate
from meshweave.rings.options import DecomposeOptions
from meshweave.rings.report import DecomposeReport
from meshweave.rings.rewriter import first
from meshweave.rings.trials import CandidateSearch
from meshweave.schedule import OverlapReport, overlap
from meshweave.schedule.decide import OrderOptions


def decompose_graph(
    gm: fx.GraphModule,
    *,
    cost: MachineProfile | Cost | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    rank: int | None = None,
    options: DecomposeOptions | None = None,
    memory_cap_bytes: int | None = None,
    overlap_options: OrderOptions | None = None,
    agree: Agree | None = None,
) -> tuple[fx.GraphModule, DecomposeReport]:
    """An equal graph in which collectives beside matmuls are taken apart, and what became of each; `gm` stays as it is.

    gm: ATen ops and functional collectives with fake tensors in meta["val"], as `mw.overlap` takes it.
    cost, groups, memory_cap_bytes, overlap_options: those of `mw.overlap`, with which candidates are judged. A machine
        profile also says which way is the best for a collective; of a callable, which is asked for the nodes of every
        candidate, a few are tried.
    rank: whose graph it is, since chunks have numbers of their own on every rank; default: that of torch.distributed.
    options: `when="always"` asks no cost, and takes the first way that can be gone for every collective.
    agree: called with what has been decided; returns what every rank is to do.

    Collectives of one kind and shape before matmuls of the same shapes go one way. Permutes are all-to-alls with one
    block each way: a ring of n ranks has n - 1. Ranks' graphs differ in the numbers of blocks and slices, and in the
    order of operands of a cat. The input comes back as a copy where nothing gains. Sums over a group are taken in the
    order in which messages come, which is fixed, in float32 for half precision. Raises MeshweaveError where it is not
    known whose graph it is, for an unknown group and for a cost that is none; VerifyError, as `mw.overlap`, for graphs
    that are not in order.
    """
    trials = GraphTrials(gm, cost, groups, rank, options or DecomposeOptions(), memory_cap_bytes, overlap_options)
    if trials.options.when == "always":
        always = trials.chosen(agree)
        return always.module, always.report
    search = trials.search()
    before, chosen = trials.seconds(gm), search.run()
    after = trials.seconds(chosen.module)
    if after >= before:
        chosen, after = search.left(), before
    agreed = search.agreed(chosen, agree)
    after = after if agreed is chosen else trials.seconds(agreed.module)
    return agreed.module, replace(agreed.report, seconds_before=before, seconds_after=after)


@dataclass(frozen=True, slots=True)
class GraphTrials:
    """A graph whose collectives may be taken apart, and what candidates are judged by: as `decompose_graph` has it."""

    gm: fx.GraphModule
    cost: MachineProfile | Cost | None
    groups: Mapping[str, Sequence[int]] | None
    rank: int | None
    options: DecomposeOptions
    memory_cap_bytes: int | None
    order: OrderOptions | None

    def chosen(self, agree: Agree | None) -> RingCandidate:
        """The fastest candidate, for who compares it with the graph as it is; where costs are not asked the first."""
        if self.options.when == "always":
            return self.writer().written(first)
        search = self.search()
        return search.agreed(search.run(), agree)

    def search(self) -> CandidateSearch:
        if not (isinstance(self.cost, MachineProfile) or callable(self.cost)):
            raise MeshweaveError(
                "to take collectives apart needs costs of compute and of links",
                got=type(self.cost).__name__,
                expected="a machine profile, or a callable that gives a node's seconds",
                hint='or DecomposeOptions(when="always")',
            )
        short = replace(self.order or OrderOptions(), bucket=False, choose="nominal")
        return CandidateSearch(self.writer(), lambda module: self.ordered(module, short))

    def writer(self) -> CandidateWriter:
        profile = self.cost if isinstance(self.cost, MachineProfile) else None
        return CandidateWriter(self.gm, self.groups, _rank(self.rank), self.options, profile)

    def seconds(self, module: fx.GraphModule) -> float:
        return self.ordered(module, self.order).seconds

    def ordered(self, module: fx.GraphModule, order: OrderOptions | None) -> OverlapReport:
        assert self.cost is not None
        cap = self.memory_cap_bytes
        return overlap(module, cost=self.cost, groups=self.groups, memory_cap_bytes=cap, options=order)[1]


def _rank(rank: int | None) -> int:
    if rank is not None:
        return rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    raise MeshweaveError(
        "chunks have numbers of their own on every rank, and it is not known which rank's graph this is",
        got="rank=None, and torch.distributed is not initialised",
        expected="rank=, one of the ranks of every group",
    )
