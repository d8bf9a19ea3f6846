"""Pipelines: in what order stages run the microbatches of a step, and what they do at the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import STARTS, WAIT, transfer
from meshweave.ir.graph import PARTS, origin_of, output_node
from meshweave.ir.rank import SYMBOLS, RankGraph

Pipeline = Literal["sequential", "gpipe", "1f1b"]
Passes = tuple[tuple[int, int], ...]  # (part, microbatch), in the order in which a role runs them

FORWARD, BACKWARD, UPDATE = 0, 1, 2


def passes_of(stage: int, num_stages: int, microbatches: int, pipeline: Pipeline) -> Passes:
    """The passes of a stage, in order.
    `sequential`: forward and backward of each microbatch in turn, as the runtime does today. `gpipe`: all forwards,
    then all backwards (Huang et al., NeurIPS 2019). `1f1b`: as many forwards as there are later stages, then forward
    and backward alternate (Narayanan et al., SOSP 2019)."""
    if pipeline not in get_args(Pipeline):
        raise MeshweaveError("unknown pipeline schedule", got=repr(pipeline), expected=", ".join(get_args(Pipeline)))
    all_of = range(microbatches)
    if pipeline == "gpipe":
        order = [*((FORWARD, m) for m in all_of), *((BACKWARD, m) for m in all_of)]
    elif pipeline == "1f1b":
        ahead = min(num_stages - 1 - stage, microbatches)
        order = [(FORWARD, m) for m in range(ahead)]
        for m in all_of:
            order += [(FORWARD, m + ahead)] if m + ahead < microbatches else []
            order.append((BACKWARD, m))
    else:
        order = [(part, m) for m in all_of for part in (FORWARD, BACKWARD)]
    return (*order, (UPDATE, 0))


def stage_numbers(roles: Sequence[RankGraph], exchange: Sequence[frozenset[fx.Node]]) -> list[int]:
    """How many stages a microbatch passes before it comes to each role in forward, whatever the devices. `exchange`:
    see `loss_exchange`. MeshweaveError if a role gets values that depend on what it sent itself."""
    sides: dict[Any, tuple[set[int], set[int]]] = {}  # by key: roles that receive, that send
    for i, (role, ignored) in enumerate(zip(roles, exchange, strict=True)):
        for node in role.graph.find_nodes(op="call_function", target=transfer):
            if PARTS[origin_of(node).phase] == FORWARD and node not in ignored:
                sides.setdefault(node.args[-1], (set(), set()))[node.args[0] is not None].add(i)
    edges = {
        (sender, receiver) for receivers, senders in sides.values() for sender in senders for receiver in receivers
    }
    numbers = [0] * len(roles)
    for _ in roles:
        for sender, receiver in edges:
            numbers[receiver] = max(numbers[receiver], numbers[sender] + 1)
    for sender, receiver in sorted(edges):
        if numbers[receiver] <= numbers[sender]:
            raise MeshweaveError(
                "1f1b is a schedule of stages that a microbatch passes once",
                where=f"devices {roles[sender].devices} and {roles[receiver].devices}",
                got="in forward, both get values from each other",
                hint='pipeline="gpipe", or layers on devices in one direction',
            )
    return numbers


def loss_exchange(roles: Sequence[RankGraph]) -> list[frozenset[fx.Node]]:
    """By role the communications that send losses and metrics to other stages, and the ops that only these need."""
    received = [_loss_exchange_of(role, ()) for role in roles]
    keys = {node.args[-1] for nodes in received for node in nodes if node.target is transfer}
    return [_loss_exchange_of(role, keys) for role in roles]


def _loss_exchange_of(role: RankGraph, keys: Collection[Any]) -> frozenset[fx.Node]:
    """The exchange of a role that only receives losses, or that also sends them by the transfers `keys`."""
    returned = {output_node(role.graph)}
    numbers = [node for (kind, _), node in role.results.items() if kind in ("loss", "metric")]
    ends = [node for node in numbers if set(node.users) == returned]
    waits = (n for n in role.graph.nodes if n.target is WAIT and not n.users)
    ends += [n for n in waits if n.args[0].args[-1] in keys]  # type: ignore[union-attr]
    exchange = set[fx.Node]()
    for node in ends:
        chain: list[fx.Node] = []
        while node.op == "call_function" and (not chain or set(node.users) <= {*chain, *exchange}):  # type: ignore[union-attr]
            chain.append(node)  # type: ignore[arg-type]
            operands = [n for n in node.all_input_nodes if n.target not in SYMBOLS]  # type: ignore[union-attr]
            if len(operands) != 1:
                break
            (node,) = operands
        first = max((i for i, n in enumerate(chain) if n.target in STARTS), default=-1)
        exchange.update(chain[: first + 1])
    return frozenset(exchange)
