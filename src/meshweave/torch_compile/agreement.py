"""Ranks that compile the same graph decide by the same figures, and prove that their decisions cannot deadlock.

Ranks communicate through the store of `torch.distributed`: no collective runs while a graph is compiled, so that a rank
that does not come is an error with its name, never a hang.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.interop.process_groups import default_store, is_in_job, ranks_of_group
from meshweave.ir.collectives import WAIT, collective_of, group_of
from meshweave.ir.graph import op_name, place_of
from meshweave.optimize.overlap.prices import CostNumbers
from meshweave.runtime.coordinator import names_of_ranks

TIMEOUT_SECONDS = 600.0  # ranks of one job compile at about the same pace; a graph of 10,000 nodes takes minutes
NOTE_SECONDS = 30.0  # of waiting after which a rank says so
_LOOK_SECONDS = 0.1  # the longest pause between two polls of the store
_PURPOSE = "agree on the order of a graph's communications"
_NOTES = logging.getLogger("meshweave")


class GraphsDifferError(MeshweaveError):
    """Ranks compile graphs of other structure, so that no order of one is an order of the others."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What `ranks` that compile the same graph, of which this process is `rank`, agree on, in turns through `store`.

    In a turn every rank sends a value, the lowest rank judges all values, and every rank returns or raises its verdict.
    The lowest rank waits `timeout_seconds` for the others, they wait twice as long for it, so that all learn who is
    missing. Each rank counts its turns in the store: the n-th turns of all ranks meet.
    """

    store: Any  # a torch.distributed.Store
    rank: int
    ranks: tuple[int, ...]
    timeout_seconds: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        if self.rank not in self.ranks or list(self.ranks) != sorted(set(self.ranks)) or not self.timeout_seconds > 0:
            raise MeshweaveError(
                "these ranks cannot agree",
                where=f"rank {self.rank}",
                got=f"ranks {self.ranks}, timeout {self.timeout_seconds:g} s",
                expected="ranks in rising order, this one among them, and a timeout above 0 s",
            )

    def figures(self, mine: CostNumbers, settings: str = "") -> CostNumbers:
        """The figures of the lowest rank. Raises MeshweaveError with the ranks that did not come or that have other
        `settings` (options, as text), and GraphsDifferError with those that have another graph."""
        lead = self.ranks[0]

        def judge(answers: Mapping[int, Any]) -> Any:
            differing = [rank for rank, (_, its) in answers.items() if its != settings]
            if differing:
                raise MeshweaveError(
                    "ranks have different options",
                    where=names_of_ranks(differing),
                    got=f"{answers[differing[0]][1]} on rank {differing[0]}",
                    expected=f"{settings}, as on rank {lead}",
                    hint="decide on one rank and broadcast: costs may differ between ranks, options may not",
                )
            differing = [rank for rank, (fingerprint, _) in answers.items() if fingerprint != mine.fingerprint]
            return [None if differing else mine.numbers, differing, [answers[rank][0] for rank in differing]]

        numbers, differing, fingerprints = self.exchange([mine.fingerprint, settings], judge)
        if differing:
            raise GraphsDifferError(
                "ranks compile different graphs: their communications may not meet",
                where=names_of_ranks(differing),
                got=f"graph {fingerprints[0]} on rank {differing[0]}",
                expected=f"the graph of rank {lead}",
                hint="if ranks run different graphs (stages of a pipeline), pass ranks=, those with this graph",
            )
        return CostNumbers(mine.fingerprint, tuple(numbers))

    def prove(self, graph: fx.Graph, groups: Mapping[str, Sequence[int]] | None = None) -> None:
        """Exchange the present order of communications of `graph`, and prove that no rank waits for ever.

        The proof: all ranks have the same sequence of starts and waits, in terms of channels (groups in order of
        appearance), and if a rank's c-th channel is a group, it is also the c-th channel of each of its members. So the
        i-th event of every rank is the same; once all have reached a start, all its members have begun it; a wait is
        for an earlier start, so it ends. Sizes of blocks of an all-to-all, like those of a permute, are specific to a
        rank and not part of the sequence. Raises MeshweaveError with the ranks if that does not hold, and for messages
        between two ranks, which are not matched by order."""
        events, channels = communications(graph)
        digest = hashlib.sha256("\n".join(events).encode()).hexdigest()[:24]
        tables = [list(_ranks_of(group, where, groups)) for group, where in channels]
        self.exchange([digest, len(events), tables], partial(_judge_order, lead=self.ranks[0]))

    def exchange(self, own_answer: Any, judge: Callable[[Mapping[int, Any]], Any]) -> Any:
        """What `judge` returns, on the lowest rank, for the values of all ranks; values are JSON.
        Raises MeshweaveError: the judge's error, or an error that names the missing ranks."""
        try:
            key = self._turn()
            if self.rank == self.ranks[0]:
                verdict = self._verdict(key, own_answer, judge)
                self.store.set(f"{key}/verdict", json.dumps(verdict))
            else:
                self.store.set(f"{key}/{self.rank}", json.dumps(own_answer))
                if self._missing(key, ["verdict"], 2 * self.timeout_seconds):
                    raise self._absence(self.ranks[:1], 2 * self.timeout_seconds)
                verdict = json.loads(self.store.get(f"{key}/verdict"))
        except RuntimeError as error:  # what stores raise if their server is gone
            raise MeshweaveError(
                "the store of torch.distributed cannot be reached",
                where=f"rank {self.rank}",
                got=str(error).splitlines()[0],
                expected=f"an answer from {names_of_ranks(self.ranks)}",
                hint="the process that serves it, usually that of rank 0, has ended: see its log",
            ) from error
        if "error" in verdict:
            raise MeshweaveError(**verdict["error"])
        return verdict["said"]

    def _turn(self) -> str:
        """The keys of this turn. They are specific to these ranks, because others may have counted further."""
        prefix = f"meshweave/agreement/{hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:12]}"
        return f"{prefix}/{self.store.add(f'{prefix}/turn/{self.rank}', 1)}"

    def _verdict(self, key: str, own_answer: Any, judge: Callable[[Mapping[int, Any]], Any]) -> dict[str, Any]:
        others = self.ranks[1:]
        try:
            missing = self._missing(key, [str(rank) for rank in others], self.timeout_seconds)
            if missing:
                raise self._absence([int(rank) for rank in missing], self.timeout_seconds)
            answers = {rank: json.loads(self.store.get(f"{key}/{rank}")) for rank in others}
            mine = {self.ranks[0]: json.loads(json.dumps(own_answer))}
            return {"said": judge(mine | answers)}
        except MeshweaveError as error:
            return {"error": {part: getattr(error, part) for part in ("what", "where", "got", "expected", "hint")}}

    def _missing(self, key: str, names: Sequence[str], seconds: float) -> list[str]:
        """The names that are still unset after `seconds`; returns earlier if all are set."""
        keys, begun, pause, is_noted = [f"{key}/{name}" for name in names], time.monotonic(), 0.001, False
        end = begun + seconds
        while keys and not self.store.check(keys):  # `wait` with a short timeout would log every timeout
            if time.monotonic() > end:
                return [name for name, wanted in zip(names, keys, strict=True) if not self.store.check([wanted])]
            if not is_noted and time.monotonic() - begun > NOTE_SECONDS:
                is_noted = True
                _NOTES.warning(f"rank {self.rank} has waited {NOTE_SECONDS:g} s for other ranks to {_PURPOSE}")
            time.sleep(pause)
            pause = min(1.5 * pause, _LOOK_SECONDS)
        return []

    def _absence(self, ranks: Sequence[int], seconds: float) -> MeshweaveError:
        return MeshweaveError(
            f"ranks did not come to {_PURPOSE}",
            where=names_of_ranks(ranks),
            got=f"nothing in {seconds:g} s",
            expected=f"{names_of_ranks(self.ranks)} compiling the same graphs in the same order",
            hint="a rank has failed, compiles other graphs (pass ranks=), has this graph for another shape already "
            "(torch.compile(dynamic=True)), or needs longer (pass timeout_seconds=)",
        )


