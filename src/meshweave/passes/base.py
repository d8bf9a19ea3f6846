"""What a pass is, what it works on, and what it says afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

from torch import fx

from meshweave.capture.recompute import Cuts
from meshweave.ir.device_program import R, Rewrite
from meshweave.ir.from_role import rewrite_role
from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_rank
from meshweave.simulate.step import SimulateOptions, simulate_roles

Numerics = Literal["exact", "reassociates"]  # of sums over devices or rows: in the same order, or in another
Stage = Literal["captured", "expanded", "written", "ordered"]
STAGES: tuple[Stage, ...] = ("captured", "expanded", "written", "ordered")
Scope = Literal["step", "graph", "joint graph"]
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class CapturedProgram:
    """The step as captured, before placement. `cuts`: by parameter the dims that the plan cuts."""

    step: StepGraph
    cuts: Cuts = field(default_factory=dict)


class PassProgram(Protocol):
    """What passes behind expansion work on: all roles of a step (`MeshProgram`), or one graph that a compiler holds
    (`GraphProgram`)."""

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """What is run, as it is now: other graphs are another program."""

    def each(self, rewrite: Rewrite[R]) -> tuple[Self, tuple[R, ...]]:
        """Every graph as `rewrite` makes it of a `DeviceProgram`, and what that says of each; `self` where it changes
        none. So a pass is written once for roles and for the graphs of others."""

    def verify(self, before: Self) -> None:
        """Raise VerifyError for what a pass did wrong that made this of `before`."""

    def seconds(self, costs: Any) -> float:
        """What it takes in simulation; infinite where it cannot be run under its cap."""

    def agreed(self, choice: int) -> int:
        """The choice among candidates that all processes take which decide together."""


@dataclass(frozen=True, slots=True)
class MeshProgram:
    """What all devices of a mesh run: one graph per role, and what joins them.

    placed: the graph that the roles were made of. microbatches: how often a step runs forward and backward.
    memory_cap_bytes: the most that a device may hold at once. keeps_gradients: they live to the end of the step.
    carry: of how many blocks the scheduler may have the parameters gathered in the step before.
    """

    roles: tuple[RankGraph, ...]
    placed: StepGraph | None = None
    microbatches: int = 1
    memory_cap_bytes: int | None = None
    keeps_gradients: bool = False
    carry: int | Literal["auto"] = 0

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        return tuple(role.graph for role in self.roles)

    def each(self, rewrite: Rewrite[R]) -> tuple[MeshProgram, tuple[R, ...]]:
        pairs = [rewrite_role(role, rewrite) for role in self.roles]
        roles, reports = tuple(role for role, _ in pairs), tuple(report for _, report in pairs)
        is_same = all(new is old for new, old in zip(roles, self.roles, strict=True))
        return self if is_same else replace(self, roles=roles), reports

    def verify(self, before: MeshProgram) -> None:
        for role in self.roles:
            verify_rank(role)

    def seconds(self, costs: Any) -> float:
        return simulate_roles(self.roles, costs, SimulateOptions(microbatches=self.microbatches)).seconds

    def agreed(self, choice: int) -> int:
        return choice  # every process has the same costs


class Report(Protocol):
    """What a pass did to one role."""

    def left(self, reason: str) -> Self:
        """The same, of a role that stays as it was for this reason."""


class Pass(Protocol[P]):
    """A frozen dataclass whose fields are its options.

    name: what lists of passes call it. numerics: "exact" where every value stays the same to the bit.
    stage: what it works on. "captured": a CapturedProgram; else a MeshProgram: "expanded" as soon as there is one,
    "written" passes write other ops, "ordered" ones change order and buckets alone, which is proven after each.
    scope: whether it needs a whole training step, or any graph will do, as torch.compile has them (a `GraphProgram`):
    "graph": of forward and of backward, each by itself; "joint graph": before the two are parted.
    """

    __slots__ = ()
    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    stage: ClassVar[Stage]
    scope: ClassVar[Scope] = "step"

    @property
    def needs_costs(self) -> bool:
        """Whether it cannot run without a machine profile, as what is compared cannot."""
        return self.is_compared

    @property
    def is_compared(self) -> bool:
        """Whether the program without it is kept too, and the faster one of the two is taken in the end."""
        return False

    @property
    def alternatives(self) -> tuple[Pass[P], ...]:
        """The passes that are tried in its place, each of which makes one program."""
        return (self,)

    @property
    def label(self) -> str:
        """What a program that has been changed by it is called among those that are compared."""
        return self.name

    def run(self, program: P, costs: Any) -> tuple[P, tuple[Report, ...]]:
        """Another program, `program` itself where nothing changes, and a report for each role. What is handed in stays
        as it is. `costs` are a MachineProfile where it needs costs. Raises MeshweaveError for what cannot be done."""
