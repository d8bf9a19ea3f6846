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
from meshweave.rings.candidates import CandidateWriter, RingCandidate
from meshweave.rings.options import DecomposeOptions
from meshweave.rings.report import DecomposeReport
from meshweave.rings.rewriter import first
from meshweave.rings.trials import CandidateSearch
from meshweave.schedule import overlap
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
    search = _search(gm, cost, groups, rank, options, memory_cap_bytes, overlap_options)
    if search is None:
        always = _writer(gm, cost, groups, rank, options).written(first)
        return always.module, always.report

    def seconds(module: fx.GraphModule) -> float:
        assert cost is not None
        cap = memory_cap_bytes
        return overlap(module, cost=cost, groups=groups, memory_cap_bytes=cap, options=overlap_options)[1].seconds

    before, chosen = seconds(gm), search.run()
    after = seconds(chosen.module)
    if after >= before:
        chosen, after = search.left(), before
    agreed = search.agreed(chosen, agree)
    after = after if agreed is chosen else seconds(agreed.module)
    return agreed.module, replace(agreed.report, seconds_before=before, seconds_after=after)


def tried_graph(
    gm: fx.GraphModule,
    *,
    cost: MachineProfile | Cost,
    groups: Mapping[str, Sequence[int]] | None = None,
    rank: int | None = None,
    options: DecomposeOptions | None = None,
    memory_cap_bytes: int | None = None,
    overlap_options: OrderOptions | None = None,
    agree: Agree | None = None,
) -> RingCandidate:
    """As `decompose_graph`, for who compares what comes back with the graph as it is."""
    search = _search(gm, cost, groups, rank, options, memory_cap_bytes, overlap_options)
    if search is None:
        return _writer(gm, cost, groups, rank, options).written(first)
    return search.agreed(search.run(), agree)


def _search(
    gm: fx.GraphModule,
    cost: MachineProfile | Cost | None,
    groups: Mapping[str, Sequence[int]] | None,
    rank: int | None,
    options: DecomposeOptions | None,
    memory_cap_bytes: int | None,
    overlap_options: OrderOptions | None,
) -> CandidateSearch | None:
    """What tries candidates of a graph; None where costs are not asked."""
    if (options or DecomposeOptions()).when == "always":
        return None
    if cost is None or not (isinstance(cost, MachineProfile) or callable(cost)):
        raise MeshweaveError(
            "to take collectives apart needs costs of compute and of links",
            got=type(cost).__name__,
            expected="a machine profile, or a callable that gives a node's seconds",
            hint='or DecomposeOptions(when="always")',
        )
    short = replace(overlap_options or OrderOptions(), bucket=False, choose="nominal")
    cap = memory_cap_bytes
    return CandidateSearch(
        _writer(gm, cost, groups, rank, options),
        lambda module: overlap(module, cost=cost, groups=groups, memory_cap_bytes=cap, options=short)[1],
    )


def _writer(
    gm: fx.GraphModule,
    cost: MachineProfile | Cost | None,
    groups: Mapping[str, Sequence[int]] | None,
    rank: int | None,
    options: DecomposeOptions | None,
) -> CandidateWriter:
    profile = cost if isinstance(cost, MachineProfile) else None
    return CandidateWriter(gm, groups, _rank(rank), options or DecomposeOptions(), profile)


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