def _judge_order(answers: Mapping[int, Any], lead: int) -> None:
    digest, count, _ = answers[lead]
    differing = [rank for rank, (its, *_) in answers.items() if its != digest]
    if differing:
        rank = differing[0]
        raise MeshweaveError(
            "ranks would communicate in different orders, which can deadlock",
            where=names_of_ranks(differing),
            got=f"order {answers[rank][0]} of {answers[rank][1]} starts and waits on rank {rank}",
            expected=f"order {digest} of {count}, as on rank {lead}",
            hint="the same figures must give the same order: do all ranks have the same versions of meshweave and "
            "torch?",
        )
    for rank, (_, _, tables) in answers.items():
        for i, members in enumerate(tables):
            outside = sorted({*members} - {*answers})
            other = next((m for m in members if m in answers and answers[m][2][i] != members), None)
            if rank in members and not outside and other is None:
                continue
            raise MeshweaveError(
                "the groups of a graph's communications do not match",
                where=f"rank {rank}, group {i} in order of appearance",
                got=f"ranks {members}" + ("" if other is None else f"; on rank {other} it is {answers[other][2][i]}"),
                expected="a group that each of its members has at this place",
                hint=f"{names_of_ranks(outside)} did not agree: add them to ranks=" if outside else "",
            )


