"""Activation checkpointing: the backward pass of a block recomputes what it needs of its forward pass.

A pass from captured graph to captured graph, so that placement plans the moves of recomputed values like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from meshweave.capture.blocks import Blocks, find_blocks, is_ahead, is_back
from meshweave.errors import PlanError
from meshweave.ir.graph import Spec, StepGraph, map_nodes, origin_of, tensor_inputs
from meshweave.ir.traits import CASTS, FACTORIES, PRODUCTS, RANK_CHANGES, RESHAPES, VIEWS, is_pointwise

aten = torch.ops.aten
ATTENTION = torch.ops.meshweave.attention.default
GROUPED = torch.ops.meshweave.grouped_mm.default
CHOICES = (aten.topk.default, aten.sort.default, aten.sort.stable)  # between equal numbers another run may differ
PIN = torch.ops.meshweave.pin.default
AGAIN = "_again"  # suffix of the name of a recomputed node

Cuts = Mapping[str, Collection[int]]
"""Parameter -> the dims that a plan cuts, except cuts for storage only: a matmul that sums over such a dim is a sum
over devices."""


def recompute(step: StepGraph, policy: str, cuts: Cuts | None = None) -> StepGraph:
    """The step with fewer values saved from forward to backward; `step` itself for policy "none", else a new step.

    "full": only a block's inputs are saved, "selective": also the values in `selective`, "pointwise": those in
    `pointwise`. Other values that a block's
    backward needs are recomputed in phase backward, right before the first op that uses them, from saved values; a
    value that is saved for others anyway (a block's output) is not recomputed. Recomputed nodes do the same op as the
    original with the same numbers (also random ones), have its module, source and call, and its name with suffix
    `_again`. Placement handles parameters with their casts and views, and repeats them in each phase.
    Raises PlanError for an unknown policy and for a model without repeated blocks.
    """
    check_policy(policy)
    if policy == "none":
        return step
    remake = plan_remake(step, policy, cuts or {})
    return _rebuilt(step, remake)


def check_policy(policy: str) -> None:
    """Raise PlanError for an unknown policy."""
    if policy not in ("none", *_KEEPS):
        raise PlanError(
            f"'{policy}' is not a recomputation policy", got=repr(policy), expected=", ".join(("none", *_KEEPS))
        )


@dataclass(frozen=True, slots=True)
class Remake:
    """What is recomputed: per block the forward nodes in graph order, and what the policy saves of all."""

    blocks: Blocks
    nodes: Mapping[str, tuple[fx.Node, ...]]
    kept: frozenset[fx.Node]


def plan_remake(step: StepGraph, policy: str, cuts: Cuts) -> Remake:
    """Decide what is recomputed. Blocks are processed from last to first: what the recomputation of a later block reads
    is saved, and so is available to earlier blocks."""
    blocks = find_blocks(step)
    members: dict[str, list[fx.Node]] = {name: [] for name in blocks.names}
    forms = parameter_forms(step)
    for node in step.graph.nodes:
        if is_ahead(node) and blocks.of(node) and node not in forms:
            members[blocks.of(node)].append(node)
    kept = frozenset(n for nodes in members.values() for n in _KEEPS[policy](nodes, forms, cuts))
    read: set[fx.Node] = set()
    remade: dict[str, tuple[fx.Node, ...]] = {}
    for name in reversed(blocks.names):
        own = set(members[name])
        there = {n for n in own if n in kept or n in read or any(is_back(u) and blocks.of(u) != name for u in n.users)}
        wanted = [n for n in own - there if any(is_back(u) for u in n.users)]
        needed = _closure(wanted, own - there)
        read.update(i for n in needed for i in n.all_input_nodes)
        remade[name] = tuple(n for n in members[name] if n in needed)
    return Remake(blocks, remade, kept)


def _closure(wanted: Iterable[fx.Node], among: Collection[fx.Node]) -> set[fx.Node]:
    closure: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in closure:
            closure.add(node)
            stack += [n for n in node.all_input_nodes if n in among]
    return closure


def parameter_forms(step: StepGraph) -> dict[fx.Node, tuple[str, tuple[int, ...]]]:
    """Parameters, their casts and their views -> the name, and for each dim the parameter's dim (-1: not a single
    dim)."""
    forms: dict[fx.Node, tuple[str, tuple[int, ...]]] = {}
    for node, item in step.sources.items():
        if item.kind == "param":
            forms[node] = item.name, tuple(range(len(item.spec.shape)))
    for node in filter(is_ahead, step.graph.nodes):
        inputs = tensor_inputs(node) if node.target in VIEWS | CASTS else []
        if len(inputs) == 1 and inputs[0] in forms:
            name, dims = forms[inputs[0]]
            forms[node] = name, _dims_after(node, dims)
    return forms


def _dims_after(node: fx.Node, dims: tuple[int, ...]) -> tuple[int, ...]:
    if node.target is aten.permute.default:
        return tuple(dims[d] for d in node.args[1])  # type: ignore[union-attr,index,misc]
    if node.target is aten.view.default:
        return (-1,) * len(node.meta["spec"].shape)
    return (-1,) * (len(node.meta["spec"].shape) - len(dims)) + dims


# What a policy saves of a block's forward nodes.

Forms = Mapping[fx.Node, tuple[str, tuple[int, ...]]]


def _nothing(nodes: Iterable[fx.Node], forms: Forms, cuts: Cuts) -> Iterator[fx.Node]:
    yield from ()


def selective(nodes: Iterable[fx.Node], forms: Forms, cuts: Cuts) -> Iterator[fx.Node]:
    """Attention with its log-sum-exp, the first, third, fifth ... matmul of a block, sums over devices, the results of
    topk and sort, and the rows that experts work on (not their matmuls).

    Like torchtitan's selective "op" policy (torchtitan/distributed/activation_checkpoint.py: what
    `_get_default_save_ops` lists is saved, all-to-alls included, except every second matmul of a block). It sorts
    again; here saved rows and what is recomputed beside them belong to the same sort.
    """
    count = 0
    for node in nodes:
        if node.target in (ATTENTION, *CHOICES):
            yield from (node, *node.users)
        elif node.target is PIN and str(node.args[1]).startswith("reduction "):  # mw.reduction
            yield node
        elif node.target is GROUPED:
            yield from _looked_up_rows(node)
        elif node.target in PRODUCTS:
            count += 1
            if count % 2:
                yield node
            if _sums_over_devices(node, forms, cuts):
                yield from _until_reduced(node)


def _looked_up_rows(grouped: fx.Node) -> Iterator[fx.Node]:
    """The rows of a grouped matmul and the ends of its experts, if the rows are looked up in a table, as rows sorted by
    expert are: under expert parallelism the lookup is the dispatch, and devices own rows by these very ends."""
    rows, _, ends = tensor_inputs(grouped)
    lookup = rows
    while lookup.target in VIEWS | CASTS:
        (lookup,) = tensor_inputs(lookup)
    if lookup.target is aten.index.Tensor:
        yield from (rows, ends)


def pointwise(nodes: Iterable[fx.Node], forms: Forms, cuts: Cuts) -> Iterator[fx.Node]:
    """Sums over devices, and the fewest bytes from which elementwise ops compute everything else that backward
    reads."""
    nodes = list(nodes)
    sums = [n for n in nodes if n.target in PRODUCTS and _sums_over_devices(n, forms, cuts)]
    saved = {n: None for node in sums for n in _until_reduced(node)}
    saved |= dict.fromkeys(n for n in nodes if n.target is PIN and str(n.args[1]).startswith("reduction "))
    yield from saved
    yield from fewest_bytes(nodes, forms, saved)


_KEEPS: Mapping[str, Callable[[Iterable[fx.Node], Forms, Cuts], Iterator[fx.Node]]] = {
    "pointwise": pointwise,
    "selective": selective,
    "full": _nothing,
}


def _sums_over_devices(node: fx.Node, forms: Forms, cuts: Cuts) -> bool:
    """Whether a matmul sums over a dim of a parameter that the plan cuts."""
    *_, left, right = tensor_inputs(node)
    return any(
        operand in forms and forms[operand][1][dim] in cuts.get(forms[operand][0], ())
        for operand, dim in ((left, -1), (right, -2))
    )


def _until_reduced(node: fx.Node) -> Iterator[fx.Node]:
    """A matmul and the values that its result alone becomes by views, pins and additions (of a bias, of the residual
    stream).

    A partial value with a single user flows on, and is reduced where it gets several users (see place/place.py): the
    last of these values is the sum over devices. Saving the matmul's own result would save a single part of it, and
    giving it a second user would reduce it elsewhere.
    """
    yield node
    while True:
        users = [u for u in node.users if is_ahead(u)]
        if len(users) != 1 or not (users[0].target in VIEWS or users[0].target in (PIN, aten.add.Tensor)):
            return
        node = users[0]
        yield node


def _rebuilt(step: StepGraph, remake: Remake) -> StepGraph:
    """A copy of the graph in which recomputed nodes stand where they are first needed, without dead code."""
    graph, copies, twins = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    block_of_node = {node: name for name, nodes in remake.nodes.items() for node in nodes}
    waiting = dict(remake.nodes)
    for node in step.graph.nodes:
        own = remake.blocks.of(node) if is_back(node) else ""
        needs = own and any(block_of_node.get(n) == own for n in node.all_input_nodes)
        for original in waiting.pop(own, ()) if needs else ():
            args, kwargs = map_nodes(original, lambda n: twins.get(n, copies[n]))
            twin = graph.create_node("call_function", original.target, args, kwargs, original.name + AGAIN)
            twin.meta.update(original.meta, origin=replace(origin_of(original), phase="backward"))
            twins[original] = twin
        copies[node] = graph.node_copy(
            node,
            lambda n, own=own: twins[n] if own and block_of_node.get(n) == own else copies[n],  # type: ignore[misc]
        )
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return replace(step, graph=graph)


# Which values of a block are saved if elementwise ops are recomputed: the fewest bytes, by a minimum cut. A compiler
# fuses recomputed elementwise ops into the kernels of the backward pass that read them, where they cost no memory
# traffic: the partitioner of AOTAutograd decides by the same cut (torch/_functorch/partitioners.py).

_SOURCE, _SINK = "source", "sink"
_CHEAP = CASTS | VIEWS | RANK_CHANGES | RESHAPES | FACTORIES
_SIDE = ("before", "after")  # a value is saved if the cut runs between its two sides


def fewest_bytes(nodes: Iterable[fx.Node], free: Collection[fx.Node], saved: Collection[fx.Node]) -> Iterator[fx.Node]:
    """The forward nodes of a block to save for the backward pass, besides `saved` (saved anyway), so that the other
    values that it reads can be recomputed by elementwise ops, casts and views. `free` are parameters and their forms,
    which are always there."""
    import networkx as nx

    own = dict.fromkeys(node for node in nodes if node not in free)
    graph = nx.DiGraph()
    graph.add_nodes_from((_SOURCE, _SINK))

    def add(node: fx.Node, is_computed_once: bool) -> None:
        spec = node.meta.get("spec")
        if isinstance(spec, Spec):
            graph.add_edge((node, _SIDE[0]), (node, _SIDE[1]), capacity=0 if node in saved else spec.num_bytes)
        if is_computed_once:
            graph.add_edge(_SOURCE, (node, _SIDE[0]))  # without a capacity: no limit

    for node in own:
        add(node, is_computed_once=not is_recomputable(node))
        if any(map(is_back, node.users)):
            graph.add_edge((node, _SIDE[1]), _SINK)
        for operand in tensor_inputs(node) if is_recomputable(node) else ():
            if operand in free or operand.op == "placeholder":
                continue
            if operand not in own:
                add(operand, is_computed_once=True)
            graph.add_edge((operand, _SIDE[1]), (node, _SIDE[0]))
    _, (reached, _) = nx.minimum_cut(graph, _SOURCE, _SINK)
    yield from (n for n in own if (n, _SIDE[0]) in reached and (n, _SIDE[1]) not in reached)


def is_recomputable(node: fx.Node) -> bool:
    """Whether a node is elementwise, a cast, a view or a constant."""
    target: Any = node.target
    return is_pointwise(target) or target in _CHEAP
