"""The pipeline of a step: what each role does when, as blocks of a stage and microbatch, and why it waits between
them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from meshweave.cost.simulate.result import Simulation, Span

PASSES = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
_TICK = 1e-9  # seconds below which two times are equal
_Key = tuple[str, int, int]  # action, stage, microbatch


@dataclass(slots=True)
class ActionBlock:
    """What a role does for an action from `start` to `end`, in seconds; `spans` are its kernels, in order. An action is
    cut into several blocks where it waits for another role. `action` is "forward", "backward", "input", "weight", or
    what follows the passes, such as "update"."""

    role: int
    action: str
    stage: int
    microbatch: int
    start: float
    end: float
    spans: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        """As `F3, stage 7`."""
        if self.action not in PASSES:
            return self.action
        return f"{PASSES[self.action]}{self.microbatch}, stage {self.stage}"


@dataclass(frozen=True, slots=True)
class IdleTime:
    """From `start` to `end` a role does nothing, before the block with index `before` (-1: behind its last pass).

    It waits for the communication `span` (-1: for none that is known), which the block `source` feeds (-1: unknown);
    during the last `message_seconds` that block has ended and its message is under way."""

    role: int
    start: float
    end: float
    before: int
    source: int = -1
    span: int = -1
    message_seconds: float = 0.0
    text: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PipelinePicture:
    """The stages of a step over time. `stages_of_role` has the stages that each role computes. `bubble` is the share of
    the time from the first pass to the end of the last in which a role, in the mean, waits between its actions; waits
    inside an action for its own devices are not counted. `activations`: the most microbatches of a stage that a role
    holds at a time, from F to B or W."""

    schedule: str
    stages_of_role: tuple[tuple[int, ...], ...]
    num_microbatches: int
    bubble: float
    activations: int
    blocks: tuple[ActionBlock, ...]
    gaps: tuple[IdleTime, ...]

    def __str__(self) -> str:
        return (
            f"{schedule_text(self.schedule, self.stages_of_role, self.num_microbatches)}, bubble {self.bubble:.1%}, "
            f"at most {self.activations} activations"
        )


def schedule_text(name: str, stages_of_role: Sequence[Sequence[int]], microbatches: int) -> str:
    """As `schedule zbv: 8 stages on 4 ranks, 8 microbatches`."""
    num_stages = len({stage for stages in stages_of_role for stage in stages})
    return f"schedule {name}: {num_stages} stages on {len(stages_of_role)} ranks, {microbatches} microbatches"


def pipeline_of(simulation: Simulation) -> PipelinePicture | None:
    """The pipeline of a simulated or measured step; None if its stages follow no schedule."""
    if not simulation.schedule:
        return None
    reader = _Reader(simulation)
    blocks = [block for role in simulation.roles for block in reader.blocks(role.index)]
    passes = [block for block in blocks if block.action in PASSES]
    if not passes:
        return None
    begin, end = min(b.start for b in passes), max(b.end for b in passes)
    gaps = tuple(gap for role in simulation.roles for gap in reader.gaps(role.index, blocks, (begin, end)))
    whole = (end - begin) * len(simulation.roles)
    roles = [role.index for role in simulation.roles]
    return PipelinePicture(
        schedule=simulation.schedule,
        stages_of_role=tuple(tuple(sorted({b.stage for b in passes if b.role == role})) for role in roles),
        num_microbatches=max(block.microbatch for block in passes) + 1,
        bubble=sum(gap.seconds for gap in gaps) / whole if whole else 0.0,
        activations=max(_activations(b for b in passes if b.role == role) for role in roles),
        blocks=tuple(blocks),
        gaps=gaps,
    )


def _activations(passes: Iterable[ActionBlock]) -> int:
    """The most microbatches of a stage between the begin of F and the end of backward, on a role."""
    begins: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    for block in passes:
        key = block.stage, block.microbatch
        if block.action == "forward":
            begins[key] = min(block.start, begins.get(key, block.start))
        elif block.action != "input":
            ends[key] = max(block.end, ends.get(key, block.end))
    changes = [*((at, 1) for at in begins.values()), *((at, -1) for at in ends.values())]
    level = peak = 0
    for _, change in sorted(changes):
        level += change
        peak = max(peak, level)
    return peak


@dataclass(slots=True)
class _Reader:
    """Blocks and gaps of the roles of a step."""

    simulation: Simulation
    kernels: dict[int, list[Span]] = field(init=False)  # by role, in order of time
    received: dict[int, list[tuple[float, int]]] = field(init=False)  # by role, ends of communications that it uses
    users: dict[int, set[_Key]] = field(init=False)  # of a communication, the actions that use it
    block_of: dict[int, int] = field(default_factory=dict)  # of a kernel

    def __post_init__(self) -> None:
        spans = self.simulation.spans
        self.kernels = {role.index: [] for role in self.simulation.roles}
        self.users = {}
        received: dict[int, set[int]] = {role.index: set() for role in self.simulation.roles}
        for span in spans:
            if span.kind == "compute":
                self.kernels[span.role].append(span)
                for need in span.needs:
                    if spans[need].kind != "compute":
                        self.users.setdefault(need, set()).add(_key(span))
                        received[span.role].add(need)
        self.received = {role: sorted((spans[c].end, c) for c in its) for role, its in received.items()}

    def blocks(self, role: int) -> Iterator[ActionBlock]:
        """The blocks of a role, in order of their begin. Actions that are scheduled as one take turns: each is a block
        over its whole time."""
        current: dict[_Key, ActionBlock] = {}
        free = 0.0
        blocks_in_order = list[ActionBlock]()
        for span in self.kernels[role]:
            key = _key(span)
            if span.start > free + _TICK and self.message(role, free, span) >= 0:
                current = {}
            if key not in current:
                current[key] = ActionBlock(role, *key, span.start, span.end)
                blocks_in_order.append(current[key])
            current[key].end = max(current[key].end, span.end)
            current[key].spans.append(span.index)
            free = max(free, span.end)
        yield from blocks_in_order

    def message(self, role: int, begin: float, span: Span) -> int:
        """The transfer between roles for which a role waits from `begin` on, until `span`; -1 if for none."""
        copy_index = self.waited_for(role, begin, span.start, _key(span))
        return copy_index if copy_index >= 0 and self.simulation.spans[copy_index].op == "transfer" else -1

    def waited_for(self, role: int, begin: float, end: float, key: _Key) -> int:
        """The communication with whose end a wait ends; else the last that ends in it and is used by the action `key`;
        -1 if there is none."""
        its = self.received[role]
        ended = its[bisect_right(its, (begin + _TICK, len(self.users))) : bisect_left(its, (end + 2 * _TICK, -1))]
        used = [(at, c) for at, c in ended if key in self.users[c]]
        exact = [c for at, c in used or ended if at >= end - _TICK]
        return exact[-1] if exact else used[-1][1] if used else -1

    def gaps(self, role: int, blocks: Sequence[ActionBlock], period: tuple[float, float]) -> Iterator[IdleTime]:
        """The times of the period in which a role is in none of its blocks."""
        if not self.block_of:
            self.block_of = {span: i for i, block in enumerate(blocks) for span in block.spans}
        free = period[0]
        for i, block in enumerate(blocks):
            if block.role != role:
                continue
            if block.start > free + _TICK and free < period[1]:
                yield self.gap(role, free, min(block.start, period[1]), i, blocks)
            free = max(free, block.end)
        if period[1] > free + _TICK:
            at = max(range(len(blocks)), key=lambda i: (blocks[i].action in PASSES, blocks[i].end))
            yield IdleTime(role, free, period[1], -1, at, text=f"the last pass of the step, {self.name(blocks[at])}")

    def gap(self, role: int, begin: float, end: float, before: int, blocks: Sequence[ActionBlock]) -> IdleTime:
        block, spans = blocks[before], self.simulation.spans
        copy_index = self.waited_for(role, begin, end, (block.action, block.stage, block.microbatch))
        if copy_index < 0:
            return IdleTime(role, begin, end, before, text="the host, which starts it then")
        copy = spans[copy_index]
        producers = [n for n in copy.needs if n in self.block_of]
        if copy.op != "transfer" or not producers:
            over = f" over {copy.group}" if copy.group else ""
            where = f" of {copy.module}" if copy.module else ""
            return IdleTime(
                role, begin, end, before, -1, copy_index, min(copy.seconds, end - begin), f"{copy.op}{over}{where}"
            )
        producer = max(producers, key=lambda n: spans[n].end)
        source = self.block_of[producer]
        message = min(end - begin, max(0.0, copy.end - spans[producer].end))
        return IdleTime(role, begin, end, before, source, copy_index, message, self.name(blocks[source]))

    def name(self, block: ActionBlock) -> str:
        return f"{block} on role {block.role}"


def _key(span: Span) -> _Key:
    # what follows the passes is not of a stage or microbatch
    return (span.action, span.stage, span.microbatch) if span.action in PASSES else (span.action or "other", 0, 0)
