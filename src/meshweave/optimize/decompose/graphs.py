"""The pass on any graph: as torch.compile passes it to its backends, from FSDP, DTensor or by hand.

The gain is judged by the whole graph, not collective by collective: a candidate is written, and the overlap pass orders
it with the same costs. So collectives that other work hides anyway are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import fx

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.errors import MeshweaveError
from meshweave.interop.process_groups import is_in_job
from meshweave.ir.graph import copied_module, module_like, op_name
from meshweave.ir.rank import operands_of
from meshweave.optimize.decompose.algorithms import DecomposeOptions
from meshweave.optimize.decompose.chains import Downstream
from meshweave.optimize.decompose.lower import lower, ring_graph
from meshweave.optimize.decompose.report import DecomposeReport
from meshweave.optimize.decompose.rewriter import Pick, RingChoice, by_gain, first, take_apart
from meshweave.optimize.overlap import OverlapReport, overlap
from meshweave.optimize.overlap.decide import OverlapOptions
from meshweave.optimize.overlap.prices import Agree, Cost, CostNumbers, fingerprint
from meshweave.search import descend

Judge = Callable[[fx.GraphModule], OverlapReport]  # of a graph, in the best order of a short search
_MOST_TRIALS = 32  # candidates that are judged, each as long as the overlap pass takes
# share of the graph's seconds: classes that are exposed for less are left, and a candidate must gain at least as much
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

    writer = RingWriter(gm, groups, _rank(rank), options, profile)
    candidate = writer.agreed(RingSearch(writer, judge).run(), agree)
    return candidate.module, candidate.report


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


@dataclass(frozen=True, slots=True)
class _Aim:
    """The target of a class of collectives: messages, or collectives of parts (of `num_chunks`, if set). `with_half`:
    the gather of an all-reduce is decomposed, too, if there is no estimate to decide."""

    is_messages: bool
    num_chunks: int = 0
    with_half: bool = False

    def of(self, choices: Sequence[RingChoice]) -> list[RingChoice]:
        fitting = [choice for choice in choices if (choice.scheme.row is not None) == self.is_messages]
        return [choice for choice in fitting if not self.num_chunks or choice.scheme.num_chunks == self.num_chunks]


@dataclass(slots=True, eq=False)
class _Twins:
    """Collectives of the same kind and shape, before or after matmuls of the same shapes; `exposed` is their total
    exposed time in the best order of the unchanged graph."""

    aims: tuple[_Aim, ...]
    reason: str  # why they are left
    exposed: float = 0.0


@dataclass(slots=True)
class RingSearch:
    """Class by class, that with the most exposed seconds first: the fastest of its aims, if that is faster than leaving
    it."""

    writer: RingWriter
    judge: Judge
    twins: dict[Any, _Twins] = field(default_factory=dict)  # by what they have in common
    of: dict[str, _Twins] = field(default_factory=dict)  # by name of a start
    names: frozenset[str] = frozenset()  # of the unchanged graph
    num_trials: int = 0

    def run(self) -> RingCandidate:
        """The fastest of the tried candidates."""
        whole = self.judge(self.writer.gm)
        self.enrol(whole)
        aims: dict[_Twins, tuple[_Aim, ...]] = {}
        for twins in sorted(self.twins.values(), key=lambda twins: -twins.exposed):
            if twins.exposed < _LEAST * whole.seconds:
                twins.reason = "other work hides it in the best order of the graph"
            else:
                aims[twins] = twins.aims
        start: dict[_Twins, _Aim] = {}
        chosen = descend(start, aims, lambda aims: self.seconds(aims, whole.seconds), _LEAST * whole.seconds)
        return self.writer.written(self.picking(chosen))

    def enrol(self, whole: OverlapReport) -> None:
        """Register the classes, and the aims of each."""
        self.names = frozenset(node.name for node in self.writer.gm.graph.nodes)
        shown: dict[str, float] = {}
        for row in whole.collectives:
            names = row.name.split("+")
            shown |= dict.fromkeys(names, row.exposed_seconds / len(names))

        def note(start: fx.Node, choices: Sequence[RingChoice]) -> tuple[int, str]:
            key = _key(start, choices)
            if key not in self.twins:
                margin = self.writer.options.margin
                is_priced = choices[0].estimate is not None
                reason = by_gain(margin)(start, choices)[1] if is_priced else ""
                self.twins[key] = _Twins(tuple(_aims(start, choices, margin)), reason or "it was not tried")
            twins = self.of[start.name] = self.twins[key]
            twins.exposed += shown.get(start.name, 0.0)
            return 0, "left"

        self.writer.written(note)

    def seconds(self, aims: Mapping[_Twins, _Aim], whole: float) -> float:
        """Seconds of a candidate; infinite if it is not possible, with the reason in the class of the last aim."""
        if not aims:
            return whole
        *_, twins = aims
        if self.num_trials == _MOST_TRIALS:
            twins.reason = f"not tried, because {_MOST_TRIALS} other candidates were"
            return float("inf")
        self.num_trials += 1
        try:
            seconds = self.judge(self.writer.written(self.picking(aims)).module).seconds
        except MeshweaveError as error:  # no order under the cap, or a callable without a price for a new node
            twins.reason = f"a candidate cannot be judged: {error.what}, {error.where}"
            return float("inf")
        twins.reason = f"the graph would take {seconds * 1e6:.1f} us, and {whole * 1e6:.1f} us unchanged"
        return seconds

    def picking(self, aims: Mapping[_Twins, _Aim]) -> Pick:
        with_half, margin = any(aim.with_half for aim in aims.values()), self.writer.options.margin

        def pick(start: fx.Node, choices: Sequence[RingChoice]) -> tuple[int, str]:
            is_priced = choices[0].estimate is not None
            twins = self.of.get(start.name)
            if twins is None and start.name in self.names:
                return 0, "it is beside a matmul only if others are decomposed"
            if twins is None:  # the second half of an all-reduce
                return by_gain(margin)(start, choices) if is_priced else (0, "" if with_half else "no gain was found")
            aim = aims.get(twins)
            fitting = aim.of(choices) if aim is not None else []
            if not fitting:
                return 0, twins.reason
            at, reason = by_gain(margin)(start, fitting) if is_priced else (0, "")
            return choices.index(fitting[at]), reason

        return pick


def _again(decisions: Sequence[int]) -> Pick:
    """Reproduce earlier decisions, of this rank or another."""
    rest = iter(decisions)

    def pick(start: fx.Node, choices: Sequence[RingChoice]) -> tuple[int, str]:
        at = next(rest)
        return (at, "") if at >= 0 else (0, "as decided before")

    return pick


def _key(start: fx.Node, choices: Sequence[RingChoice]) -> Any:
    """What the collectives of a class have in common."""
    matmuls = [(op_name(n.target), *map(_shape, operands_of(n))) for n in choices[0].matmuls]
    kind = isinstance(choices[0].chain, Downstream)
    return op_name(start.target), str(start.args[1:]), _shape(start.all_input_nodes[0]), kind, tuple(matmuls)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _aims(start: fx.Node, choices: Sequence[RingChoice], margin: float) -> Iterator[_Aim]:
    """The candidates of a class: the best ring and the best number of parts by estimate, if they gain; without
    estimates, one of each kind."""
    if choices[0].estimate is None:
        counts = dict.fromkeys(choice.scheme.num_chunks for choice in choices)
        halves = (False, True) if op_name(start.target).endswith("all_reduce") else (False,)
        yield from (_Aim(not n, n, half) for n in counts for half in halves if not (n and half))
        return
    for aim in (_Aim(True), _Aim(False)):
        fitting = aim.of(choices)
        if fitting and not by_gain(margin)(start, fitting)[1]:
            yield aim
