"""What a role runs, cut into sections: the only place that says where forward, backward and update begin.

A section is the part of a rank graph that has a single purpose in a step. It runs once per microbatch, or once per
step; an action (`engine.actions`) says for which microbatch, and which sections run together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import fx

from meshweave.ir.collectives import STARTS, WAIT, transfer
from meshweave.ir.graph import PARTS, origin_of, output_node
from meshweave.ir.rank import SYMBOLS, RankGraph

Kind = Literal[
    "unshard", "forward", "report", "backward", "input", "weight", "reduce", "update", "reshard",
    "send_forward", "receive_forward", "send_backward", "receive_backward",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
Cut = Literal["backward", "update"]  # what begins where a graph is cut
CUTS: tuple[Cut, ...] = get_args(Cut)

# Outputs of a role that are read where its graph is cut: the loss and what is reported with it before backward, and
# before the update the norm of the gradients, and what the next microbatch begins with.
READ_BEFORE: Mapping[Cut, frozenset[str]] = {
    "backward": frozenset({"loss", "metric", "output"}),
    "update": frozenset({"buffer", "acc", "norm"}),
}


@dataclass(frozen=True, slots=True)
class Sections:
    """The sections of a role.

    `kinds` has the kind of everything that a device of the role runs, in the order of the graph:

    - unshard: casts and gathers of parameters, whose results all microbatches use;
    - forward: with the loss;
    - report: sends losses and metrics to other stages, with the ops that only this needs;
    - backward: gradients of a microbatch, added to those of the earlier ones. Its parts, where a schedule runs them
      apart, are input (gradients of the stage's inputs) and weight (of its parameters);
    - reduce: sums of gradients over the mesh, once they are complete;
    - update: the optimizer. Whatever stands between its ops belongs to it, such as the wait for a gradient;
    - reshard, and send and receive of a stage's activations (forward) and their gradients (backward): in schedules that
      say when gathered parameters are freed and when messages are sent (`engine.schedules`).
    """

    role: RankGraph
    kinds: Mapping[fx.Node, Kind]
    _begins: Mapping[Cut, fx.Node] = field(repr=False)

    def nodes(self, kinds: Collection[Kind] = KINDS) -> list[fx.Node]:
        """The nodes of these sections, in the order of the graph."""
        return [node for node, kind in self.kinds.items() if kind in kinds]

    def begin(self, kind: Cut) -> fx.Node | None:
        """The node before which the graph is cut; None if nothing follows the cut."""
        return self._begins.get(kind)


def sections_of_roles(roles: Sequence[RankGraph], *, reports: bool = False) -> tuple[Sections, ...]:
    """The sections of all roles of a program. `reports`: what only tells other stages the losses is a section of its
    own, else part of forward."""
    exchange = _loss_exchange(roles) if reports else [frozenset[fx.Node]()] * len(roles)
    return tuple(map(sections_of, roles, exchange))


def sections_of(role: RankGraph, exchange: Collection[fx.Node] = ()) -> Sections:
    """The sections of a role; `exchange` are the nodes of section report.

    The graph is cut before the first node of phase update, and before that at the first node of backward. Phases
    prepare and reduce are sections wherever they stand before the update.
    """
    run = [n for n in role.graph.nodes if n.op == "call_function" and n.target not in SYMBOLS]
    parts = [PARTS[origin_of(n).phase] for n in run]
    update = parts.index(2) if 2 in parts else len(run)
    backward = parts.index(1, 0, update) if 1 in parts[:update] else update
    kinds: dict[fx.Node, Kind] = {}
    for at, node in enumerate(run):
        phase = origin_of(node).phase
        if at >= update:
            kinds[node] = "update"
        elif phase in ("prepare", "reduce"):
            kinds[node] = "unshard" if phase == "prepare" else "reduce"
        elif node in exchange:
            kinds[node] = "report"
        else:
            kinds[node] = "forward" if at < backward else "backward"
    cuts: dict[Cut, int] = {"backward": backward, "update": update}
    return Sections(role, kinds, {kind: run[at] for kind, at in cuts.items() if at < len(run)})


def _loss_exchange(roles: Sequence[RankGraph]) -> list[frozenset[fx.Node]]:
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
