"""What a pass is, what it works on, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

from torch import fx

from meshweave.capture.recompute import Cuts
from meshweave.cost.simulate.step import StepSeconds, seconds_of_step
from meshweave.ir.device_program import R, Rewrite, rewrite_role
from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_rank
from meshweave.search import AS_IT_IS

Numerics = Literal["exact", "reassociates"]  # of sums over devices or rows: in the same order, or in another
Stage = Literal["captured", "expanded", "written", "ordered"]
STAGES: tuple[Stage, ...] = ("captured", "expanded", "written", "ordered")
Scope = Literal["step", "graph", "joint graph"]
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class CapturedProgram:
    """The step as captured, before placement. `cuts`: for each parameter the dims that the plan cuts."""

    step: StepGraph
    cuts: Cuts = field(default_factory=dict)


class PassProgram(Protocol):
    """What passes after expansion work on: all roles of a step (`MeshProgram`), or a graph of torch.compile
    (`GraphProgram`)."""

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        """The current graphs; a change makes a new program."""

    def each(self, rewrite: Rewrite[R]) -> tuple[Self, tuple[R, ...]]:
        """Apply `rewrite` to every graph, as a `DeviceProgram`. Returns the new program (`self` if no graph changed)
        and a report for each graph. So a pass is written once for roles and for graphs of torch.compile."""

    def verify(self, before: Self) -> None:
        """Raise VerifyError for what the pass from `before` to this program broke."""

    def seconds(self, costs: Any) -> StepSeconds:
        """Seconds in simulation; infinite if it cannot run under its cap."""

    def agreed(self, choice: int) -> int:
        """The choice among candidates on which all processes that decide together agree."""


@dataclass(frozen=True, slots=True)
class MeshProgram:
    """What all devices of a mesh run: a graph per role, and how roles communicate.

    microbatches: how often a step runs forward and backward. memory_cap_bytes: the most that may be live on a device at
    once. keeps_gradients: gradients live to the end of the step. simulated: roles whose simulated seconds are known.
    """

    roles: tuple[RankGraph, ...]
    microbatches: int = 1
    memory_cap_bytes: int | None = None
    keeps_gradients: bool = False
    simulated: tuple[tuple[RankGraph, ...], StepSeconds] | None = None

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        return tuple(role.graph for role in self.roles)

    def each(self, rewrite: Rewrite[R]) -> tuple[MeshProgram, tuple[R, ...]]:
        return self.each_role(lambda role: rewrite_role(role, rewrite))

    def each_role(self, rewrite: Callable[[RankGraph], tuple[RankGraph, R]]) -> tuple[MeshProgram, tuple[R, ...]]:
        """Apply `rewrite` to every role. Returns the new program (`self` if all roles stay) and a report for each."""
        roles, reports = zip(*map(rewrite, self.roles), strict=True)
        is_same = all(new is old for new, old in zip(roles, self.roles, strict=True))
        return self if is_same else replace(self, roles=roles), reports

    def verify(self, before: MeshProgram) -> None:
        for role in self.roles:
            verify_rank(role)

    def with_simulated(self, roles: tuple[RankGraph, ...], seconds: StepSeconds) -> MeshProgram:
        return replace(self, roles=roles, simulated=(roles, seconds))

    def seconds(self, costs: Any) -> StepSeconds:
        if self.simulated is not None and self.simulated[0] is self.roles:
            return self.simulated[1]
        return seconds_of_step(self.roles, costs, self.microbatches)

    def agreed(self, choice: int) -> int:
        return choice  # all processes have the same costs


class Report(Protocol):
    """What a pass did to a role."""

    def left(self, reason: str) -> Self:
        """A report of a role that stays as it is, with the reason."""


class Pass(Protocol[P]):
    """A frozen dataclass whose fields are its options.

    name: its name in lists of passes. numerics: "exact" where every value stays the same to the bit.
    stage: what it works on. "captured": a CapturedProgram; else a MeshProgram: "expanded" passes run right after
    expansion, "written" passes rewrite ops, "ordered" passes change order and buckets only, which is proven after each.
    scope: "step" if it needs a whole training step. Passes with the other scopes also run on graphs of torch.compile (a
    `GraphProgram`): "graph": forward and backward, each by itself; "joint graph": before the two are partitioned.
    saves_compute, saves_communication: whether it may shorten these, not only run one beside the other.
    """

    __slots__ = ()
    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    stage: ClassVar[Stage]
    scope: ClassVar[Scope] = "step"
    saves_compute: ClassVar[bool] = False
    saves_communication: ClassVar[bool] = True

    @property
    def needs_costs(self) -> bool:
        """Whether it needs a machine profile; passes that are compared do."""
        return self.is_compared

    @property
    def is_compared(self) -> bool:
        """Whether the program without it is kept too, and the faster of the two is taken in the end: by default that of
        a pass whose option `when` is "gain"."""
        return getattr(self, "when", "") == "gain"

    @property
    def alternatives(self) -> tuple[Pass[P], ...]:
        """The passes that are tried in its place; each yields a program."""
        return (self,)

    @property
    def label(self) -> str:
        """The name of a program that this pass changed, among the programs compared."""
        return self.name

    def run(self, program: P, costs: Any) -> tuple[P, tuple[Report, ...]]:
        """Another program (`program` itself if nothing changes), and a report for each role.

        `program` is not modified. `costs` are a MachineProfile if the pass needs costs. Raises MeshweaveError for what
        it cannot do."""


def named(rewrites: Iterable[Pass[Any]]) -> str:
    """The name of a program with these rewrites."""
    return ", ".join(each_pass.label for each_pass in rewrites) or AS_IT_IS
