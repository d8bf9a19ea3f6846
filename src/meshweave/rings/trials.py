"""Which collectives of any graph are decomposed: candidates are written, and judged by the whole graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from meshweave.chunks.chains import Downstream
from meshweave.errors import MeshweaveError
from meshweave.ir.graph import op_name
from meshweave.ir.rank import operands_of
from meshweave.problem.figures import Agree, CostNumbers, fingerprint
from meshweave.rings.candidates import CandidateWriter, RingCandidate
from meshweave.rings.rewriter import Pick, RingChoice, by_gain
from meshweave.schedule import OverlapReport

Judge = Callable[[fx.GraphModule], OverlapReport]  # of a graph, in the best order of a short search
_MOST_TRIALS = 32  # candidates that are judged, each as long as the overlap pass takes
# share of the graph's seconds: classes that are exposed for less are left, and a candidate must gain at least as much
_LEAST = 1e-3


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


@dataclass(slots=True)
class _Twins:
    """Collectives of the same kind and shape, before or after matmuls of the same shapes; `exposed` is their total
    exposed time in the best order of the unchanged graph."""

    aims: tuple[_Aim, ...]
    reason: str  # why they are left
    exposed: float = 0.0


@dataclass(slots=True)
class CandidateSearch:
    """Class by class, that with the most exposed seconds first: the fastest of its aims, if that is faster than leaving
    it."""

    work: CandidateWriter
    judge: Judge
    twins: dict[Any, _Twins] = field(default_factory=dict)
    of: dict[str, _Twins] = field(default_factory=dict)  # by name of a start
    names: frozenset[str] = frozenset()  # of the unchanged graph
    num_trials: int = 0
    decomposed: frozenset[int] = frozenset()  # ids of the classes that `run` has decomposed

    def run(self) -> RingCandidate:
        """The fastest of the tried candidates."""
        whole = self.judge(self.work.gm)
        self.enrol(whole)
        aims: dict[int, _Aim] = {}
        least = whole.seconds
        for twins in sorted(self.twins.values(), key=lambda twins: -twins.exposed):
            if twins.exposed < _LEAST * whole.seconds:
                twins.reason = "other work hides it in the best order of the graph"
                continue
            before = dict(aims)
            for aim in twins.aims:
                seconds = self.tried(before | {id(twins): aim}, twins, whole.seconds)
                if seconds < least - _LEAST * whole.seconds:
                    least, aims = seconds, before | {id(twins): aim}
        self.decomposed = frozenset(aims)
        return self.work.written(self.picking(aims))

    def left(self) -> RingCandidate:
        """The unchanged graph, if it is as fast as the result of `run`."""
        for twins in self.twins.values():
            twins.reason = "the graph does not get faster" if id(twins) in self.decomposed else twins.reason
        return self.work.written(self.picking({}))

    def agreed(self, mine: RingCandidate, agree: Agree | None) -> RingCandidate:
        """The candidate that all ranks use, by `agree`."""
        if agree is None:
            return mine
        mark = fingerprint(self.work.rings().reading)
        decisions = tuple(map(int, agree(CostNumbers(mark, tuple(map(float, mine.decisions)))).numbers))
        return mine if decisions == mine.decisions else self.work.written(_again(decisions))

    def enrol(self, whole: OverlapReport) -> None:
        """Register the classes, and the aims of each."""
        self.names = frozenset(node.name for node in self.work.gm.graph.nodes)
        shown: dict[str, float] = {}
        for row in whole.collectives:
            names = row.name.split("+")
            shown |= dict.fromkeys(names, row.exposed_seconds / len(names))

        def note(start: fx.Node, choices: Sequence[RingChoice]) -> tuple[int, str]:
            key = _key(start, choices)
            if key not in self.twins:
                margin = self.work.options.margin
                is_priced = choices[0].estimate is not None
                reason = by_gain(margin)(start, choices)[1] if is_priced else ""
                self.twins[key] = _Twins(tuple(_aims(start, choices, margin)), reason or "it was not tried")
            twins = self.of[start.name] = self.twins[key]
            twins.exposed += shown.get(start.name, 0.0)
            return 0, "left"

        self.work.written(note)

    def tried(self, aims: Mapping[int, _Aim], twins: _Twins, whole: float) -> float:
        """Seconds of a candidate; infinite if it is not possible, with the reason in the class."""
        if self.num_trials == _MOST_TRIALS:
            twins.reason = f"not tried, because {_MOST_TRIALS} other candidates were"
            return float("inf")
        self.num_trials += 1
        try:
            seconds = self.judge(self.work.written(self.picking(aims)).module).seconds
        except MeshweaveError as error:  # no order under the cap, or a callable without a price for a new node
            twins.reason = f"a candidate cannot be judged: {error.what}, {error.where}"
            return float("inf")
        twins.reason = f"the graph would take {seconds * 1e6:.1f} us, and {whole * 1e6:.1f} us unchanged"
        return seconds

    def picking(self, aims: Mapping[int, _Aim]) -> Pick:
        with_half, margin = any(aim.with_half for aim in aims.values()), self.work.options.margin

        def pick(start: fx.Node, choices: Sequence[RingChoice]) -> tuple[int, str]:
            is_priced = choices[0].estimate is not None
            twins = self.of.get(start.name)
            if twins is None and start.name in self.names:
                return 0, "it is beside a matmul only if others are decomposed"
            if twins is None:  # the second half of an all-reduce
                return by_gain(margin)(start, choices) if is_priced else (0, "" if with_half else "no gain was found")
            aim = aims.get(id(twins))
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