def communications(graph: fx.Graph) -> tuple[list[str], list[tuple[Any, str]]]:
    """The starts and waits of a graph in order, as text without ranks; for each channel its group and its first use.
    Raises MeshweaveError for messages between two ranks."""
    channels: dict[str, tuple[Any, str]] = {}
    begun: dict[fx.Node, int] = {}
    events: list[str] = []
    for node in graph.nodes:
        row = collective_of(node) if node.op == "call_function" else None
        if node.target is WAIT:
            events.append(f"wait {_event_of(node, begun)}")
        elif row is not None and row.is_ordered:
            raise MeshweaveError(
                "messages between two ranks are not matched by order, so their order cannot be proven",
                where=place_of(node),
                hint="compile them outside of this graph, or pass ranks=(rank,), which proves nothing",
            )
        elif row is not None:
            group = group_of(node, row)
            name = getattr(group, "group_name", group)
            channels.setdefault(name, (group, place_of(node)))
            begun[node] = len(events)
            events.append(f"{op_name(node.target)} {list(channels).index(name)} {list(_shapes(node.meta.get('val')))}")
    return events, list(channels.values())


def _event_of(wait: fx.Node, begun: Mapping[fx.Node, int]) -> str:
    """The communication of a wait, through views and earlier waits: the event that began it, or the input that an
    earlier graph began."""
    node = wait.args[0]
    while isinstance(node, fx.Node) and node not in begun and node.all_input_nodes:
        node = node.args[0]
    if isinstance(node, fx.Node) and node in begun:
        return str(begun[node])
    inputs = wait.graph.find_nodes(op="placeholder")
    return f"for input {inputs.index(node)}" if node in inputs else "for an unknown communication"


def _shapes(val: Any) -> Iterator[str]:
    for tensor in val if isinstance(val, (list, tuple)) else (val,):
        if isinstance(tensor, torch.Tensor):
            yield f"{tensor.dtype}{list(map(str, tensor.shape))}"


def _ranks_of(group: Any, where: str, groups: Mapping[str, Sequence[int]] | None) -> tuple[int, ...]:
    if groups is not None and group in groups:
        return tuple(groups[group])
    try:
        return ranks_of_group(group)
    except (RuntimeError, ValueError, KeyError) as error:
        raise MeshweaveError(
            "the group of a collective is unknown",
            where=where,
            got=repr(group),
            expected="a group of torch.distributed, or one of groups=",
        ) from error


def only_group(graph: fx.Graph, groups: Mapping[str, Sequence[int]] | None = None) -> tuple[int, ...] | None:
    """The ranks of the group in which a graph communicates, in rising order; None if there are several groups, or
    messages between two ranks. Other ranks need not compile this graph."""
    group_ranks = set()
    for node in graph.nodes:
        row = collective_of(node) if node.op == "call_function" else None
        if row is not None and row.is_ordered:
            return None
        if row is not None:
            group_ranks.add(tuple(sorted(_ranks_of(group_of(node, row), place_of(node), groups))))
    return group_ranks.pop() if len(group_ranks) == 1 else None


def world_agreement(ranks: Sequence[int] | None, timeout_seconds: float = TIMEOUT_SECONDS) -> Agreement | None:
    """The agreement of this job's `ranks` (None: all), None if this process is alone: without torch.distributed, in a
    world of size 1, with a single rank in `ranks`, or on the `fake` backend, which has no other ranks. Raises
    MeshweaveError if this process is not in `ranks`."""
    if not is_in_job() or dist.get_backend() == "fake":
        return None
    chosen = tuple(sorted(set(ranks))) if ranks is not None else tuple(range(dist.get_world_size()))
    if chosen == (dist.get_rank(),) or len(chosen) == 1 == dist.get_world_size():
        return None
    return Agreement(default_store(), dist.get_rank(), chosen, timeout_seconds)
