"""Infers the layouts of an op's results from the sharding rule and the actual layouts of its operands.

The placement is not read: every axis must do a single thing in the op, cut a factor or pass partial values in a linear
mode of the rule, and the layouts of the results follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshweave.errors import VerifyError
from meshweave.ir.graph import Spec
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ops.factors import Dims, Rule

Placed = tuple[Spec, Layout]
Cuts = dict[int, DimSharding]  # factor -> how its loop is cut
Owners = list[tuple[str, int, str]]  # (axis, factor, key), in the form of `Rule.owned`


def infer(
    rule: Rule,
    mesh: Mesh,
    operands: Sequence[Placed],
    results: Sequence[Spec],
    placed_results: Sequence[Layout | None] = (),
) -> tuple[Layout, ...]:
    """Layouts of the results. Raises VerifyError (without a location) if the operands do not fit together.

    Factors that no operand has are cut as in `placed_results`, which also say who owns rows that an op hands out: such
    ops compute any piece on demand, and the caller checks that they are called for these pieces.
    """
    if elsewhere := [layout for _, layout in operands if layout.mesh != mesh]:
        raise VerifyError(
            "operands are on different meshes", got=f"{elsewhere[0]} on {elsewhere[0].mesh}", expected=str(mesh)
        )
    cuts, passed = _cuts(rule, operands), _passing_sums(rule, operands)
    known = {f for dims in rule.operands for dim in dims for f in dim}
    for dims, layout in zip(rule.results, placed_results, strict=False):
        free = {} if layout is None else _dim_cuts(rule, dims, layout)
        cuts |= {f: cut for f, cut in free.items() if f not in known}
    owners = _owners(rule, cuts, [layout for _, layout in operands], placed_results)
    _check_axes(cuts, passed, owners, operands)
    for i, (spec, layout) in enumerate(operands):
        wanted = _layout(rule, rule.operands[i], cuts, mesh, spec)
        if layout.dims != wanted.dims or layout.owned != rule.owned(i, owners):
            wanted = Layout(mesh, wanted.dims, (), rule.owned(i, owners))
            raise VerifyError(f"operand {i} is not cut like the others", got=str(layout), expected=str(wanted))
    return tuple(_result(rule, i, cuts, passed, owners, (mesh, spec)) for i, spec in enumerate(results))


def _result(
    rule: Rule, i: int, cuts: Cuts, passed: dict[str, str], owners: Owners, described: tuple[Mesh, Spec]
) -> Layout:
    inside = {f for dim in rule.results[i] for f in dim}
    owned = rule.owned(len(rule.operands) + i, owners)
    kept = {axis for axis, _, _ in owned}
    partial_axes = [(axis, rule.reduce_op(f)) for f, cut in cuts.items() if f not in inside for axis in cut.axes]
    partial_axes += [(axis, "sum") for axis, f, key in owners if key and f not in inside]
    partial = (*((axis, op) for axis, op in partial_axes if axis not in kept), *passed.items())
    layout = _layout(rule, rule.results[i], cuts, *described)
    return Layout(described[0], layout.dims, partial, owned)


def _owners(rule: Rule, cuts: Cuts, layouts: Sequence[Layout], placed_results: Sequence[Layout | None]) -> Owners:
    """The axes along which devices own rows, in the form of `Rule.owned`, each with its function in this op. Axes that
    distribute the experts of the op cut them: that is recorded in `cuts`."""
    owners: dict[str, tuple[str, int, str]] = {}
    hands_out = rule.keyed is not None and min(rule.keyed.positions) >= len(rule.operands)
    placed = [layout for layout in placed_results if layout is not None] if hands_out else []
    tensors = [*zip(rule.operands, layouts, strict=True), *zip(rule.results, placed, strict=False)]
    for dims, layout in tensors:
        for axis, dim, key in layout.owned:
            factor = rule.rows_in(dims[dim])
            if rule.keyed is not None and (factor, key) == (rule.keyed.rows, rule.keyed.key):
                owners.setdefault(axis, (axis, rule.keyed.experts, ""))
            elif rule.keyed is None and factor >= 0 and rule.can_own(factor):
                owners.setdefault(axis, (axis, factor, key))
            else:
                raise VerifyError("rows that devices own meet in an op that needs all of them", got=str(layout))
    if rule.keyed is not None:
        experts = rule.keyed.experts
        for axis in cuts[experts].axes if experts in cuts else ():
            owners.setdefault(axis, (axis, experts, ""))
        axes = tuple(axis for axis, factor, _ in owners.values() if factor == experts)
        if axes:
            cuts.setdefault(experts, DimSharding(axes))
        if axes and set(cuts[experts].axes) == set(axes):
            return [(axis, experts, "") for axis in cuts[experts].axes]
    return list(owners.values())


def _layout(rule: Rule, dims: Dims, cuts: Cuts, mesh: Mesh, spec: Spec) -> Layout:
    """The layout of a tensor with `dims` when factors are cut."""
    layouts = []
    for d in range(len(dims)):
        factor = rule.loop(dims, d)
        cut = cuts.get(factor, DimSharding()) if factor is not None else DimSharding()
        inner = rule.inner_size(dims, d, factor) if factor is not None else 1
        layouts.append(DimSharding(cut.axes, cut.unit * inner))
    return Layout(mesh, tuple(layouts)).normalized(spec.shape)


def _cuts(rule: Rule, operands: Sequence[Placed]) -> Cuts:
    """The operands' cuts of the factors; a unit that changes nothing in an operand may come from another."""
    cuts: Cuts = {}
    for i, (_, layout) in enumerate(operands):
        for factor, cut in _dim_cuts(rule, rule.operands[i], layout).items():
            if not (rule.is_shardable(factor) or rule.is_single(factor)):
                raise VerifyError(f"operand {i} is cut along a dim that the op needs whole", got=str(layout))
            known = cuts.setdefault(factor, cut)
            if known.axes != cut.axes:
                raise VerifyError(
                    f"operand {i} is not cut like the others",
                    got=f"{layout}: {','.join(cut.axes)} where another operand has {','.join(known.axes)}",
                )
            if known.unit == 1:
                cuts[factor] = cut
    return cuts


