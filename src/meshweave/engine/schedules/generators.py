"""Schedules of pipelines by name: a table of functions from ranks, microbatches and stages per rank to orders of
actions.

All are computation only (F, B, I, W); `with_communication` adds sends and receives. In the text below p are the ranks,
m the microbatches and r a rank. Every schedule is defined for any m >= 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise, product

from meshweave.engine.actions import Action, Actions, Schedule
from meshweave.engine.schedules.clock import StageTimes, stage_times
from meshweave.engine.schedules.form import Placement, groups_of, place_stages
from meshweave.engine.schedules.list_scheduling import (
    FillRule,
    ListScheduler,
    PassPlan,
    PipelineProblem,
    action_of_pass,
    passes_of_actions,
)
from meshweave.engine.sections import Kind
from meshweave.errors import PlanError, near_miss

_KINDS: Mapping[str, Kind] = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
Order = list[Action]


@dataclass(frozen=True, slots=True)
class PipelineSize:
    """What a schedule is generated for. `of_rank[r]` are the stages of rank r, in the order of a microbatch. `times`
    are None where the caller knows none."""

    ranks: int
    microbatches: int
    of_rank: tuple[tuple[int, ...], ...]
    times: StageTimes | None


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A row of the table: where stages are, how many a rank may hold (None: any number), and the order of every
    rank."""

    placement: Placement
    stages_per_rank: int | None
    orders: Callable[[PipelineSize], Iterable[Iterable[Action]]]


def make_schedule(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None, times: StageTimes | None = None
) -> Schedule:
    """The schedule of this name (`SCHEDULES`) for `ranks` pipeline ranks and `microbatches`.

    `stages_per_rank`: for interleaved (default 2) and looped-bfs (default 2) any number; the others fix it.
    `times`: of each stage (`stage_times`), for zb-1p and zb-2p, which are scheduled for them; default: all F, I and W
    take equally long and messages no time. Raises PlanError for an unknown name, a number below 1, and stages per rank
    that the schedule does not have."""
    if name not in SCHEDULES:
        raise PlanError(
            "unknown pipeline schedule",
            got=repr(name),
            expected=", ".join(SCHEDULES),
            hint=f"did you mean {near_miss(name, SCHEDULES)}?",
        )
    family = SCHEDULES[name]
    per_rank = stages_per_rank or family.stages_per_rank or 2
    for what, value in (("ranks", ranks), ("microbatches", microbatches), ("stages per rank", per_rank)):
        if value < 1:
            raise PlanError(f"a pipeline needs at least one of its {what}", where=f"schedule {name}", got=str(value))
    if family.stages_per_rank not in (None, per_rank):
        raise PlanError(
            f"schedule {name} has a fixed number of stages per rank",
            got=f"{per_rank} stages per rank",
            expected=str(family.stages_per_rank),
            hint="interleaved and looped-bfs take any number of stages per rank",
        )
    rank_of = place_stages(ranks, per_rank, family.placement)
    of_rank = tuple(tuple(s for s, r in enumerate(rank_of) if r == rank) for rank in range(ranks))
    size = PipelineSize(ranks, microbatches, of_rank, times)
    return Schedule(name, tuple(_without_padding(order, microbatches) for order in family.orders(size)))


def _without_padding(order: Iterable[Action], microbatches: int) -> Actions:
    """The actions of microbatches that there are. Patterns that need more of them are written with more: what is left
    of a valid schedule without some of its microbatches is valid. An action whose partner is left out runs alone."""
    groups = groups_of(list(order))
    there = (tuple(action for action in group if action.microbatch < microbatches) for group in groups)
    return tuple(replace(action, with_next=action is not group[-1]) for group in there for action in group)


def _act(kind: str, stage: int, microbatch: int, with_next: bool = False) -> Action:
    return Action((_KINDS[kind],), microbatch, stage, with_next)


class _Rank:
    """The actions of a rank, written in order: each kind of each stage counts its microbatches by itself."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.stages, self.actions = stages, list[Action]()
        self._next = {(kind, stage): count() for kind in "FIW" for stage in stages}
        self._pending: list[tuple[int, int]] = []  # stage and microbatch whose weight part has not run

    def add(self, kind: str, chunk: int = 0, *, with_next: bool = False) -> None:
        """The next action of this kind of the rank's stage number `chunk`. After I, W is pending."""
        stage = self.stages[chunk]
        microbatch = next(self._next["I" if kind == "B" else kind, stage])
        self.actions.append(_act(kind, stage, microbatch, with_next))
        if kind == "I":
            self._pending.append((stage, microbatch))

    def add_pending(self, number: int = 1, chunk: int | None = None) -> None:
        """The weight parts that have been pending longest, of one stage or of all."""
        stage = None if chunk is None else self.stages[chunk]
        chosen = [each for each in self._pending if stage in (None, each[0])][:number]
        self.actions += [_act("W", *each) for each in chosen]
        self._pending = [each for each in self._pending if each not in chosen]


