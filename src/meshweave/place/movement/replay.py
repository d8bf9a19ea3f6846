"""replay: proves that the steps of a plan take a value from its source's pieces to its target's, without tensors.

What every device has after each step follows from the step's kind, dims and axes (`meshweave.replay`); the layouts
between the first and the last are not used. Only messages name boxes of the global index space: for them the step's
layouts say where a device's array should be, and the contents whether it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir.layout import Layout
from meshweave.ir.routes import Routes, routes, routes_within
from meshweave.place.movement.plan import MovePlan
from meshweave.place.movement.steps import REDUCTIONS, Kind, Step, apply
from meshweave.replay.communication import Groups, check_messages, embed_pieces, groups_among, join, reduce
from meshweave.replay.holdings import Holding, check_is, holding_of, keep_first, keep_part, pending_of, scaled

FindRoutes = Callable[[Step, tuple[int, ...]], Routes]


def prove_plan(plan: MovePlan, shape: Sequence[int]) -> MovePlan:
    """The plan, after a replay at its first use. Raises VerifyError for a plan that does not do what it claims."""
    return _prove(plan, tuple(shape))


@lru_cache(maxsize=16384)
def _prove(plan: MovePlan, shape: tuple[int, ...]) -> MovePlan:
    replay(plan, shape)
    return plan


def routes_of_step(step: Step, shape: tuple[int, ...]) -> Routes:
    """The messages of a transfer or a permute."""
    if step.kind == "transfer":
        return routes(step.source, step.target, shape)
    return routes_within(step.source, step.target, shape, step.axes)


def replay(plan: MovePlan, shape: Sequence[int], find_routes: FindRoutes = routes_of_step) -> None:
    """Raise VerifyError unless the steps take every element from the source's pieces to the target's.

    At the end each device must have its piece of the target in order, with every contribution but those along the
    target's partial axes, and averages scaled. The steps must also reduce in a sound order, and state the layouts that
    they lead through. Messages (from `find_routes`) must send each device of the target every element of its piece
    once, from a device that has it: in a transfer complete, in a permute from its own group.
    """
    shape = tuple(shape)
    source, target = plan.source.normalized(shape), plan.target.normalized(shape)
    holding = holding_of(source, shape, source.mesh.devices)
    for number, step in enumerate(plan.steps, 1):
        try:
            if step.kind in ("transfer", "permute"):
                holding = _deliver(holding, step, shape, find_routes(step, shape))
            else:
                holding = _RUN[step.kind](holding, groups_among(step.source.mesh, step.axes, holding.devices), step)
        except MeshweaveError as error:
            where = f"step {number}: {step}" + (f", {error.where}" if error.where else "")
            raise VerifyError(error.what, where=where, got=error.got, expected=error.expected) from error
    _check_end(holding, source, target, shape)
    _check_order(plan.steps, source)
    _check_layouts(plan.steps, source, target, shape)


def _deliver(holding: Holding, step: Step, shape: tuple[int, ...], routing: Routes) -> Holding:
    """The contents after all messages of a transfer or a permute; an average may be scaled before or after it."""
    source, target = step.source, step.target
    check_is(replace(holding, owed=pending_of(source)[1]), source, shape)
    check_messages(source, target, shape, step.axes, routing.messages)
    return replace(holding_of(target, shape, target.mesh.devices), owed=holding.owed)


def _all_to_all(holding: Holding, groups: Groups, step: Step) -> Holding:
    """Cutting and joining along different dims commute."""
    if step.to_dim in (None, step.dim) or sorted(step.to_axes) != sorted(step.axes):
        raise VerifyError("has no dim to scatter, or other axes")
    return keep_part(join(holding, groups, step.dim), step.to_dim, groups.mesh, step.to_axes, step.unit)


def _to_partial(holding: Holding, groups: Groups, step: Step) -> Holding:
    if step.dim < 0:
        return keep_first(holding, groups.mesh, step.axes, step.op)
    return embed_pieces(holding, groups, step.dim, step.op)


def _cut(holding: Holding, groups: Groups, step: Step) -> Holding:
    return keep_part(holding, step.dim, groups.mesh, step.axes, step.unit)


_RUN: dict[Kind, Callable[[Holding, Groups, Step], Holding]] = {
    "slice": _cut,
    "reduce_scatter": lambda holding, groups, step: _cut(reduce(holding, groups, step.op), groups, step),
    "all_reduce": lambda holding, groups, step: reduce(holding, groups, step.op),
    "scale": lambda holding, groups, step: scaled(holding, step.factor),
    "all_to_all": _all_to_all,
    "all_gather": lambda holding, groups, step: join(holding, groups, step.dim),
    "to_partial": _to_partial,
}


def _check_end(holding: Holding, source: Layout, target: Layout, shape: tuple[int, ...]) -> None:
    where = f"{source} -> {target}"
    if sorted(holding.devices) != sorted(target.mesh.devices):
        raise VerifyError(
            "the steps do not lead to the devices of the target",
            where=where,
            got=f"devices {sorted(holding.devices)}",
            expected=f"devices {sorted(target.mesh.devices)}",
        )
    try:
        check_is(holding, target, shape)
    except VerifyError as error:
        raise VerifyError(
            f"the steps do not lead to the target: {error.what}", where=where, got=error.got, expected=error.expected
        ) from error


def _check_order(steps: Sequence[Step], source: Layout) -> None:
    """A reduction runs on the source's mesh, and only while every replicated axis was replicated in the source. A value
    that is not partial has no reductions."""
    reductions = [step for step in steps if step.kind in REDUCTIONS]
    twins = set(source.replicated_axes)
    for step in reductions:
        if step.source.mesh != source.mesh:
            raise VerifyError(
                "a value is reduced on another mesh than its own",
                where=str(step),
                got=f"mesh {step.source.mesh}",
                expected=f"mesh {source.mesh}",
            )
        if not source.partial:
            raise VerifyError(
                "a value that is not partial is summed",
                where=str(step),
                got=str(source),
                expected="steps that only move data, which keep the sign of -0.0",
            )
        lost = [axis for axis in step.source.replicated_axes if axis not in twins and source.mesh.size(axis) > 1]
        if lost:
            raise VerifyError(
                "a reduction runs where replicas would add in different orders",
                where=str(step),
                got=f"{', '.join(lost)} replicated before it",
                expected=f"only axes replicated in {source}",
            )


def _check_layouts(steps: Sequence[Step], source: Layout, target: Layout, shape: Sequence[int]) -> None:
    layout = source
    for step in steps:
        after = apply(layout, step).normalized(shape)
        if (step.source, step.target) != (layout, after):
            raise VerifyError(
                "the step states other layouts than it has",
                where=str(step),
                got=f"{step.source} -> {step.target}",
                expected=f"{layout} -> {after}",
            )
        layout = after
    if layout != target:
        raise VerifyError("the steps end elsewhere", where=str(source), got=str(layout), expected=str(target))
