"""Gathers the parameters that forward needs first at the end of the previous step, and carries them over.

In a step by itself the first blocks gather their parameters when no compute can hide that. The new parameters are
available earlier: in the update of the previous step, where the updates of other parameters hide the gathers. So the
gathered value becomes an input (kind `carry`) and an output of the same name, after the new parameter. The ops that
compute it from the parameter become the role's prologue, which runs before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from meshweave.errors import VerifyError
from meshweave.ir.collectives import COLLECTIVES, STARTS, WAIT
from meshweave.ir.graph import Input, StepGraph, copied_graph, map_nodes, op_name, origin_of, output_node, spec_of
from meshweave.ir.layout import Layout
from meshweave.ir.rank import SYMBOLS, RankGraph, copied, operands_of
from meshweave.optimize.prefetch.gather_ahead import block_of

CARRY, _PARAM = "carry", "param"


@dataclass(frozen=True, slots=True)
class Gathered:
    """A parameter in the form that forward needs: `chain` are the nodes from its placeholder (exclusive) to the value,
    each with a single tensor operand, at least one of them a collective. `item` and `layout` are those of the carry."""

    item: Input
    layout: Layout
    chain: tuple[fx.Node, ...]

    @property
    def value(self) -> fx.Node:
        return self.chain[-1]


@dataclass(frozen=True, slots=True)
class GatheredBlock:
    """The parameters that a block of the model (see `gathers.prefetch`) gathers in forward."""

    name: str
    gathered: tuple[Gathered, ...]


def carriable(role: RankGraph, placed: StepGraph) -> tuple[GatheredBlock, ...]:
    """What a role could carry over, by block, in the order in which forward needs them.

    For a parameter that the update replaces: the first value in forward that depends on it alone, gathered by
    collectives among the devices of the role. `placed` is the graph that the role was expanded from.
    """
    meant = {n.name: n for n in placed.graph.nodes}
    returned = role.results
    order = {node: i for i, node in enumerate(role.graph.nodes)}
    positioned: list[tuple[int, Gathered]] = []
    for source, item in role.sources.items():
        new = returned.get((_PARAM, item.name))
        if item.kind != _PARAM or new is None or new.op != "call_function":
            continue
        ends = [(min(order[u] for u in chain[-1].users), chain) for chain in _chains(role, source)]
        if not ends:
            continue
        at, chain = min(ends, key=lambda end: end[0])
        mark = meant[chain[-1].meta["global"]]
        positioned.append((at, Gathered(Input(CARRY, item.name, spec_of(mark)), mark.meta["layout"], chain)))
    positioned.sort(key=lambda gathered: gathered[0])
    blocks: dict[str, list[Gathered]] = {}
    for _, gathered in positioned:
        blocks.setdefault(block_of(gathered.value), []).append(gathered)
    return tuple(GatheredBlock(name, tuple(values)) for name, values in blocks.items())


def _chains(role: RankGraph, source: fx.Node) -> Iterator[tuple[fx.Node, ...]]:
    """From a parameter to each value of the placed graph that is gathered from it alone, and used, in forward."""
    waiting: list[tuple[fx.Node, ...]] = [(user,) for user in source.users]
    while waiting:
        chain = waiting.pop(0)
        node = chain[-1]
        if not _is_link(role, node):
            continue
        onward = [user for user in node.users if user.op == "call_function"]
        is_value = "global" in node.meta and any(n.target is WAIT for n in chain)
        is_passed = len(onward) == 1 and onward[0].target in STARTS
        if is_value and onward and not is_passed:
            yield chain
        else:
            waiting += [(*chain, user) for user in onward]


def _is_link(role: RankGraph, node: fx.Node) -> bool:
    """Whether a node of forward has a single tensor operand and result, within the role."""
    if node.op != "call_function" or origin_of(node).phase != "forward" or len(operands_of(node)) != 1:
        return False
    if node.target not in STARTS:
        return not isinstance(node.meta.get("spec"), tuple)
    if node.target not in COLLECTIVES:
        return False
    mesh, _ = role.group_axes(str(node.args[-1]))
    return set(mesh.devices) == set(role.devices)


def carry_gathers(role: RankGraph, gathered: Sequence[Gathered]) -> RankGraph:
    """The role with these values as inputs, computed for the next step after the new parameters; in a new graph.

    A start comes right after the new parameter, its wait at the end of the step. The role itself is not changed.
    """
    if not gathered:
        return role
    copies: dict[fx.Node, fx.Node] = {}
    graph = copied_graph(role.graph, copies)
    end = copies[output_node(role.graph)]
    carrying = replace(role, graph=graph, prologue=_prologue(role, gathered))
    new = carrying.results
    last = carrying.placeholders[-1]
    values = []
    for value in gathered:
        chain = tuple(copies[n] for n in value.chain)
        with graph.inserting_after(last):
            last = graph.placeholder(f"carry_{operands_of(chain[0])[0].name}")
        last.meta.update({key: x for key, x in chain[-1].meta.items() if key in ("spec", "origin")})
        values.append(_repeat_chain(graph, chain, new[_PARAM, value.item.name], end))
        chain[-1].replace_all_uses_with(last)
        _erase(graph, chain)
    end.args = ([*end.args[0], *values],)  # type: ignore[misc]
    keys = tuple((CARRY, value.item.name) for value in gathered)
    carrying.inputs += tuple(value.item for value in gathered)
    carrying.layouts += tuple(value.layout for value in gathered)
    carrying.outputs += keys
    carrying.output_layouts += tuple(value.layout for value in gathered)
    return carrying


def _prologue(role: RankGraph, gathered: Sequence[Gathered]) -> RankGraph:
    """The ops that compute the carried values from the parameters."""
    names = {value.item.name for value in gathered}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    parameters = []
    for source, item, layout in zip(role.placeholders, role.inputs, role.layouts, strict=True):
        if item.kind == _PARAM and item.name in names:
            copies[source] = graph.node_copy(source)
            parameters.append((item, layout))
    needed = {n for value in gathered for node in value.chain for n in _symbols(node)}
    for node in (n for n in role.graph.nodes if n in needed):
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    for value in gathered:
        for node in value.chain:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output([copies[value.value] for value in gathered])
    return replace(
        role,
        graph=graph,
        inputs=tuple(item for item, _ in parameters),
        layouts=tuple(layout for _, layout in parameters),
        outputs=tuple((CARRY, value.item.name) for value in gathered),
        output_layouts=tuple(value.layout for value in gathered),
        prologue=None,
    )


def _repeat_chain(graph: fx.Graph, chain: Sequence[fx.Node], new: fx.Node, end: fx.Node) -> fx.Node:
    """The chain repeated on the new parameter: up to its first start right after that, the rest at the end of the
    step."""
    copies = {operands_of(chain[0])[0]: new}
    cursor, is_begun = new, False
    for node in chain:
        with graph.inserting_before(end) if is_begun else graph.inserting_after(cursor):
            copy = graph.node_copy(node, lambda n: copies.get(n, n))
        copy.meta = {key: value for key, value in node.meta.items() if key != "global"}
        copy.meta["origin"] = replace(origin_of(node), phase="update")
        copies[node] = cursor = copy
        is_begun = is_begun or node.target in STARTS
    return cursor


def remove_carries(role: RankGraph) -> RankGraph:
    """The role as a step that carries nothing over, in a new graph: the prologue replaces the carried inputs, and
        nothing is computed for the next step. The role itself if it carries nothing.

    The values for the next step are proven to equal those of the prologue: after the parameter that the next step gets,
    op by op. So a proof of this step covers every step, whatever the parameters. VerifyError otherwise. Merged
    collectives must be undone before (`buckets.unmerge`).
    """
    keys = [(item.kind, item.name) for item in role.inputs if item.kind == CARRY]
    returned_keys = [key for key in role.outputs if key[0] == CARRY]
    if role.prologue is None and not keys and not returned_keys:
        return role
    computed = list(role.prologue.outputs) if role.prologue is not None else []
    if not sorted(keys) == sorted(returned_keys) == sorted(computed):
        raise VerifyError(
            "a step's carried inputs differ from the carried outputs",
            got=f"takes {_names(keys)}; returns {_names(returned_keys)}; the prologue computes {_names(computed)}",
            expected="the same values",
        )
    assert role.prologue is not None, "equal to keys, which are not empty"
    uncarrying = copied(role)
    returned, before = uncarrying.results, role.prologue.results
    for key in keys:
        _check_same(returned[key], returned.get((_PARAM, key[1])), before[key], key[1], role.prologue)
    _put_back(uncarrying, role.prologue)
    return uncarrying


def _put_back(role: RankGraph, prologue: RankGraph) -> None:
    """Insert the prologue before the first use of its values; remove what is computed for the next step."""
    graph = role.graph
    sources = dict(zip(((i.kind, i.name) for i in role.inputs), role.placeholders, strict=True))
    returned = role.results
    kept_outputs = [i for i, (kind, _) in enumerate(role.outputs) if kind != CARRY]
    values = list(returned.values())
    output_node(graph).args = ([values[i] for i in kept_outputs],)
    for key in (key for key in role.outputs if key[0] == CARRY):
        _erase(graph, _chain_of(returned[key], returned[_PARAM, key[1]]))
    for key, value in prologue.results.items():
        _write_chain(graph, _chain_of(value, None), sources[_PARAM, key[1]], sources[key])
    kept = [i for i, item in enumerate(role.inputs) if item.kind != CARRY]
    role.inputs, role.layouts = tuple(role.inputs[i] for i in kept), tuple(role.layouts[i] for i in kept)
    role.outputs = tuple(role.outputs[i] for i in kept_outputs)
    role.output_layouts = tuple(role.output_layouts[i] for i in kept_outputs)
    role.prologue = None


def _write_chain(graph: fx.Graph, chain: Sequence[fx.Node], source: fx.Node, old: fx.Node) -> None:
    """Write a chain of a prologue on `source`, before the first use of the placeholder `old`, which it then
    replaces."""
    if not old.users:
        raise VerifyError("a carried input is not used", where=old.name)
    begin = next(n for n in graph.nodes if n.op != "placeholder")
    first = next(n for n in graph.nodes if n in old.users)
    copies = {operands_of(chain[0])[0]: source}
    for symbol in dict.fromkeys(s for node in chain for s in _symbols(node)):
        _copy_into(graph, symbol, begin, copies)
    for node in chain:
        _copy_into(graph, node, first, copies)
    old.replace_all_uses_with(copies[chain[-1]])
    graph.erase_node(old)


def _copy_into(graph: fx.Graph, node: fx.Node, before: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    with graph.inserting_before(before):
        copies[node] = graph.node_copy(node, lambda n: copies[n])


def _check_same(carried_node: fx.Node, new: fx.Node | None, before: fx.Node, name: str, prologue: RankGraph) -> None:
    """Raise VerifyError unless `made` depends on the new parameter as `before` does on the parameter."""
    where = f"carry {name}, {carried_node.name}, {origin_of(carried_node)}"
    sources = prologue.sources
    while before not in sources:
        got, expected = (_call(node) for node in (carried_node, before))
        if got != expected or len(operands_of(carried_node)) != 1:
            raise VerifyError(
                "a carried output differs from the prologue's value",
                where=where,
                got=f"{carried_node.name} = {_call_text(got)}",
                expected=f"{_call_text(expected)}, as {before.name} does",
            )
        (carried_node,), (before,) = operands_of(carried_node), operands_of(before)
    if sources[before].name != name or carried_node is not new:
        raise VerifyError(
            "a carried output depends on another value than its parameter",
            where=where,
            got=carried_node.name,
            expected=new.name if new is not None else f"a new value of {name}",
        )


def _call(node: fx.Node) -> tuple[Any, Any, Any]:
    """A node without its operand, with symbols written out."""
    if node.op != "call_function":
        return node.name, (), {}
    args, kwargs = map_nodes(node, lambda n: _plain(n) if n.target in SYMBOLS else "operand")
    return node.target, args, dict(kwargs)


def _plain(symbol: fx.Node) -> Any:
    return ("symbol", symbol.target, map_nodes(symbol, _plain)[0])


def _call_text(call: tuple[Any, Any, Any]) -> str:
    target, args, kwargs = call
    named = [f"{key}={value}" for key, value in kwargs.items()]
    return f"{op_name(target)}({', '.join([*map(str, args), *named])})"


def _chain_of(value: fx.Node, source: fx.Node | None) -> list[fx.Node]:
    """The nodes from `source` (or a placeholder) exclusive to a value, in order."""
    chain: list[fx.Node] = []
    while value is not source and value.op == "call_function":
        chain.append(value)
        (value,) = operands_of(value)
    return chain[::-1]


def _erase(graph: fx.Graph, chain: Sequence[fx.Node]) -> None:
    """Erase the unused nodes of a chain, from its end."""
    for node in reversed(chain):
        if node.users:
            return
        graph.erase_node(node)


def _symbols(node: fx.Node) -> list[fx.Node]:
    """The symbols among the arguments of a node, and those that they depend on."""
    direct = [n for n in node.all_input_nodes if n.target in SYMBOLS]
    return [s for n in direct for s in (*_symbols(n), n)]


def _names(keys: Iterable[tuple[str, str]]) -> str:
    return ", ".join(name for _, name in sorted(keys)) or "nothing"
