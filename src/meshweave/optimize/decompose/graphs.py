"""The pass on any graph: as torch.compile passes it to its backends, from FSDP, DTensor or by hand.

Collectives that other work hides in the best order of the graph are left alone. The others are decomposed where that
gains by estimate, and the overlap pass orders the result with the same costs: it is taken if the whole graph is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import fx

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.errors import MeshweaveError
from meshweave.interop.process_groups import is_in_job
from meshweave.ir.graph import copied_module, module_like, op_name
from meshweave.optimize.decompose.algorithms import DecomposeOptions
from meshweave.optimize.decompose.lower import lower, ring_graph
from meshweave.optimize.decompose.report import DecomposeReport
from meshweave.optimize.decompose.rewriter import Pick, RingChoice, by_gain, first, take_apart
from meshweave.optimize.overlap import OverlapReport, overlap
from meshweave.optimize.overlap.decide import OverlapOptions
from meshweave.optimize.overlap.prices import Agree, Cost, CostNumbers, fingerprint

Judge = Callable[[fx.GraphModule], OverlapReport]  # of a graph, in the best order of a short search
# share of the graph's seconds: collectives that are exposed for less are left, and the candidate must gain as much
_LEAST = 1e-3
_ORDER_OF_SUMS = "sums in the order of messages, which differs between chunks"


def decompose_graph(
    gm: fx.GraphModule,
    *,
    cost: MachineProfile | Cost | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    rank: int | None = None,
    options: DecomposeOptions | None = None,
    memory_cap_bytes: int | None = None,
    overlap_options: OverlapOptions | None = None,
    agree: Agree | None = None,
) -> tuple[fx.GraphModule, DecomposeReport]:
    """An equivalent graph in which collectives beside matmuls are decomposed, and the outcome of each; `gm` is not
    changed.

    gm: ATen ops and functional collectives with fake tensors in meta["val"], as `mw.overlap` takes it.
    cost, groups, memory_cap_bytes, overlap_options: those of `mw.overlap`, with which the result is judged. With a
    machine profile the best algorithm of a collective is estimated; with a callable, which prices the nodes of the
    result, the first possible one is tried.
    rank: the rank that runs the graph, since chunk numbers differ between ranks; default: that of torch.distributed.
    options: `when="always"` needs no costs, and takes the first possible algorithm for every collective. agree: called
    with the decisions; returns the decisions for every rank.

    Permutes are all-to-alls with a single block each way: a ring of n ranks has n - 1. Ranks' graphs differ in the
    numbers of blocks and slices, and in the order of operands of a cat. The result is a copy of the input if nothing
    gains. Sums over a group are added in the order of messages, which is fixed, in float32 for half precision. Raises
    MeshweaveError for an unknown rank, an unknown group and an invalid cost; VerifyError, like `mw.overlap`, for
    malformed graphs.
    """
    options = options or DecomposeOptions()
    profile = cost if isinstance(cost, MachineProfile) else None
    if options.when == "always":
        written = RingWriter(gm, groups, _rank(rank), options).written(first)
        return written.module, written.report
    if profile is None and not callable(cost):
        raise MeshweaveError(
            "decomposing collectives needs costs of compute and of links",
            got=type(cost).__name__,
            expected="a machine profile, or a callable that gives a node's seconds",
            hint='or DecomposeOptions(when="always")',
        )
    short = replace(overlap_options or OverlapOptions(), bucket=False, choose="nominal")

    def judge(module: fx.GraphModule) -> OverlapReport:
        assert cost is not None
        return overlap(module, cost=cost, groups=groups, memory_cap_bytes=memory_cap_bytes, options=short)[1]

    writer, whole = RingWriter(gm, groups, _rank(rank), options, profile), judge(gm)
    candidate = writer.written(gaining(gm, whole, options.margin))
    if candidate.report.num_taken and (reason := _no_gain(candidate.module, whole, judge)):
        candidate = writer.written(lambda start, choices: (0, reason))
    candidate = writer.agreed(candidate, agree)
    return candidate.module, candidate.report


def _no_gain(module: fx.GraphModule, whole: OverlapReport, judge: Judge) -> str:
    """Why a candidate is not taken, an empty text if it is faster."""
    try:
        seconds = judge(module).seconds
    except MeshweaveError as error:  # no order under the cap, or a callable without a price for a new node
        return f"the graph cannot be judged with it: {error.what}, {error.where}"
    if seconds < (1 - _LEAST) * whole.seconds:
        return ""
    return f"the graph would take {seconds * 1e6:.1f} us, and {whole.seconds * 1e6:.1f} us unchanged"


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


@dataclass(frozen=True, slots=True)
class RingCandidate:
    """A candidate: the graph, the outcome of each collective, and the decisions that reproduce it."""

    module: fx.GraphModule
    report: DecomposeReport
    decisions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RingWriter:
    """Writes candidates from a graph that is not changed."""

    gm: fx.GraphModule
    groups: Mapping[str, Sequence[int]] | None
    rank: int
    options: DecomposeOptions
    profile: MachineProfile | None = None

    def written(self, pick: Pick) -> RingCandidate:
        rings = ring_graph(self.gm.graph, self.groups, self.rank)
        report, decisions = take_apart(rings.program, self.options, pick, self.profile, _ORDER_OF_SUMS)
        if not report.num_taken:
            return RingCandidate(copied_module(self.gm), report, decisions)
        lower(rings)
        return RingCandidate(module_like(self.gm, rings.program.graph), report, decisions)

    def agreed(self, mine: RingCandidate, agree: Agree | None) -> RingCandidate:
        """The candidate that all ranks use, by `agree`."""
        if agree is None:
            return mine
        mark = fingerprint(ring_graph(self.gm.graph, self.groups, self.rank).reading)
        decisions = tuple(map(int, agree(CostNumbers(mark, tuple(map(float, mine.decisions)))).numbers))
        return mine if decisions == mine.decisions else self.written(_again(decisions))


def gaining(gm: fx.GraphModule, whole: OverlapReport, margin: float) -> Pick:
    """Decompose what gains by estimate (without estimates: anything) among the collectives that are exposed in the best
    order of the unchanged graph. Those of the same op and shape count together: layers are alike."""
    shown = {row.name: row.exposed_seconds for row in whole.collectives}
    exposed: dict[Any, float] = {}
    for node in gm.graph.nodes:
        if node.name in shown:
            exposed[_key(node)] = exposed.get(_key(node), 0.0) + shown[node.name]

    def pick(start: fx.Node, choices: Sequence[RingChoice]) -> tuple[int, str]:
        if start.name in shown and exposed[_key(start)] < _LEAST * whole.seconds:
            return 0, "other work hides it in the best order of the graph"
        return by_gain(margin)(start, choices) if choices[0].estimate is not None else (0, "")

    return pick


def _key(start: fx.Node) -> Any:
    return op_name(start.target), str(start.args[1:]), tuple(start.all_input_nodes[0].meta["val"].shape)


def _again(decisions: Sequence[int]) -> Pick:
    """Reproduce earlier decisions, of this rank or another."""
    rest = iter(decisions)

    def pick(start: fx.Node, choices: Sequence[RingChoice]) -> tuple[int, str]:
        at = next(rest)
        return (at, "") if at >= 0 else (0, "as decided before")

    return pick
