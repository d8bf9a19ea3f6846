"""List scheduling of F, I and W: ranks choose their next pass in the order of time, by a rule or along a plan.

The rule is that of the zero-bubble paper's heuristic (Qi et al., ICLR 2024, section 3.1), for any placement of stages:
as many forwards first as memory holds and the first backward does not wait for, then forward and backward alternate,
and weight parts fill gaps or give memory back. A plan is the order of F and I on each rank; then only weight parts are
placed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from meshweave.engine.actions import Action
from meshweave.engine.schedules.clock import StageTimes
from meshweave.engine.sections import Kind

FORWARD, INPUT, WEIGHT = 0, 1, 2
PipelinePass = tuple[int, int, int]  # kind, stage, microbatch
Fill = Literal["none", "longest", "all"]
Orders = tuple[tuple[PipelinePass, ...], ...]  # for each rank
_KINDS: tuple[Kind, ...] = ("forward", "input", "weight")
_PASSES: Mapping[Kind, tuple[int, ...]] = {
    "forward": (FORWARD,),
    "input": (INPUT,),
    "weight": (WEIGHT,),
    "backward": (INPUT, WEIGHT),
}
_ROUNDING = 1e-9  # times and bytes are compared up to this share


def action_of_pass(each: PipelinePass) -> Action:
    kind, stage, m = each
    return Action((_KINDS[kind],), m, stage)


def passes_of_actions(actions: Iterable[Action]) -> tuple[PipelinePass, ...]:
    """The passes of a rank's actions, a whole backward as its two parts."""
    return tuple(
        (number, action.stage, action.microbatch)
        for action in actions
        for kind in action.kinds
        for number in _PASSES.get(kind, ())
    )


