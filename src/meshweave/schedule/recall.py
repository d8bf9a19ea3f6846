"""Orders that were found before, on disk. What a search finds depends on its problem and its options alone, so the same
problem has the same order in the next start of a job; a large one is sought for seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import combinations
from math import isclose
from typing import Any

from meshweave.buckets.merge import Merger
from meshweave.disk_cache import CacheEntry, cache_directory, code_digest
from meshweave.problem.play import peak_of, seconds_of
from meshweave.problem.problem import Order
from meshweave.schedule.report import CandidateRow
from meshweave.schedule.search import OrderCandidate, OrderSearch, busy

_LEAST_ITEMS = 400  # smaller problems are solved in the time that it takes to look
_MOST_ENTRIES = 256  # the oldest are removed
_ROOMS = ("schedule", "buckets", "problem", "simulate", "ir")  # whose code an order depends on


@dataclass(frozen=True, slots=True)
class Decision:
    """The order that a search chose: `rows` are all candidates that were compared, `regret` what it loses at worst.
    `note`: why an entry on disk was of no use."""

    chosen: OrderCandidate
    rows: tuple[CandidateRow, ...]
    regret: float
    note: str = ""


def entry_of(search: OrderSearch, orders: Sequence[tuple[str, Order]], rule: str) -> CacheEntry | None:
    """Where the decision of a search would be; None where a search is as quick."""
    if search.merger.reading.problem.num_items < _LEAST_ITEMS:
        return None
    digest = sha256()
    for part in _parts(search, orders, rule):
        digest.update(repr(part).encode())
    return CacheEntry(cache_directory() / "orders", f"{code_digest(_ROOMS)} {digest.hexdigest()}", ".json")


def _parts(search: OrderSearch, orders: Sequence[tuple[str, Order]], rule: str) -> Iterator[Any]:
    """All that a search and its choice depend on."""
    merger = search.merger
    problem, costs = merger.reading.problem, merger.costs
    yield from (getattr(problem, each.name) for each in fields(problem) if not each.name.startswith("_"))
    for starts in merger.kinds.values():
        yield [merger.reading.rows[starts[0]].bucket]
        yield [(c, merger.preludes[c], merger.after[c], merger.size(c), merger.is_copied(c)) for c in starts]
        yield merger.curve(starts[0]), merger.host(starts[0])
    yield sorted(costs.moved.items()), costs.copy_rate
    yield search.cap, search.is_bucketing, search.most_bytes, rule, [(name, list(order)) for name, order in orders]
    if search.slowdown is not None:
        levels = sorted({level for usage in problem.usage for level, _ in usage})  # a machine need not have others
        groups = (group for size in range(len(levels) + 1) for group in combinations(levels, size))
        yield [(group, search.slowdown(frozenset(group))) for group in groups]


def recalled(entry: CacheEntry, search: OrderSearch) -> tuple[Decision | None, str]:
    """The decision of an entry, and what is wrong with the entry. What it says is not believed: the order has to be
    one of this problem, under its cap, and as fast as when it was kept."""
    text, trouble = entry.read()
    if not text:
        return None, trouble
    try:
        return _checked(json.loads(text), search), ""
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        return None, f"{entry.path} holds no order of this graph ({type(error).__name__}: {error})"


def _checked(kept: Any, search: OrderSearch) -> Decision:
    """Raises ValueError for what is no order of the problem."""
    merger = search.merger
    buckets = tuple(tuple(map(int, bucket)) for bucket in kept["buckets"])
    _check_buckets(buckets, merger)
    merged = merger.merged(buckets)
    order = tuple(map(int, kept["order"]))
    if merged.buckets != buckets or (wrong := merged.problem.check(order)):
        raise ValueError("its buckets do not fit" if merged.buckets != buckets else wrong)
    seconds, peak = seconds_of(merged.problem, order, search.slowdown), peak_of(merged.problem, order)
    if peak > search.cap or not isclose(seconds, kept["seconds"][0], rel_tol=1e-9):
        raise ValueError(f"it takes {seconds} s and {peak} bytes, not {kept['seconds'][0]} s and {kept['peak']} bytes")
    rows = tuple(
        CandidateRow(str(name), tuple((str(s), float(t)) for s, t in times), int(most), bool(is_chosen))
        for name, times, most, is_chosen in kept["rows"]
    )
    times = tuple(map(float, kept["seconds"]))
    chosen = OrderCandidate(str(kept["name"]), merged, order, times, peak, busy(merged.problem))
    return Decision(chosen, rows, float(kept["regret"]))


def _check_buckets(buckets: Sequence[Sequence[int]], merger: Merger) -> None:
    """Raise ValueError for starts that may not be merged, or stand in two buckets."""
    kinds = [set(starts) for starts in merger.kinds.values()]
    members = [c for bucket in buckets for c in bucket]
    if len(set(members)) < len(members) or not all(any(kind.issuperset(b) for kind in kinds) for b in buckets):
        raise ValueError("its buckets are of several kinds")
    if any(merger.can_join(bucket[:i], c) for bucket in buckets for i, c in enumerate(bucket)):
        raise ValueError("a part of a bucket needs another")


def store(entry: CacheEntry, decision: Decision) -> str:
    """Store a decision for the next start. Returns why that was not possible, else nothing."""
    chosen = decision.chosen
    value = {
        "name": chosen.name,
        "buckets": chosen.merged.buckets,
        "order": chosen.order,
        "seconds": chosen.seconds,
        "peak": chosen.peak,
        "regret": decision.regret,
        "rows": [(row.name, row.seconds, row.peak_bytes, row.is_chosen) for row in decision.rows],
    }
    trouble = entry.write(json.dumps(value))
    if not trouble:
        entry.prune(_MOST_ENTRIES)
    return trouble
