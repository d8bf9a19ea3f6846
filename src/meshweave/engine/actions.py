"""What the devices of a step do in order: a schedule is data, a list of actions for every role.

Accumulation of gradients is a pipeline of a single stage: parameters are gathered before the first microbatch and
gradients reduced after the last, wherever the schedule says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshweave.engine.sections import KINDS, Kind, Sections
from meshweave.errors import PlanError, near_miss

_LETTERS: Mapping[Kind, str] = {
    "unshard": "G", "forward": "F", "tell": "T", "report": "L", "backward": "B", "input": "I", "weight": "W",
    "reduce": "R", "total": "N", "update": "U", "reshard": "H", "send_forward": "Sf", "receive_forward": "Rf",
    "send_backward": "Sb", "receive_backward": "Rb",
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

    def __post_init__(self) -> None:
        """Raises PlanError for kinds that there are not, and for numbers that are none."""
        kinds = self.kinds if isinstance(self.kinds, tuple) else ()
        unknown = [kind for kind in kinds if kind not in KINDS]
        of_letter = [kind for kind, letter in _LETTERS.items() if [letter] == unknown[:1]]
        if not kinds or unknown:
            raise PlanError(
                "an action of a schedule has a tuple of kinds",
                where=f"Action of microbatch {self.microbatch!r}, stage {self.stage!r}",
                got=repr(self.kinds),
                expected=", ".join(KINDS),
                hint=f"did you mean {near_miss(str(unknown[0]), of_letter or KINDS)}?"
                if unknown
                else 'for example ("forward",)',
            )
        for what, number in (("microbatch", self.microbatch), ("stage", self.stage)):
            if not isinstance(number, int):
                raise PlanError(
                    f"an action of a schedule has the number of a {what}",
                    where=f"Action of {' and '.join(kinds)}",
                    got=f"{what} {number!r}",
                    expected="an int from 0 on",
                    hint="Action(kinds, microbatch, stage)",
                )

    @property
    def name(self) -> Kind:
        """What the action is for: the first of its sections that is not just beside it, as gathers are beside
        forward."""
        return next((kind for kind in self.kinds if kind not in ("unshard", "reduce")), self.kinds[0])

    @property
    def key(self) -> str:
        """What tells it apart among the actions of a microbatch: its name and, after the first stage, its stage."""
        return f"{self.name} {self.stage}" if self.stage else self.name

    def __str__(self) -> str:
        """As `GF0`: parameters are gathered while forward of microbatch 0 runs."""
        return "".join(_LETTERS[kind] for kind in self.kinds) + str(self.microbatch)


Actions = tuple[Action, ...]  # of a role, in order


def forms_of(actions: Actions) -> list[Actions]:
    """By microbatch, what its actions run: microbatches of one form run the same tasks."""
    count = max(action.microbatch for action in actions) + 1
    return [tuple(Action(a.kinds, 0, a.stage) for a in actions if a.microbatch == number) for number in range(count)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of each role. What a role runs once per step, it runs with its first microbatch (unshard) or its last
    (reduce, update). Sections that no role has are left out.

    In a schedule of a pipeline a role is a pipeline rank, which holds the stages that its actions name
    (`engine.schedules` has the schedules by name, their proof, clock and search)."""

    name: str
    of_role: tuple[Actions, ...]

    def __post_init__(self) -> None:
        """Raises PlanError for anything but sequences of actions."""
        is_right = isinstance(self.of_role, tuple | list) and all(isinstance(row, tuple | list) for row in self.of_role)
        strange = [each for row in self.of_role for each in row if not isinstance(each, Action)] if is_right else []
        if not is_right or strange:
            raise PlanError(
                "a schedule has for each rank a tuple of actions",
                where=f"schedule {self.name}",
                got=repr(strange[0] if strange else self.of_role)[:80],
                expected="Schedule(name, (actions of rank 0, actions of rank 1, ...)), each a tuple of Action",
                hint="mw.load_schedule reads actions as text (0F0,0B0) from a file",
            )

    @property
    def num_microbatches(self) -> int:
        """One more than the highest number of a microbatch; 0 without actions."""
        return max((action.microbatch + 1 for actions in self.of_role for action in actions), default=0)

    @property
    def last_microbatch(self) -> int:
        """The number of the last microbatch: what follows all of them may have one of its own."""
        passes = (a.microbatch for actions in self.of_role for a in actions if a.name not in ("total", "update"))
        return max(passes, default=0)

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


def sequential(sections: Sequence[Sections], microbatches: int) -> Schedule:
    """Forward and backward of each microbatch in turn, the same on all roles."""
    kinds = {"forward", "backward", "update"}.union(*(its.kinds.values() for its in sections))
    return Schedule("sequential", (actions_of(microbatches, kinds),) * len(sections))


def actions_of(microbatches: int, kinds: Collection[str] = KINDS) -> Actions:
    """The actions of a role that has sections of these kinds: forward and backward of each microbatch in turn, with
    what a step runs once beside the first and the last."""
    actions = list[Action]()
    for number in range(microbatches):
        actions.append(Action(("unshard", "forward") if number == 0 else ("forward",), number))
        actions.append(Action(("backward", "reduce") if number == microbatches - 1 else ("backward",), number))
    actions.append(Action(("update",), microbatches - 1))
    return tuple(Action(tuple(k for k in each.kinds if k in kinds), each.microbatch) for each in actions)
