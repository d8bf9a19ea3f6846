"""What becomes of the rank graphs of a program once they are expanded: rows in chunks, collectives taken apart,
communication put under compute; and the proof that they still do what they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from meshweave.check.completeness import Completeness, check_complete
from meshweave.check.deadlock import DeadlockFreedom, check_deadlock
from meshweave.check.same import check_same
from meshweave.decompose import (
    DecomposeOptions,
    DecomposeReport,
    SplitOptions,
    SplitReport,
    decompose,
    prove_rings,
    split_role,
)
from meshweave.errors import MeshweaveError
from meshweave.hardware import Costs, MachineProfile
from meshweave.ir.graph import StepGraph
from meshweave.ir.liveness import peak_bytes
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_rank
from meshweave.overlap import OverlapReport
from meshweave.overlap.decide import NoOrderError
from meshweave.overlap.step import Scheduling, overlap_roles
from meshweave.report.tables import bytes_text
from meshweave.sharding.sums import sum_bytes
from meshweave.simulate.step import SimulateOptions, simulate_roles


@dataclass(frozen=True, slots=True)
class Passes:
    """Which passes a program goes through, in this order; None: not at all."""

    split: SplitOptions | None = None
    decompose: DecomposeOptions | None = None
    scheduling: Scheduling | None = None

    @property
    def asks_costs(self) -> bool:
        by_gain = [one for one in (self.split, self.decompose) if one is not None and one.when == "gain"]
        return self.scheduling is not None or bool(by_gain)

    def room(self, profile: Costs) -> int | None:
        """Bytes that a device may hold: the cap, else what the machine has; None where neither is known."""
        if self.scheduling is not None and self.scheduling.memory_cap_bytes is not None:
            return self.scheduling.memory_cap_bytes
        return None if profile.usable_bytes is None else int(profile.usable_bytes)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to write a program. `seconds` are those of the simulated step, scheduled as asked; `reason` says why it
    has none."""

    name: str
    seconds: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.reason or f'{self.seconds * 1e3:,.3f} ms'}"


@dataclass(frozen=True, slots=True)
class Optimized:
    """A program's roles, and what they were before: as expanded, and as the scheduler got them (the same, where nothing
    was split or taken apart). `splits`, `rings` and `overlap` say per role what the passes did, where they ran;
    `variants` which ways to write the program were compared, where several were."""

    roles: tuple[RankGraph, ...]
    expanded: tuple[RankGraph, ...]
    unscheduled: tuple[RankGraph, ...]
    splits: tuple[SplitReport, ...] = ()
    rings: tuple[DecomposeReport, ...] = ()
    overlap: tuple[OverlapReport, ...] = ()
    name: str = "as it is"
    variants: tuple[Variant, ...] = ()


def splitting_of(asked: bool | int | SplitOptions | None) -> SplitOptions | None:
    """How rows are split; None: not at all. Raises MeshweaveError for what says neither."""
    if asked is None or asked is False:
        return None
    if isinstance(asked, SplitOptions):
        return asked
    if asked is True:
        return SplitOptions()
    if not isinstance(asked, int):
        raise MeshweaveError(
            "split says neither whether nor how", got=repr(asked), expected="True, False, a number or SplitOptions(...)"
        )
    return SplitOptions((asked,))


def accumulated(
    expanded: Callable[[str], tuple[StepGraph, tuple[RankGraph, ...]]], microbatches: int, where: str, room: int | None
) -> tuple[StepGraph, tuple[RankGraph, ...], str]:
    """A program whose microbatches' gradients are added up `where` it is asked for, and what to say of that.

    `expanded(where)` places and expands it. "auto" is whole, unless a device would hold more than `room` bytes then.
    """
    placed, roles = expanded("whole" if where == "auto" else where)
    if microbatches == 1:
        return placed, roles, ""
    whole, stored = sum_bytes(placed)
    how = f"gradients of {microbatches} microbatches are added up"
    if whole == stored:
        return placed, roles, f"{how} in {bytes_text(whole)} a device and reduced once a step"
    if where == "auto" and room is not None and (peak := max(map(peak_bytes, roles))) > room:
        placed, roles = expanded("shards")
        asked = f"whole they would need {bytes_text(peak)} a device of {bytes_text(room)}"
        return placed, roles, f"{how} in shards, reduced in each microbatch: {asked}"
    if where == "shards":
        return placed, roles, f"{how} in shards, reduced in each microbatch, as asked"
    return placed, roles, f"{how} whole, in {bytes_text(whole)} a device, and reduced once a step"


