"""The invariants of a graph at each stage. Checked after every pass; a violation is a bug in meshweave, reported by
node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from meshweave.errors import VerifyError
from meshweave.interop.ops import is_mutable, is_operator
from meshweave.ir import ops
from meshweave.ir.collectives import COLLECTIVES, STARTS, TABLE, WAIT, transfer
from meshweave.ir.graph import Origin, Spec, StepGraph, is_prepared, op_name, origin_of, tensor_inputs
from meshweave.ir.grouped import BY_ROWS, key_of
from meshweave.ir.layout import Layout
from meshweave.ir.rank import RankGraph, operands_of, qualified

Findings = Iterator[tuple[fx.Node, str]]


def _has_meta(graph: fx.Graph) -> Findings:
    for node in graph.nodes:
        if node.op in ("placeholder", "call_function"):
            if "spec" not in node.meta:
                yield node, "has no spec"
            if not isinstance(node.meta.get("origin"), Origin):
                yield node, "has no origin"


def _is_functional(graph: fx.Graph) -> Findings:
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            yield node, f"is a {node.op}"
        if is_operator(node.target) and is_mutable(node.target):
            yield node, "writes to an operand"


def _is_placed(graph: fx.Graph) -> Findings:
    for node in graph.nodes:
        if node.op == "output":
            continue
        spec, layout = node.meta["spec"], node.meta.get("layout")
        pairs = zip(spec, layout or (), strict=False) if isinstance(spec, tuple) else [(spec, layout)]
        for described, placed in pairs:
            if described is None:
                continue
            if not isinstance(placed, Layout):
                yield node, "has no layout"
            elif placed.normalized(described.shape) != placed:
                yield node, f"has a layout that is not in normal form: {placed}"


def _operands_fit(graph: fx.Graph) -> Findings:
    """Operands have the layouts that the assignment requires; so a partial value only enters a linear op."""
    for node in graph.nodes:
        option = node.meta.get("assignment")
        if option is None:
            continue
        for operand, wanted in zip(tensor_inputs(node), option.operands, strict=True):
            if operand.meta["layout"] != wanted:
                yield node, f"takes {operand.name} as {operand.meta['layout']} instead of {wanted}"


def _moves_move(graph: fx.Graph) -> Findings:
    for node in graph.nodes:
        if node.target is ops.move and node.args[0].meta["layout"] == node.meta["layout"]:
            yield node, "moves nothing"


def _keys_agree(graph: fx.Graph) -> Findings:
    """Ops on rows by expert that name the same key have the same ends, moved or not."""
    ends_of: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.target in BY_ROWS:
            ends: Any = tensor_inputs(node)[-1]
            ends = ops.unmoved(ends)
            if ends_of.setdefault(key_of(node), ends) is not ends:
                yield node, f"has other ends than other ops with the key {key_of(node)}"


def _no_moves(graph: fx.Graph) -> Findings:
    for node in graph.nodes:
        if node.target is ops.move or node.target is torch.ops.meshweave.pin.default:
            yield node, "was not expanded"


def _waits_match(graph: fx.Graph) -> Findings:
    """Every collective is waited for exactly once, and only waits read it."""
    for node in graph.nodes:
        if node.target in STARTS:
            waits = [u for u in node.users if u.target is WAIT]
            if len(waits) != 1 or len(node.users) != 1:
                yield node, f"has {len(waits)} waits and {len(node.users)} users"
        if node.target is WAIT and node.args[0].target not in STARTS:
            yield node, "waits for a value that is not a collective"


def _groups_exist(rank: RankGraph) -> Findings:
    axes = {qualified(i, a) for i, mesh in enumerate(rank.meshes) if mesh.covers(rank.devices) for a in mesh.axis_names}
    for node in rank.graph.nodes:
        if node.target in COLLECTIVES:
            missing = [a for a in str(node.args[-1]).split(",") if a not in axes]
            if missing:
                yield node, f"works over unknown axes {missing}"
                continue
            mesh, group = rank.group_axes(str(node.args[-1]))
            if problem := TABLE[node.target].problem(node.args[1:-1], mesh.flat_size(group)):
                yield node, problem
        if node.target is transfer and node.args[-1] not in rank.transfers:
            yield node, f"takes part in an unknown transfer {node.args[-1]}"


def _prepares_parameters(rank: RankGraph) -> Findings:
    """What runs in the first microbatch only is the same in all: it depends on parameters alone."""
    if not any(node.op == "call_function" and is_prepared(node) for node in rank.graph.nodes):
        return
    fixed = {node for node, item in rank.sources.items() if item.kind in ("param", "constant")}
    for node in rank.graph.nodes:
        if node.op == "call_function" and all(operand in fixed for operand in operands_of(node)):
            fixed.add(node)
        elif node.op == "call_function" and is_prepared(node):
            yield node, "is prepared once a step, but depends on more than parameters"


_STEP: tuple[Callable[[fx.Graph], Findings], ...] = (_has_meta, _is_functional)
_PLACED = (*_STEP, _is_placed, _operands_fit, _moves_move, _keys_agree)
_RANK = (_is_functional, _no_moves, _waits_match)


def _check(stage: str, findings: Iterator[tuple[fx.Node, str]]) -> None:
    for node, problem in findings:
        name = op_name(node.target) if node.op == "call_function" else node.op
        raise VerifyError(f"{stage}: {node.name} ({name}) {problem}", where=str(origin_of(node)))


def verify_step(step: StepGraph) -> StepGraph:
    """Raise VerifyError unless `step` is a functional graph with a spec and an origin on every node."""
    _check_counts("captured graph", step)
    for rule in _STEP:
        _check("captured graph", rule(step.graph))
    return step


def check_captured(step: StepGraph) -> None:
    """The precondition of placement: a graph that has not been placed. Raises VerifyError."""
    for node in step.graph.nodes:
        if node.target is ops.move or "layout" in node.meta:
            raise VerifyError(
                "placement: the graph has been placed already",
                where=f"{node.name}, {origin_of(node)}",
                expected="a captured graph, without layouts and moves",
            )


def check_placed(step: StepGraph) -> None:
    """The precondition of expansion: a graph that has been placed and not expanded. Raises VerifyError."""
    for node in step.graph.nodes:
        where = f"{node.name}, {origin_of(node)}"
        if node.op != "output" and "layout" not in node.meta:
            raise VerifyError("expansion: a value has no layout", where=where, expected="a placed graph")
        if "plan" in node.meta:
            raise VerifyError("expansion: the graph has been expanded already", where=where, expected="a placed graph")


def verify_placed(step: StepGraph) -> StepGraph:
    """Raise VerifyError unless every value has a layout in normal form, every op gets the layouts of its assignment,
    and what the step replaces keeps its layout."""
    _check_counts("placed graph", step)
    for rule in _PLACED:
        _check("placed graph", rule(step.graph))
    _check_replaced(step)
    return step


def _check_replaced(step: StepGraph) -> None:
    """What a step replaces has the layout in which the next step (of sums: the next microbatch) reads it."""
    results = step.results
    for node, item in step.sources.items():
        value = results.get((item.kind, item.name))
        if value is not None and value.meta["layout"] != node.meta["layout"]:
            raise VerifyError(
                f"placed graph: {item.kind} {item.name} is not left as it is read",
                where=str(origin_of(value)),
                got=str(value.meta["layout"]),
                expected=str(node.meta["layout"]),
            )


def verify_rank(rank: RankGraph) -> RankGraph:
    """Raise VerifyError unless the graph is expanded, every collective has exactly one wait and every group is in the
    mesh."""
    rank.graph.lint()
    for rule in _RANK:
        _check("rank graph", rule(rank.graph))
    _check("rank graph", _groups_exist(rank))
    _check("rank graph", _prepares_parameters(rank))
    return rank


def _check_counts(stage: str, step: StepGraph) -> None:
    step.graph.lint()
    if len(step.placeholders) != len(step.inputs) or len(step.output_values) != len(step.outputs):
        raise VerifyError(f"{stage}: inputs or outputs do not match their names")
    for node, item in step.sources.items():
        if node.meta["spec"] != item.spec:
            raise VerifyError(
                f"{stage}: input {item.name} has changed", got=str(node.meta["spec"]), expected=str(item.spec)
            )
    for value in step.output_values:
        if not isinstance(value.meta.get("spec"), Spec):
            raise VerifyError(f"{stage}: an output is not a tensor", got=str(value))