@dataclass(frozen=True)
class PipelineProblem:
    """What is scheduled: `rank_of[s]` is the rank of stage s; `stored` and `left` what a stage holds for a microbatch
    after F and after I, `cap` the most that each rank may hold, in the same unit."""

    rank_of: tuple[int, ...]
    microbatches: int
    times: StageTimes
    stored: tuple[float, ...]
    left: tuple[float, ...]
    cap: tuple[float, ...]

    @property
    def last(self) -> int:
        return len(self.rank_of) - 1

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in the order of a microbatch."""
        return tuple(
            tuple(stage for stage, its in enumerate(self.rank_of) if its == rank) for rank in range(len(self.cap))
        )

    @cached_property
    def seconds(self) -> tuple[tuple[float, ...], ...]:
        """By kind and stage."""
        return self.times.forward, self.times.input, self.times.weight

    def latency(self, stage: int, other: int) -> float:
        """Of a message between two neighbouring stages."""
        return self.times.comm[min(stage, other)] if self.rank_of[stage] != self.rank_of[other] else 0.0


@dataclass(frozen=True, slots=True)
class FillRule:
    """How a rank chooses. `late[r]`: by how many forwards rank r may delay its first backward, to fill the gap before
    it. `may_run_ahead`: a forward runs in place of a backward that comes later than its end. Gaps of `least_gap` weight
    parts and more get one, of shorter gaps `fill`: none, those of the rank that has idled longest, or all."""

    late: tuple[float, ...]
    may_run_ahead: bool = False
    fill: Fill = "longest"
    least_gap: float = 1.0


@dataclass(frozen=True)
class PassPlan:
    """An order of passes per rank. Without weight parts in it, the rule places them; it has to place one before each
    pass in `after_weight`, and none in the gaps before those in `without_weight`."""

    orders: Orders
    after_weight: frozenset[PipelinePass] = frozenset()
    without_weight: frozenset[PipelinePass] = frozenset()

    @cached_property
    def has_weights(self) -> bool:
        return any(kind == WEIGHT for kind, _, _ in self.orders[0])


@dataclass(slots=True)
class _RankState:
    """A rank while it is scheduled: what it has run and when, seconds without work since it began, what it holds, and
    the weight parts that are left to run."""

    order: list[PipelinePass] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    free: float = 0.0
    idle: float = 0.0
    memory: float = 0.0
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    has_turned: bool = False  # whether a backward has begun
    prefers_forward: bool = True
    position: int = 0  # in the plan
    early: set[PipelinePass] = field(default_factory=set)  # what ran before its turn in the plan
    after_weight: set[PipelinePass] = field(default_factory=set)  # what has got its weight part before it


class ListScheduler:
    """One run of a rule, along a plan if there is one.

    `orders` are the passes of each rank and `begins` their times. `is_complete` is False where memory, or a plan that
    no order fits, kept a rank from going on."""

    def __init__(self, pipeline: PipelineProblem, rule: FillRule, plan: PassPlan | None = None) -> None:
        self.pipeline, self.rule, self.plan = pipeline, rule, plan
        stages = range(pipeline.last + 1)
        self.next_of = ([0 for _ in stages], [0 for _ in stages])  # per kind (F, I) and stage: the next microbatch
        # By kind, stage and microbatch: when the input of a pass arrives; negative as long as that is not known.
        unknown = [-1.0] * pipeline.microbatches
        self.arrivals = ([unknown.copy() for _ in stages], [unknown.copy() for _ in stages])
        self.arrivals[FORWARD][0] = [0.0] * pipeline.microbatches
        self.states = [_RankState() for _ in pipeline.cap]
        # A rank keeps room for the later stages of a microbatch whose forward it begins: else none could ever end.
        self.room = [
            sum(pipeline.stored[s] for s in pipeline.stages_of[rank] if s >= stage)
            for stage, rank in enumerate(pipeline.rank_of)
        ]
        self.first_input = _first_inputs(pipeline)
        self._run()
        self.orders: Orders = tuple(tuple(state.order) for state in self.states)
        self.begins = [state.begins for state in self.states]
        self.is_complete = sum(map(len, self.orders)) == 3 * pipeline.microbatches * len(stages)

    def longest_span(self) -> float:
        """The longest time between the begin and the end of a rank's work."""
        return max(state.free - state.begins[0] for state in self.states)

    def makespan(self) -> float:
        """When the last rank ends."""
        return max(state.free for state in self.states)

    def _run(self) -> None:
        choose = self._choose if self.plan is None else self._follow
        self.events = [(0.0, rank) for rank in range(len(self.states))]
        while self.events:
            now, rank = heapq.heappop(self.events)
            state = self.states[rank]
            if state.free <= now:
                chosen = choose(now, state, rank)
                if chosen is not None:
                    self._begin(now, state, rank, chosen)

    def _begin(self, now: float, state: _RankState, rank: int, chosen: PipelinePass) -> None:
        pipeline, (kind, stage, m) = self.pipeline, chosen
        if state.order:
            state.idle += now - state.free
        state.order.append(chosen)
        state.begins.append(now)
        state.free = now + pipeline.seconds[kind][stage]
        heapq.heappush(self.events, (state.free, rank))
        if kind == WEIGHT:
            state.memory -= pipeline.left[stage]
            return
        self.next_of[kind][stage] += 1
        state.prefers_forward = kind == INPUT
        if kind == FORWARD:
            state.memory += pipeline.stored[stage]
            target, to = (FORWARD, stage + 1) if stage < pipeline.last else (INPUT, stage)
        else:
            state.memory += pipeline.left[stage] - pipeline.stored[stage]
            state.has_turned = True
            if self.plan is None or not self.plan.has_weights:
                state.pending.append((stage, m))
            target, to = INPUT, stage - 1
        if to >= 0:
            arrival = state.free + (pipeline.latency(stage, to) if to != stage else 0.0)
            self.arrivals[target][to][m] = arrival
            heapq.heappush(self.events, (arrival, pipeline.rank_of[to]))

    # By the rule

    def _choose(self, now: float, state: _RankState, rank: int) -> PipelinePass | None:
        """What a rank begins now; None if it waits for a message."""
        input_at, backward = self._next(now, rank, INPUT)
        forward_at, forward = self._next(now, rank, FORWARD)
        limit = self.pipeline.cap[rank] * (1 + _ROUNDING)
        fits = forward is not None and state.memory + self.room[forward[1]] <= limit
        if not state.has_turned and backward is not None and input_at > now:
            return self._warm_up(
                now, rank, max(input_at, self.first_input[rank]), forward_at, forward if fits else None
            )
        if forward is not None and forward_at <= now:
            if state.prefers_forward and not fits and state.pending:
                return self._weight(state)  # gives memory back
            if fits and (state.prefers_forward or backward is None):
                return forward
        if backward is not None and input_at <= now:
            return backward
        if fits and forward is not None and forward_at <= now and self.rule.may_run_ahead:
            is_in_time = now + self.pipeline.times.forward[forward[1]] <= input_at
            if is_in_time:
                return forward
        waits_for_forward = fits and (state.prefers_forward or backward is None)
        return self._fill(now, state, min(input_at, forward_at) if waits_for_forward else input_at)

    def _warm_up(
        self, now: float, rank: int, input_at: float, forward_at: float, forward: PipelinePass | None
    ) -> PipelinePass | None:
        """Before the first backward: a forward, unless the backward would wait for it too long."""
        if forward is None or forward_at > now:
            return None
        seconds = self.pipeline.times.forward[forward[1]]
        allowed = input_at + self.rule.late[rank] * seconds
        return forward if now + seconds <= allowed * (1 + _ROUNDING) else None

    def _next(self, now: float, rank: int, kind: int) -> tuple[float, PipelinePass | None]:
        """The next pass of a kind on a rank and when its input is there, or may be there at the earliest: of several
        that are there, that of the latest stage, as it gives memory back soonest."""
        best: tuple[tuple[float, int], PipelinePass] | None = None
        for stage in self.pipeline.stages_of[rank]:
            m = self.next_of[kind][stage]
            if m == self.pipeline.microbatches or self._comes_after_own(kind, stage, m):
                continue
            key = (max(self._arrival(now, kind, stage, m), now), -stage)
            if best is None or key < best[0]:
                best = key, (kind, stage, m)
        return (best[0][0], best[1]) if best else (float("inf"), None)

    def _comes_after_own(self, kind: int, stage: int, m: int) -> bool:
        """Whether a pass needs one that its own rank has not begun: it cannot come next."""
        forward, backward = self.next_of
        stages = self.pipeline.stages_of[self.pipeline.rank_of[stage]]
        if kind == FORWARD:
            return any(forward[other] <= m for other in stages if other < stage)
        return any(
            forward[other] <= m or (other > stage and backward[other] <= m) for other in stages if other >= stage
        )

    def _arrival(self, now: float, kind: int, stage: int, m: int) -> float:
        """When the input of a pass arrives, or the earliest time at which it can."""
        known = self.arrivals[kind][stage][m]
        if known >= 0:
            return known
        if kind == INPUT and stage == self.pipeline.last:
            return float("inf")  # its forward has not begun
        source = stage - 1 if kind == FORWARD else stage + 1
        begin = max(now, self.states[self.pipeline.rank_of[source]].free)
        return begin + self.pipeline.seconds[kind][source] + self.pipeline.latency(stage, source)

    def _fill(self, now: float, state: _RankState, until: float) -> PipelinePass | None:
        """A weight part, if one is pending and the gap before the next message deserves it."""
        if not state.pending:
            return None
        gap = until - now
        least = self.rule.least_gap * self.pipeline.times.weight[state.pending[0][0]]
        if gap < least * (1 - _ROUNDING):
            longest = max(other.idle for other in self.states)
            if self.rule.fill == "none" or (self.rule.fill == "longest" and state.idle + gap <= longest):
                return None
        return self._weight(state)

    @staticmethod
    def _weight(state: _RankState) -> PipelinePass:
        return (WEIGHT, *state.pending.popleft())

    # Along a plan

    def _follow(self, now: float, state: _RankState, rank: int) -> PipelinePass | None:
        """The next pass of the plan, or a weight part before it."""
        plan = self.plan
        assert plan is not None
        row = plan.orders[rank]
        while state.position < len(row) and row[state.position] in state.early:
            state.position += 1
        if state.position == len(row):
            return self._weight(state) if state.pending else None
        following = row[state.position]
        if state.pending and following in plan.after_weight and following not in state.after_weight:
            state.after_weight.add(following)
            return self._weight(state)
        kind, stage, m = following
        at = now if kind == WEIGHT else self._arrival(now, kind, stage, m)
        if at > now:
            return None if following in plan.without_weight else self._fill(now, state, at)
        limit = self.pipeline.cap[rank] * (1 + _ROUNDING)
        if kind == FORWARD and state.memory + self.pipeline.stored[stage] > limit:
            return self._weight(state) if state.pending else self._first_that_fits(now, state, row, limit)
        state.position += 1
        return following

    def _first_that_fits(
        self, now: float, state: _RankState, row: Sequence[PipelinePass], limit: float
    ) -> PipelinePass | None:
        """Where the next forward of a plan does not fit: the first later pass that does. None until its input is
        there."""
        for following in row[state.position + 1 :]:
            kind, stage, m = following
            if kind == WEIGHT or m != self.next_of[kind][stage] or self._comes_after_own(kind, stage, m):
                continue
            if kind == FORWARD and state.memory + self.room[stage] > limit:
                continue
            if self._arrival(now, kind, stage, m) > now:
                return None
            state.early.add(following)
            return following
        return None


def _first_inputs(pipeline: PipelineProblem) -> list[float]:
    """Per rank the earliest begin of I: that of the first microbatch on a pipeline that does nothing else."""
    now, result = 0.0, [float("inf")] * len(pipeline.cap)
    for stage in range(pipeline.last + 1):
        now += pipeline.times.forward[stage] + (pipeline.latency(stage, stage + 1) if stage < pipeline.last else 0.0)
    for stage in range(pipeline.last, -1, -1):
        rank = pipeline.rank_of[stage]
        result[rank] = min(result[rank], now)
        now += pipeline.times.input[stage] + (pipeline.latency(stage, stage - 1) if stage else 0.0)
    return result
