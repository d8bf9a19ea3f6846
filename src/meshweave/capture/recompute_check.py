"""Proof that a step with recomputation equals the step without it: by induction over its nodes, without running it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from torch import fx

from meshweave.capture.blocks import is_ahead, is_back
from meshweave.capture.recompute import AGAIN, Cuts, parameter_forms, plan_remake
from meshweave.errors import VerifyError
from meshweave.ir.graph import StepGraph, map_nodes, op_name, origin_of


def check_recompute(before: StepGraph, after: StepGraph, policy: str = "full", cuts: Cuts | None = None) -> None:
    """Raise VerifyError, with the node, unless `after` computes what `before` does and saves only what `policy` allows.

    Proven: each node of `after` does the op of one node of `before` with the same arguments on operands that are proven
    equal to its operands; only nodes of the backward phase are recomputed; forward is the same nodes in the same order;
    inputs and outputs are the same; in a block, the backward pass and recomputed nodes read only those forward values
    that the policy saves or that are saved for others anyway. `policy` and `cuts` are the arguments of the pass."""
    twins = _twins(before, after)
    _check_ends(before, after, twins)
    _check_order(before, after, twins)
    if policy != "none":
        _check_kept(before, after, twins, policy, cuts or {})


def _wrong(node: fx.Node, problem: str, **parts: str) -> VerifyError:
    name = op_name(node.target) if node.op == "call_function" else node.op
    return VerifyError(f"recomputation: {node.name} ({name}) {problem}", where=str(origin_of(node)), **parts)


def _is_again(node: fx.Node, twins: Mapping[fx.Node, fx.Node]) -> bool:
    return is_back(node) and is_ahead(twins[node])


def _twins(before: StepGraph, after: StepGraph) -> dict[fx.Node, fx.Node]:
    """Node of `after` -> the node of `before` that it is proven equal to. Names are claims, checked here."""
    named = {n.name: n for n in before.graph.nodes}
    twins: dict[fx.Node, fx.Node] = {}
    for node in after.graph.nodes:
        plain = re.sub(rf"{AGAIN}(_\d+)?$", "", node.name)
        twin = named.get(node.name, named.get(plain))
        if twin is None:
            raise _wrong(node, "is not in the step without recomputation")
        if (node.op, node.target) != (twin.op, twin.target):
            raise _wrong(node, "does another op", got=op_name(node.target), expected=op_name(twin.target))
        late = [n.name for n in node.all_input_nodes if n not in twins]
        if late:
            raise _wrong(node, "reads a later node", got=", ".join(late))
        got, expected = _written(node, twins), _written(twin, None)
        if got != expected:
            raise _wrong(node, f"does not do what {twin.name} does", got=got, expected=expected)
        if node.meta.get("spec") != twin.meta.get("spec"):
            raise _wrong(node, "has another spec", got=str(node.meta.get("spec")), expected=str(twin.meta["spec"]))
        _check_origin(node, twin)
        twins[node] = twin
    return twins


def _written(node: fx.Node, twins: Mapping[fx.Node, fx.Node] | None) -> str:
    """All arguments of a node, with the names of the equal nodes of `before` for tensors."""

    def name(n: fx.Node) -> Any:
        return f"%{n.name if twins is None else twins[n].name}"

    return str(map_nodes(node, name))


def _check_origin(node: fx.Node, twin: fx.Node) -> None:
    if node.op != "call_function":
        return
    origin, expected = origin_of(node), origin_of(twin)
    if node.name == twin.name and origin != expected:
        raise _wrong(node, "comes from elsewhere", got=str(origin), expected=str(expected))
    same = (origin.module, origin.source, origin.call) == (expected.module, expected.source, expected.call)
    if node.name != twin.name and not (same and origin.phase == "backward" and is_ahead(twin)):
        raise _wrong(node, "is not a recomputed forward op", got=str(origin), expected=f"{expected}, in backward")


def _check_ends(before: StepGraph, after: StepGraph, twins: Mapping[fx.Node, fx.Node]) -> None:
    if (before.inputs, before.outputs) != (after.inputs, after.outputs):
        raise VerifyError("recomputation: the step has other inputs or outputs")
    if [twins[n] for n in after.placeholders] != before.placeholders:
        raise VerifyError("recomputation: the inputs are in another order")
    for (kind, name), value in after.results.items():
        if _is_again(value, twins):
            raise _wrong(value, f"is the output {kind} {name}, and recomputed")


def _check_order(before: StepGraph, after: StepGraph, twins: Mapping[fx.Node, fx.Node]) -> None:
    """The nodes that are not recomputed keep their order, and removed nodes served only recomputed nodes."""
    place = {n: i for i, n in enumerate(before.graph.nodes)}
    kept = [n for n in after.graph.nodes if not _is_again(n, twins)]
    for first, second in pairwise(kept):
        if place[twins[first]] >= place[twins[second]]:
            raise _wrong(second, f"stands after {first.name}")
    for node in kept:
        repeated = [n for n in node.all_input_nodes if is_ahead(node) and _is_again(n, twins)]
        if repeated:
            raise _wrong(node, f"is in the forward pass and reads {repeated[0].name}")
    for node in (n for n in after.graph.nodes if n.op == "call_function" and not n.users):
        raise _wrong(node, "has no use")


def _check_kept(before: StepGraph, after: StepGraph, twins: Mapping[fx.Node, fx.Node], policy: str, cuts: Cuts) -> None:
    allowed = plan_remake(before, policy, cuts)
    forms, of = parameter_forms(after), allowed.blocks.of
    for node in (n for n in after.graph.nodes if is_ahead(n) and of(n) and n not in forms):
        inside = [u for u in node.users if is_back(u) and of(u) == of(node)]
        others = [u for u in node.users if is_back(u) and of(u) != of(node)]
        if inside and not others and twins[node] not in allowed.kept:
            raise _wrong(node, f"is saved for {inside[0].name}, which policy '{policy}' does not allow")
