"""What a role runs, cut into sections: the only place that says where forward, backward and update begin.

A section is the part of a rank graph that has a single purpose in a step. It runs once per microbatch, or once per
step; an action (`engine.actions`) says for which microbatch, and which sections run together.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import fx

from meshweave.ir.collectives import STARTS, WAIT, transfer
from meshweave.ir.graph import PARTS, origin_of, output_node
from meshweave.ir.rank import SYMBOLS, RankGraph

Kind = Literal[
    "unshard", "forward", "tell", "report", "backward", "input", "weight", "reduce", "total", "update", "reshard",
    "send_forward", "receive_forward", "send_backward", "receive_backward",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
Cut = Literal["backward", "update"]  # what begins where a graph is cut
CUTS: tuple[Cut, ...] = get_args(Cut)

PASSES: tuple[Kind, ...] = ("forward", "backward", "input", "weight")  # of a microbatch through a stage
_OF_ALL = ("tell", "report", "total", "update")  # sections of all stages of a role

# Outputs of a role that are read where its graph is cut: the loss and what is reported with it before backward, and
# before the update the norm of the gradients, and what the next microbatch begins with.
READ_BEFORE: Mapping[Cut, frozenset[str]] = {
    "backward": frozenset({"loss", "metric", "output"}),
    "update": frozenset({"buffer", "acc", "norm"}),
}


@dataclass(frozen=True, slots=True)
class Sections:
    """The sections of a role. In a pipeline (`stages` is not empty) those of each of its stages, except that report,
    total and update are of all of them; there sends of forward and backward are not waited for.

    `kinds` has the kind of everything that a device of the role runs, in the order of the graph:

    - unshard: casts and gathers of parameters, whose results all microbatches use;
    - forward: with the loss;
    - report: sends losses and metrics to other stages, with the ops that only this needs, and receives theirs. Roles
      that do both send in a section of its own, tell: all send before any of them waits;
    - backward: gradients of a microbatch, added to those of the earlier ones. It may be in two parts: input, what other
      stages and devices wait for, and weight, the rest;
    - reduce: sums of gradients over the mesh, once they are complete;
    - total: in a pipeline, what the gradients of all stages come to together, such as their norm;
    - update: the optimizer. Whatever stands between its ops belongs to it, such as the wait for a gradient;
    - reshard, and send and receive of a stage's activations (forward) and their gradients (backward): in schedules that
      say when gathered parameters are freed and when messages are sent (`engine.schedules`).
    """

    role: RankGraph
    kinds: Mapping[fx.Node, Kind]
    _begins: Mapping[Cut, fx.Node] = field(repr=False)
    stages: Mapping[fx.Node, int] = field(default_factory=dict, repr=False)

    def nodes(self, kinds: Collection[Kind] = KINDS, stage: int | None = None) -> list[fx.Node]:
        """The nodes of these sections, in the order of the graph; `stage`: of this one alone."""
        return [node for node in self.kinds if self.has(node, kinds, stage)]

    def has(self, node: fx.Node, kinds: Collection[Kind], stage: int | None = None) -> bool:
        """Whether a node is in one of these sections, and, for those that stages have, in that of `stage`."""
        kind = self.kinds.get(node)
        if kind not in kinds and not (kind in ("input", "weight") and "backward" in kinds):
            return False
        return stage is None or not self.stages or kind in _OF_ALL or self.stages[node] == stage

    @property
    def stage_numbers(self) -> tuple[int, ...]:
        """The stages that the role has, in order."""
        return tuple(sorted({self.stages.get(node, 0) for node, kind in self.kinds.items() if kind in PASSES}))

    def begin(self, kind: Cut) -> fx.Node | None:
        """The node before which the graph is cut; None if nothing follows the cut."""
        return self._begins.get(kind)


def sections_of_roles(
    roles: Sequence[RankGraph], *, is_pipeline: bool = False, has_parts: bool = False
) -> tuple[Sections, ...]:
    """The sections of all roles of a program. `is_pipeline`: those of each stage, and what only tells other stages the
    losses is a section of its own, else it is part of forward. `has_parts`: backward in two parts."""
    exchange = _loss_exchange(roles) if is_pipeline else [frozenset[fx.Node]()] * len(roles)
    sections = map(sections_of, roles, exchange)
    return tuple(_by_stage(its, has_parts) if is_pipeline else its for its in sections)


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


def _by_stage(whole: Sections, has_parts: bool) -> Sections:
    """The sections of a role by stage. What a stage needs of another runs in an earlier section: so a node belongs to
    no earlier stage than its operands in forward, and to no later one in backward."""
    total = _joint_reduction(whole)
    numbers = _numbers(whole)
    kinds: dict[fx.Node, Kind] = {n: "total" if n in total else kind for n, kind in whole.kinds.items()}
    kinds.update((node, "unshard") for node in numbers)
    kinds.update((node, "tell") for node in _losses_sent(whole))
    for node in [n for n, kind in kinds.items() if kind == "update" and n.target is WAIT]:
        kinds[node] = kinds[node.all_input_nodes[0]]  # a part of the step ends what it has begun
    kinds = {n: kind for n, kind in kinds.items() if kind in ("total", "update") or not is_wait_for_send(whole.role, n)}
    stages: dict[fx.Node, int] = {}
    known = [*_without_rows(whole.role, kinds)]  # these are where they are used
    others = set(kinds).difference(known)
    for node, kind in kinds.items():
        its = others if node in others else kinds
        operands = [stages[n] for n in node.all_input_nodes if n in stages and n in its and kinds[n] == kind]
        pick = max if kind in ("unshard", "forward") else min
        stages[node] = pick([origin_of(node).stage, *operands])
    own = [stages[node] for node in others if kinds[node] in ("forward", "backward")]
    first = min(own, default=0)
    stages.update((node, first) for node in numbers)
    for node in reversed(known):
        is_backward = kinds[node] == "backward"
        users = [stages[user] for user in node.users if user in stages and PARTS[origin_of(user).phase] == is_backward]
        stages[node] = max(users, default=stages[node]) if is_backward else max(stages[node], min(users, default=first))
    if has_parts:
        sent = _sent_on(whole.role, kinds, stages)
        kinds.update({n: "input" if n in sent else "weight" for n, kind in kinds.items() if kind == "backward"})
        # The results of an op are in the part of the op: what runs parts hands over tensors, not lists of them.
        kinds.update({n: kinds[n.all_input_nodes[0]] for n in kinds if n.target is operator.getitem})
    return Sections(whole.role, kinds, {cut: n for cut in CUTS if (n := whole.begin(cut)) is not None}, stages)


def _without_rows(role: RankGraph, kinds: Mapping[fx.Node, Kind]) -> Iterator[fx.Node]:
    """The ops of forward and of backward that follow from no rows of a microbatch, but from parameters, constants and
    what is known of the whole batch: every stage that needs one has it."""
    constants = {node for node, item in role.sources.items() if item.kind != "batch"}
    for node, kind in kinds.items():
        operands = [n for n in node.all_input_nodes if n.target not in SYMBOLS]
        is_pass = kind in ("unshard", "forward", "backward")
        if is_pass and node.target not in STARTS and constants.issuperset(operands):
            constants.add(node)
            yield node


def _losses_sent(whole: Sections) -> set[fx.Node]:
    """The sends of losses and metrics, with what only they need, of a role that also receives some."""
    report = [node for node, kind in whole.kinds.items() if kind == "report"]
    starts = [node for node in report if node.target is transfer and not _is_within(whole.role, node)]
    sends = {node for node in starts if node.args[0] is not None}
    if len(sends) == len(starts):
        return set()
    for node in reversed(report):
        if sends.issuperset(node.users) and node.users:
            sends.add(node)
    return sends


def _numbers(whole: Sections) -> set[fx.Node]:
    """What reductions compute from numbers of the step alone, such as the inverse of the scale of the loss: the first
    stage of the role has it for all."""
    known = {node for node, item in whole.role.sources.items() if item.kind == "scalar"}
    numbers = set[fx.Node]()
    for node, kind in whole.kinds.items():
        if kind == "reduce" and node.target not in STARTS and known.issuperset(node.all_input_nodes):
            known.add(node)
            numbers.add(node)
    return numbers


def _joint_reduction(whole: Sections) -> set[fx.Node]:
    """The ops on gradients in which roles meet, what follows from them, and what is only computed for them."""
    role = whole.role
    own = [node for node, kind in whole.kinds.items() if kind == "reduce"]
    joint = set[fx.Node]()
    for node in own:
        is_met = node.target in STARTS and not _is_within(role, node)
        if is_met or not joint.isdisjoint(node.all_input_nodes):
            joint.add(node)
    for node in reversed(own):
        if node.users and all(user in joint for user in node.users):
            joint.add(node)
    return joint


def _is_within(role: RankGraph, start: fx.Node) -> bool:
    """Whether a communication is among devices of the role alone."""
    key = str(start.args[-1])
    if start.target is not transfer:
        return role.has_all_of(key)
    ends = role.transfers[key].source.mesh.devices, role.transfers[key].target.mesh.devices
    return set(role.devices).issuperset({*ends[0], *ends[1]})


def is_wait_for_send(role: RankGraph, node: fx.Node) -> bool:
    """Whether a node waits for a transfer of which the role receives nothing."""
    if node.target is not WAIT or node.all_input_nodes[0].target is not transfer:
        return False
    return role.devices[0] not in role.transfers[str(node.all_input_nodes[0].args[-1])].target.mesh


def _sent_on(role: RankGraph, kinds: Mapping[fx.Node, Kind], stages: Mapping[fx.Node, int]) -> set[fx.Node]:
    """The ops of backward on which other devices or other stages wait."""
    sent = set[fx.Node]()
    for node in reversed([*kinds]):
        if kinds[node] != "backward":
            continue
        users = [user for user in node.users if kinds.get(user) == "backward"]
        is_read = any(user in sent or stages[user] != stages[node] for user in users)
        is_start = node.target is transfer and node.args[0] is not None
        if is_read or (is_start and not role.transfers[str(node.args[-1])].axes):
            sent.add(node)
    return sent


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
