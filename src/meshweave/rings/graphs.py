"""The pass on anyone's graph: what torch.compile hands its backends, from FSDP, DTensor or by hand.

What is worth it is judged by the whole graph, not collective by collective: a candidate is written, and put into its
best order by the overlap pass with the same costs. What other work hides anyway is so left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.hardware.profile import MachineProfile
from meshweave.problem.figures import Agree
from meshweave.problem.prices import Cost
from meshweave.rings.candidates import CandidateWriter
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
    options = options or DecomposeOptions()
    if options.when == "gain" and not (isinstance(cost, MachineProfile) or callable(cost)):
        raise MeshweaveError(
            "to take collectives apart needs costs of compute and of links",
            got=type(cost).__name__,
            expected="a machine profile, or a callable that gives a node's seconds",
            hint='or DecomposeOptions(when="always")',
        )
    work = CandidateWriter(gm, groups, _rank(rank), options, cost if isinstance(cost, MachineProfile) else None)
    if options.when == "always":
        made = work.written(first)
        return made.module, made.report

    full = overlap_options or OrderOptions()
    short = replace(full, bucket=False, choose="nominal")

    def judge(one: fx.GraphModule, in_short: bool) -> OverlapReport:
        assert cost is not None
        chosen = short if in_short else full
        return overlap(one, cost=cost, groups=groups, memory_cap_bytes=memory_cap_bytes, options=chosen)[1]

    return CandidateSearch(work, judge).run(agree)


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
