"""Build the program of a training step from a model: capture, placement, movement, expansion and passes. The verifier
runs after each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

from meshweave.capture.contract import Contract
from meshweave.capture.optimizers import OptimizerSpec
from meshweave.capture.step import CaptureOptions, StepSource, capture_source
from meshweave.check.same import check_same
from meshweave.cost.hardware import Costs
from meshweave.errors import MeshError, PlanError
from meshweave.expert_chunks import built_in_chunks
from meshweave.ir.graph import Spec, StepGraph
from meshweave.ir.layout import Layout
from meshweave.ir.liveness import peak_bytes
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph, prepared_values
from meshweave.ir.verify import verify_placed, verify_rank, verify_step
from meshweave.microbatches import MicrobatchStep, capture_microbatch
from meshweave.optimize.batch_split.blocks import in_blocks
from meshweave.optimize.batch_split.captured import by_expert, share_ends
from meshweave.optimize.overlap.decide import NoOrderError
from meshweave.optimize.overlap.driver import without_collector
from meshweave.optimize.prefetch import delay_gradient_waits, gather_once
from meshweave.passes import CapturedProgram, PassList, Recompute, RingAttention
from meshweave.passes.optimize import optimize
from meshweave.pipeline import PipelineChoice, turns_of_pairs
from meshweave.place.assign import Price
from meshweave.place.balance import balance_sequence, takes_heads
from meshweave.place.decide import Placement, Units, decide, infer_units
from meshweave.place.expand.expand import expand
from meshweave.place.hooks import pinning
from meshweave.place.mapping import Homes, axes_of_operators, map_devices
from meshweave.place.movement.arrange import PlanMove, arrange
from meshweave.place.movement.dispatch import make_sparse
from meshweave.place.movement.own_sums import own_sums
from meshweave.place.movement.plan import plan_move
from meshweave.place.movement.replay import prove_plan
from meshweave.place.place import place
from meshweave.place.plans import Plan, Resolved
from meshweave.place.rates import Rates, rates_of
from meshweave.place.resolve import check_axes, resolve
from meshweave.place.row_lookups import check_own_rows
from meshweave.place.search import choose_tp, with_short_updates
from meshweave.place.sequences import keep_sequences_apart
from meshweave.place.stages import assign_stages, number_stages
from meshweave.place.sums import sum_bytes
from meshweave.program import PlanInputs, Planned, Program
from meshweave.report.tables import bytes_text
from meshweave.stored import storage_of

# A sum over n devices is proven with a set of n bits on each: 7 s for an MLP on 8,192 devices, minutes on 65,536 (2
# cores, 2026-11).
MAX_DEVICES = 1 << 16

_MOST_DECISIONS = 1 << 14  # of ops: those of hundreds of sizes

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """What a step is compiled for: the mesh, the plan (None: the default plan of the mesh's axes), and the costs by
    which moves are chosen. `own_parts`: of how many ranks the rows of a batch are; 1 if all pass the same. `decided`:
    what was decided for ops, which programs of other sizes mostly have, too."""

    mesh: Mesh
    plan: Plan | None
    costs: Costs
    own_parts: int = 1
    decided: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    fits: Callable[[int], bool] | None = field(default=None, compare=False, repr=False)


def move_price(planner: PlanMove) -> Price:
    """Seconds of a move, from its plan."""

    @cache
    def price(source: Layout, target: Layout, spec: Spec) -> float:
        return planner(source, target, spec.shape, spec.dtype).seconds

    return price


def _planner(costs: Costs, device_bytes: int | None) -> PlanMove:
    return lambda source, target, shape, dtype: plan_move(
        source, target, shape, dtype, costs, device_bytes=device_bytes
    )


def _proving(planner: PlanMove) -> PlanMove:
    """The planner, which proves each plan before its first use."""
    return lambda source, target, shape, dtype: prove_plan(planner(source, target, shape, dtype), shape)


@without_collector()
def build_program(
    source: StepSource,
    example: Any,
    optimizer: OptimizerSpec | None,
    target: Target,
    options: CaptureOptions,
    pass_list: PassList | None = None,
    progress: Progress = lambda stage: None,
    like: Program | None = None,
) -> Program:
    """Capture, place, plan, expand, optimize; the verifier runs after each stage and after every pass of `pass_list`.
    `progress(stage)` is called as a stage begins. `like` is a program of the same model whose state the new program
    shares: its choices and parameter layouts are kept. Raises MeshError for more than MAX_DEVICES devices."""
    check_size(target.mesh)
    progress("capture")
    resolved = resolve(target.plan, source.model, target.mesh)
    known = None if like is None else like.contract
    step = capture_step(source, example, optimizer, resolved, options, target.own_parts, known)
    return build_captured(step, resolved, target, options, pass_list or PassList(), progress, like)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured step, and what it was captured from."""

    step: MicrobatchStep
    source: StepSource
    optimizer: OptimizerSpec | None


def capture_step(
    source: StepSource,
    example: Any,
    optimizer: OptimizerSpec | None,
    resolved: Resolved,
    options: CaptureOptions,
    own_parts: int = 1,
    like: Contract | None = None,
) -> CapturedStep:
    """The step on a microbatch of `example`, which has the rows of `own_parts` ranks. Of a plan only its pins enter.
    `like` is the contract of the step for other sizes, if there is one."""
    capture = partial(capture_source, replace(source, hooks=pinning(resolved)), optimizer=optimizer, like=like)
    step = capture_microbatch(capture, example, options, own_parts)
    if own_parts > 1:
        check_own_rows(step.captured, own_parts)
    return CapturedStep(step, source, optimizer)


@without_collector()
def build_captured(
    given: CapturedStep,
    resolved: Resolved,
    target: Target,
    options: CaptureOptions,
    pass_list: PassList,
    progress: Progress,
    like: Program | None = None,
) -> Program:
    """What `build_program` makes of a captured step, whose nodes then have the numbers of their stages. `resolved` is
    the plan of `target`, read for the model; its layers are put on stages here."""
    step, model, mesh, costs = given.step, given.source.model, target.mesh, target.costs
    captured, contract = step.captured, step.contract
    pipeline = options.pipeline if options.part == "train" else None
    placing = _PlacementStage(target, pass_list.room(costs), options.accumulate)
    named = axes_of_operators(verify_step(captured), mesh)
    usual = range if pipeline is None else pipeline.ranks_of_stages
    assign_stages(captured, resolved, model, mesh, named, usual)
    captured, sequence = _arrange_sequence(captured, resolved, placing)
    check_axes(resolved, mesh, named)
    progress("place")
    units = infer_units(captured)
    resolved = _choose_styles(captured, given.source, resolved, named, units, placing, like)
    lasting = None if like is None else like.placement
    inputs = PlanInputs(
        captured=captured,
        mesh=mesh,
        resolved=resolved,
        costs=costs,
        options=options,
        pass_list=_with_ring(pass_list if like is None else pass_list.following(like.optimized.rewrites), resolved),
        lasting=lasting,
    )
    planned, trouble = _stored(inputs, partial(_plan, inputs, units, placing, progress), progress)
    ahead = None if step.ahead is None else _ahead_program(step.ahead, contract, inputs, placing)
    return Program(
        **{each.name: getattr(planned, each.name) for each in fields(planned)},
        options=options,
        contract=contract,
        optimizer=given.optimizer,
        recompute=next((each.policy for each in pass_list.passes if isinstance(each, Recompute)), "none"),
        resolved=resolved,
        sequence=sequence,
        rows=step.rows,
        ahead=ahead,
        coupling=step.coupling,
        **_scheduled(pipeline, inputs, planned.optimized.roles),
        storage=trouble,
    )


def _scheduled(pipeline: PipelineChoice | None, inputs: PlanInputs, roles: tuple[RankGraph, ...]) -> dict[str, Any]:
    """The schedule of the stages, and how its pairs take turns."""
    if pipeline is None:
        return {}
    count, costs = inputs.options.accumulate, inputs.costs
    schedule = pipeline.for_step(roles, count, costs, inputs.pass_list.memory_cap_bytes)
    return {"pipeline": schedule, "pairs": turns_of_pairs(roles, schedule, count, costs)}


def _say_nothing(stage: str) -> None:
    """The progress of a program that is part of another."""


def _ahead_program(step: StepGraph, contract: Contract, inputs: PlanInputs, placing: _PlacementStage) -> Program:
    """The program of what microbatches need of the whole batch."""
    options = replace(inputs.options, accumulate=1, part="outputs")
    pass_list = PassList(recalls=inputs.pass_list.recalls)
    own = replace(inputs, captured=step, options=options, pass_list=pass_list, lasting=None)
    placing = replace(placing, microbatches=1)
    planned, _ = _stored(own, partial(_plan, own, infer_units(step), placing, _say_nothing), _say_nothing)
    return Program(
        **{each.name: getattr(planned, each.name) for each in fields(planned)}, options=options, contract=contract
    )


@dataclass(slots=True)
class _PlacementStage:
    """Lays out steps on a mesh. Equal ops are decided once, in all steps."""

    target: Target
    room: int | None
    microbatches: int
    planner: PlanMove = field(init=False)
    price: Price = field(init=False)
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self.planner = _planner(self.target.costs, self.room)
        self.price = move_price(self.planner)
        self.rates = rates_of(self.target.costs)

    @property
    def mesh(self) -> Mesh:
        return self.target.mesh

    def homes(self, step: StepGraph, resolved: Resolved) -> Homes:
        return map_devices(step, resolved.homes, self.mesh, resolved.stages)

    def place(self, step: StepGraph, placement: Placement) -> StepGraph:
        decided = self.target.decided
        if len(decided) > _MOST_DECISIONS:
            decided.clear()
        return place(step, placement, price=self.price, rates=self.rates, decided=decided)

    def place_by(self, step: StepGraph, resolved: Resolved, units: Units) -> Callable[[Resolved], StepGraph]:
        """The step as plans that differ from `resolved` in styles of weights lay it out, to choose among them."""
        homes = self.homes(step, resolved)
        return lambda plan: self.place(step, decide(plan, step, self.mesh, units, homes, self.microbatches))


def _arrange_sequence(captured: StepGraph, resolved: Resolved, placing: _PlacementStage) -> tuple[StepGraph, str]:
    """The step with its sequence dim split off and reordered so that devices have equal work; also the order and its
    reason."""
    if not resolved.context_axes:
        return captured, ""
    apart = verify_step(keep_sequences_apart(captured, resolved.context_axes))

    def exchanges_heads() -> bool:
        return takes_heads(placing.place_by(apart, resolved, infer_units(apart))(resolved), resolved.context_axes)

    step, sequence = balance_sequence(apart, resolved, placing.mesh, exchanges_heads)
    return verify_step(step), sequence


def _choose_styles(
    captured: StepGraph,
    source: StepSource,
    resolved: Resolved,
    named: Collection[str],
    units: Units,
    placing: _PlacementStage,
    like: Program | None,
) -> Resolved:
    """The plan with a style for each weight that it leaves open, as in `like` if that is not None. Without a plan,
    operators in the model keep the axes that they use (`named`)."""
    if like is not None and like.resolved is not None:
        return like.resolved
    axes = [axis for axis in resolved.auto_axes if not (resolved.is_default and axis in named)]
    if not axes:
        return resolved
    place_by = placing.place_by(with_short_updates(captured), resolved, units)
    for axis in axes:
        resolved = choose_tp(source.model, resolved, axis, place_by, placing.price)
    return resolved


def _plan(inputs: PlanInputs, units: Units, placing: _PlacementStage, progress: Progress) -> Planned:
    """The stages after capture. They read `inputs` alone: the other arguments follow from these."""
    cuts = {name: tuple(dims.values()) for name, dims in inputs.resolved.shards.items()}
    step = inputs.pass_list.captured(CapturedProgram(inputs.captured, cuts), inputs.costs, progress)
    num_devices = inputs.mesh.flat_size(inputs.resolved.cutting_batch(inputs.mesh))
    build = partial(_planned, inputs, units, placing, progress)
    return built_in_chunks(build, step, inputs.pass_list, inputs.costs, num_devices, inputs.options.accumulate)


def _planned(
    inputs: PlanInputs, units: Units, placing: _PlacementStage, progress: Progress, step: StepGraph, pass_list: PassList
) -> Planned:
    """The program of a step: its ops on rows of experts in forms that devices can share (lookups by expert, rows in
    blocks, equal ends as a single value), placed, expanded, and optimized by the passes of `pass_list`."""
    mesh, resolved, costs, options = inputs.mesh, inputs.resolved, inputs.costs, inputs.options
    step = in_blocks(by_expert(step, resolved.stacked(mesh)), mesh.flat_size(resolved.data_axes(mesh)))
    step, homes = share_ends(step, placing.homes(step, resolved))
    number_stages(step, homes, resolved)
    placement = decide(resolved, step, mesh, units, homes, options.accumulate)
    placement = placement if inputs.lasting is None else placement.keeping(inputs.lasting)

    def expanded(accumulate_in: str, casts_once: bool) -> tuple[StepGraph, tuple[RankGraph, ...]]:
        placed = placing.place(step, replace(placement, accumulate_in=accumulate_in, casts_once=casts_once))
        placed = arrange(placed, placing.planner, reduce_after_cast=options.precision.reduce_after_cast)
        placed = make_sparse(own_sums(placed), placing.planner, placing.rates)
        progress("expand")
        roles = pass_list.expanded(expand(verify_placed(placed), mesh, _proving(placing.planner)), costs)
        return placed, tuple(verify_rank(delay_gradient_waits(role)) for role in roles)

    failed: NoOrderError | None = None
    room = _Room(placing.room, placing.target.fits)
    share = 0.5 if pass_list.of("ordered") else 1.0
    for placed, roles, note in _accumulated(expanded, options, resolved.accumulate_in, room, share):
        try:
            optimized = optimize(placed, roles, costs, pass_list, options.accumulate, progress)
        except NoOrderError as error:
            failed = error
            continue
        return Planned(captured=step, placed=placed, optimized=optimized, placement=placement, accumulation=note)
    assert failed is not None
    raise failed


@dataclass(frozen=True, slots=True)
class _Room:
    """The memory of a device; None if it is unknown. `fits` decides in its place, if it is not None."""

    bytes: int | None
    fits: Callable[[int], bool] | None

    def holds(self, roles: tuple[RankGraph, ...]) -> bool:
        if self.fits is not None:
            return self.fits(max(map(peak_bytes, roles)))
        return self.bytes is None or max(map(peak_bytes, roles)) <= self.bytes


def _accumulated(
    expanded: Callable[[str, bool], tuple[StepGraph, tuple[RankGraph, ...]]],
    options: CaptureOptions,
    of_plan: str,
    room: _Room,
    share: float,
) -> Iterator[tuple[StepGraph, tuple[RankGraph, ...], str]]:
    """Programs that add up gradients of microbatches as the options ask, else the plan, with a sentence about that;
    every one needs less memory than the one before it. `share`: of what is free, for parameters that are gathered once
    a step: passes that order the step need the rest.

    `expanded(where, casts_once)` places and expands a program. "auto" is whole, with gathers of parameters once a step
    as far as memory allows; then with casts of parameters in every microbatch; then in shards.
    """
    microbatches, asked = options.accumulate, options.precision.accumulate_in
    where = of_plan if asked == "auto" else asked
    if of_plan not in ("auto", where):
        raise PlanError(
            "the plan and the precision add up gradients of microbatches in different places",
            got=f'{"zero1" if of_plan == "whole" else "zero2"} ("{of_plan}") and accumulate_in="{asked}"',
            hint="leave out accumulate_in, or take the other stage of ZeRO",
        )
    first = "whole" if where == "auto" else where
    placed, roles = expanded(first, True)
    if microbatches == 1:
        yield placed, roles, ""
        return
    whole, stored = sum_bytes(placed)
    how = f"gradients of {microbatches} microbatches are added up"
    note = f"{how} whole, in {bytes_text(whole)} a device, and reduced once a step"
    if first == "shards":
        note = f"{how} in shards, reduced in each microbatch, as asked"
    elif whole == stored:
        note = f"{how} in {bytes_text(whole)} a device and reduced once a step"

    has_room = room.holds(roles)
    if first == "whole" and has_room:
        once, gathers = _gathered_once(roles, room, share)
        if gathers:
            yield placed, once, f"{note}; {gathers}"
    has_less, is_prepared = where == "auto" and whole != stored, any(prepared_values(role.graph) for role in roles)
    if has_room or not (has_less or is_prepared):
        yield placed, roles, note
    if is_prepared:
        placed, roles = expanded(first, False)
        if room.holds(roles) or not has_less:
            yield placed, roles, note
    if has_less and room.bytes is not None:
        too_much = f"whole they would need more than {bytes_text(room.bytes)} a device"
        how = f"{how} in shards, reduced in each microbatch: {too_much}"
        yield *expanded("shards", False), how


def _gathered_once(roles: tuple[RankGraph, ...], room: _Room, share: float) -> tuple[tuple[RankGraph, ...], str]:
    """Roles that gather parameters in the first microbatch for all, as far as they fit into this share of the memory
    that is free, and a clause about that; an empty one if there are none."""

    def limit_of(peak: int) -> float:
        if room.bytes is None or room.fits is not None:
            return math.inf
        return peak + share * (room.bytes - peak)

    new, counts, totals = zip(*(gather_once(role, limit_of) for role in roles), strict=True)
    for before, after in zip(roles, new, strict=True):
        if after is not before:
            check_same(before, verify_rank(after))
    once, of = sum(counts), sum(totals)
    if once < of:
        return new, f"{once} of {of} gathers of parameters are made once a step: more have no room" if once else ""
    return new, "parameters are gathered once a step" if of else ""


def _stored(inputs: PlanInputs, plan: Callable[[], Planned], progress: Progress) -> tuple[Planned, str]:
    """The program of an earlier start with the same inputs, else a new one, which the next start may load; and why a
    program on disk was of no use, or why there can be none."""
    storage, trouble = storage_of(inputs)
    if storage is None:
        return plan(), f"the program is not stored for the next start: {trouble}" if trouble else ""
    progress("load")
    planned, trouble = storage.read()
    if planned is not None:
        number_stages(planned.captured, planned.placement.homes, inputs.resolved)  # not stored
        return planned, ""
    planned = plan()
    progress("store")
    troubles = [text for text in (trouble, storage.write(planned)) if text]
    return planned, f"the program was built anew: {'; '.join(troubles)}" if troubles else ""


def check_size(mesh: Mesh) -> None:
    """Raise MeshError for more than MAX_DEVICES devices."""
    if mesh.num_devices > MAX_DEVICES:
        raise MeshError(
            "the mesh is too large to be planned and proven",
            where=f"mesh {mesh}",
            got=f"{mesh.num_devices:,} devices",
            expected=f"at most {MAX_DEVICES:,}",
            hint="plan a smaller mesh with the same axes: a device computes and sends about as much for any number of "
            "data-parallel devices",
        )


def _with_ring(pass_list: PassList, resolved: Resolved) -> PassList:
    """The passes with ring attention, if the plan asks for it, or leaves it open and variants are compared anyway."""
    if resolved.attention == "ring":
        return pass_list.having(RingAttention("always"))
    is_open = resolved.context_axes and resolved.attention == "auto"
    names = [each_pass.name for each_pass in pass_list.passes]
    is_compared = any(each_pass.is_compared for each_pass in pass_list.of("written"))
    return pass_list.having(RingAttention()) if is_open and is_compared and "ring" not in names else pass_list
