"""Completeness: every consumer of a value sees every contribution to it, proven on the rank graphs of all roles.

The proof trusts the placed graph as the meaning of every op, the rule table, and the layouts of the inputs. Everything
else is replayed: which value each local array is a form of, which boxes of it every device has, and which reductions
are pending. Nothing depends on what the rank graphs claim about layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import fx

from meshweave.check.numbers import concatenate_roles
from meshweave.check.role_replay import ReplayedValue, RoleReplay, SharedFacts, first_layout
from meshweave.errors import LayoutError, VerifyError
from meshweave.ir import ops
from meshweave.ir.collectives import STARTS, sparse_scatter, transfer
from meshweave.ir.graph import StepGraph, op_name, origin_of, output_node, spec_of
from meshweave.ir.rank import RankGraph, Transfer
from meshweave.optimize.overlap.unmerge import unmerge_buckets
from meshweave.replay.communication import EXCHANGES, SPARSE, apart, check_messages, group_ids, groups_among, together
from meshweave.replay.holdings import Holding, pending_of


@dataclass(frozen=True, slots=True)
class Completeness:
    """What was proven: `num_values` local values match the placed graph.

    Of the steps of moves (communications and the local steps around them) `num_steps` are distinct and were replayed;
    `num_twins` are equal to one of these.
    """

    num_roles: int
    num_devices: int
    num_values: int
    num_communications: int
    num_steps: int
    num_twins: int


def check_complete(placed: StepGraph, roles: Sequence[RankGraph]) -> Completeness:
    """Raise VerifyError for the first value that is not what its consumer needs; else return what was proven.

    `roles` are the rank graphs of `placed`. Only the first, because values that depend on a wrong value cannot be
    identified. Merged collectives are undone first, which proves the merge.
    """
    known = SharedFacts(placed)
    replays = [RoleReplay(unmerge_buckets(rank), known) for rank in roles]
    _check_devices(known, replays)
    for role in replays:
        _check_inputs(known, role)
        role.advance()
    num_communications, members, uses = 0, _Members(replays), _Uses()
    while any(role.at is not None for role in replays):
        ready = next((them for them in map(members.ready_with, replays) if them), None)
        if ready is None:
            raise _stuck(replays)
        num_communications += _meet(known, ready, uses)
        for role in ready:
            role.advance()
    uses.check()
    for role in replays:
        _check_outputs(known, role)
        _check_all_ran(known, role)
    num_devices = sum(len(r.devices) for r in replays)
    return Completeness(
        len(replays), num_devices, known.num_values, num_communications, known.num_steps, known.num_twins
    )


# meetings (communications between roles)


class _Members:
    """Which roles take part in a meeting."""

    def __init__(self, roles: Sequence[RoleReplay]) -> None:
        self.roles = roles
        self._of_group: dict[Any, list[RoleReplay]] = {}

    def ready_with(self, role: RoleReplay) -> list[RoleReplay] | None:
        """The roles of the meeting that `role` has reached, if all have reached it."""
        if role.at is None:
            return None
        them, call = self._of(role, role.at), _call_of(role.at)
        return them if all(r.at is not None and _call_of(r.at) == call for r in them) else None

    def _of(self, role: RoleReplay, node: fx.Node) -> list[RoleReplay]:
        if node.target is transfer:
            crossing = _transfer_of(role, node)
            return self._reached({*crossing.source.mesh.devices, *crossing.target.mesh.devices})
        key = (role.devices, node.args[-1])
        if key not in self._of_group:
            groups = group_ids(*role.rank.group_axes(str(node.args[-1]))).tolist()
            them: list[RoleReplay] = [role]
            for _ in self.roles:  # the groups of these roles may contain devices of further roles
                mine = {d for r in them for d in r.devices}
                them = self._reached(mine | {d for group in groups if not mine.isdisjoint(group) for d in group})
            self._of_group[key] = them
        return self._of_group[key]

    def _reached(self, devices: set[int]) -> list[RoleReplay]:
        return [r for r in self.roles if not devices.isdisjoint(r.devices)]


def _call_of(node: fx.Node) -> tuple[Any, ...]:
    """What must be equal in all roles of a meeting: the op, its reduce op, the size and name of its group, or its key;
    for a permute its destinations."""
    return node.target, tuple(a for a in node.args[1:] if isinstance(a, (str, int, tuple)))


def _transfer_of(role: RoleReplay, node: fx.Node) -> Transfer:
    entry = role.rank.transfers.get(str(node.args[1]))
    if entry is None:
        raise role.at_node(node, VerifyError("is a transfer that the role does not know", got=str(node.args[1])))
    return entry


class _Uses:
    """Which communications contribute to used values: an unused communication is an error.

    Roles may take part in a step of a move for others, or run it in their own groups because others need it in theirs.
    So the k-th communication of a value by the same call is considered in all roles together.
    """

    def __init__(self) -> None:
        self._counts: dict[Any, int] = {}
        self._communications: dict[Any, tuple[bool, RoleReplay, fx.Node]] = {}

    def add(self, role: RoleReplay, node: fx.Node, root: fx.Node) -> None:
        call = (_call_of(node), root)
        number = self._counts.get((role.devices, call), 0)
        self._counts[role.devices, call] = number + 1
        used = any(wait.users for wait in node.users) or self._communications.get((call, number), (False,))[0]
        self._communications[call, number] = (used, role, node)

    def check(self) -> None:
        for used, role, node in self._communications.values():
            if not used:
                raise role.at_node(node, VerifyError("nothing uses the result of a communication"))


def _meet(known: SharedFacts, roles: list[RoleReplay], uses: _Uses) -> bool:
    """Replay the meeting of these roles; returns whether it is a communication."""
    nodes = [r.at for r in roles if r.at is not None]
    communicates = nodes[0].target in STARTS
    try:
        results = (_transferred if nodes[0].target is transfer else _exchange)(known, roles, nodes)
    except VerifyError as error:
        raise roles[0].at_node(nodes[0], error) from error
    root = next(v.root for v in results if v is not None)
    for role, node, state in zip(roles, nodes, results, strict=True):
        role.settle(node, state)
        if communicates:
            uses.add(role, node, root)
    return communicates


def _operand_of_roles(roles: Sequence[RoleReplay], nodes: Sequence[fx.Node]) -> list[ReplayedValue | None]:
    """The operand of each role: forms of the same value, or None."""
    values = []
    for role, node in zip(roles, nodes, strict=True):
        state = role.states[node.args[0]] if isinstance(node.args[0], fx.Node) else None
        if not isinstance(state, ReplayedValue | None):
            raise VerifyError("passes several values at once", where=str(role))
        values.append(state)
    if lacking := next((v for v in values if v is not None and (v.readers or v.root in roles[0].known.partial)), None):
        raise VerifyError("passes a value without rows that others read", got=lacking.root.name)
    names = sorted({v.root.name for v in values if v is not None})
    if len(names) != 1:
        raise VerifyError(
            "roles pass different values", got=", ".join(names) or "none", expected="forms of the same value"
        )
    return values


def _exchange(known: SharedFacts, roles: Sequence[RoleReplay], nodes: Sequence[fx.Node]) -> list[ReplayedValue | None]:
    """A collective, or an op that a group runs together, in every group of the devices of these roles."""
    values = [v for v in _operand_of_roles(roles, nodes) if v is not None]
    if len(values) < len(roles):
        raise VerifyError("a role passes no value")
    first, holdings = nodes[0], [v.holding for v in values]
    mesh, axes = roles[0].rank.group_axes(str(first.args[-1]))
    is_sparse = first.target in SPARSE
    positions = (2,) if is_sparse else range(1, len(first.args) - 1)
    numbers = [
        concatenate_roles([(r.numbers, n.args[i]) for r, n in zip(roles, nodes, strict=True)]) for i in positions
    ]
    readers = _readers(roles, nodes, mesh.flat_size(axes), values[0]) if is_sparse else None

    def exchange() -> list[Holding]:
        merged = together(holdings)
        done = EXCHANGES[first.target](merged, groups_among(mesh, axes, merged.devices), *numbers)
        return apart(done, [h.devices for h in holdings])

    keys = [r.numbers.key(n.args[i]) for r, n in zip(roles, nodes, strict=True) for i in (*positions, -1)]
    results = known.once((first.target, mesh, axes, *keys, *holdings), exchange)
    return [ReplayedValue(v.root, holding, readers=readers) for v, holding in zip(values, results, strict=True)]


def _readers(roles: Sequence[RoleReplay], nodes: Sequence[fx.Node], count: int, moved: ReplayedValue) -> fx.Node:
    """The value with the rows that each device reads, or has: a single value, in its layout in the placed graph."""
    values = [role.states.get(node.args[1]) for role, node in zip(roles, nodes, strict=True)]  # type: ignore[arg-type]
    roots = {v.root for v in values if isinstance(v, ReplayedValue)}
    if len(roots) != 1 or not all(isinstance(v, ReplayedValue) and v.layout is not None for v in values):
        raise VerifyError("roles have different readers", got=", ".join(r.name for r in roots) or "none")
    (root,) = roots
    shape, rows = spec_of(root).shape, spec_of(moved.root).shape
    placed, extents = root.meta["layout"], moved.holding.rows.extent
    factor = 1 if nodes[0].target is sparse_scatter else count
    num_rows = placed.local_shape(shape)[-1]  # of the blocks that devices have, as `check_dispatch` proves
    fits = any(
        prod(rows[:d]) == shape[-1] and (extents[:, :d].prod(1) * factor == num_rows).all()
        for d in range(1, len(rows) + 1)
    )
    if any(v.layout != placed for v in values) or len(shape) != 2 or shape[0] != count or not fits:  # type: ignore[union-attr]
        raise VerifyError("readers are for other rows than the moved ones", got=f"{shape}", expected=f"rows of {rows}")
    return root


def _transferred(
    known: SharedFacts, roles: Sequence[RoleReplay], nodes: Sequence[fx.Node]
) -> list[ReplayedValue | None]:
    """A transfer between or within the meshes of these roles."""
    entries = {_transfer_of(r, n) for r, n in zip(roles, nodes, strict=True)}
    if len(entries) > 1:
        raise VerifyError("roles have different transfers of the same name", got="; ".join(sorted(map(str, entries))))
    (plan,) = entries
    values = _operand_of_roles(roles, nodes)
    for role, value in zip(roles, values, strict=True):
        if (value is not None) != plan.source.mesh.covers(role.devices):
            raise VerifyError(f"{role} pass {'a piece' if value is not None else 'nothing'}", expected=str(plan))
        if value is not None:
            role.proven_in(_owing(value, pending_of(plan.source)[1]), plan.source)
    owed = {v.holding.owed for v in values if v is not None}
    if len(owed) > 1:
        raise VerifyError("roles pass averages that are scaled in different ways", got=str(sorted(owed)))
    root = next(v.root for v in values if v is not None)
    if spec_of(root) != plan.spec:
        raise VerifyError("the transfer has another shape", got=str(plan.spec), expected=str(spec_of(root)))
    known.once(("messages", plan), lambda: _check_messages(plan))
    by_role = [r.in_layout(root, plan.target) if plan.target.mesh.covers(r.devices) else None for r in roles]
    return [None if v is None else _owing(v, min(owed)) for v in by_role]


def _check_messages(plan: Transfer) -> None:
    try:
        messages = plan.routes.messages
    except LayoutError as error:
        raise VerifyError(error.what, where=error.where, got=error.got, expected=error.expected) from error
    check_messages(plan.source, plan.target, plan.spec.shape, plan.axes, messages)


def _owing(value: ReplayedValue, owed: float) -> ReplayedValue:
    """The value with another pending factor: an average may be scaled before or after a message."""
    return value if value.holding.owed == owed else ReplayedValue(value.root, replace(value.holding, owed=owed))


def _text(node: fx.Node) -> str:
    target, args = _call_of(node)
    return " ".join([op_name(target), *map(str, args)])


def _stuck(roles: Sequence[RoleReplay]) -> VerifyError:
    waiting = [(r, r.at) for r in roles if r.at is not None]
    return VerifyError(
        "roles disagree about their next communication",
        where=str(origin_of(waiting[0][1])),
        got="; ".join(f"{r} at {n.name} ({_text(n)})" for r, n in waiting),
        expected="the same next communication on all of its roles",
    )


# beginning and end


def _check_devices(known: SharedFacts, roles: Sequence[RoleReplay]) -> None:
    if other := next((r for r in roles if r.rank.meshes != roles[0].rank.meshes), None):
        got, expected = ("; ".join(map(str, r.rank.meshes)) for r in (other, roles[0]))
        raise VerifyError(
            "roles number the meshes of the program differently", where=str(other), got=got, expected=expected
        )
    present = sorted(d for r in roles for d in r.devices)
    meshes = {first_layout(n.meta["layout"]).mesh for n in known.placed.graph.nodes if n.op != "output"}
    needed = {d for mesh in meshes for d in mesh.devices}
    if len(set(present)) < len(present) or not needed <= set(present):
        raise VerifyError(
            "the roles do not cover the devices of the program", got=str(present), expected=str(sorted(needed))
        )
    for mesh in meshes:
        for role in roles:
            if not mesh.covers(role.devices) and any(d in mesh for d in role.devices):
                raise VerifyError("some devices of a role have values that others lack", where=str(role), got=str(mesh))


def _check_inputs(known: SharedFacts, role: RoleReplay) -> None:
    sources = {(i.kind, i.name): n for n, i in known.placed.sources.items()}
    for node, item, layout in zip(role.rank.placeholders, role.rank.inputs, role.rank.layouts, strict=True):
        source, mark = sources.get((item.kind, item.name)), known.meaning(node)
        if source is None or mark is None or known.roots[mark] is not source or source.meta["layout"] != layout:
            raise VerifyError(
                f"input {item.kind} {item.name} is not that of the placed graph",
                where=str(role),
                got=f"{layout} on {layout.mesh}",
                expected="no such input" if source is None else str(source.meta["layout"]),
            )


def _check_outputs(known: SharedFacts, role: RoleReplay) -> None:
    """Every output of the role's meshes, in its layout; lasting values in the layout in which the next step takes
    them."""
    values = known.placed.results
    mine = [key for key, value in values.items() if value.meta["layout"].mesh.covers(role.devices)]
    if list(role.rank.outputs) != mine:
        raise VerifyError("returns other outputs", where=str(role), got=str(role.rank.outputs), expected=str(mine))
    stored = {(i.kind, i.name): a for i, a in zip(role.rank.inputs, role.rank.layouts, strict=True)}
    for key, layout, local in zip(mine, role.rank.output_layouts, role.rank.output_values, strict=True):
        try:
            value = role.operand(local, values[key])
        except VerifyError as error:
            raise role.at_node(output_node(role.rank.graph), error) from error
        if value.layout != layout or layout != stored.get(key, layout):
            lasts = f", and {stored[key]} for the next step" if key in stored else ""
            raise VerifyError(
                f"output {' '.join(key).strip()} is in another layout",
                where=f"{origin_of(local)}, {role}",
                got=str(value.layout),
                expected=f"{layout}{lasts}",
            )


def _check_all_ran(known: SharedFacts, role: RoleReplay) -> None:
    for node in known.placed.graph.nodes:
        if node.op != "call_function" or node.target is ops.move or node in role.ran:
            continue
        if first_layout(node.meta["layout"]).mesh.covers(role.devices):
            raise VerifyError(f"{node.name} is not run", where=f"{origin_of(node)}, {role}")
