"""Build the program of a training step from a model: capture, placement, movement, expansion and passes. The verifier
runs after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from meshweave.capture.batch import Batch
from meshweave.capture.optimizers import OptimizerSpec
from meshweave.capture.step import CaptureOptions, StepSource, capture_source
from meshweave.errors import MeshError
from meshweave.expand.expand import expand
from meshweave.expert_chunks import built_in_chunks
from meshweave.gathers import settle
from meshweave.hardware import Costs
from meshweave.ir.graph import Spec, StepGraph
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_placed, verify_rank, verify_step
from meshweave.movement.arrange import PlanMove, arrange
from meshweave.movement.dispatch import dispatched
from meshweave.movement.own_sums import own_sums
from meshweave.movement.plan import plan_move
from meshweave.movement.replay import proven
from meshweave.passes import CapturedProgram, Pipeline, Recompute, RingAttention
from meshweave.passes.accumulate import accumulated
from meshweave.passes.pipeline import optimize
from meshweave.program import PlanInputs, Planned, Program
from meshweave.rows.blocks import in_blocks
from meshweave.rows.ends import share_ends
from meshweave.rows.tables import by_expert
from meshweave.schedule.order import without_collector
from meshweave.sharding.assign import Price
from meshweave.sharding.balance import balanced, takes_heads
from meshweave.sharding.decide import Units, decide, infer_units
from meshweave.sharding.hooks import pinning
from meshweave.sharding.mapping import axes_of_operators, map_devices
from meshweave.sharding.place import place
from meshweave.sharding.plans import Plan, Resolved
from meshweave.sharding.rates import rates_of
from meshweave.sharding.resolve import check_axes, resolve, usual_stages
from meshweave.sharding.search import choose_tp
from meshweave.sharding.sequences import keep_sequences_apart
from meshweave.stored import storage_of

# A sum over n devices is proven with a set of n bits on each: 7 s for an MLP on 8,192 devices, minutes on 65,536 (2
# cores, 2026-11).
MAX_DEVICES = 1 << 16

Progress = Callable[[str], None]
Placing = Callable[..., StepGraph]  # `place` with these costs


@dataclass(frozen=True, slots=True)
class Target:
    """What a step is compiled for: the mesh, the plan (None: the default plan of the mesh's axes), and the costs by
    which moves are chosen."""

    mesh: Mesh
    plan: Plan | None
    costs: Costs


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
    return lambda source, target, shape, dtype: proven(planner(source, target, shape, dtype), shape)


@without_collector()
def build_program(
    source: StepSource,
    example: Any,
    optimizer: OptimizerSpec | None,
    target: Target,
    options: CaptureOptions,
    pipeline: Pipeline | None = None,
    progress: Progress = lambda stage: None,
    like: Program | None = None,
) -> Program:
    """Capture, place, plan, expand, optimize; the verifier runs after each stage and after every pass of `pipeline`.
    `progress(stage)` is called as a stage begins. `like` is a program of the same model whose state the new program
    shares: its choices and parameter layouts are kept. Raises MeshError for more than MAX_DEVICES devices."""
    pipeline = pipeline or Pipeline()
    mesh, costs = target.mesh, target.costs
    _check_size(mesh)
    progress("capture")
    resolved = resolve(target.plan, source.model, mesh)
    micro = Batch.of(example).micros(options.accumulate)[0]
    captured, contract = capture_source(replace(source, hooks=pinning(resolved)), micro, optimizer, options)
    planner = _planner(costs, pipeline.room(costs))
    price, rates = move_price(planner), rates_of(costs)
    placing = partial(place, price=price, rates=rates, decided={})  # equal ops are decided once, in all placements
    captured, sequence = _with_sequence(verify_step(captured), resolved, mesh, placing)
    resolved, units = _with_choices(resolved, source, captured, mesh, price, placing, progress, like)
    lasting = None if like is None else like.placement
    inputs = PlanInputs(captured, mesh, resolved, costs, options, _with_ring(pipeline, resolved), lasting)
    planned, trouble = _stored(_AfterCapture(inputs, units, planner, placing, progress))
    return Program(
        captured=planned.captured,
        placed=planned.placed,
        optimized=planned.optimized,
        placement=planned.placement,
        options=options,
        contract=contract,
        optimizer=optimizer,
        accumulation=planned.accumulation,
        recompute=_recompute_policy(pipeline),
        resolved=resolved,
        sequence=sequence,
        storage=trouble,
    )


@dataclass(frozen=True, slots=True)
class _AfterCapture:
    """The stages after capture. They read `inputs` alone: the other fields follow from these."""

    inputs: PlanInputs
    units: Units
    planner: PlanMove
    placing: Placing
    progress: Progress

    def run(self) -> Planned:
        it = self.inputs
        cuts = {name: tuple(dims.values()) for name, dims in it.resolved.shards.items()}
        step = it.pipeline.captured(CapturedProgram(it.captured, cuts), it.costs, self.progress)
        num_devices = it.mesh.flat_size(it.resolved.cutting_batch(it.mesh))
        return built_in_chunks(self._planned, step, it.pipeline, it.costs, num_devices, it.options.accumulate)

    def _planned(self, step: StepGraph, pipeline: Pipeline) -> Planned:
        it, options = self.inputs, self.inputs.options
        step = _with_rows(step, it.resolved, it.mesh)
        homes = map_devices(step, it.resolved.homes, it.mesh)
        placement = decide(it.resolved, step, it.mesh, self.units, homes)
        placement = placement if it.lasting is None else placement.keeping(it.lasting)

        def expanded(accumulate_in: str) -> tuple[StepGraph, tuple[RankGraph, ...]]:
            how = replace(placement, accumulate_in=accumulate_in)
            placed = arrange(
                self.placing(step, how), self.planner, reduce_after_cast=options.precision.reduce_after_cast
            )
            placed = dispatched(own_sums(placed), self.planner, rates_of(it.costs))
            self.progress("expand")
            roles = pipeline.expanded(expand(verify_placed(placed), it.mesh, _proving(self.planner)), it.costs)
            return placed, tuple(verify_rank(settle(role)) for role in roles)

        room = pipeline.room(it.costs)
        placed, roles, note = accumulated(expanded, options.accumulate, options.precision.accumulate_in, room)
        optimized = optimize(placed, roles, it.costs, pipeline, options.accumulate, self.progress)
        return Planned(step, placed, optimized, placement, note)


def _stored(stages: _AfterCapture) -> tuple[Planned, str]:
    """The program of an earlier start with the same inputs, else a new one, which the next start may load; and why a
    program on disk was of no use, or why there can be none."""
    storage, trouble = storage_of(stages.inputs)
    if storage is None:
        return stages.run(), f"the program is not stored for the next start: {trouble}" if trouble else ""
    stages.progress("load")
    planned, trouble = storage.read()
    if planned is not None:
        return planned, ""
    planned = stages.run()
    stages.progress("store")
    troubles = [text for text in (trouble, storage.write(planned)) if text]
    return planned, f"the program was built anew: {'; '.join(troubles)}" if troubles else ""


def _check_size(mesh: Mesh) -> None:
    if mesh.num_devices > MAX_DEVICES:
        raise MeshError(
            "the mesh is too large to be planned and proven",
            where=f"mesh {mesh}",
            got=f"{mesh.num_devices:,} devices",
            expected=f"at most {MAX_DEVICES:,}",
            hint="plan a smaller mesh with the same axes: a device computes and sends about as much for any number of "
            "data-parallel devices",
        )


def _with_rows(step: StepGraph, resolved: Resolved, mesh: Mesh) -> StepGraph:
    """The step with its ops on rows of experts in forms that devices can share: lookups by expert, rows in blocks, and
    equal ends as a single value."""
    step = in_blocks(by_expert(step, resolved.stacked(mesh)), mesh.flat_size(resolved.data_axes(mesh)))
    return share_ends(step, partial(map_devices, modules=resolved.homes, mesh=mesh))


def _recompute_policy(pipeline: Pipeline) -> str:
    return next((each_pass.policy for each_pass in pipeline.passes if isinstance(each_pass, Recompute)), "none")


def _with_sequence(captured: StepGraph, resolved: Resolved, mesh: Mesh, placing: Placing) -> tuple[StepGraph, str]:
    """The step with its sequence dim split off and reordered so that devices have equal work; also the order and its
    reason."""
    if not resolved.context_axes:
        return captured, ""
    apart = verify_step(keep_sequences_apart(captured, resolved.context_axes))

    def exchanges_heads() -> bool:
        homes = map_devices(apart, resolved.homes, mesh)
        placed = placing(apart, decide(resolved, apart, mesh, infer_units(apart), homes))
        return takes_heads(placed, resolved.context_axes)

    step, sequence = balanced(apart, resolved, mesh, exchanges_heads)
    return verify_step(step), sequence


def _with_ring(pipeline: Pipeline, resolved: Resolved) -> Pipeline:
    """The pipeline with ring attention, if the plan asks for it, or leaves it open and variants are compared anyway."""
    if resolved.attention == "ring":
        return pipeline.having(RingAttention("always"))
    is_open = resolved.context_axes and resolved.attention == "auto"
    names = [each_pass.name for each_pass in pipeline.passes]
    is_compared = any(each_pass.is_compared for each_pass in pipeline.of("written"))
    return pipeline.having(RingAttention()) if is_open and is_compared and "ring" not in names else pipeline


def _with_choices(
    resolved: Resolved,
    source: StepSource,
    captured: StepGraph,
    mesh: Mesh,
    price: Price,
    placing: Placing,
    progress: Progress,
    like: Program | None,
) -> tuple[Resolved, Units]:
    """The plan with its open choices settled, as in `like` if that is not None, and the units of parameters."""
    model, named = source.model, axes_of_operators(captured, mesh)
    usual_stages(resolved, model, mesh, named)
    check_axes(resolved, mesh, named)
    progress("place")
    units = infer_units(captured)
    if like is not None and like.resolved is not None:
        return like.resolved, units
    homes = map_devices(captured, resolved.homes, mesh)

    def place_with(resolved_choice: Resolved) -> StepGraph:
        return placing(captured, decide(resolved_choice, captured, mesh, units, homes))

    # Without a plan, operators in the model keep the axes that they use.
    for axis in (a for a in resolved.auto_axes if not (resolved.is_default and a in named)):
        resolved = choose_tp(model, captured, resolved, axis, place_with, price)
    return resolved, units
