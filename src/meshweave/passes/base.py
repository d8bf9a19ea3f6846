"""What a pass is, what it works on, and what it says afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

from meshweave.capture.recompute import Cuts
from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph

Numerics = Literal["exact", "reassociates"]  # of sums over devices or rows: in the same order, or in another
Stage = Literal["captured", "expanded", "written", "ordered"]
STAGES: tuple[Stage, ...] = ("captured", "expanded", "written", "ordered")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class CapturedProgram:
    """The step as captured, before placement. `cuts`: by parameter the dims that the plan cuts."""

    step: StepGraph
    cuts: Cuts = field(default_factory=dict)


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


class Report(Protocol):
    """What a pass did to one role."""

    def left(self, reason: str) -> Self:
        """The same, of a role that stays as it was for this reason."""


class Pass(Protocol[P]):
    """A frozen dataclass whose fields are its options.

    name: what lists of passes call it. numerics: "exact" where every value stays the same to the bit.
    stage: what it works on. "captured": a CapturedProgram; else a MeshProgram: "expanded" as soon as there is one,
    "written" passes write other ops, "ordered" ones change order and buckets alone, which is proven after each.
    """

    __slots__ = ()
    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    stage: ClassVar[Stage]

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
