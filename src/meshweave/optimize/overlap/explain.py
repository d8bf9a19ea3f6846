"""Why each collective is hidden or exposed, and why neighbours are not merged: the rows of a report."""

from __future__ import annotations

from collections.abc import Mapping

from meshweave.cost.simulate.clock import Slowdown
from meshweave.ir.graph import op_name
from meshweave.optimize.overlap.merge import Merger
from meshweave.optimize.overlap.play import Playback, play
from meshweave.optimize.overlap.report import CollectiveRow, Merge
from meshweave.optimize.overlap.search import OrderCandidate, OrderSearch

_LOOKED_AT = 256  # kernels after a stall that are examined as possible fillers


def exposed_of(played: Playback) -> float:
    """Seconds in which the compute stream waits for communication."""
    return sum(b - a for _, a, b in played.stalls)


def collective_rows(merger: Merger, chosen: OrderCandidate, slowdown: Slowdown | None) -> tuple[CollectiveRow, ...]:
    """A row per communication of the chosen order, in the order of starts."""
    problem, items = chosen.merged.problem, chosen.merged.items
    played = play(problem, chosen.order, slowdown)
    stalls: dict[int, tuple[float, float]] = {}
    for c, a, b in played.stalls:
        since, total = stalls.get(c, (a, 0.0))
        stalls[c] = (since, total + b - a)
    place = {x: n for n, x in enumerate(chosen.order)}
    users: dict[int, int] = {}  # of each communication the first item that waits for it
    for x in chosen.order:
        if x >= 0:
            for c in problem.waits[x]:
                users.setdefault(c, x)
    rows = []
    for c in (x for x in chosen.order if x >= 0 and problem.channel[x] >= 0):
        item = items[c]
        starts = chosen.merged.buckets[item.bucket] if item.kind == "start" else (item.of,)
        reading = merger.reading
        since, exposed = stalls.get(c, (0.0, 0.0))
        rows.append(
            CollectiveRow(
                name=problem.names[c],
                op=op_name(reading.nodes[starts[0]].target).rpartition(".")[2],
                group=problem.channels[problem.channel[c]],
                bytes=sum(merger.costs.moved[s] for s in starts),
                seconds=played.end[c] - played.begin[c],
                exposed_seconds=exposed,
                reason=_reason(chosen, played, c, since, place, users) if exposed else "",
            )
        )
    return tuple(rows)


def _reason(
    chosen: OrderCandidate, played: Playback, c: int, since: float, place: Mapping[int, int], users: Mapping[int, int]
) -> str:
    """Why the stream waits for communication c from `since` on."""
    problem = chosen.merged.problem
    needs = [*(d for d in problem.deps[c] if problem.channel[d] < 0), *problem.waits[c]]
    last = max(needs, key=lambda d: played.end[d], default=-1)
    ready = played.end[last] if needs else 0.0
    user = problem.names[users[c]] if c in users else "the end of the step"
    tiny = 0.01 * problem.copy[c]
    if played.begin[c] > played.issued[c] + tiny:
        channel = problem.channel[c]
        before = max(
            (
                s
                for s in problem.starts
                if problem.channel[s] == channel and played.end[s] <= played.begin[c] + 1e-15 and s != c
            ),
            key=lambda s: played.end[s],
            default=-1,
        )
        reason = f"its link is busy with {problem.names[before]}" if before >= 0 else "its link is busy"
    elif played.issued[c] > ready + tiny:
        reason = f"it starts {(played.issued[c] - ready) * 1e3:.3f} ms later than possible, because of memory or order"
    else:
        verb = "computed" if problem.channel[last] < 0 else "brought"
        reason = f"{problem.names[last]} has just {verb} its operand" if needs else "nothing comes before it"
    fill = _could_run(chosen, played, c, since, place)
    rest = f"{fill} could have run meanwhile" if fill else "no other item is left that could run"
    return f"{user} needs it; {reason}; {rest}"


def _could_run(chosen: OrderCandidate, played: Playback, c: int, since: float, place: Mapping[int, int]) -> str:
    """A kernel after the stall that had all its operands when the stall began; "" if there is none."""
    problem = chosen.merged.problem
    at = place.get(~c, len(chosen.order))
    for x in chosen.order[at : at + _LOOKED_AT]:
        if x < 0 or problem.channel[x] >= 0 or not problem.seconds[x]:
            continue
        ready = all(place[d] < at for d in problem.deps[x])
        if ready and all(w != c and played.end[w] <= since for w in problem.waits[x]):
            return problem.names[x]
    return ""


def merge_rows(search: OrderSearch, chosen: OrderCandidate) -> tuple[Merge, ...]:
    """The buckets of the chosen order, and for each pair of unmerged neighbours of the same kind the reason."""
    merger, problem = search.merger, search.merger.reading.problem
    merged = []
    for item, copy in zip(chosen.merged.items, chosen.merged.problem.copy, strict=True):
        if item.kind == "start":
            bucket = chosen.merged.buckets[item.bucket]
            saved = sum(problem.copy[c] for c in bucket) - copy
            merged.append(Merge(tuple(problem.names[c] for c in bucket), True, "", saved))
    of = _places(chosen)
    ranked = [(c, _places(c)) for c in sorted(search.feasible, key=lambda c: c.seconds[0]) if c.merged.buckets]
    apart = []
    for a, b in merger.neighbours():
        if a in of and of[a] == of.get(b):
            continue
        bucket = chosen.merged.buckets[of[a]] if a in of else (a,)
        reason = merger.can_join(bucket, b)
        if not reason:
            other = next((c for c, bucketed in ranked if a in bucketed and bucketed[a] == bucketed.get(b)), None)
            reason = _worse(other, chosen) if other is not None else search.why_apart(bucket, b)
        apart.append(Merge((problem.names[a], problem.names[b]), False, reason))
    return (*merged, *apart)


def _places(candidate: OrderCandidate) -> dict[int, int]:
    """By start the number of its bucket, for starts in a bucket."""
    return {c: number for number, bucket in enumerate(candidate.merged.buckets) for c in bucket}


def _worse(other: OrderCandidate, chosen: OrderCandidate) -> str:
    """Why the best order that merges two starts was not taken."""
    took = f"{other.seconds[0] * 1e3:.3f} ms, not {chosen.seconds[0] * 1e3:.3f} ms ({other.name})"
    if other.seconds[0] > chosen.seconds[0]:
        return f"the step would take {took}"
    if other.busy > chosen.busy:
        return (
            f"links and copies would do {other.busy * 1e3:.3f} ms, not {chosen.busy * 1e3:.3f} ms, for a step of {took}"
        )
    return f"the step would take {took}, but lose more where links are slower or shared"
