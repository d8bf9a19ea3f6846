"""What forward gathers is kept for backward, and for later microbatches, where memory is free in between.

A plan that shards parameters gathers each of them twice, in forward and again in backward, so that no more than a block
is whole at a time. As long as a device holds less than at its peak, that second gather buys nothing. The same holds
for activations that are gathered again, and within backward for a value that two ops gather.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import fx

from meshweave.ir.collectives import STARTS, WAIT
from meshweave.ir.graph import PARTS, erase_unused, origin_of, value_numbers
from meshweave.ir.liveness import RoleLiveness, role_liveness
from meshweave.ir.rank import RankGraph, copied, operands_of
from meshweave.ir.traits import is_random
from meshweave.optimize.prefetch.gather_ahead import is_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepReport:
    """What was kept: `num_kept` of `num_repeated` results of collectives that the graph computes again, `kept_bytes` of
    them. `peak_before` and `peak_bytes` are those of the graph's order, in bytes."""

    num_kept: int
    num_repeated: int
    kept_bytes: int
    peak_before: int
    peak_bytes: int
    reason: str = ""

    def left(self, reason: str) -> KeepReport:
        """The same, of a role that stays as it was for this reason."""
        return replace(self, num_kept=0, kept_bytes=0, peak_bytes=self.peak_before, reason=reason)

    def __str__(self) -> str:
        text = (
            f"{self.num_kept} of {self.num_repeated} repeated collectives not run again, {self.kept_bytes / 1e6:.1f} MB"
        )
        return f"{text}: {self.reason}" if self.reason else text


def keep(role: RankGraph, limit_of: Callable[[int], int]) -> tuple[RankGraph, KeepReport]:
    """The role without collectives whose results an earlier equal collective already has, in a graph of its own, and
    what was kept.

    Two collectives are equal if they are the same op on equal operands, whatever phase they are of. The result of the
    earlier one lives until the last use of the later one, if the peak of the graph's order then stays under
    `limit_of(peak)` bytes, `peak` being that of the role as it is. Results with the shortest time between come first:
    those of the last blocks. Values are exactly the same. The role itself is returned where nothing is kept.
    """
    own = copied(role)
    live = role_liveness(own)
    levels = live.levels()
    peak = max(levels)
    repeats = list(_repeats(own, live))
    kept = _merge_repeats(own, repeats, levels, limit_of(peak))
    num_bytes = sum(repeat.num_bytes for repeat in kept)
    report = KeepReport(
        num_kept=len(kept),
        num_repeated=len(repeats),
        kept_bytes=num_bytes,
        peak_before=peak,
        peak_bytes=max(levels),
    )
    return (own if kept else role), report


def gather_once(role: RankGraph, limit_of: Callable[[int], float]) -> tuple[RankGraph, int, int]:
    """The role with gathers of parameters in the first microbatch for all, in a graph of its own, as far as their
    results fit under `limit_of(peak)` at all times. Also how many of the gathers in forward these are, and how many
    there were. Values are exactly the same. The role itself is returned where there are none."""
    own = copied(role)
    live = role_liveness(own)
    levels = live.levels()
    limit_bytes = limit_of(max(levels))
    _merge_repeats(own, [r for r in _repeats(own, live) if _chain_of_gather(own, r.earlier)], levels, limit_bytes)
    numbers, live = _numbers(own.graph), role_liveness(own)
    levels = live.levels()
    count = Counter(numbers[n] for n in own.graph.nodes if n.target is WAIT)
    num_prepared = num_gathers = 0
    for node in own.graph.nodes:
        if node.target is not WAIT or not (chain := _chain_of_gather(own, node)):
            continue
        num_gathers += 1
        if count[numbers[node]] > 1:
            continue
        begin, end, num_bytes = live.ranges[live.storage_of(node)]
        others = [at for at in range(len(levels)) if not begin <= at < end]
        if all(levels[at] + num_bytes <= limit_bytes for at in others):
            num_prepared += 1
            for at in others:
                levels[at] += num_bytes
            for each in chain:
                each.meta["origin"] = replace(origin_of(each), phase="prepare")
    return (own if num_prepared else role), num_prepared, num_gathers


