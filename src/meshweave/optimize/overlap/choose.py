"""Which of the orders found is taken: a fast one that stays fast if the costs are wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from meshweave.cost.simulate.clock import Slowdown
from meshweave.optimize.overlap.play import SCENARIOS, SLOWER
from meshweave.optimize.overlap.search import ENOUGH, SMALL, OrderCandidate

_NEAR = 1.5e-3  # what robustness may cost of the nominal time
_WIDE = 0.0125  # what it may cost where it gains `_WORTH` times as much with slower communication
_WORTH = 6
_EQUAL = 1 + 1e-12  # factor up to which seconds count as equal
_JUDGED, _JUDGED_SMALL = 4, 6  # candidates that are judged under all scenarios


@dataclass(frozen=True, slots=True)
class OrderChoice:
    """The chosen candidate, all of them as judged under every scenario, and the worst-case loss of the chosen order
    against the best of each scenario."""

    chosen: OrderCandidate
    candidates: tuple[OrderCandidate, ...]
    regret: float


def choose(candidates: Sequence[OrderCandidate], slowdown: Slowdown | None, rule: str, protected: int) -> OrderChoice:
    """Among the candidates within `_NEAR` of the seconds that `_accepted_seconds` accepts, that with the least
    worst-case regret over the scenarios; with `rule` "nominal" the fastest.

    The first `protected` candidates are the input order and the caller's: the chosen order is never slower than any of
    them under nominal costs. They, the fastest, and those that lose least with slower communication are judged under
    all scenarios.
    """
    limit = min((c.seconds[0] for c in candidates[:protected]), default=inf) * _EQUAL
    ranked = _distinct(candidates)
    fastest = ranked[0].seconds[0]
    slower: dict[int, tuple[float, ...]] = {}  # by candidate, under `SLOWER`
    accepted, most, is_robust = fastest, (1 + ENOUGH) * fastest, rule != "nominal"
    if is_robust:
        close = [c for c in ranked if c.seconds[0] <= (1 + _WIDE) ** 2 * fastest]
        slower = {
            id(c): tuple(scenario.seconds(c.merged.problem, c.order, slowdown) for scenario in SLOWER) for c in close
        }
        accepted = _accepted_seconds(close, slower)
        most = (1 + _NEAR) * accepted
    near = [c for c in ranked if min(accepted, limit / _EQUAL) <= c.seconds[0] <= min(most, limit)]
    if is_robust:
        losses = _losses(near, slower)
        near.sort(key=lambda c: losses[id(c)])
    num_judged = _JUDGED_SMALL if candidates[0].merged.problem.num_items <= SMALL else _JUDGED
    pool = {id(c): c for c in (*candidates[:protected], *near[:num_judged], *ranked[: num_judged // 2])}
    judged = {key: _judge(c, slowdown, slower.get(key, ())) for key, c in pool.items()}
    best = [min(column) for column in zip(*(c.seconds for c in judged.values()), strict=True)]
    regrets = {key: max(map(_regret, c.seconds, best)) for key, c in judged.items()}
    able = [id(c) for c in near if id(c) in judged]
    rank = {
        key: (round(regrets[key], 4) if is_robust else 0.0, judged[key].busy, judged[key].seconds[0]) for key in able
    }
    chosen = min(able, key=lambda key: rank[key])
    return OrderChoice(judged[chosen], tuple(judged.values()), regrets[chosen])


def _accepted_seconds(ranked: Sequence[OrderCandidate], slower: Mapping[int, tuple[float, ...]]) -> float:
    """Nominal seconds that are accepted: those of the fastest of `ranked`, or up to `_WIDE` more where an order loses
    much less with slower communication. It is decided for every cap that allows more orders than a smaller one, and the
    least counts: with more memory no slower order is chosen."""
    accepted = inf
    for needs in sorted({c.needs for c in ranked}):
        allowed = [c for c in ranked if c.needs <= needs]
        fastest = allowed[0].seconds[0]
        near = [c for c in allowed if c.seconds[0] <= (1 + _WIDE) * fastest]
        losses = _losses(near, slower)
        nominal = {id(c): _WORTH * _regret(c.seconds[0], fastest) for c in near}
        robust = min(near, key=lambda c: (nominal[id(c)] + losses[id(c)], c.seconds[0]))
        accepted = min(accepted, robust.seconds[0])
    return accepted


def _losses(candidates: Sequence[OrderCandidate], slower: Mapping[int, tuple[float, ...]]) -> dict[int, float]:
    """By candidate its worst-case regret with slower communication."""
    best = [min(column) for column in zip(*(slower[id(c)] for c in candidates), strict=True)]
    return {id(c): max(map(_regret, slower[id(c)], best)) for c in candidates}


def _distinct(candidates: Sequence[OrderCandidate]) -> list[OrderCandidate]:
    """Those that differ in order or buckets, the fastest first."""
    distinct: dict[tuple[int, ...], OrderCandidate] = {}
    for c in sorted(candidates, key=lambda c: (c.seconds[0], c.busy)):
        distinct.setdefault((id(c.merged), *c.order), c)
    return list(distinct.values())


def _judge(c: OrderCandidate, slowdown: Slowdown | None, slower: Sequence[float]) -> OrderCandidate:
    """The candidate under every scenario; `slower`: its seconds under `SLOWER`, if known."""
    by_scenario = dict(zip(SLOWER, slower, strict=False))
    problem, order = c.merged.problem, c.order
    rest = [by_scenario[s] if s in by_scenario else s.seconds(problem, order, slowdown) for s in SCENARIOS[1:]]
    return replace(c, seconds=(c.seconds[0], *rest))


def _regret(seconds: float, best: float) -> float:
    return seconds / best - 1 if best else float(seconds > 0)
