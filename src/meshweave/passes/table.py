"""The passes of meshweave, in the order in which they run; the work of each is done in a room of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

from meshweave.capture.blocks import has_blocks
from meshweave.capture.recompute import check_policy, recompute
from meshweave.check.same import check_same
from meshweave.cost.hardware import Costs
from meshweave.errors import MeshweaveError
from meshweave.ir.rank import copied
from meshweave.optimize.batch_split import SplitReport, split_program
from meshweave.optimize.decompose import DecomposeOptions, DecomposeReport, decompose, decompose_graph
from meshweave.optimize.decompose.attention import AttentionReport, ring_attention
from meshweave.optimize.overlap import OverlapOptions, OverlapReport, overlap
from meshweave.optimize.overlap.decide import cap_of
from meshweave.optimize.overlap.steps import overlap_roles
from meshweave.optimize.prefetch.gather_ahead import prefetch
from meshweave.optimize.prefetch.keep import KeepReport, keep
from meshweave.passes.base import CapturedProgram, MeshProgram, Numerics, Pass, PassProgram, Report, Scope, Stage
from meshweave.passes.graph_program import GraphProgram

Q = TypeVar("Q", bound=PassProgram)


@dataclass(frozen=True, slots=True)
class Recompute(Pass[CapturedProgram]):
    """The backward pass recomputes values of the forward pass instead of saving them. policy: what is saved of each
    repeated block: "full": its inputs; "selective": also attention, every second matmul and sums over devices;
    "pointwise": the fewest bytes from which elementwise ops compute the rest; "none": everything. Raises PlanError for
    another policy, and, unless `is_optional`, for a model without repeated blocks.
    """

    name: ClassVar[str] = "recompute"
    numerics: ClassVar[Numerics] = "reassociates"  # over tp and cp; elsewhere every bit stays
    stage: ClassVar[Stage] = "captured"
    policy: str = "full"
    is_optional: bool = False

    def __post_init__(self) -> None:
        check_policy(self.policy)

    def run(self, program: CapturedProgram, costs: Any) -> tuple[CapturedProgram, tuple[Report, ...]]:
        if self.is_optional and not has_blocks(program.step):
            return program, ()
        return CapturedProgram(recompute(program.step, self.policy, program.cuts), program.cuts), ()


@dataclass(frozen=True, slots=True)
class Prefetch(Pass[MeshProgram]):
    """Gathers of parameters start `blocks` blocks before the block that needs them; that many more blocks are kept
    whole."""

    name: ClassVar[str] = "prefetch"
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = "expanded"
    blocks: int = 1

    def run(self, program: MeshProgram, costs: Any) -> tuple[MeshProgram, tuple[Report, ...]]:
        return replace(program, roles=tuple(prefetch(copied(role), self.blocks) for role in program.roles)), ()


@dataclass(frozen=True, slots=True)
class RingAttention(Pass[MeshProgram]):
    """Keys and values are passed around the devices of a sequence instead of being gathered: a device needs 1/n of the
    memory for them on n devices. `when`: "gain" (if the step simulates faster), or "always"."""

    name: ClassVar[str] = "ring"
    numerics: ClassVar[Numerics] = "reassociates"
    saves_compute: ClassVar[bool] = True
    stage: ClassVar[Stage] = "written"
    when: Literal["gain", "always"] = "gain"

    @property
    def label(self) -> str:
        return "ring attention"

    def run(self, program: MeshProgram, costs: Any) -> tuple[MeshProgram, tuple[AttentionReport, ...]]:
        return program.each(ring_attention)


@dataclass(frozen=True, slots=True)
class Keep(Pass[MeshProgram]):
    """What a collective has brought is kept for the next equal collective, as parameters gathered in forward are for
    backward (`reshard_after_forward=False` of FSDP2, block by block), where memory is free in between.

    `share` is how much of what memory has left above the peak of the step may be used so: the scheduler needs the rest
    to gather ahead. What it has left is what the cap says; where the caller names none, 5% of the peak or 512 MiB,
    whichever is more, but no more than the machine has.
    """

    name: ClassVar[str] = "keep"
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = "written"
    share: float = 0.5

    def run(self, program: MeshProgram, costs: Costs) -> tuple[MeshProgram, tuple[KeepReport, ...]]:
        def limit_of(peak: int) -> int:
            cap = cap_of(peak, program.memory_cap_bytes, costs.usable_bytes)
            return peak + int(max(0, cap - peak) * self.share)

        kept, reports = program.each_role(lambda role: keep(role, limit_of))
        for before, after in zip(program.roles, kept.roles, strict=True):
            if after is not before:
                check_same(before, after)
        return kept, reports


@dataclass(frozen=True, slots=True)
class Split(Pass[Any]):
    """Ops that work row by row run in chunks of a device's rows, so that communication of a chunk hides under the
    compute of another. Sums over rows are added chunk by chunk.

    num_chunks: the numbers of chunks to try. when: "gain": if the simulated step is faster; "always": wherever
    possible, into the first of `num_chunks`, without costs. positions: whether a batch with fewer sequences than
    chunks is cut along its second dim, positions, with attention whole: more graphs to search, seldom faster.
    """

    name: ClassVar[str] = "split"
    numerics: ClassVar[Numerics] = "reassociates"
    saves_communication: ClassVar[bool] = False  # chunks of a collective take together at least as long
    stage: ClassVar[Stage] = "written"
    scope: ClassVar[Scope] = "joint graph"
    num_chunks: tuple[int, ...] = (2, 4)
    when: Literal["gain", "always"] = "gain"
    positions: bool = False

    def __post_init__(self) -> None:
        if not self.num_chunks or any(type(n) is not int or n < 2 for n in self.num_chunks):
            raise MeshweaveError("a batch is split into two or more chunks", got=f"num_chunks={self.num_chunks!r}")
        if self.when not in ("gain", "always"):
            raise MeshweaveError("unknown value of when", got=repr(self.when), expected="gain or always")

    @property
    def alternatives(self) -> tuple[Split, ...]:
        counts = self.num_chunks[:1] if self.when == "always" else self.num_chunks
        return tuple(replace(self, num_chunks=(count,)) for count in counts)

    @property
    def label(self) -> str:
        return f"rows in {self.num_chunks[0]} chunks"

    def run(self, program: Q, costs: Any) -> tuple[Q, tuple[SplitReport, ...]]:
        """Splits into the first of `num_chunks`. Gradients of weights are added in float32, chunk by chunk; in a graph
        of torch.compile the matmuls add them."""
        is_step = isinstance(program, MeshProgram)
        count, positions = self.num_chunks[0], self.positions
        return program.each(partial(split_program, num_chunks=count, fuse_sums=not is_step, positions=positions))


@dataclass(frozen=True, slots=True)
class Decompose(DecomposeOptions, Pass[Any]):
    """Collectives beside matmuls become rings of messages between chunks of these matmuls. Gathers stay exact; sums
    over devices are added in the order of the messages."""

    name: ClassVar[str] = "decompose"
    numerics: ClassVar[Numerics] = "reassociates"
    stage: ClassVar[Stage] = "written"
    scope: ClassVar[Scope] = "graph"

    @property
    def label(self) -> str:
        return "collectives taken apart"

    def run(
        self, program: MeshProgram | GraphProgram, costs: Any
    ) -> tuple[MeshProgram | GraphProgram, tuple[DecomposeReport, ...]]:
        if isinstance(program, GraphProgram):
            return self.of_graph(program, costs)
        return program.each_role(lambda role: decompose(role, costs, self))

    def of_graph(self, program: GraphProgram, costs: Any) -> tuple[GraphProgram, tuple[DecomposeReport, ...]]:
        module, report = decompose_graph(
            program.module,
            cost=costs,
            groups=program.groups,
            rank=program.rank,
            options=self,
            memory_cap_bytes=program.memory_cap_bytes,
            overlap_options=program.order,
            agree=program.agree,
        )
        return program.with_module(module) if report.num_taken else program, (report,)


@dataclass(frozen=True, slots=True)
class Overlap(OverlapOptions, Pass[Any]):
    """Communication runs beside compute: the step is reordered and collectives are merged, where that simulates faster
    or the memory cap requires it. Values are the same to the bit."""

    name: ClassVar[str] = "overlap"
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = "ordered"
    scope: ClassVar[Scope] = "graph"

    def __post_init__(self) -> None:
        self.check()

    @property
    def needs_costs(self) -> bool:
        return True

    def run(
        self, program: MeshProgram | GraphProgram, costs: Any
    ) -> tuple[MeshProgram | GraphProgram, tuple[OverlapReport, ...]]:
        """Raises NoOrderError if no order is under the cap."""
        if isinstance(program, GraphProgram):
            module, report = overlap(
                program.module,
                cost=costs,
                memory_cap_bytes=program.memory_cap_bytes,
                groups=program.groups,
                options=self,
                agree=program.agree,
            )
            return replace(program, module=module, ordered_seconds=report.seconds), (report,)
        ordered = overlap_roles(
            program.roles,
            costs,
            self,
            memory_cap_bytes=program.memory_cap_bytes,
            keeps_gradients=program.keeps_gradients,
            microbatches=program.microbatches,
        )
        return program.with_simulated(ordered.roles, ordered.seconds), ordered.reports


# All passes that text can name, in the order in which they run.
PASSES: Mapping[str, type[Pass[Any]]] = {
    each_pass.name: each_pass for each_pass in (Recompute, Prefetch, RingAttention, Keep, Split, Decompose, Overlap)
}
GROUPS = {
    "exact": ("keep", "overlap"),  # passes that change no value
    "default": ("keep", "split", "decompose", "overlap"),
}