def _dim_cuts(rule: Rule, dims: Dims, layout: Layout) -> Cuts:
    cuts: Cuts = {}
    for d, dim in enumerate(layout.dims):
        if not dim.axes:
            continue
        factor = rule.loop(dims, d)
        if factor is None:
            raise VerifyError(f"dim {d} is cut, but the op needs it whole", got=str(layout))
        inner = rule.inner_size(dims, d, factor)
        cuts[factor] = DimSharding(dim.axes, dim.unit // inner if dim.unit % inner == 0 else 1)
    return cuts


def _passing_sums(rule: Rule, operands: Sequence[Placed]) -> dict[str, str]:
    """Axis -> reduce op of the partial values that pass, each in a linear mode of the rule."""
    passed: dict[str, str] = {}
    for axis in dict.fromkeys(a for _, layout in operands for a in layout.partial_axes):
        partial_ops = {i: dict(layout.partial).get(axis) for i, (_, layout) in enumerate(operands)}
        holders = frozenset(i for i, op in partial_ops.items() if op is not None)
        ops = {op for op in partial_ops.values() if op is not None}
        ways = [mode for mode in rule.linear if mode.operands == holders and ops <= mode.ops]
        if len(ops) > 1 or not ways:
            listed = ", ".join(map(str, sorted(holders)))
            raise VerifyError(
                f"operand {listed} is partial over {axis}, and the op is not linear in that operand alone",
                got=", ".join(str(layout) for _, layout in operands),
                expected="every contribution, before the op",
            )
        passed[axis] = ops.pop() or ""
    return passed


def _check_axes(cuts: Cuts, passed: dict[str, str], owners: Owners, operands: Sequence[Placed]) -> None:
    """Check that every axis does a single thing."""
    own = [axis for axis, factor, _ in owners if factor not in cuts or axis not in cuts[factor].axes]
    used = [*passed, *own, *(axis for cut in cuts.values() for axis in cut.axes)]
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise VerifyError(
            f"{', '.join(twice)} would do two things in the same op",
            got=", ".join(str(layout) for _, layout in operands),
            expected="an axis that cuts a loop of the op, or passes a partial value",
        )
