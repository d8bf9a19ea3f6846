"""What the devices of a step do in order: a schedule is data, a list of actions for every role.

Accumulation of gradients is a pipeline of a single stage: parameters are gathered before the first microbatch and
gradients reduced after the last, wherever the schedule says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from meshweave.engine.sections import KINDS, Kind, Sections
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import transfer

ScheduleName = Literal["sequential", "gpipe", "1f1b"]
_LETTERS: Mapping[Kind, str] = {
    "unshard": "G", "forward": "F", "report": "L", "backward": "B", "input": "I", "weight": "W", "reduce": "R",
    "update": "U", "reshard": "H", "send_forward": "Sf", "receive_forward": "Rf", "send_backward": "Sb",
    "receive_backward": "Rb",
}  # fmt: skip
Kinds = tuple[Kind, ...]  # of sections that run together, in the order of the graph


@dataclass(frozen=True, slots=True)
class Action:
    """Sections of a stage that run together, in the order of its graph, for a microbatch (both from 0). `with_next`:
    the role's next action is of another microbatch, and both are scheduled as one."""

    kinds: Kinds
    microbatch: int = 0
    stage: int = 0
    with_next: bool = False

    @property
    def name(self) -> Kind:
        """What the action is for: see `name_of`."""
        return name_of(self.kinds)

    def __str__(self) -> str:
        """As `GF0`: parameters are gathered while forward of microbatch 0 runs."""
        return "".join(_LETTERS[kind] for kind in self.kinds) + str(self.microbatch)


Actions = tuple[Action, ...]  # of a role, in order


def name_of(kinds: Kinds) -> Kind:
    """The section that names an action: the first that is not just beside it, as gathers are beside forward."""
    return next((kind for kind in kinds if kind not in ("unshard", "reduce")), kinds[0])


def forms_of(actions: Actions) -> list[tuple[Kinds, ...]]:
    """By microbatch, what its actions run: microbatches of one form run the same tasks."""
    count = max(action.microbatch for action in actions) + 1
    return [tuple(action.kinds for action in actions if action.microbatch == m) for m in range(count)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of each role. What a role runs once per step, it runs with its first microbatch (unshard) or its last
    (reduce, update). Sections that no role has are left out.

    In a schedule of a pipeline a role is a pipeline rank, which holds the stages that its actions name
    (`engine.schedules` has the schedules by name, their proof, clock and search)."""

    name: str
    of_role: tuple[Actions, ...]

    @property
    def num_microbatches(self) -> int:
        """One more than the highest number of a microbatch; 0 without actions."""
        return max((action.microbatch + 1 for actions in self.of_role for action in actions), default=0)

    @property
    def num_stages(self) -> int:
        """One more than the highest number of a stage; 0 without actions."""
        return max((action.stage + 1 for actions in self.of_role for action in actions), default=0)

    @property
    def stages_of_role(self) -> tuple[tuple[int, ...], ...]:
        """For each role the stages that its actions name, ascending."""
        return tuple(tuple(sorted({action.stage for action in actions})) for actions in self.of_role)

    @property
    def is_pipelined(self) -> bool:
        """Whether stages work on several microbatches at a time: a sender goes on before its receiver has the value."""
        return self.name != "sequential"

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.of_role)


def schedule_of(name: ScheduleName, sections: Sequence[Sections], microbatches: int) -> Schedule:
    """The schedule of this name for the sections of all roles, which are stages.

    `sequential`: forward and backward of each microbatch in turn. `gpipe`: all forwards, then all backwards (Huang et
    al., NeurIPS 2019). `1f1b`: as many forwards as there are later stages, then forward and backward alternate
    (Narayanan et al., SOSP 2019). Raises MeshweaveError for another name, and for 1f1b if a stage gets values that
    depend on what it sent itself."""
    if name not in get_args(ScheduleName):
        raise MeshweaveError("unknown pipeline schedule", got=repr(name), expected=", ".join(get_args(ScheduleName)))
    stages = stage_numbers(sections) if name == "1f1b" else [0] * len(sections)
    ahead = [max(stages) - stage for stage in stages]
    kinds = {"forward", "backward", "update"}.union(*(its.kinds.values() for its in sections))
    return Schedule(name, tuple(actions_of(name, microbatches, count, kinds) for count in ahead))


def actions_of(name: ScheduleName, microbatches: int, stages_after: int = 0, kinds: Collection[str] = KINDS) -> Actions:
    """The actions of a role that has sections of these kinds. `stages_after`: how many stages a microbatch passes
    after it."""
    numbers = range(microbatches)
    order: list[tuple[Kind, int]] = []
    if name == "gpipe":
        order = [*(("forward", m) for m in numbers), *(("backward", m) for m in numbers)]
    elif name == "1f1b":
        ahead = min(stages_after, microbatches)
        order = [("forward", m) for m in range(ahead)]
        for m in numbers:
            order += [("forward", m + ahead)] if m + ahead < microbatches else []
            order.append(("backward", m))
    else:
        order = [(kind, m) for m in numbers for kind in ("forward", "backward")]
    whole = _with_rest(order, microbatches, name != "sequential")
    actions = (Action(tuple(kind for kind in each.kinds if kind in kinds), each.microbatch) for each in whole)
    return tuple(action for action in actions if action.kinds)


def _with_rest(order: Iterable[tuple[Kind, int]], microbatches: int, is_pipelined: bool) -> Iterable[Action]:
    """The passes of a step, with what it runs once. In a pipeline stages tell each other the losses after all
    microbatches, so that no forward waits for the last stage."""
    last = microbatches - 1
    for kind, microbatch in order:
        before: tuple[Kind, ...] = ("unshard",) if kind == "forward" and microbatch == 0 else ()
        after: tuple[Kind, ...] = ("reduce",) if kind == "backward" and microbatch == last else ()
        yield Action((*before, kind, *after), microbatch)
    if is_pipelined:
        yield from (Action(("report",), microbatch) for microbatch in range(microbatches))
    yield Action(("update",), last)


def stage_numbers(sections: Sequence[Sections]) -> list[int]:
    """How many stages a microbatch passes before it comes to each role in forward, whatever the devices.
    MeshweaveError if a role gets values that depend on what it sent itself."""
    sides: dict[Any, tuple[set[int], set[int]]] = {}  # by key: roles that receive, that send
    for i, its in enumerate(sections):
        for node in its.nodes(("unshard", "forward")):
            if node.target is transfer:
                sides.setdefault(node.args[-1], (set(), set()))[node.args[0] is not None].add(i)
    edges = {
        (sender, receiver) for receivers, senders in sides.values() for sender in senders for receiver in receivers
    }
    numbers = [0] * len(sections)
    for _ in sections:
        for sender, receiver in edges:
            numbers[receiver] = max(numbers[receiver], numbers[sender] + 1)
    for sender, receiver in sorted(edges):
        if numbers[receiver] <= numbers[sender]:
            raise MeshweaveError(
                "1f1b is a schedule of stages that a microbatch passes once",
                where=f"devices {sections[sender].role.devices} and {sections[receiver].role.devices}",
                got="in forward, both get values from each other",
                hint='pipeline="gpipe", or layers on devices in one direction',
            )
    return numbers