def _each(
    order: Callable[[PipelineSize, int], Iterable[Action]],
) -> Callable[[PipelineSize], Iterable[Iterable[Action]]]:
    """A handcrafted schedule: the order of each rank by itself."""
    return lambda size: (order(size, rank) for rank in range(size.ranks))


def _gpipe(size: PipelineSize, rank: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al., NeurIPS 2019)."""
    (stage,) = size.of_rank[rank]
    for kind in "FB":
        yield from (_act(kind, stage, m) for m in range(size.microbatches))


def _1f1b(size: PipelineSize, rank: int) -> Iterator[Action]:
    """As many forwards as there are later stages, then forward and backward alternate (Narayanan et al., SOSP 2019)."""
    (stage,) = size.of_rank[rank]
    return _alternate(
        [(stage, m) for m in range(size.microbatches)], [(stage, m) for m in range(size.microbatches)],
        size.ranks - 1 - rank,
    )  # fmt: skip


def _alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int
) -> Iterator[Action]:
    """`ahead` forwards, then a forward and a backward in turn, of (stage, microbatch) in these orders."""
    ahead = min(ahead, len(forwards))
    yield from (_act("F", *each) for each in forwards[:ahead])
    for at, backward in enumerate(backwards):
        if ahead + at < len(forwards):
            yield _act("F", *forwards[ahead + at])
        yield _act("B", *backward)


def _interleaved(size: PipelineSize, rank: int) -> Iterator[Action]:
    """Interleaved 1F1B (Narayanan et al., SC 2021, section 2.2): microbatches go in rounds of about p through all
    stages of a rank. Rounds differ by at most a microbatch, so that m need not be a multiple of p."""
    stages = size.of_rank[rank]
    number = max(1, size.microbatches // size.ranks)
    least, larger = divmod(size.microbatches, number)
    ends = [least * i + min(i, larger) for i in range(number + 1)]
    rounds = [range(begin, end) for begin, end in pairwise(ends)]
    forwards = [(stage, m) for each in rounds for stage in stages for m in each]
    backwards = [(stage, m) for each in rounds for stage in reversed(stages) for m in each]
    return _alternate(forwards, backwards, (len(stages) - 1) * len(rounds[0]) + 2 * (size.ranks - 1 - rank))


def _looped_bfs(size: PipelineSize, rank: int) -> Iterator[Action]:
    """Breadth first (Lamy-Poirier, MLSys 2023): all microbatches through a stage before the rank's next stage; backward
    from the last microbatch to the first."""
    stages = size.of_rank[rank]
    yield from (_act("F", stage, m) for stage in stages for m in range(size.microbatches))
    yield from (_act("B", stage, m) for stage in reversed(stages) for m in reversed(range(size.microbatches)))


def _zero_bubble(size: PipelineSize, rank: int, ahead: int, lag: int) -> Iterator[Action]:
    """`ahead` forwards, then F and I alternate; W follows `lag` microbatches behind I, and all at the end."""
    (stage,) = size.of_rank[rank]
    m = size.microbatches
    yield from (_act("F", stage, at) for at in range(min(ahead, m)))
    for at in range(m):
        if ahead + at < m:
            yield _act("F", stage, ahead + at)
        yield _act("I", stage, at)
        if at >= lag:
            yield _act("W", stage, at - lag)
    yield from (_act("W", stage, at) for at in range(max(0, m - lag), m))


def _zb_h1(size: PipelineSize, rank: int) -> Iterator[Action]:
    """The first handcrafted schedule of Qi et al. (Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.1): memory of
    1F1B. Rank r delays W by r microbatches, so that each rank holds p of them."""
    return _zero_bubble(size, rank, size.ranks - 1 - rank, rank)


def _zb_h2(size: PipelineSize, rank: int) -> Iterator[Action]:
    """The second handcrafted schedule of Qi et al. (section 2.2): no bubble where F = I = W, with 2p - 1 microbatches
    held on each rank."""
    return _zero_bubble(size, rank, 2 * (size.ranks - 1 - rank), 2 * rank)


def _zbv(size: PipelineSize, rank: int) -> Iterator[Action]:
    """ZB-V (Qi et al., section 6): two stages per rank in a V; no bubble where F = I = W, in the memory of 1F1B.
    Written for at least 2p - 1 microbatches."""
    m = max(2 * size.ranks - 1, size.microbatches)
    row = _Rank(size.of_rank[rank])
    after = size.ranks - rank  # how many ranks the V has from this one to its turn, counting this one

    for _ in range(2 * after - 1):
        row.add("F", 0)
    for _ in range(rank):
        row.add("F", 1)
        row.add("F", 0)
    for _ in range(after):
        row.add("F", 1)
        row.add("I", 1)
        row.add_pending()
    first = 2 * after - 1 + rank  # forwards of the first stage so far, of the second p
    for at in range(m - size.ranks):
        if first + at < m:
            row.add("F", 0)
        row.add("I", 0)
        row.add_pending()
        row.add("F", 1)
        row.add("I", 1)
        row.add_pending()
    for _ in range(rank):
        row.add("I", 0)
        row.add("I", 1)
    for _ in range(after):
        row.add("I", 0)
        row.add_pending(chunk=0)
    row.add_pending(rank, chunk=1)
    row.add_pending(rank, chunk=0)
    return iter(row.actions)


def _dual_pipe_v(size: PipelineSize, rank: int) -> Iterator[Action]:
    """DualPipe cut in half (DeepSeek-V3 technical report, section 3.2.1, and the README of DualPipe): two stages per
    rank in a V; in the middle F of one stage and B of the other run as one. Written for at least 2p microbatches."""
    m = max(2 * size.ranks, size.microbatches)
    row = _Rank(size.of_rank[rank])
    after = size.ranks - 1 - rank

    def pair(forward: int, backward: int) -> None:
        row.add("F", forward, with_next=True)
        row.add("B", backward)

    for _ in range(2 * after):
        row.add("F", 0)
    for _ in range(rank + 1):
        row.add("F", 0)
        row.add("F", 1)
    for _ in range(after):
        row.add("I", 1)
        row.add_pending()
        row.add("F", 1)
    for at in range(m - 2 * size.ranks + rank + 1):
        if at == 0 and after == 0:  # its backward follows the forward just before it: nothing to run beside
            row.add("F", 0)
            row.add("B", 1)
        else:
            pair(0, 1)
        pair(1, 0)
    for _ in range(after):
        row.add("B", 1)
        pair(1, 0)
    # Of the last backwards the second half is split, so that other ranks get their gradients sooner.
    backwards = [chunk for _ in range(rank + 1) for chunk in (1, 0)]
    for at, chunk in enumerate(backwards):
        row.add("B" if at <= rank else "I", chunk)
    for _ in range(after):
        row.add_pending()
        row.add("I", 0)
    row.add_pending(len(row.actions))
    return iter(row.actions)


# Qi et al., Pipeline Parallelism with Controllable Memory (NeurIPS 2024), section 3: a schedule repeats a block every
# six units, and the memory of a rank is the sum of its stages' lifespans over six. V-Min: 4p / 6 stages, a third of
# 1F1B's memory; V-Half: 6p / 6, a half.
_PERIOD = 6
# How a microbatch passes the V, in units of F = I = W: units from a rank to the next for F of the first stage, F of the
# second, I of the second, I of the first.
_Hops = tuple[int, int, int, int]
_HOPS: Mapping[str, _Hops] = {"v-min": (1, 1, 1, 1), "v-half": (2, 1, 2, 1)}


def _repeat(name: str) -> Callable[[PipelineSize], Iterable[Iterable[Action]]]:
    return lambda size: _repeat_block(_HOPS[name], size)


def _repeat_block(hops: _Hops, size: PipelineSize) -> Iterator[Iterable[Action]]:
    """The block of every microbatch, six units later than that of the one before."""
    for stages, times in zip(size.of_rank, _times_in_block(hops, size.ranks), strict=True):
        passes = [
            (time + _PERIOD * m, kind, stages[chunk], m)
            for (kind, chunk), time in times.items()
            for m in range(size.microbatches)
        ]
        yield [_act(kind, stage, m) for _, kind, stage, m in sorted(passes)]


_Block = dict[tuple[str, int], int]  # when F, I and W of a rank's two stages begin


def _times_in_block(hops: _Hops, ranks: int) -> list[_Block]:
    """The block on each rank. Where the direction turns, a microbatch waits so long that every rank can repeat the
    block without two passes at a time; of such times, those that hold least, then the shortest."""
    choices = []
    for turns in product(range(1, _PERIOD), repeat=3):
        rows = [_passes_in_block(hops, turns, rank, ranks - 1) for rank in range(ranks)]
        if all(len({time % _PERIOD for time in row.values()}) == len(row) for row in rows):
            rows = [_with_weights(row) for row in rows]
            choices.append((max(map(_stages_at_a_time, rows)), sum(turns), turns, rows))
    return min(choices, key=lambda choice: choice[:3])[-1]


def _passes_in_block(hops: _Hops, turns: tuple[int, ...], rank: int, last: int) -> _Block:
    down, up, back_down, back_up = hops
    second = down * last + turns[0]  # F of the second stage, on the last rank
    back = second + up * last + turns[1]  # I of the second stage, on the first rank
    end = back + back_down * last + turns[2]  # I of the first stage, on the last rank
    return {
        ("F", 0): down * rank,
        ("F", 1): second + up * (last - rank),
        ("I", 1): back + back_down * rank,
        ("I", 0): end + back_up * (last - rank),
    }


def _with_weights(row: _Block) -> _Block:
    """W comes as soon after I as the rank is free in every period."""
    row = dict(row)
    for chunk in (1, 0):
        taken = {time % _PERIOD for time in row.values()}
        row["W", chunk] = next(t for t in count(row["I", chunk] + 1) if t % _PERIOD not in taken)
    return row


def _stages_at_a_time(row: _Block) -> int:
    """How many microbatches of its stages a rank holds at most, from F to the end of W, once all ranks are busy."""
    return max(
        sum((row["W", chunk] - at) // _PERIOD - (row["F", chunk] - at - 1) // _PERIOD for chunk in (0, 1))
        for at in range(_PERIOD)
    )


# Of the activations of a microbatch, what W needs: in the models of the zero-bubble paper, with heads of 128 and 1,024
# tokens, as `ActivationMemory.of_transformer(1, 1024, 128)` says.
_AFTER_INPUT = 32 / 74


def _automatic(limit: int) -> Callable[[PipelineSize], Iterable[Iterable[Action]]]:
    """The automatic schedule of Qi et al. (Zero Bubble Pipeline Parallelism, section 3.1), under a memory of `limit`
    times that of 1F1B: the best of the heuristic's choices and of the handcrafted schedules, by the longest span."""
    return lambda size: _automatic_orders(size, limit)


