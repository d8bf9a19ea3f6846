"""The pass on any graph: as torch.compile passes it to its backends, from FSDP, DTensor or by hand.

The gain is judged by the whole graph, not collective by collective: a candidate is written, and the overlap pass orders
it with the same costs. So collectives that other work hides anyway are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.hardware.profile import MachineProfile
from meshweave.interop.process_groups import is_in_job
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
    """An equivalent graph in which collectives beside matmuls are decomposed, and the outcome of each; `gm` is not
    changed.

    gm: ATen ops and functional collectives with fake tensors in meta["val"], as `mw.overlap` takes it.
    cost, groups, memory_cap_bytes, overlap_options: those of `mw.overlap`, with which candidates are judged. With a
    machine profile the best algorithm of a collective is estimated; with a callable, which prices the nodes of every
    candidate, a few are tried.
    rank: the rank that runs the graph, since chunk numbers differ between ranks; default: that of torch.distributed.
    options: `when="always"` needs no costs, and takes the first possible algorithm for every collective. agree: called
    with the decisions; returns the decisions for every rank.

    Collectives of the same kind and shape before matmuls of the same shapes get the same algorithm. Permutes are
    all-to-alls with a single block each way: a ring of n ranks has n - 1. Ranks' graphs differ in the numbers of blocks
    and slices, and in the order of operands of a cat. The result is a copy of the input if nothing gains. Sums over a
    group are added in the order of messages, which is fixed, in float32 for half precision. Raises MeshweaveError for
    an unknown rank, an unknown group and an invalid cost; VerifyError, like `mw.overlap`, for malformed graphs.
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
    """A graph whose collectives may be decomposed, and the costs by which candidates are judged; see
    `decompose_graph`."""

    gm: fx.GraphModule
    cost: MachineProfile | Cost | None
    groups: Mapping[str, Sequence[int]] | None
    rank: int | None
    options: DecomposeOptions
    memory_cap_bytes: int | None
    order: OrderOptions | None

    def chosen(self, agree: Agree | None) -> RingCandidate:
        """The fastest candidate, for a caller that compares it with the unchanged graph; without costs the first."""
        if self.options.when == "always":
            return self.writer().written(first)
        search = self.search()
        return search.agreed(search.run(), agree)

    def search(self) -> CandidateSearch:
        if not (isinstance(self.cost, MachineProfile) or callable(self.cost)):
            raise MeshweaveError(
                "decomposing collectives needs costs of compute and of links",
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
    if is_in_job():
        return dist.get_rank()
    raise MeshweaveError(
        "chunk numbers differ between ranks, and the rank of this graph is unknown",
        got="rank=None, and torch.distributed is not initialised",
        expected="rank=, one of the ranks of every group",
    )