def optimize(
    placed: StepGraph,
    roles: tuple[RankGraph, ...],
    mesh: Mesh,
    profile: Costs,
    passes: Passes,
    microbatches: int = 1,
    progress: Callable[[str], None] = lambda stage: None,
) -> Optimized:
    """The roles of a program behind its passes, proven.

    What is split or taken apart by gain is so only if the whole step, scheduled as asked, is simulated faster and stays
    under the cap: of all variants the fastest is taken. Raises MeshweaveError for costs that the passes cannot do with,
    and what `overlap_roles` raises.
    """
    if passes.asks_costs:
        if not isinstance(profile, MachineProfile):
            raise MeshweaveError(
                "to overlap communication with compute needs the costs of both",
                got=type(profile).__name__,
                expected='a machine profile: profile="h100", another name or a file',
            )
        profile.check_mesh(mesh)
    found = list(_variants(roles, profile, passes, progress))
    if passes.scheduling is not None:
        progress("schedule")
    if len(found) == 1:
        chosen = _scheduled(placed, found[0], profile, passes.scheduling, microbatches)
    else:
        chosen = _fastest(placed, found, profile, passes.scheduling, microbatches)
    if chosen.roles is not chosen.expanded:
        prove(placed, chosen)
    return chosen


def _variants(
    roles: tuple[RankGraph, ...], profile: Costs, passes: Passes, progress: Callable[[str], None]
) -> Iterator[Optimized]:
    """The ways to write a program: with rows whole and in chunks, each with collectives whole and taken apart. What is
    asked for always is in all of them."""
    found = [Optimized(roles, roles, roles)]
    if passes.split is not None:
        progress("split")
        found = list(_split(found[0], passes.split))
    for one in found:
        if passes.decompose is None:
            yield one
            continue
        progress("decompose")
        made = [decompose(role, profile, passes.decompose) for role in one.roles]
        rings = tuple(report for _, report in made)
        is_apart = any(report.num_taken for report in rings)
        if passes.decompose.when == "gain" or not is_apart:
            yield replace(one, rings=rings) if not is_apart else one
        if is_apart:
            apart = tuple(role for role, _ in made)
            name = f"{one.name}, collectives taken apart"
            yield replace(one, roles=apart, unscheduled=apart, rings=rings, name=name)


def _split(whole: Optimized, options: SplitOptions) -> Iterator[Optimized]:
    counts = options.num_chunks[:1] if options.when == "always" else options.num_chunks
    reports: tuple[SplitReport, ...] = ()
    made = []
    for count in counts:
        halves = [split_role(role, count) for role in whole.roles]
        reports = tuple(report for _, report in halves)
        if any(report.is_taken for report in reports):
            roles = tuple(role for role, _ in halves)
            name = f"rows in {count} chunks"
            made.append(replace(whole, roles=roles, unscheduled=roles, splits=reports, name=name))
    if options.when == "gain" or not made:
        yield replace(whole, splits=reports) if not made else whole
    yield from made


def _fastest(
    placed: StepGraph, found: list[Optimized], profile: Costs, scheduling: Scheduling | None, microbatches: int
) -> Optimized:
    """The fastest of several variants, the first of equals; it says of the others why they were not taken."""
    assert isinstance(profile, MachineProfile)
    options = SimulateOptions(microbatches=microbatches)
    made: list[tuple[float, Optimized]] = []
    variants: list[Variant] = []
    unfit: NoOrderError | None = None
    for one in found:
        try:
            done = _scheduled(placed, one, profile, scheduling, microbatches)
        except NoOrderError as error:
            unfit = unfit or error
            variants.append(Variant(one.name, reason="does not fit under the cap"))
            continue
        seconds = simulate_roles(done.roles, profile, options).seconds
        made.append((seconds, done))
        variants.append(Variant(one.name, seconds))
    if not made:
        assert unfit is not None
        raise unfit
    best = min(made, key=lambda item: item[0])[1]
    reason = "the whole step is not faster with it: " + "; ".join(map(str, variants))
    splits = best.splits or next((one.splits for one in found if one.splits), ())
    rings = best.rings or next((one.rings for one in found if one.rings), ())
    return replace(
        best,
        splits=best.splits or tuple(replace(r, is_taken=False, reason=reason) if r.is_taken else r for r in splits),
        rings=best.rings or tuple(report.left(reason) for report in rings),
        variants=tuple(variants),
    )


def _scheduled(
    placed: StepGraph, one: Optimized, profile: Costs, scheduling: Scheduling | None, microbatches: int
) -> Optimized:
    if scheduling is None:
        return one
    assert isinstance(profile, MachineProfile)
    roles, reports = overlap_roles(one.unscheduled, profile, scheduling, microbatches, placed)
    return replace(one, roles=roles, overlap=reports)


def prove(placed: StepGraph, one: Optimized) -> tuple[Completeness, DeadlockFreedom]:
    """Raise VerifyError for the first thing that a pass did wrong; else say what was proven of the program.

    Merged collectives and gathers of the next step are taken apart and back, and the step is replayed. Chunks are no
    form that the replay knows: there it is done on the roles as expanded; that all chunks of rings meet their places,
    and that the scheduler changed nothing but order and buckets, is proven by itself.
    """
    prologues = [role.prologue for role in one.roles if role.prologue is not None]
    for role in (*one.roles, *prologues):
        verify_rank(role)
    if one.unscheduled is one.expanded:
        complete = check_complete(placed, one.roles)
    else:
        complete = check_complete(placed, one.expanded)
        for before, after in zip(one.unscheduled, one.roles, strict=True):
            prove_rings(before)
            check_same(before, after)
    if prologues:
        check_deadlock(prologues)
    return complete, check_deadlock(one.roles)