def _chain_of_gather(role: RankGraph, wait: fx.Node) -> list[fx.Node]:
    """The nodes of forward from a parameter to a gathered value that is computed of it alone; none if it is not, or if
    it is made once a step already."""
    chain, node = list[fx.Node](), wait
    while node.op == "call_function":
        operands = operands_of(node)
        is_own = node.target not in STARTS or is_alone(node, role)
        if len(operands) != 1 or not is_own or "ring" in node.meta or PARTS[origin_of(node).phase] != 0:
            return []
        chain.append(node)
        (node,) = operands
    is_new = origin_of(wait).phase != "prepare"
    return chain if is_new and role.sources[node].kind == "param" else []


@dataclass(frozen=True, slots=True)
class _Repeat:
    """Two waits for equal values, the earlier the latest before the later; moments from the last use of the one to
    the start of the other, and the bytes of the value."""

    earlier: fx.Node
    later: fx.Node
    begin: int
    end: int
    num_bytes: int


def _repeats(role: RankGraph, live: RoleLiveness) -> Iterator[_Repeat]:
    """Each collective among devices of the role that runs again on equal operands. Of a move in several steps the last:
    where that is kept, nobody needs those before it. Messages of rings are left alone: rings pass pieces around so
    that no device keeps them, and each ring is proven by its own messages."""
    numbers = _numbers(role.graph)
    latest: dict[int, fx.Node] = {}
    needed = _ancestors_of_new(numbers)
    for node, number in numbers.items():
        if node.target is not WAIT or "ring" in node.meta or not is_alone(node.all_input_nodes[0], role):
            continue
        earlier = latest.get(number)
        latest[number] = node
        if earlier is not None and node in needed:
            _, last_use, num_bytes = live.ranges[live.storage_of(earlier)]
            begin, _, _ = live.ranges[live.storage_of(node)]
            yield _Repeat(earlier, node, last_use, begin, num_bytes)


def _ancestors_of_new(numbers: dict[fx.Node, int]) -> set[fx.Node]:
    """The nodes that something new is computed of, at once or through local ops that are repeated themselves."""
    first: dict[int, fx.Node] = {}
    for node, number in numbers.items():
        first.setdefault(number, node)
    needed: set[fx.Node] = set()
    for node in reversed(numbers):
        is_new = (first[numbers[user]] is user or (user in needed and user.target not in STARTS) for user in node.users)
        if any(is_new):
            needed.add(node)
    return needed


def _stays(role: RankGraph, node: fx.Node) -> bool:
    """Whether other roles take part in a communication, or in what is waited for."""
    start = node.all_input_nodes[0] if node.target is WAIT else node
    return start.target in STARTS and not is_alone(start, role)


def _numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Equal numbers for equal values; what draws from a generator equals nothing else."""
    return value_numbers(graph, {}, lambda n: None if n.op == "call_function" and not is_random(n.target) else n)


def _merge_repeats(role: RankGraph, repeats: list[_Repeat], levels: list[int], limit_bytes: float) -> list[_Repeat]:
    """Merge the repeats that fit under the limit, and return them; `levels` are raised by what these keep."""
    chosen: dict[fx.Node, _Repeat] = {}
    for repeat in sorted(repeats, key=lambda r: r.end - r.begin):
        between = range(repeat.begin, repeat.end)
        if all(levels[at] + repeat.num_bytes <= limit_bytes for at in between):
            for at in between:
                levels[at] += repeat.num_bytes
            chosen[repeat.later] = repeat
    merged = [repeat for repeat in repeats if repeat.later in chosen]
    for repeat in reversed(merged):
        repeat.later.replace_all_uses_with(repeat.earlier)
        erase_unused(role.graph, [repeat.later], partial(_stays, role))
    return merged