def _automatic_orders(size: PipelineSize, limit: int) -> Iterator[Iterable[Action]]:
    ranks, times = size.ranks, size.times or stage_times(size.ranks, 1.0, 1.0, 1.0)
    pipeline = PipelineProblem(
        rank_of=tuple(range(ranks)),
        microbatches=size.microbatches,
        times=times,
        stored=(1.0,) * ranks,
        left=(_AFTER_INPUT,) * ranks,
        cap=(float(limit * ranks),) * ranks,
    )
    choices = product((0.0, 1.0), (False, True))
    trials = [ListScheduler(pipeline, FillRule((late,) * ranks, ahead)) for late, ahead in choices]
    for order in (_zb_h1, _zb_h2)[:limit]:
        plan = PassPlan(tuple(passes_of_actions(order(size, rank)) for rank in range(ranks)))
        trials.append(ListScheduler(pipeline, FillRule((0.0,) * ranks), plan))
    best = min((trial for trial in trials if trial.is_complete), key=ListScheduler.longest_span)
    return (map(action_of_pass, order) for order in best.orders)


SCHEDULES: Mapping[str, NamedSchedule] = {
    "gpipe": NamedSchedule("plain", 1, _each(_gpipe)),
    "1f1b": NamedSchedule("plain", 1, _each(_1f1b)),
    "interleaved": NamedSchedule("looped", None, _each(_interleaved)),
    "looped-bfs": NamedSchedule("looped", None, _each(_looped_bfs)),
    "zb-h1": NamedSchedule("plain", 1, _each(_zb_h1)),
    "zb-h2": NamedSchedule("plain", 1, _each(_zb_h2)),
    "zb-1p": NamedSchedule("plain", 1, _automatic(1)),
    "zb-2p": NamedSchedule("plain", 1, _automatic(2)),
    "zbv": NamedSchedule("v", 2, _each(_zbv)),
    "v-half": NamedSchedule("v", 2, _repeat("v-half")),
    "v-min": NamedSchedule("v", 2, _repeat("v-min")),
    "dualpipev": NamedSchedule("v", 2, _each(_dual_pipe_v)),
}
